"""The least that a proxy in Python can do: bytes from one socket to the other, on asyncio, unread.

    python -m tests.vllm.bare_pump HOST:PORT [uvloop]     prints its port

What a proxy that reads costs more than this one is its own; what this one costs no proxy on asyncio is spared.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Coroutine
from typing import Any, cast


class Side(asyncio.Protocol):
    """One of two connections; what comes here leaves at `other`."""

    def __init__(self, upstream: tuple[str, int] | None = None) -> None:
        self.upstream = upstream
        self.other: asyncio.Transport | None = None
        self.early: list[bytes] = []
        self.dialling: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.upstream is not None:
            self.dialling = asyncio.get_running_loop().create_task(self.dial(*self.upstream))

    async def dial(self, host: str, port: int) -> None:
        transport, side = await asyncio.get_running_loop().create_connection(Side, host, port)
        side.other, self.other = self.transport, transport
        transport.write(b"".join(self.early))

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


async def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Side((host, int(port))), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def run(work: Coroutine[Any, Any, None]) -> None:
    if "uvloop" in sys.argv:
        with asyncio.Runner(loop_factory=importlib.import_module("uvloop").new_event_loop) as runner:
            runner.run(work)
    else:
        asyncio.run(work)


if __name__ == "__main__":
    run(main())
