"""Reading what vLLM streams, and the HTTP around it.

The rule: a stream is read as it comes, from the moment its head is there, and each chunk is recorded in the step in which
it was read. Whoever passes chunks on takes them when it may; the reader never waits for that. What piles up is bounded by
the generation itself, as it is inside vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, cast

from participant_shims.engine.record import Piece, Record
from participant_shims.engine.request import Json
from participant_shims.proxy_http import Body, BrokenMessage, End, Head, Messages

MAX_BODY_BYTES: Final = 256 << 20
REWRITTEN: Final = frozenset({b"content-length", b"transfer-encoding", b"connection", b"expect", b"accept-encoding"})
Chunks = AsyncIterator[tuple[Json, Piece]]


class Failure(Exception):
    """The engine reported an error inside its stream; `event` is what it said."""

    def __init__(self, event: Json) -> None:
        super().__init__(str(event)[:200])
        self.event = event


class Stream:
    """One response that is read and recorded from now on. `understand` says what a chunk means; `on_bytes` is called
    when something came."""

    def __init__(
        self,
        messages: Messages,
        record: Record,
        understand: Callable[[Json, bytes], Piece],
        on_bytes: Callable[[], None],
    ) -> None:
        self._messages, self._record = messages, record
        self._understand, self._on_bytes = understand, on_bytes
        self._waiting: asyncio.Queue[tuple[Json, Piece] | BaseException | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())

    async def chunks(self) -> Chunks:
        """Each chunk with what it means. Raises Failure, ConnectionError, BrokenMessage, after what came before it."""
        try:
            while True:
                item = await self._waiting.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for raw in self._events():
                chunk = cast(Json, json.loads(raw))
                if "error" in chunk and "choices" not in chunk:
                    raise Failure(chunk)
                piece = self._understand(chunk, b"data: %s\n\n" % raw)
                _take_head(self._record, chunk)
                self._record.add(piece)
                self._waiting.put_nowait((chunk, piece))
        except (OSError, BrokenMessage, Failure) as error:
            self._waiting.put_nowait(error)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            self._waiting.put_nowait(BrokenMessage(f"no stream of vLLM: {error!r}"))
        else:
            self._waiting.put_nowait(None)

    async def _events(self) -> AsyncIterator[bytes]:
        """The data of each event, to the end of the response."""
        rest = b""
        done = False
        while True:
            event = await self._messages.next()
            if isinstance(event, End):
                if not done:
                    raise ConnectionResetError("vLLM ended its stream in the middle")
                return
            if not isinstance(event, Body):
                raise ConnectionResetError("vLLM closed the connection inside its stream")
            self._on_bytes()
            *whole, rest = (rest + event.data).replace(b"\r\n", b"\n").split(b"\n\n")
            for raw in whole:
                if raw == b"data: [DONE]":
                    done = True
                elif raw.startswith(b"data: "):
                    yield raw[6:]


def _take_head(record: Record, chunk: Json) -> None:
    """What only the first or the last chunk says."""
    if not record.served_id:
        record.served_id, record.model = str(chunk.get("id") or ""), str(chunk.get("model") or "")
        record.created = int(chunk.get("created") or record.created)
    if not record.prompt_ids:
        choices = cast("list[Json]", chunk.get("choices") or [{}])
        record.prompt_ids = tuple(chunk.get("prompt_token_ids") or choices[0].get("prompt_token_ids") or ())
    if chunk.get("usage"):
        record.usage = cast(Json, chunk["usage"])
    record.fingerprint = chunk.get("system_fingerprint") or record.fingerprint


def rewritten(head: Head, url: bytes, body: bytes) -> Head:
    """The same head for another body."""
    kept = [(name, value) for name, value in head.headers if name.lower() not in REWRITTEN]
    kept.append((b"content-length", b"%d" % len(body)))
    return Head(kept, head.method, url, head.status, head.phrase, keep_alive=head.keep_alive)


async def pieces(messages: Messages, first: Sequence[Body | End]) -> AsyncIterator[bytes]:
    """A message's body: what has been taken already, then the rest. Raises BrokenMessage for an unfinished one."""
    size = 0
    waiting = iter(first)
    while True:
        event: Any = next(waiting, None) or await messages.next()
        if isinstance(event, End):
            return
        if not isinstance(event, Body):
            raise BrokenMessage("the message ended inside its body")
        size += len(event.data)
        if size > MAX_BODY_BYTES:
            raise BrokenMessage("the body is too long")
        yield event.data


async def nothing() -> Chunks:
    """No chunks."""
    none: tuple[tuple[Json, Piece], ...] = ()
    for chunk in none:
        yield chunk
