"""Proof that the simulation notices: guards of Safepoint are taken away one by one, and each must make a run fail.

The rule: a mutant is a change of source text, made while the module is loaded in a process of its own; nothing on the disk
changes. One whose text is not found any more is an error, so that the list cannot rot. A run that fails without the mutant
too proves nothing of it, and counts for nothing. What no run can tell from the original is listed as equivalent, with the
reason, and not counted.

    python -m tests.simulation.mutants                  all of them, as a table
    python -m tests.simulation.mutants --one NAME       one, with the seed that notices it
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.invariants import INVARIANTS
from tests.simulation.stored_mutants import STORED

TOP = Path(__file__).parents[2]
SEEDS = 150
WITHIN_S = 20.0  # of a processor, for one mutant
HINTS = (
    Path(__file__).parent / "hints.json"
)  # mutant -> the seed that noticed it last: it is tried first, and must notice


@dataclass(frozen=True)
class Mutant:
    """`changes`: module, text, and the text in its place. `guards`: what is gone. `proves`: the check that must notice.

    `test`: one that must fail, for a guard that no run of the simulation can need; `why` says why not.
    """

    name: str
    proves: str
    guards: str
    changes: tuple[tuple[str, str, str], ...]
    faults: tuple[str, ...] = ()  # the kinds that make this guard matter
    test: str = ""
    why: str = ""


def m(name: str, proves: str, guards: str, *changes: str, faults: str = "", test: str = "", why: str = "") -> Mutant:
    """A mutant; `changes` are module, before, after, and again; `faults` have commas between them."""
    texts = tuple(zip(changes[::3], changes[1::3], changes[2::3], strict=True))
    return Mutant(name, proves, guards, texts, tuple(faults.split(",")) if faults else (), test, why)


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
    m("epoch check", "I6", "a lower coordinator_epoch is refused", FENCE,
      "        if epoch < self._highest_epoch:\n            return self._refuse(\n                rpc, Reason.STALE_EPOCH",
      "        if epoch < 0:\n            return self._refuse(\n                rpc, Reason.STALE_EPOCH",
      faults="second coordinator"),
    m("epoch not raised by a replay", "I6", "an answered repeat raises the epoch", FENCE,
      "            self._highest_epoch = max(self._highest_epoch, epoch)  # it is served",
      "            pass  # it is served",
      faults="second coordinator,one message"),
    m("tombstones", "I9", "a finished operation stays finished", FENCE,
      "        past = self._finished.get(operation_id)\n        if past is not None:\n            if rpc is Rpc.RENEW:",
      "        past = None\n        if past is not None:\n            if rpc is Rpc.RENEW:",
      faults="one message"),
    m("tombstone of a stranger", "I8", "an abort of an unknown operation is remembered", FENCE,
      "            self._remember(operation_id, _Finished(epoch, _END_CAUSE[rpc]))\n        return Accept(ended)",
      "            pass\n        return Accept(ended)",
      faults="one message Prepare,one message Abort"),
    m("one owner", "I14", "another operation of the same epoch is fenced", FENCE,
      "            if epoch <= owner.epoch or not (ends or rpc in _GRANTING):",
      "            if not (ends or rpc in _GRANTING):",
      test="tests/shims/test_fence.py::test_another_operation_of_the_same_epoch_is_fenced_and_changes_nothing",
        why="a coordinator calls no Prepare before its last operation has ended, so two owners of one epoch need a broken one"),
    m("prepare is not repeated", "I9", "a repeated Prepare gets the recorded reply", FENCE,
      "    State.PREPARED:       _row(_R, ", "    State.PREPARED:       _row(_B, ",
      faults="one message Prepare"),
    m("commit is not repeated", "I9", "a repeated Commit gets the recorded reply", FENCE,
      "    State.COMMITTED:      _row(_R,     _R, ", "    State.COMMITTED:      _row(_R,     _B, ",
      faults="one message Commit"),
    m("lease found by calls", "I3", "a call that finds its lease lapsed is refused", FENCE,
      "        if self._owner is None or now < self._owner.lease_until:\n            return None",
      "        if True:\n            return None",
      faults="when prepared pause shim"),
    m("incarnation at confirm", "I2", "Confirm names the incarnation that prepared", SERVICE,
      "        if request.incarnation_id != operations.incarnation_id:", "        if False:",
      "coordinator.protocol.proving",
      "    return None if now_is == participant.incarnation_id else", "    return None if True else",
      test="tests/shims/test_service.py::test_confirm_proves_the_freeze_and_refuses_another_incarnation",
        why="a shim that came back is open, and refuses for that already"),
    m("freeze looked at", "I3", "commit and confirm look whether the freeze held", "participant_shims.operations",
      "        if still.generation != generation or still.activity:", "        if False:",
      test="tests/shims/test_service.py::test_activity_after_prepared_voids_the_cut",
      why="a gate that has opened refuses to export, and one that opens later does so when the shim's own lease lapses"),
    m("drain", "I4", "resources wait for handlers that run", GYM,
      "            if counts.in_flight == 0:", "            if True:",
      GYM, "            if moving or more:", "            if False:",
      faults="one message"),
    m("gates keep the lease", "L1", "a gate opens by itself", DOORS,
      "        if not self.closed or self._clock() < self._deadline:", "        if True:",
      faults="when prepared pause shim"),
    m("admission", "I3", "new work waits at a closed door", DOORS,
      "        parks = self.closed and not exempt", "        parks = False",
      faults="one message"),
    m("agents park their calls", "I3", "nothing leaves a closed agent", OUTBOUND,
      "            await self._doors.admitted(entry)\n            self._check(scope)\n            return await self._live",
      "            self._check(scope)\n            return await self._live",
      faults="one message"),
    m("answers are remembered", "I4", "a callee answers a repeated call from memory", ASGI,
      "            elif answer is not None:\n                gate.remember", "            elif False:\n                gate.remember",
      faults="weather,crash server"),
    m("memory tells requests apart", "I4", "two requests of one call id are both remembered", ASGI,
      "            elif answer is not None:\n                gate.remember",
      "            elif answer is not None and gate.log.recall(identity) is None:\n                gate.remember",
      test="tests/gate/test_rollouts.py::test_a_call_whose_id_an_earlier_life_of_the_agent_has_used_is_remembered_as_well",
      why="agents of the simulation ask the same again"),
    m("calls join", "I9", "a repeated call follows the one that runs", ASGI,
      "            if running is not None:\n", "            if False:\n",
      faults="weather"),
    m("answers are recorded", "I4", "a response is in the log before the agent acts on it", OUTBOUND,
      "        if logs and not self._log.respond(identity, answer, own):", "        if False:",
      faults="one message"),
    m("records are replayed", "I16", "a recorded call never leaves again", OUTBOUND,
      "                if record.answer is not None:", "                if False:",
      faults="one message"),
    m("attempts ascend", "I16", "a restore installs the next attempt", "participant_shims.gate.calllog_files",
      'r["attempt"] if done else r["attempt"] + 1, r["base"]', 'r["attempt"], r["base"]',
      "participant_shims.gate.calllog_files", "    if not done:\n        log.mark(", "    if False:\n        log.mark(",
      "participant_shims.gate.calllog_files", '                log.mark(rollout_id, r["attempt"] + 1)\n            else:',
      "                pass\n            else:",
      "participant_shims.gate.calllog_files", '                log.mark(rollout_id, r["attempt"] + 1)\n                sessions',
      "                sessions",
      faults="one message"),
    m("stragglers are excluded", "I4", "a rollout whose handler runs is in no cut", "participant_shims.gate.core",
      '            self.log.exclude(\n                rollout_id, s.attempt, f"{_STRAGGLER}', '            str(\n                f"{_STRAGGLER}',
      "participant_shims.gate.core", "        skip = self._running_sessions()\n", "        skip = set[str]()\n",
      faults="one message RenewLease"),
    m("confirm round", "I2", "everybody confirms after the last export", PHASES,
      "Phase.CONFIRM: PhaseSpec((frozenset({P, E, A, R}),), ", "Phase.CONFIRM: PhaseSpec((frozenset({P, E, A}),), ",
      faults="one message"),
    m("order of prepare", "I18", "agents close before resources", PHASES,
      "Phase.PREPARE: PhaseSpec(_waves(P, E, A, R), ", "Phase.PREPARE: PhaseSpec(_waves(R, A, P, E), ",
      faults="one message"),
    m("resources before agents", "I18", "resources are exported after agents are closed", PHASES,
      "Phase.PREPARE: PhaseSpec(_waves(P, E, A, R), ", "Phase.PREPARE: PhaseSpec(_waves(P, E, R, A), ",
      faults="one message"),
    m("who is missing is missed", "I17", "a save does not begin without somebody who takes part and is away",
      "coordinator.registry", "        return tuple(Missing(who, now - at, why) for _, (who, at, why) in sorted(self._gone.items()))",
      "        return ()",
      faults="crash server,crash shim,leave and come back"),
    m("a loss voids", "I17", "who is lost before publish voids the save", COURSE,
      "now + explained_within_s\n        if self.stage in BEFORE_PUBLISH:", "now + explained_within_s\n        if False:",
      test="tests/protocol/test_scenarios.py::test_scenario_has_exactly_these_effects[engine_dies_in_prepare]",
      why="it cannot be published anyway, only later given up: whoever is lost confirms nothing"),
    m("presumed abort", "I11", "what has no manifest is aborted", "coordinator.recovery",
      "records, published=manifest is not None,", "records, published=True,",
      faults="crash coordinator,dies in disk"),
    m("published is resumed", "I1", "what has a manifest is not aborted", "coordinator.recovery",
      "records, published=manifest is not None,", "records, published=False,",
      faults="race at publish"),
    m("recovery", "I2", "operations that a crash interrupted are settled", SERVER,
      "        await recover(operations)\n", "",
      faults="race at publish"),
    m("epoch at publish", "I7", "a coordinator that was replaced does not publish", OPERATIONS,
      "            if (lost := self.journal.lost()) is not None:", "            if lost := None:",
      test="tests/coordinator/test_recovery.py::test_an_older_coordinator_cannot_publish",
      why="the name of the manifest decides that as well, and the newer coordinator has taken it"),
    m("replaced coordinators leave", "L2", "a replaced coordinator lets its shims go", SERVER,
      "            if lost is not None:\n                return lost\n", "            if lost is not None:\n                return None\n",
      faults="second coordinator"),
    m("a failed journal is the end", "L2", "a coordinator without journal stops", SERVER,
      "        if journal.broken:", "        if False:",
      faults="fsync fails"),
    m("cancelled checks end", "L2", "an abort before the checks began ends the operation", OPERATIONS,
      "        if not drive.started and drive.active:\n            drive.fail_early", "        if False:\n            drive.fail_early",
      faults="abort at once"),
    m("the name decides", "I7", "a manifest's name is taken before an operation is given up", "coordinator.recovery",
      "        await _settle_on_disk(operations, asked.snapshot_id)\n", "        pass\n",
      faults="race at publish"),
    m("the address is kept", "L2", "a slow start does not hide the coordinator that replaced it", SERVER,
      "for write in (self.keep_announced, journal.note_alive):", "for write in (journal.note_alive,):",
      faults="second coordinator"),
    m("early timers", "L2", "a timer that is early still moves the core", "coordinator.driver",
      "core.Tick(max(self._around.clock(), at))", "core.Tick(self._around.clock())",
      test="tests/coordinator/test_driver.py::test_a_timer_that_goes_off_early_by_the_clocks_resolution_counts_as_its_time",
      why="renewals and the deadlines of calls wake the core again, so runs go on a little later"),
    m("directory fsync", "I10", "a name is durable before it counts", BENEATH,
      "        os.fsync(self._fd)", "        pass",
      faults="power loss"),
    m("file fsync", "I12", "bytes are durable before their name", BENEATH,
      "            os.fsync(file.fileno())",
      "            if 'snapshots' not in str(self.path) or 'manifest' in segment:\n                os.fsync(file.fileno())",
      faults="power loss"),
    m("what is found is made durable", "I10", "a manifest that somebody else may have linked is synced before it counts",
      "coordinator.snapshots", "                directory.sync()\n", "                pass\n",
      test="tests/coordinator/test_snapshots.py::test_a_manifest_whose_name_may_not_be_durable_counts_once_it_is",
      why="it needs an fsync that fails right after the link, and a loss of power before anything else syncs that directory"),
    m("journal fsync", "I10", "a record is durable before the calls it covers", "coordinator.journal",
      "            os.fsync(self._file)", "            pass",
      test="tests/coordinator/test_journal.py::test_after_a_failed_fsync_nothing_more_is_acknowledged",
      why="a loss of power here takes everybody, and with them whoever a record was about"),
    m("chunks that are there are made durable", "I10", "a chunk that somebody else may have left is synced before it is named",
      "coordinator.wire.chunks", "                self._sync(folder)  # whoever made it may have failed, or died, before its name was durable\n",
      "",
      test="tests/wire/test_chunks_and_ropes.py::test_a_chunk_that_somebody_left_before_its_name_was_durable_is_made_durable_before_it_is_used",
      why="it needs an fsync that fails at a chunk that is written again, and a loss of power right after the save of that"),
    m("folders that are there are made durable", "I10", "a directory that somebody else may have left is synced before it is used",
      BENEATH, "        try:\n            self.sync()\n        except OSError as error:\n            raise storage_error(error, f\"making {self.path / name}\") from error\n        return self.child(name)",
      "        return self.child(name)",
      test="tests/wire/test_chunks_and_ropes.py::test_a_directory_that_somebody_left_before_its_name_was_durable_is_made_durable_before_it_is_used",
      why="as that of chunks"),
    m("young chunks stay", "L3", "a chunk that was written or asked for of late is not swept", "coordinator.sweeping",
      "    before = _now(reader) - (chunks.grace_s if grace_s is None else grace_s) if there else 0.0", "    before = _now(reader) + 1e-3 if there else 0.0",
      test="tests/coordinator/test_sweeping.py::test_chunks_of_a_save_that_is_not_published_and_young_ones_stay",
      why="no operation begins while a coordinator sweeps, and every save looks for its chunks when it begins"),
    m("what is relied on is touched", "L3", "a writer touches what it counts on before it names it", "coordinator.wire.chunks",
      "                folder.touch(chunk.sha256)\n                return True", "                return True",
      test="tests/coordinator/test_sweeping.py::test_chunks_of_a_save_that_is_not_published_and_young_ones_stay",
      why="no operation begins while a coordinator sweeps, and every save looks for its chunks when it begins"),
    m("every part keeps its chunks", "I13", "a chunk that a part names is not swept", "coordinator.sweeping",
      "                found.update(entry.sha256 for entry in manifest.chunks)", "                found.update(entry.sha256 for entry in manifest.chunks[1:])",
      faults="one message"),
    m("looked at again before it goes", "I13", "a chunk is asked for once more right before it is deleted", "coordinator.sweeping",
      "            if not _is_still_old(chunks, found, before):", "            if False:",
      test="tests/coordinator/test_sweeping.py::test_a_chunk_that_is_asked_for_while_it_is_looked_who_names_it_stays",
      why="whoever asks for an old chunk does so in an operation, and a coordinator sweeps while it runs none"),
    m("the newest stays", "I13", "prune keeps the newest snapshots", "coordinator.retention",
      "enumerate(newest_first[: retention.keep_last])", "enumerate(newest_first[-retention.keep_last :])",
      faults="one message"),
    m("operations are known", "I9", "a repeat is the same operation, not another one", OPERATIONS,
      "        found: Drive | Ended | None = self.active\n", "        found: Drive | Ended | None = None\n",
      faults="one message Save"),
    m("one operation at a time", "I14", "a coordinator refuses a second operation while one runs", OPERATIONS,
      "        if self.active is not None:\n            raise fenced(self.active)", "        if False:\n            raise fenced(self.active)",
      faults="two at once"),
    m("an end needs no disk", "I15", "an abort is answered whatever the disk does", SERVICE,
      "        opened = await self._end(Rpc.ABORT, request, context)",
      "        await self.operations.on_disk(partial(self._discard_quietly, self._snapshots.get(request.context.operation_id)"
      " or 'none', request.context.operation_id))\n"
      "        opened = await self._end(Rpc.ABORT, request, context)",
      faults="disk slow,one message Prepare"),
    m("an end in every state", "I15", "an end of an operation that nobody knows is served", FENCE,
      "        if ended is None or ended.operation_id != operation_id:\n            self._remember",
      "        if epoch < 2:\n            return self._wrong_phase(rpc, operation_id, State.OPEN, ended)\n"
      "        if ended is None or ended.operation_id != operation_id:\n            self._remember",
      faults="one message Prepare"),
    m("the lease has a clock of its own", "I20", "the lease is no matter of the wall clock", "participant_shims.operations",
      "        self.clock = clock or LoopClock()",
      "        self.clock = clock or LoopClock()\n        self.clock.now = __import__('time').time",
      faults="when prepared clock jumps"),
    m("fences are bounded", "I19", "a full fence refuses new operations", FENCE,
      "        if len(self._finished) >= limit and not self._forget_oldest():", "        if False:",
      FENCE, "        if not self._has_room(epoch):", "        if False:",
      faults="one message"),
    m("a tombstone waits for its epoch", "I19", "only ids that the epoch refuses are forgotten", FENCE,
      "next((k for k, past in self._finished.items() if past.epoch < self._highest_epoch), None)",
      "next(iter(self._finished), None)",
      FENCE, "        return any(past.epoch < max(epoch, self._highest_epoch) for past in self._finished.values())", "        return True",
      faults="one message"),
    m("outcomes are bounded", "I19", "old outcomes are forgotten", "coordinator.journal_file",
      "            if len(self.outcomes) > KEPT_OUTCOMES:", "            if False:",
      faults="weather"),
    m("a start waits for nobody", "L4", "who hangs does not keep a coordinator from starting", "coordinator.recovery",
      "        drive.start(core.Recover(operations.clock()))",
      "        drive.start(core.Recover(operations.clock()))\n        await drive.done.wait()",
      faults="when prepared hang and crash coordinator"),
    m("nobody resumes before the publish", "I11", "only what is published is resumed", "coordinator.driver",
      "            self.manifest = await asyncio.to_thread(self._around.publish, self, effect)\n", "            pass\n",
      faults="one message"),
    m("a new epoch makes room", "L3", "a full fence takes operations of a new epoch", FENCE,
      "        if epoch <= self._overflow_epoch:", "        if self._overflow_epoch or len(self._finished) >= self._max_finished:",
      faults="one message"),
    m("a cause has its phase", "L5", "what ends an operation says in which phase it came", COURSE,
      "        return records.in_operation(problem, self.operation, self.phase, participant_id)",
      "        return records.in_operation(problem, self.operation, type(self.phase)(0), participant_id)",
      faults="crash shim,crash server"),
    m("an answer before the deadline", "L5", "a server ends its wait before its caller's", "participant_shims.running",
      "            if left <= 0:", "            if False:",
      "participant_shims.running", "min(PROGRESS_EVERY_S, left)", "PROGRESS_EVERY_S",
      test="tests/shims/test_service.py::test_prepare_that_does_not_drain_names_who_is_stuck_before_the_deadline",
      why="stragglers are excluded before any deadline, and a saved session is small"),
    m("a reservation that is gone has a reason", "L5", "a save that a newer coordinator cuts short at its start says so",
      "coordinator.snapshots", "            except FileNotFoundError:  # `forget_reserved`", "            except ZeroDivisionError:  # `forget_reserved`",
      test="tests/coordinator/test_snapshots.py::test_a_directory_that_a_newer_coordinator_removes_while_it_is_being_reserved_is_refused_as_stale",
      why="it needs two starts within the time of one change of a slow disk, which few runs have"),
    m("the end frees the coordinator", "L3", "an operation that has ended does not run", OPERATIONS,
      "        if self.active is drive:\n            self.active = None", "        pass",
      faults="one message"),
    m("a restore is whole", "I5", "a restore is resumed when everybody has loaded", PHASES,
      "Phase.RESTORE: PhaseSpec(_waves(P, E, A, R), ", "Phase.RESTORE: PhaseSpec(_waves(P, E, A), ",
      faults="one message"),
    *(m(*row[:6], test=row[6], why=row[7]) for row in STORED),
)  # fmt: skip

EQUIVALENT = {
    "fsync of exported files by the shim": "the writers have synced them already; it guards against an adapter that does not",
    "abort told to everybody who may have heard": "the lease opens whoever was not told, as soon as the contract asks",
    "the manifest of a part names this cut": "its digest is that of the reply, which was compared with the operation",
    "an opening is over before the next closing": "adapters put openings and closings in order as well",
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


def hunt(mutant: Mutant, seeds: int, within_s: float, first: int = 0) -> dict[str, Any]:
    """Run seeds with the mutant in this process until one notices it. Call it before anything of Safepoint is loaded."""
    sys.meta_path.insert(0, _Finder(mutant.changes))
    found: dict[str, Any] = {"name": mutant.name, "caught": False, "by": "", "tried": 0, "seen": ""}
    if mutant.test:
        import pytest

        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", mutant.test]))
        return found | {"caught": code == 1, "by": mutant.test, "tried": 1, "seen": f"pytest ends with {code}"}
    from tests.simulation.run import checked

    began = time.process_time()  # a loaded machine must not make a mutant survive
    for seed in [*([first] if first else []), *range(1, seeds + 1)]:
        found["tried"] += 1
        violations = checked(seed, mutant.faults).violations
        if violations:
            return found | {"caught": True, "by": seed, "seen": violations[0]}
        if time.process_time() - began > within_s:
            break
    return found


def apart(mutant: Mutant, seeds: int, within_s: float, first: int) -> dict[str, Any]:
    """As `hunt`, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.simulation.mutants", "--one", mutant.name, "--seeds", str(seeds),
         "--within", str(within_s), "--hint", str(first)],
        cwd=TOP, env={**os.environ, "PYTHONPATH": f"{TOP}:{TOP / 'gen'}"}, text=True, capture_output=True,
    )  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stdout + done.stderr).strip().splitlines()
        found = {"name": mutant.name, "caught": False, "by": "", "tried": 0, "seen": f"ERROR {said[-1:]}"}
    print(f"{mutant.name}: {found['by'] if found['caught'] else 'SURVIVES'}", file=sys.stderr, flush=True)
    return found


