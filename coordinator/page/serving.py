"""Serves the page, from threads of its own.

The rule: whoever is not on this machine, or comes by a name that is not this machine's, gets nothing, and nobody can change
anything. A browser that is led here by a foreign page (DNS rebinding, cross-site requests) is such a one: the Host must be
loopback, and data is answered to the page itself only. Where the coordinator asks for tokens or certificates, the page asks
for a key, which is in <root>/coordinator/page.json for those who may read it.
"""

from __future__ import annotations

import hmac
import json
import logging
import platform
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final, cast
from urllib.parse import parse_qs, unquote, urlsplit

from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import manifest_pb2

from coordinator.history import History
from coordinator.page import overview, timeline
from coordinator.page.past import Past
from coordinator.snapshot_reading import SnapshotReader
from coordinator.wire.addresses import LOOPBACK, host_and_port
from coordinator.wire.errors import Reason, SafepointError, refuse

log = logging.getLogger(__name__)

RECORD_NAME: Final = "page.json"
MAX_CONNECTIONS: Final = 32
MAX_STREAMS: Final = 16  # of changes; each keeps a thread
MAX_URL: Final = 2048
IDLE_S: Final = 10.0  # a client that says nothing, or takes nothing, for so long is let go
BEAT_S: Final = 5.0
LOOK_S: Final = 1.0  # how soon it is noticed that a page was closed
POLL_S: Final = 0.1  # how soon a close is noticed
CALM_S: Final = 10.0  # without an event the overview is as old as this at most
BUSY_S: Final = 0.5  # and with events not made more often
READ_ALL_S: Final = 600.0  # a manifest that was read is read again after so long: a few hundred take a second
LISTED_S: Final = 30.0  # and snapshots are as old as this at most, unless an operation has ended since
_COOKIE: Final = "safepoint_page"
_STATIC: Final = {
    "/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/draw.js": ("draw.js", "text/javascript"),
    "/views.js": ("views.js", "text/javascript"), "/live.js": ("live.js", "text/javascript"),
}  # fmt: skip
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip
_STATUS: Final = {
    Reason.SNAPSHOT_NOT_FOUND: HTTPStatus.NOT_FOUND, Reason.UNKNOWN_OPERATION: HTTPStatus.NOT_FOUND,
    Reason.MALFORMED_ID: HTTPStatus.BAD_REQUEST, Reason.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    Reason.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    # That a snapshot is damaged is what was asked for: a browser takes any other status for a failure of the page.
    Reason.SNAPSHOT_CORRUPT: HTTPStatus.OK, Reason.SNAPSHOT_UNSAFE: HTTPStatus.OK,
    Reason.SNAPSHOT_TOO_NEW: HTTPStatus.OK, Reason.SNAPSHOT_FOREIGN: HTTPStatus.OK,
}  # fmt: skip


def static(name: str) -> str:
    """One of the page's own files."""
    return (files("coordinator.page") / "static" / name).read_text(encoding="utf-8")


