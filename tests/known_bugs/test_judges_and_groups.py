"""Judges, cohorts and siblings: what a verifier waits for is seen, and one rollout's trouble stays its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from coordinator.wire.terms import CheckpointMode, QuiesceMode, Role, RolloutState
from participant_shims.adapter import LedgerLine
from participant_shims.gate import calllog_files
from tests.coordinator.conftest import Bench
from tests.fakes import Knobs
from tests.gate.world import Node, World, until

HOLD = QuiesceMode.HOLD


def row(number: int, **more: Any) -> dict[str, Any]:
    """A sibling of prompt 7: index ids, as NeMo Gym gives them."""
    return {"_ng_task_index": 7, "_ng_rollout_index": number, "input": "abc", "start": 5, **more}


def close_all(world: World) -> None:
    for node in world.nodes.values():
        if not node.gate.never_closes:
            node.gate.close("op", HOLD, 60)


def open_all(world: World) -> None:
    for node in world.nodes.values():
        node.gate.open()


def add_judge(world: World) -> tuple[Node, asyncio.Event]:
    """A judge that the verifier asks, and the event at which it answers."""
    judge = world.nodes["judge"] = Node(world, "judge", "gym.model", "auxiliary_model", world.directory)
    verdict = asyncio.Event()
    verify = world.counter.routes["/verify"]

    async def judged(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        await world.counter.post("judge", "/v1/responses", {"rate": body["said"]})
        return await verify(scope, body, headers)

    async def judging(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        await verdict.wait()
        return 200, {"score": 1}, []

    world.counter.routes["/verify"] = judged
    judge.routes = {"/v1/responses": judging}
    return judge, verdict


def ledger(world: World, name: str, directory: Path) -> dict[str, LedgerLine]:
    directory.mkdir()
    return {line.rollout_id: line for line in calllog_files.export(world.nodes[name].log, directory).ledger}


async def test_a_slow_judge_is_named_and_answers_through_the_pause(world: World) -> None:  # C2, A11
    judge, verdict = add_judge(world)
    running = asyncio.create_task(world.run(row(0)))
    await until(lambda: judge.served)
    close_all(world)
    status = world.counter.gate.status()
    assert [(r["rollout_id"], r["waiting_on"]) for r in status["waiting_for"]] == [
        ("7-0@agent", "judge POST /v1/responses")
    ]
    assert status["counts"]["in_flight"] == 1
    verdict.set()
    await until(lambda: world.counter.gate.status()["counts"] == {"in_flight": 0, "parked": 0, "held": 1, "calling": 0})
    open_all(world)
    assert (await running).status == 200


async def test_a_verifier_may_ask_its_judge_for_the_first_time_while_all_is_closed(world: World) -> None:  # A11, C1
    judge, verdict = add_judge(world)
    verdict.set()
    world.block["/v1/responses"] = asyncio.Event()
    judged = world.counter.routes["/verify"]
    arrived = asyncio.Event()

    async def later(*arguments: Any) -> Any:
        arrived.set()
        await world.block["verify"].wait()
        return await judged(*arguments)

    world.block["verify"] = asyncio.Event()
    world.counter.routes["/verify"] = later
    world.block["/v1/responses"].set()
    running = asyncio.create_task(world.run(row(0)))
    await asyncio.wait_for(arrived.wait(), 5)
    close_all(world)
    world.block["verify"].set()
    await until(lambda: world.counter.gate.doors.counts().held == 1)
    assert judge.served == ["/v1/responses"]
    open_all(world)
    assert (await running).status == 200


async def test_a_sibling_that_waits_for_a_parked_one_is_given_up_by_name(world: World, tmp_path: Path) -> None:  # C3
    verify, present = world.counter.routes["/verify"], list[str]()
    both = asyncio.Event()

    async def cohort(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        present.append(headers["x-safepoint-rollout"])
        if len(present) == 2:
            both.set()
        await both.wait()
        return await verify(scope, body, headers)

    world.counter.routes["/verify"] = cohort
    first = asyncio.create_task(world.run(row(0)))
    await until(lambda: present == ["7-0@agent"])
    close_all(world)
    second = asyncio.create_task(world.run(row(1)))
    await until(lambda: world.agent.gate.doors.counts().parked == 1)
    assert [r["rollout_id"] for r in world.counter.gate.exclude()["excluded"]] == ["7-0@agent"]
    said = ledger(world, "counter", tmp_path / "look")["7-0@agent"]
    assert said.state is RolloutState.EXCLUDED
    assert "/verify" in said.reason
    open_all(world)  # nobody was aborted: the cohort comes together after the cut
    assert [(await task).status for task in (first, second)] == [200, 200]


async def test_a_judge_that_fails_costs_one_rollout(world: World, tmp_path: Path) -> None:  # C4, B7
    verify = world.counter.routes["/verify"]

    async def failing(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        if headers["x-safepoint-rollout"] == "7-1@agent":
            return 500, {"error": "the judge answered 500"}, []
        return await verify(scope, body, headers)

    async def run(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        seeded = await world.agent.post("counter", "/seed", {"start": body["start"]})
        inner = await world.agent.post("agent", "/v1/responses", {"input": body["input"]}, cookies=seeded.cookies)
        verified = await world.agent.post("counter", "/verify", await inner.json(), cookies=inner.cookies)
        return verified.status, await verified.json(), []

    world.counter.routes["/verify"], world.agent.routes["/run"] = failing, run
    results = await asyncio.gather(*(world.run(row(n)) for n in range(3)))
    assert [client.status for client in results] == [200, 500, 200]
    close_all(world)
    lines = ledger(world, "agent", tmp_path / "look")
    assert {name: line.state for name, line in lines.items()} == {
        "7-0@agent": RolloutState.COMPLETED, "7-1@agent": RolloutState.EXCLUDED, "7-2@agent": RolloutState.COMPLETED,
    }  # fmt: skip
    assert "failed with status 500" in lines["7-1@agent"].reason
    new = world.restarted(tmp_path / "second")
    new.agent.routes["/run"] = world.agent.routes["/run"]
    assert (await new.run(row(0))).body == results[0].body
    assert new.model_calls == []
    new.close()


async def test_a_finished_sibling_is_not_run_again_when_another_was_cut(world: World, tmp_path: Path) -> None:
    """B25, B26: the unit is the sibling, not the group."""
    done = await world.run(row(0))
    world.hold_model_at = 1
    cut = asyncio.create_task(world.run(row(1)))
    await until(lambda: world.held_model)
    close_all(world)
    lines = ledger(world, "agent", tmp_path / "look")
    assert [lines[name].state for name in ("7-0@agent", "7-1@agent")] == [RolloutState.COMPLETED, RolloutState.PENDING]
    new = world.restarted(tmp_path / "second")
    cut.cancel()
    answers = await asyncio.gather(*(new.run(row(n)) for n in range(3)))
    assert answers[0].body == done.body
    assert len(new.model_calls) == 0 + 2 + 3  # none again, the two that were left, a sibling that had never begun
    assert [a.json()["count"] for a in answers] == [17, 17, 17]
    new.close()
    await asyncio.gather(cut, return_exceptions=True)


async def test_a_judge_with_two_workers_prevents_no_save(bench: Bench) -> None:  # review finding 18
    await bench.start()
    judge = await bench.add(
        "judge", Role.AUXILIARY_MODEL, Knobs(silent_workers=1), workers=2, mode=CheckpointMode.STATELESS
    )
    assert (await bench.save())[-1].saved.snapshot.snapshot_id == "step-1"
    assert judge.count("Prepare") == 0


async def test_several_agents_and_resources_make_one_cut(bench: Bench) -> None:  # review finding 12
    await bench.start(agents=3, models=2, resources=3, agent_0=Knobs(rollouts=2), agent_2=Knobs(rollouts=1))
    saved = (await bench.save())[-1].saved
    assert saved.snapshot.totals.parked == 3
    assert len(saved.snapshot.participant_ids) == 8
