"""The same judgement on real NeMo Gym servers: fewer cases, since their gates are the same code in a larger house.

The rule it keeps: what is killed is a real Gym server or its shim, and what is looked at afterwards is what the server
itself has: its call log says whether its doors are closed, whoever of its shim is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from coordinator.wire import failpoints
from coordinator.wire.errors import SafepointError
from tests.faults.cases import Case, Trigger
from tests.faults.fleet import LEASE_S
from tests.faults.lane import SLACK_S, STOPPED_S
from tests.faults.result import Result, say
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import counter_config, row
from tests.gym.whole import Trainer, Whole, announced, whole

ROLLOUTS = 6
TURNS = 5
# One file of failpoints for all of them: whoever comes first in the order of the phases is hit.
# A resources server that is killed has lost its sessions, and Gym's counter begins at zero for one that it does not
# know: its rollouts are wrong without a restore. So the counter is only stopped, and its shim killed.
CASES = (
    Case("agent/shim", "shim.after_manifest", "kill", Trigger.SAVE),
    Case("policy_model", "gate.before_close_ack", "kill", Trigger.SAVE),
    Case("counter", "gate.before_export_ack", "stop", Trigger.SAVE),
    Case("counter/shim", "shim.before_open", "kill", Trigger.SAVE),
    Case("agent", "gate.after_respond", "kill", Trigger.SAVE, "policy_model"),
)
_SERVER = {"agent": "counter_agent"}


def server_of(case: Case) -> str:
    """The Gym server that is hit, or beside which."""
    return _SERVER.get(case.owner, case.owner)


class GymLane:
    """One real fleet and its cases."""

    def __init__(self, job: Whole, points: Path, endpoint: ScriptedEndpoint) -> None:
        self.job, self.points, self.endpoint = job, points, endpoint
        self.serial = 0
        self.last = ""

    def arm(self, specification: str) -> None:
        """For all servers."""
        new = self.points.with_name(".next")
        new.write_text(specification)
        new.rename(self.points)

    def closed(self) -> list[str]:
        """Living servers whose doors are closed, by their own note."""
        shut: list[str] = []
        for name in self.job.fleet.names():
            with contextlib.suppress(sqlite3.Error, AssertionError):
                if self.job.fleet.processes[name].poll() is not None:
                    continue
                db = sqlite3.connect(f"file:{self.job.fleet.life(name)}/calls.db?mode=ro", uri=True)
                with contextlib.closing(db):
                    found = db.execute("SELECT value FROM meta WHERE key='doors'").fetchone()
                if found is not None and json.loads(found[0]) is not None:
                    shut.append(name)
        return shut

    async def play(self, trainer: Trainer, one: dict[str, Any]) -> dict[str, Any]:
        """Dispatch until there is a result; `dispatches` says how often."""
        dispatches = 0
        while True:
            dispatches += 1
            try:
                return {"result": await trainer.run(one), "dispatches": dispatches}
            except (aiohttp.ClientError, ConnectionError, AssertionError):
                await asyncio.sleep(0.2)

    async def run(self, case: Case) -> Result:
        """As Lane.run."""
        result = Result(f"NeMo Gym: {case.name}", case.process, case.failpoint, case.fault, case.trigger.value)
        began = time.monotonic()
        async with Trainer(self.job.fleet) as trainer:
            rows = [
                row(i, TURNS, delay_ms=150, _ng_rollout_id=f"g{self.serial}-{i}") for i in range(ROLLOUTS)
            ]  # fmt: skip
            plays = [asyncio.create_task(self.play(trainer, each)) for each in rows]
            try:
                await self._fault(case, result)
                await asyncio.wait(plays, timeout=60)
            finally:
                self.arm("")
                for play in plays:
                    if not play.done():
                        play.cancel()
                        result.lost += 1
                done = await asyncio.gather(*plays, return_exceptions=True)
        for each in done:
            if isinstance(each, BaseException) or each["result"]["reward"] != 1.0:
                result.lost += 0 if isinstance(each, asyncio.CancelledError) else 1
                result.blame(f"no right result: {each!r}"[:200])
            else:
                result.restarted += each["dispatches"] > 1
        if "/" in case.process and result.restarted:
            result.blame(f"{result.restarted} rollouts were cut off although their servers lived")
        try:
            self.serial += 1
            saved = await self.job.client.save(f"next-{self.serial}", timeout=20)
            result.next_save = f"{saved.totals.all} rollouts, {saved.pause_s:.2f} s"
            for name in filter(None, (self.last, saved.snapshot_id)):
                await self.job.client.verify(name)
            self.last = saved.snapshot_id
        except SafepointError as error:
            result.next_save = say(error)
            result.blame(f"the next save: {error}")
        result.seconds = round(time.monotonic() - began, 1)
        return result

    async def _fault(self, case: Case, result: Result) -> None:
        server = server_of(case)
        await asyncio.sleep(0.5)
        hits = self.points.with_name(f"{self.points.name}.hits")
        hits.unlink(missing_ok=True)
        self.serial += 1
        pid = (
            int(announced(self.job.fleet, server)["pid"])
            if "/" in case.process
            else self.job.fleet.processes[server].pid
        )
        saving = asyncio.create_task(self.job.client.save(f"case-{self.serial}", timeout=20))
        self.arm(case.specification)
        until, hit = time.monotonic() + 20, ""
        while not hit.endswith("\n") and time.monotonic() < until:  # the file is there a moment before its line
            await asyncio.sleep(0.01)
            hit = hits.read_text() if hits.exists() else ""
        t0 = time.monotonic()
        self.arm("")
        if not hit:
            result.blame(f"{case.failpoint} was not reached")
        elif json.loads(hit.splitlines()[0])["pid"] != pid:
            result.blame("somebody else reached it first")
        if case.fault == "stop":
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            t0 = time.monotonic()
        while self.closed() and time.monotonic() - t0 < LEASE_S + SLACK_S:
            await asyncio.sleep(0.05)
        if shut := self.closed():
            result.blame(f"still closed {LEASE_S + SLACK_S:.1f} s after the fault: {', '.join(shut)}")
        result.thaw_s = round(time.monotonic() - t0, 2)
        if case.fault == "kill" and "/" not in case.process:
            self.job.fleet.kill(server)
            await asyncio.to_thread(self.job.fleet.start, server)
        try:
            await saving
            result.happened("save: succeeded; published")
        except SafepointError as error:
            result.happened(f"save: {say(error)}")
        await self.job.registered()


async def run_gym(told: Callable[[Result], None]) -> list[Result]:
    """All cases on one fleet of real Gym servers."""
    directory = Path(tempfile.mkdtemp(prefix="faultsg-"))
    points = directory / "points"
    points.write_text("")
    results: list[Result] = []
    try:
        with ScriptedEndpoint() as endpoint:
            environment = {failpoints.VARIABLE: f"file:{points}"}
            async with whole(
                directory, counter_config(endpoint.url), environment=environment,
                lease_ttl_s=LEASE_S, heartbeat_s=0.3, straggler_grace_s=2.0,
            ) as job:  # fmt: skip
                lane = GymLane(job, points, endpoint)
                for case in CASES:
                    results.append(await lane.run(case))
                    told(results[-1])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return results
