"""What only an engine in the trainer's own process has: kinds of outputs, and a line to steer it. What it shares with one behind
the proxy is in `test_forms.py`. The engine is scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import capabilities_pb2

from coordinator.client import AsyncClient
from coordinator.server import serve
from coordinator.settings import Settings
from participant_shims.adapters.vllm_held import HeldEngine
from participant_shims.engine.held import HeldFront
from tests.vllm.forms import PROMPT, WHOLE, engine_of
from tests.vllm.held_fake import KIT, FakeLLM, Kind, Output, Params, held
from tests.vllm.parts import cut_of, load
from tests.vllm.test_control import freeze, until

GREEDY = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0}


async def told(front: HeldFront, request_id: str = "q-1", **more: Any) -> list[Output]:
    caller = more.pop("caller", None)
    params = Params(**{**GREEDY, **more})
    return [out async for out in front.generate(list(PROMPT), params, request_id, caller=caller)]


async def test_each_caller_is_told_in_the_kind_it_asked_for(tmp_path: Path) -> None:
    llm = FakeLLM()
    async with held(llm, tmp_path) as (_, front):
        for number, kind in enumerate(Kind):
            asked = asyncio.create_task(told(front, f"q-{number}", output_kind=kind))
            await until(lambda: bool(llm.running))
            llm.step(8)
            outs = await asked
            ids = [list(out.outputs[0].token_ids) for out in outs]
            if kind is Kind.DELTA:
                assert [token for each in ids for token in each] == WHOLE
            else:
                assert ids[-1] == WHOLE
                assert len(outs) == (1 if kind is Kind.FINAL_ONLY else 8)
                assert len(outs[-1].outputs[0].logprobs) == 8
                assert outs[-1].outputs[0].cumulative_logprob == -4.0
            assert outs[-1].finished
        quiet = asyncio.create_task(told(front, "quiet", logprobs=None))
        await until(lambda: bool(llm.running))
        llm.step(8)
        assert (await quiet)[-1].outputs[0].logprobs is None


@pytest.mark.parametrize("kind", [Kind.CUMULATIVE, Kind.FINAL_ONLY])
async def test_what_was_kept_is_told_in_the_kind_that_is_asked_for(tmp_path: Path, kind: Kind) -> None:
    async with engine_of("in process") as it:
        async with it.covered(tmp_path / "a"):
            part = await cut_of(it, tmp_path / "cut", 3)
        async with it.covered(tmp_path / "b"):
            await load(it.adapter, part)
            await it.adapter.open()
            assert isinstance(it.adapter.front, HeldFront)
            outs = asyncio.create_task(told(it.adapter.front, output_kind=kind))
            await it.running()
            it.engine.step(8)
            told_so_far = [list(out.outputs[0].token_ids) for out in await outs]
        assert told_so_far == ([WHOLE[: 4 + n] for n in range(5)] if kind is Kind.CUMULATIVE else [WHOLE])
        last = outs.result()[-1]
        assert (last.prompt_token_ids, last.outputs[0].cumulative_logprob) == (PROMPT, -4.0)
        assert last.safepoint_continued == "exact; kept=3"  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_tokenizer", [True, False])
async def test_who_is_told_no_text_loses_no_token(tmp_path: Path, has_tokenizer: bool) -> None:
    quiet = {"detokenize": False} if has_tokenizer else {}
    async with engine_of("in process") as it:
        assert isinstance(it.engine, FakeLLM)
        it.engine.vllm_config.model_config.skip_tokenizer_init = not has_tokenizer
        async with it.covered(tmp_path / "a"):
            part = await cut_of(it, tmp_path / "cut", 3, **quiet)
        async with it.covered(tmp_path / "b"):
            await load(it.adapter, part)
            await it.adapter.open()
            asked = it.ask(**quiet)
            await it.running()
            it.engine.step(8)
            said = await asked
            assert (said.ids, said.text, said.label) == (WHOLE, "", "exact; kept=3")
            assert (it.adapter.pool.tally.exact, it.adapter.pool.tally.again) == (1, 0)
        it.engine.vllm_config.model_config.skip_tokenizer_init = False
        async with it.covered(tmp_path / "c"):  # who wants the text of what has none is told all of it, made again
            await load(it.adapter, part)
            await it.adapter.open()
            asked = it.ask()
            await it.running()
            it.engine.step(8)
            said = await asked
            assert (said.ids, said.label) == (WHOLE, "")
            assert (it.adapter.pool.tally.regenerated, it.adapter.pool.tally.again) == (1, 3)


async def test_a_pause_waits_for_whoever_steers(tmp_path: Path) -> None:
    async with held(FakeLLM(), tmp_path) as (adapter, front):
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def refit() -> None:
            async with front.steering("refit"):
                begun.set()
                await may_end.wait()

        steering = asyncio.create_task(refit())
        await begun.wait()
        freezing = asyncio.create_task(freeze(adapter))
        await until(lambda: adapter.doors.closed)
        assert not freezing.done()
        may_end.set()
        await steering
        assert (await freezing).quiesced


async def test_an_engine_that_a_trainer_holds_takes_part_and_says_whether_it_sees_the_root(short_path: Path) -> None:
    root = short_path / "root"
    core = await serve(Settings(root=str(root), bind=f"unix:{short_path}/c.sock", heartbeat_s=0.2))
    life = short_path / "life"
    life.mkdir(mode=0o700)
    record = f"file:{root}/coordinator/address.json"
    try:
        async with AsyncClient(core.address) as client:
            async with HeldEngine(
                FakeLLM(), "engine-0", life=life, root=str(root), coordinator=record, bind="unix", kit=KIT
            ):
                seen = capabilities_pb2.SeenRoot()
                async with asyncio.timeout(20):
                    while not seen.path:
                        people = (await client.status(participants=True)).participants
                        seen = people[0].status.root if people else seen
                        await asyncio.sleep(0.02)
                assert (seen.path, seen.problem) == (str(root), "")
                assert seen.mark == (await client.status()).root_mark
                assert not [finding for finding in (await client.topology()).findings if finding.blocking]
            async with asyncio.timeout(20):
                while (await client.status()).participants:  # it said goodbye
                    await asyncio.sleep(0.02)
    finally:
        await core.kill()
