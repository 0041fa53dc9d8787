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

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from coordinator.protocol import proving, records, sentences
from coordinator.protocol.calls import CLOSING, OPENING, CallBook, Running
from coordinator.protocol.events import (
    AbortRequested,
    Announce,
    Await,
    Begin,
    Call,
    CommitRequested,
    Effect,
    Event,
    Finish,
    Ignored,
    IncarnationChanged,
    LeaseLost,
    LeaseRenewed,
    Misanswered,
    NoAnswer,
    ParticipantDone,
    ParticipantLost,
    PhaseFinished,
    PhaseStarted,
    ProgressReported,
    Publish,
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
    Tick,
    TrainerHeard,
    Verdict,
    Warned,
)
from coordinator.protocol.legality import BEFORE_PUBLISH, CALLING, OPENING_STAGES, OWNED, Standing, judge
from coordinator.protocol.opening import Opening
from coordinator.protocol.operation import Limits, Operation, Outcome, Stage
from coordinator.protocol.phase_run import Evidence, PhaseRun
from coordinator.protocol.phases import RESTORE, SAVE, STAGES, STOPS, waves
from coordinator.protocol.proofs import Opened
from coordinator.protocol.topology import Topology, fingerprint, problem_from_findings, validate
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import OperationKind, Phase, Role


