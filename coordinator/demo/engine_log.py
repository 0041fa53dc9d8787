"""Loaded into vLLM by `--middleware`: a log of every generation, apart from all that Safepoint says of itself.

The rule it keeps: the same as the policy's own log: a line is written to the kernel before the caller gets the words that
it is about, so that the demo counts from what happened, across SIGKILL too. A generation begins with its first token.

    {"event": "begin", "call": 3, "prompt": [...]}       a chat; its prompt as vLLM made it
    {"event": "continue", "call": 4, "prompt": [...]}    a completion from token ids: what follows a prefix
    {"event": "progress", "call": 3, "chunks": 500}
    {"event": "end", "call": 3, "chunks": 2000}

Standard library only. Without SAFEPOINT_DEMO_ENGINE_LOG it does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, cast

LOG_VARIABLE: Final = "SAFEPOINT_DEMO_ENGINE_LOG"
EVERY: Final = 100  # chunks between two lines of progress
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class EngineLog:
    """An ASGI middleware."""

    def __init__(self, app: App) -> None:
        self._app = app
        path = os.environ.get(LOG_VARIABLE, "")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600) if path else -1
        self._calls = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on, and write down."""
        path = scope.get("path", "")
        if self._fd < 0 or scope["type"] != "http" or path not in (_CHAT, _COMPLETIONS):
            await self._app(scope, receive, send)
            return
        self._calls += 1
        call = _Call(self._calls, path == _CHAT)

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                call.asked += message.get("body", b"")
            return message

        async def told(message: Message) -> None:
            for line in call.lines(message):
                os.write(self._fd, json.dumps(line).encode() + b"\n")
            await send(message)

        await self._app(scope, heard, told)


class _Call:
    """One request on its way."""

    def __init__(self, number: int, chat: bool) -> None:
        self.number, self.chat = number, chat
        self.asked = b""
        self._streams = False
        self._begun = False
        self._chunks = 0

    def lines(self, message: Message) -> list[dict[str, Any]]:
        """What to write before `message` is sent."""
        if message["type"] == "http.response.start":
            headers: dict[bytes, bytes] = dict(message.get("headers") or ())
            self._streams = message["status"] == 200 and b"event-stream" in headers.get(b"content-type", b"")
            return []
        body: bytes = message.get("body", b"")
        if not self._streams or not body:
            return []
        before = self._chunks // EVERY
        self._chunks += body.count(b"data: {")
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            prompt = _prompt_of_chunk(body) if self.chat else _prompt_of(self.asked)
            event = "begin" if self.chat else "continue"
            found.append({"event": event, "call": self.number, "prompt": prompt})
        if self._chunks // EVERY > before:
            found.append({"event": "progress", "call": self.number, "chunks": self._chunks})
        if b"data: [DONE]" in body:
            found.append({"event": "end", "call": self.number, "chunks": self._chunks})
        return found


def _prompt_of(raw: bytes) -> list[int]:
    prompt = json.loads(raw).get("prompt")
    return cast("list[int]", prompt) if isinstance(prompt, list) else []


def _prompt_of_chunk(body: bytes) -> list[int]:
    first = body.partition(b"\n\n")[0].removeprefix(b"data: ")
    return cast("list[int]", json.loads(first).get("prompt_token_ids") or [])
