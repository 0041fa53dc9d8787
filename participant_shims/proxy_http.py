"""HTTP/1.1 as the proxy needs it: heads, bodies and ends as events, in both directions, passed on as they came.

The rule: what is passed on is what was received: names, order and values of headers, status and reason. Only the framing
of chunked bodies is written anew, and an offer to go on in another protocol is taken out of a request: it is made to the
next hop, and the server may pass over it (RFC 9110, 7.8). A websocket is the exception, which only begins with such an offer.
Bytes are taken from the socket only when somebody wants the next event, so that a slow reader slows the writer and nothing
piles up in between.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections import deque
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, NamedTuple, cast

from coordinator.wire.extras import NotInstalled, install_extra

READ_BYTES: Final = 64 << 10
MAX_HEAD_BYTES: Final = 256 << 10
_X: Final = frozenset({b"x-", b"X-"})
_OURS: Final = re.compile(rb"x-safepoint-", re.IGNORECASE)
_NO_BODY: Final = frozenset({204, 304})
_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})  # headers, and words of Connection
Header = tuple[bytes, bytes]


class BrokenMessage(Exception):
    """The peer does not speak HTTP, or went away inside a message."""


def load_httptools() -> Any:
    """The parser. Raises NotInstalled with the way to get it: there is no slow fallback that would be used unnoticed."""
    try:
        return importlib.import_module("httptools")
    except ImportError:
        raise NotInstalled("The proxy needs httptools, which is not installed here.", install_extra("proxy")) from None


@dataclass(slots=True)
class Head:
    """The first line and the headers of a message. `method` and `url` of requests, `status` and `phrase` of responses."""

    headers: list[Header] = field(default_factory=list[Header])
    method: bytes = b""
    url: bytes = b""
    status: int = 0
    phrase: bytes = b""
    version: str = "1.1"
    keep_alive: bool = True
    upgrade: bool = False

    def value(self, name: bytes) -> bytes:
        """The last header of that (lower-case) name; empty when there is none."""
        for header, value in reversed(self.headers):
            if header.lower() == name:
                return value
        return b""

    def lower(self) -> dict[str, str]:
        """The headers by lower-case name."""
        return {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in self.headers}

    def ours(self) -> dict[str, str]:
        """Headers of this project by lower-case name: looked at for every request, and most have none."""
        return {
            n.decode("latin-1").lower(): v.decode("latin-1") for n, v in self.headers if n[:2] in _X and _OURS.match(n)
        }

    @property
    def chunked(self) -> bool:
        return self.value(b"transfer-encoding").lower().endswith(b"chunked")

    def response_has_body(self, method: bytes) -> bool:
        return not (method == b"HEAD" or self.status in _NO_BODY or 100 <= self.status < 200)

    def ends_with_connection(self, method: bytes) -> bool:
        """Whether only the end of the connection ends the body of this response."""
        return self.response_has_body(method) and not self.chunked and not self.value(b"content-length")

    def opens_websocket(self) -> bool:
        """Whether a request that asks for another protocol is the beginning of a websocket."""
        return self.method == b"GET" and self.value(b"upgrade").lower() == b"websocket"

    def without_offer(self) -> bytes:
        """The bytes of the head of a request, without what asks for another protocol."""
        kept: list[Header] = []
        for name, value in self.headers:
            if name.lower() == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() not in _OFFERS)
                if not value:
                    continue
            if name.lower() not in _OFFERS:
                kept.append((name, value))
        return replace(self, headers=kept).encode()

    def say_close(self) -> None:
        """Tell the receiver that its connection ends with this message."""
        self.headers = [header for header in self.headers if header[0].lower() != b"connection"]
        self.headers.append((b"connection", b"close"))
        self.keep_alive = False

    def encode(self) -> bytes:
        """The bytes of the head."""
        if self.status:
            first = b"HTTP/%s %d %s\r\n" % (self.version.encode(), self.status, self.phrase)
        else:
            first = b"%s %s HTTP/%s\r\n" % (self.method, self.url, self.version.encode())
        return b"".join([first, *[b"%s: %s\r\n" % header for header in self.headers], b"\r\n"])


class Body(NamedTuple):
    """A piece of a body."""

    data: bytes


class End(NamedTuple):
    """The message is complete. `trailers` of a chunked body."""

    trailers: tuple[Header, ...] = ()


Event = Head | Body | End


def phrase_of(status: int) -> bytes:
    """What stands beside a status that no server has answered with: the standard's; of an unknown one its class's, x00."""
    known = HTTPStatus(status) if status in set(HTTPStatus) else HTTPStatus(status // 100 * 100)
    return known.phrase.encode()


def encode_body(data: bytes, chunked: bool) -> bytes:
    """A piece of a body as it goes out."""
    return b"%x\r\n%s\r\n" % (len(data), data) if chunked else data


def encode_end(end: End, chunked: bool) -> bytes:
    """The end of a body as it goes out."""
    if not chunked:
        return b""
    return b"0\r\n" + b"".join(b"%s: %s\r\n" % header for header in end.trailers) + b"\r\n"


class Messages:
    """The messages that come out of a stream, as events. `responses`: whether they are responses, else requests."""

    def __init__(self, reader: asyncio.StreamReader, httptools: Any, *, responses: bool) -> None:
        self._reader = reader
        self._tools = httptools
        self._responses = responses
        self._events: deque[Event] = deque()
        self._head = Head()
        self._trailers: list[Header] = []
        self._in_head = True
        self._head_bytes = 0
        self.raw = b""  # what follows a request to upgrade: no longer HTTP
        self._parser: Any = None
        self.renew()

    def renew(self) -> None:
        """A new parser for the next message."""
        kind = self._tools.HttpResponseParser if self._responses else self._tools.HttpRequestParser
        self._parser = kind(self)
        self._in_head = True

    def end_without_body(self) -> None:
        """The message whose head has come has no body: we know it from its request (HEAD), the parser may not."""
        if self._events and isinstance(self._events[0], End):
            self._events.popleft()
        self.renew()

    async def next(self) -> Event | None:
        """The next event; None at the end of the stream. Raises BrokenMessage for what is not HTTP."""
        while not self._events:
            data = await self._reader.read(READ_BYTES)
            if not data:
                return None
            self.feed(data)
        return self._events.popleft()

    def whole_body(self) -> bytes | None:
        """The body of the message whose head was taken, when all of it is there already; else nothing is taken."""
        events = self._events
        if not events or not isinstance(events[-1], End):
            return None
        parts: list[bytes] = []
        while True:
            event = events.popleft()
            if not isinstance(event, Body):
                return parts[0] if len(parts) == 1 else b"".join(parts)
            parts.append(event.data)

    def feed(self, data: bytes) -> deque[Event]:
        """Parse what has come; the events that nobody has taken yet. Raises BrokenMessage for what is not HTTP."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + READ_BYTES:
                raise BrokenMessage("the head is too long")
        try:
            self._parser.feed_data(data)
        except self._tools.HttpParserUpgrade as upgrade:
            self._upgraded(data[cast(int, upgrade.args[0]) :])
        except self._tools.HttpParserError as error:
            raise BrokenMessage(str(error)) from error
        return self._events

    def put_back(self, event: Event) -> None:
        """Let `next` give it again."""
        self._events.appendleft(event)

    def _upgraded(self, rest: bytes) -> None:
        head = self._head
        if self._responses or head.opens_websocket():
            self.raw = rest
            return
        if head.method == b"CONNECT":
            raise BrokenMessage("it asks for a tunnel")
        # The parser takes what follows for the other protocol; it is told anew what has come, without the offer.
        self._events.pop()
        self._events.pop()
        self.renew()
        self.feed(head.without_offer() + rest)

    # ---- called by the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._head, self._trailers, self._in_head = Head(), [], True

    def on_url(self, url: bytes) -> None:
        self._head.url += url

    def on_status(self, status: bytes) -> None:
        self._head.phrase += status

    def on_header(self, name: bytes, value: bytes) -> None:
        (self._head.headers if self._in_head else self._trailers).append((name, value))

    def on_headers_complete(self) -> None:
        head, parser = self._head, self._parser
        self._in_head, self._head_bytes = False, 0
        head.version, head.keep_alive = parser.get_http_version(), parser.should_keep_alive()
        if self._responses:
            head.status = parser.get_status_code()
        else:
            head.method, head.upgrade = parser.get_method(), parser.should_upgrade()
        self._events.append(head)

    def on_body(self, data: bytes) -> None:
        self._events.append(Body(data))

    def on_message_complete(self) -> None:
        self._in_head = True
        self._events.append(End(tuple(self._trailers)))
