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
from typing import Final

from coordinator.protocol import proving, records, sentences
from coordinator.protocol.calls import CLOSING, OPENING, CallBook, Running
from coordinator.protocol.events import (
    AbortRequested,
    Announce,
    Arguments,
    Await,
    Begin,
    Call,
    CommitArguments,
    CommitRequested,
    ConfirmArguments,
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
    PrepareArguments,
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
    RestoreArguments,
    ResumeRequested,
    SetTimer,
    Tick,
    Verdict,
    Warned,
)
from coordinator.protocol.opening import Opening
from coordinator.protocol.operation import Limits, Operation, Outcome, RestorePart, Stage
from coordinator.protocol.phases import RESTORE, SAVE, STAGES, STOPS, waves
from coordinator.protocol.proofs import Committed, Confirmed, Opened, Prepared, Progress, Proof, RestoredProof
from coordinator.protocol.topology import (
    Participant,
    Topology,
    fingerprint,
    mode_for,
    problem_from_findings,
    validate,
)
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import OperationKind, Phase, Role

_CALLING: Final = frozenset(
    {Stage.PREPARING, Stage.COMMITTING, Stage.CONFIRMING, Stage.RESTORING}
)  # a wave is being called, until the deadline
_BEFORE_PUBLISH: Final = _CALLING | {
    Stage.PREPARED,
    Stage.COMMITTED,
    Stage.RESTORED,
}  # here a lost participant voids all
_OWNED: Final = frozenset(
    {Stage.PREPARED, Stage.COMMITTED, Stage.PUBLISHED}
)  # closed as long as the trainer is heard of
_OPENING: Final = frozenset({Stage.RESUMING, Stage.ABORTING})
_SAVE_ORDER: Final = tuple(Stage)  # the declaration order is that of a save


