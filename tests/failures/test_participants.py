"""Participants that die, are replaced, or do not do what they say, at each point of a save; and the coordinator with them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import Role
from tests.coordinator.conftest import Bench, until
from tests.fakes import NEVER, FakeShim, Knobs

ROLES = {"agent": Role.AGENT, "model": Role.POLICY_MODEL, "resources": Role.RESOURCES}
NAMES = ["agent-0", "model-0", "resources-0"]


async def refused(call: Any) -> SafepointError:
    with pytest.raises(SafepointError) as caught:
        await call
    return caught.value


async def steps(bench: Bench, *names: str) -> None:
    """Drive save-1 of step-1 as a trainer does, as far as the last of `names`."""
    for name in names:
        more: dict[str, Any] = {"snapshot_id": "step-1"} if name == "Prepare" else {}
        await bench.phase(name, operation_id="save-1", **more)


async def replaced(bench: Bench, name: str) -> FakeShim:
    """It dies, and another process serves at the same address and under the same name at once."""
    old = bench.shims[name]
    address = old.address
    await old.stop()
    shim = FakeShim(name, ROLES[name.partition("-")[0]], bench.root)
    await shim.start(address)
    bench.shims[name] = shim
    await shim.register(bench.running.address)
    return shim


@pytest.mark.parametrize("method", ["Prepare", "Commit", "Confirm"])
@pytest.mark.parametrize("name", NAMES)
async def test_one_that_dies_in_a_phase_voids_the_cut_at_once_and_the_others_open(
    bench: Bench, method: str, name: str
) -> None:  # 49, 50, 66
    knobs: dict[str, Any] = {name.replace("-", "_"): Knobs(die_at=method)}
    await bench.start(**knobs)
    began = time.monotonic()
    error = await refused(bench.save(timeout=60))
    assert time.monotonic() - began < 10  # not at the deadline
    assert error.problem.participant_id == name
    await until(bench.all_open)
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())


@pytest.mark.parametrize("name", NAMES)
async def test_one_that_dies_after_its_commit_and_before_publish_voids_the_cut(bench: Bench, name: str) -> None:  # 51
    """Its files are whole. The rule is the same for everybody: what was confirmed by nobody is published for nobody."""
    await bench.start()
    await steps(bench, "Prepare", "Commit")
    await bench.shims[name].stop()
    await until(bench.all_open)
    error = await refused(steps(bench, "Publish"))
    assert error.problem.participant_id == name
    assert not (bench.root / "snapshots" / "step-1" / "manifest.json").exists()


@pytest.mark.parametrize("name", NAMES)
async def test_one_that_dies_after_publish_changes_nothing_and_comes_back_open(bench: Bench, name: str) -> None:  # 52
    await bench.start(agent_0=Knobs(rollouts=2))
    await steps(bench, "Prepare", "Commit", "Publish")
    shim = await replaced(bench, name)
    events = await bench.phase("Resume", operation_id="save-1")
    assert events[-1].WhichOneof("event") in ("resumed", "saved")
    await until(bench.all_open)
    assert shim.open
    assert (await bench.status()).latest_snapshot_id == "step-1"
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


@pytest.mark.parametrize("at", ["prepare", "commit"])
@pytest.mark.parametrize("name", NAMES)
async def test_one_that_is_replaced_so_fast_that_its_port_answers_voids_the_cut(
    bench: Bench, name: str, at: str
) -> None:  # 53, 12
    await bench.start()
    await steps(bench, *(["Prepare"] if at == "prepare" else ["Prepare", "Commit"]))
    shim = await replaced(bench, name)
    await until(bench.all_open)
    error = await refused(steps(bench, "Commit" if at == "prepare" else "Publish"))
    assert error.problem.participant_id == name
    assert shim.count("Commit") == 0
    assert not (bench.root / "snapshots" / "step-1" / "manifest.json").exists()
    await until(lambda: bench.running.operations.quiet)
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


async def test_one_that_says_it_has_opened_and_has_not_refuses_the_next_save_by_name_and_its_lease_frees_it(
    bench: Bench,
) -> None:  # 60
    await bench.start(model_0=Knobs(ack_but_ignore={"Abort"}), agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    lease = pb.SaveOptions()
    lease.lease_ttl.FromSeconds(4)
    assert (await refused(bench.save(timeout=4, lease_ttl=lease.lease_ttl))).problem.participant_id == "agent-0"
    bench.shims["agent-0"].knobs.inflight = 0
    assert not bench.shims["model-0"].open
    error = await refused(bench.save("save-2", "step-2"))
    assert error.reason is Reason.FENCED
    assert error.problem.participant_id == "model-0"
    assert "save-1" in error.problem.message
    await until(bench.all_open)
    assert bench.shims["model-0"].opened_by == ["lease"]
    assert (await bench.save("save-3", "step-3"))[-1].saved.snapshot.snapshot_id == "step-3"


async def test_all_agents_replaced_at_once_is_one_cause_while_a_save_runs_and_none_before_the_next(
    bench: Bench,
) -> None:  # 70
    await bench.start(agents=3, model_0=Knobs(inflight=1, drain_after_s=NEVER))
    agents = [name for name in bench.shims if name.startswith("agent")]
    bench.shims["model-0"].knobs.hang_on.add("Prepare")
    saving = asyncio.create_task(refused(bench.save(timeout=30)))
    await until(lambda: bench.shims["model-0"].count("Prepare") == 1)
    await asyncio.gather(*(replaced(bench, name) for name in agents))
    error = await saving
    assert error.problem.participant_id in agents
    assert error.reason in (Reason.UNREACHABLE, Reason.INCARNATION_CHANGED)
    bench.shims["model-0"].knobs.hang_on.clear()
    bench.shims["model-0"].knobs.inflight = 0
    await until(lambda: bench.all_open() and bench.running.operations.quiet)
    saved = (await bench.save("save-2", "step-2"))[-1].saved
    assert set(agents) <= set(saved.snapshot.participant_ids)


async def test_several_that_are_gone_for_good_are_one_problem_that_names_them_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:  # 70
    monkeypatch.setattr("coordinator.preflight.RETURN_WITHIN_S", 0.1)
    await bench.start(agents=3)
    for name in ("agent-0", "agent-1", "agent-2"):
        await bench.shims[name].stop()
    await until(lambda: len(bench.running.operations.discovery.registry.participants()) == 2)
    error = await refused(bench.save())
    assert error.reason is Reason.TOPOLOGY_INVALID
    assert all(name in error.problem.message for name in ("agent-0", "agent-1", "agent-2"))
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())


async def test_a_stream_that_breaks_after_its_first_word_is_asked_again_and_never_taken_for_its_end(
    bench: Bench,
) -> None:  # 13
    await bench.start(agent_0=Knobs(rollouts=2, lose_reply={"Commit": 1}))
    saved = (await bench.save())[-1].saved
    assert bench.shims["agent-0"].count("Commit") == 2
    assert saved.snapshot.totals.parked == 2


# ---- the coordinator dies between the phases -------------------------------------------------------------------------


async def test_a_crash_before_anything_was_recorded_leaves_nothing_and_the_same_operation_may_begin(
    bench: Bench,
) -> None:  # 28
    await bench.start()
    await bench.shims["agent-0"].leave()
    saving = asyncio.create_task(refused(bench.save(timeout=30)))  # waits for the agent to come back
    await until(lambda: bench.running.operations.active is not None)
    await bench.crash()
    await saving
    await bench.restart()
    assert bench.running.operations.journal.contents.open == {}
    assert bench.all_open()
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())
    assert (await bench.save())[-1].saved.snapshot.snapshot_id == "step-1"


@pytest.mark.parametrize("reached", [["Prepare"], ["Prepare", "Commit"]], ids=["prepared", "committed"])
async def test_a_crash_while_all_stand_still_before_publish_aborts_and_goes_on_with_nothing(
    bench: Bench, reached: list[str]
) -> None:  # 31, 33
    await bench.start(agent_0=Knobs(rollouts=2))
    await steps(bench, *reached)
    await bench.crash()
    await bench.restart()
    await until(bench.all_open)
    assert all(shim.opened_by == ["Abort"] for shim in bench.shims.values())
    await until(lambda: bench.running.operations.quiet)
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())
    assert (await refused(steps(bench, "Publish"))).reason in (Reason.COORDINATOR_RESTARTED, Reason.WRONG_PHASE)


@pytest.mark.parametrize("hung", [1, 8, 24])
async def test_a_start_is_usable_within_a_second_however_many_participants_hang(
    bench: Bench, hung: int
) -> None:  # 39, L4
    """The bound does not grow with the number of those that hang: nobody is waited for at a start."""
    await bench.start(agents=hung)
    await steps(bench, "Prepare")
    await bench.crash()
    for name, shim in bench.shims.items():
        if name.startswith("agent"):
            shim.knobs.hang_on |= {"Abort", "Resume", "GetCapabilities", "GetStatus"}
    began = time.monotonic()
    await bench.start_coordinator()
    started_s = time.monotonic() - began
    status = await bench.status()
    usable_s = time.monotonic() - began
    print(f"L4: {hung} hung: serves after {started_s:.3f} s, answered after {usable_s:.3f} s")
    assert status.coordinator_epoch == 2
    assert usable_s < 3  # a loaded machine; quiet it is a few hundredths
    for shim in bench.shims.values():
        await shim.register(bench.running.address)
    await until(lambda: bench.shims["model-0"].open and bench.shims["resources-0"].open)
    operations = bench.running.operations
    await until(lambda: operations.active is None, within_s=8)  # the opening is given up within its reserve
    ended = operations.past.of("save-1")
    assert ended is not None
    assert len(ended.unconfirmed) == hung
