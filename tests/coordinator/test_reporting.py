"""Who is slow is told of while there is still time: at half and four fifths of a phase's budget, by name (FAILURES B58)."""

from __future__ import annotations

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.protocol import events as core
from coordinator.protocol.operation import Operation
from coordinator.protocol.proofs import Progress
from coordinator.reporting import Reporter
from coordinator.wire.errors import Blocked
from coordinator.wire.ids import OperationId, ParticipantId, SnapshotId
from coordinator.wire.terms import OperationKind, Phase

AGENT, OTHER = ParticipantId("agent-0"), ParticipantId("agent-1")


class Told:
    """A reporter with a clock, and the warnings that it made."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[pb.OperationEvent] = []
        operation = Operation(OperationKind.SAVE, OperationId("op-1"), SnapshotId("step-1"), 1)
        self.reporter = Reporter(operation, lambda: self.now, self.now, self.events.append)

    def start(self, budget_s: float | None, phase: Phase = Phase.PREPARE) -> None:
        self.reporter.announce(core.PhaseStarted(phase, (AGENT, OTHER), budget_s))

    def progress(self, after_s: float, who: ParticipantId = AGENT, in_flight: int = 2, *waiting: Blocked) -> None:
        self.now += after_s
        self.reporter.progress(
            Phase.PREPARE, who, Progress(in_flight, waiting_for=waiting, waiting_for_count=in_flight)
        )

    def warnings(self) -> list[str]:
        return [event.warning.message for event in self.events if event.HasField("warning")]


def test_half_and_four_fifths_of_the_time_are_told_once_with_who_is_waited_for() -> None:
    told = Told()
    told.start(60)
    for _ in range(59):
        told.progress(1.0, AGENT, 2, Blocked("r-17", turn=4, waiting_on="judge"))
    assert told.warnings() == [
        f"agent-0 is not done with prepare: {used} of 60 s are used ({share}%). It waits for r-17 (turn 4, on judge) and 1 more."
        for used, share in ((30, 50), (48, 80))
    ]
    assert {event.warning.participant_id for event in told.events if event.HasField("warning")} == {"agent-0"}


def test_each_participant_and_each_phase_has_its_own_marks() -> None:
    told = Told()
    told.start(10)
    told.progress(6)
    told.progress(0, OTHER)
    told.start(10, Phase.COMMIT)
    told.progress(1)
    told.progress(5)
    assert [text.split(" is ")[0] for text in told.warnings()] == ["agent-0", "agent-1", "agent-0"]


def test_nobody_is_told_of_who_is_in_time_or_has_nothing_in_flight_or_no_limit() -> None:
    told = Told()
    told.start(10)
    told.progress(4.9)
    told.progress(4, in_flight=0)
    told.start(None)
    told.progress(10_000)
    assert told.warnings() == []