class Transaction:
    """One save or restore. Step it from one task; look at its properties between steps.

    After Finish it goes on telling whoever has not confirmed that it is open, until `settled`; a driver may stop stepping
    it then, and leave them to their leases.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.stage = Stage.IDLE
        self.phase = Phase.DISCOVER  # the phase it is in, or ended in
        self.primary: Problem | None = None
        self.secondary: tuple[Problem, ...] = ()
        self.finish: Finish | None = None
        self.published = False
        self.evidence = Evidence()
        self.lost: dict[ParticipantId, Problem] = {}
        self.topology = Topology(())
        self._limits = limits or Limits()
        self._calls = CallBook(self._limits)
        self._operation: Operation | None = None
        self._recovered: records.Recovered | None = None
        self._run: PhaseRun | None = None
        self._opening: Opening | None = None
        self._phase_began = 0.0
        self._deadline = 0.0
        self._owner_until = 0.0
        self._late_warned = False
        self._abort_wanted = False
        self._opened_alone: set[ParticipantId] = set()
        self._timer_at: float | None = None
        self._unheld: Problem | None = None  # the cause of a failed restore without the advice to abort it
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
        self.published = published and found.operation.kind == OperationKind.SAVE
        self._operation = replace(found.operation, coordinator_epoch=coordinator_epoch)
        self.topology = found.topology
        closing = SAVE[0] if found.operation.kind == OperationKind.SAVE else RESTORE[0]
        # Whom the first record names may have heard: which of them did is not recorded, to keep the pause short.
        self.evidence.attempted.update(p for wave in waves(closing, found.topology.participants) for p in wave)
        return self

    # ---- what others may look at ------------------------------------------------------------------------------------

    @property
    def operation(self) -> Operation:
        """What it was asked to do. Raises RuntimeError before Begin."""
        if self._operation is None:
            raise RuntimeError("no operation has begun")
        return self._operation

    @property
    def outcome(self) -> Outcome:
        """How it stands."""
        if self.finish is not None:
            return self.finish.outcome
        if self.stage in (Stage.PUBLISHED, Stage.RESTORED):
            return Outcome.PAUSED
        return Outcome.FAILED_PAUSED if self.stage == Stage.FAILED_PAUSED else Outcome.RUNNING

    @property
    def acknowledged(self) -> tuple[ParticipantId, ...]:
        """Who has said that it is open again."""
        return tuple(sorted(self._opening.acknowledged)) if self._opening else ()

    @property
    def unconfirmed(self) -> tuple[ParticipantId, ...]:
        """Who was, or may have been, paused by it and has not said that it is open again."""
        return self._opening.unconfirmed if self._opening else tuple(sorted(self.evidence.attempted))

    @property
    def settled(self) -> bool:
        """Whether it has ended and nobody is to be told anything any more."""
        return self.stage == Stage.ENDED and not self.unconfirmed

    def pending(self) -> tuple[ParticipantId, ...]:
        """Who has not shown the proof of the phase; when opening, who has not opened."""
        if self._run is not None and self.stage in CALLING:
            return self._run.pending
        return self.unconfirmed if self.stage in OPENING_STAGES else ()

    def why_waiting(self, now: float) -> str:
        """Who is waited for and why, as one sentence; empty when nobody is."""
        waited = now - self._phase_began
        if self._run is not None and self.stage in CALLING:
            return sentences.waiting(self.phase, self._run.wave, self.evidence.progress, waited)
        if self.stage in OPENING_STAGES and self.unconfirmed:
            return sentences.waiting(self.phase, self.unconfirmed, {}, waited)
        return sentences.standing(self.stage, self.phase, waited)

    def leases(self) -> tuple[ParticipantId, ...]:
        """Whose lease the driver must renew now: those known to be closed by this operation.

        Nobody once opening has begun, nor when publishing takes longer than the operation may: then leases must be able
        to lapse, whatever the storage does.
        """
        evidence = self.evidence
        if self.stage in (Stage.FAILED_PAUSED, Stage.RESTORED):
            closed = set(evidence.attempted)
        elif self.stage in CALLING | OWNED or (self.stage == Stage.PUBLISHING and not self._late_warned):
            closed = {*evidence.prepared, *evidence.restored}
            if self.phase in CLOSING:
                closed.update(evidence.progress)  # it says how far it is, so the call has reached it and its lease runs
        else:
            return ()
        return tuple(sorted(closed - self.lost.keys() - self._opened_alone))

    def publish_until(self) -> float:
        """Until when every freeze is known to hold: look at it right before the manifest is linked."""
        return min(self.evidence.lease_until.values(), default=0.0)

    # ---- events in, effects out -------------------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """What is to be done now that `event` has happened, in order. Raises RuntimeError for a misuse by the driver."""
        out = self._handle(event)
        self._fresh = [effect.call_no for effect in out if isinstance(effect, Call)]
        if isinstance(event, Tick) and self._timer_at is not None and event.now >= self._timer_at:
            self._timer_at = None  # it has gone off
        at = self._next_at(event.now)
        if at != self._timer_at:
            self._timer_at = at
            out.append(SetTimer(at))
        return out

    def _handle(self, event: Event) -> list[Effect]:
        now = event.now
        match event:
            case Begin():
                return self._begin(event)
            case Recover():
                return self._recover(now)
            case Replied() | RefusedBy() | NoAnswer() | Misanswered():
                return self._call_ended(event)
            case ProgressReported():
                running = self._calls.get(event.call_no)
                if running is not None and running.call.phase not in OPENING:
                    self.evidence.progress[running.call.participant_id] = event.progress
                return []
            case ParticipantLost():
                return self._gone(event.participant_id, event.problem, now)
            case IncarnationChanged():
                known = {p.participant_id: p for p in self.topology.participants}.get(event.participant_id)
                if known is None or known.incarnation_id == event.incarnation_id:
                    return []
                problem = proving.incarnation_changed(self.phase, known, event.incarnation_id)
                return self._gone(event.participant_id, problem, now)
            case LeaseRenewed():
                lease_until = self.evidence.lease_until
                if event.participant_id in lease_until:
                    until = event.sent_at + event.lease_remaining_s
                    lease_until[event.participant_id] = max(until, lease_until[event.participant_id])
                return []
            case LeaseLost():
                return self._lease_lost(event.participant_id, event.problem, now)
            case RecordFailed():
                # Nothing after the record was performed: nobody has heard of what it was to cover.
                self.evidence.attempted.difference_update(self._calls.forget(self._fresh))
                self._timer_at = None
                before = self.stage in BEFORE_PUBLISH or self.stage == Stage.PUBLISHING
                return self._fail(self._mine(event.problem), now) if before else []
            case Published():
                return self._is_published(now)
            case PublishFailed():
                if self.published:
                    raise RuntimeError("the snapshot was published already")
                return self._fail(self._mine(event.problem), now) if self.stage == Stage.PUBLISHING else []
            case TrainerHeard():
                if self._operation is not None:
                    self._owner_until = now + self._operation.options.lease_ttl_s
                return []
            case Tick():
                return self._tick(now)
            case AbortRequested() | CommitRequested() | PublishRequested() | ResumeRequested():
                return self._request(event)

    def _next_at(self, now: float) -> float | None:
        if self._run is not None and self.stage in CALLING:
            return self._run.next_at()
        if self.stage in OWNED:
            return self._owner_until
        if self.stage == Stage.PUBLISHING:
            return None if self._late_warned else self._deadline
        return self._opening.next_at(now) if self._opening is not None else None

    def _tick(self, now: float) -> list[Effect]:
        if self._opening is not None:
            return self._advance(now)
        if self._run is not None and self.stage in CALLING:
            return self._fail(self._run.too_late(now), now) if now >= self._deadline else self._run.repeat_due(now)
        if self.stage == Stage.PUBLISHING and now >= self._deadline and not self._late_warned:
            self._late_warned = True
            return [_warned("The deadline passed while the snapshot is being published; leases are left to lapse.")]
        return self._owner_is_silent(now) if self.stage in OWNED and now >= self._owner_until else []

    # ---- beginning --------------------------------------------------------------------------------------------------

    def _begin(self, event: Begin) -> list[Effect]:
        if self.stage != Stage.IDLE or self._recovered is not None:
            raise RuntimeError("a transaction begins once")
        self._operation, self.topology, self._deadline = event.operation, event.topology, event.deadline
        options, participants = event.operation.options, event.topology.participants
        findings = validate(event.topology, options.quiesce_mode)
        problem = problem_from_findings(findings)
        if problem is None and options.expected_fingerprint not in ("", fingerprint(participants)):
            problem = Problem(
                Reason.FINGERPRINT_MISMATCH,
                f"The topology is not the expected one: its fingerprint is {fingerprint(participants)}.",
                "Look at GetTopology, and expect what it says if that is what you want.",
            )
        if problem is None and event.now >= event.deadline:
            problem = Problem(Reason.DEADLINE_TOO_SHORT, "No time was left to begin.")
        if problem is not None:
            # Nothing was begun, so nothing is recorded: the same operation_id may come again when this is mended.
            self.stage, self.primary = Stage.ENDED, self._mine(problem)
            self.finish = Finish(Outcome.ABORTED, self.primary)
            return [self.finish]
        first = SAVE[0] if event.operation.kind == OperationKind.SAVE else RESTORE[0]
        return [
            records.begun(event.operation, event.topology),
            *(_warned(finding.message, finding.participant_id) for finding in findings),
            *self._start(first, event.now),
        ]

    def _recover(self, now: float) -> list[Effect]:
        found = self._recovered
        if found is None or self.stage != Stage.IDLE:
            raise RuntimeError("only what from_records made recovers, and once")
        self._phase_began = now
        if found.finish is not None:
            self.stage, self.finish, self.primary = Stage.ENDED, found.finish, found.finish.primary
            self.evidence.attempted.clear()
            return [found.finish]
        if self.published:
            return self._open(Phase.RESUME, now)
        save = found.operation.kind == OperationKind.SAVE
        self.phase = SAVE[0] if save else RESTORE[0]
        text = f"The coordinator stopped during the {found.operation.kind.name.lower()} (last record: {found.last})."
        cause = found.primary or self._mine(Problem(Reason.ABORTED, text))
        if save or found.last == RecordKind.ABORTING:
            return self._abort(cause, now)
        loaded = found.last == RecordKind.RESTORED
        if found.last == RecordKind.RESUMING or (loaded and found.operation.resume_when_done):
            return self._open(Phase.RESUME, now)
        return self._stand(Stage.RESTORED, now) if loaded else self._fail(cause, now)

    # ---- phases -----------------------------------------------------------------------------------------------------

    def _start(self, phase: Phase, now: float) -> list[Effect]:
        self.stage, self.phase, self._phase_began = STAGES[phase], phase, now
        self._run = PhaseRun(
            phase, self.operation, self.topology, self.evidence, self._calls, self._limits, self._deadline, now
        )
        return [self._run.announce(), *self._go_on(self._run, now)]

    def _go_on(self, run: PhaseRun, now: float) -> list[Effect]:
        if run.done:
            return [Announce(PhaseFinished(run.phase, now - run.began)), *self._after(run.phase, now)]
        calls = run.advance(now)
        return self._fail(run.too_late(now), now) if calls is None else calls

    def _after(self, phase: Phase, now: float) -> list[Effect]:
        save = self.operation.kind == OperationKind.SAVE
        stops = self.operation.trainer_driven if save else not self.operation.resume_when_done
        out: list[Effect] = [] if save else [records.reached(RecordKind.RESTORED, self.operation)]
        if phase in STOPS and stops and not self._abort_wanted:
            return [*out, *self._stand(STOPS[phase], now)]
        program = SAVE if save else RESTORE
        following = program[program.index(phase) + 1]
        if following == Phase.PUBLISH:
            return self._publish(now)
        return [*out, *(self._open(following, now) if following in OPENING else self._start(following, now))]

    def _stand(self, stage: Stage, now: float) -> list[Effect]:
        self.stage = stage
        self._owner_until = now + self.operation.options.lease_ttl_s
        return [Await(stage)]

    def _call_ended(self, event: Replied | RefusedBy | NoAnswer | Misanswered) -> list[Effect]:
        now, running = event.now, self._calls.end(event.call_no)
        if not isinstance(running, Running):
            out: list[Effect] = [Ignored(event.call_no, running)]
            if isinstance(event, Replied) and self._opening is not None:
                closed = self._calls.take_closing(event.call_no)
                if closed is not None:  # it closed after all, maybe after we told it to open
                    out += self._opening.again(closed, now)
            return out
        if running.call.phase in OPENING:
            return self._opening_ended(event, running)
        run = self._run
        if run is None or self.stage != STAGES[running.call.phase]:
            return [Ignored(event.call_no, Verdict.STALE)]  # of a restore that has failed already
        participant_id = running.call.participant_id
        if isinstance(event, Replied):
            participant = next(p for p in self.topology.participants if p.participant_id == participant_id)
            problem = proving.check(run.phase, event.proof, participant, self.operation, self.evidence.prepared)
            if problem is not None:
                return self._fail(self._mine(problem), now)
            return [*run.accept(running, event.proof), *self._go_on(run, now)]
        if isinstance(event, NoAnswer):
            if now >= self._deadline:
                return self._fail(run.too_late(now), now)
            if run.repeats(running, now):
                return []
        return self._fail(self._mine(event.problem, participant_id), now)

    # ---- publishing -------------------------------------------------------------------------------------------------

    def _publish(self, now: float) -> list[Effect]:
        lapsed = sorted(p for p, until in self.evidence.lease_until.items() if until <= now)
        if lapsed:
            text = f"The lease of {sentences.names(lapsed)} had lapsed when everybody had confirmed."
            return self._fail(self._mine(Problem(Reason.LEASE_LAPSED, text), lapsed[0]), now)
        self.stage, self.phase, self._phase_began = STAGES[Phase.PUBLISH], Phase.PUBLISH, now
        committed = MappingProxyType(dict(sorted(self.evidence.committed.items())))
        return [
            records.publishing(self.operation),
            Announce(PhaseStarted(Phase.PUBLISH, ())),
            Publish(self.operation.snapshot_id, committed, self.publish_until()),
        ]

    def _is_published(self, now: float) -> list[Effect]:
        if self.published:
            return []
        if self.stage != Stage.PUBLISHING:
            raise RuntimeError(f"published while {self.stage}: nobody had asked for it")
        self.published = True
        out: list[Effect] = [Announce(PhaseFinished(Phase.PUBLISH, now - self._phase_began))]
        if self._abort_wanted:
            out.append(_warned("Abort came too late: the snapshot is published. Everybody resumes."))
        return [*out, *self._after(Phase.PUBLISH, now)]

    # ---- failing ----------------------------------------------------------------------------------------------------

    def _fail(self, problem: Problem, now: float) -> list[Effect]:
        """Give up at once: a save opens everybody, a restore leaves everybody paused."""
        if self.operation.kind == OperationKind.SAVE:
            return self._abort(problem, now)
        step = "Everybody stays paused: Abort opens them without the snapshot; then restore with a new operation_id."
        held = problem if step in problem.advice else replace(problem, next_step=f"{problem.advice} {step}")
        self.stage, self.primary, self._unheld = Stage.FAILED_PAUSED, held, problem
        if self.evidence.attempted <= self.lost.keys():
            return self._abort(held, now)  # nobody is left to stay paused
        return [records.failing(RecordKind.FAILED_PAUSED, self.operation, held), Await(Stage.FAILED_PAUSED, held)]

    def _abort(self, problem: Problem, now: float) -> list[Effect]:
        # Once it opens, the advice on how to open it is no advice any more.
        self.primary = self._unheld or self.primary or problem
        return self._open(Phase.ABORT, now)

    def _gone(self, participant_id: ParticipantId, problem: Problem, now: float) -> list[Effect]:
        participant = next((p for p in self.topology.participants if p.participant_id == participant_id), None)
        if participant is None or participant_id in self.lost or self.stage in (Stage.IDLE, Stage.ENDED):
            return []
        problem = self._mine(problem, participant_id)
        if participant.role == Role.AUXILIARY_MODEL:
            return [_warned(f"It is gone: {problem.message}", participant_id)]
        self.lost[participant_id] = problem
        if self.stage in BEFORE_PUBLISH:
            return self._fail(problem, now)
        if self.stage == Stage.FAILED_PAUSED:
            self._add(problem)
            return self._abort(problem, now) if self.evidence.attempted <= self.lost.keys() else []
        if self.stage in OPENING_STAGES:
            self._add(problem)
            return self._advance(now)
        return [_warned(f"It is gone after it had confirmed; the snapshot is valid. {problem.message}", participant_id)]

    def _lease_lost(self, participant_id: ParticipantId, problem: Problem, now: float) -> list[Effect]:
        held = self.stage in BEFORE_PUBLISH or self.stage in (Stage.FAILED_PAUSED, Stage.PUBLISHING, Stage.PUBLISHED)
        if not held or participant_id not in self.evidence.attempted - self._opened_alone:
            return []
        self._opened_alone.add(participant_id)
        problem = self._mine(problem, participant_id)
        if self.stage in BEFORE_PUBLISH:
            return self._fail(problem, now)
        if self.stage == Stage.FAILED_PAUSED:
            self._add(problem)
            return []
        return [_warned(f"It opened by itself after it had confirmed. {problem.message}", participant_id)]

    def _owner_is_silent(self, now: float) -> list[Effect]:
        text = f"The trainer has called nothing for {self.operation.options.lease_ttl_s:.0f} s"
        if self.stage == Stage.PUBLISHED:
            return [_warned(f"{text}: everybody resumes, the snapshot is published."), *self._open(Phase.RESUME, now)]
        step = "Call the next phase, or repeat the last one, within the lease; or ask for a longer lease."
        return self._fail(self._mine(Problem(Reason.LEASE_LAPSED, f"{text} while everybody was paused.", step)), now)

    # ---- opening ----------------------------------------------------------------------------------------------------

    def _open(self, phase: Phase, now: float) -> list[Effect]:
        out: list[Effect] = [*self._calls.cancel_all()]
        # A restore that has begun to open must never be taken for one that waits. A save needs no such record: what its
        # manifest does not say is presumed aborted. So its record comes after the calls, and keeps nobody waiting.
        first = phase == Phase.RESUME and self.operation.kind == OperationKind.RESTORE
        out += [self._decided(phase)] if first else []
        self.stage, self.phase, self._phase_began = STAGES[phase], phase, now
        told = [p for p in self.topology.participants if p.participant_id in self.evidence.attempted]
        self._opening = Opening(
            phase, waves(phase, told), self.operation, str(self.primary or "")[:1000],
            self._calls, self.lost, self._limits, now,
        )  # fmt: skip
        out += [Announce(PhaseStarted(phase, self._opening.told)), *self._opening.advance(now)]
        out += [] if first else [self._decided(phase)]
        return [*out, *self._advance(now)]

    def _decided(self, phase: Phase) -> Record:
        if phase == Phase.ABORT and self.primary is not None:
            return records.failing(RecordKind.ABORTING, self.operation, self.primary)
        return records.reached(RecordKind.PUBLISHED if self.published else RecordKind.RESUMING, self.operation)

    def _advance(self, now: float) -> list[Effect]:
        opening = self._opening
        if opening is None:
            return []
        out = opening.advance(now)
        return [*out, *self._end(opening, now)] if self.stage in OPENING_STAGES and opening.finished(now) else out

    def _opening_ended(self, event: Replied | RefusedBy | NoAnswer | Misanswered, running: Running) -> list[Effect]:
        participant_id, opening, out = running.call.participant_id, self._opening, list[Effect]()
        if opening is None:
            raise RuntimeError("an opening call ended that nobody had made")
        opened = isinstance(event, Replied) and isinstance(event.proof, Opened)
        if isinstance(event, Replied) and isinstance(event.proof, Opened):
            self.evidence.opened[participant_id] = event.proof
            out = [Announce(ParticipantDone(self.phase, participant_id))] if self.stage in OPENING_STAGES else []
        elif isinstance(event, (RefusedBy, Misanswered)):
            self._add(self._mine(event.problem, participant_id))
        reason = event.problem.reason if isinstance(event, RefusedBy) else None
        opening.answered(running, event.now, opened=opened, reason=reason)
        return [*out, *self._advance(event.now)]

    def _end(self, opening: Opening, now: float) -> list[Effect]:
        for participant_id in opening.unconfirmed:
            text = "It has not said that it is open; it opens by itself when its lease lapses."
            silent = Problem(Reason.UNREACHABLE, text, waited_s=now - self._phase_began)
            self._add(self._mine(silent, participant_id))
        outcome = Outcome.ABORTED if self.stage == Stage.ABORTING else Outcome.SUCCEEDED
        self.stage = Stage.ENDED
        self.finish = Finish(outcome, self.primary, self.secondary, opening.unconfirmed, self.published)
        return [
            Announce(PhaseFinished(self.phase, now - self._phase_began)),
            records.ended(self.operation, self.finish),
            self.finish,
        ]

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _request(self, event: Request) -> list[Effect]:
        now = event.now
        if self._operation is None:
            return [Reject(Problem(Reason.UNKNOWN_OPERATION, "No operation has begun."))]
        standing = judge(event, self.stage, self.outcome, self.phase, self.operation)
        if isinstance(standing, Problem):
            return [Reject(standing)]
        self._owner_until = now + self.operation.options.lease_ttl_s
        if standing == Standing.REPEATED:
            return []
        match event:
            case ResumeRequested():
                return self._open(Phase.RESUME, now)
            case CommitRequested() | PublishRequested():
                self._deadline = event.deadline
                return self._start(Phase.COMMIT if isinstance(event, CommitRequested) else Phase.CONFIRM, now)
            case AbortRequested():
                if self.stage == Stage.PUBLISHING:
                    self._abort_wanted = True  # only the disk knows now; whatever it says, everybody opens
                    return []
                text = f"Aborted: {event.cause.rstrip('.')}." if event.cause else "Aborted by request."
                return self._abort(self._mine(Problem(Reason.ABORTED, text)), now)

    def _mine(self, problem: Problem, participant_id: str = "") -> Problem:
        return records.in_operation(problem, self.operation, self.phase, participant_id)

    def _add(self, problem: Problem) -> None:
        if problem.reason in (Reason.OPERATION_FINISHED, Reason.UNKNOWN_OPERATION):
            return  # to an opening call that is as good as OK
        known = (*self.secondary, *([self.primary] if self.primary else []))
        if not any(
            (p.reason, p.participant_id, p.message) == (problem.reason, problem.participant_id, problem.message)
            for p in known
        ):
            self.secondary = (*self.secondary, problem)[: records.MAX_SECONDARY]


def _warned(message: str, participant_id: str = "") -> Announce:
    return Announce(Warned(message, ParticipantId(participant_id) if participant_id else None))
