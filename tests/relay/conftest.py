"""A node as it is: a real coordinator, relays and shims on real sockets; only the servers behind the shims are not there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.relay import host
from coordinator.relay.host import RelayOptions, RelayServer, address_record
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.access import Access
from coordinator.wire.links import read_security
from coordinator.wire.record import FILE
from coordinator.wire.terms import CheckpointMode, Role
from participant_shims.adapter import Description
from participant_shims.shim import Shim, ShimOptions
from tests.shims.shim_fakes import FakeAdapter, answer, collect, until

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"policy": Role.POLICY_MODEL, "agent": Role.AGENT, "tools": Role.RESOURCES}
BEAT_S = 0.5


@dataclass
class Server(FakeAdapter):
    """A fake server with a name of its own."""

    name: str = ""

    async def describe(self) -> Description:
        await self._step("describe")
        return Description(
            self.name, self.role, self.kind, CheckpointMode.EXPORT_RESTORE, self.state_schema, self.modes
        )


@dataclass
class RelayProcess:
    """A relay in a process of its own, which can be stopped and killed."""

    directory: Path
    process: subprocess.Popen[bytes]
    said: dict[str, Any]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Node:
    """Everything of one test."""

    path: Path
    coordinator: Coordinator | None = None
    relays: dict[str, RelayServer] = field(default_factory=dict[str, RelayServer])
    processes: list[RelayProcess] = field(default_factory=list[RelayProcess])
    shims: dict[str, Shim] = field(default_factory=dict[str, Shim])
    servers: dict[str, Server] = field(default_factory=dict[str, Server])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    tls: Path | None = None  # of `safepoint certs init`
    token_file: str = ""

    def shown(self, who: str) -> dict[str, str]:
        """What a process of that name is started with, to show who it is."""
        return {"tls_dir": str(self.tls / who) if self.tls is not None else "", "token_file": self.token_file}

    @property
    def root(self) -> Path:
        return self.path / "root"

    @property
    def record(self) -> str:
        return f"{FILE}{self.root}/coordinator/address.json"

    async def coordinate(self) -> Coordinator:
        self.root.mkdir(exist_ok=True)
        given = {"heartbeat_s": BEAT_S, "straggler_grace_s": 0.5, **self.shown("coordinator"), **self.settings}
        self.coordinator = await serve(Settings(root=str(self.root), **given))
        return self.coordinator

    async def relay(self, name: str = "n1", job_id: str = "default") -> RelayServer:
        """One in this process."""
        options = RelayOptions(self.record, self.path / f"relay-{name}", name, job_id=job_id, **self.shown("relay"))
        made = self.relays[name] = await host.serve(options)
        return made

    async def relay_process(self, name: str = "n1") -> RelayProcess:
        """One of its own."""
        directory = self.path / f"relay-{name}"
        process = subprocess.Popen(  # noqa: ASYNC220 - it begins at once
            [sys.executable, "-m", "coordinator.cli", "relay", "-c", self.record, "--dir", str(directory), "--name", name],
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"}, cwd=ROOT,
        )  # fmt: skip
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        made = RelayProcess(directory, process, json.loads(line))
        self.processes.append(made)
        return made

    async def shim(self, name: str, behind: str = "n1", role: Role | None = None) -> Server:
        """A shim, behind a relay, or with an empty name none. What is before a point in its name is its actor."""
        actor, _, server_name = name.rpartition(".")
        server = Server(role=role or ROLES[server_name.partition("-")[0]], name=name)
        target = address_record(self.path / f"relay-{behind}") if behind else self.record
        life = self.path / f"life-{name}"
        options = ShimOptions(life, name, target, self.root, actor_id=actor, **self.shown("shim"))
        options.life.mkdir(mode=0o700, exist_ok=True)
        self.servers[name] = server
        shim = self.shims[name] = Shim(options, server)
        await shim.__aenter__()
        return server

    async def fleet(self, behind: str = "n1") -> None:
        """One of each role, registered."""
        for name in ROLES:
            await self.shim(f"{name}-0", behind)
        await self.here(*(f"{name}-0" for name in ROLES))

    async def here(self, *names: str) -> None:
        """Wait until the coordinator has these, and they know it."""

        def is_here(name: str) -> bool:
            registration = self.shims[name].registration
            return self.registry.get(name) is not None and registration is not None and registration.welcomed.is_set()

        await until(lambda: all(map(is_here, names)), 15)

    async def gone(self, *names: str) -> None:
        """Wait until the coordinator has none of these."""
        await until(lambda: all(self.registry.get(name) is None for name in names), 15)

    @property
    def registry(self) -> Any:
        assert self.coordinator is not None
        return self.coordinator.operations.discovery.registry

    def via(self, name: str) -> str:
        """Through which relay one is registered; empty when through none."""
        found = self.registry.get(name)
        relay = self.registry.relay_of(name, found.incarnation_id)
        return relay.relay_id if relay is not None else ""

    def all_open(self) -> bool:
        return all(server.open_now for server in self.servers.values())

    async def ask(self, method: str, request: Any, timeout: float = 10.0) -> Any:
        assert self.coordinator is not None
        mine, access = self.shown("trainer"), Access.RESTORER if method == "Restore" else Access.OPERATOR
        security = read_security(mine["token_file"] or None, mine["tls_dir"] or None)
        async with security.channel(self.coordinator.address, Access.COORDINATOR) as link:
            stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
            call = getattr(stub, method)(request, timeout=timeout, metadata=security.metadata(access))
            return await (collect(call) if hasattr(call, "__aiter__") else answer(call))

    async def save(self, number: int = 1, timeout: float = 15.0, **options: Any) -> list[pb.OperationEvent]:
        request = pb.SaveRequest(
            operation_id=f"save-{number}", snapshot_id=f"s-{number}", options=pb.SaveOptions(**options)
        )
        return await self.ask("Save", request, timeout)

    async def topology(self, *, refresh: bool = False) -> pb.GetTopologyResponse:
        return await self.ask("GetTopology", pb.GetTopologyRequest(refresh=refresh))

    async def stop(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send(signal.SIGCONT)
            process.end()
        for shim in self.shims.values():
            await shim.stop()
        for relay in self.relays.values():
            await relay.stop()
        if self.coordinator is not None:
            await self.coordinator.kill()


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    for variable in ("SAFEPOINT_TOKEN_FILE", "SAFEPOINT_TLS_DIR"):
        monkeypatch.delenv(variable, raising=False)
    made = Node(tmp_path)
    yield made
    await made.stop()
