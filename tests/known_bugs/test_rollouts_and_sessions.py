"""Rollouts that are lost or made twice, and sessions that are mixed up: each must be in one state, with its own cookies."""

from __future__ import annotations

import asyncio
import json
import tempfile
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import manifest_pb2

from coordinator.client import AsyncClient
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import CheckpointMode, QuiesceMode, Role, RolloutState, StragglerPolicy
from participant_shims.adapters.proxy import ProxyAdapter, ProxyOptions
from participant_shims.gate import calllog_files
from participant_shims.gate.calllog import CallLog
from participant_shims.identity import CallIdentity
from tests.coordinator.conftest import Bench, collect, until
from tests.fakes import Knobs
from tests.gate import world as gym
from tests.gate.world import Node, World
from tests.shims.shim_fakes import FakeAdapter, refused, serve
from tests.shims.shim_fakes import collect as take

HOLD = QuiesceMode.HOLD
ROW: dict[str, Any] = {"_ng_rollout_id": "r-1", "input": "abc", "start": 5}


def close_all(world: World) -> None:
    for node in world.nodes.values():
        node.gate.close("op", HOLD, 60)


def entry(rollout_id: str, state: RolloutState, **more: Any) -> manifest_pb2.LedgerEntry:
    return manifest_pb2.LedgerEntry(rollout_id=rollout_id, state=int(state), **more)  # type: ignore[arg-type]


ONE_OF_EACH = [
    entry("p0-s0", RolloutState.COMPLETED, recorded_calls=3),
    entry("p0-s1", RolloutState.PARKED, recorded_calls=2),
    entry("p1-s0", RolloutState.PENDING, recorded_calls=1, waiting_on="model POST /v1/responses"),
    entry("p1-s1", RolloutState.EXCLUDED, reason="its last dispatch failed with status 500"),
]


async def test_four_rollouts_in_four_states_are_four_in_every_place(bench: Bench) -> None:  # B1, B15, B23
    await bench.start(agent_0=Knobs(ledger=ONE_OF_EACH))
    async with AsyncClient(bench.running.address) as client:
        saved = await client.save("step-1")
        assert "2 in flight kept" in saved.line
        assert "1 to restart" in saved.line
    read = await collect(bench.stub().ReadLedger(pb.ReadLedgerRequest(snapshot_id="step-1"), timeout=5))
    found = {e.rollout_id: (e.state, e.reason, e.waiting_on) for part in read for e in part.entries}
    assert found == {e.rollout_id: (e.state, e.reason, e.waiting_on) for e in ONE_OF_EACH}
    restored = (await bench.restore())[-1].restored
    for totals in (saved.snapshot.totals, restored.totals):
        assert (totals.completed, totals.parked, totals.pending, totals.excluded) == (1, 1, 1, 1)
    await bench.abort()


async def test_a_rollout_that_two_agents_have_in_two_states_is_excluded_and_fails_a_strict_save(  # B10, B1
    bench: Bench,
) -> None:
    await bench.start(
        agents=2,
        agent_0=Knobs(ledger=[entry("p0-s0", RolloutState.COMPLETED)]),
        agent_1=Knobs(ledger=[entry("p0-s0", RolloutState.PARKED)]),
    )
    with pytest.raises(SafepointError) as caught:
        await bench.save(straggler_policy=int(StragglerPolicy.FAIL))
    assert caught.value.reason is Reason.LEDGER_UNBALANCED
    assert [r.rollout_id for r in caught.value.problem.rollouts] == ["p0-s0"]
    assert bench.all_open()
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())
    events = await bench.save("save-2", "step-2")
    totals = events[-1].saved.snapshot.totals
    assert (totals.completed, totals.parked, totals.pending, totals.excluded) == (0, 0, 0, 1)
    (told,) = [event.warning.message for event in events if event.HasField("warning")]
    assert {"p0-s0", "agent-0", "agent-1"} <= set(told.replace(";", "").split())


