"""One operation at a time, each bound to its id; the trainer's phases; restore; what is refused and why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from grpc import aio
from safepoint.v1 import capabilities_pb2, errors_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.preflight import RUNS, workers_problem
from coordinator.protocol import phases
from coordinator.protocol.events import ParticipantLost
from coordinator.protocol.topology import Participant, ShimProcess
from coordinator.snapshot_reading import SnapshotReader
from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.rpc import error_from_rpc
from coordinator.wire.terms import CheckpointMode, Role
from tests.coordinator.conftest import Bench, collect, kinds, unary, until
from tests.fakes import NEVER, FakeShim, Knobs
from tests.in_time import Stopwatch, room_for_answers


def reason_of(caught: pytest.ExceptionInfo[SafepointError]) -> Reason:
    return caught.value.reason


# ---- ids and fences -------------------------------------------------------------------------------------------------


async def test_a_repeat_gets_the_recorded_outcome_and_nobody_is_called(bench: Bench) -> None:
    await bench.start()
    first = await bench.save()
    calls = {name: len(shim.calls) for name, shim in bench.shims.items()}
    again = await bench.save()
    assert again[-1] == first[-1]
    assert {name: len(shim.calls) for name, shim in bench.shims.items()} == calls


async def test_a_failed_operation_is_repeated_as_the_same_failure(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(fail_on={"Prepare": Problem(Reason.DECLINED, "no room")}))
    messages = []
    for _ in range(2):
        with pytest.raises(SafepointError) as caught:
            await bench.save()
        assert reason_of(caught) is Reason.DECLINED
        messages.append(caught.value.problem.message)
        bench.shims["agent-0"].knobs.fail_on.clear()
    assert messages[0] == messages[1]


async def test_the_same_id_with_other_parameters_is_a_conflict_that_shows_both_digests(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    calls = {name: len(shim.calls) for name, shim in bench.shims.items()}
    with pytest.raises(SafepointError) as caught:
        await bench.save("save-1", "step-other")
    assert reason_of(caught) is Reason.REQUEST_CONFLICT
    digests = caught.value.problem.metadata
    assert len(digests["recorded_sha256"]) == len(digests["offered_sha256"]) == 64
    assert digests["recorded_sha256"] != digests["offered_sha256"]
    assert {name: len(shim.calls) for name, shim in bench.shims.items()} == calls


async def test_a_second_operation_is_fenced_and_told_whose_turn_it_is(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    saving = asyncio.create_task(bench.save(timeout=20))
    await until(lambda: not bench.shims["agent-0"].open)
    for attempt in (bench.save("save-2", "step-2"), bench.restore("restore-2")):
        with pytest.raises(SafepointError) as caught:
            await attempt
        assert reason_of(caught) is Reason.FENCED
        assert caught.value.problem.operation_id == "save-1"
    await bench.abort()
    with pytest.raises(SafepointError):
        await saving


async def test_twenty_saves_at_once_make_one_winner(bench: Bench) -> None:  # I8
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=0.2))
    results = await asyncio.gather(*(bench.save(f"save-{n}", f"step-{n}") for n in range(20)), return_exceptions=True)
    won = [r for r in results if isinstance(r, list)]
    assert len(won) == 1
    assert all(isinstance(r, list) or (isinstance(r, SafepointError) and r.reason is Reason.FENCED) for r in results)


async def test_a_snapshot_id_is_never_reused(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    with pytest.raises(SafepointError) as caught:
        await bench.save("save-2", "step-1")
    assert reason_of(caught) is Reason.SNAPSHOT_EXISTS
    assert all(shim.count("Prepare") == 1 for shim in bench.shims.values())
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a" * 129, "é"])
async def test_an_id_that_is_none_is_refused(bench: Bench, name: str) -> None:
    await bench.start_coordinator()
    for call in (
        bench.save(operation_id=name),
        bench.save(snapshot_id=name),
        bench.restore(snapshot_id=name),
        unary(bench.stub().VerifySnapshot(pb.VerifySnapshotRequest(snapshot_id=name), timeout=5)),
    ):
        with pytest.raises(SafepointError) as caught:
            await call
        assert reason_of(caught) is Reason.MALFORMED_ID


async def test_a_call_without_deadline_is_refused(bench: Bench) -> None:  # E8
    await bench.start_coordinator()
    stub = bench.stub()
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.GetStatus(pb.GetCoordinatorStatusRequest())
    assert caught.value.code().name == "INVALID_ARGUMENT"
    assert error_from_rpc(caught.value).reason is Reason.DEADLINE_MISSING
    with pytest.raises(SafepointError) as refused:
        await collect(stub.Save(pb.SaveRequest(operation_id="a", snapshot_id="b")))
    assert reason_of(refused) is Reason.DEADLINE_MISSING


async def test_too_little_time_pauses_nobody(bench: Bench) -> None:
    await bench.start()
    with pytest.raises((SafepointError, aio.AioRpcError)):
        await bench.save(timeout=0.001)
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())


@pytest.mark.parametrize("kind", ["save", "restore", "prepare"])
async def test_a_time_that_cannot_be_enough_for_all_waves_is_refused_before_anybody_is_asked(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy models were closed, and the agents behind them refused for want of time."""
    if kind == "restore":
        await saved_and_restarted(bench)
    else:
        await bench.start()
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "save": lambda: bench.save("short", "short"),
        "restore": lambda: bench.restore("short"),
        "prepare": lambda: bench.phase("Prepare", operation_id="short", snapshot_id="short"),
    }
    with monkeypatch.context() as patched:
        # Waves that need long, not a caller that has little: the answer has to arrive on a busy machine too.
        patched.setattr(phases, "WAVE_LEAST_S", 10.0)
        with pytest.raises(SafepointError, match="waves of calls") as caught:
            await calls[kind]()
    assert reason_of(caught) is Reason.DEADLINE_TOO_SHORT
    assert "Nobody was asked" in caught.value.problem.message
    assert "1 s is the least" in caught.value.problem.next_step
    assert not any(shim.count(call) for shim in bench.shims.values() for call in ("Prepare", "Restore", "Abort"))
    await bench.save("short", "short")  # the id was never used up


