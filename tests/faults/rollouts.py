"""The two ends of the fleet that no fault hits: the engine that generates, and the trainer that keeps rollouts in flight.

The rule they keep: every rollout that was dispatched is accounted for. It ends with the right result, or is lost; it may
be dispatched again when its connection breaks or its agent fails, and then it is counted as restarted. The engine counts
how often each turn was generated.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

AGAIN_S = 0.1
GENERATION_S = 0.05
FIRST_WITHIN_S = 30.0


def number_of(rollout_id: str, turn: int) -> int:
    """What the policy says at that turn; the same for ever."""
    return zlib.crc32(f"{rollout_id}/{turn}".encode()) % 9 + 1


class Engine:
    """Generates over HTTP. `generated`: how often each (rollout, turn) was generated to its end."""

    def __init__(self) -> None:
        self.generated: Counter[tuple[str, int]] = Counter()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Engine:
        app = web.Application()
        app.add_routes([web.post("/generate", self._generate)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/generate"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def repeated(self, rollout_ids: Iterable[str]) -> int:
        """Generations of these rollouts that were made more than once."""
        chosen = set(rollout_ids)
        return sum(n - 1 for (rollout_id, _), n in self.generated.items() if rollout_id in chosen)

    def knows(self, rollout_id: str) -> bool:
        """Whether the rollout has come as far as its first generation: its agent knows it."""
        return (rollout_id, 0) in self.generated

    async def _generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        rollout_id, turn = str(asked["rollout"]), int(asked["turn"])
        await asyncio.sleep(GENERATION_S)
        self.generated[rollout_id, turn] += 1
        return web.json_response({"n": number_of(rollout_id, turn)})


@dataclass
class Live:
    """One rollout of the trainer's. `wrong`: why what came back is not its result."""

    rollout_id: str
    row: dict[str, Any]
    dispatches: int = 0
    finished: bool = False
    wrong: str = ""
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Trainer:
    """Keeps `width` rollouts of `turns` turns in flight at the agent, for as long as it is told to."""

    def __init__(self, agent_url: str, name: str, width: int = 6, turns: int = 8) -> None:
        self._url = f"{agent_url}/run"
        self._name, self._width, self._turns = name, width, turns
        self._numbers = itertools.count()
        self._session: aiohttp.ClientSession | None = None
        self._pump: asyncio.Task[None] | None = None
        self.live: dict[str, Live] = {}
        self.done: list[str] = []  # finished, and not retired yet

    async def __aenter__(self) -> Trainer:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert self._session is not None
        await self._session.close()

    def go(self) -> None:
        """Begin to dispatch, or go on."""
        if self._pump is None:
            self._pump = asyncio.create_task(self._keep())

    async def under_way(self) -> None:
        """Until a rollout has ended, and others are on their way. Raises TimeoutError."""
        async with asyncio.timeout(FIRST_WITHIN_S):
            while not self.done or not self.in_flight():
                await asyncio.sleep(0.02)

    async def stop(self) -> list[Live]:
        """As a trainer that dies: nothing is dispatched any more, what is in flight is given up. Those, to be dispatched again."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._pump = None
        left = [each for each in self.live.values() if not each.finished]
        for each in left:
            if each.task is not None:
                each.task.cancel()
        await asyncio.gather(*(each.task for each in left if each.task is not None), return_exceptions=True)
        return left

    def dispatch(self, each: Live) -> None:
        """Dispatch a rollout, again or for the first time."""
        self.live[each.rollout_id] = each
        each.task = asyncio.create_task(self._run(each))

    async def finish(self, chosen: Iterable[Live], within_s: float) -> list[Live]:
        """Wait for these; those that have not ended with their result after `within_s` seconds: they are lost."""
        tasks = [each.task for each in chosen if each.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        return [each for each in chosen if not each.finished or each.wrong]

    def in_flight(self) -> list[Live]:
        """Those that have not ended."""
        return [each for each in self.live.values() if not each.finished]

    def take_done(self) -> list[str]:
        """Ids of those that are safe with the trainer since the last call."""
        done, self.done = self.done, []
        for rollout_id in done:
            self.live.pop(rollout_id, None)
        return done

    async def _keep(self) -> None:
        while True:
            while len(self.in_flight()) < self._width:
                rollout_id = f"{self._name}-{next(self._numbers):05d}"
                start = zlib.crc32(rollout_id.encode()) % 100
                row = {"_ng_rollout_id": rollout_id, "start": start, "turns": self._turns}
                self.dispatch(Live(rollout_id, row))
            await asyncio.sleep(0.05)

    async def _run(self, each: Live) -> None:
        assert self._session is not None
        while not each.finished:
            each.dispatches += 1
            try:
                async with self._session.post(self._url, json=each.row) as response:
                    if response.status == 200:
                        self._judge(each, await response.json())
                        return
            except (aiohttp.ClientError, ConnectionError):
                pass  # nobody knows what has become of it: the same id again
            await asyncio.sleep(AGAIN_S)

    def _judge(self, each: Live, result: dict[str, Any]) -> None:
        expected = each.row["start"] + sum(number_of(each.rollout_id, t) for t in range(each.row["turns"]))
        if result != {"total": expected, "count": expected, "reward": 1.0}:
            each.wrong = f"{each.rollout_id}: {result} instead of {expected}"
        else:
            self.done.append(each.rollout_id)
        each.finished = True
