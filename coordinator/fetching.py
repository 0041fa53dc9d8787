"""Snapshots that come back: from the object store into the root of a coordinator that runs, to be restored.

The rule: only from the store that this coordinator uploads to, so that no caller can make it read from elsewhere, and only
what does not count as newer than what it saves. A prune or a sweep never meets a fetch: its name is in use from before it is
made. Everybody that asks for one that is being fetched waits for the same copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from safepoint.v1 import manifest_pb2

from coordinator import archive, copies
from coordinator.journals import AnyJournal
from coordinator.snapshots import SnapshotStore
from coordinator.uploading import in_daemon
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.objects import Objects


@dataclass(frozen=True, slots=True)
class Fetched:
    """A snapshot that is in the root. `found`: it was there already, and nothing was copied. `skipped`: damaged copies that may
    be newer, and why, when the newest was asked for."""

    manifest: manifest_pb2.SnapshotManifest
    files: int = 0
    size_bytes: int = 0
    found: bool = False
    skipped: dict[str, str] = field(default_factory=dict[str, str])


class Fetching:
    """The fetches of one coordinator. Belongs to an event loop."""

    def __init__(
        self, store: SnapshotStore, objects: Objects | None, journal: AnyJournal, lock: asyncio.Lock, published: Callable[[str], None]
    ) -> None:  # fmt: skip
        """`lock`: the one that a prune holds. `published` is called when there is a new one."""
        self._store, self._objects, self._journal, self._lock = store, objects, journal, lock
        self._published = published
        self._running: dict[str, asyncio.Task[Fetched]] = {}

    def names(self) -> set[str]:
        """What is being fetched."""
        return set(self._running)

    async def fetch(self, snapshot_id: str, url: str) -> Fetched:
        """Bring a snapshot into the root; the newest in the store when no name is given. Verified whole when this returns.

        Raises INVALID_ARGUMENT without a store, or for another one's URL, STALE_EPOCH for one that would count as newer than
        what is saved from now on, SNAPSHOT_EXISTS when the root has another one of that name, and what `archive.pull` raises.
        """
        objects = self._objects_at(url)
        skipped: dict[str, str] = {}
        if not snapshot_id:
            snapshot_id, skipped = await in_daemon(lambda: copies.newest(objects))
        task = self._running.get(snapshot_id)
        if task is None:
            task = asyncio.create_task(self._fetch(objects, snapshot_id), name=f"fetch {snapshot_id}")
            self._running[snapshot_id] = task
            task.add_done_callback(lambda _: self._running.pop(snapshot_id, None))
        fetched = await asyncio.shield(task)  # it goes on when this caller leaves: a repeat finds it
        return replace(fetched, skipped=skipped)

    def close(self) -> None:
        """Stop waiting; what is half there is swept at the next start."""
        for task in self._running.values():
            task.cancel()

    async def _fetch(self, objects: Objects, name: str) -> Fetched:
        if (there := await in_daemon(lambda: self._there(objects, name))) is not None:
            return there
        async with self._lock:  # a prune that has looked already is over now, and the next one sees the name in use
            pass
        copied = await in_daemon(lambda: archive.pull(objects, name, self._store.disk, self._journal.require_epoch))
        manifest = await asyncio.to_thread(self._store.load, name)
        self._published(name)
        return Fetched(manifest, copied.files, copied.size_bytes)

    def _there(self, objects: Objects, name: str) -> Fetched | None:
        """The snapshot, if the root has it. Raises what keeps it from being fetched."""
        self._journal.require_epoch()
        try:
            mine = self._store.load(name)
        except SafepointError as error:
            if error.reason is not Reason.SNAPSHOT_NOT_FOUND:
                raise
        else:
            archive.has_copy(self._store, name, objects)  # raises for another one of that name
            return Fetched(mine, found=True)
        manifest = copies.load(objects, name)
        if manifest.job_id != self._store.job_id:
            raise refuse(Reason.SNAPSHOT_FOREIGN,
                         f"{objects.url}/{name} is a snapshot of job {manifest.job_id}, not of {self._store.job_id}.")  # fmt: skip
        if manifest.coordinator_epoch > self._journal.epoch:
            raise refuse(
                Reason.STALE_EPOCH,
                f"{objects.url}/{name} was saved by a coordinator of epoch {manifest.coordinator_epoch}, and this one has epoch "
                f"{self._journal.epoch}: it would count as newer than what is saved from now on.",
                next_step="Start the coordinator again while the store answers: it takes a higher epoch.",
            )  # fmt: skip
        return None

    def _objects_at(self, url: str) -> Objects:
        objects, root = self._objects, self._store.root
        by_hand = f"Or stop it, `safepoint snapshots pull SNAPSHOT URL --root {root}`, and start it again."
        if objects is None:
            raise refuse(
                Reason.INVALID_ARGUMENT, "This coordinator has no object store: its setting `upload` names none.",
                next_step=f"Start it with --upload URL. {by_hand}",
            )  # fmt: skip
        if url and url.rstrip("/").removeprefix("file://") != objects.url:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"This coordinator fetches from {objects.url} only, which its setting `upload` names.",
                next_step=f"Name that one, or none. {by_hand}",
            )  # fmt: skip
        return objects
