"""What a shim sees of the snapshot root, so that `safepoint doctor` says it before a save is refused because of it.

The rule kept here: only a thread of its own touches the root. One that hangs (a file server that is away) keeps neither a
status nor the end of the process waiting: it is told as what is wrong with the root.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from safepoint.v1 import capabilities_pb2

from coordinator.wire.errors import SafepointError
from coordinator.wire.record import address_below, look_up, mark_of

EVERY_S: Final = 5.0
HUNG_AFTER_S: Final = 5.0
MAX_PATH_BYTES: Final = 1024
MAX_PROBLEM_BYTES: Final = 500


class RootWatch:
    """Looks at `root` now and then; None: there is nothing to look at, which is told as well. `clock`: seconds, monotonic."""

    def __init__(self, root: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._seen: capabilities_pb2.SeenRoot | None = None
        self._looks_since: float | None = None

    def start(self) -> None:
        """Look for as long as the process lives, beside it."""
        threading.Thread(target=self._run, name="look at the root", daemon=True).start()

    def seen(self) -> capabilities_pb2.SeenRoot | None:
        """What the last look has found, or that the present one hangs; None before the first. Does not block."""
        since = self._looks_since
        hangs_s = self._clock() - since if since is not None else 0.0
        if hangs_s <= HUNG_AFTER_S:
            return self._seen
        return _seen(self._root, problem=f"It has not answered for {hangs_s:.0f} s.")

    def look(self) -> None:
        """One look. Blocks for as long as the file system does. Raises nothing."""
        self._looks_since = self._clock()
        self._seen = _look(self._root)
        self._looks_since = None

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(EVERY_S)


def _look(root: Path | None) -> capabilities_pb2.SeenRoot:
    if root is None:
        return _seen(None)
    try:
        if not root.is_dir():
            return _seen(root, problem="It is not there, or no directory.")
        read_only = os.statvfs(root).f_flag & os.ST_RDONLY
        mark = mark_of(look_up(address_below(str(root))).nonce)
    except SafepointError as error:  # no record: another root, or one that no coordinator has been in
        return _seen(root, problem=error.problem.message)
    except (OSError, ValueError) as error:
        return _seen(root, problem=f"It cannot be seen: {error}.")
    return _seen(root, mark, "It is mounted read-only there." if read_only else "")


def _seen(root: Path | None, mark: str = "", problem: str = "") -> capabilities_pb2.SeenRoot:
    path = os.fsencode(root)[:MAX_PATH_BYTES].decode(errors="ignore") if root is not None else ""
    return capabilities_pb2.SeenRoot(
        path=path, mark=mark, problem=problem.encode(errors="replace")[:MAX_PROBLEM_BYTES].decode(errors="ignore")
    )
