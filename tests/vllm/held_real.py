"""Run by vLLM's own interpreter: a real AsyncLLM is frozen, saved, ended, and another one continues. Prints JSON.

.venv-vllm/bin/python -m tests.vllm.held_real MODEL FOLDER
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Exported, Loaded
from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from participant_shims.engine.held import HeldFront
from tests.vllm.parts import part_of

TOKENS = 280
CUT_AT = 200  # tokens that each has at the cut: half a character of every one is then under 2 % of what is in flight


def make_llm(model: str) -> Any:
    args: Any = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    engine: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    return engine.from_engine_args(
        args(model=model, dtype="float32", enforce_eager=True, max_model_len=8192, max_num_seqs=16)
    )


async def ask(generate: Any, number: int, kind: Any, **more: Any) -> Any:
    params: Any = importlib.import_module("vllm").SamplingParams
    asked = params(max_tokens=TOKENS, ignore_eos=True, logprobs=0, output_kind=kind, **more)
    last: Any = None
    ids: list[int] = []
    text = ""
    async for out in generate({"prompt_token_ids": [20 + number, 30, 40]}, asked, f"q-{number}-{time.monotonic()}"):
        last = out
        ids += out.outputs[0].token_ids
        text += out.outputs[0].text
    delta = kind.name == "DELTA"
    return {
        "ids": ids if delta else list(last.outputs[0].token_ids), "text": text if delta else last.outputs[0].text,
        "finish": last.outputs[0].finish_reason, "label": getattr(last, "safepoint_continued", ""),
        "logprob": last.outputs[0].cumulative_logprob,
    }  # fmt: skip


async def beside(llm: Any, life: Path) -> tuple[VllmAdapter, HeldFront]:
    adapter = VllmAdapter(
        VllmOptions("engine", "", "", life), lambda doors, pool, stale: HeldFront(llm, doors, pool, stale)
    )
    await adapter.start(lambda: None)
    await adapter.describe()
    assert isinstance(adapter.front, HeldFront)
    return adapter, adapter.front


async def freeze(adapter: VllmAdapter, operation: str) -> float:
    """Again, as a save is, when the machine is so busy that the engine does not answer in time."""
    for tried in range(6):
        begun = time.monotonic()
        await adapter.close(f"{operation}.{tried}", QuiesceMode.HOLD, 60)
        try:
            assert [drain async for drain in adapter.quiesce(QuiesceMode.HOLD, 30)][-1].quiesced
            break
        except SafepointError as error:
            if error.reason is not Reason.DECLINED or tried == 5:
                raise
            await adapter.open()
    return time.monotonic() - begun


async def main(model: str, folder: Path) -> dict[str, Any]:
    kinds = list(importlib.import_module("vllm.sampling_params").RequestOutputKind)
    questions = [(n, kinds[n % 3], {"temperature": 0.0}) for n in range(6)]
    questions += [(n, kinds[n % 3], {"temperature": 0.9, "seed": n}) for n in range(6, 9)]
    (folder / "cut").mkdir()
    llm = make_llm(model)
    wanted = [await ask(llm.generate, n, kind, **more) for n, kind, more in questions]
    adapter, front = await beside(llm, folder / "a")
    asked = [asyncio.create_task(ask(front.generate, n, kind, **more)) for n, kind, more in questions]
    times: list[float] = []
    while not all(task.done() for task in asked):
        times.append(await freeze(adapter, f"op-{len(times)}"))
        await adapter.open()
        await asyncio.sleep(0.1)
    resumed = [await task for task in asked]

    await front.generated()  # counts from here on
    asked = [asyncio.create_task(ask(front.generate, n, kind, **more)) for n, kind, more in questions]
    while min([len(record.token_ids) for record in front.in_flight.values()] or [0]) < CUT_AT:
        await asyncio.sleep(0.02)
    await freeze(adapter, "op-save")
    exported = [step async for step in adapter.export(folder / "cut")][-1]
    assert isinstance(exported, Exported)
    in_flight = sum(len(record.token_ids) for record in front.in_flight.values())
    ranks = await front.generated()
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await adapter.stop()
    llm.shutdown()

    llm = make_llm(model)
    adapter, front = await beside(llm, folder / "b")
    await adapter.close("op-load", QuiesceMode.HOLD, 60)
    assert isinstance([step async for step in adapter.load_part(part_of(folder / "cut", exported))][-1], Loaded)
    await adapter.open()
    continued = await asyncio.gather(*(ask(front.generate, n, kind, **more) for n, kind, more in questions))
    tally, alive = adapter.pool.tally, await adapter.alive()
    await adapter.stop()
    llm.shutdown()
    return {
        "wanted": wanted, "resumed": resumed, "continued": continued, "rounds": len(times), "alive": alive,
        "freeze_s": statistics.median(times), "in_flight": in_flight, "kept": tally.kept, "again": tally.again,
        "ranks": ranks,
    }  # fmt: skip


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # whatever vLLM has left running