# ---- abort and status -----------------------------------------------------------------------------------------------


async def test_status_and_abort_answer_within_a_second_whatever_is_stuck(bench: Bench) -> None:
    stuck = {"Prepare", "Abort", "GetStatus", "RenewLease", "Resume"}
    await bench.start(agent_0=Knobs(hang_on=stuck), model_0=Knobs(hang_on=stuck))
    saving = asyncio.create_task(bench.save(timeout=20))
    await until(lambda: bench.shims["model-0"].count("Prepare") == 1)
    watch = Stopwatch()
    status = await bench.status(participants=True)
    assert watch.seconds < 1
    assert status.operation.operation_id == "save-1"
    assert "model-0" in status.operation.waiting_for
    health = {h.info.capabilities.participant_id: h for h in status.participants}
    assert not health["model-0"].reachable
    assert health["resources-0"].reachable
    watch = Stopwatch()
    assert "model-0" in (await bench.abort("save-1", timeout=30)).unconfirmed
    assert watch.seconds < 1
    saving.cancel()


async def test_a_fleet_too_large_to_be_asked_in_a_second_is_told_of_in_one_and_who_blocks_is_asked_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.status.ASKED_AT_ONCE", 1)
    await bench.start(agents=3, resources=2, resources_1=Knobs(hang_on={"GetStatus", "Prepare"}))
    saving = asyncio.create_task(bench.save(timeout=20))
    await until(lambda: bench.shims["resources-1"].count("Prepare") == 1)

    async def told(timeout: float) -> dict[str, pb.ParticipantHealth]:
        request = pb.GetCoordinatorStatusRequest(participants=True)
        watch = Stopwatch()
        status = await unary(bench.stub().GetStatus(request, timeout=timeout))
        assert watch.seconds < timeout
        return {h.info.capabilities.participant_id: h for h in status.participants}

    health = await told(1.0)
    assert not health.pop("resources-1").reachable
    assert all(one.reachable and one.problem.startswith("Not asked") for one in health.values()), "it took their time"
    assert all(one.HasField("status") for name, one in (await told(4.0)).items() if name != "resources-1")
    saving.cancel()


