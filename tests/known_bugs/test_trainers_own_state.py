"""What a trainer keeps beside its rollouts: its cursor, what it has claimed, which weights made what (B3, B4, B13, B16, F22).

Safepoint decides nothing about it. It promises that it comes back with the rollouts of the same cut, whatever failed since,
so that a trainer can work out who still owes what.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safepoint.v1 import manifest_pb2

from coordinator.client import AsyncClient
from coordinator.wire.terms import RolloutState
from participant_shims.gate import calllog_files
from tests.coordinator.conftest import Bench
from tests.fakes import Knobs
from tests.gate.world import World

LIMIT = 8  # rollouts that the trainer keeps in flight
PROMPTS = [f"p-{n}" for n in range(12)]
STATES = manifest_pb2.RolloutState


def entry(prompt: str, state: STATES.ValueType, reason: str = "") -> manifest_pb2.LedgerEntry:
    return manifest_pb2.LedgerEntry(rollout_id=prompt, state=state, participant_id="agent-0", reason=reason)


# p-0 was trained on and retired. The agent knows these; p-8 and later were not dispatched.
LEDGER = [
    entry("p-1", STATES.ROLLOUT_STATE_COMPLETED),
    entry("p-2", STATES.ROLLOUT_STATE_COMPLETED),
    *(entry(f"p-{n}", STATES.ROLLOUT_STATE_PARKED) for n in (3, 4, 5)),
    entry("p-6", STATES.ROLLOUT_STATE_PENDING),
    entry("p-7", STATES.ROLLOUT_STATE_EXCLUDED, "it could not be captured"),
]
MINE = {
    "cursor": 8,
    "trained": ["p-0"],
    "claimed": {"step-5": ["p-1", "p-2", "p-3", "p-4"]},
    "weights": {"p-1": 12, "p-2": 11},
}


@asynccontextmanager
async def client_of(bench: Bench) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(bench.running.address) as client:
        yield client


async def a_cut_that_fails(client: AsyncClient) -> None:
    async with client.cut("step-6") as cut:
        cut.metadata["trainer"] = json.dumps({**MINE, "cursor": 12, "trained": PROMPTS[:4]})
        raise RuntimeError("no weights")


async def test_cursor_claims_and_versions_come_back_with_the_rollouts_of_the_same_cut(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(ledger=LEDGER))
    async with client_of(bench) as client:
        async with client.cut("step-5") as cut:
            cut.metadata["trainer"] = json.dumps(MINE)
        # The next cut fails after the trainer has moved on: nothing of it may be mixed with the one before.
        with pytest.raises(RuntimeError, match="no weights"):
            await a_cut_that_fails(client)
    await bench.crash()
    await bench.restart()
    async with client_of(bench) as client:
        restored = await client.restore("latest")
        found = {r.rollout_id: r async for r in restored.rollouts()}
        await client.resume()
    assert restored.snapshot.snapshot_id == "step-5"
    mine = json.loads(restored.snapshot.metadata["trainer"])
    assert mine == MINE

    # Each prompt is in exactly one place.
    finished = {name for name, r in found.items() if r.completed}
    again = {name for name, r in found.items() if not r.completed}
    new = set(PROMPTS[mine["cursor"] :])
    places = [set(mine["trained"]), finished, again, new]
    assert set().union(*places) == set(PROMPTS)
    assert sum(map(len, places)) == len(PROMPTS)
    # Who still owes what: the claimed batch lacks those that run again, and nothing waits for a prompt that nobody runs.
    owed = set(mine["claimed"]["step-5"]) - finished
    assert owed == {"p-3", "p-4"}
    assert owed <= again
    # What is dispatched again counts against the limit.
    assert restored.totals.kept_in_flight + restored.totals.excluded == len(again) == 5
    assert LIMIT - len(again) == 3
    # Results that came back have the version that made them.
    assert {name: mine["weights"][name] for name in finished} == {"p-1": 12, "p-2": 11}


async def test_a_rollout_that_was_dropped_and_retired_is_in_no_later_snapshot(world: World, tmp_path: Path) -> None:
    for n in (1, 2, 3):
        await world.run({"_ng_rollout_id": f"r-{n}", "input": "abc"})

    def ledger(name: str) -> dict[str, RolloutState]:
        out = tmp_path / name
        out.mkdir()
        return {line.rollout_id: line.state for line in calllog_files.export(world.agent.log, out).ledger}

    assert ledger("before") == dict.fromkeys(("r-1", "r-2", "r-3"), RolloutState.COMPLETED)
    world.agent.gate.retire([["r-2", 0]])  # dropped as stale: over, and not trained on
    assert ledger("after") == dict.fromkeys(("r-1", "r-3"), RolloutState.COMPLETED)
