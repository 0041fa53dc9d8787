"""How much is measured: everything, or what shows a regression in two minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes and runs of all sections."""

    together: tuple[int, ...]  # fleets of so many participants, side by side
    one_by_one: tuple[int, ...]  # and so many, one fleet after the other
    cuts: int
    large_cuts: int
    large_rounds: int
    switches: int
    requests_s: float  # seconds of load on a server at a time
    gate_runs: int
    drains: int
    state_mb: tuple[int, ...]
    state_runs: int
    sessions: tuple[int, ...]
    generations_s: tuple[float, ...]
    pauses: int
    rollouts: tuple[int, ...]
    kills: int
    relayed: tuple[tuple[int, int], ...]  # fleets of so many participants behind so many relays


FULL = Scale(
    together=(1, 10, 100), one_by_one=(1000, 3000), cuts=9, large_cuts=3, large_rounds=2, switches=5,
    requests_s=0.5, gate_runs=20, drains=200, state_mb=(16, 64), state_runs=3, sessions=(100, 1000, 10_000),
    generations_s=(0.2, 2.0, 20.0), pauses=3, rollouts=(10, 100, 300), kills=40,
    relayed=((250, 0), (250, 2), (500, 2), (500, 8), (1000, 0), (1000, 2)),
)  # fmt: skip
QUICK = Scale(
    together=(10, 100), one_by_one=(), cuts=5, large_cuts=0, large_rounds=0, switches=2,
    requests_s=0.4, gate_runs=6, drains=40, state_mb=(16,), state_runs=3, sessions=(100, 2000),
    generations_s=(0.2, 2.0), pauses=3, rollouts=(), kills=5, relayed=(),
)  # fmt: skip
