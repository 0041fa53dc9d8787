"""The snapshots of one job below one root, as its coordinator makes them: reserved, published, given up.

The rule: a snapshot exists if and only if its manifest is there and verifies. Its directory is made with O_EXCL, its
manifest is linked last and never replaced, and a failure of any kind leaves older snapshots untouched.

    <root>/owner.json                     whose root this is; another job's is refused

Everything here blocks: callers on an event loop use a thread. Safe for several threads, except that `discard` must not
meet an operation that writes the same snapshot.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

from safepoint.v1 import manifest_pb2

from coordinator.snapshot_reading import OWNER, SNAPSHOTS, SnapshotReader
from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, FileDigest, not_of_a_snapshot, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import Folder, open_root
from coordinator.wire.ids import SnapshotId, is_wire_id
from coordinator.wire.manifest_file import MANIFEST_NAME, VOID, is_void, write_snapshot_manifest

_PROBE: Final = ".probe-"


class SnapshotStore(SnapshotReader):
    """The snapshots of `job_id` below `root`, claimed for it."""

    def __init__(self, root: str | os.PathLike[str], job_id: str) -> None:
        """Make what is missing of the root and claim it.

        Raises SNAPSHOT_FOREIGN when the root belongs to another job, STORAGE_FULL, STORAGE_FAILED.
        """
        super().__init__(root, job_id)
        if isinstance(self.root, Path):
            try:
                os.makedirs(self.root, exist_ok=True)
            except OSError as error:
                raise storage_error(error, f"making {self.root}") from error
        with open_root(self.root) as top:
            _claim(top, job_id)
            if isinstance(top, Directory):
                _probe(top)
            else:
                _probe_store(top)
            top.ensure_child(SNAPSHOTS).close()

    def directory(self, name: str) -> Folder:
        """A directory of ours beside the snapshots, such as `coordinator`, made when it is not there."""
        with open_root(self.root) as top:
            try:
                return top.ensure_child(name)
            except SafepointError as error:
                what = (
                    "a directory of the coordinator's own must be there, since a link may lead to that of another root"
                )
                raise not_of_a_snapshot(error, what, f"Move {top.path / name} away, then repeat.") from error

    def begin(self, snapshot_id: SnapshotId) -> None:
        """Reserve the directory of a snapshot to come. Raises SNAPSHOT_EXISTS, STALE_EPOCH; then nothing changed."""
        failpoints.reach("snapshots.before_begin")
        with self.snapshots() as snapshots:
            try:
                snapshots.make_child(snapshot_id).close()
            except FileExistsError:
                raise refuse(
                    Reason.SNAPSHOT_EXISTS, f"There is a snapshot {snapshot_id}, or a part of one, already."
                ) from None
            except FileNotFoundError:  # `forget_reserved` of one that has just started
                raise refuse(
                    Reason.STALE_EPOCH, f"A newer coordinator has removed the directory of {snapshot_id}."
                ) from None
        failpoints.reach("snapshots.after_begin")

    def publish(
        self, manifest: manifest_pb2.SnapshotManifest, still_valid: Callable[[], None] = lambda: None
    ) -> FileDigest:
        """Write the manifest: the one commit point. `still_valid` is asked right before, and raises to forbid it.

        When it raises, `published_by` says whether the manifest is there: a failed fsync of the directory comes after.
        Raises STALE_EPOCH when a newer coordinator has taken the name (`void`), or the directory, in the meantime.
        """
        taken = f"A newer coordinator has given up the snapshot {manifest.snapshot_id}."
        with self.open(manifest.snapshot_id) as directory:
            failpoints.reach("snapshots.before_publish")
            still_valid()
            try:
                written = write_snapshot_manifest(directory, manifest)
            except FileExistsError:
                if is_void(directory):
                    raise refuse(Reason.STALE_EPOCH, taken) from None
                raise refuse(Reason.SNAPSHOT_EXISTS, f"The snapshot {manifest.snapshot_id} is published.") from None
        failpoints.reach("snapshots.after_publish")
        if not self._has(manifest.snapshot_id, written):
            raise refuse(Reason.STALE_EPOCH, taken)  # we wrote into a directory that was being deleted
        return written

    def _has(self, snapshot_id: str, written: FileDigest) -> bool:
        """Whether the snapshot of that name has this manifest. Raises STORAGE_FAILED when the disk cannot say."""
        try:
            with self.open(snapshot_id) as directory:
                return directory.digest(MANIFEST_NAME) == written
        except FileNotFoundError:
            return False
        except SafepointError as error:
            if error.reason is Reason.STORAGE_FAILED:
                raise
            return False

    def void(self, snapshot_id: SnapshotId) -> None:
        """Take the manifest's name, so that a coordinator before us that still runs cannot publish this snapshot.

        Whoever makes the name first has decided, so look with `published_by` afterwards. Raises STORAGE_FULL,
        STORAGE_FAILED: then nothing is decided.
        """
        failpoints.reach("snapshots.before_void")
        try:
            with self.open(snapshot_id) as directory:
                directory.write_new(MANIFEST_NAME, VOID)
        except FileExistsError:
            pass
        except SafepointError as error:
            if error.reason is not Reason.SNAPSHOT_NOT_FOUND:  # without a directory nothing can be published
                raise
        failpoints.reach("snapshots.after_void")

    def forget_reserved(self) -> None:
        """At a start: remove directories that were reserved and hold nothing. Raises STORAGE_FAILED.

        A coordinator that dies between reserving and its first record leaves one that no journal knows, and the repeat of
        that save would find its name taken. One that lives and has only just reserved it is replaced by us anyway.
        """
        with self.snapshots() as snapshots:
            for name in snapshots.names():
                if is_wire_id(name):
                    snapshots.remove_empty(name)

    def discard_temporaries(self, snapshot_id: SnapshotId) -> None:
        """At a start: remove what a publish left that was cut short after its manifest was there. Raises STORAGE_FAILED."""
        with self.open(snapshot_id) as directory:
            directory.discard_temporaries(MANIFEST_NAME)

    def published_by(self, snapshot_id: SnapshotId, operation_id: str) -> manifest_pb2.SnapshotManifest | None:
        """The manifest, if that operation has published it: durable from now on, since whoever linked it may have died, or
        failed, before its name was. Raises STORAGE_FAILED when the disk cannot say, STORAGE_* when it cannot keep it.
        """
        try:
            manifest = self.load(snapshot_id)
        except SafepointError as error:
            if error.reason is Reason.STORAGE_FAILED:
                raise
            return None
        if manifest.operation_id != operation_id:
            return None
        with self.open(snapshot_id) as directory:
            try:
                directory.sync()
            except OSError as error:
                raise storage_error(error, f"making the name of {directory.path / MANIFEST_NAME} durable") from error
        return manifest

    def discard(self, snapshot_id: SnapshotId) -> None:
        """Delete what an operation without success left. Raises SNAPSHOT_IN_USE when it is published after all."""
        with self.snapshots() as snapshots:
            try:
                with snapshots.child(snapshot_id) as directory:
                    if directory.has(MANIFEST_NAME) and not is_void(directory):
                        raise refuse(Reason.SNAPSHOT_IN_USE, f"The snapshot {snapshot_id} is published.")
            except FileNotFoundError:
                return
        self.remove(snapshot_id)

    def give_up(self, snapshot_id: SnapshotId) -> None:
        """Delete what is not published, for good: its name is taken first. One that is published stays."""
        self.void(snapshot_id)
        try:
            self.discard(snapshot_id)
        except SafepointError as error:
            if error.reason is not Reason.SNAPSHOT_IN_USE:
                raise

    def remove(self, snapshot_id: str) -> None:
        """Delete a snapshot, or what is left of one. Twice is harmless.

        Its name is taken away first, so that a crash half-way never leaves a snapshot with its manifest and without its files.
        """
        with self.snapshots() as snapshots:
            try:
                failpoints.reach("snapshots.before_discard")
                gone = snapshots.take_away(snapshot_id)
                failpoints.reach("snapshots.after_discard")
                snapshots.remove_child(gone)
            except FileNotFoundError:
                pass


def _probe(top: Directory) -> None:
    """Try what publishing and pruning rest on, where it would matter: one name made once, never over another; a rename.

    Found at the start and not at the first save. Raises STORAGE_FAILED; a full disk is no answer, and let pass: a coordinator
    that starts on one may have to abort.
    """
    for name in top.names():
        if name.startswith(_PROBE):
            with suppress(FileNotFoundError, SafepointError):
                top.remove_child(name)
    name, made = _PROBE + secrets.token_hex(4), False
    try:
        with top.make_child(name) as folder:
            made = True
            folder.write_new("once", b"1")
            try:
                folder.write_new("once", b"2")
            except FileExistsError:
                pass
            if folder.read("once", 1) != b"1":
                raise refuse(Reason.STORAGE_FAILED, "A second writer replaced the file of the first.")
        top.rename_child(name, f"{name}-b")
        top.remove_child(f"{name}-b")
    except (SafepointError, FileNotFoundError) as error:
        if made and not top.has(name) and not top.has(f"{name}-b"):
            return  # another start took ours for what a crash had left
        if isinstance(error, SafepointError) and error.reason is Reason.STORAGE_FULL:
            return
        raise refuse(
            Reason.STORAGE_FAILED,
            f"The snapshot root {top.path} cannot hold snapshots: {error}",
            next_step="Use a directory of a local disk, NFS or another POSIX file system with hard links.",
        ) from error


def _probe_store(top: Folder) -> None:
    """As `_probe`, of a store: a name is made once, and what was made is seen by a read and a list that begin afterwards."""
    name = _PROBE + secrets.token_hex(4)
    with top.child(name) as folder:
        try:
            folder.write_new("once", b"1")
            with suppress(FileExistsError):
                folder.write_new("once", b"2")
            if folder.read("once", 1) != b"1":
                raise refuse(Reason.STORAGE_FAILED, "A second writer replaced the object of the first.")
            if folder.names() != ["once"]:
                raise refuse(Reason.STORAGE_FAILED, "An object that was written is in no list.")
        except (SafepointError, FileNotFoundError) as error:
            step = error.problem.next_step if isinstance(error, SafepointError) else ""
            raise refuse(
                Reason.STORAGE_FAILED, f"The snapshot root {top.path} cannot hold snapshots: {error}"[:900],
                next_step=step or "Use a store that refuses the second writer of a name, as S3 does (If-None-Match), or a directory.",
            ) from error  # fmt: skip
        finally:
            with suppress(SafepointError):
                folder.remove_file("once")


def _claim(top: Folder, job_id: str) -> None:
    try:
        if not top.has(OWNER):  # a full disk could not even try
            top.write_new(OWNER, json.dumps({"job_id": job_id}).encode() + b"\n")
            return
    except FileExistsError:
        pass
    try:
        owner: object = json.loads(top.read(OWNER, 4096))
    except (ValueError, RecursionError, FileNotFoundError):
        owner = None
    named = cast("dict[str, object]", owner).get("job_id") if isinstance(owner, dict) else None
    if named != job_id:
        raise refuse(
            Reason.SNAPSHOT_FOREIGN,
            f"The snapshot root {top.path} belongs to {f'job {named}' if isinstance(named, str) else 'nobody known'}, "
            f"not to job {job_id}.",
        )
