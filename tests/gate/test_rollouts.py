"""Whole rollouts through the gates of three servers: parked, held, cut, restarted, joined, retried."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.remarks import SESSIONS_ELSEWHERE
from coordinator.wire.terms import QuiesceMode, RolloutState
from participant_shims.gate import calllog_files
from participant_shims.gate.elsewhere import Elsewhere
from participant_shims.identity import ATTEMPT_HEADER, CALL_HEADER, HOME_HEADER, ROLLOUT_HEADER, root
from tests.gate.test_calllog import FullDisk
from tests.gate.world import Client, Node, World, until

HOLD = QuiesceMode.HOLD
ROW: dict[str, Any] = {"_ng_rollout_id": "r-1", "input": "abc", "start": 5}
EXPECTED = {"count": 5 + 3 + 4 + 5, "said": [[3, {"count": 8}], [4, {"count": 12}], [5, {"count": 17}]]}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "first")
    yield made
    made.close()


def close_all(world: World) -> None:
    for name in ("model", "agent", "helper", "counter"):
        world.nodes[name].gate.close("op", HOLD, 60)


def open_all(world: World) -> None:
    for name in ("counter", "model", "helper", "agent"):
        world.nodes[name].gate.open()


async def cut_at_model(world: World, turn: int, row: dict[str, Any] = ROW) -> asyncio.Task[Client]:
    """A rollout that stands at its `turn`-th model call, with every gate closed."""
    before = len(world.model.served)
    world.hold_model_at = turn
    running = asyncio.create_task(world.run(row))
    await until(lambda: world.held_model and len(world.model.served) > before)
    close_all(world)
    return running


async def ledger(world: World, directory: Path) -> dict[str, Any]:
    """What a save of the agent says now."""
    os.mkdir(directory)
    await world.agent.gate.export(str(directory), "")
    return {line.rollout_id: line for line in calllog_files.export(world.agent.log, directory).ledger}


async def test_an_undisturbed_rollout_ends_as_without_a_gate(world: World) -> None:
    client = await world.run(ROW)
    assert (client.status, client.json()) == (200, EXPECTED)
    assert len(world.model_calls) == 3
    assert world.agent.log.excluded() == []


BY_INDICES = {"_ng_task_index": 7, "_ng_rollout_index": 1, "input": "abc", "start": 5}
BOTH_IDS = pytest.mark.parametrize(
    ("row", "rollout_id"), [(ROW, "r-1"), (BY_INDICES, "7-1@agent")], ids=["its own id", "indices"]
)


@BOTH_IDS
async def test_a_rollout_whose_result_somebody_has_runs_again(
    world: World, row: dict[str, Any], rollout_id: str
) -> None:
    """The next epoch: yesterday's answer would be that of an older policy."""
    assert (await world.run(row)).json() == EXPECTED
    assert (await world.run(row)).json() == EXPECTED
    assert len(world.model_calls) == 6
    assert world.agent.log.attempt_of(rollout_id) == 1


async def test_a_running_duplicate_joins(world: World) -> None:
    world.block["/v1/responses"] = asyncio.Event()
    first = asyncio.create_task(world.run(ROW))
    await until(lambda: world.model.gate.doors.counts().in_flight == 1)
    second = asyncio.create_task(world.run(ROW))
    await until(lambda: world.agent.gate.remarks.counters.get("dispatches joined"))
    world.block["/v1/responses"].set()
    a, b = await asyncio.gather(first, second)
    assert a.body == b.body
    assert len(world.model_calls) == 3
    assert not world.agent.gate.doors.is_inside("r-1")


async def test_a_running_id_with_another_input_runs_beside_and_leaves_the_first_alone(world: World) -> None:
    world.block["/v1/responses"] = asyncio.Event()
    first = asyncio.create_task(world.run(ROW))
    await until(lambda: world.model.gate.doors.counts().in_flight == 1)
    other = asyncio.create_task(world.run({**ROW, "input": "abcd"}))
    await until(lambda: world.model.gate.doors.counts().in_flight == 2)
    world.block["/v1/responses"].set()
    a, b = await asyncio.gather(first, other)
    assert a.json() == EXPECTED
    assert b.json()["count"] == 5 + 4 + 5 + 6
    (warning,) = world.agent.gate.status()["warnings"]
    assert "Rollout r-1 was dispatched again with another input" in warning


