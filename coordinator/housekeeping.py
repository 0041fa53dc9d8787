"""What a coordinator deletes beside its operations: old snapshots, and what failed and crashed ones have left.

The rule: nothing that an operation uses, and nothing once a newer coordinator has started; what cannot be deleted now is
still there for the next time, and fails nobody's operation. `pruning` looks and deletes, `retention` decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator import pruning
from coordinator.journals import AnyJournal
from coordinator.retention import Retention
from coordinator.settings import Settings
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import SnapshotId

log = logging.getLogger(__name__)


class Housekeeping:
    """Belongs to the event loop of its operations. `lock`: held while an operation begins; `in_use`: snapshots that one
    writes or restores now; `writing`: whether one writes chunks now; `saved_last`: the snapshot that is never old; `unsent` says of all, newest first, which are on their
    way to the object store, and why they stay therefore.
    """

    def __init__(
        self,
        settings: Settings,
        store: SnapshotStore,
        journal: AnyJournal,
        lock: asyncio.Lock,
        in_use: Callable[[], Collection[str]],
        writing: Callable[[], bool],
        saved_last: Callable[[], str],
        unsent: Callable[[Sequence[str]], Mapping[str, str]],
    ) -> None:
        self._settings = settings
        self._store = store
        self._journal = journal
        self._lock = lock
        self._in_use = in_use
        self._writing = writing
        self._saved_last = saved_last
        self._unsent = unsent
        self._left: dict[SnapshotId, None] = {}  # what could not be discarded, in the order in which it was left

    async def discard(self, snapshot_id: SnapshotId) -> None:
        """Delete what an operation without success has left. What cannot be deleted goes with `discard_left`."""

        def discard() -> None:
            self._journal.require_epoch()  # a newer coordinator deletes it, and may have begun a save of that name since
            self._store.discard(snapshot_id)

        self._left.pop(snapshot_id, None)
        try:
            await asyncio.to_thread(discard)
        except SafepointError as error:
            if error.reason is not Reason.SNAPSHOT_IN_USE:  # then it is a snapshot after all
                self._left[snapshot_id] = None
                log.warning("what %s left is still there, the end of the next save deletes it: %s", snapshot_id, error)

    async def discard_left(self) -> None:
        """Once more for what could not be deleted. After a save: the disk takes writes again. Whoever has begun a save of
        one of these names since has it in use.
        """
        if not self._left:
            return
        async with self._lock:
            for snapshot_id in [name for name in self._left if name not in self._in_use()]:
                await self.discard(snapshot_id)

    async def prune_as_set(self) -> None:
        """After a save: as the settings say."""
        retention = Retention(self._settings.keep_last, self._settings.keep_every, self._settings.keep_interval_s)
        async with self._lock:
            try:
                await self.prune(retention)
            except SafepointError as error:
                log.warning("old snapshots were not deleted: %s", error)

    async def prune(
        self, retention: Retention, *, dry_run: bool = False, spare: Collection[str] = ()
    ) -> pruning.Pruned:
        """As `pruning.prune`; the caller holds the lock. Raises STALE_EPOCH as well, once we are replaced."""
        await asyncio.to_thread(self._journal.require_epoch)
        return await asyncio.to_thread(
            pruning.prune, self._store, retention, self._in_use(), dry_run=dry_run, spare=spare,
            saved_last=self._saved_last(), writing=self._writing(), also=self._unsent, still_ours=self._journal.require_epoch,
        )  # fmt: skip

    async def sweep(self) -> None:
        """Delete what a crash left in the root. Once, when what the journal holds is being settled."""
        async with self._lock:
            try:
                swept = await asyncio.to_thread(pruning.sweep, self._store, self._in_use(), self._journal.require_epoch)
            except SafepointError as error:
                log.warning("what unfinished saves left is still there, prune deletes it: %s", error)
            else:
                if swept:
                    log.info("deleted what unfinished saves left: %s", ", ".join(swept[:20]))
