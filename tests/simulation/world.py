"""A whole job on the simulated loop: coordinator, servers with their gates and shims, and a trainer.

The rule: a process that dies is gone with everything in it, and what starts in its place begins as the real one does:
a coordinator with its root, a shim with its life's directory, a server with a new life.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import random as global_random
import secrets
import shutil
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable, Generator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from coordinator import journal, journal_file, past, sweeping
from coordinator.journal import ADDRESS_NAME
from coordinator.relay import host as relay_host
from coordinator.relay.host import RelayOptions, address_record
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire import manifest_file
from coordinator.wire.errors import SafepointError
from participant_shims import ends
from participant_shims.adapters.gym import GymAdapter
from participant_shims.gate import calllog_export, logfile
from participant_shims.gate import process as gate_process
from participant_shims.gate.state import sessions as state_sessions
from participant_shims.gate.state import shelf
from participant_shims.shim import Shim, ShimOptions
from tests.simulation.behaviour import KEPT_IN_MEMORY, KEPT_OUTCOMES
from tests.simulation.checks import HISTORY_KEEP, Checks
from tests.simulation.disk import SimDisk, installed
from tests.simulation.faults import LEASE_S, Plan
from tests.simulation.logs import Logs
from tests.simulation.loop import PROCESS, Process, SimLock, SimLoop
from tests.simulation.network import Network, Weather
from tests.simulation.servers import GymServer, Http, Work

ROOT = "/root"
WALL_START_NS = 1_800_000_000 * 10**9
SETTLED_FOR_S = 3.0  # how long writers count on a chunk that they have touched
GRACE_S = 40.0  # longer than that and any operation, as the real one
CLOCKS = (time.time, time.time_ns, time.monotonic, time.sleep)  # the machine's


class LoopTime:
    """The clock of a shim: its loop's."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        return asyncio.get_running_loop().call_later(delay_s, callback)


