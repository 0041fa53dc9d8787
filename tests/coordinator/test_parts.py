"""Small parts: the ledger's lines, the feed, the registry, the pause, conversions."""

from __future__ import annotations

import asyncio
import json

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from safepoint.v1 import capabilities_pb2, manifest_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert, ledger_lines
from coordinator.client_heard import Heard
from coordinator.feed import FEW, Feed
from coordinator.pause import PauseMeter
from coordinator.protocol import events as core
from coordinator.protocol.ledger import Line
from coordinator.protocol.operation import Operation
from coordinator.protocol.topology import Participant
from coordinator.registry import Registry
from coordinator.reporting import Reporter
from coordinator.wire.errors import Problem, Reason, SafepointError, Unanswered
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.terms import CheckpointMode, OperationKind, Phase, QuiesceMode, Role, RolloutState

texts = st.text(max_size=30).filter(lambda text: text.isprintable())
lines = st.builds(
    Line,
    rollout_id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,20}", fullmatch=True),
    attempt=st.integers(0, 2**32 - 1),
    state=st.sampled_from([s for s in RolloutState if s]),
    reason=texts,
    participant_id=st.sampled_from(["", "agent-0"]),
    recorded_calls=st.integers(0, 2**64 - 1),
    waiting_on=texts,
    input_sha256=st.sampled_from(["", "a" * 64]),
)


@given(lines)
def test_a_ledger_line_is_what_protobuf_would_write_and_reads_back(line: Line) -> None:
    raw = ledger_lines.encode(line)
    parsed = json_format.Parse(raw.decode(), manifest_pb2.LedgerEntry())
    assert parsed == ledger_lines.entry(line)
    assert ledger_lines.decode(raw, "x") == line
    theirs = json_format.MessageToJson(parsed, preserving_proto_field_name=True, indent=None)
    assert ledger_lines.decode(theirs.encode(), "x") == line
    assert json.loads(raw) == json.loads(theirs)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", Reason.SNAPSHOT_CORRUPT),
        (b"[]", Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED"', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r"}', Reason.SNAPSHOT_CORRUPT),
        (b'{"state":"ROLLOUT_STATE_PARKED"}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"../r","state":"ROLLOUT_STATE_PARKED"}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED","attempt":-1}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED","attempt":true}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED","attempt":4294967296}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED","recorded_calls":"1e3"}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED","reason":7}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED","participant_id":"../x"}', Reason.SNAPSHOT_CORRUPT),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_FOO"}', Reason.SNAPSHOT_TOO_NEW),
        (b'{"rollout_id":"r","state":"ROLLOUT_STATE_PARKED","extra":1}', Reason.SNAPSHOT_TOO_NEW),
    ],
)
def test_a_ledger_line_is_read_strictly(raw: bytes, expected: Reason) -> None:
    with pytest.raises(SafepointError) as caught:
        ledger_lines.decode(raw, "x")
    assert caught.value.reason is expected


async def test_a_slow_follower_loses_the_oldest_and_is_told() -> None:
    feed = Feed()
    with feed.follow(limit=3) as follower, feed.follow("other") as deaf:
        for n in range(5):
            feed.publish(pb.OperationEvent(operation_id="save-1", sequence=n))
        await asyncio.wait_for(follower.wait(), 1)
        assert follower.resync()
        assert not follower.resync()
        assert [follower.take().sequence for _ in range(3)] == [2, 3, 4]  # type: ignore[union-attr]
        assert follower.take() is None
        assert deaf.take() is None
    feed.publish(pb.OperationEvent(operation_id="save-1", sequence=9))
    assert follower.take() is None


