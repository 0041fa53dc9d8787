"""Resources whose state nobody can save: what used them restarts from its input, is told why, and nothing else does.

Declared (`SAFEPOINT_STATE=counter=restart_only`), or behind a proxy (`safepoint shim --proxy`), where a server without
a gate is at best `stateless` and else `restart_only`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.client_results import Totals
from coordinator.demo.ports import free_ports
from coordinator.wire.terms import CheckpointMode, RolloutState
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import Fleet, counter_config, row, with_second_counter
from tests.gym.whole import REPOSITORY, Trainer, Whole, shim_environment, until, whole

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]
TURNS = 4


async def kill_all(job: Whole, runs: list[asyncio.Task[Any]], endpoint: ScriptedEndpoint) -> None:
    """Everything at once; the trainer's requests with it."""
    job.fleet.kill()
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    endpoint.release()


async def test_only_what_touched_a_restart_only_server_restarts_and_what_is_finished_stays_so(directory: Path) -> None:
    environment = {"SAFEPOINT_STATE": "counter=restart_only"}
    with ScriptedEndpoint() as endpoint:
        config = with_second_counter(counter_config(endpoint.url))
        rows = {i: row(i, TURNS, _ng_rollout_id=f"lost-{i}") for i in range(5)}
        others = {i: row(50 + i, TURNS, _ng_rollout_id=f"kept-{i}") for i in range(5)}
        async with whole(directory, config, environment=environment) as job:
            capabilities = await job.registered()
            assert capabilities["counter"].checkpoint_mode == CheckpointMode.RESTART_ONLY
            assert capabilities["other"].checkpoint_mode == CheckpointMode.EXPORT_RESTORE
            async with Trainer(job.fleet) as one, Trainer(job.fleet, "other_agent") as two:
                finished = await asyncio.gather(one.run(rows[0]), two.run(others[0]))
                begun, total = endpoint.begun, endpoint.total
                endpoint.hold(after_turn=2)
                runs = [asyncio.create_task(one.run(rows[i])) for i in range(1, 5)]
                runs += [asyncio.create_task(two.run(others[i])) for i in range(1, 5)]
                await until(lambda: endpoint.begun == begun + 24)  # the third generation of each runs
                saved = await job.client.save("cut")
                assert saved.totals == Totals(completed=2, pending=4, excluded=4)
                ledger = job.ledger("cut")
                for i in range(1, 5):
                    assert ledger[f"lost-{i}"]["state"] == "ROLLOUT_STATE_EXCLUDED"
                    assert "counter is restart-only" in ledger[f"lost-{i}"]["reason"]
                    assert ledger[f"kept-{i}"]["state"] == "ROLLOUT_STATE_PENDING"
                assert {ledger[r]["state"] for r in ("lost-0", "kept-0")} == {"ROLLOUT_STATE_COMPLETED"}
                await kill_all(job, runs, endpoint)
        assert endpoint.total == total + 16, "two generations of each were made before the cut"
        total, begun = endpoint.total, endpoint.begun
        async with whole(directory, config, life="b", environment=environment) as job:
            restored = await job.client.restore("cut")
            assert restored.totals == saved.totals
            assert restored.diverged_count == 0, "what the snapshot never had has not diverged"
            states = {r.rollout_id: r.state async for r in restored.rollouts()}
            assert sum(state is RolloutState.EXCLUDED for state in states.values()) == 4
            async with Trainer(job.fleet) as one, Trainer(job.fleet, "other_agent") as two:
                again = [asyncio.create_task(one.run(r)) for r in rows.values()]
                again += [asyncio.create_task(two.run(r)) for r in others.values()]
                await asyncio.sleep(0.3)
                assert not any(run.done() for run in again), "still paused"
                await job.client.resume()
                results = await asyncio.gather(*again)
            assert [r["reward"] for r in results] == [1.0] * 10
            assert [results[0], results[5]] == finished
        # A rollout has TURNS + 2 generations. From their input: all of them; from the cut: without the first two.
        assert endpoint.total - total == 4 * (TURNS + 2) + 4 * TURNS
        assert endpoint.begun - begun == endpoint.total - total


