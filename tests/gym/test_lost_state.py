"""A resources server that is without the state of rollouts whose agent goes on: they restart, and none ends wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import counter_config, row
from tests.gym.whole import Trainer, until, whole

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]
COUNT, TURNS = 6, 4


async def test_a_counter_that_was_killed_alone_spoils_no_rollout_that_runs(directory: Path) -> None:
    rows = [row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(COUNT)]
    with ScriptedEndpoint() as endpoint:
        config = counter_config(endpoint.url)
        async with whole(directory, config) as job:
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
