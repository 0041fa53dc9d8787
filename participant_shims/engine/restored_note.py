"""Restored requests that nobody has got yet, in the shim's directory: for the shim that comes after this one.

The rule: they are for the engine process into which they were loaded, and for no other: one that was started anew may have
other weights, and nobody has restored it. Whose restore brought them is noted until that is resumed. A note that can't be
written or read costs a regeneration and fails nothing. Blocks: use a thread.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.wire import failpoints
from coordinator.wire.errors import SafepointError
from participant_shims.engine.record import Record
from participant_shims.engine.requests_file import Origin, encode, read_requests, write_requests

log = logging.getLogger(__name__)

NAME: Final = "restored"
LOADED_BY: Final = "loaded-by"
OVER: Final = "over"
ENGINE: Final = "engine"
SHARED: Final = "shared"


class RestoredNote:
    """In the directory `life`; None: nothing is noted."""

    def __init__(self, life: Path | None) -> None:
        self._folder = life / NAME if life else None
        self._loaded_by = ""

    def there(self) -> bool:
        """Whether a shim before us has left one."""
        return self._folder is not None and self._folder.exists()

    def write(
        self, operation_id: str, engine_life: str, origin: Origin, records: Sequence[Record],
        shared: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        """These and no others were loaded, for `operation_id`. `shared`: where other engines find them."""
        self._loaded_by = operation_id
        if self._folder is None:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            failpoints.reach("engine.before_restored")
            self._folder.mkdir(mode=0o700, parents=True)
            write_requests(self._folder, origin, [encode(record) for record in records])
            (self._folder / ENGINE).write_text(json.dumps(engine_life))
            (self._folder / SHARED).write_text(json.dumps(shared))
            (self._folder / LOADED_BY).write_text(operation_id)
        except OSError as error:
            log.warning("restored requests can't be noted in %s: %s", self._folder, error.strerror)

    def over(self, request_id: str) -> None:
        """Somebody has got this one, or nobody wants it. One short write, on the event loop."""
        if self._folder is None or not self._folder.exists():
            return
        try:
            failpoints.reach("engine.before_over")
            with (self._folder / OVER).open("a") as out:
                out.write(request_id + "\n")
        except OSError as error:
            log.warning("%s can't be written: %s", self._folder, error.strerror)

    def read(self, engine_life: str) -> list[Record]:
        """What was loaded into this process of the engine and nobody has got yet."""
        if self._folder is None or not self._folder.exists():
            return []
        try:
            noted = json.loads((self._folder / ENGINE).read_text())
            if not engine_life or noted != engine_life:
                log.warning("restored requests are left behind: the engine was started anew since they were loaded")
                return []
            gone = set((self._folder / OVER).read_text().split()) if (self._folder / OVER).exists() else set[str]()
            return [record for record in read_requests(self._folder)[1] if record.request_id not in gone]
        except (OSError, ValueError, SafepointError) as error:
            log.warning("restored requests can't be read from %s: %s", self._folder, error)
            return []

    def shared(self, engine_life: str) -> tuple[str, str] | None:
        """Where other engines find what was loaded into this process of the engine, and we find theirs."""
        if self._folder is None:
            return None
        try:
            if not engine_life or json.loads((self._folder / ENGINE).read_text()) != engine_life:
                return None
            operation_id, group = json.loads((self._folder / SHARED).read_text())
            return str(operation_id), str(group)
        except (OSError, ValueError, TypeError):
            return None

    def loaded_by(self) -> str:
        """The operation that loaded them and was neither kept nor forgotten; empty when there is none."""
        try:
            return (self._folder / LOADED_BY).read_text().strip() if self._folder else self._loaded_by
        except OSError:
            return ""

    def keep(self) -> None:
        """They are there for good."""
        self._loaded_by = ""
        if self._folder is not None:
            try:
                (self._folder / LOADED_BY).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s can't be removed: %s", self._folder / LOADED_BY, error.strerror)

    def forget(self) -> None:
        """Nothing was loaded."""
        self._loaded_by = ""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
