"""Faults of control calls and of discovery, against a scripted server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.adapters import vllm_freeze
from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from participant_shims.engine import control as control_module
from participant_shims.engine.control import EngineControl
from participant_shims.engine.discovery import discover
from participant_shims.engine.proxy import CONTROL
from participant_shims.engine.record import Piece, Record
from participant_shims.engine.request import CHAT, make_ask
from participant_shims.engine.requests_file import read_requests
from tests.vllm.real_engine import Caller, Said
from tests.vllm.scripted_engine import Scripted, scripted

ASK: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0,
                       "return_token_ids": True, "logprobs": 0}  # fmt: skip


@asynccontextmanager
async def covered(engine: Scripted, life: Path, **options: Any) -> AsyncIterator[tuple[VllmAdapter, Caller]]:
    name = options.pop("name", "engine")
    adapter = VllmAdapter(VllmOptions(name, "127.0.0.1:0", engine.target, life, **options))
    await adapter.start(lambda: None)
    await adapter.describe()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        try:
            yield adapter, Caller(http, adapter.proxy.address)
        finally:
            await adapter.stop()


async def until(condition: Any, within_s: float = 5) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.005)


async def freeze(adapter: VllmAdapter, operation: str = "op-1", mode: QuiesceMode = QuiesceMode.HOLD) -> Any:
    await adapter.close(operation, mode, 60)
    return [drain async for drain in adapter.quiesce(mode, 5)][-1]


# ---- discovery --------------------------------------------------------------------------------------------------------


async def test_a_server_without_control_is_refused_by_the_name_of_the_variable() -> None:
    async with scripted(dev_mode=False) as engine:
        with pytest.raises(SafepointError) as refused:
            await discover(engine.target)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert "VLLM_SERVER_DEV_MODE=1" in refused.value.problem.advice


async def test_a_server_with_an_api_key_is_asked_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted(api_key="sk-x") as engine:
        for key in (None, "sk-other"):
            if key:
                monkeypatch.setenv("VLLM_API_KEY", key)
            with pytest.raises(SafepointError) as refused:
                await discover(engine.target)
            assert refused.value.reason is Reason.UNSUPPORTED
            assert "VLLM_API_KEY" in refused.value.problem.advice
        monkeypatch.setenv("VLLM_API_KEY", "sk-x")
        assert (await discover(engine.target)).model == "tiny"
        async with covered(engine, tmp_path) as (adapter, caller):
            assert (await caller.post("/v1/completions", ASK))[0] == 401  # the key is the shim's own, and no caller's
            assert await generating(engine, adapter.alive()) == ""


async def generating(engine: Scripted, asked: Any) -> Any:
    task = asyncio.ensure_future(asked)
    while not task.done():
        engine.step()
        await asyncio.wait({task}, timeout=0.005)
    return task.result()


@pytest.mark.parametrize("version", ["0.16.2", "0.9.1", "", "dev"])
async def test_a_server_that_freezes_nothing_is_refused(version: str) -> None:
    async with scripted(version=version) as engine:
        with pytest.raises(SafepointError) as refused:
            await discover(engine.target)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert "0.17" in refused.value.problem.advice


@pytest.mark.parametrize(
    "parallel",
    [
        {"data_parallel_external_lb": True, "data_parallel_size": 2, "data_parallel_size_local": 1},
        {"data_parallel_hybrid_lb": True, "data_parallel_size": 4, "data_parallel_size_local": 2},
    ],
)
async def test_one_of_several_api_servers_is_refused(parallel: dict[str, Any]) -> None:
    async with scripted(parallel=parallel) as engine:
        with pytest.raises(SafepointError) as refused:
            await discover(engine.target)
    assert "does not reach the others" in str(refused.value)


async def test_it_is_known_from_which_version_on_a_paused_server_rejects() -> None:
    for version, rejects in (("0.32.0", False), ("0.33.0", True), ("0.33.1rc2", True), ("1.0", True)):
        async with scripted(version=version) as engine:
            assert (await discover(engine.target)).rejects_when_paused is rejects


@pytest.mark.parametrize(
    ("config", "usual", "with_none", "with_ten"),
    [
        ({"generation_config": "vllm"}, 0, None, 10),
        ({"generation_config": "auto", "override_generation_config": {"max_new_tokens": 7}}, 0, 7, 7),
        ({"generation_config": "auto"}, 16, 16, 10),
    ],
)
async def test_a_limit_of_the_server_itself_is_known(
    config: dict[str, Any], usual: int, with_none: int | None, with_ten: int
) -> None:
    async with scripted(model_config=config, usual_limit=usual) as engine:
        found = await discover(engine.target)
    for limit, more in ((with_none, {}), (with_ten, {"max_tokens": 10})):
        ask = make_ask(CHAT, {"messages": [{"role": "user", "content": "x"}], **more})
        assert found.knows_limit_of(ask)
        assert found.limit_of(ask) == limit


async def test_a_limit_that_the_server_does_not_tell_is_not_guessed() -> None:
    for source, knows_ten in (("auto", True), ("/etc/generation", False)):
        async with scripted(model_config={"generation_config": source}) as engine:
            found = await discover(engine.target)
        for known, more in ((False, {}), (knows_ten, {"max_tokens": 10})):
            assert found.knows_limit_of(make_ask(CHAT, {"messages": [], **more})) is known


async def test_the_last_words_of_an_engine_that_dies_frozen_are_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_freeze, "PATIENT_S", 0.2)
    async with scripted() as engine, covered(engine, tmp_path) as (adapter, caller):
        asked = asyncio.create_task(caller.stream(ASK))
        await until(lambda: bool(engine.running))
        engine.step()
        await freeze(adapter)
        engine.leaks = engine.deaf = True
        engine.step()
        await until(lambda: adapter.front.spoke_at > (adapter.freeze._frozen_at or 0))
        found = await adapter.still()
        assert "does not answer" in found.activity
        assert found.reason is Reason.DECLINED
        engine.deaf = False
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_server_that_is_not_up_is_unavailable() -> None:
    async with scripted() as engine:
        target = engine.target
    with pytest.raises(SafepointError) as refused:
        await discover(target)
    assert refused.value.reason is Reason.UNAVAILABLE


async def test_a_server_that_was_started_anew_is_looked_at_again(tmp_path: Path) -> None:
    async with scripted() as engine, covered(engine, tmp_path) as (adapter, _):
        engine.started, engine.weight_version = 2000.0, "step-9"
        await freeze(adapter)
        assert adapter.proxy.serving.weight_version == "step-9"
        await adapter.open()
        engine.started, engine.model = 3000.0, "another"
        with pytest.raises(SafepointError) as refused:
            await freeze(adapter, "op-2")
        assert refused.value.reason is Reason.INCARNATION_CHANGED
        await adapter.open()
        assert not engine.paused


async def test_a_shim_that_was_there_first_gets_to_know_its_engine_by_itself(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("participant_shims.adapters.vllm.LOOK_AGAIN_S", 0.01)
    async with scripted(version="") as engine:
        target = engine.target
    adapter = VllmAdapter(VllmOptions("engine", "127.0.0.1:0", target, tmp_path))
    await adapter.start(lambda: None)
    async with scripted() as engine:
        monkeypatch.setattr(adapter.front, "where", engine.target)
        await until(lambda: adapter.proxy.serving.engine is not None)
    await adapter.stop()


# ---- control calls ----------------------------------------------------------------------------------------------------


async def test_parameters_are_in_the_query_and_wait_is_never_used() -> None:
    async with scripted() as engine:
        control = EngineControl(engine.target)
        await control.pause("keep")
        await control.resume()
        await control.pause("abort")
        assert engine.calls == [
            "/pause?mode=keep&clear_cache=false", "/resume", "/pause?mode=abort&clear_cache=false"
        ]  # fmt: skip
        with pytest.raises(AssertionError):
            await control.pause("wait")


async def test_each_control_call_has_a_connection_of_its_own() -> None:
    async with scripted() as engine:
        control = EngineControl(engine.target)
        for _ in range(3):
            await control.pause("keep")
            await control.resume()
        assert len(engine.connections) == 6


async def test_a_pause_whose_answer_is_lost_is_not_sent_again_when_it_was_served() -> None:
    async with scripted(pause_fault=["lost"]) as engine:
        await EngineControl(engine.target).pause("keep")
        assert engine.paused
        assert len(engine.calls) == 1


async def test_a_pause_that_was_not_served_is_sent_again() -> None:
    async with scripted(pause_fault=["unserved", "unserved"]) as engine:
        await EngineControl(engine.target).pause("keep")
        assert engine.paused
        assert len(engine.calls) == 3


async def test_a_lapsed_pause_that_could_not_be_undone_is_undone_when_the_engine_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would: its operation is over, and the next pause would be taken for somebody else's."""
    monkeypatch.setattr("participant_shims.adapters.vllm.WATCH_EVERY_S", 0.02)
    async with scripted(resume_fault=[500, 500]) as engine, covered(engine, tmp_path) as (adapter, _):
        await freeze(adapter)
        await adapter.renew(0.01)
        await until(lambda: not adapter.doors.closed)
        await until(lambda: not engine.paused)
        assert len([call for call in engine.calls if call == "/resume"]) == 3


