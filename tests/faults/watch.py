"""Looks at the doors of every gate all the time, so that a pause is measured where it is felt.

The rule it keeps: a gate counts as closed from the first look that says so to the first that says it is open; one that
cannot be looked at (its process is dead or stopped) holds nobody, and is named as unseen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp

EVERY_S = 0.04


class Watch:
    """`last_closed`: the monotonic time at which a gate was last seen closed; `closed`: those that are now."""

    def __init__(self, urls: dict[str, str]) -> None:
        self._urls = urls
        self.closed: set[str] = set()
        self.unseen: set[str] = set()
        self.last_closed: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._looks = 0

    async def __aenter__(self) -> Watch:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.5))
        self._tasks = [asyncio.create_task(self._look(name, url)) for name, url in self._urls.items()]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._session is not None
        await self._session.close()

    async def open(self, within_s: float, alive: Callable[[str], bool] = lambda name: True) -> set[str]:
        """Wait until no gate is closed; those that still are after `within_s` seconds. Dead ones are not asked."""
        until, quiet = time.monotonic() + within_s, 0
        while time.monotonic() < until:
            shut = {name for name in self.closed if alive(name)}
            quiet = quiet + 1 if not shut else 0
            if quiet >= 3:  # more than one look: between two waves of an opening nothing is decided
                return set()
            await asyncio.sleep(EVERY_S)
        return {name for name in self.closed if alive(name)}

    def thaw_s(self, since: float) -> float:
        """Seconds from `since` until a gate was last seen closed; zero when none was."""
        return max((seen - since for seen in self.last_closed.values() if seen > since), default=0.0)

    async def _look(self, name: str, url: str) -> None:
        assert self._session is not None
        while True:
            try:
                async with self._session.get(f"{url}/doors") as response:
                    said: dict[str, Any] | None = await response.json()
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                self.unseen.add(name)
                self.closed.discard(name)
            else:
                self.unseen.discard(name)
                if said is not None and said["closed"]:
                    self.closed.add(name)
                    self.last_closed[name] = time.monotonic()
                else:
                    self.closed.discard(name)
            await asyncio.sleep(EVERY_S)