async def test_calls_that_are_not_logged_name_their_rollout_so_that_one_worker_has_its_session(world: World) -> None:
    named: list[str | None] = []
    seed = world.counter.routes["/seed"]

    async def heard(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        named.append(headers.get(HOME_HEADER))
        return await seed(scope, body, headers)

    world.counter.routes["/seed"] = heard
    world.hold_model_at = 0
    first = asyncio.create_task(world.run(ROW))
    await until(lambda: world.held_model)
    second = asyncio.create_task(world.run(ROW | {"start": 6}))
    await until(lambda: len(named) == 2)
    world.let_model_go()
    await asyncio.gather(first, second)
    assert named == [None, "r-1"]


async def test_a_save_leaves_out_an_id_that_runs_twice_with_different_inputs(world: World, tmp_path: Path) -> None:
    world.block["/v1/responses"] = asyncio.Event()
    first = asyncio.create_task(world.run(ROW))
    await until(lambda: world.model.gate.doors.counts().in_flight == 1)
    other = asyncio.create_task(world.run({**ROW, "input": "abcd"}))
    await until(lambda: world.model.gate.doors.counts().in_flight == 2)
    close_all(world)
    assert (await ledger(world, tmp_path / "one"))["r-1"].state is RolloutState.EXCLUDED
    assert "another input" in (await ledger(world, tmp_path / "two"))["r-1"].reason
    open_all(world)
    world.block["/v1/responses"].set()
    await asyncio.gather(first, other)
    close_all(world)  # a later cut: nothing runs twice any more
    assert (await ledger(world, tmp_path / "three"))["r-1"].state is RolloutState.COMPLETED


async def test_the_response_of_a_rollout_that_is_not_logged_is_held_like_any_other(world: World) -> None:
    go, verify = asyncio.Event(), world.counter.routes["/verify"]

    async def slow(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        await go.wait()
        return await verify(scope, body, headers)

    world.counter.routes["/verify"] = slow
    first = asyncio.create_task(world.run(ROW))
    await until(lambda: world.agent.served)
    other = asyncio.create_task(world.run({**ROW, "input": "abcd"}))
    await until(lambda: world.counter.served.count("/verify") == 2)
    world.agent.gate.close("op", HOLD, 60)
    go.set()
    for _ in range(500):
        await asyncio.sleep(0)
    assert not first.done()
    assert not other.done()
    open_all(world)
    await asyncio.gather(first, other)


@pytest.mark.parametrize("bad", ["r 1", "-1", "a/b", "x" * 257, "", True, 1.5, ["r-1"]])
async def test_a_rollout_id_that_cannot_be_one_is_told_and_the_row_runs(world: World, bad: Any) -> None:
    row = {**ROW, "_ng_rollout_id": bad, "_ng_task_index": 7, "_ng_rollout_index": 1}
    assert (await world.run(row)).json() == EXPECTED
    assert world.agent.log.attempt_of("7-1@agent") == 0
    (warning,) = world.agent.gate.status()["warnings"]
    assert "A-Z a-z 0-9 . _ : @ + = -" in warning
    assert str(bad)[:60] in warning
    assert len(warning) < 500
    await world.run(row)
    assert world.agent.gate.status()["warnings"][0].endswith("(2 times)")


async def test_a_row_without_an_id_is_nothing_to_warn_of(world: World) -> None:
    await world.run({"_ng_rollout_id": None, "input": "abc", "start": 5})
    await world.run({"input": "abc", "start": 5})
    assert world.agent.gate.status()["warnings"] == []


async def test_new_dispatches_park_while_closed_and_run_when_open(world: World) -> None:
    close_all(world)
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: world.agent.gate.doors.counts().parked == 1)
    assert world.agent.served == []
    open_all(world)
    assert (await running).json() == EXPECTED


async def test_a_dispatch_whose_client_left_while_parked_is_never_run(world: World) -> None:
    close_all(world)
    client = Client()
    running = asyncio.create_task(world.run(ROW, client))
    await until(lambda: world.agent.gate.doors.counts().parked == 1)
    client.leave()
    await running
    open_all(world)
    await asyncio.sleep(0)
    assert world.agent.served == []
    assert world.agent.log.attempt_of("r-1") == -1


async def test_a_generation_that_runs_at_the_cut_goes_on_and_its_response_is_held(world: World) -> None:
    running = await cut_at_model(world, 1)
    world.let_model_go()
    await until(lambda: world.model.gate.doors.counts().held == 1)
    assert len(world.model_calls) == 2
    status = world.agent.gate.status()
    assert status["rollouts"][0] | {"age_s": 0} == {
        "rollout_id": "r-1", "attempt": 0, "turn": 3, "activity": "calling", "age_s": 0,
        "waiting_on": "model POST /v1/responses",
    }  # fmt: skip
    open_all(world)
    assert (await running).json() == EXPECTED
    assert len(world.model_calls) == 3


async def test_the_agent_stops_before_its_next_call(world: World) -> None:
    world.block["/add"] = asyncio.Event()
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: "/add" in world.counter.served)
    world.agent.gate.close("op", HOLD, 60)
    world.block["/add"].set()
    await until(lambda: world.agent.gate.doors.counts().parked == 1)
    assert len(world.model_calls) == 1
    assert world.agent.gate.status()["rollouts"][0]["activity"] == "parked"
    world.agent.gate.open()
    assert (await running).json() == EXPECTED


