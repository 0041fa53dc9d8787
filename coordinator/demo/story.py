"""The demo: rollouts are saved while they run, everything is killed, and they finish as if nothing had happened.

Two worlds run the same tasks with the same seed. The first is never interrupted: the gate is loaded in its servers and is
never asked for anything; there are no shims and no coordinator. In the second one rollouts are saved while most of them are in flight,
they go on for a while, then every process gets SIGKILL, the coordinator and the policy included; new servers restore
the snapshot on other ports, a trainer that has forgotten everything dispatches the ledger, and the rollouts finish.
Then the two are compared.

The rule it keeps: every figure is measured, by `evidence`, `figures` and `compare`, from results, from the policy's logs and from
the snapshot's files. The last line printed is the figures as JSON, and the same goes to build/demo.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from coordinator.client_results import SaveResult
from coordinator.demo.compare import Generations, Outcome, differences, final_states
from coordinator.demo.drive import Trainer
from coordinator.demo.engines import Engine, RandomNetwork
from coordinator.demo.evidence import conversations_of, read_log, recorded_calls
from coordinator.demo.figures import Figures, Records, measure
from coordinator.demo.hosts import RayHost
from coordinator.demo.rows import READER, Task, make_tasks
from coordinator.demo.world import World
from coordinator.wire.errors import Reason, SafepointError, refuse

BUILD: Final = Path(__file__).resolve().parents[2] / "build"
TOKEN_MS: Final = 20.0
# A generation takes up to 2 s and a rollout 8 of them; beyond this something hangs.
FINISH_S: Final = 120.0
SNAPSHOT: Final = "demo-1"


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What the interrupted world ended with."""

    save: SaveResult
    restarted: frozenset[str]
    finished: frozenset[str]  # at the cut: what the trainer had by then, and what the ledger says
    outcome: Outcome


