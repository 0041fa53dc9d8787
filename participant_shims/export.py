"""Where a participant's part of a snapshot lies, and when it is durable.

The rule: a participant's directory is made by us, new, below a snapshot directory that the coordinator made; its
manifest is the last file, written when everything it lists is durable; and nothing of a published snapshot is touched.

    <root>/snapshots/<snapshot_id>/<participant_id>/...           files of the adapter, then manifest.json
    <root>/chunks/...                                             what ropes among them are made of

The root is configured and never comes from the wire. Everything here blocks: the service uses a thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from safepoint.v1 import capabilities_pb2, manifest_pb2

from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, segments, storage_error
from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Reason, Refused, SafepointError, refuse
from coordinator.wire.folder import Place
from coordinator.wire.manifest_file import (
    MANIFEST_NAME,
    read_participant_manifest,
    verify_files,
    write_participant_manifest,
)
from coordinator.wire.rope import is_rope, read_rope
from participant_shims.adapter import WrittenFile

SNAPSHOTS: Final = "snapshots"
SEEN_WITHIN_S: Final = 3.0
LOOK_EVERY_S: Final = 0.1

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class VerifiedPart:
    """A part of a snapshot of which every byte was read: its manifest and where it lies."""

    manifest: manifest_pb2.ParticipantManifest
    directory: Path


async def until_seen(look: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """What `look` finds. Looked for again while it raises SNAPSHOT_NOT_FOUND, for SEEN_WITHIN_S.

    On a network file system a directory that another machine has just made is seen here only when the cache of names has
    run out. What is found then is checked by its digest, so a stale view can delay and never mislead.
    """
    waited_s = 0.0
    while True:
        try:
            return await look()
        except SafepointError as error:
            if error.reason is not Reason.SNAPSHOT_NOT_FOUND or waited_s >= SEEN_WITHIN_S:
                raise
        await asyncio.sleep(LOOK_EVERY_S)
        waited_s += LOOK_EVERY_S


# What a participant is refused below a root, of either kind.


def published_already(snapshot_id: str) -> Refused:
    return refuse(Reason.SNAPSHOT_EXISTS, f"Snapshot {snapshot_id} is published already.")


def never_published(snapshot_id: str) -> Refused:
    return refuse(Reason.SNAPSHOT_NOT_FOUND, f"Snapshot {snapshot_id} was never published.")


def anothers(part: Place, operation_id: str) -> Refused:
    return refuse(Reason.SNAPSHOT_EXISTS, f"{part} exists and is not of operation {operation_id}.")


def no_part(participant_id: str, snapshot_id: str) -> Refused:
    return refuse(Reason.SNAPSHOT_CORRUPT, f"The part of {participant_id} in snapshot {snapshot_id} is not there.")


def no_place(snapshot: Place) -> Refused:
    return refuse(
        Reason.SNAPSHOT_NOT_FOUND, f"There is no {snapshot}.",
        next_step="Give the coordinator and every shim the same snapshot root.",
    )  # fmt: skip


class Exports:
    """The snapshot root as one participant uses it. Not for two threads at once."""

    def __init__(self, root: Path | None, participant_id: str) -> None:
        self.root = root
        self._participant_id = participant_id
        self._begun: dict[str, str] = {}  # snapshot_id -> the operation that made our directory in it

    def begin(self, snapshot_id: str, operation_id: str) -> Path:
        """Make the directory, mode 0700. One that a failed earlier try of the same operation left is cleared first.

        Raises SNAPSHOT_NOT_FOUND when the coordinator has not made the snapshot's directory (or the roots differ),
        SNAPSHOT_EXISTS when the snapshot is published or somebody else made our directory, STORAGE_*.
        """
        with self._snapshot(snapshot_id) as snapshot:
            if snapshot.has(MANIFEST_NAME):
                raise published_already(snapshot_id)
            if self._begun.get(snapshot_id) == operation_id and snapshot.is_directory(self._participant_id):
                snapshot.remove_child(self._participant_id)
            try:
                made = snapshot.make_child(self._participant_id)
            except FileExistsError:
                raise anothers(snapshot.path / self._participant_id, operation_id) from None
            made.close()
            self._begun = {snapshot_id: operation_id}  # one operation at a time: older ones need no more clearing
            return snapshot.path / self._participant_id

    def chunks(self, snapshot_id: str, files: Iterable[WrittenFile]) -> list[Chunk]:
        """The chunks of all ropes among `files`, sorted.

        Raises STORAGE_FAILED when one is not there, or known to be damaged, and as `read_rope`.
        """
        found: set[Chunk] = set()
        with self._snapshot(snapshot_id) as snapshot, snapshot.child(self._participant_id) as ours:
            for file in files:
                if is_rope(file.path):
                    found.update(read_rope(ours, file.path).chunks)
        shared = Chunks(self.root) if self.root is not None else None
        listed = sorted(found, key=lambda chunk: chunk.sha256)
        for chunk in listed:
            if shared is None or not shared.touch(chunk):
                raise refuse(
                    Reason.STORAGE_FAILED, f"The chunk {chunk.sha256} is damaged, or was deleted while it was in use.",
                    next_step="Save again: it is written anew then. If it happens again, look at the disk.",
                )  # fmt: skip
        return listed

    def finish(self, snapshot_id: str, files: Iterable[WrittenFile], manifest: manifest_pb2.ParticipantManifest) -> str:
        """Make all files durable, then write the manifest. The SHA-256 hex of the stored manifest.json.

        Raises STORAGE_*, SNAPSHOT_UNSAFE, and PROTOCOL_VIOLATION when a file is not what the adapter said. Then there
        is no manifest, and `discard` removes the rest.
        """
        with self._snapshot(snapshot_id) as snapshot, snapshot.child(self._participant_id) as ours:
            folders = {""}
            for file in files:
                parts = segments(file.path)
                folders.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
                self._sync_file(ours, file)
            for folder in sorted(folders, reverse=True):  # the deepest first: a name is durable when its folder is
                if folder:
                    with ours.child(folder) as below:
                        below.sync()
            ours.sync()
            failpoints.reach("shim.before_manifest")
            written = write_participant_manifest(ours, manifest)
            snapshot.sync()
            failpoints.reach("shim.after_manifest")
            return written.sha256

    def discard(self, snapshot_id: str, operation_id: str) -> None:
        """Remove what this operation wrote, unless the snapshot was published with it. Raises STORAGE_*."""
        if self._begun.get(snapshot_id) != operation_id:
            return
        try:
            with self._snapshot(snapshot_id) as snapshot:
                if not snapshot.has(MANIFEST_NAME):
                    snapshot.remove_child(self._participant_id)
        except FileNotFoundError:
            pass
        del self._begun[snapshot_id]

    def ahead(self, until: Callable[[], bool]) -> None:
        """Nothing is to be done ahead of a save: what is written below the root is there."""

    def verify(
        self, snapshot_id: str, source_id: str, manifest_sha256: str, now: capabilities_pb2.Capabilities
    ) -> VerifiedPart:
        """Read and compare every byte of a part, and that it fits the participant that `now` describes.

        Raises SNAPSHOT_NOT_FOUND, SNAPSHOT_CORRUPT, SNAPSHOT_UNSAFE, SNAPSHOT_TOO_NEW, SNAPSHOT_FOREIGN, STORAGE_*.
        """
        where = f"The part of {source_id} in snapshot {snapshot_id}"
        with self._snapshot(snapshot_id) as snapshot:
            if not snapshot.has(MANIFEST_NAME):
                raise never_published(snapshot_id)
            try:
                part = snapshot.child(source_id)
            except FileNotFoundError:
                raise no_part(source_id, snapshot_id) from None
            with part:
                try:
                    manifest, _ = read_participant_manifest(part, manifest_sha256)
                except FileNotFoundError:
                    raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} has no manifest.") from None
                then = manifest.capabilities
                if manifest.snapshot_id != snapshot_id or then.participant_id != source_id:
                    raise refuse(
                        Reason.SNAPSHOT_FOREIGN,
                        f"{where} was written for {then.participant_id} in snapshot {manifest.snapshot_id}.",
                    )
                if (then.kind, then.state_schema) != (now.kind, now.state_schema):
                    raise refuse(
                        Reason.SNAPSHOT_FOREIGN,
                        f"{where} holds {then.state_schema} of a {then.kind}; "
                        f"{now.participant_id} is a {now.kind} with {now.state_schema}.",
                    )
                verify_files(part, manifest)
                return VerifiedPart(manifest, part.path)

    def published(self, snapshot_id: str) -> Path:
        """The directory of a snapshot. Raises as `verify`."""
        with self._snapshot(snapshot_id) as snapshot:
            if not snapshot.has(MANIFEST_NAME):
                raise never_published(snapshot_id)
            return snapshot.path

    def _snapshot(self, snapshot_id: str) -> Directory:
        if self.root is None:
            raise refuse(
                Reason.STORAGE_FAILED, f"{self._participant_id} has no snapshot root.",
                next_step="Start its shim with SAFEPOINT_ROOT.",
            )  # fmt: skip
        try:
            with Directory.open(self.root) as root, root.child(SNAPSHOTS) as snapshots:
                return snapshots.child(snapshot_id)
        except FileNotFoundError:
            raise no_place(self.root / SNAPSHOTS / snapshot_id) from None

    @staticmethod
    def _sync_file(ours: Directory, file: WrittenFile) -> None:
        # Written by other processes perhaps: fsync is of the file, whoever wrote it.
        path = ours.path / file.path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise storage_error(error, f"opening {path}") from error
        try:
            failpoints.reach("shim.before_sync", path.name)
            os.fsync(fd)
            size = os.fstat(fd).st_size
        except OSError as error:  # after a failed fsync the file counts as lost; it is not tried again
            raise storage_error(error, f"syncing {path}") from error
        finally:
            os.close(fd)
        if size != file.size_bytes:
            raise refuse(Reason.PROTOCOL_VIOLATION, f"{path} has {size} bytes, and its writer says {file.size_bytes}.")