class Page:
    """What the page answers. `offer` is called on the coordinator's event loop, everything else in threads."""

    def __init__(self, looked: overview.Looked, root: str, job_id: str) -> None:
        self._looked = looked
        self._history = History(root)
        self._past = Past(self._history, overview.MAX_OPERATIONS)
        self._reader = SnapshotReader(root, job_id)
        self._job_id = job_id
        self._changed = threading.Condition()
        self._version = 0
        self._closed = False
        self._making = threading.Lock()
        self._verifying = threading.Lock()
        self._made: tuple[int, float, timeline.Document] | None = None
        self._listed: tuple[int, float, timeline.Document] | None = None
        self._known: dict[str, manifest_pb2.SnapshotManifest] = {}  # as the last list has found them
        self._read_all_at = time.monotonic()
        self._outcomes = 0  # how many operations have said how they ended

    def offer(self, event: pb.OperationEvent) -> None:
        """An event of the feed: whoever looks is told that something changed."""
        with self._changed:
            self._version += 1
            self._outcomes += event.WhichOneof("event") in ("saved", "failed")
            self._changed.notify_all()

    def wait(self, version: int, within_s: float) -> int | None:
        """The version, once it is not `version` any more or the time is over; None when the page is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._version != version, within_s)
            return None if self._closed else self._version

    def close(self) -> None:
        """Let go of whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def overview(self) -> timeline.Document:
        """As `overview.overview`; made once for all who look at the same time."""
        with self._making:
            version, now = self._version, time.monotonic()
            if self._made is not None:
                known, at, document = self._made
                if now - at < (CALM_S if known == version else BUSY_S):
                    return document
            document = {"job_id": self._job_id} | overview.overview(self._looked, self._past, self._snapshots(now))
            self._made = (version, now, document)
            return document

    def _snapshots(self, now: float) -> timeline.Document:
        """Read again when an operation has ended, and now and then: pins and prunes tell nobody."""
        outcomes = self._outcomes
        if self._listed is not None and self._listed[0] == outcomes and now - self._listed[1] < LISTED_S:
            return self._listed[2]
        if now - self._read_all_at > READ_ALL_S:
            self._known.clear()
            self._read_all_at = now
        listed = overview.listing(self._reader, self._known)
        self._listed = (outcomes, now, listed)
        return listed

    def operation(self, operation_id: str) -> timeline.Document:
        """One operation. Raises UNKNOWN_OPERATION, STORAGE_FAILED."""
        record = self._history.find(operation_id)
        if record is None:
            raise refuse(Reason.UNKNOWN_OPERATION, f"The history has no operation {operation_id[:130]}.")
        return timeline.document(record)

    def snapshot(self, snapshot_id: str) -> timeline.Document:
        """One snapshot. Raises as `SnapshotReader.load`."""
        return overview.snapshot(self._reader.load(snapshot_id))

    def verify(self, snapshot_id: str) -> timeline.Document:
        """Read every byte of it, one at a time. Raises as `SnapshotReader.verify`, and UNAVAILABLE."""
        if not self._verifying.acquire(blocking=False):
            raise refuse(Reason.UNAVAILABLE, "Another snapshot is being read.")
        try:
            return overview.verified(self._reader, snapshot_id)
        finally:
            self._verifying.release()

    def difference(self, before: str, after: str) -> timeline.Document:
        """Two snapshots compared. Raises as `SnapshotReader.load`."""
        return overview.difference(self._reader, before, after)


