"""One HTTP call to the engine, on a connection of its own.

The rule: a connection is never used twice. vLLM closes idle ones after 5 s, and a request that is written into one that is
just being closed may or may not have been served. What is known of a call that failed is said: it was never sent, or
nobody knows.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any, Final, cast

from participant_shims.proxy_http import READ_BYTES, Body, BrokenMessage, End, Head, Messages, load_httptools

MAX_ANSWER_BYTES: Final = 256 << 20
API_KEY: Final = "VLLM_API_KEY"  # as vLLM itself is given it


class NotSent(Exception):
    """The engine can't be reached: it has not seen the call."""


class Unknown(Exception):
    """The call was written, and no answer came: it may have been served."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body. Raises ValueError."""
        return json.loads(self.body)

    def value(self, name: str) -> Any:
        """A member of a JSON object; None when it is none, or has no such member."""
        try:
            found = self.json()
        except ValueError:
            return None
        return cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None


async def call(target: str, method: str, path: str, body: Any = None, *, timeout_s: float) -> Answer:
    """Call `target` (host:port). `body` is sent as JSON.

    Raises NotSent when no connection could be made, Unknown when no whole answer came within `timeout_s` seconds.
    """
    host, _, port = target.rpartition(":")
    writer: asyncio.StreamWriter | None = None
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    try:
        try:
            async with asyncio.timeout_at(end):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=READ_BYTES * 2)
        except (OSError, TimeoutError) as error:
            raise NotSent(f"{target} can't be reached: {str(error) or 'no answer'}") from error
        try:
            async with asyncio.timeout_at(end):
                raw = b"" if body is None else json.dumps(body).encode()
                writer.write(_head(target, method, path, len(raw)) + raw)
                await writer.drain()
                return await _answer(reader)
        except TimeoutError as error:
            raise Unknown(f"{method} {path}: no answer within {timeout_s:.1f} s") from error
        except (OSError, BrokenMessage, EOFError) as error:
            raise Unknown(f"{method} {path}: the connection was lost") from error
    finally:
        if writer is not None:
            writer.transport.abort()


def _head(target: str, method: str, path: str, size: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {target}", "Accept: application/json", "Connection: close"]
    if key := os.environ.get(API_KEY):
        lines.append(f"Authorization: Bearer {key}")
    if size or method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {size}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _answer(reader: asyncio.StreamReader) -> Answer:
    messages = Messages(reader, load_httptools(), responses=True)
    head = await messages.next()
    if not isinstance(head, Head):
        raise EOFError
    until_close = head.ends_with_connection(b"POST")
    parts: list[bytes] = []
    size = 0
    while True:
        event = await messages.next()
        if isinstance(event, Body):
            parts.append(event.data)
            size += len(event.data)
            if size > MAX_ANSWER_BYTES:
                raise BrokenMessage("the answer is too long")
        elif isinstance(event, End) or (event is None and until_close):
            return Answer(head.status, b"".join(parts))
        else:
            raise EOFError
