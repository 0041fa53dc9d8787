"""Events of operations, from the one who drives to all who follow.

The rule: a slow follower never slows the operation and never costs unbounded memory. Each has a bounded queue; when it
is full the oldest event goes, and the follower is told that it has missed some (`resync`) before it gets the next one.
Of a large fleet a follower sees how it stands, not each step: beyond the first FEW steps of a phase it is woken ten times
a second, is not told who was called, and not who was done once the phase has finished. Single event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final, Protocol

from safepoint.v1 import coordinator_service_pb2

log = logging.getLogger(__name__)

QUEUE_LENGTH: Final = 1000
FEW: Final = 16  # steps of one phase that are told one by one
GATHER_S: Final = 0.1
HISTORY_LENGTH: Final = 200  # what Explain shows and a late follower is given


class Sink(Protocol):
    """Whoever is told of every event, at once and on the event loop: it returns without waiting."""

    def offer(self, event: coordinator_service_pb2.OperationEvent) -> None: ...


class Follower:
    """One reader of a feed. Use in `with`, so that it is forgotten when its reader leaves."""

    def __init__(self, feed: Feed, operation_id: str, limit: int) -> None:
        self._feed = feed
        self._operation_id = operation_id
        self._limit = limit
        self._events: deque[coordinator_service_pb2.OperationEvent] = deque()
        self._missed = False
        self._steps = 0  # of the present phase
        self._wake = asyncio.Event()
        self._waking: asyncio.TimerHandle | None = None

    def __enter__(self) -> Follower:
        self._feed.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._feed.remove(self)
        if self._waking is not None:
            self._waking.cancel()

    def offer(self, event: coordinator_service_pb2.OperationEvent) -> None:
        """An event happened."""
        if self._operation_id and event.operation_id != self._operation_id:
            return
        kind = event.WhichOneof("event")
        if kind == "phase_started":
            self._steps = 0
        elif kind == "phase_finished" and self._steps > FEW:
            self._events = deque(each for each in self._events if not _is_over(each))
        elif kind == "participant_called" and (self._steps >= FEW or event.participant_called.also_called):
            return  # the phase has said who takes part in it; who is done is told
        if len(self._events) >= self._limit:
            self._events.popleft()
            self._missed = True
        self._events.append(event)
        if kind in ("participant_called", "participant_progress"):
            self._steps += 1 + len(event.participant_progress.also_done)
            if self._steps > FEW:
                if self._waking is None:
                    self._waking = asyncio.get_running_loop().call_later(GATHER_S, self._woken)
                return
        self._wake.set()

    def _woken(self) -> None:
        self._waking = None
        self._wake.set()

    def take(self) -> coordinator_service_pb2.OperationEvent | None:
        """The oldest event that was not taken; None when there is none."""
        return self._events.popleft() if self._events else None

    def resync(self) -> bool:
        """Whether events were dropped since this was asked last."""
        missed, self._missed = self._missed, False
        return missed

    async def wait(self) -> None:
        """Until there may be something to take. The caller bounds it."""
        await self._wake.wait()
        self._wake.clear()


class Feed:
    """All events of a coordinator."""

    def __init__(self) -> None:
        self._followers: dict[Sink, None] = {}  # in the order in which they came

    def follow(self, operation_id: str = "", limit: int = QUEUE_LENGTH) -> Follower:
        """A reader of the events of one operation, or of all."""
        return Follower(self, operation_id, limit)

    def publish(self, event: coordinator_service_pb2.OperationEvent) -> None:
        """Tell everybody who follows; never waits, and never fails: one who cannot take it is told nothing more."""
        for follower in tuple(self._followers):
            try:
                follower.offer(event)
            except Exception:
                log.exception("%s has failed and is left out: operations go on without it", type(follower).__name__)
                self.remove(follower)

    def add(self, follower: Sink) -> None:
        """From now on `follower` is told of everything. A `Follower` calls it itself."""
        self._followers[follower] = None

    def remove(self, follower: Sink) -> None:
        """Called by the follower."""
        self._followers.pop(follower, None)


def _is_over(event: coordinator_service_pb2.OperationEvent) -> bool:
    """Whether it says nothing more once its phase has finished."""
    kind = event.WhichOneof("event")
    return kind == "participant_called" or (kind == "participant_progress" and event.participant_progress.done)