class PageServer:
    """The HTTP server. `url` leads to the page, `address` is host:port."""

    def __init__(self, page: Page, bind: str, key: str = "") -> None:
        """`bind`: host:port on loopback, port 0 for any. Raises INVALID_ARGUMENT, and UNAVAILABLE when it is taken."""
        host, port = page_address(bind)
        try:
            self._server = _Server(("::1" if host == "::1" else "127.0.0.1", port), page, key)
        except OSError as error:
            raise refuse(
                Reason.UNAVAILABLE, f"The address {bind} for the page cannot be bound: {error.strerror or error}.",
                next_step="Stop what listens there, or set `page_bind` to another address; port 0 takes a free one.",
            ) from error  # fmt: skip
        self.page, self.key = page, key
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        self.url = f"http://{self.address}/" + (f"?key={key}" if key else "")
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; twice is harmless."""
        self.page.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def record(self) -> bytes:
        """What is in page.json: on which machine the page is, where there, with its key."""
        return json.dumps({"host": platform.node(), "address": self.address, "url": self.url}).encode() + b"\n"


def page_address(bind: str) -> tuple[str, int]:
    """Host and port of the page. Raises INVALID_ARGUMENT for what is no address of the loopback."""
    with suppress(ValueError):
        host, port = host_and_port(bind)
        if host in LOOPBACK:
            return host, port
    raise refuse(
        Reason.INVALID_ARGUMENT, f"page_bind must be a loopback address and a port, not {bind!r}.",
        next_step="Set it to 127.0.0.1:0, and reach it from elsewhere through ssh -L.",
    )  # fmt: skip


def new_key() -> str:
    """A key that nobody guesses."""
    return secrets.token_urlsafe(24)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], page: Page, key: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.page, self.key = page, key
        self.room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.room.acquire(blocking=False):
            self.shutdown_request(request)  # as full as it gets: the browser tries again
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is nobody's problem."""
        log.debug("a client of the page has left", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "safepoint"
    sys_version = ""
    timeout = IDLE_S

    @property
    def _page(self) -> Page:
        return cast(_Server, self.server).page

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        refused = self._refused(parts.path)
        if refused is not None:
            self._fail(*refused)
        elif not self._knows_key(parts.query):
            self._fail(
                HTTPStatus.FORBIDDEN, f"This page needs its key: the url in {RECORD_NAME} below the root has it."
            )
        elif parts.path in _STATIC:
            name, kind = _STATIC[parts.path]
            self._send(HTTPStatus.OK, static(name).encode(), f"{kind}; charset=utf-8", keyed="key=" in parts.query)
        elif parts.path == "/events":
            self._stream()
        else:
            self._answer(parts.path, parse_qs(parts.query))

    do_HEAD = do_GET

    def _not_allowed(self) -> None:
        self._fail(HTTPStatus.METHOD_NOT_ALLOWED, "This page only looks: GET.")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _not_allowed

    def _refused(self, path: str) -> tuple[HTTPStatus, str] | None:
        if len(self.path) > MAX_URL:
            return HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long."
        hosts = self.headers.get_all("Host") or []
        host = urlsplit(f"//{hosts[0]}").hostname if len(hosts) == 1 else None
        if host not in LOOPBACK:
            return HTTPStatus.MISDIRECTED_REQUEST, "Only this machine's own names lead here."
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        if path != "/" and site not in ("same-origin", "none"):
            return HTTPStatus.FORBIDDEN, "Only the page itself may ask for this."
        return None

    def _knows_key(self, query: str) -> bool:
        key = cast(_Server, self.server).key
        if not key:
            return True
        given = parse_qs(query).get("key", [""])[0]
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            cookie = None
        return any(hmac.compare_digest(text.encode(), key.encode()) for text in (given, cookie.value if cookie else ""))

    def _answer(self, path: str, query: dict[str, list[str]]) -> None:
        what, _, name = path.removeprefix("/api/").partition("/")
        name = unquote(name)
        page = self._page
        answers: dict[str, Callable[[], timeline.Document]] = {
            "overview": page.overview,
            "operation": lambda: page.operation(name),
            "snapshot": lambda: page.snapshot(name),
            "verify": lambda: page.verify(name),
            "difference": lambda: page.difference(query.get("before", [""])[0], query.get("after", [""])[0]),
        }
        if not path.startswith("/api/") or what not in answers:
            self._fail(HTTPStatus.NOT_FOUND, "There is nothing here.")
            return
        try:
            document = answers[what]()
        except SafepointError as error:
            status = _STATUS.get(error.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
            self._json(status, {"error": str(error), "reason": error.reason.name})
        except Exception:
            log.exception("the page could not answer %s", path)
            self._json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "See the coordinator's log.", "reason": "INTERNAL"})
        else:
            self._json(HTTPStatus.OK, document)

    def _stream(self) -> None:
        """Server-sent events: one line whenever something changed, and a beat when nothing does."""
        room = cast(_Server, self.server).streams
        if not room.acquire(blocking=False):
            self._fail(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pages are open.")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self._headers({"Content-Type": "text/event-stream", "Connection": "close"})
            self.close_connection = True
            self.wfile.write(b"retry: 1000\n\n")
            version, told_at = self._page.wait(-1, 0), -BEAT_S
            known = None
            while version is not None and self.command == "GET" and not self._has_left():
                if version != known or time.monotonic() - told_at >= BEAT_S:
                    self.wfile.write(f"data: {version}\n\n".encode())
                    known, told_at = version, time.monotonic()
                version = self._page.wait(version, LOOK_S)
        finally:
            room.release()

    def _has_left(self) -> bool:
        """Whether the client has closed its end: a write would notice only the second time."""
        looking = select.poll()  # and not select(): a coordinator of a large fleet has thousands of descriptors
        looking.register(self.connection, select.POLLIN)
        try:
            return bool(looking.poll(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _json(self, status: HTTPStatus, document: timeline.Document) -> None:
        self._send(status, json.dumps(document, separators=(",", ":")).encode(), "application/json")

    def _fail(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True  # whatever the body is that it came with
        self._send(status, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, *, keyed: bool = False) -> None:
        self.send_response(status)
        extra = {"Content-Type": kind, "Content-Length": str(len(body))}
        key = cast(_Server, self.server).key
        if keyed and key:
            extra["Set-Cookie"] = f"{_COOKIE}={key}; HttpOnly; SameSite=Strict; Path=/"
        if self.close_connection:
            extra["Connection"] = "close"
        self._headers(extra)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _headers(self, extra: dict[str, str]) -> None:
        for name, value in (_HEADERS | extra).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Addresses may carry the key: nothing is logged."""
