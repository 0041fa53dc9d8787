"""The call logs of several actors' servers in one, range by range, and what an agent knows of rollouts that are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.wire.terms import CheckpointMode, Role, RolloutState
from participant_shims.adapter import Description
from participant_shims.adapters.gym_files import GymFiles
from participant_shims.gate import calllog_files
from participant_shims.gate.calllog import CallLog, Verdict
from tests.gate.test_calllog import TEXT, dispatched, written

AGENT = Description("agent", Role.AGENT, "gym.agent", CheckpointMode.EXPORT_RESTORE, "gym-calls-v1")
SOME = [f"r-{n}" for n in range(6)]


def agent(path: Path, *rollouts: str) -> CallLog:
    log = CallLog(path)
    for rollout_id in rollouts:
        dispatched(log, rollout_id)
    return log


def below(bound: str) -> Callable[[str], bool]:
    return lambda rollout_id: rollout_id < bound


def test_only_the_rollouts_of_a_range_are_installed_with_all_that_is_theirs(tmp_path: Path) -> None:
    source = agent(tmp_path / "a.db", *SOME)
    source.bind("s-1", "r-1", 0)
    source.bind("s-4", "r-4", 0)
    file = written(source, tmp_path / "out")
    halves: tuple[Callable[[str], bool], ...] = (below("r-3"), lambda rollout_id: rollout_id >= "r-3")
    for number, half in enumerate(halves):
        log = CallLog(tmp_path / f"{number}.db")
        loaded = calllog_files.load(log, [file], takes=[half])
        assert loaded.totals == {RolloutState.PENDING: 3}
        assert loaded.sessions == 1
        mine = [rollout_id for rollout_id in SOME if half(rollout_id)]
        for rollout_id in SOME:
            claim = log.claim(rollout_id, "sha", b'{"a": 1}', "c=1")
            assert claim.verdict is (Verdict.REPLAY if rollout_id in mine else Verdict.RUN)
            assert bool(log.records(rollout_id, "0")) is (rollout_id in mine)


def test_logs_of_two_agents_become_one_and_what_both_say_is_taken_from_the_first(tmp_path: Path) -> None:
    one = written(agent(tmp_path / "a.db", "r-0", "r-1"), tmp_path / "one")
    second = agent(tmp_path / "b.db", "r-1", "r-2")
    two = written(second, tmp_path / "two")
    log = CallLog(tmp_path / "new.db")
    loaded = calllog_files.load(log, [one, two], takes=[lambda _: True, lambda _: True])
    assert loaded.totals == {RolloutState.PENDING: 3}
    assert len(log.records("r-1", "0")) == 2


def noted(tmp_path: Path) -> CallLog:
    log = agent(tmp_path / "a.db")
    log.hold_elsewhere([("r-0", "sha", "a1"), ("r-1", "sha", "a2")])
    return log


def test_a_rollout_that_another_actor_has_is_told_by_its_input(tmp_path: Path) -> None:
    log = noted(tmp_path)
    assert log.held_elsewhere("r-0", "sha") == "a1"
    assert log.held_elsewhere("r-0", "of the next epoch") == ""
    assert log.held_elsewhere("r-9", "sha") == ""
    assert log.is_fresh(), "a note is no work: the restore may be repeated"


@pytest.mark.parametrize(
    "end", ["retired", "the next cut", "the restore is given up", "another restore", "it runs here"]
)
def test_the_note_ends(tmp_path: Path, end: str) -> None:
    log = noted(tmp_path)
    if end == "retired":
        log.retire([("r-0", 1_000_000_000)])
        assert log.held_elsewhere("r-1", "sha") == "a2"
    elif end == "the next cut":
        (tmp_path / "out").mkdir()
        GymFiles(tmp_path / "a.db", "agent").export(tmp_path / "out", AGENT)
    elif end == "the restore is given up":
        calllog_files.unload(log)
    elif end == "another restore":
        calllog_files.load(log, [written(agent(tmp_path / "b.db"), tmp_path / "out")])
    else:
        log.claim("r-0", "sha", b"", "")
        log.finish("r-0", 0, TEXT)
    assert log.held_elsewhere("r-0", "sha") == ""


def test_a_row_known_by_indices_goes_on_in_the_actor_that_its_rollout_was_brought_to(tmp_path: Path) -> None:
    """Gym counts indices in each actor, so that the row has another name where it is now."""
    source = agent(tmp_path / "a.db", "7-1@a0.simple_agent", "7-1@a1.simple_agent", "7-1@a0.other", "7-1", "17-1@a0.x")
    log = CallLog(tmp_path / "new.db")
    calllog_files.load(log, [written(source, tmp_path / "out")])
    here = "7-1@a2.simple_agent"
    assert log.moved_here(here, "another input", "simple_agent") == ""
    assert log.moved_here("7-2@a2.simple_agent", "sha", "simple_agent") == ""
    assert log.moved_here("7-1", "sha", "simple_agent") == "", "an id of the trainer's own means one rollout"
    for mine in ("7-1@a0.simple_agent", "7-1@a1.simple_agent"):  # rows that say the same: each goes on from one
        assert log.moved_here(here, "sha", "simple_agent") == mine
        assert log.claim(mine, "sha", b"", "").verdict is Verdict.REPLAY
    assert log.moved_here(here, "sha", "simple_agent") == ""
    log.claim("7-1@a2.other", "sha", b"", "")
    assert log.moved_here("7-1@a2.other", "sha", "other") == "", "it runs here already"


@pytest.mark.parametrize(("before", "after"), [("a0.agent", "agent"), ("agent", "a0.agent")])
def test_so_does_one_of_a_deployment_that_got_its_name_or_lost_it(tmp_path: Path, before: str, after: str) -> None:
    log = CallLog(tmp_path / "new.db")
    calllog_files.load(log, [written(agent(tmp_path / "a.db", f"7-1@{before}"), tmp_path / "out")])
    assert log.moved_here(f"7-1@{after}", "sha", "agent") == f"7-1@{before}"
