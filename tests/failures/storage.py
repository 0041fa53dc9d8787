"""Failures of the storage, 78 to 90: rows as in `table`."""

from __future__ import annotations

from typing import Final

from tests.known_bugs.table import Row

STORAGE_ROWS: Final[tuple[Row, ...]] = ()
