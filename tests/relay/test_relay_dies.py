"""A relay that is killed, stopped, replaced or left behind: named in errors, nobody stays closed, shims find the way."""

from __future__ import annotations

import asyncio
import signal

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.relay import host, standing
from coordinator.relay.host import address_record
from coordinator.wire import staying
from coordinator.wire.errors import Reason, SafepointError
from tests.relay.conftest import Node
from tests.shims.shim_fakes import until

# Where a call of each phase can be held in the server behind the shim.
HELD = {"prepare": "quiesce", "commit": "export", "confirm": "still"}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying, "BEYOND_AFTER_S", 1.0)
    monkeypatch.setattr(staying, "MAX_WAIT_S", 0.5)
    monkeypatch.setattr(staying, "WELCOME_WITHIN_S", 1.5)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", HELD)
async def test_gone_in_a_phase_it_is_named_and_everybody_opens_and_comes_back_past_it(
    node: Node, phase: str, fault: signal.Signals
) -> None:
    """A relay that hangs and one that is cut off are silent, as one that is stopped."""
    await node.coordinate()
    relay = await node.relay_process()
    await node.fleet()
    tools = node.servers["tools-0"]
    hold = asyncio.Event()
    tools.gate[HELD[phase]] = hold
    saving = asyncio.create_task(node.save())
    await until(lambda: HELD[phase] in tools.calls)
    relay.send(fault)
    with pytest.raises(SafepointError) as failed:
        await saving
    assert failed.value.reason is Reason.UNREACHABLE
    assert f"relay n1 (pid {relay.said['pid']} on " in failed.value.problem.message
    hold.set()
    tools.gate.clear()
    # The coordinator calls them at their own addresses: they open long before their lease of 60 s.
    await until(node.all_open, 10)
    await node.here(*node.servers)
    assert {node.via(name) for name in node.servers} == {""}
    assert (await node.save(2))[-1].HasField("saved")


async def test_killed_after_the_publish_the_save_has_succeeded_and_everybody_opens_past_it(node: Node) -> None:
    await node.coordinate()
    relay = await node.relay_process()
    await node.fleet()
    tools, hold = node.servers["tools-0"], asyncio.Event()
    tools.gate["open"] = hold
    saving = asyncio.create_task(node.save())
    await until(lambda: "open" in tools.calls)
    relay.end()
    hold.set()
    tools.gate.clear()
    assert (await saving)[-1].HasField("saved")
    await until(node.all_open, 10)


async def test_killed_in_a_restore_it_is_named_and_everybody_opens_past_it(node: Node) -> None:
    await node.coordinate()
    relay = await node.relay_process()
    await node.fleet()
    await node.save()
    tools, hold = node.servers["tools-0"], asyncio.Event()
    tools.gate["load"] = hold
    restoring = asyncio.create_task(
        node.ask("Restore", pb.RestoreSnapshotRequest(operation_id="restore-1", snapshot_id="s-1"), 20)
    )
    await until(lambda: "load" in tools.calls)
    relay.end()
    with pytest.raises(SafepointError) as failed:
        await restoring
    assert "relay n1" in failed.value.problem.message
    hold.set()
    tools.gate.clear()
    await node.ask("Abort", pb.AbortOperationRequest())
    await until(node.all_open, 10)


async def test_killed_while_a_restore_stands_it_is_aborted_past_it(node: Node) -> None:
    await node.coordinate()
    relay = await node.relay_process()
    await node.fleet()
    await node.save()
    await node.ask("Restore", pb.RestoreSnapshotRequest(operation_id="restore-1", snapshot_id="s-1"))
    relay.end()
    await node.gone(*node.servers)
    await node.ask("Abort", pb.AbortOperationRequest())
    await until(node.all_open, 10)


async def test_started_again_in_time_its_shims_come_back_to_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying, "BEYOND_AFTER_S", 60.0)
    await node.coordinate()
    relay = await node.relay_process()
    await node.fleet()
    relay.end()
    await node.gone(*node.servers)
    await node.relay_process()
    await node.here(*node.servers)
    assert {node.via(name) for name in node.servers} == {"n1"}
    assert (await node.save())[-1].HasField("saved")


async def test_stopped_past_the_lease_nobody_stays_closed_and_what_it_passes_on_later_changes_nothing(
    node: Node,
) -> None:
    await node.coordinate()
    relay = await node.relay_process()
    await node.fleet()
    tools = node.servers["tools-0"]
    tools.gate["export"] = asyncio.Event()
    request = pb.SaveRequest(operation_id="save-1", snapshot_id="s-1")
    request.options.lease_ttl.FromSeconds(1)
    saving = asyncio.create_task(node.ask("Save", request, 20))
    await until(lambda: "export" in tools.calls)
    relay.send(signal.SIGSTOP)
    with pytest.raises(SafepointError) as failed:
        await saving
    assert failed.value.reason in (Reason.UNREACHABLE, Reason.LEASE_LAPSED)
    await until(node.all_open, 10)
    tools.gate.clear()
    await node.here(*node.servers)
    assert {node.via(name) for name in node.servers} == {""}
    assert (await node.save(2))[-1].HasField("saved")
    relay.send(signal.SIGCONT)
    await asyncio.sleep(0.5)  # whatever was on its way through it arrives now
    assert node.all_open()
    assert (await node.save(3))[-1].HasField("saved")


