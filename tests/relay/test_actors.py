"""Several Gym actors, each on a node of its own behind that node's relay: one cut, one fingerprint, one restore."""

from __future__ import annotations

import asyncio

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.cli_live import relay_lines
from coordinator.wire import staying
from coordinator.wire.errors import Reason, SafepointError
from tests.relay.conftest import ROLES, Node
from tests.shims.shim_fakes import until

ACTORS = {"a0": "n1", "a1": "n2"}  # and whose relay each is behind
EVERYBODY = [f"{actor}.{name}-0" for actor in ACTORS for name in ROLES]


async def fleet(node: Node, behind: bool = True) -> None:
    for actor, relay in ACTORS.items():
        for name in ROLES:
            await node.shim(f"{actor}.{name}-0", relay if behind else "")
    await node.here(*EVERYBODY)


async def test_they_make_one_cut_and_are_one_topology_whether_relays_stand_between_or_not(node: Node) -> None:
    await node.coordinate()
    await node.relay("n1")
    await node.relay("n2")
    await fleet(node)
    assert [node.via(name) for name in EVERYBODY] == ["n1"] * 3 + ["n2"] * 3
    through = await node.topology(refresh=True)
    assert {(p.capabilities.actor_id, p.relay.relay_id) for p in through.participants} == set(ACTORS.items())
    assert (await node.save())[-1].HasField("saved")
    # Agents of both actors are closed before resources of either; and all are, before any of them exports.
    assert {p.name for p in (node.root / "snapshots" / "s-1").iterdir() if p.is_dir()} == set(EVERYBODY)
    for relay in node.relays.values():
        await relay.stop()
    for shim in node.shims.values():
        await shim.stop()
    await node.gone(*EVERYBODY)
    await fleet(node, behind=False)
    direct = await node.topology()
    assert {p.relay.relay_id for p in direct.participants} == {""}
    assert direct.fingerprint == through.fingerprint


async def test_a_coordinator_that_is_started_again_restores_them_through_their_relays(node: Node) -> None:
    first = await node.coordinate()
    for relay in ACTORS.values():
        await node.relay(relay)
    await fleet(node)
    await node.save()
    await first.kill()
    await node.coordinate()
    await node.here(*EVERYBODY)
    assert [node.via(name) for name in EVERYBODY] == ["n1"] * 3 + ["n2"] * 3
    events = await node.ask("Restore", pb.RestoreSnapshotRequest(operation_id="restore-1", snapshot_id="s-1"), 20)
    assert any(event.HasField("restored") for event in events)
    assert all(server.loaded for server in node.servers.values())
    assert not any(server.open_now for server in node.servers.values())
    await node.ask("Resume", pb.ResumeOperationRequest(operation_id="restore-1"))
    assert node.all_open()
    assert (await node.save(2))[-1].HasField("saved")


async def test_the_relay_of_one_that_dies_costs_the_cut_of_all_and_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staying, "BEYOND_AFTER_S", 1.0)
    monkeypatch.setattr(staying, "MAX_WAIT_S", 0.5)
    await node.coordinate()
    dying = await node.relay_process("n1")
    await node.relay("n2")
    await fleet(node)
    await node.save()
    held = asyncio.Event()
    for actor in ACTORS:
        node.servers[f"{actor}.tools-0"].gate["export"] = held
    saving = asyncio.create_task(node.save(2))
    await until(lambda: all("export" in node.servers[f"{actor}.tools-0"].calls[-1:] for actor in ACTORS))
    dying.end()
    with pytest.raises(SafepointError) as failed:
        await saving
    assert failed.value.problem.participant_id.startswith("a0.")
    assert f"behind relay n1 (pid {dying.said['pid']} on " in failed.value.problem.message
    why = await node.ask("Explain", pb.ExplainRequest())
    assert "relay n1" in why.operation.failure.primary.message
    held.set()
    for actor in ACTORS:
        node.servers[f"{actor}.tools-0"].gate.clear()
    await until(node.all_open, 10)
    await node.here(*EVERYBODY)
    assert [node.via(name) for name in EVERYBODY] == [""] * 3 + ["n2"] * 3
    assert (await node.save(3))[-1].HasField("saved")
    listed = await node.ask("ListSnapshots", pb.ListSnapshotsRequest())
    assert {snapshot.snapshot_id for snapshot in listed.snapshots} == {"s-1", "s-3"}


async def test_status_says_who_is_behind_which_and_names_the_relay_of_who_does_not_answer(node: Node) -> None:
    await node.coordinate()
    for relay in ACTORS.values():
        await node.relay(relay)
    await fleet(node)
    node.servers["a1.tools-0"].gate["status"] = asyncio.Event()  # never
    status = await node.ask("GetStatus", pb.GetCoordinatorStatusRequest(participants=True))
    (silent,) = [health for health in status.participants if not health.reachable]
    assert silent.info.capabilities.participant_id == "a1.tools-0"
    assert "relay n2 (pid " in silent.problem
    first, second = relay_lines(status)
    assert first.startswith("relay n1 (pid ")
    assert first.endswith(": a0.agent-0, a0.policy-0, a0.tools-0")
    assert second.startswith("relay n2 (pid ")


async def test_a_relay_that_does_not_answer_is_named_where_a_participant_is_asked_through_it(node: Node) -> None:
    await node.coordinate()
    relay = await node.relay("n1")
    await node.relay("n2")
    await fleet(node)
    await relay._server.stop(0)  # its own registration goes on
    assert node.coordinator is not None
    here = node.registry.get("a0.agent-0")
    with pytest.raises(SafepointError) as failed:
        await node.coordinator.operations.participants.status(here, 1, 3.0)
    assert failed.value.reason is Reason.UNREACHABLE
    assert "relay n1" in failed.value.problem.message
