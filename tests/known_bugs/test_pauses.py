"""Pauses that abort nothing, let nothing slip past, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.admission import Doors, Entry
from tests.coordinator.conftest import Bench, until
from tests.fakes import NEVER, Knobs
from tests.gate import world as gym
from tests.gate.clock import Clock
from tests.gate.world import World
from tests.in_time import room_for_answers

HOLD = QuiesceMode.HOLD


@pytest.mark.parametrize("seed", range(20))
async def test_no_interleaving_gets_work_past_a_closed_door_or_out_of_the_count(seed: int) -> None:  # A3, A6
    """25 interleavings of arrivals, ends, closings and openings for each seed; what runs is what is counted."""
    chance = random.Random(seed)
    for _ in range(25):
        clock = Clock()
        doors = Doors(clock=clock, call_later=clock.later)
        running: set[Entry] = set()

        async def work(doors: Doors = doors, running: set[Entry] = running) -> None:
            entry = doors.enter(f"r-{chance.randrange(8)}")
            await doors.admitted(entry)
            running.add(entry)
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
            running.discard(entry)
            doors.leave(entry)

        tasks: list[asyncio.Task[None]] = []
        for step in range(40):
            match chance.randrange(4):
                case 0 | 1:
                    tasks.append(asyncio.create_task(work()))
                case 2:
                    if chance.random() < 0.5:
                        doors.open()  # and closed again before anybody who was parked could wake
                    doors.close(f"op-{step}", HOLD, 60)
                    before = set(running)
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                        assert running <= before, "something began after the doors had closed"
                        assert doors.counts().in_flight == len(running), "something runs and is not counted"
                case _:
                    doors.open()
            await asyncio.sleep(0)
        doors.open()
        await asyncio.gather(*tasks)
        assert doors.counts().in_flight == doors.counts().parked == 0


async def test_sixteen_rollouts_in_flight_are_aborted_by_no_pause(world: World) -> None:  # A23, A25
    world.block["/v1/responses"] = asyncio.Event()
    rows: list[dict[str, Any]] = [
        {"_ng_task_index": n, "_ng_rollout_index": 0, "input": "abc", "start": n} for n in range(16)
    ]
    running = [asyncio.create_task(world.run(row)) for row in rows]
    await gym.until(lambda: world.model.gate.doors.counts().in_flight == 16)
    for number in range(3):
        for name in ("model", "agent", "counter"):
            world.nodes[name].gate.close(f"op-{number}", HOLD, 60)
        assert world.agent.gate.status()["rollout_count"] == 16
        for name in ("counter", "model", "agent"):
            world.nodes[name].gate.open()
    world.block["/v1/responses"].set()
    results = await asyncio.gather(*running)
    assert [client.json()["count"] for client in results] == [n + 12 for n in range(16)]
    assert len(world.model_calls) == 48
    assert all(node.gate.remarks.counters == {} for node in world.nodes.values())


async def test_a_save_aborts_nobody(bench: Bench) -> None:  # A23
    await bench.start(agents=2, models=2, agent_0=Knobs(inflight=3, drain_after_s=0.1))
    await bench.save()
    assert [shim.aborted for shim in bench.shims.values()] == [[]] * 5


async def test_an_abort_leaves_nothing_that_the_next_save_could_stumble_over(bench: Bench) -> None:  # A15, A19
    await bench.start(agent_0=Knobs(inflight=2, drain_after_s=NEVER, rollouts=2))
    saving: asyncio.Task[Any] = asyncio.create_task(bench.save(timeout=20))
    await until(lambda: not bench.shims["agent-0"].open)
    await bench.abort("save-1")
    with pytest.raises(SafepointError):
        await saving
    bench.shims["agent-0"].knobs.inflight = 0  # the same rollouts, and this time they can be cut
    await until(lambda: not (bench.root / "snapshots" / "step-1").exists())
    saved = (await bench.save("save-2", "step-1"))[-1].saved
    assert saved.snapshot.totals.parked == 2


async def test_an_operation_that_was_resumed_cannot_be_resumed_into_the_next_one(bench: Bench) -> None:  # A1
    await bench.start()
    await bench.phase("Prepare", operation_id="save-1", snapshot_id="step-1")
    await bench.abort("save-1")
    await bench.phase("Prepare", operation_id="save-2", snapshot_id="step-2")
    with pytest.raises(SafepointError) as caught:
        await bench.phase("Resume", operation_id="save-1")
    assert caught.value.reason in {Reason.WRONG_PHASE, Reason.ABORTED, Reason.FENCED}
    assert not any(shim.open for shim in bench.shims.values())
    await bench.abort("save-2")
    assert bench.all_open()


async def test_the_pause_of_one_stuck_participant_ends_with_the_callers_deadline(bench: Bench) -> None:  # A2, E7
    await bench.start(resources_0=Knobs(hang_on={"Prepare"}))
    with room_for_answers(), pytest.raises(SafepointError) as caught:
        await bench.save(timeout=15)  # the answer names it, and is no timeout of ours
    assert "resources-0" in str(caught.value)
    await until(bench.all_open)
