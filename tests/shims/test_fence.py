"""The fence, example by example: each rule of DESIGN section 3, 1 to 4."""

from __future__ import annotations

import pytest

from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import ParticipantState as State
from participant_shims.fence import LEGAL, Accept, Cause, Decision, Fence, Join, Refuse, Replay, Rpc, Rule

NOW = 100.0


def new(max_finished: int = 100) -> Fence:
    return Fence("counter", max_finished)


def call(fence: Fence, rpc: Rpc, operation: str = "a", epoch: int = 1, digest: str = "d", now: float = NOW) -> Decision:
    return fence.call(rpc, operation, epoch, digest, now, 60)


def prepared(operation: str = "a", epoch: int = 1, fence: Fence | None = None) -> Fence:
    fence = fence or new()
    assert isinstance(call(fence, Rpc.PREPARE, operation, epoch), Accept)
    assert fence.succeeded(Rpc.PREPARE, operation, "prepared", NOW) is None
    return fence


def reason(decision: Decision) -> Reason:
    assert isinstance(decision, Refuse)
    return decision.problem.reason


def picture(fence: Fence) -> tuple[object, ...]:
    return (fence.state, fence.operation_id, fence.highest_epoch, fence.lease_remaining(NOW), fence.remembered)


def test_every_state_has_a_rule_for_every_rpc_and_can_be_left() -> None:
    for state in State:
        if state is State.UNSPECIFIED:
            continue
        assert set(LEGAL[state]) == set(Rpc)
        assert LEGAL[state][Rpc.RESUME] is LEGAL[state][Rpc.ABORT] is Rule.END


def test_a_save_goes_through_its_states_and_each_repeat_gets_the_recorded_reply() -> None:
    fence = new()
    assert isinstance(call(fence, Rpc.PREPARE), Accept)
    assert fence.state is State.PREPARING
    assert isinstance(call(fence, Rpc.PREPARE), Join)
    fence.succeeded(Rpc.PREPARE, "a", "p", NOW)
    assert isinstance(call(fence, Rpc.COMMIT), Accept)
    assert isinstance(call(fence, Rpc.COMMIT), Join)
    assert fence.state is State.COMMITTING
    fence.succeeded(Rpc.COMMIT, "a", "c", NOW)
    assert fence.state is State.COMMITTED
    assert isinstance(call(fence, Rpc.CONFIRM), Accept)
    for rpc, reply in ((Rpc.PREPARE, "p"), (Rpc.COMMIT, "c")):
        again = call(fence, rpc)
        assert isinstance(again, Replay)
        assert again.reply == reply
    end = call(fence, Rpc.RESUME)
    assert isinstance(end, Accept)
    assert end.ended is not None
    assert end.ended.cause is Cause.RESUMED
    fence.record_end(Rpc.RESUME, "a", "opened")
    assert call(fence, Rpc.RESUME) == Replay("opened")
    assert fence.state is State.OPEN


@pytest.mark.parametrize("rpc", [Rpc.COMMIT, Rpc.CONFIRM, Rpc.RENEW])
def test_a_phase_before_prepare_is_refused_and_not_remembered(rpc: Rpc) -> None:
    fence = new()
    assert reason(call(fence, rpc)) is Reason.WRONG_PHASE
    assert picture(fence) == picture(new())
    assert isinstance(call(fence, Rpc.PREPARE), Accept)


def test_another_operation_of_the_same_epoch_is_fenced_and_changes_nothing() -> None:
    fence = prepared()
    before = picture(fence)
    refusal = call(fence, Rpc.PREPARE, "b")
    assert reason(refusal) is Reason.FENCED
    assert isinstance(refusal, Refuse)
    assert refusal.problem.operation_id == "a"
    assert picture(fence) == before


