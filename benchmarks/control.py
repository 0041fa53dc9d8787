"""What a cut costs beside the draining: Safepoint, the HTTP peer, and the bare fan-out of the same phases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

from benchmarks.fleets import fleets
from benchmarks.fleets.fleets import AskedFleet, Taken
from benchmarks.measure import in_turn, ratio, spread
from benchmarks.results import Curves, Results, Table
from benchmarks.scale import Scale

DRAINS_S: Final = (0.5, 2.5)
ROUNDS_UP_TO: Final = 1000  # larger fleets are started once: that takes longer than the cuts
KINDS: Final[dict[str, Callable[[int], AbstractContextManager[Any]]]] = {
    "Safepoint": fleets.ours,
    "HTTP long-poll": fleets.peer,
    "bare": fleets.bare,
}


def run(scale: Scale, results: Results) -> None:
    """Fills `switch_vs_http_peer_100`, `control_vs_http_longpoll_1000`, `limit_over_control_100`."""
    taken: dict[int, dict[str, list[Taken]]] = {}
    for count in scale.together:
        taken[count] = _side_by_side(count, scale, results)
        print(f"  {count} participants: {_line(taken[count])}", flush=True)
    for count in scale.one_by_one:
        taken[count] = _one_by_one(count, scale)
        print(f"  {count} participants: {_line(taken[count])}", flush=True)
    _tell(taken, results)


def _side_by_side(count: int, scale: Scale, results: Results) -> dict[str, list[Taken]]:
    with ExitStack() as stack:
        running = {name: stack.enter_context(start(count)) for name, start in KINDS.items()}
        for fleet in running.values():
            fleet.cut()  # connections, and code that runs for the first time
        taken = in_turn({name: fleet.cut for name, fleet in running.items()}, scale.cuts)
        if count == 100:
            _switches(running["Safepoint"], running["HTTP long-poll"], scale, results)
        return taken


def _switches(ours: Any, peer: AskedFleet, scale: Scale, results: Results) -> None:
    def upstream(waits: str) -> Taken:
        peer.waits = waits
        return peer.cut(DRAINS_S)

    taken = in_turn(
        {
            "Safepoint": partial(ours.cut, DRAINS_S),
            "HTTP, readiness polls of 1 s": partial(upstream, "upstream"),
            "HTTP, retries of 0.1 s": partial(upstream, "retries"),
            "HTTP long-poll": partial(upstream, "longpoll"),
        },
        scale.switches,
    )
    peer.waits = "longpoll"
    over = {name: [each.overhead_s for each in cuts] for name, cuts in taken.items()}
    results.ratios["switch_vs_http_peer_100"] = ratio(over["HTTP, readiness polls of 1 s"], over["Safepoint"])
    results.figures["switch_overhead_s_100"] = over
    rows = [
        (name, str(spread(values).scaled(1000)), str(ratio(values, over["Safepoint"]))) for name, values in over.items()
    ]
    results.tables.append(
        Table(
            "A whole switch, 100 participants, drains of 0.5 to 2.5 s",
            ("who", "overhead over the last drain, ms", "against Safepoint"),
            rows,
            "From prepare to resume, less the longest drain. Resources servers drain; the agent and model stages are quiet.",
        )
    )


def _one_by_one(count: int, scale: Scale) -> dict[str, list[Taken]]:
    """Fleets that would disturb each other even when they are idle."""
    taken: dict[str, list[Taken]] = {name: [] for name in KINDS}
    for turn in range(scale.large_rounds if count <= ROUNDS_UP_TO else 1):
        for name in list(KINDS) if turn % 2 == 0 else reversed(list(KINDS)):
            with KINDS[name](count) as fleet:
                fleet.cut()
                taken[name] += [fleet.cut() for _ in range(scale.large_cuts)]
    return taken


def _tell(taken: dict[int, dict[str, list[Taken]]], results: Results) -> None:
    rows: list[tuple[str, ...]] = []
    lines: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in KINDS}
    for count, kinds in taken.items():
        seconds = {name: [each.elapsed_s for each in cuts] for name, cuts in kinds.items()}
        against_peer = ratio(seconds["HTTP long-poll"], seconds["Safepoint"])
        over_limit = ratio(seconds["Safepoint"], seconds["bare"])
        for name, cuts in kinds.items():
            found = spread(seconds[name])
            cpu, theirs = spread(c.cpu_s for c in cuts), spread(c.participants_cpu_s for c in cuts)
            rows.append((f"{count:,}", name, str(found.scaled(1000)), str(cpu.scaled(1000)), str(theirs.scaled(1000))))
            lines[name].append((count, found.median, found.low, found.high))
        rows.append((f"{count:,}", "peer / Safepoint", str(against_peer), "", ""))
        rows.append((f"{count:,}", "Safepoint / bare", str(over_limit), "", ""))
        results.figures[f"control_{count}"] = {
            name: {"elapsed_s": seconds[name], "cpu_s": [c.cpu_s for c in cuts]} for name, cuts in kinds.items()
        }
        if count == 1000:
            results.ratios["control_vs_http_longpoll_1000"] = against_peer
        if count == 100:
            results.ratios["limit_over_control_100"] = over_limit
    note = (
        "Nobody drains. CPU is that of the coordinator, or of the peer's control, and of all participants together, which "
        "share the machine with it. `bare`: four unary calls for each participant in the same order, without logic, journal "
        "or snapshot."
    )
    columns = ("participants", "who", "prepare to resume, ms", "coordinator CPU, ms", "participants' CPU, ms")
    results.tables.append(Table("Control time without draining", columns, rows, note))
    results.curves.append(
        Curves("participants", "Control time by participants", "participants", "prepare to resume, s", lines)
    )


def _line(kinds: dict[str, list[Taken]]) -> str:
    return ", ".join(f"{name} {spread(c.elapsed_s for c in cuts).scaled(1000)} ms" for name, cuts in kinds.items())
