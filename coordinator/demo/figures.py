"""The demo's figures, and the verdict on them.

PURE. The rule it keeps: each figure is counted from records of what happened (the policy's logs, the snapshot's files, the
results), never from what somebody meant to do; and the verdict needs all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from coordinator.demo.compare import Generations


@dataclass(frozen=True, slots=True)
class Figures:
    """What the demo measured; the JSON line in this order.

    `in_flight_at_cut`: rollouts of the ledger without a result. `kept`: of those, the ones that continued; `restarted`:
    the ones that began again from their input. `lost`: rollouts without a result at the end. `finished_redone`: rollouts
    finished at the cut of which any model call was made again. `model_calls_repeated`: generations of calls whose answer
    was in the snapshot. `calls_after_cut`: calls that ended between the cut and the kill, and were naturally made again.
    `pause_s`: as measured at the gates.
    """

    rollouts: int
    in_flight_at_cut: int
    kept: int
    restarted: int
    lost: int
    finished_redone: int
    model_calls_repeated: int
    calls_after_cut: int
    pause_s: float
    snapshot_bytes: int
    equal_to_uninterrupted: bool

    @property
    def good(self) -> bool:
        """Whether the promise was kept. A rollout that the cut excluded and that restarted breaks none: it costs time."""
        return self.equal_to_uninterrupted and not (self.lost or self.finished_redone or self.model_calls_repeated)


@dataclass(frozen=True, slots=True)
class Records:
    """What happened. Conversations are digests; `conversations` has those of each rollout that has a result at the end."""

    rollouts: Collection[str]
    in_flight: int
    restarted: Set[str]
    finished: Set[str]
    recorded: Set[str]
    conversations: Mapping[str, Set[str]]
    before_kill: Generations
    after_kill: Generations


def measure(records: Records, pause_s: float, snapshot_bytes: int, equal: bool) -> Figures:
    """The figures of an interrupted run."""
    again = records.after_kill.begun
    return Figures(
        rollouts=len(records.rollouts),
        in_flight_at_cut=records.in_flight,
        kept=records.in_flight - len(records.restarted),
        restarted=len(records.restarted),
        lost=sum(rollout_id not in records.conversations for rollout_id in records.rollouts),
        finished_redone=sum(
            any(digest in again for digest in records.conversations.get(rollout_id, ()))
            for rollout_id in records.finished
        ),
        model_calls_repeated=sum(count for digest, count in again.items() if digest in records.recorded),
        calls_after_cut=sum(
            digest not in records.recorded and digest in again for digest in records.before_kill.finished
        ),
        pause_s=round(pause_s, 3),
        snapshot_bytes=snapshot_bytes,
        equal_to_uninterrupted=equal,
    )
