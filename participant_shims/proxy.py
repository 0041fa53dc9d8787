"""A reverse proxy with the gate's doors, for servers that can't be loaded into.

The rule: it never rejects, never invents a response and never sends anything twice. A request parks at the closed doors
with its body off the wire; one whose client leaves meanwhile is never sent. A response that is ready is held until the
doors open, a stream before its next piece. An upstream connection that is lost is passed on as a lost connection: the
callers know how to treat that, and a status of ours they would take for the server's. The one exception is the gate's
own: a call of an attempt that a restore has replaced is answered 409. Whoever closes a connection after an answer has
said so in that answer: a client that keeps connections would write its next request into one that is just going.

GET, HEAD, OPTIONS and websockets pass untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any, Final, cast

from coordinator.wire.errors import Reason, Refused, refuse
from participant_shims.admission import ANONYMOUS, Doors, Entry
from participant_shims.identity import CallIdentity, from_headers
from participant_shims.proxy_http import (
    READ_BYTES,
    Body,
    BrokenMessage,
    End,
    Head,
    Messages,
    encode_body,
    encode_end,
    load_httptools,
)

log = logging.getLogger(__name__)

UNGATED: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})
MAX_PARKED_BODY: Final = 16 << 20  # what a parked request may keep in memory; the rest waits in its socket
# A server that closes idle connections may be doing so just now; a connection is used again only while it is warm.
WARM_S: Final = 2.0
LINGER_S: Final = 2.0  # how long a client that was answered early may go on sending before its connection is cut
LOST: Final = (ConnectionError, BrokenMessage, asyncio.IncompleteReadError, OSError)


class Link(asyncio.StreamReaderProtocol):
    """A connection with an event for "the peer has gone", which also comes while nobody reads.

    `sink`: gets what comes in the step in which it comes, instead of the reader. `on_gone`: called when the peer goes.
    """

    def __init__(self, on_connected: Callable[[Link], None] | None = None) -> None:
        self.reader = asyncio.StreamReader(READ_BYTES * 2)
        super().__init__(self.reader)
        self.gone = asyncio.Event()
        self._slow = False
        self._transport: asyncio.Transport | None = None
        self.writer: asyncio.StreamWriter | None = None
        # Looked up once: asyncio asks the system for the process's id each time that it says which loop runs.
        self.loop = asyncio.get_running_loop()
        self.sink: Callable[[bytes], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        self._on_connected = on_connected

    def data_received(self, data: bytes) -> None:
        if self.sink is not None:
            self.sink(data)
        else:
            super().data_received(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Not asked whether it is an asyncio.Transport: uvloop's is of no class of asyncio's.
        self._transport = its = cast(asyncio.Transport, transport)
        self.writer = asyncio.StreamWriter(its, self, self.reader, self.loop)
        if self._on_connected is not None:
            self._on_connected(self)

    def eof_received(self) -> bool | None:
        self._went()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._went()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._slow = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._slow = False
        super().resume_writing()

    def _went(self) -> None:
        self.gone.set()
        if self.on_gone is not None:
            self.on_gone()

    async def send(self, data: bytes) -> None:
        """Write, and wait while the peer is slow. Raises ConnectionError when it is gone."""
        if data:
            transport = self._transport
            assert transport is not None  # set when the connection was made
            transport.write(data)
            if self._slow or transport.is_closing():  # else there is nothing to wait for
                await self.drained()

    def write(self, data: bytes) -> None:
        """Write, whether the peer is slow or not: for what is bounded anyway."""
        assert self._transport is not None
        self._transport.write(data)

    async def drained(self) -> None:
        """Wait while the peer is slow. Raises ConnectionError when it is gone."""
        assert self.writer is not None
        await self.writer.drain()

    def drop(self, *, now: bool) -> None:
        """Close; `now` without sending what is buffered, which the peer sees as a lost connection."""
        if self.writer is not None:
            if now:
                self.writer.transport.abort()
            else:
                self.writer.close()


class Upstream:
    """Our connection to the server, made for one client."""

    def __init__(self, link: Link, messages: Messages) -> None:
        self.link = link
        self.messages = messages
        self.fresh = True  # nobody was answered on it yet, so that its other end does not take it for an idle one
        self._over = False
        self._used_at = link.loop.time()

    @property
    def warm(self) -> bool:
        """Whether it may be used once more."""
        return not self._over and not self.link.gone.is_set() and self.link.loop.time() - self._used_at < WARM_S

    def used(self, *, again: bool = True) -> None:
        """An answer has come on it to its end; not `again`: its other end closes it now."""
        self.fresh, self._over = False, not again
        self._used_at = self.link.loop.time()


def not_bound(listen: str, error: OSError) -> Refused:
    """What is raised where a proxy cannot listen. Nothing was started."""
    return refuse(
        Reason.UNAVAILABLE, f"{listen}, where callers are to reach this server, cannot be bound: {error.strerror}.",
        next_step="Stop what listens there, or take another address; port 0 takes a free one.",
    )  # fmt: skip


class Proxy:
    """Listens at `listen`, passes on to `upstream` (both host:port). `is_stale` tells calls of replaced attempts."""

    def __init__(
        self, listen: str, upstream: str, doors: Doors, is_stale: Callable[[CallIdentity], bool] = lambda call: False
    ) -> None:
        self._listen = listen
        self._upstream = upstream.removeprefix("http://").rstrip("/")
        self._doors = doors
        self._is_stale = is_stale
        self._tools = load_httptools()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.on_call: Callable[[CallIdentity], None] = lambda call: None
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises OSError when the place is taken."""
        host, _, port = self._listen.rpartition(":")
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Link(self._accept), host or "127.0.0.1", int(port)
        )
        bound: Any = self._server.sockets[0].getsockname()
        self.address = f"{host or '127.0.0.1'}:{bound[1]}"

    async def stop(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _accept(self, client: Link) -> None:
        task = asyncio.create_task(self._serve(client))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, client: Link) -> None:
        requests = Messages(client.reader, self._tools, responses=False)
        upstream: Upstream | None = None
        lost = True
        try:
            while True:
                event = await requests.next()
                if event is None:
                    lost = False
                    return
                if not isinstance(event, Head):
                    raise BrokenMessage("a body without a head")
                before, after = upstream, await self._exchange(client, requests, event, upstream)
                upstream = after
                if before is not None and before is not after:
                    before.link.drop(now=True)
                if after is None:
                    await self._linger(client)
                    lost = False
                    return
        except LOST as error:
            log.debug("a connection ended: %r", error)
        except asyncio.CancelledError:
            pass  # the proxy ends
        finally:
            client.drop(now=lost)
            if upstream is not None:
                upstream.link.drop(now=True)

    async def _exchange(
        self, client: Link, requests: Messages, head: Head, upstream: Upstream | None
    ) -> Upstream | None:
        """One request and its response. Our connection for the next one, warm or not; None when the client's ends.

        What it dials and does not return it drops. Raises what is in LOST when either side is lost: both are dropped then.
        """
        ours = head.ours()
        call = from_headers(ours) if ours else None
        if call is not None and self._is_stale(call):
            await self._refuse_stale(client, call)
            return None
        entry: Entry | None = None
        if head.method not in UNGATED and not head.upgrade:
            what = f"{head.method.decode('latin-1')} {head.url.decode('latin-1')}"[:256]
            entry = self._doors.enter(
                call.rollout_id if call else ANONYMOUS, call.attempt if call else 0, waiting_on=what
            )
        fresh: Upstream | None = None
        again: Upstream | None = None
        try:
            parked: list[Body | End] = []
            if entry is not None and not await self._pass_doors(client, requests, entry, parked):
                raise ConnectionResetError("the client left while its request was parked")
            if call is not None:
                self.on_call(call)  # only now: a request that was never sent has touched nothing
            if upstream is None or not upstream.warm:
                if upstream is not None:
                    upstream.link.drop(now=True)
                fresh = upstream = await self._dial()
            if head.upgrade:
                await self._tunnel(client, requests, head, upstream)
                return None
            again = await self._relay(client, requests, head, upstream, entry, parked)
            return again
        finally:
            if fresh is not None and fresh is not again:
                fresh.link.drop(now=True)
            if entry is not None:
                self._doors.leave(entry)

    async def _pass_doors(self, client: Link, requests: Messages, entry: Entry, parked: list[Body | End]) -> bool:
        """Wait at the doors, taking the body off the wire meanwhile. False when the client left first."""
        admitted = asyncio.create_task(self._doors.admitted(entry))
        leaving = asyncio.create_task(client.gone.wait())
        reading: asyncio.Task[Any] | None = None
        size = 0
        complete = False
        try:
            while not admitted.done():
                if reading is None and not complete and size < MAX_PARKED_BODY:
                    reading = asyncio.create_task(requests.next())
                waits: set[asyncio.Task[Any]] = {admitted, leaving, *([reading] if reading else [])}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and reading.done():
                    event, reading = reading.result(), None
                    if event is None:
                        self._doors.abandon(entry)
                        await admitted
                        return False
                    parked.append(event)
                    size += len(event.data) if isinstance(event, Body) else 0
                    complete = isinstance(event, End)
                if leaving.done() and not admitted.done():
                    self._doors.abandon(entry)
                    return await admitted
            return admitted.result()
        finally:
            leaving.cancel()
            if reading is not None:
                # A read that is under way must not lose what it gets: it is ended before anybody else reads.
                reading.cancel()
                await asyncio.wait({reading})
                if not reading.cancelled() and reading.exception() is None and reading.result() is not None:
                    parked.append(reading.result())
            if not admitted.done():
                admitted.cancel()

    async def _relay(
        self, client: Link, requests: Messages, head: Head, upstream: Upstream, entry: Entry | None,
        parked: list[Body | End],
    ) -> Upstream | None:  # fmt: skip
        sending = asyncio.create_task(self._send_request(requests, head, upstream.link, parked))
        leaving = asyncio.create_task(client.gone.wait())
        answering = asyncio.create_task(self._send_response(client, upstream, head, entry, sending))
        tasks: set[asyncio.Task[Any]] = {sending, leaving, answering}
        try:
            await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise ConnectionResetError("the client left before its response")
            if not answering.result():
                return None
            sending.result()
            upstream.used()
            return upstream if head.keep_alive else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _send_request(requests: Messages, head: Head, to: Link, parked: list[Body | End]) -> None:
        await to.send(head.encode())
        waiting = iter(parked)
        while True:
            event: Any = next(waiting, None) or await requests.next()
            if isinstance(event, Body):
                await to.send(encode_body(event.data, head.chunked))
            elif isinstance(event, End):
                await to.send(encode_end(event, head.chunked))
                return
            else:
                raise BrokenMessage("the request ended inside its body")

    async def _send_response(
        self, client: Link, upstream: Upstream, request: Head, entry: Entry | None,
        sending: asyncio.Task[None] | None = None,
    ) -> bool:  # fmt: skip
        """Pass the response on. Whether both connections can be used again; the client was told when its can't.

        It can't when the server answers before `sending` is done: the rest of the request may never come.
        """
        messages = upstream.messages
        while True:
            head = await messages.next()
            if not isinstance(head, Head):
                raise ConnectionResetError("the server closed the connection before its response")
            await self._hold(entry)
            if not 100 <= head.status < 200:
                if sending is not None and not sending.done():
                    head.say_close()
                await client.send(head.encode())
                break
            await client.send(head.encode())
            await messages.next()  # the end of an interim response
        until_close = head.ends_with_connection(request.method)
        if not head.response_has_body(request.method):
            messages.end_without_body()
            return head.keep_alive
        while True:
            event = await messages.next()
            if isinstance(event, Body):
                await self._hold(entry)
                await client.send(encode_body(event.data, head.chunked))
            elif isinstance(event, End):
                await client.send(encode_end(event, head.chunked))
                return head.keep_alive and not until_close
            elif event is None and until_close:
                return False
            else:
                raise ConnectionResetError("the server closed the connection inside its response")

    async def _linger(self, client: Link) -> None:
        """End our side. The client may still be sending: a socket that is closed with unread bytes is reset, and takes the
        answer with it."""
        assert client.writer is not None
        if client.gone.is_set() or not client.writer.can_write_eof():
            return
        client.writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while await client.reader.read(READ_BYTES):
                    pass

    async def _hold(self, entry: Entry | None) -> None:
        if entry is not None:
            await self._doors.hold(entry)

    async def _tunnel(self, client: Link, requests: Messages, head: Head, upstream: Upstream) -> None:
        """A websocket. When the server will not have it, the connection ends with its answer: what came after it would be HTTP,
        and has to pass the doors."""
        messages = upstream.messages
        await upstream.link.send(head.encode())
        answer = await messages.next()
        if not isinstance(answer, Head):
            raise ConnectionResetError("the server closed the connection before its response")
        if answer.status != 101:
            answer.say_close()
            messages.put_back(answer)
            await self._send_response(client, upstream, head, None)
            return
        await upstream.link.send(requests.raw)
        await client.send(answer.encode() + messages.raw)

        async def pump(source: asyncio.StreamReader, to: Link) -> None:
            while data := await source.read(READ_BYTES):
                await to.send(data)

        both = {
            asyncio.create_task(pump(client.reader, upstream.link)),
            asyncio.create_task(pump(upstream.link.reader, client)),
        }
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            upstream.link.drop(now=False)

    async def _dial(self) -> Upstream:
        host, _, port = self._upstream.rpartition(":")
        _, link = await asyncio.get_running_loop().create_connection(Link, host, int(port))
        return Upstream(link, Messages(link.reader, self._tools, responses=True))

    @staticmethod
    async def _refuse_stale(client: Link, call: CallIdentity) -> None:
        message = f"Attempt {call.attempt} of {call.rollout_id} has been replaced."
        body = json.dumps({"error": {"reason": "STALE_ATTEMPT", "message": message}}).encode()
        await client.send(
            b"HTTP/1.1 409 Conflict\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
