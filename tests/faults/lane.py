"""One fleet with its trainer, and what every case does to it: arm, wait for the fault, watch the gates, mend.

The rule it keeps: nobody mends anything before everybody has had to open by themselves, and whoever was stopped is still
stopped while the others are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path

import psutil

from coordinator.client import AsyncClient
from coordinator.wire.errors import Reason, Refused, SafepointError
from tests.faults.cases import Case
from tests.faults.fleet import COORDINATOR, LEASE_S, SERVERS, Fleet
from tests.faults.result import Result, say
from tests.faults.rollouts import Engine, Live, Trainer
from tests.faults.watch import Watch

SLACK_S = 1.5  # a loaded machine is late by so much
STOPPED_S = LEASE_S + 1.0
HIT_WITHIN_S = 20.0
HEAL_WITHIN_S = 40.0
SAVE_S = 20.0
ROOT_MB = 48


class Lane:
    """One fleet with its trainer, and the cases that it is put through, one after the other."""

    def __init__(self, number: int, keep: Path | None = None) -> None:
        self.number = number
        self._keep = keep
        self._serial = 0
        self.last = ""  # the newest snapshot that was published
        self.known_leaks: set[str] = set()
        self.tried = ""  # the snapshot that the case's own save was to make
        self.told: bool | None = None  # what the caller was told of it: done, refused, or nothing for sure
        self.case: Case
        self.result: Result
        self.before: list[Live] = []  # in flight when the case began
        self.t0 = 0.0  # when the fault came
        self.recorded: dict[str, int] = {}  # finished calls of each rollout in the snapshot that is restored
        self.finished: dict[tuple[str, int], int] = {}  # turns of those calls, and how often they had been generated
        self._stopped_pid = 0
        self.hit: set[str] = set()  # failpoints that did something
        self.mounts: list[Path] = []

    @contextlib.asynccontextmanager
    async def fleet(self) -> AsyncGenerator[None]:
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
            await self.trainer.under_way()
            self.last = (await self.client.save(self.name("first"), timeout=SAVE_S)).snapshot_id
            yield

    def _leave(self) -> None:
        for mounted in reversed(self.mounts):
            subprocess.run(["umount", "-l", str(mounted)], check=False, capture_output=True)
        self.mounts.clear()
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
            self.mounts.append(folder)

    def name(self, what: str) -> str:
        self._serial += 1
        return f"s{self._serial:04d}-{what}"

    # ---- the fault

    async def fault_in(self, work: Awaitable[None] | None, restoring: bool = False) -> None:
        """Wait for the fault, let it do its worst, and mend what a person or a supervisor would mend."""
        case, result = self.case, self.result
        task = asyncio.ensure_future(work) if work is not None else None
        pid = await self.until_hit(case.owner, case.failpoint)
        self.t0 = time.monotonic()
        self.f.disarm()
        alive = self.f.runs
        if case.fault == "kill":
            await self.until_dead(pid)
        if case.fault == "stop":
            alive = self._not_stopped
            self._stopped_pid = pid
            await asyncio.sleep(STOPPED_S)
        if not restoring:
            # Nobody starts a coordinator that died until everybody has had to open by themselves.
            bound = self.bound_s()
            self.blame_closed(
                await self.watch.open(bound - (time.monotonic() - self.t0), alive), f"{bound:.1f} s after the fault"
            )
            result.thaw_s = round(self.watch.thaw_s(self.t0), 2)
        if case.fault == "stop":
            os.kill(pid, signal.SIGCONT)
            self._stopped_pid = 0
            self.blame_closed(await self.watch.open(LEASE_S + SLACK_S), "after it went on")
        if case.failpoint == "journal.before_fsync" and case.fault.startswith("error"):
            await self.until_ended(COORDINATOR, "although its journal has failed")
        self.f.start()
        if task is not None:
            await asyncio.wait({task}, timeout=SAVE_S + 10)
            if not task.done():
                task.cancel()
                result.blame("the caller was never answered")

    def _not_stopped(self, name: str) -> bool:
        return self.f.runs(name) and self.f.pid(name) != self._stopped_pid

    def bound_s(self) -> float:
        """How long after the fault a gate may be closed: the lease, and what a hang delays a coordinator that lives."""
        hang = int(self.case.fault[6:-1]) / 1000 if self.case.fault.startswith("delay") else 0.0
        return max(LEASE_S, hang) + SLACK_S

    def blame_closed(self, closed: set[str], when: str) -> None:
        if closed:
            self.result.blame(f"still closed {when}: {', '.join(sorted(closed))}")

    async def until_hit(self, owner: str, failpoint: str) -> int:
        until = time.monotonic() + HIT_WITHIN_S
        while time.monotonic() < until:
            for hit in self.f.hits(owner):
                if hit.name == failpoint:
                    self.hit.add(failpoint)
                    return hit.pid
            await asyncio.sleep(0.01)
        raise TimeoutError(f"{failpoint} was not reached by {owner} within {HIT_WITHIN_S:.0f} s")

    async def until_dead(self, pid: int) -> None:
        """Wait for the end of a process, one of ours or a shim, all its threads included."""
        ours = next((p for p in self.f.processes.values() if p.pid == pid), None)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if ours is not None:  # a zombie may have threads that are still ending: only `wait` knows
                if ours.poll() is not None:
                    return
            else:
                try:
                    if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                        return
                except psutil.NoSuchProcess:
                    return
            await asyncio.sleep(0.01)
        self.result.blame(f"pid {pid} outlives SIGKILL")

    async def until_ended(self, name: str, why: str) -> None:
        until = time.monotonic() + HIT_WITHIN_S
        while self.f.runs(name):
            if time.monotonic() > until:
                self.result.blame(f"{name} goes on {why}")
                return
            await asyncio.sleep(0.05)
        self.result.happened(f"{name} ended itself with code {self.f.processes[name].returncode}")

    async def saving(self, timeout: float = SAVE_S) -> None:
        self.tried = self.name("case")
        await self.call("save", self.client.save(self.tried, timeout=timeout))

    async def call(self, what: str, call: Awaitable[object]) -> None:
        self.told = None
        try:
            await call
        except SafepointError as error:
            self.result.happened(f"{what}: {say(error)}")
            if isinstance(error, Refused) and error.reason is not Reason.UNAVAILABLE:
                self.told = False
        else:
            self.result.happened(f"{what}: succeeded")
            self.told = True

    # ---- and after it

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
