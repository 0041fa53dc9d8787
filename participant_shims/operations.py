"""Runs operations: what the fence has accepted is done here, against the adapter.

The rule: the fence decides, this file performs, in this order: whatever a decision says has ended is opened before
anything else is done. Phases are tasks that outlive their callers; Resume and Abort overtake them and wait for nobody
but the gates. Leases run on an injected clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from coordinator.wire import failpoints, logs
from coordinator.wire.beneath import storage_error
from coordinator.wire.errors import STILL_LOADED, Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.terms import ParticipantState, Phase
from participant_shims.adapter import (
    Adapter,
    Closed,
    Description,
    Doubts,
    Opened,
    ShowsStacks,
    Snapshot,
    StaysClosed,
    TaskStack,
    Unloads,
)
from participant_shims.fence import Accept, Cause, Decision, Ended, Fence, Refuse, Rpc
from participant_shims.forgetting import Forgetting
from participant_shims.running import Pulse, Running

log = logging.getLogger(__name__)

# Resume and Abort answer within 1 s; what has not opened by then is opened in the background.
OPEN_WAIT_S: Final = 0.85
REOPEN_EVERY_S: Final = 0.5
STATUS_WAIT_S: Final = 0.8
_PHASE: Final = {Rpc.PREPARE: Phase.PREPARE, Rpc.COMMIT: Phase.COMMIT, Rpc.RESTORE: Phase.RESTORE}
_PAUSED: Final = frozenset(ParticipantState) - {ParticipantState.UNSPECIFIED, ParticipantState.OPEN}
ResultT = TypeVar("ResultT")


class Alarm(Protocol):
    """A timer that can be taken back."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic time and timers."""

    def now(self) -> float:
        """Seconds."""
        ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Alarm:
        """Call back on the event loop after `delay_s` seconds of this clock."""
        ...


class LoopClock:
    """The real one. CLOCK_MONOTONIC goes on while a process is stopped, so a lease lapses then as well."""

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Alarm:
        return asyncio.get_running_loop().call_later(delay_s, callback)