class Story:
    """Tells and measures one demo. `console` gets the story; `quiet` and `rough` are the engines of the two worlds."""

    # Whether the second world starts while the first one runs, which costs less time than cores.
    both_at_once = True
    finish_s = FINISH_S

    def __init__(
        self, console: Console, tasks: Sequence[Task], seed: int, folder: Path, quiet: Engine, rough: Engine
    ) -> None:
        self._console = console
        self._seed = seed
        self._tasks = tasks
        self._began = time.monotonic()
        self._quiet = World(folder / "uninterrupted", quiet, None)
        self._rough = World(folder / "interrupted", rough, RayHost())

    async def tell(self) -> Figures:
        """The figures. Raises SafepointError when a step is refused; everything that was started is ended then too."""
        self._say(f"[bold]{len(self._tasks)} rollouts on unmodified NeMo Gym servers[/], seed {self._seed}")
        try:
            expected = await self._uninterrupted()
            interrupted = await self._interrupted()
        finally:
            await asyncio.gather(self._quiet.stop(), self._rough.stop(), return_exceptions=True)
        found = self._differences(expected, interrupted.outcome)
        figures = self._measure(interrupted, equal=not found)
        self._show(figures, found)
        return figures

    async def _uninterrupted(self) -> Outcome:
        self._say("\n[bold]1. What it should be.[/] A run that nobody interrupts.")
        self._say("   Servers: a policy model, a stateful counter, stateless synonyms, an agent for each of the two.")
        with self._doing("starting servers"):
            await self._quiet.start()
        # The other world comes up meanwhile: that takes longer than the run does.
        starting = asyncio.create_task(self._rough.start()) if self.both_at_once else None
        try:
            began = time.monotonic()
            async with Trainer(self._quiet.fleet.urls) as trainer:
                with self._doing("rollouts run", trainer):
                    await self._drive(trainer, self._tasks, len(self._tasks))
            self._say(f"   {_summary(trainer.results)}, in {time.monotonic() - began:.1f} s.")
            await asyncio.to_thread(self._quiet.kill)
            with self._doing("starting the servers of the other run"):
                await (starting or self._rough.start())
        finally:
            if starting is not None:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        return _outcome(trainer)

    async def _interrupted(self) -> Interrupted:
        world, count = self._rough, len(self._tasks)
        self._say(
            "\n[bold]2. The same rollouts, saved while they run.[/] New servers, the coordinator an actor on Ray."
        )
        few = max(1, count // 8)
        async with Trainer(world.fleet.urls) as trainer:
            with self._doing("rollouts run", trainer):
                await self._to_the_cut(trainer, world, few)
            self._say(f"   {len(trainer.results)} have finished, {len(trainer.in_flight)} are in flight. Saving.")
            finished = frozenset(trainer.results)
            save = await self._save(world)
            self._say(f"   [green]{save.line}[/]")
            with self._doing("rollouts go on", trainer):
                await self._drive(trainer, [], len(trainer.results) + few)
            self._say(f"   They went on: {len(trainer.results)} have finished, {len(trainer.in_flight)} are in flight.")

            self._say("\n[bold]3. kill -9.[/] Every server, every shim, the policy, the coordinator.")
            killed = await asyncio.to_thread(world.kill)
        self._say(f"   {killed} processes are dead. The trainer forgets every result, too.")

        self._say("\n[bold]4. Back.[/] New servers on other ports, with nothing but the snapshot.")
        began = time.monotonic()
        with self._doing("starting servers"):
            revived_s = await world.restart()
        self._say(
            f"   Ray had the coordinator back {revived_s:.1f} s after the kill; all is up after {time.monotonic() - began:.1f} s."
        )
        restored = await world.client.restore(timeout=60)
        self._say(f"   [green]{restored.line}[/]")
        ledger = {rollout.rollout_id: rollout async for rollout in restored.rollouts()}
        await world.client.resume(timeout=30)
        finished |= {rollout.rollout_id for rollout in ledger.values() if rollout.completed}
        restarted = {rollout.rollout_id for rollout in (*ledger.values(), *restored.diverged) if rollout.restarts}

        self._say("\n[bold]5. On from there.[/] The trainer dispatches the ledger, row by row, and then the rest.")
        known = [task for task in self._tasks if task.rollout_id in ledger]
        rest = [task for task in self._tasks if task.rollout_id not in ledger]
        began = time.monotonic()
        async with Trainer(world.fleet.urls) as trainer:
            with self._doing("rollouts finish", trainer):
                await self._drive(trainer, [*known, *rest], count)
            self._say(f"   {_summary(trainer.results)}, in {time.monotonic() - began:.1f} s.")
        return Interrupted(save, frozenset(restarted), finished, _outcome(trainer))

    async def _to_the_cut(self, trainer: Trainer, world: World, few: int) -> None:
        """Dispatch everything, and wait for the moment to save: when `few` have finished."""
        del world
        await self._drive(trainer, self._tasks, few)

    async def _save(self, world: World) -> SaveResult:
        return await world.client.save(SNAPSHOT, timeout=60, metadata={"step": "1"})

    def _differences(self, expected: Outcome, actual: Outcome) -> list[str]:
        return differences(expected, actual)

    async def _drive(self, trainer: Trainer, tasks: Sequence[Task], until: int) -> None:
        trainer.dispatch(tasks)
        try:
            async with asyncio.timeout(self.finish_s):
                await trainer.until_finished(until)
        except TimeoutError:
            raise refuse(
                Reason.UNAVAILABLE,
                f"after {self.finish_s:.0f} s only {len(trainer.results)} rollouts have finished; without a result: "
                f"{', '.join(sorted(trainer.in_flight))}",
                next_step=f"Read the logs in {self._rough.folder.parent}.",
            ) from None
        trainer.raise_failures()

    def _measure(self, done: Interrupted, equal: bool) -> Figures:
        return self._plain_figures(
            done, equal, read_log(self._rough.policy_log(1)), read_log(self._rough.policy_log(2))
        )

    def _plain_figures(self, done: Interrupted, equal: bool, before: Generations, after: Generations) -> Figures:
        world, totals = self._rough, done.save.totals
        records = Records(
            rollouts=[task.rollout_id for task in self._tasks],
            in_flight=totals.all - totals.completed,
            restarted=done.restarted,
            finished=done.finished,
            recorded=recorded_calls(world.root, SNAPSHOT, self._seed),
            conversations={
                rollout_id: conversations_of(result, self._seed) for rollout_id, result in done.outcome.results.items()
            },
            before_kill=before,
            after_kill=after,
        )
        return measure(records, done.save.pause_s, done.save.size_bytes, equal)

    def _show(self, figures: Figures, found: Sequence[str]) -> None:
        table = Table(show_header=False, box=None, padding=(0, 1, 0, 3))
        for name, value in dataclasses.asdict(figures).items():
            table.add_row(name.replace("_", " "), str(value))
        self._say(
            "\n[bold]6. Compared with the run that nobody interrupted:[/] every answer, token, log-probability and"
        )
        self._say("   reward, and the state in which each counter ended.")
        self._console.print(table)
        for difference in found[:10]:
            self._say(f"   [red]different[/] {difference}")
        verdict = (
            "[bold green]Nothing was lost, nothing was done twice.[/]" if figures.good else "[bold red]Not equal.[/]"
        )
        self._say(f"   {verdict} It took {time.monotonic() - self._began:.0f} s.")

    def _doing(self, what: str, trainer: Trainer | None = None) -> Live:
        """A spinner on a terminal, with the counts of `trainer`; nothing in a pipe."""
        spinner = Spinner("dots", what)

        def now() -> Spinner:
            if trainer is not None:
                spinner.update(text=f"{what}: {len(trainer.results)} finished, {len(trainer.in_flight)} in flight")
            return spinner

        # Standard output is redirected already, to keep Ray's remarks out of the story.
        return Live(
            get_renderable=now, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
        )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


def _outcome(trainer: Trainer) -> Outcome:
    return Outcome(dict(trainer.results), final_states(trainer.results, READER))


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    calls = sum(
        item.get("generation_token_ids") is not None
        for result in results.values()
        for item in result["response"]["output"]
    )
    reward = sum(float(result["reward"]) for result in results.values()) / max(1, len(results))
    return f"{len(results)} rollouts finished, {calls} model calls, mean reward {reward:.3f}"


def run_demo(json: bool = False, rollouts: int = 32, seed: int = 7) -> int:
    """Run the demo; the exit code: 0 when nothing was lost, nothing done twice and all is equal, else 1.

    `json`: print nothing but the last line, and the story to standard error. Raises SafepointError when a step is refused:
    logs are under build/demo/ then, and nothing is left running.
    """
    return _run(json, rollouts, seed, BUILD)


def _run(as_json: bool, rollouts: int, seed: int, build: Path, token_ms: float = TOKEN_MS) -> int:
    engine = RandomNetwork(seed, token_ms)
    return show(
        as_json,
        "demo",
        build,
        lambda console, folder: Story(console, make_tasks(rollouts, seed), seed, folder, engine, engine),
    )


def show(as_json: bool, name: str, build: Path, make: Callable[[Console, Path], Story]) -> int:
    """Tell a story with its logs below build/<name>/ and its figures in build/<name>.json; the exit code."""
    folder = build / name
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(file=sys.stderr if as_json else sys.stdout)
    try:
        # Ray prints to standard output whenever a worker dies, and here one is killed on purpose.
        with (folder / "ray.log").open("w") as log, contextlib.redirect_stdout(log):
            figures = asyncio.run(make(console, folder).tell())
    except SafepointError:
        console.print(
            f"The demo did not get through. Logs are in {folder}.", markup=False, highlight=False, soft_wrap=True
        )
        raise
    line = json.dumps(dataclasses.asdict(figures))
    (build / f"{name}.json").write_text(line + "\n")
    print(line, flush=True)
    return 0 if figures.good else 1
