"""Chats that go on to the end that they would have had: also what a model thinks, and also without a limit. Scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from participant_shims.adapter import Part
from participant_shims.adapters.vllm import VllmAdapter
from tests.vllm.forms import ended
from tests.vllm.parts import export, load, part_of
from tests.vllm.real_engine import Caller
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import covered, freeze, generating, until

ASKED: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "temperature": 0,
    "return_token_ids": True, "logprobs": True,
}  # fmt: skip
WHOLE = [103 + n for n in range(8)]


async def cut_of(engine: Scripted, folder: Path, ask: dict[str, Any]) -> Part:
    """What is saved of that chat after five tokens."""
    for name in ("cut", "a", "b"):
        (folder / name).mkdir()
    async with covered(engine, folder / "a") as (adapter, caller):
        asked = asyncio.create_task(caller.stream(ask))
        await until(lambda: bool(engine.running))
        engine.step(5)
        await until(lambda: [len(r.token_ids) for r in adapter.proxy.in_flight.values()] == [5])
        await freeze(adapter)
        part = part_of(folder / "cut", await export(adapter, folder / "cut"))
        await ended(asked)
    return part


@asynccontextmanager
async def restored(engine: Scripted, folder: Path, part: Part) -> AsyncGenerator[tuple[VllmAdapter, Caller]]:
    """The next life of the shim, with that part, open."""
    async with covered(engine, folder / "b") as (adapter, caller):
        await load(adapter, part)
        await adapter.open()
        yield adapter, caller


@pytest.mark.parametrize("streams", [False, True])
async def test_no_token_of_what_it_thinks_is_generated_again(tmp_path: Path, streams: bool) -> None:
    async with scripted(thinks=True) as engine:
        part = await cut_of(engine, tmp_path, ASKED)
        async with restored(engine, tmp_path, part) as (adapter, caller):
            sent = len(engine.bodies)
            said = await generating(engine, caller.stream(ASKED) if streams else caller.whole(ASKED))
            assert (said.ids, said.label, said.finish) == (WHOLE, "exact; kept=5", "length")
            choices = [each["choices"][0] for each in said.raw[:-1]] if streams else said.raw["choices"]
            told = [choice.get("delta") or choice.get("message") or {} for choice in choices]
            assert "".join(each.get("reasoning") or "" for each in told) == "".join(f"w{n}" for n in WHOLE)
            assert not said.text
            assert (adapter.pool.tally.kept, adapter.pool.tally.again) == (5, 0)
            assert [b["prompt"] for b in engine.bodies[sent:] if b.get("stream")] == [[1, 2, 3, *WHOLE[:5]]]


@pytest.mark.parametrize(("usual", "label"), [(8, "exact; kept=5"), (0, "")])
async def test_a_chat_without_a_limit_ends_where_its_server_would_have_ended_it(
    tmp_path: Path, usual: int, label: str
) -> None:
    ask = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    async with scripted(usual_limit=usual, model_config={"generation_config": "auto"}) as engine:
        part = await cut_of(engine, tmp_path, ask)
        async with restored(engine, tmp_path, part) as (adapter, caller):
            said = await generating(engine, caller.whole(ask))
            assert (said.ids, said.label) == ([103 + n for n in range(usual or 16)], label)
            assert adapter.pool.tally.regenerated == int(not usual)


@pytest.mark.parametrize("stops_at", [1, 7])
@pytest.mark.parametrize("shown", [False, True])
async def test_the_token_that_ended_an_answer_is_written_only_where_it_was_asked_for(
    tmp_path: Path, stops_at: int, shown: bool
) -> None:
    """vLLM does not write it: half a character before it is left out, and `</s>` is no text."""
    async with scripted(thinks=True, stops_at=stops_at) as engine, covered(engine, tmp_path) as (_, caller):
        asked = asyncio.create_task(caller.whole({**ASKED, "include_stop_str_in_output": shown}))
        await until(lambda: bool(engine.running))
        engine.step(8)
        choice = (await asked).raw["choices"][0]
        wanted = "".join(f"w{n}" for n in WHOLE[: stops_at if shown else stops_at - 1])
        assert (choice["message"]["reasoning"] or "", choice["message"]["content"]) == (wanted, None)
        assert (choice["token_ids"], choice["finish_reason"]) == (WHOLE[:stops_at], "stop")


async def test_what_goes_on_to_the_token_that_ends_it_does_not_write_it_either(tmp_path: Path) -> None:
    async with scripted(thinks=True, stops_at=7) as engine:
        part = await cut_of(engine, tmp_path, ASKED)
        async with restored(engine, tmp_path, part) as (_, caller):
            said = await generating(engine, caller.whole(ASKED))
            choice = said.raw["choices"][0]
            assert choice["message"]["reasoning"] == "".join(f"w{n}" for n in WHOLE[:6])
            assert (choice["token_ids"], said.label) == (WHOLE[:7], "exact; kept=5")


@pytest.mark.parametrize("more", [{"stop": ["w"]}, {"include_reasoning": False}])
async def test_an_answer_that_cannot_be_made_of_tokens_is_left_to_vllm(tmp_path: Path, more: dict[str, Any]) -> None:
    """Of a stop string no token tells where the text ends, and of an answer whose reasoning is left out no token is told."""
    async with scripted(thinks=True) as engine, covered(engine, tmp_path) as (adapter, caller):
        asked = asyncio.create_task(caller.whole({**ASKED, **more}))
        await until(lambda: bool(engine.running))
        assert engine.bodies == [{**ASKED, **more}]
        assert [bool(record.anew) for record in adapter.proxy.in_flight.values()] == [True]
        engine.step(8)
        await asked
