"""One operation from beginning to end: events in, ordered effects out.

PURE. The one rule: a snapshot is published, or everybody who may have heard of the operation is told to open, and never
the one after the other was decided. Events, effects and the driver's loop are in `events`; the order of phases in
`phases`. Nothing here reads a clock or waits, and nothing raises for what a participant did, only for a misuse by us.

    IDLE -> PREPARING -> [PREPARED] -> COMMITTING -> [COMMITTED] -> CONFIRMING -> PUBLISHING -> [PUBLISHED] -> RESUMING
    IDLE -> RESTORING -> [RESTORED] -> RESUMING            stages in brackets wait for the trainer's next call
            RESTORING, RESTORED -> FAILED_PAUSED -> ABORTING
    every stage before PUBLISHING -> ABORTING              RESUMING, ABORTING -> ENDED
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from coordinator.protocol import records, sentences
from coordinator.protocol.calls import CLOSING
from coordinator.protocol.course import Course, warned
from coordinator.protocol.events import (
    AbortRequested,
    Begin,
    Call,
    CommitRequested,
    Effect,
    Event,
    Finish,
    IncarnationChanged,
    LeaseLost,
    LeaseRenewed,
    LossExplained,
    Misanswered,
    NoAnswer,
    ParticipantLost,
    ProgressReported,
    Published,
    PublishFailed,
    PublishRequested,
    Record,
    RecordFailed,
    RecordKind,
    Recover,
    RefusedBy,
    Reject,
    Replied,
    Request,
    ResumeRequested,
    SetTimer,
    Slept,
    Tick,
    TrainerHeard,
)
from coordinator.protocol.legality import BEFORE_PUBLISH, CALLING, OPENING_STAGES, OWNED, Standing, judge
from coordinator.protocol.operation import Limits, Operation, Outcome, Stage
from coordinator.protocol.phase_run import Evidence
from coordinator.protocol.phases import RESTORE, SAVE, too_short, waves
from coordinator.protocol.topology import Topology, refusal, validate
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import OperationKind, Phase


class Transaction:
    """One save or restore. Step it from one task; look at its properties between steps.

    After Finish it goes on telling whoever has not confirmed that it is open, until `settled`; a driver may stop stepping
    it then, and leave them to their leases.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._course: Course | None = None
        self._recovered: records.Recovered | None = None
        self._timer_at: float | None = None
        self._fresh: list[int] = []  # calls of the last step: not made if its record fails

    @classmethod
    def from_records(
        cls, journal: Sequence[Record], *, published: bool, coordinator_epoch: int, limits: Limits | None = None
    ) -> Transaction:
        """An operation as a coordinator finds it when it starts again; step Recover next.

        `published`: whether the snapshot's manifest is there and verifies; for a restore it means nothing. Raises
        ValueError when the first record is not BEGUN.
        """
        found = records.read(journal)
        self = cls(limits)
        self._recovered = found
        operation = replace(found.operation, coordinator_epoch=coordinator_epoch)
        course = self._course = Course(operation, found.topology, self._limits)
        course.published = published and operation.kind == OperationKind.SAVE
        # Whom the first record names may have heard: which of them did is not recorded, to keep the pause short.
        closing = _program(operation)[0]
        course.evidence.attempted.update(p for wave in waves(closing, found.topology.participants) for p in wave)
        return self

    # ---- what others may look at ------------------------------------------------------------------------------------

    @property
    def course(self) -> Course:
        """What it is about. Raises RuntimeError before Begin."""
        if self._course is None:
            raise RuntimeError("no operation has begun")
        return self._course

    @property
    def operation(self) -> Operation:
        """What it was asked to do. Raises RuntimeError before Begin."""
        return self.course.operation

    @property
    def topology(self) -> Topology:
        """Who takes part, fixed at Begin; nobody before."""
        return self._course.topology if self._course else Topology(())

    @property
    def stage(self) -> Stage:
        """Where it stands."""
        return self._course.stage if self._course else Stage.IDLE

    @property
    def phase(self) -> Phase:
        """The phase it is in, or ended in."""
        return self._course.phase if self._course else Phase.DISCOVER

    @property
    def outcome(self) -> Outcome:
        """How it stands, as the contract names it."""
        if self.finish is not None:
            return self.finish.outcome
        if self.stage in (Stage.PUBLISHED, Stage.RESTORED):
            return Outcome.PAUSED
        return Outcome.FAILED_PAUSED if self.stage == Stage.FAILED_PAUSED else Outcome.RUNNING

    @property
    def finish(self) -> Finish | None:
        """How it ended; None while it has not."""
        return self._course.finish if self._course else None

    @property
    def published(self) -> bool:
        """Whether the commit point is passed."""
        return self._course is not None and self._course.published

    @property
    def primary(self) -> Problem | None:
        """The one cause why it did not end well."""
        return self._course.primary if self._course else None

    @property
    def secondary(self) -> tuple[Problem, ...]:
        """What else went wrong."""
        return self._course.secondary if self._course else ()

    @property
    def evidence(self) -> Evidence:
        """What participants have shown so far."""
        return self._course.evidence if self._course else Evidence()

    @property
    def acknowledged(self) -> tuple[ParticipantId, ...]:
        """Who has said that it is open again."""
        opening = self._course.opening if self._course else None
        return tuple(sorted(opening.acknowledged)) if opening else ()

    @property
    def unconfirmed(self) -> tuple[ParticipantId, ...]:
        """Who was, or may have been, paused by it and has not said that it is open again."""
        opening = self._course.opening if self._course else None
        return opening.unconfirmed if opening else tuple(sorted(self.evidence.attempted))

    @property
    def settled(self) -> bool:
        """Whether it has ended and nobody is to be told anything any more."""
        return self.stage == Stage.ENDED and not self.unconfirmed

    @property
    def closed(self) -> frozenset[ParticipantId]:
        """Who may be closed by it still; those that are known to be gone or open are not among them."""
        return frozenset(self._course.closed) if self._course is not None else frozenset()

    def pending(self) -> tuple[ParticipantId, ...]:
        """Who has not shown the proof of the phase; when opening, who has not opened."""
        run = self._course.run if self._course else None
        if run is not None and self.stage in CALLING:
            return run.pending
        return self.unconfirmed if self.stage in OPENING_STAGES else ()

    def why_waiting(self, now: float) -> str:
        """Who is waited for and why, as one sentence; empty when nobody is."""
        course = self._course
        if course is None:
            return ""
        waited = now - course.phase_began
        if course.run is not None and course.stage in CALLING:
            return sentences.waiting(course.phase, course.run.wave, course.evidence.progress, waited)
        if course.stage in OPENING_STAGES and self.unconfirmed:
            return sentences.waiting(course.phase, self.unconfirmed, {}, waited)
        if course.resume_wanted and course.stage == Stage.RESTORED:
            return sentences.unheard(sorted(course.unheard), waited)
        return sentences.standing(course.stage, course.phase, waited, course.closed)

    def phase_time(self, now: float) -> tuple[float, float | None] | None:
        """Seconds since the phase that runs began, and the longest that it may take; None while none runs."""
        course = self._course
        if course is None or course.stage not in CALLING | OPENING_STAGES:
            return None
        budget = course.deadline - course.phase_began if course.stage in CALLING else self._limits.reserve_s
        return now - course.phase_began, budget

    def leases(self) -> tuple[ParticipantId, ...]:
        """Whose lease the driver must renew now: those known to be closed by this operation.

        Nobody once opening has begun, nor when publishing takes longer than the operation may: then leases must be able
        to lapse, whatever the storage does.
        """
        course = self._course
        if course is None:
            return ()
        evidence, stage = course.evidence, course.stage
        if stage in (Stage.FAILED_PAUSED, Stage.RESTORED):
            return tuple(sorted(course.closed))
        elif stage in CALLING | OWNED or (stage == Stage.PUBLISHING and not course.late_warned):
            closed = {*evidence.prepared, *evidence.restored}
            if course.phase in CLOSING:
                closed.update(evidence.progress)  # it says how far it is, so the call has reached it and its lease runs
        else:
            return ()
        return tuple(sorted(closed & course.closed))

    @property
    def unheard(self) -> frozenset[ParticipantId]:
        """Who has to renew its lease before a restore that this coordinator has found may be resumed: ask them soon."""
        return frozenset(self._course.unheard) if self._course is not None else frozenset()

    def publish_until(self) -> float:
        """Until when every freeze is known to hold: look at it right before the manifest is linked."""
        return self.evidence.holds_until()

    # ---- events in, effects out -------------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """What is to be done now that `event` has happened, in order. Raises RuntimeError for a misuse by the driver."""
        out = self._handle(event)
        self._fresh = [effect.call_no for effect in out if isinstance(effect, Call)]
        if isinstance(event, Tick) and self._timer_at is not None and event.now >= self._timer_at:
            self._timer_at = None  # it has gone off
        at = self._course.next_at(event.now) if self._course else None
        if at != self._timer_at:
            self._timer_at = at
            out.append(SetTimer(at))
        return out

    def _handle(self, event: Event) -> list[Effect]:
        if isinstance(event, Begin):
            return self._begin(event)
        course, now = self._course, event.now
        if course is None:
            unknown = Problem(Reason.UNKNOWN_OPERATION, "No operation has begun.")
            return [Reject(unknown)] if isinstance(event, Request) else []
        match event:
            case Recover():
                return self._recover(course, now)
            case Replied() | RefusedBy() | NoAnswer() | Misanswered():
                return course.call_ended(event)
            case ProgressReported():
                course.progressed(event)
            case ParticipantLost():
                return course.gone(event.participant_id, event.problem, now, event.explained_within_s)
            case LossExplained():
                return course.explained(event.participant_id, event.how, now)
            case IncarnationChanged():
                return course.restarted(event.participant_id, event.incarnation_id, now)
            case LeaseRenewed():
                return course.lease_renewed(event)
            case LeaseLost():
                return course.lease_lost(event.participant_id, event.problem, now)
            case Slept():
                course.slept = max(course.slept, event, key=lambda each: each.seconds) if course.slept else event
                return []
            case RecordFailed():
                # Nothing after the record was performed, timers included: nobody has heard of what it was to cover.
                unheard = course.calls.forget(self._fresh)
                self._timer_at = math.nan  # equal to nothing, so that the timer is set again
                if course.stage == Stage.RESUMING:
                    return course.not_opened(course.mine(event.problem), now)
                course.evidence.attempted.difference_update(unheard)
                before = course.stage in BEFORE_PUBLISH or course.stage == Stage.PUBLISHING
                return course.fail(course.mine(event.problem), now) if before else []
            case Published():
                return course.is_published(now)
            case PublishFailed():
                if course.published:
                    raise RuntimeError("the snapshot was published already")
                return course.fail(course.mine(event.problem), now) if course.stage == Stage.PUBLISHING else []
            case Tick():
                return course.tick(now)
            case TrainerHeard():
                course.heard(now)
            case AbortRequested() | CommitRequested() | PublishRequested() | ResumeRequested():
                return self._request(course, event)
        return []

    def _begin(self, event: Begin) -> list[Effect]:
        if self._course is not None:
            raise RuntimeError("a transaction begins once")
        operation, topology = event.operation, event.topology
        course = self._course = Course(operation, topology, self._limits)
        course.deadline = event.deadline
        findings = validate(topology, operation.options.quiesce_mode)
        problem = refusal(topology, findings, operation.options.expected_fingerprint)
        if problem is None:
            problem = too_short(operation, topology.participants, event.deadline - event.now)
        if problem is not None:
            # Nothing was begun, so nothing is recorded: the same operation_id may come again when this is mended.
            course.stage, course.primary = Stage.ENDED, course.mine(problem)
            course.finish = Finish(Outcome.ABORTED, course.primary)
            return [course.finish]
        return [
            records.begun(operation, topology),
            *(warned(finding.message, finding.participant_id) for finding in findings),
            *course.start(_program(operation)[0], event.now),
        ]

    def _recover(self, course: Course, now: float) -> list[Effect]:
        found = self._recovered
        if found is None or course.stage != Stage.IDLE:
            raise RuntimeError("only what from_records made recovers, and once")
        course.phase_began = now
        if found.finish is not None:
            course.stage, course.finish, course.primary = Stage.ENDED, found.finish, found.finish.primary
            course.evidence.attempted.clear()
            return [found.finish]
        if course.published:
            return course.open(Phase.RESUME, now)
        course.phase = _program(found.operation)[0]
        text = f"The coordinator stopped during the {found.operation.kind.name.lower()} (last record: {found.last})."
        opens = found.operation.kind == OperationKind.SAVE or found.last == RecordKind.ABORTING
        cause = found.primary or course.mine(Problem(Reason.COORDINATOR_RESTARTED, text))
        if opens:
            return course.abort(cause, now)
        loaded = found.last == RecordKind.RESTORED
        if found.last == RecordKind.RESUMING or (loaded and found.operation.resume_when_done):
            return course.open(Phase.RESUME, now, decided=True)
        if not loaded:
            return course.fail(cause, now)
        course.unheard = set(course.evidence.attempted)
        return course.stand(Stage.RESTORED, now)

    def _request(self, course: Course, event: Request) -> list[Effect]:
        now = event.now
        standing = judge(event, course.stage, self.outcome, course.phase, course.operation, course.primary)
        if isinstance(standing, Problem):
            return [Reject(standing)]
        course.heard(now)
        if standing == Standing.REPEATED:
            return []
        match event:
            case ResumeRequested():
                return course.resume(now)
            case CommitRequested() | PublishRequested():
                course.deadline = event.deadline
                return course.start(Phase.COMMIT if isinstance(event, CommitRequested) else Phase.CONFIRM, now)
            case AbortRequested():
                if course.stage == Stage.PUBLISHING:
                    course.abort_wanted = True  # only the disk knows now; whatever it says, everybody opens
                    return []
                text = f"Aborted: {event.cause.rstrip('.')}." if event.cause else "Aborted by request."
                return course.abort(course.mine(Problem(Reason.ABORTED, text)), now)


def _program(operation: Operation) -> tuple[Phase, ...]:
    return SAVE if operation.kind == OperationKind.SAVE else RESTORE
