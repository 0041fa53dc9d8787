"""A restore that was given up while an agent's shim was dead gets into no snapshot, and no rollout continues it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from coordinator.client_results import Totals
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import counter_config, row
from tests.gym.test_restarts import kill_all
from tests.gym.whole import Trainer, announced, until, whole

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]
TURNS = 4
AGENT = "counter_agent"


@pytest.mark.parametrize(
    "hangs", [False, True], ids=["its shim is killed", "its server hangs, then its shim is killed"]
)
async def test_a_restore_that_was_given_up_is_in_no_snapshot_and_not_continued(directory: Path, hangs: bool) -> None:
    settings = {"lease_ttl_s": 6.0, "heartbeat_s": 1.5}
    rows = [row(i, TURNS, _ng_rollout_id=f"r-{i}") for i in range(6)]
    with ScriptedEndpoint() as endpoint:
        config = counter_config(endpoint.url)
        async with whole(directory, config, **settings) as job, Trainer(job.fleet) as trainer:
            endpoint.hold(after_turn=2)
            runs = [asyncio.create_task(trainer.run(r)) for r in rows]
            await until(lambda: endpoint.begun == 18)
            assert (await job.client.save("cut")).totals == Totals(pending=6)
            await kill_all(job, runs, endpoint)
        async with whole(directory, config, life="b", **settings) as job, Trainer(job.fleet) as trainer:
            await job.client.restore("cut")
            before = announced(job.fleet, AGENT)
            server = job.fleet.processes[AGENT].pid
            if hangs:
                os.kill(server, signal.SIGSTOP)
                await job.client.abort()
                os.kill(before["pid"], signal.SIGKILL)
                os.kill(server, signal.SIGCONT)
            else:
                os.kill(before["pid"], signal.SIGKILL)
                await job.client.abort()
            again = [asyncio.create_task(trainer.run(r)) for r in rows[:3]]  # right after the abort
            await until(lambda: announced(job.fleet, AGENT).get("pid", before["pid"]) != before["pid"])
            await job.registered()
            results = await asyncio.gather(*again)
            assert [r["reward"] for r in results] == [1.0] * 3, "they began again from their input"
            saved = await job.client.save("after")
            assert saved.totals == Totals(completed=3)
