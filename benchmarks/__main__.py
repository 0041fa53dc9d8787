"""Run the benchmarks: `python -m benchmarks [--quick] [--only SECTION,...] [--out build/bench]`."""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from pathlib import Path
from typing import Final

from benchmarks import plots
from benchmarks.measure import machine
from benchmarks.results import Results, worse_than
from benchmarks.scale import FULL, QUICK

SECTIONS: Final = ("control", "relays", "detection", "gate", "throughput", "pauses", "lost")
QUICK_SECTIONS: Final = ("control", "detection", "gate", "pauses", "lost")


def main() -> None:
    """Exit code 1 when a section could not be measured, or a ratio fell."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes, without the large fleets")
    parser.add_argument("--only", default="", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder; OUT.json lies beside it")
    parser.add_argument("--against", type=Path, help="results of an earlier run: worse by more than a third fails")
    given = parser.parse_args()
    results = Results(machine(), "quick" if given.quick else "full")
    failed = False
    for name in given.only.split(",") if given.only else QUICK_SECTIONS if given.quick else SECTIONS:
        began = time.monotonic()
        print(f"{name}:", flush=True)
        try:
            importlib.import_module(f"benchmarks.{name}").run(QUICK if given.quick else FULL, results)
        except Exception as error:
            traceback.print_exc()
            results.not_measured[name] = f"{type(error).__name__}: {error}"[:300]
            failed = True
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
        results.write(given.out)
    plots.draw(results.curves, given.out)
    print()
    print(results.markdown())
    if given.against is not None:
        fallen = worse_than(json.loads(given.against.read_text())[results.scale]["ratios"], results)
        for line in fallen:
            print(f"fell: {line}")
        failed = failed or bool(fallen)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