class World:
    """One run. `violations` is what must be empty at the end."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self.plan, self.scratch = plan, scratch
        seed = plan.seed
        self.loop = SimLoop(Random(f"order {seed}"), Random(f"threads {seed}"))
        self.disk = SimDisk(self.loop, Random(f"disk {seed}"))
        self.network = Network(self.loop, Random(f"network {seed}"))
        self.random = Random(f"world {seed}")
        self.work = Work(Random(f"work {seed}"))
        self.work.straggles = plan.straggles
        self.http = Http(self.loop, self.network)
        self.lines: list[str] = []
        self.violations: list[str] = []
        self.checks = Checks(self)
        self.coordinator: Coordinator | None = None
        self.coordinator_process: Process | None = None
        self.shims: dict[str, Shim] = {}
        self.shim_processes: dict[str, Process] = {}
        self.relay_processes: dict[str, Process] = {}
        self.lives: dict[str, int] = {}
        self.coordinators = 0
        self.supervised = True  # what dies is started again
        self.wall_jumped_s = 0.0
        self.when_prepared: dict[str, Callable[[], None]] = {}  # what happens once that one has answered Prepare
        self.network.names["coordinator"] = self.coordinator_address
        if plan.same_ports:
            self.network.ports = {f"shim of {name}": 30_000 + n for n, name in enumerate(plan.servers)}
        self.network.trace = lambda process, text: self.trace(process.name, text)
        self.network.on_call, self.network.on_reply = self.checks.called, self.checks.replied
        self.disk.trace = lambda text: self.trace("disk", text)
        self.disk.on_link, self.disk.on_unlink = self.checks.linked, self.checks.unlinked
        self.disk.violation = self.violation
        self.network.on_too_late = self.checks.behaviour.too_late
        self.network.on_send, self.network.on_end = self.checks.sent, self.checks.call_ended

    # ---- the story --------------------------------------------------------------------------------------------------------

    def trace(self, who: str, text: str) -> None:
        self.lines.append(f"{self.loop.now - 10_000:8.3f} {who:14} {text}")

    def violation(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)
            self.trace("VIOLATION", text)

    # ---- processes ----------------------------------------------------------------------------------------------------------

    def process(self, name: str, host: str) -> Process:
        made = Process(self.loop, name, host, self.plan.offsets.get(host.removesuffix("-b"), 0.0))
        self.checks.processes.append(made)
        return made

    def pid(self) -> int:
        """As `os.getpid`: of the simulated process. What is told of the machine would differ from run to run."""
        return PROCESS.get(self.loop.outside).number

    def began(self, pid: int) -> str:
        """As `process.started`."""
        return next((f"{each.born_at}" for each in self.checks.processes if each.number == pid and each.alive), "")

    def coordinator_address(self) -> str:
        text = self.disk.read_text(f"{ROOT}/coordinator/{ADDRESS_NAME}")
        try:
            return str(json.loads(text or "{}").get("address", ""))
        except ValueError:
            return ""

    def start_coordinator(self) -> Process:
        self.coordinators += 1
        number = self.coordinators
        process = self.process(f"coordinator-{number}", "coordinator" if number % 2 else "coordinator-b")
        self.coordinator_process, self.coordinator = process, None
        self.checks.behaviour.coordinator_starts(process)
        process.on_kill.append(lambda: self._coordinator_died(process))
        process.spawn(self._coordinate(process))
        return process

    def _coordinator_died(self, process: Process) -> None:
        self.trace(process.name, "is dead")
        if self.coordinator_process is process:
            self.coordinator = None
            delay = self.random.uniform(0.05, 3.0)
            self.loop.after(delay, lambda: self._replace(process))

    def _replace(self, dead: Process) -> None:
        if self.supervised and self.coordinator_process is dead:
            self.start_coordinator()

    async def _coordinate(self, process: Process) -> None:
        settings = Settings(
            root=ROOT, lease_ttl_s=LEASE_S, heartbeat_s=1.5, straggler_grace_s=2.0, prepare_timeout_s=12.0, commit_timeout_s=12.0,
            restore_timeout_s=20.0, history_keep=HISTORY_KEEP,
        )  # fmt: skip
        try:
            running = await serve(settings, make_server=self.network.make_server, dial=self.network.dial)
        except SafepointError as error:
            self.trace(process.name, f"cannot start: {error.reason.name} {error.problem.message}")
            self.checks.cannot_start(error)
            self.loop.after(0.0, process.kill)
            return
        self.trace(process.name, f"serves with epoch {running.epoch}")
        self.checks.coordinator_started(process, running)
        if self.coordinator_process is process:
            self.coordinator = running
        await running.wait()
        self.trace(process.name, f"has stopped by itself: {running.unfit}"[:100])
        self.loop.after(0.0, process.kill)

    def wall_ns(self) -> int:
        # Added as whole numbers: clocks that differ by seconds must agree in what comes after them, which is written down.
        return WALL_START_NS + int(self.loop.now * 1e9) + int((self.plan.wall_skew_s + self.wall_jumped_s) * 1e9)

    def wall_s(self) -> float:
        """As `time.time`, in whole milliseconds, which are as long in a file whatever the clock says."""
        return self.wall_ns() // 10**6 / 1e3

    def sleep(self, delay_s: float) -> None:
        """As `time.sleep`, in blocking work."""
        if self.loop.job is not None:
            self.loop.job.stop_for(delay_s)

    def start_server(self, name: str) -> None:
        kind, role = self.plan.servers[name]
        life = self.lives[name] = self.lives.get(name, 0) + 1
        directory = self.scratch / f"{name}.{life}"
        directory.mkdir()
        process = self.process(f"{name}.{life}", name)
        names = sorted(self.plan.servers)
        which = int(name.rpartition("-")[2])
        tools = [n for n in names if n.startswith("tools")]
        models = [n for n in names if n.startswith("model")]
        targets = {"resources": tools[which % len(tools)], "model": models[which % len(models)]}
        server = process.run(GymServer, process, self.http, self.work, name, kind, role, life, directory, targets)
        server.violation = self.violation
        self.checks.servers.append(server)
        self.http.servers[name] = server
        before = server.gate.on_change

        def changed() -> None:
            before()
            self.checks.doors_changed(server)

        server.gate.on_change = changed
        process.on_kill.append(lambda: self._server_died(name, process))
        process.spawn(server.main())
        self.start_shim(name, directory, life)

    def _server_died(self, name: str, process: Process) -> None:
        self.trace(process.name, "is dead")
        shim = self.shim_processes.get(name)
        life = self.lives[name]
        if shim is not None:
            self.loop.after(0.0, shim.kill)
        self.loop.after(self.random.uniform(0.5, 4.0), lambda: self._serve_again(name, life))

    def _serve_again(self, name: str, life: int) -> None:
        if self.supervised and self.lives[name] == life:
            self.start_server(name)

    def start_shim(self, name: str, directory: Path, life: int) -> None:
        process = self.process(f"shim of {name}", name)
        self.shim_processes[name] = process

        relay = self.plan.relays.get(name)
        target = address_record(self.scratch / relay) if relay is not None else "coordinator"

        async def main() -> None:
            options = ShimOptions(life=directory, participant_id=name, coordinator=target, root=Path(ROOT))
            shim = Shim(
                options, GymAdapter(directory, name), make_server=self.network.make_server, dial=self.network.dial,
                clock=LoopTime(),
            )  # fmt: skip
            self.shims[name] = shim
            self.checks.shim_started(process, name, shim)
            await shim._start()
            self.trace(process.name, f"{shim.incarnation_id[:8]} at {shim.address}")

        process.on_kill.append(lambda: self._shim_died(name, directory, life, process))
        process.spawn(main())

    def _shim_died(self, name: str, directory: Path, life: int, process: Process) -> None:
        self.trace(process.name, "is dead")
        soonest, latest = (0.001, 0.1) if self.plan.quick_restarts else (0.2, 2.5)
        self.loop.after(self.random.uniform(soonest, latest), lambda: self._shim_again(name, directory, life, process))

    def _shim_again(self, name: str, directory: Path, life: int, dead: Process) -> None:
        server = self.http.servers[name]
        if self.supervised and server.life == life and server.process.alive and self.shim_processes[name] is dead:
            self.start_shim(name, directory, life)

    def start_relay(self, name: str) -> None:
        process = self.process(name, name)
        self.relay_processes[name] = process

        async def main() -> None:
            options = RelayOptions("coordinator", self.scratch / name, name)
            try:
                relay = await relay_host.serve(options, make_server=self.network.make_server, dial=self.network.dial)
            except Exception as error:
                self.violation(f"{name} cannot start: {error!r}")
                raise
            self.trace(name, f"serves at {relay.address}")
            await relay.staying

        process.on_kill.append(lambda: self._relay_died(name, process))
        process.spawn(main())

    def _relay_died(self, name: str, process: Process) -> None:
        self.trace(name, "is dead")
        # Soon enough for its shims to wait for it, or not.
        delay = self.random.choice([self.random.uniform(0.1, 2.5), self.random.uniform(6.0, 15.0)])
        self.loop.after(delay, lambda: self._relay_again(name, process))

    def _relay_again(self, name: str, dead: Process) -> None:
        if self.supervised and self.relay_processes[name] is dead:
            self.start_relay(name)

    def everybody(self) -> list[Process]:
        """All processes that belong to the job now."""
        servers = [server.process for server in self.http.servers.values()]
        coordinator = [self.coordinator_process] if self.coordinator_process else []
        return [*coordinator, *servers, *self.shim_processes.values(), *self.relay_processes.values()]

    def kill_all(self) -> None:
        self.supervised = False
        for process in self.everybody():
            process.kill()

    def start_all(self) -> None:
        self.supervised = True
        self.start_coordinator()
        for name in sorted(set(self.plan.relays.values())):
            self.start_relay(name)
        for name in self.plan.servers:
            self.start_server(name)

    # ---- the end of all faults ------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        self.trace("world", "no more faults")
        self.network.weather = Weather()
        self.network.aimed.clear()
        self.when_prepared.clear()
        self.disk.full_until = self.disk.slow_until = 0.0
        self.disk.fail_fsync = self.disk.fail_read = 0
        self.disk.before_publish = None
        for process in self.checks.processes:
            process.crash_in_disk_ops = -1
            process.go_on()


class Memory:
    """Pure functions of what ships that are asked the same again and again."""

    def __init__(self) -> None:
        self._parse = manifest_file._parse
        self._parsed: dict[tuple[type[Any], bytes], Any] = {}
        self._scope_of, self._facts_of = state_sessions.scope_of, state_sessions.facts_of
        self._known: dict[type[Any], tuple[Any, Any]] = {}

    def parse(self, body: bytes, into: type[Any], where: str) -> Any:
        """As `manifest_file._parse`."""
        found = self._parsed.get((into, body))
        if found is None:
            if len(self._parsed) > 500:
                self._parsed.clear()
            found = self._parsed[into, body] = self._parse(body, into, where)
        copied = into()
        copied.CopyFrom(found)
        return copied

    def scope_of(self, server: object) -> Any:
        """As `sessions.scope_of`."""
        return self._of(server)[0]

    def facts_of(self, server: object) -> Any:
        """As `sessions.facts_of`."""
        return self._of(server)[1]

    def _of(self, server: object) -> tuple[Any, Any]:
        if type(server) not in self._known:
            self._known[type(server)] = (self._scope_of(server), self._facts_of(server))
        return self._known[type(server)]


MEMORY = Memory()


def defaults(instead: dict[Any, Any]) -> list[tuple[Any, Any, Any]]:
    """Put what stands in for a clock where functions have the machine's as a default: that was read when they were defined.

    Returns the functions with what they had.
    """
    given: list[tuple[Any, Any, Any]] = []
    for function in _with_clocks(len(sys.modules)):
        values, named = function.__defaults__, function.__kwdefaults__
        given.append((function, values, named))
        function.__defaults__ = values and tuple(_instead(value, instead) for value in values)
        function.__kwdefaults__ = named and {name: _instead(value, instead) for name, value in named.items()}
    return given


def _instead(value: Any, instead: dict[Any, Any]) -> Any:
    return instead[value] if isinstance(value, types.BuiltinFunctionType) and value in instead else value


@functools.lru_cache(maxsize=2)
def _with_clocks(modules: int) -> tuple[Any, ...]:
    """Functions of what ships that have a clock as a default; looked for again when more is loaded."""
    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("coordinator", "participant_shims"):
            here = [each for each in vars(module).values() if getattr(each, "__module__", "") == name]
            here += [each for owner in here if isinstance(owner, type) for each in vars(owner).values()]
            for function in here:
                if isinstance(function, types.FunctionType):
                    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
                    if any(value is clock for value in values for clock in CLOCKS):
                        found[id(function)] = function
    return tuple(found.values())


@contextlib.contextmanager
def made(plan: Plan) -> Generator[World]:
    """A world with its disk installed and chance under control; nothing of it is left afterwards."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    scratch = Path(tempfile.mkdtemp(prefix="safepoint-sim-", dir=base))
    world, logs = World(plan, scratch), Logs()
    chance = Random(f"secrets {plan.seed}")
    before = secrets.token_hex, secrets.token_bytes
    state = global_random.getstate()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    manifest_file._parse = MEMORY.parse
    constants = (
        (past, "KEPT_IN_MEMORY", KEPT_IN_MEMORY), (journal_file, "KEPT_OUTCOMES", KEPT_OUTCOMES[plan.little_memory]),
        (journal, "ROTATE_BYTES", 6_000), (time, "time_ns", world.wall_ns), (time, "time", world.wall_s), (time, "monotonic", world.loop.time),
        (time, "sleep", world.sleep),
        (logfile, "sqlite3", logs.sqlite3),
        (state_sessions, "scope_of", MEMORY.scope_of), (state_sessions, "facts_of", MEMORY.facts_of),
        (calllog_export, "SETTLED_FOR_S", SETTLED_FOR_S), (shelf, "SETTLED_FOR_S", SETTLED_FOR_S),
        (sweeping.sweep, "__kwdefaults__", {**(sweeping.sweep.__kwdefaults__ or {}), "grace_s": GRACE_S}),
        (calllog_export, "threading", SimpleNamespace(Lock=lambda: SimLock(world.loop))),
        (relay_host, "_own", lambda directory: directory.mkdir(exist_ok=True) or -1),
        (asyncio, "all_tasks", world.loop.tasks), (asyncio.tasks._all_tasks, "add", lambda task: None),  # type: ignore[attr-defined]
        (os, "getpid", world.pid), (gate_process, "started", world.began),
        (ends, "output_of", lambda pid: ""), (socket, "gethostname", lambda: PROCESS.get(world.loop.outside).host),
    )  # fmt: skip
    kept = [(module, name, getattr(module, name)) for module, name, _ in constants]
    for module, name, value in constants:
        setattr(module, name, value)
    given = defaults({
        CLOCKS[0]: time.time, CLOCKS[1]: time.time_ns, CLOCKS[2]: time.monotonic, CLOCKS[3]: time.sleep,
    })  # fmt: skip
    secrets.token_bytes = lambda nbytes=None: chance.randbytes(nbytes or 32)
    secrets.token_hex = lambda nbytes=None: f"{chance.getrandbits(8 * (nbytes or 32)):0{2 * (nbytes or 32)}x}"
    global_random.seed(f"global {plan.seed}")
    collects = gc.isenabled()
    gc.disable()  # when it runs is chance, and what it collects has callbacks
    try:
        with installed(world.disk):
            asyncio.set_event_loop(world.loop)
            try:
                yield world
            finally:
                world.loop.end()
                for server in world.checks.servers:
                    server.gate.on_change = None
                    server.log.close()
                logs.close()
                asyncio.set_event_loop(None)
                world.loop.close()
    finally:
        world.loop.forget()
        if collects:
            gc.enable()
        logging.disable(level)
        secrets.token_hex, secrets.token_bytes = before
        for function, values, named in given:
            function.__defaults__, function.__kwdefaults__ = values, named
        manifest_file._parse = MEMORY._parse
        for module, name, value in kept:
            setattr(module, name, value)
        global_random.setstate(state)
        shutil.rmtree(scratch, ignore_errors=True)


__all__ = ["PROCESS", "ROOT", "World", "made"]
