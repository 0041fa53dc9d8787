"""One phase that calls its waves one after the other until everybody has shown the proof.

PURE. The one rule: a wave begins only when the one before it has proved everything, and no call begins after the
deadline. What a failure means is not decided here but in `transaction`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.protocol import sentences
from coordinator.protocol.calls import CallBook, Running
from coordinator.protocol.events import (
    Announce,
    Arguments,
    Call,
    CommitArguments,
    ConfirmArguments,
    Effect,
    ParticipantDone,
    PhaseStarted,
    PrepareArguments,
    RestoreArguments,
    Warned,
)
from coordinator.protocol.operation import Limits, Operation, RestorePart
from coordinator.protocol.phases import waves
from coordinator.protocol.proofs import Committed, Confirmed, Opened, Prepared, Progress, Proof, RestoredProof
from coordinator.protocol.topology import Topology, mode_for
from coordinator.wire.errors import Problem
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import Phase


@dataclass(slots=True)
class Evidence:
    """What has been shown so far, by participant. `attempted`: everybody who may have heard of the operation."""

    attempted: set[ParticipantId] = field(default_factory=lambda: set[ParticipantId]())
    prepared: dict[ParticipantId, Prepared] = field(default_factory=lambda: dict[ParticipantId, Prepared]())
    committed: dict[ParticipantId, Committed] = field(default_factory=lambda: dict[ParticipantId, Committed]())
    restored: dict[ParticipantId, RestoredProof] = field(default_factory=lambda: dict[ParticipantId, RestoredProof]())
    opened: dict[ParticipantId, Opened] = field(default_factory=lambda: dict[ParticipantId, Opened]())
    lease_until: dict[ParticipantId, float] = field(default_factory=lambda: dict[ParticipantId, float]())
    progress: dict[ParticipantId, Progress] = field(default_factory=lambda: dict[ParticipantId, Progress]())

    def holds_until(self) -> float:
        """Until when every confirmed freeze is known to hold."""
        return min(self.lease_until.values(), default=0.0)


class PhaseRun:
    """The waves of one phase. Adds to `evidence`, and clears its progress, which is of one phase only."""

    def __init__(
        self,
        phase: Phase,
        operation: Operation,
        topology: Topology,
        evidence: Evidence,
        calls: CallBook,
        limits: Limits,
        deadline: float,
        now: float,
    ) -> None:
        self.phase = phase
        self.began = now
        self.deadline = deadline
        self._operation = operation
        self._participants = {p.participant_id: p for p in topology.participants}
        self._evidence = evidence
        self._calls = calls
        self._limits = limits
        self._waves = waves(phase, topology.participants)
        self._wave: set[ParticipantId] = set()
        self._called = False  # whether the present wave was called
        evidence.progress.clear()

    @property
    def done(self) -> bool:
        """Whether everybody has shown the proof."""
        return not self._wave and not self._waves

    @property
    def wave(self) -> list[ParticipantId]:
        """Who of the present wave has not shown it."""
        return sorted(self._wave)

    @property
    def pending(self) -> tuple[ParticipantId, ...]:
        """Who of any wave has not shown it."""
        return tuple(sorted(self._wave.union(*self._waves)))

    def announce(self) -> Effect:
        """That it begins, and with whom."""
        return Announce(
            PhaseStarted(self.phase, tuple(p for wave in self._waves for p in wave), self.deadline - self.began)
        )

    def advance(self, now: float) -> list[Effect] | None:
        """The calls of the next wave when this one is through; None when the deadline has passed instead."""
        if self._wave or not self._waves:
            return []
        self._wave, self._called = set(self._waves.pop(0)), now < self.deadline
        if not self._called:
            return None
        return [self._call(participant_id, now) for participant_id in self.wave]

    def repeat_due(self, now: float) -> list[Effect]:
        """The calls that got no answer and whose time has come again."""
        return [self._call(retry.participant_id, now, retry.attempt) for retry in self._calls.due(now)]

    def repeats(self, running: Running, now: float) -> bool:
        """Whether a call that got no answer will be made again, a few times and before the deadline."""
        return running.attempt < self._limits.attempts and self._calls.retry_later(running, now) < self.deadline

    def next_at(self) -> float:
        """When time alone changes something."""
        retry = self._calls.next_retry()
        return self.deadline if retry is None else min(self.deadline, retry)

    def too_late(self, now: float) -> Problem:
        """Why the phase did not end before its deadline, naming who is late and what they last said."""
        return sentences.deadline_passed(
            self._operation, self.phase, self.wave, self._evidence.progress, now - self.began, called=self._called,
            reserve_s=self._limits.reserve_s,
        )  # fmt: skip

    def accept(self, running: Running, proof: Proof) -> list[Effect]:
        """Count a proof that was checked."""
        participant_id, evidence = running.call.participant_id, self._evidence
        out: list[Effect] = [Announce(ParticipantDone(self.phase, participant_id))]
        match proof:
            case Prepared():
                evidence.prepared[participant_id] = proof
                if proof.excluded_count:
                    text = sentences.excluded(proof, self._operation.snapshot_id)
                    out.append(Announce(Warned(text, participant_id)))
            case Committed():
                evidence.committed[participant_id] = proof
            case Confirmed():
                # What remained was measured after the call was sent: counting from then is on the safe side.
                evidence.lease_until[participant_id] = running.sent_at + proof.lease_remaining_s
            case RestoredProof():
                evidence.restored[participant_id] = proof
                if proof.diverged_count:
                    text = f"{proof.diverged_count} of the rollouts that it knows restart from their input."
                    out.append(Announce(Warned(text, participant_id)))
            case Opened():
                evidence.opened[participant_id] = proof
        self._wave.discard(participant_id)
        return out

    def _call(self, participant_id: ParticipantId, now: float, attempt: int = 1) -> Call:
        self._evidence.attempted.add(participant_id)
        timeout = self.deadline - now
        if self.phase == Phase.CONFIRM:
            timeout = min(timeout, self._limits.confirm_call_s)
        arguments = self._arguments(participant_id)
        return self._calls.make(
            participant_id, self.phase, timeout, self._operation.operation_id, arguments, now, attempt
        )

    def _arguments(self, participant_id: ParticipantId) -> Arguments:
        operation, options = self._operation, self._operation.options
        if self.phase == Phase.PREPARE:
            mode = mode_for(self._participants[participant_id], options.quiesce_mode)
            return PrepareArguments(mode, options.straggler_policy, options.straggler_grace_s, options.lease_ttl_s)
        if self.phase == Phase.COMMIT:
            return CommitArguments(operation.snapshot_id)
        if self.phase == Phase.CONFIRM:
            prepared = self._evidence.prepared[participant_id]
            return ConfirmArguments(prepared.incarnation_id, prepared.generation)
        part = operation.parts.get(participant_id, RestorePart())
        return RestoreArguments(
            operation.snapshot_id, part.manifest_sha256, part.source_participant_id, options.lease_ttl_s,
            part.sources, operation.placements,
        )  # fmt: skip
