"""The same judgement on the shim of an engine, before a server that is like vLLM and generates by the clock.

The rule it keeps: an engine has no lease of its own, so what is judged is what its shim and that shim's successor do: the
engine runs again soon after somebody has started the shim, every request gets exactly its tokens, and after a restore no
token that the snapshot holds is generated again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from coordinator.client import AsyncClient
from coordinator.demo.ports import free_ports
from coordinator.wire import failpoints
from coordinator.wire.errors import SafepointError
from participant_shims.identity import CallIdentity
from tests.faults.cases import Case, Trigger
from tests.faults.fleet import LEASE_S, REPOSITORY, settings_of_a_coordinator
from tests.faults.lane import HIT_WITHIN_S, SAVE_S, SLACK_S, STOPPED_S
from tests.faults.result import Result, say
from tests.vllm.scripted_engine import Scripted, scripted

WIDTH = 4
TOKENS = 60
TOKEN_S = 0.02
SOON_S = 30.0  # until a process has started, on a machine that is busy
PROMPT = [1, 2, 3]
ANSWER = "".join(f"w{100 + len(PROMPT) + n}" for n in range(TOKENS))
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True,
        "logprobs": 0}  # fmt: skip
SHIM = "engine/shim"


def _case(name: str, fault: str, trigger: Trigger = Trigger.SAVE) -> Case:
    return Case(SHIM, f"engine.{name}", fault, trigger)


ENGINE_CASES = (
    *(
        _case(name, "kill")
        for name in ("before_note", "before_pause", "after_pause", "after_quiet", "before_requests",
                     "before_requests_fsync", "before_resume", "after_resume")
    ),
    *(_case(name, "kill", Trigger.RESTORE) for name in ("before_publish", "before_restored")),
    *(_case(name, "kill", Trigger.RESUME) for name in ("before_claim", "before_continue", "before_over")),
    *(
        _case(name, error, trigger)
        for name, trigger in (("before_note", Trigger.SAVE), ("before_requests", Trigger.SAVE),
                              ("before_requests_fsync", Trigger.SAVE), ("before_publish", Trigger.RESTORE),
                              ("before_restored", Trigger.RESTORE), ("before_claim", Trigger.RESUME),
                              ("before_over", Trigger.RESUME))
        for error in ("error(EIO)", "error(ENOSPC)")
    ),
    _case("after_pause", "stop"),
    _case("before_resume", "stop"),
    _case("after_pause", "delay(3000)"),
)  # fmt: skip


class EngineLane:
    """A coordinator and a shim as processes, an engine here, and a trainer that keeps requests in flight."""

    def __init__(self, directory: Path, engine: Scripted) -> None:
        self.directory, self.engine = directory, engine
        self.root, self.points = directory / "root", directory / "points"
        self.root.mkdir(mode=0o700)
        self.points.write_text("")
        self.port = free_ports(1)[0]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = AsyncClient(f"file:{self.root}/coordinator/address.json")
        self.http: aiohttp.ClientSession
        self.life = directory / "life"
        self.serial = 0
        self.last = ""
        self.hit: set[str] = set()

    # ---- processes

    def start(self, name: str) -> None:
        """Start it, unless it runs."""
        running = self.processes.get(name)
        if running is not None and running.poll() is None:
            return
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SAFEPOINT_", "PYTHONPATH"))}
        environment = kept | {
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}", "SAFEPOINT_ROOT": str(self.root),
        }  # fmt: skip
        command = [sys.executable, "-m", "coordinator.cli", "coordinator", "--root", str(self.root)]
        if name == "engine":
            self.life.mkdir(mode=0o700, exist_ok=True)
            environment |= {
                failpoints.VARIABLE: f"file:{self.points}",
                "SAFEPOINT_COORDINATOR": f"file:{self.root}/coordinator/address.json",
            }
            command = [
                sys.executable, "-m", "participant_shims.cli", "shim", "--vllm",
                f"127.0.0.1:{self.port}={self.engine.target}", "--name", "engine", "--life", str(self.life),
            ]  # fmt: skip
        else:
            environment |= settings_of_a_coordinator()
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def end(self, *names: str) -> None:
        for name in names:
            process = self.processes.get(name)
            if process is not None:
                process.kill()
                process.wait()

    def arm(self, specification: str) -> None:
        new = self.points.with_name(".next")
        new.write_text(specification)
        new.rename(self.points)

    def hits(self) -> set[str]:
        """What did something since `forget_hits`."""
        path = Path(f"{self.points}.hits")
        return {json.loads(line)["name"] for line in path.read_text().splitlines()} if path.exists() else set()

    def forget_hits(self) -> None:
        Path(f"{self.points}.hits").unlink(missing_ok=True)

    async def until_hit(self, failpoint: str) -> None:
        until = time.monotonic() + HIT_WITHIN_S
        while time.monotonic() < until:
            if failpoint in self.hits():
                self.hit.add(failpoint)
                return
            await asyncio.sleep(0.005)
        raise TimeoutError(f"{failpoint} was not reached within {HIT_WITHIN_S:.0f} s")

    async def healthy(self) -> None:
        """Both run, the shim is registered, and the engine generates."""
        for name in ("coordinator", "engine"):
            self.start(name)
        until, seen = time.monotonic() + SOON_S, "nobody"
        while time.monotonic() < until:
            with contextlib.suppress(SafepointError, OSError, ValueError):
                said = json.loads((self.life / "shim.json").read_text())
                topology = await self.client.topology(timeout=2)
                seen = str([p.incarnation_id for p in topology.participants])
                if seen == str([said["incarnation_id"]]) and not self.engine.paused:
                    return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"not healthy: {seen}, paused {self.engine.paused}{self._log()}")

    def _log(self) -> str:
        return "".join(f"\n{p.name}: {p.read_text()[-1500:]}" for p in self.directory.glob("*.log"))

    # ---- requests

    async def ask(self, rollout_id: str, attempt: int) -> dict[str, Any]:
        """Until there is an answer: its text, how it was continued, and how often it was sent."""
        headers, sent = CallIdentity(rollout_id, attempt, "0.1").headers(), 0
        while True:
            sent += 1
            try:
                async with self.http.post(
                    f"http://127.0.0.1:{self.port}/v1/completions", json=BODY, headers=headers
                ) as response:
                    if response.status == 200:
                        choice = (await response.json())["choices"][0]
                        label = response.headers.get("x-safepoint-continued", "")
                        return {"text": choice["text"], "label": label, "sent": sent}
            except (aiohttp.ClientError, ConnectionError):
                pass
            await asyncio.sleep(0.1)

    def dispatch(self, attempt: int = 0) -> dict[str, asyncio.Task[dict[str, Any]]]:
        """`WIDTH` requests; those of attempt 0 are new ones."""
        self.serial += attempt == 0
        names = [f"e{self.serial}-{n}" for n in range(WIDTH)]
        return {name: asyncio.create_task(self.ask(name, attempt)) for name in names}

    async def under_way(self, tokens: int = 5) -> None:
        """Until each request that was dispatched has had some tokens."""
        until = time.monotonic() + SOON_S
        while len(self.engine.running) < WIDTH and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(tokens * TOKEN_S)

    def name(self, what: str) -> str:
        self.serial += 1
        return f"s{self.serial:03d}-{what}"

    # ---- one case

    async def run(self, case: Case) -> Result:
        """Put it through one case, and judge what is left."""
        result = Result(f"engine: {case.name}", case.process, case.failpoint, case.fault, case.trigger.value)
        began = time.monotonic()
        self.forget_hits()
        asked: dict[str, asyncio.Task[dict[str, Any]]] = {}
        try:
            asked = await (self._save if case.trigger is Trigger.SAVE else self._restore)(case, result)
            await self._judge(case, result, asked)
        except Exception as error:
            result.blame(f"the case did not come to its end: {say(error)}")
        finally:
            self.arm("")
            for task in asked.values():
                task.cancel()
        result.seconds = round(time.monotonic() - began, 1)
        return result

    async def _fault(self, case: Case, result: Result) -> None:
        """Wait for it, and mend what a supervisor would; measure how long the engine stands still afterwards."""
        await self.until_hit(case.failpoint)
        self.arm("")
        shim = self.processes["engine"]
        if case.fault == "kill":
            await asyncio.to_thread(shim.wait)
            self.start("engine")
        elif case.fault == "stop":
            await asyncio.sleep(STOPPED_S)
            os.kill(shim.pid, signal.SIGCONT)
        since = time.monotonic()
        bound = {"kill": SOON_S, "stop": LEASE_S + SLACK_S}.get(case.fault, 3.0 + LEASE_S + SLACK_S)
        if case.trigger is Trigger.SAVE:
            while self.engine.paused and time.monotonic() - since < bound:
                await asyncio.sleep(0.01)
            result.thaw_s = round(time.monotonic() - since, 2)
            if self.engine.paused:
                result.blame(f"the engine is still paused {bound:.0f} s after the fault")

    async def _save(self, case: Case, result: Result) -> dict[str, asyncio.Task[dict[str, Any]]]:
        asked = self.dispatch()
        await self.under_way()
        self.arm(case.specification)
        saving = asyncio.create_task(self.client.save(self.name("case"), timeout=SAVE_S))
        await self._fault(case, result)
        await self._told("save", saving, result)
        return asked

    async def _restore(self, case: Case, result: Result) -> dict[str, asyncio.Task[dict[str, Any]]]:
        """Save while requests run, lose everything, restore; then the fault, and whatever is right after it."""
        lost = self.dispatch()
        await self.under_way(tokens=15)
        self.last = (await self.client.save(self.name("to-restore"), timeout=SAVE_S)).snapshot_id
        for task in lost.values():
            task.cancel()
        await self._anew()
        if case.trigger is Trigger.RESTORE:
            self.arm(case.specification)
            restoring = asyncio.create_task(self.client.restore(self.last, timeout=SAVE_S))
            await self._fault(case, result)
            await self._told("restore", restoring, result)
            await self.client.abort("the restore met a fault", timeout=10)
            await self._anew()
        await self.client.restore(self.last, timeout=SAVE_S)
        self.serial -= 1  # the same rollouts again
        if case.trigger is Trigger.RESUME:
            self.arm(case.specification)
        self.engine.bodies.clear()
        await self.client.resume(timeout=10)
        asked = self.dispatch(attempt=1)
        if case.trigger is Trigger.RESUME:
            await self._fault(case, result)
            result.happened("resume: succeeded; the requests go on")
        return asked

    async def _anew(self) -> None:
        """A fresh shim before an engine that was started anew."""
        self.end("engine")
        shutil.rmtree(self.life, ignore_errors=True)
        self.engine.started += 1
        self.engine.paused = False
        await self.healthy()

    async def _told(self, what: str, call: asyncio.Task[Any], result: Result) -> None:
        try:
            await call
            result.happened(f"{what}: succeeded")
        except SafepointError as error:
            result.happened(f"{what}: {say(error)}")

    async def _judge(self, case: Case, result: Result, asked: dict[str, asyncio.Task[dict[str, Any]]]) -> None:
        await self.healthy()
        _, late = await asyncio.wait(asked.values(), timeout=SOON_S)
        result.lost += len(late)
        for name, task in asked.items():
            if not task.done():
                result.blame(f"{name} has no answer")
                continue
            said = task.result()
            result.restarted += said["sent"] > 1
            if said["text"] != ANSWER:
                result.lost += 1
                result.blame(f"{name} has other tokens: {said['text']}"[:200])
            # The first time that it is asked: what the snapshot holds is not generated again. (A shim that is killed has
            # the tokens since then with it, and nobody has seen those.)
            if case.trigger is not Trigger.SAVE and said["sent"] == 1 and not said["label"].startswith("exact"):
                result.blame(f"{name} was not continued from the snapshot: {said['label']!r}")
        if case.trigger is not Trigger.SAVE:
            anew = sum(body.get("prompt") == PROMPT for body in self.engine.bodies)
            result.repeated = anew
            if anew:
                result.blame(f"{anew} requests of the snapshot began anew")
        if case.fault != "kill" and result.restarted:
            result.blame(f"{result.restarted} requests were cut off although their shim lived")
        try:
            saved = await self.client.save(self.name("next"), timeout=SAVE_S)
            result.next_save = f"{saved.totals.all} rollouts, {saved.pause_s:.2f} s"
            for name in filter(None, (self.last, saved.snapshot_id)):
                await self.client.verify(name, timeout=20)
            self.last = saved.snapshot_id
        except SafepointError as error:
            result.next_save = say(error)
            result.blame(f"the next save: {error}")
        if case.trigger is Trigger.SAVE and case.fault == "kill" and (self.life / "paused-by-us").exists():
            result.blame("the note of a pause that is over is still there")


@contextlib.asynccontextmanager
async def engine_lane() -> AsyncGenerator[EngineLane]:
    """Everything started and registered."""
    directory = Path(tempfile.mkdtemp(prefix="faultse-"))
    try:
        async with scripted() as engine, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as http:

            async def generate() -> None:
                while True:
                    await asyncio.sleep(TOKEN_S)
                    engine.step()

            generating = asyncio.create_task(generate())
            lane = EngineLane(directory, engine)
            lane.http = http
            try:
                await lane.healthy()
                yield lane
            finally:
                lane.end("engine", "coordinator")
                await lane.client.close()
                generating.cancel()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def run_engine(
    told: Callable[[Result], None], cases: tuple[Case, ...] = ENGINE_CASES
) -> tuple[list[Result], set[str]]:
    """All cases, one after the other; and the failpoints that did something."""
    results: list[Result] = []
    async with engine_lane() as lane:
        for case in cases:
            results.append(await lane.run(case))
            told(results[-1])
        return results, lane.hit
