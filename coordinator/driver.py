"""The only loop: performs the effects of one operation in order, and feeds what comes of them back.

The rule: every decision is the core's. This file waits, calls, writes and tells; it never looks at a reason, a role or
a phase to decide what happens next. Nothing that can hang is waited for without a bound, and what is not `required`
(records of the opening) is not waited for at all: opening never needs a disk.

One Drive per operation, on one event loop. `done` is set at Finish; the task then goes on telling whoever has not said
that it is open, until there is nothing left to tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

from safepoint.v1 import coordinator_service_pb2, manifest_pb2

from coordinator.answers import Answers
from coordinator.participants import Participants
from coordinator.pause import PauseMeter
from coordinator.protocol import events as core
from coordinator.protocol import sentences
from coordinator.protocol.calls import OPENING
from coordinator.protocol.operation import Operation, Outcome, Stage
from coordinator.protocol.proofs import Opened, Progress
from coordinator.protocol.topology import Participant
from coordinator.protocol.transaction import Transaction
from coordinator.reporting import Reporter
from coordinator.wire import failpoints, logs
from coordinator.wire.beneath import storage_error
from coordinator.wire.errors import Misanswered, Problem, Reason, Refused, SafepointError
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import Phase

log = logging.getLogger(__name__)

RENEW_SOON_S: Final = 0.5
RECORD_TIMEOUT_S: Final = 10.0  # a journal that takes longer has failed, as far as an operation is concerned
DISK_RETRY_S: Final = 1.0
CALLS_AT_ONCE: Final = 32  # begun before the loop looks at anything else
TOLD_WITHIN_S: Final = 0.01  # of a large phase: who is done, with others
_PLACES: Final = {  # before and after each call of a wave
    Phase.PREPARE: ("driver.before_prepare", "driver.after_prepare"),
    Phase.COMMIT: ("driver.before_commit", "driver.after_commit"),
    Phase.CONFIRM: ("driver.before_confirm", "driver.after_confirm"),
    Phase.RESTORE: ("driver.before_restore", "driver.after_restore"),
    Phase.RESUME: ("driver.before_resume", "driver.after_resume"),
    Phase.ABORT: ("driver.before_abort", "driver.after_abort"),
}
# A renewal that ends with one of these has not been decided by the participant; the next one is tried.
_NO_VERDICT: Final = frozenset({Reason.UNAVAILABLE, Reason.INTERNAL, Reason.LIMIT_EXCEEDED})


class Surroundings(Protocol):
    """What an operation needs of the coordinator around it."""

    participants: Participants
    slept: Callable[[], tuple[float, str]]

    def clock(self) -> float:
        """Seconds of the event loop's monotonic clock."""
        ...

    def record(self, drive: Drive, record: core.Record) -> Awaitable[None]:
        """Make a record durable. Starts at once; raises SafepointError when it could not."""
        ...

    def publish(self, drive: Drive, effect: core.Publish) -> manifest_pb2.SnapshotManifest:
        """Write ledger and manifest; blocks, and is called in a thread. Raises SafepointError."""
        ...

    def published_manifest(self, drive: Drive) -> manifest_pb2.SnapshotManifest | None:
        """The manifest of this operation, if the disk has it; blocks. Raises SafepointError when the disk cannot say."""
        ...

    async def restore_done(self, drive: Drive) -> coordinator_service_pb2.RestoreDone:
        """The summary of a restore whose participants have all loaded."""
        ...

    def present(self, whom: Participant) -> Participant:
        """Who has that participant's name now; itself when nobody has."""
        ...

    def ended(self, drive: Drive) -> None:
        """The operation has ended: Finish was performed, and everybody answered."""
        ...


@dataclass(slots=True)
class Identity:
    """What binds an operation_id: a repeat must have the same digest."""

    digest: str
    metadata: dict[str, str]
    trace: dict[str, str] = field(default_factory=dict[str, str])  # the caller's, when it sent one and traces are on


@dataclass(frozen=True, slots=True)
class Checking:
    """What an operation does before Begin. `who` are waited for; `doing` is what follows their names, or stands alone.

    `since`: of the loop's clock.
    """

    doing: str
    since: float
    who: Callable[[], Sequence[ParticipantId]] = tuple


