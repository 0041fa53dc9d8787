"""Reading what vLLM streams, and the HTTP around it.

The rule: a stream is read as it comes, and each chunk is recorded in the step in which its bytes arrive. What may be passed
on is passed on in the same step, without a task that has to wake up first; what may not waits in order. The reader never
waits for a caller. What piles up is bounded by the generation itself, as it is inside vLLM.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

from participant_shims.engine.record import Piece, Record
from participant_shims.engine.request import Json
from participant_shims.engine.text import loads
from participant_shims.proxy import Upstream
from participant_shims.proxy_http import Body, BrokenMessage, End, Head, Messages

MAX_BODY_BYTES: Final = 256 << 20
REWRITTEN: Final = frozenset({b"content-length", b"transfer-encoding", b"connection", b"expect", b"accept-encoding"})
Chunks = AsyncIterator[tuple[Json, Piece]]
Encode = Callable[[Json, Piece], bytes]
Write = Callable[[bytes, bool], None]  # and whether the stream has ended


class Failure(Exception):
    """The engine reported an error inside its stream; `event` is what it said."""

    def __init__(self, event: Json) -> None:
        super().__init__(str(event)[:200])
        self.event = event


class Refusal(Exception):
    """The engine answered something else than a stream; nothing has been generated."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(head.status)
        self.head, self.body = head, body


