"""A TCP forwarder that can stop one direction: bytes are taken and go nowhere, and no connection is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class OneWay:
    """Listens at `host`:`port` and forwards to `to`:`port`. The switches may be set at any time."""

    def __init__(self, host: str, port: int, to: str) -> None:
        self._host, self._port, self._to = host, port, to
        self.drop_requests = False
        self.drop_replies = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> OneWay:
        self._server = await asyncio.start_server(self._serve, self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection(self._to, self._port)
        for source, sink, drops in (
            (reader, out, lambda: self.drop_requests),
            (there, writer, lambda: self.drop_replies),
        ):
            task = asyncio.create_task(self._pass_on(source, sink, drops))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, drops: Callable[[], bool]) -> None:
        try:
            while chunk := await source.read(1 << 16):
                if not drops():
                    sink.write(chunk)
                    await sink.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            with contextlib.suppress(ConnectionError, OSError, RuntimeError):
                sink.close()
