"""What a snapshot says that each rollout has behind it, and whether a restored fleet has just that.

The rule it keeps: a rollout's calls are seed, then for each turn a generation and an addition; so the number of its
recorded calls says which turns may never be generated again, and what its session must hold: the additions that are
recorded, and at most one more, which was executed and whose answer nobody had yet.
"""

from __future__ import annotations

from collections import Counter

import aiohttp

from coordinator.wire.terms import RolloutState
from tests.faults.lane import Lane
from tests.faults.rollouts import Live, number_of


async def recorded_of(lane: Lane, snapshot_id: str) -> dict[str, int]:
    """How many calls of each rollout that goes on are recorded in the snapshot."""
    goes_on = {RolloutState.PARKED, RolloutState.PENDING}
    return {r.rollout_id: r.recorded_calls async for r in lane.client.ledger(snapshot_id) if r.state in goes_on}


def generated(recorded: dict[str, int]) -> set[tuple[str, int]]:
    """The turns whose generation is recorded."""
    return {(rollout_id, turn) for rollout_id, calls in recorded.items() for turn in range(calls // 2)}


def wrong_sessions(recorded: dict[str, int], starts: dict[str, int], sessions: list[int]) -> list[str]:
    """Rollouts of which no session is what their recorded calls have made of it."""
    left, wrong = Counter(sessions), list[str]()
    for rollout_id in recorded.keys() & starts.keys():
        calls = recorded[rollout_id]
        if not calls:
            continue
        added = (calls - 1) // 2
        # After a generation there may be one addition that was executed and that nobody has an answer of.
        turns = (added, added + 1) if calls % 2 == 0 else (added,)
        counts = [starts[rollout_id] + sum(number_of(rollout_id, t) for t in range(n)) for n in turns]
        found = next((count for count in counts if left[count] > 0), None)
        if found is None:
            wrong.append(f"no session of {rollout_id} has {counts} after {calls} calls")
        else:
            left[found] -= 1
    return wrong


async def compare_sessions(lane: Lane, rollouts: list[Live]) -> None:
    """Blame what a restored fleet has not. Everybody is paused."""
    async with aiohttp.ClientSession() as http, http.get(f"{lane.f.url('counter')}/sessions") as response:
        sessions = await response.json()
    starts = {each.rollout_id: int(each.row["start"]) for each in rollouts}
    for wrong in wrong_sessions(lane.recorded, starts, sessions):
        lane.result.blame(wrong)
