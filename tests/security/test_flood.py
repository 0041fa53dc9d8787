"""Under a flood an operation can still be ended: Abort, Resume, status and health get through (FAILURES D13, B96, rule 8)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2_grpc
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.feed import QUEUE_LENGTH, Feed
from coordinator.wire.access import Lane
from coordinator.wire.errors import Reason
from coordinator.wire.lanes import LIMITS
from coordinator.wire.rpc import channel, error_from_rpc
from coordinator.wire.terms import ParticipantState
from tests.coordinator.conftest import Bench
from tests.fakes import Knobs

WITHIN_S = 1.0
CONNECTIONS = 4


@pytest.fixture
async def flooded(tmp_path: Path) -> AsyncGenerator[Bench]:
    """Somebody is paused by a prepare that does not end; every lane but the reserved ones is full, and pushed at."""
    bench = Bench(tmp_path / "root")
    try:
        await bench.start(model_0=Knobs(inflight=1, drain_after_s=math.inf))
        async with flood(bench):
            yield bench
    finally:
        await bench.stop()


@asynccontextmanager
async def flood(bench: Bench) -> AsyncGenerator[None]:
    links = [channel(bench.running.address) for _ in range(CONNECTIONS)]
    stubs: list[Any] = [coordinator_service_pb2_grpc.CoordinatorStub(link) for link in links]
    prepare = pb.PrepareOperationRequest(operation_id="save-1", snapshot_id="s-1")
    prepare.options.quiesce_mode = capabilities_pb2.QUIESCE_MODE_DRAIN  # it waits for what never ends
    calls = [stubs[n % CONNECTIONS].Prepare(prepare, timeout=60) for n in range(2 * LIMITS[Lane.WORK].total)]
    calls += [
        stubs[n % CONNECTIONS].Watch(pb.WatchRequest()) for n in range(2 * LIMITS[Lane.WATCH].total)
    ]  # never read
    pushing = [asyncio.create_task(push(stub)) for stub in stubs]
    try:
        await refusals(calls)
        yield
    finally:
        for task in pushing:
            task.cancel()
        await asyncio.gather(*pushing, return_exceptions=True)
        for call in calls:
            call.cancel()
        for link in links:
            await link.close()


async def push(stub: Any) -> None:
    """Come again at once whenever it is refused."""
    while True:
        call = stub.Watch(pb.WatchRequest())
        try:
            await call.read()
        except aio.AioRpcError:
            await asyncio.sleep(0.01)
        finally:
            call.cancel()


async def refusals(calls: list[Any]) -> None:
    """Until lanes are full: what is over them has been refused, with a time to come again."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        done = [call for call in calls if call.done()]
        if len(done) >= LIMITS[Lane.WORK].total + LIMITS[Lane.WATCH].total:
            for call in done[:5]:
                with pytest.raises(aio.AioRpcError) as raised:
                    await call.read()
                found = error_from_rpc(raised.value)
                assert (found.reason, found.problem.retry_after_s) == (Reason.LIMIT_EXCEEDED, 1.0)
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"only {len([c for c in calls if c.done()])} calls were refused")


async def quickest(ask: Callable[[], Awaitable[Any]], tries: int = 5) -> tuple[float, Any]:
    """The best of a few: what is measured is the server, and this machine is busy with other things, too."""
    took: list[float] = []
    answer: Any = None
    for _ in range(tries):
        began = time.monotonic()
        answer = await ask()
        took.append(time.monotonic() - began)
        if took[-1] < WITHIN_S:
            break
    return min(took), answer


async def test_status_health_and_abort_answer_within_a_second_under_a_flood(flooded: Bench) -> None:
    async with channel(flooded.running.address) as link:
        stub: Any = coordinator_service_pb2_grpc.CoordinatorStub(link)
        dialled: Any = link
        check = dialled.unary_unary("/grpc.health.v1.Health/Check")

        took_s, status = await quickest(lambda: stub.GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5))
        assert took_s < WITHIN_S
        assert status.operation.operation_id == "save-1"

        took_s, answer = await quickest(lambda: check(b"", timeout=5))
        assert (took_s < WITHIN_S, answer) == (True, b"\x08\x01")

        assert not flooded.all_open()
        began = time.monotonic()
        aborted = await stub.Abort(pb.AbortOperationRequest(cause="enough"), timeout=5)
        assert time.monotonic() - began < WITHIN_S
        assert aborted.operation_id == "save-1"
        end = time.monotonic() + 5
        while not flooded.all_open():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert all(shim.state == ParticipantState.OPEN for shim in flooded.shims.values())


async def test_a_resume_gets_through_as_well(flooded: Bench) -> None:
    async with channel(flooded.running.address) as link:
        stub: Any = coordinator_service_pb2_grpc.CoordinatorStub(link)
        began = time.monotonic()
        with pytest.raises(
            aio.AioRpcError
        ) as raised:  # it is not published: the answer is a reason, and it comes at once
            async for _ in stub.Resume(pb.ResumeOperationRequest(operation_id="save-1"), timeout=5):
                pass
        assert error_from_rpc(raised.value).reason is Reason.WRONG_PHASE
        assert time.monotonic() - began < WITHIN_S


def test_a_follower_that_does_not_read_costs_a_bounded_queue_and_is_told_what_it_missed() -> None:
    feed = Feed()
    with feed.follow() as slow:
        for number in range(3 * QUEUE_LENGTH):
            feed.publish(pb.OperationEvent(operation_id="save-1", sequence=number))
        assert slow.resync()
        got: list[int] = []
        while (event := slow.take()) is not None:
            got.append(event.sequence)
        assert got == list(range(2 * QUEUE_LENGTH, 3 * QUEUE_LENGTH))  # the newest
        assert not slow.resync()