async def test_what_used_a_server_that_saves_nothing_restarts_and_is_counted(bench: Bench) -> None:  # B18, B23, G13
    await bench.start(resources=0, agent_0=Knobs(ledger=[entry(f"r-{n}", RolloutState.PARKED) for n in range(3)]))
    await bench.add(
        "sandbox", Role.RESOURCES, Knobs(ledger=[entry("r-1", RolloutState.PARKED)]), mode=CheckpointMode.RESTART_ONLY
    )
    saved = (await bench.save())[-1].saved
    assert (saved.snapshot.totals.parked, saved.snapshot.totals.excluded) == (2, 1)
    read = await collect(bench.stub().ReadLedger(pb.ReadLedgerRequest(snapshot_id="step-1"), timeout=5))
    lost = [e for part in read for e in part.entries if e.state == int(RolloutState.EXCLUDED)]
    assert [(e.rollout_id, "sandbox" in e.reason) for e in lost] == [("r-1", True)]


async def test_a_restart_from_the_input_uses_nothing_of_the_old_tokens(world: World, tmp_path: Path) -> None:  # B18
    world.hold_model_at = 2
    cut = asyncio.create_task(world.run(ROW))
    await gym.until(lambda: world.held_model)
    close_all(world)
    new = world.restarted(tmp_path / "second", excluded={"r-1": "its session was lost"})
    cut.cancel()
    assert new.agent.log.records("r-1", "0.2") == []
    assert new.model.log.db.execute("SELECT count(*) FROM executed").fetchone() == (0,)
    assert (await new.run(ROW)).status == 200
    assert len(new.model_calls) == 3
    new.close()
    await asyncio.gather(cut, return_exceptions=True)


async def test_an_effect_that_was_applied_and_not_acknowledged_is_applied_once(world: World, tmp_path: Path) -> None:
    """B27: the server dies between its effect and the answer that the agent records."""
    world.block["/add"] = asyncio.Event()
    cut = asyncio.create_task(world.run(ROW))
    await gym.until(lambda: "/add" in world.counter.served)
    close_all(world)
    world.block["/add"].set()
    await gym.until(lambda: world.counter.gate.doors.counts().held == 1)
    assert list(world.counters.values()) == [5 + 3]
    new = world.restarted(tmp_path / "second")
    cut.cancel()
    assert (await new.run(ROW)).json()["count"] == 5 + 3 + 4 + 5
    assert new.counter.gate.remarks.counters == {"calls answered from memory": 1}
    new.close()
    await asyncio.gather(cut, return_exceptions=True)


async def test_two_servers_that_set_a_cookie_of_one_name_get_each_their_own_back(world: World, tmp_path: Path) -> None:
    """G3: the model server sets `s` as the counter does; after the restore neither sees the other's."""
    heard: list[tuple[str, str]] = []

    def listening(node: Node) -> None:
        for path, handler in list(node.routes.items()):

            async def call(
                scope: Any, body: Any, headers: dict[str, str], path: str = path, inner: Any = handler
            ) -> Any:
                heard.append((path, headers.get("cookie", "")))
                return await inner(scope, body, headers)

            node.routes[path] = call

    def prepare(world: World) -> None:
        generate = world.model.routes["/v1/responses"]

        async def generating(scope: Any, body: Any, headers: dict[str, str]) -> Any:
            status, answer, _ = await generate(scope, body, headers)
            return status, answer, [("set-cookie", "s=of-the-model; path=/")]

        world.model.routes["/v1/responses"] = generating
        listening(world.model)
        listening(world.counter)

        async def loop(scope: Any, body: Any, headers: dict[str, str]) -> Any:
            jars: dict[str, Any] = {"counter": SimpleCookie(headers.get("cookie", "")), "model": None}
            said: list[Any] = []
            for turn in range(world.turns):
                ask = {"input": body["input"], "said": said, "turn": turn}
                answer = await world.agent.post("model", "/v1/responses", ask, cookies=jars["model"])
                jars["model"] = answer.cookies
                step = await answer.json()
                added = await world.agent.post("counter", "/add", {"n": step["n"]}, cookies=jars["counter"])
                jars["counter"] = added.cookies
                said.append([step["n"], await added.json()])
            return 200, {"said": said}, [("set-cookie", f"s={jars['counter']['s'].value}; path=/")]

        world.agent.routes["/v1/responses"] = loop

    prepare(world)
    world.hold_model_at = 1
    cut = asyncio.create_task(world.run(ROW))
    await gym.until(lambda: world.held_model)
    close_all(world)
    new = world.restarted(tmp_path / "second")
    cut.cancel()
    prepare(new)
    heard.clear()
    assert (await new.run(ROW)).json()["count"] == 17
    assert heard == [
        ("/v1/responses", "s=of-the-model"), ("/add", "s=a0"), ("/v1/responses", "s=of-the-model"), ("/add", "s=a0"),
        ("/verify", "s=a0"),
    ]  # fmt: skip
    assert new.agent.gate.status()["diverged"] == 0
    new.close()
    await asyncio.gather(cut, return_exceptions=True)


