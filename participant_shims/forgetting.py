"""Forgetting what an aborted restore had loaded, for as long as it takes.

The rule: what was given up is either gone or named. Admission opens whatever happens here, the status says what is still
in the server and why, and it is tried again until it is gone; nothing new begins on top of it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from coordinator.wire.errors import SafepointError
from participant_shims.adapter import Adapter, Unloads
from participant_shims.running import Pulse

log = logging.getLogger(__name__)

AGAIN_S: Final = 2.0


class Forgetting:
    """What is left of restores that were given up. `left`: as a sentence without its full stop; empty when nothing is."""

    def __init__(self, adapter: Adapter, changed: Pulse) -> None:
        self._adapter = adapter
        self._changed = changed
        self._one_at_a_time = asyncio.Lock()  # what is forgotten is never what a new restore has just loaded
        self._what = ""
        self.left = ""

    async def forget(self, operation_id: str) -> bool:
        """The restore of that id is given up: forget what it loaded. Whether it is gone; never raises."""
        self._what = f"What the aborted restore {operation_id} had loaded is still in the server"
        self.left = self._what
        return await self.again()

    async def again(self) -> bool:
        """Try again, if anything is left. Whether nothing is any more; never raises."""
        async with self._one_at_a_time:
            if not self.left:
                return True
            try:
                if isinstance(self._adapter, Unloads):
                    await self._adapter.unload()
            except SafepointError as error:
                left = f"{self._what}: {error.problem.message.rstrip('.')}"
            except Exception as error:
                log.exception("the adapter failed to forget")
                left = f"{self._what}: {type(error).__name__}"
            else:
                left = ""
            if left != self.left:
                if left:
                    log.warning("%s", left)
                self.left = left
                self._changed.beat()
            return not left

    async def go_on(self) -> None:
        """Until nothing is left."""
        while self.left:
            await asyncio.sleep(AGAIN_S)
            await self.again()
