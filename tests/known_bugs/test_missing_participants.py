"""A server that died before the save: its shim is gone, and a snapshot without it would look whole (B11, C7, F8)."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.journal_file import ACCEPT
from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.terms import CheckpointMode, Phase, Role
from tests.coordinator.conftest import Bench, unary, until
from tests.fakes import NEVER, Knobs
from tests.in_time import room_for_answers


async def topology(bench: Bench) -> pb.GetTopologyResponse:
    return await unary(bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=5))


async def die(bench: Bench, name: str) -> None:
    await bench.shims[name].stop()
    await until(lambda: bench.running.operations.discovery.registry.get(name) is None)


async def test_a_save_without_somebody_who_was_here_is_refused_and_names_it(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=2))
    await die(bench, "resources-0")
    with pytest.raises(SafepointError) as caught:
        await bench.save(timeout=2)
    problem = caught.value.problem
    assert problem.reason is Reason.TOPOLOGY_INVALID
    assert problem.participant_id == "resources-0"
    assert "resources-0" in problem.message
    assert "--without resources-0" in problem.advice
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())  # removed behind the answer
    blocking = [f for f in (await topology(bench)).findings if f.blocking]
    assert [f.participant_id for f in blocking] == ["resources-0"]
    status = await unary(bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5))
    assert list(status.missing) == blocking
    await bench.add("resources-0", Role.RESOURCES)
    status = await unary(bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5))
    assert list(status.missing) == []
    saved = (await bench.save("save-2"))[-1].saved
    assert sorted(saved.snapshot.participant_ids) == ["agent-0", "model-0", "resources-0"]


async def test_one_that_is_back_within_seconds_is_waited_for_and_nobody_is_paused_meanwhile(bench: Bench) -> None:
    await bench.start()
    await die(bench, "model-0")
    saving: asyncio.Task[Any] = asyncio.create_task(bench.save(timeout=10))
    await until(lambda: bench.running.operations.active is not None)
    assert bench.all_open()
    await bench.add("model-0", Role.POLICY_MODEL)
    assert sorted((await saving)[-1].saved.snapshot.participant_ids) == ["agent-0", "model-0", "resources-0"]


async def test_a_save_that_waits_for_one_that_is_gone_says_for_whom_and_how_long_everywhere(bench: Bench) -> None:
    await bench.start()
    await die(bench, "model-0")
    saving = asyncio.create_task(bench.save(timeout=9))
    await until(lambda: bench.running.operations.active is not None)
    active = bench.running.operations.active
    assert active is not None
    await until(lambda: bool(active.pending))
    operation = (await bench.status()).operation
    assert operation.phase == int(Phase.DISCOVER)
    assert list(operation.pending_participants) == ["model-0"]
    assert re.fullmatch(
        r"discover: waiting \d+\.\d s for model-0 to come back; nobody is paused\.", operation.waiting_for
    )
    assert operation.HasField("phase_elapsed")
    with pytest.raises(SafepointError) as caught:
        await bench.save("save-2", "step-2")
    assert "save-1 of step-1 runs since" in caught.value.problem.message
    assert "for model-0 to come back" in caught.value.problem.message
    with pytest.raises(SafepointError) as caught:
        await saving
    problem = caught.value.problem
    assert (problem.participant_id, problem.phase) == ("model-0", Phase.DISCOVER)
    assert problem.waited_s is not None
    assert problem.waited_s >= 1
    told = [e.warning for e in caught.value.events if e.WhichOneof("event") == "warning"]  # type: ignore[attr-defined]
    assert [w.participant_id for w in told] == ["model-0"]
    assert "Waiting for it to come back" in told[0].message


async def test_whoever_removed_a_server_on_purpose_says_so_once(bench: Bench) -> None:
    await bench.start(resources=2)
    await die(bench, "resources-1")
    now = (await topology(bench)).fingerprint
    began = time.monotonic()
    saved = (await bench.save(timeout=90, expected_fingerprint=now))[-1].saved
    assert time.monotonic() - began < 15, "nobody is waited for who was removed on purpose"
    assert sorted(saved.snapshot.participant_ids) == ["agent-0", "model-0", "resources-0"]
    assert not [f for f in (await topology(bench)).findings if f.blocking]
    await bench.save("save-2", "step-2")


async def test_a_restarted_coordinator_waits_for_those_who_were_in_the_newest_snapshot(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    await bench.crash()
    await bench.start_coordinator()
    for name in ("agent-0", "model-0"):
        await bench.shims[name].register(bench.running.address)
    saving: asyncio.Task[Any] = asyncio.create_task(bench.save("save-2", "step-2", timeout=10))
    await until(lambda: bench.running.operations.active is not None)
    await asyncio.sleep(0)
    await bench.shims["resources-0"].register(bench.running.address)
    assert sorted((await saving)[-1].saved.snapshot.participant_ids) == ["agent-0", "model-0", "resources-0"]


async def restarted_without(bench: Bench, *absent: str) -> None:
    """The coordinator dies together with some participants, and starts again; the others come back."""
    await bench.crash()
    await bench.start_coordinator()
    for name, shim in bench.shims.items():
        if name not in absent and not shim.dead:
            await shim.register(bench.running.address)


async def test_after_a_restart_a_save_is_refused_without_one_that_never_came_back(bench: Bench) -> None:
    await bench.start(resources=2)  # known although no snapshot has been taken
    await restarted_without(bench, "resources-1")
    with room_for_answers(), pytest.raises(SafepointError) as caught:
        await bench.save(timeout=20)  # half of what the coordinator uses of it is waited
    problem = caught.value.problem
    assert (problem.reason, problem.participant_id) == (Reason.TOPOLOGY_INVALID, "resources-1")
    assert "last heard 20" in problem.message
    assert "UTC" in problem.message
    assert "--without resources-1" in problem.advice
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())
    await restarted_without(bench, "resources-1")  # another restart does not forget it
    assert [f.participant_id for f in (await topology(bench)).findings if f.blocking] == ["resources-1"]
    await bench.shims["resources-1"].register(bench.running.address)
    saved = (await bench.save("save-2"))[-1].saved
    assert len(saved.snapshot.participant_ids) == 4


async def test_one_that_is_said_to_be_gone_for_good_is_missed_by_nobody_any_more(bench: Bench) -> None:
    await bench.start(resources=2)
    await restarted_without(bench, "resources-1")
    began = time.monotonic()
    saved = (await bench.save(timeout=90, without=["resources-1"]))[-1].saved
    assert time.monotonic() - began < 15, "nobody waits for who is gone for good"
    assert sorted(saved.snapshot.participant_ids) == ["agent-0", "model-0", "resources-0"]
    await bench.save("save-2", "step-2")
    await restarted_without(bench, "resources-1")
    await bench.save("save-3", "step-3")
    assert not [f for f in (await topology(bench)).findings if f.blocking]


async def test_a_save_that_is_refused_has_said_of_nobody_that_it_is_gone(bench: Bench) -> None:
    await bench.start(resources=3)
    await die(bench, "resources-1")
    await die(bench, "resources-2")
    for number, expected in enumerate(("0" * 64, "")):  # in the second one somebody else is missing
        with pytest.raises(SafepointError):
            await bench.save(f"save-{number}", without=["resources-1"], timeout=2, expected_fingerprint=expected)
    assert [f.participant_id for f in (await topology(bench)).findings if f.blocking] == ["resources-1", "resources-2"]
    bench.running.operations.journal._broken = "test"  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(SafepointError) as caught:
        await bench.save("save-2", without=["resources-1", "resources-2"])
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert len(bench.running.operations.discovery.registry.missing()) == 2, "nothing has begun durably"


async def test_who_was_left_out_is_missed_no_more_once_the_save_has_begun_even_if_it_fails(bench: Bench) -> None:
    await bench.start(resources=2, agent_0=Knobs(fail_on={"Prepare": Problem(Reason.DECLINED, "no room")}))
    await die(bench, "resources-1")
    for name in ("save-1", "save-2"):  # the second one names somebody who is dismissed already
        with pytest.raises(SafepointError) as caught:
            await bench.save(name, without=["resources-1"])
        assert caught.value.reason is Reason.DECLINED
    bench.shims["agent-0"].knobs.fail_on.clear()
    await restarted_without(bench)
    await bench.save("save-3")


async def test_a_name_that_nobody_has_cannot_be_left_out_and_the_known_ones_are_said(bench: Bench) -> None:
    await bench.start()
    await die(bench, "resources-0")
    now = (await topology(bench)).fingerprint
    for number, expected in enumerate(("", now)):
        with pytest.raises(SafepointError) as caught:
            await bench.save(f"save-{number}", without=["resources-0", "resource-0"], expected_fingerprint=expected)
        problem = caught.value.problem
        assert (problem.reason, problem.participant_id) == (Reason.UNKNOWN_PARTICIPANT, "resource-0")
        assert "resources-0, agent-0, model-0" in problem.message
    assert [m.participant.participant_id for m in bench.running.operations.discovery.registry.missing()] == [
        "resources-0"
    ]
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())
    assert (await bench.save("save-2", without=["resources-0"]))[-1].HasField("saved")


async def test_one_that_is_here_cannot_be_gone_for_good(bench: Bench) -> None:
    await bench.start()
    with pytest.raises(SafepointError) as caught:
        await bench.save(without=["agent-0"])
    assert (caught.value.reason, caught.value.participant_id) == (Reason.INVALID_ARGUMENT, "agent-0")
    with pytest.raises(SafepointError) as caught:
        await bench.save(without=["../x"])
    assert caught.value.reason is Reason.MALFORMED_ID
    assert bench.all_open()
    await bench.save("save-2", "step-2")


async def test_a_restored_snapshot_says_who_takes_part(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    await bench.add("resources-late", Role.RESOURCES)
    await die(bench, "resources-late")
    await restarted_without(bench)
    await bench.restore(resume=True)
    await bench.save("save-2", "step-2")


async def test_a_journal_that_was_lost_is_made_up_for_by_the_newest_snapshot(bench: Bench) -> None:
    await bench.start(resources=2)
    await bench.save()
    await bench.crash()
    for path in (bench.root / "coordinator").glob("journal-*.log"):
        path.unlink()
    (bench.root / "coordinator" / ACCEPT).touch()  # nobody acts without it, unless told to
    await restarted_without(bench, "resources-1")
    with pytest.raises(SafepointError) as caught:
        await bench.save("save-2", "step-2", timeout=2)
    assert caught.value.participant_id == "resources-1"
    assert "newest snapshot" in caught.value.problem.message


async def test_a_judge_that_is_gone_prevents_nothing(bench: Bench) -> None:
    await bench.start()
    await bench.add("judge", Role.AUXILIARY_MODEL, mode=CheckpointMode.STATELESS)
    await die(bench, "judge")
    assert (await bench.save())[-1].saved.snapshot.snapshot_id == "step-1"


async def test_an_agent_that_dies_while_it_is_waited_for_is_told_with_its_rollouts(bench: Bench) -> None:  # B11, E9
    await bench.start(agent_0=Knobs(inflight=2, drain_after_s=NEVER))
    saving: asyncio.Task[Any] = asyncio.create_task(bench.save(timeout=20))
    await until(lambda: bench.shims["agent-0"].count("Prepare") == 1 and not bench.shims["agent-0"].open)
    active = bench.running.operations.active
    assert active is not None
    await until(lambda: "2 in flight" in active.transaction.why_waiting(0))
    await bench.shims["agent-0"].stop()
    with pytest.raises(SafepointError) as caught:
        await saving
    problem = caught.value.problem
    assert problem.participant_id == "agent-0"
    assert problem.phase.name == "PREPARE"
    assert [r.rollout_id for r in problem.rollouts] == ["r1", "r2"]
    assert problem.rollout_count == 2
    assert bench.all_open()
