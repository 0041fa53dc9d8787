"""The client of one request: what it sends, and the news that it has left.

The rule kept here: that a client left is noticed at once, whatever its request does meanwhile, and no message of it is
lost to the application. ASGI tells of a disconnect only to whoever asks for the next message, and applications rarely
ask; so once the body is there one task asks for all, and the application is given what it gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from participant_shims.gate.execution import Message, Receive, read_body


class Caller:
    """Use in `with`; leaving it ends the watch. `on_left` is called once, on the loop, when the client leaves."""

    def __init__(self, receive: Receive, on_left: Callable[[], None]) -> None:
        self._receive = receive
        self._on_left = on_left
        self._kept: bytes | None = None
        self._watching: asyncio.Task[Message] | None = None

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Nobody wants to know any more."""
        if self._watching is not None:
            self._watching.cancel()

    def keep(self, body: bytes) -> None:
        """The body was read by somebody else: give it to the application."""
        self._kept = body
        self.watch()

    async def body(self) -> bytes | None:
        """The whole body, off the wire, to be given to the application by `receive`; None when the client left first."""
        self._kept = await read_body(self._receive)
        if self._kept is not None:
            self.watch()
        return self._kept

    def watch(self) -> None:
        """The body has been read, here or by somebody else: from now on nothing but a disconnect can come."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._until_left())

    async def receive(self) -> Message:
        """The application's side of the request."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return {"type": "http.request", "body": kept, "more_body": False}
        if self._watching is not None:
            return dict(await asyncio.shield(self._watching))  # the application may give up waiting; the watch goes on
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._on_left()
        elif not message.get("more_body", False):
            self.watch()
        return message

    async def _until_left(self) -> Message:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._on_left()
                return message
