"""Pausing an engine that answers between two steps, as vLLM does: soon, without taking somebody else's pause for ours, and
with every token that was said. Behind the proxy and in process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.engine.pause_note import NAME as MARKER
from tests.vllm.forms import WHOLE, Form, both_forms, ended, engine_of, made
from tests.vllm.parts import export, load, part_of
from tests.vllm.real_engine import Said
from tests.vllm.test_control import freeze, until


@asynccontextmanager
async def stepping(it: Form) -> AsyncGenerator[None]:
    async def steps() -> None:
        while True:
            it.engine.step()
            await asyncio.sleep(0.005)

    task = asyncio.create_task(steps())
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def generating(it: Form) -> AsyncGenerator[Said]:
    """One stream, after its first token."""
    said = Said()
    stream = it.ask(said=said, max_tokens=500)
    try:
        await it.running()
        it.engine.step()
        await until(lambda: len(said.ids) == 1)
        yield said
    finally:
        await ended(stream)


@both_forms
async def test_who_generates_is_paused_at_the_end_of_the_step_that_runs_and_not_of_the_next(
    tmp_path: Path, form: str
) -> None:
    async with made(form, tmp_path, {"between_steps": "in order"}) as it, generating(it) as said:
        freezing = asyncio.create_task(freeze(it.adapter))
        await until(lambda: [path for path, _ in it.engine.waiting] == ["/is_paused", "/pause"])
        it.engine.step()
        assert (await freezing).quiesced
        assert len(said.ids) == 1
        async with stepping(it):
            await it.adapter.open()
            await until(lambda: len(said.ids) > 1)


@both_forms
async def test_a_pause_of_somebody_else_that_has_just_begun_outlives_ours(tmp_path: Path, form: str) -> None:
    """The last token came a moment ago, as if it still generated."""
    async with made(form, tmp_path, {"between_steps": "in order"}) as it, generating(it):
        it.engine.paused = True
        assert (await freeze(it.adapter)).quiesced
        await it.adapter.open()
        assert it.engine.paused
        assert not [call for call in it.engine.calls if "resume" in call]


@both_forms
async def test_a_pause_that_is_served_before_the_question_who_had_paused_is_ours(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path, {"between_steps": "pause first"}) as it, generating(it):
        freezing = asyncio.create_task(freeze(it.adapter))
        await until(lambda: len(it.engine.waiting) == 2)
        it.engine.step()
        assert (await freezing).quiesced
        async with stepping(it):
            await it.adapter.open()
        assert not it.engine.paused


@both_forms
async def test_who_is_silent_is_asked_before_it_is_paused(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path, {"paused": True}) as it:
        assert (await freeze(it.adapter)).quiesced
        await it.adapter.open()
        assert it.engine.paused
        assert not [call for call in it.engine.calls if call.lstrip("/").startswith(("pause", "resume"))]


@both_forms
async def test_who_was_silent_and_says_something_while_it_is_asked_is_paused_without_its_answer(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is busy is late with its answer; what it generates comes all the same."""
    monkeypatch.setattr("participant_shims.adapters.vllm_freeze.LATELY_S", 0.0)
    async with made(form, tmp_path) as it, generating(it):
        it.engine.deaf, before = True, it.engine.looks
        freezing = asyncio.create_task(freeze(it.adapter))
        await until(lambda: it.engine.looks > before)
        it.engine.deaf = False  # for whoever asks next
        async with stepping(it), asyncio.timeout(3):
            assert (await freezing).quiesced
        await it.adapter.open()
        assert not it.engine.paused


