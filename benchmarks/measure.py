"""Numbers of several runs, and what they say together.

The rule: what is compared is measured in the same run, in turn, and a figure is the median of its runs with the lowest and
the highest beside it. A ratio is taken run by run, so that a machine that grows slower meanwhile slows both sides.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some runs, the lowest, the highest, and how many there were."""

    median: float
    low: float
    high: float
    runs: int

    def scaled(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.runs)

    def __str__(self) -> str:
        return f"{figure(self.median)} ({figure(self.low)} to {figure(self.high)})"


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value. Raises ValueError for none."""
    given = sorted(values)
    if not given:
        raise ValueError("nothing was measured")
    return Spread(statistics.median(given), given[0], given[-1], len(given))


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Run by run. Raises ValueError when the runs are not pairs."""
    return spread(a / b for a, b in zip(above, below, strict=True))


def in_turn(contenders: Mapping[str, Callable[[], ResultT]], runs: int, order: int = 0) -> dict[str, list[ResultT]]:
    """Run all of them `runs` times, each time beginning with another one."""
    names = list(contenders)
    out: dict[str, list[ResultT]] = {name: [] for name in names}
    for run in range(order, order + runs):
        shift = run % len(names)
        for name in names[shift:] + names[:shift]:
            out[name].append(contenders[name]())
    return out


_SPIN: Final = (
    "import time; wall, cpu = time.perf_counter(), time.process_time()\n"
    "while time.perf_counter() - wall < 0.5: pass\n"
    "print((time.process_time() - cpu) / (time.perf_counter() - wall))"
)


def free_share() -> float:
    """Which share of its processors this machine gives us now, 0 to 1: other work on it has the rest. Takes half a second."""
    count = len(os.sched_getaffinity(0))
    command = [sys.executable, "-I", "-S", "-c", _SPIN]
    spinning = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return min(1.0, sum(float(each.communicate()[0]) for each in spinning) / count)


def figure(value: float) -> str:
    """Three digits, as people read them."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def machine() -> dict[str, object]:
    """Where it was measured."""
    load = os.getloadavg()[0]
    return {
        "python": platform.python_version(), "system": platform.system(), "cores": os.cpu_count(),
        "load_at_start": round(load, 2),
    }  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; the nearest one that was measured."""
    given = sorted(values)
    return given[min(len(given) - 1, int(share * len(given)))]