async def test_a_call_of_the_agent_to_itself_is_never_parked(world: World) -> None:
    def on_send(server: str, path: str) -> None:
        if server == "agent":  # it has left, and meets doors that close while it is on its way
            world.agent.gate.close("op", HOLD, 60)

    world.on_send = on_send
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: world.agent.gate.doors.counts().parked == 1)
    assert world.agent.served == ["/run", "/v1/responses"]
    assert world.agent.gate.status()["rollouts"][0]["waiting_on"] == "model POST /v1/responses"
    world.on_send = None
    world.agent.gate.open()
    assert (await running).json() == EXPECTED


@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_a_rollout_cut_at_any_turn_repeats_no_model_call_and_no_tool(
    world: World, tmp_path: Path, turn: int
) -> None:
    running = await cut_at_model(world, turn)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    again = await new.run(ROW)
    assert again.json() == EXPECTED
    assert len(new.model_calls) == 3 - turn
    assert len([p for p in new.counter.served if p == "/add"]) == 3 - turn
    assert "/seed" not in new.counter.served
    assert new.agent.gate.outbound.replayed == 1 + 2 * turn
    assert new.agent.log.attempt_of("r-1") == 1
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_call_executed_before_the_cut_and_not_recorded_is_answered_from_memory(
    world: World, tmp_path: Path
) -> None:
    running = await cut_at_model(world, 1)
    world.let_model_go()
    await until(lambda: world.model.gate.doors.counts().held == 1)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    assert (await new.run(ROW)).json() == EXPECTED
    assert len(new.model_calls) == 1  # the third; the second was remembered by the model's gate
    assert new.model.gate.remarks.counters == {"calls answered from memory": 1}
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_tool_whose_response_was_held_at_the_cut_is_not_executed_twice(world: World, tmp_path: Path) -> None:
    world.block["/add"] = asyncio.Event()
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: "/add" in world.counter.served)
    close_all(world)
    world.block["/add"].set()
    await until(lambda: world.counter.gate.doors.counts().held == 1)
    out = tmp_path / "look"
    out.mkdir()
    ledger = calllog_files.export(world.agent.log, out).ledger
    assert [(line.state, line.waiting_on) for line in ledger] == [(RolloutState.PENDING, "counter POST /add")]
    new = world.restarted(tmp_path / "second")
    running.cancel()
    assert (await new.run(ROW)).json() == EXPECTED
    assert len([p for p in new.counter.served if p == "/add"]) == 2
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_second_restart_continues_from_what_the_first_one_added(world: World, tmp_path: Path) -> None:
    first = await cut_at_model(world, 1)
    new = world.restarted(tmp_path / "second")
    first.cancel()
    second = await cut_at_model(new, 2)  # replayed up to the second model call; that one and what follows is live
    new.let_model_go()
    await until(lambda: new.model.gate.doors.counts().held == 1)
    third = new.restarted(tmp_path / "third")
    second.cancel()
    assert (await third.run(ROW)).json() == EXPECTED
    assert (len(world.model_calls), len(new.model_calls), len(third.model_calls)) == (1, 2, 0)
    assert third.agent.gate.status()["diverged"] == 0
    assert third.agent.log.attempt_of("r-1") == 2
    for w in (new, third):
        w.close()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_an_agent_that_uses_chance_restarts_with_the_reason(world: World, tmp_path: Path) -> None:
    world.chance = itertools.count(1)
    running = await cut_at_model(world, 2)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.chance = itertools.count(100)
    client = await new.run(ROW)
    assert client.status == 200
    assert client.json()["said"] == EXPECTED["said"]
    assert len(new.model_calls) == 3  # all of them: nothing recorded was used
    assert new.agent.gate.status()["diverged"] == 1
    assert new.agent.log.attempt_of("r-1") == 2
    reason = new.agent.log.db.execute("SELECT reason FROM rollouts").fetchone()[0]
    assert "replay diverged" in reason
    assert reason.count("digest") == 2
    assert "was sent with another content" in reason
    (warning,) = new.agent.gate.remarks.texts()
    assert "on the time, on chance or on something from outside" in warning, "the cause"
    assert warning.endswith("whose answers are recorded."), "and what helps, whole"
    assert new.counter.served.count("/seed") == 1  # a session of its own, not the old one with its count
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_rollout_that_diverges_on_a_full_disk_still_has_its_result(world: World, tmp_path: Path) -> None:
    world.chance = itertools.count(1)
    running = await cut_at_model(world, 2)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.chance = itertools.count(100)
    disk: Any = FullDisk(new.agent.log.db, "DELETE FROM calls")
    new.agent.log.db = disk
    client = await new.run(ROW)
    assert (client.status, client.json()["said"]) == (200, EXPECTED["said"])
    assert len(new.model_calls) == 3  # the seed was answered from the log before it was found out
    assert "call log" in new.agent.gate.status()["warnings"][-1]
    disk.full = False
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_agent_that_stops_short_of_its_records_restarts(world: World, tmp_path: Path) -> None:
    running = await cut_at_model(world, 2)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.turns = 1
    client = await new.run(ROW)
    assert client.json()["said"] == EXPECTED["said"][:1]
    assert new.agent.gate.status()["diverged"] == 1
    assert len(new.model_calls) == 1
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_restored_rollout_with_another_input_begins_anew(world: World, tmp_path: Path) -> None:
    running = await cut_at_model(world, 1)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    client = await new.run({**ROW, "start": 6})
    assert client.json()["count"] == 18
    assert len(new.model_calls) == 3
    row = new.agent.log.db.execute("SELECT attempt, base, reason FROM rollouts").fetchone()
    assert row == (1, 1, "input changed")
    new.close()
    await asyncio.gather(running, return_exceptions=True)


