"""Who is told that somebody is missing is told of the door first, where that is why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.kept_out import blaming, left_out, parted
from coordinator.protocol.topology import Missing
from coordinator.registry import Registry
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import ParticipantId
from coordinator.wire.refusals import KeptOut
from coordinator.wire.terms import Role
from tests.coordinator.conftest import Bench, kinds
from tests.protocol.transcript import participant

TOKEN = Problem(Reason.UNAUTHENTICATED, "The call carries no valid token.")
MISSED = Problem(
    Reason.TOPOLOGY_INVALID, "`cart` (resources, 10.0.0.3:7001) took part and is missed for 20 s: it was ended.",
    "Start `cart` again.", participant_id="cart",
)  # fmt: skip


def at_the_door(says: str, ago_s: float = 2.0) -> KeptOut:
    return KeptOut("10.0.0.3", ago_s, TOKEN, 3, says)


def test_the_refusal_at_the_door_is_the_cause_where_the_missing_one_is_refused_there() -> None:
    told = blaming(MISSED, [at_the_door("cart")], {"cart"})
    assert told.message.startswith("A shim on 10.0.0.3, of `cart` as it says, was refused 3 times")
    assert "That is why `cart` is missed: `cart` (resources, 10.0.0.3:7001) took part" in told.message
    assert "SAFEPOINT_TOKEN_FILE" in told.advice
    assert "Start `cart` again" not in told.advice, "it runs, and would be refused again"
    assert told.reason is Reason.TOPOLOGY_INVALID, "the caller's own token is not what was refused"


def test_a_whole_fleet_at_the_door_is_one_cause_and_one_step() -> None:
    everybody = ["agent", "cart", "judge", "model"]
    told = blaming(MISSED, [at_the_door(name, n) for n, name in enumerate(everybody)], everybody)
    assert told.message.startswith("A shim on 10.0.0.3, of `agent` as it says, was refused")
    assert "So was 1 more." in told.message
    assert "are missed" in told.message
    assert told.advice.count("SAFEPOINT_TOKEN_FILE") == 1
    assert "again." not in told.advice


def test_who_is_missing_for_another_reason_keeps_its_own_step() -> None:
    told = blaming(MISSED, [at_the_door("model")], {"cart", "model"})
    assert told.message.startswith("A shim on 10.0.0.3, of `model`")
    assert "SAFEPOINT_TOKEN_FILE" in told.advice
    assert "Start `cart` again." in told.advice


def test_a_stranger_at_the_door_is_named_after_what_is_known() -> None:
    for says in ("", "stranger"):
        told = blaming(MISSED, [at_the_door(says)], {"cart"})
        assert told.message.startswith("`cart` (resources")
        assert "was refused 3 times" in told.message
        assert "Start `cart` again." in told.advice


def gone(name: str) -> Missing:
    return Missing(replace(participant("x", Role.RESOURCES), participant_id=ParticipantId(name)), 20.0, "it was ended")


def test_nobody_is_told_to_start_again_what_is_refused_at_the_door() -> None:
    found, others = parted([gone("cart"), gone("model")], [at_the_door("cart")])
    assert [one.participant.participant_id for one in others] == ["model"]
    assert (found[0].participant_id, found[0].blocking) == ("cart", True)
    assert found[0].message.startswith("`cart` took part and is missed, because its shim is refused.")
    assert found[0].next_step.startswith("Let it in, as is said of the refusal")
    names = [f"shim-{n}" for n in range(7)]
    (whole,), others = parted([*map(gone, names)], [*map(at_the_door, names)])
    assert others == ()
    assert "`shim-4` and 2 more took part and are missed, because their shims are refused" in whole.message
    assert "Start" not in whole.next_step
    assert parted([gone("cart")], [at_the_door("")]) == ([], (gone("cart"),))


async def test_a_fleet_that_is_refused_is_not_to_be_started_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.start_coordinator()
    names = ["agent", "cart", "model"]
    bench.running.operations.kept_out = lambda: [at_the_door(name) for name in names]
    missing = tuple(map(gone, names))
    monkeypatch.setattr(Registry, "missing", lambda _: missing)
    topology = await bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=10)
    status = await bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=10)
    for findings in (topology.findings, status.missing):
        steps = [one.next_step for one in findings]
        assert not any("Start" in step for step in steps), steps
        assert any("Let them in" in step for step in steps), steps


def test_many_at_the_door_are_a_few_warnings() -> None:
    told = left_out([at_the_door(f"shim-{n}", n) for n in range(5)])
    assert len(told) == 4
    assert "of `shim-0` as it says" in told[0]
    assert "What it holds is not in the snapshot. Next: Put the coordinator's token" in told[0]
    assert told[-1] == "So were 2 more: see `safepoint topology`."
    assert left_out([]) == []


async def test_a_save_without_a_shim_that_is_refused_at_the_door_says_so(bench: Bench) -> None:
    await bench.start()
    bench.running.operations.kept_out = lambda: [at_the_door("cart")]
    events = await bench.save()
    (warning,) = [one.warning.message for one in events if one.WhichOneof("event") == "warning"]
    assert "of `cart` as it says, was refused 3 times" in warning
    assert kinds(events)[-1] == "saved"
