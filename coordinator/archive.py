"""Copies of whole snapshots in an object store: pushed from a root, pulled into another one.

The rule is that of a root, and needs neither rename nor lock: a copy exists if and only if its manifest.json is there. It is
written last, when every other object is complete, and nothing is ever replaced, so a push that is cut short leaves no copy,
and a repeat goes on from where it was. The bytes are those of the root: a pull compares every digest on the way, and links
the manifest last as a save does.

    <url>/<snapshot_id>/...          as below <root>/snapshots/<snapshot_id>/
    <url>/.chunks/<2>/<sha256>       as below <root>/chunks/: all copies share them, so a second push sends what has changed
    <url>/.epochs/<n>                empty: there is, or is to be, a copy that a coordinator of epoch <n> has saved

The root stays where a save is decided: journal, epochs and the commit point are on a file system that all machines see.
A copy is made afterwards, while rollouts run. Everything here blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator.client_requests import passed_over
from coordinator.snapshot_reading import Listing, SnapshotReader, Verification, age
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import FileDigest, digest_of
from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import Folder
from coordinator.wire.ids import SnapshotId, is_wire_id
from coordinator.wire.manifest_file import (
    LEDGER_NAME,
    MANIFEST_NAME,
    MAX_EPOCH,
    MAX_MANIFEST_BYTES,
    PARTICIPANT_KIND,
    SNAPSHOT_KIND,
    decode,
    is_void,
    read_participant_manifest,
)
from coordinator.wire.objects import Objects

_CHUNKS: Final = ".chunks"  # no snapshot can have this name, nor the next one
_EPOCHS: Final = ".epochs"
_AT_ONCE: Final = 8  # manifests that a list reads
_MOST_BELIEVED: Final = (
    MAX_EPOCH // 2
)  # epochs count starts: who writes more into a store must not use up a root's numbers
_REFRESH_S: Final = 600.0  # far less than sweeping.GRACE_S
_NAMED: Final = 10  # copies that a refusal names
NO_COPY: Final = "Correct the URL, or push a snapshot there first: `safepoint snapshots push`."


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
    if not _is(objects, key, expected):
        raise refuse(Reason.SNAPSHOT_EXISTS, f"{objects.url} has another {key}.")
    return True


def newest_epoch(objects: Objects) -> int:
    """The highest epoch of all copies, zero without any. One list, so that it can be asked at every start.

    A coordinator that begins on an empty disk must have a higher one: what it saves would else count as older than what a
    coordinator before it has left in the store.
    """
    found = (int(name) for name in objects.names(_EPOCHS) if name.isdecimal() and len(name) <= 18)
    return max((epoch for epoch in found if epoch <= _MOST_BELIEVED), default=0)


def _mark_epoch(objects: Objects, epoch: int) -> None:
    key = f"{_EPOCHS}/{epoch}"
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
    raw, manifest = _manifest(objects, snapshot_id)
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


def copies(objects: Objects) -> list[manifest_pb2.SnapshotManifest]:
    """Manifests of all copies in a store, newest first; what has none, or a damaged one, is passed over."""
    return list(listing(objects).snapshots)


def newest(objects: Objects) -> tuple[str, dict[str, str]]:
    """The newest copy in a store, and damaged ones that may be newer, with why. Raises SNAPSHOT_NOT_FOUND, and SNAPSHOT_CORRUPT
    when all that are there are damaged."""
    found = listing(objects)
    skipped = passed_over(found.invalid, partial(load, objects))
    if not found.snapshots and not skipped:
        raise refuse(Reason.SNAPSHOT_NOT_FOUND, f"There is no copy of a snapshot at {objects.url}.", next_step=NO_COPY)
    if not found.snapshots:
        name, why = next(iter(skipped.items()))
        raise refuse(
            Reason.SNAPSHOT_CORRUPT,
            f"There are {len(skipped)} copies at {objects.url}, and none of them can be read. {name}: {why}"[:900],
            next_step="Push a snapshot anew; nothing was changed.",
        )
    return found.snapshots[0].snapshot_id, skipped


def listing(objects: Objects) -> Listing:
    """As `SnapshotReader.list`, of a store: what has no manifest is no copy, and is said to be none."""

    def read(name: str) -> manifest_pb2.SnapshotManifest | str:
        try:
            return _manifest(objects, name)[1]
        except SafepointError as error:
            if error.reason in (Reason.STORAGE_FAILED, Reason.STORAGE_FULL):
                raise
            if error.reason is Reason.SNAPSHOT_NOT_FOUND:
                return f"{objects.url}/{name} has no manifest: a copy that is being made, or was cut short."
            return error.problem.message

    names = [name for name in objects.names() if is_wire_id(name)]
    with ThreadPoolExecutor(_AT_ONCE) as readers:
        found = dict(zip(names, readers.map(read, names), strict=True))
    valid = [one for one in found.values() if not isinstance(one, str)]
    valid.sort(key=age, reverse=True)
    return Listing(tuple(valid), {name: one for name, one in found.items() if isinstance(one, str)})


def load(objects: Objects, snapshot_id: str) -> manifest_pb2.SnapshotManifest:
    """The manifest of a copy. Raises MALFORMED_ID, SNAPSHOT_NOT_FOUND, SNAPSHOT_CORRUPT, SNAPSHOT_TOO_NEW, STORAGE_*."""
    return _manifest(objects, snapshot_id)[1]


def ledger(objects: Objects, snapshot_id: str) -> Iterator[bytes]:
    """The lines of a copy's ledger, after its digest was compared. Raises as `load`."""
    manifest = load(objects, snapshot_id)
    key = f"{snapshot_id}/{LEDGER_NAME}"
    if not _is(objects, key, FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256)):
        raise _damaged(objects, key)
    rest = b""
    for block in objects.chunks(key):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def verify(objects: Objects, snapshot_id: str) -> Verification:
    """Read every byte of a copy and compare all digests; nothing is written. Raises as `load`; the message names the object."""
    raw, manifest = _manifest(objects, snapshot_id)
    files, size = 1, len(raw)
    for key, expected in _expected(objects, manifest):
        if not _is(objects, key, expected):
            raise _damaged(objects, key)
        files, size = files + 1, size + expected.size_bytes
    # The snapshot's own manifest is counted as in a root: with the files, and not with the bytes.
    return Verification(manifest, files, size - len(raw), ())


