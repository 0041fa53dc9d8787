"""A save over real gRPC: what is said, what is on the disk, and that everybody is open afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import pytest
from grpc import aio
from safepoint.v1 import capabilities_pb2, manifest_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.protocol.transaction import Transaction
from coordinator.wire import beneath
from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.rpc import error_from_rpc
from coordinator.wire.terms import CheckpointMode, Phase, Role
from tests.coordinator.conftest import Bench, collect, kinds, unary, until
from tests.fakes import NEVER, Knobs
from tests.in_time import Stopwatch, room_for_answers


async def failure(bench: Bench, **kwargs: Any) -> SafepointError:
    with pytest.raises(SafepointError) as caught:
        await bench.save(**kwargs)
    return caught.value


async def test_a_save_publishes_a_snapshot_and_everybody_is_open(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=3))
    events = await bench.save()
    assert kinds(events)[-2:] == ["resumed", "saved"]
    saved = events[-1].saved
    assert saved.snapshot.snapshot_id == "step-1"
    assert saved.snapshot.totals.parked == 3
    assert saved.pause.ToMicroseconds() > 0
    assert not saved.unconfirmed
    assert bench.all_open()
    assert [shim.opened_by for shim in bench.shims.values()] == [["Resume"]] * 3
    assert (bench.root / "snapshots" / "step-1" / "manifest.json").is_file()
    sequences = [event.sequence for event in events]
    assert sequences == sorted(set(sequences))


async def test_the_first_word_comes_within_a_second(bench: Bench) -> None:  # E2
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    watch = Stopwatch()
    call = bench.stub().Save(pb.SaveRequest(operation_id="save-1", snapshot_id="step-1"), timeout=30)
    await call.read()
    assert watch.seconds < 1
    call.cancel()


async def test_a_drain_that_does_not_end_names_rollout_participant_turn_and_time(bench: Bench) -> None:  # E1
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    with room_for_answers():
        problem = (await failure(bench, timeout=20)).problem
    assert problem.reason is Reason.DRAIN_INCOMPLETE
    assert problem.participant_id == "agent-0"
    assert [r.rollout_id for r in problem.rollouts] == ["r1"]
    assert problem.rollouts[0].turn == 3
    assert problem.rollouts[0].waiting_on == "judge"
    assert problem.waited_s is not None
    assert bench.all_open()


async def test_nine_hundred_stuck_rollouts_keep_the_status_code(bench: Bench) -> None:  # H2
    await bench.start(agent_0=Knobs(inflight=900, drain_after_s=NEVER))
    request = pb.SaveRequest(operation_id="save-1", snapshot_id="step-1")
    with room_for_answers(), pytest.raises(aio.AioRpcError) as caught:
        [_ async for _ in bench.stub().Save(request, timeout=20)]
    assert caught.value.code().name == "DEADLINE_EXCEEDED"
    problem = error_from_rpc(caught.value).problem
    assert problem.reason is Reason.DRAIN_INCOMPLETE
    assert problem.rollout_count == 900


async def test_a_participant_that_hangs_in_prepare_is_named_in_time_and_the_others_open(bench: Bench) -> None:  # A2
    await bench.start(agents=0, models=2, resources=0)
    await bench.add("agent-0", Role.AGENT)
    bench.shims["model-1"].knobs.hang_on.add("Prepare")
    with room_for_answers():  # its answer is no timeout of ours
        error = await failure(bench, timeout=15)
    assert error.problem.participant_id == "model-1" or "model-1" in error.problem.message
    assert bench.shims["model-0"].open
    assert bench.shims["model-0"].aborted == ["save-1"]


async def test_a_worker_that_does_not_acknowledge_fails_the_prepare(bench: Bench) -> None:  # A7
    await bench.start(resources=0)
    await bench.add("resources-0", Role.RESOURCES, Knobs(silent_workers=1), workers=2)
    error = await failure(bench)
    assert error.reason is Reason.WORKERS_MISSING
    assert "1 of 2 workers" in error.problem.message
    assert bench.all_open()


async def test_leaving_the_stream_of_a_save_does_not_end_it(bench: Bench) -> None:  # A8
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=0.3))
    call = bench.stub().Save(pb.SaveRequest(operation_id="save-1", snapshot_id="step-1"), timeout=10)
    await call.read()
    call.cancel()
    events = await bench.save()
    assert events[-1].saved.snapshot.snapshot_id == "step-1"
    assert bench.shims["agent-0"].count("Prepare") == 1
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


async def test_a_participant_that_hangs_in_resume_is_listed_and_the_save_stands(bench: Bench) -> None:  # A10
    await bench.start(resources_0=Knobs(hang_on={"Resume"}))
    with room_for_answers():
        events = await bench.save(timeout=30)
    saved = events[-1].saved
    assert list(saved.unconfirmed) == ["resources-0"]
    assert bench.shims["agent-0"].open
    explained = (await bench.status()).operation
    assert list(explained.unconfirmed) == ["resources-0"]
    assert explained.outcome == pb.OPERATION_OUTCOME_SUCCEEDED
    bench.shims["resources-0"].knobs.hang_on.clear()  # it is told again
    await until(bench.all_open)


async def test_one_refusal_opens_everybody_who_may_have_heard(bench: Bench) -> None:  # A13, D1
    await bench.start(models=2, model_1=Knobs(fail_on={"Prepare": Problem(Reason.INTERNAL, "broken")}))
    error = await failure(bench)
    assert error.problem.participant_id == "model-1"
    assert bench.all_open()
    # At least once: on a busy machine an abort that is not answered at once is repeated.
    assert set(bench.shims["model-0"].aborted) == {"save-1"}
    assert bench.shims["model-1"].count("Abort") >= 1
    bench.shims["model-1"].knobs.fail_on.clear()
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())  # removed behind the answer


async def test_a_decline_ends_it_at_once(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(fail_on={"Prepare": Problem(Reason.DECLINED, "no room")}))
    began = time.monotonic()
    error = await failure(bench, timeout=30)
    assert time.monotonic() - began < 10, "not until the deadline"
    assert error.reason is Reason.DECLINED
    assert bench.all_open()


async def test_an_abort_that_is_not_confirmed_is_said_to_be(bench: Bench) -> None:  # A24
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER), model_0=Knobs(hang_on={"Abort"}))
    saving = asyncio.create_task(failure(bench, timeout=30))
    await until(lambda: not bench.shims["agent-0"].open)
    watch = Stopwatch()
    reply = await bench.abort(timeout=30)
    assert watch.seconds < 1
    assert reply.operation_id == "save-1"
    assert "model-0" in reply.unconfirmed
    assert "agent-0" not in reply.unconfirmed
    error = await saving
    assert error.reason is Reason.ABORTED


async def test_a_dead_participant_ends_the_wait(bench: Bench) -> None:  # B22
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER), model_0=Knobs(die_at="Prepare"))
    began = time.monotonic()
    error = await failure(bench, timeout=30)
    assert time.monotonic() - began < 10, "not until the deadline"
    assert error.problem.participant_id == "model-0"
    assert error.reason in {Reason.UNREACHABLE, Reason.INCARNATION_CHANGED}
    assert bench.all_open()


async def test_a_silent_participant_is_lost_after_three_heartbeats(bench: Bench) -> None:  # H7
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    saving = asyncio.create_task(failure(bench, timeout=30))
    await until(lambda: not bench.shims["agent-0"].open)
    bench.shims["model-0"].beating = False
    error = await saving
    assert error.problem.participant_id == "model-0"
    assert "silent" in error.problem.message
    assert bench.all_open()


async def test_a_judge_that_is_labelled_policy_is_refused_before_anything_is_paused(bench: Bench) -> None:  # C1
    await bench.start(resources=0)
    await bench.add("judge", Role.POLICY_MODEL)
    await bench.add("verifier", Role.RESOURCES, depends_on=("judge",))
    topology = await unary(bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=5))
    assert [f.participant_id for f in topology.findings if f.blocking] == ["judge"]
    error = await failure(bench)
    assert error.reason is Reason.POLICY_NOT_SERVED
    assert "auxiliary" in error.problem.message
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())  # removed behind the answer


@pytest.mark.parametrize(
    ("resources", "expected", "reason"),
    [(0, "", Reason.POLICY_NOT_SERVED), (1, "0" * 64, Reason.FINGERPRINT_MISMATCH)],
)
async def test_a_topology_that_is_refused_reserves_nothing_on_the_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, resources: int, expected: str, reason: Reason
) -> None:
    await bench.start(resources=resources)
    if not resources:
        await bench.add("verifier", Role.RESOURCES, depends_on=("model-0",))
    begun: list[str] = []
    monkeypatch.setattr(bench.running.operations.store, "begin", begun.append)
    error = await failure(bench, expected_fingerprint=expected)
    assert (error.reason, error.problem.operation_id) == (reason, "save-1")
    assert begun == []


async def test_an_auxiliary_model_is_never_paused(bench: Bench) -> None:
    await bench.start()
    judge = await bench.add("judge", Role.AUXILIARY_MODEL, mode=CheckpointMode.STATELESS)
    await bench.save()
    assert [name for name, _ in judge.calls if name != "GetCapabilities"] == []


@pytest.mark.parametrize("lie", ["operation", "digest", "missing-file", "no-proof", "generation"])
async def test_a_participant_that_lies_can_only_void_the_cut(bench: Bench, lie: str) -> None:
    await bench.start(resources_0=Knobs(lie=lie))
    error = await failure(bench)
    assert error.problem.participant_id == "resources-0"
    assert bench.all_open()
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())


async def test_one_that_never_commits_prevents_the_snapshot(bench: Bench) -> None:  # F8, F3
    await bench.start(resources_0=Knobs(hang_on={"Commit"}))
    error = await failure(bench, timeout=1.5)
    assert error.problem.phase is Phase.COMMIT
    assert bench.all_open()
    listed = await unary(bench.stub().ListSnapshots(pb.ListSnapshotsRequest(), timeout=5))
    assert not listed.snapshots


async def test_while_it_is_written_the_status_says_so_and_lists_nothing_as_saved(bench: Bench) -> None:  # F9
    await bench.start(resources_0=Knobs(slow_s={"Commit": 0.4}))
    saving = asyncio.create_task(bench.save())
    await until(lambda: bench.shims["resources-0"].count("Commit") == 1)
    status = await bench.status()
    assert status.operation.phase == capabilities_pb2.PHASE_COMMIT
    assert list(status.operation.pending_participants) == ["resources-0"]
    assert status.operation.outcome == pb.OPERATION_OUTCOME_RUNNING
    assert status.latest_snapshot_id == ""
    await saving
    assert (await bench.status()).latest_snapshot_id == "step-1"


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
async def test_a_full_disk_at_the_manifest_is_a_clean_abort(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:  # F7
    import errno

    await bench.start()
    await bench.save("save-0", "step-0")
    real = os.link

    def full(src: Any, dst: Any, **kwargs: Any) -> None:
        if dst == "manifest.json" and "agent" not in str(src) and bench_snapshot_open["now"]:
            raise OSError(getattr(errno, code), "full")
        real(src, dst, **kwargs)

    bench_snapshot_open = {"now": False}
    original = beneath.Directory.write_new

    def write_new(self: beneath.Directory, name: str, data: Any) -> Any:
        bench_snapshot_open["now"] = name == "manifest.json" and self.path.name == "step-1"
        return original(self, name, data)

    monkeypatch.setattr(beneath.Directory, "write_new", write_new)
    monkeypatch.setattr(os, "link", full)
    error = await failure(bench)
    assert error.reason is Reason.STORAGE_FULL
    assert bench.all_open()
    monkeypatch.undo()
    verified = await unary(bench.stub().VerifySnapshot(pb.VerifySnapshotRequest(snapshot_id="step-0"), timeout=5))
    assert verified.manifest.snapshot_id == "step-0"
    assert (await bench.save("save-2", "step-1"))[-1].saved.snapshot.snapshot_id == "step-1"


async def test_verify_reads_every_part_also_when_one_is_damaged(bench: Bench) -> None:
    await bench.start(agents=2, agent_0=Knobs(rollouts=1), agent_1=Knobs(rollouts=1))
    await bench.save()
    for name in ("agent-0", "agent-1"):
        part = bench.root / "snapshots" / "step-1" / name
        file = next(path for path in sorted(part.iterdir()) if path.name != "manifest.json")
        file.write_bytes(b"x" + file.read_bytes()[1:])
    with pytest.raises(SafepointError) as raised:
        bench.running.operations.store.verify("step-1")
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT
    assert raised.value.problem.participant_id == "agent-0"
    assert "Damaged as well: what agent-1 wrote." in raised.value.problem.message


async def test_a_save_beyond_its_quota_is_a_clean_abort_that_names_who_has_the_most(bench: Bench) -> None:  # D20
    bench.settings["max_snapshot_bytes"] = 2
    await bench.start(agent_0=Knobs(rollouts=3))
    problem = (await failure(bench)).problem
    assert (problem.reason, problem.participant_id) == (Reason.STORAGE_FULL, "agent-0")
    assert "max_snapshot_bytes allows 2" in problem.message
    assert bench.all_open()
    assert not (bench.root / "snapshots" / "step-1").exists()


async def test_a_full_disk_at_the_journal_pauses_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    await bench.start()
    journal = bench.running.operations.journal
    monkeypatch.setattr(
        journal,
        "append",
        lambda entry: (_ for _ in ()).throw(beneath.storage_error(OSError(errno.ENOSPC, "full"), "x")),
    )
    error = await failure(bench)
    assert error.reason is Reason.STORAGE_FULL
    assert all(shim.count("Prepare") == 0 for shim in bench.shims.values())
    monkeypatch.undo()
    await bench.save()


async def test_a_lost_reply_is_asked_for_again_and_nothing_runs_twice(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(lose_reply={"Prepare": 1, "Commit": 1, "Confirm": 1, "Resume": 1}))
    events = await bench.save()
    assert events[-1].saved.snapshot.snapshot_id == "step-1"
    assert bench.shims["agent-0"].count("Commit") == 2
    assert bench.all_open()


async def test_a_crash_in_a_handler_shows_nothing_of_its_text(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(crash_on={"Prepare"}))
    error = await failure(bench)
    assert "secret" not in str(error)
    assert bench.all_open()


async def test_no_lease_no_snapshot(bench: Bench) -> None:
    """A participant whose lease lapses during a long commit voids the cut although it says nothing."""
    await bench.start(resources_0=Knobs(slow_s={"Commit": 1.6}), agent_0=Knobs(hang_on={"RenewLease"}))
    request = pb.SaveOptions()
    request.lease_ttl.FromMilliseconds(1000)
    with pytest.raises(SafepointError) as caught:
        await bench.save(lease_ttl=request.lease_ttl)
    assert caught.value.problem.participant_id == "agent-0"
    assert bench.all_open()
    assert bench.shims["agent-0"].thawed_by_lease == 1


async def test_a_coordinator_that_did_not_run_right_before_the_link_says_for_how_long_it_is_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.start()
    clock = bench.running.operations.clock
    monkeypatch.setattr(Transaction, "publish_until", lambda _: clock() - 6.1)
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.reason is Reason.LEASE_LAPSED
    assert "A lease had lapsed 6.1 s before the manifest was to be linked" in caught.value.problem.message
    assert "the coordinator did not run" in caught.value.problem.advice
    assert bench.all_open()


async def test_leases_are_renewed_through_a_commit_that_is_longer_than_they_are(bench: Bench) -> None:
    await bench.start(resources_0=Knobs(slow_s={"Commit": 1.5}))
    options = pb.SaveOptions()
    options.lease_ttl.FromMilliseconds(1000)
    events = await bench.save(lease_ttl=options.lease_ttl)
    assert events[-1].saved.snapshot.snapshot_id == "step-1"
    assert bench.shims["agent-0"].thawed_by_lease == 0


@pytest.mark.slow
async def test_two_hundred_thousand_rollouts_pass(bench: Bench) -> None:  # H1
    entries = [
        manifest_pb2.LedgerEntry(
            rollout_id=f"{n // 8}-{n % 8}", state=manifest_pb2.ROLLOUT_STATE_PARKED, recorded_calls=5
        )
        for n in range(200_000)
    ]
    await bench.start(agent_0=Knobs(ledger=entries))
    events = await bench.save(timeout=60)
    assert events[-1].saved.snapshot.totals.parked == 200_000
    read = await collect(bench.stub().ReadLedger(pb.ReadLedgerRequest(snapshot_id="step-1"), timeout=60))
    names = [entry.rollout_id for part in read for entry in part.entries]
    assert len(names) == 200_000
    assert names == sorted(names)
    assert max(len(part.entries) for part in read) <= 1000


async def test_whoever_joins_while_a_save_runs_voids_it(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    saving = asyncio.create_task(failure(bench, timeout=30))
    await until(lambda: not bench.shims["agent-0"].open)
    await bench.add("agent-1", Role.AGENT)
    error = await saving
    assert "agent-1" in error.problem.message
    assert bench.all_open()


async def test_a_static_participant_takes_part_and_its_absence_is_found_before_anything_is_paused(bench: Bench) -> None:
    from tests.fakes import FakeShim

    static = await FakeShim("resources-0", Role.RESOURCES, bench.root).start()
    bench.settings["participants"] = (static.address,)
    await bench.start(resources=0)
    bench.shims["resources-0"] = static
    await bench.save()
    assert static.count("Commit") == 1
    await static.stop()
    error = await failure(bench, operation_id="save-2", snapshot_id="step-2")
    assert "resources-0" in error.problem.message
    assert bench.shims["agent-0"].count("Prepare") == 1


async def test_the_pause_is_that_of_the_gates(bench: Bench) -> None:
    await bench.start(resources_0=Knobs(slow_s={"Commit": 0.3}))
    began = time.monotonic()
    events = await bench.save()
    pause_s = events[-1].saved.pause.ToMicroseconds() / 1e6
    assert 0.3 <= pause_s <= time.monotonic() - began
    assert events[-2].resumed.pause == events[-1].saved.pause


async def test_the_journal_holds_what_a_person_can_read(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    folder = bench.root / "coordinator"
    (journal,) = folder.glob("journal-*.log")

    def written() -> list[str]:
        return [json.loads(line.partition(" ")[2])["kind"] for line in journal.read_text().splitlines()]

    await until(lambda: written()[-1] == "outcome")  # written after the answer: nobody waits for it
    assert written()[:2] == ["head", "members"], "who takes part is known before an operation begins"
    assert "begun" in written()
    assert (folder / "epoch-1").exists()
