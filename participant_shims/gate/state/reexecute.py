"""Session state by doing it again: the requests of a session are sent once more, in order, and each answer is compared.

The one rule: an answer that differs is never taken. The session is then reported as diverged, with the request, both
digests and the first place that differs, and its rollout starts again from its input.

For servers whose sessions can't be written down but whose handlers are deterministic. Effects outside of the server
happen again: `describe` says so.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import unquote

from participant_shims.gate.state.shapes import a_dict, a_list, exact_list

AT_ONCE: Final = 16  # sessions that are re-executed concurrently
TIMEOUT_S: Final = 120.0  # for one request
MAX_KEPT_BODY: Final = 256 * 1024  # bytes of a response kept to say where it differs; beyond that its digest must do
# Recorded headers that describe one connection or one sending, not the request.
_DROPPED: Final = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive", "expect"})

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request. `target` is path and query as sent; header names are in lower case."""

    method: str
    target: str
    headers: Headers = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response; header names are in lower case."""

    status: int
    headers: Headers = ()
    body: bytes = b""


Send = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that was served, and what has to come back when it is sent again."""

    request: Request
    status: int
    digest: str  # of the canonical body, see canonical_digest
    body: bytes | None = None  # None when it was too long to keep
    set_cookies: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: Request, response: Response, ignored: frozenset[str] = frozenset()) -> Exchange:
        """The record of a request that was answered with `response`."""
        cookies = tuple(value for name, value in response.headers if name == "set-cookie")
        body = response.body if len(response.body) <= MAX_KEPT_BODY else None
        return cls(request, response.status, canonical_digest(response.body, ignored), body, cookies)

    def to_plain(self) -> list[Any]:
        """As values that the codec writes."""
        r = self.request
        headers = [[k, v] for k, v in r.headers]
        return [r.method, r.target, headers, r.body, self.status, self.digest, self.body, list(self.set_cookies)]

    @classmethod
    def from_plain(cls, plain: Any) -> Exchange:
        """What `to_plain` gave. Raises TypeError for anything else."""
        if not exact_list(plain) or len(plain) != 8:
            raise TypeError("a recorded request is incomplete")
        method, target, headers, body, status, digest, kept, cookies = plain
        if (
            not exact_list(headers)
            or not exact_list(cookies)
            or not all(exact_list(h) and len(h) == 2 for h in headers)
        ):
            raise TypeError("a recorded request has bad headers")
        pairs: list[tuple[str, str]] = [(h[0], h[1]) for h in headers]
        texts: list[Any] = [method, target, digest, *cookies, *(part for pair in pairs for part in pair)]
        if not all(type(t) is str for t in texts) or type(body) is not bytes or type(status) is not int:
            raise TypeError("a recorded request is malformed")
        if kept is not None and type(kept) is not bytes:
            raise TypeError("a recorded response is malformed")
        request = Request(method, target, tuple(pairs), body)
        return cls(request, status, digest, kept, tuple(cookies))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a session can't be had by doing it again."""

    number: int  # of the request within its session, from 0
    request: str  # method and path
    what: str
    expected: str = ""  # digests, when both are there
    got: str = ""

    def __str__(self) -> str:
        digests = f" (expected {self.expected[:12]}, got {self.got[:12]})" if self.expected else ""
        return f"diverged at request {self.number} {self.request}: {self.what}{digests}"


@dataclass(slots=True)
class RequestLog:
    """The requests of each session in the order in which they were served."""

    _sessions: dict[str, list[Exchange]] = field(default_factory=dict[str, list[Exchange]])

    def record(self, session_id: str, exchange: Exchange) -> None:
        self._sessions.setdefault(session_id, []).append(exchange)

    def forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def of(self, session_id: str) -> Sequence[Exchange]:
        return self._sessions.get(session_id, ())

    def others(self, sessions: Collection[str]) -> bool:
        """Whether there are requests of sessions that are not among `sessions`."""
        return any(session_id not in sessions for session_id in self._sessions)


def _pruned(value: Any, ignored: frozenset[str]) -> Any:
    if a_dict(value):
        return {k: _pruned(v, ignored) for k, v in value.items() if k not in ignored}
    return [_pruned(v, ignored) for v in value] if a_list(value) else value