@BOTH_IDS
async def test_a_restored_result_answers_once_and_then_its_rollout_runs_again(
    world: World, tmp_path: Path, row: dict[str, Any], rollout_id: str
) -> None:
    first = await world.run(row)
    close_all(world)
    new = world.restarted(tmp_path / "second")
    assert (await new.run(row)).body == first.body
    assert new.model_calls == []
    assert (await new.run(row)).json() == EXPECTED
    assert len(new.model_calls) == 3
    assert new.agent.log.attempt_of(rollout_id) == 1
    new.close()


@BOTH_IDS
async def test_a_response_that_never_reached_its_client_answers_the_retry(
    world: World, row: dict[str, Any], rollout_id: str
) -> None:
    world.block["/v1/responses"] = asyncio.Event()
    client = Client()
    running = asyncio.create_task(world.run(row, client))
    await until(lambda: world.model.gate.doors.counts().in_flight == 1)
    client.leave()
    await asyncio.sleep(0)
    world.block["/v1/responses"].set()
    await running
    assert (await world.run(row)).json() == EXPECTED
    assert len(world.model_calls) == 3
    assert not world.agent.gate.doors.is_inside(rollout_id)


async def test_a_call_that_is_retried_after_its_response_was_lost_is_executed_once(world: World) -> None:
    world.lose = {"/add", "/v1/responses"}
    assert (await world.run(ROW)).json() == EXPECTED
    assert world.counter.gate.remarks.counters == {"calls answered from memory": 1}


async def test_a_retry_joins_the_call_that_still_runs(world: World) -> None:
    world.block["/add"] = asyncio.Event()
    world.counters["s0"] = 0
    headers = [(ROLLOUT_HEADER, "r-9"), (ATTEMPT_HEADER, "0"), (CALL_HEADER, "0.1"), ("cookie", "s=s0")]
    both = [
        asyncio.create_task(Client().send_request(world.counter.app, "POST", "/add", b'{"n": 4}', headers))
        for _ in range(2)
    ]
    await until(lambda: world.counter.gate.remarks.counters.get("calls joined"))
    world.block["/add"].set()
    a, b = await asyncio.gather(*both)
    assert (a.json(), b.json()) == ({"count": 4}, {"count": 4})
    assert world.counters["s0"] == 4


async def test_an_execution_whose_client_left_stays_counted_until_it_ends(world: World) -> None:
    world.block["/add"] = asyncio.Event()
    world.counters["s0"] = 0
    headers = [(ROLLOUT_HEADER, "r-9"), (ATTEMPT_HEADER, "0"), (CALL_HEADER, "0.1"), ("cookie", "s=s0")]
    call = asyncio.create_task(Client().send_request(world.counter.app, "POST", "/add", b'{"n": 4}', headers))
    await until(lambda: world.counter.served)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert world.counter.gate.doors.counts().in_flight == 1
    world.block["/add"].set()
    await until(lambda: world.counter.gate.doors.counts().in_flight == 0)
    again = await Client().send_request(world.counter.app, "POST", "/add", b'{"n": 4}', headers)
    assert again.json() == {"count": 4}
    assert world.counter.served == ["/add"]


async def test_the_same_call_id_with_another_request_is_another_call(world: World) -> None:
    world.counters["s0"] = 0
    headers = [(ROLLOUT_HEADER, "r-9"), (ATTEMPT_HEADER, "0"), (CALL_HEADER, "0.1"), ("cookie", "s=s0")]
    await Client().send_request(world.counter.app, "POST", "/add", b'{"n": 4}', headers)
    other = await Client().send_request(world.counter.app, "POST", "/add", b'{"n": 5}', headers)
    assert other.json() == {"count": 9}
    assert world.counter.gate.remarks.counters == {"call ids met again with another request": 1}


async def test_a_call_whose_id_an_earlier_life_of_the_agent_has_used_is_remembered_as_well(world: World) -> None:
    world.counters |= {"s0": 0, "s1": 0}
    headers = [(ROLLOUT_HEADER, "r-9"), (ATTEMPT_HEADER, "0"), (CALL_HEADER, "0.1")]
    for session in ("s0", "s1", "s1", "s0"):
        asked = [*headers, ("cookie", f"s={session}")]
        answer = await Client().send_request(world.counter.app, "POST", "/add", b'{"n": 4}', asked)
        assert answer.json() == {"count": 4}
    assert world.counter.served == ["/add", "/add"]
    assert world.counter.gate.executions == {}


