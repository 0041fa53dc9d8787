"""A resources server that is without the state of rollouts whose agent goes on: they restart, and none ends wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import counter_config, row
from tests.gym.whole import Trainer, Whole, counted, until, whole, workers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]
COUNT, TURNS = 6, 4


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[ScriptedEndpoint, Whole]]:
    """For the tests that need nothing special of it: what they kill, they start again."""
    with ScriptedEndpoint() as endpoint:
        async with whole(tmp_path_factory.mktemp("g"), counter_config(endpoint.url)) as job:
            yield endpoint, job


async def test_a_counter_that_was_killed_alone_spoils_no_rollout_that_runs(
    deployment: tuple[ScriptedEndpoint, Whole],
) -> None:
    endpoint, job = deployment
    rows = [row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(COUNT)]
    async with Trainer(job.fleet) as trainer:
        endpoint.hold(after_turn=2)
        runs = [asyncio.create_task(trainer.run(r)) for r in rows]
        await until(lambda: endpoint.begun == 3 * COUNT)  # two changes of each session are recorded
        await asyncio.to_thread(job.fleet.kill, "counter")
        await asyncio.to_thread(job.fleet.start, "counter")
        await job.registered()
        endpoint.release()
        assert [r["reward"] for r in await asyncio.gather(*runs)] == [1.0] * COUNT
    assert (await job.status("counter_agent")).diverged_rollouts == COUNT


async def test_an_agent_that_was_killed_alone_runs_again_what_its_callees_have_seen_before(
    deployment: tuple[ScriptedEndpoint, Whole],
) -> None:
    _, job = deployment
    again = row(1, 2, _ng_rollout_id="again")
    async with Trainer(job.fleet) as trainer:
        for _ in range(3):  # three epochs: what its callees serve rises with each
            assert (await trainer.run(again))["reward"] == 1.0
    await asyncio.to_thread(job.fleet.kill, "counter_agent")
    await asyncio.to_thread(job.fleet.start, "counter_agent")
    await job.registered()
    async with Trainer(job.fleet) as trainer:
        assert (await trainer.run(again))["reward"] == 1.0
        assert (await trainer.run(again))["reward"] == 1.0
    assert (await job.status("counter_agent")).diverged_rollouts == 0


async def test_a_worker_of_the_counter_that_was_killed_takes_the_sessions_in_its_memory_along(directory: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        async with whole(directory, counter_config(endpoint.url, counter_workers=2)) as job:
            before = await workers(job, "counter")
            async with Trainer(job.fleet) as trainer:
                rows = [row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(COUNT)]
                endpoint.hold(after_turn=2)
                runs = [asyncio.create_task(trainer.run(r)) for r in rows]
                await until(lambda: endpoint.begun == 3 * COUNT)
                victim = counted(job.fleet, "counter", "SELECT pid FROM counts ORDER BY rollout_id LIMIT 1")
                lost = counted(job.fleet, "counter", f"SELECT count(*) FROM counts WHERE pid={victim}")
                assert victim in before.values()
                assert 0 < lost < COUNT
                os.kill(victim, signal.SIGKILL)
                async with asyncio.timeout(60):
                    while victim in (await workers(job, "counter")).values():
                        await asyncio.sleep(0.1)
                saved = await job.client.save("without")
                assert (saved.totals.excluded, saved.totals.pending) == (lost, COUNT - lost)
                assert f"pid {victim}" in job.ledger("without")["r-0"]["reason"]
                endpoint.release()
                assert [r["reward"] for r in await asyncio.gather(*runs)] == [1.0] * COUNT
                assert (await job.status("counter_agent")).diverged_rollouts == lost

                # Nobody waits for the successor: calls do, and no other worker takes them meanwhile.
                endpoint.hold(after_turn=2)
                begun = endpoint.begun
                more = [row(100 + i, TURNS, _ng_rollout_id=f"s-{i}") for i in range(COUNT)]
                runs = [asyncio.create_task(trainer.run(r)) for r in more]
                await until(lambda: endpoint.begun == begun + 3 * COUNT)
                victim = counted(job.fleet, "counter", "SELECT pid FROM counts ORDER BY rollout_id LIMIT 1")
                again = counted(job.fleet, "counter", f"SELECT count(*) FROM counts WHERE pid={victim}")
                os.kill(victim, signal.SIGKILL)
                endpoint.release()
                assert [r["reward"] for r in await asyncio.gather(*runs)] == [1.0] * COUNT
                assert (await job.status("counter_agent")).diverged_rollouts == lost + again
