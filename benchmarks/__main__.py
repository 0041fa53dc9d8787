"""Run the benchmarks: `python -m benchmarks [--quick] [--only SECTION,...] [--out build/bench]`."""

from __future__ import annotations

import argparse
import importlib
import time
import traceback
from pathlib import Path
from typing import Final

from benchmarks import plots
from benchmarks.measure import machine
from benchmarks.results import Results
from benchmarks.scale import FULL, QUICK

SECTIONS: Final = ("control", "detection", "gate", "throughput", "pauses", "lost")


def main() -> None:
    """Exit code 1 when a section could not be measured."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes, without the large fleets")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder; OUT.json lies beside it")
    given = parser.parse_args()
    results = Results(machine())
    failed = False
    for name in given.only.split(","):
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
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