async def test_a_resume_whose_answer_is_lost_is_settled_too() -> None:
    async with scripted(resume_fault=["lost", "unserved"], paused=True) as engine:
        control = EngineControl(engine.target)
        await control.resume()
        assert not engine.paused
        await control.pause("keep")
        await control.resume()
        assert not engine.paused


async def test_a_refused_pause_is_told_and_not_repeated() -> None:
    async with scripted(pause_fault=[500]) as engine:
        with pytest.raises(SafepointError) as refused:
            await EngineControl(engine.target).pause("keep")
        assert "500" in str(refused.value)
        assert len(engine.calls) == 1


async def test_control_calls_are_never_concurrent_and_the_newest_command_wins() -> None:
    async with scripted(slow_s=0.05) as engine:
        control = EngineControl(engine.target)
        pauses = [asyncio.create_task(control.pause("keep")) for _ in range(3)]
        await until(lambda: bool(engine.calls))
        results = await asyncio.gather(*pauses, control.resume(), return_exceptions=True)
        assert engine.most_at_once == 1
        assert engine.calls[-1] == "/resume"
        assert not engine.paused
        # Those that had not been sent when the resume came are not sent after it.
        assert [getattr(r, "reason", None) for r in results[1:3]] == [Reason.ABORTED, Reason.ABORTED]


