"""Runs seeds from the command line and writes what came of them.

    python -m tests.simulation.run --seeds 2000            seeds 1 to 2000, on all cores
    python -m tests.simulation.run --seed 281 --trace      one seed, with its story
    python -m tests.simulation.run --seed 281 --shrink     the smallest plan that still fails

The rule: a seed says everything. Whatever fails here fails again with the same seed, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from dataclasses import replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from tests.simulation import blame
from tests.simulation.faults import RELAYED, make
from tests.simulation.loop import SimLoop
from tests.simulation.shrink import kind_of, shrink
from tests.simulation.story import Result, play

OTHER_CLOCK_EVERY = 40
RELAYED_EVERY = 4
CHUNK, CHUNKS = 4, 12  # seeds that a process gets at once, and how often: then it ends, with 4 MB for each of them
SHRUNK = 3  # failing seeds of a batch, at some 20 s each


def usual(seed: int) -> tuple[str, ...]:
    """What a run of that seed is asked for beside chance: a share has relays between."""
    return (RELAYED,) if seed % RELAYED_EVERY == 0 else ()


def checked(seed: int, only: tuple[str, ...] = ()) -> Result:
    """A seed as every run judges it: some are run again on another wall clock, and must decide the same (I20)."""
    plan = make(seed, only)
    result = play(plan)
    if seed % OTHER_CLOCK_EVERY == 0 and not result.violations:
        later = replace(plan, wall_skew_s=plan.wall_skew_s + 86_400.0)
        other = play(later)
        if not _same(result, other):
            if _same(play(plan), result) and _same(play(later), other):
                result.violations.append(f"I20: another wall clock, other decisions: {_difference(result, other)}")
            else:  # it was not the clock: the run itself was not the same as before
                result.unsteady = _difference(result, other)
    return result


def _same(one: Result, other: Result) -> bool:
    return (one.decisions, one.fingerprint) == (other.decisions, other.fingerprint)


def _difference(result: Result, other: Result) -> str:
    pairs = zip(result.trace, other.trace, strict=False)
    return next((f"{a.strip()} | {b.strip()}" for a, b in pairs if a != b), "none in the story")


def _begin() -> None:
    warnings.simplefilter("ignore")
    gc.disable()  # a run collects for itself, but here the end of the process is cheaper
    SimLoop.collect_every = 0


def one(seed: int) -> dict[str, Any]:
    """Run a seed: what is counted of it."""
    plan, result = make(seed, usual(seed)), checked(seed, usual(seed))
    return {
        "seed": seed, "violations": result.violations, "kind": kind_of(result), "steps": result.steps,
        "virtual_s": result.virtual_s, "published": result.published, "restored": result.restored,
        "partial": result.partial, "unsteady": result.unsteady, "faults": Counter(event.kind for event in plan.faults),
    }  # fmt: skip


def blamed(pool: Pool, first: int, count: int) -> dict[str, Any]:
    """Runs with a single fault: how many operations failed, and how many of them for the reason that it was (L5)."""
    began, told, silent = time.monotonic(), Counter[str](), list[str]()
    for kind, answers in pool.imap_unordered(blame.asked, range(first, first + count), chunksize=CHUNK):
        told[kind] += len(answers)
        silent += [text for well, text in answers if not well]
    failed = told.total()
    named = failed - len(silent)
    return {
        "runs": count, "failed": failed, "named": named, "by_fault": dict(sorted(told.items())), "not_named": silent[:20],
        "ok": named >= blame.LEAST * failed, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def many(first: int, count: int, jobs: int, within_s: float = 0.0, singles: int = 0) -> dict[str, Any]:
    """Run seeds in processes of their own; at most `within_s` seconds when that is given. `singles`: see `blamed`.

    `seconds` are those of the seeds; runs with a single fault have their own.
    """
    done, faults = list[dict[str, Any]](), Counter[str]()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.simulation.story"])
    with context.Pool(jobs, _begin, maxtasksperchild=CHUNKS) as pool:
        blame_of_one_fault = blamed(pool, first, singles) if singles else {}
        began = time.monotonic()
        for found in pool.imap_unordered(one, range(first, first + count), chunksize=CHUNK):
            done.append(found)
            faults.update(found["faults"])
            if found["violations"]:
                print(f"seed {found['seed']}: {found['violations'][0]}", flush=True)
            if within_s and time.monotonic() - began > within_s:
                pool.terminate()
                break
    bad = sorted((d for d in done if d["violations"]), key=lambda d: d["seed"])
    return {
        "seeds": len(done),
        "first_seed": first,
        "violations": len(bad),
        "steps": sum(d["steps"] for d in done),
        "virtual_seconds": round(sum(d["virtual_s"] for d in done)),
        "seconds": round(time.monotonic() - began, 1),
        "faults": dict(sorted(faults.items())),
        "single_faults": blame_of_one_fault,
        "snapshots_published": sum(d["published"] for d in done),
        "jobs_restored": sum(d["restored"] for d in done),
        "published_without_a_member": sum(d["partial"] for d in done),
        "unsteady": [{"seed": d["seed"], "difference": d["unsteady"]} for d in done if d["unsteady"]],
        "failing": [{"seed": d["seed"], "violations": d["violations"][:5]} for d in bad[:50]],
    }


def show(result: Result, trace: bool) -> None:
    """A run, for people."""
    if trace:
        print("\n".join(result.trace))
    print(f"seed {result.seed}: {result.steps} steps, {result.virtual_s:.0f} s, {result.published} snapshots published")
    print("\n".join(f"VIOLATION {text}" for text in result.violations) or "no violation")


def main(arguments: list[str] | None = None) -> int:
    """The command. 1 when an invariant was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--singles", type=int, default=0, help="and so many runs with a single fault, which must be named"
    )
    parser.add_argument("--within", type=float, default=0.0, help="stop after so many seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", default="", help="kinds of faults with commas, as mutants ask for")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if asked.seed is not None:
        only = tuple(asked.only.split(",")) if asked.only else usual(asked.seed)
        plan, result = make(asked.seed, only), checked(asked.seed, only)
        if asked.shrink:
            plan, result = shrink(plan, print)
            print(*plan.events, sep="\n")
        show(result, asked.trace)
        return 1 if result.violations else 0
    report = many(asked.first, asked.seeds, asked.jobs, asked.within, asked.singles)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for failing in report["failing"][:SHRUNK]:
        seed = failing["seed"]
        print(f"\nSeed {seed}:  PYTHONPATH=.:gen python -m tests.simulation.run --seed {seed} --shrink --trace")
        plan, result = shrink(make(seed, usual(seed)))
        print("  enough for it:", *plan.events, sep="\n    ")
        print(*(f"  {text}" for text in result.violations or failing["violations"]), sep="\n")
    print(
        f"{report['seeds']} seeds, {report['steps']} steps, {report['virtual_seconds']} simulated seconds in "
        f"{report['seconds']} s: {report['violations']} violations"
    )
    singles = report["single_faults"]
    if singles:
        print(
            f"{singles['runs']} runs with a single fault in {singles['seconds']} s: {singles['named']} of "
            f"{singles['failed']} failures name it (L5)"
        )
        print(*singles["not_named"], sep="\n", end="")
    for each in report["unsteady"]:  # a fault of the simulation, not of what it runs; what it says cannot be relied on
        print(f"seed {each['seed']} was not the same run each time: {each['difference']}")
    return 1 if report["violations"] or report["unsteady"] or not singles.get("ok", True) else 0


if __name__ == "__main__":
    sys.exit(main())
