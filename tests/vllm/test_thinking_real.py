"""A model that thinks, behind a real reasoning parser: what it thought before the cut is thought after it, and nothing anew."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.vllm.forms import ended
from tests.vllm.parts import export, load, part_of
from tests.vllm.real_engine import SLOTS, Caller, RealEngine, Said, chat, tiny_model, vllm_python
from tests.vllm.shims import shim_before
from tests.vllm.test_continuation import ask
from tests.vllm.test_freeze import freeze, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 400
CUT = 40  # tokens of each, at the least, before the cut
EARLY, LATE = (
    range(2, CUT // 2),
    range(CUT * 4, TOKENS - 20),
)  # where thinking ends: well before the cut, and well after it
# An answer that is read from tokens has special tokens from within it as text, which vLLM leaves out of its own.
NO_SPECIAL = {str(token): -100 for token in range(3)}
# The tokenizer of the tiny model has no such tokens; its model has room for more than it has.
TOKENIZER = """
import sys
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
assert tokenizer.add_tokens(["<think>", "</think>"]) == 2
tokenizer.save_pretrained(sys.argv[1])
print(tokenizer.convert_tokens_to_ids("</think>"))
"""


def thinking_model(folder: Path) -> int:
    """The tiny model with tokens around what it thinks, in `folder`; the id of the one that ends it."""
    shutil.copytree(tiny_model(4, 256), folder)
    made = subprocess.run(
        [str(vllm_python()), "-c", TOKENIZER, str(folder)], check=True, capture_output=True, text=True
    )
    return int(made.stdout)


async def question(direct: Caller, end: int, where: range) -> dict[str, Any]:
    """One whose thinking ends there. Weights are random: what makes them say that token is tried."""
    for bias in (1.5, 3, 6, 0.5, 9):
        asked = [chat(f"think {n}", tokens=TOKENS, logit_bias={**NO_SPECIAL, str(end): bias}) for n in range(SLOTS)]
        for body, said in zip(asked, await asyncio.gather(*map(direct.whole, asked)), strict=True):
            if end in said.ids and said.ids.index(end) in where:
                return body
    raise AssertionError(f"no question whose thinking ends in {where}")


def told(said: Said, streamed: bool) -> tuple[str, str]:
    """What it thought, and what it said."""
    messages = (
        [choice["delta"] for chunk in said.raw if chunk != "[DONE]" for choice in chunk["choices"]]
        if streamed
        else [said.raw["choices"][0]["message"]]
    )
    return "".join(m.get("reasoning") or "" for m in messages), "".join(m.get("content") or "" for m in messages)


async def test_what_it_thought_before_the_cut_is_kept(
    workshop: Path, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    end = await asyncio.to_thread(thinking_model, tmp_path / "model")
    (tmp_path / "cut").mkdir()
    for life in ("a", "b"):
        (tmp_path / life).mkdir()
    engine = RealEngine(
        workshop / "thinking.log", "--reasoning-parser", "deepseek_r1", model=tmp_path / "model"
    )  # fmt: skip
    try:
        await engine.ready()
        direct = Caller(http, engine.target, past_proxy=True)
        bodies = [
            chat("it thinks to its end", tokens=TOKENS, logit_bias={**NO_SPECIAL, str(end): -100}),
            await question(direct, end, LATE),
            await question(direct, end, EARLY),
        ]
        questions = list(itertools.product(bodies, (False, True)))
        wanted = [await ask(direct, each) for each in questions]
        async with shim_before(engine.target, tmp_path / "a") as adapter:
            caller = Caller(http, adapter.proxy.address)
            asked = [asyncio.create_task(ask(caller, each)) for each in questions]
            await until(
                lambda: (
                    len(adapter.proxy.in_flight) == len(questions)
                    and min(len(r.token_ids) for r in adapter.proxy.in_flight.values()) > CUT
                )
            )
            await freeze(adapter, "op-save")
            part = part_of(tmp_path / "cut", await export(adapter, tmp_path / "cut"))
            cuts = sorted(end in record.token_ids for record in adapter.proxy.in_flight.values())
            assert cuts[:2] == [False] * 2, "some were cut while they thought"
            assert cuts[-2:] == [True] * 2, "and some when they had begun to speak"
            for task in asked:
                await ended(task)
        async with shim_before(engine.target, tmp_path / "b") as adapter:
            await load(adapter, part)
            await adapter.open()
            caller = Caller(http, adapter.proxy.address)
            got = await asyncio.gather(*(ask(caller, each) for each in questions))
            for number, (want, have, (_, streamed)) in enumerate(zip(wanted, got, questions, strict=True)):
                assert (have.ids, have.finish) == (want.ids, want.finish)
                # As vLLM tells it in one piece. Of random tokens its own streams tell it otherwise: half a character before the
                # end of a thought is missing, and a thought that is short is another one.
                thought, text = told(have, streamed)
                assert (thought, text) == told(wanted[number - streamed], False)
                assert thought, "it thought"
                assert int(have.label.removeprefix("exact; kept=")) > CUT
            assert (adapter.pool.tally.exact, adapter.pool.tally.again) == (len(questions), 0)
    finally:
        engine.kill()
