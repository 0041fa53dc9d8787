"""One run of the application for one identified call, whoever waits for it.

The rule kept here: an identified call is executed once and to its end, also when its client leaves: the client retries,
and must find the answer. So the application runs in a task of its own, its messages are kept, and any number of clients
follow them. A response is complete (and remembered) before anybody gets it; only event streams are passed on as they
come.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final

from participant_shims.gate.calllog import Answer

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

STREAM_TYPES: Final = (b"text/event-stream", b"application/x-ndjson")


class Run:
    """The application's messages for one request. `on_message` is called after each."""

    def __init__(self, on_message: Callable[[], None] | None = None) -> None:
        self.messages: list[Message] = []
        self.streams = False
        self.complete = False
        self._over = asyncio.Event()
        self._on_message = on_message

    async def of(self, app: App, scope: Scope, body: bytes) -> None:
        """Run `app` with a request whose body has been read. Whatever it raises, it raises."""
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._over.wait()
            return {"type": "http.disconnect"}

        try:
            await app(scope, receive, self._send)
        finally:
            self._over.set()

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            headers = {k.lower(): v for k, v in message.get("headers", ())}
            self.streams = headers.get(b"content-type", b"").partition(b";")[0].strip().lower() in STREAM_TYPES
        elif kind == "http.response.body" and not message.get("more_body", False):
            self.complete = True
            self._over.set()
        self.messages.append(message)
        if self._on_message is not None:
            self._on_message()

    def answer(self) -> Answer | None:
        """The whole response; None when there is none."""
        if not self.complete:
            return None
        start = next((m for m in self.messages if m["type"] == "http.response.start"), None)
        if start is None:
            return None
        body = b"".join(m.get("body", b"") for m in self.messages if m["type"] == "http.response.body")
        headers = tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in start.get("headers", ()))
        return Answer(int(start["status"]), headers, body)


class Execution:
    """A run that clients follow. `digest`: of the request, so that a retry is told from another call."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.finished = False
        self.adopted = False  # its first client left: whoever ends it takes it off the books
        self.error: BaseException | None = None
        self.run: Run | None = None  # the one whose messages may be passed on as they come
        self.answer: Answer | None = None
        self.scope: Scope = {}
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def new_run(self, *, passes_on: bool) -> Run:
        """Begin to collect; with `passes_on`, followers get an event stream as it comes."""
        run = Run(self.tell)
        if passes_on:
            self.run = run
        return run

    def tell(self) -> None:
        """Something new for the followers."""
        self._news.set()
        self._news = asyncio.Event()

    def end(self, answer: Answer | None, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        self.answer, self.error, self.finished = answer, error, True
        self.tell()

    async def follow(self, send: Send, before_send: Callable[[], Awaitable[bool]]) -> bool:
        """Pass the response on; `before_send` waits while it must be held and says whether the client is still there.

        Whether the whole response was passed on. Raises what the application raised when it gave no response.
        """
        passed = 0
        while not self.finished or (self.run is not None and self.run.streams):
            news = self._news
            if self.run is not None and self.run.streams:
                for message in self.run.messages[passed:]:
                    if not await before_send():
                        return False
                    await send(message)
                    passed += 1
                if self.finished and passed == len(self.run.messages):
                    break
                if passed < len(self.run.messages):
                    continue
            if not self.finished:
                await news.wait()
        if self.error is not None:
            raise self.error
        if passed:
            return self.run is not None and self.run.complete
        if self.answer is None or not await before_send():
            return False
        await send_answer(send, self.answer)
        return True


def conflict(error: Mapping[str, object], headers: Mapping[str, str] = MappingProxyType({})) -> Answer:
    """A 409 of ours: why a request is not run, in JSON."""
    body = json.dumps({"error": error}).encode()
    common = {"content-type": "application/json", "content-length": str(len(body))}
    return Answer(409, tuple({**common, **headers}.items()), body, "Conflict")


async def send_answer(send: Send, answer: Answer) -> None:
    """Send a known response."""
    headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


async def read_body(receive: Receive) -> bytes | None:
    """The whole body, off the wire; None when the client left before it was there."""
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)