@pytest.mark.parametrize("call", ["Save", "Prepare", "Restore"])
async def test_what_was_aborted_before_it_came_never_begins(bench: Bench, call: str) -> None:
    await bench.start(agent_0=Knobs(rollouts=1))
    await bench.save("save-0", "step-0")
    asked_before = [shim.count("Prepare") + shim.count("Restore") for shim in bench.shims.values()]
    await bench.abort("late")
    await bench.abort("late")
    kind = {"Save": pb.SaveRequest, "Prepare": pb.PrepareOperationRequest, "Restore": pb.RestoreSnapshotRequest}[call]
    request: Any = kind(operation_id="late", snapshot_id="step-0" if call == "Restore" else "step-1")
    for _ in range(2):
        with pytest.raises(SafepointError) as caught:
            await collect(getattr(bench.stub(), call)(request, timeout=5))
        assert caught.value.reason is Reason.OPERATION_FINISHED
    assert [shim.count("Prepare") + shim.count("Restore") for shim in bench.shims.values()] == asked_before
    assert not (bench.root / "snapshots" / "step-1").exists()
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


async def test_abort_of_nothing_and_of_another_operation_changes_nothing(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=0.3))
    assert (await bench.abort()).operation_id == ""
    saving = asyncio.create_task(bench.save())
    await until(lambda: not bench.shims["agent-0"].open)
    assert (await bench.abort("save-other")).operation_id == ""
    assert (await saving)[-1].saved.snapshot.snapshot_id == "step-1"
    assert (await bench.abort("save-1")).operation_id == ""


async def test_explain_gives_the_primary_cause(bench: Bench) -> None:
    await bench.start(
        agent_0=Knobs(fail_on={"Commit": Problem(Reason.DECLINED, "no room")}), resources_0=Knobs(hang_on={"Abort"})
    )
    with pytest.raises(SafepointError):
        await bench.save(timeout=4)
    explained = await bench.explain()
    assert explained.operation.operation_id == "save-1"
    assert explained.operation.outcome == pb.OPERATION_OUTCOME_ABORTED
    assert explained.operation.failure.primary.participant_id == "agent-0"
    assert "no room" in explained.operation.failure.primary.message
    assert explained.operation.failure.primary.next_step
    assert any(detail.participant_id == "resources-0" for detail in explained.operation.failure.secondary)
    assert kinds(list(explained.events))[-1] == "failed"
    with pytest.raises(SafepointError) as caught:
        await bench.explain("nobody")
    assert reason_of(caught) is Reason.UNKNOWN_OPERATION


async def test_watch_begins_with_the_status_and_ends_with_its_operation(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=0.2))
    saving = asyncio.create_task(bench.save())
    await until(lambda: not bench.shims["agent-0"].open)
    events = await collect(bench.stub().Watch(pb.WatchRequest(operation_id="save-1"), timeout=10))
    assert events[0].status.operation.operation_id == "save-1"
    assert events[-1].operation_event.WhichOneof("event") == "saved"
    await saving


async def test_retired_rollouts_are_told_to_everybody_and_who_could_not_be_told_is_named(bench: Bench) -> None:
    await bench.start(model_0=Knobs(hang_on={"RetireAttempts"}))
    request = pb.RetireRolloutsRequest(rollout_ids=["r-1", "r-2"])
    with room_for_answers():
        reply = await unary(bench.stub().RetireRollouts(request, timeout=15))
    assert list(reply.unconfirmed) == ["model-0"]
    assert "model-0" in reply.causes["model-0"]
    assert set(bench.shims["agent-0"].retired) == {"r-1", "r-2"}
    assert reply.retired == 4


# ---- trainer-driven phases ------------------------------------------------------------------------------------------


async def test_a_trainer_drives_a_save_step_by_step(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=2))
    prepared = await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    assert "phase_finished" in kinds(prepared)
    assert not any(shim.open for shim in bench.shims.values())
    await bench.phase("Commit", operation_id="save-1")
    assert not (bench.root / "snapshots" / "step-1" / "manifest.json").exists()
    published = await bench.phase("Publish", operation_id="save-1", metadata={"step": "40"})
    assert published[-1].saved.snapshot.metadata == {"step": "40"}
    assert published[-1].saved.pause.ToMicroseconds() == 0
    assert not any(shim.open for shim in bench.shims.values())
    assert (await bench.status()).operation.outcome == pb.OPERATION_OUTCOME_PAUSED
    with pytest.raises(SafepointError) as caught:
        await bench.abort("save-1")
    assert reason_of(caught) is Reason.WRONG_PHASE
    resumed = await bench.phase("Resume", operation_id="save-1")
    assert resumed[-1].resumed.pause.ToMicroseconds() > 0
    assert sorted(resumed[-1].resumed.acknowledged) == ["agent-0", "model-0", "resources-0"]
    assert bench.all_open()


