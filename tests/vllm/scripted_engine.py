"""A server that behaves like vLLM until a script says otherwise: for faults that a real one can't be made to show.

It generates by the clock of `step()`: a token for each running request. Knobs change what control calls do.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Scripted:
    """`pause_fault` and `resume_fault`: "lost" (served, then the connection is cut), "unserved" (cut before it is
    served), or a status to answer; each for one call. `slow_s`: how long control calls take."""

    version: str = "0.32.0"
    dev_mode: bool = True
    parallel: dict[str, Any] = field(default_factory=dict)
    weight_version: str = "default"
    checksums: dict[str, str] = field(default_factory=dict)  # of the weights; empty: it has none
    pause_fault: list[Any] = field(default_factory=list)
    resume_fault: list[Any] = field(default_factory=list)
    slow_s: float = 0.0
    deaf: bool = False  # is_paused does not answer
    # As a real one: while something runs, control calls and is_paused are answered when a step ends; "pause first": in
    # another order than that in which they came.
    between_steps: str = ""
    waiting: list[tuple[str, asyncio.Future[None]]] = field(default_factory=list)
    aborts_silently: bool = False  # an abort tells nobody
    full: bool = False  # it has one slot: who comes later waits
    leaks: bool = False  # goes on generating while it is paused: rank 1, when it has several
    tokens: int = 0  # of rank 1
    looks: int = 0  # at is_paused
    rejects: int = 0  # status for requests
    mute: bool = False  # tokens of a chat have no text, as in the middle of a character
    thinks: bool = False  # what it says in a chat is reasoning; it reads that from ids, too
    stops_at: int = 0  # the token of an answer that ends it, and has no text; 0: none does
    model_config: dict[str, Any] = field(default_factory=dict)  # as /server_info shows it
    usual_limit: int = (
        0  # tokens of a chat that asks for no number, as a server tells that renders; 0: it renders nothing
    )
    api_key: str = ""  # without which nobody gets an answer below /v1
    ends_bare: bool = False  # a stream is a bare [DONE]
    fails: int = 0  # the code with which a stream fails in its first event; its end comes with the next step
    paused: bool = False
    calls: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    connections: set[Any] = field(default_factory=set)
    generating: dict[int, Any] = field(default_factory=dict)  # connections of what runs
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: dict[int, asyncio.Queue[int]] = field(default_factory=dict)
    left: int = 0  # requests whose caller went away
    port: int = 0
    serial: int = 0
    started: float = 1000.0
    model: str = "tiny"
    max_model_len: int = 4096

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def step(self, tokens: int = 1) -> None:
        """Every running request gets so many tokens, unless it is paused."""
        if self.paused and not self.leaks:
            return
        for queue in list(self.running.values())[: 1 if self.full else None]:
            for _ in range(tokens):
                queue.put_nowait(1)
                self.tokens += 1
        if self.between_steps == "pause first":
            self.waiting.sort(reverse=True)
        for _, turn in self.waiting:
            turn.set_result(None)
        self.waiting.clear()

    def dies(self, successor: str) -> None:
        """What runs breaks off, and another process, of those weights, is there at once."""
        self.started, self.weight_version = self.started + 1000, successor
        for transport in self.generating.values():
            transport.abort()

    async def _turn(self, path: str) -> None:
        if self.between_steps and self.running and not self.paused:
            self.waiting.append((path, asyncio.get_running_loop().create_future()))
            await self.waiting[-1][1]

    async def control(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path_qs)
        self.connections.add(request.transport)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            faults = {"/pause": self.pause_fault, "/resume": self.resume_fault}.get(request.path)
            fault = faults.pop(0) if faults else None
            if fault == "unserved":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if isinstance(fault, int):
                return web.json_response({"error": "scripted"}, status=fault)
            await asyncio.sleep(self.slow_s)
            await self._turn(request.path)
            if request.path in ("/pause", "/resume", "/wake_up"):  # waking up undoes a pause, too
                self.paused = request.path == "/pause"
            if request.query.get("mode") == "abort" and not self.aborts_silently:
                for queue in self.running.values():
                    queue.put_nowait(-1)
            if fault == "lost":
                assert request.transport is not None
                request.transport.abort()
            return web.json_response({"status": "paused" if self.paused else "resumed"})
        finally:
            self.at_once -= 1

    async def look(self, request: web.Request) -> web.StreamResponse:
        if not self.dev_mode:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.looks += 1
        if self.deaf:
            await asyncio.sleep(3600)
        await self._turn(request.path)
        return web.json_response({"is_paused": self.paused})

    async def untrue(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path_qs)
        return web.json_response({"server_load": 0})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.rejects:
            return web.json_response({"error": {"code": self.rejects, "message": "scripted"}}, status=self.rejects)
        chat = request.path.startswith("/v1/chat")
        prompt = body["prompt"] if isinstance(body.get("prompt"), list) else [1, 2, 3]
        self.serial += 1
        mine, limit = self.serial, body.get("max_tokens", self.usual_limit or 16)
        queue = self.running[mine] = asyncio.Queue()
        self.generating[mine] = request.transport
        head = {"id": f"x-{mine}", "object": "o", "created": 5, "model": "tiny"}
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        if body.get("stream"):
            await response.prepare(request)
        if self.fails:
            failed = {"error": {"code": self.fails, "message": "scripted"}}
            await response.write(b"data: " + json.dumps(failed).encode() + b"\n\n")
            await queue.get()
            await response.write(b"data: [DONE]\n\n")
            return response
        words: list[int] = []
        finish = "length"
        try:
            while len(words) < limit and not self.ends_bare:
                if await queue.get() < 0:
                    finish = "abort"
                    break
                # The same token at the same place, whatever was prompt and what was generated before.
                words.append(100 + len(prompt) + len(words))
                if body.get("stream"):
                    stops = self.stops_at > 0 and len(prompt) + len(words) - 3 == self.stops_at
                    last = stops or len(words) == limit
                    said = chunk(words[-1:], chat, len(words) == 1, prompt, last, "stop" if stops else "length")
                    if stops and chat:
                        said["delta"]["content"] = ""
                    if self.thinks and chat:
                        said["delta"] = {"reasoning": said["delta"]["content"]}
                    await response.write(event(head, {**said, "delta": {}} if self.mute and not last else said))
                    if stops:
                        break
            if body.get("stream"):
                if finish == "abort":
                    await response.write(event(head, chunk([], chat, False, prompt, True, finish)))
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
                return response
            text = "".join(f"w{w}" for w in words)
            return web.json_response({**head, "choices": [{"index": 0, "text": text, "finish_reason": finish}]})
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        finally:
            del self.running[mine], self.generating[mine]


def event(head: dict[str, Any], choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"


def chunk(
    ids: list[int], chat: bool, first: bool, prompt: list[int], last: bool, finish: str = "length"
) -> dict[str, Any]:  # fmt: skip
    text = "".join(f"w{i}" for i in ids)
    common = {"index": 0, "finish_reason": finish if last else None, "token_ids": ids}
    if chat:
        entries = [{"token": f"w{i}", "logprob": -0.5, "bytes": [], "top_logprobs": []} for i in ids]
        prompted = {"prompt_token_ids": prompt} if first else {}
        return {**common, **prompted, "delta": {"content": text}, "logprobs": {"content": entries}}
    return {
        **common, "text": text, "stop_reason": None, "prompt_token_ids": prompt if first else None,
        "logprobs": {"text_offset": [0] * len(ids), "token_logprobs": [-0.5] * len(ids),
                     "tokens": [f"w{i}" for i in ids], "top_logprobs": [None] * len(ids)},
    }  # fmt: skip


@asynccontextmanager
async def scripted(port: int = 0, **knobs: Any) -> AsyncIterator[Scripted]:
    """The server, listening; port 0: any."""
    made = Scripted(**knobs)

    async def info(_: web.Request) -> web.Response:
        config: dict[str, Any] = {"parallel_config": made.parallel, "model_config": made.model_config}
        if made.thinks:
            config["structured_outputs_config"] = {"reasoning_parser": "scripted"}
        return web.json_response({"vllm_config": config})

    async def derender(request: web.Request) -> web.Response:
        asked = await request.json()
        if not asked:
            return web.json_response({}, status=400 if made.thinks or made.usual_limit else 404)
        choice = asked["generate_response"]["choices"][0]
        if not choice["token_ids"]:
            return web.json_response({"error": "empty or null token_ids"}, status=400)
        message = {"role": "assistant", "content": None, "reasoning": "".join(f"w{i}" for i in choice["token_ids"])}
        return web.json_response({"choices": [{"message": message, "finish_reason": choice["finish_reason"]}]})

    @web.middleware
    async def keyed(request: web.Request, handler: Any) -> web.StreamResponse:
        knows = request.headers.get("authorization") == f"Bearer {made.api_key}"
        if made.api_key and request.path.startswith("/v1") and not knows:
            return web.json_response({"error": "Unauthorized"}, status=401)
        answered: web.StreamResponse = await handler(request)
        return answered

    async def render(request: web.Request) -> web.Response:
        if not made.usual_limit:
            return web.json_response({}, status=404)
        asked = await request.json()
        limit = asked.get("max_tokens", made.usual_limit)
        told = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": min(limit, made.max_model_len - 3)}}
        return web.json_response(told if "messages" in asked else [told])

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": made.model, "max_model_len": made.max_model_len}]})

    async def weights(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": made.weight_version})

    async def checker(request: web.Request) -> web.Response:
        if not made.checksums or (await request.json()) != {"action": "checksum"}:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"checksums": made.checksums})

    async def metrics(_: web.Request) -> web.Response:
        ranks = range(made.parallel.get("data_parallel_size", 1))
        counts = "".join(
            f'vllm:generation_tokens_total{{engine="{rank}",model_name="tiny"}} {made.tokens if rank == 1 else 7}.0\n'
            for rank in ranks
        )
        return web.Response(
            text=f"# HELP x\nprocess_start_time_seconds {made.started}\nvllm:num_requests_running 0\n"
            f"vllm:num_requests_waiting 0\n{counts}"
        )

    app = web.Application(middlewares=[keyed])
    app.add_routes(
        [
            web.get("/version", _always({"version": made.version})),
            web.get("/is_paused", made.look),
            web.post("/pause", made.control),
            web.post("/resume", made.control),
            web.get("/v1/models", models),
            web.get("/metrics", metrics),
            web.get("/server_info", info),
            web.get("/weight_info", weights),
            web.post("/weight_checker", checker if made.checksums else made.control),
            web.post("/v1/completions", made.generate),
            web.post("/v1/chat/completions", made.generate),
            web.post("/v1/chat/completions/derender", derender),
            web.post("/v1/{kind:(chat/)?completions}/render", render),
            web.post("/v1/responses", made.generate),
            web.post("/v1/messages", made.generate),
            # What else steers an engine, and what tells untruths about one: /health is 200 whatever happens, the others
            # count nothing while it is paused, or in one process only.
            web.post("/{steers:.*}", made.control),
            web.get("/{untrue:health|load}", made.untrue),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        await runner.cleanup()


def _always(value: Any) -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(value)

    return answer


async def main() -> None:
    """As a process, which can be stopped and killed: `python -m tests.vllm.scripted_engine PORT` prints its port and gives
    each request a token every 20 ms."""
    async with scripted(port=int(sys.argv[1]), started=time.time()) as engine:
        print(engine.port, flush=True)
        while True:
            await asyncio.sleep(0.02)
            engine.step()


if __name__ == "__main__":
    asyncio.run(main())
