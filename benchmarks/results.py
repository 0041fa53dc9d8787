"""What a benchmark has found, and how it is shown: JSON for machines, Markdown for people, curves for `plots`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Spread

TOLERATED: Final = 2 / 3  # what must be left of an earlier ratio
# What is to be reached: name -> (the bar, whether more is better, what it says).
BARS: Final[dict[str, tuple[float, bool, str]]] = {
    "switch_vs_http_peer_100": (3.0, True, "overhead of a whole switch, drains of 0.5 to 2.5 s: HTTP peer / Safepoint"),
    "control_vs_http_longpoll_1000": (1.3, True, "control time without drain: HTTP peer with long-poll / Safepoint"),
    "limit_over_control_100": (1.5, False, "control time: Safepoint / bare fan-out of the same phases"),
    "gate_throughput": (0.97, True, "requests/s of a real Gym server: with the gate / bare"),
    "gate_all_off_vs_cheapest": (0.97, True, "requests/s of a real Gym server: gate with everything off / a middleware that only passes on"),
    "gate_with_log_throughput": (0.90, True, "requests/s of a real Gym server: with gate and call log / bare"),
    "drain_detection_vs_poll_200ms": (10.0, True, "p99 until the end of a drain is known: polling at 200 ms / Safepoint"),
    "throughput_vs_disk": (0.7, True, "save and restore, MB/s, the slower of both: Safepoint / the slower of disk and digest"),
    "pause_by_generation": (1.5, False, "pause under hold: generations of 20 s / of 0.2 s"),
    "pause_by_sessions": (2.0, False, "pause: 10,000 live sessions / 100"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title; `note` says how to read them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curves:
    """One plot: named lines of (x, median, low, high)."""

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float, float, float]]]
    logarithmic: bool = True


@dataclass(slots=True)
class Results:
    """Filled by the sections."""

    machine: dict[str, object]
    scale: str = "full"
    ratios: dict[str, Spread] = field(default_factory=dict[str, Spread])
    tables: list[Table] = field(default_factory=list[Table])
    curves: list[Curves] = field(default_factory=list[Curves])
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    not_measured: dict[str, str] = field(default_factory=dict[str, str])

    def write(self, out: Path) -> None:
        """`bench.json` beside the folder `out`, and `out`/bench.md."""
        out.mkdir(parents=True, exist_ok=True)
        data = {
            "scale": self.scale,
            "ratios": {name: asdict(found) for name, found in self.ratios.items()},
            "machine": self.machine,
            "not_measured": self.not_measured,
            "figures": self.figures,
        }
        (out.parent / f"{out.name}.json").write_text(json.dumps(data, indent=1) + "\n")
        (out / "bench.md").write_text(self.markdown())

    def markdown(self) -> str:
        """All tables, the ratios first."""
        rows = [
            (f"`{name}`", f"{'at least' if more else 'at most'} {bar:g}", str(self.ratios[name]),
             str(self.ratios[name].runs), meaning)
            for name, (bar, more, meaning) in BARS.items()
            if name in self.ratios
        ]  # fmt: skip
        ratios = Table("Ratios", ("ratio", "bar", "median (low to high)", "runs", "what"), rows)
        parts = [_table(table) for table in (ratios, *self.tables) if table.rows]
        parts += [f"Not measured: {name}: {why}" for name, why in self.not_measured.items()]
        return "\n\n".join(parts) + "\n"


def worse_than(reference: Mapping[str, Mapping[str, float]], results: Results) -> dict[str, str]:
    """What has become worse by more than a third: name, and a sentence. Ratios of only one of both runs are not compared."""
    found: dict[str, str] = {}
    for name, (_, more_is_better, _) in BARS.items():
        if name not in results.ratios or name not in reference:
            continue
        before, now = reference[name]["median"], results.ratios[name].median
        left = now / before if more_is_better else before / now
        if left < TOLERATED:
            found[name] = f"{name} was {before:.3g} and is {now:.3g}"
    return found


def _table(table: Table) -> str:
    lines = [f"## {table.title}", "", "| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join([*lines, "", table.note] if table.note else lines)
