"""Servers with two uvicorn workers: each acknowledges, a missing one is an error with its name, never a zero."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.errors import Reason, Refused
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import counter_config, row
from tests.gym.whole import Trainer, Whole, counted, until, whole, workers

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]


async def all_open(job: Whole) -> bool:
    statuses = [await job.status(name) for name in job.fleet.names()]
    return not any(s.HasField("closed_for") for s in statuses)


async def rollouts(job: Whole, first: int, count: int = 6) -> list[dict[str, Any]]:
    async with Trainer(job.fleet) as trainer:
        return await asyncio.gather(*(trainer.run(row(first + i, 2)) for i in range(count)))


async def test_two_workers_one_of_which_is_silent_or_dead_at_the_worst_moment(directory: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        async with whole(directory, counter_config(endpoint.url, model_workers=2)) as job:
            pids = await workers(job)
            assert sorted(pids) == ["worker-0", "worker-1"]

            # Both acknowledge, with calls in flight at both.
            endpoint.hold()
            async with Trainer(job.fleet) as trainer:
                runs = [asyncio.create_task(trainer.run(row(i, 2))) for i in range(12)]
                await until(lambda: endpoint.begun == 12)
                saved = await job.client.save("both")
                assert (saved.totals.pending, saved.totals.excluded) == (12, 0)
                endpoint.release()
                assert [r["reward"] for r in await asyncio.gather(*runs)] == [1.0] * 12
            assert endpoint.repeated == 0

            # One does not acknowledge: it is stopped.
            os.kill(pids["worker-1"], signal.SIGSTOP)
            try:
                with pytest.raises(Refused) as caught:
                    await job.client.save("silent", timeout=30)
            finally:
                os.kill(pids["worker-1"], signal.SIGCONT)
            print(f"silent: {caught.value}")
            assert caught.value.reason is Reason.WORKERS_MISSING
            assert caught.value.participant_id == "policy_model"
            assert "worker-1" in str(caught.value)
            pids = await workers(job)
            async with asyncio.timeout(60):
                while not await all_open(job):
                    await asyncio.sleep(0.1)
            assert [r["reward"] for r in await rollouts(job, 100)] == [1.0] * 6

            # One is killed while everybody is paused: uvicorn replaces it, and the cut is void all the same.
            await job.client.prepare("void", "op-void")
            os.kill(pids["worker-0"], signal.SIGKILL)
            with pytest.raises(Refused) as caught:
                await job.client.commit("op-void", timeout=30)
            print(f"killed: {caught.value}")
            assert caught.value.reason is Reason.WORKERS_MISSING
            assert caught.value.participant_id == "policy_model"
            assert "worker-0" in str(caught.value)
            assert "void" not in [s.snapshot_id for s in (await job.client.snapshots()).published]
            new = await workers(job)
            assert new["worker-0"] != pids["worker-0"]
            async with asyncio.timeout(60):
                while not await all_open(job):
                    await asyncio.sleep(0.1)
            assert [r["reward"] for r in await rollouts(job, 200)] == [1.0] * 6
            assert (await job.client.save("after")).totals.excluded == 0


async def test_an_agent_with_two_workers_is_cut_in_flight_and_continues_in_fresh_ones(directory: Path) -> None:
    count, turns = 16, 3
    with ScriptedEndpoint() as endpoint:
        config = counter_config(endpoint.url, agent_workers=2)
        rows = [row(i, turns, _ng_rollout_id=f"r-{i}") for i in range(count)]
        async with whole(directory, config) as job:
            pids = await workers(job, "counter_agent")
            assert sorted(pids) == ["worker-0", "worker-1"]
            assert (await job.registered())["counter_agent"].configured_workers == 2
            async with Trainer(job.fleet) as trainer:
                endpoint.hold(after_turn=1)
                runs: list[asyncio.Task[Any]] = []
                for other, begun in (("worker-1", count), ("worker-0", 2 * count)):
                    os.kill(pids[other], signal.SIGSTOP)  # so that each takes half of them
                    try:
                        half = rows[len(runs) : len(runs) + count // 2]
                        runs += [asyncio.create_task(trainer.run(r)) for r in half]
                        await until(lambda begun=begun: endpoint.begun == begun, 60)  # the second generation of each
                    finally:
                        os.kill(pids[other], signal.SIGCONT)
                ran_in = counted(job.fleet, "counter_agent", "SELECT COUNT(DISTINCT pid) FROM rollouts")
                assert ran_in == 2, "both workers run rollouts"
                saved = await job.client.save("cut")
                assert (saved.totals.pending, saved.totals.excluded) == (count, 0)
                status = await job.status("counter_agent")
                assert sorted(w.worker_id for w in status.workers if w.acknowledged) == sorted(pids)

                # One of them does not acknowledge: an error with its name, and the other opens again.
                os.kill(pids["worker-1"], signal.SIGSTOP)
                try:
                    with pytest.raises(Refused) as caught:
                        await job.client.save("silent", timeout=30)
                finally:
                    os.kill(pids["worker-1"], signal.SIGCONT)
                assert caught.value.reason is Reason.WORKERS_MISSING
                assert caught.value.participant_id == "counter_agent"
                assert "worker-1" in str(caught.value)
                job.fleet.kill()
                for run in runs:
                    run.cancel()
                await asyncio.gather(*runs, return_exceptions=True)
                endpoint.release()
        total = endpoint.total
        async with whole(directory, config, life="b") as job:
            restored = await job.client.restore("cut")
            assert (restored.totals.pending, restored.diverged_count) == (count, 0)
            async with Trainer(job.fleet) as trainer:
                again = [asyncio.create_task(trainer.run(r)) for r in rows]
                await job.client.resume()
                results = await asyncio.gather(*again)
            assert [r["reward"] for r in results] == [1.0] * count
        assert endpoint.total - total == count * (turns + 1), "the first generation of each is not made again"


async def test_a_row_that_runs_in_one_worker_is_not_executed_again_where_it_comes_to_the_other(directory: Path) -> None:
    """Each client is given what the first one gets, in whichever worker it asks: it was made again once that one had it."""
    count, turns = 3, 3
    rows = [row(10 * i, turns, delay_ms=100, _ng_rollout_id=f"r-{i}") for i in range(count)]
    with ScriptedEndpoint() as endpoint:
        async with (
            whole(directory, counter_config(endpoint.url, agent_workers=2)) as job,
            Trainer(job.fleet) as trainer,
        ):
            await workers(job, "counter_agent")
            results = await asyncio.gather(*(trainer.run(r) for r in rows * 6))
            assert [r["reward"] for r in results] == [1.0] * len(results)
            assert (endpoint.total, endpoint.repeated) == (count * (turns + 2), 0)


async def test_what_a_killed_worker_had_asked_of_the_other_is_no_answer_to_the_attempt_that_follows(
    directory: Path,
) -> None:
    """The inner call of an attempt whose worker is gone goes on in the other, fails, and was taken for that of the next."""
    count, turns = 16, 3
    rows = [row(10 * i, turns, _ng_rollout_id=f"r-{i}") for i in range(count)]
    with ScriptedEndpoint() as endpoint:
        async with (
            whole(directory, counter_config(endpoint.url, agent_workers=2)) as job,
            Trainer(job.fleet) as trainer,
        ):
            pids = await workers(job, "counter_agent")
            endpoint.hold(after_turn=1)
            counter = job.fleet.processes["counter"].pid
            os.kill(counter, signal.SIGSTOP)
            os.kill(pids["worker-0"], signal.SIGSTOP)  # so that all begin in the other
            runs = [asyncio.create_task(trainer.run(r)) for r in rows]
            await until(lambda: counted(job.fleet, "counter_agent", "SELECT COUNT(*) FROM rollouts") == count)
            for pid in (pids["worker-0"], counter):
                os.kill(pid, signal.SIGCONT)  # the inner call of each comes to either
            await until(lambda: endpoint.begun == 2 * count)  # the second generation of each
            os.kill(pids["worker-1"], signal.SIGKILL)
            again = [asyncio.create_task(trainer.run(r)) for r in rows]  # its successor takes seconds to start
            claimed = "SELECT COUNT(*) FROM rollouts WHERE attempt>0"
            await until(lambda: counted(job.fleet, "counter_agent", claimed) > 0)
            await asyncio.sleep(0.3)  # what was claimed asks for its inner call
            endpoint.release()
            results = await asyncio.gather(*again)
            assert [r["reward"] for r in results] == [1.0] * count
            await asyncio.gather(*runs, return_exceptions=True)


async def test_an_agent_with_two_workers_that_is_killed_alone_executes_nothing_twice_in_the_sessions_it_left(
    directory: Path,
) -> None:
    """A worker seeds the session, and the one that its call to itself reached works in it: the first has told nobody."""
    count, turns = 12, 4
    rows = [row(10 * i, turns, _ng_rollout_id=f"r-{i}") for i in range(count)]
    with ScriptedEndpoint() as endpoint:
        async with (
            whole(directory, counter_config(endpoint.url, agent_workers=2)) as job,
            Trainer(job.fleet) as trainer,
        ):
            await workers(job, "counter_agent")
            endpoint.hold(after_turn=3)
            runs = [asyncio.create_task(trainer.run(r)) for r in rows]
            await until(lambda: endpoint.begun == 4 * count)  # three changes of each session
            await asyncio.to_thread(job.fleet.kill, "counter_agent")
            await asyncio.gather(*runs, return_exceptions=True)
            endpoint.release()
            await asyncio.to_thread(job.fleet.start, "counter_agent")
            await job.registered()
            results = await asyncio.gather(*(trainer.run(r) for r in rows))
            assert [r["reward"] for r in results] == [1.0] * count
            assert (await job.status("counter_agent")).diverged_rollouts <= count
            assert (await job.client.save("after")).totals.completed == count


async def test_sessions_of_two_workers_are_saved_and_continue_wherever_their_calls_arrive(directory: Path) -> None:
    count, turns = 16, 3
    rows = [row(i, turns, _ng_rollout_id=f"r-{i}") for i in range(count)]
    held_by = "SELECT COUNT(DISTINCT pid) FROM counts"
    with ScriptedEndpoint() as endpoint:
        config = counter_config(endpoint.url, counter_workers=2)
        async with whole(directory, config) as job, Trainer(job.fleet) as trainer:
            others = [r | {"_ng_rollout_id": f"u-{i}"} for i, r in enumerate(rows)]
            uninterrupted = await asyncio.gather(*(trainer.run(r) for r in others))
            endpoint.hold(after_turn=2)
            begun = endpoint.begun
            runs = [asyncio.create_task(trainer.run(r)) for r in rows]
            await until(lambda: endpoint.begun == begun + 3 * count)
            assert counted(job.fleet, "counter", held_by) == 2
            saved = await job.client.save("cut")
            assert (saved.totals.pending, saved.totals.excluded) == (count, 0)
            job.fleet.kill()
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            endpoint.release()
        total = endpoint.total
        async with whole(directory, config, life="b") as job:
            restored = await job.client.restore("cut")
            assert (restored.totals.pending, restored.diverged_count) == (count, 0)
            assert counted(job.fleet, "counter", held_by) == 2
            async with Trainer(job.fleet) as trainer:
                again = [asyncio.create_task(trainer.run(r)) for r in rows]
                await job.client.resume()
                results = await asyncio.gather(*again)
            assert (await job.status("counter_agent")).diverged_rollouts == 0
            await asyncio.to_thread(job.fleet.terminate, "counter")
            await until(lambda: not list(job.fleet.run_dir.glob("counter-*")), 15)
        assert [r["reward"] for r in uninterrupted] == [1.0] * count
        assert [(r["reward"], said(r)) for r in results] == [(r["reward"], said(r)) for r in uninterrupted]
        assert endpoint.total - total == count * turns, "the first generations of each are not made again"


async def test_a_worker_killed_between_restore_and_resume_is_told_with_the_rollouts_that_restart(
    directory: Path,
) -> None:
    count, turns = 12, 3
    rows = [row(i, turns, _ng_rollout_id=f"r-{i}") for i in range(count)]
    with ScriptedEndpoint() as endpoint:
        config = counter_config(endpoint.url, counter_workers=2)
        async with whole(directory, config) as job, Trainer(job.fleet) as trainer:
            endpoint.hold(after_turn=2)
            runs = [asyncio.create_task(trainer.run(r)) for r in rows]
            await until(lambda: endpoint.begun == 3 * count)
            await job.client.save("cut")
            job.fleet.kill()
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            endpoint.release()
        async with whole(directory, config, life="b") as job:
            pids = await workers(job, "counter")
            restored = await job.client.restore("cut")
            assert (restored.totals.pending, restored.diverged_count) == (count, 0)
            victim = pids["worker-1"]
            lost = counted(job.fleet, "counter", f"SELECT count(*) FROM counts WHERE pid={victim}")
            assert 0 < lost < count
            os.kill(victim, signal.SIGKILL)
            async with asyncio.timeout(60):
                while victim in (await workers(job, "counter")).values():
                    await asyncio.sleep(0.1)
            told = f"Worker worker-1 (pid {victim}) has gone since the restore: its process "
            assert any(told in warning for warning in (await job.status("counter")).warnings), "before the resume, too"
            async with Trainer(job.fleet) as trainer:
                again = [asyncio.create_task(trainer.run(r)) for r in rows]
                resumed = await job.client.resume()
                results = await asyncio.gather(*again)
            (warning,) = resumed.warnings
            assert warning.startswith(f"counter: {told}")
            assert f"What it had loaded ({lost} session{'s' * (lost != 1)}) is lost with it" in warning
            assert [r["reward"] for r in results] == [1.0] * count
            assert (await job.status("counter_agent")).diverged_rollouts == lost
            assert not (await job.status("counter")).warnings, "it is over"


def said(result: dict[str, Any]) -> list[Any]:
    """What the model and the tools have said, without the ids that are made at random for each."""
    return [[o.get(key) for key in ("type", "arguments", "output", "content")] for o in result["response"]["output"]]
