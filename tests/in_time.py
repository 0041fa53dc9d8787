"""Rules about time, held on a machine that is busy with something else.

A test that expects "within a second" must not fail because others had the processors, and one that lets a server run out
of time must leave its answer enough time to arrive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Stopwatch:
    """Seconds since it was made, less those that this process stood ready to run and the machine ran others.

    On a quiet machine that is the time that has passed. Only for what happens in this process: another one's waiting is
    not seen. What sleeps, or holds the loop, counts in full.
    """

    def __init__(self) -> None:
        self._began, self._waited = time.monotonic(), _waited_s()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began - max(0.0, _waited_s() - self._waited)


def _waited_s() -> float:
    """How long the threads of this process have waited for a processor. 0 where the system does not say."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(file.read_bytes().split()[1])
        except (OSError, IndexError):
            continue  # a thread that has just ended
    return total / 1e9


@contextmanager
def room_for_answers() -> Iterator[None]:
    """Servers in this process use a tenth of their callers' time: the rest is for the answer to arrive.

    What they keep back otherwise, tests/wire holds.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("coordinator.wire.rpc.budget", lambda remaining_s: remaining_s / 10)
        yield
