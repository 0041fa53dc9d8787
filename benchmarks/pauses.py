"""How long everybody is paused, and what it grows with: generations, live sessions, live rollouts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from benchmarks import live
from benchmarks.live import Sessions
from benchmarks.measure import Spread, spread
from benchmarks.results import Curves, Results, Table
from benchmarks.scale import Scale
from coordinator.client_results import SaveResult
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import row
from tests.gym.whole import Trainer, Whole, until

LIVE: Final = 16
SESSION_KB: Final = 10
BEGIN_WITHIN_S: Final = 180.0


def run(scale: Scale, results: Results) -> None:
    """Fills `pause_by_generation` and `pause_by_sessions`."""
    asyncio.run(_run(scale, results))


async def _run(scale: Scale, results: Results) -> None:
    async with _pausing(scale.pauses) as pausing:
        by_rollouts = {n: await pausing.with_rollouts(n) for n in scale.rollouts}
        by_seconds = {s: await pausing.while_generating(s) for s in scale.generations_s}
    async with _pausing(scale.pauses) as pausing:  # others: what was generated for still runs in those
        by_sessions = {n: await pausing.with_sessions(n) for n in scale.sessions}
    results.ratios["pause_by_generation"] = _ends(list(by_seconds.values()))
    results.ratios["pause_by_sessions"] = _ends(list(by_sessions.values()))
    _tell("generation", f"Pause by length of generations, {LIVE} in flight", "generation, s", by_seconds, results)
    _tell("rollouts", "Pause by live rollouts", "live rollouts", by_rollouts, results)
    title = f"Pause by live sessions of {SESSION_KB} kB, 1 % changed"
    _tell("sessions", title, "live sessions", by_sessions, results)


@asynccontextmanager
async def _pausing(pauses: int) -> AsyncIterator[_Pausing]:
    with live.on_disk() as directory, ScriptedEndpoint() as endpoint:
        async with live.deployment(directory, live.config(endpoint.url)) as job:
            pausing = _Pausing(job, endpoint, pauses)
            await pausing.save()
            yield pausing


class _Pausing:
    """Saves of one deployment, in different circumstances. Each method gives the pauses in seconds."""

    def __init__(self, job: Whole, endpoint: ScriptedEndpoint, pauses: int) -> None:
        self._job, self._endpoint, self._pauses = job, endpoint, pauses
        self._sessions = Sessions(job)
        self._numbers = itertools.count(1)

    async def save(self) -> SaveResult:
        return (await live.save(self._job, f"p-{next(self._numbers)}")).result

    async def while_generating(self, seconds: float) -> list[float]:
        """Some rollouts wait, each for a generation of so many seconds. Nobody waits for long ones to end."""
        turns = 2 if seconds > 1 else 60  # they live for as long as the saves take
        async with Trainer(self._job.fleet) as trainer:
            runs, found = await self._while_running(trainer, LIVE, turns, round(seconds * 1000))
            for each in runs:
                each.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
        return found

    async def with_rollouts(self, rollouts: int) -> list[float]:
        """So many rollouts wait, each for its first generation."""
        self._endpoint.hold()
        try:
            async with Trainer(self._job.fleet) as trainer:
                runs, found = await self._while_running(trainer, rollouts, 1, 0)
                self._endpoint.release()
                await asyncio.gather(*runs)
        finally:
            self._endpoint.release()
        return found

    async def _while_running(
        self, trainer: Trainer, rollouts: int, turns: int, delay_ms: int
    ) -> tuple[list[asyncio.Task[Any]], list[float]]:
        begun, first = self._endpoint.begun, next(self._numbers) * 10_000
        rows = [row(first + i, turns, delay_ms=delay_ms) for i in range(rollouts)]
        runs = [asyncio.create_task(trainer.run(each)) for each in rows]
        await until(lambda: self._endpoint.begun >= begun + rollouts, BEGIN_WITHIN_S)
        found = [await self.save() for _ in range(self._pauses)]
        if any(each.totals.kept_in_flight < rollouts for each in found):
            raise RuntimeError(f"a save did not find {rollouts} rollouts in flight")
        return runs, [each.pause_s for each in found]

    async def with_sessions(self, sessions: int) -> list[float]:
        """So many sessions are there, and a hundredth of them has changed since the last save."""
        fill, known = self._sessions.fill, len(self._sessions.cookies)
        await fill(range(known, sessions), SESSION_KB, next(self._numbers))
        await self.save()
        found: list[float] = []
        for _ in range(self._pauses):
            await fill(range(max(1, sessions // 100)), SESSION_KB, next(self._numbers))
            found.append((await self.save()).pause_s)
        return found


def _tell(name: str, title: str, unit: str, found: Mapping[float, list[float]], results: Results) -> None:
    if not found:
        return
    spreads = {size: spread(values) for size, values in found.items()}
    rows = [(f"{size:,}", str(each.scaled(1000)), str(each.runs)) for size, each in spreads.items()]
    results.tables.append(Table(title, (unit, "pause, ms", "runs"), rows))
    points = [(float(size), each.median, each.low, each.high) for size, each in spreads.items()]
    results.curves.append(Curves(name, title, unit, "pause, s", {"pause": points}))
    results.figures[f"pause_s_by_{name}"] = {str(size): values for size, values in found.items()}
    print(f"  {title}: " + ", ".join(f"{each[0]}: {each[1]} ms" for each in rows), flush=True)


def _ends(found: Sequence[list[float]]) -> Spread:
    """The last against the first, run by run."""
    return spread(last / first for last, first in zip(found[-1], found[0], strict=True))
