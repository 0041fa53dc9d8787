"""A sentence that speaks of rollouts names them, or says what does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.protocol.events import Slept
from coordinator.protocol.proofs import Prepared, Progress
from coordinator.protocol.sentences import WE_SLEPT, as_we_know, checking, excluded, of_our_sleep, once_open, waiting
from coordinator.wire.errors import CATALOG, Blocked, Problem, Reason
from coordinator.wire.ids import IncarnationId, ParticipantId, SnapshotId
from coordinator.wire.terms import Phase, QuiesceMode, counted

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


def test_what_a_save_waits_for_before_anybody_is_paused_is_named_with_its_time() -> None:
    who = [ParticipantId(f"box-{n}") for n in range(7)]
    text = checking("to come back", who, 3.21)
    assert (
        text
        == "discover: waiting 3.2 s for box-0, box-1, box-2, box-3, box-4 and 2 more to come back; nobody is paused."
    )
    assert checking("writing ahead", [], 3.21) == "discover: writing ahead, for 3.2 s; nobody is paused."


@pytest.mark.parametrize("reason", [reason for reason in Reason if CATALOG[reason].aborted])
def test_once_everybody_is_open_nobody_is_told_to_abort(reason: Reason) -> None:
    for told in ("", CATALOG[reason].next_step):  # a participant sends the catalog's advice as its own
        problem = once_open(Problem(reason, "x", told), QuiesceMode.HOLD)
        assert "abort" not in problem.advice.lower()
    own = Problem(reason, "x", "Turn it off and on.")
    assert once_open(own, QuiesceMode.HOLD) == own


def test_a_hold_that_failed_by_stragglers_is_not_advised_to_hold() -> None:
    late = Problem(Reason.DRAIN_INCOMPLETE, "x")
    held = once_open(late, QuiesceMode.HOLD).advice
    assert "`safepoint why --stacks`" in held
    assert "hold" not in held
    assert "`--mode hold`" in once_open(late, QuiesceMode.DRAIN).advice


@pytest.mark.parametrize(("count", "said"), [(1, "1 rollout)."), (2, "2 rollouts).")])
def test_one_is_not_said_as_many(count: int, said: str) -> None:
    who = ParticipantId("agent")
    assert waiting(Phase.PREPARE, [who], {who: Progress(in_flight=1, waiting_for_count=count)}, 2.0).endswith(said)
    assert counted(count, "rollout", "restarts", "restart") == f"{said[:-2]} {'restarts' if count == 1 else 'restart'}"
    items = "1 item" if count == 1 else "1 of 2 items"
    step = Progress(items_done=1, items_total=0 if count == 1 else 2)
    assert waiting(Phase.COMMIT, [who], {who: step}, 2.0).endswith(f"0 bytes, {items}).")


ASLEEP = Slept(30.0, 8.0, "The coordinator (process 7) did not run, for 8.0 s.")


@pytest.mark.parametrize(
    ("problem", "ours"),
    [
        (Problem(Reason.DRAIN_INCOMPLETE, "Late.", waited_s=16.0), True),
        (Problem(Reason.DRAIN_INCOMPLETE, "Late.", waited_s=16.1), False),  # most of the time somebody else was slow
        (Problem(Reason.UNREACHABLE, "No answer.", waited_s=9.0), True),
        (Problem(Reason.UNREACHABLE, "It is gone."), False),
        (Problem(Reason.UNREACHABLE, "It was killed.", waited_s=9.0, metadata={"ended": "By signal 9."}), False),
        (Problem(Reason.UNREACHABLE, "It has left.", metadata={"slept": "the coordinator did not run"}), True),
        (Problem(Reason.LEASE_LAPSED, "It has opened."), True),
        (Problem(Reason.STORAGE_FULL, "Full.", waited_s=1.0), False),
        (Problem(Reason.DECLINED, "No.", waited_s=1.0), False),
    ],
)
def test_who_is_well_is_not_blamed_for_the_time_that_the_coordinator_has_slept(problem: Problem, ours: bool) -> None:
    problem = replace(problem, participant_id="agent")
    told = of_our_sleep(problem, ASLEEP, lease_ttl_s=16.0)
    assert (told.participant_id == "") is ours
    assert told.message.startswith(ASLEEP.said) is ours
    assert (told.next_step == WE_SLEPT) is ours
    if ours:
        assert told.reason in (Reason.UNREACHABLE, Reason.LEASE_LAPSED)
        assert "agent" in told.message or problem.message in told.message
    else:
        assert told == problem


def test_a_lease_lapses_by_a_sleep_of_half_of_it_and_by_no_shorter_one() -> None:
    lapsed = Problem(Reason.LEASE_LAPSED, "It has opened.", participant_id="agent")
    assert of_our_sleep(lapsed, ASLEEP, lease_ttl_s=16.1) == lapsed


def test_without_a_sleep_only_who_has_left_for_one_is_not_blamed() -> None:
    late = Problem(Reason.DRAIN_INCOMPLETE, "Late.", participant_id="agent", waited_s=1.0)
    left = replace(late, metadata={"slept": "the coordinator did not run, for 8.0 s"})
    assert of_our_sleep(late, None, lease_ttl_s=1.0) == late
    assert of_our_sleep(left, None, lease_ttl_s=1.0).participant_id == ""


def test_who_does_not_see_the_snapshot_is_not_told_as_its_absence() -> None:
    unseen = Problem(Reason.SNAPSHOT_NOT_FOUND, "There is no /b/snapshots/one.", "Give every shim the same root.")
    told = as_we_know(unseen)
    assert (told.reason, told.next_step) == (Reason.STORAGE_FAILED, unseen.next_step)
    assert unseen.message in told.message
    other = replace(unseen, reason=Reason.SNAPSHOT_CORRUPT)
    assert as_we_know(other) == other
