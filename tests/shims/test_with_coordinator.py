"""Shims and the real coordinator: they find each other, save, survive its death, and restore."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc, errors_pb2

from coordinator.doctor import fleet
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.rpc import channel
from coordinator.wire.terms import Role
from participant_shims.adapters.proxy import ProxyAdapter, ProxyOptions
from participant_shims.identity import CallIdentity
from participant_shims.shim import Shim, ShimOptions
from tests.shims.proxy_server import Reached, running_server
from tests.shims.shim_fakes import answer, collect, until

SERVERS = {"policy": (Role.POLICY_MODEL, "stateless"), "agent": (Role.AGENT, "restart_only"),
           "sandbox": (Role.RESOURCES, "restart_only")}  # fmt: skip


@asynccontextmanager
async def shims(path: Path, server: Reached) -> AsyncIterator[dict[str, tuple[Shim, ProxyAdapter]]]:
    async with AsyncExitStack() as stack:
        out = {}
        for name, (role, mode) in SERVERS.items():
            adapter = ProxyAdapter(ProxyOptions(name, role, "127.0.0.1:0", f"127.0.0.1:{server.port}", "proxy", mode))
            options = ShimOptions(
                path / f"life-{name}", name, f"file:{path}/root/coordinator/address.json", path / "root", bind="unix"
            )
            options.life.mkdir(mode=0o700, exist_ok=True)
            out[name] = await stack.enter_async_context(Shim(options, adapter)), adapter
        yield out


@asynccontextmanager
async def stub_of(coordinator: Coordinator) -> AsyncIterator[Any]:
    async with channel(coordinator.address) as link:
        yield coordinator_service_pb2_grpc.CoordinatorStub(link)


@asynccontextmanager
async def coordinating(path: Path) -> AsyncIterator[Coordinator]:
    """A coordinator that ends as a crash would end it."""
    made = await serve(
        Settings(root=str(path / "root"), bind=f"unix:{path}/c.sock", heartbeat_s=0.2, straggler_grace_s=0.5)
    )
    try:
        yield made
    finally:
        await made.kill()


async def registered(running: dict[str, tuple[Shim, ProxyAdapter]], epoch: int) -> None:
    def all_are() -> bool:
        return all(s.registration and s.registration.coordinator_epoch == epoch for s, _ in running.values())

    await until(all_are, 15)


async def post(http: aiohttp.ClientSession, adapter: ProxyAdapter, path: str, attempt: int = 0) -> int:
    headers = CallIdentity("r-1", attempt, f"{attempt}.1").headers()
    async with http.post(f"http://{adapter.proxy.address}{path}", headers=headers) as response:
        return response.status


async def test_a_save_a_crash_of_the_coordinator_and_a_restore(short_path: Path) -> None:
    (short_path / "root").mkdir()
    async with running_server() as server, aiohttp.ClientSession() as http:
        async with shims(short_path, server) as running:
            async with coordinating(short_path) as coordinator, stub_of(coordinator) as stub:
                await registered(running, coordinator.epoch)
                topology = await answer(stub.GetTopology(pb.GetTopologyRequest(), timeout=10))
                assert [p.capabilities.participant_id for p in topology.participants] == sorted(SERVERS)
                everybody = pb.GetCoordinatorStatusRequest(participants=True)
                (clocks,) = fleet.clock(await answer(stub.GetStatus(everybody, timeout=10)), time.time())
                assert clocks.message.endswith("the one here and 4 more"), "nothing has run yet"
                assert await post(http, running["agent"][1], "/echo") == 200
                calling = asyncio.create_task(post(http, running["sandbox"][1], "/slow"))
                await until(lambda: server.paths == ["/echo", "/slow"])
                request = pb.SaveRequest(operation_id="save-1", snapshot_id="snap-1")
                events = await collect(stub.Save(request, timeout=30))
                assert any(event.HasField("saved") for event in events)
                assert all(not adapter.doors.closed for _, adapter in running.values())
                server.go.set()
                assert await calling == 200  # the straggler was excluded, not ended
                ledger = (short_path / "root/snapshots/snap-1/ledger.jsonl").read_text().splitlines()
                assert [(e["rollout_id"], e["state"]) for e in map(json.loads, ledger)] == [
                    ("r-1", "ROLLOUT_STATE_EXCLUDED")
                ]
            async with coordinating(short_path) as coordinator:
                await registered(running, coordinator.epoch)
        async with (  # every server is started anew
            shims(short_path, server) as running,
            coordinating(short_path) as coordinator,
            stub_of(coordinator) as stub,
        ):
            await registered(running, coordinator.epoch)
            restore = pb.RestoreSnapshotRequest(operation_id="restore-1", snapshot_id="snap-1")
            events = await collect(stub.Restore(restore, timeout=30))
            assert any(event.HasField("restored") for event in events)
            assert all(adapter.doors.closed for _, adapter in running.values())
            await collect(stub.Resume(pb.ResumeOperationRequest(operation_id="restore-1"), timeout=10))
            assert all(not adapter.doors.closed for _, adapter in running.values())
            assert await post(http, running["sandbox"][1], "/echo", attempt=0) == 409
            assert await post(http, running["sandbox"][1], "/echo", attempt=1) == 200


async def test_a_dead_coordinator_leaves_nobody_closed_beyond_the_lease(short_path: Path) -> None:  # A12, L1
    (short_path / "root").mkdir()
    async with running_server() as server, shims(short_path, server) as running:
        async with coordinating(short_path) as coordinator, stub_of(coordinator) as stub:
            await registered(running, coordinator.epoch)
            request = pb.PrepareOperationRequest(operation_id="save-1", snapshot_id="snap-1")
            request.options.lease_ttl.FromSeconds(1)
            await collect(stub.Prepare(request, timeout=10))
            assert all(adapter.doors.closed for _, adapter in running.values())
        await until(lambda: all(not adapter.doors.closed for _, adapter in running.values()), 5)
        for shim, _ in running.values():
            await until(lambda shim=shim: "lease" in shim.service.operations.last_failure)


async def test_the_topology_says_whose_shim_sees_another_root(short_path: Path) -> None:
    """Nobody has to be paused to learn it; and nothing is refused by it, since a view of a shared directory may be old."""
    for name in ("root", "elsewhere"):
        (short_path / name).mkdir()
    async with running_server() as server, shims(short_path, server) as running:
        running["sandbox"][0]._options = replace(running["sandbox"][0]._options, root=short_path / "elsewhere")
        async with coordinating(short_path) as coordinator, stub_of(coordinator) as stub:
            await registered(running, coordinator.epoch)
            for name in ("agent", "sandbox"):
                running[name][0].watch_root()

            async def told() -> list[pb.Finding]:
                found = (await answer(stub.GetTopology(pb.GetTopologyRequest(), timeout=10))).findings
                return [each for each in found if each.reason == errors_pb2.REASON_STORAGE_FAILED]

            while not (findings := await told()):
                await asyncio.sleep(0.02)
            ((who, blocks, text),) = [(each.participant_id, each.blocking, each.message) for each in findings]
            assert (who, blocks) == ("sandbox", False)
            assert f"does not see the coordinator's root {short_path}/root at {short_path}/elsewhere" in text
        watches = [running[name][0].service.root_watch for name in ("agent", "sandbox")]
    assert all(watch is not None and watch._stopped.is_set() for watch in watches)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFEPOINT_TOKEN_FILE", raising=False)
