"""A real vLLM whose API server, shim and `safepoint serve` are killed leaves its engine; the next start ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.demo.ports import free_ports
from participant_shims.leftovers import NAME
from tests.vllm.real_engine import READY_S, REPOSITORY, tiny_model, vllm_python
from tests.vllm.test_control import until
from tests.vllm.test_serve_engine import environment, gone

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def serve(folder: Path, *argv: str) -> list[str]:
    return [sys.executable, "-m", "participant_shims.cli", "serve", "--name", "engine-0", "--listen",
            f"127.0.0.1:{free_ports(1)[0]}", "--root", str(folder), "--run-dir", str(folder), "--bind", "unix", "--",
            *argv]  # fmt: skip


async def test_the_engine_that_a_sigkill_leaves_is_ended_by_the_next_start(tmp_path: Path) -> None:
    model = await asyncio.to_thread(tiny_model)
    with (tmp_path / "serve.log").open("wb") as log:
        first = await asyncio.create_subprocess_exec(
            *serve(tmp_path, str(vllm_python().parent / "vllm"), "serve", str(model), "--port", str(free_ports(1)[0]),
                   "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            stdout=log, stderr=log, env={**environment(), **QUIET}, cwd=REPOSITORY, start_new_session=True,
        )  # fmt: skip
    note = tmp_path / "engine-0-vllm" / NAME
    engine: list[psutil.Process] = []

    def there() -> bool:
        """Whether the engine's process runs and is noted."""
        assert first.returncode is None, (tmp_path / "serve.log").read_text()[-2000:]
        server = next((c for c in psutil.Process(first.pid).children() if "vllm" in " ".join(c.cmdline())
                       and "participant_shims.cli" not in c.cmdline()), None)  # fmt: skip
        engine[:] = (
            [c for c in server.children() if "EngineCor" in c.name() or "EngineCor" in " ".join(c.cmdline())]
            if server
            else []
        )
        return bool(engine) and note.exists() and all(f"[{c.pid}, " in note.read_text() for c in engine)

    try:
        await until(there, READY_S)
        core = engine[0].pid
        sessions = [int(session) for session in json.loads(note.read_text())["sessions"]]
        for pid in (first.pid, *sessions):  # serve; the leaders are the API server and the shim
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await first.wait()
        await asyncio.sleep(1)
        left = not gone(core)

        vllm = tmp_path / "vllm"
        vllm.write_text("#!/bin/sh\nexit 0\n")
        vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
        again = await asyncio.create_subprocess_exec(
            *serve(tmp_path, str(vllm), "serve", "m", "--port", str(free_ports(1)[0])), stderr=asyncio.subprocess.PIPE,
            env=environment(), cwd=REPOSITORY,
        )  # fmt: skip
        _, errors = await asyncio.wait_for(again.communicate(), 60)
        assert left, "vLLM's engine ends with its API server by now: then this is no longer needed"
        assert gone(core)
        assert f"had left {core} " in errors.decode() or f" {core} VLLM" in errors.decode()
        assert "before this one was killed" in errors.decode()
    finally:
        for pid in (first.pid, *(c.pid for c in engine)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
