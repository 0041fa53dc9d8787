"""gRPC without sockets: real stubs at one end, real servicers and interceptors at the other, a bad network between them.

The rule: messages of one call keep their order, as on one connection; everything else may be late, lost, repeated, or
overtake. A partition holds in one direction: what is under way is delivered when it heals, or never, and then the
connection breaks at both ends after the keepalive. A call whose process dies breaks at the other end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
from grpc import aio

from tests.simulation.loop import PROCESS, Process, SimLoop

KEEPALIVE_S = 20.0
REFUSED_S = 0.001


@dataclass
class Weather:
    """How bad the network is now. Rates are per message."""

    delay_s: tuple[float, float] = (0.0002, 0.003)
    lose: float = 0.0  # the connection breaks and this message with it
    late: float = 0.0  # it arrives up to `late_s` later
    late_s: float = 3.0
    twice: float = 0.0  # a request is served twice; the second answer reaches nobody
    cut: float = 0.0  # a message of a stream, and the stream with it
    blocked: dict[tuple[str, str], float] = field(default_factory=dict)  # (from host, to host) -> until


class Network:
    """Everybody's connections. `on_served(call, reply)` sees every message that a server sends."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loop, self.random = loop, random
        self.weather = Weather()
        self.servers: dict[str, SimServer] = {}
        self._next_port = 20_000
        self.ports: dict[str, int] = {}  # by process: of those that listen where the one before them did
        self.trace: Callable[[Process, str], None] = lambda process, text: None
        self.on_call: Callable[[ServerCall, Any], None] = lambda call, request: None
        self.on_reply: Callable[[ServerCall, Any], None] = lambda call, reply: None
        self.on_send: Callable[[Process, str, Any], None] = lambda process, name, request: None
        self.on_end: Callable[[ServerCall, Any, Any], None] = lambda call, code, trailers: None
        self.on_too_late: Callable[[ClientCall, ServerCall], None] = lambda call, served: None
        self.names: dict[str, Callable[[], str]] = {}
        self.aimed: dict[tuple[str, str], tuple[str, float]] = {}  # the next (method, to host): what happens to it
        self.bad_until = 0.0  # until when a message is lost or late
        self.settled_at = 0.0  # by then all that was sent has arrived, or its loss was noticed

    def port(self) -> int:
        self._next_port += 1
        return self._next_port

    def make_server(self, interceptors: Any = (), options: Any = ()) -> Any:
        return SimServer(self, list(interceptors))

    def dial(self, target: str) -> Any:
        return SimChannel(self, target)

    def way(self, source: Process, target: Process, last: float, call_lost: Callable[[], None]) -> float | None:
        """When a message that is sent now arrives, not before `last`; None when it never does."""
        weather, now = self.weather, self.loop.now
        until = weather.blocked.get((source.host, target.host), 0.0)
        when, lost_s = self._fate(until, last)
        self.settled_at = max(self.settled_at, now + lost_s if when is None else when)
        if when is None or when > max(last, now + weather.delay_s[1]):
            self.bad_until = max(self.bad_until, self.settled_at)
        if when is None:
            self.loop.after(lost_s, call_lost)
        return when

    def _fate(self, until: float, last: float) -> tuple[float | None, float]:
        """When a message arrives; or None, and after how many seconds its connection is found broken."""
        weather, random, now = self.weather, self.random, self.loop.now
        delay = random.uniform(*weather.delay_s)
        if weather.late and random.random() < weather.late:
            delay += random.uniform(0.0, weather.late_s)
        if until > now:
            if until - now < KEEPALIVE_S and random.random() < 0.6:
                return max(last, until + delay), 0.0
            return None, KEEPALIVE_S
        if weather.lose and random.random() < weather.lose:
            return None, random.uniform(0.001, 0.5)
        return max(last, now + delay), 0.0


