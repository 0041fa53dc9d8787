"""A copy to or from an object store that a person waits for: how far it is, and an end when the store says nothing.

The rule: nobody looks at silence for long, and nobody waits for ever on a network that is dead. The copy runs in a thread,
since what a store does in it cannot be interrupted. One that is given up ends with the process; what it has made counts for
nothing without its manifest, and a repeat goes on from there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, TypeVar

from coordinator.client_results import size_text
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.objects import Objects

ResultT = TypeVar("ResultT")

FIRST_S: Final = 5.0  # a copy that takes no longer needs no word
EVERY_S: Final = 15.0
TIMEOUT_S: Final = 300.0  # for one object: chunks are some 8 MB, so this is a link of 30 kB/s
_LOOK_S: Final = 0.2


class Watched:
    """Objects of which is known what is asked of them now. Used by one thread, looked at by another."""

    def __init__(self, objects: Objects, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = objects.url
        self._objects, self._clock = objects, clock
        self._asked: tuple[str, float] | None = None  # what, and when
        self._objects_done = self._bytes_done = 0

    def put_new(self, key: str, file: int) -> None:
        """As Objects."""
        with self._asking(f"writing {self.url}/{key}"):
            self._objects.put_new(key, file)
        self._done(os.fstat(file).st_size)

    def size(self, key: str) -> int | None:
        """As Objects."""
        with self._asking(f"looking at {self.url}/{key}"):
            return self._objects.size(key)

    def chunks(self, key: str) -> Iterator[bytes]:
        """As Objects."""
        left = self._objects.chunks(key)
        while True:
            with self._asking(f"reading {self.url}/{key}"):
                chunk = next(left, None)
            if chunk is None:
                break
            self._bytes_done += len(chunk)
            yield chunk
        self._done(0)

    def names(self, below: str = "") -> list[str]:
        """As Objects."""
        with self._asking(f"listing {self.url}"):
            return self._objects.names(below)

    def silence(self) -> tuple[str, float]:
        """What the store is asked now, and for how many seconds; nothing and zero while it is not."""
        asked = self._asked
        return (asked[0], self._clock() - asked[1]) if asked is not None else ("", 0.0)

    def progress(self) -> str:
        """How far it is, for people."""
        doing, silent_s = self.silence()
        done = (
            f"{self._objects_done} object{'' if self._objects_done == 1 else 's'}, {size_text(self._bytes_done)} so far"
        )
        return f"{done}; {doing} for {silent_s:.0f} s" if doing else f"{done}; comparing digests"

    @contextmanager
    def _asking(self, doing: str) -> Generator[None]:
        self._asked = doing, self._clock()
        try:
            yield
        finally:
            self._asked = None

    def _done(self, size: int) -> None:
        self._objects_done += 1
        self._bytes_done += size


def watch(
    work: Callable[[], ResultT],
    watched: Watched,
    tell: Callable[[str], None],
    timeout_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    look_s: float = _LOOK_S,
) -> ResultT:
    """Do the copy; `tell` how far it is, now and then. Raises what `work` raises, and STORAGE_FAILED when the store has not
    answered one request for `timeout_s` (0: it may take for ever).
    """
    result: Future[ResultT] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="safepoint-copy", daemon=True).start()
    tell_at = clock() + FIRST_S
    while True:
        try:
            return result.result(look_s)
        except TimeoutError:
            if result.done():
                return result.result()  # it was the work that raised it, or it is done now
        doing, silent_s = watched.silence()
        if timeout_s and silent_s >= timeout_s:
            raise refuse(
                Reason.STORAGE_FAILED, f"The object store has not answered for {silent_s:.0f} s at {doing}.",
                next_step="See that it can be reached from here (the endpoint in the environment, a proxy, the network), then "
                "repeat: what is there is not sent again. `--timeout` waits longer.",
            )  # fmt: skip
        if clock() >= tell_at:
            tell(watched.progress())
            tell_at = clock() + EVERY_S
