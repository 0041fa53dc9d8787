"""Proof that the explorer notices: guards are taken away one by one, and each must give a counterexample.

The rule: a mutant is a change of source text, made while the module is loaded in a process of its own; nothing on the disk
changes. One whose text is not found exactly once is an error, so that the list cannot rot.

    python -m tests.explorer.mutants               all of them, as a table
    python -m tests.explorer.mutants --one NAME    one, with its trace
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
FENCE = "participant_shims.fence"
PROVING = "coordinator.protocol.proving"
PHASES = "coordinator.protocol.phases"
COURSE = "coordinator.protocol.course"
OPENING = "coordinator.protocol.opening"
SHIM = "tests.explorer.shim"  # what an adapter does is the model's own, and so is what it may get wrong


@dataclass(frozen=True)
class Mutant:
    """`rule`: which invariant must break. `bounds`: arguments of `Bounds` in which it does."""

    name: str
    rule: str
    module: str
    before: str
    after: str
    bounds: dict[str, Any]


def _m(
    name: str, rule: str, module: str, before: str, after: str, program: str = "save", **bounds: int | bool
) -> Mutant:
    return Mutant(
        name, rule, module, before, after, {"program": program.split(","), "losses": 0, "crashes": 0, **bounds}
    )


MUTANTS = (
    _m("no epoch check", "I6", FENCE,
       "        if epoch < self._highest_epoch:\n            return self._refuse(\n                rpc, Reason.STALE_EPOCH",
       "        if epoch < 0:\n            return self._refuse(\n                rpc, Reason.STALE_EPOCH", crashes=1),
    _m("no incarnation check", "I17", PROVING,
       "    return None if now_is == participant.incarnation_id else", "    return None if True else", crashes=1, lapses=0),
    _m("no tombstone", "I8", FENCE,
       "        past = self._finished.get(operation_id)\n        if past is not None:\n            if rpc is Rpc.RENEW:",
       "        past = None\n        if past is not None:\n            if rpc is Rpc.RENEW:", losses=1),
    _m("no tombstone for a stranger", "I8", FENCE,
       "            self._remember(operation_id, _Finished(epoch, _END_CAUSE[rpc]))\n        return Accept(ended)",
       "            pass\n        return Accept(ended)", aborts=1),
    _m("publish without confirm", "I3", PHASES,
       "SAVE: Final = (Phase.PREPARE, Phase.COMMIT, Phase.CONFIRM, Phase.PUBLISH, Phase.RESUME)",
       "SAVE: Final = (Phase.PREPARE, Phase.COMMIT, Phase.PUBLISH, Phase.RESUME)"),
    _m("publish without commit", "I2", PHASES,
       "SAVE: Final = (Phase.PREPARE, Phase.COMMIT, Phase.CONFIRM, Phase.PUBLISH, Phase.RESUME)",
       "SAVE: Final = (Phase.PREPARE, Phase.CONFIRM, Phase.PUBLISH, Phase.RESUME)"),
    _m("reply not recorded", "I9", FENCE,
       "        owner.replies[rpc] = reply\n", "        pass\n"),
    _m("prepare done twice", "I9", FENCE, "    State.PREPARED:       _row(_R, ", "    State.PREPARED:       _row(_B, "),
    _m("resume in the order of prepare", "I18", PHASES,
       "Phase.RESUME:  PhaseSpec(_waves(R, E, P, A), ", "Phase.RESUME:  PhaseSpec(_waves(P, E, A, R), "),
    _m("resources close first", "I18", PHASES,
       "Phase.PREPARE: PhaseSpec(_waves(P, E, A, R), ", "Phase.PREPARE: PhaseSpec(_waves(R, E, P, A), "),
    _m("one owner", "I14", FENCE,
       "            if epoch <= owner.epoch or not (ends or rpc in _GRANTING):",
       "            if not (ends or rpc in _GRANTING):", "save,save", crashes=1),
    _m("abort after publish", "I1", "coordinator.protocol.transaction",
       "        if course.published:\n            return course.open(Phase.RESUME, now)",
       "        if False:\n            return course.open(Phase.RESUME, now)", crashes=1, lapses=0),
    _m("not everybody is told to open", "I18", COURSE,
       "if p.participant_id in self.evidence.attempted]", "if p.participant_id in self.evidence.prepared]", aborts=1),
    _m("opening is not repeated", "L1", OPENING,
       "            self._calls.retry_later(running, now)", "            pass", losses=1),
    _m("who asks by a renewal is not the newest", "I5", FENCE,
       "                self._highest_epoch = max(self._highest_epoch, epoch)\n            return self._end_again(",
       "                pass\n            return self._end_again(", "restore", crashes=1, lapses=0),
    _m("still loaded, though given up", "I5", SHIM,
       "        still = lapsed and shim.loaded == operation + 1", "        still = lapsed", "restore", crashes=1, lapses=0),
    _m("a resume is not durable before it is told", "I5", COURSE,
       "        out += [records.resuming(self.operation)] if first else []\n", "", "restore", crashes=1, lapses=0),
    _m("a lapse after a restore is no matter", "I5", COURSE,
       "problem.metadata.get(STILL_LOADED) == self.operation.operation_id", "True", "restore", crashes=1, lapses=0),
)  # fmt: skip


def explore(mutant: Mutant) -> dict[str, Any]:
    """Explore with the mutant, in this process. Call it before anything of Safepoint is loaded."""
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        raise SystemExit(
            f"the text of this mutant is {text.count(mutant.before)} times in {mutant.module}: {mutant.before!r}"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[mutant.module] = module
    exec(compile(text.replace(mutant.before, mutant.after), spec.origin, "exec", dont_inherit=True), module.__dict__)
    found = importlib.import_module("tests.explorer.explore")
    result = found.Explorer(found.Bounds(**{**mutant.bounds, "program": tuple(mutant.bounds["program"])})).run()
    return {"name": mutant.name, "violation": result.violation, "states": result.states, "trace": result.trace}


def apart(mutant: Mutant) -> dict[str, Any]:
    """As `explore`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.explorer.mutants", "--one", mutant.name, "--json"],
        cwd=TOP, env={**os.environ, "PYTHONPATH": f"{TOP}:{TOP / 'gen'}"}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        found = {"name": mutant.name, "violation": f"ERROR {said}", "states": 0, "trace": []}
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command. 1 unless every mutant breaks the rule that it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.one:
        found = explore(next(each for each in MUTANTS if each.name == asked.one))
        print(json.dumps(found) if asked.json else "\n".join([*found["trace"], f"{found['states']} states"]))
        return 0
    print("| guard taken away | rule | states | found |\n| --- | --- | --- | --- |")
    caught = 0
    for mutant in MUTANTS:
        found = apart(mutant)
        caught += found["violation"].startswith(mutant.rule)
        print(
            f"| {mutant.name} | {mutant.rule} | {found['states']:,} | {found['violation'] or 'NOTHING'} |", flush=True
        )
    print(f"{caught} of {len(MUTANTS)} mutants caught")
    return 0 if caught == len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
