"""Which request to an object store of this process has waited for longest: a store that is stopped says nothing itself.

The rule: whoever shows what is waited for names the store as well. One registry for the process, since a request is made deep
below whoever is waited for.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

SLOW_S: Final = 2.0


class Asked:
    """Requests that run. Safe for several threads. `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._running: dict[int, tuple[float, str]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def asking(self, doing: str) -> Generator[None]:
        """While a request runs; `doing` says what it does and where: "writing s3://bucket/x"."""
        number = next(self._numbers)
        with self._lock:
            self._running[number] = self._clock(), doing
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]

    def slow(self, root: str = "") -> str:
        """The oldest request, below that root where one is given, as a sentence; empty when none has run for SLOW_S.

        An operation waits for its root and for no other store: an upload may wait for one at the same time.
        """
        with self._lock:
            asked = [found for found in self._running.values() if not root or f" {root}/" in found[1]]
        since, doing = min(asked, default=(self._clock(), ""))
        waited_s = self._clock() - since
        return f"The object store has not answered for {waited_s:.0f} s: {doing}." if waited_s >= SLOW_S else ""


ASKED: Final = Asked()
