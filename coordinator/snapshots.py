"""The snapshots of one job below one root: reserved, published, listed, read, verified, pruned.

The rule: a snapshot exists if and only if its manifest is there and verifies. Its directory is made with O_EXCL, its
manifest is linked last and never replaced, and a failure of any kind leaves older snapshots untouched.

    <root>/owner.json                     whose root this is; another job's is refused
    <root>/snapshots/<snapshot_id>/manifest.json        SnapshotManifest, written last
    <root>/snapshots/<snapshot_id>/ledger.jsonl         one LedgerEntry a line
    <root>/snapshots/<snapshot_id>/<participant_id>/    what that participant wrote
    <root>/snapshots/.gone-<snapshot_id>-<random>       being deleted; no snapshot any more

Everything here blocks: callers on an event loop use a thread. Safe for several threads, except that `prune` and
`discard` must know what is in use.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

from safepoint.v1 import manifest_pb2

from coordinator import ledger_lines
from coordinator.protocol import ledger
from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, FileDigest, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import SnapshotId, is_wire_id
from coordinator.wire.manifest_file import (
    MANIFEST_NAME,
    MAX_UNLISTED,
    VOID,
    is_sha256,
    is_void,
    read_participant_manifest,
    read_snapshot_manifest,
    verify_files,
    write_snapshot_manifest,
)
from coordinator.wire.terms import Phase, RolloutState

LEDGER_NAME: Final = "ledger.jsonl"
MAX_LEDGER_LINE: Final = 64 << 10
_SNAPSHOTS: Final = "snapshots"
_OWNER: Final = "owner.json"
_GONE: Final = ".gone-"
_MAX_COUNTED: Final = 1_000_000  # files


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read to verify a snapshot: files and bytes, and the files that nobody vouches for (at most 100)."""

    manifest: manifest_pb2.SnapshotManifest
    files: int
    size_bytes: int
    unlisted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Published snapshots, newest first, and directories that hold none, with the reason."""

    snapshots: tuple[manifest_pb2.SnapshotManifest, ...]
    invalid: dict[str, str]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, or would be: names in that order, and the bytes they held."""

    deleted: tuple[str, ...]
    size_bytes: int


