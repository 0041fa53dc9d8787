"""What a coordinator costs by participants and by relays, and what a fleet of 100,000 would need by those figures.

The rule: the model is straight lines through medians of the same run, and says so. One machine runs everything here, so the
time of a save is that of all its participants together; what scales is the CPU of the coordinator, which is a process's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.fleets import fleets
from benchmarks.fleets.fleets import OurFleet, Taken
from benchmarks.measure import ratio, spread
from benchmarks.results import Results, Table
from benchmarks.scale import Scale

IDLE_S: Final = 10.0
LARGE: Final = 100_000
PER_NODE: Final = 250


@dataclass(frozen=True, slots=True)
class Measured:
    """One fleet. `idle`: share of a processor that the coordinator uses between saves."""

    count: int
    relays: int
    cuts: list[Taken]
    idle: float

    @property
    def cpu_s(self) -> float:
        """The coordinator's, of a save."""
        return statistics.median(cut.cpu_s for cut in self.cuts)


def run(scale: Scale, results: Results) -> None:
    """Fills `coordinator_cpu_vs_relays`, of the largest fleet, and the model."""
    found = [_measured(count, relays, scale.large_cuts or scale.cuts) for count, relays in scale.relayed]
    rows: list[tuple[str, ...]] = []
    for one in found:
        ours = spread(cut.cpu_s for cut in one.cuts)
        theirs, shims = (spread(c.relays_cpu_s for c in one.cuts), spread(c.participants_cpu_s for c in one.cuts))
        elapsed = spread(cut.elapsed_s for cut in one.cuts)
        rows.append(
            (f"{one.count:,}", str(one.relays or "none"), str(ours.scaled(1000)), f"{one.cpu_s / one.count * 1000:.2f}",
             str(theirs.scaled(1000)), str(shims.scaled(1000)), str(elapsed.scaled(1000)), f"{one.idle:.1%}")
        )  # fmt: skip
    columns = (
        "participants", "relays", "coordinator CPU, ms", "for each participant, ms", "relays' CPU, ms",
        "participants' CPU, ms", "prepare to resume, ms", "coordinator, idle",
    )  # fmt: skip
    results.tables.append(
        Table("A coordinator behind relays, without draining", columns, rows, "All share one machine, relays too.")
    )
    results.figures["relays"] = [
        {"count": o.count, "relays": o.relays, "cpu_s": [c.cpu_s for c in o.cuts], "idle": o.idle,
         "relays_cpu_s": [c.relays_cpu_s for c in o.cuts], "elapsed_s": [c.elapsed_s for c in o.cuts]}
        for o in found
    ]  # fmt: skip
    largest = max(one.count for one in found)
    direct = [one for one in found if one.count == largest and not one.relays]
    behind = [one for one in found if one.count == largest and one.relays]
    if direct and behind:
        cpu = [[cut.cpu_s for cut in one.cuts] for one in (direct[0], behind[0])]
        results.ratios["coordinator_cpu_vs_relays"] = ratio(*cpu)
    _model(found, results)


def _measured(count: int, relays: int, cuts: int) -> Measured:
    with fleets.ours(count, relays) as fleet:
        fleet.cut()  # connections, and code that runs for the first time
        idle = _idle(fleet)
        measured = Measured(count, relays, [fleet.cut() for _ in range(cuts)], idle)
    print(f"  {count} participants, {relays} relays: {measured.cpu_s * 1000:.0f} ms of the coordinator", flush=True)
    return measured


def _idle(fleet: OurFleet) -> float:
    before = fleet.control.cpu_s()
    time.sleep(IDLE_S)
    return (fleet.control.cpu_s() - before) / IDLE_S


def _model(found: Sequence[Measured], results: Results) -> None:
    """Straight lines: by participants among those with as many relays, by relays among those with as many participants."""
    by_count = _line([(one.count, one.cpu_s) for one in found if one.relays == 2])
    counts = [one.count for one in found if one.relays]
    same = max(set(counts), key=counts.count, default=0)
    by_relays = _line([(one.relays, one.cpu_s) for one in found if one.relays and one.count == same])
    direct = _line([(one.count, one.cpu_s) for one in found if not one.relays])
    if by_count is None or by_relays is None or direct is None:
        return
    each, rest = by_count
    relay = max(0.0, by_relays[0])
    nodes = LARGE // PER_NODE
    through = rest + each * LARGE + relay * (nodes - 2)
    alone = direct[1] + direct[0] * LARGE
    rows = [
        ("one participant more, without relays", f"{direct[0] * 1000:.2f} ms"),
        ("one participant more, behind relays", f"{each * 1000:.2f} ms"),
        ("one relay more", f"{relay * 1000:.2f} ms"),
        (f"{LARGE:,} participants, without relays", f"{alone:.0f} s"),
        (f"{LARGE:,} participants behind {nodes} relays", f"{through:.0f} s"),
    ]
    note = f"Straight lines through the medians above. A node has {PER_NODE} participants."
    results.tables.append(Table("CPU of the coordinator for a save, by the model", ("what", "CPU"), rows, note))
    results.figures["relays_model"] = {"each_s": each, "relay_s": relay, "direct_each_s": direct[0]}


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Slope and intercept; None for less than two points."""
    if len({x for x, _ in points}) < 2:
        return None
    slope, intercept = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return slope, intercept
