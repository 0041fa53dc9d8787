"""What is in an object store: copies of snapshots, listed, read and verified. `archive` makes them, and brings them back.

The rule is that of a root: a copy exists if and only if its manifest.json is there, and it is what its digests say.

    <url>/<snapshot_id>/...          as below <root>/snapshots/<snapshot_id>/
    <url>/.chunks/<2>/<sha256>       as below <root>/chunks/: all copies share them, so a second push sends what has changed
    <url>/.epochs/<n>                empty: there is, or is to be, a copy that a coordinator of epoch <n> has saved

Nothing is written here. Everything blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator.client_requests import passed_over
from coordinator.snapshot_reading import Listing, Verification, age
from coordinator.wire.beneath import FileDigest, digest_of
from coordinator.wire.chunks import Chunk
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import is_wire_id
from coordinator.wire.manifest_file import (
    LEDGER_NAME,
    MANIFEST_NAME,
    MAX_EPOCH,
    MAX_MANIFEST_BYTES,
    PARTICIPANT_KIND,
    SNAPSHOT_KIND,
    decode,
)
from coordinator.wire.objects import Objects

CHUNKS_AT: Final = ".chunks"  # no snapshot can have this name, nor the next one
EPOCHS: Final = ".epochs"
_AT_ONCE: Final = 8  # manifests that a list reads
_MOST_BELIEVED: Final = (
    MAX_EPOCH // 2
)  # epochs count starts: who writes more into a store must not use up a root's numbers
_NAMED: Final = 10  # copies that a refusal names
NO_COPY: Final = "Correct the URL, or push a snapshot there first: `safepoint snapshots push`."


def manifests(objects: Objects) -> list[manifest_pb2.SnapshotManifest]:
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
            return read_manifest(objects, name)[1]
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
    return read_manifest(objects, snapshot_id)[1]


def ledger(objects: Objects, snapshot_id: str) -> Iterator[bytes]:
    """The lines of a copy's ledger, after its digest was compared. Raises as `load`."""
    manifest = load(objects, snapshot_id)
    key = f"{snapshot_id}/{LEDGER_NAME}"
    if not holds(objects, key, FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256)):
        raise damaged(objects, key)
    rest = b""
    for block in objects.chunks(key):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def verify(objects: Objects, snapshot_id: str) -> Verification:
    """Read every byte of a copy and compare all digests; nothing is written. Raises as `load`; the message names the object."""
    raw, manifest = read_manifest(objects, snapshot_id)
    files, size = 1, len(raw)
    for key, expected in _expected(objects, manifest):
        if not holds(objects, key, expected):
            raise damaged(objects, key)
        files, size = files + 1, size + expected.size_bytes
    # The snapshot's own manifest is counted as in a root: with the files, and not with the bytes.
    return Verification(manifest, files, size - len(raw), ())


def newest_epoch(objects: Objects) -> int:
    """The highest epoch of all copies, zero without any. One list, so that it can be asked at every start.

    A coordinator that begins on an empty disk must have a higher one: what it saves would else count as older than what a
    coordinator before it has left in the store.
    """
    found = (int(name) for name in objects.names(EPOCHS) if name.isdecimal() and len(name) <= 18)
    return max((epoch for epoch in found if epoch <= _MOST_BELIEVED), default=0)


def _expected(objects: Objects, manifest: manifest_pb2.SnapshotManifest) -> Iterator[tuple[str, FileDigest]]:
    """Every object of a copy but its manifest, chunks once. Manifests of parts are read on the way."""
    name = manifest.snapshot_id
    seen: set[str] = set()
    for reference in manifest.participants:
        if not reference.manifest_sha256:
            continue
        raw, part = part_manifest(objects, name, reference)
        yield f"{name}/{reference.participant_id}/{MANIFEST_NAME}", FileDigest(len(raw), reference.manifest_sha256)
        for file in part.files:
            yield f"{name}/{reference.participant_id}/{file.path}", FileDigest(file.size_bytes, file.sha256)
        for entry in part.chunks:
            if entry.sha256 not in seen:
                seen.add(entry.sha256)
                yield chunk_key(Chunk(entry.sha256, entry.size_bytes)), FileDigest(entry.size_bytes, entry.sha256)
    yield f"{name}/{LEDGER_NAME}", FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256)


def read_manifest(objects: Objects, snapshot_id: str) -> tuple[bytes, manifest_pb2.SnapshotManifest]:
    """The bytes of a copy's manifest, and what they say. Raises as `load`."""
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


def part_manifest(
    objects: Objects, name: str, reference: manifest_pb2.ParticipantRef
) -> tuple[bytes, manifest_pb2.ParticipantManifest]:
    """The manifest of a part, and its bytes. Raises SNAPSHOT_CORRUPT, SNAPSHOT_UNSAFE."""
    key = f"{name}/{reference.participant_id}/{MANIFEST_NAME}"
    raw = b"".join(content(objects, key, MAX_MANIFEST_BYTES))
    where = f"{objects.url}/{key}"
    if hashlib.sha256(raw).hexdigest() != reference.manifest_sha256:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is not the one that the snapshot names.")
    return raw, decode(PARTICIPANT_KIND, raw, manifest_pb2.ParticipantManifest, where)  # checks every path


def holds(objects: Objects, key: str, expected: FileDigest) -> bool:
    """Whether an object has those bytes. Of a larger one only as much is read as shows it. Raises SNAPSHOT_CORRUPT for none."""
    return digest_of(content(objects, key, expected.size_bytes)) == expected


def content(objects: Objects, key: str, size: int) -> Iterator[bytes]:
    """The bytes of an object, and no more than one chunk beyond `size`: a stranger's must not fill the disk.

    Raises SNAPSHOT_CORRUPT when it is not there, at once: for a writer, what is missing would be a failure of the disk.
    """
    parts = _at_most(objects.chunks(key), size)
    try:
        return chain((next(parts, b""),), parts)
    except FileNotFoundError:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{objects.url}/{key} is missing.") from None


def damaged(objects: Objects, key: str) -> SafepointError:
    """An object has other bytes than were saved."""
    return refuse(Reason.SNAPSHOT_CORRUPT, f"{objects.url}/{key} is damaged: its bytes are not those that were saved.")


def chunk_key(chunk: Chunk) -> str:
    """Where a store has a chunk."""
    return f"{CHUNKS_AT}/{chunk.sha256[:2]}/{chunk.sha256}"


def _at_most(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        size -= len(chunk)
        if size < 0:
            return


def _instead(objects: Objects) -> str:
    """What to pull when a copy is not there: those that are, as far as a glance shows."""
    names = [name for name in objects.names() if is_wire_id(name)]
    there = [name for name in names[-_NAMED:] if objects.size(f"{name}/{MANIFEST_NAME}") is not None]
    more = " and others" if len(names) > _NAMED else ""
    return f"Pull one that is there: {', '.join(there)}{more}." if there else NO_COPY
