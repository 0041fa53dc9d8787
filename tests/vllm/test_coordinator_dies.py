"""A coordinator that is killed while an engine is frozen: callers wait for the lease, and the trainer is told soon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.client import AsyncClient, Client, Reason, Unanswered
from coordinator.wire.terms import Phase
from tests.vllm.real_engine import REPOSITORY
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import ASK
from tests.vllm.test_engine_shim import process

LEASE_S = 2.0
LATE_S = 1.0  # of a timer and of a control call, on a machine that is busy
ABORT_S = 1.0  # of the last call of a cut, which nobody answers


@asynccontextmanager
async def generating(engine: Scripted) -> AsyncGenerator[None]:
    """It gives each request a token every 10 ms, unless it is paused."""

    async def step() -> None:
        while True:
            engine.step()
            await asyncio.sleep(0.01)

    stepping = asyncio.create_task(step())
    try:
        yield
    finally:
        stepping.cancel()


async def started(*command: str) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli", *command, stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}"},
    )  # fmt: skip
    assert made.stdout is not None
    return made, json.loads(await asyncio.wait_for(made.stdout.readline(), 20))


async def longest_silence(address: str, body: dict[str, Any], heard: Callable[[], object]) -> float:
    """The longest time, in seconds, for which a stream stood still. `heard` is called at each token."""
    loop = asyncio.get_running_loop()
    longest, last = 0.0, loop.time()
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://{address}/v1/completions", json={**body, "stream": True}) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                longest, last = max(longest, loop.time() - last), loop.time()
                heard()
    return longest


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_engine_thaws_by_its_lease_and_the_cut_ends_with_what_to_do(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("coordinator.client_cut._RENEW_TIMEOUT_S", ABORT_S)
    root, loop = short_path / "root", asyncio.get_running_loop()
    tokens = 0

    def heard() -> None:
        nonlocal tokens
        tokens += 1

    async with scripted() as engine, generating(engine):
        coordinator, said = await started("coordinator", "--root", str(root))
        shim, shown = await process(engine, short_path / "life")
        killed_at: list[float] = []

        def kill() -> None:
            assert engine.paused
            coordinator.send_signal(signal.SIGKILL)
            killed_at.append(loop.time())

        async def cut() -> None:
            where = f"file:{root}/coordinator/address.json"
            if kind == "async":
                async with AsyncClient(where) as client, client.cut("snap-1", lease=LEASE_S):
                    kill()
                return

            def run() -> None:
                with Client(where) as client, client.cut("snap-1", lease=LEASE_S):
                    kill()

            await asyncio.to_thread(run)

        asked = asyncio.create_task(longest_silence(shown["listens"], {**ASK, "max_tokens": 600}, heard))
        try:
            async with asyncio.timeout(20):
                async with AsyncClient(said["address"]) as client:
                    while not (await client.topology()).participants:
                        await asyncio.sleep(0.05)
                while tokens < 5:
                    await asyncio.sleep(0.01)
            with pytest.raises(Unanswered) as failed:
                await cut()
            took_s = loop.time() - killed_at[0]
            stood_s = await asked
        finally:
            for each in (coordinator, shim):
                if each.returncode is None:
                    each.kill()
                await each.wait()
    print(f"stood still {stood_s:.2f} s, cut ended {took_s:.2f} s after the kill")
    assert 0.5 < stood_s < LEASE_S + LATE_S
    assert tokens == 600
    assert took_s < LEASE_S + ABORT_S + 2 * LATE_S, (
        "it looks for its coordinator until the lease is over, and no longer"
    )
    problem = failed.value.problem
    assert (problem.reason, problem.phase) == (Reason.UNREACHABLE, Phase.COMMIT)
    assert said["address"] in problem.message
    assert "safepoint status" in problem.advice
