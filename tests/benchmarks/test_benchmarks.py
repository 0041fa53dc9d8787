"""The benchmarks' own rules: what they compare is the same work, and what they say follows from what they measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import lost, plots
from benchmarks.__main__ import SECTION_OF, SECTIONS, fallen_always
from benchmarks.fleets import work
from benchmarks.measure import Spread, free_share, in_turn, ratio, spread
from benchmarks.results import BARS, Curves, Results, worse_than

REQUIRED = {
    "switch_vs_http_peer_100", "control_vs_http_longpoll_1000", "limit_over_control_100", "gate_throughput",
    "gate_all_off_vs_cheapest", "gate_with_log_throughput", "drain_detection_vs_poll_200ms", "throughput_vs_disk", "pause_by_generation",
    "pause_by_sessions",
}  # fmt: skip


def test_every_fleet_drains_for_the_same_times() -> None:
    fleet = work.members(100)
    operation = work.operation_name("save-1", (0.5, 2.5))
    drains = [work.drain_s(operation, member.name, member.role) for member in fleet]
    assert drains == [work.drain_s(operation, member.name, member.role) for member in fleet]
    working = [drain for drain, member in zip(drains, fleet, strict=True) if member.role == work.RESOURCES]
    assert 0.5 <= min(working) < 0.7
    assert 2.3 < max(working) <= 2.5
    assert not any(drain for drain, member in zip(drains, fleet, strict=True) if member.role != work.RESOURCES)
    assert work.last_drain_s(operation, fleet) == max(drains)
    assert work.last_drain_s(work.operation_name("save-2", (0.0, 0.0)), fleet) == 0


def test_a_name_that_says_when_they_are_quiet_is_read_as_that_time() -> None:
    at = work.quiet_at(work.operation_name_at("detect-1", (100.0, 101.0)), "resources-3", work.RESOURCES, 50.0)
    assert 100.0 <= at <= 101.0
    assert work.quiet_at(work.operation_name("save-1", (1.0, 1.0)), "resources-3", work.RESOURCES, 50.0) == 51.0


def test_a_ratio_is_taken_run_by_run_and_contenders_take_turns() -> None:
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == Spread(2.0, 1.0, 3.0, 3)
    order: list[str] = []
    in_turn({name: lambda name=name: order.append(name) for name in "abc"}, 3)
    assert order == list("abcbcacab")


def test_the_json_has_each_ratio_with_median_spread_and_runs(tmp_path: Path) -> None:
    assert set(BARS) == REQUIRED
    results = Results({}, ratios={name: spread([1.0, 2.0, 4.0]) for name in BARS})
    results.write(tmp_path / "bench")
    read = json.loads((tmp_path / "bench.json").read_text())
    assert set(read["ratios"]) == REQUIRED
    assert read["ratios"]["gate_throughput"] == {"median": 2.0, "low": 1.0, "high": 4.0, "runs": 3}
    assert all(f"`{name}`" in (tmp_path / "bench" / "bench.md").read_text() for name in BARS)


def test_a_ratio_that_falls_by_more_than_a_third_is_told_whichever_way_is_better() -> None:
    def results(**ratios: float) -> Results:
        return Results({}, ratios={name: spread([value]) for name, value in ratios.items()})

    before = {"gate_throughput": {"median": 0.99}, "limit_over_control_100": {"median": 2.0}, "gone": {"median": 1.0}}
    assert worse_than(before, results(gate_throughput=0.67, limit_over_control_100=2.9, throughput_vs_disk=0.1)) == {}
    assert worse_than(before, results(gate_throughput=0.65, limit_over_control_100=3.1)) == {
        "limit_over_control_100": "limit_over_control_100 was 2 and is 3.1",
        "gate_throughput": "gate_throughput was 0.99 and is 0.65",
    }


@pytest.mark.parametrize(
    ("again", "fell", "measured"),
    [
        ([(0.9, 2.0)], [], [["control", "gate"]]),
        ([(0.5, 2.0), (0.9, 2.0)], [], [["control", "gate"], ["gate"]]),
        ([(0.5, 2.0), (0.4, 9.0)], ["gate_throughput was 0.99 and is 0.4"], [["control", "gate"], ["gate"]]),
    ],
)
def test_a_ratio_has_fallen_when_it_has_each_time_that_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, again: list[tuple[float, float]], fell: list[str], measured: list[list[str]]
) -> None:
    monkeypatch.setattr("benchmarks.__main__.free_share", lambda: 1.0)
    before = {"gate_throughput": {"median": 0.99}, "limit_over_control_100": {"median": 2.0}}
    results = Results({}, ratios={"gate_throughput": spread([0.1]), "limit_over_control_100": spread([9.0])})
    asked: list[list[str]] = []

    def measure(sections: Iterable[str]) -> None:
        asked.append(list(sections))
        gate, limit = again[len(asked) - 1]
        results.ratios |= {"gate_throughput": spread([gate]), "limit_over_control_100": spread([limit])}

    assert fallen_always(before, results, measure) == fell
    assert asked == measured


def test_the_section_of_every_ratio_is_known() -> None:
    assert all(SECTION_OF[name.partition("_")[0]] in SECTIONS for name in BARS)


def test_the_same_figures_give_the_same_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = [Curves("c", "title", "x", "y", {"a": [(1.0, 2.0, 1.0, 3.0), (10.0, 4.0, 3.0, 5.0)]})]
    (first,) = plots.draw(curves, tmp_path)
    before = first.read_bytes()
    plots.draw(curves, tmp_path)
    assert first.read_bytes() == before


def turn(begins: float, tokens: float) -> lost.Turn:
    generated = begins + tokens / lost.TOKENS_PER_S
    return lost.Turn(begins, generated, generated + 2.0, tokens)


def test_what_is_redone_is_what_no_snapshot_has() -> None:
    # Two turns of 10 s each; the snapshot at 11 s has the first, the second is half made when everything dies at 17 s.
    rollout = lost.Rollout(0, (turn(0.0, 500.0), turn(12.0, 500.0)))
    cost = lost.redone(lost.Job((rollout,)), killed_s=17.0, snapshot_s=11.0)
    assert cost["Safepoint"] == lost.Redone(250.0, 0)
    assert cost["finished groups only"] == cost["nothing"] == lost.Redone(750.0, 1)
    assert lost.redone(lost.Job((rollout,)), killed_s=30.0, snapshot_s=25.0)["finished groups only"] == lost.Redone(
        0.0, 0
    )


def test_a_generation_in_flight_at_the_snapshot_is_counted_against_safepoint_whole() -> None:
    rollout = lost.Rollout(0, (turn(0.0, 1000.0),))
    assert lost.redone(lost.Job((rollout,)), killed_s=15.0, snapshot_s=10.0)["Safepoint"].tokens == 750.0


def test_nothing_is_said_to_have_fallen_on_a_machine_with_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.free_share", lambda: 0.6)
    results = Results({}, ratios={"gate_throughput": spread([0.1])})
    asked: list[list[str]] = []
    assert fallen_always({"gate_throughput": {"median": 0.99}}, results, lambda names: asked.append(list(names))) == []
    assert asked == [], "nor is it measured again there"


def test_the_free_share_of_the_processors_is_a_share() -> None:
    assert 0.0 < free_share() <= 1.0