def canonical_digest(body: bytes, ignored: frozenset[str] = frozenset()) -> str:
    """SHA-256 hex of a body: of its JSON with sorted keys and without the fields named in `ignored`, else of the bytes."""
    try:
        text = json.dumps(_pruned(json.loads(body), ignored), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    except (ValueError, RecursionError):
        return hashlib.sha256(body).hexdigest()


def first_difference(expected: bytes | None, got: bytes, ignored: frozenset[str] = frozenset()) -> str:
    """Where two bodies differ, e.g. `$.output[0].text`; empty when that can't be said."""
    if expected is None:
        return ""
    try:
        return next(_differences(_pruned(json.loads(expected), ignored), _pruned(json.loads(got), ignored), "$"), "")
    except (ValueError, RecursionError):
        return ""


def _differences(expected: Any, got: Any, path: str) -> Iterator[str]:
    if a_dict(expected) and a_dict(got):
        for key in sorted(expected.keys() | got.keys()):
            if (key in expected) != (key in got):
                yield f"{path}.{key}"
            else:
                yield from _differences(expected[key], got[key], f"{path}.{key}")
    elif a_list(expected) and a_list(got):
        for index, (a, b) in enumerate(zip(expected, got, strict=False)):
            yield from _differences(a, b, f"{path}[{index}]")
        if len(expected) != len(got):
            yield f"{path}[{min(len(expected), len(got))}]"
    elif expected != got or type(expected) is not type(got):
        yield path


def with_session_cookie(exchange: Exchange) -> Request:
    """The request as it is sent again: with the session's cookie although the first request of a session had none.

    Gym's session middleware keeps an id that it finds, so the session keeps its id.
    """
    headers = tuple((k, v) for k, v in exchange.request.headers if k not in _DROPPED)
    present = "; ".join(v for k, v in headers if k == "cookie")
    names = {part.partition("=")[0].strip() for part in present.split(";")}
    added = [c.partition(";")[0].strip() for c in exchange.set_cookies]
    cookie = "; ".join([*([present] if present else []), *(c for c in added if c.partition("=")[0] not in names)])
    kept = tuple((k, v) for k, v in headers if k != "cookie")
    length = (("content-length", str(len(exchange.request.body))),)
    return replace(exchange.request, headers=(*kept, *((("cookie", cookie),) if cookie else ()), *length))


async def reexecute(
    histories: Mapping[str, Sequence[Exchange]],
    send: Send,
    *,
    ignored: frozenset[str] = frozenset(),
    at_once: int = AT_ONCE,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Mismatch]:
    """Send the requests of every session again; the sessions that diverged and why. Raises nothing of its own.

    Sessions run concurrently, at most `at_once`; the requests of one run in order, each for at most `timeout_s` seconds.
    """
    diverged: dict[str, Mismatch] = {}
    slots = asyncio.Semaphore(at_once)

    async def one(session_id: str, history: Sequence[Exchange]) -> None:
        async with slots:
            for number, exchange in enumerate(history):
                mismatch = await _again(number, exchange, send, ignored, timeout_s)
                if mismatch is not None:
                    diverged[session_id] = mismatch
                    return

    await asyncio.gather(*(one(session_id, history) for session_id, history in histories.items()))
    return diverged


async def _again(
    number: int, exchange: Exchange, send: Send, ignored: frozenset[str], timeout_s: float
) -> Mismatch | None:
    name = f"{exchange.request.method} {exchange.request.target.partition('?')[0]}"
    try:
        async with asyncio.timeout(timeout_s):
            response = await send(with_session_cookie(exchange))
    except TimeoutError:
        return Mismatch(number, name, f"no answer within {timeout_s:.0f} s")
    except Exception as e:  # whatever the server does wrong concerns this session only
        return Mismatch(number, name, f"{type(e).__name__}: {str(e)[:200]}")
    got = canonical_digest(response.body, ignored)
    if response.status != exchange.status:
        return Mismatch(number, name, f"status {response.status} and not {exchange.status}", exchange.digest, got)
    # With ignored fields the digest of the record can't be taken as it is.
    expected = canonical_digest(exchange.body, ignored) if exchange.body is not None else exchange.digest
    if got == expected:
        return None
    where = first_difference(exchange.body, response.body, ignored)
    return Mismatch(number, name, f"another answer, first at {where}" if where else "another answer", expected, got)


def asgi_send(app: Any, *, server: tuple[str, int] = ("127.0.0.1", 80)) -> Send:
    """Requests straight into an ASGI application of this process, past every socket."""

    async def send(request: Request) -> Response:
        path, _, query = request.target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("ascii", "ignore"),
            "query_string": query.encode("ascii", "ignore"),
            "root_path": "",
            "headers": [
                (b"host", f"{server[0]}:{server[1]}".encode()),
                *((k.encode("latin-1"), v.encode("latin-1")) for k, v in request.headers),
            ],
            "client": ("127.0.0.1", 0),
            "server": server,
            "state": {},
        }
        events = [{"type": "http.request", "body": request.body, "more_body": False}]
        finished = asyncio.Event()
        status = 0
        headers: list[tuple[str, str]] = []
        body = bytearray()

        async def receive() -> dict[str, Any]:
            if events:
                return events.pop()
            await finished.wait()
            return {"type": "http.disconnect"}

        async def take(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.extend(
                    (k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in message.get("headers", [])
                )
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    finished.set()

        await app(scope, receive, take)
        return Response(status, tuple(headers), bytes(body))

    return send
