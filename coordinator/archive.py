"""Copies of whole snapshots in an object store (`copies`): pushed from a root, pulled into another one.

The rule is that of a root, and needs neither rename nor lock: the manifest of a copy is written last, when every other object
is complete, and nothing is ever replaced, so a push that is cut short leaves no copy, and a repeat goes on from where it was.
The bytes are those of the root: a pull compares every digest on the way, and links the manifest last as a save does.

The root stays where a save is decided: journal, epochs and the commit point are on a file system that all machines see.
A copy is made afterwards, while rollouts run. Everything here blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator.copies import EPOCHS, chunk_key, content, damaged, holds, part_manifest, read_manifest
from coordinator.snapshot_reading import SnapshotReader
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import FileDigest
from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import Folder
from coordinator.wire.ids import SnapshotId
from coordinator.wire.manifest_file import LEDGER_NAME, MANIFEST_NAME, is_void, read_participant_manifest
from coordinator.wire.objects import Objects

_REFRESH_S: Final = 600.0  # far less than sweeping.GRACE_S


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied: objects, their bytes, and how many of them were there already."""

    snapshot_id: str
    files: int
    size_bytes: int
    found: int = 0


@dataclass(frozen=True, slots=True)
class Sending:
    """How far a push is."""

    files: int
    size_bytes: int
    files_done: int = 0
    bytes_done: int = 0  # of what was sent or was there already


def push(
    reader: SnapshotReader,
    snapshot_id: str,
    objects: Objects,
    *,
    whole: bool = True,
    before_each: Callable[[Sending], None] = lambda _: None,
) -> Copied:
    """Copy a snapshot into a store. Every byte is verified first; the manifest goes last.

    Without `whole` only what the store does not have is read and verified, each file right before it goes: what a push after
    each save costs is what has changed. `before_each` is called before each object, and may wait, or raise to end it.

    Raises what `verify` raises, also when the snapshot is deleted meanwhile; SNAPSHOT_EXISTS when the store has another
    snapshot of that name, STORAGE_FULL, STORAGE_FAILED: then the store has no copy, or the one it had.
    """
    try:
        manifest = reader.verify(snapshot_id).manifest if whole else reader.load(snapshot_id)
        return _send(reader, manifest, objects, before_each)
    except (SafepointError, FileNotFoundError) as error:
        told = error if isinstance(error, SafepointError) else None
        if told is not None and told.reason not in (Reason.SNAPSHOT_CORRUPT, Reason.SNAPSHOT_UNSAFE):
            raise
        if not _is_there(reader, snapshot_id):  # nothing holds a snapshot for a push: a prune may have taken it
            raise refuse(
                Reason.SNAPSHOT_NOT_FOUND, f"The snapshot {snapshot_id} was deleted while it was copied.",
                next_step="Push one that is there, and pin it first when a prune may come.",
            ) from error  # fmt: skip
        if told is None:
            raise refuse(
                Reason.SNAPSHOT_CORRUPT, f"A file of {snapshot_id} has gone while it was copied: {error}."
            ) from error
        raise


def _is_there(reader: SnapshotReader, snapshot_id: str) -> bool:
    with reader.snapshots() as snapshots:
        return snapshots.has(snapshot_id)


def _send(
    reader: SnapshotReader,
    manifest: manifest_pb2.SnapshotManifest,
    objects: Objects,
    before_each: Callable[[Sending], None],
) -> Copied:
    snapshot_id = manifest.snapshot_id
    with reader.open(snapshot_id) as directory:
        chunks = Chunks(reader.disk)
        steps: list[tuple[int, Callable[[], bool]]] = [  # chunks before everything that names them
            (chunk.size_bytes, partial(_put_chunk, chunks, chunk, objects)) for chunk in _chunks(directory, manifest)
        ]
        listed = [*_listed(directory, manifest), (MANIFEST_NAME, directory.digest(MANIFEST_NAME))]
        for path, expected in listed:
            key = f"{snapshot_id}/{path}"
            steps.append((expected.size_bytes, partial(_put, directory, path, expected, objects, key)))
        done = Sending(len(steps), sum(size for size, _ in steps))
        found = 0
        for number, (size, put) in enumerate(steps, start=1):
            before_each(done)
            if number == len(steps):
                _mark_epoch(objects, manifest.coordinator_epoch)
            found += not put()
            done = Sending(done.files, done.size_bytes, number, done.bytes_done + size)
    return Copied(snapshot_id, done.files, done.size_bytes, found)


