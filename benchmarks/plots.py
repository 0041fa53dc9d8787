"""Curves as SVG, with matplotlib where it is installed (`pip install 'safepoint[bench]'`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.results import Curves


def draw(curves: Iterable[Curves], out: Path) -> list[Path]:
    """One file for each; none without matplotlib. The same figures give the same bytes."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "safepoint"
    from matplotlib import pyplot

    drawn: list[Path] = []
    for each in curves:
        figure: Any
        axes: Any
        figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
        for label, points in each.lines.items():
            xs, medians, lows, highs = zip(*points, strict=True)
            axes.plot(xs, medians, marker="o", label=label)
            axes.fill_between(xs, lows, highs, alpha=0.15)
        if each.logarithmic:
            axes.set_xscale("log")
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(each.title)
        axes.set_xlabel(each.x)
        axes.set_ylabel(each.y)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
        figure.tight_layout()
        path = out / f"{each.name}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        drawn.append(path)
    return drawn
