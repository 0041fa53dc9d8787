"""What a restore brought outlives its shim, is forgotten with the restore, and is for one process of the engine. Scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Exported, Loaded, Unloads
from participant_shims.adapters.vllm import VllmAdapter
from participant_shims.engine.requests_file import read_requests
from participant_shims.identity import CallIdentity
from tests.vllm.forms import both_forms, engine_of, made
from tests.vllm.parts import part_of
from tests.vllm.scripted_engine import scripted
from tests.vllm.test_control import ASK, covered, freeze, half_done, until

MINE = CallIdentity("r-1", 0, "0.1")


def restored(number: int) -> Any:
    record = half_done(prompt=[1, 2, 3], user=f"u-{number}", min_tokens=number)
    record.request_id, record.rollout_id, record.call_id = f"sp-{number}", f"r-{number}", "0.1"
    return record


async def saved(adapter: VllmAdapter, directory: Path) -> Exported:
    """A cut of what is in the adapter."""
    directory.mkdir()  # noqa: ASYNC240
    await freeze(adapter, f"save-{directory.name}")
    exported = [step async for step in adapter.export(directory)][-1]
    assert isinstance(exported, Exported)
    await adapter.open()
    return exported


async def load(adapter: VllmAdapter, directory: Path, exported: Exported, operation: str = "op-load") -> None:
    await adapter.close(operation, QuiesceMode.HOLD, 60)
    assert isinstance([step async for step in adapter.load_part(part_of(directory, exported))][-1], Loaded)


async def test_what_nobody_has_got_yet_is_in_the_next_cut_also_of_the_next_shim(tmp_path: Path) -> None:
    life = tmp_path / "life"
    life.mkdir()
    async with scripted() as engine:
        async with covered(engine, life) as (adapter, caller):
            for number in range(3):
                adapter.pool.put(restored(number))
            exported = await saved(adapter, tmp_path / "one")
            adapter.pool.replace([])
            await load(adapter, tmp_path / "one", exported)
            await adapter.open()
            await adapter.keep()
            # One is asked for and answered, and one is under way when the shim ends.
            asked = {n: asyncio.create_task(caller.whole({**ASK, "min_tokens": n}, CallIdentity(f"r-{n}", 1, "0.1").headers()))
                     for n in (0, 1)}  # fmt: skip
            # One token was asked for by us, to see whether the engine lives; those that stream are theirs.
            await until(lambda: sum(bool(b.get("stream")) for b in engine.bodies) == 2)
            first = 1 + next(n for n, b in enumerate(engine.bodies) if b.get("stream"))
            for _ in range(5):
                engine.running[first].put_nowait(1)
            await asyncio.wait(asked.values(), return_when=asyncio.FIRST_COMPLETED)
            done = [n for n, task in asked.items() if task.done()]
            assert len(done) == 1
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)
        async with covered(engine, life) as (adapter, _):
            await until(lambda: len(adapter.pool) == 2)
            left = {r.request_id for r in adapter.pool.records()}
            assert left == {f"sp-{n}" for n in range(3) if n not in done}
            await saved(adapter, tmp_path / "two")
            assert {r.request_id for r in read_requests(tmp_path / "two")[1]} == left
            assert adapter.restored.is_stale(CallIdentity("r-2", 0, "0.1"))


@both_forms
@pytest.mark.parametrize("killed", [False, True])
async def test_a_restore_that_is_given_up_leaves_nothing_also_after_its_shim_was_killed(
    tmp_path: Path, form: str, killed: bool
) -> None:
    life = tmp_path / "life"
    async with engine_of(form) as it:
        async with it.covered(life):
            assert isinstance(it.adapter, Unloads)
            it.adapter.pool.put(restored(1))
            exported = await saved(it.adapter, tmp_path / "cut")
            await load(it.adapter, tmp_path / "cut", exported)
            assert it.adapter.restored.is_stale(MINE)
            assert await it.adapter.loaded_by() == "op-load"
            if not killed:
                await it.adapter.unload()
                await it.adapter.unload()
                await it.adapter.open()
                assert len(it.adapter.pool) == 0
                assert await it.adapter.loaded_by() == ""
                asked = it.ask(MINE, min_tokens=1)
                await it.running()
                it.engine.step(8)
                assert (await asked).label == ""
        async with it.covered(life):
            assert await it.adapter.loaded_by() == ("op-load" if killed else "")
            await it.adapter.unload()
            assert len(it.adapter.pool) == 0
            assert not it.adapter.restored.is_stale(MINE)
        async with it.covered(life):
            assert len(it.adapter.pool) == 0


@both_forms
async def test_a_resumed_restore_is_kept_whatever_is_given_up_later(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        it.adapter.pool.put(restored(1))
        exported = await saved(it.adapter, tmp_path / "cut")
        await load(it.adapter, tmp_path / "cut", exported)
        await it.adapter.open()
        await it.adapter.keep()
        await it.adapter.unload()
        assert len(it.adapter.pool) == 1
        assert it.adapter.restored.is_stale(MINE)


async def test_an_engine_that_was_started_anew_is_not_given_what_another_one_was_restored_to(tmp_path: Path) -> None:
    async with scripted() as engine:
        async with covered(engine, tmp_path) as (adapter, _):
            adapter.pool.put(restored(1))
            exported = await saved(adapter, tmp_path / "cut")
            await load(adapter, tmp_path / "cut", exported)
            await adapter.open()
            await adapter.keep()
        engine.started += 100
        async with covered(engine, tmp_path) as (adapter, _):
            assert len(adapter.pool) == 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_what_is_not_read_is_in_the_ledger_by_name_and_begins_anew(tmp_path: Path, path: str) -> None:
    question = {"model": "tiny", "input": "Count on.", "max_tokens": 4}
    async with scripted() as engine:
        async with covered(engine, tmp_path / "one") as (adapter, caller):
            asked = asyncio.create_task(caller.post(path, question, MINE.headers()))
            await until(lambda: len(engine.running) == 1)
            assert adapter.doors.counts().in_flight == 1
            exported = await saved(adapter, tmp_path / "cut")
            ledger = (tmp_path / "cut" / exported.ledger_file).read_text()
            assert f"what {path} generates is not read" in ledger
            assert "r-1" in ledger
            assert [r.ask.body for r in read_requests(tmp_path / "cut")[1]] == [question]
            assert exported.recorded_calls == 0
            # The answer of the life before is the engine's own, frozen or not.
            engine.step(4)
            assert await asked == (200, {"id": "x-1", "object": "o", "created": 5, "model": "tiny",
                                         "choices": [{"index": 0, "text": "w103w104w105w106", "finish_reason": "length"}]})  # fmt: skip
        async with covered(engine, tmp_path / "two") as (adapter, caller):
            await load(adapter, tmp_path / "cut", exported)
            await adapter.open()
            before = len(engine.bodies)
            asked = asyncio.create_task(caller.post(path, question, CallIdentity("r-1", 1, "0.1").headers()))
            await until(lambda: len(engine.bodies) > before and bool(engine.running))
            for _ in range(4):
                engine.step()
            assert (await asked)[1]["choices"][0]["text"] == "w103w104w105w106"
            assert engine.bodies[-1] == question
            assert (adapter.pool.tally.regenerated, len(adapter.pool)) == (1, 0)
