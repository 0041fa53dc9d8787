"""Spans of operations: one for each save and restore, its phases, and each participant's part of a phase.

The rule: spans follow what is told to everybody else, so that a trace can say nothing else than `safepoint status`; an
operation never waits for them, and never fails by them. Only loaded where traces are on.

    safepoint.save                     child of the trainer's span, when its call carried one
      safepoint.prepare                a phase
        safepoint.prepare counter      a participant's part; its shim's own span is a child of it
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert, outcomes
from coordinator.driver import Drive
from coordinator.outcomes import Ended
from coordinator.protocol.operation import Outcome
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import Phase
from coordinator.wire.trace import Metadata, Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A span of what was broken off: why is told later. `ended_ns`: since 1970."""

    span: Any
    phase_no: int
    participant_id: str
    ended_ns: int


@dataclass(slots=True)
class _Open:
    """The spans of one operation that have not ended."""

    span: Any
    phase: Any = None
    phase_no: int = 0
    parts: dict[str, Any] = field(default_factory=dict[str, Any])  # by participant, of the present phase
    cut: list[_Cut] = field(default_factory=list[_Cut])


class Traces:
    """Takes in events on the coordinator's event loop."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, _Open] = {}

    def began(self, drive: Drive, *, taken_over: bool = False) -> None:
        """An operation begins."""
        operation = drive.operation
        span = self._tracer.start(
            f"safepoint.{operation.kind.name.lower()}", drive.identity.trace, operation_id=operation.operation_id,
            snapshot_id=operation.snapshot_id, coordinator_epoch=operation.coordinator_epoch, taken_over=taken_over or None,
        )  # fmt: skip
        self._open[operation.operation_id] = _Open(span)

    def offer(self, event: pb.OperationEvent) -> None:
        """One event of the feed."""
        found = self._open.get(event.operation_id)
        if found is None:
            return
        match event.WhichOneof("event"):
            case "phase_started":
                self._cut(found)
                name, number = f"safepoint.{_name(event.phase_started.phase)}", event.phase_started.phase
                found.phase, found.phase_no = self._tracer.start(name, found.span), number
            case "participant_called":
                called = event.participant_called
                for name in (called.participant_id, *called.also_called):
                    self._called(found, called.phase, name)
            case "participant_progress":
                step = event.participant_progress
                for name in (step.participant_id, *step.also_done) if step.done else ():
                    if (part := found.parts.pop(name, None)) is not None:
                        part.end()
            case "phase_finished":
                if event.phase_finished.phase == found.phase_no and found.phase is not None:
                    found.phase.end()
                    found.phase, found.phase_no = None, 0
            case "warning":
                found.span.add_event(
                    "warning", {"message": event.warning.message, "participant": event.warning.participant_id}
                )
            case "failed":
                self._blame(found, event.failed)
            case _:
                pass

    def ended(self, drive: Drive, ended: Ended) -> None:
        """An operation has ended."""
        found = self._open.pop(ended.operation_id, None)
        if found is None:
            return
        self._cut(found)
        for each in found.cut:
            each.span.end(end_time=each.ended_ns)
        for key, value in outcomes.fields(ended).items():
            found.span.set_attribute(f"safepoint.{key}", value)
        if ended.outcome is not Outcome.SUCCEEDED:
            primary = problem_from_detail(ended.failed.primary) if ended.failed is not None else None
            self._tracer.fail(
                found.span,
                primary.reason.name if primary else "ABORTED",
                primary.message if primary else "It was aborted.",
            )
        found.span.end()

    def carried(self, operation_id: str, participant_id: str) -> Metadata:
        """What goes along with the call of a participant in the present phase. Raises nothing."""
        found = self._open.get(operation_id)
        part = found.parts.get(participant_id) if found is not None else None
        try:
            return self._tracer.carried(part) if part is not None else ()
        except Exception:
            log.exception("the context of a span cannot be sent along")
            return ()

    def _called(self, found: _Open, phase: int, participant_id: str) -> None:
        if found.phase is None or phase != found.phase_no:
            return
        again = found.parts.pop(participant_id, None)
        if again is not None:  # another attempt: the one before got no answer
            self._tracer.fail(again, "UNREACHABLE", "It was called again.")
            again.end()
        name = f"safepoint.{_name(phase)} {participant_id}"
        found.parts[participant_id] = self._tracer.start(name, found.phase, participant_id=participant_id)

    def _blame(self, found: _Open, failed: pb.Failed) -> None:
        self._cut(found, keep_phase=True)
        for detail in reversed((failed.primary, *failed.secondary)):  # the primary cause is the last word
            problem = problem_from_detail(detail)
            for each in found.cut:
                whose = each.participant_id in ("", problem.participant_id)
                if whose and each.phase_no == problem.phase:
                    self._tracer.fail(each.span, problem.reason.name, problem.message)

    def _cut(self, found: _Open, keep_phase: bool = False) -> None:
        """What has not finished is broken off here; its spans end when it is known why."""
        now, number = time.time_ns(), found.phase_no
        if keep_phase and number in (int(Phase.RESUME), int(Phase.ABORT)):
            return  # opening goes on after the failure was told
        for participant_id, span in found.parts.items():
            span.set_attribute("safepoint.unfinished", True)
            found.cut.append(_Cut(span, number, participant_id, now))
        found.parts.clear()
        if found.phase is not None:
            found.phase.set_attribute("safepoint.unfinished", True)
            found.cut.append(_Cut(found.phase, number, "", now))
        found.phase, found.phase_no = None, 0


def _name(phase: int) -> str:
    return convert.enum(Phase, phase).name.lower()
