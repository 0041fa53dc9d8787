"""The demo's inference engine: the network behind an OpenAI chat endpoint, as NeMo Gym's vllm_model calls it.

    python -m coordinator.demo.policy --port 0 --seed 7 --log build/demo/policy.jsonl

It stands for a vLLM server, so it is killed and started again with everything else. The rule it keeps: every generation
is in the log, once when it begins and once when it ends, written to the kernel before anything is answered. So that the
demo counts repeated calls from what happened and not from what it believes, across SIGKILL too: a begin without an end
is a generation that the kill took.

A generation takes `--token-ms` for each sampled token, like a real one; the digest of a conversation is that of its
prompt tokens, so that calls found in a snapshot can be looked up in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from coordinator.demo.conversation import conversation_digest
from coordinator.demo.grammar import Decoder, Schema, Tool
from coordinator.demo.network import Generation, Network, prompt_ids

# A rollout has between so many model calls; the sampled tokens decide within them.
MIN_TURNS: Final = 3
MAX_TURNS: Final = 8
MAX_LENGTH: Final = 32_768


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """The chat template: all that a reply may depend on, one line for each part."""
    lines: list[str] = []
    for tool in tools:
        parameters = json.dumps(tool["function"].get("parameters") or {}, sort_keys=True, separators=(",", ":"))
        lines.append(f"tool {tool['function']['name']} {parameters}")
    for message in messages:
        lines.append(f"{message['role']} {_content(message)}")
        for call in message.get("tool_calls") or ():
            lines.append(f"call {call['function']['name']} {call['function']['arguments']}")
    return "\n".join(lines)


def tools_of(body: Mapping[str, Any]) -> list[Tool]:
    """The tools that a request offers."""
    found: list[Tool] = []
    for tool in body.get("tools") or ():
        parameters: Schema = tool["function"].get("parameters") or {}
        found.append(Tool(tool["function"]["name"], parameters))
    return found


def decoder_for(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> Decoder:
    """What may be said at this point of a rollout.

    A rollout looks before it ends: where there are tools without arguments, the last call is to one of them. So the answer
    of its last call is the state of its environment, as the environment itself gives it.
    """
    said = [message for message in messages if message["role"] == "assistant"]
    turn = 1 + len(said)
    readers = [tool for tool in tools if not tool.parameters.get("properties")]
    called = [call["function"]["name"] for call in (said[-1].get("tool_calls") or ())] if said else []
    has_looked = not readers or any(tool.name in called for tool in readers)
    if readers and turn == MAX_TURNS - 1:
        return Decoder(readers, must_call=not has_looked, may_call=True)
    return Decoder(tools, must_call=turn < MIN_TURNS or not has_looked, may_call=turn < MAX_TURNS)


@dataclass
class GenerationLog:
    """An append-only JSONL file of generations. Each line is one write(2), so a kill leaves whole lines."""

    path: Path | None
    _fd: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, **line: object) -> None:
        """Add one line, with the wall-clock time in seconds."""
        if self._fd >= 0:
            os.write(self._fd, json.dumps({**line, "time": time.time()}).encode() + b"\n")


@dataclass
class Policy:
    """The endpoint's state. `token_s`: seconds that one sampled token takes."""

    network: Network
    log: GenerationLog
    token_s: float
    calls: Counter[str] = field(default_factory=lambda: Counter[str]())
    begun: int = 0
    finished: int = 0
    aborted: int = 0

    def generate(self, body: Mapping[str, Any]) -> tuple[str, int, Generation]:
        """The digest of the conversation, the length of its prompt, and the reply: always the same for the same body."""
        ids = prompt_ids(render(body["messages"], body.get("tools") or ()))
        decoder = decoder_for(body["messages"], tools_of(body))
        return conversation_digest(self.network.seed, ids), len(ids), self.network.generate(ids, decoder)

    async def chat(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions: one generation. A client that leaves aborts it."""
        body: dict[str, Any] = await request.json()
        digest, prompt_length, generation = self.generate(body)
        self.calls[digest] += 1
        self.begun += 1
        number = self.begun
        self.log.write(event="begin", call=number, digest=digest, tokens=len(generation.token_ids))
        try:
            await asyncio.sleep(self.token_s * len(generation.token_ids))
        except asyncio.CancelledError:
            self.aborted += 1
            self.log.write(event="abort", call=number, digest=digest)
            raise
        self.finished += 1
        self.log.write(event="end", call=number, digest=digest)
        return web.json_response(completion(body, digest, prompt_length, generation))

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: the tokens of a prompt."""
        body: dict[str, Any] = await request.json()
        ids = prompt_ids(render(body["messages"], body.get("tools") or ()))
        return web.json_response({"count": len(ids), "max_model_len": MAX_LENGTH, "tokens": ids})

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [{"id": "demo-policy", "object": "model"}]})

    async def stats(self, request: web.Request) -> web.Response:
        """GET /stats: generations of this process by conversation digest, and how they stand."""
        return web.json_response(
            {
                "calls": dict(self.calls),
                "begun": self.begun,
                "finished": self.finished,
                "aborted": self.aborted,
                "in_flight": self.begun - self.finished - self.aborted,
            }
        )

    def application(self) -> web.Application:
        """The endpoint as an aiohttp application."""
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat),
                web.post("/tokenize", self.tokenize),
                web.get("/v1/models", self.models),
                web.get("/stats", self.stats),
            ]
        )
        return app


def completion(body: Mapping[str, Any], digest: str, prompt_length: int, generation: Generation) -> dict[str, Any]:
    """The response in OpenAI's form, with tokens as ids in vLLM's (`token_id:N`). A function of its arguments."""
    reply = generation.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool is not None:
        function = {"name": reply.tool, "arguments": reply.arguments}
        # From the conversation, not from chance: the id comes back in the next prompt.
        message["tool_calls"] = [{"id": f"call_{digest[:24]}", "type": "function", "function": function}]
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": "stop" if reply.tool is None else "tool_calls",
    }
    if body.get("logprobs"):
        choice["logprobs"] = {
            "content": [
                {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
                for token, log_prob in zip(generation.token_ids, generation.log_probs, strict=True)
            ]
        }
    return {
        "id": f"chatcmpl-{digest[:24]}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model") or "demo-policy",
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_length,
            "completion_tokens": len(generation.token_ids),
            "total_tokens": prompt_length + len(generation.token_ids),
        },
    }


async def serve(policy: Policy, host: str, port: int) -> web.AppRunner:
    """Listen; the address is `runner.addresses[0]`. The caller ends it with `runner.cleanup()`."""
    # Without handler_cancellation aiohttp lets a handler run on after its client has left, and no abort would be seen.
    runner = web.AppRunner(policy.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


async def _main(args: argparse.Namespace) -> None:
    policy = Policy(Network(args.seed), GenerationLog(args.log), args.token_ms * args.slow / 1000)
    runner = await serve(policy, args.host, args.port)
    host, port = runner.addresses[0][:2]
    print(json.dumps({"base_url": f"http://{host}:{port}/v1", "pid": os.getpid()}), flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """`python -m coordinator.demo.policy`: prints one JSON line with its address, then serves until it is killed."""
    parser = argparse.ArgumentParser(description="the demo's policy: a random network behind an OpenAI chat endpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--token-ms", type=float, default=12.0, help="how long a sampled token takes")
    parser.add_argument("--slow", type=float, default=1.0, help="multiplies --token-ms")
    parser.add_argument("--log", type=Path, default=None, help="append one line for each begin, end and abort")
    try:
        asyncio.run(_main(parser.parse_args()))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
