"""Two data-parallel ranks behind two API servers: one pause reaches all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from tests.vllm.real_engine import Caller, RealEngine, Said, completion
from tests.vllm.test_freeze import figure, freeze, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_one_pause_freezes_every_rank_and_all_go_on_exactly(
    workshop: Path, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    engine = RealEngine(workshop / "ranks.log", "--data-parallel-size", "2", "--api-server-count", "2")
    try:
        await engine.ready()
        direct = Caller(http, engine.target, past_proxy=True)
        asked = [completion(f"rank {n}", tokens=40) for n in range(8)]
        wanted = [await direct.whole(a) for a in asked[:2]]
        adapter = VllmAdapter(VllmOptions("engine", "127.0.0.1:0", engine.target, tmp_path))
        await adapter.start(lambda: None)
        try:
            assert (await adapter.describe()).configured_workers == 2
            # One that does not stop is named by what its metrics count of each.
            assert sorted(await adapter.front.generated()) == ["0", "1"]
            caller = Caller(http, adapter.proxy.address)
            told = [Said() for _ in asked]
            streams = [asyncio.create_task(caller.stream(a, s)) for a, s in zip(asked, told, strict=True)]
            await until(lambda: all(said.ids for said in told))
            rounds = 0
            while not all(task.done() for task in streams):
                await freeze(adapter, f"op-{rounds}")
                recorded = [len(r.token_ids) for r in adapter.proxy.in_flight.values()]
                await asyncio.sleep(0.1)
                assert [len(r.token_ids) for r in adapter.proxy.in_flight.values()] == recorded
                assert (await adapter.still()).activity == ""
                await adapter.open()
                rounds += 1
                await asyncio.sleep(0.3)
            await asyncio.gather(*streams)
            figure("two_ranks", {"rounds": rounds})
            assert rounds >= 3
            assert all(len(said.ids) == 40 for said in told)
            for want, have in zip(wanted, told, strict=False):
                assert have.ids == want.ids
            assert await adapter.alive() == ""
        finally:
            await adapter.open()
            await adapter.stop()
    finally:
        engine.kill()
