"""The weights that an engine had at the cut are in its manifest, and a restore compares them, in both forms. Scripted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import Weights
from participant_shims.adapter import Part
from participant_shims.engine.requests_file import REQUESTS
from tests.vllm.forms import WHOLE, both_forms, engine_of, made
from tests.vllm.parts import cut_of, load
from tests.vllm.test_control import until

WEIGHTS = {"rank0/layers.0": "a1", "rank0/layers.1": "b2"}
OTHERS = {**WEIGHTS, "rank0/layers.1": "c3"}
STEP = "step-1"


async def saved(form: str, folder: Path, checksums: dict[str, str], *, digest: bool = True) -> Part:
    """What an engine of these weights has saved in `folder`: one request, after two tokens."""
    knobs = {"checksums": checksums, "weight_version": STEP}
    async with made(form, folder.parent / f"life-{folder.name}", knobs, weight_digest=digest) as it:
        return await cut_of(it, folder, 2)


def of_an_older_version(part: Part) -> Part:
    """The same, as it was saved before manifests named weights: the first line of the requests does."""
    assert part.weights is not None
    path = part.directory / REQUESTS
    head, *lines = path.read_text().splitlines()
    named = {"weight_version": part.weights.version, "weight_digest": part.weights.digest_sha256}
    path.write_text("\n".join([json.dumps(json.loads(head) | named), *lines]) + "\n")
    return Part(part.directory, part.files)


@both_forms
async def test_the_version_and_where_it_is_asked_for_the_digest_are_in_the_manifest_and_nowhere_else(
    tmp_path: Path, form: str
) -> None:
    a = await saved(form, tmp_path / "a", WEIGHTS)
    b = await saved(form, tmp_path / "b", dict(reversed(WEIGHTS.items())))
    c = await saved(form, tmp_path / "c", OTHERS)
    assert a.weights is not None
    assert c.weights is not None
    assert a.weights == b.weights != c.weights  # it says nothing of their order
    assert a.weights.version == STEP
    assert len(a.weights.digest_sha256) == len(c.weights.digest_sha256) == 64
    assert (await saved(form, tmp_path / "d", WEIGHTS, digest=False)).weights == Weights(STEP)
    head = json.loads((tmp_path / "a" / REQUESTS).read_text().splitlines()[0])
    assert sorted(head) == ["count", "engine_version", "format", "model"]


async def test_one_engine_has_the_same_digest_in_both_forms(tmp_path: Path) -> None:
    parts = [await saved(form, tmp_path / form[0], WEIGHTS) for form in ("behind the proxy", "in process")]
    assert parts[0].weights == parts[1].weights


@both_forms
@pytest.mark.parametrize("older", [False, True])
async def test_other_weights_are_refused_before_anything_is_continued(tmp_path: Path, form: str, older: bool) -> None:
    part = await saved(form, tmp_path / "cut", WEIGHTS)
    part = of_an_older_version(part) if older else part
    for knobs, says in (
        ({"checksums": OTHERS, "weight_version": STEP}, "another digest"),
        ({"checksums": WEIGHTS, "weight_version": "step-2"}, "version 'step-1', not 'step-2'"),
    ):
        async with made(form, tmp_path / "new", knobs, weight_digest=True) as it:
            with pytest.raises(SafepointError, match=says) as refused:
                await load(it.adapter, part)
            assert refused.value.reason is Reason.FINGERPRINT_MISMATCH
            assert len(it.adapter.pool) == 0
    async with made(form, tmp_path / "new", {"checksums": WEIGHTS, "weight_version": STEP}, weight_digest=True) as it:
        assert (await load(it.adapter, part)).sessions == 1


@both_forms
@pytest.mark.parametrize("older", [False, True])
async def test_other_weights_are_taken_where_they_are_to_be_marked_and_the_answer_says_so(
    tmp_path: Path, form: str, older: bool, caplog: pytest.LogCaptureFixture
) -> None:
    part = await saved(form, tmp_path / "cut", WEIGHTS)
    part = of_an_older_version(part) if older else part
    async with made(form, tmp_path / "new", {"weight_version": "step-2"}, weights="mark") as it:
        with caplog.at_level(logging.WARNING):
            assert (await load(it.adapter, part)).sessions == 1
        assert "off-policy" in caplog.text
        await it.adapter.open()
        asked = it.ask()
        await it.running()
        it.engine.step(6)
        said = await asked
        assert said.ids == WHOLE
        assert said.label == "continued_not_bit_exact; kept=2; weights=step-1@0,step-2@2"


@both_forms
async def test_a_digest_of_the_snapshot_is_compared_whatever_is_asked_of_later_saves(tmp_path: Path, form: str) -> None:
    """Else a restore would call exact what nobody has compared."""
    part = await saved(form, tmp_path / "cut", WEIGHTS)
    async with made(form, tmp_path / "new", {"checksums": WEIGHTS, "weight_version": STEP}) as it:
        assert (await load(it.adapter, part)).sessions == 1
    for checksums, says in ((OTHERS, "another digest"), ({}, "tells no digest")):
        knobs = {"checksums": checksums, "weight_version": STEP}
        async with made(form, tmp_path / "new", knobs) as it:
            with pytest.raises(SafepointError, match=says) as refused:
                await load(it.adapter, part)
            assert refused.value.reason is Reason.FINGERPRINT_MISMATCH
        async with made(form, tmp_path / "new", knobs, weights="mark") as it:
            assert (await load(it.adapter, part)).sessions == 1


@both_forms
async def test_a_snapshot_without_a_digest_is_compared_by_version_alone(tmp_path: Path, form: str) -> None:
    part = await saved(form, tmp_path / "cut", WEIGHTS, digest=False)
    async with made(form, tmp_path / "new", {"checksums": OTHERS, "weight_version": STEP}, weight_digest=True) as it:
        assert (await load(it.adapter, part)).sessions == 1


@both_forms
async def test_a_part_that_names_no_weights_anywhere_is_damaged(tmp_path: Path, form: str) -> None:
    part = await saved(form, tmp_path / "cut", WEIGHTS)
    async with engine_of(form, weight_version=STEP) as it, it.covered(tmp_path / "new"):
        with pytest.raises(SafepointError, match="names the weights at the cut") as refused:
            await load(it.adapter, Part(part.directory, part.files))
        assert refused.value.reason is Reason.SNAPSHOT_CORRUPT


async def test_an_engine_that_was_started_anew_continues_nothing_of_the_one_before(tmp_path: Path) -> None:
    """Its shim lives on, and the engine behind it may have any weights."""
    part = await saved("behind the proxy", tmp_path / "cut", {}, digest=False)
    async with made("behind the proxy", tmp_path / "new", {"weight_version": STEP}) as it:
        assert (await load(it.adapter, part)).sessions == 1
        await it.adapter.open()
        it.engine.dies("step-3")
        asked = it.ask()
        await it.running()
        (record,) = it.adapter.front.in_flight.values()
        assert [(s.start, s.weight_version) for s in record.segments] == [(0, "step-3")]
        it.engine.step(8)
        said = await asked
        assert said.ids == WHOLE
        assert "exact" not in said.label
        assert (it.adapter.pool.tally.kept, it.adapter.pool.tally.regenerated) == (0, 1)
        assert len(it.adapter.pool) == 0


async def test_what_an_engine_had_said_when_it_was_lost_is_not_continued_by_its_successor(tmp_path: Path) -> None:
    async with made("behind the proxy", tmp_path / "new", {"weight_version": STEP}) as it:
        asked = it.ask()
        await it.running()
        it.engine.step(3)
        await it.recorded(3)
        it.engine.dies("step-2")
        with pytest.raises(Exception):  # noqa: B017, PT011 - however its client says that the answer broke off
            await asked
        await until(lambda: len(it.adapter.pool) == 1)
        again = it.ask()
        await it.running(2)
        it.engine.step(8)
        said = await again
        assert said.ids == WHOLE
        assert "exact" not in said.label
        assert it.adapter.pool.tally.again == 3