def test_who_is_fenced_is_told_by_whose_coordinator_and_for_how_long() -> None:
    fence = prepared(epoch=5)
    refusal = call(fence, Rpc.PREPARE, "b", epoch=5)
    assert isinstance(refusal, Refuse)
    left = fence.lease_remaining(NOW)
    assert left
    assert (
        f"a of the coordinator of epoch 5 owns the pause (prepared), for {left:.1f} s more" in refusal.problem.message
    )


def test_an_operation_that_the_participant_has_ended_itself_says_why_ever_after() -> None:
    fence = prepared()
    fence.force_end(Cause.LAPSED, "Worker worker-0 is stopped.")
    for rpc in (Rpc.RENEW, Rpc.COMMIT):
        refusal = call(fence, rpc)
        assert isinstance(refusal, Refuse)
        assert refusal.problem.reason is Reason.LEASE_LAPSED
        assert "(Worker worker-0 is stopped)" in refusal.problem.message


@pytest.mark.parametrize("rpc", list(Rpc))
def test_an_older_epoch_is_refused_whatever_it_asks_and_changes_nothing(rpc: Rpc) -> None:  # I6
    fence = prepared(epoch=5)
    before = picture(fence)
    assert reason(call(fence, rpc, "a", epoch=4)) is Reason.STALE_EPOCH
    assert reason(call(fence, rpc, "b", epoch=4)) is Reason.STALE_EPOCH
    assert picture(fence) == before


@pytest.mark.parametrize("rpc", [Rpc.PREPARE, Rpc.RESTORE, Rpc.RESUME, Rpc.ABORT])
def test_a_higher_epoch_takes_over_and_the_old_operation_is_finished(rpc: Rpc) -> None:
    fence = prepared("a", 1)
    decision = call(fence, rpc, "b", 2)
    assert isinstance(decision, Accept)
    assert decision.ended is not None
    assert (decision.ended.operation_id, decision.ended.cause) == ("a", Cause.SUPERSEDED)
    assert reason(call(fence, Rpc.COMMIT, "a", 2)) is Reason.OPERATION_FINISHED


def test_a_restarted_coordinator_may_go_on_with_its_operation_and_fences_the_old_one() -> None:
    fence = prepared("a", 1)
    assert isinstance(call(fence, Rpc.COMMIT, "a", 2), Accept)
    assert reason(call(fence, Rpc.ABORT, "a", 1)) is Reason.STALE_EPOCH
    assert fence.state is State.COMMITTING


def test_the_same_id_with_another_request_is_a_conflict_that_shows_both_digests() -> None:
    fence = prepared()
    before = picture(fence)
    refusal = call(fence, Rpc.PREPARE, digest="e")
    assert isinstance(refusal, Refuse)
    assert refusal.problem.reason is Reason.REQUEST_CONFLICT
    assert dict(refusal.problem.metadata) == {"first_digest": "d", "this_digest": "e"}
    assert picture(fence) == before


@pytest.mark.parametrize("rpc", [Rpc.RESUME, Rpc.ABORT])
def test_an_end_of_an_unknown_operation_is_accepted_and_fences_it(rpc: Rpc) -> None:  # I8
    fence = new()
    assert call(fence, rpc) == Accept()
    assert reason(call(fence, Rpc.PREPARE)) is Reason.OPERATION_FINISHED
    assert reason(call(fence, Rpc.RESTORE)) is Reason.OPERATION_FINISHED


def test_an_abort_of_a_stranger_while_another_runs_fences_the_stranger_only() -> None:
    fence = prepared("a")
    assert reason(call(fence, Rpc.ABORT, "b")) is Reason.FENCED
    assert (fence.state, fence.operation_id) == (State.PREPARED, "a")
    call(fence, Rpc.RESUME, "a")
    assert reason(call(fence, Rpc.PREPARE, "b")) is Reason.OPERATION_FINISHED