@contextmanager
def proxy(fleet: Fleet, root: Path, mode: str) -> Iterator[None]:
    """`safepoint shim --proxy` in front of the fleet's counter."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_C")}
    environment |= shim_environment(root) | {"SAFEPOINT_RUN_DIR": str(fleet.run_dir)}
    public = fleet.url("counter").removeprefix("http://")
    with (fleet.directory / "proxy.log").open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "participant_shims.cli", "shim", "--name", "counter", "--role", "resources",
                "--proxy", f"{public}=127.0.0.1:{fleet.proxied['counter']}", "--checkpoint-mode", mode,
            ],
            env=environment, cwd=REPOSITORY, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@asynccontextmanager
async def behind_a_proxy(
    directory: Path, config: dict[str, Any], life: str, port: int, mode: str, **more: Any
) -> AsyncIterator[Whole]:
    """The deployment with a proxy in front of the counter."""
    names = ("policy_model", "counter_agent", "counter")
    async with whole(directory, config, life=life, names=names, proxied={"counter": port}, **more) as job:
        with proxy(job.fleet, job.root, mode):
            await job.registered()
            yield job


async def test_a_proxied_server_with_state_restarts_what_has_called_it(directory: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        config, (port,) = counter_config(endpoint.url), free_ports(1)
        rows = [row(i, TURNS, _ng_rollout_id=f"p-{i}") for i in range(5)]
        async with behind_a_proxy(directory, config, "a", port, "restart_only") as job, Trainer(job.fleet) as trainer:
            finished = await trainer.run(rows[0])
            begun = endpoint.begun
            endpoint.hold(after_turn=2)
            runs = [asyncio.create_task(trainer.run(r)) for r in rows[1:]]
            await until(lambda: endpoint.begun == begun + 12)
            saved = await job.client.save("cut")
            assert saved.totals == Totals(completed=1, excluded=4)
            ledger = job.ledger("cut")
            for i in range(1, 5):
                assert ledger[f"p-{i}"]["reason"].startswith("counter is restart-only: It is behind a proxy")
            # The save itself harms nobody: everything goes on after it.
            endpoint.release()
            assert [r["reward"] for r in await asyncio.gather(*runs)] == [1.0] * 4
            assert endpoint.repeated == 0
            await kill_all(job, [], endpoint)
        total = endpoint.total
        async with behind_a_proxy(directory, config, "b", port, "restart_only") as job, Trainer(job.fleet) as trainer:
            restored = await job.client.restore("cut", resume=True)
            assert (restored.totals, restored.diverged_count) == (saved.totals, 0)
            results = await asyncio.gather(*(trainer.run(r) for r in rows))
            assert [r["reward"] for r in results] == [1.0] * 5
            assert results[0] == finished
        assert endpoint.total - total == 4 * (TURNS + 2), "those four from their input, and nothing of the finished one"


async def test_a_proxied_server_without_state_of_its_own_loses_nobody(directory: Path) -> None:
    """Stateless: whatever it needs is elsewhere. Here the server itself survives the crash that its callers do not."""
    with ScriptedEndpoint() as endpoint:
        config, (port,) = counter_config(endpoint.url), free_ports(1)
        rows = [row(i, TURNS, _ng_rollout_id=f"s-{i}") for i in range(4)]
        async with behind_a_proxy(directory, config, "a", port, "stateless") as job, Trainer(job.fleet) as trainer:
            capabilities = await job.registered()
            assert capabilities["counter"].checkpoint_mode == CheckpointMode.STATELESS
            endpoint.hold(after_turn=2)
            runs = [asyncio.create_task(trainer.run(r)) for r in rows]
            await until(lambda: endpoint.begun == 12)
            saved = await job.client.save("cut")
            assert saved.totals == Totals(pending=4)
            job.fleet.kill("policy_model", "counter_agent")
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            endpoint.release()
            survivor = job.fleet.processes.pop("counter")
        try:
            total = endpoint.total
            async with behind_a_proxy(directory, config, "b", port, "stateless", running={"counter": survivor}) as job:
                restored = await job.client.restore("cut", resume=True)
                assert (restored.totals, restored.diverged_count) == (Totals(pending=4), 0)
                async with Trainer(job.fleet) as trainer:
                    results = await asyncio.gather(*(trainer.run(r) for r in rows))
                assert [r["reward"] for r in results] == [1.0] * 4
            assert endpoint.total - total == 4 * TURNS
        finally:
            survivor.kill()
            survivor.wait()
