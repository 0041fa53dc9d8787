"""A scripted OpenAI endpoint: what it answers depends on the conversation alone, and it counts what it was asked.

For "add A then add B then get the count" it calls one tool a turn and then says the count. `delay=N` in the text makes
each answer take N ms. `hold()` keeps answers back until `release()`, so that a test can stop the world at a known point.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
from typing import Any

from aiohttp import web


class ScriptedEndpoint:
    """Runs in a thread of its own. `asked`: how often each conversation was generated to its end."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.begun = 0
        self.aborted = 0  # generations whose client left before they ended
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._open: asyncio.Event | None = None
        self._ready = threading.Event()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.held_after: int | None = None  # turns that are still answered while it holds

    def __enter__(self) -> ScriptedEndpoint:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def hold(self, after_turn: int = 0) -> None:
        """Answers of turn `after_turn` and later wait."""
        self.held_after = after_turn

    def release(self) -> None:
        """Let everything go."""
        self.held_after = None
        if self._open is not None:
            self._loop.call_soon_threadsafe(self._open.set)

    @property
    def repeated(self) -> int:
        """Conversations that were generated more than once."""
        return sum(n - 1 for n in self.asked.values())

    @property
    def total(self) -> int:
        """Answers in all."""
        return sum(self.asked.values())

    @property
    def running(self) -> int:
        """Generations that have begun and not ended."""
        return self.begun - self.total - self.aborted

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._begin())
        self._ready.set()
        self._loop.run_forever()

    async def _begin(self) -> None:
        self._open = asyncio.Event()
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.post("/v1/chat/completions", self._chat), web.post("/tokenize", self._tokenize)])
        # As a real engine does: a generation ends when its client leaves.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _end(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        try:
            return await self._generate(request)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        messages = asked["messages"]
        self.begun += 1
        first = _text(next(m for m in messages if m["role"] == "user"))
        turn = sum(1 for m in messages if m["role"] == "assistant")
        if (delay := re.search(r"delay=(\d+)", first)) is not None:
            await asyncio.sleep(int(delay.group(1)) / 1000)
        while self.held_after is not None and turn >= self.held_after:
            assert self._open is not None
            self._open.clear()
            await self._open.wait()
        numbers = [int(x) for x in re.findall(r"add (-?\d+)", first)]
        message: dict[str, Any] = {"role": "assistant", "content": None}
        call: tuple[str, dict[str, int]] | None = None
        if turn < len(numbers):
            call = ("increment_counter", {"count": numbers[turn]})
        elif turn == len(numbers):
            call = ("get_counter_value", {})
        else:
            message["content"] = "The count is " + _text([m for m in messages if m["role"] == "tool"][-1])
        if call is not None:
            function = {"name": call[0], "arguments": json.dumps(call[1])}
            message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
        key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
        self.asked[key] = self.asked.get(key, 0) + 1
        said = json.dumps(message.get("tool_calls") or message["content"])
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}
        if asked.get("logprobs"):
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{t}", "logprob": -0.5, "bytes": None, "top_logprobs": []}
                    for t in _tokens(said)
                ]
            }
        usage = {"prompt_tokens": len(json.dumps(messages)) // 4, "completion_tokens": len(said) // 4 + 1}
        return web.json_response(
            {
                "id": "chatcmpl-" + key[:24], "object": "chat.completion", "created": 0, "model": asked.get("model"),
                "choices": [choice], "usage": usage | {"total_tokens": sum(usage.values())},
            }
        )  # fmt: skip

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = _tokens(json.dumps((await request.json())["messages"]))
        return web.json_response({"count": len(tokens), "max_model_len": 4096, "tokens": tokens})


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _tokens(text: str) -> list[int]:
    return [(ord(c) % 250) + 1 for c in text][:64] or [1]
