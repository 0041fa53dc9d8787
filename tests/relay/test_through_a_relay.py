"""What goes through a relay is as it is without: who is in, what is called, what is refused, what is shown."""

from __future__ import annotations

import asyncio

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.doctor import Severity
from coordinator.doctor.relay import relay as examined
from coordinator.relay.fanning import Fanning
from coordinator.relay.host import address_record
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError
from coordinator.wire.record import look_up_coordinator
from coordinator.wire.rpc import channel
from coordinator.wire.staying import AnotherJob
from tests.relay.conftest import ROLES, Node
from tests.shims.shim_fakes import answer, collect, refused, rollout, until


async def test_a_save_and_a_restore_go_through_it_and_topology_says_so(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.fleet()
    events = await node.save()
    assert events[-1].HasField("saved")
    assert node.all_open()
    shown = await node.topology(refresh=True)
    assert not [found.message for found in shown.findings if found.blocking]
    assert {info.relay.relay_id for info in shown.participants} == {"n1"}
    assert [info.capabilities.participant_id for info in shown.participants] == sorted(f"{name}-0" for name in ROLES)
    restore = pb.RestoreSnapshotRequest(operation_id="restore-1", snapshot_id="s-1")
    events = await node.ask("Restore", restore)
    assert any(event.HasField("restored") for event in events)
    assert all(server.loaded for server in node.servers.values())
    await node.ask("Resume", pb.ResumeOperationRequest(operation_id="restore-1"))
    assert node.all_open()


async def test_a_shim_of_another_job_gets_the_coordinators_refusal_and_leaves(node: Node) -> None:
    node.settings["job_id"] = "theirs"
    await node.coordinate()
    await node.relay(job_id="theirs")
    await node.shim("agent-0")
    shim = node.shims["agent-0"]
    assert shim.registration is not None
    await until(lambda: shim.registration is not None and isinstance(shim.registration.trouble, AnotherJob), 15)
    assert "job 'theirs'" in str(shim.registration.trouble)
    assert node.registry.participants() == ()


async def test_progress_is_pushed_while_one_drains(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.fleet()
    tools = node.servers["tools-0"]
    tools.in_flight = [rollout("r-17"), rollout("r-22")]
    assert node.coordinator is not None
    waited: list[set[str]] = []
    async with channel(node.coordinator.address) as link:
        request = pb.SaveRequest(operation_id="save-1", snapshot_id="s-1")
        request.options.straggler_grace.FromSeconds(10)
        async for event in coordinator_service_pb2_grpc.CoordinatorStub(link).Save(request, timeout=15):
            now = {activity.rollout_id for activity in event.participant_progress.waiting_for}
            if now and now not in waited:
                waited.append(now)
                tools.finish(min(now))  # goes on only when it was told
    assert waited == [{"r-17", "r-22"}, {"r-22"}]


async def test_a_refusal_of_one_comes_through_with_its_own_words(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.fleet()
    node.servers["agent-0"].fail["export"] = Refused(
        Problem(Reason.STORAGE_FULL, "There is no room for the agent.", rollouts=(), metadata={"free": "0"})
    )
    with pytest.raises(SafepointError) as failed:
        await node.save()
    assert failed.value.reason is Reason.STORAGE_FULL
    assert failed.value.problem.participant_id == "agent-0"
    assert "no room for the agent" in failed.value.problem.message
    await until(node.all_open)


async def test_an_abort_and_status_do_not_wait_for_a_call_that_hangs(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.fleet()
    node.servers["tools-0"].gate["quiesce"] = asyncio.Event()  # never
    saving = asyncio.create_task(node.save())
    await until(lambda: "quiesce" in node.servers["tools-0"].calls)
    loop = asyncio.get_running_loop()
    began = loop.time()
    status = await node.ask("GetStatus", pb.GetCoordinatorStatusRequest(participants=True), 1.0)
    assert all(health.reachable for health in status.participants)
    await node.ask("Abort", pb.AbortOperationRequest(), 1.5)
    assert loop.time() - began < 1.5
    with pytest.raises(SafepointError):
        await saving
    assert node.all_open()


async def test_the_calls_of_a_wave_go_out_in_one_request(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    fans: list[tuple[str, int]] = []
    real = Fanning._fan

    def counted(self, request, context, *, urgent):  # type: ignore[no-untyped-def]
        fans.append((request.WhichOneof("call"), len(request.targets)))
        return real(self, request, context, urgent=urgent)

    monkeypatch.setattr(Fanning, "_fan", counted)
    node.settings["heartbeat_s"] = 5.0  # everybody shares this process
    await node.coordinate()
    await node.relay()
    names = [f"tools-{number}" for number in range(40)]
    for name in names:
        await node.shim(name)
    await node.shim("agent-0")
    await node.here("agent-0", *names)
    await node.save()
    waves = [fan for fan in fans if fan[0] not in ("get_status", "renew_lease")]
    assert waves == [
        ("prepare", 1), ("prepare", 40), ("commit", 1), ("commit", 40), ("confirm", 41), ("resume", 40), ("resume", 1),
    ]  # fmt: skip


async def test_a_name_that_is_taken_is_refused_through_it_as_the_coordinator_does(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.shim("agent-0", behind="")
    await node.here("agent-0")
    first = node.shims["agent-0"]
    node.shims["first"] = first
    await node.shim("agent-0")  # another process of that name
    second = node.shims["agent-0"]
    assert second.registration is not None
    await until(lambda: second.registration is not None and second.registration.trouble is not None)
    trouble = second.registration.trouble
    assert trouble is not None
    assert trouble.reason is Reason.DUPLICATE_PARTICIPANT
    assert first.address in trouble.problem.message
    assert node.registry.get("agent-0").incarnation_id == first.incarnation_id


async def test_what_no_shim_calls_is_refused_as_not_served_here(node: Node) -> None:
    await node.coordinate()
    relay = await node.relay()
    async with channel(relay.address) as link:
        stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
        for call in (
            answer(stub.GetTopology(pb.GetTopologyRequest(), timeout=5)),
            collect(stub.Save(pb.SaveRequest(operation_id="a", snapshot_id="b"), timeout=5)),
        ):
            error = await refused(call)
            assert error.reason is Reason.UNSUPPORTED


async def test_a_person_finds_the_coordinator_past_it_and_doctor_a_relay_that_is_gone(node: Node) -> None:
    coordinator = await node.coordinate()
    relay = await node.relay()
    target = address_record(node.path / "relay-n1")
    assert look_up_coordinator(target).address == coordinator.address
    assert [found.severity for found in await asyncio.to_thread(list, examined(target))] == [Severity.OK]
    assert not list(examined(node.record))
    await relay.stop()
    (found,) = await asyncio.to_thread(list, examined(target))
    assert found.severity is Severity.WARNING
    assert "relay of this node is gone" in found.message


async def test_one_directory_has_one_relay(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    with pytest.raises(SafepointError) as failed:
        await node.relay()
    assert failed.value.reason is Reason.DUPLICATE_PARTICIPANT
