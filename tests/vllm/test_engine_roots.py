"""Engines of several Gym actors, and a snapshot root in an object store: saved and continued as anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.places import in_actor
from coordinator.wire.rpc import channel
from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from participant_shims.identity import CallIdentity
from participant_shims.shim import Shim, ShimOptions
from tests.stored import MemoryStore
from tests.vllm.real_engine import Caller
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import ASK, until
from tests.vllm.test_engine_shim import collect, registered

Engine = tuple[Scripted, VllmAdapter, Caller]


@pytest.fixture(params=["disk", "store"])
def root(request: pytest.FixtureRequest, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "disk":
        return str(short_path / "root")
    memory = MemoryStore()
    monkeypatch.setattr("participant_shims.shim.names_at", lambda _: memory.names())  # what a shim opens for itself
    return memory.root()


@asynccontextmanager
async def fleet(root: str, path: Path, actors: tuple[str, ...]) -> AsyncIterator[tuple[list[Engine], Any]]:
    """A coordinator and an engine of each actor, all new."""
    async with AsyncExitStack() as stack:
        core = await serve(Settings(root=root, bind=f"unix:{path}/c.sock", heartbeat_s=0.2))
        stack.push_async_callback(core.kill)
        engines: list[Engine] = []
        for actor in actors:
            name = in_actor(actor, "engine")
            life = path / f"life-{name}"
            life.mkdir(mode=0o700, exist_ok=True)
            engine = await stack.enter_async_context(scripted())
            disk = None if root.startswith("s3:") else Path(root)
            adapter = VllmAdapter(VllmOptions(name, "127.0.0.1:0", engine.target, life, root=disk))
            options = ShimOptions(
                life, name, core.address, root=disk, store="" if disk else root, bind="unix", actor_id=actor
            )
            shim = await stack.enter_async_context(Shim(options, adapter))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            await registered(shim, core)
            engines.append((engine, adapter, Caller(http, adapter.proxy.address)))
        link = await stack.enter_async_context(channel(core.address))
        yield engines, coordinator_service_pb2_grpc.CoordinatorStub(link)


@pytest.mark.parametrize("actors", [("",), ("left", "right")])
async def test_generations_go_on_from_any_root_and_in_any_actor(
    root: str, short_path: Path, actors: tuple[str, ...]
) -> None:
    question = {**ASK, "max_tokens": 12}

    def who(number: int, attempt: int) -> dict[str, str]:
        return CallIdentity(f"r-{number}", attempt, "0.1").headers()

    async with fleet(root, short_path, actors) as (engines, stub):
        asked = [asyncio.create_task(c.whole(question, who(n, 0))) for n, (_, _, c) in enumerate(engines)]
        for engine, adapter, _ in engines:
            await until(lambda engine=engine: bool(engine.running))
            engine.step(5)
            await until(lambda adapter=adapter: len(next(iter(adapter.proxy.in_flight.values())).token_ids) == 5)
        events = await collect(stub.Save(pb.SaveRequest(operation_id="s-1", snapshot_id="snap-1"), timeout=30))
        assert any(event.HasField("saved") for event in events)
        assert not any(engine.paused for engine, _, _ in engines)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    async with fleet(root, short_path, actors) as (engines, stub):
        restore = pb.RestoreSnapshotRequest(operation_id="r-1", snapshot_id="snap-1")
        assert any(event.HasField("restored") for event in await collect(stub.Restore(restore, timeout=30)))
        asked = [asyncio.create_task(c.whole(question, who(n, 1))) for n, (_, _, c) in enumerate(engines)]
        await collect(stub.Resume(pb.ResumeOperationRequest(operation_id="r-1"), timeout=30))
        for engine, _, _ in engines:
            await until(lambda engine=engine: any(b.get("max_tokens") == 7 for b in engine.bodies))
            engine.step(7)
        for said in await asyncio.gather(*asked):
            assert said.ids == [103 + n for n in range(12)]
            assert said.label == "exact; kept=5"