class SnapshotStore:
    """The snapshots of `job_id` below `root`."""

    def __init__(self, root: str | os.PathLike[str], job_id: str) -> None:
        """Make what is missing of the root and claim it.

        Raises SNAPSHOT_FOREIGN when the root belongs to another job, STORAGE_FULL, STORAGE_FAILED.
        """
        self.root = Path(root)
        self.job_id = job_id
        try:
            os.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise storage_error(error, f"making {self.root}") from error
        with Directory.open(self.root) as top:
            _claim(top, job_id)
            top.ensure_child(_SNAPSHOTS).close()

    def directory(self, name: str) -> Directory:
        """A directory of ours beside the snapshots, such as `coordinator`, made when it is not there."""
        with Directory.open(self.root) as top:
            return top.ensure_child(name)

    def begin(self, snapshot_id: SnapshotId) -> None:
        """Reserve the directory of a snapshot to come. Raises SNAPSHOT_EXISTS; then nothing changed."""
        failpoints.reach("snapshots.before_begin")
        with self._snapshots() as snapshots:
            try:
                snapshots.make_child(snapshot_id).close()
            except FileExistsError:
                raise refuse(
                    Reason.SNAPSHOT_EXISTS, f"There is a snapshot {snapshot_id}, or a part of one, already."
                ) from None
        failpoints.reach("snapshots.after_begin")

    def open(self, snapshot_id: str) -> Directory:
        """The directory of a snapshot, published or not. Raises SNAPSHOT_NOT_FOUND, MALFORMED_ID, SNAPSHOT_UNSAFE."""
        if not is_wire_id(snapshot_id):
            raise refuse(Reason.MALFORMED_ID, f"{snapshot_id[:130]!r} is no snapshot_id.")
        with self._snapshots() as snapshots:
            try:
                return snapshots.child(snapshot_id)
            except FileNotFoundError:
                raise _not_found(snapshot_id) from None

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
        if self.published_by(SnapshotId(manifest.snapshot_id), manifest.operation_id) is None:
            raise refuse(Reason.STALE_EPOCH, taken)  # we wrote into a directory that was being deleted
        return written

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

    def published_by(self, snapshot_id: SnapshotId, operation_id: str) -> manifest_pb2.SnapshotManifest | None:
        """The manifest, if that operation has published it. Raises STORAGE_FAILED when the disk cannot say."""
        try:
            manifest = self.load(snapshot_id)
        except SafepointError as error:
            if error.reason is Reason.STORAGE_FAILED:
                raise
            return None
        return manifest if manifest.operation_id == operation_id else None

    def load(self, snapshot_id: str) -> manifest_pb2.SnapshotManifest:
        """The manifest of a published snapshot; its files are not read.

        Raises SNAPSHOT_NOT_FOUND, SNAPSHOT_CORRUPT, SNAPSHOT_TOO_NEW, SNAPSHOT_UNSAFE, SNAPSHOT_FOREIGN.
        """
        with self.open(snapshot_id) as directory:
            return self._manifest(directory, snapshot_id)

    def verify(self, snapshot_id: str) -> Verification:
        """Read every byte of a snapshot and compare all digests. Raises as `load`; the message names the file."""
        with self.open(snapshot_id) as directory:
            manifest = self._manifest(directory, snapshot_id)
            files, size, unlisted = 1, 0, list[str]()
            for reference in manifest.participants:
                if not reference.manifest_sha256:
                    continue
                blamed = blamed_on(reference.participant_id)
                with blamed, _participant_directory(directory, reference.participant_id) as part:
                    found, stored = _participant_manifest(part, reference)
                    _check_belongs(found, manifest, reference.participant_id)
                    verified = verify_files(part, found)
                files += verified.files + 1
                size += verified.size_bytes + stored.size_bytes
                unlisted += [f"{reference.participant_id}/{path}" for path in verified.unlisted]
            size += self._check_ledger(directory, manifest).size_bytes
            _check_balance(directory, manifest)
            known = {MANIFEST_NAME, LEDGER_NAME} | {
                r.participant_id for r in manifest.participants if r.manifest_sha256
            }
            unlisted += [name for name in directory.names() if name not in known]
            return Verification(manifest, files, size, tuple(unlisted[:MAX_UNLISTED]))

    def part_totals(self, reference: manifest_pb2.ParticipantRef, snapshot_id: str) -> dict[str, int]:
        """The rollouts of one participant's own ledger, by the lower-case name of their state. Raises as `load`."""
        with self.open(snapshot_id) as directory, _participant_directory(directory, reference.participant_id) as part:
            totals = _participant_manifest(part, reference)[0].totals
        return {state.name.lower(): getattr(totals, state.name.lower()) for state in RolloutState if state}

    def ledger(self, snapshot_id: str) -> Generator[bytes]:
        """The lines of a snapshot's ledger, after its digest was compared. Raises as `load`."""
        with self.open(snapshot_id) as directory:
            self._check_ledger(directory, self._manifest(directory, snapshot_id))
            yield from directory.lines(LEDGER_NAME, MAX_LEDGER_LINE)

    def list(self) -> Listing:
        """What is there. A directory without a valid manifest is listed with why, and never restored.

        Reads manifests and no ledger: a byte that has changed elsewhere is found by `verify`, which a restore begins with.
        Newest first: by the epoch of the coordinator that published, then by its clock.
        """
        valid: list[manifest_pb2.SnapshotManifest] = []
        invalid: dict[str, str] = {}
        with self._snapshots() as snapshots:
            for name in snapshots.names():
                if name.startswith(_GONE):
                    continue
                try:
                    if not is_wire_id(name):
                        raise refuse(Reason.SNAPSHOT_UNSAFE, f"{name[:130]!r} is no snapshot_id.")
                    with snapshots.child(name) as directory:
                        manifest = self._manifest(directory, name)
                        self._check_complete(directory, manifest)
                        valid.append(manifest)
                except SafepointError as error:
                    invalid[name] = error.problem.message
                except FileNotFoundError:
                    pass  # deleted in between
        valid.sort(key=_age, reverse=True)
        return Listing(tuple(valid), invalid)

    def discard(self, snapshot_id: SnapshotId) -> None:
        """Delete what an operation without success left. Raises SNAPSHOT_IN_USE when it is published after all."""
        with self._snapshots() as snapshots:
            try:
                with snapshots.child(snapshot_id) as directory:
                    if directory.has(MANIFEST_NAME) and not is_void(directory):
                        raise refuse(Reason.SNAPSHOT_IN_USE, f"The snapshot {snapshot_id} is published.")
                _remove(snapshots, snapshot_id)
            except FileNotFoundError:
                pass

    def spared(self, keep_last: int) -> set[str]:
        """The newest snapshot of which every byte is right, when pruning to `keep_last` would delete it. Reads a lot.

        Newer ones may be damaged where no list can see it; whoever asks for a deletion must pass this to `prune`.
        """
        names = [manifest.snapshot_id for manifest in self.list().snapshots]
        for position, name in enumerate(names if len(names) > keep_last else ()):
            try:
                self.verify(name)
            except SafepointError as error:
                if error.reason in (Reason.STORAGE_FAILED, Reason.STORAGE_FULL):
                    raise
            else:
                return {name} if position >= keep_last else set()
        return set()

    def prune(self, keep_last: int, in_use: Collection[str], dry_run: bool) -> Pruned:
        """Delete all but the newest `keep_last` snapshots, and leavings: unpublished directories that nobody writes.

        The newest one stays whatever is asked, and so does everything of `in_use` (what an operation saves or restores
        now, and what is `spared`), and every directory with a manifest that is damaged, foreign or newer: people look at those.
        """
        if keep_last < 1:
            raise refuse(Reason.INVALID_ARGUMENT, "keep_last must be at least 1: the newest snapshot is never deleted.")
        listing = self.list()
        old = [m.snapshot_id for m in listing.snapshots[keep_last:]]
        with self._snapshots() as snapshots:
            leavings = [name for name in listing.invalid if is_wire_id(name) and _unpublished(snapshots, name)]
            halfway = [name for name in snapshots.names() if name.startswith(_GONE)]
            doomed = [name for name in (*old, *leavings) if name not in in_use]
            size = 0
            for name in doomed:
                try:
                    with snapshots.child(name) as directory:
                        size += directory.size_below(_MAX_COUNTED)
                except FileNotFoundError:
                    continue
                if not dry_run:
                    _remove(snapshots, name)
            for name in halfway if not dry_run else ():
                snapshots.remove_child(name)
        return Pruned(tuple(doomed), size)

    def _snapshots(self) -> Directory:
        try:
            with Directory.open(self.root) as top:
                return top.child(_SNAPSHOTS)
        except FileNotFoundError:
            raise refuse(Reason.STORAGE_FAILED, f"The snapshot root {self.root} is gone.") from None

    def _manifest(self, directory: Directory, snapshot_id: str) -> manifest_pb2.SnapshotManifest:
        try:
            if is_void(directory):
                raise _not_found(snapshot_id)
            manifest, _ = read_snapshot_manifest(directory)
        except FileNotFoundError:
            raise _not_found(snapshot_id) from None
        if manifest.job_id != self.job_id:
            raise refuse(
                Reason.SNAPSHOT_FOREIGN,
                f"The snapshot {snapshot_id} belongs to job {manifest.job_id}, not {self.job_id}.",
            )
        if manifest.snapshot_id != snapshot_id:
            raise refuse(
                Reason.SNAPSHOT_FOREIGN, f"The directory {snapshot_id} holds the snapshot {manifest.snapshot_id}."
            )
        return manifest

    def _check_ledger(self, directory: Directory, manifest: manifest_pb2.SnapshotManifest) -> FileDigest:
        where = directory.path / LEDGER_NAME
        try:
            found = directory.digest(LEDGER_NAME)
        except FileNotFoundError:
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is missing.") from None
        if found != FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256):
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is damaged: its bytes are not those that were saved.")
        return found

    def _check_complete(self, directory: Directory, manifest: manifest_pb2.SnapshotManifest) -> None:
        # Cheap, for lists: every part is there with the manifest that was bound, and the ledger, which may have a million
        # lines, with its size. `verify` reads the bytes.
        where = directory.path / LEDGER_NAME
        try:
            size = directory.size(LEDGER_NAME)
        except FileNotFoundError:
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is missing.") from None
        if size != manifest.ledger_size_bytes:
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is damaged: it has another size than what was saved.")
        for reference in manifest.participants:
            if reference.manifest_sha256:
                with _participant_directory(directory, reference.participant_id) as part:
                    _participant_manifest(part, reference)


