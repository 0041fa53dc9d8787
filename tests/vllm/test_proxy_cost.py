"""What the proxy costs, measured at the shim's own process: CPU a request, CPU a token, tokens a second.

The engine is scripted and fast: against a real one on the same two cores nothing of the proxy's would be seen.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from safepoint.v1 import participant_service_pb2 as participant
from safepoint.v1 import participant_service_pb2_grpc

from coordinator.wire.rpc import channel
from tests.vllm.real_engine import Caller, free_port
from tests.vllm.scripted_engine import scripted
from tests.vllm.test_control import ASK, until
from tests.vllm.test_engine_shim import process, short_path  # noqa: F401 - a fixture
from tests.vllm.test_freeze import figure

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


async def test_the_cost_of_a_request_and_of_a_token(short_path: Path) -> None:  # noqa: F811
    port = free_port()
    async with scripted() as engine, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        shim, said = await process(engine, short_path / "life", f"127.0.0.1:{port}")
        try:
            async with channel(said["address"]) as link:
                stub = participant_service_pb2_grpc.ParticipantStub(link)
                await stub.GetCapabilities(participant.GetCapabilitiesRequest(), timeout=10)
            cpu, caller = psutil.Process(shim.pid), Caller(http, f"127.0.0.1:{port}")

            def used() -> float:
                times = cpu.cpu_times()
                return float(times.user + times.system)

            # Streams: 16 at once, a token a chunk.
            for plain in (True, False):
                tokens = 1500
                ask = {**ASK, "max_tokens": tokens} if plain else {
                    "model": "tiny", "prompt": [1], "max_tokens": tokens, "temperature": 0}  # fmt: skip
                streams = [asyncio.create_task(caller.stream(ask)) for _ in range(16)]
                await until(lambda: len(engine.running) == 16)
                before, begun = used(), time.monotonic()
                for _ in range(tokens):
                    engine.step()
                await asyncio.gather(*streams)
                spent, took = used() - before, time.monotonic() - begun
                name = "asked for ids and log-probs" if plain else "stripped"
                figure(f"proxy: us CPU a token, {name}", round(spent / tokens / 16 * 1e6, 1))
                figure(f"proxy: tokens a second of one core, {name}", round(tokens * 16 / spent))
                figure(f"proxy: tokens a second, all on two cores, {name}", round(tokens * 16 / took))
                assert spent / tokens / 16 < 300e-6

            # Requests of one token, each whole.
            count = 400
            before = used()
            for _ in range(count // 8):
                asked = [asyncio.create_task(caller.whole({**ASK, "max_tokens": 1})) for _ in range(8)]
                await until(lambda: len(engine.running) == 8)
                engine.step()
                await asyncio.gather(*asked)
            figure("proxy: ms CPU a request of one token", round((used() - before) / count * 1e3, 3))
        finally:
            shim.terminate()
            await shim.wait()