def fails_anyway(seed: int, faults: tuple[str, ...]) -> str:
    """What is seen in this run of what ships, without any mutant: empty when all is well."""
    from tests.simulation.run import checked

    return next(iter(checked(seed, faults).violations), "")


def proved(table: list[dict[str, Any]], jobs: int) -> None:
    """Take back what a run has noticed that fails without the mutant as well."""
    asked = [
        (row, mutant)
        for row, mutant in zip(table, MUTANTS, strict=True)
        if row["caught"] and isinstance(row["by"], int)
    ]
    with multiprocessing.get_context("forkserver").Pool(jobs) as pool:
        seen = pool.starmap(fails_anyway, [(row["by"], mutant.faults) for row, mutant in asked], chunksize=4)
    for (row, _), anyway in zip(asked, seen, strict=True):
        if anyway:
            row |= {"caught": False, "seen": f"seed {row['by']} fails without it too: {anyway}"}


def main(arguments: list[str] | None = None) -> int:
    """The command. 1 unless every mutant was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one")
    parser.add_argument("--hint", type=int, default=-1)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--within", type=float, default=WITHIN_S)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--learn", action="store_true", help=f"write {HINTS.name}")
    asked = parser.parse_args(arguments)
    hints: dict[str, int] = json.loads(HINTS.read_text(encoding="utf-8")) if HINTS.exists() else {}
    if asked.one:
        mutant = next(each for each in MUTANTS if each.name == asked.one)
        first = asked.hint if asked.hint >= 0 else hints.get(mutant.name, 0)
        print(json.dumps(hunt(mutant, asked.seeds, asked.within, first)))
        return 0
    began = time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        table = list(pool.map(lambda each: apart(each, asked.seeds, asked.within, hints.get(each.name, 0)), MUTANTS))
    proved(table, asked.jobs)
    cases = [
        row | {"proves": mutant.proves, "guards": mutant.guards, "faults": ", ".join(mutant.faults)}
        for mutant, row in zip(MUTANTS, table, strict=True)
    ]
    print("| check | guard taken away | noticed by | what was seen |\n| --- | --- | --- | --- |")
    for case in cases:
        by = (
            f"seed {case['by']}{' of ' + case['faults'] if case['faults'] else ''}"
            if isinstance(case["by"], int)
            else case["by"]
        )
        print(f"| {case['proves']} | {case['guards']} | {by if case['caught'] else 'NOBODY'} | {case['seen'][:110]} |")
    print("\n| invariant | what holds | where it is asked | proved by the mutants |\n| --- | --- | --- | --- |")
    for number, (holds, where) in INVARIANTS.items():
        proofs = ", ".join(case["name"] for case in cases if case["proves"] == number and case["caught"])
        print(f"| {number} | {holds} | {where} | {proofs or 'NONE'} |")
    survived = [case["name"] for case in cases if not case["caught"]]
    seconds = round(time.monotonic() - began, 1)
    print(f"\n{len(cases) - len(survived)} of {len(cases)} mutants caught in {seconds} s")
    if survived:
        print(f"Not noticed: {', '.join(survived)}")
    if asked.learn:
        learnt = {case["name"]: case["by"] for case in cases if isinstance(case["by"], int)}
        HINTS.write_text(json.dumps(dict(sorted((hints | learnt).items())), indent=1) + "\n", encoding="utf-8")
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "mutants": len(cases), "caught": len(cases) - len(survived), "survived": survived, "seconds": seconds,
            "equivalent": EQUIVALENT, "cases": cases,
        }  # fmt: skip
        asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
