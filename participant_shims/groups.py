"""Process groups: a command is started in one of its own, and none of it is left afterwards.

The rule: whoever is killed here was started here, as a group. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Generator
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37


def signal_group(group: int, number: signal.Signals) -> None:
    """Send it to everybody in the group; nobody there: nothing happens."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def end_group(group: int) -> None:
    """Kill what the command left in its group. SIGTERM first: shims say goodbye, so that nobody waits for them."""
    for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 2.0)):
        end = time.monotonic() + wait_s
        signal_group(group, number)
        while time.monotonic() < end:
            if not _reap_group(group):
                return
            time.sleep(0.02)


def _reap_group(group: int) -> bool:
    """Collect those that have ended and are ours; whether anybody of the group is left."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def adopted_orphans() -> Generator[None]:
    """Inside, orphans of a command that we start become our children, so that they can be collected.

    Elsewhere than on Linux init has them, and nothing changes. Afterwards the process is as it was: one that runs a
    command in passing (a test, a trainer) must not collect orphans for the rest of its life.
    """
    before = ctypes.c_int(0)
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