async def test_each_step_may_be_repeated_and_an_early_one_is_refused_and_legal_later(bench: Bench) -> None:
    await bench.start()
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    for method in ("Publish", "Resume"):
        with pytest.raises(SafepointError) as caught:
            await bench.phase(method, operation_id="save-1")
        assert reason_of(caught) is Reason.WRONG_PHASE
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    for method in ("Commit", "Commit", "Publish", "Publish"):
        await bench.phase(method, operation_id="save-1")
    with pytest.raises(SafepointError) as caught:
        await bench.phase("Publish", operation_id="save-1", metadata={"other": "x"})
    assert reason_of(caught) is Reason.REQUEST_CONFLICT
    first = await bench.phase("Resume", operation_id="save-1")
    again = await bench.phase("Resume", operation_id="save-1")
    assert first[-1].resumed == again[-1].resumed
    assert "saved" in kinds(await bench.phase("Publish", operation_id="save-1"))
    assert all(shim.count("Commit") == 1 for shim in bench.shims.values())


async def test_resume_of_nothing_is_ok_when_idle_and_fenced_when_not(bench: Bench) -> None:
    await bench.start()
    resumed = (await bench.phase("Resume", operation_id="never"))[-1].resumed
    assert not resumed.HasField("pause"), "nobody was paused, which clients tell from a pause of no length"
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    with pytest.raises(SafepointError) as caught:
        await bench.phase("Resume", operation_id="never")
    assert reason_of(caught) is Reason.FENCED
    await bench.abort()


async def test_a_trainer_that_falls_silent_lets_everybody_open(bench: Bench) -> None:
    await bench.start()
    options = pb.SaveOptions()
    options.lease_ttl.FromMilliseconds(1000)
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1", options=options)
    await until(bench.all_open)
    explained = await bench.explain()
    assert explained.operation.failure.primary.reason == int(Reason.LEASE_LAPSED)


# ---- restore --------------------------------------------------------------------------------------------------------


async def saved_and_restarted(bench: Bench, **knobs: Knobs) -> None:
    await bench.start(agent_0=Knobs(rollouts=3))
    await bench.save()
    for name, shim in list(bench.shims.items()):
        await shim.stop()
        await until(lambda name=name: bench.running.operations.discovery.registry.get(name) is None)
        await bench.add(name, Role(shim.capabilities.role), knobs.get(name.replace("-", "_")))


async def test_what_was_lost_between_restore_and_resume_is_told_by_the_resume_and_kept_in_its_history(
    bench: Bench,
) -> None:
    told = "Worker worker-1 (pid 7) has gone since the restore."
    await saved_and_restarted(bench, resources_0=Knobs(resume_warnings=(told,)))
    await bench.restore()
    events = await bench.phase("Resume", operation_id="restore-1")
    assert events[-1].HasField("resumed"), "it opens all the same"
    (warned,) = [event.warning for event in events if event.HasField("warning")]
    assert (warned.participant_id, warned.message) == ("resources-0", told)
    explained = await unary(bench.stub().Explain(pb.ExplainRequest(operation_id="restore-1"), timeout=5))
    assert [event.warning.message for event in explained.events if event.HasField("warning")] == [told]


async def test_a_restore_leaves_everybody_paused_and_only_resume_opens(bench: Bench) -> None:
    await saved_and_restarted(bench)
    events = await bench.restore()
    done = events[-1].restored
    assert done.snapshot.snapshot_id == "step-1"
    assert done.totals.parked == 3
    assert done.sessions == 3
    assert not any(shim.open for shim in bench.shims.values())
    assert (await bench.status()).operation.outcome == pb.OPERATION_OUTCOME_PAUSED
    resumed = await bench.phase("Resume", operation_id="restore-1")
    assert kinds(resumed)[-1] == "resumed"
    assert bench.all_open()