async def test_a_caller_that_gives_up_does_not_cut_a_call_off() -> None:
    async with scripted(slow_s=0.2) as engine:
        control = EngineControl(engine.target)
        pausing = asyncio.create_task(control.pause("keep"))
        await until(lambda: engine.at_once == 1)
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        await control.resume()
        assert engine.calls == ["/pause?mode=keep&clear_cache=false", "/resume"]
        assert (engine.paused, engine.most_at_once) == (False, 1)


async def test_resuming_a_server_that_is_gone_is_done() -> None:
    async with scripted() as engine:
        control = EngineControl(engine.target)
    await control.resume()


async def test_a_silent_server_is_told_of_within_a_second() -> None:
    async with scripted(deaf=True) as engine:
        begun = time.monotonic()
        with pytest.raises(SafepointError) as refused:
            await EngineControl(engine.target).is_paused()
        assert time.monotonic() - begun < 1
        assert refused.value.reason is Reason.UNAVAILABLE


async def test_a_pause_that_never_settles_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "SETTLE_S", 0.5)
    async with scripted(deaf=True) as engine:
        with pytest.raises(SafepointError) as refused:
            await EngineControl(engine.target).pause("keep")
        assert refused.value.reason is Reason.UNAVAILABLE


async def test_a_wedged_server_is_seen_by_its_canary(tmp_path: Path) -> None:
    async with scripted() as engine:
        control = EngineControl(engine.target)
        assert "not one token" in await control.canary("tiny", 0.2)  # nobody steps: /is_paused is false all the same
        await until(lambda: not engine.running)
        answer = asyncio.create_task(control.canary("tiny", 5))
        await until(lambda: bool(engine.running))
        engine.step()
        assert await answer == ""


