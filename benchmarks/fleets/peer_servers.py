"""The peer's participants: HTTP and JSON, FastAPI on uvicorn, one listening socket each, one event loop per process.

    python -m benchmarks.fleets.peer_servers '[["agent-0", "agent"], ...]'

Written from the facts of upstream's protocol: POST prepare, commit and resume, GET status. A participant that is not
quiet answers `preparing` with its blockers (an agent of the first generation: 409), or, when asked to wait, answers once it
is quiet: the long-poll that upstream does not have, its best case. Prints one line of JSON: name -> port.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict

from benchmarks.fleets import work
from benchmarks.fleets.processes import raise_descriptor_limit


class Asked(BaseModel):
    """What every request says."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_id: str
    deadline_ts: float


class Prepare(Asked):
    """`wait`: answer when it is quiet."""

    wait: bool = False


class Commit(Asked):
    checkpoint_dir: str


class Report(BaseModel):
    ready: bool
    blockers: list[str] = []
    blocker_count: int = 0
    counts: dict[str, int] = {}
    restarts: list[str] = []


class Prepared(BaseModel):
    phase: str
    report: Report


class Committed(BaseModel):
    phase: str
    manifest: dict[str, Any]
    manifest_sha256: str
    episode_ids: list[str]


class Resumed(BaseModel):
    phase: str
    idempotent: bool


class Participant:
    """One participant: its phase, whose it is, what it has answered."""

    def __init__(self, member: work.Member) -> None:
        self.member = member
        self.phase = "idle"
        self.checkpoint_id = ""
        self.resumed: list[str] = []
        self.committed: Committed | None = None
        self._quiet_at = 0.0
        self._lock = asyncio.Lock()

    def check(self, asked: Asked, *phases: str) -> None:
        """Raise 409 unless this checkpoint may do that now."""
        if asked.deadline_ts < time.time():
            raise HTTPException(409, {"code": "deadline_exceeded"})
        if asked.checkpoint_id in self.resumed:
            raise HTTPException(409, {"code": "stale_checkpoint"})
        if self.checkpoint_id not in ("", asked.checkpoint_id):
            raise HTTPException(409, {"code": "checkpoint_conflict"})
        if self.phase not in phases:
            raise HTTPException(409, {"code": "invalid_phase"})

    async def prepare(self, asked: Prepare) -> Prepared:
        async with self._lock:
            self.check(asked, "idle", "preparing", "prepared")
            if self.phase == "idle":
                self.phase, self.checkpoint_id = "preparing", asked.checkpoint_id
                self._quiet_at = work.quiet_at(
                    asked.checkpoint_id, self.member.name, self.member.role, time.monotonic()
                )
        while asked.wait and (left := self._quiet_at - time.monotonic()) > 0:  # noqa: ASYNC110 - a sleep may end early
            await asyncio.sleep(left)
        return self.status()

    def status(self) -> Prepared:
        ready = time.monotonic() >= self._quiet_at
        if ready and self.phase == "preparing":
            self.phase = "prepared"
        blockers = [] if ready else ["r-1"]
        return Prepared(
            phase=self.phase,
            report=Report(ready=ready, blockers=blockers, blocker_count=len(blockers), counts={"parked": 1}),
        )

    async def commit(self, asked: Commit) -> Committed:
        async with self._lock:
            self.check(asked, "prepared", "committed")
            if self.committed is None:
                self.committed = await asyncio.to_thread(self._write, Path(asked.checkpoint_dir), asked.checkpoint_id)
            self.phase = "committed"
            return self.committed

    def _write(self, root: Path, checkpoint_id: str) -> Committed:
        ours = root / "gym" / self.member.role / self.member.name
        ours.mkdir(parents=True)
        temporary = ours / ".records"
        digest = work.write_durably(temporary, work.EXPORT)
        temporary.rename(ours / f"records-{digest}.jsonl")
        manifest = {
            "schema": 1, "kind": self.member.role, "instance": self.member.name, "checkpoint_id": checkpoint_id,
            "records_file": f"records-{digest}.jsonl", "records_sha256": digest, "record_count": 1,
        }  # fmt: skip
        text = json.dumps(manifest, sort_keys=True).encode()
        temporary = ours / ".manifest"
        work.write_durably(temporary, text)
        os.link(temporary, ours / "manifest.json")
        temporary.unlink()
        work.sync_directory(ours)
        return Committed(
            phase="committed", manifest=manifest, manifest_sha256=hashlib.sha256(text).hexdigest(), episode_ids=["r-1"]
        )

    async def resume(self, asked: Asked) -> Resumed:
        async with self._lock:
            known = asked.checkpoint_id in self.resumed
            if not known:
                self.resumed = [*self.resumed[-63:], asked.checkpoint_id]
            if self.checkpoint_id == asked.checkpoint_id:
                self.phase, self.checkpoint_id, self.committed = "idle", "", None
            return Resumed(phase=self.phase, idempotent=known)


def application(by_port: dict[int, Participant]) -> FastAPI:
    """One application for all participants of this process; the port says which one is meant."""
    app = FastAPI()
    prefix = "/ng-control/v1/checkpoint"

    def me(request: Request) -> Participant:
        return by_port[request.scope["server"][1]]

    @app.post(f"{prefix}/prepare")
    async def prepare(asked: Prepare, request: Request) -> Prepared:
        return await me(request).prepare(asked)

    @app.get(f"{prefix}/status")
    async def status(request: Request) -> Prepared:
        return me(request).status()

    @app.post(f"{prefix}/commit")
    async def commit(asked: Commit, request: Request) -> Committed:
        return await me(request).commit(asked)

    @app.post(f"{prefix}/resume")
    async def resume(asked: Asked, request: Request) -> Resumed:
        return await me(request).resume(asked)

    return app


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(json.dumps(self.ports), flush=True)

    ports: dict[str, int]


def main(plan: str) -> None:
    raise_descriptor_limit()
    sockets: list[socket.socket] = []
    by_port: dict[int, Participant] = {}
    for name, role in json.loads(plan):
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)
        by_port[listening.getsockname()[1]] = Participant(work.Member(name, role))
    # Keep-alive for longer than a benchmark, so that the peer pays for no new connection.
    config = uvicorn.Config(application(by_port), log_level="warning", access_log=False, timeout_keep_alive=3600)
    server = Server(config)
    server.ports = {participant.member.name: port for port, participant in by_port.items()}
    server.run(sockets)


if __name__ == "__main__":
    main(sys.argv[1])
