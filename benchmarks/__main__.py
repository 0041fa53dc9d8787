"""Run the benchmarks: `python -m benchmarks [--quick] [--only SECTION,...] [--out build/bench]`."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from benchmarks import plots
from benchmarks.measure import free_share, machine
from benchmarks.results import Results, worse_than
from benchmarks.scale import FULL, QUICK

SECTIONS: Final = ("control", "relays", "detection", "gate", "throughput", "pauses", "lost")
QUICK_SECTIONS: Final = ("control", "detection", "gate", "pauses", "lost")
# By the first word of a ratio: the section that measures it.
SECTION_OF: Final = {
    "switch": "control", "control": "control", "limit": "control", "drain": "detection", "gate": "gate",
    "throughput": "throughput", "pause": "pauses",
}  # fmt: skip
TRIES: Final = 3  # a machine that was busy for a moment has made nothing slower
QUIET: Final = 0.9  # of the processors; with less of them nothing is compared


def main() -> None:
    """Exit code 1 when a section could not be measured, or a ratio fell each time that it was measured."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes, without the large fleets")
    parser.add_argument("--only", default="", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder; OUT.json lies beside it")
    parser.add_argument(
        "--against", type=Path, help="results of an earlier run: worse by more than a third, three times, fails"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # fleets are ended as well, then
    results = Results(machine(), "quick" if given.quick else "full")

    def measure(sections: Iterable[str]) -> None:
        for name in sections:
            _measure(name, results)
            results.write(given.out)

    measure(given.only.split(",") if given.only else QUICK_SECTIONS if given.quick else SECTIONS)
    fallen: list[str] = []
    if given.against is not None:
        fallen = fallen_always(json.loads(given.against.read_text())[results.scale]["ratios"], results, measure)
    plots.draw(results.curves, given.out)
    print()
    print(results.markdown())
    for line in fallen:
        print(f"fell: {line}")
    raise SystemExit(1 if results.not_measured or fallen else 0)


def fallen_always(
    reference: Mapping[str, Mapping[str, float]], results: Results, measure: Callable[[Iterable[str]], None]
) -> list[str]:
    """What has become worse by more than a third, each time that its section was measured. Nothing on a machine that has
    other work: its share of the processors is looked at before each try (`free_share`)."""
    fallen = worse_than(reference, results)
    for _ in range(TRIES - 1):
        if not fallen:
            break
        if (share := free_share()) < QUIET:
            print(
                f"not compared: other work has {1 - share:.0%} of the processors; {'; '.join(fallen.values())}",
                flush=True,
            )
            return []
        print("again: " + "; ".join(fallen.values()), flush=True)
        measure(dict.fromkeys(SECTION_OF[name.partition("_")[0]] for name in fallen))
        still = worse_than(reference, results)
        fallen = {name: still[name] for name in fallen if name in still}
    return list(fallen.values())


def _measure(name: str, results: Results) -> None:
    began = time.monotonic()
    print(f"{name}:", flush=True)
    try:
        importlib.import_module(f"benchmarks.{name}").run(QUICK if results.scale == "quick" else FULL, results)
    except Exception as error:
        traceback.print_exc()
        results.not_measured[name] = f"{type(error).__name__}: {error}"[:300]
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
