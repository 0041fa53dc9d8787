"""What an engine promises behind the proxy, it promises in the trainer's process: one set of tests for both forms. Scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.remarks import ENGINE_SILENT
from coordinator.wire.terms import CheckpointMode, QuiesceMode, Role
from participant_shims.adapters import vllm as vllm_module
from participant_shims.engine import control, held
from participant_shims.engine.held import Ended
from participant_shims.engine.pause_note import NAME as MARKER
from participant_shims.engine.requests_file import read_requests
from participant_shims.identity import CallIdentity
from tests.vllm.forms import PROMPT, RANKS, WHOLE, Form, both_forms, ended, engine_of, made
from tests.vllm.parts import export, load, part_of
from tests.vllm.real_engine import Said
from tests.vllm.test_control import freeze, until

MINE, AGAIN = CallIdentity("r-1", 0, "0.1"), CallIdentity("r-1", 1, "0.1")
MANY = 4000


async def saved(it: Form, life: Path, cut: Path, tokens: int, **more: Any) -> Any:
    """The part that a shim before it saves in `cut` of one request of MINE, after so many tokens, and which is over then."""
    cut.mkdir()  # noqa: ASYNC240
    async with it.covered(life):
        asked = it.ask(MINE, **more)
        await it.running()
        await it.adapter.close("op-0", QuiesceMode.HOLD, 60)
        it.engine.step(tokens)  # it is recorded, and the caller is told nothing of it
        await it.recorded(tokens)
        await freeze(it.adapter, "op-save")
        part = part_of(cut, await export(it.adapter, cut))
        await ended(asked)
    return part


# ---- who takes part ---------------------------------------------------------------------------------------------------


@both_forms
async def test_every_rank_is_a_worker(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        what = await it.adapter.describe()
        assert (what.role, what.kind, what.configured_workers) == (Role.ENGINE, "vllm", RANKS)
        assert what.checkpoint_mode is CheckpointMode.EXPORT_RESTORE
        assert len((await it.adapter.close("op", QuiesceMode.HOLD, 60)).workers) == RANKS


@both_forms
async def test_an_engine_that_does_not_answer_is_unavailable(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        it.engine.deaf = True
        with pytest.raises(SafepointError) as refused:
            await it.adapter.front.is_paused(0.1)
        it.engine.deaf = False
        assert refused.value.reason is Reason.UNAVAILABLE


@both_forms
async def test_an_engine_that_gives_no_sign_of_life_is_a_warning_until_it_does(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_module, "WATCH_EVERY_S", 0.02)
    monkeypatch.setattr(vllm_module, "PATIENT_S", 0.1)
    async with made(form, tmp_path) as it:

        async def warned() -> str:
            return " ".join((await it.adapter.status(0)).warnings)

        it.engine.deaf = True
        async with asyncio.timeout(5):
            while ENGINE_SILENT not in await warned():
                await asyncio.sleep(0.01)
        assert it.adapter.target in await warned()
        it.engine.deaf = False
        async with asyncio.timeout(5):
            while await warned():
                await asyncio.sleep(0.01)


# ---- freezing ---------------------------------------------------------------------------------------------------------


@both_forms
async def test_frozen_means_paused_recorded_to_the_last_token_and_told_to_nobody(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        said = Said()
        asked = it.ask(said=said)
        await it.running()
        it.engine.step(2)
        await until(lambda: len(said.ids) == 2)
        await it.adapter.close("op", QuiesceMode.HOLD, 60)
        it.engine.step(3)  # between the doors and the pause
        await it.recorded(5)
        drain = [d async for d in it.adapter.quiesce(QuiesceMode.HOLD, 5)][-1]
        assert (drain.quiesced, drain.counts.held, it.engine.paused) == (True, 1, True)
        parked = it.ask()
        await until(lambda: it.adapter.doors.counts().parked == 1)
        assert (len(said.ids), len(it.asked())) == (2, 1)
        assert (await it.adapter.still()).activity == ""
        await it.adapter.open()
        assert not it.engine.paused
        await it.running(2)
        it.engine.step(8)
        assert [(await each).ids for each in (asked, parked)] == [WHOLE, WHOLE]
        assert said.logprobs == [-0.5] * 8


@both_forms
@pytest.mark.parametrize(("options", "limit_s"), [({}, 30.0), ({"drain_limit_s": 5.0}, 5.0)])
async def test_a_drain_waits_so_long_and_then_keeps_what_still_runs(
    tmp_path: Path, form: str, options: dict[str, Any], limit_s: float
) -> None:
    async with made(form, tmp_path, **options) as it:
        now = 100.0
        it.adapter.freeze.now = lambda: now
        asked = [it.ask()]
        await it.running()
        await it.adapter.close("op", QuiesceMode.DRAIN, 60)
        draining = it.adapter.quiesce(QuiesceMode.DRAIN, None)
        for after_s in (0.0, limit_s - 0.1):
            now = 100.0 + after_s
            asked.append(it.ask())  # it is parked, which wakes the drain
            drain = await anext(draining)
            assert (drain.quiesced, drain.counts.in_flight, it.engine.paused) == (False, 1, False)
        now = 100.0 + limit_s
        asked.append(it.ask())
        last = [drain async for drain in draining][-1]
        assert (last.quiesced, last.counts.held, it.engine.paused) == (True, 1, True)
        assert not last.excluded
        await ended(*asked)


@both_forms
@pytest.mark.parametrize(("ranks", "who"), [(1, "a rank of it did not stop"), (2, "rank 1 of 2 did not stop")])
async def test_an_engine_that_goes_on_is_not_frozen_and_its_requests_and_its_rank_are_named(
    tmp_path: Path, form: str, ranks: int, who: str
) -> None:
    async with made(form, tmp_path, {"leaks": True, "ranks": ranks}) as it:
        asked = it.ask(max_tokens=MANY)
        await it.running()
        async with it.going_on():
            with pytest.raises(SafepointError) as refused:
                await freeze(it.adapter)
        assert refused.value.reason is Reason.ACTIVITY_AFTER_PREPARED
        assert next(iter(it.adapter.front.in_flight)) in str(refused.value)
        assert who in refused.value.problem.advice
        await ended(asked)


@both_forms
async def test_a_token_after_the_freeze_voids_it(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        asked = it.ask()
        await it.running()
        it.engine.step()
        await freeze(it.adapter)
        assert (await it.adapter.still()).activity == ""
        it.engine.leaks = True
        it.engine.step()
        await until(lambda: it.adapter.front.spoke_at > (it.adapter.freeze._frozen_at or 0))
        assert "generated after it was frozen" in (await it.adapter.still()).activity
        await ended(asked)


@both_forms
async def test_drained_means_that_every_request_has_ended(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        asked = [it.ask() for _ in range(3)]
        await it.running(3)
        await it.adapter.close("op-1", QuiesceMode.DRAIN, 60)
        drains: list[Any] = []

        async def drain() -> None:
            drains.extend([each async for each in it.adapter.quiesce(QuiesceMode.DRAIN, 60)])

        draining = asyncio.create_task(drain())
        it.engine.step(7)
        await until(lambda: all(len(r.token_ids) == 7 for r in it.adapter.front.in_flight.values()))
        assert not it.engine.paused
        it.engine.step()
        await asyncio.wait_for(draining, 10)
        assert (drains[-1].quiesced, drains[-1].counts.held, it.engine.paused) == (True, 0, True)
        assert [(await each).ids for each in asked] == [WHOLE] * 3


@both_forms
@pytest.mark.parametrize("silently", [False, True])
async def test_an_abort_names_whom_it_ends_also_when_the_engine_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, silently: bool
) -> None:
    monkeypatch.setattr("participant_shims.adapters.vllm_freeze.ABORT_WITHIN_S", 0.2)
    async with made(form, tmp_path, {"aborts_silently": silently}) as it:
        asked = it.ask(MINE)
        await it.running()
        drain = await freeze(it.adapter, mode=QuiesceMode.ABORT)
        assert [r.rollout_id for r in drain.excluded] == ["r-1"]
        assert drain.counts.in_flight == 0
        await it.adapter.open()
        if silently:
            with pytest.raises((aiohttp.ClientError, Ended)):
                await asyncio.wait_for(asked, 5)
        else:
            assert (await asked).finish == "abort"


@both_forms
async def test_a_lapsed_lease_resumes_the_engine_too(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        await it.adapter.close("op", QuiesceMode.HOLD, 0.3)
        _ = [d async for d in it.adapter.quiesce(QuiesceMode.HOLD, 5)]
        assert it.engine.paused
        await until(lambda: not it.engine.paused)
        assert not it.adapter.doors.closed


@both_forms
async def test_a_pause_left_by_a_dead_shim_is_undone_by_the_next_one_and_no_other_is(tmp_path: Path, form: str) -> None:
    async with engine_of(form) as it:
        it.engine.paused = True
        (tmp_path / MARKER).write_text("op-1\n")
        async with it.covered(tmp_path):
            await until(lambda: not it.engine.paused)
        assert not (tmp_path / MARKER).exists()
        it.engine.paused = True  # somebody else's, without a note of ours
        async with it.covered(tmp_path):
            await freeze(it.adapter)
            await it.adapter.open()
            assert it.engine.paused


@both_forms
async def test_an_engine_whose_streams_stand_still_after_an_opening_is_called_wedged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(vllm_module, "SPEAKS_S", 0.1)
    monkeypatch.setattr(control.EngineControl.canary, "__defaults__", (0.1,))
    monkeypatch.setattr(held, "CANARY_S", 0.1)
    async with made(form, tmp_path) as it:
        asked = it.ask(max_tokens=MANY)
        await it.running()
        await freeze(it.adapter)
        await it.adapter.open()
        assert "not one token" in await it.adapter.alive()
        async with it.going_on():
            assert await it.adapter.alive() == ""
        await ended(asked)


# ---- admission --------------------------------------------------------------------------------------------------------


@both_forms
async def test_a_caller_that_leaves_takes_its_request_with_it(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        asked = it.ask()
        await it.running()
        await ended(asked)
        await until(lambda: not it.engine.running and not it.adapter.front.in_flight)
        assert it.adapter.doors.counts().in_flight == 0
        assert len(it.adapter.pool) == 0


@both_forms
async def test_a_parked_request_whose_caller_leaves_is_never_sent(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        await it.adapter.close("op", QuiesceMode.HOLD, 60)
        asked = it.ask()
        await until(lambda: it.adapter.doors.counts().parked == 1)
        await ended(asked)
        await until(lambda: it.adapter.doors.counts().parked == 0)
        await it.adapter.open()
        assert it.asked() == []


@both_forms
async def test_whoever_steers_an_engine_waits_while_it_is_frozen(tmp_path: Path, form: str) -> None:
    async with made(form, tmp_path) as it:
        await freeze(it.adapter)
        theirs = asyncio.create_task(it.steers())
        await until(lambda: it.adapter.doors.counts().parked == 1)
        assert it.engine.paused
        assert (await it.adapter.still()).activity == ""
        await it.adapter.open()
        await asyncio.wait_for(theirs, 10)
        assert not it.engine.paused


# ---- going on ---------------------------------------------------------------------------------------------------------


@both_forms
@pytest.mark.parametrize("done", [0, 3, 8])
async def test_a_restored_request_goes_on_and_its_caller_sees_one_answer(tmp_path: Path, form: str, done: int) -> None:
    async with engine_of(form, weight_version="step-1") as it:
        part = await saved(it, tmp_path / "a", tmp_path / "cut", done)
        assert [r.token_ids for r in read_requests(part.directory)[1]] == [WHOLE[:done]]
    async with engine_of(form, weight_version="step-1") as it, it.covered(tmp_path / "b"):
        assert (await load(it.adapter, part)).sessions == 1
        await it.adapter.open()
        with pytest.raises((AssertionError, Ended), match=r"STALE_ATTEMPT|replaced"):
            await it.ask(MINE)
        asked = it.ask(AGAIN)
        if done < 8:
            await it.running()
            assert [(prompt, left) for prompt, left, _ in it.asked()] == [([*PROMPT, *WHOLE[:done]], 8 - done)]
            it.engine.step(8)
        said = await asked
        assert (said.ids, said.text) == (WHOLE, "".join(f"w{token}" for token in WHOLE))
        assert (said.logprobs, said.finish) == ([-0.5] * 8, "length")
        assert said.label == (f"exact; kept={done}" if done else "")
        assert (it.adapter.pool.tally.kept, it.adapter.pool.tally.again) == (done, 0)
        assert done < 8 or it.asked() == []


@both_forms
async def test_sampling_is_continued_with_another_seed_and_labelled(tmp_path: Path, form: str) -> None:
    async with engine_of(form) as it:
        part = await saved(it, tmp_path / "a", tmp_path / "cut", 3, temperature=0.7, seed=11)
        async with it.covered(tmp_path / "b"):
            await load(it.adapter, part)
            await it.adapter.open()
            asked = it.ask(AGAIN, temperature=0.7, seed=11)
            await it.running()
            it.engine.step(8)
            assert (await asked).label == "continued_not_bit_exact; kept=3"
            assert it.asked()[-1][2] not in (11, None)


@both_forms
@pytest.mark.parametrize("more", [{"structured_outputs": {"regex": "a"}}, {"stop": ["x"]}])
async def test_what_has_no_way_in_at_a_later_token_begins_anew(tmp_path: Path, form: str, more: dict[str, Any]) -> None:
    async with engine_of(form) as it:
        part = await saved(it, tmp_path / "a", tmp_path / "cut", 3, **more)
        async with it.covered(tmp_path / "b"):
            await load(it.adapter, part)
            await it.adapter.open()
            asked = it.ask(AGAIN, **more)
            await it.running()
            it.engine.step(8)
            said = await asked
            assert (said.ids, said.label) == (WHOLE, "")
            assert (it.adapter.pool.tally.regenerated, it.adapter.pool.tally.again) == (1, 3)


@both_forms
async def test_a_restored_request_survives_a_caller_that_leaves_and_is_in_the_next_cut(
    tmp_path: Path, form: str
) -> None:
    async with engine_of(form) as it:
        part = await saved(it, tmp_path / "a", tmp_path / "cut", 3)
        async with it.covered(tmp_path / "b"):
            await load(it.adapter, part)
            await it.adapter.open()
            asked = it.ask(AGAIN)
            await it.running()
            it.engine.step()
            await it.recorded(4)
            await ended(asked)
            await until(lambda: len(it.adapter.pool) == 1)
            await freeze(it.adapter, "op-next")
            (tmp_path / "next").mkdir()
            await export(it.adapter, tmp_path / "next")
            assert [r.token_ids for r in read_requests(tmp_path / "next")[1]] == [WHOLE[:4]]
            await it.adapter.open()
            asked = it.ask(AGAIN)
            await until(lambda: it.asked()[-1][:2] == ([*PROMPT, *WHOLE[:4]], 4) and bool(it.engine.running))
            it.engine.step(8)
            assert (await asked).ids == WHOLE
