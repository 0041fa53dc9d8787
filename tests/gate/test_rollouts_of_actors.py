"""Rollouts that a restore has brought to another Gym actor, through the gates of its servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.gate.test_rollouts import BY_INDICES, EXPECTED, cut_at_model
from tests.gate.world import World


async def test_a_row_without_an_id_goes_on_at_the_last_call_where_its_rollout_is_now(tmp_path: Path) -> None:
    world = World(tmp_path / "first")
    world.agent.gate.participant_id = "a0.agent"
    running = await cut_at_model(world, 2, BY_INDICES)
    new = world.restarted(tmp_path / "second")
    new.agent.gate.participant_id = "a1.agent"
    running.cancel()
    first, second = await asyncio.gather(new.run(BY_INDICES), new.run({**BY_INDICES, "input": "of another batch"}))
    assert first.json() == EXPECTED
    assert second.json() != EXPECTED
    assert len(new.model_calls) == 1 + 3
    assert (new.agent.log.attempt_of("7-1@a0.agent"), new.agent.log.attempt_of("7-1@a1.agent")) == (1, 0)
    assert not new.agent.gate.doors.is_inside("7-1@a0.agent")
    assert not new.agent.gate.doors.is_inside("7-1@a1.agent")
    await asyncio.gather(running, return_exceptions=True)
    for each in (world, new):
        each.close()