@contextmanager
def blamed_on(participant_id: str, phase: Phase = Phase.UNSPECIFIED) -> Generator[None]:
    """Whatever is wrong with a part of a snapshot is wrong with the one who wrote it."""
    try:
        yield
    except SafepointError as error:
        found = error.problem
        filled = replace(found, participant_id=found.participant_id or participant_id, phase=found.phase or phase)
        raise type(error)(filled) from error


def participant_files(
    directory: Directory, participant_id: str, manifest_sha256: str
) -> tuple[Directory, manifest_pb2.ParticipantManifest]:
    """The open directory of a participant and its manifest, which must be the one of that digest.

    Raises SNAPSHOT_CORRUPT when either is missing or the manifest is another one.
    """
    part = _participant_directory(directory, participant_id)
    try:
        reference = manifest_pb2.ParticipantRef(participant_id=participant_id, manifest_sha256=manifest_sha256)
        return part, _participant_manifest(part, reference)[0]
    except BaseException:
        part.close()
        raise


def _check_balance(directory: Directory, manifest: manifest_pb2.SnapshotManifest) -> None:
    # Digests say that nothing was changed, not that it was right: a rollout in no state, or in two, would be lost.
    where = str(directory.path / LEDGER_NAME)
    lines = (ledger_lines.decode(raw, where) for raw in directory.lines(LEDGER_NAME, MAX_LEDGER_LINE))
    totals = {state: getattr(manifest.totals, state.name.lower()) for state in RolloutState if state}
    try:
        ledger.balance(lines, totals)
    except SafepointError as error:
        if error.reason is not Reason.LEDGER_UNBALANCED:
            raise
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where}: {error.problem.message}") from error