async def test_an_abort_reaches_the_shim_that_replaced_one_that_had_restored(bench: Bench) -> None:
    await saved_and_restarted(bench)
    await bench.restore()
    await bench.shims["agent-0"].stop()
    await until(lambda: bench.running.operations.discovery.registry.get("agent-0") is None)
    replaced = await bench.add("agent-0", Role.AGENT)
    await bench.abort("restore-1")
    await until(lambda: replaced.aborted == ["restore-1"])


async def test_a_restore_may_resume_by_itself(bench: Bench) -> None:
    await saved_and_restarted(bench)
    events = await bench.restore(resume=True)
    assert {"restored", "resumed"} <= set(kinds(events))
    assert bench.all_open()


async def test_a_failed_restore_stays_paused_and_says_what_is_legal_next(bench: Bench) -> None:  # D3
    await saved_and_restarted(
        bench, resources_0=Knobs(fail_on={"RestoreLoad": Problem(Reason.NOT_FRESH, "served work")})
    )
    with pytest.raises(SafepointError) as caught:
        await bench.restore()
    assert reason_of(caught) is Reason.NOT_FRESH
    assert "Abort" in caught.value.problem.advice
    assert not bench.shims["resources-0"].open
    assert (await bench.status()).operation.outcome == pb.OPERATION_OUTCOME_FAILED_PAUSED
    with pytest.raises(SafepointError) as fenced:
        await bench.restore("restore-2")
    assert reason_of(fenced) is Reason.FENCED
    assert "served work" in fenced.value.problem.message
    assert "safepoint abort" in fenced.value.problem.advice
    assert "Wait" not in fenced.value.problem.advice, "it never ends by itself"
    found = await unary(bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=5))
    assert [f.reason for f in found.findings if f.blocking] == [errors_pb2.REASON_FENCED]
    await bench.abort("restore-1")
    assert bench.all_open()
    bench.shims["resources-0"].knobs.fail_on.clear()
    with pytest.raises(SafepointError):  # the id is used up
        await bench.restore("restore-1")
    assert (await bench.restore("restore-2"))[-1].restored.snapshot.snapshot_id == "step-1"


async def test_a_restore_into_servers_that_have_worked_names_all_of_them_and_pauses_nobody(bench: Bench) -> None:
    await saved_and_restarted(bench)
    for name in ("resources-0", "agent-0"):
        bench.shims[name].knobs.served = True
    with pytest.raises(SafepointError) as caught:
        await bench.restore()
    assert reason_of(caught) is Reason.NOT_FRESH
    assert "agent-0, resources-0 have served" in caught.value.problem.message
    assert re.search(
        r"agent-0: shim at [^;]+, registered \d+ s ago; resources-0: shim at", caught.value.problem.message
    )
    assert all(shim.count("Restore") == 0 for shim in bench.shims.values())
    assert bench.all_open()
    for shim in bench.shims.values():
        shim.knobs.served = False
    assert (await bench.restore("restore-2"))[-1].restored.snapshot.snapshot_id == "step-1"


async def test_an_operation_is_not_the_snapshot_it_loads(bench: Bench) -> None:  # D2
    await bench.start()
    await bench.save("save-1", "step-1")
    with pytest.raises(SafepointError) as caught:
        await bench.restore(operation_id="step-1", snapshot_id="save-1")
    assert reason_of(caught) is Reason.SNAPSHOT_NOT_FOUND
    assert bench.all_open()