async def test_a_shim_that_is_gone_behind_it_is_missed_at_once_with_its_own_last_words(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.fleet()
    shim = node.shims["tools-0"]
    shim.ends_because = "Its server has ended."
    await shim.stop()
    await node.gone("tools-0")
    (missing,) = node.registry.missing()
    assert missing.participant.participant_id == "tools-0"
    assert missing.why.startswith("tools-0 is gone behind relay n1 (pid ")
    assert missing.why.count("Its server has ended") == 1
    assert missing.why.count(f"its shim was {missing.participant.process}") == 1


async def test_a_shim_that_is_killed_behind_it_voids_the_save_that_waits_for_it(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.fleet()
    tools = node.servers["tools-0"]
    tools.gate["quiesce"] = asyncio.Event()
    saving = asyncio.create_task(node.save())
    await until(lambda: "quiesce" in tools.calls)
    shim = node.shims["tools-0"]
    assert shim._registering is not None
    shim._registering.cancel()  # as a connection that broke: nothing is said
    with pytest.raises(SafepointError) as failed:
        await saving
    assert failed.value.problem.participant_id == "tools-0"
    assert "is gone behind relay n1" in failed.value.problem.message
    await until(node.all_open)


async def test_a_shim_that_is_replaced_behind_it_voids_the_save_and_is_called_in_the_next(node: Node) -> None:
    await node.coordinate()
    await node.relay()
    await node.fleet()
    held = asyncio.Event()
    node.servers["agent-0"].gate["export"] = held
    saving = asyncio.create_task(node.save())
    await until(lambda: "export" in node.servers["agent-0"].calls)
    before = node.shims["tools-0"].incarnation_id
    await node.shims["tools-0"].stop()
    await node.shim("tools-0")
    held.set()
    node.servers["agent-0"].gate.clear()
    with pytest.raises(SafepointError):
        await saving
    await until(lambda: (found := node.registry.get("tools-0")) is not None and found.incarnation_id != before)
    assert (await node.save(2))[-1].HasField("saved")
    assert node.all_open()


async def test_two_relays_and_a_shim_without_one_make_one_cut(node: Node) -> None:
    await node.coordinate()
    await node.relay("n1")
    await node.relay("n2")
    await node.shim("policy-0", behind="")
    await node.shim("agent-0", behind="n1")
    await node.shim("tools-0", behind="n2")
    await node.shim("tools-1", behind="n1")
    await node.here("policy-0", "agent-0", "tools-0", "tools-1")
    assert [node.via(name) for name in sorted(node.servers)] == ["n1", "", "n2", "n1"]
    assert (await node.save())[-1].HasField("saved")
    assert node.all_open()


async def test_a_participant_moves_between_relays_and_nothing_is_lost(node: Node) -> None:
    """The same incarnation at another relay takes over; the first one has nothing to say of it any more."""
    await node.coordinate()
    await node.relay("n1")
    await node.fleet("n1")
    await node.relay("n2")
    lost: list[str] = []
    node.registry.follow(lambda who, problem: lost.append(who.participant_id), lambda who: None)
    shim = node.shims["tools-0"]
    assert shim.registration is not None
    second = type(shim.registration)(
        address_record(node.path / "relay-n2"), shim._capabilities, shim.incarnation_id, shim.address, "default"
    )
    moving = asyncio.create_task(second.run())
    await until(lambda: node.via("tools-0") == "n2")
    assert shim._registering is not None
    shim._registering.cancel()  # leaves the first one, later
    await until(lambda: node.relays["n1"].registry.get("tools-0") is None)
    assert (await node.save())[-1].HasField("saved")
    assert lost == []
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)


async def test_a_coordinator_that_is_started_again_gets_everybody_back_through_it(node: Node) -> None:
    first = await node.coordinate()
    await node.relay()
    await node.fleet()
    await first.kill()
    second = await node.coordinate()
    await node.here(*node.servers)
    assert {node.via(name) for name in node.servers} == {"n1"}
    assert {s.registration.coordinator_epoch for s in node.shims.values() if s.registration} == {second.epoch}
    assert (await node.save())[-1].HasField("saved")


async def test_a_shim_that_waits_for_its_relays_coordinator_is_not_taken_for_silent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no welcome yet, and nothing to beat: whoever was let in after a wait was lost in the same moment."""
    monkeypatch.setattr(standing, "COORDINATOR_WITHIN_S", 10.0)
    monkeypatch.setattr(staying, "WELCOME_WITHIN_S", 20.0)
    monkeypatch.setattr(staying, "BEYOND_AFTER_S", 60.0)
    monkeypatch.setattr(host, "FIRST_BEAT_S", 0.1)
    relay = await node.relay()
    lost: list[str] = []
    relay.registry.follow(lambda who, problem: lost.append(problem.message), lambda who: None)
    await node.shim("agent-0")
    await until(lambda: relay.registry.get("agent-0") is not None)
    silent_at = asyncio.get_running_loop().time() + 4 * relay.registry.silence_s
    await until(lambda: asyncio.get_running_loop().time() > silent_at)
    await node.coordinate()
    await node.here("agent-0")
    assert lost == []
    assert node.via("agent-0") == "n1"


async def test_a_relay_without_a_coordinator_welcomes_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "COORDINATOR_WITHIN_S", 0.2)
    await node.relay()
    await node.shim("agent-0")
    registration = node.shims["agent-0"].registration
    assert registration is not None
    await until(lambda: registration.trouble is not None)
    assert not registration.welcomed.is_set()
    assert "has no coordinator" in str(registration.trouble)
    await node.coordinate()
    await node.here("agent-0")


async def test_a_relay_of_another_job_than_its_coordinators_says_so_to_the_shims_it_cannot_let_in(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "COORDINATOR_WITHIN_S", 0.2)
    node.settings["job_id"] = "another"
    await node.coordinate()
    relay = await node.relay()
    await asyncio.wait({relay.staying})
    await node.shim("agent-0")
    registration = node.shims["agent-0"].registration
    assert registration is not None
    await until(lambda: registration.trouble is not None)
    assert "has no coordinator: The coordinator at " in str(registration.trouble)
    assert "is of job 'another'" in str(registration.trouble)
