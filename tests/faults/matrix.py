"""Runs cases of the fault matrix on one fleet, and judges each by what is left afterwards.

The rule it keeps: a case is over when the fleet is as it was before: everybody runs and is registered, every gate is
open, every rollout that was in flight has its result, the snapshots are whole, nothing is left lying about, and the next
save succeeds. Only then comes the next case; a fleet that cannot be healed is replaced, and the case has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from coordinator.client import AsyncClient
from coordinator.wire.errors import SafepointError
from tests.faults import cases as c
from tests.faults.cases import Case, Trigger
from tests.faults.fleet import COORDINATOR, LEASE_S, SERVERS, Fleet
from tests.faults.one_way import OneWay
from tests.faults.rollouts import Engine, Live, Trainer
from tests.faults.watch import Watch

SLACK_S = 1.5  # a loaded machine is late by so much
STOPPED_S = LEASE_S + 1.0
HIT_WITHIN_S = 20.0
HEAL_WITHIN_S = 40.0
FINISH_WITHIN_S = 30.0
TIDY_WITHIN_S = 6.0
SAVE_S = 20.0
ROOT_MB = 48
_TEMPORARY = re.compile(r"\..+")


@dataclass
class Result:
    """One row. `thaw_s`: from the fault until the last gate was open; `lost`: rollouts without their result, or without a line in a ledger."""

    name: str
    process: str
    failpoint: str
    fault: str
    trigger: str
    ok: bool = True
    what_happened: str = ""
    thaw_s: float = 0.0
    lost: int = 0
    restarted: int = 0
    repeated: int = 0
    next_save: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    def blame(self, what: str) -> None:
        """Something that must not be."""
        self.ok = False
        self.wrong.append(what)

    def happened(self, what: str) -> None:
        self.what_happened += ("; " if self.what_happened else "") + what


def say(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, SafepointError):
        who = f" by {error.problem.participant_id}" if error.problem.participant_id else ""
        return f"{error.reason.name}{who}"
    return f"{type(error).__name__}: {str(error)[:80]}"


class Lane:
    """One fleet with its trainer, and the cases that it is put through, one after the other."""

    def __init__(self, number: int, keep: Path | None = None) -> None:
        self.number = number
        self._keep = keep
        self._serial = 0
        self.last = ""  # the newest snapshot that was published
        self._known_leaks: set[str] = set()
        self.hit: set[str] = set()  # failpoints that did something
        self._mounts: list[Path] = []

    @contextlib.asynccontextmanager
    async def fleet(self) -> AsyncIterator[None]:
        """Everything started, registered, and saved once."""
        self.directory = Path(tempfile.mkdtemp(prefix=f"faults{self.number}-"))
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._leave)
            self.engine = await stack.enter_async_context(Engine())
            self._mount(self.directory / "root")
            self._mount(self.directory / "run")
            self.f = Fleet(self.directory, self.engine.url)
            stack.callback(self.f.close)
            self.client = AsyncClient(f"file:{self.f.root}/coordinator/address.json")
            stack.push_async_callback(self.client.close)
            self.f.start()
            self.watch = await stack.enter_async_context(Watch({name: self.f.url(name) for name in SERVERS}))
            await self.healthy()
            self.trainer = await stack.enter_async_context(
                Trainer(self.f.url("agent"), f"lane{self.number}x{self._serial}")
            )
            self.trainer.go()
            await asyncio.sleep(0.5)
            self.last = (await self.client.save(self._name("first"), timeout=SAVE_S)).snapshot_id
            yield

    def _leave(self) -> None:
        for mounted in reversed(self._mounts):
            subprocess.run(["umount", "-l", str(mounted)], check=False, capture_output=True)
        self._mounts.clear()
        if self._keep is not None:
            shutil.copytree(self.directory, self._keep / self.directory.name, dirs_exist_ok=True,
                            ignore=lambda folder, names: [n for n in names if n.endswith(".sock")])  # fmt: skip
        shutil.rmtree(self.directory, ignore_errors=True)

    def _mount(self, folder: Path) -> None:
        # Without the right to mount, the disk cannot be filled: those cases say so.
        folder.mkdir(mode=0o700)
        options = f"size={ROOT_MB}m,mode=0700"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False, capture_output=True
        )
        if done.returncode == 0:
            self._mounts.append(folder)

    def _name(self, what: str) -> str:
        self._serial += 1
        return f"s{self._serial:04d}-{what}"

    # ---- one case -------------------------------------------------------------------------------------------------

    async def run(self, case: Case) -> Result:
        """Put the fleet through one case. Never raises for what the case shows; a fleet that is beyond healing, ConnectionError."""
        result = Result(case.name, case.process, case.failpoint, case.fault, case.trigger.value)
        began = time.monotonic()
        self.f.forget_hits()
        self.result, self.case = result, case
        self.before = self.trainer.in_flight()
        self.t0 = began
        try:
            if case.fault in c.OUTSIDE:
                await self._outside(case)
            else:
                await _STORY[case.trigger](self)
            self.f.disarm()
            await self._judge()
        except Exception as error:
            result.blame(f"the case did not come to its end: {say(error)}")
            raise ConnectionError(str(error)) from error
        finally:
            self.f.disarm()
            result.seconds = round(time.monotonic() - began, 1)
        return result

    # ---- stories: each arms, triggers, and waits until the fault has come and gone -------------------------------

    async def _save(self) -> None:
        self.f.arm(self.case.owner, self.case.specification)
        await self._fault_in(self._saving())

    async def _slow_save(self) -> None:
        self.f.arm(COORDINATOR, "publication.before_ledger=1*delay(1500)")
        await self._save()

    async def _failed_save(self) -> None:
        cause = "shim.before_sync=1*error(EIO)"
        mine = self.case.specification
        if self.case.owner == "counter":
            mine = f"{mine};{cause}"
        else:
            self.f.arm("counter", cause)
        self.f.arm(self.case.owner, mine)
        await self._fault_in(self._saving())

    async def _lapse(self) -> None:
        if self.case.of_server:  # a gate is left alone by its shim as well, which would open it
            self.f.arm(self.case.owner, f"{self.case.specification};shim.after_manifest=1*kill")
        else:
            self.f.arm(self.case.owner, self.case.specification)
            self.f.arm(COORDINATOR, "driver.before_confirm=1*kill")
        await self._fault_in(self._saving())

    async def _recovery(self) -> None:
        self.f.arm(COORDINATOR, "snapshots.before_publish=1*kill")
        saving = asyncio.create_task(self._saving())
        await self._until_hit(COORDINATOR, "snapshots.before_publish")
        await asyncio.to_thread(self.f.processes[COORDINATOR].wait)
        self.f.arm(COORDINATOR, self.case.specification)
        self.f.start(COORDINATOR)
        await self._fault_in(saving)

    async def _start(self) -> None:
        self.f.kill(COORDINATOR)
        self.f.arm(COORDINATOR, self.case.specification)
        self.f.start(COORDINATOR)
        await self._fault_in(None)

    async def _shim_start(self) -> None:
        server = self.case.owner if self.case.owner != COORDINATOR else self.case.detail
        self.f.arm(self.case.owner, self.case.specification)
        self.f.signal(f"{server}/shim", signal.SIGKILL)
        await self._fault_in(None)

    async def _traffic(self) -> None:
        self.f.arm(self.case.owner, self.case.specification)
        await self._fault_in(None)

    async def _restore(self) -> None:
        left = await self._fresh()
        self.f.arm(self.case.owner, self.case.specification)
        restoring = asyncio.create_task(self._call("restore", self.client.restore(self.last, timeout=SAVE_S)))
        await self._fault_in(restoring, restoring=True)
        # Whatever became of it: abort, start anew, restore again. The snapshot has to be as good as before.
        await self.client.abort("the restore met a fault", timeout=10)
        self.result.thaw_s = 0.0
        self.t0 = time.monotonic()
        self._blame_closed(await self.watch.open(LEASE_S + SLACK_S, self.f.runs), "after the abort")
        self.result.thaw_s = round(self.watch.thaw_s(self.t0), 2)
        await self._anew()
        await self.client.restore(self.last, resume=True, timeout=SAVE_S)
        self._again(left)

    async def _resume(self) -> None:
        left = await self._fresh()
        await self.client.restore(self.last, resume=True, timeout=SAVE_S)
        self.f.arm(self.case.owner, self.case.specification)
        self._again(left)
        await self._fault_in(None)

    async def _fresh(self) -> list[Live]:
        """Save while rollouts run, kill every server, and start fresh ones: as after a crash of everything."""
        self.last = (await self.client.save(self._name("to-restore"), timeout=SAVE_S)).snapshot_id
        left = await self.trainer.stop()
        self.before = left
        await self._anew()
        return left

    async def _anew(self) -> None:
        self.f.disarm()
        self.f.kill(*SERVERS)
        await self.healthy()

    def _again(self, left: list[Live]) -> None:
        for each in left:
            self.trainer.dispatch(each)
        self.trainer.go()

    # ---- the fault ------------------------------------------------------------------------------------------------

    async def _fault_in(self, work: Awaitable[None] | None, restoring: bool = False) -> None:
        """Wait for the fault, let it do its worst, and mend what a person or a supervisor would mend."""
        case, result = self.case, self.result
        task = asyncio.ensure_future(work) if work is not None else None
        pid = await self._until_hit(case.owner, case.failpoint)
        self.t0 = time.monotonic()
        self.f.disarm()
        alive = self.f.runs
        if case.fault == "kill":
            await self._until_dead(pid)
        if case.fault == "stop":
            alive = self._not_stopped
            self._stopped_pid = pid
            await asyncio.sleep(STOPPED_S)
        if not restoring:
            # Nobody starts a coordinator that died until everybody has had to open by themselves.
            bound = self.bound_s()
            self._blame_closed(
                await self.watch.open(bound - (time.monotonic() - self.t0), alive), f"{bound:.1f} s after the fault"
            )
            result.thaw_s = round(self.watch.thaw_s(self.t0), 2)
        if case.fault == "stop":
            os.kill(pid, signal.SIGCONT)
            self._stopped_pid = 0
            self._blame_closed(await self.watch.open(LEASE_S + SLACK_S), "after it went on")
        self.f.start()
        if task is not None:
            await asyncio.wait({task}, timeout=SAVE_S + 10)
            if not task.done():
                task.cancel()
                result.blame("the caller was never answered")

    _stopped_pid = 0

    def _not_stopped(self, name: str) -> bool:
        return self.f.runs(name) and self.f.pid(name) != self._stopped_pid

    def bound_s(self) -> float:
        """How long after the fault a gate may be closed: the lease, and what a hang delays a coordinator that lives."""
        hang = int(self.case.fault[6:-1]) / 1000 if self.case.fault.startswith("delay") else 0.0
        return max(LEASE_S, hang) + SLACK_S

    def _blame_closed(self, closed: set[str], when: str) -> None:
        if closed:
            self.result.blame(f"still closed {when}: {', '.join(sorted(closed))}")

    async def _until_hit(self, owner: str, failpoint: str) -> int:
        until = time.monotonic() + HIT_WITHIN_S
        while time.monotonic() < until:
            for hit in self.f.hits(owner):
                if hit.name == failpoint:
                    self.hit.add(failpoint)
                    return hit.pid
            await asyncio.sleep(0.01)
        raise TimeoutError(f"{failpoint} was not reached by {owner} within {HIT_WITHIN_S:.0f} s")

    async def _until_dead(self, pid: int) -> None:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            for process in self.f.processes.values():
                process.poll()
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    return
            except psutil.NoSuchProcess:
                return
            await asyncio.sleep(0.01)
        self.result.blame(f"pid {pid} outlives SIGKILL")

    async def _saving(self, timeout: float = SAVE_S) -> None:
        self.tried = self._name("case")
        await self._call("save", self.client.save(self.tried, timeout=timeout))

    async def _call(self, what: str, call: Awaitable[object]) -> None:
        try:
            await call
        except SafepointError as error:
            self.result.happened(f"{what}: {say(error)}")
        else:
            self.result.happened(f"{what}: succeeded")

    # ---- faults from outside --------------------------------------------------------------------------------------

    async def _outside(self, case: Case) -> None:
        match case.fault:
            case c.KILL_IDLE:
                pid = self.f.pid(case.process)
                self.f.signal(case.process, signal.SIGKILL)
                await self._until_dead(pid)
                self.f.start()
            case c.STOP_IDLE:
                self.f.signal(case.process, signal.SIGSTOP)
                await asyncio.sleep(STOPPED_S)
                self.f.signal(case.process, signal.SIGCONT)
            case c.FULL_ROOT:
                await self._with_full(self.f.root)
            case c.FULL_RUN_DIR:
                await self._with_full(self.f.run_dir)
            case c.READ_ONLY_ROOT:
                if self._cannot_mount(self.f.root):
                    return
                self._remount("ro")
                try:
                    await self._saving()
                    self._blame_closed(await self.watch.open(LEASE_S + SLACK_S), "on a read-only root")
                finally:
                    self._remount("rw")
            case _:
                await self._one_way(case.fault)
        self.result.thaw_s = round(self.watch.thaw_s(self.t0), 2) if case.trigger is Trigger.SAVE else 0.0

    def _cannot_mount(self, folder: Path) -> bool:
        if folder in self._mounts:
            return False
        self.result.happened("not done: this user may not mount")
        return True

    def _remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how},size={ROOT_MB}m", str(self.f.root)], check=True)

    async def _with_full(self, folder: Path) -> None:
        if self._cannot_mount(folder):
            return
        filler = folder / "filler"
        with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
            while True:
                out.write(b"x" * (1 << 12))
        try:
            await asyncio.sleep(1.0)
            self.t0 = time.monotonic()
            await self._saving()
            self._blame_closed(await self.watch.open(LEASE_S + SLACK_S), "on a full disk")
        finally:
            filler.unlink()

    async def _one_way(self, fault: str) -> None:
        """The counter's shim is reached through a forwarder that stops one direction while a save runs."""
        self.f.extra["counter"] = {"SAFEPOINT_ADVERTISE": "127.0.0.2"}
        self.f.kill("counter")
        await self.healthy()
        port = int(str(self.f.shim("counter")["address"]).rpartition(":")[2])
        try:
            async with OneWay("127.0.0.2", port, "127.0.0.1") as link:
                await self.healthy()
                await self._call("save through the forwarder", self.client.save(self._name("through"), timeout=SAVE_S))
                link.drop_requests, link.drop_replies = fault == c.DROP_REQUESTS, fault == c.DROP_REPLIES
                self.t0 = time.monotonic()
                await self._saving(timeout=5)
                # The operation's own deadline ends it; until then its owner renews the leases of the others.
                self._blame_closed(await self.watch.open(5 + LEASE_S + SLACK_S), "behind the broken link")
                self.result.thaw_s = round(self.watch.thaw_s(self.t0), 2)
        finally:
            del self.f.extra["counter"]
            self.f.kill("counter")

    # ---- what is left ---------------------------------------------------------------------------------------------

    async def healthy(self) -> None:
        """Start what does not run, and wait until everybody is registered, nothing blocks a save, and all are open."""
        until, seen = time.monotonic() + HEAL_WITHIN_S, "nobody"
        while time.monotonic() < until:
            self.f.start()
            try:
                topology = await self.client.topology(timeout=2)
                known = {p.capabilities.participant_id: p.incarnation_id for p in topology.participants}
                blocking = [f.message for f in topology.findings if f.blocking]
                present = {name: self.f.shim(name).get("incarnation_id") for name in SERVERS}
                if known == present and not blocking and not self.watch.closed and not self.watch.unseen:
                    return
                seen = f"registered {sorted(known)}, {blocking}, closed {sorted(self.watch.closed)}"
            except SafepointError as error:
                seen = say(error)
            await asyncio.sleep(0.05)
        logs = "".join(f"\n--- {name}\n{self.f.log(name)}" for name in (COORDINATOR, *SERVERS))
        raise TimeoutError(f"not healthy after {HEAL_WITHIN_S:.0f} s: {seen}{logs}")

    async def _judge(self) -> None:
        """Heal, then look at everything."""
        result, case = self.result, self.case
        await self.healthy()
        lost = await self.trainer.finish(self.before, FINISH_WITHIN_S)
        for each in lost:
            result.blame(each.wrong or f"{each.rollout_id} has no result after {each.dispatches} dispatches")
        result.lost += len(lost)
        await self._next_save()
        restored = case.trigger in (Trigger.RESTORE, Trigger.RESUME)
        result.restarted = 0 if restored else sum(each.dispatches > 1 for each in self.before)
        result.repeated = self.engine.repeated(each.rollout_id for each in self.before)
        if not case.of_server and not restored and case.fault not in (c.DROP_REPLIES, c.DROP_REQUESTS):
            if result.restarted:
                result.blame(f"{result.restarted} rollouts were cut off although their servers lived")
            if result.repeated:
                result.blame(f"{result.repeated} finished generations were made again")
        await self._tidy()
        done = self.trainer.take_done()
        if done:
            await self.client.retire(done, timeout=10)

    async def _next_save(self) -> None:
        result = self.result
        known = {each.rollout_id for each in self.trainer.in_flight() if self.engine.knows(each.rollout_id)}
        try:
            saved = await self.client.save(self._name("next"), timeout=SAVE_S)
        except SafepointError as error:
            result.next_save = say(error)
            result.blame(f"the next save: {error}")
            return
        must = known & {each.rollout_id for each in self.trainer.in_flight()}
        lines = {rollout.rollout_id async for rollout in self.client.ledger(saved.snapshot_id)}
        if missing := must - lines:
            result.lost += len(missing)
            result.blame(f"in no line of the ledger: {', '.join(sorted(missing))}")
        result.next_save = f"{saved.totals.all} rollouts, {saved.pause_s:.2f} s"
        listed = await self.client.snapshots()
        names = {each.snapshot_id for each in listed.published}
        for name in {self.last, saved.snapshot_id} | ({self.tried} & names):
            try:
                await self.client.verify(name, timeout=20)
            except SafepointError as error:
                result.blame(f"snapshot {name}: {error}")
        if self.tried and self.case.trigger is not Trigger.TRAFFIC:
            result.happened("published" if self.tried in names else "not published")
        self.last, self.tried = saved.snapshot_id, ""

    tried = ""

    async def _tidy(self) -> None:
        until = time.monotonic() + TIDY_WITHIN_S
        while leaks := set(await self._leaks()) - self._known_leaks:
            if time.monotonic() > until:
                self.result.blame(f"left behind: {', '.join(sorted(leaks)[:5])}")
                self._known_leaks |= leaks  # a leak is one case's
                return
            await asyncio.sleep(0.1)

    async def _leaks(self) -> list[str]:
        listed = await self.client.snapshots()
        names = {each.snapshot_id for each in listed.published}
        leaks = [f"{name}: {why}" for name, why in listed.invalid.items()]
        for path in self.f.root.rglob("*"):
            where = path.relative_to(self.f.root)
            if _TEMPORARY.fullmatch(path.name) or (
                len(where.parts) == 2 and where.parts[0] == "snapshots" and path.name not in names
            ):
                leaks.append(str(where))
        lives = {self.f.life(name) for name in SERVERS}
        leaks += [path.name for path in self.f.run_dir.iterdir() if path not in lives]
        leaks += [str(p.relative_to(self.f.run_dir)) for p in self.f.run_dir.rglob("*") if _TEMPORARY.fullmatch(p.name)]
        leaks += [f"tmp/{path.name}" for path in self.f.temporary.iterdir()]
        return leaks


