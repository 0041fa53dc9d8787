"""A server that is not there (FakeAdapter, with knobs), a clock that stands still, and a shim served for real.

The rule: everything but the server behind the adapter is the real thing: service, fence, grpc.aio over a Unix socket.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio
from safepoint.v1 import participant_service_pb2 as pb
from safepoint.v1 import participant_service_pb2_grpc

from coordinator.wire.errors import SafepointError
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor, channel, error_from_rpc
from coordinator.wire.terms import Activity, CheckpointMode, QuiesceMode, Role, RolloutState
from participant_shims.adapter import (
    Closed,
    Counts,
    Description,
    Drain,
    Exported,
    LiveRollout,
    Loaded,
    Opened,
    Progress,
    Snapshot,
    Stillness,
    Worker,
    WrittenFile,
)
from participant_shims.service import ParticipantService

NAME = "counter"
INCARNATION = "i-1"


@dataclass
class _Alarm:
    due: float
    callback: Callable[[], None]
    taken_back: bool = False

    def cancel(self) -> None:
        self.taken_back = True


class FakeClock:
    """Stands still until a test moves it. `stop` + `wake` is a process that was stopped: timers fire late."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.alarms: list[_Alarm] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> _Alarm:
        alarm = _Alarm(self.time + delay_s, callback)
        self.alarms.append(alarm)
        return alarm

    def advance(self, seconds: float, *, fire: bool = True) -> None:
        self.time += seconds
        if fire:
            self.fire()

    def fire(self, *, also_taken_back: bool = False) -> None:
        due = [a for a in self.alarms if a.due <= self.time and (also_taken_back or not a.taken_back)]
        self.alarms = [a for a in self.alarms if a.due > self.time]
        for alarm in due:
            alarm.callback()