def _expected(objects: Objects, manifest: manifest_pb2.SnapshotManifest) -> Iterator[tuple[str, FileDigest]]:
    """Every object of a copy but its manifest, chunks once. Manifests of parts are read on the way."""
    name = manifest.snapshot_id
    seen: set[str] = set()
    for reference in manifest.participants:
        if not reference.manifest_sha256:
            continue
        raw, part = _part_manifest(objects, name, reference)
        yield f"{name}/{reference.participant_id}/{MANIFEST_NAME}", FileDigest(len(raw), reference.manifest_sha256)
        for file in part.files:
            yield f"{name}/{reference.participant_id}/{file.path}", FileDigest(file.size_bytes, file.sha256)
        for entry in part.chunks:
            if entry.sha256 not in seen:
                seen.add(entry.sha256)
                yield _key(Chunk(entry.sha256, entry.size_bytes)), FileDigest(entry.size_bytes, entry.sha256)
    yield f"{name}/{LEDGER_NAME}", FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256)


def _part_manifest(
    objects: Objects, name: str, reference: manifest_pb2.ParticipantRef
) -> tuple[bytes, manifest_pb2.ParticipantManifest]:
    key = f"{name}/{reference.participant_id}/{MANIFEST_NAME}"
    raw = _whole(objects, key)
    where = f"{objects.url}/{key}"
    if hashlib.sha256(raw).hexdigest() != reference.manifest_sha256:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is not the one that the snapshot names.")
    return raw, decode(PARTICIPANT_KIND, raw, manifest_pb2.ParticipantManifest, where)  # checks every path


def _is(objects: Objects, key: str, expected: FileDigest) -> bool:
    """Whether an object has those bytes. Of a larger one only as much is read as shows it. Raises SNAPSHOT_CORRUPT for none."""
    return digest_of(_first(_at_most(objects.chunks(key), expected.size_bytes), objects, key)) == expected


def _damaged(objects: Objects, key: str) -> SafepointError:
    return refuse(Reason.SNAPSHOT_CORRUPT, f"{objects.url}/{key} is damaged: its bytes are not those that were saved.")


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


def _key(chunk: Chunk) -> str:
    return f"{_CHUNKS}/{chunk.sha256[:2]}/{chunk.sha256}"


