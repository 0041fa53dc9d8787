"""What the fault matrix has found, each as a small test of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from safepoint.v1 import participant_service_pb2 as participant

from coordinator import server
from coordinator.settings import Settings
from coordinator.snapshots import SnapshotStore
from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import SnapshotId
from coordinator.wire.terms import ParticipantState, QuiesceMode
from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from participant_shims.engine import discovery
from participant_shims.engine.requests_file import Origin
from participant_shims.engine.restored_note import RestoredNote
from participant_shims.identity import CallIdentity
from tests.coordinator.conftest import Bench, until
from tests.fakes import Knobs
from tests.shims.benches import gym_bench
from tests.shims.shim_fakes import FakeAdapter, answer, collect, refused
from tests.shims.shim_fakes import serve as serve_shim
from tests.vllm.real_engine import Caller
from tests.vllm.scripted_engine import scripted
from tests.vllm.test_control import ASK, half_done


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "root")
    yield made
    await made.stop()


async def test_a_name_that_was_reserved_and_never_begun_is_free_after_a_start(bench: Bench) -> None:
    SnapshotStore(bench.root, "default").begin(SnapshotId("step-1"))  # then the coordinator died
    await bench.start()
    assert (await bench.save("save-1", "step-1"))[-1].saved.snapshot.snapshot_id == "step-1"


def test_only_a_name_that_holds_nothing_is_freed_before_the_first_call(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "default")
    store.begin(SnapshotId("step-1"))
    (tmp_path / "snapshots" / "step-1" / "agent").mkdir()
    store.begin(SnapshotId("step-2"))
    store.forget_reserved()
    assert [p.name for p in (tmp_path / "snapshots").iterdir()] == ["step-1"], "the sweep decides about that one"


async def test_a_deletion_that_a_crash_cut_short_is_finished_by_the_next_start(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "default")
    store.begin(SnapshotId("step-1"))
    half = tmp_path / "snapshots" / ".gone-step-1-0a1b2c3d"
    (tmp_path / "snapshots" / "step-1").rename(half)
    (half / "calls.jsonl").write_text("x")
    coordinator = await server.serve(Settings(root=str(tmp_path)))
    try:
        await until(lambda: not half.exists())
    finally:
        await coordinator.kill()


async def test_a_disk_that_cannot_be_tidied_keeps_no_coordinator_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: object) -> None:
        raise storage_error(OSError(errno.EIO, "Input/output error"), "removing something")

    monkeypatch.setattr(SnapshotStore, "forget_reserved", refused)
    coordinator = await server.serve(Settings(root=str(tmp_path)))
    await coordinator.kill()


def test_a_directory_that_could_not_be_made_durable_is_not_there(tmp_path: Path) -> None:
    failpoints.arm({failpoints.VARIABLE: f"disk.before_sync[{tmp_path.name}]=1*error(EIO)"})
    try:
        with Directory.open(tmp_path) as directory:
            with pytest.raises(SafepointError) as raised:
                directory.make_child("step-1")
            assert raised.value.reason is Reason.STORAGE_FAILED
            assert directory.names() == []
            directory.make_child("step-1").close()
    finally:
        failpoints.disarm()


async def test_what_a_crash_left_half_written_is_removed_by_the_next_start(bench: Bench) -> None:
    await bench.start()
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    await bench.phase("Commit", operation_id="save-1")
    await bench.phase("Publish", operation_id="save-1")
    await bench.crash()
    snapshot, own = bench.root / "snapshots" / "step-1", bench.root / "coordinator"
    os.link(snapshot / "manifest.json", snapshot / ".manifest.json.0a1b2c3d4e5f")  # it died between link and unlink
    (own / ".address.json.0a1b2c3d4e5f").write_text("{")
    await bench.restart()
    await until(bench.all_open)
    assert [p.name for p in (*snapshot.iterdir(), *own.iterdir()) if p.name.startswith(".")] == []
    assert (await bench.status()).latest_snapshot_id == "step-1"


async def test_the_repeat_of_a_restore_whose_coordinator_died_is_told_at_once_that_it_failed(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    bench.shims["agent-0"].knobs = Knobs(hang_on={"Restore"})
    restoring = asyncio.create_task(bench.restore(timeout=30))
    await until(lambda: bench.shims["agent-0"].count("Restore") == 1)
    await bench.crash()
    await asyncio.gather(restoring, return_exceptions=True)
    await bench.restart()
    async with asyncio.timeout(10):  # not the 60 s that its caller would have waited
        for _ in range(2):
            with pytest.raises(SafepointError) as raised:
                await bench.restore(timeout=60)
            assert raised.value.reason is Reason.COORDINATOR_RESTARTED
            assert "Abort opens everybody" in raised.value.problem.advice
    assert not bench.all_open(), "half of it may be loaded"
    await bench.abort()
    await until(bench.all_open)


async def test_a_gate_that_hangs_has_no_lease_and_is_named() -> None:
    with tempfile.TemporaryDirectory(prefix="sp-") as short:
        async with gym_bench(Path(short), workers=2) as gates:
            await gates.adapter.close("op-1", QuiesceMode.HOLD, 60)
            await gates.adapter.renew(60)
            link = gates.adapter._links["worker-1"]

            async def hangs(*_: object, **__: object) -> None:
                raise refuse(Reason.WORKERS_MISSING, "it has not answered renew")

            link.request = hangs
            with pytest.raises(SafepointError) as raised:
                await gates.adapter.renew(60)
            assert raised.value.reason is Reason.WORKERS_MISSING, "its lease still runs"
            gates.adapter._pause.held_until["worker-1"] = 0.0
            with pytest.raises(SafepointError) as raised:
                await gates.adapter.renew(60)
            assert raised.value.reason is Reason.LEASE_LAPSED
            assert "worker-1" in raised.value.problem.message
            assert "runs and" not in raised.value.problem.message
            assert gates.adapter._pause.held_until["worker-0"] > 0


async def test_nobody_waits_for_a_gate_that_hangs_longer_than_its_lease() -> None:
    """The others would be paused until the time of the phase is over: ten minutes, by default."""
    with tempfile.TemporaryDirectory(prefix="sp-") as short:
        adapter = FakeAdapter()
        async with serve_shim(adapter, Path(short)) as shim:
            shim.reserve()
            await shim.prepared()
            adapter.gate["export"] = asyncio.Event()
            committing = asyncio.create_task(collect(shim.commit(timeout=60)))
            await until(lambda: "export" in adapter.calls)
            adapter.fail["renew"] = refuse(
                Reason.LEASE_LAPSED, "Worker worker-0 has confirmed no lease that still runs."
            )
            renewal = participant.RenewLeaseRequest(context=shim.context())
            renewal.lease_ttl.FromSeconds(60)
            await answer(shim.stub.RenewLease(renewal, timeout=5))
            error = await refused(committing)
            assert error.reason is Reason.LEASE_LAPSED
            assert "worker-0" in str(error)
            assert (await shim.state()).state == ParticipantState.OPEN


async def test_whoever_asks_the_next_shim_at_once_gets_what_was_restored_and_not_a_new_answer(tmp_path: Path) -> None:
    record = half_done(prompt=[1, 2, 3])
    record.request_id, record.rollout_id, record.call_id = "sp-1", "r-1", "0.1"
    async with scripted(started=1000.0) as engine, aiohttp.ClientSession() as http:
        RestoredNote(tmp_path).write("op-1", await discovery.life(engine.target), Origin("tiny", "0.32.0"), [record])
        adapter = VllmAdapter(VllmOptions("engine", "127.0.0.1:0", engine.target, tmp_path))
        await adapter.start(lambda: None)
        try:
            headers = CallIdentity("r-1", 1, "0.1").headers()
            asked = asyncio.create_task(Caller(http, adapter.proxy.address).whole(ASK, headers))
            await until(lambda: bool(engine.running))
            engine.step(ASK["max_tokens"])
            assert (await asked).label == f"exact; kept={len(record.token_ids)}"
            assert not [body for body in engine.bodies if body.get("prompt") == ASK["prompt"]]
        finally:
            await adapter.stop()
