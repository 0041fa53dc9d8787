"""`safepoint serve -- vllm serve` that is told to go ends everything of a real vLLM, streams or not, with its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest

from coordinator.demo.ports import free_ports
from tests.vllm.real_engine import READY_S, REPOSITORY, tiny_model, vllm_python
from tests.vllm.test_leftovers_real import QUIET, serve
from tests.vllm.test_serve_engine import environment, gone

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_whoever_is_told_to_go_while_a_stream_runs_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    model = await asyncio.to_thread(tiny_model)
    written = tmp_path / "serve.log"
    argv = serve(
        tmp_path, str(vllm_python().parent / "vllm"), "serve", str(model), "--port", str(free_ports(1)[0]), "--dtype",
        "float32", "--enforce-eager", "--max-model-len", "2048",
    )  # fmt: skip
    listen = argv[argv.index("--listen") + 1]
    with written.open("wb") as log:
        ran = await asyncio.create_subprocess_exec(
            *argv, stdout=log, stderr=log, env={**environment(), **QUIET}, cwd=REPOSITORY, start_new_session=True
        )
    everybody: list[psutil.Process] = []
    try:
        async with aiohttp.ClientSession() as http:
            await asyncio.wait_for(_ready(http, listen, ran), READY_S)
            question = {
                "model": str(model),
                "prompt": "Counting:",
                "max_tokens": 1500,
                "ignore_eos": True,
                "stream": True,
            }
            async with http.post(f"http://{listen}/v1/completions", json=question) as stream:
                await stream.content.readline()
                everybody = psutil.Process(ran.pid).children(recursive=True)
                assert len(everybody) >= 3, "the API server, its engine and the shim"
                os.kill(ran.pid, number)
                with contextlib.suppress(aiohttp.ClientError):
                    await stream.read()
        code = await asyncio.wait_for(ran.wait(), 40)
        said = await asyncio.to_thread(written.read_text, errors="replace")
        assert code == 0, said[-2000:]
        assert "ended by itself" not in said
        assert [p.pid for p in everybody if not gone(p.pid)] == []
    finally:
        for process in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            ran.kill()


async def _ready(http: aiohttp.ClientSession, listen: str, ran: asyncio.subprocess.Process) -> None:
    while True:
        assert ran.returncode is None, "vLLM does not start"
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"http://{listen}/health") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.2)
