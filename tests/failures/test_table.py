"""The table of failures has every row, and names tests that exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.failures import render
from tests.failures.table import NUMBERS, ROWS
from tests.known_bugs.table import Row
from tests.known_bugs.test_table import TESTS, faults


def faults_here(row: Row) -> list[str]:
    """As of a row of known bugs; a scenario is a file that is there."""
    scenarios = [test for test in row.tests if test.endswith(".txt")]
    found = [f"{row.id} names {test}, which does not exist" for test in scenarios if not (TESTS / test).is_file()]
    functions = tuple(test for test in row.tests if test not in scenarios)
    if not functions and scenarios:
        return found
    return found + faults(replace(row, tests=functions))


def test_every_row_is_there_once() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) == len(set(ids))
    assert set(NUMBERS) <= set(ids)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_has_tests_that_exist_or_a_reason(row: Row) -> None:
    assert faults_here(row) == []


def test_a_row_that_lies_would_be_noticed() -> None:
    assert faults_here(Row("X", "s", "A rule.", ("protocol/scenarios/nobody_wrote.txt",)))
    assert faults_here(Row("X", "s", "A rule.", ("coordinator/test_save.py::test_nobody_wrote",)))
    assert faults_here(Row("X", "s", "A rule."))


def test_the_page_is_fresh() -> None:
    assert render.DOCUMENT.read_text(encoding="utf-8") == render.document(), "run `python -m tests.failures.render`"
