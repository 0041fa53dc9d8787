"""How long a freeze takes does not depend on how much has been generated."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from participant_shims.adapter import Exported
from participant_shims.adapters.vllm import VllmAdapter
from tests.vllm.real_engine import Caller, Said, completion
from tests.vllm.test_freeze import figure, freeze, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]
LONG = 4000
STREAMS = 4  # as many as the cache of the test engine holds at this length: more would be preempted
ROUNDS = 20


async def test_four_thousand_tokens_freeze_as_fast_as_a_hundred(
    adapter: VllmAdapter, caller: Caller, tmp_path: Path
) -> None:
    told = [Said() for _ in range(STREAMS)]
    streams = [
        asyncio.create_task(caller.stream(completion(f"long {n}:", tokens=LONG + 2000), said))
        for n, said in enumerate(told)
    ]  # fmt: skip
    try:
        medians: dict[int, float] = {}
        for length in (100, LONG):
            await until(lambda length=length: all(len(said.ids) >= length for said in told), 1200)
            times: list[float] = []
            for number in range(ROUNDS):
                begun = time.monotonic()
                await freeze(adapter, f"op-{length}-{number}")
                times.append(time.monotonic() - begun)
                await adapter.open()
                await asyncio.sleep(0.2)
            medians[length] = statistics.median(times)
            figure(f"freeze_s_at_{length}_tokens", {"median": medians[length], "max": max(times), "n": len(times)})
        directory = tmp_path / "cut"
        directory.mkdir()
        await freeze(adapter, "op-export")
        begun = time.monotonic()
        exported = [step async for step in adapter.export(directory)][-1]
        assert isinstance(exported, Exported)
        figure("export_s_at_4000_tokens", {"s": time.monotonic() - begun, "bytes": exported.files[0].size_bytes,
                                            "tokens": sum(len(said.ids) for said in told)})  # fmt: skip
        assert max(medians.values()) < 0.3, medians
        assert max(medians.values()) < 1.5 * min(medians.values()), medians
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
