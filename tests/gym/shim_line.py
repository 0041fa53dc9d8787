"""The shim's end of the gate's line, for tests of the gate: listens on `gate.sock`, asks, collects events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any


class Line:
    """One connected gate."""

    def __init__(self, hello: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.hello = hello
        self.events: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self._writer = writer
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, op: str, within_s: float = 10.0, **params: Any) -> dict[str, Any]:
        """The gate's answer; raises AssertionError with what it refused."""
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        self._writer.write(json.dumps({"id": self._number, "op": op, "params": params}).encode() + b"\n")
        message = await asyncio.wait_for(answer, within_s)
        if "error" in message:
            raise AssertionError(message["error"])
        return message["ok"]

    async def status_when(self, wanted: Any, within_s: float = 20.0) -> dict[str, Any]:
        """The first pushed status for which `wanted` holds."""
        async with asyncio.timeout(within_s):
            seen = 0
            while True:
                for event in self.events[seen:]:
                    if event.get("event") == "status" and wanted(event["status"]):
                        return event["status"]
                seen = len(self.events)
                self.news.clear()
                await self.news.wait()

    def take(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self.events.append(message)
            self.news.set()
        elif "progress" in message:
            return  # the answer is still to come
        elif message["id"] in self._waiting and not self._waiting[message["id"]].done():
            self._waiting.pop(message["id"]).set_result(message)

    def hang_up(self) -> None:
        self._writer.close()


class ShimLine:
    """Listens like a shim. `lines`: worker_id to its gate."""

    def __init__(self, life: Path) -> None:
        self.path = life / "gate.sock"
        self.lines: dict[str, Line] = {}
        self._joined = asyncio.Condition()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> ShimLine:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=64 << 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Like a shim that was killed: gone, with the socket file left behind."""
        if self._server is not None:
            self._server.close()
            for line in self.lines.values():
                line.hang_up()
            self._server = None

    async def worker(self, name: str = "worker-0", within_s: float = 20.0) -> Line:
        """The gate of a worker, once it has dialled in."""
        async with asyncio.timeout(within_s), self._joined:
            await self._joined.wait_for(lambda: name in self.lines)
            return self.lines[name]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line: Line | None = None
        try:
            while raw := await reader.readline():
                message = json.loads(raw)
                if "hello" in message:
                    line = Line(message["hello"], writer)
                    async with self._joined:
                        self.lines[line.hello["worker_id"]] = line
                        self._joined.notify_all()
                elif line is not None:
                    line.take(message)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