# ---- freezing ---------------------------------------------------------------------------------------------------------


async def test_a_token_without_text_ends_no_stream_of_a_caller_that_asked_for_text(tmp_path: Path) -> None:
    async with scripted(mute=True) as engine, covered(engine, tmp_path) as (_, caller):
        said = Said()
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        stream = asyncio.create_task(caller.stream(ask, said))
        await until(lambda: bool(engine.running))
        for _ in range(4):
            engine.step()
            await asyncio.sleep(0.02)
        await asyncio.wait_for(stream, 5)
        assert (said.text, said.finish) == ("w106", "length")


# ---- admission --------------------------------------------------------------------------------------------------------


async def test_rejecting_is_typed_and_retryable(tmp_path: Path) -> None:
    async with scripted() as engine, covered(engine, tmp_path, rejects=True) as (adapter, caller):
        await adapter.close("op", QuiesceMode.HOLD, 60)
        async with caller.http.post(f"http://{caller.address}/v1/completions", json=ASK) as response:
            assert response.status == 503
            assert response.headers["retry-after"] == "1"
            assert (await response.json())["error"]["type"] == "engine_paused"
        assert not engine.bodies
        assert adapter.doors.counts().parked == 0


async def test_a_stream_that_is_a_bare_done_is_an_aborted_answer(tmp_path: Path) -> None:
    async with scripted(ends_bare=True) as engine, covered(engine, tmp_path) as (_, caller):
        said = await caller.whole(ASK)
        assert (said.finish, said.ids) == ("abort", [])


async def test_what_a_paused_server_rejects_is_passed_on(tmp_path: Path) -> None:
    async with scripted(version="0.33.0", rejects=503) as engine, covered(engine, tmp_path) as (_, caller):
        status, answer = await caller.post("/v1/completions", ASK)
        assert (status, answer["error"]["message"]) == (503, "scripted")
        assert len(engine.bodies) == 1


async def test_what_the_engine_does_not_let_be_recorded_is_asked_as_it_came(tmp_path: Path) -> None:
    async with scripted(rejects=400) as engine, covered(engine, tmp_path) as (_, caller):
        status, _answer = await caller.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert status == 400
        assert [b.get("return_token_ids") for b in engine.bodies] == [True, None]


@pytest.mark.parametrize(("code", "phrase"), [(400, "Bad Request"), (503, "Service Unavailable"), (499, "Bad Request")])
async def test_an_error_of_our_making_has_the_phrase_of_its_status(tmp_path: Path, code: int, phrase: str) -> None:
    async with (
        scripted(fails=code) as engine,
        covered(engine, tmp_path) as (adapter, _),
        aiohttp.ClientSession() as http,
        http.post(f"http://{adapter.listens}/v1/completions", json=ASK) as answer,
    ):
        assert (answer.status, answer.reason) == (code, phrase)


@pytest.mark.parametrize("streams", [False, True])
async def test_whoever_asks_after_a_stream_that_failed_does_not_get_its_rest(tmp_path: Path, streams: bool) -> None:
    """The failure is told as soon as it is read; what vLLM still says on that connection is nobody's answer."""
    async with scripted(fails=400) as engine, covered(engine, tmp_path) as (_, caller):
        status, told = await caller.post("/v1/completions", {**ASK, "stream": streams})
        assert status == (200 if streams else 400)
        assert "scripted" in str(told)
        engine.fails = 0
        asked = asyncio.create_task(caller.whole(ASK))  # on the same connection
        await until(lambda: len(engine.bodies) == 2)
        while not asked.done():
            engine.step()
            await asyncio.wait({asked}, timeout=0.005)
        assert (await asked).ids == [103 + n for n in range(8)]


# ---- going on ---------------------------------------------------------------------------------------------------------


def half_done(tokens: int = 3, **more: Any) -> Record:
    made = Record("sp-old", make_ask("/v1/completions", {**ASK, **more}), prompt_ids=(1, 2, 3), served_id="x-1",
                  model="tiny", created=5)  # fmt: skip
    made.weights_are("default")
    for number in range(tokens):
        made.add(Piece(f"w{103 + number}", (103 + number,), ([-0.5, f"w{103 + number}", None],)))
    return made


