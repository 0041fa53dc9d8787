"""The policy: a reply depends on its conversation alone, always parses, and its tokens are really the network's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.demo.compare import read_generations
from coordinator.demo.conversation import conversation_digest
from coordinator.demo.grammar import MAX_TEXT, MIN_TEXT, Decoder, Tool
from coordinator.demo.network import Network, prompt_ids
from coordinator.demo.policy import MAX_TURNS, MIN_TURNS, GenerationLog, Policy, render, serve
from coordinator.demo.rows import make_tasks
from tests.examples import examples

SCALARS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "integer", "enum": [1, 12, 123]},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string"},
        {"type": "string", "enum": ["a", "ab", 'quo"te', "\u00e9"]},
        {},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items}),
        st.dictionaries(st.sampled_from(["x", "y", "z w"]), inner, max_size=3).map(
            lambda properties: {"type": "object", "properties": properties, "required": list(properties)}
        ),
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["count", "name", "list"]), SCHEMAS, max_size=3).map(
    lambda properties: {"type": "object", "properties": properties, "required": list(properties)}
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a decoded value is of its schema: written here again, so that the grammar is not its own judge."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema.get("type", "string"):
        case "integer" | "number":
            return type(value) is int
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "array":
            return isinstance(value, list) and bool(value) and all(fits(each, schema["items"]) for each in value)
        case "object":
            properties = schema["properties"]
            return set(value) == set(properties) and all(fits(value[name], properties[name]) for name in value)
        case _:
            return isinstance(value, str) and value.isalpha()


@given(parameters=st.lists(OBJECTS, min_size=1, max_size=3), seed=st.integers(), must=st.booleans(), may=st.booleans())
@settings(deadline=None, max_examples=examples(200))
def test_whatever_bytes_are_chosen_the_reply_parses_and_its_arguments_fit_the_schema(
    parameters: list[dict[str, Any]], seed: int, must: bool, may: bool
) -> None:
    tools = [Tool(f"tool_{'x' * number}", schema) for number, schema in enumerate(parameters)]
    chance = random.Random(seed)
    decoder = Decoder(tools, must_call=must, may_call=may)
    while allowed := decoder.allowed():
        decoder.push(chance.choice(allowed))
    reply = decoder.reply()
    assert MIN_TEXT <= len(reply.text) <= MAX_TEXT
    if reply.tool is None:
        assert not (must and may)
    else:
        assert may
        schema = {tool.name: tool.parameters for tool in tools}[reply.tool]
        assert fits(json.loads(reply.arguments), dict(schema))


def test_a_byte_that_is_not_allowed_is_refused_and_changes_nothing() -> None:
    decoder = Decoder([], must_call=False, may_call=True)
    before = decoder.allowed()
    with pytest.raises(ValueError, match="not allowed"):
        decoder.push(ord("9"))
    assert decoder.allowed() == before
    with pytest.raises(ValueError, match="not complete"):
        decoder.reply()


def conversation(number: int, turns: int) -> dict[str, Any]:
    """The body of a call in the middle of a rollout."""
    row = make_tasks(number + 1, 7)[number].row["responses_create_params"]
    messages: list[dict[str, Any]] = list(row["input"])
    for turn in range(turns):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "x", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "hm", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": str(turn)})
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"]}}
        for tool in row["tools"]
    ]
    return {"model": "m", "messages": messages, "tools": tools, "logprobs": True}


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(7)


def test_a_reply_depends_on_its_conversation_alone_whatever_came_before(network: Network) -> None:
    bodies = [conversation(number, number % 4) for number in range(12)]
    log = GenerationLog(None)
    first = [Policy(network, log, 0).generate(body) for body in bodies]
    order = list(range(12))
    random.Random(3).shuffle(order)
    torch.manual_seed(99)
    again = Policy(Network(7), log, 0)
    shuffled = {number: again.generate(bodies[number]) for number in order}
    assert [shuffled[number] for number in range(12)] == first
    assert len({digest for digest, _, _ in first}) == 12


def test_another_seed_or_another_word_is_another_reply(network: Network) -> None:
    body = conversation(0, 1)
    log = GenerationLog(None)
    said = Policy(network, log, 0).generate(body)
    assert Policy(Network(8), log, 0).generate(body)[2] != said[2]
    body["messages"][0] = {**body["messages"][0], "content": body["messages"][0]["content"] + " now"}
    assert Policy(network, log, 0).generate(body)[0] != said[0]


def test_log_probabilities_are_those_of_the_network_for_the_tokens_it_sampled(network: Network) -> None:
    digest, length, generation = Policy(network, GenerationLog(None), 0).generate(conversation(1, 2))
    ids = prompt_ids(render(conversation(1, 2)["messages"], conversation(1, 2)["tools"]))
    assert (digest, length) == (conversation_digest(7, ids), len(ids))
    # In one piece instead of token by token: what the network says of the whole text.
    whole = torch.tensor([*ids, *generation.token_ids]).unsqueeze(0)
    with torch.inference_mode():
        out, _ = network._model.recurrent(network._model.embedding(whole))
        log_probs = torch.log_softmax(network._model.head(out[0]), dim=1)
    expected = [float(log_probs[len(ids) - 1 + at, token]) for at, token in enumerate(generation.token_ids)]
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)
    assert all(log_prob < 0 for log_prob in generation.log_probs)


def test_a_rollout_takes_between_three_and_eight_turns_and_not_always_the_same(network: Network) -> None:
    policy = Policy(network, GenerationLog(None), 0)
    turns: list[int] = []
    for number in range(16):
        body = conversation(number, 0)
        while True:
            reply = policy.generate(body)[2].reply
            body["messages"].append({"role": "assistant", "content": reply.text})
            if reply.tool is None:
                break
            assert reply.tool in {tool["function"]["name"] for tool in body["tools"]}
            body["messages"].append({"role": "tool", "content": "ok"})
        turns.append(sum(message["role"] == "assistant" for message in body["messages"]))
    assert min(turns) >= MIN_TURNS
    assert max(turns) <= MAX_TURNS
    assert len(set(turns)) > 2


@pytest.fixture
async def endpoint(network: Network, tmp_path: Path) -> AsyncIterator[tuple[Policy, str]]:
    policy = Policy(network, GenerationLog(tmp_path / "log.jsonl"), token_s=0.0)
    runner = await serve(policy, "127.0.0.1", 0)
    host, port = runner.addresses[0][:2]
    yield policy, f"http://{host}:{port}"
    await runner.cleanup()


async def test_the_endpoint_answers_as_vllm_does_with_token_ids_that_spell_the_call(
    endpoint: tuple[Policy, str],
) -> None:
    _, url = endpoint
    body = conversation(0, 0)
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
        async with session.post(f"{url}/tokenize", json=body) as response:
            tokens = (await response.json())["tokens"]
        async with session.get(f"{url}/stats") as response:
            stats = await response.json()
    choice = answer["choices"][0]
    ids = [int(entry["token"].removeprefix("token_id:")) for entry in choice["logprobs"]["content"]]
    call = choice["message"]["tool_calls"][0]["function"]
    assert bytes(ids).decode() == f"{choice['message']['content']};{call['name']} {call['arguments']}\n"
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    digest = conversation_digest(7, tokens)
    assert choice["message"]["tool_calls"][0]["id"] == f"call_{digest[:24]}"
    assert stats == {"calls": {digest: 1}, "begun": 1, "finished": 1, "aborted": 0, "in_flight": 0}


async def test_a_client_that_leaves_aborts_its_generation_and_the_log_says_so(
    endpoint: tuple[Policy, str], tmp_path: Path
) -> None:
    policy, url = endpoint
    policy.token_s = 60.0
    async with aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(f"{url}/v1/chat/completions", json=conversation(0, 0)))
        async with asyncio.timeout(20):
            while not policy.begun:
                await asyncio.sleep(0.01)
            call.cancel()
            while not policy.aborted:
                await asyncio.sleep(0.01)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["begin", "abort"]
    generations = read_generations([*lines, '{"event": "end", "dig'])
    assert list(generations.begun.values()) == [1]
    assert not generations.finished
