"""When a save is due: the rules of `client_schedule`, on a clock that the tests turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.client_schedule import MARGIN_S, RETRY_S, Due, SaveRules, SaveSchedule, Trigger
from coordinator.wire.errors import Reason, Refused


def done(schedule: SaveSchedule, due: Due, now: float, took_s: float = 0.0, step: int | None = None) -> None:
    schedule.begun(due, now, step)
    schedule.succeeded(now + took_s)


def trigger(due: Due | None) -> Trigger | None:
    return None if due is None else due.trigger


def test_nothing_is_due_when_nothing_is_asked_for() -> None:
    schedule = SaveSchedule(SaveRules(), 0)
    assert schedule.due(1e9, step=10**9) is None
    assert schedule.wait_s(1e9) is None


def test_by_time_a_save_is_due_a_period_after_the_start_and_after_the_begin_of_each_save() -> None:
    schedule = SaveSchedule(SaveRules(every_s=100), 0)
    assert schedule.due(99.9) is None
    assert schedule.wait_s(40) == 60
    due = schedule.due(100)
    assert trigger(due) is Trigger.TIME
    assert due is not None
    done(schedule, due, 100, took_s=30)
    assert schedule.due(199) is None
    assert trigger(schedule.due(200)) is Trigger.TIME


def test_between_two_saves_there_is_the_gap_even_when_a_save_takes_longer_than_the_period() -> None:
    schedule = SaveSchedule(SaveRules(every_s=100, min_gap_s=50), 0)
    due = schedule.due(100)
    assert due is not None
    done(schedule, due, 100, took_s=500)
    schedule.demand()
    assert schedule.due(649) is None
    assert schedule.wait_s(640) == 10
    assert trigger(schedule.due(650)) is Trigger.DEMAND


def test_steps_are_counted_from_the_first_that_is_shown_so_that_a_restart_does_not_save_at_once() -> None:
    schedule = SaveSchedule(SaveRules(every_steps=20), 0)
    assert schedule.due(0, step=140) is None
    assert schedule.due(1, step=159) is None
    due = schedule.due(2, step=160)
    assert trigger(due) is Trigger.STEPS
    assert due is not None
    done(schedule, due, 2, step=160)
    assert schedule.due(3, step=160) is None
    assert trigger(schedule.due(4, step=181)) is Trigger.STEPS, "a step that was passed over is not missed"


def test_a_demand_is_served_once_and_one_that_comes_during_a_save_asks_for_the_next() -> None:
    schedule = SaveSchedule(SaveRules(), 0)
    schedule.demand()
    due = schedule.due(1)
    assert trigger(due) is Trigger.DEMAND
    assert due is not None
    schedule.begun(due, 1)
    schedule.demand()
    schedule.succeeded(2)
    assert trigger(schedule.due(2)) is Trigger.DEMAND
    done(schedule, due, 2)
    assert schedule.due(3) is None


def test_before_the_end_one_save_is_due_whatever_the_gap_and_only_one() -> None:
    schedule = SaveSchedule(SaveRules(min_gap_s=1e6, before_end_s=300), 0, ends_at=1000)
    assert schedule.due(699) is None
    assert schedule.wait_s(600) == 100
    due = schedule.due(700)
    assert due == Due(Trigger.PREEMPTION, 300 - MARGIN_S)
    assert due is not None
    done(schedule, due, 700)
    assert schedule.due(800) is None


def test_with_little_time_left_stragglers_are_not_waited_for_and_with_none_no_save_begins() -> None:
    schedule = SaveSchedule(SaveRules(before_end_s=300, last_chance_s=30), 0)
    schedule.ends(1000)
    due = schedule.due(975)
    assert due == Due(Trigger.LAST_CHANCE, 25 - MARGIN_S)
    assert due is not None
    assert not due.stragglers_wait
    assert schedule.due(1000 - MARGIN_S) is None
    assert schedule.due(2000) is None


def test_a_last_save_that_failed_is_due_again_at_once_while_there_is_time() -> None:
    schedule = SaveSchedule(SaveRules(min_gap_s=1e6), 0, ends_at=100)
    due = schedule.due(10)
    assert due is not None
    schedule.begun(due, 10)
    schedule.failed(due, 12)
    assert trigger(schedule.due(12)) is Trigger.PREEMPTION


def test_before_the_end_only_the_first_failure_is_followed_at_once_whatever_is_tolerated() -> None:
    schedule = SaveSchedule(SaveRules(before_end_s=300, tolerated_failures=None), 0, ends_at=300)
    now, tries = 0.0, 0
    while now < 300:
        due = schedule.due(now)
        if due is not None:
            schedule.begun(due, now)
            schedule.failed(due, now)
            tries += 1
            if tries > 1:
                assert schedule.due(now) is None
        wait_s = schedule.wait_s(now)
        if wait_s is None:
            break
        assert wait_s > 0 or schedule.due(now) is not None, "who waits must not spin"
        now += wait_s
    assert 300 / RETRY_S <= tries < 300 / RETRY_S + 30


def test_an_end_that_has_passed_keeps_nothing_from_being_saved() -> None:
    for ends_at in (-1000.0, 0.0):
        schedule = SaveSchedule(SaveRules(every_s=100), 0, ends_at)
        assert schedule.due(1) is None
        assert schedule.wait_s(1) == 99
        assert trigger(schedule.due(100)) is Trigger.TIME
        schedule.demand()
        assert trigger(schedule.due(1)) is Trigger.DEMAND
    schedule.ends(1000)
    assert schedule.due(1000 - MARGIN_S / 2) is None
    assert schedule.wait_s(1000 - MARGIN_S / 2) == MARGIN_S / 2, "and not 0: who waits must not spin"
    assert trigger(schedule.due(1000)) is Trigger.DEMAND, "it lives: the end was none"


def test_the_earliest_end_counts_and_a_nearer_one_asks_for_another_save() -> None:
    schedule = SaveSchedule(SaveRules(before_end_s=300), 0, ends_at=1000)
    due = schedule.due(750)
    assert due is not None
    done(schedule, due, 750)
    schedule.ends(5000)
    assert trigger(schedule.due(760)) is Trigger.PREEMPTION, "told to end while it goes on: what came since is worth it"
    schedule.ends(790)
    due = schedule.due(765)
    assert due == Due(Trigger.LAST_CHANCE, 25 - MARGIN_S)


def test_a_failed_save_is_tried_again_after_the_gap_and_too_many_in_a_row_are_told() -> None:
    schedule = SaveSchedule(SaveRules(every_s=100, tolerated_failures=1), 0)
    due = schedule.due(100)
    assert due is not None
    schedule.begun(due, 100)
    schedule.failed(due, 101)
    assert not schedule.exceeded
    assert schedule.due(101 + RETRY_S - 0.1) is None
    due = schedule.due(101 + RETRY_S)
    assert due is not None
    schedule.begun(due, 110)
    schedule.failed(due, 111)
    assert schedule.exceeded
    schedule.succeeded(120)
    assert (schedule.exceeded, schedule.failures) == (False, 0)


@pytest.mark.parametrize(
    "rules",
    [{"every_s": -1}, {"every_steps": -1}, {"min_gap_s": float("nan")}, {"before_end_s": float("inf")},
     {"tolerated_failures": -1}, {"before_end_s": 10, "last_chance_s": 20}],
)  # fmt: skip
def test_rules_that_cannot_be_kept_are_refused(rules: dict[str, float]) -> None:
    with pytest.raises(Refused) as caught:
        SaveRules(**rules)  # type: ignore[arg-type]
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert next(iter(rules)) in str(caught.value)


@given(
    st.lists(
        st.tuples(st.sampled_from(["look", "demand", "fail", "end"]), st.floats(0.01, 500), st.floats(0, 50)),
        max_size=60,
    )
)
def test_between_saves_there_is_always_the_gap_but_before_the_end(steps: list[tuple[str, float, float]]) -> None:
    rules = SaveRules(every_s=60, min_gap_s=20, before_end_s=40, last_chance_s=10)
    schedule, now, free_at = SaveSchedule(rules, 0), 0.0, 0.0
    for what, later, took in steps:
        now += later
        if what == "demand":
            schedule.demand()
        if what == "end":
            schedule.ends(now + took)
        due = schedule.due(now)
        wait = schedule.wait_s(now)
        if due is None:
            continue
        assert wait == 0 or due.trigger in (Trigger.PREEMPTION, Trigger.LAST_CHANCE)
        if due.within_s is None:
            assert now >= free_at
        else:
            assert due.within_s > 0
        schedule.begun(due, now)
        now += took
        if what == "fail":
            schedule.failed(due, now)
        else:
            schedule.succeeded(now)
        free_at = now + rules.min_gap_s