class Transaction:
    """One save or restore. Step it from one task; look at its properties between steps.

    After Finish it goes on telling whoever has not confirmed that it is open, until `settled`; a driver may stop stepping
    it then, and leave them to their leases.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.stage = Stage.IDLE
        self.primary: Problem | None = None
        self.secondary: list[Problem] = []
        self.finish: Finish | None = None
        self.published = False
        self.prepared: dict[ParticipantId, Prepared] = {}
        self.committed: dict[ParticipantId, Committed] = {}
        self.restored: dict[ParticipantId, RestoredProof] = {}
        self.opened: dict[ParticipantId, Opened] = {}
        self.progress: dict[ParticipantId, Progress] = {}
        self.lost: dict[ParticipantId, Problem] = {}
        self._limits = limits or Limits()
        self._calls = CallBook(self._limits)
        self._operation: Operation | None = None
        self._topology = Topology(())
        self._participants: dict[ParticipantId, Participant] = {}
        self._attempted: set[ParticipantId] = set()
        self._recovered: records.Recovered | None = None
        self._phase = Phase.DISCOVER
        self._phase_began = 0.0
        self._deadline = 0.0
        self._owner_until = 0.0
        self._late_warned = False
        self._abort_wanted = False
        self._waves: list[list[ParticipantId]] = []
        self._wave: set[ParticipantId] = set()
        self._lease_until: dict[ParticipantId, float] = {}
        self._opened_alone: set[ParticipantId] = set()
        self._opening: Opening | None = None
        self._timer_at: float | None = None
        self._fresh: list[int] = []

    # ---- what others may look at ------------------------------------------------------------------------------------

    @property
    def operation(self) -> Operation:
        """What it was asked to do. Raises RuntimeError before Begin."""
        if self._operation is None:
            raise RuntimeError("no operation has begun")
        return self._operation

    @property
    def topology(self) -> Topology:
        """Who takes part, fixed at Begin."""
        return self._topology

    @property
    def phase(self) -> Phase:
        """The phase it is in, or ended in."""
        return self._phase

    @property
    def outcome(self) -> Outcome:
        """How it stands."""
        if self.finish is not None:
            return self.finish.outcome
        if self.stage in (Stage.PUBLISHED, Stage.RESTORED):
            return Outcome.PAUSED
        return Outcome.FAILED_PAUSED if self.stage == Stage.FAILED_PAUSED else Outcome.RUNNING

    @property
    def attempted(self) -> frozenset[ParticipantId]:
        """Everybody who may have heard of it."""
        return frozenset(self._attempted)

    @property
    def acknowledged(self) -> tuple[ParticipantId, ...]:
        """Who has said that it is open again."""
        return tuple(sorted(self._opening.acknowledged)) if self._opening else ()

    @property
    def unconfirmed(self) -> tuple[ParticipantId, ...]:
        """Who was, or may have been, paused by it and has not said that it is open again."""
        return self._opening.unconfirmed if self._opening else tuple(sorted(self._attempted))

    @property
    def settled(self) -> bool:
        """Whether it has ended and nobody is to be told anything any more."""
        return self.stage == Stage.ENDED and not self.unconfirmed

    def pending(self) -> tuple[ParticipantId, ...]:
        """Who has not shown the proof of the phase; when opening, who has not opened."""
        if self.stage in _CALLING:
            return tuple(sorted(self._wave.union(*self._waves)))
        return self.unconfirmed if self.stage in _OPENING else ()

    def why_waiting(self, now: float) -> str:
        """Who is waited for and why, as one sentence; empty when nobody is."""
        if self.stage in _CALLING:
            return sentences.waiting(self._phase, sorted(self._wave), self.progress, now - self._phase_began)
        if self.stage in _OPENING and self.unconfirmed:
            return sentences.waiting(self._phase, self.unconfirmed, {}, now - self._phase_began)
        if self.stage == Stage.PUBLISHING:
            return f"publish: writing the snapshot manifest for {now - self._phase_began:.1f} s."
        if self.stage == Stage.FAILED_PAUSED:
            return "restore: failed; everybody stays paused until Abort."
        if self.stage in _OWNED or self.stage == Stage.RESTORED:
            call = {Stage.PREPARED: "Commit", Stage.COMMITTED: "Publish"}.get(self.stage, "Resume")
            return f"{self._phase.name.lower()}: done; everybody is paused until the trainer calls {call}."
        return ""

    def leases(self) -> tuple[ParticipantId, ...]:
        """Whose lease the driver must renew now: those known to be closed by this operation.

        Nobody once opening has begun, nor when publishing takes longer than the operation may: then leases must be able
        to lapse, whatever the storage does.
        """
        if self.stage in (Stage.FAILED_PAUSED, Stage.RESTORED):
            closed = set(self._attempted)
        elif self.stage in _CALLING | _OWNED or (self.stage == Stage.PUBLISHING and not self._late_warned):
            closed = {*self.prepared, *self.restored}
            if self._phase in CLOSING:
                closed.update(self.progress)  # it answers, so the call has reached it and its lease runs
        else:
            return ()
        return tuple(sorted(closed - self.lost.keys() - self._opened_alone))

    def publish_until(self) -> float:
        """Until when every freeze is known to hold: look at it right before the manifest is linked."""
        return min(self._lease_until.values(), default=0.0)

    @classmethod
    def from_records(
        cls,
        journal: Sequence[Record],
        *,
        published: bool,
        coordinator_epoch: int,
        limits: Limits | None = None,
    ) -> Transaction:
        """An operation as a coordinator finds it when it starts again; step Recover next.

        `published`: whether the snapshot's manifest is there and verifies; for a restore it means nothing. Raises
        ValueError when the first record is not BEGUN.
        """
        found = records.read(journal)
        self = cls(limits)
        self._recovered = found
        self.published = published and found.operation.kind == OperationKind.SAVE
        self._adopt(replace(found.operation, coordinator_epoch=coordinator_epoch), found.topology)
        closing = Phase.PREPARE if found.operation.kind == OperationKind.SAVE else Phase.RESTORE
        self._attempted = {p for wave in waves(closing, found.topology.participants) for p in wave}
        return self

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
            case ProgressReported(call_no=call_no):
                running = self._calls.get(call_no)
                if running is not None and running.call.phase not in OPENING:
                    self.progress[running.call.participant_id] = event.progress
                return []
            case ParticipantLost(participant_id=participant_id, problem=problem):
                return self._gone(participant_id, problem, now)
            case IncarnationChanged(participant_id=participant_id, incarnation_id=incarnation_id):
                known = self._participants.get(participant_id)
                if known is None or known.incarnation_id == incarnation_id:
                    return []
                return self._gone(participant_id, proving.incarnation_changed(self._phase, known, incarnation_id), now)
            case LeaseRenewed(participant_id=participant_id):
                if participant_id in self._lease_until:
                    until = event.sent_at + event.lease_remaining_s
                    self._lease_until[participant_id] = max(until, self._lease_until[participant_id])
                return []
            case LeaseLost(participant_id=participant_id, problem=problem):
                return self._lease_lost(participant_id, problem, now)
            case RecordFailed(problem=problem):
                # Nothing after the record was performed: nobody has heard of what it was to cover.
                self._attempted.difference_update(self._calls.forget(self._fresh))
                self._timer_at = None
                return (
                    self._fail(self._mine(problem), now) if self.stage in _BEFORE_PUBLISH | {Stage.PUBLISHING} else []
                )
            case Published():
                return self._is_published(now)
            case PublishFailed(problem=problem):
                if self.published:
                    raise RuntimeError("the snapshot was published already")
                return self._fail(self._mine(problem), now) if self.stage == Stage.PUBLISHING else []
            case Tick():
                return self._tick(now)
            case AbortRequested() | CommitRequested() | PublishRequested() | ResumeRequested():
                return self._request(event)

    def _next_at(self, now: float) -> float | None:
        if self.stage in _CALLING:
            retry = self._calls.next_retry()
            return self._deadline if retry is None else min(self._deadline, retry)
        if self.stage in _OWNED:
            return self._owner_until
        if self.stage == Stage.PUBLISHING:
            return None if self._late_warned else self._deadline
        return self._opening.next_at(now) if self._opening is not None else None

    def _tick(self, now: float) -> list[Effect]:
        if self._opening is not None:
            return self._advance(now)
        if self.stage in _CALLING:
            if now >= self._deadline:
                return self._expire(now)
            return [self._call(retry.participant_id, now, retry.attempt) for retry in self._calls.due(now)]
        if self.stage == Stage.PUBLISHING and now >= self._deadline and not self._late_warned:
            self._late_warned = True
            return [
                _warned("The deadline passed while the snapshot is being published; leases are not renewed any more.")
            ]
        if self.stage in _OWNED and now >= self._owner_until:
            return self._owner_is_silent(now)
        return []

    # ---- beginning --------------------------------------------------------------------------------------------------

    def _begin(self, event: Begin) -> list[Effect]:
        if self.stage != Stage.IDLE or self._recovered is not None:
            raise RuntimeError("a transaction begins once")
        self._adopt(event.operation, event.topology)
        self._deadline = event.deadline
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
            self.stage, self.primary = Stage.ENDED, records.in_operation(problem, event.operation, Phase.DISCOVER)
            self.finish = Finish(Outcome.ABORTED, self.primary)
            return [self.finish]
        first = SAVE[0] if event.operation.kind == OperationKind.SAVE else RESTORE[0]
        return [
            records.begun(event.operation, event.topology),
            *(_warned(f.message, f.participant_id) for f in findings),
            *self._start(first, event.now),
        ]

    def _adopt(self, operation: Operation, topology: Topology) -> None:
        self._operation = operation
        self._topology = topology
        self._participants = {p.participant_id: p for p in topology.participants}

    def _recover(self, now: float) -> list[Effect]:
        found = self._recovered
        if found is None or self.stage != Stage.IDLE:
            raise RuntimeError("only what from_records made recovers, and once")
        self._phase_began = now
        if found.finish is not None:
            self.stage, self.finish, self.primary = Stage.ENDED, found.finish, found.finish.primary
            self._attempted.clear()
            return [found.finish]
        stopped = Problem(
            Reason.ABORTED,
            f"The coordinator stopped during the {found.operation.kind.name.lower()} (last record: {found.last.value}).",
        )
        if self.published:
            self._phase = Phase.PUBLISH
            return [records.reached(RecordKind.PUBLISHED, self.operation), *self._open(Phase.RESUME, now)]
        if found.operation.kind == OperationKind.SAVE or found.last == RecordKind.ABORTING:
            return self._abort(found.primary or self._mine(stopped), now)
        self._phase = Phase.RESTORE
        if found.last == RecordKind.RESUMING or (found.last == RecordKind.RESTORED and self.operation.resume_when_done):
            return self._open(Phase.RESUME, now)
        if found.last == RecordKind.RESTORED:
            return self._stand(Stage.RESTORED, now)
        return self._fail(found.primary or self._mine(stopped), now)

    # ---- phases -----------------------------------------------------------------------------------------------------

    def _start(self, phase: Phase, now: float) -> list[Effect]:
        self.stage, self._phase, self._phase_began = STAGES[phase], phase, now
        self.progress.clear()
        self._waves, self._wave = waves(phase, self._topology.participants), set()
        called = tuple(p for wave in self._waves for p in wave)
        return [Announce(PhaseStarted(phase, called)), *self._next_wave(now)]

    def _next_wave(self, now: float) -> list[Effect]:
        if not self._waves:
            return [Announce(PhaseFinished(self._phase, now - self._phase_began)), *self._after(self._phase, now)]
        self._wave = set(self._waves.pop(0))
        if now >= self._deadline:
            return self._expire(now, called=False)
        return [self._call(participant_id, now) for participant_id in sorted(self._wave)]

    def _after(self, phase: Phase, now: float) -> list[Effect]:
        operation = self.operation
        stops = operation.trainer_driven if operation.kind == OperationKind.SAVE else not operation.resume_when_done
        out: list[Effect] = []
        if phase == Phase.RESTORE:
            out.append(records.reached(RecordKind.RESTORED, operation))
        if phase in STOPS and stops and not self._abort_wanted:
            return [*out, *self._stand(STOPS[phase], now)]
        program = SAVE if operation.kind == OperationKind.SAVE else RESTORE
        following = program[program.index(phase) + 1]
        if following == Phase.PUBLISH:
            return self._publish(now)
        return [*out, *(self._open(following, now) if following in OPENING else self._start(following, now))]

    def _stand(self, stage: Stage, now: float) -> list[Effect]:
        self.stage = stage
        self._owner_until = now + self.operation.options.lease_ttl_s
        return [Await(stage)]

    def _call(self, participant_id: ParticipantId, now: float, attempt: int = 1) -> Call:
        self._attempted.add(participant_id)
        timeout = self._deadline - now
        if self._phase == Phase.CONFIRM:
            timeout = min(timeout, self._limits.confirm_call_s)
        return self._calls.make(
            participant_id,
            self._phase,
            timeout,
            self.operation.operation_id,
            self._arguments(participant_id),
            now,
            attempt,
        )

    def _arguments(self, participant_id: ParticipantId) -> Arguments:
        operation, options = self.operation, self.operation.options
        if self._phase == Phase.PREPARE:
            mode = mode_for(self._participants[participant_id], options.quiesce_mode)
            return PrepareArguments(mode, options.straggler_policy, options.straggler_grace_s, options.lease_ttl_s)
        if self._phase == Phase.COMMIT:
            return CommitArguments(operation.snapshot_id)
        if self._phase == Phase.CONFIRM:
            prepared = self.prepared[participant_id]
            return ConfirmArguments(prepared.incarnation_id, prepared.generation)
        part = operation.parts.get(participant_id, RestorePart())
        return RestoreArguments(
            operation.snapshot_id, part.manifest_sha256, part.source_participant_id, options.lease_ttl_s
        )

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
        if self.stage != STAGES[running.call.phase]:
            return [Ignored(event.call_no, Verdict.STALE)]  # a restore that has failed already
        participant_id = running.call.participant_id
        if isinstance(event, Replied):
            participant = self._participants[participant_id]
            problem = proving.check(self._phase, event.proof, participant, self.operation, self.prepared)
            return self._accept(running, event.proof, now) if problem is None else self._fail(self._mine(problem), now)
        if isinstance(event, NoAnswer):
            if now >= self._deadline:
                return self._expire(now)
            if running.attempt < self._limits.attempts and self._calls.retry_later(running, now) < self._deadline:
                return []
        return self._fail(self._mine(event.problem, participant_id), now)

    def _accept(self, running: Running, proof: Proof, now: float) -> list[Effect]:
        participant_id = running.call.participant_id
        out: list[Effect] = [Announce(ParticipantDone(self._phase, participant_id))]
        match proof:
            case Prepared():
                self.prepared[participant_id] = proof
                if proof.excluded_count:
                    text = f"{proof.excluded_count} rollouts could not quiesce and are excluded: they restart."
                    out.append(_warned(text, participant_id))
            case Committed():
                self.committed[participant_id] = proof
            case Confirmed():
                # What remained was measured after the call was sent and before now: counting from then is safe.
                self._lease_until[participant_id] = running.sent_at + proof.lease_remaining_s
            case RestoredProof():
                self.restored[participant_id] = proof
                if proof.diverged_count:
                    out.append(_warned(f"{proof.diverged_count} rollouts could not be brought back.", participant_id))
            case Opened():
                pass
        self._wave.discard(participant_id)
        return out if self._wave else [*out, *self._next_wave(now)]

    def _expire(self, now: float, *, called: bool = True) -> list[Effect]:
        who, waited = sorted(self._wave), now - self._phase_began
        problem = sentences.deadline_passed(self.operation, self._phase, who, self.progress, waited, called=called)
        return self._fail(problem, now)

    # ---- publishing -------------------------------------------------------------------------------------------------

    def _publish(self, now: float) -> list[Effect]:
        lapsed = sorted(p for p, until in self._lease_until.items() if until <= now)
        if lapsed:
            text = f"The lease of {sentences.names(lapsed)} had lapsed when everybody had confirmed."
            return self._fail(self._mine(Problem(Reason.LEASE_LAPSED, text), lapsed[0]), now)
        if now >= self._deadline:
            return self._fail(self._mine(Problem(Reason.ABORTED, "The deadline passed before publishing.")), now)
        self.stage, self._phase, self._phase_began = STAGES[Phase.PUBLISH], Phase.PUBLISH, now
        committed = MappingProxyType(dict(sorted(self.committed.items())))
        return [
            records.publishing(self.operation),
            Announce(PhaseStarted(Phase.PUBLISH, ())),
            Publish(self.operation.snapshot_id, committed, self.publish_until()),
        ]

    def _is_published(self, now: float) -> list[Effect]:
        if self.published:
            return []
        if self.stage != Stage.PUBLISHING:
            raise RuntimeError(f"published while {self.stage.value}: nobody had asked for it")
        self.published = True
        out: list[Effect] = [
            records.reached(RecordKind.PUBLISHED, self.operation),
            Announce(PhaseFinished(Phase.PUBLISH, now - self._phase_began)),
        ]
        if self._abort_wanted:
            out.append(_warned("Abort came too late: the snapshot is published. Everybody resumes."))
        return [*out, *self._after(Phase.PUBLISH, now)]

    # ---- failing ----------------------------------------------------------------------------------------------------

    def _fail(self, problem: Problem, now: float) -> list[Effect]:
        """Give up at once: a save opens everybody, a restore leaves everybody paused."""
        if self.operation.kind == OperationKind.SAVE:
            return self._abort(problem, now)
        held = replace(
            problem,
            next_step=f"{problem.advice} Everybody stays paused: Abort opens them without the snapshot, "
            "then restore with a new operation_id.",
        )
        self.stage, self.primary = Stage.FAILED_PAUSED, held
        self._waves, self._wave = [], set()
        if self._attempted <= self.lost.keys():
            return self._abort(held, now)  # nobody is left to stay paused
        return [records.failing(RecordKind.FAILED_PAUSED, self.operation, held), Await(Stage.FAILED_PAUSED, held)]

    def _abort(self, problem: Problem, now: float) -> list[Effect]:
        self.primary = self.primary or problem
        out = [records.failing(RecordKind.ABORTING, self.operation, self.primary)]
        return [*out, *self._open(Phase.ABORT, now)]

    def _gone(self, participant_id: ParticipantId, problem: Problem, now: float) -> list[Effect]:
        participant = self._participants.get(participant_id)
        if participant is None or participant_id in self.lost or self.stage in (Stage.IDLE, Stage.ENDED):
            return []
        problem = self._mine(problem, participant_id)
        if participant.role == Role.AUXILIARY_MODEL:
            return [_warned(f"It is gone: {problem.message}", participant_id)]
        self.lost[participant_id] = problem
        if self.stage in _BEFORE_PUBLISH:
            return self._fail(problem, now)
        if self.stage == Stage.FAILED_PAUSED:
            self._add(problem)
            return self._abort(problem, now) if self._attempted <= self.lost.keys() else []
        if self.stage in _OPENING:
            if self.stage == Stage.ABORTING:
                self._add(problem)
            return self._advance(now)
        return [_warned(f"It is gone after it had confirmed; the snapshot is valid. {problem.message}", participant_id)]

    def _lease_lost(self, participant_id: ParticipantId, problem: Problem, now: float) -> list[Effect]:
        if participant_id not in self._attempted or participant_id in self._opened_alone:
            return []
        problem = self._mine(problem, participant_id)
        if self.stage in _BEFORE_PUBLISH:
            self._opened_alone.add(participant_id)
            return self._fail(problem, now)
        if self.stage == Stage.FAILED_PAUSED:
            self._opened_alone.add(participant_id)
            self._add(problem)
            return []
        if self.stage in (Stage.PUBLISHING, Stage.PUBLISHED):
            self._opened_alone.add(participant_id)
            return [_warned(f"It opened by itself after it had confirmed. {problem.message}", participant_id)]
        return []

    def _owner_is_silent(self, now: float) -> list[Effect]:
        text = f"The trainer has called nothing for {self.operation.options.lease_ttl_s:.0f} s"
        if self.stage == Stage.PUBLISHED:
            return [_warned(f"{text}: everybody resumes, the snapshot is published."), *self._open(Phase.RESUME, now)]
        return self._fail(self._mine(Problem(Reason.LEASE_LAPSED, f"{text} while everybody was paused.")), now)

    # ---- opening ----------------------------------------------------------------------------------------------------

    def _open(self, phase: Phase, now: float) -> list[Effect]:
        out: list[Effect] = []
        if phase == Phase.RESUME and self.operation.kind == OperationKind.RESTORE:
            out.append(records.reached(RecordKind.RESUMING, self.operation))
        out += self._calls.cancel_all()
        self.stage, self._phase, self._phase_began = STAGES[phase], phase, now
        self._waves, self._wave = [], set()
        told = [p for p in self._topology.participants if p.participant_id in self._attempted]
        self._opening = Opening(
            phase, waves(phase, told), self.operation.operation_id, str(self.primary or "")[:1000],
            self._calls, self.lost, self._limits, now, self.operation.options.lease_ttl_s,
        )  # fmt: skip
        return [*out, Announce(PhaseStarted(phase, self._opening.told)), *self._advance(now)]

    def _advance(self, now: float) -> list[Effect]:
        opening = self._opening
        if opening is None:
            return []
        out = opening.advance(now)
        if self.stage in _OPENING and opening.finished(now):
            out += self._end(opening, now)
        return out

    def _opening_ended(self, event: Replied | RefusedBy | NoAnswer | Misanswered, running: Running) -> list[Effect]:
        participant_id = running.call.participant_id
        opening = self._opening
        if opening is None:
            raise RuntimeError("an opening call ended that nobody had made")
        if isinstance(event, Replied) and isinstance(event.proof, Opened):
            opening.answered(running, event.now, opened=True)
            self.opened[participant_id] = event.proof
            if self.stage in _OPENING:
                return [Announce(ParticipantDone(self._phase, participant_id)), *self._advance(event.now)]
            return self._advance(event.now)
        harmless = (Reason.OPERATION_FINISHED, Reason.UNKNOWN_OPERATION)
        if isinstance(event, (RefusedBy, Misanswered)) and event.problem.reason not in harmless:
            self._add(self._mine(event.problem, participant_id))
        refused = event.problem.reason if isinstance(event, RefusedBy) else None
        opening.answered(running, event.now, opened=False, reason=refused)
        return self._advance(event.now)

    def _end(self, opening: Opening, now: float) -> list[Effect]:
        for participant_id in opening.unconfirmed:
            text = "It has not said that it is open; it opens by itself when its lease lapses."
            silent = Problem(Reason.UNREACHABLE, text, waited_s=now - self._phase_began)
            self._add(self._mine(silent, participant_id))
        outcome = Outcome.ABORTED if self.stage == Stage.ABORTING else Outcome.SUCCEEDED
        self.stage = Stage.ENDED
        self.finish = Finish(outcome, self.primary, tuple(self.secondary), opening.unconfirmed, self.published)
        return [
            Announce(PhaseFinished(self._phase, now - self._phase_began)),
            records.ended(self.operation, self.finish),
            self.finish,
        ]

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _request(self, event: Request) -> list[Effect]:
        if self._operation is None:
            return [Reject(Problem(Reason.UNKNOWN_OPERATION, "No operation has begun."))]
        if isinstance(event, AbortRequested):
            return self._abort_request(event)
        if isinstance(event, ResumeRequested):
            if self.stage in (Stage.PUBLISHED, Stage.RESTORED):
                return self._open(Phase.RESUME, event.now)
            resumes = self.stage in (Stage.RESUMING, Stage.PUBLISHING) and not self.operation.trainer_driven
            if resumes or self.stage == Stage.RESUMING or self.outcome == Outcome.SUCCEEDED:
                return []
            return self._reject("Resume", "Use Abort: it is not published, nor restored.")
        due = Stage.PREPARED if isinstance(event, CommitRequested) else Stage.COMMITTED
        name = "Commit" if isinstance(event, CommitRequested) else "Publish"
        if not self.operation.trainer_driven:
            return self._reject(name, "Follow it with Watch: it goes on by itself.")
        if self.stage == due:
            self._deadline = event.deadline
            return self._start(Phase.COMMIT if due == Stage.PREPARED else Phase.CONFIRM, event.now)
        failed = self.stage == Stage.ABORTING or self.outcome == Outcome.ABORTED
        if not failed and _SAVE_ORDER.index(self.stage) > _SAVE_ORDER.index(due):
            return []  # a repeat
        return self._reject(name, "Start a new operation." if failed else f"Wait until it is {due.value}.")

    def _abort_request(self, event: AbortRequested) -> list[Effect]:
        if self.stage in _BEFORE_PUBLISH or self.stage == Stage.FAILED_PAUSED:
            text = f"Aborted: {event.cause}" if event.cause else "Aborted by request."
            return self._abort(self._mine(Problem(Reason.ABORTED, text)), event.now)
        if self.stage == Stage.PUBLISHING:
            self._abort_wanted = True  # only the disk knows now; whatever it says, everybody opens
            return []
        return self._reject("Abort", "Use Resume: the snapshot is published.") if self.stage == Stage.PUBLISHED else []

    def _reject(self, call: str, next_step: str) -> list[Effect]:
        operation = self.operation
        text = f"{call} is not legal now: the {operation.kind.name.lower()} is {self.stage.value}."
        return [Reject(Problem(Reason.WRONG_PHASE, text, next_step, self._phase, operation_id=operation.operation_id))]

    def _mine(self, problem: Problem, participant_id: str = "") -> Problem:
        return records.in_operation(problem, self.operation, self._phase, participant_id)

    def _add(self, problem: Problem) -> None:
        known = {
            (p.reason, p.participant_id, p.message)
            for p in (*self.secondary, *([self.primary] if self.primary else []))
        }
        if (problem.reason, problem.participant_id, problem.message) not in known:
            self.secondary = [*self.secondary, problem][: records.MAX_SECONDARY]


def _warned(message: str, participant_id: str = "") -> Announce:
    return Announce(Warned(message, ParticipantId(participant_id) if participant_id else None))
