"""What a kill at a random time costs: tokens and turns that have to be made again, in a model of a job.

The model: rollouts of agents run side by side, turn after turn, in groups; everything dies at once; a snapshot was taken
at every interval before. Three ways to go on from it:

    Safepoint               every rollout goes on from its last finished turn of the snapshot; a generation that was in
                            flight is made again (with the engine's own shim it would go on, which is left out here)
    finished groups only    what is in a group that was complete at the snapshot stays; every other rollout begins anew
    nothing                 a step's rollouts are kept when the step is complete, as weights are; else all begin anew

Nobody redoes what came after a snapshot for a lack of a better one: it is counted for all three.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from benchmarks.measure import spread
from benchmarks.results import Curves, Results, Table
from benchmarks.scale import Scale

AT_ONCE: Final = 64
GROUP: Final = 8
STEP_GROUPS: Final = 64  # of 512 rollouts
TOKENS_PER_S: Final = 50.0
TOOL_S: Final = 2.0
TURNS: Final = (2.5, 0.6)  # logarithm: mean, deviation; about 12 turns
TOKENS: Final = (6.0, 0.8)  # about 400 tokens a turn
INTERVALS_S: Final = (60.0, 300.0, 1200.0)
HORIZON_S: Final = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and the tool call after it."""

    begins_s: float
    generated_s: float
    ends_s: float
    tokens: float

    def made_by(self, now: float) -> float:
        """Tokens that there are at `now`."""
        if now >= self.generated_s:
            return self.tokens
        return max(0.0, now - self.begins_s) * TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout, as it would go if nobody died."""

    number: int
    turns: tuple[Turn, ...]

    @property
    def ends_s(self) -> float:
        return self.turns[-1].ends_s


@dataclass(frozen=True, slots=True)
class Redone:
    """Of one kill and one way to go on."""

    tokens: float
    turns: int


@dataclass(frozen=True, slots=True)
class Job:
    """All rollouts in the order in which they begin, and when each group and each step of them is complete."""

    rollouts: tuple[Rollout, ...]

    def ends(self, size: int) -> list[float]:
        """When each so many rollouts are complete."""
        return [
            max(rollout.ends_s for rollout in self.rollouts[first : first + size])
            for first in range(0, len(self.rollouts), size)
        ]


def job(seed: int) -> Job:
    """A job of some hours. Slots take the next rollout as they become free."""
    chance = random.Random(seed)
    free = [0.0] * AT_ONCE
    made: list[Rollout] = []
    while min(free) < HORIZON_S:
        slot = free.index(min(free))
        turns: list[Turn] = []
        now = free[slot]
        for _ in range(max(1, round(chance.lognormvariate(*TURNS)))):
            tokens = max(1.0, chance.lognormvariate(*TOKENS))
            generated = now + tokens / TOKENS_PER_S
            turns.append(Turn(now, generated, generated + chance.expovariate(1 / TOOL_S), tokens))
            now = turns[-1].ends_s
        free[slot] = now
        made.append(Rollout(len(made), tuple(turns)))
    return Job(tuple(made))


def redone(rollouts: Job, killed_s: float, snapshot_s: float) -> dict[str, Redone]:
    """What each way makes again after a kill, when the last snapshot was taken at `snapshot_s`."""
    groups, steps = rollouts.ends(GROUP), rollouts.ends(GROUP * STEP_GROUPS)
    tokens = dict.fromkeys(WAYS, 0.0)
    turns = dict.fromkeys(WAYS, 0)
    for rollout in rollouts.rollouts:
        if rollout.turns[0].begins_s >= killed_s:
            break
        kept_whole = {
            "finished groups only": groups[rollout.number // GROUP] <= snapshot_s,
            "nothing": steps[rollout.number // (GROUP * STEP_GROUPS)] <= snapshot_s,
        }
        if all(kept_whole.values()):
            continue
        for turn in rollout.turns:
            if turn.begins_s >= killed_s:
                break
            made, finished = turn.made_by(killed_s), turn.generated_s <= killed_s
            kept = {**kept_whole, "Safepoint": turn.generated_s <= snapshot_s}
            for way in WAYS:
                if not kept[way]:
                    tokens[way] += made
                    turns[way] += finished
    return {way: Redone(tokens[way], turns[way]) for way in WAYS}


WAYS: Final = ("Safepoint", "finished groups only", "nothing")


def run(scale: Scale, results: Results) -> None:
    """A table and a plot; none of the required ratios."""
    rows: list[tuple[str, ...]] = []
    lines: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in WAYS}
    jobs = [job(seed) for seed in range(3)]
    for interval_s in INTERVALS_S:
        found: dict[str, list[Redone]] = {way: [] for way in WAYS}
        for seed, rollouts in enumerate(jobs):
            chance = random.Random(1000 + seed)
            for _ in range(scale.kills):
                killed = chance.uniform(HORIZON_S / 4, HORIZON_S * 3 / 4)
                for way, cost in redone(rollouts, killed, killed // interval_s * interval_s).items():
                    found[way].append(cost)
        ours = [each.tokens for each in found["Safepoint"]]
        for way, costs in found.items():
            tokens = spread(each.tokens for each in costs)
            more = spread(each.tokens / max(1.0, mine) for each, mine in zip(costs, ours, strict=True))
            turns = spread(each.turns for each in costs)
            rows.append((f"{interval_s:.0f} s", way, str(tokens), str(turns), str(more)))
            lines[way].append((interval_s, tokens.median, max(1.0, tokens.low), tokens.high))
        print(f"  every {interval_s:.0f} s: {[row[2] for row in rows[-3:]]} tokens redone", flush=True)
    note = (
        f"A model, not a measurement: {AT_ONCE} rollouts at once, groups of {GROUP}, steps of {GROUP * STEP_GROUPS} rollouts, "
        f"{TOKENS_PER_S:.0f} tokens a second each. Its rules are at the top of `benchmarks/lost.py`."
    )
    columns = ("snapshot every", "goes on with", "tokens redone", "turns redone", "tokens against Safepoint")
    results.tables.append(Table("Work that is lost by a kill at a random time", columns, rows, note))
    results.curves.append(Curves("lost", "Tokens made again after a kill", "snapshot every, s", "tokens", lines))
