"""Proof that the simulation notices: guards of Safepoint are taken away one by one, and each must make a run fail.

The rule: a mutant is a change of source text, made while the module is loaded in a process of its own; nothing on the disk
changes. One whose text is not found any more is an error, so that the list cannot rot. What no run can tell from the
original is listed as equivalent, with the reason, and not counted.

    python -m tests.simulation.mutants                  all of them, as a table
    python -m tests.simulation.mutants --one NAME       one, with the seed that notices it
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
SEEDS = 250
WITHIN_S = 240.0


@dataclass(frozen=True)
class Mutant:
    """`changes`: module, text, and the text in its place. `guards`: what is gone. `seed`: where to look first."""

    name: str
    guards: str
    changes: tuple[tuple[str, str, str], ...]
    seed: int = 0


def m(name: str, guards: str, *changes: str, seed: int = 0) -> Mutant:
    """A mutant; `changes` are module, before, after, and again."""
    return Mutant(name, guards, tuple(zip(changes[::3], changes[1::3], changes[2::3], strict=True)), seed)


FENCE = "participant_shims.fence"
SERVICE = "participant_shims.service"
GYM = "participant_shims.adapters.gym"
ASGI = "participant_shims.gate.asgi"
OUTBOUND = "participant_shims.gate.outbound"
DOORS = "participant_shims.admission"
COURSE = "coordinator.protocol.course"
PHASES = "coordinator.protocol.phases"
BENEATH = "coordinator.wire.beneath"
OPERATIONS = "coordinator.operations"
SERVER = "coordinator.server"

MUTANTS = (
    m("epoch check", "a lower coordinator_epoch is refused", FENCE,
      "        if epoch < self._highest_epoch:\n            return self._refuse(\n                rpc, Reason.STALE_EPOCH",
      "        if epoch < 0:\n            return self._refuse(\n                rpc, Reason.STALE_EPOCH"),
    m("epoch not raised by a replay", "an answered repeat raises the epoch", FENCE,
      "            self._highest_epoch = max(self._highest_epoch, epoch)  # it is served",
      "            pass  # it is served"),
    m("tombstones", "a finished operation stays finished", FENCE,
      "        past = self._finished.get(operation_id)\n        if past is not None:\n            return self._end_again",
      "        past = None\n        if past is not None:\n            return self._end_again"),
    m("tombstone of a stranger", "an abort of an unknown operation is remembered", FENCE,
      "            self._remember(operation_id, _Finished(epoch, _END_CAUSE[rpc]))\n        return Accept(ended)",
      "            pass\n        return Accept(ended)"),
    m("one owner", "another operation of the same epoch is fenced", FENCE,
      "            if epoch <= owner.epoch or not (ends or rpc in _GRANTING):",
      "            if not (ends or rpc in _GRANTING):"),
    m("prepare is not repeated", "a repeated Prepare gets the recorded reply", FENCE,
      "    State.PREPARED:       _row(_R, ", "    State.PREPARED:       _row(_B, "),
    m("commit is not repeated", "a repeated Commit gets the recorded reply", FENCE,
      "    State.COMMITTED:      _row(_R,     _R, ", "    State.COMMITTED:      _row(_R,     _B, "),
    m("lease found by calls", "a call that finds its lease lapsed is refused", FENCE,
      "        if self._owner is None or now < self._owner.lease_until:\n            return None",
      "        if True:\n            return None"),
    m("incarnation at confirm", "Confirm names the incarnation that prepared", SERVICE,
      "        if request.incarnation_id != operations.incarnation_id:", "        if False:",
      "coordinator.protocol.proving",
      "    return None if now_is == participant.incarnation_id else", "    return None if True else"),
    m("freeze looked at", "commit and confirm look whether the freeze held", "participant_shims.operations",
      "        if still.generation != generation or still.activity:", "        if False:"),
    m("an old opening is settled", "no opening of the last operation opens the next one", SERVICE,
      "        await operations.settle_opening()\n        begun =", "        begun ="),
    m("drain", "resources wait for handlers that run", GYM,
      "            if counts.in_flight == 0:", "            if True:",
      GYM, "            if moving or more:", "            if False:"),
    m("gates keep the lease", "a gate opens by itself", DOORS,
      "        if not self.closed or self._clock() < self._deadline:", "        if True:"),
    m("admission", "new work waits at a closed door", DOORS,
      "        parks = self.closed and not exempt", "        parks = False"),
    m("agents park their calls", "nothing leaves a closed agent", OUTBOUND,
      "            await self._doors.admitted(entry)\n            self._check(scope)\n            return await self._live",
      "            self._check(scope)\n            return await self._live"),
    m("answers are remembered", "a callee answers a repeated call from memory", ASGI,
      "            elif answer is not None:\n                gate.remember", "            elif False:\n                gate.remember"),
    m("memory tells requests apart", "two requests of one call id are both remembered", ASGI,
      "            elif answer is not None:\n                gate.remember",
      "            elif answer is not None and gate.log.recall(identity) is None:\n                gate.remember"),
    m("calls join", "a repeated call follows the one that runs", ASGI,
      "            if running is not None:\n", "            if False:\n"),
    m("answers are recorded", "a response is in the log before the agent acts on it", OUTBOUND,
      "        if logs and not self._log.respond(identity, answer, own):", "        if False:"),
    m("records are replayed", "a recorded call never leaves again", OUTBOUND,
      "                if record.answer is not None:", "                if False:"),
    m("attempts ascend", "a restore installs the next attempt", "participant_shims.gate.calllog_files",
      'r["attempt"] if done else r["attempt"] + 1, r["base"]', 'r["attempt"], r["base"]'),
    m("stragglers are excluded", "a rollout whose handler runs is in no cut", "participant_shims.gate.core",
      '            self.log.exclude(\n                rollout_id, s.attempt, f"{_STRAGGLER}', '            str(\n                f"{_STRAGGLER}'),
    m("confirm round", "everybody confirms after the last export", PHASES,
      "SAVE: Final = (Phase.PREPARE, Phase.COMMIT, Phase.CONFIRM, Phase.PUBLISH, Phase.RESUME)",
      "SAVE: Final = (Phase.PREPARE, Phase.COMMIT, Phase.PUBLISH, Phase.RESUME)"),
    m("order of prepare", "agents close before resources", PHASES,
      "Phase.PREPARE: PhaseSpec(_waves(P, E, A, R), ", "Phase.PREPARE: PhaseSpec(_waves(R, A, P, E), "),
    m("resources before agents", "resources are exported after agents are closed", PHASES,
      "Phase.PREPARE: PhaseSpec(_waves(P, E, A, R), ", "Phase.PREPARE: PhaseSpec(_waves(P, E, R, A), "),
    m("a loss voids", "who is lost before publish voids the save", COURSE,
      "        self.lost[participant_id] = problem\n        if self.stage in BEFORE_PUBLISH:",
      "        self.lost[participant_id] = problem\n        if False:"),
    m("presumed abort", "what has no manifest is aborted", "coordinator.recovery",
      "records, published=manifest is not None,", "records, published=True,"),
    m("published is resumed", "what has a manifest is not aborted", "coordinator.recovery",
      "records, published=manifest is not None,", "records, published=False,"),
    m("recovery", "operations that a crash interrupted are settled", SERVER,
      "        await recover(operations)\n", ""),
    m("epoch at publish", "a coordinator that was replaced does not publish", OPERATIONS,
      "            if not self.journal.owns_epoch():", "            if False:",
      SERVER, "        if ours:\n            return None", "        if True:\n            return None"),
    m("replaced coordinators leave", "a replaced coordinator lets its shims go", SERVER,
      "        if ours:\n            return None", "        if True:\n            return None"),
    m("a failed journal is the end", "a coordinator without journal stops", SERVER,
      "        if journal.broken:", "        if False:"),
    m("cancelled checks end", "an abort before the checks began ends the operation", OPERATIONS,
      "        if not drive.started and drive.active:\n            drive.fail_early", "        if False:\n            drive.fail_early"),
    m("the name decides", "a manifest's name is taken before an operation is given up", "coordinator.recovery",
      "        await _settle_on_disk(operations, snapshot_id)\n", "        pass\n"),
    m("the address is kept", "a slow start does not hide the coordinator that replaced it", SERVER,
      "                await asyncio.to_thread(self.keep_announced)\n            return None", "                pass\n            return None"),
    m("early timers", "a timer that is early still moves the core", "coordinator.driver",
      "core.Tick(max(self._around.clock(), at))", "core.Tick(self._around.clock())"),
    m("directory fsync", "a name is durable before it counts", BENEATH,
      "        os.fsync(self._fd)", "        pass"),
    m("file fsync", "bytes are durable before their name", BENEATH,
      "            os.fsync(file.fileno())", "            pass"),
    m("journal fsync", "a record is durable before the calls it covers", "coordinator.journal",
      "            os.fsync(self._file)", "            pass"),
    m("the newest stays", "prune keeps the newest snapshots", "coordinator.retention",
      "enumerate(newest_first[: retention.keep_last])", "enumerate(newest_first[-retention.keep_last :])"),
    m("operations are known", "a repeat is the same operation, not another one", OPERATIONS,
      "        found: Drive | Ended | None = self.active\n", "        found: Drive | Ended | None = None\n"),
    m("incarnations of rollouts", "the manifest of a part names this cut", "coordinator.publication",
      "        if named != (participant_id,", "        if False and named != (participant_id,"),
)  # fmt: skip

EQUIVALENT = {
    "fsync of exported files by the shim": "the writers have synced them already; it guards against an adapter that does not",
    "abort told to everybody who may have heard": "the lease opens whoever was not told, as soon as the contract asks",
    "held responses": "what is released early was remembered before, so the cut stays consistent; only the agent moves on",
}


class _Loader(importlib.machinery.SourceFileLoader):
    changes: tuple[tuple[str, str, str], ...] = ()

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        text = Path(path).read_text(encoding="utf-8")
        for module, before, after in self.changes:
            if module == fullname:
                if text.count(before) != 1:
                    raise SystemExit(f"the text of this mutant is {text.count(before)} times in {module}: {before!r}")
                text = text.replace(before, after)
        return compile(text, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: tuple[tuple[str, str, str], ...]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in {module for module, _, _ in self._changes}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            loader = _Loader(fullname, spec.origin)
            loader.changes = self._changes
            spec.loader = loader
        return spec


def hunt(mutant: Mutant, seeds: int, within_s: float) -> dict[str, Any]:
    """Run seeds with the mutant in this process until one notices it. Call it before anything of Safepoint is loaded."""
    sys.meta_path.insert(0, _Finder(mutant.changes))
    from tests.simulation.faults import make
    from tests.simulation.story import play

    began = time.monotonic()
    tried = 0
    for seed in ([mutant.seed] if mutant.seed else []) + list(range(1, seeds + 1)):
        tried += 1
        found = play(make(seed)).violations
        if found:
            return {"name": mutant.name, "caught": True, "seed": seed, "tried": tried, "violation": found[0]}
        if time.monotonic() - began > within_s:
            break
    return {"name": mutant.name, "caught": False, "seed": 0, "tried": tried, "violation": ""}


def apart(mutant: Mutant, seeds: int, within_s: float) -> dict[str, Any]:
    """As `hunt`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.simulation.mutants", "--one", mutant.name, "--seeds", str(seeds),
         "--within", str(within_s)],
        cwd=TOP, env={**os.environ, "PYTHONPATH": f"{TOP}:{TOP / 'gen'}"}, text=True, capture_output=True,
    )  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stdout + done.stderr).strip().splitlines()
        found = {"name": mutant.name, "caught": False, "seed": 0, "tried": 0, "violation": f"ERROR {said[-1:]}"}
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command. 1 unless every mutant was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--within", type=float, default=WITHIN_S)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    if asked.one:
        mutant = next(each for each in MUTANTS if each.name == asked.one)
        print(json.dumps(hunt(mutant, asked.seeds, asked.within)))
        return 0
    began = time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        table = list(pool.map(lambda each: apart(each, asked.seeds, asked.within), MUTANTS))
    print("| guard taken away | caught by | what was seen |\n| --- | --- | --- |")
    for mutant, row in zip(MUTANTS, table, strict=True):
        by = f"seed {row['seed']}, after {row['tried']}" if row["caught"] else "NOBODY"
        print(f"| {mutant.guards} | {by} | {row['violation'][:110]} |")
    caught = sum(row["caught"] for row in table)
    seconds = round(time.monotonic() - began, 1)
    print(f"{caught} of {len(table)} mutants caught in {seconds} s")
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"mutants": len(table), "caught": caught, "seconds": seconds, "equivalent": EQUIVALENT, "table": table}
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if caught == len(table) else 1


if __name__ == "__main__":
    sys.exit(main())
