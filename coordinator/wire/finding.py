"""Where a client finds its coordinator, also while the object store that holds the address record does not answer.

The rule: a store that is slow, stopped or away keeps nobody from a coordinator that was found before: Abort and Resume need no
storage. The record that was read last is used then. It carries the coordinator's nonce, so that another one, which may have its
port by now, refuses the call before anything is done.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

from coordinator.wire.errors import SafepointError
from coordinator.wire.names import is_store
from coordinator.wire.record import FILE, Record, look_up, nowhere

AGAIN_WITHIN_S: Final = 0.5  # a store gets so long when an older record is known
FIRST_WITHIN_S: Final = 5.0  # and so long when none is
GIVEN_UP_AFTER_S: Final = 60.0  # not every store has a limit of its own: a look may hang for ever


class Finder:
    """Looks up one target again for each call. Safe for several threads; blocks for FIRST_WITHIN_S at most."""

    def __init__(self, target: str, look_up: Callable[[str], Record] = look_up) -> None:
        self._target = target
        self._look_up = look_up
        self._lock = threading.Lock()
        self._running: dict[str, _Look] = {}  # by target: the one that is under way is waited for, and no other begun
        self._known: dict[str, Record] = {}

    def find(self) -> Record:
        """Whom to call now, past a relay. Raises Unanswered as `look_up`."""
        record = self._read(self._target)
        return self._read(record.beyond) if record.beyond else record

    async def found(self) -> Record:
        """As `find`, beside the event loop where that takes its time."""
        record = await self._read_beside(self._target)
        return await self._read_beside(record.beyond) if record.beyond else record

    async def _read_beside(self, target: str) -> Record:
        return await asyncio.to_thread(self._read, target) if _is_stored(target) else self._read(target)

    def _read(self, target: str) -> Record:
        if not _is_stored(target):
            return self._look_up(target)
        with self._lock:
            known = self._known.get(target)
            look = self._running.get(target)
            if look is not None and look.record is not None:
                self._known[target] = known = look.record  # it came when nobody waited for it any more
            if look is None or look.is_over:
                look = self._running[target] = _Look(self._look_up, target)
        within_s = AGAIN_WITHIN_S if known is not None else FIRST_WITHIN_S
        if not look.done.wait(within_s):
            if known is not None:
                return known
            raise nowhere(target, f"the object store has not answered for {within_s:g} s")
        with self._lock:
            if self._running.get(target) is look:
                del self._running[target]
            if look.record is not None:
                self._known[target] = look.record
        if look.record is not None:
            return look.record
        assert look.error is not None
        says_nothing = look.error.__cause__ is not None  # the store failed; it did not say that there is no record
        if known is not None and says_nothing:
            return known
        raise look.error


def _is_stored(target: str) -> bool:
    return is_store(target.removeprefix(FILE))


class _Look:
    """One look at a store, in a thread that nobody has to wait for: it ends when the store does."""

    def __init__(self, look_up: Callable[[str], Record], target: str) -> None:
        self.done = threading.Event()
        self.record: Record | None = None
        self.error: SafepointError | None = None
        self._began_s = time.monotonic()
        threading.Thread(target=self._run, args=(look_up, target), name="look up", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it says nothing of now: it has ended, or will not."""
        return self.done.is_set() or time.monotonic() - self._began_s > GIVEN_UP_AFTER_S

    def _run(self, look_up: Callable[[str], Record], target: str) -> None:
        try:
            self.record = look_up(target)
        except SafepointError as error:
            self.error = error
        except BaseException as error:
            self.error = nowhere(target, f"it cannot be read ({error})")
            raise
        finally:
            self.done.set()