def has_copy(reader: SnapshotReader, snapshot_id: str, objects: Objects) -> bool:
    """Whether the store has a copy of this very snapshot: one manifest is read, and it names the digests of the rest.

    Raises SNAPSHOT_EXISTS when it has another of that name, what `load` raises, STORAGE_*.
    """
    reader.load(snapshot_id)
    with reader.open(snapshot_id) as directory:
        expected = directory.digest(MANIFEST_NAME)
    key = f"{snapshot_id}/{MANIFEST_NAME}"
    if objects.size(key) is None:
        return False
    if not holds(objects, key, expected):
        raise refuse(Reason.SNAPSHOT_EXISTS, f"{objects.url} has another {key}.")
    return True


def _mark_epoch(objects: Objects, epoch: int) -> None:
    key = f"{EPOCHS}/{epoch}"
    if objects.size(key) is not None:
        return
    file = os.memfd_create("epoch")
    try:
        objects.put_new(key, file)
    except FileExistsError:
        pass  # somebody was faster, and it says the same
    finally:
        os.close(file)


def pull(
    objects: Objects,
    snapshot_id: str,
    root: Path,
    still_valid: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Copied:
    """Copy a snapshot out of a store into a root, which is made and claimed for its job when it is new.

    No coordinator may run on the root: `still_valid` is asked right before the manifest is written, and raises to forbid it.
    One that starts meanwhile takes what is half there for what a crash left, and deletes it. It may give the name away again,
    so everything here is done in the directory that we have made, and nothing is removed by its name.

    Raises SNAPSHOT_NOT_FOUND, SNAPSHOT_EXISTS (the root has it), SNAPSHOT_FOREIGN (the root is another job's),
    SNAPSHOT_IN_USE (a coordinator has started), SNAPSHOT_CORRUPT, SNAPSHOT_UNSAFE, SNAPSHOT_TOO_NEW, STORAGE_*: then the
    root is as it was.
    """
    raw, manifest = read_manifest(objects, snapshot_id)
    store = SnapshotStore(root, manifest.job_id)
    name = SnapshotId(snapshot_id)
    _begin(store, name)
    with store.open(name) as directory:
        try:
            copied = _fetch(objects, manifest, directory, root, clock)
            still_valid()
            directory.write_new(MANIFEST_NAME, raw)
            store.verify(name)
        except (FileNotFoundError, FileExistsError) as error:
            raise refuse(
                Reason.SNAPSHOT_IN_USE, f"Somebody has removed what was there of {name} in {root}: a coordinator has started.",
                next_step="Stop it first, or pull into another root and start one there.",
            ) from error  # fmt: skip
        except BaseException:
            _clear(store, name, directory)
            raise
    return Copied(snapshot_id, copied.files + 1, copied.size_bytes + len(raw))


def _begin(store: SnapshotStore, name: SnapshotId) -> None:
    """As `store.begin`; says what has the name. What is half there is not taken over: somebody may be writing it."""
    try:
        store.begin(name)
    except SafepointError as error:
        if error.reason is not Reason.SNAPSHOT_EXISTS:
            raise
        with store.open(name) as directory:
            published = directory.has(MANIFEST_NAME) and not is_void(directory)
        if published:
            raise refuse(
                Reason.SNAPSHOT_EXISTS, f"{store.root} has the snapshot {name} already.",
                next_step=f"Nothing is to be pulled if it is whole: safepoint snapshots verify {name} --root {store.root}",
            ) from error  # fmt: skip
        raise refuse(
            Reason.SNAPSHOT_EXISTS, f"{store.root} has a part of {name}, without a manifest: of a pull that was cut short, or runs.",
            next_step="If none runs, start a coordinator on the root once, which deletes what is half there, or run "
            f"safepoint snapshots prune --keep 1000000 --root {store.root}, which deletes no snapshot; then pull again.",
        ) from error  # fmt: skip


def _fetch(
    objects: Objects,
    manifest: manifest_pb2.SnapshotManifest,
    directory: Folder,
    root: Path,
    clock: Callable[[], float],
) -> Copied:
    name, size, files = manifest.snapshot_id, 0, 0
    taken: list[Chunk] = []
    refreshed = clock()
    for reference in manifest.participants:
        if not reference.manifest_sha256:
            continue
        key = f"{name}/{reference.participant_id}"
        raw, part = part_manifest(objects, name, reference)
        shared = Chunks(root)
        for entry in part.chunks:
            chunk = Chunk(entry.sha256, entry.size_bytes)
            if clock() - refreshed > _REFRESH_S:  # nothing names them yet: a prune would take those of an hour ago
                for earlier in taken:
                    shared.touch(earlier)
                refreshed = clock()
            taken.append(chunk)
            shared.take(chunk, content(objects, chunk_key(chunk), chunk.size_bytes))
            size += chunk.size_bytes
            files += 1
        with directory.make_child(reference.participant_id) as folder:
            for file in part.files:
                _get(objects, f"{key}/{file.path}", folder, file.path, FileDigest(file.size_bytes, file.sha256))
                size += file.size_bytes
            folder.write_new(MANIFEST_NAME, raw)
        size += len(raw)
        files += len(part.files) + 1
    ledger = FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256)
    _get(objects, f"{name}/{LEDGER_NAME}", directory, LEDGER_NAME, ledger)
    return Copied(name, files + 1, size + ledger.size_bytes)