@both_forms
async def test_of_a_generation_of_32_000_tokens_the_cut_has_every_one_and_only_the_rest_is_asked_for(
    tmp_path: Path, form: str
) -> None:
    said, more = 32_000, 5
    directory = tmp_path / "cut"
    directory.mkdir()
    async with engine_of(form, max_model_len=65_536) as it:
        async with it.covered(tmp_path / "a"):
            asked = it.ask(max_tokens=said + more)
            await it.running()
            for _ in range(said // 1000):
                it.engine.step(1000)
                await asyncio.sleep(0)
            await until(lambda: [len(r.token_ids) for r in it.adapter.front.in_flight.values()] == [said], 30)
            await freeze(it.adapter)
            part = part_of(directory, await export(it.adapter, directory))
            await ended(asked)
        it.engine.paused = False
        async with it.covered(tmp_path / "b"):
            await load(it.adapter, part)
            await it.adapter.open()
            asked = it.ask(max_tokens=said + more)
            await it.running()
            assert it.asked()[-1][1] == more
            it.engine.step(more)
            answer = await asked
            assert answer.ids == [103 + n for n in range(said + more)]
            assert answer.label == f"exact; kept={said}"
            assert it.adapter.pool.tally.again == 0


@both_forms
async def test_an_answer_that_ends_while_closed_is_in_the_cut_and_is_told_later(tmp_path: Path, form: str) -> None:
    directory = tmp_path / "cut"
    directory.mkdir()
    async with engine_of(form) as it:
        async with it.covered(tmp_path / "a"):
            asked = it.ask()
            await it.running()
            await it.adapter.close("op", QuiesceMode.HOLD, 60)
            it.engine.step(8)
            await until(lambda: [r.finished for r in it.adapter.front.in_flight.values()] == [True])
            _ = [drain async for drain in it.adapter.quiesce(QuiesceMode.HOLD, 5)]
            part = part_of(directory, await export(it.adapter, directory))
            assert not asked.done()
            await it.adapter.open()
            assert ((await asked).ids, (await asked).finish) == (WHOLE, "length")
        async with it.covered(tmp_path / "b"):
            await load(it.adapter, part)
            await it.adapter.open()
            sent = len(it.asked())
            again = await it.ask()
            assert (again.ids, again.label) == (WHOLE, "exact; kept=8")
            assert len(it.asked()) == sent


@both_forms
async def test_an_opening_overtakes_a_pause_that_hangs(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path, {"slow_s": 0.4}) as it:
        freezing = asyncio.create_task(freeze(it.adapter))
        await until(lambda: any("pause" in call for call in it.engine.calls))
        freezing.cancel()
        await it.adapter.open()
        assert not it.engine.paused
        assert not it.adapter.doors.closed
        await ended(freezing)


@both_forms
async def test_a_pause_that_waits_for_the_resume_of_a_lapsed_one_is_undone_like_any_other(
    tmp_path: Path, form: str
) -> None:
    """The engine stayed frozen for ever: what the lapse had resumed was taken for the new pause."""
    async with made(form, tmp_path, {"slow_s": 0.2}) as it:
        await freeze(it.adapter)
        await it.adapter.renew(0.01)
        await until(lambda: not it.adapter.doors.closed)
        await freeze(it.adapter, "op-2")
        assert it.engine.paused
        assert (tmp_path / MARKER).exists(), "the next shim would have to know of it"
        await it.adapter.open()
        assert not it.engine.paused


@both_forms
async def test_a_pause_of_somebody_else_that_still_drains_is_no_freeze(tmp_path: Path, form: str) -> None:
    """Their `wait` says that it is paused from its first moment on, and goes on generating."""
    async with made(form, tmp_path, {"leaks": True}) as it, generating(it):
        it.engine.paused = True
        async with it.going_on():
            with pytest.raises(SafepointError) as refused:
                await freeze(it.adapter)
        assert refused.value.reason is Reason.ACTIVITY_AFTER_PREPARED


@both_forms
async def test_an_engine_whose_streams_go_on_is_asked_for_no_token_to_show_that_it_lives(
    tmp_path: Path, form: str
) -> None:
    """One that is busy to the last slot lets the canary wait in its queue, and would be called wedged."""
    async with made(form, tmp_path, {"full": True}) as it, generating(it):
        await freeze(it.adapter)
        await it.adapter.open()
        alive = asyncio.create_task(it.adapter.alive())
        while not alive.done():
            it.engine.step()
            await asyncio.wait({alive}, timeout=0.005)
        assert await alive == ""
        assert len(it.engine.running) == 1  # no canary waits behind it
        assert (await it.adapter.status(0)).waiting_for == ""
