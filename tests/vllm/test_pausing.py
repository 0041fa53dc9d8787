"""Pausing an engine that answers between two steps, as vLLM does: soon, without taking somebody else's pause for ours, and
with every token that was said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Exported
from tests.vllm.parts import part_of
from tests.vllm.real_engine import Caller, Said
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import ASK, covered, freeze, until


@asynccontextmanager
async def stepping(engine: Scripted) -> AsyncGenerator[None]:
    async def steps() -> None:
        while True:
            engine.step()
            await asyncio.sleep(0.005)

    task = asyncio.create_task(steps())
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def generating(engine: Scripted, caller: Caller) -> AsyncGenerator[Said]:
    """One stream, after its first token."""
    said = Said()
    stream = asyncio.create_task(caller.stream({**ASK, "max_tokens": 500}, said))
    try:
        await until(lambda: bool(engine.running))
        engine.step()
        await until(lambda: len(said.ids) == 1)
        yield said
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def test_who_generates_is_paused_at_the_end_of_the_step_that_runs_and_not_of_the_next(tmp_path: Path) -> None:
    async with (
        scripted(between_steps="in order") as engine,
        covered(engine, tmp_path) as (adapter, caller),
        generating(engine, caller) as said,
    ):
        freezing = asyncio.create_task(freeze(adapter))
        await until(lambda: [path for path, _ in engine.waiting] == ["/is_paused", "/pause"])
        engine.step()
        assert (await freezing).quiesced
        assert len(said.ids) == 1
        async with stepping(engine):
            await adapter.open()
            await until(lambda: len(said.ids) > 1)


async def test_a_pause_of_somebody_else_that_has_just_begun_outlives_ours(tmp_path: Path) -> None:
    """The last token came a moment ago, as if it still generated."""
    async with (
        scripted(between_steps="in order") as engine,
        covered(engine, tmp_path) as (adapter, caller),
        generating(engine, caller),
    ):
        engine.paused = True
        assert (await freeze(adapter)).quiesced
        await adapter.open()
        assert engine.paused
        assert "/resume" not in engine.calls


async def test_a_pause_that_is_served_before_the_question_who_had_paused_is_ours(tmp_path: Path) -> None:
    async with (
        scripted(between_steps="pause first") as engine,
        covered(engine, tmp_path) as (adapter, caller),
        generating(engine, caller),
    ):
        freezing = asyncio.create_task(freeze(adapter))
        await until(lambda: len(engine.waiting) == 2)
        engine.step()
        assert (await freezing).quiesced
        async with stepping(engine):
            await adapter.open()
        assert not engine.paused


async def test_who_is_silent_is_asked_before_it_is_paused(tmp_path: Path) -> None:
    async with scripted(paused=True) as engine, covered(engine, tmp_path) as (adapter, _):
        assert (await freeze(adapter)).quiesced
        await adapter.open()
        assert engine.paused
        assert not any(path.startswith(("/pause", "/resume")) for path in engine.calls)


async def test_who_was_silent_and_says_something_while_it_is_asked_is_paused_without_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is busy is late with its answer; what it generates comes all the same."""
    monkeypatch.setattr("participant_shims.adapters.vllm_freeze.LATELY_S", 0.0)
    async with scripted() as engine, covered(engine, tmp_path) as (adapter, caller), generating(engine, caller):
        engine.deaf, before = True, engine.looks
        freezing = asyncio.create_task(freeze(adapter))
        await until(lambda: engine.looks > before)
        engine.deaf = False  # for whoever asks next
        async with stepping(engine), asyncio.timeout(3):
            assert (await freezing).quiesced
        await adapter.open()
        assert not engine.paused


async def test_of_a_generation_of_32_000_tokens_the_cut_has_every_one_and_only_the_rest_is_asked_for(
    tmp_path: Path,
) -> None:
    said, more, ask = 32_000, 5, {**ASK, "max_tokens": 32_005}
    directory = tmp_path / "cut"
    directory.mkdir()
    async with scripted(max_model_len=65_536) as engine, covered(engine, tmp_path / "a") as (adapter, caller):
        asked = asyncio.create_task(caller.whole(ask))
        await until(lambda: bool(engine.running))
        while engine.tokens < said:
            engine.step(1000)
            await asyncio.sleep(0)
        await until(lambda: len(next(iter(adapter.proxy.in_flight.values())).token_ids) == said, 30)
        await freeze(adapter)
        exported = [step async for step in adapter.export(directory)][-1]
        assert isinstance(exported, Exported)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    async with scripted(max_model_len=65_536) as engine, covered(engine, tmp_path / "b") as (adapter, caller):
        await adapter.close("op-2", QuiesceMode.HOLD, 60)
        _ = [step async for step in adapter.load_part(part_of(directory, exported))]
        await adapter.open()
        asked = asyncio.create_task(caller.whole(ask))
        await until(lambda: any(body["max_tokens"] == more for body in engine.bodies), 30)
        engine.step(more)
        answer = await asked
        assert answer.ids == [103 + n for n in range(said + more)]
        assert answer.label == f"exact; kept={said}"
        assert adapter.pool.tally.again == 0
