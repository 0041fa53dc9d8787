"""A sentence that speaks of rollouts names them, or says what does."""

from __future__ import annotations

import pytest

from coordinator.protocol.proofs import Prepared
from coordinator.protocol.sentences import excluded
from coordinator.wire.errors import Blocked
from coordinator.wire.ids import IncarnationId, SnapshotId

ALL_OF_THEM = "`safepoint snapshots show step-1 --rollouts` names"


@pytest.mark.parametrize(
    ("named", "count", "said"),
    [
        (1, 1, "1 rollout could not quiesce and is excluded: a restore begins it again from the input: r-0 (turn 1, 31 s, waiting on cart /add)."),
        (2, 2, "2 rollouts could not quiesce and are excluded: a restore begins them again from the input: "
               "r-0 (turn 1, 31 s, waiting on cart /add), "
               "r-1 (turn 1, 31 s, waiting on cart /add)."),
        (20, 700, f"and 697 more, which {ALL_OF_THEM}."),
        (0, 2, f"2 rollouts could not quiesce and are excluded: a restore begins them again from the input; {ALL_OF_THEM} them."),
    ],
)  # fmt: skip
def test_a_warning_of_excluded_rollouts_says_which(named: int, count: int, said: str) -> None:
    who = tuple(Blocked(f"r-{n}", turn=1, age_s=31, waiting_on="cart /add") for n in range(named))
    text = excluded(Prepared(IncarnationId("i-1"), 1, (), excluded=who, excluded_count=count), SnapshotId("step-1"))
    assert text.endswith(said)
    assert text.count("turn 1") == min(named, 3)
