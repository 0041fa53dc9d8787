"""Which snapshot is uploaded next, and when one is tried again: plain values, no clock."""

from __future__ import annotations

import pytest

from coordinator.uploads import FIRST_S, MOST_S, STUCK_S, Uploads
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import UploadState

DOWN = Problem(Reason.STORAGE_FAILED, "The object store failed.")
DAMAGED = Problem(Reason.SNAPSHOT_CORRUPT, "It is damaged.")


@pytest.fixture
def uploads() -> Uploads:
    made = Uploads()
    made.found(["step-3", "step-2", "step-1"])
    return made


def test_the_newest_goes_first_and_one_that_is_published_meanwhile_before_the_older_ones(uploads: Uploads) -> None:
    assert uploads.next(0) == "step-3"
    uploads.began("step-3", 0.0)
    assert uploads.next(0) == "step-2", "what is being sent is not sent twice"
    uploads.done("step-3")
    uploads.found(["step-4", "step-3", "step-2", "step-1"])
    assert uploads.next(0) == "step-4"
    assert [one.snapshot_id for one in uploads.unsent()] == ["step-4", "step-2", "step-1"]
    assert uploads.newest_uploaded() == "step-3"


def test_what_is_gone_needs_no_copy(uploads: Uploads) -> None:
    uploads.found(["step-3"])
    uploads.began("step-3", 0.0)
    uploads.done("step-3")
    assert uploads.next(0) is None
    assert uploads.wait_s(0) is None
    uploads.found([])
    uploads.failed("step-3", DOWN, 0)
    assert uploads.unsent() == ()


def test_when_the_store_fails_all_wait_twice_as_long_each_time_up_to_a_limit(uploads: Uploads) -> None:
    now, waits = 0.0, list[float]()
    for _ in range(9):
        name = uploads.next(now)
        assert name == "step-3"
        uploads.began(name, 0.0)
        uploads.failed(name, DOWN, now)
        assert uploads.next(now) is None
        wait_s = uploads.wait_s(now)
        assert wait_s is not None
        waits.append(wait_s)
        assert uploads.next(now + wait_s - 0.001) is None
        now += wait_s
    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert waits[-1] == MOST_S
    assert uploads.of("step-3").attempts == 9
    assert uploads.store_problem == DOWN
    uploads.began("step-3", 0.0)
    uploads.done("step-3")
    assert uploads.store_problem is None
    assert uploads.next(now) == "step-2", "the store is back: nobody waits any more"
    uploads.began("step-2", 0.0)
    uploads.failed("step-2", DOWN, now)
    assert uploads.wait_s(now) == FIRST_S, "and begins to count anew"


def test_what_is_wrong_with_one_snapshot_keeps_no_other_from_its_turn(uploads: Uploads) -> None:
    uploads.began("step-3", 0.0)
    uploads.failed("step-3", DAMAGED, 100.0)
    assert uploads.next(100.0) == "step-2"
    assert uploads.of("step-3").state is UploadState.FAILED
    for name in ("step-2", "step-1"):
        uploads.began(name, 0.0)
        uploads.done(name)
    assert uploads.wait_s(100.0) == STUCK_S
    assert uploads.next(100.0 + STUCK_S) == "step-3", "somebody may have mended it"


def test_the_jobs_of_a_store_do_not_come_back_all_at_once(uploads: Uploads) -> None:
    uploads.began("step-3", 0.0)
    uploads.failed("step-3", DOWN, 0.0, jitter=0.5)
    assert uploads.wait_s(0.0) == FIRST_S / 2
