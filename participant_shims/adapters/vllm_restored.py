"""What a restore has brought to one engine: requests that wait for their callers, and attempts that they replace.

The rule: it outlives the shim that loaded it, for the same process of the engine, until it was given up or its callers have
had it. Whoever still comes with a replaced attempt is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from participant_shims.engine.discovery import Engine
from participant_shims.engine.pool import Pool
from participant_shims.engine.record import Record
from participant_shims.engine.requests_file import Origin
from participant_shims.engine.restored_note import RestoredNote
from participant_shims.engine.sharing import Sharing
from participant_shims.identity import CallIdentity

log = logging.getLogger(__name__)

MAX_REPLACED: Final = 200_000  # rollouts whose older attempts are refused; a trainer retires them long before


class Restored:
    """Of one engine. `life`: the shim's directory; `root`: the snapshot root. None: nothing is noted, or shared, there."""

    def __init__(self, participant_id: str, life: Path | None, root: Path | None) -> None:
        self.sharing = Sharing(root, participant_id)
        self.pool = Pool(self.sharing)
        self._note = RestoredNote(life)
        self.pool.on_over = self._note.over
        self._min_attempt: dict[str, int] = {}
        self._min_attempt_before: dict[str, int] | None = None  # as it was before the last load

    def is_stale(self, call: CallIdentity) -> bool:
        """Whether the attempt was replaced."""
        return call.attempt < self._min_attempt.get(call.rollout_id, 0)

    def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        """As of an adapter."""
        for rollout_id, attempt in attempts:
            self._replace(rollout_id, attempt + 1)
        return self.pool.retire(attempts)

    async def take(
        self, records: Sequence[Record], origin: Origin, operation_id: str, engine: Engine | None, group: str
    ) -> None:
        """These and no others were loaded. Other engines of the `group` find them; empty: nobody else does."""
        if self._min_attempt_before is None:
            self._min_attempt_before = dict(self._min_attempt)
        self._take(records)
        shared = (operation_id, group) if group else None
        if shared is not None:
            await asyncio.to_thread(self.sharing.publish, shared, records)
        engine_life = engine.life if engine else ""
        await asyncio.to_thread(self._note.write, operation_id, engine_life, origin, records, shared)

    async def unload(self) -> None:
        """Forget what a load brought. May be repeated."""
        if not await self.loaded_by():
            return
        self.pool.replace([])
        if self._min_attempt_before is not None:
            self._min_attempt, self._min_attempt_before = self._min_attempt_before, None
        else:  # the shim that loaded is gone: what it had replaced before is not known, and retired long since
            self._min_attempt.clear()
        await asyncio.to_thread(self.sharing.withdraw)
        await asyncio.to_thread(self._note.forget)

    async def loaded_by(self) -> str:
        """Whose load is in here, and was neither kept nor forgotten."""
        return await asyncio.to_thread(self._note.loaded_by)

    async def keep(self) -> None:
        """What was loaded is there for good."""
        self._min_attempt_before = None
        await asyncio.to_thread(self._note.keep)

    def left_behind(self) -> bool:
        """Whether a shim before us may have loaded something."""
        return self._note.there()

    async def bring_back(self, engine: Engine) -> None:
        """What a shim before us had loaded into this engine, and nobody has asked for yet."""
        records = await asyncio.to_thread(self._note.read, engine.life)
        if records and not len(self.pool):
            log.info("%d restored requests of the shim before this one wait for their callers", len(records))
            self._take(records)
        where = await asyncio.to_thread(self._note.shared, engine.life)
        # While its restore is not resumed nobody looks for what others have: not all of it may be there.
        self.sharing.join(where, records, opened=not await self.loaded_by())

    def _take(self, records: Sequence[Record]) -> None:
        self.pool.replace(records)
        for record in records:
            if record.rollout_id:
                self._replace(record.rollout_id, record.attempt + 1)

    def _replace(self, rollout_id: str, min_attempt: int) -> None:
        self._min_attempt[rollout_id] = max(min_attempt, self._min_attempt.pop(rollout_id, 0))
        while len(self._min_attempt) > MAX_REPLACED:
            del self._min_attempt[next(iter(self._min_attempt))]
