"""The course of one operation: from its first phase until everybody is open again.

PURE. The one rule: whatever goes wrong before the snapshot is published ends in opening everybody (a save) or in leaving
everybody paused (a restore); whatever goes wrong afterwards ends in resuming. `transaction` hands events to it and says
when it may be called; the stages are drawn there.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from coordinator.protocol import proving, records, sentences
from coordinator.protocol.calls import OPENING, CallBook, Running
from coordinator.protocol.events import (
    Announce,
    Await,
    Effect,
    Finish,
    Ignored,
    LeaseRenewed,
    Misanswered,
    NoAnswer,
    ParticipantDone,
    PhaseFinished,
    PhaseStarted,
    ProgressReported,
    Publish,
    Record,
    RecordKind,
    RefusedBy,
    Replied,
    Slept,
    Verdict,
    Warned,
)
from coordinator.protocol.legality import BEFORE_PUBLISH, CALLING, OPENING_STAGES, OWNED, UNATTENDED
from coordinator.protocol.opening import Opening
from coordinator.protocol.operation import Limits, Operation, Outcome, Stage
from coordinator.protocol.phase_run import Evidence, PhaseRun
from coordinator.protocol.phases import RESTORE, SAVE, STAGES, STOPS, waves
from coordinator.protocol.proofs import Opened
from coordinator.protocol.topology import Topology
from coordinator.wire.errors import STILL_LOADED, Problem, Reason
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import OperationKind, Phase, Role


class Course:
    """The stages of one operation. Its attributes are read by `Transaction` and changed here only."""

    def __init__(self, operation: Operation, topology: Topology, limits: Limits) -> None:
        self.operation = operation
        self.topology = topology
        self.participants = {p.participant_id: p for p in topology.participants}
        self.stage = Stage.IDLE
        self.phase = Phase.DISCOVER
        self.phase_began = 0.0
        self.deadline = 0.0
        self.primary: Problem | None = None
        self.secondary: tuple[Problem, ...] = ()
        self.finish: Finish | None = None
        self.published = False
        self.abort_wanted = False
        self.late_warned = False
        self.slept: Slept | None = None  # the longest time for which the coordinator has not run meanwhile
        self.evidence = Evidence()
        self.lost: dict[ParticipantId, Problem] = {}
        self.opened_alone: set[ParticipantId] = set()
        # Who has not said since this coordinator started that it still holds the restore that waits: the coordinator before
        # may have begun to abort it, of which no record need be left.
        self.unheard: set[ParticipantId] = set()
        self.resume_wanted = False  # the trainer has asked, and is answered once nobody is unheard
        self.calls = CallBook(limits)
        self.run: PhaseRun | None = None
        self.opening: Opening | None = None
        self._limits = limits
        self._owner_until = 0.0
        self._stood_since = 0.0  # since when a restore waits for its trainer
        self._remind_gap = 0.0
        self._remind_at = 0.0
        self._word_until: dict[
            ParticipantId, float
        ] = {}  # who is lost, and until when an answer waits to say how it ended
        self._opening_took: float | None = None
        self._stands = True  # False while the answer of a failed restore is held back for that word
        self._unheld: Problem | None = None  # the cause of a failed restore without the advice to abort it

    # ---- time --------------------------------------------------------------------------------------------------------

    def next_at(self, now: float) -> float | None:
        """When time alone changes something."""
        if self.run is not None and self.stage in CALLING:
            return self.run.next_at()
        if self.stage in OWNED:
            return self._owner_until
        if self.stage == Stage.PUBLISHING:
            return None if self.late_warned else self.deadline
        if self.stage in UNATTENDED:
            return self._remind_at if self._stands else min(self._remind_at, self._word_at())
        if self.opening is None:
            return None
        at = self.opening.next_at(now)
        told = self.stage in OPENING_STAGES and self.opening.finished(now)
        return min((t for t in (at, self._word_at() if told else None) if t is not None), default=None)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self.opening is not None:
            return self._advance(now)
        if self.run is not None and self.stage in CALLING:
            return self.fail(self.run.too_late(now), now) if now >= self.deadline else self.run.repeat_due(now)
        if self.stage == Stage.PUBLISHING and now >= self.deadline and not self.late_warned:
            self.late_warned = True
            return [warned("The deadline passed while the snapshot is being published; leases are left to lapse.")]
        if self.stage in UNATTENDED and not self._stands and now >= self._word_at():
            return self._stand_failed(now)
        if self.stage in UNATTENDED and now >= self._remind_at:
            self._remind_gap = min(2 * self._remind_gap, self._limits.remind_most_s)
            self._remind_at = now + self._remind_gap
            return [warned(sentences.unattended(self.stage, now - self._stood_since))]
        return self._owner_is_silent(now) if self.stage in OWNED and now >= self._owner_until else []

    def heard(self, now: float) -> None:
        """The trainer lives: what it has paused stays so for one more lease."""
        self._owner_until = now + self.operation.options.lease_ttl_s

    def _owner_is_silent(self, now: float) -> list[Effect]:
        text = f"The trainer has called nothing for {self.operation.options.lease_ttl_s:.0f} s"
        if self.stage == Stage.PUBLISHED:
            return [warned(f"{text}: everybody resumes, the snapshot is published."), *self.open(Phase.RESUME, now)]
        step = "Call the next phase, or repeat the last one, within the lease; or ask for a longer lease."
        waited = (
            f"{text} while everybody was paused, for {now - self._stood_since:.1f} s by then: its lease has lapsed."
        )
        return self.fail(self.mine(Problem(Reason.LEASE_LAPSED, waited, step)), now)

    # ---- phases ------------------------------------------------------------------------------------------------------

    def start(self, phase: Phase, now: float) -> list[Effect]:
        """Begin a phase that calls waves."""
        self.stage, self.phase, self.phase_began = STAGES[phase], phase, now
        self.run = PhaseRun(
            phase, self.operation, self.topology, self.evidence, self.calls, self._limits, self.deadline, now
        )
        return [self.run.announce(), *self._go_on(self.run, now)]

    def _go_on(self, run: PhaseRun, now: float) -> list[Effect]:
        if run.done:
            return [Announce(PhaseFinished(run.phase, now - run.began)), *self._after(run.phase, now)]
        calls = run.advance(now)
        return self.fail(run.too_late(now), now) if calls is None else calls

    def _after(self, phase: Phase, now: float) -> list[Effect]:
        save = self.operation.kind == OperationKind.SAVE
        stops = self.operation.trainer_driven if save else not self.operation.resume_when_done
        out: list[Effect] = [] if save else [records.reached(RecordKind.RESTORED, self.operation)]
        if phase in STOPS and stops and not self.abort_wanted:
            return [*out, *self.stand(STOPS[phase], now)]
        program = SAVE if save else RESTORE
        following = program[program.index(phase) + 1]
        if following == Phase.PUBLISH:
            return self._publish(now)
        return [*out, *(self.open(following, now) if following in OPENING else self.start(following, now))]

    def stand(self, stage: Stage, now: float) -> list[Effect]:
        """Wait for the trainer's next call."""
        self.stage = stage
        self.heard(now)
        self._begin_to_wait(now)
        return [Await(stage)]

    def _begin_to_wait(self, now: float) -> None:
        self._stood_since, self._remind_gap = now, self._limits.remind_after_s
        self._remind_at = now + self._remind_gap

    def progressed(self, event: ProgressReported) -> None:
        """Keep what a running call said last: errors and status name it."""
        running = self.calls.get(event.call_no)
        if running is not None and running.call.phase not in OPENING:
            self.evidence.progress[running.call.participant_id] = event.progress

    def call_ended(self, event: Replied | RefusedBy | NoAnswer | Misanswered) -> list[Effect]:
        """A call ended in one of the four ways."""
        now, running = event.now, self.calls.end(event.call_no)
        if not isinstance(running, Running):
            out: list[Effect] = [Ignored(event.call_no, running)]
            if isinstance(event, Replied) and self.opening is not None:
                closed = self.calls.take_closing(event.call_no)
                if closed is not None:  # it closed after all, maybe after we told it to open
                    out += self.opening.again(closed, now)
            return out
        if running.call.phase in OPENING:
            return self._opening_ended(event, running)
        run = self.run
        if run is None or self.stage != STAGES[running.call.phase]:
            return [Ignored(event.call_no, Verdict.STALE)]  # of a restore that has failed already
        participant_id = running.call.participant_id
        if isinstance(event, Replied):
            participant = self.participants[participant_id]
            problem = proving.check(run.phase, event.proof, participant, self.operation, self.evidence.prepared)
            if problem is not None:
                return self.fail(self.mine(problem), now)
            return [*run.accept(running, event.proof), *self._go_on(run, now)]
        if isinstance(event, NoAnswer):
            if now >= self.deadline:
                return self.fail(run.too_late(now), now)
            if run.repeats(running, now):
                return []
        return self.fail(self.mine(sentences.as_we_know(event.problem), participant_id), now)

    # ---- publishing --------------------------------------------------------------------------------------------------

    def _publish(self, now: float) -> list[Effect]:
        lapsed = sorted(p for p, until in self.evidence.lease_until.items() if until <= now)
        if lapsed:
            text = f"The lease of {sentences.names(lapsed)} had lapsed when everybody had confirmed."
            return self.fail(self.mine(Problem(Reason.LEASE_LAPSED, text), lapsed[0]), now)
        self.stage, self.phase, self.phase_began = STAGES[Phase.PUBLISH], Phase.PUBLISH, now
        committed = MappingProxyType(dict(sorted(self.evidence.committed.items())))
        return [
            records.publishing(self.operation),
            Announce(PhaseStarted(Phase.PUBLISH, ())),
            Publish(self.operation.snapshot_id, committed, self.evidence.holds_until()),
        ]

    def is_published(self, now: float) -> list[Effect]:
        """The commit point is passed. Raises RuntimeError when nobody had asked for it."""
        if self.published:
            return []
        if self.stage != Stage.PUBLISHING:
            raise RuntimeError(f"published while {self.stage}: nobody had asked for it")
        self.published = True
        out: list[Effect] = [Announce(PhaseFinished(Phase.PUBLISH, now - self.phase_began))]
        if self.abort_wanted:
            out.append(warned("Abort came too late: the snapshot is published. Everybody resumes."))
        return [*out, *self._after(Phase.PUBLISH, now)]

    # ---- failing -----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> set[ParticipantId]:
        """Who may be closed by it still: whoever has heard of it, without the lost ones and those that opened by themselves."""
        return self.evidence.attempted - self.lost.keys() - self.opened_alone

    def fail(self, problem: Problem, now: float) -> list[Effect]:
        """Give up at once: a save opens everybody, a restore leaves everybody paused."""
        problem = sentences.of_our_sleep(problem, self.slept, self.operation.options.lease_ttl_s)
        if self.operation.kind == OperationKind.SAVE:
            return self.abort(problem, now)
        does = "opens everybody" if self.closed else "goes on"
        step = f"{sentences.still_closed(self.closed)}: Abort {does} without the snapshot; then restore with a new operation_id."
        held = problem if step in problem.advice else replace(problem, next_step=f"{problem.advice} {step}")
        self.stage, self.primary, self._unheld = Stage.FAILED_PAUSED, held, problem
        self._begin_to_wait(now)
        if self.evidence.attempted <= self.lost.keys():
            return self.abort(held, now)  # nobody is left to stay paused
        self._stands = False
        return [records.failing(RecordKind.FAILED_PAUSED, self.operation, problem), *self._stand_failed(now)]

    def _stand_failed(self, now: float) -> list[Effect]:
        """Answer that the restore has failed, once how the lost ones ended is known or nobody says so in time."""
        if self._stands or self._waits_for_word(now):
            return []
        self._stands = True
        return [Await(Stage.FAILED_PAUSED, self.primary, self.secondary)]

    def abort(self, problem: Problem, now: float) -> list[Effect]:
        """Open everybody without success; the first problem stays the primary one."""
        # Once it opens, the advice on how to open it is no advice any more.
        self.primary = sentences.once_open(self._unheld or self.primary or problem, self.operation.options.quiesce_mode)
        return self.open(Phase.ABORT, now)

    def restarted(self, participant_id: ParticipantId, incarnation_id: IncarnationId, now: float) -> list[Effect]:
        """A shim of that name has another incarnation now: the one of this operation is gone."""
        known = self.participants.get(participant_id)
        if known is None or known.incarnation_id == incarnation_id:
            return []
        return self.gone(participant_id, proving.incarnation_changed(self.phase, known, incarnation_id), now)

    def gone(
        self, participant_id: ParticipantId, problem: Problem, now: float, explained_within_s: float = 0.0
    ) -> list[Effect]:
        """A participant is lost. What follows happens at once; only the answer waits a moment to say how it ended."""
        participant = self.participants.get(participant_id)
        if participant is None or participant_id in self.lost or self.stage in (Stage.IDLE, Stage.ENDED):
            return []
        problem = self.mine(problem, participant_id)
        if participant.role == Role.AUXILIARY_MODEL:
            return [warned(f"It is gone: {problem.message}", participant_id)]
        problem = sentences.went_with(
            problem, self.evidence.progress.get(participant_id), self.evidence.prepared.get(participant_id)
        )
        self.lost[participant_id] = problem
        if explained_within_s > 0 and participant_id in self.evidence.attempted:
            self._word_until[participant_id] = now + explained_within_s
        if self.stage in BEFORE_PUBLISH:
            return self.fail(problem, now)
        if self.stage == Stage.FAILED_PAUSED:
            self._add(problem)
            return self.abort(problem, now) if self.evidence.attempted <= self.lost.keys() else []
        if self.stage in OPENING_STAGES:
            self._add(problem)
            return self._advance(now)
        return [warned(f"It is gone after it had confirmed; the snapshot is valid. {problem.message}", participant_id)]

    def explained(self, participant_id: ParticipantId, how: str, now: float) -> list[Effect]:
        """It has become known how a lost participant ended: every problem that tells of its loss says so."""
        before = self.lost.get(participant_id)
        if before is None or self.stage == Stage.ENDED:
            return []
        self._word_until.pop(participant_id, None)
        after = self.lost[participant_id] = sentences.explained(before, how)

        def told(problem: Problem) -> Problem:
            if problem.participant_id != participant_id or problem.message != before.message:
                return problem
            return replace(problem, message=after.message, metadata=after.metadata)

        self.primary = told(self.primary) if self.primary is not None else None
        self._unheld = told(self._unheld) if self._unheld is not None else None
        self.secondary = tuple(told(problem) for problem in self.secondary)
        if self.stage == Stage.FAILED_PAUSED:
            return self._stand_failed(now)
        return self._advance(now)

    def _word_at(self) -> float:
        return max(self._word_until.values(), default=0.0)

    def _waits_for_word(self, now: float) -> bool:
        return now < self._word_at()

    def lease_renewed(self, event: LeaseRenewed) -> list[Effect]:
        """It is closed still. Move the time until which a confirmed freeze is known to hold."""
        lease_until = self.evidence.lease_until
        if event.participant_id in lease_until:
            until = event.sent_at + event.lease_remaining_s
            lease_until[event.participant_id] = max(until, lease_until[event.participant_id])
        self.unheard.discard(event.participant_id)
        return self.resume(event.now) if self.resume_wanted and self.stage == Stage.RESTORED else []

    def resume(self, now: float) -> list[Effect]:
        """The trainer wants it: at once, or when everybody has said that it still holds what was restored."""
        self.resume_wanted = bool(self.unheard)
        return [] if self.unheard else self.open(Phase.RESUME, now)

    def lease_lost(self, participant_id: ParticipantId, problem: Problem, now: float) -> list[Effect]:
        """A participant has opened by itself."""
        held = self.stage in BEFORE_PUBLISH or self.stage in (Stage.FAILED_PAUSED, Stage.PUBLISHING, Stage.PUBLISHED)
        if not held or participant_id not in self.evidence.attempted - self.opened_alone:
            return []
        self.opened_alone.add(participant_id)
        problem = self.mine(problem, participant_id)
        if self.stage == Stage.RESTORED and problem.metadata.get(STILL_LOADED) == self.operation.operation_id:
            # What the snapshot holds is there, and works already: Resume makes it final, and Abort would throw it away.
            self.unheard.discard(participant_id)
            text = f"It opened by itself, with what was restored, and waits for Resume. {problem.message}"
            return [warned(text, participant_id), *(self.resume(now) if self.resume_wanted else [])]
        if self.stage in BEFORE_PUBLISH:
            return self.fail(problem, now)
        if self.stage == Stage.FAILED_PAUSED:
            self._add(problem)
            return []
        return [warned(f"It opened by itself after it had confirmed. {problem.message}", participant_id)]

    # ---- opening -----------------------------------------------------------------------------------------------------

    def open(self, phase: Phase, now: float, *, decided: bool = False) -> list[Effect]:
        """Tell everybody who may have heard of the operation to open: RESUME or ABORT.

        `decided`: that it is so is in the journal already.
        """
        out: list[Effect] = [*self.calls.cancel_all()]
        # A restore that has begun to open must never be taken for one that waits, so that is durable before anybody hears
        # of it. A save needs no such record: what its manifest does not say is presumed aborted. Its record comes after the
        # calls, and keeps nobody waiting.
        first = phase == Phase.RESUME and self.operation.kind == OperationKind.RESTORE and not decided
        out += [records.resuming(self.operation)] if first else []
        self.stage, self.phase, self.phase_began = STAGES[phase], phase, now
        told = [p for p in self.topology.participants if p.participant_id in self.evidence.attempted]
        self.opening = Opening(
            phase, waves(phase, told), self.operation, str(self.primary or "")[:1000],
            self.calls, self.lost, self._limits, now,
        )  # fmt: skip
        out += [Announce(PhaseStarted(phase, self.opening.told, self._limits.reserve_s)), *self.opening.advance(now)]
        out += [] if first or decided else [self._decided(phase)]
        return [*out, *self._advance(now)]

    def _decided(self, phase: Phase) -> Record:
        if phase == Phase.ABORT and self.primary is not None:
            return records.failing(RecordKind.ABORTING, self.operation, self.primary)
        return records.reached(RecordKind.PUBLISHED, self.operation)

    def not_opened(self, problem: Problem, now: float) -> list[Effect]:
        """The record that a restore opens is not durable, so nobody was told: it stays as it is, and loaded."""
        self.opening = None
        return self.fail(problem, now)

    def _advance(self, now: float) -> list[Effect]:
        opening = self.opening
        if opening is None:
            return []
        out = opening.advance(now)
        if self.stage not in OPENING_STAGES or not opening.finished(now):
            return out
        self._opening_took = now - self.phase_began if self._opening_took is None else self._opening_took
        return out if self._waits_for_word(now) else [*out, *self._end(opening, self._opening_took)]

    def _opening_ended(self, event: Replied | RefusedBy | NoAnswer | Misanswered, running: Running) -> list[Effect]:
        participant_id, opening, out = running.call.participant_id, self.opening, list[Effect]()
        if opening is None:
            raise RuntimeError("an opening call ended that nobody had made")
        opened = isinstance(event, Replied) and isinstance(event.proof, Opened)
        if isinstance(event, Replied) and isinstance(event.proof, Opened):
            self.evidence.opened[participant_id] = event.proof
            out = [Announce(ParticipantDone(self.phase, participant_id))] if self.stage in OPENING_STAGES else []
        elif isinstance(event, (RefusedBy, Misanswered)):
            self._add(self.mine(event.problem, participant_id))
        reason = event.problem.reason if isinstance(event, RefusedBy) else None
        opening.answered(running, event.now, opened=opened, reason=reason)
        return [*out, *self._advance(event.now)]

    def _end(self, opening: Opening, took_s: float) -> list[Effect]:
        for participant_id in opening.unconfirmed:
            text = "It has not said that it is open; it opens by itself when its lease lapses."
            silent = Problem(Reason.UNREACHABLE, text, waited_s=took_s)
            self._add(self.mine(silent, participant_id))
        outcome = Outcome.ABORTED if self.stage == Stage.ABORTING else Outcome.SUCCEEDED
        self.stage = Stage.ENDED
        if outcome == Outcome.ABORTED:
            mode = self.operation.options.quiesce_mode
            self.secondary = tuple(sentences.once_open(problem, mode) for problem in self.secondary)
        self.finish = Finish(outcome, self.primary, self.secondary, opening.unconfirmed, self.published)
        return [
            Announce(PhaseFinished(self.phase, took_s)),
            records.ended(self.operation, self.finish),
            self.finish,
        ]

    # ---- problems ----------------------------------------------------------------------------------------------------

    def mine(self, problem: Problem, participant_id: str = "") -> Problem:
        """The problem, with operation, phase and participant filled in."""
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


def warned(message: str, participant_id: str = "") -> Announce:
    return Announce(Warned(message, ParticipantId(participant_id) if participant_id else None))
