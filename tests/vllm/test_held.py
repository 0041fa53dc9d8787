"""An engine in the trainer's own process keeps the promises of one behind the proxy. The engine is scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import capabilities_pb2

from coordinator.client import AsyncClient
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Exported, Loaded
from participant_shims.adapters.vllm import VllmAdapter
from participant_shims.adapters.vllm_held import HeldEngine
from participant_shims.engine.held import Ended, HeldFront
from participant_shims.engine.requests_file import read_requests
from participant_shims.identity import CallIdentity
from tests.vllm.held_fake import KIT, FakeLLM, Kind, Output, Params, held
from tests.vllm.test_control import freeze, until
from tests.vllm.test_engine_shim import short_path

__all__ = ["short_path"]

PROMPT = [1, 2, 3]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0}
WHOLE = [103 + n for n in range(8)]


async def told(front: HeldFront, request_id: str = "q-1", **more: Any) -> list[Output]:
    caller = more.pop("caller", None)
    params = Params(**{**GREEDY, **more})
    return [out async for out in front.generate(list(PROMPT), params, request_id, caller=caller)]


async def cut(adapter: VllmAdapter, directory: Path) -> Exported:
    directory.mkdir()  # noqa: ASYNC240
    await freeze(adapter, f"save-{directory.name}")
    exported = [step async for step in adapter.export(directory)][-1]
    assert isinstance(exported, Exported)
    await adapter.open()
    return exported


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


async def test_frozen_means_paused_recorded_and_told_to_nobody(tmp_path: Path) -> None:
    llm = FakeLLM()
    async with held(llm, tmp_path) as (adapter, front):
        outs: list[Output] = []

        async def ask() -> None:
            async for out in front.generate(PROMPT, Params(**GREEDY, output_kind=Kind.DELTA), "q-1"):
                outs.append(out)

        asked = asyncio.create_task(ask())
        await until(lambda: bool(llm.running))
        llm.step(2)
        await until(lambda: len(outs) == 2)
        closed = await adapter.close("op-1", QuiesceMode.HOLD, 60)
        assert len(closed.workers) == 2
        llm.step(1)  # between the closed doors and the pause: recorded, not told
        await until(lambda: len(front.in_flight["q-1"].token_ids) == 3)
        drain = [d async for d in adapter.quiesce(QuiesceMode.HOLD, 5)][-1]
        assert drain.quiesced
        assert drain.counts.held == 1
        assert llm.calls == ["pause keep False"]
        parked = asyncio.create_task(told(front, "q-2"))
        await until(lambda: adapter.doors.counts().parked == 1)
        assert len(outs) == 2
        assert (await adapter.still()).activity == ""
        await adapter.open()
        await until(lambda: len(llm.running) == 2)
        llm.step(8)
        await asyncio.gather(asked, parked)
        assert [t for out in outs for t in out.outputs[0].token_ids] == WHOLE


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("done", [3, 8])
async def test_a_restored_request_goes_on_and_its_caller_sees_one_answer(tmp_path: Path, kind: Kind, done: int) -> None:
    llm = FakeLLM()
    mine = CallIdentity("r-1", 0, "0.1")
    async with held(llm, tmp_path / "a", weight_version="step-1") as (adapter, front):
        asked = asyncio.create_task(told(front, output_kind=kind, caller=mine))
        await until(lambda: bool(llm.running))
        await adapter.close("op-0", QuiesceMode.HOLD, 60)
        llm.step(done)
        await until(lambda: len(front.in_flight["q-1"].token_ids) == done)
        exported = await cut(adapter, tmp_path / "cut")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        origin, records = read_requests(tmp_path / "cut")
        assert (origin.weight_version, [r.token_ids for r in records]) == ("step-1", [WHOLE[:done]])
    again = FakeLLM()
    async with held(again, tmp_path / "b", weight_version="step-1") as (adapter, front):
        await adapter.close("op-1", QuiesceMode.HOLD, 60)
        assert isinstance([s async for s in adapter.load(tmp_path / "cut", exported.files)][-1], Loaded)
        await adapter.open()
        with pytest.raises(Ended, match="replaced"):
            await told(front, caller=mine)
        asked = asyncio.create_task(told(front, "new", output_kind=kind, caller=CallIdentity("r-1", 1, "0.1")))
        if done < 8:
            await until(lambda: bool(again.running))
            assert again.asked[0][0] == {"prompt_token_ids": [*PROMPT, *WHOLE[:done]]}
            assert again.asked[0][1].max_tokens == 8 - done
            again.step(8)
        outs = await asked
        ids = [t for out in outs for t in out.outputs[0].token_ids]
        assert (ids if kind is Kind.DELTA else list(outs[-1].outputs[0].token_ids)) == WHOLE
        last = outs[-1]
        assert last.prompt_token_ids == PROMPT
        assert last.safepoint_continued == f"exact; kept={done}"  # type: ignore[attr-defined]
        assert last.outputs[0].cumulative_logprob == -4.0
        assert adapter.pool.tally.kept == done
        assert not again.asked if done == 8 else True


async def test_sampling_is_continued_with_another_seed_and_labelled(tmp_path: Path) -> None:
    llm = FakeLLM()
    async with held(llm, tmp_path / "life") as (adapter, front):
        asked = asyncio.create_task(told(front, temperature=0.7, seed=11))
        await until(lambda: bool(llm.running))
        llm.step(3)
        await until(lambda: len(front.in_flight["q-1"].token_ids) == 3)
        exported = await cut(adapter, tmp_path / "cut")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await adapter.close("op-1", QuiesceMode.HOLD, 60)
        _ = [s async for s in adapter.load(tmp_path / "cut", exported.files)]
        await adapter.open()
        again = asyncio.create_task(told(front, "q-2", temperature=0.7, seed=11))
        await until(lambda: bool(llm.running))
        llm.step(8)
        assert (await again)[-1].safepoint_continued == "continued_not_bit_exact; kept=3"  # type: ignore[attr-defined]
        assert llm.asked[-1][1].seed not in (11, None)


@pytest.mark.parametrize("more", [{"structured_outputs": {"regex": "a"}}, {"stop": ["x"]}])
async def test_what_has_no_way_in_at_a_later_token_begins_anew(tmp_path: Path, more: dict[str, Any]) -> None:
    llm = FakeLLM()
    async with held(llm, tmp_path / "life") as (adapter, front):
        asked = asyncio.create_task(told(front, **more))
        await until(lambda: bool(llm.running))
        llm.step(3)
        await until(lambda: len(front.in_flight["q-1"].token_ids) == 3)
        exported = await cut(adapter, tmp_path / "cut")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await adapter.close("op-1", QuiesceMode.HOLD, 60)
        _ = [s async for s in adapter.load(tmp_path / "cut", exported.files)]
        await adapter.open()
        again = asyncio.create_task(told(front, "q-2", **more))
        await until(lambda: bool(llm.running))
        llm.step(8)
        assert list((await again)[-1].outputs[0].token_ids) == WHOLE
        assert (adapter.pool.tally.regenerated, adapter.pool.tally.again) == (1, 3)


@pytest.mark.parametrize("silently", [False, True])
async def test_an_abort_ends_every_caller_also_when_the_engine_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silently: bool
) -> None:
    monkeypatch.setattr("participant_shims.adapters.vllm_freeze.ABORT_WITHIN_S", 0.2)
    llm = FakeLLM(aborts_silently=silently)
    async with held(llm, tmp_path) as (adapter, front):
        asked = asyncio.create_task(told(front, caller=CallIdentity("r-1", 0, "0.1")))
        await until(lambda: bool(llm.running))
        drain = await freeze(adapter, mode=QuiesceMode.ABORT)
        assert [r.rollout_id for r in drain.excluded] == ["r-1"]
        await adapter.open()
        if silently:
            with pytest.raises(Ended, match="nobody said so"):
                await asked
        else:
            assert (await asked)[-1].outputs[0].finish_reason == "abort"


async def test_a_caller_that_leaves_takes_its_request_with_it(tmp_path: Path) -> None:
    llm = FakeLLM()
    async with held(llm, tmp_path) as (adapter, front):
        asked = asyncio.create_task(told(front))
        await until(lambda: bool(llm.running))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: not llm.running)
        assert not front.in_flight
        assert adapter.doors.counts().in_flight == 0


async def test_an_engine_that_goes_on_or_does_not_answer_is_named(tmp_path: Path) -> None:
    llm = FakeLLM(leaks=True)
    async with held(llm, tmp_path) as (adapter, front):
        asked = asyncio.create_task(told(front, max_tokens=4000))
        await until(lambda: bool(llm.running))

        async def go_on() -> None:
            while True:
                llm.step()
                await asyncio.sleep(0.02)

        going = asyncio.create_task(go_on())
        with pytest.raises(SafepointError) as refused:
            await freeze(adapter)
        assert refused.value.reason is Reason.ACTIVITY_AFTER_PREPARED
        assert "q-1" in str(refused.value)
        for task in (going, asked):
            task.cancel()
        await asyncio.gather(going, asked, return_exceptions=True)
        await adapter.open()
        llm.deaf = True
        with pytest.raises(SafepointError) as refused:
            await front.is_paused()
        assert refused.value.reason is Reason.UNAVAILABLE
        llm.deaf = False


async def test_steering_waits_for_the_doors_and_a_pause_waits_for_it(tmp_path: Path) -> None:
    llm = FakeLLM()
    async with held(llm, tmp_path) as (adapter, front):
        await freeze(adapter)
        order: list[str] = []

        async def refit() -> None:
            async with front.steering("refit"):
                order.append("refit")
                await asyncio.sleep(0.05)
                order.append("refit over")

        steering = asyncio.create_task(refit())
        await asyncio.sleep(0.05)
        assert order == []
        await adapter.open()
        await until(lambda: order == ["refit"])
        await freeze(adapter, "op-2")
        order.append("frozen")
        await steering
        assert order == ["refit", "refit over", "frozen"]


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
