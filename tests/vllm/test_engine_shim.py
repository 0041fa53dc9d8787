"""The shim of an engine as a participant: with the real coordinator, and as a process. The engine is scripted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc, participant_service_pb2_grpc
from safepoint.v1 import participant_service_pb2 as participant

from coordinator.cli_views import snapshot_text
from coordinator.client_async import AsyncClient
from coordinator.doctor import fleet
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.errors import Refused
from coordinator.wire.remarks import NO_SUCH_VLLM
from coordinator.wire.rpc import channel
from coordinator.wire.terms import Weights
from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from participant_shims.cli import EXIT_USAGE, main
from participant_shims.engine.pause_note import NAME as MARKER
from participant_shims.identity import CallIdentity
from participant_shims.shim import Shim, ShimOptions
from tests.cli.conftest import Safepoint
from tests.vllm.real_engine import REPOSITORY, Caller
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import ASK, until


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFEPOINT_TOKEN_FILE", raising=False)


class HasTarget(Protocol):
    @property
    def target(self) -> str: ...


@asynccontextmanager
async def beside(
    engine: HasTarget, path: Path, name: str = "engine"
) -> AsyncIterator[tuple[Shim, VllmAdapter, Caller]]:
    life = path / f"life-{name}"
    life.mkdir(mode=0o700, exist_ok=True)
    adapter = VllmAdapter(VllmOptions(name, "127.0.0.1:0", engine.target, life, root=path / "root"))
    options = ShimOptions(life, name, f"file:{path}/root/coordinator/address.json", path / "root", bind="unix")
    async with Shim(options, adapter) as shim, aiohttp.ClientSession() as http:
        yield shim, adapter, Caller(http, adapter.proxy.address)


@asynccontextmanager
async def coordinating(path: Path) -> AsyncIterator[tuple[Coordinator, Any]]:
    made = await serve(Settings(root=str(path / "root"), bind=f"unix:{path}/c.sock", heartbeat_s=0.2))
    try:
        async with channel(made.address) as link:
            yield made, coordinator_service_pb2_grpc.CoordinatorStub(link)
    finally:
        await made.kill()


async def registered(shim: Shim, coordinator: Coordinator) -> None:
    await until(lambda: shim.registration and shim.registration.coordinator_epoch == coordinator.epoch, 15)


@asynccontextmanager
async def whole(path: Path) -> AsyncGenerator[tuple[Scripted, VllmAdapter, Caller, AsyncClient]]:
    """An engine, the shim beside it, registered, and a client of its coordinator."""
    async with (
        scripted() as engine,
        beside(engine, path) as (shim, adapter, caller),
        coordinating(path) as (core, _),
        AsyncClient(core.address) as client,
    ):
        await registered(shim, core)
        yield engine, adapter, caller, client


async def collect(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_a_generation_in_flight_is_saved_and_goes_on_after_everything_died(short_path: Path) -> None:
    question = {**ASK, "max_tokens": 12}
    async with scripted() as engine:
        async with beside(engine, short_path) as (shim, adapter, caller), coordinating(short_path) as (core, stub):
            await registered(shim, core)
            asked = asyncio.create_task(caller.whole(question, CallIdentity("r-1", 0, "0.1").headers()))
            await until(lambda: bool(engine.running))
            engine.step(5)
            await until(lambda: len(next(iter(adapter.proxy.in_flight.values())).token_ids) == 5)
            events = await collect(stub.Save(pb.SaveRequest(operation_id="s-1", snapshot_id="snap-1"), timeout=30))
            assert any(event.HasField("saved") for event in events)
            assert not engine.paused
            assert not adapter.doors.closed
            (listed,) = (await stub.ListSnapshots(pb.ListSnapshotsRequest(), timeout=10)).snapshots
            assert listed.weights["engine"].version == "default"
            asked.cancel()
        part = short_path / "root/snapshots/snap-1/engine"
        lines = [json.loads(line) for line in (part / "requests.jsonl").read_text().splitlines()]
        assert lines[0]["format"] == "vllm-requests-v1"
        assert '"version": "default"' in (part / "manifest.json").read_text()
        assert [(r["rollout_id"], len(r["token_ids"])) for r in lines[1:]] == [("r-1", 5)]
        assert "5 tokens generated" in (part / "ledger.jsonl").read_text()

    async with (
        scripted() as engine,
        beside(engine, short_path) as (shim, adapter, caller),
        coordinating(short_path) as (core, stub),
    ):
        await registered(shim, core)
        restore = pb.RestoreSnapshotRequest(operation_id="r-1", snapshot_id="snap-1")
        assert any(event.HasField("restored") for event in await collect(stub.Restore(restore, timeout=30)))
        assert adapter.doors.closed
        asked = asyncio.create_task(caller.whole(question, CallIdentity("r-1", 1, "0.1").headers()))
        await until(lambda: adapter.doors.counts().parked == 1)
        await collect(stub.Resume(pb.ResumeOperationRequest(operation_id="r-1"), timeout=10))
        await until(lambda: any(b.get("max_tokens") == 7 for b in engine.bodies))
        engine.step(7)
        said = await asked
        assert said.ids == [103 + n for n in range(12)]
        assert said.label == "exact; kept=5"
        stale, answer = await caller.post("/v1/completions", question, CallIdentity("r-1", 0, "0.1").headers())
        assert (stale, answer["error"]["reason"]) == (409, "STALE_ATTEMPT")


async def test_requests_of_no_rollout_are_counted_wherever_a_snapshot_is_told_of(short_path: Path) -> None:
    async with whole(short_path) as (engine, adapter, caller, client):
        assert not (await client.topology()).findings
        asked = [asyncio.create_task(caller.whole({**ASK, "prompt": [n]})) for n in range(6)]
        await until(lambda: len(engine.running) == 6)
        engine.step(3)
        saved = await client.save("snap-1")
        assert saved.line.partition(" s, ")[2].startswith("0 in flight kept, 6 requests in engines kept, 0 to restart")
        (listed,) = (await client.snapshots()).published
        assert (listed.engine_requests, listed.totals.all) == ({"engine": 6}, 0)
        assert "requests      engine: 6 in flight" in snapshot_text(listed)
        (part,) = (await client.verify("snap-1")).manifest.participants
        assert part.engine_requests == 6
        cli = Safepoint(f"file:{short_path}/root/coordinator/address.json")
        assert "requests      engine: 6 in flight" in (await cli("snapshots", "verify", "snap-1")).out
        assert (await cli("snapshots", "verify", "snap-1", "--json")).json()["engine_requests"] == {"engine": 6}
        head, _, row = (await cli("history")).out.strip().splitlines()
        assert "in engines" in head
        assert " 6 " in row
        engine.step(8)
        await asyncio.gather(*asked)
        restored = await client.restore("snap-1")
        assert restored.line == (
            "restored snap-1: 0 in flight continue, 6 requests in engines continue when they are asked again, "
            "0 answered from record, 0 restart, 0 sessions, weights compared by version, still paused"
        )
        by_digest = replace(restored.snapshot, weights={"engine": Weights("default", "d" * 64)})
        assert replace(restored, snapshot=by_digest).weights_compared_by == "digest"
        await client.resume()
        assert len(adapter.pool) == 6


async def test_a_restore_compares_the_weights_of_the_manifest_with_those_of_the_engine(short_path: Path) -> None:
    async with (
        scripted() as engine,
        beside(engine, short_path) as (shim, adapter, _),
        coordinating(short_path) as (core, stub),
    ):
        await registered(shim, core)
        await collect(stub.Save(pb.SaveRequest(operation_id="s-1", snapshot_id="snap-1"), timeout=30))
        engine.weight_version = "step-8"
        restore = pb.RestoreSnapshotRequest(operation_id="r-1", snapshot_id="snap-1")
        with pytest.raises(aio.AioRpcError, match="version 'default', not 'step-8'"):
            await collect(stub.Restore(restore, timeout=30))
        assert len(adapter.pool) == 0


async def test_another_server_on_the_port_of_an_engine_is_told_before_and_by_a_save(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("participant_shims.adapters.vllm.WATCH_EVERY_S", 0.02)
    async with whole(short_path) as (engine, adapter, _, client):
        engine.dev_mode = False
        with pytest.raises(Refused) as refused:
            await adapter.freeze._front.is_paused(1.0)
        for words in ("another server has its port", "VLLM_SERVER_DEV_MODE=1"):
            assert words in refused.value.problem.advice
        async with asyncio.timeout(5):
            while not (await adapter.status(0)).warnings:
                await asyncio.sleep(0.01)
        (health,) = (await client.status(participants=True)).participants
        assert NO_SUCH_VLLM in health.status.warnings[0]
        topology = await client.topology()
        (found,) = [each for each in topology.findings if each.blocking]
        assert (found.participant_id, found.message) == ("engine", health.status.warnings[0])
        assert "another server has its port" in found.next_step
        told = fleet.participants(pb.GetCoordinatorStatusResponse(participants=[health]), fleet.unheard(topology))
        assert not [*told], "doctor says it once, as the error that the topology has"
        with pytest.raises(Refused, match=NO_SUCH_VLLM) as failed:
            await client.save("snap-1")
        assert "another server has its port" in str(failed.value)
        engine.dev_mode = True
        async with asyncio.timeout(5):
            while (await adapter.status(0)).warnings:
                await asyncio.sleep(0.01)
        assert not (await client.topology()).findings
        await client.save("snap-2")


async def test_an_engine_that_hangs_is_named_at_once_and_the_others_go_on(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("participant_shims.adapters.vllm_freeze.PATIENT_S", 0.3)
    async with (
        scripted() as well, scripted() as hung, beside(well, short_path, "engine-0") as (one, first, _),
        beside(hung, short_path, "engine-1") as (other, second, _), coordinating(short_path) as (core, stub),
    ):  # fmt: skip
        await registered(one, core)
        await registered(other, core)
        hung.deaf = True
        begun = asyncio.get_running_loop().time()
        with pytest.raises(aio.AioRpcError) as failed:
            await collect(stub.Save(pb.SaveRequest(operation_id="s-1", snapshot_id="snap-1"), timeout=30))
        assert asyncio.get_running_loop().time() - begun < 10
        assert "engine-1" in str(failed.value.details())
        assert "/is_paused" in str(failed.value.details())
        await until(lambda: not well.paused and not first.doors.closed and not second.doors.closed)
        hung.deaf = False
        events = await collect(stub.Save(pb.SaveRequest(operation_id="s-2", snapshot_id="snap-2"), timeout=30))
        assert any(event.HasField("saved") for event in events)


async def test_a_shim_that_is_killed_while_it_froze_is_followed_by_one_that_resumes(short_path: Path) -> None:
    life = short_path / "life"
    async with scripted() as engine:
        first, said = await process(engine, life)
        async with channel(said["address"]) as link:
            stub = participant_service_pb2_grpc.ParticipantStub(link)
            what = await stub.GetCapabilities(participant.GetCapabilitiesRequest(), timeout=10)
            assert (what.capabilities.kind, what.capabilities.state_schema) == ("vllm", "vllm-requests-v1")
            request = participant.PrepareRequest()
            request.context.operation_id, request.context.coordinator_epoch = "op-1", 1
            request.lease_ttl.FromSeconds(60)
            events = await collect(stub.Prepare(request, timeout=10))
            assert events[-1].HasField("prepared")
        assert engine.paused
        assert (life / MARKER).exists()
        first.send_signal(signal.SIGKILL)
        await first.wait()
        assert engine.paused
        second, _ = await process(engine, life)
        await until(lambda: not engine.paused)
        second.terminate()
        assert await asyncio.wait_for(second.wait(), 10) == 0


async def process(
    engine: Scripted, life: Path, listen: str = "127.0.0.1:0"
) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_") or k == "SAFEPOINT_TEST_RUN"}
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "participant_shims.cli", "shim", "--vllm", f"{listen}={engine.target}",
        "--name", "engine", "--life", str(life), "--root", str(life.parent / "root"),
        stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY,
        env={**environment, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}"},
    )  # fmt: skip
    assert made.stdout is not None
    return made, json.loads(await asyncio.wait_for(made.stdout.readline(), 20))


def test_an_engine_needs_a_name_and_two_places(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--vllm", "127.0.0.1:0"], ["--vllm", "127.0.0.1:0=127.0.0.1:1", "--name", ""]):
        assert main(["shim", *arguments]) == EXIT_USAGE
    assert "--vllm LISTEN=UPSTREAM needs --name" in capsys.readouterr().err
