"""Autosave: signals, the end of a job, failures that are tolerated, and a loop that sleeps until something is due."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.client_autosave import Autosave
from coordinator.client_results import SaveResult, SnapshotSummary, Totals
from coordinator.client_schedule import SaveRules, Trigger
from coordinator.wire.errors import Problem, Reason, Refused


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Saver:
    """A client that notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failures = 0
        self.there: set[str | None] = set()

    def save(self, snapshot_id: str | None = None, **options: Any) -> SaveResult:
        self.asked.append({"snapshot_id": snapshot_id} | options)
        if snapshot_id in self.there:
            raise Refused(Problem(Reason.SNAPSHOT_EXISTS, f"{snapshot_id} is there."))
        if self.failures:
            self.failures -= 1
            raise Refused(Problem(Reason.DRAIN_INCOMPLETE, "r-1 still drains."))
        return SaveResult(SnapshotSummary("s", "o", 0.0, 1, Totals(), (), "", {}), 0.1, 0.2)


def autosave(saver: Saver, clock: Clock, environ: Mapping[str, str] | None = None, **rules: Any) -> Autosave:
    return Autosave(saver, SaveRules(**rules), environ=environ or {}, clock=clock, wall_clock=lambda: 5000.0)


def test_a_save_carries_its_step_its_trigger_and_what_the_trainer_adds() -> None:
    saver, clock = Saver(), Clock()
    saving = autosave(saver, clock, every_steps=10)
    assert saving.due(0) is None
    assert saving.due(10)
    assert saving.save(10, metadata={"weights": "/ckpt/10"}) is not None
    (asked,) = saver.asked
    assert asked["snapshot_id"] == "step-10"
    assert asked["metadata"] == {"trigger": "steps", "step": "10", "weights": "/ckpt/10"}
    assert (asked["timeout"], asked["straggler_grace"]) == (None, None)


def test_a_step_that_was_saved_in_a_life_before_is_saved_under_another_name() -> None:
    """A trainer that has restored an older snapshot comes to the same steps again; its last chance must not fail over that."""
    saver, clock = Saver(), Clock()
    saver.there = {"step-10"}
    saving = autosave(saver, clock, every_steps=10)
    assert saving.due(0) is None
    assert saving.due(10)
    assert saving.save(10) is not None
    assert [asked["snapshot_id"] for asked in saver.asked] == ["step-10", None]
    assert saver.asked[1]["metadata"] == saver.asked[0]["metadata"] == {"trigger": "steps", "step": "10"}
    assert saving.schedule.failures == 0


def test_failures_are_tolerated_until_there_are_too_many_in_a_row() -> None:
    saver, clock = Saver(), Clock()
    saving = autosave(saver, clock, every_s=10, tolerated_failures=1)
    saver.failures = 2
    clock.now += 10
    assert saving.due()
    assert saving.save() is None
    clock.now += 10
    assert saving.due()
    with pytest.raises(Refused) as caught:
        saving.save()
    assert "2 saves in a row have failed." in caught.value.__notes__


def test_usr1_asks_for_a_save_and_term_for_the_last_one_and_handlers_that_were_there_are_called_and_put_back() -> None:
    saver, clock, heard = Saver(), Clock(), list[int]()
    before = {
        number: signal.signal(number, lambda n, _: heard.append(n)) for number in (signal.SIGUSR1, signal.SIGTERM)
    }
    try:
        ours = signal.getsignal(signal.SIGTERM)
        with autosave(saver, clock) as saving:
            assert saving.due() is None
            os.kill(os.getpid(), signal.SIGUSR1)
            due = saving.due()
            assert due is not None
            assert due.trigger is Trigger.DEMAND
            saving.save()
            os.kill(os.getpid(), signal.SIGTERM)
            assert saving.ending
            due = saving.due()
            assert due is not None
            assert due.trigger is Trigger.LAST_CHANCE
            saving.save()
            assert saver.asked[-1]["straggler_grace"] == 0.0
            assert 0 < saver.asked[-1]["timeout"] < 30
        assert heard == [signal.SIGUSR1, signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_of_the_main_thread_no_handler_is_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run() -> None:
        with autosave(Saver(), Clock()):
            assert signal.getsignal(signal.SIGTERM) is before

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_a_slurm_job_is_known_from_its_environment() -> None:
    clock = Clock()
    saving = autosave(Saver(), clock, {"SLURM_JOB_END_TIME": "5400"}, before_end_s=300)
    assert saving.due() is None
    clock.now += 100
    due = saving.due()
    assert due is not None
    assert due.trigger is Trigger.PREEMPTION


@pytest.mark.parametrize("text", ["soon", "1", "-5", "nan", "inf"])
def test_an_end_of_a_slurm_job_that_is_no_time_to_come_is_not_known_and_saves_go_on(text: str) -> None:
    clock = Clock()
    saving = autosave(Saver(), clock, {"SLURM_JOB_END_TIME": text})
    assert saving.schedule.wait_s(clock.now) is None
    saving.demand()
    due = saving.due()
    assert due is not None
    assert due.trigger is Trigger.DEMAND


def test_waiting_ends_when_a_save_is_demanded_or_the_job_ends() -> None:
    for act in (Autosave.demand, Autosave.end):
        saving = Autosave(Saver(), SaveRules(before_end_s=60), environ={})
        waiting = threading.Thread(target=saving.wait, args=(60.0,))
        waiting.start()
        act(saving)
        waiting.join(10)
        assert not waiting.is_alive()


def test_waiting_ends_by_itself() -> None:
    saving = Autosave(Saver(), SaveRules(every_s=0.01), environ={})
    due = saving.wait(60)
    assert due is not None
    assert due.trigger is Trigger.TIME
    assert Autosave(Saver(), SaveRules(), environ={}).wait(0.0) is None
