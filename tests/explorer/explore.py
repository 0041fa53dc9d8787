"""Explores the small model: every state that the real core can be led into within the bounds, none left out.

The rule: breadth first, each distinct state once, all steps of it. So a counterexample is as short as any, and a run that
ends without one has seen everything within the bounds that it prints. What is checked, by the name in the list of
invariants: I1 agreement, I2 what a publish needs, I3 unbroken freeze, I5 no half restore, I6 fencing, I7 one writer, I8
tombstones, I9 repeats, I14 one at a time, I15 abort before publish, I17 membership, I18 order, L5 blame; and L1 and L2:
from every state the world comes to rest, with everybody open and every operation decided, without a further fault
(and without a lease, unless somebody crashed or every repeat was lost).

    python -m tests.explorer.explore                                 the bounds of `make explore`
    python -m tests.explorer.explore --program save,save --losses 2  one program, larger bounds
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.explorer.model import Model
from tests.explorer.tell import tell
from tests.explorer.violation import Violation
from tests.explorer.world import BEGIN, LAPSE, Budget, State, Step

UNKNOWN = -1
TELL_EVERY = 1_000_000  # states
TOLD = 3  # how often a participant is told to open within its lease, with the times of `core`


@dataclass
class Bounds:
    """What is explored: the operations one after the other, and what may go wrong."""

    program: tuple[str, ...]
    losses: int = 1
    crashes: int = 1
    aborts: int = 0
    lapses: int = 1
    split: bool = False

    def __str__(self) -> str:
        faults = (
            f"{self.losses} losses or repeats, {self.crashes} crash, {self.lapses} renewed leases that lapse, "
            f"{self.aborts} abort by a person"
        )
        return f"{' then '.join(self.program)}; {faults}{'; two coordinators at once' if self.split else ''}"


DEFAULT = (
    Bounds(("save",), losses=2, crashes=1, lapses=0),  # the longest first
    Bounds(("save",), losses=3, crashes=0, lapses=0),
    Bounds(("save",), losses=1, crashes=0, aborts=1),
    Bounds(("driven",), losses=1, crashes=0, aborts=1, lapses=0),
    Bounds(("save",), losses=0, crashes=1, lapses=0, split=True),
    Bounds(("restore",), losses=0, crashes=1, lapses=0, split=True),
    Bounds(("save", "save"), losses=2, crashes=0, lapses=0),
    Bounds(("restore", "save"), losses=2, crashes=0, lapses=0),
    Bounds(("save", "save"), losses=0, crashes=1, lapses=0),
    Bounds(("save", "save"), losses=0, crashes=0, aborts=1),
    Bounds(("restore", "save"), losses=0, crashes=0, lapses=1, aborts=1),
)
# What the default leaves out, up to two operations, three losses and a crash in one model; smaller ones first. Measured, with
# the model compiled as `make explore EXPLORE=full` does it: the last one is 77,301,828 states (97 minutes of a processor,
# 14.6 GB), the one before it 6,963,243 (8 minutes, 2 GB), the others at most 5,601,630 (5 minutes, 1.6 GB). Each further loss
# takes some 5 to 15 times as many.
FULL = (
    Bounds(("restore", "save"), losses=0, crashes=1, lapses=0),
    Bounds(("restore",), losses=2, crashes=1, lapses=0),
    Bounds(("save", "save"), losses=1, crashes=1, lapses=0),
    Bounds(("save",), losses=1, crashes=1, split=True),
    Bounds(("save",), losses=3, crashes=1, lapses=0),
    Bounds(("restore", "save"), losses=1, crashes=1, lapses=0),
    Bounds(("save", "save"), losses=2, crashes=1, lapses=0),
    Bounds(("save", "save"), losses=3, crashes=1, lapses=0),
)


@dataclass
class Result:
    """What an exploration saw. `violation` is empty when every rule held; then `trace` is too."""

    bounds: Bounds
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    peak_mb: int = 0  # the most memory that the process has had
    whole: bool = False  # whether everything within the bounds was seen
    by_lease: int = (
        0  # states whose calm way out needs a lease to lapse: only a crash may lead there, or as many losses as repeats
    )
    violation: str = ""
    trace: list[str] = field(default_factory=list[str])


class Explorer:
    """One exploration.

    A state that was seen is some 30 bytes of numbers, and the key of a dictionary: exact, and no digest that could be that
    of two states. Only what is still to be expanded, two depths, is kept apart; a trace finds the others by their place.
    """

    def __init__(self, bounds: Bounds, *, plain: bool = False) -> None:
        """`plain`: without the reductions of keys and of what is over."""
        self.bounds = bounds
        budget = Budget(bounds.losses, bounds.crashes, bounds.aborts, bounds.lapses)
        self.model = Model(bounds.program, budget, split=bounds.split, plain=plain)
        first = self.model.packed(self.model.first)
        self._numbers: dict[bytes, int] = {first: 0}  # in the order in which they were found
        self._depth = [first]  # what is expanded now
        self._next: list[bytes] = []
        self._parents = array("i", [UNKNOWN])
        self._left_to_lease = UNKNOWN  # the first state that needs one
        self._calm = array("i", [UNKNOWN])  # the next state of a world without further faults; itself when at rest
        self._by_lapse = bytearray(1)  # whether the step there is a lapse, since nothing else is left to happen

    def run(self, within_s: float = float("inf"), most: int = sys.maxsize) -> Result:
        """Explore, then see that every state leads to rest. Stops early at a violation and at the limits."""
        began, result = time.process_time(), Result(self.bounds)
        place = 0
        try:
            while self._depth and time.process_time() - began <= within_s and len(self._numbers) <= most:
                for packed in self._depth:
                    result.transitions += self._expand(place, packed)
                    place += 1
                    if not place % TELL_EVERY:
                        self._tell(place, time.process_time() - began)
                    if len(self._numbers) > most:
                        break
                self._depth, self._next = self._next, []
                result.depth += bool(self._depth)
            result.whole = place == len(self._numbers)
            if result.whole:
                result.by_lease = self._lead_to_rest()
                if result.by_lease and not self.bounds.crashes and self.bounds.losses < TOLD:
                    raise Violation(
                        "L1", f"{result.by_lease} states lead to rest by a lease, though nobody had crashed"
                    )
        except Violation as violation:
            result.violation = str(violation)
            at = self._left_to_lease if result.by_lease else place
            result.trace = [*self._trace(at), f"!! {violation}"]
        except Stuck as stuck:
            result.violation = str(stuck)
            result.trace = [*self._trace(stuck.place), f"!! {stuck}"]
        result.states, result.seconds = len(self._numbers), round(time.process_time() - began, 1)
        result.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return result

    def _tell(self, place: int, seconds: float) -> None:
        """How far a long one is, on stderr. What is left to expand says when it ends: it grows, and then it shrinks."""
        found = len(self._numbers)
        print(
            f"{self.bounds}: {found:,} states, {found - place:,} to expand, {seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def ends(self) -> set[tuple[object, ...]]:
        """How the world can stand at rest: what is published, what was told, and how operations ended."""
        calm = (self.model.unpacked(packed) for place, packed in enumerate(self._numbers) if self._calm[place] == place)
        each, model = range(len(self.bounds.program)), self.model
        return {(s.manifests, s.decided, s.budget, *(model.op(s, model.highest(s), n) for n in each)) for s in calm}

    def _expand(self, place: int, packed: bytes) -> int:
        model, state = self.model, self.model.unpacked(packed)
        if model.calm(state):
            self._calm[place] = place
        count, best, to = 0, BEGIN + 10, UNKNOWN
        for step in model.steps(state):
            count += 1
            after = model.packed(step.state)
            number = self._numbers.setdefault(after, len(self._parents))
            if number == len(self._parents):
                self._next.append(after)
                self._parents.append(place)
                self._calm.append(UNKNOWN)
                self._by_lapse.append(0)
            if not step.cost and step.rank < best and number != place:
                best, to = step.rank, number
        if self._calm[place] == UNKNOWN:
            self._calm[place] = to
            self._by_lapse[place] = best == LAPSE
        return count

    def _lead_to_rest(self) -> int:
        """Follow the calm steps of every state until one is at rest. How many need a lease to lapse on the way."""
        known = bytearray(len(self._numbers))  # 1: leads to rest, 2: by a lapse
        for start in range(len(self._numbers)):
            path: list[int] = []
            place = start
            on_it: set[int] = set()
            while not known[place]:
                path.append(place)
                on_it.add(place)
                following = self._calm[place]
                if following == place:
                    known[place] = 1
                    path.pop()
                    break
                if following == UNKNOWN or following in on_it:
                    raise Stuck(start, self.model)
                place = following
            for before in reversed(path):
                known[before] = max(known[place], 1 + self._by_lapse[before])
                place = before
        self._left_to_lease = known.find(2)
        return known.count(2)

    def _trace(self, place: int) -> list[str]:
        """How the state came about, a line a step."""
        numbers = [place]
        while self._parents[numbers[-1]] != UNKNOWN:
            numbers.append(self._parents[numbers[-1]])
        numbers.reverse()
        wanted = set(numbers)
        states = {n: self.model.unpacked(packed) for n, packed in enumerate(self._numbers) if n in wanted}
        out: list[str] = []
        for before, after in itertools.pairwise(numbers):
            step = next(s for s in self._safely(states[before]) if s.state == states[after])
            out.append(tell(step, self.model))
        return out

    def _safely(self, state: State) -> list[Step]:
        out: list[Step] = []
        try:
            out.extend(self.model.steps(state))
        except Violation:
            pass
        return out


class Stuck(Exception):
    """A state from which the world does not come to rest."""

    def __init__(self, place: int, model: Model) -> None:
        super().__init__(
            "L1/L2: from here nobody gets everybody open and every operation decided without a further fault"
        )
        self.place = place


def explored(task: tuple[Bounds, float, int]) -> Result:
    """One exploration, in a process of its own."""
    bounds, within_s, most = task
    return Explorer(bounds).run(within_s, most)


def main(arguments: list[str] | None = None) -> int:
    """The command. 1 when a rule was broken, or when not everything within the bounds was seen and no limit was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="operations, with commas: save, driven (by the trainer), restore")
    parser.add_argument(
        "--full", action="store_true", help="larger bounds as well, up to two operations, three losses and a crash"
    )
    parser.add_argument("--losses", type=int)
    parser.add_argument("--crashes", type=int)
    parser.add_argument("--aborts", type=int)
    parser.add_argument("--lapses", type=int)
    parser.add_argument("--split", action="store_true", help="the first coordinator may live on beside the second")
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="seconds of a processor for each exploration"
    )
    parser.add_argument(
        "--most", type=int, default=sys.maxsize, help="states of each exploration: a million takes 0.2 GB"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    chosen = [Bounds(tuple(asked.program.split(",")), split=asked.split)] if asked.program else list(DEFAULT)
    chosen += FULL if asked.full else ()
    for bounds in chosen:
        for name in ("losses", "crashes", "aborts", "lapses"):
            if getattr(asked, name) is not None:
                setattr(bounds, name, getattr(asked, name))
    began, results = time.monotonic(), list[Result]()
    print(
        "| explored | states | transitions | depth | CPU s | MB | left to a lease | found |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    tasks = [(bounds, asked.within, asked.most) for bounds in chosen]
    with multiprocessing.get_context("spawn").Pool(min(asked.jobs, len(tasks)), maxtasksperchild=1) as pool:
        for result in pool.imap(explored, tasks):
            results.append(result)
            found = result.violation or (
                "nothing" if result.whole else f"nothing up to {result.depth} steps: it was stopped"
            )
            print(
                f"| {result.bounds} | {result.states:,} | {result.transitions:,} | {result.depth} | {result.seconds} "
                f"| {result.peak_mb:,} | {result.by_lease:,} | {found} |",
                *result.trace,
                sep="\n    ",
                flush=True,
            )
    states, seconds = sum(r.states for r in results), round(time.monotonic() - began, 1)
    broken, unfinished = sum(bool(r.violation) for r in results), sum(not r.whole for r in results)
    print(
        f"{states:,} states, {sum(r.transitions for r in results):,} transitions in {seconds} s: {broken} violations, "
        f"{unfinished} explorations stopped at a limit. Each row is one model with a coordinator (two after its crash, or at "
        "once) and an agent, a policy model and resources; faults of different rows were not combined."
    )
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "states": states, "transitions": sum(r.transitions for r in results), "violations": broken,
            "not_ended": unfinished, "seconds": seconds, "explored": [asdict(r) for r in results],
        }  # fmt: skip
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    limited = asked.within < float("inf") or asked.most < sys.maxsize
    return 1 if broken or (unfinished and not limited) else 0


if __name__ == "__main__":
    sys.exit(main())
