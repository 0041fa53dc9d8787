"""Each file in scenarios/ is one story with an exact end. `transcript` says how they are written and rewritten."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.protocol.transcript import Transcript

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
DASHES = "----"


def played(text: str) -> str:
    """The same file with what really comes out below each line of dashes."""
    transcript, out, waiting_for_blank = Transcript(), list[str](), False
    effects: list[str] = []
    for line in text.splitlines():
        if line == DASHES:
            out += [DASHES, *effects]
            effects, waiting_for_blank = [], True
        elif not line:
            waiting_for_blank = False
            out.append("")
        elif not waiting_for_blank:
            out.append(line)
            if not line.startswith("#"):
                effects += transcript.run(line)
    assert not effects, "the last commands have no line of dashes"
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_has_exactly_these_effects(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    actual = played(text)
    if os.environ.get("SAFEPOINT_REWRITE"):
        path.write_text(actual, encoding="utf-8")
    assert actual == text or os.environ.get("SAFEPOINT_REWRITE")


def test_there_are_scenarios_and_each_says_what_it_is_about() -> None:
    assert len(SCENARIOS) >= 20
    for path in SCENARIOS:
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# "), path.name
        assert first.endswith("."), path.name


def test_a_restore_that_stays_paused_is_never_told_as_one_that_has_ended_and_names_abort() -> None:
    told = [line for path in SCENARIOS for line in path.read_text(encoding="utf-8").splitlines()]
    told = [line for line in told if line.startswith("await failed-paused because ")]
    assert told
    for line in told:
        assert "because ABORTED" not in line
        assert re.search(r"(stays paused: Abort opens everybody|Nobody is paused .*: Abort goes on) without", line)


def test_a_changed_effect_is_noticed() -> None:
    text = SCENARIOS[0].read_text(encoding="utf-8")
    assert played(text.replace("call #1 ", "call #9 ")) != text.replace("call #1 ", "call #9 ")
