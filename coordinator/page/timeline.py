"""One operation as a document that the browser draws: a lane for each participant, phases as bars, counts as curves.

PURE. The rule: what is not known is absent, never guessed. A bar that was not seen to end is open; a participant that was
called and never heard of has a lane all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.history_record import Record, Told
from coordinator.wire.errors import Problem
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import Phase

MAX_POINTS: Final = 400  # of one lane; more are thinned out, since a lane is a thousand pixels wide at most
MAX_LANES: Final = 100
MAX_MARKS: Final = 200
MAX_WAITING: Final = 5
# Phases in which everybody is called; the coordinator has the others for itself.
COORDINATOR: Final = "coordinator"

Document = dict[str, Any]


def summary(record: Record) -> Document:
    """What a list shows of an operation."""
    problem = problem_from_detail(record.failed.primary) if record.failed is not None else None
    return {
        "operation_id": record.operation_id, "operation": record.operation, "snapshot_id": record.snapshot_id,
        "began_s": record.began_s, "elapsed_s": record.elapsed_s, "outcome": record.outcome, "phase": record.phase,
        "pause_s": record.pause_s, "size_bytes": record.size_bytes, "coverage": record.coverage,
        "totals": totals(record.snapshot.totals) if record.snapshot is not None else None,
        "in_engines": record.in_engines,
        "cause": f"{problem.reason.name}{f' at {problem.participant_id}' if problem.participant_id else ''}" if problem else "",
    }  # fmt: skip


def document(record: Record) -> Document:
    """Everything that is drawn of an operation. Seconds since it began."""
    drawing = _Drawing(record.elapsed_s)
    for who in record.participants:
        drawing.lane(str(who.get("participant_id", ""))).update(_described(who))
    for told in record.events:
        drawing.take(told)
    details = [record.failed.primary, *record.failed.secondary] if record.failed is not None else []
    blamed = frozenset(detail.participant_id for detail in details)
    return summary(record) | {
        "job_id": record.job_id, "epoch": record.epoch, "mode": record.mode, "stragglers": record.stragglers,
        "lease_s": record.lease_s or None, "trainer_driven": record.trainer_driven, "takeovers": record.takeovers,
        "dropped": record.dropped, "damaged": record.damaged, "unconfirmed": list(record.unconfirmed),
        "metadata": dict(record.snapshot.metadata) if record.snapshot is not None else {},
        "pause": drawing.pause(record), "phases": drawing.phases, "lanes": drawing.ordered(blamed),
        "lane_count": len(drawing.lanes),
        "marks": drawing.marks[:MAX_MARKS], "failure": failure(record.failed),
    }  # fmt: skip


def failure(failed: pb.Failed | None) -> Document | None:
    """The primary cause, and what followed from it."""
    if failed is None:
        return None
    return _problem(problem_from_detail(failed.primary)) | {
        "secondary": [_problem(problem_from_detail(detail)) for detail in failed.secondary]
    }


def totals(message: Any) -> dict[str, int]:
    """Rollouts by state."""
    return {name: int(getattr(message, name)) for name in ("completed", "parked", "pending", "excluded")}


def _problem(problem: Problem) -> Document:
    return {
        "reason": problem.reason.name, "message": problem.message, "next_step": problem.advice,
        "phase": problem.phase.name.lower() if problem.phase else "", "participant_id": problem.participant_id,
        "waited_s": problem.waited_s, "rollouts": [str(rollout) for rollout in problem.rollouts[:MAX_WAITING]],
        "rollout_count": max(problem.rollout_count, len(problem.rollouts)),
    }  # fmt: skip


def _described(who: Mapping[str, Any]) -> Document:
    return {
        "role": str(who.get("role", "")), "kind": str(who.get("participant_kind", "")),
        "state_survives_by": str(who.get("state_survives_by", "")), "workers": who.get("workers", 0),
        "depends_on": [str(name) for name in who.get("depends_on", ())],
    }  # fmt: skip


@dataclass(slots=True)
class _Drawing:
    """Folds events into lanes. `end_s`: when the operation was last heard of."""

    end_s: float
    phases: list[Document] = field(default_factory=list[Document])
    lanes: dict[str, Document] = field(default_factory=dict[str, Document])
    marks: list[Document] = field(default_factory=list[Document])
    opened_s: float | None = None

    def lane(self, name: str) -> Document:
        return self.lanes.setdefault(
            name,
            {"participant_id": name, "role": "", "kind": "", "state_survives_by": "", "workers": 0, "depends_on": [],
             "bars": [], "points": []},
        )  # fmt: skip

    def take(self, told: Told) -> None:
        at, event = round(told.at_s, 4), told.event
        match event.WhichOneof("event"):
            case "phase_started":
                self._close(at, done=False)
                begun = event.phase_started
                budget_s = convert.seconds(begun.budget) if begun.HasField("budget") else None
                self.phases.append(_bar(_name(begun.phase), at) | {"budget_s": budget_s})
                for name in begun.participant_ids:
                    self.lane(name)
            case "phase_finished":
                self._close(at, done=True)
            case "participant_called":
                called = event.participant_called
                for name in (called.participant_id, *called.also_called):
                    self._bar(name, _name(called.phase), at)
            case "participant_progress":
                self._progress(at, event.participant_progress)
            case "warning":
                self._mark(at, "warning", event.warning.message, event.warning.participant_id)
            case "saved":
                self._mark(at, "saved", f"{event.saved.snapshot.snapshot_id} is published")
            case "restored":
                self._mark(at, "restored", f"{event.restored.snapshot.snapshot_id} is loaded everywhere")
            case "resumed":
                self.opened_s = at
                self._mark(at, "resumed", "everybody is open")
            case "failed":
                problem = problem_from_detail(event.failed.primary)
                self._mark(at, "failed", f"{problem.reason.name}: {problem.message}", problem.participant_id)
            case _:
                pass

    def pause(self, record: Record) -> Document | None:
        """From the first gate that closed to the last that opened, as the gates measured it."""
        if record.pause_s is None or not record.pause_s:
            return None
        to_s = self.opened_s if self.opened_s is not None else self.end_s
        return {"from_s": max(0.0, round(to_s - record.pause_s, 4)), "to_s": to_s}

    def ordered(self, blamed: Set[str]) -> list[Document]:
        """Lanes in the order in which admission closes, so that a save reads as stairs.

        Of a large fleet: those that are to blame, and the slowest.
        """
        first = {"policy_model": 0, "engine": 1, "agent": 2, "resources": 3}
        chosen = sorted(self.lanes.values(), key=lambda lane: (lane["participant_id"] not in blamed, -self._slow(lane)))
        found = [lane | {"points": _thinned(lane["points"])} for lane in chosen[:MAX_LANES]]
        return sorted(found, key=lambda lane: (first.get(lane["role"], 9), lane["participant_id"]))

    def _slow(self, lane: Document) -> float:
        ends = ((bar["to_s"] if bar["to_s"] is not None else self.end_s) - bar["from_s"] for bar in lane["bars"])
        return float(max(ends, default=0.0))

    def _bar(self, name: str, phase: str, at: float) -> Document:
        bars: list[Document] = self.lane(name)["bars"]
        if bars and bars[-1]["phase"] == phase and bars[-1]["to_s"] is None:
            return bars[-1]
        bars.append(_bar(phase, at))
        return bars[-1]

    def _progress(self, at: float, step: pb.ParticipantProgress) -> None:
        phase = _name(step.phase)
        if not step.done:
            self._bar(step.participant_id, phase, at)
            self.lane(step.participant_id)["points"].append(_point(at, phase, step))
            return
        for name in (step.participant_id, *step.also_done):
            bar = next((b for b in reversed(self.lane(name)["bars"]) if b["phase"] == phase), None)
            if bar is not None and bar["to_s"] is None:
                bar.update(to_s=at, done=True)

    def _close(self, at: float, *, done: bool) -> None:
        """The phase is over: so is every bar of it that is still open."""
        if not self.phases or self.phases[-1]["to_s"] is not None:
            return
        self.phases[-1].update(to_s=at, done=done)
        for lane in self.lanes.values():
            for bar in lane["bars"]:
                if bar["to_s"] is None:
                    bar.update(to_s=at, done=done)

    def _mark(self, at: float, kind: str, text: str, participant_id: str = "") -> None:
        self.marks.append({"at_s": at, "kind": kind, "text": text, "participant_id": participant_id})


def _bar(phase: str, at: float) -> Document:
    return {"phase": phase, "from_s": at, "to_s": None, "done": False}


def _point(at: float, phase: str, step: pb.ParticipantProgress) -> Document:
    counts = ("in_flight", "parked", "held", "bytes_done", "bytes_total", "items_done", "items_total")
    return {"at_s": at, "phase": phase, "waiting": _waiting(step.waiting_for), "waiting_count": int(
        max(step.waiting_for_count, len(step.waiting_for)))} | {name: int(getattr(step, name)) for name in counts}  # fmt: skip


def _waiting(rows: Iterable[capabilities_pb2.RolloutActivity]) -> list[str]:
    return [str(blocked) for blocked in convert.blocked(rows)[:MAX_WAITING]]


def _thinned(points: list[Document]) -> list[Document]:
    """At most MAX_POINTS of them, the first and the last among them."""
    if len(points) <= MAX_POINTS:
        return points
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(number * step)] for number in range(MAX_POINTS)]


def _name(phase: int) -> str:
    known = {member.value: member.name.lower() for member in Phase}
    return known.get(phase, COORDINATOR)