@dataclass
class FakeAdapter:
    """A server by knobs. `gate` events hold a method until they are set; `fail` maps a method to what it raises."""

    role: Role = Role.RESOURCES
    mode: CheckpointMode = CheckpointMode.EXPORT_RESTORE
    kind: str = "fake"
    state_schema: str = "fake-v1"
    modes: tuple[QuiesceMode, ...] = (QuiesceMode.HOLD, QuiesceMode.DRAIN)
    files: dict[str, bytes] = field(default_factory=lambda: {"sessions.jsonl": b'{"a": 1}\n'})
    in_flight: list[LiveRollout] = field(default_factory=list)
    parked: int = 3
    held: int = 1
    fail: dict[str, Exception] = field(default_factory=dict)
    gate: dict[str, asyncio.Event] = field(default_factory=dict)
    activity: str = ""
    calls: list[str] = field(default_factory=list)
    open_now: bool = True
    generation: int = 0
    loaded: dict[str, bytes] = field(default_factory=dict)
    loaded_for: str = ""  # outlives the shim, as the server does
    closed_for: str = ""
    retired: list[tuple[str, int]] = field(default_factory=list)
    lease_s: float = 0.0
    changed: Callable[[], None] = lambda: None
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        if name in self.gate:
            await self.gate[name].wait()
        if name in self.fail:
            raise self.fail[name]

    def finish(self, rollout_id: str) -> None:
        """One of the running requests ends."""
        self.in_flight = [r for r in self.in_flight if r.rollout_id != rollout_id]
        self.move()

    def move(self) -> None:
        event, self.progress = self.progress, asyncio.Event()
        event.set()
        self.changed()

    async def start(self, on_change: Callable[[], None]) -> None:
        self.changed = on_change

    async def stop(self) -> None:
        self.calls.append("stop")

    async def describe(self) -> Description:
        await self._step("describe")
        return Description(NAME, self.role, self.kind, self.mode, self.state_schema, self.modes)

    async def close(self, operation_id: str, mode: QuiesceMode, lease_ttl_s: float) -> Closed:
        await self._step("close")
        if self.open_now:
            self.generation += 1
        self.open_now, self.lease_s, self.closed_for = False, lease_ttl_s, operation_id
        return Closed((Worker("worker-0", 7, True),), Counts(len(self.in_flight), self.parked, 0), self.generation)

    async def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        await self._step("quiesce")
        deadline = None if exclude_after_s is None else asyncio.get_running_loop().time() + exclude_after_s
        while self.in_flight:
            moved = self.progress
            waiting = tuple(self.in_flight)
            yield Drain(Counts(len(waiting), self.parked, 0), waiting[:20], len(waiting))
            left = None if deadline is None else deadline - asyncio.get_running_loop().time()
            if left is not None and left <= 0:
                yield Drain(Counts(0, self.parked, self.held), quiesced=True, excluded=waiting)
                return
            try:
                async with asyncio.timeout(left):
                    await moved.wait()
            except TimeoutError:
                pass
        yield Drain(Counts(0, self.parked, self.held), quiesced=True)

    async def still(self) -> Stillness:
        await self._step("still")
        return Stillness(self.generation, self.activity)

    async def export(self, directory: Path) -> AsyncIterator[Progress | Exported]:
        await self._step("export")
        written = []
        for name, data in self.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            written.append(WrittenFile(name, len(data), hashlib.sha256(data).hexdigest()))
            yield Progress(len(data), 0, 1, len(self.files))
        await self._step("exported")
        yield Exported(tuple(written), "", {RolloutState.PARKED: 2}, sessions=len(written), recorded_calls=5)

    async def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        await self._step("load")
        self.loaded_for = self.closed_for
        for file in files:
            yield Progress(file.size_bytes)
            self.loaded[file.path] = (directory / file.path).read_bytes()
        yield Loaded(len(files), {RolloutState.PARKED: 2}, (), self.generation)

    async def unload(self) -> None:
        await self._step("unload")
        self.loaded.clear()
        self.loaded_for = ""

    async def loaded_by(self) -> str:
        return self.loaded_for

    async def keep(self) -> None:
        await self._step("keep")
        self.loaded_for = ""

    async def open(self) -> Opened:
        await self._step("open")
        if self.open_now:
            return Opened()
        self.open_now = True
        self.generation += 1
        return Opened(self.parked, self.held, 1.5)

    async def renew(self, lease_ttl_s: float) -> None:
        await self._step("renew")
        self.lease_s = lease_ttl_s

    async def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        await self._step("retire")
        self.retired += attempts
        return len(attempts)

    async def status(self, max_rollouts: int) -> Snapshot:
        await self._step("status")
        return Snapshot(
            (Worker("worker-0", 7, True),), Counts(len(self.in_flight), self.parked, 0), self.generation,
            not self.open_now, tuple(self.in_flight[:max_rollouts]), len(self.in_flight),
        )  # fmt: skip


def rollout(rollout_id: str, waiting_on: str = "judge", turn: int = 4, age_s: float = 83.0) -> LiveRollout:
    return LiveRollout(rollout_id, Activity.CALLING, 0, turn, age_s, waiting_on)


