"""The gate inside unmodified Gym servers: simple_agent, example_session_state_mgmt, vllm_model."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.wire.terms import RolloutState
from participant_shims.gate import calllog_files
from participant_shims.gate.calllog import CallLog
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import Fleet, counter_config, row
from tests.gym.shim_line import Line, ShimLine

pytestmark = pytest.mark.gym
PREPARE = ("policy_model", "counter_agent", "counter")  # the order of the waves
RESUME = ("counter", "policy_model", "counter_agent")


@asynccontextmanager
async def lines_of(fleet: Fleet, *names: str) -> AsyncIterator[dict[str, Line]]:
    async with AsyncExitStack() as stack:
        shims = {n: await stack.enter_async_context(ShimLine(fleet.life(n))) for n in names or fleet.names()}
        yield {n: await shim.worker() for n, shim in shims.items()}


async def close_all(lines: dict[str, Line], operation_id: str, lease_s: float = 60) -> None:
    for name in PREPARE:
        await lines[name].ask("close", operation_id=operation_id, mode="hold", lease_s=lease_s)
    await lines["counter"].status_when(lambda s: s["closed"] and s["counts"]["in_flight"] == 0)


async def open_all(lines: dict[str, Line]) -> None:
    for name in RESUME:
        await lines[name].ask("open")


class Trainer:
    """Dispatches rows and collects what comes back."""

    def __init__(self, fleet: Fleet) -> None:
        self._url = fleet.url("counter_agent") + "/run"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Trainer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, row: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._url, json=row) as response:
            assert response.status == 200, await response.text()
            return await response.json()


def counted(fleet: Fleet, name: str, query: str) -> int:
    db = sqlite3.connect(fleet.life(name) / "calls.db")
    try:
        return int(db.execute(query).fetchone()[0])
    finally:
        db.close()


async def until(condition: Any, within_s: float = 90) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_gate_says_what_its_server_is(fleet: Fleet) -> None:
    async with lines_of(fleet) as lines:
        hello = {name: line.hello for name, line in lines.items()}
    assert {n: h["kind"] for n, h in hello.items()} == {
        "policy_model": "gym.model", "counter": "gym.resources", "counter_agent": "gym.agent",
    }  # fmt: skip
    assert hello["policy_model"]["describe"]["role"] == "policy_model"
    assert hello["counter_agent"]["describe"]["depends_on"] == ["counter", "policy_model"]
    assert hello["policy_model"]["describe"]["upstream_endpoints"][0].startswith("http://127.0.0.1:")
    assert hello["counter"]["describe"]["checkpoint_mode"] == "export_restore"
    assert hello["counter"]["pid"] == fleet.processes["counter"].pid
    life = fleet.life("counter")
    assert life.stat().st_mode & 0o777 == 0o700


async def test_rollouts_that_are_cut_in_flight_all_finish_and_no_call_is_made_twice(
    fleet: Fleet, endpoint: ScriptedEndpoint
) -> None:
    repeated, begun = endpoint.repeated, endpoint.begun
    endpoint.hold(after_turn=2)
    async with lines_of(fleet) as lines, Trainer(fleet) as trainer:
        runs = [asyncio.create_task(trainer.run(row(100 + i, 4))) for i in range(12)]
        await until(lambda: endpoint.begun == begun + 36)  # the third generation of each runs
        await close_all(lines, "op-1")
        endpoint.release()
        status = await lines["policy_model"].status_when(lambda s: s["counts"]["held"] == 12)
        assert status["counts"]["in_flight"] == 0
        late = asyncio.create_task(trainer.run(row(150, 1)))
        status = await lines["counter_agent"].status_when(lambda s: s["counts"]["parked"] == 1)
        named = await lines["counter_agent"].ask("status", max_rollouts=100)
        waiting = {r["rollout_id"]: r for r in named["rollouts"]}
        assert len(waiting) == 13
        assert waiting["103-0@counter_agent"]["waiting_on"] == "policy_model POST /v1/responses"
        assert waiting["103-0@counter_agent"]["activity"] == "calling"
        assert waiting["103-0@counter_agent"]["turn"] == 5
        assert waiting["150-0@counter_agent"]["activity"] == "parked"
        assert not any(r.done() for r in runs)
        await open_all(lines)
        results = await asyncio.gather(*runs, late)
    assert [r["reward"] for r in results] == [1.0] * 13
    assert endpoint.repeated == repeated
    assert counted(fleet, "counter", "SELECT count(*) FROM executed") <= 13
    assert counted(fleet, "policy_model", "SELECT count(*) FROM executed") <= 13


async def test_a_client_that_leaves_while_parked_is_never_run(fleet: Fleet, endpoint: ScriptedEndpoint) -> None:
    total = endpoint.total
    async with lines_of(fleet) as lines, Trainer(fleet) as trainer:
        await close_all(lines, "op-2")
        leaving = asyncio.create_task(trainer.run(row(200, 2)))
        await lines["counter_agent"].status_when(lambda s: s["counts"]["parked"] == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await lines["counter_agent"].status_when(lambda s: s["closed"] and s["counts"]["parked"] == 0)
        await open_all(lines)
        assert (await trainer.run(row(201, 1)))["reward"] == 1.0
    assert endpoint.total == total + 3  # of the last one only
    assert counted(fleet, "counter_agent", "SELECT count(*) FROM rollouts WHERE rollout_id='200-0@counter_agent'") == 0


async def test_the_lease_opens_when_the_shim_is_dead(fleet: Fleet) -> None:
    async with Trainer(fleet) as trainer:
        async with lines_of(fleet) as lines:
            await close_all(lines, "op-3", lease_s=1.5)
            parked = asyncio.create_task(trainer.run(row(300, 1)))
            await lines["counter_agent"].status_when(lambda s: s["counts"]["parked"] == 1)
        # The shims are gone now; nobody renews and nobody opens.
        assert (await asyncio.wait_for(parked, 20))["reward"] == 1.0
        async with lines_of(fleet, "counter_agent") as lines:
            status = await lines["counter_agent"].ask("status", max_rollouts=0)
            assert (status["closed"], status["lapsed_operation_id"]) == (False, "op-3")


async def test_a_retried_tool_call_changes_the_session_once(fleet: Fleet) -> None:
    headers = {"x-safepoint-rollout": "direct-1", "x-safepoint-attempt": "0"}
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        url = fleet.url("counter")
        async with session.post(url + "/seed_session", json={"initial_count": 1}) as seeded:
            cookies = {k: m.value for k, m in seeded.cookies.items()}
            assert seeded.cookies  # Set-Cookie comes through
        answers = []
        for _ in range(3):
            async with session.post(
                url + "/increment_counter",
                json={"count": 5},
                cookies=cookies,
                headers=headers | {"x-safepoint-call": "0.2"},
            ) as response:
                answers.append((response.status, await response.read(), response.headers.getall("Set-Cookie")))
        assert answers[0] == answers[1] == answers[2]
        async with session.post(
            url + "/get_counter_value", cookies=cookies, headers=headers | {"x-safepoint-call": "0.3"}
        ) as response:
            assert await response.json() == {"count": 6}


async def export(fleet: Fleet, lines: dict[str, Line], out: Path) -> dict[str, Any]:
    """What shims do at commit. The ledgers, by server."""
    ledgers = {}
    for name in PREPARE:
        (out / name).mkdir(parents=True)
        await lines[name].ask("export", directory=str(out / name), prefix="w0-")
        log = CallLog(fleet.life(name) / "calls.db")
        ledgers[name] = calllog_files.export(log, out / name).ledger
        log.close()
    return ledgers


async def load(fleet: Fleet, lines: dict[str, Line], out: Path) -> None:
    """What shims do at restore."""
    for name in PREPARE:
        await lines[name].ask("close", operation_id="restore", mode="hold", lease_s=60)
        files = [p.name for p in (out / name).glob("w0-*")]
        await lines[name].ask("load", parts=[{"directory": str(out / name), "files": files, "some": False}])
        log = CallLog(fleet.life(name) / "calls.db")
        calllog_files.load(log, [out / name / calllog_files.FILE])
        log.close()


async def test_servers_that_were_killed_continue_every_rollout_where_it_stood(
    endpoint: ScriptedEndpoint, directory: Path
) -> None:
    fleet = Fleet(counter_config(endpoint.url), directory)
    rows = [row(400 + i, 4, _ng_rollout_id=f"k-{i}") for i in range(10)]
    try:
        fleet.start()
        async with lines_of(fleet) as lines, Trainer(fleet) as trainer:
            finished = await trainer.run(rows[0])
            repeated, total, begun = endpoint.repeated, endpoint.total, endpoint.begun
            idle = endpoint.running
            endpoint.hold(after_turn=3)
            runs = [asyncio.create_task(trainer.run(r)) for r in rows[1:]]
            await until(lambda: endpoint.begun == begun + 36)
            await close_all(lines, "save")
            ledgers = await export(fleet, lines, directory / "out")
            states = {line.rollout_id: line.state for line in ledgers["counter_agent"]}
            assert states == {"k-0": RolloutState.COMPLETED} | {f"k-{i}": RolloutState.PENDING for i in range(1, 10)}
            fleet.kill()
            await asyncio.gather(*runs, return_exceptions=True)
        endpoint.release()
        await until(lambda: endpoint.running <= idle)  # generations whose server is gone end, and count
        interrupted = endpoint.total - total - 27
        fleet.start()
        async with lines_of(fleet) as lines, Trainer(fleet) as trainer:
            await load(fleet, lines, directory / "out")
            again = [asyncio.create_task(trainer.run(r)) for r in rows]
            await lines["counter_agent"].status_when(lambda s: s["counts"]["parked"] == 10)
            await open_all(lines)
            results = await asyncio.gather(*again)
            status = await lines["counter_agent"].ask("status", max_rollouts=0)
        assert [r["reward"] for r in results] == [1.0] * 10
        assert results[0] == finished
        assert endpoint.repeated - repeated == interrupted <= 9  # in flight at the kill, and nothing that was recorded
        assert status["diverged"] == 0
        assert status["replayed_calls"] == 9 * 7  # the seed, three generations and three tools of each
        assert counted(fleet, "counter_agent", "SELECT sum(attempt) FROM rollouts") == 9
    finally:
        fleet.close()


async def test_two_workers_acknowledge_each_and_a_new_one_is_closed_before_it_serves(
    endpoint: ScriptedEndpoint, directory: Path
) -> None:
    fleet = Fleet(counter_config(endpoint.url, model_workers=2), directory)
    try:
        fleet.start()
        async with ShimLine(fleet.life("policy_model")) as shim, Trainer(fleet) as trainer:
            workers = [await shim.worker("worker-0"), await shim.worker("worker-1")]
            assert {w.hello["configured_workers"] for w in workers} == {2}
            assert len({w.hello["pid"] for w in workers}) == 2
            results = await asyncio.gather(*(trainer.run(row(500 + i, 2)) for i in range(8)))
            assert [r["reward"] for r in results] == [1.0] * 8
            for worker in workers:
                await worker.ask("close", operation_id="op", mode="hold", lease_s=60)
            runs = [asyncio.create_task(trainer.run(row(520 + i, 2))) for i in range(8)]

            async def parked() -> int:
                answers = [await w.ask("status", max_rollouts=0) for w in workers]
                return sum(a["counts"]["parked"] for a in answers)

            async with asyncio.timeout(60):
                while await parked() < 8:
                    await asyncio.sleep(0.05)
            # A worker dies; uvicorn replaces it, and the new one takes its name and finds that admission is closed.
            victim = workers[0].hello["pid"]
            os.kill(victim, 9)
            async with asyncio.timeout(90):
                while shim.lines["worker-0"].hello["pid"] == victim:
                    await asyncio.sleep(0.05)
            replaced = shim.lines["worker-0"]
            status = await replaced.ask("status", max_rollouts=0)
            assert (status["closed"], status["operation_id"]) == (True, "op")
            for worker in (replaced, workers[1]):
                await worker.ask("open")
            results = await asyncio.gather(*runs)
            assert [r["reward"] for r in results] == [1.0] * 8
    finally:
        fleet.close()


async def test_without_a_gate_the_same_rows_give_the_same_answers(
    endpoint: ScriptedEndpoint, directory: Path, fleet: Fleet
) -> None:
    plain = Fleet(counter_config(endpoint.url), directory, gated=False)
    rows = [row(600 + i, 3) for i in range(4)]

    def content(result: dict[str, Any]) -> Any:
        text = json.dumps([result["reward"], result["response"]["output"], result["response"]["usage"]])
        ids = {o["id"] for o in result["response"]["output"] if o.get("id")}
        for known in ids:  # made by uuid4 for each
            text = text.replace(known, "id")
        return json.loads(text)

    try:
        plain.start()
        async with Trainer(plain) as trainer:
            without = [content(await trainer.run(r)) for r in rows]
        async with Trainer(fleet) as trainer:
            gated = [content(await trainer.run(r)) for r in rows]
        assert gated == without
        assert "safepoint" not in plain.log("counter_agent")
    finally:
        plain.close()
