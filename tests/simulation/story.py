"""One run from its first process to its last check.

The rule: faults come while the job works, then they stop, and from then on everything must come right in bounded time:
everybody opens, the next save succeeds, a job that is killed continues from it, and every rollout ends with the result
that it would have had.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from coordinator.wire.errors import Problem, Reason
from tests.simulation.cut import finished_calls, next_attempts
from tests.simulation.faults import LEASE_S, Event, Plan
from tests.simulation.loop import Process
from tests.simulation.trainer import Trainer
from tests.simulation.world import GRACE_S, SETTLED_FOR_S, World, made

SETTLE_S = 60.0
FINISH_S = 400.0
WATCH_EVERY_S = 0.5


@dataclass
class Result:
    """What a run came to. `trace` is for people, `fingerprint` for comparing."""

    seed: int
    violations: list[str]
    trace: list[str]
    decisions: list[str]
    steps: int
    virtual_s: float
    fingerprint: int
    published: int
    restored: bool
    partial: int
    failures: list[tuple[str, Problem]]  # operations that were told to have failed, and why
    left: str  # a digest of everything on the disk, when it was asked for
    unsteady: str = ""  # where two runs of the same seed differed, once and not again


class Story:
    """Plays a plan in a world."""

    def __init__(self, world: World) -> None:
        self.world, self.plan = world, world.plan
        self.trainers = 0
        self.trainer = self._new_trainer()
        self.restored = False
        self.at_once = 0
        self.snapshot = "final"  # the last one before the job ends
        self._over = False
        self._extra: list[Process] = []

    def _new_trainer(self) -> Trainer:
        self.trainers += 1
        process = self.world.process(f"trainer-{self.trainers}", "trainer")
        return process.run(Trainer, self.world, process, self.trainers)  # type: ignore[no-any-return]

    async def play(self) -> None:
        """Everything. Ends early at the first violation."""
        world, plan = self.world, self.plan
        watching = asyncio.create_task(self._watch())
        world.start_all()
        await asyncio.sleep(1.0)
        trainer = self.trainer
        rows = [trainer.row(n) for n in range(plan.rows)]
        trainer.process.spawn(trainer.roll(rows, plan.concurrency))
        begun = world.loop.now
        for event in plan.events:
            await asyncio.sleep(max(0.0, begun + event.at - world.loop.now))
            if world.violations:
                break
            self._happen(event)
        await asyncio.sleep(max(0.0, begun + plan.duration_s - world.loop.now))
        if not world.violations:
            world.heal()
        again = (self._restart, self._finish, self._age) if plan.restarts else ()
        for step in (self._gone, self._settle, self._save, *again):
            if world.violations:
                break
            await step(rows)
        watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            self.world.checks.watch()

    # ---- what happens ---------------------------------------------------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        world, trainer = self.world, self.trainer
        world.trace("EVENT", str(event).split(maxsplit=1)[1])
        number = int(event.value)
        match event.kind:
            case "save":
                trainer.process.spawn(trainer.save(f"save-{number}", f"step-{number}"))
            case "other save":
                trainer.process.spawn(trainer.save(f"other-{number}", f"other-{number}"))
            case "cut":
                trainer.process.spawn(trainer.cut(f"cut-{number}", f"cut-{number}"))
            case "abort":
                trainer.process.spawn(trainer.abort())
            case "prune":
                trainer.process.spawn(trainer.prune(number))
            case "restore running":
                trainer.process.spawn(self._restore_running(trainer, number))
            case _:
                self._go_wrong(event)

    async def _restore_running(self, trainer: Trainer, number: int) -> None:
        newest = list(self.world.checks.published)
        if newest:
            operation = f"restore-{number}"
            await trainer.restore(operation, newest[-1], resume=True)
            await trainer.abort(operation)

    def _go_wrong(self, event: Event) -> None:
        world, weather, disk = self.world, self.world.network.weather, self.world.disk
        now, whom, value = world.loop.now, event.whom, event.value
        what, _, kind = event.kind.partition(" ")
        process = self._process(kind if what in ("crash", "pause") else "who writes", whom)
        match event.kind:
            case "crash coordinator" | "crash shim" | "crash server" | "crash relay":
                if process is not None:
                    process.kill()
            case "hang and crash coordinator":
                if world.shim_processes[whom].alive:
                    world.shim_processes[whom].pause()
                    world.loop.after(max(value, 2 * LEASE_S), world.shim_processes[whom].go_on)
                if world.coordinator_process is not None:
                    world.coordinator_process.kill()
            case "cut relay off":
                self._happen(replace(event, kind="partition"))
            case "pause coordinator" | "pause shim" | "pause server" | "pause trainer" | "pause relay":
                if process is not None:
                    process.pause()
                    world.loop.after(value, process.go_on)
            case "partition":
                # Shims and trainer against whoever coordinates: servers stay together, or nothing would roll.
                for host in ("coordinator", "coordinator-b"):
                    if event.extra in ("to", "both"):
                        weather.blocked[host, whom] = now + value
                    if event.extra in ("from", "both"):
                        weather.blocked[whom, host] = now + value
            case "weather":
                for name, rate in (("lose", 0.04), ("late", 0.1), ("twice", 0.25), ("cut", 0.08)):
                    if event.extra in (name, "all"):
                        setattr(weather, name, rate)
                        world.loop.after(2 * value, lambda name=name: setattr(weather, name, 0.0))
            case "disk full":
                disk.full_until = now + value
            case "disk slow":
                disk.slow_until, disk.slow_s = now + 2 * value, value / 6
            case "fsync fails":
                disk.fail_fsync, disk.fail_fsync_of = int(value), event.extra
            case "dies in disk":
                if process is not None:
                    process.crash_in_disk_ops = int(value)
            case "second coordinator":
                # The old one lives on, perhaps stopped, and thinks that it is the only one.
                process = world.coordinator_process
                if process is not None and value > 1:
                    process.pause()
                    world.loop.after(value, process.go_on)
                if process is not None:
                    self._extra.append(process)
                process = world.start_coordinator()
                if event.extra:
                    self._stopped_at_its_start(process, value)
            case "race at publish":
                disk.before_publish = lambda: self._race(event)
            case "power loss":
                self._lose_power()
            case "leave and come back":
                server = world.http.servers[whom]
                server.process.kill()
            case "one message":
                method, _, how = event.extra.partition(" ")
                for host in (whom, f"{whom}-b"):  # where coordinators take turns
                    world.network.aimed[method, host] = (how, value)
            case "when prepared":
                world.when_prepared[whom] = lambda: self._happen(replace(event, kind=event.extra))
            case "clock jumps":
                world.wall_jumped_s += value
            case "abort at once":
                self._abort_at_once(value)
            case "two at once":
                self._two_at_once(value)
            case other:
                raise AssertionError(other)

    def _abort_at_once(self, value: float) -> None:
        """A save and its abort reach a coordinator that does not run: it finds both when it goes on."""
        world, trainer, process = self.world, self.trainer, self.world.coordinator_process
        if process is None:
            return
        process.pause()
        world.loop.after(value, process.go_on)
        self.at_once += 1
        name = f"at-once-{self.at_once}"
        trainer.process.spawn(trainer.save(name, name))
        world.loop.after(0.02, lambda: trainer.process.spawn(trainer.abort(name)) if trainer.process.alive else None)

    def _stopped_at_its_start(self, process: Process, value: float) -> None:
        """One that has its epoch and not yet its address is stopped, and the next one is there before it goes on."""
        world = self.world
        self._extra.append(process)
        world.loop.after(world.random.uniform(0.0, 0.012), process.pause)
        world.loop.after(max(1.0, value), process.go_on)
        world.loop.after(0.5, lambda: world.start_coordinator() if world.coordinator_process is process else None)

    def _two_at_once(self, value: float) -> None:
        """Two saves, as of a timer and of somebody at a terminal."""
        world, trainer = self.world, self.trainer
        self.at_once += 1
        first, second = f"one-{self.at_once}", f"two-{self.at_once}"
        trainer.process.spawn(trainer.save(first, first))
        world.loop.after(
            value, lambda: trainer.process.spawn(trainer.save(second, second)) if trainer.process.alive else None
        )

    def _race(self, event: Event) -> float:
        """The moment between the last look and the link: what may come in between."""
        world, process = self.world, self.world.coordinator_process
        world.trace("EVENT", f"race at publish: {event.extra}")
        if event.extra == "second" and process is not None:
            self._extra.append(process)
            world.start_coordinator()
        elif event.extra == "crash" and process is not None:
            world.loop.after(event.value * 0.7, process.kill)
        elif event.extra == "crash after" and process is not None:
            world.loop.after(event.value + world.random.uniform(0.0, 0.05), process.kill)
        elif event.extra == "fsync":  # the name is there, and nobody may count on it
            world.disk.fail_fsync, world.disk.fail_fsync_of = 1, "coordinator"
        elif event.extra == "power":
            world.loop.after(event.value * 0.7, self._lose_power)
        return event.value

    def _process(self, kind: str, whom: str) -> Process | None:
        world = self.world
        if kind == "coordinator" or whom == "coordinator":
            return world.coordinator_process
        if kind == "trainer":
            return self.trainer.process
        if kind == "relay":
            return world.relay_processes[whom]
        if kind == "server":
            return world.http.servers[whom].process
        return world.shim_processes.get(whom)  # also of those who write: the shim writes most

    def _lose_power(self) -> None:
        world = self.world
        for process in world.checks.processes:
            if process.host != "trainer":
                process.kill()
        world.kill_all()
        world.disk.power_loss()
        world.trace("world", "power is lost and comes back")
        world.checks.all_whole()
        world.start_all()

    # ---- the faults are over ----------------------------------------------------------------------------------------------------

    async def _gone(self, rows: Any) -> None:
        """L1 with the coordinator gone for good: leases open everybody."""
        if not self.plan.coordinator_leaves:
            return
        world = self.world
        world.supervised = False
        for process in self._extra:
            process.kill()
        if world.coordinator_process is not None:
            world.coordinator_process.kill()
        world.trace("world", "the coordinator is gone for good")
        await asyncio.sleep(max(0.0, world.network.settled_at - world.loop.now) + LEASE_S + 2.5)
        for name, server in world.http.servers.items():
            if server.process.alive and server.gate.doors.closed:
                world.violation(f"L1: the coordinator is gone, and {name} is still closed")
        self._revive()

    def _revive(self) -> None:
        world = self.world
        world.supervised = True
        if world.coordinator_process is None or not world.coordinator_process.alive:
            world.start_coordinator()
        for name, process in list(world.relay_processes.items()):
            if not process.alive:
                world.start_relay(name)
        for name, server in world.http.servers.items():
            if not server.process.alive:
                world.start_server(name)
            elif not world.shim_processes[name].alive:
                world.start_shim(name, world.scratch / f"{name}.{server.life}", server.life)

    async def _settle(self, rows: Any) -> None:
        """L1, L2, L4: in bounded time nobody is closed, no operation runs, and everybody is here."""
        world = self.world
        self._revive()
        trainer = self.trainer
        # From here on everybody is connected: what was under way has arrived, and what broke was noticed.
        await asyncio.sleep(max(0.0, world.network.settled_at - world.loop.now))
        until = world.loop.now + SETTLE_S
        why = "nothing"
        while world.loop.now < until:
            await asyncio.sleep(0.5)
            here = await self._as_trainer(trainer.everybody_is_here())
            idle = await self._as_trainer(trainer.idle())
            closed = [n for n, s in world.http.servers.items() if s.gate.doors.closed]
            fit = world.coordinator is not None and world.coordinator.unfit is None
            fit = fit and not world.coordinator.operations.journal.broken  # it is about to be started again
            replaced = [process.name for process in self._extra if process.alive]  # they leave without being told
            if here and idle and fit and not closed and not replaced:
                return
            if here and not idle:
                await self._as_trainer(trainer.abort())  # a restore that failed stays paused until somebody says so
            why = f"everybody here: {here}, idle: {idle}, closed: {closed}, replaced and alive: {replaced}"
        world.violation(f"L2: {SETTLE_S:.0f} s after the last fault it has not settled: {why}")

    async def _as_trainer(self, work: Any) -> Any:
        return await self.trainer.process.spawn(work)

    async def _save(self, rows: Any) -> None:
        """L3: the next save succeeds."""
        await self._must_save("final")
        self.world.checks.all_whole()

    async def _must_save(self, name: str) -> None:
        world = self.world
        if await self._as_trainer(self.trainer.save(name, name)):
            return
        if self._remembers_too_many():
            # As its next step says: a new epoch makes room. The name is used up.
            assert world.coordinator_process is not None
            world.coordinator_process.kill()
            await self._settle(())
            name, self.snapshot = f"{name}-again", f"{name}-again"
            if await self._as_trainer(self.trainer.save(name, name)):
                return
        world.violation(f"L3: nothing is wrong any more, and {name} does not succeed")

    def _remembers_too_many(self) -> bool:
        """Whether the last save was refused only because fences that remember few operations have had so many."""
        return self.plan.little_memory and self.trainer.last_failure is Reason.LIMIT_EXCEEDED

    async def _restart(self, rows: Any) -> None:
        """The whole job dies, comes back, and goes on from the newest snapshot."""
        world, plan = self.world, self.plan
        await asyncio.sleep(world.random.uniform(0.0, 3.0))
        self.trainer.process.kill()
        world.kill_all()
        if plan.power_loss_at_end:
            world.disk.power_loss()
        world.trace("world", "the job is started again")
        world.checks.all_whole()
        self.trainer = trainer = self._new_trainer()
        world.start_all()
        if plan.faults_in_restore:
            names = list(plan.servers)
            for _ in range(2):
                kind, whom = (
                    world.random.choice(["crash coordinator", "crash shim", "pause shim", "weather"]),
                    world.random.choice(names),
                )
                event = Event(0.0, kind, whom, world.random.uniform(0.3, 9.0), "all")
                world.loop.after(world.random.uniform(0.5, 6.0), lambda e=event: self._unless_healed(e))
        until = world.loop.now + 3 * SETTLE_S
        number = 0
        while world.loop.now < until:
            await asyncio.sleep(0.5)
            if not await self._as_trainer(trainer.everybody_is_here()):
                continue
            number += 1
            error = await self._as_trainer(trainer.restore(f"restore-final-{number}", self.snapshot, resume=True))
            if error is None:
                self.restored = True
                break
            if error.reason is Reason.FINGERPRINT_MISMATCH:
                break
            await self._as_trainer(trainer.abort())
        world.heal()
        self._revive()
        if not self.restored:
            world.violation(f"L3: the newest snapshot cannot be restored after {number} tries")

    def _unless_healed(self, event: Event) -> None:
        if not self.restored:
            self._happen(event)

    async def _finish(self, rows: Any) -> None:
        """Every rollout ends, with the result that it must have; nothing is left over."""
        world, trainer = self.world, self.trainer
        world.work.straggles = 0.0
        if not self.plan.faults_in_restore:  # else a server may have died again, and what it had with it
            for server in world.http.servers.values():
                server.finished = finished_calls(world, self.snapshot)
                server.attempts = next_attempts(world, self.snapshot)
        rolling = trainer.process.spawn(trainer.roll(rows, 4))
        done, _ = await asyncio.wait({rolling}, timeout=FINISH_S)
        if not done:
            missing = [row["_ng_rollout_id"] for row in rows if row["_ng_rollout_id"] not in trainer.results]
            world.violation(f"L3: {missing} never end after the restore")
            return
        rolling.result()
        if not self.plan.used_on:
            return
        await self._must_save("last")
        await asyncio.sleep(3.0)
        await self._as_trainer(trainer.prune(2))
        await asyncio.sleep(1.0)
        world.checks.all_whole()
        world.checks.nothing_left()
        world.checks.remembered_rightly()

    async def _age(self, rows: Any) -> None:
        """What nobody needs any more is deleted once it is old, whatever happens meanwhile, and nothing else is."""
        world, trainer, plan = self.world, self.trainer, self.plan
        if not plan.ages:
            return
        # A save that is given up has written chunks that no snapshot names, and its writers count on them.
        await self._give_up("given-up-1")
        await self._as_trainer(trainer.prune(1))
        await self._must_save("young")
        # What has changed since is in no snapshot: the saves that are given up write it and count on it.
        await self._as_trainer(trainer.roll([trainer.row(plan.rows)], 1))
        await self._give_up("given-up-2")
        await asyncio.sleep(GRACE_S + SETTLED_FOR_S)
        await self._give_up("given-up-3")  # asks for what is old by now
        world.trace("EVENT", f"what is old is swept: {plan.ages}")
        pruning = trainer.process.spawn(trainer.prune(1))
        await asyncio.sleep(world.random.uniform(0.0, 0.03))
        self._disturb(plan.ages)
        await asyncio.sleep(world.random.uniform(0.0, 0.05))
        saving = trainer.process.spawn(trainer.save("meanwhile", "meanwhile"))
        await asyncio.wait({pruning, saving})
        refused = "meanwhile" not in world.checks.published
        if plan.ages == "quiet" and refused and not self._remembers_too_many():
            world.violation("L3: nothing is wrong, and a save does not succeed after what is old was swept")
        world.heal()
        await self._settle(rows)
        await self._must_save("aged")
        world.checks.all_whole()
        await asyncio.sleep(GRACE_S + SETTLED_FOR_S)
        await self._as_trainer(trainer.prune(1))
        world.checks.all_whole()
        world.checks.nothing_left(chunks=True)

    async def _give_up(self, name: str) -> None:
        saving = self.trainer.process.spawn(self.trainer.save(name, name))
        await asyncio.sleep(self.world.random.uniform(0.005, 0.1))
        await self._as_trainer(self.trainer.abort(name))
        await saving

    def _disturb(self, how: str) -> None:
        world, process = self.world, self.world.coordinator_process
        if process is None or how == "quiet":
            return
        if how == "crash":
            process.crash_in_disk_ops = world.random.randint(1, 40)
        elif how == "power":
            world.loop.after(world.random.uniform(0.0, 0.05), self._lose_power)
        elif how == "fsync":
            world.disk.fail_fsync, world.disk.fail_fsync_of = 1, world.random.choice(["", "coordinator"])
        elif how == "second":  # the one that sweeps lives on, perhaps stopped
            self._extra.append(process)
            if world.random.random() < 0.7:
                process.pause()
                world.loop.after(world.random.uniform(0.3, 9.0), process.go_on)
            world.start_coordinator()


def play(plan: Plan, *, digest: bool = False) -> Result:
    """Run a plan. Never raises for what goes wrong inside: that is a violation. `digest`: fill in `left`."""
    with made(plan) as world:
        story = Story(world)
        try:
            world.loop.run_until_complete(story.play())
        except Exception as error:
            world.violation(f"the simulation stopped: {error!r}")
        for failure in world.loop.failures:
            world.violation(f"an exception that nobody caught: {failure}")
        return Result(
            plan.seed, list(world.violations), world.lines, list(world.checks.decisions), world.loop.steps,
            world.loop.now - 10_000, world.loop.fingerprint, len(world.checks.published), story.restored,
            world.checks.partial, list(world.checks.failures), world.disk.digest() if digest else "",
        )  # fmt: skip