def _participant_directory(directory: Directory, participant_id: str) -> Directory:
    try:
        return directory.child(participant_id)
    except FileNotFoundError:
        raise refuse(
            Reason.SNAPSHOT_CORRUPT, f"{directory.path / participant_id} is missing.", participant_id=participant_id
        ) from None


def _participant_manifest(
    part: Directory, reference: manifest_pb2.ParticipantRef
) -> tuple[manifest_pb2.ParticipantManifest, FileDigest]:
    where = part.path / MANIFEST_NAME
    if not is_sha256(reference.manifest_sha256):
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} has no digest.", participant_id=reference.participant_id)
    try:
        return read_participant_manifest(part, reference.manifest_sha256)
    except FileNotFoundError:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is missing.", participant_id=reference.participant_id) from None


def _check_belongs(
    found: manifest_pb2.ParticipantManifest, snapshot: manifest_pb2.SnapshotManifest, participant_id: str
) -> None:
    if (found.capabilities.participant_id, found.snapshot_id, found.operation_id) != (
        participant_id,
        snapshot.snapshot_id,
        snapshot.operation_id,
    ):
        raise refuse(
            Reason.SNAPSHOT_FOREIGN,
            f"The part {participant_id} of {snapshot.snapshot_id} was written by {found.capabilities.participant_id} for "
            f"{found.snapshot_id} in {found.operation_id}.",
            participant_id=participant_id,
        )


def _claim(top: Directory, job_id: str) -> None:
    try:
        top.write_new(_OWNER, json.dumps({"job_id": job_id}).encode() + b"\n")
        return
    except FileExistsError:
        pass
    try:
        owner: object = json.loads(top.read(_OWNER, 4096))
    except (ValueError, RecursionError, FileNotFoundError):
        owner = None
    named = cast("dict[str, object]", owner).get("job_id") if isinstance(owner, dict) else None
    if named != job_id:
        raise refuse(
            Reason.SNAPSHOT_FOREIGN,
            f"The snapshot root {top.path} belongs to {f'job {named}' if isinstance(named, str) else 'nobody known'}, "
            f"not to job {job_id}.",
        )


def _unpublished(snapshots: Directory, name: str) -> bool:
    try:
        with snapshots.child(name) as directory:
            return not directory.has(MANIFEST_NAME) or is_void(directory)
    except (SafepointError, FileNotFoundError):
        return False


def _remove(snapshots: Directory, name: str) -> None:
    # Renamed first, so that a crash half-way never leaves a snapshot with its manifest and without its files.
    gone = f"{_GONE}{name[:100]}-{secrets.token_hex(4)}"
    failpoints.reach("snapshots.before_discard")
    try:
        snapshots.rename_child(name, gone)
        failpoints.reach("snapshots.after_discard")
        snapshots.remove_child(gone)
    except FileNotFoundError:
        pass


def _age(manifest: manifest_pb2.SnapshotManifest) -> tuple[int, int, str]:
    return (manifest.coordinator_epoch, manifest.create_time.ToNanoseconds(), manifest.snapshot_id)


def _not_found(snapshot_id: str) -> SafepointError:
    return refuse(Reason.SNAPSHOT_NOT_FOUND, f"No snapshot {snapshot_id} is published here.")
