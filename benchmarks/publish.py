"""Make a run the one that the README shows and that later runs are compared with.

    python -m benchmarks.publish build/bench          the run of `make bench`, or build/bench-quick

Writes benchmarks/reference.json and docs/figures/bench-*.svg; `python -m tests.docs.render_tables` then renders the README.
Only runs on a machine that did nothing else.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]
REFERENCE: Final = REPOSITORY / "benchmarks" / "reference.json"
FIGURES: Final = REPOSITORY / "docs" / "figures"


def publish(out: Path) -> None:
    """Take over the run whose folder is `out`. What it did not measure stays as it was."""
    run: dict[str, Any] = json.loads((out.parent / f"{out.name}.json").read_text())
    reference: dict[str, Any] = json.loads(REFERENCE.read_text())
    before = reference[run["scale"]]
    reference[run["scale"]] = {"machine": run["machine"], "ratios": before["ratios"] | run["ratios"]}
    REFERENCE.write_text(json.dumps(reference, indent=1, sort_keys=True) + "\n")
    if run["scale"] == "full":
        for plot in sorted(out.glob("*.svg")):
            shutil.copy(plot, FIGURES / f"bench-{plot.name}")


if __name__ == "__main__":
    publish(Path(sys.argv[1]))
