"""The demo's figures: everything that breaks the promise shows in one of them, and spoils the verdict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.demo.compare import Generations
from coordinator.demo.conversation import conversation_digest
from coordinator.demo.evidence import read_log, recorded_calls
from coordinator.demo.figures import Figures, Records, measure

# Three rollouts: `done` had finished at the cut, `half` had one of two calls recorded, `new` none of its one. One call of
# `half` and the one of `new` ended after the cut and died with the kill.
GOOD = Records(
    rollouts=["done", "half", "new"],
    in_flight=2,
    restarted=frozenset(),
    finished=frozenset({"done"}),
    recorded=frozenset({"d1", "h1"}),
    conversations={"done": {"d1"}, "half": {"h1", "h2"}, "new": {"n1"}},
    before_kill=Generations({"d1": 1, "h1": 1, "h2": 1, "n1": 1}, {"d1": 1, "h1": 1, "h2": 1}),
    after_kill=Generations({"h2": 1, "n1": 1}, {"h2": 1, "n1": 1}),
)


def figures(**changes: Any) -> Figures:
    equal = changes.pop("equal", True)
    return measure(dataclasses.replace(GOOD, **changes), 0.25, 1000, equal)


def test_a_run_that_kept_the_promise_is_good_and_calls_after_the_cut_are_counted_apart() -> None:
    assert figures() == Figures(3, 2, 2, 0, 0, 0, 0, 1, 0.25, 1000, True)
    assert figures().good


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"after_kill": Generations({"h1": 2, "h2": 1, "n1": 1}, {})}, "model_calls_repeated", 2),
        ({"after_kill": Generations({"d1": 1, "h2": 1, "n1": 1}, {})}, "finished_redone", 1),
        ({"conversations": {"done": {"d1"}, "half": {"h1", "h2"}}}, "lost", 1),
        ({"equal": False}, "equal_to_uninterrupted", False),
    ],
)
def test_each_broken_promise_shows_in_its_figure_and_spoils_the_verdict(
    changes: dict[str, Any], name: str, value: object
) -> None:
    assert getattr(figures(**changes), name) == value
    assert not figures(**changes).good


def test_a_rollout_that_the_cut_excluded_is_counted_as_restarted_and_not_as_kept() -> None:
    restarted = figures(restarted=frozenset({"half"}))
    assert (restarted.kept, restarted.restarted, restarted.good) == (1, 1, True)


def test_recorded_calls_are_found_in_any_json_lines_file_of_a_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "s-1" / "agent"
    folder.mkdir(parents=True)
    body = json.dumps({"output": [{"type": "message", "prompt_token_ids": [256, 1, 257]}]})
    (folder / "calls.jsonl").write_text(json.dumps({"t": "call", "body": body}) + "\n" + json.dumps({"t": "x"}) + "\n")
    assert recorded_calls(tmp_path, "s-1", 7) == {conversation_digest(7, [256, 1, 257])}
    assert recorded_calls(tmp_path, "s-1", 8) != recorded_calls(tmp_path, "s-1", 7)


def test_a_policy_that_never_came_up_has_generated_nothing(tmp_path: Path) -> None:
    assert read_log(tmp_path / "no-such.jsonl") == Generations()