class SimServer:
    """Stands in for aio.Server."""

    def __init__(self, network: Network, interceptors: list[Any]) -> None:
        self.network, self._interceptors = network, interceptors
        self.process = PROCESS.get()
        self.handlers: dict[str, Any] = {}
        self.address = ""
        self.serving = False
        self.calls: dict[ServerCall, None] = {}
        self._stopped = asyncio.Event()
        self.process.on_kill.append(self._die)

    def add_generic_rpc_handlers(self, handlers: Any) -> None: ...

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            self.handlers[f"/{service}/{name}"] = handler

    def add_insecure_port(self, bind: str) -> int:
        port = self.network.ports.get(self.process.name) or self.network.port()
        self.address = f"127.0.0.1:{port}"
        self.network.servers[self.address] = self
        return port

    async def start(self) -> None:
        self.serving = True

    async def stop(self, grace: float | None) -> None:
        self.serving = False
        for call in list(self.calls):
            call.broken()
        self._stopped.set()

    async def wait_for_termination(self) -> None:
        await self._stopped.wait()

    def _die(self) -> None:
        self.serving = False
        for call in list(self.calls):
            call.broken()

    async def handler_of(self, method: str) -> Any:
        async def last(details: Any) -> Any:
            return self.handlers.get(details.method)

        continuation = last
        for interceptor in reversed(self._interceptors):
            continuation = _through(interceptor, continuation)
        return await continuation(SimpleNamespace(method=method, invocation_metadata=()))


def _through(interceptor: Any, following: Any) -> Any:
    async def continuation(details: Any) -> Any:
        return await interceptor.intercept_service(following, details)

    return continuation


