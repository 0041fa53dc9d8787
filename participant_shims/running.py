"""One phase that runs, and those who follow it.

The rule: callers come and go, the phase goes on. A phase is a task of the shim; a stream only follows it, so that a
cancelled or repeated call changes nothing (BUGS A8), and a slow reader gets the newest progress instead of a backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Generic, TypeVar

from coordinator.wire.errors import Problem, Refused
from participant_shims.adapter import Drain
from participant_shims.fence import Rpc

EventT = TypeVar("EventT")
PROGRESS_EVERY_S: Final = 1.0


class Pulse:
    """Wakes everybody who waits for the next change. One event loop."""

    def __init__(self) -> None:
        self._beats = 0
        self._event: asyncio.Event | None = None  # while somebody waits

    @property
    def beats(self) -> int:
        return self._beats

    def beat(self) -> None:
        """Something changed."""
        self._beats += 1
        if self._event is not None:
            event, self._event = self._event, None
            event.set()

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Until there was a beat after `seen`, or until `timeout_s` seconds are over."""
        if seen != self._beats or timeout_s <= 0:
            return
        if self._event is None:
            self._event = asyncio.Event()
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass


class Running(Generic[EventT]):
    """A phase: what it has reported so far, and how it ended.

    `firsts` are events that every follower gets, such as AdmissionClosed; of progress only the newest is kept.
    """

    def __init__(self, rpc: Rpc, operation_id: str) -> None:
        self.rpc = rpc
        self.operation_id = operation_id
        self.task: asyncio.Task[None] | None = None
        self.drain: Drain | None = None  # for the caller who has to be told who is waited for
        self.problem: Problem | None = None
        self._firsts: list[EventT] = []
        self._progress: EventT | None = None
        self._final: EventT | None = None
        self._pulse = Pulse()

    @property
    def over(self) -> bool:
        return self._final is not None or self.problem is not None

    def first(self, event: EventT) -> None:
        """An event for every follower, whenever it comes."""
        self._firsts.append(event)
        self._pulse.beat()

    def progress(self, event: EventT) -> None:
        """The newest progress."""
        self._progress = event
        self._pulse.beat()

    def resting(self, event: EventT) -> None:
        """What is said after a second in which nothing else was: most exports take less, and of a thousand none is free."""
        self._progress = event

    def finish(self, event: EventT) -> None:
        """Done: the last event."""
        self._final = event
        self._pulse.beat()

    def fail(self, problem: Problem) -> None:
        """Ended without success. Only the first end counts."""
        if not self.over:
            self.problem = problem
            self._pulse.beat()

    def cancel(self, problem: Problem) -> None:
        """Stop it: its followers get `problem` at once, its task ends when it can."""
        self.fail(problem)
        if self.task is not None:
            self.task.cancel()

    async def follow(self, budget_s: float, out_of_time: Callable[[float], Problem]) -> AsyncIterator[EventT]:
        """Every first event, progress at each change and at least every second, the last event.

        Raises Refused: the phase's own problem, or `out_of_time(seconds waited)` when `budget_s` is used up; the phase
        goes on then.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        sent = 0
        shown: Any = None
        last_sent = begun
        while True:
            seen = self._pulse.beats
            while sent < len(self._firsts):
                yield self._firsts[sent]
                sent += 1
                last_sent = clock()
            if self._final is not None:
                yield self._final
                return
            if self.problem is not None:
                raise Refused(self.problem)
            now = clock()
            if self._progress is not None and (self._progress is not shown or now - last_sent >= PROGRESS_EVERY_S):
                shown = self._progress
                last_sent = now
                yield self._progress
            left = budget_s - (clock() - begun)
            if left <= 0:
                raise Refused(out_of_time(clock() - begun))
            await self._pulse.wait(seen, min(PROGRESS_EVERY_S, left))