async def test_another_topology_is_refused_with_the_difference_and_nobody_is_paused(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    await bench.add("resources-1", Role.RESOURCES)
    with pytest.raises(SafepointError) as caught:
        await bench.restore()
    assert reason_of(caught) is Reason.FINGERPRINT_MISMATCH
    assert "resources-1" in caught.value.problem.message
    assert all(shim.count("Restore") == 0 for shim in bench.shims.values())


@pytest.mark.parametrize("damage", ["truncate", "edit", "remove"])
async def test_a_damaged_part_refuses_the_restore_before_anything_is_paused(
    bench: Bench, damage: str
) -> None:  # F1, F6
    await bench.start(agent_0=Knobs(rollouts=2))
    await bench.save("save-0", "step-0")
    await bench.save()
    victim = bench.root / "snapshots" / "step-1" / "agent-0" / "state.bin"
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "edit":
        victim.write_bytes(b"S" + victim.read_bytes()[1:])
    else:
        victim.unlink()
    with pytest.raises(SafepointError) as caught:
        await bench.restore()
    assert reason_of(caught) is Reason.SNAPSHOT_CORRUPT
    assert "state.bin" in caught.value.problem.message
    assert bench.all_open()
    assert all(shim.count("Restore") == 0 for shim in bench.shims.values())
    assert (await bench.restore("restore-2", "step-0"))[-1].restored.snapshot.snapshot_id == "step-0"
    await bench.abort()


async def test_a_snapshot_that_is_being_restored_is_not_pruned(bench: Bench) -> None:
    await bench.start()
    for n in range(3):
        await bench.save(f"save-{n}", f"step-{n}")
    await bench.restore("restore-1", "step-0")
    pruned = await unary(bench.stub().PruneSnapshots(pb.PruneSnapshotsRequest(keep_last=1), timeout=5))
    assert list(pruned.deleted) == ["step-1"]
    assert pruned.size_bytes > 0
    await bench.abort()


async def test_only_the_last_few_are_kept_when_it_is_asked_for(bench: Bench) -> None:
    bench.settings["keep_last"] = 2
    await bench.start()
    for n in range(4):
        await bench.save(f"save-{n}", f"step-{n}")
    await until(lambda: sorted(p.name for p in (bench.root / "snapshots").iterdir()) == ["step-2", "step-3"])
    listed = await unary(bench.stub().ListSnapshots(pb.ListSnapshotsRequest(page_size=1), timeout=5))
    assert [s.snapshot_id for s in listed.snapshots] == ["step-3"]
    rest = await unary(
        bench.stub().ListSnapshots(pb.ListSnapshotsRequest(page_size=1, page_token=listed.next_page_token), timeout=5)
    )
    assert [s.snapshot_id for s in rest.snapshots] == ["step-2"]
    assert rest.next_page_token == ""


async def test_a_list_in_pages_reads_each_manifest_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.start()
    for n in range(3):
        await bench.save(f"save-{n}", f"step-{n}")
    read: list[str] = []
    real = SnapshotReader._manifest

    def counted(self: SnapshotReader, directory: Any, name: str) -> Any:
        read.append(name)
        return real(self, directory, name)

    monkeypatch.setattr(SnapshotReader, "_manifest", counted)
    for _ in range(2):  # a list that begins anew looks at the disk again
        read.clear()
        names, page = list[str](), ""
        while True:
            request = pb.ListSnapshotsRequest(page_size=1, page_token=page)
            answer = await unary(bench.stub().ListSnapshots(request, timeout=5))
            names += [info.snapshot_id for info in answer.snapshots]
            if not (page := answer.next_page_token):
                break
        assert names == ["step-2", "step-1", "step-0"]
        assert sorted(read) == ["step-0", "step-1", "step-2"]


# ---- registration ---------------------------------------------------------------------------------------------------


async def test_a_second_living_shim_of_one_name_is_refused(bench: Bench) -> None:
    await bench.start()
    twin = await FakeShim("agent-0", Role.AGENT, bench.root).start()
    with pytest.raises(aio.AioRpcError) as caught:
        await twin.register(bench.running.address)
    assert error_from_rpc(caught.value).reason is Reason.DUPLICATE_PARTICIPANT
    await twin.stop()
    await bench.save()
    await bench.shims["agent-0"].stop()
    await bench.add("agent-0", Role.AGENT)
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


async def test_a_shim_without_a_role_is_seen_and_refuses_every_operation(bench: Bench) -> None:
    await bench.start()
    await bench.add("judge-0", Role.UNSPECIFIED, kind="gym.model")
    found = await bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=5)
    (finding,) = [each for each in found.findings if each.participant_id == "judge-0" and each.blocking]
    assert "SAFEPOINT_ROLES" in finding.next_step
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.reason is Reason.ROLE_INVALID
    assert bench.all_open()


@pytest.mark.parametrize("refresh", [False, True])
async def test_a_worker_that_is_missing_is_a_finding_before_a_save_is_refused_by_it(
    bench: Bench, refresh: bool
) -> None:
    await bench.start(models=1, resources=0)
    shim = await bench.add("cart-0", Role.RESOURCES, Knobs(silent_workers=1), workers=2)
    asked = pb.GetTopologyRequest(refresh=refresh)
    found = await unary(bench.stub().GetTopology(asked, timeout=5))
    (finding,) = [each for each in found.findings if each.blocking]
    assert (finding.participant_id, finding.reason) == ("cart-0", errors_pb2.REASON_WORKERS_MISSING)
    assert "1 of 2" in finding.message
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.reason is Reason.WORKERS_MISSING
    shim.knobs.silent_workers = 0  # its server has started another one
    assert not [f for f in (await unary(bench.stub().GetTopology(asked, timeout=5))).findings if f.blocking]


