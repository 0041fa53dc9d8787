"""A closed loop of requests: so many connections, each sends its next request when the last one was answered.

Raw sockets and no HTTP library, so that the server is the slower side.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.measure import percentile

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
END_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """What came of one run: how many answers, how many a second, how long one took; `cpu_s` of the server for each."""

    requests: int
    per_s: float
    p50_s: float
    p99_s: float
    cpu_s: float = 0.0


def request(port: int, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{port}", "content-type: application/json",
             f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + body


async def closed_loop(port: int, make: Callable[[], bytes], connections: int, seconds: float) -> Served:
    """Ask for so many seconds. Raises RuntimeError when an answer is not 200."""
    took: list[float] = []
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    callers = [_Caller(make, began + seconds, took) for _ in range(connections)]
    links = [await loop.create_connection(lambda caller=caller: caller, "127.0.0.1", port) for caller in callers]
    async with asyncio.timeout(seconds + END_WITHIN_S):
        await asyncio.gather(*(caller.done for caller in callers))
    elapsed = time.perf_counter() - began
    for transport, _ in links:
        transport.close()
    return Served(len(took), len(took) / elapsed, percentile(took, 0.5), percentile(took, 0.99))


class _Caller(asyncio.Protocol):
    def __init__(self, make: Callable[[], bytes], until: float, took: list[float]) -> None:
        self._make, self._until, self._took = make, until, took
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        found = _LENGTH.search(head + b"\r\n")
        if found is None or not head.startswith(b"HTTP/1.1 200"):
            self._fail(f"answered with {self._buffer[:300]!r}")
        elif len(body) >= int(found[1]):
            self._buffer = b""
            now = time.perf_counter()
            self._took.append(now - self._sent_at)
            if now < self._until:
                self._send()
            elif not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection lost: {exc}")

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._make())

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))
