"""A server that answers like vLLM from canned bytes, as fast as it can be done in Python: what a proxy costs shows only
before one that costs little itself.

    python -m tests.vllm.canned_engine [TOKENS_A_SECOND] [steps]     prints its port

A request gets its `max_tokens` tokens at once, in chunks of one; with TOKENS_A_SECOND each stream gets its tokens at that
pace. With `steps` all streams get a token in one step, each written by itself, as a real engine has it; with 0 for a pace
steps follow each other as quickly as streams take them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any, Final

HEAD = b"HTTP/1.1 200 OK\r\ndate: Sun, 01 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
INFO = {
    "/version": {"version": "0.32.0"}, "/is_paused": {"is_paused": False}, "/weight_info": {"weight_version": "v"},
    "/v1/models": {"data": [{"id": "tiny", "max_model_len": 65536}]}, "/server_info": {"vllm_config": {}},
}  # fmt: skip


def token(number: int, last: bool) -> bytes:
    choice = {
        "index": 0, "text": "word", "logprobs": {"text_offset": [4 * number], "token_logprobs": [-1.2345678],
        "tokens": ["word"], "top_logprobs": [{"word": -1.2345678}]}, "finish_reason": "length" if last else None,
        "stop_reason": None, "token_ids": [number % 500], "prompt_token_ids": None if number else [1, 2, 3],
    }  # fmt: skip
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
    data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


FIRST, MIDDLE, LAST = token(0, False), token(7, False), token(7, True)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
BEHIND: Final = 256 << 10  # bytes that a stream has not taken yet; then it gets no more


@dataclass(slots=True)
class Running:
    """A stream that gets its tokens in steps."""

    transport: asyncio.Transport
    count: int
    said: int = 0

    def step(self) -> bool:
        """Whether that was its last token."""
        if self.transport.get_write_buffer_size() < BEHIND:
            self.said += 1
            last = self.said == self.count
            self.transport.write(MIDDLE if 1 < self.said < self.count else LAST + END if last else FIRST)
            return last
        return self.transport.is_closing()


class Steps:
    """Of all streams at once, `pace` a second; 0: as quickly as can be."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.running: list[Running] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.running = [stream for stream in self.running if not stream.step()]
            if self.pace:
                due = max(due + 1 / self.pace, loop.time() - 1.0)  # one that was late catches up, within a second
            await asyncio.sleep(
                max(0.0, due - loop.time()) if self.running and self.pace else 0 if self.running else 0.01
            )


class Canned(asyncio.Protocol):
    def __init__(self, pace: float, steps: Steps | None = None) -> None:
        self.pace, self.steps = pace, steps
        self.rest = b""
        self.tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.rest += data
        while (end := self.rest.find(b"\r\n\r\n")) >= 0:
            head = self.rest[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.rest) < end + 4 + size:
                return
            path = self.rest.split(b" ", 2)[1].decode().partition("?")[0]
            body, self.rest = self.rest[end + 4 : end + 4 + size], self.rest[end + 4 + size :]
            self.answer(path, body)

    def answer(self, path: str, body: bytes) -> None:
        if path != "/v1/completions":
            found: Any = INFO.get(path)
            raw = json.dumps(found).encode()
            status = b"HTTP/1.1 404 Not Found\r\n" if found is None else HEAD
            self.transport.write(status + b"content-length: %d\r\n\r\n%s" % (len(raw), raw))
            return
        asked = json.loads(body)
        count = asked.get("max_tokens", 16)
        head = HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        if self.steps is not None:
            self.transport.write(head)
            self.steps.running.append(Running(self.transport, count))
            return
        if not self.pace:
            middle = [FIRST, *[MIDDLE] * (count - 2), LAST] if count > 1 else [token(0, True)]
            self.transport.write(head + b"".join(middle) + END)
            return
        self.transport.write(head)
        task = asyncio.get_running_loop().create_task(self.stream(count))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def stream(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(count):
            await asyncio.sleep(max(0.0, begun + number / self.pace - loop.time()))
            self.transport.write(MIDDLE if 0 < number < count - 1 else LAST if number else FIRST)
        self.transport.write(END)


async def main() -> None:
    pace = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    steps = Steps(pace) if "steps" in sys.argv else None
    server = await asyncio.get_running_loop().create_server(lambda: Canned(pace, steps), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    if steps is not None:
        await steps.run()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