@pytest.mark.parametrize(
    ("workers", "waiting_for", "said"),
    [
        (2, "", ""),
        (1, "1 of 2 workers of cart are connected (worker-0); missing: worker-1 (pid 7: its process was ended by signal 9)",
         "was ended by signal 9)."),
        (0, "", ""),  # of a participant that counts no workers in its status
        (0, "0 of 2 workers of cart are connected (none)", "0 of 2"),
        (2, "worker-1 does not answer. Its process (pid 7) is stopped: `kill -CONT 7` lets it go on", "kill -CONT 7"),
        (2, f"worker-1 does not answer. Its process (pid 7) {RUNS}: see how busy its machine is", ""),
        (2, "vLLM at 127.0.0.1:1 does not answer", ""),
    ],
)  # fmt: skip
def test_a_status_says_whether_a_save_would_miss_a_worker(workers: int, waiting_for: str, said: str) -> None:
    """A busy worker is waited for by a save: it is no finding."""
    who = Participant(
        ParticipantId("cart"), Role.RESOURCES, "gym.resources", CheckpointMode.EXPORT_RESTORE, IncarnationId("i-1"), "a:1",
        configured_workers=2,
    )  # fmt: skip
    seen = capabilities_pb2.ParticipantStatus(waiting_for=waiting_for)
    for number in range(workers):
        seen.workers.add(worker_id=f"worker-{number}", acknowledged=True)
    problem = workers_problem(who, seen)
    assert (problem is None) is (not said)
    assert problem is None or (said in problem.message and problem.reason is Reason.WORKERS_MISSING)


async def test_a_restart_during_a_save_voids_it(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    saving: asyncio.Task[Any] = asyncio.create_task(bench.save(timeout=20))
    await until(lambda: not bench.shims["agent-0"].open)
    await bench.shims["model-0"].stop()
    with pytest.raises(SafepointError) as caught:
        await saving
    assert caught.value.problem.participant_id == "model-0"
    await until(bench.all_open)


async def test_a_shim_that_registers_paused_by_a_forgotten_operation_is_opened(bench: Bench) -> None:  # A18
    await bench.start_coordinator()
    shim = FakeShim("agent-0", Role.AGENT, bench.root)
    bench.shims["agent-0"] = shim
    await shim.start()
    shim._close("save-of-long-ago", 3, 60)
    await shim.register(bench.running.address)
    await until(lambda: shim.open)
    assert shim.aborted == ["save-of-long-ago"]


@pytest.mark.parametrize("slept", [True, False])
async def test_a_coordinator_that_did_not_run_answers_at_once_and_waits_for_nobodys_last_word(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, slept: bool
) -> None:
    """What a shim's successor would say of its end is waited for; those that have left a coordinator that slept all live."""
    waited: list[float] = []
    monkeypatch.setattr("coordinator.operations.EXPLAIN_WITHIN_S", 0.6)
    await bench.start(resources_0=Knobs(hang_on={"Commit"}))
    operations = bench.running.operations
    registry = operations.discovery.registry
    saving = asyncio.create_task(bench.save())
    await until(
        lambda: operations.active is not None and "Commit" in [name for name, _ in bench.shims["resources-0"].calls]
    )
    assert operations.active is not None
    post = operations.active.post

    def posted(event: Any) -> None:
        if isinstance(event, ParticipantLost):
            waited.append(event.explained_within_s)
        post(event)

    monkeypatch.setattr(operations.active, "post", posted)
    for session in list(registry._sessions.values()):
        process = ShimProcess("host-a", 4711, "", watched=True)
        session.participant = replace(session.participant, process=process)
        registry.leave(
            session, "its registration ended", we_slept="the coordinator did not run, for 7.0 s" if slept else ""
        )
    with pytest.raises(SafepointError, match="has left" if slept else "is gone") as caught:
        await saving
    assert caught.value.reason is Reason.UNREACHABLE
    assert set(waited) == {0.0 if slept else 0.6}
