"""A note that a pause of ours may be in force, for the shim that comes after this one.

The rule: it is written before the engine is paused and removed after it was resumed, and its absence means nothing worse
than a pause that stays until somebody resumes. Pausing and opening never fail because of it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from coordinator.wire import failpoints

log = logging.getLogger(__name__)

NAME: Final = "paused-by-us"


class PauseNote:
    """In the directory `life`; None: nothing is noted."""

    def __init__(self, life: Path | None) -> None:
        self._path = life / NAME if life else None

    def there(self) -> bool:
        """Whether a shim before us has left one."""
        return self._path is not None and self._path.exists()

    def write(self, operation_id: str) -> None:
        """We are about to pause for `operation_id`."""
        if self._path is not None:
            try:
                failpoints.reach("engine.before_note")
                self._path.write_text(operation_id + "\n")
            except OSError as error:
                log.warning("%s can't be written: %s", self._path, error.strerror)

    def remove(self) -> None:
        """The engine runs."""
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s can't be removed: %s", self._path, error.strerror)