def _put_chunk(chunks: Chunks, chunk: Chunk, objects: Objects) -> bool:
    """False when the store has it. Its size is looked at, not its bytes: the store made it whole, under the name of its digest."""
    if objects.size(_key(chunk)) == chunk.size_bytes:
        return False
    chunks.check(chunk)
    try:
        with chunks.opened(chunk.sha256) as file:
            objects.put_new(_key(chunk), file)
    except FileExistsError:
        if objects.size(_key(chunk)) != chunk.size_bytes:
            raise refuse(Reason.SNAPSHOT_EXISTS, f"{objects.url} has another {_key(chunk)}.") from None
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
        if not _is(objects, key, expected):
            raise refuse(Reason.SNAPSHOT_EXISTS, f"{objects.url} has another {key}.") from None
        return False
    return True


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
        raw, part = _part_manifest(objects, name, reference)
        shared = Chunks(root)
        for entry in part.chunks:
            chunk = Chunk(entry.sha256, entry.size_bytes)
            if clock() - refreshed > _REFRESH_S:  # nothing names them yet: a prune would take those of an hour ago
                for earlier in taken:
                    shared.touch(earlier)
                refreshed = clock()
            taken.append(chunk)
            shared.take(chunk, _first(_at_most(objects.chunks(_key(chunk)), chunk.size_bytes), objects, _key(chunk)))
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


def _first(parts: Iterator[bytes], objects: Objects, key: str) -> Iterator[bytes]:
    """The same, of an object that is there. Apart: for a writer, what is missing would be a failure of the disk."""
    try:
        return chain((next(parts, b""),), parts)
    except FileNotFoundError:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{objects.url}/{key} is missing.") from None


def _get(objects: Objects, key: str, directory: Folder, path: str, expected: FileDigest) -> None:
    folder, slash, rest = path.partition("/")
    if slash:
        with directory.ensure_child(folder) as below:
            _get(objects, key, below, rest, expected)
        return
    written = directory.write_new(path, _first(_at_most(objects.chunks(key), expected.size_bytes), objects, key))
    if written != expected:
        raise _damaged(objects, key)


def _clear(store: SnapshotStore, name: SnapshotId, directory: Folder) -> None:
    """Take back what we have written; the name goes only with a directory that holds nothing. Never raises."""
    with suppress(OSError, SafepointError):
        directory.remove_file(MANIFEST_NAME)  # first: without it there is no snapshot
        for each in directory.names():
            (directory.remove_child if directory.is_directory(each) else directory.remove_file)(each)
        with store.snapshots() as snapshots:
            snapshots.remove_empty(name)


def _at_most(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """No more than one chunk beyond what is expected: a stranger's object must not fill the disk."""
    for chunk in chunks:
        yield chunk
        size -= len(chunk)
        if size < 0:
            return


def _whole(objects: Objects, key: str) -> bytes:
    try:
        raw = b"".join(_at_most(objects.chunks(key), MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{objects.url}/{key} is missing.") from None
    return raw


def _manifest(objects: Objects, snapshot_id: str) -> tuple[bytes, manifest_pb2.SnapshotManifest]:
    if not is_wire_id(snapshot_id):
        raise refuse(Reason.MALFORMED_ID, f"{snapshot_id[:130]!r} is no snapshot_id.")
    where = f"{objects.url}/{snapshot_id}/{MANIFEST_NAME}"
    try:
        raw = b"".join(_at_most(objects.chunks(f"{snapshot_id}/{MANIFEST_NAME}"), MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        raise refuse(
            Reason.SNAPSHOT_NOT_FOUND, f"There is no copy of {snapshot_id} at {objects.url}.", next_step=_instead(objects)
        ) from None  # fmt: skip
    manifest = decode(SNAPSHOT_KIND, raw, manifest_pb2.SnapshotManifest, where)
    if manifest.snapshot_id != snapshot_id:
        raise refuse(Reason.SNAPSHOT_FOREIGN, f"{where} is that of the snapshot {manifest.snapshot_id}.")
    return raw, manifest


def _instead(objects: Objects) -> str:
    """What to pull when a copy is not there: those that are, as far as a glance shows."""
    names = [name for name in objects.names() if is_wire_id(name)]
    there = [name for name in names[-_NAMED:] if objects.size(f"{name}/{MANIFEST_NAME}") is not None]
    more = " and others" if len(names) > _NAMED else ""
    return f"Pull one that is there: {', '.join(there)}{more}." if there else NO_COPY
