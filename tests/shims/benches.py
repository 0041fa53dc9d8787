"""A server behind each adapter, as the contract suite needs it: work that starts, runs, and ends when it is told to.

`FakeBench` is the fake of the service tests; `ProxyBench` a real server behind the real proxy; `GymBench` real gates
(doors, call log, control thread) that dial in over the life's socket, without a Gym server around them; `VllmBench` a
scripted engine, over HTTP and in this process.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from coordinator.wire.terms import Role
from participant_shims.adapter import Adapter
from participant_shims.adapters.gym import GymAdapter
from participant_shims.adapters.proxy import ProxyAdapter, ProxyOptions
from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from participant_shims.admission import Entry
from participant_shims.gate.calllog import CallLog
from participant_shims.gate.control import Control
from participant_shims.gate.core import Gate
from participant_shims.gate.describe import Server
from participant_shims.identity import CallIdentity
from tests.shims.proxy_server import Reached, running_server
from tests.shims.shim_fakes import FakeAdapter, rollout, until
from tests.vllm.held_fake import FakeLLM, Params, held
from tests.vllm.real_engine import Caller
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import ASK


class Bench(Protocol):
    adapter: Adapter
    role: Role
    lapses: bool  # whether its gates keep a lease of their own
    freezes: bool  # whether running work stops in the middle and goes on later
    changes: int

    async def work(self, rollout_id: str) -> None:
        """A request of that rollout arrives; returns when it is inside (running or parked)."""
        ...

    async def end(self, rollout_id: str) -> None:
        """It ends as soon as it may."""
        ...


class FakeBench:
    lapses = False
    freezes = False
    role = Role.RESOURCES

    def __init__(self) -> None:
        self.adapter: Any = FakeAdapter(parked=0, held=0)
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1

    async def work(self, rollout_id: str) -> None:
        if self.adapter.open_now:
            self.adapter.in_flight.append(rollout(rollout_id))
        else:
            self.adapter.parked += 1
        self.adapter.move()

    async def end(self, rollout_id: str) -> None:
        self.adapter.finish(rollout_id)


class ProxyBench:
    lapses = True
    freezes = False
    role = Role.RESOURCES

    def __init__(self, server: Reached, http: aiohttp.ClientSession) -> None:
        self.adapter: Any = ProxyAdapter(
            ProxyOptions("counter", Role.RESOURCES, "127.0.0.1:0", f"127.0.0.1:{server.port}")
        )
        self.server, self.http = server, http
        self.changes = 0
        self.calls: dict[str, asyncio.Task[None]] = {}

    def changed(self) -> None:
        self.changes += 1

    async def work(self, rollout_id: str) -> None:
        before = self.adapter.doors.counts()
        headers = CallIdentity(rollout_id, 0, "0.1").headers()

        async def send() -> None:
            async with self.http.post(f"http://{self.adapter.proxy.address}/slow", headers=headers) as response:
                await response.read()

        self.calls[rollout_id] = asyncio.create_task(send())
        await until(lambda: self.adapter.doors.counts() != before)

    async def end(self, rollout_id: str) -> None:
        self.server.go.set()
        await until(lambda: self.adapter.doors.counts().in_flight == 0)


class GymBench:
    lapses = True
    freezes = False

    def __init__(self, life: Path, kind: str = "gym.resources", workers: int = 2, role: str = "resources") -> None:
        self.life = life
        self.kind, self.workers, self.role_name = kind, workers, role
        self.role = Role.RESOURCES if role == "resources" else Role.AGENT
        self.adapter: Any = GymAdapter(life, "counter")
        self.changes = 0
        self.gates: list[Gate] = []
        self.controls: list[Control] = []
        self.inside: dict[str, tuple[Gate, Entry, asyncio.Task[None]]] = {}

    def changed(self) -> None:
        self.changes += 1

    async def add_worker(self) -> None:
        server = Server("counter", self.kind, self.role_name, self.workers)
        gate = Gate(server, CallLog(self.life / "calls.db"), worker_id=f"worker-{len(self.gates)}")
        control = Control(gate, self.life / "gate.sock")
        await gate.start()
        control.start(asyncio.get_running_loop())
        self.gates.append(gate)
        self.controls.append(control)

    async def lose_worker(self, number: int) -> None:
        """The worker's process is gone: its line is cut and does not come back."""
        await asyncio.to_thread(self.controls[number].stop)

    async def work(self, rollout_id: str) -> None:
        gate = self.gates[len(self.inside) % len(self.gates)]
        entry = gate.doors.enter(rollout_id, 0)
        self.inside[rollout_id] = gate, entry, asyncio.create_task(self._admit(gate, entry))
        await asyncio.sleep(0)

    async def _admit(self, gate: Gate, entry: Entry) -> None:
        await gate.doors.admitted(entry)

    async def end(self, rollout_id: str) -> None:
        gate, entry, task = self.inside.pop(rollout_id)
        await task
        gate.doors.leave(entry)

    async def stop(self) -> None:
        for _, _, task in self.inside.values():
            task.cancel()
        for control in self.controls:
            if control._thread.is_alive():
                await asyncio.to_thread(control.stop)
        for gate in self.gates:
            gate.log.close()