async def test_a_call_of_a_stale_attempt_is_refused_and_has_no_effect(world: World, tmp_path: Path) -> None:
    running = await cut_at_model(world, 1)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    headers = [(ROLLOUT_HEADER, "r-1"), (ATTEMPT_HEADER, "0"), (CALL_HEADER, "0.2.9"), ("cookie", "s=a0")]
    # The attempt that runs on is known at the agent; the callee learns of it from the first call it makes.
    assert (await new.run(ROW)).status == 200
    before = dict(new.counters)
    client = await Client().send_request(new.counter.app, "POST", "/add", b'{"n": 4}', headers)
    assert client.status == 409
    assert client.json()["error"]["reason"] == "STALE_ATTEMPT"
    assert new.counters == before
    new.close()
    await asyncio.gather(running, return_exceptions=True)


@BOTH_IDS
@pytest.mark.parametrize("epochs", [2, 4])
async def test_an_agent_that_was_started_again_alone_goes_on_above_what_its_callees_know(
    world: World, tmp_path: Path, row: dict[str, Any], rollout_id: str, epochs: int
) -> None:
    """Every epoch, restore and retirement raises what callees serve; the log of the agent's new life knows of none."""
    for _ in range(epochs):
        assert (await world.run(row)).json() == EXPECTED
    world.lose_agent(tmp_path / "alone")
    before = len(world.model_calls)
    assert (await world.run(row)).json() == EXPECTED
    assert len(world.model_calls) == before + 3
    assert world.agent.log.attempt_of(rollout_id) == epochs
    assert world.agent.gate.status()["diverged"] == 0
    assert world.agent.gate.remarks.texts() == []


async def test_an_agent_that_was_killed_with_its_log_executes_nothing_twice_in_the_session_that_it_left(
    world: World, tmp_path: Path
) -> None:
    """One process of the agent has seeded the session, another one works in it: `/seed` is still remembered, `/add` is not."""

    async def add_twice(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        cookies: Any = SimpleCookie(headers["cookie"])
        for turn in range(2):
            await (await world.nodes["helper"].post("counter", "/add", {"n": 1}, cookies=cookies)).json()
            ask = {"input": body["input"], "turn": turn}
            await (await world.nodes["helper"].post("model", "/v1/responses", ask)).json()
        added = await world.nodes["helper"].post("counter", "/add", {"n": 1}, cookies=cookies)
        return added.status, await added.json(), []

    async def run_with_helper(scope: Any, row: Any, headers: dict[str, str]) -> Any:
        seeded = await world.agent.post("counter", "/seed", {"start": 5})
        helped = await world.agent.post("helper", "/v1/responses", {"input": row["input"]}, cookies=seeded.cookies)
        return helped.status, await helped.json(), []

    world.agent.routes["/run"] = run_with_helper
    world.nodes["helper"].routes["/v1/responses"] = add_twice
    world.hold_model_at = 1
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: world.held_model)
    assert list(world.counters.values()) == [7]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # what ran in the two that are killed
    await asyncio.gather(running, return_exceptions=True)
    world.lose_agent(tmp_path / "agent")
    world.lose_helper(tmp_path / "helper")
    world.hold_model_at = None
    assert (await world.run(ROW)).json() == {"count": 8}
    assert list(world.counters.values()) == [7, 8]
    assert world.agent.gate.remarks.texts() == []


async def test_an_agent_that_was_replaced_while_a_rollout_ran_does_not_outrun_its_successor(world: World) -> None:
    world.hold_model_at = 2
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: world.held_model)
    for name in ("counter", "model"):
        world.nodes[name].log.mark("r-1", 3)
    world.let_model_go()
    client = await running
    assert client.status == 409
    error = client.json()["error"]
    assert (error["reason"], error["rollout_id"], error["attempt"]) == ("REPLAY_DIVERGED", "r-1", 0)
    assert "another agent or another life of this server has begun" in error["message"]
    assert "_ng_rollout_id" in error["next_step"]
    assert world.agent.log.attempt_of("r-1") == 0


