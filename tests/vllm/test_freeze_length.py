"""How long a freeze takes does not depend on how much has been generated, and the proxy does not slow streams down."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from participant_shims.adapter import Exported
from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from tests.vllm.bench_proxy import used
from tests.vllm.real_engine import SLOTS, Caller, RealEngine, Said, completion, tiny_model
from tests.vllm.test_freeze import MEASURES, figure, freeze, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]
LONG = 4000
TIMES = 20
PASSES = 12 if MEASURES else 3


@pytest.fixture
async def small_engine(workshop: Path) -> AsyncIterator[RealEngine]:
    """An engine whose cache holds sixteen streams of that length."""
    model = await asyncio.to_thread(tiny_model, 4, 256)
    engine = RealEngine(workshop / "small.log", model=model)
    try:
        yield await engine.ready()
    finally:
        engine.kill()


@pytest.fixture
async def small(small_engine: RealEngine, tmp_path: Path) -> AsyncIterator[VllmAdapter]:
    """A shim before it."""
    adapter = VllmAdapter(VllmOptions("engine", "127.0.0.1:0", small_engine.target, tmp_path))
    await adapter.start(lambda: None)
    await adapter.describe()
    yield adapter
    await adapter.stop()


async def test_four_thousand_tokens_freeze_as_fast_as_a_hundred(
    small: VllmAdapter, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    caller = Caller(http, small.proxy.address)
    told = [Said() for _ in range(SLOTS)]
    streams = [
        asyncio.create_task(caller.stream(completion(f"long {n}:", tokens=LONG + 2500), said))
        for n, said in enumerate(told)
    ]  # fmt: skip
    try:
        medians: dict[int, float] = {}
        cpu: dict[int, float] = {}
        for length in (100, LONG):
            await until(lambda length=length: _so_long(length, told, streams), 1200)
            times: list[float] = []
            used: list[float] = []
            for number in range(TIMES):
                begun, before = time.monotonic(), time.process_time()
                await freeze(small, f"op-{length}-{number}")
                times.append(time.monotonic() - begun)
                used.append(time.process_time() - before)
                await small.open()
                await asyncio.sleep(0.2)
            medians[length], cpu[length] = statistics.median(times), statistics.median(used)
            figure(f"freeze_s_16_streams_at_{length}_tokens",
                   {"median": round(medians[length], 4), "min": round(min(times), 4), "max": round(max(times), 4), "n": len(times),
                    "cpu_s_of_the_shim": round(cpu[length], 4)})  # fmt: skip
        directory = tmp_path / "cut"
        directory.mkdir()
        await freeze(small, "op-export")
        begun = time.monotonic()
        exported = [step async for step in small.export(directory)][-1]
        assert isinstance(exported, Exported)
        figure("export_s_at_4000_tokens", {"s": time.monotonic() - begun, "bytes": exported.files[0].size_bytes,
                                            "tokens": sum(len(said.ids) for said in told)})  # fmt: skip
        await small.open()
        if MEASURES:
            assert max(medians.values()) < 0.3, medians
            assert max(medians.values()) < 1.5 * min(medians.values()), medians
        # Also on a machine that is busy: nothing that the shim does grows with what was generated. The shim is in this
        # process; what is added is what tokens cost that come until the engine stands still.
        assert max(cpu.values()) < 1.5 * min(cpu.values()) + 0.005, cpu
        assert max(medians.values()) < 3 * min(medians.values()) + 0.5, medians
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def _so_long(length: int, told: list[Said], streams: list[asyncio.Task[Said]]) -> bool:
    for ended in (stream for stream in streams if stream.done()):
        raise AssertionError(f"a stream has ended: {ended.exception()!r}")
    return all(len(said.ids) >= length for said in told)


async def test_streams_are_as_fast_with_the_proxy_as_without(
    small_engine: RealEngine, small: VllmAdapter, http: aiohttp.ClientSession
) -> None:
    """The proxy is in this process, the engine has the other core. Each pass through it is compared with the one beside it,
    first the one way and then the other: a machine that is busy is busy for both.

    Where engine and proxy share processors, an engine has so much less of them as the proxy takes: that share is counted,
    and is told apart from noise on a busy machine, too."""
    ways = {"direct": Caller(http, small_engine.target, past_proxy=True), "proxy": Caller(http, small.proxy.address)}
    tokens = 300
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    me = psutil.Process(os.getpid())
    engines: list[float] = []
    for number in range(PASSES):
        for name in sorted(ways, reverse=number % 2 == 1):
            asked = [completion(f"pass {number} {n}", tokens=tokens) for n in range(SLOTS)]
            before, begun, theirs = sum(me.cpu_times()[:2]), time.monotonic(), used_by(small_engine.process.pid)
            got = await asyncio.gather(*(ways[name].stream(a) for a in asked))
            took = time.monotonic() - begun
            assert all(len(said.ids) == tokens for said in got)
            rates[name].append(SLOTS * tokens / took)
            cpu[name].append((sum(me.cpu_times()[:2]) - before) / SLOTS / tokens * 1e6)
            engines.append((used_by(small_engine.process.pid) - theirs) / SLOTS / tokens * 1e6)
    shares = [1 - proxied / direct for direct, proxied in zip(rates["direct"], rates["proxy"], strict=True)]
    share = statistics.median(shares)
    figure("streaming, tokens a second, median", {name: round(statistics.median(r), 1) for name, r in rates.items()})
    figure("streaming, share that the proxy costs", {"median of pairs": round(share, 4), "n": len(shares),
                                                     "quartiles": [round(q, 4) for q in statistics.quantiles(shares)]})  # fmt: skip
    # The caller is in this process, too, both times.
    proxys, engine = min(cpu["proxy"]) - min(cpu["direct"]), min(engines)
    figure("streaming, us CPU a token of the proxy, real engine", round(proxys, 1))
    figure("streaming, us CPU a token of vLLM", round(engine, 1))
    figure("streaming, share of the processors that the proxy takes", round(proxys / (proxys + engine), 4))
    assert not MEASURES or proxys / (proxys + engine) < 0.02, (proxys, engine)
    assert not MEASURES or share < 0.1


def used_by(pid: int) -> float:
    """CPU seconds so far of a process and all that it has started."""
    its = psutil.Process(pid)
    return sum(used(process) for process in [its, *its.children(recursive=True)])