def test_the_lease_lapses_at_its_time_and_later_calls_are_told() -> None:
    fence = prepared()
    assert fence.lease_remaining(NOW + 59) == 1
    assert fence.lapse("a", fence.lease_generation, NOW + 59.9) is None
    ended = fence.lapse("a", fence.lease_generation, NOW + 60)
    assert ended is not None
    assert ended.cause is Cause.LAPSED
    for rpc in (Rpc.PREPARE, Rpc.COMMIT, Rpc.CONFIRM, Rpc.RENEW):
        assert reason(call(fence, rpc, now=NOW + 61)) is Reason.LEASE_LAPSED
    assert isinstance(call(fence, Rpc.ABORT, now=NOW + 61), Accept)


def test_a_call_that_finds_its_lease_lapsed_is_refused_and_says_that_admission_must_open() -> None:
    fence = prepared()
    decision = call(fence, Rpc.COMMIT, now=NOW + 60)
    assert reason(decision) is Reason.LEASE_LAPSED
    assert decision.ended is not None
    assert decision.ended.operation_id == "a"
    other = prepared("b", fence=fence)
    assert other.operation_id == "b"


def test_another_operation_that_finds_the_lease_lapsed_begins_after_the_opening() -> None:
    fence = prepared()
    decision = call(fence, Rpc.PREPARE, "b", now=NOW + 60)
    assert isinstance(decision, Accept)
    assert decision.ended is not None
    assert decision.ended.cause is Cause.LAPSED


def test_who_asks_whether_a_lapsed_operation_is_still_held_fences_the_coordinators_before_it() -> None:
    fence = prepared(epoch=3)
    fence.force_end(Cause.LAPSED)
    assert reason(fence.call(Rpc.RENEW, "a", 4, "", NOW + 1, 10)) is Reason.LEASE_LAPSED
    assert reason(call(fence, Rpc.ABORT, "a", epoch=3, now=NOW + 2)) is Reason.STALE_EPOCH
    assert isinstance(call(fence, Rpc.RESUME, "a", epoch=4, now=NOW + 3), Accept)


def test_every_call_of_the_owner_renews_but_repeats_of_the_grant_do_not() -> None:
    fence = prepared()
    call(fence, Rpc.PREPARE, now=NOW + 30)
    assert fence.lease_remaining(NOW + 30) == 30
    call(fence, Rpc.CONFIRM, now=NOW + 30)
    assert fence.lease_remaining(NOW + 30) == 60
    fence.call(Rpc.RENEW, "a", 1, "", NOW + 40, 10)
    assert fence.lease_remaining(NOW + 40) == 10
    call(fence, Rpc.COMMIT, now=NOW + 45)
    assert fence.lease_remaining(NOW + 45) == 10


def test_a_timer_of_an_older_lease_is_a_no_op() -> None:
    fence = prepared()
    old = fence.lease_generation
    call(fence, Rpc.CONFIRM, now=NOW + 1)
    assert fence.lapse("a", old, NOW + 1000) is None
    call(fence, Rpc.RESUME, now=NOW + 2)
    prepared("b", fence=fence)
    assert fence.lapse("a", fence.lease_generation, NOW + 1000) is None
    assert fence.operation_id == "b"


def test_a_failed_prepare_leaves_no_owner_and_its_repeat_gets_the_recorded_failure() -> None:
    fence = new()
    call(fence, Rpc.PREPARE)
    problem = Problem(Reason.DECLINED, "no")
    ended = fence.failed(Rpc.PREPARE, "a", problem)
    assert ended is not None
    assert fence.state is State.OPEN
    assert call(fence, Rpc.PREPARE) == Refuse(problem)
    assert reason(call(fence, Rpc.PREPARE, digest="e")) is Reason.OPERATION_FINISHED
    assert isinstance(call(fence, Rpc.PREPARE, "b"), Accept)


def test_a_failed_commit_may_be_repeated_with_the_same_request_only() -> None:
    fence = prepared()
    call(fence, Rpc.COMMIT)
    assert fence.failed(Rpc.COMMIT, "a", Problem(Reason.STORAGE_FULL, "full")) is None
    assert fence.state is State.PREPARED
    assert reason(call(fence, Rpc.COMMIT, digest="e")) is Reason.REQUEST_CONFLICT
    assert isinstance(call(fence, Rpc.COMMIT), Accept)