class ServerCall:
    """One call at the server. `client` is None for a repetition that nobody made."""

    def __init__(self, server: SimServer, method: str, timeout: float | None, client: ClientCall | None) -> None:
        self.server, self.method, self.client = server, method, client
        self.network, self.process = server.network, server.process
        self.name = method.rpartition("/")[2]
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.request: Any = None
        self._deadline = None if timeout is None else self.process.loop.now + timeout
        self._task: asyncio.Task[Any] | None = None
        self._last = 0.0
        self._over = self._unheard = False
        self._trailers: Any = ()
        self._code: Any = None
        self._details = ""
        server.calls[self] = None

    # ---- aio.ServicerContext ----------------------------------------------------------------------------------------------

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self.process.loop.now)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self._code, self._details, self._trailers = code, details, trailing_metadata
        raise aio.AbortError

    def invocation_metadata(self) -> Any:
        return ()

    def peer(self) -> str:
        return "unix:"

    # ---- life -------------------------------------------------------------------------------------------------------------

    def start(self, raw: bytes | None) -> None:
        self._task = self.process.spawn(self._serve(raw), f"serve {self.name}")
        left = self.time_remaining()
        if left is not None:
            self.process.loop.after(left, self.cancel)

    def lose_replies(self) -> None:
        """The connection breaks under the first reply."""
        self._unheard = True
        client = self.client
        if client is not None:
            self.network.loop.after(self.network.random.uniform(0.05, 1.5), client.unreachable)

    def cancel(self) -> None:
        """The client left, or the deadline is over."""
        if not self._over and self._task is not None and self.process.alive:
            self.process.soon(self._task.cancel)

    def broken(self) -> None:
        """The server or its process ends: its side of the connection breaks."""
        if self._over:
            return
        self._over = True
        self.server.calls.pop(self, None)
        client = self.client
        if client is not None:
            when = self.network.way(self.process, client.process, self._last, client.unreachable)
            if when is not None:
                self.network.loop.at(when, client.process, client.unreachable)
        if self._task is not None and self.process.alive:
            self.process.soon(self._task.cancel)

    async def _serve(self, raw: bytes | None) -> None:
        try:
            handler = await self.server.handler_of(self.method)
            if handler is None:
                self._end(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
                return
            argument: Any = self._stream(handler) if handler.request_streaming else handler.request_deserializer(raw)
            if not handler.request_streaming:
                # The interceptor reads the message itself, once it knows the caller.
                self.request = self.server.handlers[self.method].request_deserializer(raw)
                self.network.on_call(self, self.request)
            if handler.response_streaming:
                method = handler.stream_stream if handler.request_streaming else handler.unary_stream
                async for reply in method(argument, self):
                    self._reply(handler, reply)
            else:
                method = handler.stream_unary if handler.request_streaming else handler.unary_unary
                self._reply(handler, await method(argument, self))
            self._end(grpc.StatusCode.OK, "")
        except aio.AbortError:
            self._end(self._code, self._details)
        except asyncio.CancelledError:
            self._end(grpc.StatusCode.CANCELLED, "")
        except Exception as error:
            self.process.loop.failures.append(f"{self.name} at {self.process.name} raised {error!r}")
            self._end(grpc.StatusCode.UNKNOWN, repr(error))

    async def _stream(self, handler: Any) -> Any:
        while (raw := await self.requests.get()) is not None:
            yield handler.request_deserializer(raw)

    def _reply(self, handler: Any, reply: Any) -> None:
        self.network.on_reply(self, reply)
        raw = handler.response_serializer(reply)
        client = self.client
        if client is None or self._over or self._unheard:
            return
        weather = self.network.weather
        if weather.cut and handler.response_streaming and self.network.random.random() < weather.cut:
            self.network.trace(self.process, f"{self.name}: the stream is cut")
            self._unheard = True
            self.network.loop.after(self.network.random.uniform(0.001, 0.2), client.unreachable)
            self.cancel()
            return
        self._send(lambda: client.receive(raw))

    def _end(self, code: Any, details: str) -> None:
        if self._over:
            return
        self._over = True
        self.server.calls.pop(self, None)
        client, trailers = self.client, self._trailers
        self.network.on_end(self, code, trailers)
        if client is not None:
            self._send(lambda: client.ended(code, details, trailers))

    def _send(self, what: Callable[[], None]) -> None:
        client = self.client
        assert client is not None
        if self._unheard:
            return  # the connection is broken: nothing comes after what was lost
        when = self.network.way(self.process, client.process, self._last, client.unreachable)
        if when is None:
            self._unheard = True
            self.network.trace(self.process, f"{self.name}: a reply is lost")
            return
        self._last = when
        self.network.loop.at(when, client.process, lambda: client.process.deliver(what))


class SimChannel:
    """Stands in for aio.Channel."""

    def __init__(self, network: Network, target: str) -> None:
        self.network, self.target = network, target
        self.process = PROCESS.get()
        self.calls: dict[ClientCall, None] = {}
        self.closed = False

    def _multi(self, method: str, request_serializer: Any, response_deserializer: Any) -> Any:
        def call(request: Any = None, *, timeout: float | None = None, metadata: Any = None, **_: Any) -> ClientCall:
            if self.closed:
                raise aio.UsageError("Channel is closed.")
            return ClientCall(self, method, request, timeout, request_serializer, response_deserializer)

        return call

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        return self._multi(method, request_serializer, response_deserializer)

    unary_stream = stream_stream = stream_unary = unary_unary

    async def close(self, grace: float | None = None) -> None:
        self.closed = True
        for call in list(self.calls):
            call.cancel()

    async def __aenter__(self) -> SimChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class ClientCall:
    """A call at its client: awaitable, iterable, and with `read`, `code` and `cancel`, as the aio classes have them."""

    def __init__(self, channel: SimChannel, method: str, request: Any, timeout: float | None, write: Any, read: Any):
        self.channel, self.method, self.process = channel, method, channel.process
        self.network, self._write, self._parse = channel.network, write, read
        self.name, self.began_at = method.rpartition("/")[2], channel.network.loop.now
        self._inbox: deque[Any] = deque()
        self._news = asyncio.Event()
        self._status: Any = None  # code, details, trailers
        self._server: ServerCall | None = None
        self._last = 0.0
        self._pump: asyncio.Task[Any] | None = None
        channel.calls[self] = None
        self.process.on_kill.append(self._gone)
        loop = self.network.loop
        if timeout is not None:
            loop.after(timeout, self._too_late)
        target = self.network.names[channel.target]() if channel.target in self.network.names else channel.target
        server = self.network.servers.get(target)
        if server is None:
            loop.after(REFUSED_S, self.unreachable)
            return
        self.peer = server.process
        streams = hasattr(request, "__aiter__")
        self.network.on_send(self.process, self.name, request)
        raw = None if streams else write(request)
        when = self.network.way(self.process, self.peer, 0.0, self.unreachable)
        if when is None:
            self.network.trace(self.process, f"{self.name} to {self.peer.name} is lost")
            return
        what, seconds = self.network.aimed.pop((self.name, self.peer.host), ("", 0.0))
        if what:
            self.network.bad_until = max(self.network.bad_until, when + max(seconds, 2.0))
        when += seconds if what == "late" else 0.0
        self._last = when
        self.network.settled_at = max(self.network.settled_at, when)
        loop.at(when, self.peer, lambda: self._arrive(server, raw, timeout, what == "reply lost"))
        weather, random = self.network.weather, self.network.random
        if raw is not None and (what == "twice" or (weather.twice and random.random() < weather.twice)):
            again = when + (seconds if what == "twice" else random.uniform(0.0, 6.0))
            self.network.settled_at = max(self.network.settled_at, again)
            loop.at(again, self.peer, lambda: self._arrive_again(server, raw, timeout))
        if streams:
            self._pump = self.process.spawn(self._send_all(request))

    def _arrive(self, server: SimServer, raw: bytes | None, timeout: float | None, unheard: bool) -> None:
        if not server.serving or not server.process.alive:
            self.network.loop.after(REFUSED_S, self.unreachable)
            return
        # A deadline travels as what is left when it was sent: a late request finds all of it.
        self._server = ServerCall(server, self.method, timeout, self)
        if unheard:
            self._server.lose_replies()
        self._server.start(raw)
        if self._status is not None:
            self._tell_server()

    def _arrive_again(self, server: SimServer, raw: bytes, timeout: float | None) -> None:
        if server.serving and server.process.alive:
            self.network.trace(server.process, f"{self.name} arrives a second time")
            ServerCall(server, self.method, timeout, None).start(raw)

    async def _send_all(self, requests: Any) -> None:
        async for request in requests:
            raw = self._write(request)
            if self._status is not None:
                return
            when = self.network.way(self.process, self.peer, self._last, self.unreachable)
            if when is None:
                return
            self._last = when
            self.network.loop.at(when, self.peer, lambda raw=raw: self._hand_over(raw))

    def _hand_over(self, raw: bytes) -> None:
        call = self._server
        if call is not None and call.process.alive:
            call.process.deliver(call.requests.put_nowait, raw)

    # ---- what comes back ------------------------------------------------------------------------------------------------

    def receive(self, raw: bytes) -> None:
        if self._status is None:
            self._inbox.append(self._parse(raw))
            self._news.set()

    def ended(self, code: Any, details: str, trailers: Any) -> None:
        if self._status is None:
            self._status = (code, details, trailers)
            self.channel.calls.pop(self, None)
            self._news.set()
            if self._pump is not None:
                self._pump.cancel()

    def unreachable(self) -> None:
        """The connection broke; the client notices."""
        if self._status is None and self.process.alive:
            self.process.soon(self._broken, grpc.StatusCode.UNAVAILABLE, "the connection broke")

    def _too_late(self) -> None:
        if self._status is None and self.process.alive:
            if self._server is not None and self.network.bad_until < self.began_at:
                self.network.on_too_late(self, self._server)
            self.process.soon(self._broken, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _broken(self, code: Any, details: str) -> None:
        if self._status is None:
            self.ended(code, details, ())
            self._tell_server()

    def _tell_server(self) -> None:
        call = self._server
        if call is not None:
            when = self.network.way(self.process, call.process, self._last, lambda: call.cancel())
            if when is not None:
                self.network.loop.at(when, call.process, call.cancel)

    def _gone(self) -> None:
        if self._status is None:
            self._status = (grpc.StatusCode.CANCELLED, "the client died", ())
            self._tell_server()

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self.ended(grpc.StatusCode.CANCELLED, "Locally cancelled", ())
        self._tell_server()
        return True

    # ---- for the caller -------------------------------------------------------------------------------------------------

    async def _next(self) -> Any:
        while not self._inbox:
            if self._status is not None:
                return aio.EOF
            self._news.clear()
            await self._news.wait()
        return self._inbox.popleft()

    def _raise_if_failed(self) -> None:
        code, details, trailers = self._status
        if code is grpc.StatusCode.CANCELLED and details == "Locally cancelled":
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailers), details=details)

    async def read(self) -> Any:
        found = await self._next()
        if found is aio.EOF:
            self._raise_if_failed()
        return found

    async def code(self) -> Any:
        while self._status is None:
            self._news.clear()
            await self._news.wait()
        return self._status[0]

    def __await__(self) -> Any:
        return self._one().__await__()

    async def _one(self) -> Any:
        try:
            found = await self._next()
            while self._status is None:
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_if_failed()
        return found

    async def __aiter__(self) -> Any:
        try:
            while (found := await self._next()) is not aio.EOF:
                yield found
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_if_failed()
