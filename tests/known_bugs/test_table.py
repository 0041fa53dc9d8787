"""The table of known bugs has every row, and names tests that exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.known_bugs import render
from tests.known_bugs.table import IDS, ROWS, Row

TESTS = Path(__file__).resolve().parents[1]


@cache
def functions_of(file: str) -> frozenset[str]:
    """The test functions of a file, without importing it."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    )


def faults(row: Row) -> list[str]:
    """What is wrong with a row."""
    found = [f"{row.id} names {test}, which does not exist" for test in row.tests if not _exists(test)]
    if bool(row.tests) == bool(row.reason):
        found.append(f"{row.id} needs tests or a reason, and not both")
    if row.reason and len(row.reason) < 40:
        found.append(f"{row.id} gives no reason that one could check")
    if not row.rule.endswith(".") or not row.source:
        found.append(f"{row.id} has no rule in a sentence, or no source")
    return found


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in functions_of(file)


def test_every_row_is_there_once() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) == len(set(ids))
    assert set(IDS) <= set(ids)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_has_tests_that_exist_or_a_reason(row: Row) -> None:
    assert faults(row) == []


def test_a_row_that_lies_would_be_noticed() -> None:
    assert faults(Row("X", "s", "A rule.", ("coordinator/test_save.py::test_nobody_wrote",)))
    assert faults(Row("X", "s", "A rule.", ("no/such_file.py::test_x",)))
    assert faults(Row("X", "s", "A rule."))
    assert faults(Row("X", "s", "A rule.", (), "no reason"))


def test_the_page_is_fresh() -> None:
    assert render.DOCUMENT.read_text(encoding="utf-8") == render.document(), "run `python -m tests.known_bugs.render`"
