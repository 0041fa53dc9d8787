"""Field names of `--json` and of the demo's figures are what was promised (review finding 10: renamed metrics; J3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.known_bugs import golden


async def test_no_name_has_changed() -> None:
    promised, printed = golden.read(), await golden.printed()
    assert printed.keys() == promised.keys()
    for command, names in promised.items():
        gone = sorted(set(names) - set(printed[command]))
        new = sorted(set(printed[command]) - set(names))
        assert (gone, new) == ([], []), (
            f"{command} --json: these names are gone: {gone}; these are new: {new}. A name that is gone breaks scripts; "
            "for one that is new run `python -m tests.known_bugs.golden` and commit the file."
        )


def test_every_command_prints_some_names_and_deep_ones() -> None:
    promised = golden.read()
    assert {"pause_s", "snapshot.totals.parked", "line"} <= set(promised["save"])
    assert {"participants[].status.rollouts[].waiting_on", "operation.waiting_for"} <= set(promised["status"])
    assert {"findings[].next_step", "fingerprint"} <= set(promised["topology"])
    assert {"error.reason", "error.rollouts", "error.exit_code"} <= set(promised["a failure"])
    assert {"snapshots[].snapshot_id", "invalid"} <= set(promised["snapshots ls"])


def test_the_demo_that_was_run_last_has_the_names() -> None:
    file = Path(__file__).resolve().parents[2] / "build" / "demo.json"
    if not file.exists():
        pytest.skip("no demo was run in this checkout; the names are those of the code")
    assert sorted(json.loads(file.read_text())) == golden.read()["build/demo.json"]


def test_a_renamed_field_would_be_noticed() -> None:
    assert sorted(golden.names({"a": [{"b": 1}, {"c": {"d": 2}}], "metadata": {"mine": 1}})) == [
        "a", "a[].b", "a[].c", "a[].c.d", "metadata",
    ]  # fmt: skip
