"""`python -m tests.faults.run`: the fault matrix, as a table and as build/faults.json.

--lanes N       fleets beside each other (default 3)        --out FILE      where the JSON goes
--only TEXT     cases with TEXT in their name               --keep DIR      keep the fleets' logs there
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

from coordinator.wire.failpoint_names import PLACES
from tests.faults.cases import Case, all_cases
from tests.faults.engine_cases import ENGINE_CASES, run_engine
from tests.faults.fleet import LEASE_S
from tests.faults.gym_cases import run_gym
from tests.faults.lane import Lane
from tests.faults.matrix import run_lane
from tests.faults.result import Result, as_json

# For whoever reads nothing but the table: what each row has shown, and what its columns count.
PROMISE = f"""\
Each row breaks one thing while rollouts run on real processes: kill, stop or hang of a process, often at a named place of
its code (a failpoint), a disk or a link that fails. It is ok when, after that,

- every rollout that was in flight has its result (lost: 0), and no finished generation was made a second time;
- nobody stayed closed for longer than its owner lived and the lease after that, which is {LEASE_S:g} s here and 30 s by default;
- the last published snapshot verifies, and no file and no process is left over;
- the next save succeeds, with the fleet as it is by then.

What happened: how the operation ended, and whom it named; a full root or run directory is everybody's, and who met it first
is named. Thaw: seconds from the fault until the last gate was open again.
Restarted: rollouts that were dispatched a second time since their server had died; they continue or begin again, and are not lost.
"""


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    lines = [
        "| case | what happened | thaw s | restarted | lost | next save |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        verdict = "" if r.ok else f" **FAILED: {'; '.join(r.wrong)[:300]}**"
        lines.append(
            f"| {r.name} | {r.what_happened}{verdict} | {r.thaw_s:.2f} | {r.restarted} | {r.lost} | {r.next_save} |"
        )
    return "\n".join(lines)


def summary(results: list[Result], hit: set[str], seconds: float) -> str:
    """One line: what was done and what came of it."""
    failed = sum(not r.ok for r in results)
    thaw = max((r.thaw_s for r in results), default=0.0)
    return (
        f"{len(results)} cases, {len(hit)} of {len(PLACES)} failpoints hit, {failed} failed, "
        f"{sum(r.lost for r in results)} rollouts lost, longest thaw {thaw:.2f} s, in {seconds:.0f} s"
    )


def told(r: Result) -> None:
    """One line on standard error, as soon as it is known."""
    verdict = "ok" if r.ok else "FAILED"
    print(
        f"{verdict:6} {r.seconds:5.1f} s  thaw {r.thaw_s:4.2f}  {r.name}: {r.what_happened} {'; '.join(r.wrong)}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


async def run(cases: list[Case], lanes: int, keep: Path | None) -> tuple[list[Result], set[str]]:
    """All cases on so many fleets; results in the order of the cases, and the failpoints that did something."""
    queue, order = list(cases), {case.name: number for number, case in enumerate(cases)}
    if (us := asyncio.current_task()) is not None:  # whoever ends us: fleets are ended first
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, us.cancel)
    made = [Lane(number, keep) for number in range(lanes)]
    done = await asyncio.gather(*(run_lane(lane, queue, told) for lane in made))
    results = sorted((r for each in done for r in each), key=lambda r: order[r.name])
    return results, {name for lane in made for name in lane.hit}


def main() -> int:
    """Exit code 0 when every case is as it must be, and every failpoint was hit (unless --only)."""
    parser = argparse.ArgumentParser(prog="tests.faults.run")
    parser.add_argument("--lanes", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("build/faults.json"))
    parser.add_argument("--keep", type=Path, default=None)
    parser.add_argument("--no-gym", action="store_true")
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if arguments.only in case.name]
    of_engines = tuple(case for case in ENGINE_CASES if arguments.only in case.name)
    if not cases and not of_engines:
        parser.error(f"no case has {arguments.only!r} in its name")
    began = time.monotonic()
    results, hit = asyncio.run(run(cases, min(arguments.lanes, len(cases)), arguments.keep))
    if of_engines:
        more, hit_there = asyncio.run(run_engine(told, of_engines))
        results, hit = results + more, hit | hit_there
    if not arguments.no_gym and not arguments.only:
        results += asyncio.run(run_gym(told))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(as_json(len(PLACES), LEASE_S, results))
    print(PROMISE)
    print(table(results))
    print()
    print(summary(results, hit, time.monotonic() - began))
    complete = bool(arguments.only) or hit == set(PLACES)
    if not complete:
        print(f"never hit: {', '.join(sorted(set(PLACES) - hit))}")
    return 0 if complete and all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