async def test_every_session_that_a_rollout_got_is_its_own(tmp_path: Path) -> None:  # D7
    """A server that gives a new session at each turn: all of them are saved with their rollout, none with another."""
    log = CallLog(tmp_path / "calls.db")
    for session, rollout in (("s1", "r-1"), ("s2", "r-1"), ("t1", "r-2")):
        log.bind(session, rollout, 0)
    log.bind("s2", "r-1", 0)
    out = tmp_path / "out"
    out.mkdir()
    calllog_files.export(log, out)
    new = CallLog(tmp_path / "new.db")
    calllog_files.load(new, [out / calllog_files.FILE])
    assert new.sessions() == {"s1": ("r-1", 0), "s2": ("r-1", 0), "t1": ("r-2", 0)}
    assert new.done([("r-1", 0)]) == ["s1", "s2"]
    assert new.sessions() == {"t1": ("r-2", 0)}
    log.close()
    new.close()


async def test_the_status_lists_every_live_rollout_with_turn_age_and_what_it_waits_for(world: World) -> None:  # B21, J6
    world.block["/add"] = asyncio.Event()
    running = [asyncio.create_task(world.run({**ROW, "_ng_rollout_id": f"p{p}-s{s}"})) for p in (0, 1) for s in (0, 1)]
    await gym.until(lambda: world.counter.served.count("/add") == 4)
    close_all(world)
    world.clock.move(7.0)
    agent, counter = world.agent.gate.status(), world.counter.gate.status()
    names = ["p0-s0", "p0-s1", "p1-s0", "p1-s1"]
    assert sorted(r["rollout_id"] for r in agent["rollouts"]) == names
    assert {(r["turn"], r["age_s"], r["waiting_on"]) for r in agent["rollouts"]} == {(2, 7.0, "counter POST /add")}
    assert sorted(r["rollout_id"] for r in counter["waiting_for"]) == names
    world.block["/add"].set()
    for node in world.nodes.values():
        node.gate.open()
    await asyncio.gather(*running)


async def test_what_was_restored_and_not_yet_dispatched_is_in_the_next_snapshot(world: World, tmp_path: Path) -> None:
    """Hazard 99: two restarts in a row, and nobody came for the rollouts in between."""
    done = await world.run({**ROW, "_ng_rollout_id": "r-done"})
    before = len(world.model_calls)
    cut = asyncio.create_task(world.run(ROW))
    world.hold_model_at = 1
    await gym.until(lambda: world.held_model and len(world.model_calls) == before + 1)
    close_all(world)
    second = world.restarted(tmp_path / "second")
    third = second.restarted(tmp_path / "third")
    cut.cancel()
    assert (await third.run(ROW)).json()["count"] == 17
    assert len(third.model_calls) == 2
    assert third.agent.log.attempt_of("r-1") == 2
    assert (await third.run({**ROW, "_ng_rollout_id": "r-done"})).body == done.body
    for other in (second, third):
        other.close()
    await asyncio.gather(cut, return_exceptions=True)