class Drive:
    """One operation from its first call to its last."""

    def __init__(
        self,
        operation: Operation,
        transaction: Transaction,
        identity: Identity,
        around: Surroundings,
        publish_event: Callable[[coordinator_service_pb2.OperationEvent], None],
    ) -> None:
        self.operation = operation
        self.transaction = transaction
        self.identity = identity
        self.began_at = around.clock()
        self.began_ms = 0  # milliseconds since 1970, for people; 0: not known
        self.ended_at: float | None = None
        self.reporter = Reporter(operation, around.clock, self.began_at, publish_event)
        self.meter = PauseMeter()
        self.answers = Answers()
        self.manifest: manifest_pb2.SnapshotManifest | None = None  # of the snapshot that is saved or restored
        self.replies: dict[ParticipantId, Any] = {}  # the last Restored of each, for the summary
        self.recorded = False  # BEGUN is durable: the operation_id is used up
        self.reserved = False  # the snapshot's directory was made by this operation
        self.left_out: tuple[ParticipantId, ...] = ()  # who counts as gone for good once this has begun
        self.restored_from: manifest_pb2.RestoredFrom | None = None  # what a save says of the run before it
        self.ignored = 0
        self.finish: core.Finish | None = None
        self.done = asyncio.Event()
        self._around = around
        self._inbox: asyncio.Queue[core.Event] = asyncio.Queue()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._closing = False
        self._slept_s = 0.0  # the longest time that the core was told of
        self.task: asyncio.Task[None] | None = None
        self.checking: asyncio.Task[None] | None = None  # what runs before Begin
        self.checks = Checking("beginning", self.began_at)  # and what that does now
        self.abort_cause = ""

    # ---- for the service --------------------------------------------------------------------------------------------

    def start(self, first: core.Begin | core.Recover) -> None:
        """Begin to drive. Before it, checks that pause nobody may run, and end in `fail_early`."""
        self.post(first)
        self.task = asyncio.create_task(self._run(), name=f"drive {self.operation.operation_id}")

    def post(self, event: core.Event) -> None:
        """Something happened; it is stepped in turn."""
        self._inbox.put_nowait(event)

    def fail_early(self, problem: Problem) -> None:
        """The checks before Begin refuse it: nothing was recorded, nobody has heard of it."""
        self._finish(core.Finish(Outcome.ABORTED, problem))

    @property
    def started(self) -> bool:
        """Whether Begin or Recover was given."""
        return self.task is not None

    @property
    def outcome(self) -> Outcome:
        """How it stands."""
        return self.finish.outcome if self.finish is not None else self.transaction.outcome

    def why_waiting(self, now: float) -> str:
        """Who is waited for and why, as one sentence; empty when nobody is."""
        if self.started or not self.active:
            return self.transaction.why_waiting(now)
        return sentences.checking(self.checks.doing, self.checks.who(), now - self.checks.since)

    @property
    def pending(self) -> tuple[ParticipantId, ...]:
        """Who is waited for."""
        return tuple(self.transaction.pending() if self.started else self.checks.who())

    @property
    def unconfirmed(self) -> tuple[ParticipantId, ...]:
        """Who may be paused by it and has not said that it is open: telling them goes on after the end."""
        return self.transaction.unconfirmed

    @property
    def active(self) -> bool:
        """Whether it has not ended: it owns the fence."""
        return not self.done.is_set()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began, or that it took."""
        return (self.ended_at or self._around.clock()) - self.began_at

    async def stop(self) -> None:
        """Stop driving, as a crash would: nobody is told anything more."""
        self._closing = True
        running = [*self._calls.values(), *self._others, *(t for t in (self.task, self.checking) if t is not None)]
        for task in running:
            task.cancel()
        for timer in (self._timer, self._telling):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        logs.about(self.operation.operation_id)
        renewing = self._spawn(self._renew_leases(soon=self.recorded))
        try:
            while not self._nothing_left():
                event = await self._inbox.get()
                if (slept := self._just_slept()) is not None:
                    await self._step(slept)
                await self._step(event)
        except Exception as error:  # a bug: nobody may wait for ever, and leases free whoever is paused
            log.exception("driving %s failed", self.operation.operation_id)
            problem = Problem(Reason.INTERNAL, f"The coordinator failed: {type(error).__name__}.")
            if isinstance(error, MemoryError):
                problem = storage_error(error, "driving the operation").problem
            problem = replace(problem, operation_id=self.operation.operation_id)
            self._finish(core.Finish(Outcome.ABORTED, problem, (), self.transaction.unconfirmed))
        finally:
            renewing.cancel()
            if self._timer is not None:
                self._timer.cancel()

    def _just_slept(self) -> core.Slept | None:
        """That this process has not run while the operation did, once."""
        seconds, said = self._around.slept()
        now = self._around.clock()
        if seconds <= self._slept_s or self.began_at > now - seconds:
            return None
        self._slept_s = seconds
        return core.Slept(now, seconds, said)

    def _nothing_left(self) -> bool:
        return self.done.is_set() and not self._calls and self._timer is None and self._inbox.empty()

    async def _step(self, event: core.Event) -> None:
        effects = deque(self.transaction.step(event))
        while effects:
            effect = effects.popleft()
            if isinstance(effect, core.Record):
                problem = await self._record(effect)
                if problem is not None:
                    effects = deque(self.transaction.step(core.RecordFailed(self._around.clock(), problem)))
            elif isinstance(effect, core.Call):
                calls = [effect]
                while effects and isinstance(following := effects[0], core.Call) and len(calls) < CALLS_AT_ONCE:
                    calls.append(following)
                    effects.popleft()
                self._make(calls)
                if len(calls) == CALLS_AT_ONCE:  # of thousands: heartbeats are answered in between
                    await asyncio.sleep(0)
            else:
                self._perform(effect, event)
        if self.reporter.holds_back and self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TOLD_WITHIN_S, self._tell)

    async def _record(self, record: core.Record) -> Problem | None:
        """None when it is durable, or need not be."""
        if record.kind is core.RecordKind.RESTORED:
            self.answers.restored = self.reporter.restored(await self._around.restore_done(self))
        writing = asyncio.ensure_future(self._around.record(self, record))
        if not record.required:
            writing.add_done_callback(_log_failure)
        else:
            try:
                async with asyncio.timeout(RECORD_TIMEOUT_S):
                    await asyncio.shield(writing)
            except TimeoutError:
                writing.add_done_callback(_log_failure)
                return Problem(Reason.STORAGE_FAILED, "The journal did not answer.", waited_s=RECORD_TIMEOUT_S)
            except SafepointError as error:
                return error.problem
        if record.kind is core.RecordKind.BEGUN:
            self.recorded = True
        return None

    def _tell(self) -> None:
        self._telling = None
        self.reporter.flush()

    def _make(self, calls: Sequence[core.Call]) -> None:
        """Begin calls of one phase."""
        self.reporter.called(calls[0].phase, [call.participant_id for call in calls])
        for call in calls:
            task = asyncio.create_task(self._call(call), name=f"{call.phase.name} {call.participant_id}")
            self._calls[call.call_no] = task
            task.add_done_callback(partial(self._call_over, call.call_no))

    def _perform(self, effect: core.Effect, cause: core.Event) -> None:
        match effect:
            case core.Cancel(call_no=call_no):
                running = self._calls.get(call_no)
                if running is not None:
                    running.cancel()
            case core.Publish():
                self._spawn(self._publish(effect))
            case core.SetTimer(at=at):
                self._set_timer(at)
            case core.Announce(what=what):
                self.reporter.announce(what)
            case core.Ignored():
                self.ignored += 1
            case core.Await(stage=stage):
                self._await(stage, effect)
            case core.Reject(problem=problem):
                self.answers.reject(cause, Refused(problem))
            case core.Finish():
                self._finish(effect)
            case core.Record() | core.Call():
                raise AssertionError("records and calls are _step's")

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def _call(self, call: core.Call) -> None:
        now = self._around.clock
        whom = self.transaction.course.participants[call.participant_id]
        if call.phase in OPENING:
            # A shim that was replaced has another address, and its server may be paused by the one that is gone.
            whom = self._around.present(whom)

        def moved(progress: Progress) -> None:
            self.reporter.progress(call.phase, call.participant_id, progress)
            self.post(core.ProgressReported(now(), call.call_no, progress))

        def closed() -> None:
            self.meter.closed(call.participant_id, now())
            self.post(core.ProgressReported(now(), call.call_no, Progress()))

        before, after = _PLACES[call.phase]
        failpoints.reach(before, call.participant_id)
        try:
            proof, reply = await self._around.participants.perform(whom, call, moved, closed)
        except Misanswered as error:
            self.post(core.Misanswered(now(), call.call_no, error.problem))
        except Refused as error:
            self.post(core.RefusedBy(now(), call.call_no, error.problem))
        except SafepointError as error:
            self.post(core.NoAnswer(now(), call.call_no, error.problem))
        else:
            failpoints.reach(after, call.participant_id)
            if isinstance(proof, Opened):
                self.meter.opened(call.participant_id, now(), proof.closed_for_s)
                for text in proof.warnings:
                    self.reporter.warn(text, call.participant_id)
            else:
                self.replies[call.participant_id] = reply
            self.post(core.Replied(now(), call.call_no, proof))

    def _call_over(self, call_no: int, _: asyncio.Task[None]) -> None:
        self._calls.pop(call_no, None)
        if self.done.is_set() and not self._closing:
            self.post(core.Tick(self._around.clock()))  # so that the loop looks whether anything is left

    async def _renew_leases(self, soon: bool) -> None:
        # Soon: leases have run on while there was no coordinator, and a restore that was found is not resumed before.
        ttl_s = self.operation.options.lease_ttl_s
        while True:
            await asyncio.sleep(min(RENEW_SOON_S, ttl_s / 3) if soon else ttl_s / 3)
            soon = bool(self.transaction.unheard)
            closed = set(self.transaction.leases())
            for participant in self.transaction.topology.participants:
                if participant.participant_id in closed:
                    self._spawn(self._renew(participant, ttl_s))  # nobody's renewal waits for somebody else's

    async def _renew(self, whom: Participant, ttl_s: float) -> None:
        now = self._around.clock
        sent_at = now()
        try:
            left_s = await self._around.participants.renew(whom, self.operation.operation_id, ttl_s, ttl_s / 3)
        except SafepointError as error:
            if isinstance(error, Refused) and error.reason not in _NO_VERDICT:
                self.post(core.LeaseLost(now(), whom.participant_id, error.problem))
        else:
            self.post(core.LeaseRenewed(now(), whom.participant_id, sent_at, left_s))

    # ---- publishing -------------------------------------------------------------------------------------------------

    async def _publish(self, effect: core.Publish) -> None:
        try:
            self.manifest = await asyncio.to_thread(self._around.publish, self, effect)
        except SafepointError as error:
            self.manifest = await self._ask_the_disk()
            if self.manifest is None:
                self.post(core.PublishFailed(self._around.clock(), error.problem))
                return
        self.post(core.Published(self._around.clock()))

    async def _ask_the_disk(self) -> manifest_pb2.SnapshotManifest | None:
        # A failed fsync leaves a manifest that is there, or not: neither may be guessed. Leases lapse meanwhile.
        while True:
            try:
                return await asyncio.to_thread(self._around.published_manifest, self)
            except SafepointError as error:
                log.warning("cannot tell whether %s is published: %s", self.operation.snapshot_id, error)
                await asyncio.sleep(DISK_RETRY_S)

    # ---- standing still and ending ----------------------------------------------------------------------------------

    def _await(self, stage: Stage, effect: core.Await) -> None:
        if effect.primary is not None:
            self.answers.failed = self.reporter.failed(effect.primary, effect.secondary)
            self.answers.stands_failed(Refused(effect.primary))
            return
        if stage is Stage.PUBLISHED and self.manifest is not None:
            self.answers.saved = self.reporter.saved(self.manifest, 0.0, ())
        self.answers.reached(stage)

    def _finish(self, finish: core.Finish) -> None:
        if self.done.is_set():
            return
        failpoints.reach("driver.before_finish")
        self.ended_at, self.finish = self._around.clock(), finish
        if finish.outcome is not Outcome.SUCCEEDED:
            primary = finish.primary or Problem(Reason.ABORTED, "It was aborted.")
            self.answers.failed = self.reporter.failed(primary, finish.secondary)
            self.answers.fail_all(Refused(primary))
        else:
            pause_s = self.meter.seconds()
            self.answers.resumed = self.reporter.resumed(pause_s, self.transaction.acknowledged, finish.unconfirmed)
            told = self.operation.trainer_driven and self.answers.saved is not None
            if finish.published and self.manifest is not None and not told:
                self.answers.saved = self.reporter.saved(self.manifest, pause_s, finish.unconfirmed)
            self.answers.succeed_all()
        self.done.set()
        self._around.ended(self)

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._timer = asyncio.get_running_loop().call_at(at, self._tick, at)

    def _tick(self, at: float) -> None:
        self._timer = None
        # A loop may fire early by the resolution of its clock: the core would take that for no time at all, and wait.
        self.post(core.Tick(max(self._around.clock(), at)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task


def _log_failure(writing: asyncio.Future[None]) -> None:
    if not writing.cancelled() and writing.exception() is not None:
        log.warning("a record that the operation can do without was not written: %s", writing.exception())
