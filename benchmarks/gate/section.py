"""Measures the contenders in turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Final

from benchmarks.gate import servers
from benchmarks.gate.load import Served, closed_loop
from benchmarks.gate.servers import Server
from benchmarks.measure import in_turn, ratio, spread
from benchmarks.results import Results, Table
from benchmarks.scale import Scale

CONNECTIONS: Final = 8


def run(scale: Scale, results: Results) -> None:
    """Fills `gate_throughput`, `gate_all_off_vs_cheapest` and `gate_with_log_throughput`."""
    with servers.contenders() as (counters, agents):
        served, rollouts = _measure(counters, scale), _measure(agents, scale)
    results.ratios["gate_throughput"] = ratio(_per_s(served["gate"]), _per_s(served["bare"]))
    off, cheapest = served[servers.ALL_OFF], served[servers.CHEAPEST_NAME]
    results.ratios["gate_all_off_vs_cheapest"] = ratio(_per_s(off), _per_s(cheapest))
    results.ratios["gate_with_log_throughput"] = ratio(_per_s(rollouts["gate and call log"]), _per_s(rollouts["bare"]))
    _tell("A resources server (example_session_state_mgmt, one call)", served, results)
    _tell("An agent server (simple_agent, a rollout of 11 outbound calls)", rollouts, results)


def _measure(contenders: dict[str, Server], scale: Scale) -> dict[str, list[Served]]:
    def once(server: Server, seconds: float) -> Served:
        before = server.cpu_s()
        served = asyncio.run(closed_loop(server.port, server.make, CONNECTIONS, seconds))
        return replace(served, cpu_s=(server.cpu_s() - before) / served.requests)

    for server in contenders.values():
        once(server, scale.requests_s / 2)
    return in_turn(
        {name: partial(once, server, scale.requests_s) for name, server in contenders.items()}, scale.gate_runs
    )


def _per_s(served: list[Served]) -> list[float]:
    return [each.per_s for each in served]


def _tell(title: str, served: dict[str, list[Served]], results: Results) -> None:
    bare = served["bare"]
    rows: list[tuple[str, ...]] = []
    for name, found in served.items():
        cpu = [each.cpu_s for each in found]
        added = spread(a.p99_s - b.p99_s for a, b in zip(found, bare, strict=True)).scaled(1000)
        rows.append(
            (
                name, str(spread(_per_s(found))), str(ratio(_per_s(found), _per_s(bare))),
                str(spread(cpu).scaled(1000)), str(ratio([each.cpu_s for each in bare], cpu)),
                str(spread(each.p50_s for each in found).scaled(1000)),
                str(spread(each.p99_s for each in found).scaled(1000)), str(added),
            )
        )  # fmt: skip
        print(f"  {name}: {rows[-1][1]} /s, {rows[-1][2]} of bare, by CPU {rows[-1][4]}", flush=True)
    columns = (
        "what is loaded",
        "requests/s",
        "of bare",
        "server CPU, ms a request",
        "bare / it",
        "p50, ms",
        "p99, ms",
        "added to p99, ms",
    )
    results.tables.append(Table(title, columns, rows, f"{CONNECTIONS} connections, each with one request at a time."))
    results.figures[title] = {name: _per_s(found) for name, found in served.items()}
