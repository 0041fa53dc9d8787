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


Next = tuple[bytes, object] | None
Answered = Callable[[object, bytes], None]


async def closed_loop(
    port: int, make: Callable[[], Next], connections: int, seconds: float, answered: Answered | None = None
) -> Served:
    """Ask for so many seconds, or until `make` gives no more. `make` gives a request and what to call it when `answered`
    is told the head of its answer. Raises RuntimeError when an answer is not 200."""
    took: list[float] = []
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    callers = [_Caller(make, began + seconds, took, answered) for _ in range(connections)]
    links = [await loop.create_connection(lambda caller=caller: caller, "127.0.0.1", port) for caller in callers]
    async with asyncio.timeout(seconds + END_WITHIN_S):
        await asyncio.gather(*(caller.done for caller in callers))
    elapsed = time.perf_counter() - began
    for transport, _ in links:
        transport.close()
    return Served(len(took), len(took) / elapsed, percentile(took, 0.5), percentile(took, 0.99))


class _Caller(asyncio.Protocol):
    def __init__(self, make: Callable[[], Next], until: float, took: list[float], answered: Answered | None) -> None:
        self._make, self._until, self._took, self._answered = make, until, took, answered
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = b""
        self._sent_at = 0.0
        self._name: object = None

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
            self._took.append(time.perf_counter() - self._sent_at)
            if self._answered is not None:
                self._answered(self._name, head)
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection lost: {exc}")

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        following = self._make() if self._sent_at < self._until else None
        if following is None:
            if not self.done.done():
                self.done.set_result(None)
            return
        message, self._name = following
        self._transport.write(message)

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))
