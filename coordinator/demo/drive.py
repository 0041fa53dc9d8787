"""The trainer's side of the demo: dispatches rollouts, collects their results, and survives a crash of everything.

The rule it keeps: a lost connection is not a result. What was in flight when the servers died is unknown, stays without
a result, and is dispatched again with the same id after the restore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from coordinator.demo.rows import Task
from coordinator.wire.errors import Reason, refuse


@dataclass
class Trainer:
    """Dispatches tasks to agents. `results` holds the body of each finished rollout, `order` the ids as they finished."""

    urls: Mapping[str, str]
    results: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    order: list[str] = field(default_factory=list[str])
    unknown: set[str] = field(default_factory=set[str])
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"], init=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _moved: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def __aenter__(self) -> Trainer:
        # No timeout: a parked rollout waits as long as the pause lasts, as Gym's own client does.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert self._session is not None
        await self._session.close()

    @property
    def in_flight(self) -> frozenset[str]:
        """Rollouts that were dispatched and have neither a result nor a lost connection."""
        return frozenset(rollout_id for rollout_id, task in self._tasks.items() if not task.done())

    def dispatch(self, tasks: Sequence[Task]) -> None:
        """Begin rollouts; returns at once."""
        for task in tasks:
            self._tasks[task.rollout_id] = asyncio.create_task(self._run(task))

    async def until_finished(self, count: int) -> None:
        """Wait until so many rollouts have a result, or nothing is in flight any more."""
        while len(self.results) < count and self.in_flight:
            self._moved.clear()
            waiting = asyncio.ensure_future(self._moved.wait())
            # A task's end and `_moved` come in either order: the timeout is for the last one of all.
            await asyncio.wait([waiting], timeout=0.2)
            waiting.cancel()

    def raise_failures(self) -> None:
        """Raise the first failure that is no lost connection, if there was one."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def stop(self) -> None:
        """Give up what is in flight, as a trainer does that dies."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, task: Task) -> None:
        assert self._session is not None
        try:
            async with self._session.post(f"{self.urls[task.agent]}/run", json=task.row) as response:
                body = await response.read()
                if response.status != 200:
                    raise refuse(Reason.INTERNAL, f"{task.rollout_id}: HTTP {response.status}: {body[:300]!r}")
                self.results[task.rollout_id] = await response.json()
                self.order.append(task.rollout_id)
        except (aiohttp.ClientError, ConnectionError):
            self.unknown.add(task.rollout_id)
        finally:
            self._moved.set()