def participant(incarnation: str = "i-1", name: str = "agent", address: str = "a:1") -> Participant:
    return Participant(
        ParticipantId(name), Role.AGENT, "k", CheckpointMode.EXPORT_RESTORE, IncarnationId(incarnation), address
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def registry() -> tuple[Registry, Clock, list[Problem], list[Participant]]:
    clock, lost, joined = Clock(), list[Problem](), list[Participant]()
    made = Registry(clock, silence_s=3.0)
    made.follow(lambda _, problem: lost.append(problem), joined.append)
    return made, clock, lost, joined


def test_a_dead_shim_is_replaced_and_its_loss_is_told() -> None:
    made, clock, lost, joined = registry()
    made.register(participant("i-1"))
    clock.now = 3.0
    with pytest.raises(SafepointError) as caught:
        made.register(participant("i-2"))
    assert caught.value.reason is Reason.DUPLICATE_PARTICIPANT
    clock.now = 3.1
    made.register(participant("i-2"))
    assert [p.reason for p in lost] == [Reason.INCARNATION_CHANGED]
    assert [p.incarnation_id for p in joined] == ["i-1", "i-2"]
    assert [p.incarnation_id for p in made.participants()] == ["i-2"]


def test_the_same_process_on_a_new_stream_is_no_loss_and_its_old_stream_ends_quietly() -> None:
    made, _, lost, _ = registry()
    old = made.register(participant())
    new = made.register(participant())
    assert not old.alive
    made.leave(old, "its stream ended")
    assert lost == []
    assert made.get("agent") is not None
    made.leave(new, "its stream ended")
    assert [p.reason for p in lost] == [Reason.UNREACHABLE]
    assert made.get("agent") is None


def test_silence_is_counted_from_the_last_heartbeat_and_forgiven_when_it_was_ours() -> None:
    made, clock, lost, _ = registry()
    session = made.register(participant())
    clock.now = 3.0
    made.beat(session)
    clock.now = 6.0
    made.reap()
    assert lost == []
    clock.now = 20.0
    made.forgive()
    made.reap()
    assert lost == []
    clock.now = 23.1
    made.reap()
    assert "silent" in lost[0].message


def test_a_static_participant_that_was_restarted_or_is_gone_is_told() -> None:
    made, _, lost, joined = registry()
    made.set_static(participant("i-1"))
    made.set_static(participant("i-1"))
    made.set_static(participant("i-2"))
    made.forget_static("a:1")
    assert [p.reason for p in lost] == [Reason.INCARNATION_CHANGED, Reason.UNREACHABLE]
    assert [p.incarnation_id for p in joined] == ["i-1", "i-2"]
    made.set_static(participant("i-3"))
    with pytest.raises(SafepointError):
        made.set_static(participant("i-3", address="b:1"))


def test_the_pause_is_first_closed_to_last_open_with_each_closing_as_its_gate_measured_it() -> None:
    meter = PauseMeter()
    assert meter.seconds() == 0
    a, b = ParticipantId("a"), ParticipantId("b")
    meter.closed(a, 10.0)
    meter.closed(b, 10.5)
    meter.closed(a, 11.0)
    meter.opened(b, 13.0, 1.0)
    assert meter.seconds() == pytest.approx(1.5)
    meter.opened(a, 14.0, 2.5)
    assert meter.seconds() == pytest.approx(2.5)
    meter.opened(a, 99.0, 50.0)
    assert meter.seconds() == pytest.approx(2.5)


def test_news_of_a_closing_that_comes_late_hides_no_part_of_the_pause() -> None:
    meter = PauseMeter()
    meter.closed(ParticipantId("a"), 10.3)  # it had closed at 10.0
    meter.opened(ParticipantId("a"), 10.4, 0.4)
    assert meter.seconds() == pytest.approx(0.4)


def test_a_participant_survives_the_wire() -> None:
    found = Participant(
        ParticipantId("m"), Role.POLICY_MODEL, "gym.model", CheckpointMode.STATELESS, IncarnationId("i"), "x:1",
        quiesce_modes=(QuiesceMode.DRAIN,), configured_workers=3, state_schema="s", checkpoint_mode_reason="r",
        depends_on=("a",), upstream_endpoints=("http://x",), config_digest="d", features=("f",), shim_version="1",
    )  # fmt: skip
    assert convert.participant(convert.capabilities(found), found.incarnation_id, found.address) == found


def test_enum_values_of_a_newer_version_become_unspecified() -> None:
    assert convert.enum(QuiesceMode, 99) is QuiesceMode.UNSPECIFIED


def step(name: str, number: int) -> pb.OperationEvent:
    event = pb.OperationEvent(operation_id="save-1", sequence=number)
    getattr(event, name).participant_id = f"p-{number}"
    if name == "participant_progress":
        event.participant_progress.done = True
    return event


async def test_of_a_large_fleet_a_follower_is_not_told_who_was_done_when_the_phase_is() -> None:
    feed = Feed()
    with feed.follow() as follower:
        feed.publish(pb.OperationEvent(operation_id="save-1", phase_started=pb.PhaseStarted()))
        for number in range(500):
            feed.publish(step("participant_called" if number % 2 else "participant_progress", number))
        stands = pb.OperationEvent(operation_id="save-1", sequence=500)
        stands.participant_progress.held = 3
        feed.publish(stands)
        feed.publish(pb.OperationEvent(operation_id="save-1", sequence=501, phase_finished=pb.PhaseFinished()))
        async with asyncio.timeout(10):
            await follower.wait()
        got = list(iter(follower.take, None))
        assert [event.WhichOneof("event") for event in got] == [
            "phase_started", "participant_progress", "phase_finished",
        ]  # fmt: skip
        assert got[1].participant_progress.held == 3
        assert not follower.resync(), "nothing was missed"


def reporter(count: int) -> tuple[Reporter, list[pb.OperationEvent]]:
    """In a phase of so many, and what it tells from then on."""
    told: list[pb.OperationEvent] = []
    operation = Operation(OperationKind.SAVE, OperationId("save-1"), SnapshotId("s-1"))
    made = Reporter(operation, lambda: 0.0, 0.0, told.append)
    made.announce(core.PhaseStarted(Phase.PREPARE, tuple(ParticipantId(f"p-{number}") for number in range(count))))
    told.clear()
    return made, told


def test_of_a_large_phase_who_is_called_and_who_is_done_in_one_moment_is_told_together() -> None:
    made, told = reporter(FEW + 1)
    names = [ParticipantId(f"p-{number}") for number in range(3)]
    made.called(Phase.PREPARE, names)
    for name in names:
        made.announce(core.ParticipantDone(Phase.PREPARE, name))
    assert made.holds_back
    assert len(told) == 1
    made.announce(core.PhaseFinished(Phase.PREPARE, 1.0))
    called, done, finished = told
    assert [called.participant_called.participant_id, *called.participant_called.also_called] == names
    assert [done.participant_progress.participant_id, *done.participant_progress.also_done] == names
    assert done.participant_progress.done
    assert finished.HasField("phase_finished"), "who was done before it is told before it"
    assert [event.sequence for event in told] == [2, 3, 4]
    assert not made.holds_back


def test_of_a_small_phase_each_step_is_an_event() -> None:
    made, told = reporter(FEW)
    made.called(Phase.PREPARE, [ParticipantId("p-0"), ParticipantId("p-1")])
    made.announce(core.ParticipantDone(Phase.PREPARE, ParticipantId("p-0")))
    assert [event.WhichOneof("event") for event in told] == ["participant_called"] * 2 + ["participant_progress"]
    assert not made.holds_back


async def test_of_a_small_fleet_each_step_is_told_at_once() -> None:
    feed = Feed()
    with feed.follow() as follower:
        for number in range(FEW):
            feed.publish(step("participant_called", number))
            async with asyncio.timeout(10):
                await follower.wait()
            assert follower.take() is not None


async def test_of_a_large_fleet_a_follower_is_told_who_was_called_of_the_first_few_alone() -> None:
    feed = Feed()
    with feed.follow() as follower:
        for number in range(100):
            feed.publish(step("participant_called", number))
        async with asyncio.timeout(10):
            await follower.wait()
        assert [event.sequence for event in iter(follower.take, None)] == list(range(FEW))
        assert not follower.resync(), "nothing was missed: the phase has said who takes part"


async def test_steps_that_are_gathered_come_without_another_event() -> None:
    feed = Feed()
    with feed.follow() as follower:
        for number in range(100):
            feed.publish(step("participant_progress", number))
        async with asyncio.timeout(10):
            await follower.wait()
            got = list(iter(follower.take, None))
            assert len(got) == 100
            feed.publish(step("participant_progress", 100))
            await follower.wait()
            assert follower.take() is not None


def test_who_is_told_to_be_done_together_is_waited_for_no_more() -> None:
    heard = Heard()
    heard.take(
        pb.OperationEvent(
            phase_started=pb.PhaseStarted(phase=capabilities_pb2.PHASE_PREPARE, participant_ids=["a", "b", "c"])
        )
    )
    done = pb.OperationEvent()
    done.participant_progress.participant_id, done.participant_progress.done = "a", True
    done.participant_progress.also_done.append("b")
    heard.take(done)
    error = heard.added_to(Unanswered(Problem(Reason.UNREACHABLE, "No answer.")), 1.0, "Save")
    assert "waited for c." in error.problem.message