class Operations:
    """The operations of one participant. One event loop; no method blocks it."""

    def __init__(
        self,
        adapter: Adapter,
        participant_id: str,
        incarnation_id: str,
        clock: Clock | None = None,
        actor_id: str = "",
    ) -> None:
        self.adapter = adapter
        self.actor_id = actor_id
        self.participant_id = participant_id
        self.incarnation_id = incarnation_id
        self.clock = clock or LoopClock()
        self.fence = Fence(participant_id)
        self.changed = Pulse()
        self.forgetting = Forgetting(adapter, self.changed)
        self.last_failure = ""
        self.closed: Closed | None = None  # what close() answered in the present operation
        self.loaded_by = ""  # the restore whose state is in the server, until it is resumed
        self._given_up = False  # and must be forgotten, before admission opens
        self._running: Running[Any] | None = None
        self._opening: asyncio.Task[Opened] | None = None
        self._opened_for = ""
        self._alarm: Alarm | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._description: Description | None = None
        self._snapshot: Snapshot | None = None
        self._noticing = False
        self._forgetting_again = False
        # One thread: what an aborted operation still writes is over before its directory is removed.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="safepoint-disk")
        self.on_abandoned: Callable[[str], None] = lambda operation_id: None

    # ---- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to listen to the adapter, and ask what a shim before this one had it load."""
        await self.adapter.start(self._notice)
        if isinstance(self.adapter, Unloads):
            try:
                self.loaded_by = await self.adapter.loaded_by()
            except Exception:  # a shim that does not start would be worse
                log.exception("whether a restore is loaded cannot be read")

    async def stop(self) -> None:
        """End: open admission if it can be opened, whoever owns it."""
        self.apply(self.fence.force_end(Cause.ABORTED), "The shim was stopped.")
        if self._opening is not None:
            await asyncio.wait({self._opening}, timeout=OPEN_WAIT_S)
        for task in [*self._tasks, *([self._opening] if self._opening else [])]:
            task.cancel()
        await self.adapter.stop()
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def describe(self) -> Description:
        """What the server is; fixed for this incarnation. Raises UNAVAILABLE while it is not up."""
        if self._description is None:
            self._description = replace(await self.adapter.describe(), actor_id=self.actor_id)
        return self._description

    # ---- decisions ------------------------------------------------------------------------------------------------

    def call(self, rpc: Rpc, operation_id: str, epoch: int, digest: str, lease_ttl_s: float = 0.0) -> Decision:
        """Ask the fence, and perform what the decision ended. Raises what it refuses.

        LEASE_LAPSED of a restore whose state is in the server still says so: a Resume would find everything.
        """
        logs.about(operation_id)
        decision = self.fence.call(rpc, operation_id, epoch, digest, self.clock.now(), lease_ttl_s)
        self.apply(decision.ended)
        if isinstance(decision, Refuse):
            problem = decision.problem
            if problem.reason is Reason.LEASE_LAPSED and operation_id == self.in_question:
                problem = replace(problem, metadata={**problem.metadata, STILL_LOADED: operation_id})
            raise Refused(problem)
        if decision.lease_generation:
            self._set_alarm(decision.lease_generation)
        self.changed.beat()
        return decision

    def apply(self, ended: Ended | None, why: str = "") -> None:
        """Perform the end of an operation: stop its phase, begin to open. Waits for nothing."""
        if ended is None:
            return
        problem = self._why_over(ended, why)
        self.last_failure = "" if ended.cause is Cause.RESUMED else problem.message
        log.log(logging.INFO if ended.cause is Cause.RESUMED else logging.WARNING, "%s", problem.message)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        running, self._running = self._running, None
        self.closed = None
        if running is not None:
            running.cancel(problem)
        if ended.operation_id == self.loaded_by:
            # A lapse keeps it: everybody may have loaded, and a Resume that comes late shall not find it gone.
            self._given_up = ended.cause in (Cause.ABORTED, Cause.SUPERSEDED)
            self.loaded_by = "" if ended.cause is Cause.RESUMED else self.loaded_by
        if ended.cause is not Cause.RESUMED:
            self._doubt()
        if ended.cause is Cause.ABORTED:
            self.on_abandoned(ended.operation_id)
        self.begin_opening(ended.operation_id)
        self.changed.beat()

    async def end(self, rpc: Rpc, operation_id: str, epoch: int, digest: str) -> Opened:
        """Resume or abort. What was released, once every gate has said so.

        Raises what the fence refuses; UNAVAILABLE when a gate has not confirmed within 1 s: the operation is finished
        all the same, opening goes on, and a repeat waits again.
        """
        loaded_here = operation_id == self.loaded_by
        decision = self.call(rpc, operation_id, epoch, digest)
        if not isinstance(decision, Accept):
            reply = getattr(decision, "reply", None)
            assert isinstance(reply, Opened)  # nothing else is recorded for an end
            return reply
        if rpc is Rpc.ABORT and decision.ended is None and loaded_here:
            # Its lease had lapsed, or the shim that loaded was killed: the fence of this one has never heard of it.
            self._given_up = True
            await self._unload()
        if rpc is Rpc.RESUME and loaded_here:
            self.loaded_by = ""
            self.spawn(self._keep())  # Resume needs no disk, and waits for none
        opened = await self._confirm_open(operation_id)
        self.fence.record_end(rpc, operation_id, opened)
        return opened

    def begin_opening(self, operation_id: str) -> asyncio.Task[Opened]:
        """Open, and go on until it is done or the next operation closes. Joins an opening that is under way."""
        # One that is done answers for its own operation again: what it released was released for that one.
        if self._opening is None or (self._opening.done() and self._opened_for != operation_id):
            self._opening, self._opened_for = asyncio.create_task(self._open()), operation_id
        return self._opening

    async def settle_opening(self) -> None:
        """Wait until the last operation's opening is done, at most its 1 s; then nothing opens any more by itself."""
        opening = self._opening
        if opening is None:
            return
        if not opening.done():
            await asyncio.wait({opening}, timeout=OPEN_WAIT_S)
        opening.cancel()
        self._opening = None

    # ---- phases ---------------------------------------------------------------------------------------------------

    def begin(self, running: Running[Any], phase: Callable[[], Awaitable[Any]]) -> None:
        """Run an accepted phase as a task of ours. Its followers learn how it ended."""
        self._running = running
        running.task = self.spawn(self._perform(running, phase))

    @property
    def running(self) -> Running[Any] | None:
        """The phase that runs now, or ran last in this operation."""
        return self._running

    async def _perform(self, running: Running[Any], phase: Callable[[], Awaitable[Any]]) -> None:
        rpc, operation_id = running.rpc, running.operation_id
        try:
            final = await phase()
        except asyncio.CancelledError:
            return  # overtaken: `apply` has told the followers
        except SafepointError as error:
            problem = error.problem
        except (OSError, MemoryError) as error:
            problem = storage_error(error, rpc.value).problem
        except Exception:
            log.exception("%s of %s failed unexpectedly", rpc.value, operation_id)
            problem = Problem(Reason.INTERNAL, f"{rpc.value} failed unexpectedly; the log of the shim says how.")
        else:
            refusal = self.fence.succeeded(rpc, operation_id, running, self.clock.now())
            if refusal is None:
                running.finish(final)
                self.changed.beat()
                return
            running.fail(refusal.problem)  # before `apply`, which would cancel the task we are in
            running.task = None
            self.apply(refusal.ended)
            return
        problem = replace(
            problem,
            participant_id=problem.participant_id or self.participant_id,
            operation_id=problem.operation_id or operation_id,
            phase=problem.phase or _PHASE[rpc],
        )
        self.last_failure = problem.message
        self._doubt()
        running.task = None  # `apply` must not cancel the task we are in
        ended = self.fence.failed(rpc, operation_id, problem, closed=self.closed is not None)
        if ended is not None:
            self._running = None
            self.apply(ended, problem.message)
            if self._opening is not None:  # the caller may rely on it: admission is open again
                await asyncio.wait({self._opening}, timeout=OPEN_WAIT_S)
        elif self.fence.state is ParticipantState.OPEN and self._alarm is not None:
            self._alarm.cancel()  # a restore that closed nothing is forgotten
            self._alarm = None
        running.fail(problem)
        self.changed.beat()

    def _doubt(self) -> None:
        # A chunk may be gone on which a server relies: the next save must not fail for the same one.
        if isinstance(self.adapter, Doubts):
            self.adapter.doubt()

    def hold_is_lost(self, operation_id: str, why: str) -> None:
        """A gate is open, or will be by itself: end the operation as its lease would, if it still has the pause."""
        if self.fence.state in _PAUSED and self.fence.operation_id == operation_id:
            self.apply(self.fence.force_end(Cause.LAPSED, why), why)

    async def check_freeze(self, generation: int) -> None:
        """Raise ACTIVITY_AFTER_PREPARED unless admission has stayed closed and nothing moved since `generation`."""
        still = await self.adapter.still()
        if still.generation != generation or still.activity:
            raise refuse(
                still.reason,
                still.activity or f"Admission moved from generation {generation} to {still.generation}.",
                participant_id=self.participant_id,
            )

    async def on_disk(self, work: Callable[[], ResultT]) -> ResultT:
        """Run blocking work in the disk thread, after what it still has to do."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """A task that is kept alive until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- status ---------------------------------------------------------------------------------------------------

    async def look(self, max_rollouts: int) -> tuple[Snapshot | None, str]:
        """The server's status and a remark. Within 1 s: when the adapter does not answer, its last status is shown."""
        try:
            async with asyncio.timeout(STATUS_WAIT_S):
                self._snapshot = await self.adapter.status(max_rollouts)
        except TimeoutError:
            return self._snapshot, "The server does not answer; these figures are old."
        except SafepointError as error:
            return self._snapshot, error.problem.message
        return self._snapshot, ""

    async def stacks(self, limit: int) -> list[TaskStack]:
        """What the tasks of its rollouts wait for. Within 1 s; nothing where nobody can look."""
        if not limit or not isinstance(self.adapter, ShowsStacks):
            return []
        try:
            async with asyncio.timeout(STATUS_WAIT_S):
                return await self.adapter.stacks(limit)
        except TimeoutError:
            return []

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _set_alarm(self, generation: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        left = self.fence.lease_remaining(self.clock.now())
        if left is not None:
            operation_id = self.fence.operation_id
            self._alarm = self.clock.call_later(left, lambda: self._lapse(operation_id, generation))

    def _lapse(self, operation_id: str, generation: int) -> None:
        failpoints.reach("shim.before_lapse")
        ended = self.fence.lapse(operation_id, generation, self.clock.now())
        if ended is not None:
            self.apply(ended)
        elif self.fence.operation_id == operation_id and self.fence.lease_generation == generation:
            self._set_alarm(generation)  # the timer came early by its resolution

    async def _confirm_open(self, operation_id: str) -> Opened:
        opening = self.begin_opening(operation_id)
        await asyncio.wait({opening}, timeout=OPEN_WAIT_S)
        if opening.done() and not opening.cancelled():
            return opening.result()
        raise refuse(
            Reason.UNAVAILABLE, "Not every worker has confirmed yet that admission is open.",
            participant_id=self.participant_id,
            next_step="Repeat the call: opening goes on, and the gates open by themselves when their lease lapses.",
        )  # fmt: skip

    async def _open(self) -> Opened:
        await self._unload()
        while True:
            try:
                failpoints.reach("shim.before_open")
                opened = await self.adapter.open()
                failpoints.reach("shim.after_open")
            except SafepointError as error:
                log.warning("not open yet: %s", error)
                self.last_failure = error.problem.message
            except Exception:
                log.exception("the adapter failed to open")
            else:
                self.changed.beat()
                return opened
            await asyncio.sleep(REOPEN_EVERY_S)

    async def _unload(self) -> None:
        if not self._given_up:
            return
        operation_id, self._given_up, self.loaded_by = self.loaded_by, False, ""
        if not await self.forgetting.forget(operation_id):  # whatever the disk does, admission opens
            self.spawn(self.forgetting.go_on())

    async def settle_unloading(self) -> None:
        """Before a new cut or load: forget what an aborted restore left. Raises UNAVAILABLE when that still fails.

        A cut would hold rollouts of a snapshot that was given up, and a load would be undone when it is forgotten later.
        """
        await self._unload()
        if not await self.forgetting.again():
            raise refuse(
                Reason.UNAVAILABLE, f"{self.forgetting.left}.", participant_id=self.participant_id,
                next_step="It is tried again every few seconds; restart the server if it stays so.",
            )  # fmt: skip

    @property
    def in_question(self) -> str:
        """The restore whose state is in the server while nobody here knows whether it was resumed; empty when there is none."""
        return self.loaded_by if self.loaded_by != self.fence.operation_id and not self._given_up else ""

    async def held(self) -> str:
        """The operation of which the server holds something: what owns the fence, what a restore has loaded, or what a shim
        before this one was killed in, so that it is still closed. Only a coordinator knows how that one ended. Empty: nothing.

        Raises UNAVAILABLE when the server does not say.
        """
        known = self.fence.operation_id or self.in_question
        if known or not isinstance(self.adapter, StaysClosed):
            return known
        return await self.adapter.left_closed_for()

    def require_settled(self) -> None:
        """Before a cut. Raises UNAVAILABLE while a restore is `in_question`: it may have been given up.

        Asked before the fence is: an operation that owned it would keep the answer out.
        """
        self.apply(self.fence.lapse(self.fence.operation_id, self.fence.lease_generation, self.clock.now()))
        if self.in_question:
            raise refuse(
                Reason.UNAVAILABLE,
                f"{self.participant_id} holds what restore {self.in_question} had loaded, and has not heard whether it was "
                "resumed.",
                participant_id=self.participant_id, phase=Phase.PREPARE, metadata={"in_question": self.in_question},
                next_step="Repeat the save with a new operation_id: the coordinator tells it to resume or abort.",
            )  # fmt: skip

    async def _keep(self) -> None:
        if isinstance(self.adapter, Unloads):
            try:
                await self.adapter.keep()
            except Exception:
                log.exception("that the restore was resumed is not noted: a late abort to another shim may undo it")

    def _why_over(self, ended: Ended, why: str) -> Problem:
        reason = Reason.LEASE_LAPSED if ended.cause is Cause.LAPSED else Reason.OPERATION_FINISHED
        text = f"Operation {ended.operation_id} {ended.cause.value}" + (f": {why}" if why else ".")
        return Problem(reason, text, participant_id=self.participant_id, operation_id=ended.operation_id,
                       metadata={"ended": ended.cause.name.lower()})  # fmt: skip

    def _notice(self) -> None:
        """The adapter says that something changed."""
        self.changed.beat()
        if self.forgetting.left and not self._forgetting_again:  # a gate that was missing may be here now
            self._forgetting_again = True
            self.spawn(self._forget_again())
        if self.closed is not None and not self._noticing:
            self._noticing = True
            self.spawn(self._look_for_thaw())

    async def _forget_again(self) -> None:
        try:
            await self.forgetting.again()
        finally:
            self._forgetting_again = False

    async def _look_for_thaw(self) -> None:
        # The gates have a lease of their own, which ends the pause also when this process was stopped for longer.
        try:
            closed, operation_id = self.closed, self.fence.operation_id
            snapshot, remark = await self.look(0)
            if remark or snapshot is None or snapshot.closed or closed is None or closed is not self.closed:
                return
            self.hold_is_lost(operation_id, "The gates opened by their own lease.")
        finally:
            self._noticing = False
