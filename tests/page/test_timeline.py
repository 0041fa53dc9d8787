"""What is drawn of an operation follows from its events, and nothing is made up where they are missing."""

from __future__ import annotations

from typing import Any

import pytest
from safepoint.v1 import errors_pb2

from coordinator.history_record import Record
from coordinator.page.timeline import MAX_LANES, MAX_POINTS, document, summary
from coordinator.wire.terms import Phase
from tests.page.records import a_save, called, done, failed, finished, moved, record, started


def lane(drawn: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in drawn["lanes"] if each["participant_id"] == name]
    return dict(found)


def spans(bars: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(bar["phase"], bar["from_s"], bar["to_s"], bar["done"]) for bar in bars]


def test_phases_and_lanes_are_bars_from_begin_to_proof() -> None:
    drawn = document(a_save())
    assert spans(drawn["phases"]) == [
        ("discover", 0.0, 0.01, True), ("prepare", 0.02, 0.46, True), ("commit", 0.46, 0.7, True),
        ("publish", 0.7, 0.75, True), ("resume", 0.75, 0.8, True),
    ]  # fmt: skip
    assert drawn["phases"][1]["budget_s"] == 60
    assert drawn["phases"][2]["budget_s"] is None
    assert spans(lane(drawn, "model")["bars"]) == [("prepare", 0.02, 0.42, True)]
    assert spans(lane(drawn, "box")["bars"]) == [("prepare", 0.44, 0.46, True), ("commit", 0.5, 0.7, True)]


def test_of_a_large_fleet_who_is_called_and_who_is_done_together_has_each_a_bar() -> None:
    drawn = document(
        record(
            started(0.0, Phase.PREPARE, "a", "b"), called(0.1, Phase.PREPARE, "a", "b"), done(0.3, Phase.PREPARE, "a", "b")
        )
    )  # fmt: skip
    for name in ("a", "b"):
        assert spans(lane(drawn, name)["bars"]) == [("prepare", 0.1, 0.3, True)]


def test_lanes_stand_in_the_order_in_which_admission_closes() -> None:
    assert [each["participant_id"] for each in document(a_save())["lanes"]] == ["model", "agent", "box"]


def test_counts_are_points_and_the_last_word_of_a_phase_has_none() -> None:
    points = lane(document(a_save()), "model")["points"]
    assert [(p["at_s"], p["in_flight"], p["parked"]) for p in points] == [(0.05, 8, 2), (0.2, 3, 4)]


def test_the_pause_ends_when_everybody_is_open_and_is_as_long_as_the_gates_say() -> None:
    drawn = document(a_save())
    assert drawn["pause"] == {"from_s": pytest.approx(0.02), "to_s": 0.8}
    assert drawn["pause_s"] == pytest.approx(0.78)
    assert drawn["coverage"] == pytest.approx(62 / 64)
    assert drawn["size_bytes"] == 41_000_000


def test_what_did_not_end_is_closed_without_proof_by_the_next_phase() -> None:
    drawn = document(record(
        started(0, Phase.PREPARE, "model", "box"), called(0, Phase.PREPARE, "model"), done(0.1, Phase.PREPARE, "model"),
        called(0.1, Phase.PREPARE, "box"), moved(0.2, Phase.PREPARE, "box", in_flight=3),
        started(2.0, Phase.ABORT, "model", "box"), finished(2.1, Phase.ABORT),
        failed(2.1, errors_pb2.REASON_DRAIN_INCOMPLETE, "3 requests have not ended.", "box"),
        outcome="aborted", elapsed_s=2.1,
    ))  # fmt: skip
    assert spans(drawn["phases"]) == [("prepare", 0, 2.0, False), ("abort", 2.0, 2.1, True)]
    assert spans(lane(drawn, "box")["bars"]) == [("prepare", 0.1, 2.0, False)]
    why = drawn["failure"]
    assert (why["reason"], why["participant_id"], why["phase"], why["waited_s"]) == (
        "DRAIN_INCOMPLETE", "box", "prepare", 2.5,
    )  # fmt: skip
    assert why["rollouts"][0].startswith("r-1")
    assert why["rollout_count"] == 9
    assert why["secondary"][0]["message"] == "also"
    assert drawn["cause"] == "DRAIN_INCOMPLETE at box"


def test_what_runs_has_an_open_end() -> None:
    drawn = document(record(started(0, Phase.PREPARE, "model"), called(0, Phase.PREPARE, "model"), outcome=""))
    assert spans(drawn["phases"]) == [("prepare", 0, None, False)]
    assert spans(lane(drawn, "model")["bars"]) == [("prepare", 0, None, False)]
    assert drawn["pause"] is None


def test_who_was_only_heard_of_has_a_lane_all_the_same() -> None:
    drawn = document(record(moved(0.5, Phase.PREPARE, "stranger", in_flight=1), participants=()))
    assert spans(lane(drawn, "stranger")["bars"]) == [("prepare", 0.5, None, False)]
    assert lane(drawn, "stranger")["role"] == ""


def test_a_phase_that_this_version_does_not_know_is_drawn() -> None:
    drawn = document(record(started(0, 99, "model"), called(0, 99, "model")))  # type: ignore[arg-type]
    assert drawn["phases"][0]["phase"] == "coordinator"


def test_many_points_are_thinned_and_keep_their_ends() -> None:
    events = [moved(number / 1000, Phase.PREPARE, "model", in_flight=number) for number in range(5000)]
    points = lane(document(record(*events)), "model")["points"]
    assert len(points) == MAX_POINTS
    assert (points[0]["in_flight"], points[-1]["in_flight"]) == (0, 4999)


def test_a_record_of_which_only_the_first_line_is_left_is_shown() -> None:
    bare = Record("op-1", "restore", "step-1", 1.7e9)
    assert summary(bare)["outcome"] == ""
    drawn = document(bare)
    assert (drawn["phases"], drawn["lanes"], drawn["failure"], drawn["pause_s"]) == ([], [], None, None)
    assert drawn["lease_s"] is None, "unknown, and not none at all"


def test_of_a_large_fleet_the_slowest_are_drawn_and_those_to_blame() -> None:
    names = [f"agent-{number:04d}" for number in range(500)]
    events = [called(0, Phase.PREPARE, name) for name in names]
    events += [done(number / 1000, Phase.PREPARE, name) for number, name in enumerate(names)]
    events.append(failed(0.6, errors_pb2.REASON_DECLINED, "no", "agent-0003"))
    drawn = document(record(*events, participants=(), outcome="aborted"))
    shown = [each["participant_id"] for each in drawn["lanes"]]
    assert drawn["lane_count"] == 500
    assert len(shown) == MAX_LANES
    assert "agent-0003" in shown
    assert shown[1:] == names[-MAX_LANES + 1 :]
