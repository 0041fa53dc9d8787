"""Checksums of the engine's weights go into a snapshot and are compared, where that is asked for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Exported, Loaded
from participant_shims.adapters.vllm import VllmAdapter
from participant_shims.engine.requests_file import read_requests
from tests.vllm.scripted_engine import scripted
from tests.vllm.test_control import ASK, covered, freeze, until

WEIGHTS = {"rank0/layers.0": "a1", "rank0/layers.1": "b2"}
OTHERS = {**WEIGHTS, "rank0/layers.1": "c3"}


async def saved(folder: Path, checksums: dict[str, str], *, digest: bool) -> Exported:
    """What an engine of these weights has saved in `folder`: one request, after two tokens."""
    await asyncio.to_thread(folder.mkdir)
    async with (
        scripted(checksums=checksums) as engine,
        covered(engine, folder, weight_digest=digest) as (adapter, caller),
    ):
        asked = asyncio.create_task(caller.stream(ASK))
        await until(lambda: bool(engine.running))
        engine.step(2)
        await until(lambda: len(next(iter(adapter.proxy.in_flight.values())).token_ids) == 2)
        await freeze(adapter)
        exported = [step async for step in adapter.export(folder)][-1]
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(exported, Exported)
    return exported


async def load(adapter: VllmAdapter, folder: Path, exported: Exported) -> Loaded:
    await adapter.close("op-2", QuiesceMode.HOLD, 60)
    loaded = [step async for step in adapter.load(folder, exported.files)][-1]
    assert isinstance(loaded, Loaded)
    return loaded


async def test_the_digest_is_in_the_cut_where_it_is_asked_for_and_says_nothing_of_their_order(tmp_path: Path) -> None:
    await saved(tmp_path / "a", WEIGHTS, digest=True)
    await saved(tmp_path / "b", dict(reversed(WEIGHTS.items())), digest=True)
    await saved(tmp_path / "c", OTHERS, digest=True)
    await saved(tmp_path / "d", WEIGHTS, digest=False)
    a, b, c, d = (read_requests(tmp_path / name)[0].weight_digest for name in "abcd")
    assert a == b != c
    assert len(a) == len(c) == 64
    assert d == ""


async def test_weights_of_the_same_version_and_another_digest_are_refused_before_anything_is_continued(
    tmp_path: Path,
) -> None:
    exported = await saved(tmp_path / "cut", WEIGHTS, digest=True)
    async with scripted(checksums=OTHERS) as engine, covered(engine, tmp_path, weight_digest=True) as (adapter, _):
        with pytest.raises(SafepointError) as refused:
            await load(adapter, tmp_path / "cut", exported)
        assert refused.value.reason is Reason.FINGERPRINT_MISMATCH
        assert "another digest" in str(refused.value)
        assert len(adapter.pool) == 0
        engine.checksums = dict(WEIGHTS)  # what the snapshot is of
        assert (await load(adapter, tmp_path / "cut", exported)).sessions == 1


async def test_weights_of_another_digest_are_taken_where_they_are_to_be_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exported = await saved(tmp_path / "cut", WEIGHTS, digest=True)
    marks = {"weight_digest": True, "weights": "mark"}
    async with scripted(checksums=OTHERS) as engine, covered(engine, tmp_path, **marks) as (adapter, _):
        with caplog.at_level(logging.WARNING):
            assert (await load(adapter, tmp_path / "cut", exported)).sessions == 1
        assert "off-policy" in caplog.text


async def test_a_digest_that_one_of_the_two_does_not_have_is_not_compared(tmp_path: Path) -> None:
    exported = await saved(tmp_path / "cut", WEIGHTS, digest=True)
    async with scripted() as engine, covered(engine, tmp_path) as (adapter, _):
        assert (await load(adapter, tmp_path / "cut", exported)).sessions == 1
