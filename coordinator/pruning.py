"""What is deleted of a snapshot root, and what is never: pruning, pins, leavings.

The rule: `retention` decides, this file looks and deletes. Never the newest snapshot that can be restored, never one that is
pinned or in use, never a directory whose manifest is damaged, foreign or newer (people look at those). What cannot be told,
such as a pin that cannot be read, counts as a reason to keep.

    <root>/pins/<snapshot_id>             why it is kept, UTF-8

Everything here blocks: callers on an event loop use a thread, and hold the lock under which operations begin, or what is
`in_use` may be out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator import sweeping
from coordinator.retention import Dated, Retention, plan, step_of
from coordinator.snapshot_reading import SnapshotReader
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import GONE
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import Folder, open_root
from coordinator.wire.ids import SnapshotId, is_wire_id
from coordinator.wire.manifest_file import MANIFEST_NAME, is_void

MAX_PIN_BYTES: Final = 500
_PINS: Final = "pins"
_MAX_COUNTED: Final = 1_000_000  # files


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, or would be: names in that order, the bytes they held; and what stays, newest first, with why.

    `size_bytes` counts chunks that no snapshot names any more, once nobody has asked for them in a while.
    """

    deleted: tuple[str, ...]
    size_bytes: int
    kept: Mapping[str, str]


def pins(reader: SnapshotReader) -> dict[str, str]:
    """What is pinned: names to reasons. Raises STORAGE_FAILED, SNAPSHOT_UNSAFE; then nothing may be deleted."""
    found: dict[str, str] = {}
    try:
        with open_root(reader.root) as top, top.child(_PINS) as folder:
            for name in folder.names():
                if is_wire_id(name):
                    found[name] = _reason(folder, name)
    except FileNotFoundError:
        pass  # nobody has ever pinned anything
    return found


def pin(store: SnapshotStore, snapshot_id: str, reason: str) -> manifest_pb2.SnapshotManifest:
    """Keep a published snapshot until it is unpinned. Durable when this returns; a newer reason replaces the older one.

    Raises INVALID_ARGUMENT without a reason, what `load` raises, STORAGE_FULL and STORAGE_FAILED: then it is as it was.
    """
    if not 1 <= len(reason.encode()) <= MAX_PIN_BYTES or not reason.strip():
        raise refuse(Reason.INVALID_ARGUMENT, f"A pin needs a reason of 1 to {MAX_PIN_BYTES} bytes.")
    manifest = store.load(snapshot_id)
    with store.directory(_PINS) as folder:
        folder.replace(snapshot_id, reason.encode())
    return manifest


def unpin(store: SnapshotStore, snapshot_id: str) -> str:
    """Take a pin away; the reason it had, empty when there was none. Raises MALFORMED_ID, STORAGE_FAILED."""
    if not is_wire_id(snapshot_id):
        raise refuse(Reason.MALFORMED_ID, f"{snapshot_id[:130]!r} is no snapshot_id.")
    with store.directory(_PINS) as folder:
        if not folder.has(snapshot_id):
            return ""
        reason = _reason(folder, snapshot_id)
        folder.remove_file(snapshot_id)
        folder.sync()
        return reason


def spared(store: SnapshotReader, retention: Retention) -> set[str]:
    """The newest snapshot of which every byte is right, unless `retention` keeps it. Reads a lot, and blocks for it.

    Newer ones may be damaged where no list can see it; whoever asks for a deletion must pass this to `prune`. It is asked
    before the lock is taken, so nothing is counted on that can change until then: a pin that keeps it may be taken away.
    """
    dated = _dated(store)
    planned = plan(dated, retention, {})
    for one in dated if planned.doomed else ():
        try:
            store.verify(one.snapshot_id)
        except SafepointError as error:
            if error.reason in (Reason.STORAGE_FAILED, Reason.STORAGE_FULL):
                raise
        else:
            return {one.snapshot_id} if one.snapshot_id in planned.doomed else set()
    return set()


def prune(
    store: SnapshotStore,
    retention: Retention,
    in_use: Collection[str] = (),
    *,
    dry_run: bool = False,
    spare: Collection[str] = (),
    saved_last: str = "",
    writing: bool = False,
    also: Callable[[Sequence[str]], Mapping[str, str]] = lambda _: {},
    still_ours: Callable[[], None] = lambda: None,
) -> Pruned:
    """Delete what `retention` does not keep, and leavings: unpublished directories that nobody writes.

    `in_use` is what an operation saves or restores now, `spare` what `spared` has said, `saved_last` what is never old,
    `writing` whether somebody writes chunks now: then none is deleted; `also` says of all, newest first, which else stay and why.
    `still_ours` is asked before each deletion, after all have been looked for, and raises to forbid it: what a coordinator
    that has replaced us writes since is not among them. Raises what that raises, STORAGE_FAILED and SNAPSHOT_UNSAFE; what
    was not deleted then is whole, and goes the next time.
    """
    dated = _dated(store)
    also_kept = also([one.snapshot_id for one in dated])
    planned = plan(dated, retention, pins(store), in_use, spare, saved_last, also_kept)
    doomed = [*planned.doomed, *(name for name in leavings(store) if name not in in_use)]
    size = 0
    for name in doomed:
        try:
            with store.snapshots() as snapshots, snapshots.child(name) as directory:
                size += directory.size_below(_MAX_COUNTED)
        except FileNotFoundError:
            continue
        if not dry_run:
            still_ours()
            store.remove(name)
    if not dry_run:
        _finish_deletions(store)
    # What is being written is named by no manifest yet, and its age is told by clocks, which jump. It goes the next time.
    swept = sweeping.Swept()
    if not writing:
        swept = sweeping.sweep(store, dry_run=dry_run, without=frozenset(doomed), still_ours=still_ours)
    return Pruned(tuple(doomed), size + swept.size_bytes, planned.kept)


def leavings(store: SnapshotReader) -> list[str]:
    """Directories of snapshots that were never published, and those of a coordinator's that was replaced."""
    found: list[str] = []
    with store.snapshots() as snapshots:
        for name in snapshots.names():
            if is_wire_id(name):
                try:
                    with snapshots.child(name) as directory:
                        if not directory.has(MANIFEST_NAME) or is_void(directory):
                            found.append(name)
                except (SafepointError, FileNotFoundError):
                    pass  # a link, a device, or gone in between
    return found


def sweep(store: SnapshotStore, in_use: Collection[str], still_ours: Callable[[], None] = lambda: None) -> list[str]:
    """Delete what a crash left: directories without a snapshot that no operation of ours writes. Their names.

    The manifest's name is taken first: a coordinator before us that still runs cannot publish what is being deleted.
    `still_ours` as in `prune`: nor do we delete what one after us writes.
    """
    swept = [name for name in leavings(store) if name not in in_use]
    for name in swept:
        still_ours()
        store.give_up(SnapshotId(name))
    _finish_deletions(store)
    return swept


def _finish_deletions(store: SnapshotReader) -> None:
    with store.snapshots() as snapshots:
        for name in snapshots.names():
            if name.startswith(GONE):
                snapshots.remove_child(name)


def _dated(store: SnapshotReader) -> list[Dated]:
    return [
        Dated(found.snapshot_id, found.create_time.ToMilliseconds() / 1e3, step_of(found.metadata))
        for found in store.list().snapshots
    ]


def _reason(folder: Folder, name: str) -> str:
    try:
        return folder.read(name, MAX_PIN_BYTES).decode(errors="replace")
    except (SafepointError, FileNotFoundError) as error:
        return f"(its reason cannot be read: {error})"
