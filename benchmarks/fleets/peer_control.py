"""The peer's coordinator: aiohttp, one POST for each phase and participant, in the same order, stage after stage.

    python -m benchmarks.fleets.peer_control '[["agent-0", "agent", 40001], ...]'

Each line on standard input, {"id": ..., "directory": ..., "waits": "upstream"}, takes one checkpoint from prepare to resume
and is answered with {"elapsed_s": ...}. What `waits` may be:

    upstream   as upstream has them: prepare is asked once, status each second until it is ready
    retries    as its first generation has them for agents: prepare is repeated each 0.1 s until it is ready
    longpoll   the best case that upstream does not have: prepare is answered when it is ready

A participant's manifest is read back and compared, and one manifest of all is published before resume, as upstream does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleets import work
from benchmarks.fleets.processes import raise_descriptor_limit

PREFIX = "/ng-control/v1/checkpoint"
RETRY_S = 0.1
READINESS_POLL_S = 1.0
DEADLINE_S = 120.0


class Control:
    """One fleet's control."""

    def __init__(self, fleet: list[tuple[str, str, int]], http: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._http = http

    async def checkpoint(self, checkpoint_id: str, directory: Path, waits: str) -> float:
        """From prepare to resume; the seconds it took."""
        began = time.perf_counter()
        asked = {"checkpoint_id": checkpoint_id, "deadline_ts": time.time() + DEADLINE_S}
        for stage in self._stages(work.PREPARE_ORDER):
            await asyncio.gather(*(self._prepare(port, asked, waits) for _, _, port in stage))
        commit = {**asked, "checkpoint_dir": str(directory)}
        committed: dict[str, dict[str, Any]] = {}
        for stage in self._stages(work.COMMIT_ORDER):
            replies = await asyncio.gather(*(self._post(port, "commit", commit) for _, _, port in stage))
            committed |= {name: reply for (name, _, _), reply in zip(stage, replies, strict=True)}
        await asyncio.to_thread(self._publish, checkpoint_id, directory, committed)
        for stage in self._stages(work.OPEN_ORDER):
            await asyncio.gather(*(self._post(port, "resume", asked) for _, _, port in stage))
        return time.perf_counter() - began

    async def _prepare(self, port: int, asked: dict[str, Any], waits: str) -> None:
        body = {**asked, "wait": True} if waits == "longpoll" else asked
        reply = await self._post(port, "prepare", body)
        while not reply["report"]["ready"]:
            if waits == "retries":
                await asyncio.sleep(RETRY_S)
                reply = await self._post(port, "prepare", body)
            else:
                await asyncio.sleep(READINESS_POLL_S)
                async with self._http.get(f"http://127.0.0.1:{port}{PREFIX}/status") as response:
                    reply = await response.json()

    async def _post(self, port: int, what: str, body: dict[str, Any]) -> Any:
        async with self._http.post(f"http://127.0.0.1:{port}{PREFIX}/{what}", json=body) as response:
            reply = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{what} at port {port}: {response.status} {reply}")
            return reply

    def _publish(self, checkpoint_id: str, directory: Path, committed: dict[str, dict[str, Any]]) -> None:
        for name, role, _ in self._fleet:
            text = (directory / "gym" / role / name / "manifest.json").read_bytes()
            if hashlib.sha256(text).hexdigest() != committed[name]["manifest_sha256"]:
                raise RuntimeError(f"the manifest of {name} is not the one it committed")
        temporary = directory / ".gym_checkpoint"
        episodes = {name: reply["episode_ids"] for name, reply in committed.items()}
        outer = {"schema": 2, "checkpoint_id": checkpoint_id, "instances": episodes}
        work.write_durably(temporary, json.dumps(outer).encode())
        temporary.rename(directory / "gym_checkpoint.json")
        work.sync_directory(directory)

    def _stages(self, order: Iterable[str]) -> Iterator[list[tuple[str, str, int]]]:
        for role in order:
            stage = [member for member in self._fleet if member[1] == role]
            if stage:
                yield stage


async def main(plan: str) -> None:
    raise_descriptor_limit()
    lines: asyncio.StreamReader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3600)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        control = Control([tuple(each) for each in json.loads(plan)], http)
        print("{}", flush=True)
        while line := await lines.readline():
            asked = json.loads(line)
            elapsed = await control.checkpoint(asked["id"], Path(asked["directory"]), asked["waits"])
            print(json.dumps({"elapsed_s": elapsed}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