def _get(objects: Objects, key: str, directory: Folder, path: str, expected: FileDigest) -> None:
    folder, slash, rest = path.partition("/")
    if slash:
        with directory.ensure_child(folder) as below:
            _get(objects, key, below, rest, expected)
        return
    written = directory.write_new(path, content(objects, key, expected.size_bytes))
    if written != expected:
        raise damaged(objects, key)


def _clear(store: SnapshotStore, name: SnapshotId, directory: Folder) -> None:
    """Take back what we have written; the name goes only with a directory that holds nothing. Never raises."""
    with suppress(OSError, SafepointError):
        directory.remove_file(MANIFEST_NAME)  # first: without it there is no snapshot
        for each in directory.names():
            (directory.remove_child if directory.is_directory(each) else directory.remove_file)(each)
        with store.snapshots() as snapshots:
            snapshots.remove_empty(name)


def _put_chunk(chunks: Chunks, chunk: Chunk, objects: Objects) -> bool:
    """False when the store has it. Its size is looked at, not its bytes: the store made it whole, under the name of its digest."""
    if objects.size(chunk_key(chunk)) == chunk.size_bytes:
        return False
    chunks.check(chunk)
    try:
        with chunks.opened(chunk.sha256) as file:
            objects.put_new(chunk_key(chunk), file)
    except FileExistsError:
        if objects.size(chunk_key(chunk)) != chunk.size_bytes:
            raise refuse(Reason.SNAPSHOT_EXISTS, f"{objects.url} has another {chunk_key(chunk)}.") from None
        return False
    return True


def _put(directory: Folder, path: str, expected: FileDigest, objects: Objects, key: str) -> bool:
    """False when the object was there, with the same bytes."""
    if directory.digest(path) != expected:
        raise refuse(
            Reason.SNAPSHOT_CORRUPT, f"{directory.path / path} is damaged: its bytes are not those that were saved."
        )
    try:
        with directory.opened(path) as file:
            objects.put_new(key, file)
    except FileExistsError:
        if not holds(objects, key, expected):
            raise refuse(Reason.SNAPSHOT_EXISTS, f"{objects.url} has another {key}.") from None
        return False
    return True


def _listed(directory: Folder, manifest: manifest_pb2.SnapshotManifest) -> Iterator[tuple[str, FileDigest]]:
    """All files of a snapshot but its manifest, those that vouch for others after them."""
    for reference in manifest.participants:
        if reference.manifest_sha256:
            with directory.child(reference.participant_id) as part:
                found, stored = read_participant_manifest(part, reference.manifest_sha256)
            for file in found.files:
                yield f"{reference.participant_id}/{file.path}", FileDigest(file.size_bytes, file.sha256)
            yield f"{reference.participant_id}/{MANIFEST_NAME}", stored
    yield LEDGER_NAME, FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256)


def _chunks(directory: Folder, manifest: manifest_pb2.SnapshotManifest) -> list[Chunk]:
    """All chunks of a snapshot, each once."""
    found: set[Chunk] = set()
    for reference in manifest.participants:
        if reference.manifest_sha256:
            with directory.child(reference.participant_id) as part:
                listed, _ = read_participant_manifest(part, reference.manifest_sha256)
            found.update(Chunk(entry.sha256, entry.size_bytes) for entry in listed.chunks)
    return sorted(found, key=lambda chunk: chunk.sha256)
