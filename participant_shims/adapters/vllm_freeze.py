"""Freezing what one engine generates, and showing that it is frozen.

The rule: frozen is a state with proof. The doors are closed, the pause was acknowledged, the engine itself says that it is
paused, and for 100 ms after that no byte has come out of any stream. Drained is a count of our own requests, never vLLM's
word for it. A pause that somebody else had made is respected: it is not undone when we open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.terms import Activity, QuiesceMode
from participant_shims.adapter import Counts, Drain, LiveRollout, Stillness
from participant_shims.admission import ANONYMOUS, Doors, Standing
from participant_shims.engine.front import Front
from participant_shims.engine.pause_note import PauseNote
from participant_shims.running import Pulse

log = logging.getLogger(__name__)

QUIET_S: Final = 0.1  # no byte for so long, and nothing is on its way any more
QUIET_WITHIN_S: Final = 3.0
PATIENT_S: Final = 5.0  # on a machine that is busy, an API server takes a second to say whether it is paused
READS: Final = 4  # turns of the event loop from the arrival of a byte to its record
LATELY_S: Final = 1.0  # who has said something within it generates
SPEAKS_EVERY_S: Final = 0.005
ABORT_WITHIN_S: Final = 5.0
COUNTS_S: Final = 0.3  # between two looks at the tokens of each rank
SHOWN: Final = 20


class Freeze:
    """Of one engine. `life`: where a pause of ours is noted for our successor. `look`: looks whether the engine is still the
    one that was described; raises what it finds. `pulse` beats whenever the doors count anew."""

    def __init__(
        self, participant_id: str, life: Path | None, drain_limit_s: float, front: Front, doors: Doors, pulse: Pulse,
        look: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._participant_id, self._drain_limit_s = participant_id, drain_limit_s
        self._front, self._doors, self._pulse, self._look = front, doors, pulse, look
        self.now: Callable[[], float] = time.monotonic  # the clock of a drain
        self._note = PauseNote(life)
        self._paused_at = 0.0  # loop time
        self.ours = False  # whether a pause of ours may be in force
        self._pauses = 0  # asked for so far
        self._frozen_at: float | None = None  # loop time from which on nothing may come any more

    def over(self) -> None:
        """What was frozen before is no longer, or is about to be frozen anew."""
        self._frozen_at = None

    def counts(self) -> Counts:
        """As the doors have them."""
        tally = self._doors.counts()
        return Counts(tally.in_flight, tally.parked, tally.held)

    async def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        """As of an adapter."""
        aborted: list[LiveRollout] = []
        # Its metrics take a while to write: whether it is still the same is looked at while it stops.
        looking = asyncio.ensure_future(self._look())
        try:
            async for drain in self._stop(mode, exclude_after_s, aborted):
                yield drain
            await looking
        except SafepointError as error:
            if error.reason is not Reason.UNAVAILABLE:
                raise
            # It was waited for: asking again shortly would only wait once more, with everybody paused.
            raise refuse(
                Reason.DECLINED, error.problem.message,
                next_step=error.problem.next_step
                or f"See whether vLLM at {self._front.where} lives, by its log; then save again.",
            ) from error  # fmt: skip
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        await self._until_quiet()
        self._frozen_at = asyncio.get_running_loop().time()
        failpoints.reach("engine.after_quiet")
        counts = self.counts()
        yield Drain(Counts(0, counts.parked, counts.held + counts.in_flight), quiesced=True, excluded=tuple(aborted))

    async def still(self) -> Stillness:
        """As of an adapter."""
        generation = self._doors.generation
        if not self._doors.closed:
            return Stillness(generation, "Admission is open.")
        if self._frozen_at is None:
            return Stillness(generation)
        where = self._front.where
        try:
            paused = await self._front.is_paused(PATIENT_S)
        except SafepointError as error:
            # Whether it kept still nobody can say; an engine that is gone has not, and its last words were no tokens.
            return Stillness(generation, f"{error.problem.message} See whether it lives, by its log.", Reason.DECLINED)
        if self._front.spoke_at > self._frozen_at:
            return Stillness(generation, f"{self._participant_id} generated after it was frozen.")
        if not paused:
            return Stillness(generation, f"Somebody has resumed vLLM at {where}, or it was restarted.")
        return Stillness(generation)

    async def resume(self) -> None:
        """Undo a pause of ours. Raises UNAVAILABLE; it may be repeated."""
        failpoints.reach("engine.before_resume")
        pauses = self._pauses
        await self._front.resume()
        failpoints.reach("engine.after_resume")
        if pauses == self._pauses:  # else the next operation has asked for one meanwhile, which comes after this
            self.ours = False
            self._note.remove()

    async def settle(self) -> None:
        """Undo what a shim before us has left paused: its noted pause, never somebody else's."""
        if self._note.there():
            log.warning("the shim before this one ended while vLLM at %s was paused by it", self._front.where)
            try:
                await self.resume()
            except SafepointError as error:
                log.error("%s", error)

    # ---- parts ----------------------------------------------------------------------------------------------------

    async def _stop(
        self, mode: QuiesceMode, exclude_after_s: float | None, aborted: list[LiveRollout]
    ) -> AsyncIterator[Drain]:
        if mode is QuiesceMode.DRAIN:
            limit = self._drain_limit_s
            async for drain in self._until_empty(limit if exclude_after_s is None else min(limit, exclude_after_s)):
                yield drain
        elif mode is QuiesceMode.ABORT:
            aborted += self._all_running()
            yield Drain(self.counts(), tuple(aborted[:SHOWN]), len(aborted))
            await self._pause("abort")
            async for drain in self._until_empty(ABORT_WITHIN_S):
                yield drain
            if left := self._front.end_all():
                log.error("vLLM told nobody that it aborted %s: their connections were cut", ", ".join(left[:20]))
                async for drain in self._until_empty(ABORT_WITHIN_S):
                    yield drain
        if mode is not QuiesceMode.ABORT:
            await self._pause("keep")
        self._doors.mode = QuiesceMode.HOLD  # what is left is frozen, and so is its way to the caller

    async def _pause(self, mode: str) -> None:
        """Raises UNAVAILABLE, ABORTED; LEASE_LAPSED when the doors opened meanwhile.

        vLLM answers every control call between two steps. So who generates is not asked first whether somebody else has
        paused it, and paused a step later: it is asked and paused at once, and what it says is looked at afterwards. Who is
        silent answers at once, and is asked first.
        """
        self._check_closed()
        loop = asyncio.get_running_loop()
        generates = self._generates()
        asking = None if self.ours else asyncio.ensure_future(self._front.is_paused(PATIENT_S))
        try:
            if asking is not None:
                await self._read()  # the question leaves first, and what had come before says nothing
            asked_at = loop.time()
            if asking is not None and not generates and await self._is_paused(asking, asked_at):
                self._paused_at = loop.time()
                self._leave_it_paused()
                return
            self.ours = True
            self._pauses += 1
            self._note.write(self._doors.operation_id)
            failpoints.reach("engine.before_pause")
            self._paused_at = await self._front.pause(mode)
            failpoints.reach("engine.after_pause")
            if asking is not None and generates and await self._was_paused(asking, asked_at):
                self.ours = False
                self._note.remove()
                self._leave_it_paused()
            self._check_closed()
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    def _generates(self) -> bool:
        """Whether something comes out of it, so that it is not likely to be paused."""
        spoke_ago_s = asyncio.get_running_loop().time() - self._front.spoke_at
        return spoke_ago_s < LATELY_S and any(not record.finished for record in self._front.in_flight.values())

    async def _is_paused(self, asking: asyncio.Future[bool], asked_at: float) -> bool:
        """Whether somebody else has paused it. Who generates after all is not: a server that is busy takes longer to say so."""
        while not asking.done() and self._front.spoke_at <= asked_at:
            await asyncio.wait({asking}, timeout=SPEAKS_EVERY_S)
        return await asking if asking.done() else False

    async def _was_paused(self, asking: asyncio.Future[bool], asked_at: float) -> bool:
        """Whether somebody else had paused it when it was asked. Both calls are on their way at once: what it has generated
        since then shows that it took ours first."""
        await self._read()
        if self._front.spoke_at > asked_at:
            return False
        try:
            return await asking
        except SafepointError:
            return False  # it has answered the pause, which came later

    def _leave_it_paused(self) -> None:
        log.warning("vLLM at %s is paused already, by somebody else; it stays so when we open", self._front.where)

    async def _until_empty(self, limit_s: float) -> AsyncIterator[Drain]:
        """Progress until nothing of ours runs, or `limit_s` seconds are over."""
        end = self.now() + limit_s
        while True:
            seen = self._pulse.beats
            self._check_closed()
            counts = self.counts()
            if counts.in_flight == 0 or self.now() >= end:
                return
            standing, count = self._doors.rollouts(SHOWN, only=(Activity.RUNNING,))
            yield Drain(counts, tuple(live(s) for s in standing), count)
            await self._pulse.wait(seen, min(1.0, end - self.now()))

    async def _until_quiet(self) -> None:
        """Until no byte has come for QUIET_S, counted from the pause on."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            quiet_at = max(self._paused_at, self._front.spoke_at) + QUIET_S
            if quiet_at <= loop.time():
                # Were we the ones who stood still, what came meanwhile is read only now.
                await self._read()
                if quiet_at == max(self._paused_at, self._front.spoke_at) + QUIET_S:
                    self._check_closed()
                    return
                continue
            if loop.time() - begun > QUIET_WITHIN_S:
                who = ", ".join(sorted(r.request_id for r in self._front.in_flight.values() if not r.finished)[:5])
                ranks = await self._ranks_that_go_on()
                raise refuse(
                    Reason.ACTIVITY_AFTER_PREPARED,
                    f"vLLM at {self._front.where} says that it is paused and goes on generating "
                    f"({who or 'unrecorded requests'}).",
                    next_step=f"Restart it: {ranks or 'a rank of it'} did not stop.",
                )
            await asyncio.sleep(max(0.0, quiet_at - loop.time()))
            self._check_closed()

    async def _ranks_that_go_on(self) -> str:
        """Those of several ranks whose count of tokens still rises, by number; empty when that can't be seen."""
        try:
            before = await self._front.generated()
            await asyncio.sleep(COUNTS_S)
            now = await self._front.generated()
        except SafepointError:
            return ""
        going = sorted(rank for rank in before if now.get(rank, 0.0) > before[rank])
        return f"rank {', '.join(going)} of {len(before)}" if going and len(before) > 1 else ""

    @staticmethod
    async def _read() -> None:
        """Until what has come already is recorded."""
        for _ in range(READS):
            await asyncio.sleep(0.001)

    def _check_closed(self) -> None:
        if not self._doors.closed:
            raise refuse(Reason.LEASE_LAPSED, f"{self._participant_id} has opened by its lease.")

    def _all_running(self) -> tuple[LiveRollout, ...]:
        count = self._doors.rollouts(0, only=(Activity.RUNNING,))[1]
        return tuple(live(s) for s in self._doors.rollouts(count, only=(Activity.RUNNING,))[0])


def live(s: Standing) -> LiveRollout:
    """As the protocol has it."""
    return LiveRollout(s.rollout_id or ANONYMOUS, s.activity, s.attempt, s.turn, s.age_s, s.waiting_on)
