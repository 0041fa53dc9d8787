"""A shim that is killed while its server is closed: its successor opens it at once, when the coordinator says how it ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.rpc import channel
from coordinator.wire.terms import QuiesceMode
from participant_shims.adapters.gym import GymAdapter
from participant_shims.shim import Shim, ShimOptions
from tests.shims.benches import GymBench, gym_bench
from tests.shims.shim_fakes import collect, until

LEASE_S = 120.0
SOON_S = 30.0  # of a machine that does ten other things


@asynccontextmanager
async def coordinating(path: Path) -> AsyncIterator[tuple[Coordinator, Any]]:
    made = await serve(
        Settings(root=str(path / "root"), bind=f"unix:{path}/c.sock", heartbeat_s=0.2, lease_ttl_s=LEASE_S)
    )
    try:
        async with channel(made.address) as link:
            yield made, coordinator_service_pb2_grpc.CoordinatorStub(link)
    finally:
        await made.kill()


@asynccontextmanager
async def shim_of(path: Path, bench: GymBench) -> AsyncIterator[Shim]:
    """Registered. On leaving it ends as SIGKILL would end it: nobody is told, nothing is opened."""
    options = ShimOptions(
        bench.life, "counter", f"file:{path}/root/coordinator/address.json", path / "root", bind="127.0.0.1:0"
    )
    bench.adapter = GymAdapter(bench.life, "counter")
    shim = Shim(options, bench.adapter)
    await shim._start()
    try:
        await until(lambda: shim.registration is not None and shim.registration.coordinator_epoch > 0, SOON_S)
        yield shim
    finally:
        assert shim._registering is not None
        shim._registering.cancel()
        await asyncio.gather(shim._registering, return_exceptions=True)
        assert shim._server is not None
        await shim._server.stop(0)
        assert shim._listening is not None
        shim._listening.close()
        for task in shim.service.operations._tasks:
            task.cancel()
        await bench.adapter.stop()


@pytest.mark.parametrize("who", ["the same coordinator", "the next coordinator"])
async def test_its_successor_opens_the_server_long_before_the_lease_would(short_path: Path, who: str) -> None:
    (short_path / "root").mkdir()
    async with gym_bench(short_path, kind="gym.agent", role="agent") as bench:
        await bench.adapter.stop()
        async with coordinating(short_path) as (coordinator, stub):
            async with shim_of(short_path, bench):
                request = pb.PrepareOperationRequest(operation_id="op-1", snapshot_id="step-1")
                await collect(stub.Prepare(request, timeout=SOON_S))
                assert all(gate.doors.closed for gate in bench.gates)
            killed_at = time.monotonic()
            if who == "the same coordinator":
                await until(lambda: coordinator.operations.active is None, SOON_S)  # it has told whom it could reach
                async with shim_of(short_path, bench):
                    await until(lambda: not any(gate.doors.closed for gate in bench.gates), SOON_S)
        if who == "the next coordinator":
            async with coordinating(short_path), shim_of(short_path, bench):
                await until(lambda: not any(gate.doors.closed for gate in bench.gates), SOON_S)
    assert time.monotonic() - killed_at < LEASE_S / 2


async def test_without_a_coordinator_the_successor_leaves_it_closed_for_the_lease(short_path: Path) -> None:
    """It may be part of a restore: opening half of one is worse than a pause."""
    async with gym_bench(short_path) as bench:
        await bench.adapter.close("op-1", QuiesceMode.HOLD, LEASE_S)
        await bench.adapter.stop()
        bench.adapter = GymAdapter(bench.life, "counter")
        await bench.adapter.start(bench.changed)
        await until(lambda: len(bench.adapter._links) == 2)
        assert await bench.adapter.left_closed_for() == "op-1"
        assert all(gate.doors.closed for gate in bench.gates)
        await bench.adapter.open()
        assert await bench.adapter.left_closed_for() == ""
        assert not any(gate.doors.closed for gate in bench.gates)
        await bench.adapter.close("op-2", QuiesceMode.HOLD, LEASE_S)
        assert await bench.adapter.left_closed_for() == "", "its own"