async def test_a_rollout_that_a_callee_has_lost_restarts_from_its_input(world: World, tmp_path: Path) -> None:
    running = await cut_at_model(world, 1)
    world.counter.log.exclude("r-1", 0, "its session can't be saved")
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.counters.clear()  # what was excluded is not there
    client = await new.run(ROW)
    assert client.json() == EXPECTED
    assert new.counter.served.count("/seed") == 1
    assert new.agent.gate.status()["diverged"] == 1
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_rollout_restarts_whose_callee_was_left_out_of_the_restore(world: World, tmp_path: Path) -> None:
    running = await cut_at_model(world, 1)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.lose_counter(tmp_path / "fresh")  # the restore lapsed after the agent and before the counter
    assert (await new.run(ROW)).json() == EXPECTED
    assert new.counter.served.count("/seed") == 1
    assert new.agent.gate.status()["diverged"] == 1
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_rollout_restarts_when_one_of_its_callees_alone_was_killed(world: World, tmp_path: Path) -> None:
    running = await cut_at_model(world, 1)
    world.lose_counter(tmp_path / "fresh")
    open_all(world)
    world.let_model_go()
    assert (await running).json() == EXPECTED
    assert world.agent.gate.status()["diverged"] == 1
    assert world.counter.gate.remarks.counters == {"calls refused whose state is lost": 1}


async def test_a_server_of_which_several_processes_answer_at_one_address_is_told_and_a_restart_is_not(
    world: World, tmp_path: Path
) -> None:
    """A reverse proxy, replicas of one name: each process gets a part of the calls, and none has the whole session."""
    (other := tmp_path / "other").mkdir()
    processes = [world.counter, Node(world, "counter", "gym.resources", "resources", other)]
    processes[1].routes = processes[0].routes
    turn = itertools.count()

    def balance(server: str, _: str) -> None:
        if server == "counter":
            world.nodes["counter"] = processes[next(turn) % 2]

    world.on_send = balance
    await world.run(ROW)
    told = [text for process in processes for text in process.gate.remarks.texts()]
    assert told
    assert all(text.startswith(SESSIONS_ELSEWHERE) for text in told)
    assert "of rollout r-1 some were executed by another process" in told[0]
    for process in processes:
        process.log.close()


async def test_a_server_that_was_started_anew_again_and_again_is_not_taken_for_several(
    world: World, tmp_path: Path
) -> None:
    lives = itertools.count()

    def restart_it(server: str, path: str) -> None:
        if path == "/add" and (life := next(lives)) < 3:  # at an attempt's first step each
            world.lose_counter(tmp_path / f"life-{life}")

    world.on_send = restart_it
    assert (await world.run(ROW)).json() == EXPECTED
    assert world.agent.gate.status()["diverged"] == 3
    assert world.counter.gate.remarks.texts() == []


def test_who_was_refused_before_at_an_earlier_beginning_was_executed_by_somebody_else() -> None:
    told: list[str] = []
    elsewhere = Elsewhere(lambda _, sentence: told.append(sentence))
    elsewhere.refused(root("r-1", 0, 0).child(1), executed=False)
    elsewhere.refused(root("r-1", 1, 0).child(2), executed=False)  # at once, and by a repeat: the same beginning
    elsewhere.refused(root("r-2", 0, 0).child(1), executed=False)
    assert told == [], "so does a restart look"
    elsewhere.refused(root("r-1", 2, 2).child(1), executed=False)
    elsewhere.refused(root("r-3", 0, 0).child(1), executed=True)
    assert [text.partition(" of rollout ")[2][:3] for text in told] == ["r-1", "r-3"]


