"""What the status says of an operation that is over: who may still be paused by it, and for how long that can be."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.operations import Operations
from coordinator.outcomes import Ended
from coordinator.protocol.operation import Operation, Outcome
from coordinator.settings import Settings
from coordinator.status import operation_status
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.terms import OperationKind, Phase

OPEN_BY = 145.0


def unconfirmed(
    now: float,
    outcome: Outcome = Outcome.ABORTED,
    open_by: float | None = OPEN_BY,
    here: Collection[str] = (),
    told: Collection[str] = (),
) -> list[str]:
    """Who is said to be paused at that time, when these are registered and these of them have not heard yet."""
    ended = Ended(
        OperationId("save-1"), SnapshotId("step-1"), OperationKind.SAVE, outcome, "", Phase.ABORT, 1.0, ("counter",),
        open_by=open_by,
    )  # fmt: skip
    registry = SimpleNamespace(get=lambda name: object() if name in here else None)
    operations: Any = SimpleNamespace(
        active=None, past=SimpleNamespace(last=lambda: ended), clock=lambda: now,
        discovery=SimpleNamespace(registry=registry), settling=SimpleNamespace(waiting=lambda: list(told)),
    )  # fmt: skip
    status = operation_status(cast(Operations, operations))
    assert status is not None
    return list(status.unconfirmed)


def test_nobody_is_said_to_be_paused_longer_than_its_lease_can_last() -> None:
    assert unconfirmed(OPEN_BY - 1) == ["counter"]
    assert unconfirmed(OPEN_BY) == []


def test_who_has_come_back_and_has_heard_is_not_said_to_be_paused() -> None:
    assert unconfirmed(OPEN_BY - 1, here=["counter"]) == []
    assert unconfirmed(OPEN_BY - 1, here=["counter"], told=["counter"]) == ["counter"], "it has not heard yet"
    assert unconfirmed(1e9, open_by=None, here=["counter"]) == [], (
        "whose operation was an earlier coordinator's as well"
    )
    assert unconfirmed(1e9, Outcome.FAILED_PAUSED, here=["counter"]) == ["counter"], "a restore keeps it paused"


@pytest.mark.parametrize(
    ("outcome", "open_by"),
    [(Outcome.FAILED_PAUSED, OPEN_BY), (Outcome.ABORTED, None)],
    ids=["a restore that keeps them paused", "an operation of an earlier coordinator"],
)
def test_who_may_be_paused_for_longer_stays_named(outcome: Outcome, open_by: float | None) -> None:
    assert unconfirmed(1e9, outcome, open_by) == ["counter"]


@pytest.mark.parametrize(("trainer_driven", "longest_s"), [(True, 60.0), (False, 660.0)])
def test_a_whole_save_may_spend_the_limits_of_its_phases_together(trainer_driven: bool, longest_s: float) -> None:
    save = Operation(OperationKind.SAVE, OperationId("save-1"), SnapshotId("step-1"), trainer_driven=trainer_driven)
    operations: Any = SimpleNamespace(
        settings=Settings(root="/nowhere", prepare_timeout_s=60.0, commit_timeout_s=600.0)
    )
    assert Operations.longest(operations, save) == longest_s
