"""A coordinator that dies at any point, and the next one in the same root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.recovery import require_log
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import JOB, Reason, SafepointError
from coordinator.wire.refusals import introduced
from coordinator.wire.rpc import error_from_rpc
from tests.coordinator.conftest import Bench, collect, kinds, unary, until
from tests.fakes import NEVER, Knobs
from tests.in_time import Stopwatch


def running(call: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(call)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
    return task


@pytest.mark.parametrize("method", ["Prepare", "Commit", "Confirm"])
async def test_a_crash_before_publishing_aborts_and_the_next_save_works(bench: Bench, method: str) -> None:  # A19, I4
    await bench.start(agent_0=Knobs(hang_on={method}))
    saving = running(bench.save(timeout=30))
    await until(lambda: bench.shims["agent-0"].count(method) == 1)
    await bench.crash()
    saving.cancel()
    bench.shims["agent-0"].knobs.hang_on.clear()
    await bench.restart()
    await until(bench.all_open)
    assert bench.running.epoch == 2
    await until(lambda: all("save-1" in shim.aborted for shim in bench.shims.values()))
    await until(lambda: bench.running.operations.active is None)
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    assert caught.value.reason is Reason.COORDINATOR_RESTARTED
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())


async def test_a_crash_after_publishing_resumes(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=2))
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    await bench.phase("Commit", operation_id="save-1")
    await bench.phase("Publish", operation_id="save-1")
    await bench.crash()
    await bench.restart()
    await until(bench.all_open)
    assert all(shim.opened_by == ["Resume"] for shim in bench.shims.values())
    await until(lambda: bench.running.operations.active is None)
    published = [e for e in await bench.phase("Publish", operation_id="save-1") if e.WhichOneof("event") == "saved"]
    assert published[0].saved.snapshot.totals.parked == 2
    assert (await bench.status()).latest_snapshot_id == "step-1"


@pytest.mark.parametrize("there", [True, False])
async def test_a_crash_in_the_middle_of_publishing_believes_the_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """The record PUBLISHING is written, the one after it is not: only the manifest decides."""
    await bench.start()
    hold = asyncio.Event()
    loop = asyncio.get_running_loop()
    operations = bench.running.operations
    publish = operations.publish

    def stuck(drive: Any, effect: Any) -> Any:
        manifest = publish(drive, effect) if there else None
        asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(5)
        return manifest

    monkeypatch.setattr(operations, "publish", stuck)
    saving = running(bench.save(timeout=30))
    folder = bench.root / "snapshots" / "step-1"
    await until(
        lambda: (
            (folder / "manifest.json").exists()
            if there
            else operations.active is not None and operations.active.transaction.stage == "publishing"
        )
    )
    await bench.crash()
    hold.set()
    saving.cancel()
    await bench.restart()
    await until(bench.all_open)
    expected = "Resume" if there else "Abort"
    assert all(shim.opened_by == [expected] for shim in bench.shims.values())
    await until(lambda: bench.running.operations.active is None)
    await until(lambda: folder.exists() == there)


@pytest.mark.parametrize(
    "there", [[], ["epoch-3"], ["epoch-6", "journal-9.log", "epoch-x"]], ids=["nothing", "older", "garbage"]
)
def test_a_coordinator_that_has_run_before_refuses_to_act_where_its_log_is_not(tmp_path: Any, there: list[str]) -> None:
    """FAILURES 40: another machine, and files of its own below the same path, or none."""
    for name in there:
        (tmp_path / "coordinator").mkdir(exist_ok=True)
        (tmp_path / "coordinator" / name).touch()
    with pytest.raises(SafepointError) as caught:
        require_log(str(tmp_path), 7)
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert "epoch 7" in caught.value.problem.message
    assert [entry.name for entry in tmp_path.iterdir()] == (["coordinator"] if there else [])
    require_log(str(tmp_path), 0)  # nobody has run before
    (tmp_path / "coordinator").mkdir(exist_ok=True)
    (tmp_path / "coordinator" / "epoch-7").touch()
    require_log(str(tmp_path), 7)


async def test_one_hung_participant_does_not_block_the_start(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(hang_on={"Prepare"}))
    saving = running(bench.save(timeout=30))
    await until(lambda: bench.shims["agent-0"].count("Prepare") == 1)
    await bench.crash()
    saving.cancel()
    bench.shims["agent-0"].knobs.hang_on |= {"Abort", "GetCapabilities"}
    watch = Stopwatch()
    await bench.restart()
    assert watch.seconds < 2
    await until(lambda: bench.shims["resources-0"].open and bench.shims["model-0"].open)
    status = await bench.status()
    assert status.coordinator_epoch == 2


async def test_the_outcome_of_a_save_survives_a_restart(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=2))
    first = (await bench.save())[-1].saved
    await until(lambda: "save-1" in bench.running.operations.journal.contents.outcomes)
    await bench.crash()
    await bench.restart()
    calls = sum(len(shim.calls) for shim in bench.shims.values())
    again = (await bench.save())[-1].saved
    assert again.snapshot == first.snapshot
    assert again.pause == first.pause
    with pytest.raises(SafepointError) as caught:
        await bench.save("save-1", "step-other")
    assert caught.value.reason is Reason.REQUEST_CONFLICT
    assert sum(shim.count("Prepare") for shim in bench.shims.values()) == 3
    assert calls


async def test_an_operation_of_an_older_coordinator_is_refused_everywhere(bench: Bench) -> None:  # A1
    """The old one wakes up after the new one has paused everybody: its late resume opens nobody."""
    await bench.start()
    old = bench.running
    for shim in bench.shims.values():
        await shim.leave()
    await until(lambda: not old.operations.discovery.registry.participants())
    await bench.restart()
    try:
        await bench.phase("Prepare", operation_id="save-new", snapshot_id="step-new")
        from coordinator.protocol import events as core
        from coordinator.wire.ids import OperationId, ParticipantId
        from coordinator.wire.terms import Phase

        who = bench.running.operations.discovery.registry.get("model-0")
        assert who is not None
        call = core.Call(1, ParticipantId("model-0"), Phase.RESUME, 2, OperationId("save-new"), core.ResumeArguments())
        with pytest.raises(SafepointError) as caught:
            await old.operations.participants.perform(who, call, lambda _: None, lambda: None)
        assert caught.value.reason is Reason.STALE_EPOCH
        assert not any(shim.open for shim in bench.shims.values())
        await bench.abort()
    finally:
        await old.kill()


async def test_an_older_coordinator_cannot_publish(bench: Bench) -> None:
    await bench.start()
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    await bench.phase("Commit", operation_id="save-1")
    with Directory.open(bench.root / "coordinator") as directory:
        directory.write_new("epoch-9", b"")  # another one has started, and the participants have not heard of it
    with pytest.raises(SafepointError) as caught:
        await bench.phase("Publish", operation_id="save-1")
    assert caught.value.reason is Reason.STALE_EPOCH
    assert not (bench.root / "snapshots" / "step-1" / "manifest.json").exists()


async def test_a_dead_coordinator_freezes_nobody_longer_than_the_lease(bench: Bench) -> None:  # A12
    await bench.start()
    options = pb.SaveOptions()
    options.lease_ttl.FromMilliseconds(1000)
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1", options=options)
    await bench.crash()
    watch = Stopwatch()
    await until(bench.all_open)
    assert watch.seconds < 1.5
    assert all(shim.opened_by == ["lease"] for shim in bench.shims.values())


async def test_a_restore_that_was_loaded_stays_paused_over_a_restart(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=2))
    await bench.save()
    await bench.restore()
    await bench.crash()
    await bench.restart()
    status = await bench.status()
    assert status.operation.operation_id == "restore-1"
    assert status.operation.outcome == pb.OPERATION_OUTCOME_PAUSED
    assert not any(shim.open for shim in bench.shims.values())
    assert (await bench.restore())[-1].restored.totals.parked == 2
    await bench.phase("Resume", operation_id="restore-1")
    assert bench.all_open()


async def _restored_and_left_alone(bench: Bench) -> None:
    """The coordinator has died before Resume, and the leases of all are over."""
    bench.settings["lease_ttl_s"] = 1
    await bench.start(agent_0=Knobs(rollouts=2))
    await bench.save()
    await bench.restore()
    await bench.crash()
    await until(bench.all_open)


async def test_a_restore_whose_coordinator_was_gone_for_longer_than_the_lease_can_still_be_resumed(
    bench: Bench,
) -> None:
    """Everybody works with what was restored by then. To abort would run again what the snapshot holds."""
    await _restored_and_left_alone(bench)
    await bench.restart()
    await bench.phase("Resume", operation_id="restore-1")
    assert all(("Resume", "restore-1") in shim.heard for shim in bench.shims.values())
    assert not any(shim.in_question for shim in bench.shims.values())
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


async def test_a_restore_that_somebody_has_given_up_meanwhile_cannot_be_resumed(bench: Bench) -> None:
    await _restored_and_left_alone(bench)
    bench.shims["agent-0"].in_question = ""  # the coordinator before had begun to abort
    await bench.restart()
    with pytest.raises(SafepointError) as caught:
        await bench.phase("Resume", operation_id="restore-1")
    assert caught.value.reason in (Reason.LEASE_LAPSED, Reason.WRONG_PHASE)
    await bench.abort()
    assert all(("Abort", "restore-1") in s.heard for n, s in bench.shims.items() if n != "agent-0")


async def test_a_stop_in_good_order_aborts_what_is_not_published(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    saving = running(bench.save(timeout=30))
    await until(lambda: not bench.shims["agent-0"].open)
    await bench.running.stop()
    assert bench.all_open()
    saving.cancel()


async def test_another_job_is_refused_and_changes_nothing(bench: Bench) -> None:
    await bench.start_coordinator()
    await bench.running.kill()
    bench.settings["job_id"] = "another"
    with pytest.raises(SafepointError) as caught:
        await bench.start_coordinator()
    assert caught.value.reason is Reason.SNAPSHOT_FOREIGN
    assert not (bench.root / "coordinator" / "epoch-2").exists()


async def test_a_taken_port_is_refused(bench: Bench, tmp_path: Any) -> None:
    first = await bench.start_coordinator()
    other = Bench(tmp_path / "other")
    other.settings["bind"] = first.address
    with pytest.raises(SafepointError) as caught:
        await other.start_coordinator()
    assert caught.value.reason is Reason.UNAVAILABLE


async def test_an_open_bind_needs_certificates(bench: Bench) -> None:
    bench.settings["bind"] = "0.0.0.0:0"
    with pytest.raises(SafepointError) as caught:
        await bench.start_coordinator()
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert "certificates" in caught.value.problem.message
    assert "SAFEPOINT_TLS_DIR" in caught.value.problem.advice


async def test_with_a_token_a_stranger_learns_nothing(bench: Bench, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    bench.settings["token_file"] = str(token)
    await bench.start_coordinator()
    with pytest.raises(SafepointError) as caught:
        await bench.status()
    assert caught.value.reason is Reason.UNAUTHENTICATED
    status = await unary(
        bench.stub().GetStatus(
            pb.GetCoordinatorStatusRequest(), timeout=5, metadata=(("authorization", "Bearer " + "a" * 64),)
        )
    )
    assert status.coordinator_epoch == 1


async def test_a_shim_that_was_refused_is_named_and_no_longer_told_of_once_it_is_in(
    bench: Bench, tmp_path: Any
) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    bench.settings["token_file"] = str(token)
    await bench.start_coordinator()
    right, wrong = ((("authorization", f"Bearer {letter * 64}"), *introduced("cart")) for letter in "ab")
    with pytest.raises(aio.AioRpcError):
        await bench.stub().Register(iter(()), timeout=5, metadata=wrong).read()
    status = await bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5, metadata=right)
    assert ["of `cart` as it says" in one.message for one in status.kept_out] == [True]
    hello = pb.Hello(incarnation_id="i-1", address="127.0.0.1:1")
    hello.capabilities.participant_id, hello.capabilities.configured_workers = "cart", 1
    over = asyncio.Event()

    async def requests() -> AsyncIterator[pb.RegisterRequest]:
        yield pb.RegisterRequest(hello=hello)
        await over.wait()

    stream = bench.stub().Register(requests(), timeout=5, metadata=right)
    assert (await stream.read()).HasField("welcome")
    status = await bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5, metadata=right)
    assert list(status.kept_out) == []
    over.set()
    stream.cancel()


@pytest.mark.parametrize(
    ("foreign", "reason", "says", "next_step"),
    [
        ({"job_id": "other"}, Reason.INVALID_ARGUMENT, "is of job 'other', and this coordinator of job 'default'", "SAFEPOINT_JOB"),
        ({"job_id": "default", "highest_epoch": 9}, Reason.STALE_EPOCH, "has served epoch 9", "coordinator/epoch-9"),
    ],
)  # fmt: skip
async def test_a_shim_that_cannot_be_ours_is_refused_at_the_door_and_missed_by_no_save(
    bench: Bench, foreign: dict[str, Any], reason: Reason, says: str, next_step: str
) -> None:
    await bench.start()
    hello = pb.Hello(incarnation_id="i-1", address="127.0.0.1:1", **foreign)
    hello.capabilities.participant_id, hello.capabilities.configured_workers = "cart", 1
    stream = bench.stub().Register(iter([pb.RegisterRequest(hello=hello)]), timeout=5, metadata=introduced("cart"))
    with pytest.raises(aio.AioRpcError) as refused:
        await stream.read()
    problem = error_from_rpc(refused.value).problem
    assert problem.reason is reason
    assert says in problem.message
    assert next_step in problem.advice
    assert problem.metadata.get(JOB, "") == ("default" if reason is Reason.INVALID_ARGUMENT else "")
    found = await unary(bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=5))
    (shown,) = [one for one in found.findings if one.reason == int(reason)]
    assert "of `cart` as it says" in shown.message
    assert says in shown.message
    assert next_step in shown.next_step
    assert not shown.blocking
    events = await bench.save()
    assert kinds(events)[-1] == "saved"
    (warning,) = [one.warning.message for one in events if one.WhichOneof("event") == "warning"]
    assert says in warning, "and who asks for a save is told"


async def test_a_second_shim_of_one_name_is_told_of_until_it_is_in(bench: Bench) -> None:
    """Servers of a start that was not ended whole keep the names of those that are started next."""
    await bench.start_coordinator()

    def registering(incarnation: str, address: str) -> tuple[Any, asyncio.Event]:
        hello = pb.Hello(incarnation_id=incarnation, address=address)
        hello.capabilities.participant_id, hello.capabilities.configured_workers = "cart", 1
        over = asyncio.Event()

        async def requests() -> AsyncIterator[pb.RegisterRequest]:
            yield pb.RegisterRequest(hello=hello)
            await over.wait()

        return bench.stub().Register(requests(), timeout=10, metadata=introduced("cart")), over

    async def told() -> list[str]:
        status = await unary(bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5))
        found = await unary(bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=5))
        duplicates = [one for one in found.findings if one.reason == int(Reason.DUPLICATE_PARTICIPANT)]
        assert [one.message for one in duplicates] == [one.message for one in status.kept_out]
        return [f"{one.message} {one.next_step}" for one in status.kept_out]

    old, old_over = registering("i-1", "127.0.0.1:1")
    assert (await old.read()).HasField("welcome")
    refused, _ = registering("i-2", "127.0.0.1:2")
    with pytest.raises(aio.AioRpcError):
        await refused.read()
    (text,) = await told()
    for part in (
        "of `cart` as it says",
        "cart is registered from 127.0.0.1:1",
        "earlier start",
        "listens at 127.0.0.1:1",
    ):
        assert part in text
    old_over.set()
    await until(lambda: bench.running.operations.discovery.registry.get("cart") is None)
    new, new_over = registering("i-2", "127.0.0.1:2")
    assert (await new.read()).HasField("welcome")
    assert await told() == []
    new_over.set()
    new.cancel()


async def test_a_shim_with_a_wrong_token_is_found_by_whoever_asks_who_takes_part(bench: Bench, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    bench.settings["token_file"] = str(token)
    await bench.start_coordinator()
    register = bench.stub().Register(iter(()), timeout=5, metadata=(("authorization", "Bearer " + "b" * 64),))
    with pytest.raises(aio.AioRpcError):
        await register.read()
    right = (("authorization", "Bearer " + "a" * 64),)
    found = await bench.stub().GetTopology(pb.GetTopologyRequest(), timeout=5, metadata=right)
    (finding,) = [one for one in found.findings if one.reason == int(Reason.UNAUTHENTICATED)]
    assert not finding.blocking
    assert "A shim on 127.0.0.1 was refused" in finding.message
    assert "no valid token" in finding.message
    assert "SAFEPOINT_TOKEN_FILE" in finding.next_step
    assert "b" * 8 not in str(found)
    status = await bench.stub().GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5, metadata=right)
    assert [one.message for one in status.kept_out] == [finding.message]
    request = pb.SaveRequest(operation_id="save-1", snapshot_id="step-1")
    with pytest.raises(SafepointError, match=r"A shim on 127.0.0.1 was refused .* no valid token") as raised:
        await collect(bench.stub().Save(request, timeout=5, metadata=right))
    assert raised.value.reason is Reason.TOPOLOGY_INVALID
    assert "SAFEPOINT_TOKEN_FILE" in raised.value.problem.next_step
    why = await bench.stub().Explain(pb.ExplainRequest(), timeout=5, metadata=right)
    assert "A shim on 127.0.0.1 was refused" in why.operation.failure.primary.message
