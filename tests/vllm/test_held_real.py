"""A real AsyncLLM in one process: frozen and resumed exactly, and continued by another one after it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from tests.vllm.real_engine import REPOSITORY, tiny_model, vllm_python
from tests.vllm.test_freeze import MEASURES, figure

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_an_engine_in_process_goes_on_exactly_and_so_does_the_next_one(workshop: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    model = await asyncio.to_thread(tiny_model)
    with (workshop / "held.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(vllm_python()), "-m", "tests.vllm.held_real", str(model), str(tmp_path),
            stdout=asyncio.subprocess.PIPE, stderr=log, env=environment, cwd=REPOSITORY, start_new_session=True,
        )  # fmt: skip
    try:
        out, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, (workshop / "held.log").read_text()[-3000:]
    found = json.loads(out.decode().strip().splitlines()[-1])
    assert found["rounds"] >= 3
    assert found["alive"] == ""
    for want, resumed, continued in zip(found["wanted"], found["resumed"], found["continued"], strict=True):
        exact = ("ids", "text", "finish")
        assert {name: resumed[name] for name in exact} == {name: want[name] for name in exact}
        assert resumed["logprob"] == pytest.approx(want["logprob"], abs=0.05)
        if continued["label"].startswith("exact; kept="):
            assert {name: continued[name] for name in exact} == {name: want[name] for name in exact}
            assert continued["logprob"] == pytest.approx(want["logprob"], abs=0.05)
        else:
            assert continued["label"].startswith("continued_not_bit_exact; kept=")
            assert len(continued["ids"]) == len(want["ids"])
    assert sum(each["label"].startswith("exact") for each in found["continued"]) == 6
    assert found["kept"] + found["again"] == found["in_flight"]
    assert found["ranks"] == {"0": found["in_flight"]}  # one that does not stop is named by what is counted of each
    assert found["again"] < 0.02 * found["in_flight"]
    assert not MEASURES or found["freeze_s"] < 0.3
    figure("in_process", {name: found[name] for name in ("rounds", "freeze_s", "in_flight", "kept", "again")})