_STORY: dict[Trigger, Callable[[Lane], Awaitable[None]]] = {
    Trigger.SAVE: Lane._save,
    Trigger.SLOW_SAVE: Lane._slow_save,
    Trigger.FAILED_SAVE: Lane._failed_save,
    Trigger.LAPSE: Lane._lapse,
    Trigger.RECOVERY: Lane._recovery,
    Trigger.START: Lane._start,
    Trigger.SHIM_START: Lane._shim_start,
    Trigger.TRAFFIC: Lane._traffic,
    Trigger.RESTORE: Lane._restore,
    Trigger.RESUME: Lane._resume,
}


async def run_lane(lane: Lane, queue: list[Case], told: Callable[[Result], None]) -> list[Result]:
    """Take cases from the queue until it is empty. A fleet that a case has left broken is replaced by a fresh one."""
    results: list[Result] = []
    while queue:
        with contextlib.suppress(ConnectionError):
            async with lane.fleet():
                while queue:
                    case = queue.pop(0)
                    try:
                        await lane.run(case)
                    finally:
                        results.append(lane.result)
                        told(lane.result)
    return results


def as_json(failpoints: int, results: list[Result]) -> str:
    """build/faults.json."""
    rows = [
        {
            "name": r.name, "process": r.process, "failpoint": r.failpoint, "fault": r.fault, "trigger": r.trigger,
            "ok": r.ok, "what_happened": r.what_happened, "thaw_s": r.thaw_s, "lost": r.lost, "restarted": r.restarted,
            "repeated": r.repeated, "next_save": r.next_save, "seconds": r.seconds, "wrong": r.wrong,
        }
        for r in results
    ]  # fmt: skip
    return json.dumps({"failpoints": failpoints, "cases": rows}, indent=1) + "\n"
