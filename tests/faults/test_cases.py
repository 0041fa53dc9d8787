"""The fault matrix covers the table of failpoints, and every kind of process and fault."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from coordinator.wire import failpoints
from coordinator.wire.failpoint_names import COORDINATOR, ENGINE, GATE, PLACES, SHIM
from tests.faults import run
from tests.faults.cases import OUTSIDE, Case, all_cases, few_cases
from tests.faults.cut import generated, wrong_sessions
from tests.faults.engine_cases import ENGINE_CASES
from tests.faults.fleet import SERVERS
from tests.faults.rollouts import number_of

EVERY_CASE = [*all_cases(), *ENGINE_CASES]


def kind(case: Case) -> str:
    if case.process == "coordinator":
        return COORDINATOR
    if case.owner == "engine":
        return ENGINE
    return SHIM if case.process.endswith("/shim") else GATE


def test_a_name_that_no_case_has_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["run", "--only", "no such case", "--no-gym"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert "no case has 'no such case' in its name" in capsys.readouterr().err


def test_every_failpoint_is_in_the_matrix_with_a_kill() -> None:
    killed = {case.failpoint for case in EVERY_CASE if case.fault == "kill"}
    assert killed == set(PLACES)


def test_every_place_on_a_disk_is_in_it_with_both_errors() -> None:
    for error in ("error(EIO)", "error(ENOSPC)"):
        assert {c.failpoint for c in EVERY_CASE if c.fault == error} == {p.name for p in PLACES.values() if p.disk}


def test_every_kind_of_process_is_killed_and_stopped_and_hangs() -> None:
    for fault in ("kill", "stop", "delay"):
        assert {kind(c) for c in EVERY_CASE if c.fault.startswith(fault)} == {COORDINATOR, SHIM, GATE, ENGINE}, fault
    assert {c.fault for c in all_cases()} >= set(OUTSIDE)


def test_a_case_hits_the_process_that_reaches_its_place() -> None:
    for case in EVERY_CASE:
        if case.failpoint and PLACES[case.failpoint].process in (COORDINATOR, SHIM, GATE, ENGINE):
            assert kind(case) == PLACES[case.failpoint].process, case.name
        assert case.owner in ("coordinator", "engine", *SERVERS)
        assert case.failpoint or case.fault in OUTSIDE
        if case.failpoint:
            failpoints.parse(case.specification)


def test_the_commit_point_is_tried_from_both_sides() -> None:
    sides = Counter(case.published for case in all_cases())
    assert sides[True] >= 8
    assert sides[False] >= 8


def test_names_are_unique_and_no_shim_dies_twice_in_a_row() -> None:
    cases = all_cases()
    assert not [name for name, times in Counter(case.name for case in cases).items() if times > 1]
    near = [(a, b) for a, b in itertools.pairwise(cases) if a.process == b.process and "/" in a.process]
    assert not near


def test_the_share_of_every_test_run_is_part_of_the_matrix() -> None:
    names = {case.name for case in all_cases()}
    assert {case.name for case in few_cases()} <= names
    assert {kind(case) for case in few_cases()} == {COORDINATOR, SHIM, GATE}


def test_a_session_that_lacks_an_addition_or_has_one_twice_is_found() -> None:
    first, second, third = (number_of("r", turn) for turn in range(3))
    starts, after_two = {"r": 5}, 5 + first + second
    assert generated({"r": 5, "new": 0}) == {("r", 0), ("r", 1)}
    assert wrong_sessions({"r": 5}, starts, [1, after_two]) == []  # seed, and two turns
    assert wrong_sessions({"r": 6}, starts, [after_two + third]) == []  # its addition was executed, not answered
    assert wrong_sessions({"new": 0, "gone": 3}, starts, []) == []
    for sessions in ([], [5 + first], [after_two + third], [after_two + second]):
        assert len(wrong_sessions({"r": 5}, starts, sessions)) == 1, sessions
