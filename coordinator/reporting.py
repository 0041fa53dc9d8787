"""What an operation tells: the core's values as messages for those who follow it.

The rule: every event carries the operation, a sequence that counts up within it, and the time since it began, so that a
follower can order, resume and drop what it has seen. Nothing here decides or waits. Of a large phase who is called and who
is done in one moment is told together: an event for each would cost more than the rest of a participant's part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from safepoint.v1 import coordinator_service_pb2, manifest_pb2

from coordinator import convert
from coordinator.feed import FEW, HISTORY_LENGTH
from coordinator.protocol import events as core
from coordinator.protocol.operation import Operation
from coordinator.protocol.proofs import Progress
from coordinator.wire.errors import Problem
from coordinator.wire.ids import ParticipantId
from coordinator.wire.marks import Marks, Use
from coordinator.wire.rpc import detail_from_problem
from coordinator.wire.terms import Phase

MAX_SECONDARY = 20
SHOWN = 5


@dataclass(slots=True)
class Reporter:
    """Numbers the events of one operation and hands them to `publish`; keeps those that are worth showing later."""

    operation: Operation
    clock: Callable[[], float]
    began_at: float
    publish: Callable[[coordinator_service_pb2.OperationEvent], None]
    history: deque[coordinator_service_pb2.OperationEvent] = field(
        default_factory=lambda: deque[coordinator_service_pb2.OperationEvent](maxlen=HISTORY_LENGTH)
    )
    _sequence: int = 0
    _budget: tuple[float, float | None] = (0.0, None)  # of the phase that runs: since when, and how many seconds
    _marks: Marks = field(default_factory=Marks)
    _large: bool = False  # the phase that runs
    _done: list[ParticipantId] = field(default_factory=list[ParticipantId])  # of it, and not told yet
    _phase: Phase = Phase.UNSPECIFIED  # whose they are

    @property
    def holds_back(self) -> bool:
        """Whether something waits to be told together with what comes next: call `flush` within a moment."""
        return bool(self._done)

    def flush(self) -> None:
        """Tell who is done. Whatever else is told does so first."""
        if not self._done:
            return
        (first, *others), self._done = self._done, []
        self._tell(
            keep=False,
            participant_progress=coordinator_service_pb2.ParticipantProgress(
                phase=convert.wire(self._phase), participant_id=first, done=True, also_done=others
            ),
        )

    def announce(self, what: core.PhaseStarted | core.ParticipantDone | core.PhaseFinished | core.Warned) -> None:
        """Tell what the core announces."""
        match what:
            case core.PhaseStarted():
                self._budget, self._marks = (self.clock(), what.budget_s), Marks()
                self._large = len(what.participant_ids) > FEW
                self._tell(
                    phase_started=coordinator_service_pb2.PhaseStarted(
                        phase=convert.wire(what.phase),
                        participant_ids=what.participant_ids,
                        budget=convert.duration(what.budget_s) if what.budget_s is not None else None,
                        lease_ttl=convert.duration(self.operation.options.lease_ttl_s),
                    )
                )
            case core.ParticipantDone():
                self._phase = what.phase
                self._done.append(what.participant_id)
                if not self._large:
                    self.flush()
            case core.PhaseFinished():
                self._tell(
                    phase_finished=coordinator_service_pb2.PhaseFinished(
                        phase=convert.wire(what.phase), duration=convert.duration(what.duration_s)
                    )
                )
            case core.Warned():
                self.warn(what.message, what.participant_id or "")

    def warn(self, message: str, participant_id: str = "") -> None:
        """Something a person should know."""
        self._tell(warning=coordinator_service_pb2.Warning(message=message, participant_id=participant_id))

    def called(self, phase: Phase, participant_ids: Sequence[ParticipantId]) -> None:
        """The parts of these participants of a phase begin."""
        together = [participant_ids] if self._large else [[each] for each in participant_ids]
        for first, *others in together:
            self._tell(
                keep=False,
                participant_called=coordinator_service_pb2.ParticipantCalled(
                    phase=convert.wire(phase), participant_id=first, also_called=others
                ),
            )

    def progress(self, phase: Phase, participant_id: ParticipantId, how_far: Progress) -> None:
        """One participant moved. Not kept: the next one replaces it."""
        message = coordinator_service_pb2.ParticipantProgress(
            phase=convert.wire(phase),
            participant_id=participant_id,
            in_flight=how_far.in_flight,
            parked=how_far.parked,
            held=how_far.held,
            bytes_done=how_far.bytes_done,
            bytes_total=how_far.bytes_total,
            waiting_for=convert.activities(how_far.waiting_for),
            waiting_for_count=how_far.waiting_for_count,
            items_done=how_far.items_done,
            items_total=how_far.items_total,
        )
        self._tell(keep=False, participant_progress=message)
        began_at, budget_s = self._budget
        if budget_s and how_far.in_flight:
            taken = Use(
                participant_id,
                f"{participant_id} is not done with {phase.name.lower()}",
                self.clock() - began_at,
                budget_s,
                "s",
            )
            for use in self._marks.look([taken]):
                self.warn(f"{use}{_waits_for(how_far)}", participant_id)

    def saved(
        self, manifest: manifest_pb2.SnapshotManifest, pause_s: float, unconfirmed: Sequence[str]
    ) -> coordinator_service_pb2.OperationEvent:
        """The save is done."""
        return self._tell(
            saved=coordinator_service_pb2.Saved(
                snapshot=snapshot_info(manifest), pause=convert.duration(pause_s), unconfirmed=unconfirmed
            )
        )

    def restored(self, done: coordinator_service_pb2.RestoreDone) -> coordinator_service_pb2.OperationEvent:
        """The restore is done."""
        return self._tell(restored=done)

    def resumed(
        self, pause_s: float, acknowledged: Iterable[str], unconfirmed: Iterable[str]
    ) -> coordinator_service_pb2.OperationEvent:
        """Admission is open."""
        return self._tell(
            resumed=coordinator_service_pb2.Resumed(
                pause=convert.duration(pause_s), acknowledged=sorted(acknowledged), unconfirmed=sorted(unconfirmed)
            )
        )

    def failed(self, primary: Problem, secondary: Sequence[Problem]) -> coordinator_service_pb2.OperationEvent:
        """It ended without success, or stands still after a failure."""
        return self._tell(failed=failure(primary, secondary))

    def _tell(self, *, keep: bool = True, **event: Any) -> coordinator_service_pb2.OperationEvent:
        self.flush()
        self._sequence += 1
        message = coordinator_service_pb2.OperationEvent(
            operation_id=self.operation.operation_id,
            sequence=self._sequence,
            elapsed=convert.duration(self.clock() - self.began_at),
            **event,
        )
        if keep:
            self.history.append(message)
        self.publish(message)
        return message


def failure(primary: Problem, secondary: Sequence[Problem]) -> coordinator_service_pb2.Failed:
    """Why it failed: one primary cause, and what else went wrong."""
    return coordinator_service_pb2.Failed(
        primary=detail_from_problem(primary),
        secondary=[detail_from_problem(each) for each in secondary[:MAX_SECONDARY]],
    )


def _waits_for(how_far: Progress) -> str:
    """Which rollouts, as the end of a sentence; empty when it does not say."""
    shown = [
        f"{r.rollout_id} (turn {r.turn}{f', on {r.waiting_on}' if r.waiting_on else ''})"
        for r in how_far.waiting_for[:SHOWN]
    ]
    more = max(how_far.waiting_for_count, len(how_far.waiting_for)) - len(shown)
    return f" It waits for {', '.join(shown)}{f' and {more} more' if more > 0 else ''}." if shown else ""


def snapshot_info(
    manifest: manifest_pb2.SnapshotManifest, pin_reason: str = ""
) -> coordinator_service_pb2.SnapshotInfo:
    """What a list shows of a snapshot; `pin_reason` is empty for one that is not pinned."""
    return coordinator_service_pb2.SnapshotInfo(
        snapshot_id=manifest.snapshot_id,
        operation_id=manifest.operation_id,
        create_time=manifest.create_time,
        size_bytes=manifest.ledger_size_bytes + sum(each.size_bytes for each in manifest.participants),
        totals=manifest.totals,
        participant_ids=[each.participant_id for each in manifest.participants],
        topology_fingerprint=manifest.topology_fingerprint,
        metadata=manifest.metadata,
        pin_reason=pin_reason,
        weights={each.participant_id: each.weights for each in manifest.participants if each.HasField("weights")},
        engine_requests={
            each.participant_id: each.engine_requests for each in manifest.participants if each.engine_requests
        },
    )