async def test_a_save_after_a_callee_alone_was_killed_does_not_bring_back_the_wrong_state(
    world: World, tmp_path: Path
) -> None:
    running = await cut_at_model(world, 1)
    world.lose_counter(tmp_path / "fresh")
    new = world.restarted(tmp_path / "second")
    new.counters = world.counters
    running.cancel()
    assert (await new.run(ROW)).json() == EXPECTED
    assert new.counter.served.count("/seed") == 1
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_another_agent_whose_callee_was_killed_restarts_the_whole_rollout(world: World, tmp_path: Path) -> None:
    async def help_with_counter(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        helper = world.nodes["helper"]
        seeded = await helper.post("counter", "/seed", {"start": 5})
        await (await helper.post("model", "/v1/responses", {"input": body["input"], "turn": 0})).json()
        added = await helper.post("counter", "/add", {"n": 1}, cookies=seeded.cookies)
        return added.status, await added.json(), []

    world.agent.routes["/run"] = world.run_with_helper
    world.nodes["helper"].routes["/v1/responses"] = help_with_counter
    running = await cut_at_model(world, 0)
    world.lose_counter(tmp_path / "fresh")
    open_all(world)
    world.let_model_go()
    assert (await running).json() == {"count": 6}
    assert world.counter.served == ["/seed", "/add"]


async def test_a_callee_without_state_that_was_killed_costs_no_rollout_anything(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await cut_at_model(world, 1)
    counters = world.counters
    world.lose_counter(tmp_path / "fresh")
    world.counters = counters  # they are kept elsewhere
    monkeypatch.setattr(world.counter.gate, "describe", lambda: {"checkpoint_mode": "stateless"})
    open_all(world)
    world.let_model_go()
    assert (await running).json() == EXPECTED
    assert world.agent.gate.status()["diverged"] == 0


KINDS = ("excluded", "rollout", "call", "executed", "session", "mark", "count")


@pytest.mark.parametrize("version", [1, 2])
async def test_a_snapshot_of_an_earlier_version_is_continued(world: World, tmp_path: Path, version: int) -> None:
    def as_before(file: Path) -> None:  # the first did not count executed calls; both had their lines by kind
        records = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        records = [
            r | {"explicit": 1} if r["t"] == "rollout" else r for r in records if version > 1 or r["t"] != "count"
        ]
        kept = [json.dumps(r) for r in sorted(records, key=lambda r: KINDS.index(r["t"]))]
        head = json.dumps({"t": "header", "format": f"gym-calls-v{version}"}, separators=(",", ":"))
        file.write_text("\n".join([head, *kept]) + "\n")

    first = await cut_at_model(world, 1)
    new = world.restarted(tmp_path / "second", edit=as_before)
    first.cancel()
    second = await cut_at_model(new, 2)  # its next snapshot knows as little
    third = new.restarted(tmp_path / "third")
    second.cancel()
    assert (await third.run(ROW)).json() == EXPECTED
    assert third.counter.served == ["/add", "/verify"]
    for w in (new, third):
        w.close()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_a_rollout_that_the_ledger_excludes_is_not_continued(world: World, tmp_path: Path) -> None:
    running = await cut_at_model(world, 1)
    new = world.restarted(tmp_path / "second", excluded={"r-1": "another server lost it"})
    running.cancel()
    assert (await new.run(ROW)).json() == EXPECTED
    assert len(new.model_calls) == 3
    assert new.agent.log.attempt_of("r-1") == 1
    assert new.agent.gate.status()["diverged"] == 0
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_callees_forget_what_their_caller_has_recorded(world: World) -> None:
    await world.run(ROW)
    left = world.counter.log.db.execute("SELECT call_id FROM executed").fetchall()
    assert left == [("0.3",)]  # /verify, after which the rollout made no further call
    await world.run({**ROW, "_ng_rollout_id": "r-2"})
    left = world.counter.log.db.execute("SELECT rollout_id, call_id FROM executed").fetchall()
    assert left == [("r-2", "0.3")]
    assert world.agent.log.db.execute("SELECT count(*) FROM executed").fetchone() == (0,)


async def test_an_event_stream_is_passed_on_as_it_comes_and_held_chunk_by_chunk(world: World) -> None:
    world.block["chunk1"], world.block["chunk2"] = asyncio.Event(), asyncio.Event()
    headers = [(ROLLOUT_HEADER, "r-9"), (ATTEMPT_HEADER, "0"), (CALL_HEADER, "0.1")]
    client = Client()
    call = asyncio.create_task(client.send_request(world.model.app, "POST", "/stream", b"{}", headers))
    await until(lambda: client.chunks)
    world.model.gate.close("op", HOLD, 60)
    world.block["chunk1"].set()
    await until(lambda: world.model.gate.doors.counts().held == 1)
    assert client.chunks == [b"data: 0\n\n"]
    world.model.gate.open()
    await until(lambda: len(client.chunks) == 2)
    world.block["chunk2"].set()
    await call
    assert client.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    again = await Client().send_request(world.model.app, "POST", "/stream", b"{}", headers)
    assert again.body == client.body
    assert world.model.served == ["/stream"]


async def test_anonymous_work_is_counted_gated_and_not_remembered(world: World) -> None:
    world.counters["s0"] = 0
    close_all(world)
    call = asyncio.create_task(
        Client().send_request(world.counter.app, "POST", "/add", b'{"n": 4}', [("cookie", "s=s0")])
    )
    await until(lambda: world.counter.gate.doors.counts().parked == 1)
    assert world.counters["s0"] == 0
    open_all(world)
    assert (await call).json() == {"count": 4}
    assert world.counter.gate.status()["anonymous_requests"] == 1
    assert world.counter.log.db.execute("SELECT count(*) FROM executed").fetchone() == (0,)


async def test_an_anonymous_response_is_held_while_closed(world: World) -> None:
    world.block["/add"] = asyncio.Event()
    world.counters["s0"] = 0
    client = Client()
    call = asyncio.create_task(
        client.send_request(world.counter.app, "POST", "/add", b'{"n": 4}', [("cookie", "s=s0")])
    )
    await until(lambda: world.counter.served)
    world.counter.gate.close("op", HOLD, 60)
    world.block["/add"].set()
    await until(lambda: world.counter.gate.doors.counts().held == 1)
    assert client.status == 0
    world.counter.gate.open()
    assert (await call).json() == {"count": 4}


async def test_cookies_come_through_unchanged_live_and_replayed(world: World) -> None:
    seen: list[Any] = []
    original = world.agent.routes["/run"]

    async def run(scope: Any, row: Any, headers: dict[str, str]) -> Any:
        response = await world.agent.post("counter", "/seed", {"start": 0})
        seen.append([(m.key, m.value, m["httponly"]) for m in response.cookies.values()])
        seen.append(response.headers.getall("set-cookie"))
        return await original(scope, row, headers)

    world.agent.routes["/run"] = run
    await world.run(ROW)
    assert seen[0] == [("s", "a0", True), ("other", "1", "")]
    assert seen[1] == ["s=a0; path=/; httponly", "other=1; path=/"]


async def test_a_worker_that_joins_while_closed_is_closed_before_it_serves(world: World, tmp_path: Path) -> None:
    world.model.gate.close("op", HOLD, 60)
    late = World(tmp_path / "first")  # the same logs: another worker process of each server
    late.clock.now = world.clock.now
    call = asyncio.create_task(
        Client().send_request(late.model.app, "POST", "/v1/responses", b'{"input":"x","turn":0}')
    )
    await until(lambda: late.model.gate.doors.counts().parked == 1)
    assert late.model.gate.doors.operation_id == "op"
    late.model.gate.open()
    await call
    late.close()


async def test_an_auxiliary_model_is_never_closed(tmp_path: Path) -> None:
    world = World(tmp_path / "aux")
    world.model.gate.never_closes = True
    with pytest.raises(Exception, match="never paused"):
        world.model.gate.close("op", HOLD, 60)
    assert not world.model.gate.doors.closed
    world.close()


async def test_stragglers_are_excluded_by_name_with_what_they_wait_for(world: World, tmp_path: Path) -> None:
    world.block["/add"] = asyncio.Event()
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: "/add" in world.counter.served)
    close_all(world)
    assert [r["rollout_id"] for r in world.counter.gate.exclude()["excluded"]] == ["r-1"]
    out = tmp_path / "look"
    out.mkdir()
    ledger = calllog_files.export(world.counter.log, out).ledger
    assert [(line.rollout_id, line.state) for line in ledger] == [("r-1", RolloutState.EXCLUDED)]
    assert "did not end before the cut at counter" in ledger[0].reason
    world.block["/add"].set()
    open_all(world)
    assert (await running).json() == EXPECTED
    assert world.counter.log.excluded() == []


async def test_a_full_disk_costs_the_rollout_its_place_in_the_cut_and_never_a_request(world: World) -> None:
    await world.run({**ROW, "_ng_rollout_id": "r-0"})
    for node in world.nodes.values():  # from now on every file is as large as it may get
        pages = node.log.db.execute("PRAGMA page_count").fetchone()[0]
        node.log.db.execute(f"PRAGMA max_page_count={pages}")
    filler = "x" * 20_000
    running = await cut_at_model(world, 1, {**ROW, "filler": filler, "input": "abc" + filler})
    assert world.agent.log.failures
    await world.agent.gate.export("unused", "")
    assert any(r == "r-1" and "could not be logged" in reason for r, _, reason in world.agent.log.excluded())
    world.let_model_go()
    open_all(world)
    assert (await running).status == 200


async def test_an_agent_that_calls_in_parallel_repeats_nothing(world: World, tmp_path: Path) -> None:
    world.agent.routes["/run"] = world.run_in_parallel
    world.hold_model_at = 1
    running = asyncio.create_task(world.run(ROW))
    await until(lambda: world.model.served.count("/v1/responses") == 6)  # the second call of each line
    close_all(world)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.agent.routes["/run"] = new.run_in_parallel
    assert (await new.run(ROW)).json() == {"said": [[3, 4, 5]] * 3}
    assert len(world.model_calls) == 3
    assert len(new.model_calls) == 6
    assert new.agent.gate.outbound.replayed == 3
    assert new.agent.gate.status()["diverged"] == 0
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_calls_of_another_agent_on_behalf_of_a_rollout_are_replayed_too(world: World, tmp_path: Path) -> None:
    world.agent.routes["/run"] = world.run_with_helper
    running = await cut_at_model(world, 2)
    out = tmp_path / "look"
    out.mkdir()
    assert calllog_files.export(world.nodes["helper"].log, out).ledger == ()  # the rollout is the other agent's
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.agent.routes["/run"] = new.run_with_helper
    assert (await new.run(ROW)).json() == {"said": [3, 4, 5]}
    assert len(new.model_calls) == 1
    assert new.nodes["helper"].gate.outbound.replayed == 2
    new.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_another_agent_that_diverges_restarts_the_whole_rollout(world: World, tmp_path: Path) -> None:
    world.agent.routes["/run"] = world.run_with_helper
    world.chance = itertools.count(1)
    running = await cut_at_model(world, 2)
    new = world.restarted(tmp_path / "second")
    running.cancel()
    new.chance = itertools.count(100)
    new.agent.routes["/run"] = new.run_with_helper
    assert (await new.run(ROW)).json() == {"said": [3, 4, 5]}
    assert len(new.model_calls) == 3
    assert new.agent.gate.status()["diverged"] == 1
    new.close()
    await asyncio.gather(running, return_exceptions=True)
