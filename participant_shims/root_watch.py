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

from coordinator.wire.clipping import clipped
from coordinator.wire.errors import SafepointError
from coordinator.wire.record import address_below, look_up, mark_of

EVERY_S: Final = 5.0
AGAIN_S: Final = 0.5  # while something is wrong: that the coordinator has come must not look like a wrong root for long
STORED_EVERY_S: Final = 60.0  # of a root in a store each look is a request, of each shim
STORED_AGAIN_S: Final = 5.0
HUNG_AFTER_S: Final = 5.0
MAX_PATH_BYTES: Final = 1024
MAX_PROBLEM_BYTES: Final = 500
_OURS: Final = ("coordinator", "snapshots", "chunks")  # below a root; made when they are needed


class RootWatch:
    """Looks at `root` now and then: a directory, or the URL of one in a store, of which it reads one object. None: there is
    nothing to look at, which is told as well. `clock`: seconds, monotonic.
    """

    def __init__(self, root: Path | str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._seen: capabilities_pb2.SeenRoot | None = None
        self._looks_since: float | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Look until `stop`, beside everything else; a look that hangs keeps no process from ending."""
        threading.Thread(target=self._run, name="look at the root", daemon=True).start()

    def stop(self) -> None:
        """Look no more. Does not wait for a look that is under way."""
        self._stopped.set()

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
        while not self._stopped.is_set():
            self.look()
            well = self._seen is not None and not self._seen.problem
            if isinstance(self._root, str):
                self._stopped.wait(STORED_EVERY_S if well else STORED_AGAIN_S)
            else:
                self._stopped.wait(EVERY_S if well else AGAIN_S)


def _look(root: Path | str | None) -> capabilities_pb2.SeenRoot:
    if root is None:
        return _seen(None)
    try:
        if isinstance(root, str):
            return _seen(root, mark_of(look_up(address_below(root)).nonce))
        if not root.is_dir():
            return _seen(root, problem="It is not there, or no directory.")
        if problem := _barred(root):
            return _seen(root, problem=problem)
        read_only = os.statvfs(root).f_flag & os.ST_RDONLY
        mark = mark_of(look_up(address_below(str(root))).nonce)
    except SafepointError as error:  # no record, or no store: another root, or one that no coordinator has been in
        return _seen(root, problem=error.problem.message)
    except PermissionError as error:
        return _seen(root, problem=f"The shim's user (uid {os.geteuid()}) may not look there: {error.strerror}.")
    except (OSError, ValueError) as error:
        return _seen(root, problem=f"It cannot be seen: {error}.")
    return _seen(root, mark, "It is mounted read-only there." if read_only else "")


def _barred(root: Path) -> str:
    """Why this user cannot work in the root, as one sentence; empty when it can. What the coordinator makes there is its user's
    alone."""
    for name in _OURS:
        folder = root / name
        if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            return (
                f"The shim's user (uid {os.geteuid()}) may not write in {folder}, which belongs to uid {folder.stat().st_uid}: "
                "coordinator and servers run as one user."
            )
    return ""


def _seen(root: Path | str | None, mark: str = "", problem: str = "") -> capabilities_pb2.SeenRoot:
    path = os.fsencode(root)[:MAX_PATH_BYTES].decode(errors="ignore") if root is not None else ""
    return capabilities_pb2.SeenRoot(path=path, mark=mark, problem=clipped(problem, MAX_PROBLEM_BYTES))
