"""The proxy changes nothing that a caller sees: compared with what the engine says without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.real_engine import Caller, chat, completion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}]  # fmt: skip
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
BARE: dict[str, Any] = {"return_token_ids": None, "logprobs": None}

ASKED = {
    "completion": completion(tokens=24),
    "completion, bare": completion(tokens=24, **BARE),
    "completion, alternatives": completion(tokens=12, logprobs=3),
    "completion to its end": completion(tokens=200, ignore_eos=False, seed=3, temperature=1.0),
    "completion from ids": completion([5, 6, 7, 80], tokens=8),
    "completion, stop string": completion(tokens=40, stop=["a"]),
    "completion, echo": completion(tokens=8, echo=True),
    "completion, two answers": completion(tokens=8, n=2, temperature=1.0, seed=4),
    "completion, two prompts": completion(["one", "two"], tokens=8),
    "chat": chat(tokens=24),
    "chat, bare": chat(tokens=24, **BARE),
    "chat, alternatives": chat(tokens=12, top_logprobs=3),
    "chat, tools": chat(tokens=24, tools=TOOLS, tool_choice="auto"),
    "chat, tools, to its end": chat("why", tokens=60, tools=TOOLS, ignore_eos=False),
    "chat, tools, stop string": chat("why", tokens=60, tools=TOOLS, stop=["a"]),
    "chat, tools, stop token": chat(tokens=60, tools=TOOLS, stop_token_ids=list(range(256, 400))),
    "chat, tools, nothing said": chat(tokens=60, tools=TOOLS, stop_token_ids=list(range(512))),
    "chat, reasoning left out": chat(tokens=8, include_reasoning=False),
    "chat, tool required": chat(tokens=60, tools=STRICT, tool_choice="required", ignore_eos=False),
    "chat, json": chat(tokens=30, response_format={"type": "json_object"}),
    "chat, seeded": chat(tokens=24, temperature=0.8, seed=7),
    "chat, usage": chat(tokens=8, **BARE),
}


def bare(answer: Any) -> Any:
    """Without what differs between two equal requests."""
    if isinstance(answer, list):
        return [bare(part) for part in answer]
    if isinstance(answer, dict):
        return {k: bare(v) for k, v in answer.items() if not (k in ("id", "created") and isinstance(v, (str, int)))}
    return answer


def joined(chunks: list[Any]) -> Any:
    """A stream without its cuts: a stream is cut where the machine's load has it."""
    out: dict[str, Any] = {"text": "", "ids": [], "prompt": None, "lp": [], "ends": [], "usage": None, "calls": ""}
    for chunk in chunks:
        if chunk == "[DONE]":
            out["done"] = True
            continue
        out["usage"] = chunk.get("usage") or out["usage"]
        out["keys"] = out.get("keys", set()) | set(chunk) - {"usage"}
        out["prompt"] = chunk.get("prompt_token_ids") or out["prompt"]
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            out["text"] += choice.get("text") or delta.get("content") or ""
            out["calls"] += "".join(c["function"].get("arguments") or "" for c in delta.get("tool_calls") or [])
            out["ids"] += choice.get("token_ids") or []
            out["prompt"] = choice.get("prompt_token_ids") or out["prompt"]
            logprobs = choice.get("logprobs") or {}
            out["lp"] += logprobs.get("content") or list(zip(*logprobs.values(), strict=False))
            if choice.get("finish_reason"):
                out["ends"].append((choice["index"], choice["finish_reason"], choice.get("stop_reason")))
    return out


@pytest.mark.parametrize("name", sorted(ASKED))
async def test_an_answer_is_the_engines_own(name: str, direct: Caller, caller: Caller) -> None:
    wanted, got = await direct.whole(ASKED[name]), await caller.whole(ASKED[name])
    assert bare(got.raw) == bare(wanted.raw)
    assert list(got.raw) == list(wanted.raw)


@pytest.mark.parametrize("name", sorted(n for n in ASKED if "echo" not in n and "two" not in n))
async def test_a_stream_is_the_engines_own(name: str, direct: Caller, caller: Caller) -> None:
    asked = {**ASKED[name], **({"stream_options": {"include_usage": True}} if "usage" in name else {})}
    wanted, got = await direct.stream(asked), await caller.stream(asked)
    assert joined(got.raw) == joined(wanted.raw)


async def test_what_the_engine_refuses_is_refused_in_its_words(direct: Caller, caller: Caller) -> None:
    for path, body in (
        ("/v1/completions", completion(tokens=-1)),
        ("/v1/completions", completion(tokens=100_000)),
        ("/v1/completions", completion(stream_options={"include_usage": True})),
        ("/v1/chat/completions", {**chat(top_logprobs=3), "logprobs": None}),
        ("/v1/chat/completions", {"model": "tiny", "messages": "no"}),
        ("/v1/chat/completions", {"model": "who", "messages": [{"role": "user", "content": "x"}]}),
    ):
        assert await caller.post(path, body) == await direct.post(path, body)


async def test_other_routes_pass(direct: Caller, caller: Caller) -> None:
    assert await caller.get("/version") == await direct.get("/version")
    body = {"model": "tiny", "prompt": "abc"}
    assert await caller.post("/tokenize", body) == await direct.post("/tokenize", body)
