"""Freezing, draining and aborting a real engine: quickly, exactly, and without losing anybody."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Drain, Exported, Loaded, Opened
from participant_shims.adapters.vllm import VllmAdapter
from tests.vllm.parts import export, part_of
from tests.vllm.real_engine import SLOTS, Caller, Said, completion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ROUNDS = 100
# What has to be reached depends on a machine that does nothing else: it is asserted where it is measured.
MEASURES = os.environ.get("SAFEPOINT_MEASURES") == "1"
FIGURES = Path(__file__).resolve().parents[2] / "build" / "vllm-figures.json"


def figure(name: str, value: Any) -> None:
    """Keep what was measured, for the documentation."""
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    known[name] = value
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


async def freeze(adapter: VllmAdapter, operation: str, mode: QuiesceMode = QuiesceMode.HOLD) -> list[Drain]:
    """Again, as a save is, when the machine is so busy that the engine does not answer in time."""
    for tried in range(5):
        await adapter.close(f"{operation}.{tried}", mode, 60)
        try:
            return [drain async for drain in adapter.quiesce(mode, 30)]
        except SafepointError as error:
            if error.reason is not Reason.DECLINED:
                raise
            await adapter.open()
    await adapter.close(operation, mode, 60)
    return [drain async for drain in adapter.quiesce(mode, 30)]


async def until(condition: Any, within_s: float = 120) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.01)


async def test_sixteen_running_streams_freeze_and_nobody_is_told_anything_meanwhile(
    adapter: VllmAdapter, caller: Caller
) -> None:
    told = [Said() for _ in range(SLOTS)]
    streams = [
        asyncio.create_task(caller.stream(completion(f"stream {n}:", tokens=2000), said))
        for n, said in enumerate(told)
    ]  # fmt: skip
    try:
        times: list[float] = []
        for round_ in range(20):
            before = [len(said.ids) for said in told]
            await until(lambda before=before: all(len(s.ids) > b for s, b in zip(told, before, strict=True)))
            begun = time.monotonic()
            drains = await freeze(adapter, f"op-{round_}")
            times.append(time.monotonic() - begun)
            assert drains[-1].quiesced
            assert drains[-1].counts.held == SLOTS
            known = [len(said.ids) for said in told]
            recorded = [len(r.token_ids) for r in adapter.proxy.in_flight.values()]
            await asyncio.sleep(0.05)
            assert [len(said.ids) for said in told] == known, "a caller was told something while it was frozen"
            assert [len(r.token_ids) for r in adapter.proxy.in_flight.values()] == recorded
            assert sum(known) <= sum(recorded)
            assert (await adapter.still()).activity == ""
            opened = await adapter.open()
            assert isinstance(opened, Opened)
        figure("freeze_s_16_streams", {"median": statistics.median(times), "max": max(times), "n": len(times)})
        assert not MEASURES or statistics.median(times) < 0.3, times
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    await until(lambda: not adapter.proxy.in_flight)


async def test_frozen_streams_go_on_token_exact(adapter: VllmAdapter, caller: Caller, direct: Caller) -> None:
    asked = [completion(f"greedy {n}", tokens=80) for n in range(6)]
    asked += [completion(f"seeded {n}", tokens=80, temperature=0.9, seed=n) for n in range(6)]
    wanted = await asyncio.gather(*(direct.stream(a) for a in asked))
    told = [Said() for _ in asked]
    streams = [asyncio.create_task(caller.stream(a, s)) for a, s in zip(asked, told, strict=True)]
    rounds = 0
    while not all(task.done() for task in streams):
        await freeze(adapter, f"op-{rounds}")
        await adapter.open()
        rounds += 1
        await asyncio.sleep(0.1)
    await asyncio.gather(*streams)
    assert rounds >= 5
    for want, got in zip(wanted, told, strict=True):
        assert (got.ids, got.text, got.finish) == (want.ids, want.text, want.finish)
        # Rounding differs with who is in the same batch.
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)


@pytest.mark.slow
async def test_a_storm_of_requests_through_a_hundred_pauses_loses_doubles_and_changes_nobody(
    adapter: VllmAdapter, caller: Caller, direct: Caller
) -> None:
    chance = random.Random(5)
    asked = [completion(f"storm {n}", tokens=chance.randint(1, 24)) for n in range(16)]
    asked += [completion(f"storm {n}", tokens=chance.randint(1, 24), temperature=0.9, seed=n) for n in range(16, 32)]
    wanted = await asyncio.gather(*(direct.whole(a) for a in asked))
    told: dict[int, tuple[int, Said]] = {}
    callers: list[asyncio.Task[None]] = []

    async def one(number: int, which: int) -> None:
        said = await (caller.stream(asked[which]) if number % 2 else caller.whole(asked[which]))
        assert number not in told
        told[number] = which, said

    async def storm() -> None:
        while True:
            callers.append(asyncio.create_task(one(len(callers), chance.randrange(len(asked)))))
            # No more than what the engine gets done; they come all the same while it is paused.
            await asyncio.sleep(0.02 if len(callers) - len(told) < 3 * SLOTS else 0.2)

    coming = asyncio.create_task(storm())
    for round_ in range(ROUNDS):
        await freeze(adapter, f"storm-{round_}")
        await asyncio.sleep(chance.random() * 0.05)
        await adapter.open()
        await asyncio.sleep(chance.random() * 0.3)
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    await asyncio.gather(*callers)
    assert sorted(told) == list(range(len(callers)))
    for which, said in told.values():
        assert (said.ids, said.text, said.finish) == (wanted[which].ids, wanted[which].text, wanted[which].finish)
    figure("storm", {"requests": len(callers), "rounds": ROUNDS, "exact": len(told)})
    assert len(callers) > ROUNDS
    assert not adapter.proxy.in_flight


async def test_drained_means_that_our_own_set_is_empty(adapter: VllmAdapter, caller: Caller) -> None:
    # More than there are slots: vLLM's own `wait` would leave those behind that have not begun.
    told = [Said() for _ in range(SLOTS + 4)]
    streams = [asyncio.create_task(caller.stream(completion(f"d {n}", tokens=10), s)) for n, s in enumerate(told)]
    await until(lambda: len(adapter.proxy.in_flight) == len(told))
    drains = await freeze(adapter, "op-drain", QuiesceMode.DRAIN)
    assert drains[-1].quiesced
    assert drains[-1].counts.held == 0
    assert not adapter.proxy.in_flight
    await asyncio.gather(*streams)
    assert all(len(said.ids) == 10 for said in told)
    assert await adapter.control.is_paused()
    late = asyncio.create_task(caller.whole(completion(tokens=2)))
    await until(lambda: adapter.doors.counts().parked == 1)
    await adapter.open()
    assert len((await late).ids) == 2


async def test_a_drain_that_takes_too_long_becomes_a_freeze(adapter: VllmAdapter, caller: Caller) -> None:
    said = Said()
    stream = asyncio.create_task(caller.stream(completion(tokens=2000), said))
    await until(lambda: said.ids)
    await adapter.close("op-slow", QuiesceMode.DRAIN, 60)
    begun = time.monotonic()
    drains = [drain async for drain in adapter.quiesce(QuiesceMode.DRAIN, 0.5)]
    # How soon it stands still is up to the machine; that it did not wait for the end is what is held.
    assert 0.5 <= time.monotonic() - begun < (3 if MEASURES else 30)
    assert drains[0].waiting_for
    assert drains[-1].quiesced
    assert drains[-1].counts.held == 1
    assert drains[-1].excluded == ()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)


async def test_an_abort_names_whom_it_ended_and_each_caller_is_told(adapter: VllmAdapter, caller: Caller) -> None:
    told = [Said() for _ in range(SLOTS + 3)]
    streams = [asyncio.create_task(caller.stream(completion(f"a {n}", tokens=500), s)) for n, s in enumerate(told)]
    quiet = asyncio.create_task(caller.whole(completion("a whole one", tokens=500)))
    await until(lambda: len(adapter.proxy.in_flight) == len(told) + 1 and sum(bool(s.ids) for s in told) >= SLOTS - 1)
    drains = await freeze(adapter, "op-abort", QuiesceMode.ABORT)
    assert drains[-1].quiesced
    assert drains[-1].excluded
    await asyncio.wait_for(asyncio.gather(*streams), 60)
    assert (await quiet).finish == "abort"
    assert all(said.finish in ("abort", "") for said in told)
    assert not adapter.proxy.in_flight


async def test_a_pause_of_somebody_else_outlives_ours(adapter: VllmAdapter, caller: Caller, direct: Caller) -> None:
    await direct.post("/pause?mode=keep&clear_cache=false", None)
    try:
        assert (await freeze(adapter, "op-theirs"))[-1].quiesced
        await adapter.open()
        assert await adapter.control.is_paused()
    finally:
        await direct.post("/resume", None)


async def test_a_resume_behind_our_back_voids_the_freeze(adapter: VllmAdapter, direct: Caller) -> None:
    await freeze(adapter, "op-void")
    await direct.post("/resume", None)
    assert "resumed" in (await adapter.still()).activity


async def test_a_control_call_of_somebody_else_waits_for_the_doors(adapter: VllmAdapter, caller: Caller) -> None:
    await freeze(adapter, "op-first")
    theirs = asyncio.create_task(caller.post("/resume", None))
    await asyncio.sleep(0.2)
    assert not theirs.done()
    assert await adapter.control.is_paused()
    await adapter.open()
    status, answer = await asyncio.wait_for(theirs, 10)
    assert (status, answer["status"]) == (200, "resumed")


async def test_a_version_of_the_weights_begins_a_segment(adapter: VllmAdapter, caller: Caller) -> None:
    said = Said()
    stream = asyncio.create_task(caller.stream(completion(tokens=200), said))
    await until(lambda: len(said.ids) > 5)
    try:
        assert (await caller.post("/update_weight_version", {"new_version": "step-7"}))[0] == 200
        record = next(iter(adapter.proxy.in_flight.values()))
        await until(lambda: len(record.segments) == 2)
        assert [s.weight_version for s in record.segments] == ["default", "step-7"]
        assert record.segments[0].start == 0 < record.segments[1].start <= len(record.token_ids)
    finally:
        await caller.post("/update_weight_version", {"new_version": "default"})
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)


async def test_other_weights_are_refused_unless_they_are_marked(
    adapter: VllmAdapter, caller: Caller, tmp_path: Path
) -> None:
    directory = tmp_path / "cut"
    directory.mkdir()
    await freeze(adapter, "op-save")
    exported = [step async for step in adapter.export(directory)][-1]
    assert isinstance(exported, Exported)
    await adapter.open()
    await caller.post("/update_weight_version", {"new_version": "step-8"})
    try:
        await adapter.close("op-load", QuiesceMode.HOLD, 60)
        with pytest.raises(SafepointError) as refused:
            _ = [step async for step in adapter.load_part(part_of(directory, exported))]
        assert refused.value.reason is Reason.FINGERPRINT_MISMATCH
        assert "step-8" in str(refused.value)
        object.__setattr__(adapter._options, "weights", "mark")
        assert isinstance([step async for step in adapter.load_part(part_of(directory, exported))][-1], Loaded)
    finally:
        await adapter.open()
        await caller.post("/update_weight_version", {"new_version": "default"})


async def test_checksums_of_the_weights_are_the_same_in_each_cut(adapter: VllmAdapter, tmp_path: Path) -> None:
    object.__setattr__(adapter._options, "weight_digest", True)
    digests: list[str] = []
    for number in range(2):
        directory = tmp_path / f"cut-{number}"
        directory.mkdir()
        await freeze(adapter, f"op-{number}")
        exported = await export(adapter, directory)
        await adapter.open()
        assert exported.weights is not None
        digests.append(exported.weights.digest_sha256)
    assert digests[0] == digests[1]
    assert len(digests[0]) == 64