async def test_a_restored_rollout_that_is_dispatched_twice_runs_once(world: World, tmp_path: Path) -> None:  # hazard 33
    world.hold_model_at = 1
    cut = asyncio.create_task(world.run(ROW))
    await gym.until(lambda: world.held_model)
    close_all(world)
    new = world.restarted(tmp_path / "second")
    cut.cancel()
    both = await asyncio.gather(new.run(ROW), new.run(ROW))
    assert both[0].body == both[1].body
    assert len(new.model_calls) == 2
    assert new.agent.log.attempt_of("r-1") == 1
    new.close()
    await asyncio.gather(cut, return_exceptions=True)


async def test_a_session_that_no_file_holds_fails_the_restore_and_stays_paused(tmp_path: Path) -> None:  # hazard 66
    """What was saved and is neither loaded nor said to be lost would let its rollout go on without its state."""
    with tempfile.TemporaryDirectory(prefix="sp-") as short:
        async with serve(
            FakeAdapter(files={"worker-0.sessions": b"a\n", "worker-7.sessions": b"b\n"}), Path(short)
        ) as shim:
            shim.reserve("snap-1")
            await shim.prepared("op-1")
            committed = (await take(shim.commit("op-1", "snap-1")))[-1].committed
            shim.publish("snap-1")
            await shim.resume("op-1")
            real = shim.adapter.load

            async def of_one_worker(directory: Path, files: Any) -> Any:
                async for step in real(directory, [f for f in files if f.path.startswith("worker-0.")]):
                    yield step

            shim.adapter.load = of_one_worker  # type: ignore[method-assign]
            error = await refused(take(shim.restore(committed.manifest_sha256)))
            assert error.reason is Reason.SNAPSHOT_CORRUPT
            assert "1 of the 2 sessions" in error.problem.message
            assert not shim.adapter.open_now
            await shim.abort("op-2")
            assert shim.adapter.open_now


EVERY = 2**32 - 1  # what a coordinator names when a trainer retires a rollout: every attempt that there was


async def test_an_index_id_that_was_retired_runs_again_in_the_next_epoch(world: World, tmp_path: Path) -> None:
    """The next epoch gives the same ids to other prompts: they must be identified, logged and saved like the first."""
    row = {"_ng_task_index": 7, "_ng_rollout_index": 1, "input": "abc", "start": 5}
    assert (await world.run(row)).status == 200
    for node in world.nodes.values():
        for _ in range(
            2
        ):  # a repeat, as after a lost reply, changes nothing: all servers go on counting from one number
            node.gate.retire([["7-1@agent", EVERY], ["never-seen", EVERY]])
        assert node.log.db.execute("SELECT 1 FROM marks WHERE rollout_id='never-seen'").fetchone() is None
    stale = [
        ("x-safepoint-rollout", "7-1@agent"),
        ("x-safepoint-attempt", "0"),
        ("x-safepoint-call", "0.9"),
        ("cookie", "s=a0"),
    ]
    late = await gym.Client().send_request(world.counter.app, "POST", "/add", b'{"n": 4}', stale)
    assert late.status == 409, "what was retired is refused"
    world.hold_model_at = 1
    again = asyncio.create_task(world.run(row))
    await gym.until(lambda: world.held_model)
    close_all(world)
    out = tmp_path / "look"
    out.mkdir()
    (line,) = calllog_files.export(world.agent.log, out).ledger
    assert (line.rollout_id, line.attempt, line.recorded_calls) == ("7-1@agent", 1, 3)
    new = world.restarted(tmp_path / "second")
    again.cancel()
    assert (await new.run(row)).json()["count"] == 17
    assert len(new.model_calls) == 2, "it went on from its records"
    new.close()
    await asyncio.gather(again, return_exceptions=True)


