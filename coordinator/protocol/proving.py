"""Whether a reply shows what its phase needs.

PURE. The one rule: a proof is compared with what was discovered and what was asked, never with itself. A participant
that says how many workers it expects is not believed; the topology says how many are configured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from coordinator.protocol import sentences
from coordinator.protocol.operation import Operation
from coordinator.protocol.phases import PHASES
from coordinator.protocol.proofs import Committed, Confirmed, Opened, Prepared, Proof, RestoredProof
from coordinator.protocol.topology import Participant
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import Phase, RolloutState, StragglerPolicy, counted

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def check(
    phase: Phase,
    proof: Proof,
    participant: Participant,
    operation: Operation,
    prepared: Mapping[ParticipantId, Prepared],
) -> Problem | None:
    """Why `proof` does not prove `phase` for `participant`; None when it does.

    `prepared`: what was proved before, which Confirm must repeat.
    """
    expected = PHASES[phase].proof
    if expected is None or not isinstance(proof, expected):
        return _problem(
            Reason.PROTOCOL_VIOLATION, phase, participant,
            f"It answered {phase.name.lower()} with {type(proof).__name__}.",
        )  # fmt: skip
    if isinstance(proof, Opened):
        return None
    changed = _incarnation(phase, participant, proof.incarnation_id)
    if changed is not None:
        return changed
    if isinstance(proof, Prepared):
        return _prepared(proof, participant, operation)
    if isinstance(proof, Committed):
        return _committed(proof, participant, operation)
    if isinstance(proof, Confirmed):
        return _confirmed(proof, participant, prepared.get(participant.participant_id))
    return _restored(proof, participant, operation)


def incarnation_changed(phase: Phase, participant: Participant, now_is: IncarnationId) -> Problem:
    """The shim was restarted in between: what it had closed is open, what it knew is gone."""
    return _problem(
        Reason.INCARNATION_CHANGED, phase, participant,
        f"It was restarted: it was {participant.incarnation_id} at discovery and is {now_is} now.",
    )  # fmt: skip


def _incarnation(phase: Phase, participant: Participant, now_is: IncarnationId) -> Problem | None:
    return None if now_is == participant.incarnation_id else incarnation_changed(phase, participant, now_is)


def _prepared(proof: Prepared, participant: Participant, operation: Operation) -> Problem | None:
    acknowledged, configured = len(set(proof.workers)), participant.configured_workers
    if acknowledged < configured or proof.workers_silent:
        silent = f"; silent: {', '.join(proof.workers_silent)}" if proof.workers_silent else ""
        known = f" (acknowledged: {', '.join(sorted(set(proof.workers)))}{silent})" if proof.workers or silent else ""
        return _problem(
            Reason.WORKERS_MISSING, Phase.PREPARE, participant,
            f"{acknowledged} of {configured} workers acknowledged{known}.",
        )  # fmt: skip
    if proof.excluded_count > 0 and operation.options.straggler_policy == StragglerPolicy.FAIL:
        return Problem(
            Reason.DRAIN_INCOMPLETE,
            sentences.not_excluded(proof),
            phase=Phase.PREPARE, participant_id=participant.participant_id, rollouts=proof.excluded,
            rollout_count=proof.excluded_count, waited_s=proof.quiesce_s,
        )  # fmt: skip
    return None


def _committed(proof: Committed, participant: Participant, operation: Operation) -> Problem | None:
    wrong = [
        f"{what} {is_!r} instead of {should!r}"
        for what, is_, should in (
            ("operation", proof.operation_id, operation.operation_id),
            ("snapshot", proof.snapshot_id, operation.snapshot_id),
            ("participant", proof.participant_id, participant.participant_id),
        )
        if is_ != should
    ]
    if _DIGEST.fullmatch(proof.manifest_sha256) is None:
        wrong.append("a digest that is none")
    if not wrong:
        return None
    return _problem(
        Reason.PROTOCOL_VIOLATION,
        Phase.COMMIT,
        participant,
        f"Its manifest is not that of this cut: {'; '.join(wrong)}.",
    )


def _confirmed(proof: Confirmed, participant: Participant, before: Prepared | None) -> Problem | None:
    if before is None or proof.generation != before.generation:
        was = "never prepared" if before is None else f"{before.generation} when prepared"
        return _problem(
            Reason.PROTOCOL_VIOLATION, Phase.CONFIRM, participant,
            f"It confirms a freeze that was broken: admission generation {proof.generation}, {was}.",
        )  # fmt: skip
    if proof.lease_remaining_s <= 0:
        return _problem(Reason.LEASE_LAPSED, Phase.CONFIRM, participant, "Its lease has lapsed.")
    return None


def _restored(proof: RestoredProof, participant: Participant, operation: Operation) -> Problem | None:
    if proof.snapshot_id != operation.snapshot_id:
        return _problem(
            Reason.PROTOCOL_VIOLATION, Phase.RESTORE, participant,
            f"It loaded snapshot {proof.snapshot_id!r} instead of {operation.snapshot_id!r}.",
        )  # fmt: skip
    part = operation.parts.get(participant.participant_id)
    wrong = _unaccounted(proof, part.totals) if part is not None and part.loads else ""
    return _problem(Reason.LEDGER_UNBALANCED, Phase.RESTORE, participant, wrong) if wrong else None


def _unaccounted(proof: RestoredProof, saved: Mapping[str, int]) -> str:
    """Which rollouts of its manifest a participant has lost, invented or moved without a word; empty when none."""
    now = {state.name.lower(): proof.totals.get(state, 0) for state in RolloutState if state}
    before = {name: saved.get(name, 0) for name in now}
    if sum(now.values()) != sum(before.values()):
        return f"It accounts for {counted(sum(now.values()), 'rollout')}, and its manifest has {sum(before.values())}."
    if now["completed"] != before["completed"]:
        return f"It has {counted(now['completed'], 'finished rollout')}, and its manifest has {before['completed']}."
    for name in ("parked", "pending"):
        if now[name] > before[name]:
            return f"It has {counted(now[name], f'{name} rollout')}, and its manifest has {before[name]}."
    restart = now["excluded"] - before["excluded"]
    if restart > proof.diverged_count:
        return f"{counted(restart, 'rollout', 'restarts', 'restart')} that its manifest has, and it names {proof.diverged_count}."
    return ""


def _problem(reason: Reason, phase: Phase, participant: Participant, message: str) -> Problem:
    return Problem(reason, message, phase=phase, participant_id=participant.participant_id)
