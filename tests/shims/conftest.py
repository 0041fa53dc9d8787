"""A served shim with a fake server behind it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.shims.shim_fakes import FakeAdapter, Shim, serve


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose name leaves room for a socket: paths of Unix sockets end at 107 characters."""
    with tempfile.TemporaryDirectory(prefix="sp-") as name:
        yield Path(name)


@pytest.fixture
async def shim(short_path: Path) -> AsyncIterator[Shim]:
    async with serve(FakeAdapter(), short_path) as served:
        yield served