async def test_what_comes_before_the_kept_part_is_told_is_told_once(tmp_path: Path) -> None:
    async with scripted() as engine, covered(engine, tmp_path) as (adapter, caller):
        adapter.pool.put(half_done())
        may_pass = asyncio.Event()
        held = adapter.doors.hold

        async def hold(entry: Any) -> bool:
            await may_pass.wait()
            return await held(entry)

        adapter.doors.hold = hold  # type: ignore[method-assign]
        asked = asyncio.create_task(caller.stream(ASK))
        await until(lambda: bool(engine.running))
        engine.step(2)
        await until(lambda: len(next(iter(adapter.proxy.in_flight.values())).token_ids) == 5)
        may_pass.set()
        engine.step(3)
        said = await asked
        assert said.ids == [103 + n for n in range(8)]
        assert said.text == "".join(f"w{i}" for i in said.ids)
        assert len(said.logprobs) == 8


async def test_a_continuation_that_is_refused_begins_anew_and_is_counted(tmp_path: Path) -> None:
    async with scripted(rejects=503) as engine, covered(engine, tmp_path) as (adapter, caller):
        adapter.pool.put(half_done())
        assert (await caller.post("/v1/completions", ASK))[0] == 503
        assert [b["max_tokens"] for b in engine.bodies] == [5, 8]
        assert (adapter.pool.tally.regenerated, adapter.pool.tally.again) == (1, 3)


async def test_requests_that_nobody_has_asked_for_again_are_in_the_next_cut(tmp_path: Path) -> None:
    directory = tmp_path / "cut"
    directory.mkdir()
    async with scripted() as engine, covered(engine, tmp_path) as (adapter, _):
        adapter.pool.put(half_done())
        await freeze(adapter)
        _ = [step async for step in adapter.export(directory)]
        assert [r.token_ids for r in read_requests(directory)[1]] == [[103, 104, 105]]


@pytest.mark.parametrize("path", sorted(CONTROL))
async def test_whatever_steers_an_engine_waits_while_it_is_frozen(tmp_path: Path, path: str) -> None:
    """Pauses do not nest: a resume, a waking up or an update of weights in between would undo the freeze."""
    async with scripted() as engine, covered(engine, tmp_path) as (adapter, caller):
        await freeze(adapter)
        theirs = asyncio.create_task(caller.post(path, {}))
        await until(lambda: adapter.doors.counts().parked == 1 or theirs.done())
        assert engine.paused
        assert not any(called.startswith(path) for called in engine.calls if called.partition("?")[2] == "")
        assert (await adapter.still()).activity == ""
        await adapter.open()
        status, _ = await asyncio.wait_for(theirs, 10)
        assert status == 200
        assert engine.calls[-1] == path
        assert engine.most_at_once == 1


async def test_a_drain_believes_its_own_set_and_no_count_of_the_servers(tmp_path: Path) -> None:
    """/health is 200 whatever happens, /load counts in one process, /metrics says nothing runs while what waits does."""
    async with scripted(full=True) as engine, covered(engine, tmp_path) as (adapter, caller):
        streams = [asyncio.create_task(caller.stream({**ASK, "stream": True})) for _ in range(3)]
        await until(lambda: len(engine.running) == 3)
        engine.step()
        await adapter.close("op-1", QuiesceMode.DRAIN, 60)
        drains: list[Any] = []

        async def drain() -> None:
            drains.extend([each async for each in adapter.quiesce(QuiesceMode.DRAIN, 60)])

        draining = asyncio.create_task(drain())
        while not all(stream.done() for stream in streams):
            assert not draining.done(), "it was called drained while two waited for a slot"
            assert not engine.paused
            engine.step()
            await asyncio.sleep(0.005)
        await asyncio.wait_for(draining, 10)
        assert drains[-1].quiesced
        assert drains[-1].counts.held == 0
        assert [len((await stream).ids) for stream in streams] == [8, 8, 8]
        assert not [called for called in engine.calls if called.startswith(("/health", "/load", "/abort_requests"))]
