"""Chunks that nothing needs any more: found by marking what is needed, deleted when nobody has asked for them in a while.

The rule: a chunk stays while any part of any snapshot names it, published or not, and for `grace_s` after it was last written or
asked for: whoever writes a save touches every chunk that it is going to name, before it names it. One part that cannot be read
might name any chunk, so then all stay, and that is said. The caller holds the lock under which operations begin.

Everything here blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.snapshot_reading import SnapshotReader
from coordinator.wire.beneath import GONE
from coordinator.wire.chunks import Found
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import ChunkStore, Folder, open_root
from coordinator.wire.ids import is_wire_id
from coordinator.wire.manifest_file import MANIFEST_NAME, is_void, read_participant_manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Swept:
    """What was deleted, or would be; `unread`: the part that keeps everything, empty when there is none."""

    chunks: int = 0
    size_bytes: int = 0
    unread: str = ""


def sweep(
    reader: SnapshotReader,
    *,
    dry_run: bool = False,
    without: frozenset[str] = frozenset(),
    grace_s: float | None = None,
    still_ours: Callable[[], None] = lambda: None,
) -> Swept:
    """Delete chunks that no part names, and objects with the bytes of a younger one. `without`: snapshots that count as
    deleted, for a dry run. `grace_s`: None for that of the storage.

    `still_ours` is asked before the first deletion, and raises to forbid it. Raises what that raises, STORAGE_FAILED.
    """
    chunks = reader.chunks()
    there = list(chunks.all())
    before = _now(reader) - (chunks.grace_s if grace_s is None else grace_s) if there else 0.0
    old = [found for found in there if found.touched_s < before]
    if not old:
        return Swept()
    try:
        needed = named(reader, without)
    except SafepointError as error:
        if error.reason is Reason.STORAGE_FAILED:
            raise
        log.warning("chunks that nothing may need are kept, since a part cannot be read: %s", error)
        return Swept(unread=error.problem.message)
    youngest = {found.sha256: found for found in sorted(there, key=lambda found: found.touched_s)}
    count = size = 0
    for found in sorted(old, key=lambda found: found.name):
        if found.sha256 in needed and found is youngest[found.sha256]:
            continue
        if not dry_run:
            if not count:
                still_ours()
            if not _is_still_old(chunks, found, before):
                continue
            chunks.remove(found.name)
        count, size = count + 1, size + found.size_bytes
    if not dry_run:
        chunks.discard_temporaries(before)
    return Swept(count, size)


def named(reader: SnapshotReader, without: frozenset[str] = frozenset()) -> set[str]:
    """Every chunk that a part of a snapshot names, of one that is not published as well.

    Raises SNAPSHOT_CORRUPT, SNAPSHOT_UNSAFE, SNAPSHOT_TOO_NEW for a part that cannot be read.
    """
    found: set[str] = set()
    with reader.snapshots() as snapshots:
        for name in snapshots.names():
            if name.startswith(GONE) or name in without:
                continue  # it is being deleted, and no snapshot any more
            if not is_wire_id(name) or not snapshots.is_directory(name):
                raise refuse(Reason.SNAPSHOT_UNSAFE, f"{snapshots.path / name[:130]} is no snapshot.")
            try:
                with snapshots.seen(name) as directory:
                    found |= _named_in(directory)
            except FileNotFoundError:
                pass  # deleted in between
    return found


def _named_in(snapshot: Folder) -> set[str]:
    found: set[str] = set()
    if snapshot.has(MANIFEST_NAME) and is_void(snapshot):
        return found  # it is never published
    for name in snapshot.names():
        if is_wire_id(name) and snapshot.is_directory(name):
            with snapshot.child(name) as part:
                try:
                    manifest, _ = read_participant_manifest(part)
                except FileNotFoundError:
                    continue  # a part that was not finished: it is in no snapshot, or damaged
                found.update(entry.sha256 for entry in manifest.chunks)
    return found


def _is_still_old(chunks: ChunkStore, found: Found, before: float) -> bool:
    """Looked at once more right before it goes: somebody may be writing a save that names it."""
    touched_s = chunks.touched_s(found.name)
    return touched_s is not None and touched_s < before


def _now(reader: SnapshotReader) -> float:
    """The time of the storage, which is not that of this machine when it is another one's."""
    name = f".now-{secrets.token_hex(4)}"
    with open_root(reader.root) as top:
        top.write_new(name, b"")
        try:
            return top.size_and_time(name)[1]
        finally:
            top.remove_file(name)
