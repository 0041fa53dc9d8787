"""A whole deployment for tests: real Gym servers with the shims that they start, a real coordinator, a trainer's client.

    async with whole(directory, counter_config(endpoint.url)) as job:
        result = await job.client.save("step-1")

Nothing is in miniature here: shims find the coordinator through its address file and register, as beside `ng_run`. What
lies in `directory` is everything there is; it must be short enough for Unix sockets below it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from safepoint.v1 import participant_service_pb2 as pb
from safepoint.v1 import participant_service_pb2_grpc

from coordinator.client import AsyncClient
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.errors import SafepointError
from coordinator.wire.rpc import channel
from tests.gym.fleet import Fleet

REGISTER_S = 120.0
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Whole:
    """`names`: the participants that are waited for; by default every server of the fleet."""

    fleet: Fleet
    root: Path
    coordinator: Coordinator
    client: AsyncClient
    names: tuple[str, ...] = ()

    async def registered(self) -> dict[str, Any]:
        """Wait until everybody is; their capabilities by name."""
        return await registered(self.client, self.names or self.fleet.names())

    def status(self, name: str) -> Any:
        """The status that the shim of a server gives."""
        return participant_status(self.fleet, name)

    def ledger(self, snapshot_id: str) -> dict[str, dict[str, Any]]:
        """The ledger on disk, by rollout."""
        text = (self.root / "snapshots" / snapshot_id / "ledger.jsonl").read_text()
        return {line["rollout_id"]: line for line in map(json.loads, text.splitlines())}


@asynccontextmanager
async def whole(
    directory: Path,
    config: dict[str, Any],
    *,
    life: str = "a",
    names: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    proxied: dict[str, int] | None = None,
    running: dict[str, subprocess.Popen[bytes]] | None = None,
    **settings: Any,
) -> AsyncIterator[Whole]:
    """Everything started and registered. Called again with another `life` and the same directory: after a crash.

    With `names` nobody is waited for: the caller starts more, and then calls `registered`. `running` are servers that
    have survived the crash.
    """
    root = directory / "root"
    root.mkdir(exist_ok=True)
    (directory / life).mkdir()
    fleet = Fleet(config, directory / life, environment=shim_environment(root) | (environment or {}),
                  proxied=proxied or {}, processes=dict(running or {}))  # fmt: skip
    coordinator = await serve(Settings(root=str(root), **settings))
    client = AsyncClient(coordinator.address)
    try:
        await asyncio.to_thread(fleet.start)
        job = Whole(fleet, root, coordinator, client, names)
        if not names:
            await job.registered()
        yield job
    finally:
        await asyncio.to_thread(fleet.close)
        await client.close()
        await coordinator.kill()


def shim_environment(root: Path) -> dict[str, str]:
    """What a server's environment needs so that its shim finds the coordinator."""
    return {
        "SAFEPOINT_SHIM": "spawn",
        "SAFEPOINT_ROOT": str(root),
        "SAFEPOINT_COORDINATOR": f"file:{root}/coordinator/address.json",
    }


async def registered(client: AsyncClient, names: Iterable[str], within_s: float = REGISTER_S) -> dict[str, Any]:
    """Wait until all of `names` are registered and nothing blocks a save; their capabilities by name."""
    wanted, end, seen = set(names), time.monotonic() + within_s, "nobody"
    while time.monotonic() < end:
        try:
            topology = await client.topology(timeout=5)
            found = {p.capabilities.participant_id: p.capabilities for p in topology.participants}
            blocking = [f"{f.participant_id}: {f.message}" for f in topology.findings if f.blocking]
            if wanted <= set(found) and not blocking:
                return found
            seen = f"{sorted(found)}, {blocking}"
        except SafepointError as error:
            seen = str(error)
        await asyncio.sleep(0.1)
    raise AssertionError(f"after {within_s:.0f} s registered: {seen}")


async def workers(job: Whole, name: str = "policy_model") -> dict[str, int]:
    """Pids of a server's two workers, once both are there."""
    async with asyncio.timeout(60):
        while len(found := {w.worker_id: w.pid for w in (await job.status(name)).workers}) < 2:
            await asyncio.sleep(0.1)
    return found


def announced(fleet: Fleet, name: str) -> dict[str, Any]:
    """What the shim of this server's life says; empty until it is there."""
    try:
        return json.loads((fleet.life(name) / "shim.json").read_text())
    except (OSError, ValueError, AssertionError):
        return {}


async def participant_status(fleet: Fleet, name: str, max_rollouts: int = 50) -> Any:
    """GetStatus of a server's shim."""
    async with channel(announced(fleet, name)["address"]) as link:
        stub: Any = participant_service_pb2_grpc.ParticipantStub(link)
        return (await stub.GetStatus(pb.GetStatusRequest(max_rollouts=max_rollouts), timeout=10)).status


def counted(fleet: Fleet, name: str, query: str) -> int:
    """A figure out of a server's call log."""
    db = sqlite3.connect(fleet.life(name) / "calls.db")
    try:
        return int(db.execute(query).fetchone()[0])
    finally:
        db.close()


@dataclass
class CoordinatorProcess:
    """`safepoint coordinator` as a process of its own, which a test may kill."""

    root: Path
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "coordinator.cli", "coordinator", "--root", str(self.root)],
                stdout=out, stderr=out, cwd=REPOSITORY, start_new_session=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_C")},
            )  # fmt: skip

    async def address(self, within_s: float = 30) -> str:
        """Where it serves."""
        path, end = self.root / "coordinator" / "address.json", time.monotonic() + within_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return str(json.loads(path.read_text())["address"])
            except (OSError, ValueError):
                await asyncio.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Trainer:
    """Dispatches rows and collects what comes back."""

    def __init__(self, fleet: Fleet, agent: str = "counter_agent") -> None:
        self._url = fleet.url(agent) + "/run"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Trainer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, row: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._url, json=row) as response:
            assert response.status == 200, await response.text()
            return await response.json()


async def until(condition: Any, within_s: float = 90) -> None:
    """Polls: nothing tells us."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)
