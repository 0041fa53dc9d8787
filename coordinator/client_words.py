"""The events of an operation, in a line each for people.

PURE but for the contract's messages: no clock, no sockets.
"""

from __future__ import annotations

from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.client_results import seconds, size_text
from coordinator.wire.errors import Blocked
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import Phase, counted


def describe(event: pb.OperationEvent) -> str:
    """One line for people; empty for an event that tells them nothing: that a participant is called, or one not known here."""
    kind = event.WhichOneof("event")
    at = f"{seconds(event.elapsed):7.2f} s  "
    if kind == "phase_started":
        count = len(event.phase_started.participant_ids)
        return f"{at}{_phase(event.phase_started.phase)}" + (f": {counted(count, 'participant')}" if count else "")
    if kind == "phase_finished":
        return f"{at}{_phase(event.phase_finished.phase)}: done in {seconds(event.phase_finished.duration):.2f} s"
    if kind == "participant_progress":
        return at + _progress_text(event.participant_progress)
    if kind == "warning":
        who = f"{event.warning.participant_id}: " if event.warning.participant_id else ""
        return f"{at}warning: {who}{event.warning.message}"
    if kind == "saved":
        return f"{at}saved {event.saved.snapshot.snapshot_id}"
    if kind == "restored":
        return f"{at}restored {event.restored.snapshot.snapshot_id}, {counted(event.restored.sessions, 'session')}"
    if kind == "resumed":
        return f"{at}resumed after {seconds(event.resumed.pause):.2f} s of pause"
    if kind == "failed":
        return f"{at}failed: {problem_from_detail(event.failed.primary)}"
    return ""


def _progress_text(step: pb.ParticipantProgress) -> str:
    parts = ["done" if step.done else ""]
    if step.bytes_done:
        parts.append(size_text(step.bytes_done) + (f" of {size_text(step.bytes_total)}" if step.bytes_total else ""))
    if step.items_done and not step.bytes_done:
        parts.append(counted(step.items_done, "item") + (f" of {step.items_total}" if step.items_total else ""))
    parts += [
        f"{n} {what}" for n, what in ((step.in_flight, "in flight"), (step.parked, "parked"), (step.held, "held")) if n
    ]
    if step.waiting_for:
        shown = ", ".join(
            str(Blocked(r.rollout_id, r.attempt, r.turn, seconds(r.age), r.waiting_on, no_client_s(r)))
            for r in step.waiting_for[:3]
        )
        more = max(step.waiting_for_count, len(step.waiting_for)) - min(3, len(step.waiting_for))
        parts.append(f"waiting for {shown}" + (f" and {more} more" if more > 0 else ""))
    also = f" and {len(step.also_done)} more" if step.also_done else ""
    return f"{_phase(step.phase)} {step.participant_id}{also}: {', '.join(p for p in parts if p) or 'working'}"


def no_client_s(rollout: capabilities_pb2.RolloutActivity) -> float | None:
    """Seconds since the last client that waited for it left; None while somebody waits."""
    return seconds(rollout.no_client_for) if rollout.HasField("no_client_for") else None


def _phase(number: int) -> str:
    try:
        return Phase(number).name.lower()
    except ValueError:
        return f"phase {number}"