@asynccontextmanager
async def fake_bench(path: Path) -> AsyncIterator[FakeBench]:
    bench = FakeBench()
    await bench.adapter.start(bench.changed)
    yield bench
    await bench.adapter.stop()


@asynccontextmanager
async def proxy_bench(path: Path) -> AsyncIterator[ProxyBench]:
    async with running_server() as server, aiohttp.ClientSession() as http:
        bench = ProxyBench(server, http)
        await bench.adapter.start(bench.changed)
        yield bench
        server.go.set()
        await bench.adapter.stop()
        await asyncio.gather(*bench.calls.values(), return_exceptions=True)


@asynccontextmanager
async def gym_bench(path: Path, **more: Any) -> AsyncIterator[GymBench]:
    life = Path(tempfile.mkdtemp(prefix="life-", dir=path))
    bench = GymBench(life, **more)
    await bench.adapter.start(bench.changed)
    for _ in range(bench.workers):
        await bench.add_worker()
    await until(lambda: len(bench.adapter._links) == bench.workers)
    yield bench
    await bench.stop()
    await bench.adapter.stop()


class VllmBench:
    """A scripted engine: behind the proxy, or in this process."""

    role, lapses, freezes = Role.ENGINE, True, True

    def __init__(self, adapter: VllmAdapter, engine: Scripted | FakeLLM, ask: Callable[[str], Any]) -> None:
        self.adapter: Any = adapter
        self.engine, self.ask = engine, ask
        self.changes = 0
        self.calls: dict[str, asyncio.Task[Any]] = {}

    def changed(self) -> None:
        self.changes += 1

    async def work(self, rollout_id: str) -> None:
        before, running = self.adapter.doors.counts(), len(self.engine.running)
        self.calls[rollout_id] = asyncio.create_task(self.ask(rollout_id))
        await until(lambda: self.adapter.doors.counts() != before)
        if not self.adapter.doors.closed:
            await until(lambda: len(self.engine.running) > running)

    async def end(self, rollout_id: str) -> None:
        await until(lambda: not self.engine.paused)
        while not self.calls[rollout_id].done():
            self.engine.step(8)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def vllm_bench(path: Path) -> AsyncIterator[VllmBench]:
    life = Path(tempfile.mkdtemp(prefix="life-", dir=path))
    async with scripted() as engine, aiohttp.ClientSession() as http:
        adapter = VllmAdapter(VllmOptions("engine", "127.0.0.1:0", engine.target, life))

        async def ask(rollout_id: str) -> None:
            await Caller(http, adapter.proxy.address).whole(ASK, CallIdentity(rollout_id, 0, "0.1").headers())

        bench = VllmBench(adapter, engine, ask)
        await adapter.start(bench.changed)
        await adapter.describe()
        yield bench
        await adapter.stop()
        await asyncio.gather(*bench.calls.values(), return_exceptions=True)


@asynccontextmanager
async def held_bench(path: Path) -> AsyncIterator[VllmBench]:
    life = Path(tempfile.mkdtemp(prefix="life-", dir=path))
    llm = FakeLLM()
    async with held(llm, life) as (adapter, front):

        async def ask(rollout_id: str) -> None:
            caller = CallIdentity(rollout_id, 0, "0.1")
            async for _ in front.generate([1, 2, 3], Params(temperature=0.0, max_tokens=8), rollout_id, caller=caller):
                pass

        bench = VllmBench(adapter, llm, ask)
        adapter._changed = bench.changed
        yield bench
        for task in bench.calls.values():
            task.cancel()
        await asyncio.gather(*bench.calls.values(), return_exceptions=True)


BENCHES: dict[str, Any] = {
    "fake": fake_bench, "proxy": proxy_bench, "gym": gym_bench, "vllm": vllm_bench, "vllm held": held_bench,
}  # fmt: skip