@dataclass
class Shim:
    """A served participant and a stub to it."""

    stub: Any
    adapter: FakeAdapter
    clock: FakeClock
    service: ParticipantService
    root: Path

    def context(self, operation_id: str = "op-1", epoch: int = 1) -> pb.OperationContext:
        return pb.OperationContext(operation_id=operation_id, coordinator_epoch=epoch)

    def prepare(self, operation_id: str = "op-1", epoch: int = 1, timeout: float = 5.0, **more: Any) -> Any:
        request = pb.PrepareRequest(context=self.context(operation_id, epoch), **more)
        request.lease_ttl.FromMilliseconds(int(more.pop("lease_s", 60) * 1000)) if "lease_ttl" not in more else None
        return self.stub.Prepare(request, timeout=timeout)

    def commit(
        self, operation_id: str = "op-1", snapshot_id: str = "snap-1", epoch: int = 1, timeout: float = 5
    ) -> Any:
        request = pb.CommitRequest(context=self.context(operation_id, epoch), snapshot_id=snapshot_id)
        return self.stub.Commit(request, timeout=timeout)

    def restore(self, digest: str, operation_id: str = "op-2", snapshot_id: str = "snap-1", **more: Any) -> Any:
        request = pb.RestoreRequest(
            context=self.context(operation_id, more.pop("epoch", 1)), snapshot_id=snapshot_id, manifest_sha256=digest, **more
        )  # fmt: skip
        request.lease_ttl.FromSeconds(60)
        return self.stub.Restore(request, timeout=5)

    async def resume(self, operation_id: str = "op-1", epoch: int = 1) -> pb.ResumeResponse:
        return await answer(self.stub.Resume(pb.ResumeRequest(context=self.context(operation_id, epoch)), timeout=5))

    async def abort(self, operation_id: str = "op-1", epoch: int = 1, timeout: float = 5) -> pb.AbortResponse:
        request = pb.AbortRequest(context=self.context(operation_id, epoch), cause="a test")
        return await answer(self.stub.Abort(request, timeout=timeout))

    async def confirm(self, prepared: pb.Prepared, operation_id: str = "op-1") -> pb.ConfirmResponse:
        return await answer(
            self.stub.Confirm(
                pb.ConfirmRequest(
                    context=self.context(operation_id), incarnation_id=prepared.incarnation_id,
                    admission_generation=prepared.admission_generation,
                ),
                timeout=5,
            )
        )  # fmt: skip

    async def prepared(self, operation_id: str = "op-1", **more: Any) -> pb.Prepared:
        events = await collect(self.prepare(operation_id, **more))
        return events[-1].prepared

    async def state(self) -> Any:
        return (await answer(self.stub.GetStatus(pb.GetStatusRequest(max_rollouts=50), timeout=5))).status

    def reserve(self, snapshot_id: str = "snap-1") -> Path:
        """What the coordinator does first: the snapshot's directory."""
        path = self.root / "snapshots" / snapshot_id
        path.mkdir(parents=True, mode=0o700)
        return path

    def publish(self, snapshot_id: str = "snap-1") -> None:
        (self.root / "snapshots" / snapshot_id / "manifest.json").write_text("published\n")


async def collect(call: Any) -> list[Any]:
    """All events of a stream; raises SafepointError."""
    try:
        return [event async for event in call]
    except aio.AioRpcError as error:
        raise error_from_rpc(error) from None


async def answer(call: Any) -> Any:
    """The answer of a call; raises SafepointError."""
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_from_rpc(error) from None


async def refused(awaitable: Any) -> SafepointError:
    """The refusal that `awaitable` must end with."""
    try:
        got = await awaitable
    except SafepointError as error:
        return error
    raise AssertionError(f"not refused: {got}")


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition, with a deadline."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not condition():
        if loop.time() > end:
            raise AssertionError("it did not happen in time")
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serve(adapter: FakeAdapter, tmp_path: Path, incarnation: str = INCARNATION) -> AsyncIterator[Shim]:
    """A shim's service on a real server over a Unix socket."""
    clock = FakeClock()
    root = tmp_path / "root"
    (root / "snapshots").mkdir(parents=True, exist_ok=True)
    service = ParticipantService(adapter, NAME, incarnation, root, clock)
    server = aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
    participant_service_pb2_grpc.add_ParticipantServicer_to_server(service, server)
    target = f"unix:{tmp_path}/{incarnation}.sock"
    server.add_insecure_port(target)
    await server.start()
    await service.start()
    try:
        async with channel(target) as link:
            yield Shim(participant_service_pb2_grpc.ParticipantStub(link), adapter, clock, service, root)
    finally:
        await service.stop()
        await server.stop(0)
