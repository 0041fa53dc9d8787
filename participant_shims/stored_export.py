"""A participant's part of a snapshot whose root is in an object store: written on this machine, and sent from there.

The rule: a part is in the store when its manifest is, which is written last, when everything it lists is there. What is on this
machine is a copy: lost with it, and never read by anybody else.

Adapters and gates write below a spool, a directory that looks like a root, and need not know of the store. Chunks are sent ahead
of a save where there is one (`ahead`), so that a pause sends what has changed since. A restore brings the part into the spool,
with every digest compared on the way, and goes on as on a disk.

    <spool>/snapshots/<snapshot_id>/<participant_id>/...    what is being sent, or was brought
    <spool>/chunks/...                                      what this participant has written or brought; kept while it is in use

Everything here blocks: the service uses a thread.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from safepoint.v1 import capabilities_pb2, manifest_pb2

from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, FileDigest, segments, storage_error
from coordinator.wire.chunks import GRACE_S, Chunk, Chunks
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.manifest_file import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    VOID,
    read_participant_manifest,
    write_participant_manifest,
)
from coordinator.wire.names import Names
from coordinator.wire.stored_chunks import StoredChunks
from coordinator.wire.stored_folder import StoredFolder, Where
from participant_shims.adapter import WrittenFile
from participant_shims.adapters.ledger_file import LEDGER
from participant_shims.export import (
    SNAPSHOTS,
    Exports,
    VerifiedPart,
    anothers,
    never_published,
    no_part,
    no_place,
    published_already,
)

_AT_ONCE: Final = 4


class StoredExports:
    """The snapshot root as one participant uses it; methods as those of `export.Exports`. Not for two threads at once, but for
    `ahead`, which runs beside the others."""

    def __init__(self, names: Names, spool: Path, participant_id: str) -> None:
        """`spool` is made, and what one before us has left in it of parts is deleted; its chunks stay."""
        self.root = spool
        self._names = names
        self._participant_id = participant_id
        self._local = Exports(spool, participant_id)
        self._chunks = Chunks(spool)
        self._stored = StoredChunks(names)
        self._begun: dict[str, tuple[str, StoredFolder]] = {}  # snapshot_id -> the operation, and our folder in it
        self._used: set[str] = set()  # chunks of our last save
        try:
            shutil.rmtree(spool / SNAPSHOTS, ignore_errors=True)
            (spool / SNAPSHOTS).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, f"making {spool}") from error

    def begin(self, snapshot_id: str, operation_id: str) -> Path:
        """As `Exports.begin`; the directory is on this machine."""
        snapshot = self._snapshot(snapshot_id)
        if snapshot.has(MANIFEST_NAME):
            raise published_already(snapshot_id)
        if self._begun.get(snapshot_id, ("",))[0] == operation_id:
            with suppress(FileNotFoundError):
                snapshot.remove_child(self._participant_id)
        try:
            ours = snapshot.make_child(self._participant_id)
        except FileExistsError:
            raise anothers(snapshot.path / self._participant_id, operation_id) from None
        self._begun = {snapshot_id: (operation_id, ours)}
        self._clear(snapshot_id)
        return self._local.begin(snapshot_id, operation_id)

    def chunks(self, snapshot_id: str, files: Iterable[WrittenFile]) -> list[Chunk]:
        """As `Exports.chunks`; they are in the store when this returns."""
        found = self._local.chunks(snapshot_id, files)
        self._send(found)
        self._used = {chunk.sha256 for chunk in found}
        return found

    def finish(self, snapshot_id: str, files: Iterable[WrittenFile], manifest: manifest_pb2.ParticipantManifest) -> str:
        """As `Exports.finish`: send all files, then the manifest."""
        _, ours = self._begun[snapshot_id]
        listed = list(files)
        with self._part(snapshot_id, self._participant_id) as local:
            folders = {"": ours}
            for file in sorted(listed, key=lambda file: file.path):
                above = segments(file.path)[:-1]
                for depth in range(1, len(above) + 1):
                    path = "/".join(above[:depth])
                    if path not in folders:
                        folders[path] = folders["/".join(above[: depth - 1])].ensure_child(above[depth - 1])
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(partial(_send_file, local, folders), listed))
        failpoints.reach("shim.before_manifest")
        written = write_participant_manifest(ours, manifest)
        failpoints.reach("shim.after_manifest")
        self._clear(snapshot_id)
        self._forget_chunks()
        return written.sha256

    def discard(self, snapshot_id: str, operation_id: str) -> None:
        """As `Exports.discard`."""
        begun, _ = self._begun.get(snapshot_id, ("", None))
        if begun != operation_id:
            return
        self._clear(snapshot_id)
        snapshot = self._snapshot(snapshot_id)
        if not snapshot.has(MANIFEST_NAME):
            with suppress(FileNotFoundError):
                snapshot.remove_child(self._participant_id)
        del self._begun[snapshot_id]

    def verify(
        self, snapshot_id: str, source_id: str, manifest_sha256: str, now: capabilities_pb2.Capabilities
    ) -> VerifiedPart:
        """As `Exports.verify`, of a part that is brought into the spool for it, beside others of the same snapshot."""
        snapshot = self._snapshot(snapshot_id)
        published = self._manifest(snapshot_id, snapshot)
        try:
            part = snapshot.child(source_id)
            raw = part.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise no_part(source_id, snapshot_id) from None
        with self._spooled(snapshot_id, published) as into:
            with suppress(FileNotFoundError):
                into.remove_child(source_id)
            with into.ensure_child(source_id) as local:
                self._bring(part, raw, local, manifest_sha256)
        return self._local.verify(snapshot_id, source_id, manifest_sha256, now)

    def published(self, snapshot_id: str) -> Path:
        """As `Exports.published`: its ledger is brought into the spool, beside the parts that are there."""
        snapshot = self._snapshot(snapshot_id)
        with self._spooled(snapshot_id, self._manifest(snapshot_id, snapshot)) as into:
            if not into.has(LEDGER):
                with suppress(FileNotFoundError):
                    _copy(snapshot, LEDGER, into, LEDGER)
            return into.path

    def ahead(self, until: Callable[[], bool]) -> None:
        """Send chunks that a save to come may name, while `until` says so. Raises STORAGE_FULL, STORAGE_FAILED."""
        for found in self._chunks.all():
            if not until():
                return
            self._stored.send(Chunk(found.sha256, found.size_bytes), self._chunks)

    def _manifest(self, snapshot_id: str, snapshot: StoredFolder) -> bytes:
        try:
            published = snapshot.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            published = VOID
        if published == VOID:
            raise never_published(snapshot_id)
        return published

    def _spooled(self, snapshot_id: str, published: bytes) -> Directory:
        """The snapshot in the spool, alone there; what it has already of parts stays."""
        with Directory.open(self.root) as spool:
            with suppress(FileNotFoundError), spool.child(f"{SNAPSHOTS}/{snapshot_id}") as there:
                if there.read(MANIFEST_NAME, MAX_MANIFEST_BYTES) == published:
                    return spool.child(f"{SNAPSHOTS}/{snapshot_id}")
            self._clear(snapshot_id)
            into = spool.child(f"{SNAPSHOTS}/{snapshot_id}")
            into.write_new(MANIFEST_NAME, published)
            return into

    def _send(self, chunks: Iterable[Chunk]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(partial(self._stored.send, source=self._chunks), chunks))

    def _bring(self, part: StoredFolder, raw: bytes, local: Directory, manifest_sha256: str) -> None:
        local.write_new(MANIFEST_NAME, raw)
        manifest, _ = read_participant_manifest(local, manifest_sha256)
        for entry in manifest.files:
            *above, name = segments(entry.path)
            at = local
            for folder in above:
                at = at.ensure_child(folder)
            try:
                _copy(part, entry.path, at, name)
            except FileNotFoundError:
                raise refuse(Reason.SNAPSHOT_CORRUPT, f"{part.path / entry.path} is listed and not there.") from None
        for chunk in manifest.chunks:
            self._chunks.take(Chunk(chunk.sha256, chunk.size_bytes), self._stored.read(chunk.sha256))
        self._used.update(chunk.sha256 for chunk in manifest.chunks)

    def _clear(self, snapshot_id: str) -> None:
        """What lies in the spool of a snapshot, and of those before it."""
        with Directory.open(self.root) as spool, spool.ensure_child(SNAPSHOTS) as snapshots:
            for name in snapshots.names():
                with suppress(FileNotFoundError):
                    snapshots.remove_child(name)
            snapshots.ensure_child(snapshot_id).close()

    def _forget_chunks(self) -> None:
        """Delete copies that the last save did not name and nobody has asked for in a while."""
        before = time.time() - GRACE_S
        for found in list(self._chunks.all()):
            if found.touched_s < before and found.sha256 not in self._used:
                self._chunks.remove(found.name)

    def _part(self, snapshot_id: str, participant_id: str) -> Directory:
        with Directory.open(self.root) as spool:
            return spool.child(f"{SNAPSHOTS}/{snapshot_id}/{participant_id}")

    def _snapshot(self, snapshot_id: str) -> StoredFolder:
        try:
            return StoredFolder(self._names).child(SNAPSHOTS).seen(snapshot_id)
        except FileNotFoundError:
            raise no_place(Where(self._names.url) / SNAPSHOTS / snapshot_id) from None


def _copy(source: StoredFolder, path: str, into: Directory, name: str) -> None:
    """Bring a file to this machine. Raises FileNotFoundError when it is not in the store, STORAGE_*."""
    with source.opened(path) as file, open(file, "rb", closefd=False) as stream:
        into.write_new(name, iter(partial(stream.read, 1 << 20), b""))


def _send_file(local: Directory, folders: dict[str, StoredFolder], file: WrittenFile) -> None:
    found = local.digest(file.path)
    if found != FileDigest(file.size_bytes, file.sha256):
        raise refuse(
            Reason.PROTOCOL_VIOLATION,
            f"{local.path / file.path} has {found.size_bytes} bytes, or others than its writer says, which are {file.size_bytes}.",
        )
    above, _, name = file.path.rpartition("/")
    with local.opened(file.path) as opened:
        folders[above].put_file(name, opened)
