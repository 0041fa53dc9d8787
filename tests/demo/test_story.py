"""The demo from end to end, small: real servers, a real Ray, everything killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coordinator.demo import story
from coordinator.wire.errors import Reason, SafepointError


@pytest.mark.gym
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rollouts_that_were_saved_while_they_ran_finish_after_kill_9_as_if_nothing_had_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = story._run(True, 8, 7, tmp_path)
    out, err = capsys.readouterr()
    assert out.count("\n") == 1, "with --json there is one line on standard output"
    figures = json.loads(out)
    assert code == 0, err
    assert json.loads((tmp_path / "demo.json").read_text()) == figures
    assert figures["equal_to_uninterrupted"] is True
    # How many are in flight is the machine's: the first to finish starts the save, others finish until it cuts.
    assert figures["in_flight_at_cut"] > 0
    assert figures["kept"] == figures["in_flight_at_cut"]
    assert {name: figures[name] for name in ("lost", "restarted", "finished_redone", "model_calls_repeated")} == {
        "lost": 0,
        "restarted": 0,
        "finished_redone": 0,
        "model_calls_repeated": 0,
    }
    assert 0 < figures["pause_s"] < 10
    assert figures["snapshot_bytes"] > 0
    # Of the servers' lives two were killed: a policy's second log proves that there was a second life.
    assert (tmp_path / "demo" / "interrupted" / "policy-2.jsonl").stat().st_size > 0


def test_a_missing_gym_environment_is_said_with_the_way_to_get_it_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAFEPOINT_GYM_PYTHON", os.fspath(tmp_path / "nowhere" / "python"))
    with pytest.raises(SafepointError) as caught:
        story._run(False, 2, 7, tmp_path)
    assert caught.value.reason is Reason.UNAVAILABLE
    assert "make setup-gym" in str(caught.value)
    assert "did not get through" in capsys.readouterr().out