async def test_behind_a_proxy_too_an_id_that_was_retired_may_come_again() -> None:
    adapter = ProxyAdapter(ProxyOptions("tool", Role.RESOURCES, "127.0.0.1:0", "127.0.0.1:1"))
    adapter._remember(CallIdentity("7-1", 0, "0.1"))
    for _ in range(2):
        await adapter.retire([("7-1", EVERY), ("never-seen", EVERY)])
    assert adapter._is_stale(CallIdentity("7-1", 0, "0.2"))
    assert not adapter._is_stale(CallIdentity("7-1", 1, "1.1"))
    assert not adapter._is_stale(CallIdentity("never-seen", 0, "0.1"))
    assert await adapter.retire([("7-1", 4)]) == 0
    assert adapter._is_stale(CallIdentity("7-1", 4, "4.1"))


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize("attempts", [(0, 0), (3, 0), (0, 3)])
async def test_an_index_id_that_another_agent_had_in_an_earlier_batch_spoils_no_save(
    bench: Bench, attempts: tuple[int, int]
) -> None:
    """Batches number their rows anew, and the rows of the next one may go to another agent."""
    await bench.start(
        agents=2,
        agent_0=Knobs(ledger=[entry("7-1", RolloutState.COMPLETED, input_sha256=A, attempt=attempts[0])]),
        agent_1=Knobs(ledger=[entry("7-1", RolloutState.PARKED, input_sha256=B, attempt=attempts[1])]),
    )
    saved = (await bench.save())[-1].saved
    assert (saved.snapshot.totals.completed, saved.snapshot.totals.parked) == (0, 1)
    read = await collect(bench.stub().ReadLedger(pb.ReadLedgerRequest(snapshot_id="step-1"), timeout=5))
    assert [(e.participant_id, e.input_sha256) for part in read for e in part.entries] == [("agent-1", B)]


async def test_two_live_rollouts_of_one_id_restart_and_veto_nothing(bench: Bench) -> None:
    await bench.start(
        agents=2,
        agent_0=Knobs(ledger=[entry("7-1", RolloutState.PARKED, input_sha256=A), entry("7-2", RolloutState.PARKED)]),
        agent_1=Knobs(ledger=[entry("7-1", RolloutState.PARKED, input_sha256=B)]),
    )
    saved = (await bench.save())[-1].saved
    assert (saved.snapshot.totals.parked, saved.snapshot.totals.excluded) == (1, 1)
    read = await collect(bench.stub().ReadLedger(pb.ReadLedgerRequest(snapshot_id="step-1"), timeout=5))
    (lost,) = [e for part in read for e in part.entries if e.rollout_id == "7-1"]
    assert "agent-0" in lost.reason
    assert "agent-1" in lost.reason
    assert "_ng_rollout_id" in lost.reason


async def test_two_agents_may_have_the_same_indices_one_after_the_other(world: World) -> None:
    """Three batches at one agent, then a row of the same indices at another: servers they share must not refuse it."""
    row = {"_ng_task_index": 7, "_ng_rollout_index": 1, "input": "abc", "start": 5}
    for _ in range(3):
        assert (await world.run(row)).status == 200
    helper = world.nodes["helper"]

    async def helping(scope: Any, body: Any, headers: dict[str, str]) -> Any:
        said: list[int] = []
        for turn in range(world.turns):
            ask = {"input": body["input"], "said": said, "turn": turn}
            said.append((await (await helper.post("model", "/v1/responses", ask)).json())["n"])
        return 200, {"said": said}, []

    helper.routes["/run"] = helping
    client = gym.Client()
    await client.send_request(helper.app, "POST", "/run", json.dumps({**row, "input": "other"}).encode())
    assert (client.status, client.json()) == (200, {"said": [5, 6, 7]})
    assert world.model.gate.remarks.counters == {}
    assert helper.log.attempt_of("7-1@helper") == 0
    assert world.agent.log.attempt_of("7-1@agent") == 2