def test_a_failed_restore_stays_and_one_that_closed_nothing_is_forgotten() -> None:
    fence = new()
    call(fence, Rpc.RESTORE)
    fence.failed(Rpc.RESTORE, "a", Problem(Reason.SNAPSHOT_CORRUPT, "bad"), closed=False)
    assert fence.state is State.OPEN
    assert isinstance(call(fence, Rpc.RESTORE), Accept)
    fence.failed(Rpc.RESTORE, "a", Problem(Reason.NOT_FRESH, "no"))
    assert fence.state is State.RESTORE_FAILED
    assert reason(call(fence, Rpc.COMMIT)) is Reason.WRONG_PHASE
    assert isinstance(call(fence, Rpc.RESTORE), Accept)


def test_a_phase_that_ends_after_its_operation_is_void() -> None:
    fence = new()
    call(fence, Rpc.PREPARE)
    call(fence, Rpc.ABORT)
    late = fence.succeeded(Rpc.PREPARE, "a", "p", NOW)
    assert late is not None
    assert late.problem.reason is Reason.OPERATION_FINISHED
    assert fence.failed(Rpc.PREPARE, "a", Problem(Reason.DECLINED, "x")) is None
    prepared("b", fence=fence)
    lapsed = new()
    call(lapsed, Rpc.PREPARE)
    late = lapsed.succeeded(Rpc.PREPARE, "a", "p", NOW + 61)
    assert late is not None
    assert late.problem.reason is Reason.LEASE_LAPSED
    assert late.ended is not None


def test_finished_ids_are_never_forgotten_within_their_epoch() -> None:  # I19
    fence = new(max_finished=4)
    for n in range(4):
        prepared(f"op-{n}", fence=fence)
        call(fence, Rpc.RESUME, f"op-{n}")
    assert reason(call(fence, Rpc.PREPARE, "op-4")) is Reason.LIMIT_EXCEEDED
    assert isinstance(call(fence, Rpc.ABORT, "op-9"), Accept)  # an end is served also when memory is full
    assert reason(call(fence, Rpc.PREPARE, "op-9")) is Reason.LIMIT_EXCEEDED
    for n in range(4):
        assert reason(call(fence, Rpc.PREPARE, f"op-{n}")) is Reason.OPERATION_FINISHED
    prepared("op-5", epoch=2, fence=fence)  # a new epoch makes room
    call(fence, Rpc.RESUME, "op-5", epoch=2)
    assert fence.remembered == 4


def test_an_operation_whose_memory_was_taken_by_strangers_is_still_remembered() -> None:
    fence = new(max_finished=2)
    prepared("a", fence=fence)
    for n in range(5):
        call(fence, Rpc.ABORT, f"stranger-{n}")
    call(fence, Rpc.RESUME, "a")
    assert reason(call(fence, Rpc.PREPARE, "a")) is Reason.OPERATION_FINISHED
    assert fence.remembered == 2
    for n in range(5):
        assert isinstance(call(fence, Rpc.PREPARE, f"stranger-{n}"), Refuse)


def test_retiring_waits_for_the_operation() -> None:
    fence = prepared(epoch=3)
    assert reason(fence.may_retire(3, NOW)) is Reason.FENCED
    assert reason(fence.may_retire(2, NOW)) is Reason.STALE_EPOCH
    call(fence, Rpc.RESUME, epoch=3)
    assert isinstance(fence.may_retire(4, NOW), Accept)
    assert fence.highest_epoch == 4


def test_giving_up_the_pause_finishes_the_operation() -> None:
    fence = prepared()
    ended = fence.force_end(Cause.LAPSED)
    assert ended is not None
    assert fence.force_end(Cause.LAPSED) is None
    assert reason(call(fence, Rpc.COMMIT)) is Reason.LEASE_LAPSED
