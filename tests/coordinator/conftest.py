"""A coordinator of the real thing, in the test's own event loop, with fake shims around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.errors import SafepointError, Unanswered
from coordinator.wire.rpc import channel, error_from_rpc
from coordinator.wire.terms import Role
from tests.fakes import FakeShim, Knobs


class Bench:
    """H(agents, models, resources) of the bug list: a coordinator and its shims."""

    def __init__(self, root: Path, store: str = "") -> None:
        """`store`: the root is there, at that URL, and not in the directory."""
        self.root = root
        self.where = store or str(root)
        self.settings: dict[str, Any] = {"heartbeat_s": 0.2}
        self.shims: dict[str, FakeShim] = {}
        self.coordinator: Coordinator | None = None
        self._channels: list[aio.Channel] = []

    async def start(self, agents: int = 1, models: int = 1, resources: int = 1, **knobs: Knobs) -> Bench:
        await self.start_coordinator()
        for role, count, name in (
            (Role.AGENT, agents, "agent"),
            (Role.POLICY_MODEL, models, "model"),
            (Role.RESOURCES, resources, "resources"),
        ):
            for number in range(count):
                participant_id = f"{name}-{number}"
                await self.add(participant_id, role, knobs.get(participant_id.replace("-", "_")))
        return self

    async def start_coordinator(self) -> Coordinator:
        self.coordinator = await serve(Settings(root=self.where, **self.settings))
        return self.coordinator

    async def add(self, name: str, role: Role, knobs: Knobs | None = None, **kwargs: Any) -> FakeShim:
        shim = FakeShim(name, role, self.where, knobs, **kwargs)
        self.shims[name] = shim
        await shim.start()
        await shim.register(self.running.address)
        return shim

    @property
    def running(self) -> Coordinator:
        assert self.coordinator is not None
        return self.coordinator

    def stub(self) -> Any:
        opened = channel(self.running.address)
        self._channels.append(opened)
        return coordinator_service_pb2_grpc.CoordinatorStub(opened)

    async def crash(self) -> None:
        """The coordinator dies; shims stay."""
        await self.running.kill()
        for shim in self.shims.values():
            await shim.leave()

    async def restart(self) -> None:
        """Another coordinator in the same root, and everybody registers with it."""
        await self.start_coordinator()
        for shim in self.shims.values():
            if not shim.dead:
                await shim.register(self.running.address)

    async def stop(self) -> None:
        for shim in self.shims.values():
            await shim.stop()
        for opened in self._channels:
            await opened.close()
        if self.coordinator is not None:
            await self.coordinator.kill()

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def save(
        self, operation_id: str = "save-1", snapshot_id: str = "step-1", timeout: float = 10, **options: Any
    ) -> list[pb.OperationEvent]:
        request = pb.SaveRequest(operation_id=operation_id, snapshot_id=snapshot_id, options=pb.SaveOptions(**options))
        return await asked(lambda: self.stub().Save(request, timeout=timeout))

    async def restore(
        self,
        operation_id: str = "restore-1",
        snapshot_id: str = "step-1",
        timeout: float = 10,
        resume: bool = False,
        elastic: bool = False,
    ) -> list[pb.OperationEvent]:
        request = pb.RestoreSnapshotRequest(
            operation_id=operation_id, snapshot_id=snapshot_id, resume=resume, elastic=elastic
        )
        return await asked(lambda: self.stub().Restore(request, timeout=timeout))

    async def phase(self, method: str, timeout: float = 10, **fields: Any) -> list[pb.OperationEvent]:
        types = {
            "Prepare": pb.PrepareOperationRequest,
            "Commit": pb.CommitOperationRequest,
            "Publish": pb.PublishRequest,
            "Resume": pb.ResumeOperationRequest,
        }
        return await asked(lambda: getattr(self.stub(), method)(types[method](**fields), timeout=timeout))

    async def abort(self, operation_id: str = "", timeout: float = 5) -> pb.AbortOperationResponse:
        return await unary(self.stub().Abort(pb.AbortOperationRequest(operation_id=operation_id), timeout=timeout))

    async def status(self, participants: bool = False) -> pb.GetCoordinatorStatusResponse:
        request = pb.GetCoordinatorStatusRequest(participants=participants)
        return await unary(self.stub().GetStatus(request, timeout=5))

    async def explain(self, operation_id: str = "") -> pb.ExplainResponse:
        return await unary(self.stub().Explain(pb.ExplainRequest(operation_id=operation_id), timeout=5))

    def all_open(self) -> bool:
        return all(shim.open for shim in self.shims.values() if not shim.dead)


async def collect(call: Any) -> list[Any]:
    """The messages of a stream; raises SafepointError for what it failed with, the events so far attached."""
    events: list[Any] = []
    try:
        async for event in call:
            events.append(event)
    except aio.AioRpcError as error:
        failure = error_from_rpc(error)
        failure.events = events  # type: ignore[attr-defined]
        raise failure from error
    return events


async def asked(call: Callable[[], Any]) -> list[Any]:
    """As `collect`; repeats a call that grpc.aio has lost on its own side.

    On a loaded machine it may find a stream ended before it has sent the request ("Internal error from Core"). Clients
    repeat what got no answer, and so does this: calls are idempotent.
    """
    try:
        return await collect(call())
    except Unanswered as error:
        if "Internal error from Core" not in error.problem.message:
            raise
        return await collect(call())


async def unary(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_from_rpc(error) from error


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Polls: the only way to wait for what happens elsewhere."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


def kinds(events: list[pb.OperationEvent]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


__all__ = ["Bench", "SafepointError", "collect", "kinds", "unary", "until"]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "root")
    yield made
    await made.stop()
