"""What a server's life leaves behind: nothing when it ended in good order, and what was killed until the next start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from coordinator.client import AsyncClient
from coordinator.client_requests import save_options
from coordinator.wire.terms import ParticipantState
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import Fleet, counter_config, row
from tests.gym.whole import (
    CoordinatorProcess,
    Trainer,
    announced,
    participant_status,
    registered,
    shim_environment,
    until,
    whole,
)

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]


def lives(fleet: Fleet) -> list[str]:
    """The servers that have a directory, once for each life."""
    return sorted(path.name.rpartition("-")[0] for path in fleet.run_dir.iterdir())


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_life_that_sigterm_ends_leaves_nothing_and_a_killed_one_is_swept_by_the_next(directory: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        async with whole(directory, counter_config(endpoint.url, model_workers=2)) as job:
            fleet = job.fleet
            shims = {name: int(announced(fleet, name)["pid"]) for name in fleet.names()}
            async with Trainer(fleet) as trainer:
                assert (await trainer.run(row(1, 1)))["reward"] == 1.0
            assert lives(fleet) == sorted(fleet.names())
            await asyncio.to_thread(fleet.terminate, "counter", "policy_model")  # one process, and two workers
            await until(lambda: lives(fleet) == ["counter_agent"])
            await until(lambda: not alive(shims["counter"]) and not alive(shims["policy_model"]))
            # What was killed is left for people to look at ...
            fleet.kill("counter_agent")
            await until(lambda: not alive(shims["counter_agent"]))
            (left,) = fleet.run_dir.glob("counter_agent-*")
            assert (left / "shim.log").exists()
            # ... until the same server starts again.
            await asyncio.to_thread(fleet.start)
            await job.registered()
            assert not left.exists()
            assert lives(fleet) == sorted(fleet.names())


async def test_with_shim_and_coordinator_dead_the_gates_open_by_themselves_and_every_rollout_finishes(
    directory: Path,
) -> None:
    lease_s = 4.0
    root = directory / "root"
    root.mkdir()
    with ScriptedEndpoint() as endpoint:
        fleet = Fleet(counter_config(endpoint.url), directory / "a", environment=shim_environment(root))
        fleet.directory.mkdir()
        coordinator = CoordinatorProcess(root, directory / "coordinator.log")
        try:
            await asyncio.to_thread(fleet.start)
            async with AsyncClient(await coordinator.address()) as client, Trainer(fleet) as trainer:
                await registered(client, fleet.names())
                endpoint.hold(after_turn=2)
                runs = [asyncio.create_task(trainer.run(row(10 + i, 4))) for i in range(8)]
                await until(lambda: endpoint.begun == 24)
                await client.prepare("never", "op-1", save_options("hold", "exclude", None, lease_s, ""))
                shims = {name: int(announced(fleet, name)["pid"]) for name in fleet.names()}
                paused = {name: await participant_status(fleet, name) for name in fleet.names()}
                assert {s.state for s in paused.values()} == {ParticipantState.PREPARED}
                coordinator.kill()
                for pid in shims.values():
                    psutil.Process(pid).kill()
                endpoint.release()
                begun = asyncio.get_running_loop().time()
                late = asyncio.create_task(trainer.run(row(30, 1)))
                results = await asyncio.wait_for(asyncio.gather(*runs, late), 90)
                took = asyncio.get_running_loop().time() - begun
            assert [r["reward"] for r in results] == [1.0] * 9
            assert endpoint.repeated == endpoint.aborted == 0
            print(f"open {took:.1f} s after everybody else was killed; the lease was {lease_s:.0f} s")
            assert took < 20, "the lease was this, and not the 30 s that it is by default"
            # The servers have new shims meanwhile, which find everybody open.
            for name, old in shims.items():
                await until(lambda name=name, old=old: announced(fleet, name).get("pid") not in (None, old))
        finally:
            await asyncio.to_thread(fleet.close)
            coordinator.kill()
