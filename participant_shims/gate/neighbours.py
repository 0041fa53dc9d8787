"""The other worker processes of a server that keeps sessions in memory, and the calls that this one passes on to them.

The rule kept here: every call of a rollout runs in one and the same worker, its *home*, whichever of them it reaches. Uvicorn
gives a connection to any worker, and a session lives in the memory of one; in another the same call would meet an empty
session, and nothing would tell. The home follows from the rollout id alone, so nobody has to remember or to agree on it, and
after a restore it is the worker that loaded the session: servers are restored with as many workers as they had.

Passing on is a wire and no more: a call is admitted, counted, parked, held and remembered at its home. When the home dies the
call is sent again, as the caller would do; its successor answers it from the call log, or says that the state is lost.

One connection a call, over the life's `w<n>.sock`. A frame is two lengths, a JSON object and bytes:

    -> {"method", "path", ..., "headers": [[name, value], ...]}, body       closing it: the client has left
    <- {"status", "headers"}, b""                                           the response begins
    <- {"more": true|false}, a part of its body
    <- {"failed": true}, b""                                                the application failed, or ended without a whole
                                                                            response: it must not be run again for that
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire.remarks import WORKER_AWAY
from participant_shims.gate.execution import App, Message, Receive, Scope, Send, read_body

log = logging.getLogger(__name__)

_LENGTHS: Final = struct.Struct(">IQ")
_TEXTS: Final = ("http_version", "method", "scheme", "path", "root_path")
_BYTES: Final = ("raw_path", "query_string")
_BACKLOG: Final = 4096
RETRY_S: Final = 0.1
WARN_AFTER_S: Final = 2.0
Json = Mapping[str, Any]


def home_of(rollout_id: str, workers: int) -> int:
    """The number of the worker at which the calls of a rollout run, of a server that has so many."""
    return int.from_bytes(hashlib.sha256(rollout_id.encode()).digest()[:8]) % workers


class Neighbours:
    """Those of worker `number` of a server with `workers`, whose life is `life`. `warn` tells people what they should mend, by
    its kind, and `over` that what a kind warned of is so no more.

    `app` serves what others pass on here, with what its lifespan has put into `state`; both are set from outside.
    """

    def __init__(
        self, life: Path, number: int, workers: int, warn: Callable[[str, str], None], over: Callable[[str], None]
    ) -> None:
        self.number = number
        self.app: App | None = None
        self.state: Mapping[str, Any] = {}
        self._life = life
        self._workers = workers
        self._warn = warn
        self._over = over
        self._waiting: Counter[int] = Counter()  # calls that wait for a home, of whom people were told
        self._serving: asyncio.Task[None] | None = None

    def home(self, rollout_id: str) -> int | None:
        """The worker at which the calls of a rollout run; None when it is this one."""
        number = home_of(rollout_id, self._workers)
        return None if number == self.number else number

    # -- at the home

    def start(self) -> None:
        """Serve what others pass on, until the loop ends. Called on the loop."""
        self._serving = asyncio.ensure_future(self._serve())

    async def stop(self) -> None:
        """For tests."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})

    async def _serve(self) -> None:
        while True:
            try:
                server = await asyncio.start_unix_server(self._take, self._socket(self.number), backlog=_BACKLOG)
                break
            except OSError as error:  # a full disk; others wait for us meanwhile
                self._warn("a worker that others cannot reach", f"{self._socket(self.number)} cannot be made: {error}.")
                await asyncio.sleep(WARN_AFTER_S)
        async with server:
            await server.serve_forever()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head, body = await _receive(reader)
            given = answered = False

            async def receive() -> Message:
                nonlocal given
                if not given:
                    given = True
                    return {"type": "http.request", "body": body, "more_body": False}
                await reader.read()  # nothing comes but the end
                return {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                nonlocal answered
                answered = message["type"] == "http.response.body" and not message.get("more_body", False)
                with contextlib.suppress(OSError):  # whoever has left is told of by `receive`
                    if message["type"] == "http.response.start":
                        headers = [_pair(*pair) for pair in message.get("headers", ())]
                        await _send(writer, {"status": message["status"], "headers": headers})
                    elif message["type"] == "http.response.body":
                        await _send(writer, {"more": message.get("more_body", False)}, message.get("body", b""))

            assert self.app is not None
            try:
                await self.app({**_scope_of(head), "state": dict(self.state)}, receive, send)
            except Exception:
                log.exception("a call that worker %d was passed has failed", self.number)
                answered = False
            if not answered:
                await _send(writer, {"failed": True})
        except (OSError, EOFError, ValueError, KeyError):
            log.debug("a connection between workers has ended", exc_info=True)
        finally:
            writer.close()

    # -- at the others

    async def pass_on(self, home: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Let worker `home` serve this request. Raises when the application there does, as if it had run here."""
        body = await read_body(receive)
        if body is None:
            return
        asking = asyncio.create_task(self._ask(home, _head_of(scope), body, send))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
        finally:
            asking.cancel()
            leaving.cancel()

    async def _ask(self, home: int, head: Json, body: bytes, send: Send) -> None:
        begun = time.monotonic()
        warned = False
        kind = f"worker-{home} cannot be reached"
        try:
            while not await self._ask_once(home, head, body, send):
                if not warned and time.monotonic() - begun > WARN_AFTER_S:
                    warned = True
                    self._waiting[home] += 1
                    self._warn(kind, f"Calls wait for worker-{home}, {WORKER_AWAY}.")
                await asyncio.sleep(RETRY_S)
        finally:
            if warned:
                self._waiting[home] -= 1
                if not self._waiting[home]:
                    self._over(kind)

    async def _ask_once(self, home: int, head: Json, body: bytes, send: Send) -> bool:
        """Whether there was an answer. It is repeated else: identified calls are executed once."""
        start: Message | None = None
        passed = False
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket(home))
        except OSError:
            return False
        try:
            await _send(writer, head, body)
            while True:
                said, part = await _receive(reader)
                if "failed" in said:
                    raise RuntimeError(f"The application failed in worker-{home}, which had to serve this call.")
                if "status" in said:
                    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in said["headers"]]
                    start = {"type": "http.response.start", "status": said["status"], "headers": headers}
                    continue
                if start is not None:
                    # Not before there is a body: until then the home may die without a trace at the client.
                    passed = True
                    await send(start)
                    start = None
                await send({"type": "http.response.body", "body": part, "more_body": said["more"]})
                if not said["more"]:
                    return True
        except (OSError, EOFError):
            if passed:
                raise
            return False
        finally:
            writer.close()

    def _socket(self, number: int) -> Path:
        return self._life / f"w{number}.sock"


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(writer: asyncio.StreamWriter, head: Json, body: bytes = b"") -> None:
    text = json.dumps(head, separators=(",", ":")).encode()
    writer.write(_LENGTHS.pack(len(text), len(body)) + text)
    if body:
        writer.write(body)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> tuple[Json, bytes]:
    text, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    head = cast("Json", json.loads(await reader.readexactly(text)))
    return head, await reader.readexactly(body) if body else b""


def _pair(name: bytes, value: bytes) -> tuple[str, str]:
    return name.decode("latin-1"), value.decode("latin-1")


def _head_of(scope: Scope) -> Json:
    texts = {key: scope[key] for key in _TEXTS if key in scope}
    raw = {key: scope[key].decode("latin-1") for key in _BYTES if key in scope}
    ends = {key: scope[key] for key in ("client", "server") if key in scope}
    return {**texts, **raw, **ends, "headers": [_pair(*pair) for pair in scope["headers"]]}


def _scope_of(head: Json) -> Scope:
    raw = {key: head[key].encode("latin-1") for key in _BYTES if key in head}
    ends = {key: tuple(head[key]) for key in ("client", "server") if head.get(key)}
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
        **{key: head[key] for key in _TEXTS if key in head}, **raw, **ends, "headers": headers,
    }  # fmt: skip
