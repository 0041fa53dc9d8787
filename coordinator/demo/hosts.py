"""Where the demo's coordinator runs: as a named, detached actor on a Ray that the demo starts for itself.

The rule it keeps: `kill` is SIGKILL to the actor's process, without a word to anybody, and what comes back afterwards
has only the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from coordinator import ray_host
from coordinator.settings import Settings
from coordinator.wire.errors import SafepointError

REVIVE_S: Final = 60.0
_RAY_FOLDER: Final = "RAY_TMPDIR"
_ACTOR: Final = "ray::CoordinatorHost"


class RayHost:
    """A Ray of one machine with the coordinator on it. Ray itself lives on, as a cluster does when a worker dies."""

    def __init__(self) -> None:
        self._started = False
        self._killed_at = 0.0

    async def start(self, settings: Settings, folder: Path) -> None:
        """Start Ray, with its files in `folder`, and the actor; return when the coordinator serves.

        Raises what `ray_host.start` raises.
        """
        self._started = True
        # What it has to say of a killed worker is what the demo does on purpose.
        logging.getLogger("ray").setLevel(logging.ERROR)
        before = os.environ.get(_RAY_FOLDER)
        os.environ[_RAY_FOLDER] = str(folder)
        try:
            await asyncio.to_thread(ray_host.connect, "local")
        finally:
            del os.environ[_RAY_FOLDER]
            if before is not None:
                os.environ[_RAY_FOLDER] = before
        await asyncio.to_thread(ray_host.start, settings)

    def kill(self) -> int:
        """SIGKILL to the actor's process; how many there were."""
        killed = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, ProcessLookupError):
                if any(part.startswith(_ACTOR) for part in process.cmdline()[:1]):
                    os.kill(process.pid, signal.SIGKILL)
                    killed += 1
        self._killed_at = time.monotonic()
        return killed

    async def revived(self) -> float:
        """Wait until Ray has restarted the actor, which it does unasked; seconds since the kill. Raises UNAVAILABLE."""
        until = time.monotonic() + REVIVE_S
        while True:
            try:
                await asyncio.to_thread(ray_host.find)
                return time.monotonic() - self._killed_at
            except SafepointError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """End the actor and the Ray. Harmless when nothing was started."""
        if self._started:
            with suppress(SafepointError):
                await asyncio.to_thread(ray_host.stop)
            await asyncio.to_thread(ray_host.disconnect)
            self._started = False