class Stream:
    """The response to the request that is about to be written to `upstream`, read and recorded from now on.

    `understand` says what a chunk means; `on_bytes` is called when something came. Ends with `close()`.
    """

    def __init__(
        self, upstream: Upstream, record: Record, understand: Callable[[Json, bytes], Piece], on_bytes: Callable[[], None]
    ) -> None:  # fmt: skip
        self._messages, self._link = upstream.messages, upstream.link
        self._record, self._understand, self._on_bytes = record, understand, on_bytes
        self._head: Head | None = None
        self._refused: list[bytes] | None = None
        self._rest: bytes = b""
        self._done = False
        self._over = False
        self._error: Exception | None = None
        self._waiting: deque[tuple[Json, Piece]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._keeps = True  # whether chunks wait for somebody; whole answers are made from the record
        self._direct: tuple[Encode, Write, Callable[[], bool]] | None = None
        self._told: list[bytes] = []  # by this step, directly
        self._told_end = False
        self._came = False
        self._link.sink, self._link.on_gone = self._feed, self._lost
        if self._link.gone.is_set():
            self._lost()

    async def head(self) -> Head:
        """The head of the stream. Raises Refusal, ConnectionError, BrokenMessage."""
        while not self._over and (self._head is None or self._refused is not None):
            await self._change()
        if self._error is not None and (self._head is None or self._refused is not None):
            raise self._error
        assert self._head is not None
        return self._head

    async def whole(self) -> None:
        """Wait for the end; the record has what was said. Raises Failure, ConnectionError, BrokenMessage."""
        self._keeps = False
        self._waiting.clear()
        while not self._over:
            await self._change()
        if self._error is not None:
            raise self._error

    async def chunks(self) -> Chunks:
        """Each chunk with what it means. Raises Failure, ConnectionError, BrokenMessage, after what came before it."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._over:
                if self._error is not None:
                    raise self._error
                return
            await self._change()

    async def pass_on(
        self, encode: Encode, write: Write, may: Callable[[], bool], hold: Callable[[], Awaitable[Any]]
    ) -> None:
        """Pass every chunk on by `write`, as `encode` has it: at once while `may()`, else after `hold()`.

        `write` gets what came together in one, first of all what is there at the beginning, if only nothing, and learns
        with the last of it that the stream has ended well. Raises as `chunks` does.
        """
        begun = False
        while True:
            await hold()
            told = b"".join([encode(chunk, piece) for chunk, piece in self._waiting])
            self._waiting.clear()
            ended = self._over and self._error is None
            if told or ended or not begun:
                begun = True
                write(told, ended)
            if self._over:
                if self._error is not None:
                    raise self._error
                return
            self._direct = encode, write, may
            try:
                await self._change()
            finally:
                self._direct = None
            if self._told_end:  # nothing is left to be held
                return

    def close(self) -> None:
        """Read no more. Whoever wants the connection for something else has read to the end."""
        self._link.sink = self._link.on_gone = None

    # ---- called when something comes ------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        # A system call costs more than all the rest of a token: what comes in one step leaves in one.
        direct, self._came = self._direct, False
        try:
            events = self._messages.feed(data)
            said: list[bytes] = []  # pieces of the body that came together are read as one
            while events and not self._over:
                event = events.popleft()
                if isinstance(event, Body):
                    said.append(event.data)
                    continue
                if said:
                    self._take_body(said)
                    said.clear()
                self._take(event)
            if said:
                self._take_body(said)
        except (OSError, BrokenMessage, Failure) as error:
            self._end(error)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            self._end(BrokenMessage(f"no stream of vLLM: {error!r}"))
        if self._came:
            self._on_bytes()
        if direct is not None:
            # What waits is told first, by whoever waits for it, and the end after it.
            ended = self._over and self._error is None and not self._waiting and direct[2]()
            told = b"".join(self._told)
            self._told.clear()
            if told or ended:  # nothing is not written: a chunk of no bytes would be the end of the response
                self._told_end = ended
                direct[1](told, ended)

    def _lost(self) -> None:
        where = "inside its stream" if self._head is not None else "before its response"
        self._end(ConnectionResetError(f"vLLM closed the connection {where}"))

    def _take_body(self, said: list[bytes]) -> None:
        self._came = True
        if self._refused is None:
            self._read(said[0] if len(said) == 1 else b"".join(said))
            return
        self._refused += said
        if sum(map(len, self._refused)) > MAX_BODY_BYTES:
            raise BrokenMessage("the body is too long")

    def _take(self, event: Head | End) -> None:
        if isinstance(event, End):
            if self._refused is not None:
                assert self._head is not None
                self._end(Refusal(self._head, b"".join(self._refused)))
            elif self._head is not None and not 100 <= self._head.status < 200:
                self._end(None if self._done else ConnectionResetError("vLLM ended its stream in the middle"))
        else:
            self._head = event
            if event.status != 200 or b"event-stream" not in event.value(b"content-type"):
                self._refused = None if 100 <= event.status < 200 else []
            self._wake()

    def _read(self, data: bytes) -> None:
        """Record what a piece of the body says, to the last chunk that is complete in it."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        record, understand = self._record, self._understand
        whole = data.split(b"\n\n")
        self._rest = whole.pop()
        for raw in whole:
            if raw == b"data: [DONE]":
                self._done = True
            elif raw.startswith(b"data: "):
                chunk: Json = loads(raw[6:])
                if "error" in chunk and "choices" not in chunk:
                    raise Failure(chunk)
                piece = understand(chunk, raw + b"\n\n")
                _take_head(record, chunk)
                record.add(piece)
                direct = self._direct
                if direct is not None and direct[2]():
                    self._told.append(direct[0](chunk, piece))
                elif self._keeps:
                    self._direct = None  # what comes next comes after this one
                    self._waiting.append((chunk, piece))
        if self._waiting:
            self._wake()

    def _end(self, error: Exception | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self.close()
            self._wake()

    async def _change(self) -> None:
        self._waiter = self._link.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _take_head(record: Record, chunk: Json) -> None:
    """What only the first or the last chunk says."""
    if not record.served_id:
        record.served_id, record.model = str(chunk.get("id") or ""), str(chunk.get("model") or "")
        record.created = int(chunk.get("created") or record.created)
    if not record.prompt_ids:
        choices: list[Json] = chunk.get("choices") or [{}]
        record.prompt_ids = tuple(chunk.get("prompt_token_ids") or choices[0].get("prompt_token_ids") or ())
    usage: Json | None = chunk.get("usage")
    if usage:
        record.usage = usage
    fingerprint: str | None = chunk.get("system_fingerprint")
    if fingerprint:
        record.fingerprint = fingerprint


def rewritten(head: Head, url: bytes, body: bytes) -> Head:
    """The same head for another body."""
    kept = [(name, value) for name, value in head.headers if name.lower() not in REWRITTEN]
    kept.append((b"content-length", b"%d" % len(body)))
    return Head(kept, head.method, url, head.status, head.phrase, keep_alive=head.keep_alive)


def request_to(head: Head, url: bytes, body: bytes, request_id: str) -> bytes:
    """A request with another body, and an id if its caller gave none: one pass, since each request takes it."""
    lines = [b"%s %s HTTP/%s\r\n" % (head.method, url, head.version.encode())]
    named = False
    for header in head.headers:
        name = header[0].lower()
        if name not in REWRITTEN:
            lines.append(b"%s: %s\r\n" % header)
            named = named or (name == b"x-request-id" and bool(header[1]))
    if not named:
        lines.append(b"x-request-id: %s\r\n" % request_id.encode())
    lines.append(b"content-length: %d\r\n\r\n" % len(body))
    lines.append(body)
    return b"".join(lines)


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
