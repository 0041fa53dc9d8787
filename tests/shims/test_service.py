"""The Participant service over real gRPC: what the contract says of each RPC."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from safepoint.v1 import participant_service_pb2 as pb

from coordinator.wire.errors import STILL_LOADED, Problem, Reason, refuse
from coordinator.wire.terms import CheckpointMode, ParticipantState, QuiesceMode, Role
from participant_shims.adapter import Opened
from tests.in_time import Stopwatch, room_for_answers
from tests.shims.shim_fakes import FakeAdapter, Shim, answer, collect, refused, rollout, serve, until


async def saved(shim: Shim, operation_id: str = "op-1", snapshot_id: str = "snap-1") -> pb.Committed:
    """A whole save up to the publication."""
    shim.reserve(snapshot_id)
    await shim.prepared(operation_id)
    events = await collect(shim.commit(operation_id, snapshot_id))
    shim.publish(snapshot_id)
    await shim.resume(operation_id)
    return events[-1].committed


# ---- prepare ---------------------------------------------------------------------------------------------------------


async def test_prepare_reports_closed_then_progress_then_prepared(shim: Shim) -> None:
    shim.adapter.in_flight = [rollout("r-1"), rollout("r-2")]
    call = shim.prepare(straggler_policy=2)
    kinds = []
    async for event in call:
        kinds.append(event.WhichOneof("event"))
        if event.HasField("drain_progress"):
            shim.adapter.finish(event.drain_progress.waiting_for[0].rollout_id)
    assert kinds[0] == "admission_closed"
    assert kinds[-1] == "prepared"
    assert kinds.count("drain_progress") >= 2
    status = await shim.state()
    assert status.state == ParticipantState.PREPARED
    assert status.operation_id == "op-1"
    assert 59 < status.lease_remaining.seconds <= 60


async def test_prepare_that_does_not_drain_names_who_is_stuck_before_the_deadline(shim: Shim) -> None:  # E1
    shim.adapter.in_flight = [rollout(f"r-{n}") for n in range(30)]
    with room_for_answers():
        error = await refused(collect(shim.prepare(timeout=5, straggler_policy=2)))
    assert error.reason is Reason.DRAIN_INCOMPLETE
    assert len(error.rollouts) == 20
    assert error.problem.rollout_count == 30
    first = error.rollouts[0]
    assert (first.rollout_id, first.turn, first.age_s, first.waiting_on) == ("r-0", 4, 83.0, "judge")
    assert error.problem.operation_id == "op-1"
    assert error.participant_id == "counter"
    assert (await shim.state()).state == ParticipantState.PREPARING
    assert not shim.adapter.open_now


async def test_a_handler_that_outlasts_the_grace_fails_a_hold_that_may_exclude_nobody(shim: Shim) -> None:
    shim.adapter.in_flight = [rollout("r-1")]
    begun = time.monotonic()
    hold = {"straggler_policy": 2, "quiesce_mode": int(QuiesceMode.HOLD)}
    error = await refused(collect(shim.prepare(timeout=60, straggler_grace=Duration(nanos=200_000_000), **hold)))
    assert time.monotonic() - begun < 10, "everybody is paused meanwhile: not until the deadline"
    assert (error.reason, error.rollouts[0].rollout_id) == (Reason.DRAIN_INCOMPLETE, "r-1")


async def test_the_error_of_a_drain_says_what_nobody_waits_for_any_more(shim: Shim) -> None:  # A21
    shim.adapter.in_flight = [replace(rollout("r-1"), no_client_s=12.0), rollout("r-2")]
    with room_for_answers():
        error = await refused(collect(shim.prepare(timeout=5, straggler_policy=2)))
    assert [r.no_client_s for r in error.rollouts] == [12.0, None]
    assert "no client for 12 s" in str(error)
    status = (await answer(shim.stub.GetStatus(pb.GetStatusRequest(max_rollouts=5), timeout=5))).status
    assert [r.no_client_for.seconds for r in status.rollouts if r.HasField("no_client_for")] == [12]


async def test_progress_comes_within_a_second_and_each_second(shim: Shim) -> None:  # E2
    shim.adapter.in_flight = [rollout("r-1")]
    gaps = []
    call = shim.prepare(timeout=60, straggler_policy=2)
    for _ in range(4):
        watch = Stopwatch()
        await call.read()
        gaps.append(watch.seconds)
    call.cancel()
    assert max(gaps) < 1.2
    assert gaps[0] < 1


async def test_stragglers_are_excluded_before_the_deadline(shim: Shim) -> None:
    shim.adapter.in_flight = [rollout("r-1")]
    with room_for_answers():
        prepared = await shim.prepared(timeout=15)
    assert prepared.excluded_count == 1
    assert prepared.excluded[0].rollout_id == "r-1"


async def test_a_cancelled_prepare_goes_on_and_a_repeat_follows_it(shim: Shim) -> None:  # A8
    shim.adapter.in_flight = [rollout("r-1")]
    first = shim.prepare(straggler_policy=2)
    async for _ in first:
        break
    first.cancel()
    second = asyncio.create_task(collect(shim.prepare(straggler_policy=2)))
    await asyncio.sleep(0)
    shim.adapter.finish("r-1")
    events = await second
    assert events[0].HasField("admission_closed")
    assert events[-1].HasField("prepared")
    assert shim.adapter.calls.count("close") == 1
    assert (await collect(shim.prepare(straggler_policy=2)))[-1] == events[-1]


async def test_a_repeated_prepare_with_other_parameters_is_a_conflict_with_both_digests(shim: Shim) -> None:
    await shim.prepared()
    before = await shim.state()
    error = await refused(collect(shim.prepare(quiesce_mode=int(QuiesceMode.DRAIN))))
    assert error.reason is Reason.REQUEST_CONFLICT
    assert set(error.problem.metadata) == {"first_digest", "this_digest"}
    assert (await shim.state()).state == before.state


async def test_a_failed_prepare_opens_and_the_next_operation_succeeds(shim: Shim) -> None:  # D1, A13
    shim.adapter.fail["quiesce"] = refuse(Reason.DECLINED, "The sandbox is busy.")
    error = await refused(collect(shim.prepare()))
    assert (error.reason, error.problem.message) == (Reason.DECLINED, "The sandbox is busy.")
    status = await shim.state()
    assert (status.state, status.operation_id) == (ParticipantState.OPEN, "")
    assert shim.adapter.open_now
    again = await refused(collect(shim.prepare()))  # the same operation gets the recorded failure, and nothing is tried
    assert again.problem.message == error.problem.message
    assert shim.adapter.calls.count("close") == 1
    del shim.adapter.fail["quiesce"]
    assert (await shim.prepared("op-2")).incarnation_id == "i-1"


async def test_an_unexpected_failure_of_an_adapter_tells_nothing_and_opens(shim: Shim) -> None:
    shim.adapter.fail["quiesce"] = RuntimeError("/secret/path")
    error = await refused(collect(shim.prepare()))
    assert error.reason is Reason.INTERNAL
    assert "secret" not in str(error)
    assert shim.adapter.open_now


async def test_a_call_without_a_deadline_is_refused(shim: Shim) -> None:  # E8
    request = pb.PrepareRequest(context=shim.context())
    request.lease_ttl.FromSeconds(60)
    error = await refused(collect(shim.stub.Prepare(request)))
    assert error.reason is Reason.DEADLINE_MISSING
    assert shim.adapter.open_now


@pytest.mark.parametrize(
    ("operation_id", "epoch", "lease_s", "reason"),
    [
        ("", 1, 60, Reason.MALFORMED_ID),
        ("../op", 1, 60, Reason.MALFORMED_ID),
        ("op-1", 0, 60, Reason.INVALID_ARGUMENT),
        ("op-1", 1, 0.5, Reason.INVALID_ARGUMENT),
        ("op-1", 1, 3601, Reason.INVALID_ARGUMENT),
    ],
)
async def test_malformed_requests_change_nothing(
    shim: Shim, operation_id: str, epoch: int, lease_s: float, reason: Reason
) -> None:
    request = pb.PrepareRequest(context=pb.OperationContext(operation_id=operation_id, coordinator_epoch=epoch))
    request.lease_ttl.FromMilliseconds(int(lease_s * 1000))
    assert (await refused(collect(shim.stub.Prepare(request, timeout=5)))).reason is reason
    assert "close" not in shim.adapter.calls
    assert (await shim.state()).coordinator_epoch == 0


async def test_a_quiesce_mode_that_is_not_offered_is_refused_at_once(shim: Shim) -> None:
    error = await refused(collect(shim.prepare(quiesce_mode=int(QuiesceMode.ABORT))))
    assert error.reason is Reason.UNSUPPORTED
    assert "hold, drain" in error.problem.message
    assert shim.adapter.open_now


async def test_an_auxiliary_model_is_never_paused(short_path: Path) -> None:
    async with serve(FakeAdapter(role=Role.AUXILIARY_MODEL), short_path) as shim:
        assert (await refused(collect(shim.prepare()))).reason is Reason.UNSUPPORTED
        assert shim.adapter.open_now


# ---- the end of an operation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stuck_in", ["close", "quiesce", "still"])
async def test_abort_overtakes_a_prepare_that_hangs(shim: Shim, stuck_in: str) -> None:  # I15
    shim.adapter.gate[stuck_in] = asyncio.Event()
    following = asyncio.create_task(collect(shim.prepare()))
    await until(lambda: stuck_in in shim.adapter.calls)
    watch = Stopwatch()
    await shim.abort(timeout=30)
    assert watch.seconds < 1
    error = await refused(following)
    assert error.reason is Reason.OPERATION_FINISHED
    assert shim.adapter.open_now
    assert (await shim.state()).state == ParticipantState.OPEN
    del shim.adapter.gate[stuck_in]
    await shim.prepared("op-2")


async def test_resume_and_abort_of_an_unknown_operation_are_accepted_and_fence_it(shim: Shim) -> None:  # I8
    assert (await shim.abort("op-7")).released_parked == 0
    assert (await refused(collect(shim.prepare("op-7")))).reason is Reason.OPERATION_FINISHED
    await shim.resume("op-8")
    assert (await refused(collect(shim.prepare("op-8")))).reason is Reason.OPERATION_FINISHED
    assert shim.adapter.open_now


async def test_resume_answers_the_same_each_time_and_releases_once(shim: Shim) -> None:
    await shim.prepared()
    first = await shim.resume()
    assert (first.released_parked, first.released_held) == (3, 1)
    assert first.closed_for.ToMilliseconds() == 1500
    assert await shim.resume() == first
    assert shim.adapter.calls.count("open") == 1


async def test_an_abort_that_no_gate_confirms_says_so_within_a_second_and_goes_on(shim: Shim) -> None:  # A24
    await shim.prepared()
    shim.adapter.gate["open"] = asyncio.Event()
    watch = Stopwatch()
    error = await refused(shim.abort(timeout=30))
    assert watch.seconds < 1
    assert error.reason is Reason.UNAVAILABLE
    assert (await shim.state()).state == ParticipantState.OPEN  # the operation is over all the same
    shim.adapter.gate["open"].set()
    await until(lambda: shim.adapter.open_now)
    assert (await shim.abort()).released_parked == 3


async def test_what_a_resume_says_was_lost_is_short_and_the_same_each_time(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opens() -> Opened:
        return Opened(warnings=("x" * 5000, *(f"worker-{n}" for n in range(30))))

    monkeypatch.setattr(shim.adapter, "open", opens)
    first = await shim.resume()
    assert [len(first.warnings), len(first.warnings[0]), first.warnings[1]] == [20, 1000, "worker-0"]
    assert await shim.resume() == first


async def test_a_late_resume_of_an_older_operation_does_not_open_the_present_one(shim: Shim) -> None:  # A1
    await shim.prepared("op-4")
    await shim.resume("op-4")
    await shim.prepared("op-5")
    opened = shim.adapter.calls.count("open")
    await shim.resume("op-4")  # answered from the record
    assert (await refused(shim.abort("op-4"))).reason is Reason.FENCED
    assert shim.adapter.calls.count("open") == opened
    assert (await shim.state()).operation_id == "op-5"
    assert not shim.adapter.open_now


async def test_abort_leaves_nothing_behind_for_the_next_operation(shim: Shim) -> None:  # A15
    shim.adapter.in_flight = [rollout("r-1")]
    follower = asyncio.create_task(collect(shim.prepare("c1", straggler_policy=2)))
    await until(lambda: not shim.adapter.open_now)
    await shim.abort("c1")
    await refused(follower)
    shim.adapter.finish("r-1")
    assert (await shim.prepared("c2")).excluded_count == 0


async def test_another_operation_of_the_same_coordinator_is_told_who_owns_the_pause(shim: Shim) -> None:
    await shim.prepared()
    error = await refused(collect(shim.prepare("op-2")))
    assert (error.reason, error.problem.operation_id) == (Reason.FENCED, "op-1")


async def test_a_newer_coordinator_takes_over_after_admission_was_opened(shim: Shim) -> None:
    await shim.prepared("op-1", epoch=1)
    await shim.prepared("op-2", epoch=2)
    assert shim.adapter.calls.index("open") < len(shim.adapter.calls) - shim.adapter.calls[::-1].index("close")
    assert shim.adapter.generation == 3  # closed, opened, closed: nothing of op-1 can be confirmed
    assert (await refused(collect(shim.commit("op-1", epoch=1)))).reason is Reason.STALE_EPOCH
    assert (await shim.state()).operation_id == "op-2"


# ---- the lease -------------------------------------------------------------------------------------------------------


async def test_commit_is_refused_after_the_lease_lapsed(shim: Shim) -> None:  # A12
    shim.reserve()
    await shim.prepared()
    shim.clock.advance(60.5)
    await until(lambda: shim.adapter.open_now)
    assert (await refused(collect(shim.commit()))).reason is Reason.LEASE_LAPSED
    status = await shim.state()
    assert status.state == ParticipantState.OPEN
    assert "lease" in status.last_failure
    assert "export" not in shim.adapter.calls


async def test_a_stopped_process_finds_its_lease_lapsed_before_it_acts(shim: Shim) -> None:  # B22
    prepared = await shim.prepared()
    shim.reserve()
    shim.clock.advance(61, fire=False)  # no timer has fired
    assert (await refused(collect(shim.commit()))).reason is Reason.LEASE_LAPSED
    assert "export" not in shim.adapter.calls
    await until(lambda: shim.adapter.open_now)
    assert (await refused(shim.confirm(prepared))).reason is Reason.LEASE_LAPSED


async def test_a_timer_that_fires_after_resume_is_a_no_op(shim: Shim) -> None:  # B26
    await shim.prepared("op-1")
    await shim.resume("op-1")
    await shim.prepared("op-2")
    shim.clock.time += 0  # the timer of op-1 fires although it was taken back
    for alarm in shim.clock.alarms:
        alarm.due = 0
    shim.clock.fire(also_taken_back=True)
    assert (await shim.state()).state == ParticipantState.PREPARED


async def test_every_call_of_the_owner_renews_and_a_repeated_prepare_does_not(shim: Shim) -> None:
    shim.reserve()
    prepared = await shim.prepared()
    shim.clock.advance(50)
    await collect(shim.prepare())
    assert (await shim.state()).lease_remaining.seconds == 10
    await shim.confirm(prepared)
    assert (await shim.state()).lease_remaining.seconds == 60
    shim.clock.advance(50)
    await collect(shim.commit())
    assert (await shim.state()).lease_remaining.seconds == 60
    request = pb.RenewLeaseRequest(context=shim.context())
    request.lease_ttl.FromSeconds(100)
    reply = await answer(shim.stub.RenewLease(request, timeout=5))
    assert reply.lease_remaining.seconds == 100
    await until(lambda: shim.adapter.lease_s == 100)


async def test_gates_that_opened_by_their_own_lease_void_the_operation(shim: Shim) -> None:
    await shim.prepared()
    shim.adapter.open_now = True
    shim.adapter.generation += 1
    shim.adapter.changed()
    await until(lambda: shim.service.operations.fence.operation_id == "")
    assert (await refused(collect(shim.commit()))).reason is Reason.LEASE_LAPSED


# ---- commit ----------------------------------------------------------------------------------------------------------


async def test_commit_writes_files_then_a_manifest_and_repeats_answer_the_same(shim: Shim) -> None:
    shim.adapter.files = {"b/x.bin": b"x" * 10, "a.jsonl": b"{}\n"}
    shim.reserve()
    await shim.prepared()
    events = await collect(shim.commit())
    committed = events[-1].committed
    assert [f.path for f in committed.manifest.files] == ["a.jsonl", "b/x.bin"]
    assert committed.manifest.operation_id == "op-1"
    assert committed.manifest.totals.parked == 2
    directory = shim.root / "snapshots" / "snap-1" / "counter"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(p.name for p in directory.iterdir()) == ["a.jsonl", "b", "manifest.json"]
    assert (await collect(shim.commit()))[-1].committed == committed  # I9: the export runs once
    assert shim.adapter.calls.count("export") == 1
    assert (await refused(collect(shim.commit(snapshot_id="snap-2")))).reason is Reason.REQUEST_CONFLICT


async def test_commit_before_prepare_is_refused_and_not_remembered(shim: Shim) -> None:
    assert (await refused(collect(shim.commit()))).reason is Reason.WRONG_PHASE
    await shim.prepared()


async def test_activity_after_prepared_voids_the_cut(shim: Shim) -> None:  # A5
    shim.reserve()
    prepared = await shim.prepared()
    shim.adapter.activity = "r-3 sent POST /v1/responses"
    error = await refused(collect(shim.commit()))
    assert error.reason is Reason.ACTIVITY_AFTER_PREPARED
    assert "r-3" in error.problem.message
    assert error.participant_id == "counter"
    assert (await refused(shim.confirm(prepared))).reason is Reason.ACTIVITY_AFTER_PREPARED


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, Reason.STORAGE_FULL), (errno.EDQUOT, Reason.STORAGE_FULL),
                           (errno.EIO, Reason.STORAGE_FAILED)],
)  # fmt: skip
async def test_a_failed_export_leaves_no_files_and_may_be_repeated(shim: Shim, number: int, reason: Reason) -> None:
    snapshot = shim.reserve()
    await shim.prepared()
    shim.adapter.fail["exported"] = OSError(number, "no")
    assert (await refused(collect(shim.commit()))).reason is reason
    assert list(snapshot.iterdir()) == []
    assert (await shim.state()).state == ParticipantState.PREPARED
    del shim.adapter.fail["exported"]
    assert (await collect(shim.commit()))[-1].committed.manifest.sessions == 1


@pytest.mark.parametrize("failure", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
async def test_a_shim_without_memory_says_so_and_not_that_the_disk_is_full(shim: Shim, failure: Exception) -> None:
    snapshot = shim.reserve()
    await shim.prepared()
    shim.adapter.fail["exported"] = failure
    problem = (await refused(collect(shim.commit()))).problem
    assert problem.message.startswith(f"Process {os.getpid()} gets no more memory")
    assert problem.participant_id == "counter"
    assert "more memory" in problem.advice
    assert "Free space" not in problem.advice
    assert list(snapshot.iterdir()) == []


async def test_a_file_that_is_not_what_the_adapter_said_is_refused(shim: Shim) -> None:
    snapshot = shim.reserve()
    await shim.prepared()
    shim.adapter.gate["exported"] = asyncio.Event()
    following = asyncio.create_task(collect(shim.commit()))
    await until(lambda: "exported" in shim.adapter.calls)
    (snapshot / "counter" / "sessions.jsonl").write_bytes(b"cut")
    shim.adapter.gate["exported"].set()
    assert (await refused(following)).reason is Reason.PROTOCOL_VIOLATION
    assert list(snapshot.iterdir()) == []


async def test_commit_never_writes_into_what_is_not_ours(shim: Shim) -> None:
    await shim.prepared()
    assert (await refused(collect(shim.commit()))).reason is Reason.SNAPSHOT_NOT_FOUND  # nobody made the directory
    snapshot = shim.reserve()
    (snapshot / "counter").mkdir()
    (snapshot / "counter" / "theirs").write_text("x")
    assert (await refused(collect(shim.commit()))).reason is Reason.SNAPSHOT_EXISTS
    assert (snapshot / "counter" / "theirs").exists()


async def test_abort_overtakes_an_export_and_discards_it(shim: Shim) -> None:
    snapshot = shim.reserve()
    await shim.prepared()
    shim.adapter.gate["exported"] = asyncio.Event()
    following = asyncio.create_task(collect(shim.commit()))
    await until(lambda: "exported" in shim.adapter.calls)
    watch = Stopwatch()
    await shim.abort(timeout=30)
    assert watch.seconds < 1
    assert (await refused(following)).reason is Reason.OPERATION_FINISHED
    await until(lambda: list(snapshot.iterdir()) == [])


async def test_abort_after_the_publication_keeps_the_files(shim: Shim) -> None:  # I1
    snapshot = shim.reserve()
    await shim.prepared()
    await collect(shim.commit())
    shim.publish()
    await shim.abort()
    await shim.service.operations.on_disk(lambda: None)
    assert (snapshot / "counter" / "manifest.json").exists()


@pytest.mark.parametrize("mode", [CheckpointMode.STATELESS, CheckpointMode.RESTART_ONLY])
async def test_a_participant_with_nothing_to_write_commits_and_restores(short_path: Path, mode: CheckpointMode) -> None:
    async with serve(FakeAdapter(mode=mode, files={}), short_path) as shim:
        committed = await saved(shim)
        assert list(committed.manifest.files) == []
        events = await collect(shim.restore(committed.manifest_sha256))
        assert events[-1].restored.sessions == 0
        await shim.resume("op-2")
        assert (await collect(shim.restore("", "op-3")))[-1].HasField("restored")  # it never committed
        assert not shim.adapter.open_now


# ---- confirm ---------------------------------------------------------------------------------------------------------


async def test_confirm_proves_the_freeze_and_refuses_another_incarnation(shim: Shim) -> None:
    prepared = await shim.prepared()
    reply = await shim.confirm(prepared)
    assert reply.admission_generation == prepared.admission_generation
    assert reply.lease_remaining.seconds in (59, 60)
    prepared.incarnation_id = "i-0"
    assert (await refused(shim.confirm(prepared))).reason is Reason.INCARNATION_CHANGED
    prepared.incarnation_id, prepared.admission_generation = "i-1", prepared.admission_generation + 2
    assert (await refused(shim.confirm(prepared))).reason is Reason.ACTIVITY_AFTER_PREPARED


async def test_confirm_is_refused_when_the_lease_lapses_while_the_server_is_looked_at(shim: Shim) -> None:
    prepared = await shim.prepared()
    shim.adapter.calls.clear()
    shim.adapter.gate["still"] = asyncio.Event()
    asking = asyncio.create_task(shim.confirm(prepared))
    await until(lambda: "still" in shim.adapter.calls)
    shim.clock.advance(61, fire=False)
    shim.adapter.gate["still"].set()
    assert (await refused(asking)).reason is Reason.LEASE_LAPSED


# ---- restore ---------------------------------------------------------------------------------------------------------


async def test_restore_loads_and_stays_paused_until_resume(shim: Shim) -> None:
    committed = await saved(shim)
    events = await collect(shim.restore(committed.manifest_sha256))
    assert events[0].HasField("admission_closed")
    restored = events[-1].restored
    assert (restored.sessions, restored.totals.parked, restored.snapshot_id) == (1, 2, "snap-1")
    assert shim.adapter.loaded == shim.adapter.files
    assert not shim.adapter.open_now
    assert (await collect(shim.restore(committed.manifest_sha256)))[-1].restored == restored
    assert shim.adapter.calls.count("load") == 1
    await shim.resume("op-2")
    assert shim.adapter.open_now


async def test_a_damaged_snapshot_is_refused_before_anything_is_closed(shim: Shim) -> None:
    committed = await saved(shim)
    (shim.root / "snapshots/snap-1/counter/sessions.jsonl").write_bytes(b'{"a": 2}\n')
    closes = shim.adapter.calls.count("close")
    error = await refused(collect(shim.restore(committed.manifest_sha256)))
    assert error.reason is Reason.SNAPSHOT_CORRUPT
    assert "sessions.jsonl" in error.problem.message
    assert shim.adapter.calls.count("close") == closes
    assert (await shim.state()).state == ParticipantState.OPEN
    assert "load" not in shim.adapter.calls


async def test_the_wrong_manifest_or_snapshot_is_refused(shim: Shim) -> None:  # D2
    committed = await saved(shim)
    assert (await refused(collect(shim.restore("0" * 64)))).reason is Reason.SNAPSHOT_CORRUPT
    # operation and snapshot are two names: the saving operation's id is no snapshot, and it is never used again
    swapped = shim.restore(committed.manifest_sha256, operation_id="op-9", snapshot_id="op-1")
    assert (await refused(collect(swapped))).reason is Reason.SNAPSHOT_NOT_FOUND
    again = shim.restore(committed.manifest_sha256, operation_id="op-1")
    assert (await refused(collect(again))).reason is Reason.OPERATION_FINISHED


async def test_a_link_in_a_snapshot_is_refused(shim: Shim, short_path: Path) -> None:
    committed = await saved(shim)
    target = shim.root / "snapshots/snap-1/counter/sessions.jsonl"
    (short_path / "outside").write_bytes(target.read_bytes())
    target.unlink()
    target.symlink_to(short_path / "outside")
    assert (await refused(collect(shim.restore(committed.manifest_sha256)))).reason is Reason.SNAPSHOT_UNSAFE


async def test_state_of_another_kind_or_schema_is_refused(shim: Shim) -> None:
    committed = await saved(shim)
    shim.adapter.state_schema = "fake-v2"
    shim.service.operations._description = None
    assert (await refused(collect(shim.restore(committed.manifest_sha256)))).reason is Reason.SNAPSHOT_FOREIGN


async def test_a_failed_load_stays_paused_and_may_be_repeated_or_aborted(shim: Shim) -> None:  # D3
    committed = await saved(shim)
    shim.adapter.fail["load"] = refuse(Reason.NOT_FRESH, "It has served work.")
    error = await refused(collect(shim.restore(committed.manifest_sha256)))
    assert error.reason is Reason.NOT_FRESH
    status = await shim.state()
    assert (status.state, status.operation_id) == (ParticipantState.RESTORE_FAILED, "op-2")
    assert "served work" in status.last_failure
    assert not shim.adapter.open_now
    del shim.adapter.fail["load"]
    assert (await collect(shim.restore(committed.manifest_sha256)))[-1].HasField("restored")
    await shim.abort("op-2")
    assert shim.adapter.open_now


async def test_an_aborted_restore_leaves_nothing_of_the_snapshot_behind(shim: Shim) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    assert shim.adapter.loaded
    shim.adapter.calls.clear()
    await shim.abort("op-2")
    assert not shim.adapter.loaded
    assert shim.adapter.calls.index("unload") < shim.adapter.calls.index("open")


async def lapsed(shim: Shim) -> Problem:
    """What somebody is told who asks for more time for a restore whose lease is over."""
    request = pb.RenewLeaseRequest(context=shim.context("op-2"), lease_ttl=Duration(seconds=60))
    error = await refused(answer(shim.stub.RenewLease(request, timeout=5)))
    assert error.reason is Reason.LEASE_LAPSED
    return error.problem


async def test_a_restore_that_lost_its_lease_keeps_what_it_loaded_until_it_is_aborted(shim: Shim) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    shim.clock.advance(1000)
    await asyncio.sleep(0)
    assert (await shim.state()).state == ParticipantState.OPEN
    assert shim.adapter.loaded
    assert (await lapsed(shim)).metadata[STILL_LOADED] == "op-2"  # so that a Resume may still come
    await shim.abort("op-2")
    assert not shim.adapter.loaded
    assert STILL_LOADED not in (await lapsed(shim)).metadata


async def test_a_resumed_restore_keeps_what_it_loaded_whatever_comes_later(shim: Shim) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    await shim.resume("op-2")
    await shim.abort("op-2")
    await shim.abort("op-3")
    assert shim.adapter.loaded
    assert "unload" not in shim.adapter.calls


async def test_an_abort_to_a_shim_that_replaced_the_one_that_loaded_forgets_what_was_loaded(
    shim: Shim, tmp_path: Path
) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    async with serve(shim.adapter, tmp_path, "i-2") as replaced:  # the first was killed: nobody opened or unloaded
        assert shim.adapter.loaded
        await replaced.abort("op-3")  # of somebody else
        assert shim.adapter.loaded
        await replaced.abort("op-2")
        assert not shim.adapter.loaded


async def test_nothing_is_saved_on_top_of_what_a_restore_loaded_until_it_is_said_whether_it_was_resumed(
    shim: Shim, tmp_path: Path
) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    async with serve(shim.adapter, tmp_path, "i-2") as replaced:  # the first was killed
        described = await answer(replaced.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=5))
        assert (described.state, described.operation_id) == (ParticipantState.OPEN, "op-2")
        assert "op-2" in (await replaced.state()).warnings[0]
        error = await refused(collect(replaced.prepare("op-3")))
        assert error.reason is Reason.UNAVAILABLE
        assert "op-2" in error.problem.message
        await replaced.abort("op-2")  # it was not fenced by the one that was refused
        assert not shim.adapter.loaded
        assert not (await replaced.state()).warnings
        await replaced.prepared("op-4")


async def test_a_new_shim_that_hears_that_the_restore_was_resumed_keeps_it_and_saves(
    shim: Shim, tmp_path: Path
) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    async with serve(shim.adapter, tmp_path, "i-2") as replaced:
        await replaced.resume("op-2")
        await replaced.prepared("op-3")
        assert shim.adapter.loaded


@pytest.mark.parametrize("found", [True, False], ids=["found by the timer", "found by the call"])
async def test_nothing_is_saved_on_top_of_a_restore_that_lost_its_lease(shim: Shim, found: bool) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    shim.clock.advance(1000, fire=found)
    assert (await refused(collect(shim.prepare("op-3")))).reason is Reason.UNAVAILABLE
    await shim.abort("op-2")
    assert not shim.adapter.loaded
    await shim.prepared("op-3")


async def test_an_abort_to_a_shim_that_replaced_one_that_resumed_keeps_what_was_loaded(
    shim: Shim, tmp_path: Path
) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    await shim.resume("op-2")
    await until(lambda: "keep" in shim.adapter.calls)
    async with serve(shim.adapter, tmp_path, "i-2") as replaced:
        await replaced.abort("op-2")
        assert shim.adapter.loaded


async def test_a_server_opens_although_it_cannot_forget_what_was_loaded_and_says_so(shim: Shim) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    shim.adapter.fail["unload"] = refuse(Reason.UNAVAILABLE, "worker-0 does not answer.")
    await shim.abort("op-2")
    assert shim.adapter.open_now
    warnings = (await shim.state()).warnings
    assert len(warnings) == 1
    assert "op-2" in warnings[0]
    assert "worker-0 does not answer" in warnings[0]


async def test_what_could_not_be_forgotten_is_tried_again_until_it_is(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("participant_shims.forgetting.AGAIN_S", 0.01)
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    shim.adapter.fail["unload"] = OSError("disk")
    await shim.abort("op-2")
    await until(lambda: shim.adapter.calls.count("unload") > 2)
    assert shim.adapter.loaded
    del shim.adapter.fail["unload"]
    await until(lambda: not shim.adapter.loaded)
    assert not (await shim.state()).warnings
    tries = shim.adapter.calls.count("unload")
    await asyncio.sleep(0.05)
    assert shim.adapter.calls.count("unload") == tries


@pytest.mark.parametrize("method", ["prepare", "restore"])
async def test_nothing_begins_on_top_of_what_an_aborted_restore_left(shim: Shim, method: str) -> None:
    committed = await saved(shim)
    await collect(shim.restore(committed.manifest_sha256))
    shim.adapter.fail["unload"] = OSError("disk")
    await shim.abort("op-2")

    def begin(operation_id: str) -> object:
        if method == "prepare":
            return shim.prepare(operation_id)
        return shim.restore(committed.manifest_sha256, operation_id=operation_id)

    error = await refused(collect(begin("op-3")))
    assert error.reason is Reason.UNAVAILABLE
    assert "op-2" in error.problem.message
    assert shim.adapter.open_now
    shim.adapter.calls.clear()
    del shim.adapter.fail["unload"]
    await collect(begin("op-4"))
    assert shim.adapter.calls.index("unload") < shim.adapter.calls.index("close")


async def test_a_part_is_restored_under_another_name(shim: Shim) -> None:
    committed = await saved(shim)
    here = shim.root / "snapshots/snap-1"
    (here / "counter").rename(here / "old-name")
    error = await refused(collect(shim.restore(committed.manifest_sha256, source_participant_id="old-name")))
    assert error.reason is Reason.SNAPSHOT_FOREIGN  # its manifest says whose it is


# ---- status and rollouts ---------------------------------------------------------------------------------------------


async def test_status_answers_within_a_second_when_the_server_does_not(shim: Shim) -> None:  # rule 8
    await shim.prepared()
    shim.adapter.gate["status"] = asyncio.Event()
    watch = Stopwatch()
    status = await shim.state()
    assert watch.seconds < 1
    assert status.state == ParticipantState.PREPARED
    assert "does not answer" in status.waiting_for


async def test_watch_sends_changes_at_once_and_the_newest_to_a_slow_reader(shim: Shim) -> None:
    call = shim.stub.WatchStatus(pb.WatchStatusRequest(max_rollouts=10), timeout=10)
    assert (await call.read()).status.state == ParticipantState.OPEN
    await shim.prepared()
    watch = Stopwatch()
    while (await call.read()).status.state != ParticipantState.PREPARED:
        pass
    assert watch.seconds < 0.5
    call.cancel()


async def test_watchers_do_not_starve_other_calls(shim: Shim) -> None:  # H16
    watchers = [shim.stub.WatchStatus(pb.WatchStatusRequest(), timeout=10) for _ in range(20)]
    for watcher in watchers:
        await watcher.read()
    watch = Stopwatch()
    await shim.abort(timeout=30)
    assert watch.seconds < 1
    for watcher in watchers:
        watcher.cancel()


async def test_watchers_are_bounded_and_give_their_place_back(shim: Shim) -> None:
    watchers = [shim.stub.WatchStatus(pb.WatchStatusRequest(), timeout=10) for _ in range(64)]
    for watcher in watchers:
        await watcher.read()
    error = await refused(collect(shim.stub.WatchStatus(pb.WatchStatusRequest(), timeout=5)))
    assert error.reason is Reason.LIMIT_EXCEEDED
    for watcher in watchers:
        watcher.cancel()
    await until(lambda: shim.service._watchers == 0)


async def test_cancelled_streams_leave_nothing_waiting(shim: Shim) -> None:  # H15
    shim.adapter.in_flight = [rollout("r-1")]
    with room_for_answers():
        await refused(collect(shim.prepare(timeout=5, straggler_policy=2)))
    before = len(asyncio.all_tasks())
    calls = [shim.prepare(straggler_policy=2) for _ in range(10)]
    for call in calls:
        await call.read()
        call.cancel()
    await until(lambda: len(asyncio.all_tasks()) <= before)
    assert shim.adapter.calls.count("close") == 1


async def test_retire_is_refused_while_an_operation_is_active(shim: Shim) -> None:
    request = pb.RetireAttemptsRequest(coordinator_epoch=1, attempts=[pb.AttemptRef(rollout_id="r-1", attempt=2)])
    assert (await answer(shim.stub.RetireAttempts(request, timeout=5))).retired == 1
    assert shim.adapter.retired == [("r-1", 2)]
    await shim.prepared()
    assert (await refused(answer(shim.stub.RetireAttempts(request, timeout=5)))).reason is Reason.FENCED
    request.attempts.extend([pb.AttemptRef(rollout_id="r-1")] * 1024)
    assert (await refused(answer(shim.stub.RetireAttempts(request, timeout=5)))).reason is Reason.INVALID_ARGUMENT


async def test_capabilities_are_told_with_the_state(shim: Shim) -> None:
    await shim.prepared()
    reply = await answer(shim.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=5))
    assert reply.capabilities.participant_id == "counter"
    assert (reply.state, reply.operation_id, reply.coordinator_epoch) == (ParticipantState.PREPARED, "op-1", 1)


async def test_a_server_that_is_not_up_is_unavailable(shim: Shim) -> None:
    shim.adapter.fail["describe"] = refuse(Reason.UNAVAILABLE, "The server is not up.")
    error = await refused(answer(shim.stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=5)))
    assert error.reason is Reason.UNAVAILABLE


async def test_stopping_the_shim_opens_admission(short_path: Path) -> None:
    adapter = FakeAdapter()
    async with serve(adapter, short_path) as shim:
        await shim.prepared()
    assert adapter.open_now


async def test_an_export_that_ends_at_once_is_one_message_and_a_longer_one_is_told_each_second(shim: Shim) -> None:
    shim.adapter.files = {}  # it says nothing by itself
    shim.reserve()
    await shim.prepared()
    assert [event.WhichOneof("event") for event in await collect(shim.commit())] == ["committed"]
    await shim.resume()
    shim.reserve("snap-2")
    await shim.prepared("op-2")
    shim.adapter.gate["export"] = asyncio.Event()
    call = shim.commit("op-2", "snap-2")
    async with asyncio.timeout(10):
        first = await anext(aiter(call))
    assert first.HasField("export_progress")
    shim.adapter.gate["export"].set()
    assert (await collect(call))[-1].HasField("committed")
