"""kill -9 of everything, then the same questions again: each goes on from its prefix, or says that it did not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Exported, Loaded
from participant_shims.adapters.vllm import VllmAdapter
from participant_shims.engine.requests_file import read_requests
from participant_shims.identity import CallIdentity
from tests.vllm.parts import part_of
from tests.vllm.real_engine import Caller, RealEngine, Said, chat, completion
from tests.vllm.shims import shim_before
from tests.vllm.test_freeze import figure, freeze, until
from tests.vllm.test_transparency import TOOLS, bare, joined

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 120
GREEDY: dict[str, tuple[dict[str, Any], bool]] = {  # what is asked, and whether it streams
    "completion": (completion("greedy one", tokens=TOKENS), False),
    "completion, streamed": (completion("greedy two", tokens=TOKENS), True),
    "completion, alternatives": (completion("greedy three", tokens=TOKENS, logprobs=0, logit_bias={"90": -2}), False),
    "completion, bare": (completion("greedy four", tokens=TOKENS, return_token_ids=None, logprobs=None), False),
    "chat": (chat("greedy five", tokens=TOKENS), False),
    "chat, streamed": (chat("greedy six", tokens=TOKENS), True),
    "chat, tools": (chat("greedy seven", tokens=TOKENS, tools=TOOLS, tool_choice="auto"), False),
    "chat, tools, streamed": (chat("greedy eight", tokens=TOKENS, tools=TOOLS, tool_choice="auto"), True),
}
SAMPLED = {
    "seeded": (completion("sampled one", tokens=TOKENS, temperature=0.9, seed=11), False),
    "unseeded": (chat("sampled two", tokens=TOKENS, temperature=0.9), True),
}
ANEW = {
    "constrained": (chat("anew one", tokens=TOKENS, structured_outputs={"regex": "[a-z ]{60,119}"}), False),
    "several answers": (completion("anew two", tokens=TOKENS, n=2, temperature=0.7, seed=5), False),
    "stop string": (completion("anew three", tokens=TOKENS, stop=["zzzz"]), False),
    "penalty": (completion("anew four", tokens=TOKENS, frequency_penalty=0.5), True),
}
ALL = {**GREEDY, **SAMPLED, **ANEW}


async def ask(caller: Caller, question: tuple[dict[str, Any], bool]) -> Said:
    body, streams = question
    return await (caller.stream(body) if streams else caller.whole(body))


async def test_after_kill_nine_each_call_goes_on_from_its_prefix(
    workshop: Path, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    directory = tmp_path / "cut"
    directory.mkdir()
    first = await RealEngine(workshop / "first.log").ready()
    second: RealEngine | None = None
    try:
        direct = Caller(http, first.target, past_proxy=True)
        wanted = {name: await ask(direct, question) for name, question in ALL.items() if name not in SAMPLED}
        async with shim_before(first.target, tmp_path) as adapter:
            caller = Caller(http, adapter.proxy.address)
            asked = [asyncio.create_task(ask(caller, question)) for question in ALL.values()]
            await until(
                lambda: sorted(len(r.token_ids) for r in adapter.proxy.in_flight.values() if not r.anew)[:1] > [25]
            )
            assert (await freeze(adapter, "op-save"))[-1].counts.held == len(ALL)
            exported = [step async for step in adapter.export(directory)][-1]
            assert isinstance(exported, Exported)
            assert exported.sessions == len(ALL)
            assert exported.recorded_calls == len(GREEDY) + len(SAMPLED)
            first.kill()
            begun = time.monotonic()
            await adapter.open()  # a dead engine keeps nobody's doors shut
            assert time.monotonic() - begun < 1
            lost = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(error, aiohttp.ClientError) for error in lost), lost
        in_flight = {r.ask.body.get("prompt") or r.ask.body["messages"][0]["content"]: r
                     for r in read_requests(directory)[1]}  # fmt: skip

        second = await RealEngine(workshop / "second.log").ready()
        async with shim_before(second.target, tmp_path) as adapter:
            caller = Caller(http, adapter.proxy.address)
            await adapter.close("op-load", QuiesceMode.HOLD, 60)
            loaded = [step async for step in adapter.load_part(part_of(directory, exported))][-1]
            assert isinstance(loaded, Loaded)
            answers = {name: asyncio.create_task(ask(caller, question)) for name, question in ALL.items()}
            await until(lambda: adapter.doors.counts().parked == len(ALL))
            await adapter.open()
            got = {name: await task for name, task in answers.items()}
            status = await adapter.status(0)
            tally = adapter.pool.tally

            for name in GREEDY:
                want, have = wanted[name], got[name]
                assert have.label.startswith("exact; kept="), (name, have.label)
                assert (have.ids, have.text, have.finish) == (want.ids, want.text, want.finish), name
                assert have.logprobs == pytest.approx(want.logprobs, abs=1e-3), name
                if GREEDY[name][1]:
                    assert {k: v for k, v in joined(have.raw).items() if k not in ("lp", "keys")} == {
                        k: v for k, v in joined(want.raw).items() if k not in ("lp", "keys")
                    }, name
                else:
                    assert without_logprobs(have.raw) == without_logprobs(want.raw), name
            for name, (body, _) in SAMPLED.items():
                record = in_flight[body.get("prompt") or body["messages"][0]["content"]]
                assert got[name].label.startswith("continued_not_bit_exact; kept="), name
                assert got[name].ids[: record.marks[-1][0]] == record.token_ids[: record.marks[-1][0]]
                assert len(got[name].ids) == len(got[name].logprobs) == TOKENS
            for name in ANEW:
                assert not got[name].label
                assert got[name].text == wanted[name].text, name
            assert (tally.exact, tally.not_exact, tally.regenerated) == (len(GREEDY), len(SAMPLED), len(ANEW))
            assert f"{len(GREEDY)} continued exactly" in status.waiting_for
            kept = sum(len(in_flight[b.get("prompt") or b["messages"][0]["content"]].token_ids)
                       for b, _ in [*GREEDY.values(), *SAMPLED.values()])  # fmt: skip
            assert len(adapter.pool) == 0
            figure("continuation", {"tokens_in_flight": kept, "kept": tally.kept, "generated_again": kept - tally.kept})

            # The shim outlives its engine: what was under way goes on as well when its caller asks again.
            question = completion("the engine dies under it", tokens=TOKENS)
            want = await Caller(http, second.target, past_proxy=True).whole(question)
            said = Said()
            stream = asyncio.create_task(caller.stream(question, said))
            await until(lambda: len(said.ids) > 30)
            second.kill()
            with pytest.raises(aiohttp.ClientError):
                await stream
            third = RealEngine(workshop / "third.log", port=second.port)
            second = third
            await third.ready()
            have = await caller.whole(question)
            assert have.ids == want.ids
            assert have.text == want.text
            assert have.label.startswith("exact; kept=")
            await third_life(adapter, caller)
    finally:
        first.kill()
        if second is not None:
            second.kill()


async def third_life(adapter: VllmAdapter, caller: Caller) -> None:
    """Who says which rollout he is gets his own record, and a cut holds those that nobody has asked for yet."""
    question = completion("siblings", tokens=150)
    headers = [CallIdentity(f"r-{n}", 0, "0.1").headers() for n in range(2)]
    asked = [asyncio.create_task(caller.whole(question, h)) for h in headers]
    await until(
        lambda: (
            all(len(r.token_ids) > 5 for r in adapter.proxy.in_flight.values()) and len(adapter.proxy.in_flight) == 2
        )
    )
    await freeze(adapter, "op-siblings")
    assert {r.rollout_id for r in adapter.proxy.in_flight.values()} == {"r-0", "r-1"}
    await adapter.open()
    await asyncio.gather(*asked)


def without_logprobs(answer: dict[str, Any]) -> Any:
    plain = bare(answer)
    return {**plain, "choices": [{k: v for k, v in c.items() if k != "logprobs"} for c in plain["choices"]]}
