"""Snapshots as they are read: opened, listed, loaded, verified. Nothing here changes a byte.

The rule: a snapshot exists if and only if its manifest is there and verifies; what is damaged, foreign, newer or hostile is
refused with the reason, and never taken for one. A list reads manifests and sizes, `verify` every byte.

    <root>/snapshots/<snapshot_id>/manifest.json        SnapshotManifest, written last
    <root>/snapshots/<snapshot_id>/ledger.jsonl         one LedgerEntry a line
    <root>/snapshots/<snapshot_id>/<participant_id>/    what that participant wrote
    <root>/snapshots/.gone-<snapshot_id>-<random>       being deleted; no snapshot any more

Everything here blocks: callers on an event loop use a thread. Safe for several threads.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator import convert, ledger_lines
from coordinator.protocol import ledger, sentences
from coordinator.protocol.ledger import Line
from coordinator.protocol.phases import waves
from coordinator.protocol.topology import Participant, fingerprint
from coordinator.wire.beneath import GONE, FileDigest
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.folder import ChunkStore, Folder, Place, chunks_below, open_root, place
from coordinator.wire.ids import IncarnationId, is_wire_id
from coordinator.wire.manifest_file import (
    LEDGER_NAME,
    MANIFEST_NAME,
    MAX_UNLISTED,
    is_sha256,
    is_void,
    read_participant_manifest,
    read_snapshot_manifest,
    verify_files,
)
from coordinator.wire.terms import Phase, RolloutState

MAX_LEDGER_LINE: Final = 64 << 10
SNAPSHOTS: Final = "snapshots"
OWNER: Final = "owner.json"  # whose root it is; there is none without it
MOVED: Final = (
    "Use the snapshot root as it was written: files of this snapshot were moved or renamed. Restore another one."
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read to verify a snapshot: files and bytes, and the files that nobody vouches for (at most 100), those beside
    it (`../NAME`) as well."""

    manifest: manifest_pb2.SnapshotManifest
    files: int
    size_bytes: int
    unlisted: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Published snapshots, newest first, and directories that hold none, with the reason."""

    snapshots: tuple[manifest_pb2.SnapshotManifest, ...]
    invalid: dict[str, str]


_NONE: Final[Mapping[str, manifest_pb2.SnapshotManifest]] = MappingProxyType({})


class SnapshotReader:
    """The snapshots of `job_id` below `root`. Makes nothing: a root that is not there raises STORAGE_FAILED."""

    def __init__(self, root: str | os.PathLike[str], job_id: str) -> None:
        self.root: Place = place(os.fspath(root))
        self.job_id = job_id

    @property
    def disk(self) -> Path:
        """The root where it must be a directory. Raises INVALID_ARGUMENT for one in a store."""
        if not isinstance(self.root, Path):
            raise refuse(
                Reason.INVALID_ARGUMENT, f"The root {self.root} is in an object store, and this needs a directory.",
                next_step="Copy what is in the store with the tools of the store.",
            )  # fmt: skip
        return self.root

    def chunks(self) -> ChunkStore:
        """The chunks that its snapshots share."""
        return chunks_below(self.root)

    def open(self, snapshot_id: str) -> Folder:
        """The directory of a snapshot, published or not. Raises SNAPSHOT_NOT_FOUND, MALFORMED_ID, SNAPSHOT_UNSAFE."""
        if not is_wire_id(snapshot_id):
            raise refuse(Reason.MALFORMED_ID, f"{snapshot_id[:130]!r} is no snapshot_id.")
        with self.snapshots() as snapshots:
            try:
                return snapshots.seen(snapshot_id)
            except FileNotFoundError:
                raise _not_found(snapshot_id) from None

    def load(self, snapshot_id: str) -> manifest_pb2.SnapshotManifest:
        """The manifest of a published snapshot; its files are not read.

        Raises SNAPSHOT_NOT_FOUND, SNAPSHOT_CORRUPT, SNAPSHOT_TOO_NEW, SNAPSHOT_UNSAFE, SNAPSHOT_FOREIGN.
        """
        with self.open(snapshot_id) as directory:
            return self._manifest(directory, snapshot_id)

    def verify(self, snapshot_id: str) -> Verification:
        """Read every byte of a snapshot and compare all digests. Raises as `load`; the message names the file.

        All parts are read also when one is damaged, so that no save relies on any of their damaged chunks (`chunks`).
        """
        with self.open(snapshot_id) as directory:
            manifest = self._manifest(directory, snapshot_id)
            files, size, unlisted, damaged = 1, 0, list[str](), list[SafepointError]()
            for reference in manifest.participants:
                if not reference.manifest_sha256:
                    continue
                blamed = blamed_on(reference.participant_id)
                try:
                    with blamed, _participant_directory(directory, reference.participant_id) as part:
                        found, stored = _participant_manifest(part, reference)
                        _check_belongs(found, manifest, reference.participant_id)
                        _check_noted(found, reference, directory.path)
                        verified = verify_files(part, found, self.chunks())
                except SafepointError as error:
                    if error.reason is not Reason.SNAPSHOT_CORRUPT:
                        raise
                    damaged.append(error)
                    continue
                files += verified.files + 1
                size += verified.size_bytes + stored.size_bytes
                unlisted += [f"{reference.participant_id}/{path}" for path in verified.unlisted]
            if damaged:
                raise _first_of(damaged)
            size += self._check_ledger(directory, manifest).size_bytes
            _check_balance(directory, manifest)
            known = {MANIFEST_NAME, LEDGER_NAME} | {
                r.participant_id for r in manifest.participants if r.manifest_sha256
            }
            unlisted += [name for name in directory.names() if name not in known]
            unlisted += [f"../{name}" for name in self.foreign()]
            return Verification(manifest, files, size, tuple(unlisted[:MAX_UNLISTED]))

    def part_totals(self, reference: manifest_pb2.ParticipantRef, snapshot_id: str) -> dict[str, int]:
        """The rollouts of one participant's own ledger, by the lower-case name of their state. Raises as `load`."""
        with self.open(snapshot_id) as directory, _participant_directory(directory, reference.participant_id) as part:
            totals = _participant_manifest(part, reference)[0].totals
        return {state.name.lower(): getattr(totals, state.name.lower()) for state in RolloutState if state}

    def part_manifest(
        self, reference: manifest_pb2.ParticipantRef, snapshot_id: str
    ) -> manifest_pb2.ParticipantManifest:
        """The manifest of one participant's part. Raises as `load`."""
        with self.open(snapshot_id) as directory, _participant_directory(directory, reference.participant_id) as part:
            return _participant_manifest(part, reference)[0]

    def part_ledger(self, reference: manifest_pb2.ParticipantRef, snapshot_id: str) -> Generator[Line]:
        """The lines of one participant's own ledger, whose digest `verify` has compared. Raises as `load`."""
        with self.open(snapshot_id) as directory, _participant_directory(directory, reference.participant_id) as part:
            name = _participant_manifest(part, reference)[0].ledger_file
            for raw in part.lines(name, MAX_LEDGER_LINE) if name else ():
                yield ledger_lines.decode(raw, str(part.path / name), reference.participant_id)

    def ledger(self, snapshot_id: str) -> Generator[bytes]:
        """The lines of a snapshot's ledger, after its digest was compared. Raises as `load`."""
        with self.open(snapshot_id) as directory:
            self._check_ledger(directory, self._manifest(directory, snapshot_id))
            yield from directory.lines(LEDGER_NAME, MAX_LEDGER_LINE)

    def list(self, known: Mapping[str, manifest_pb2.SnapshotManifest] = _NONE, checked: int | None = None) -> Listing:
        """What is there. A directory without a valid manifest is listed with why, and never restored.

        `known`: what an earlier list has found is not read again as long as it is there, since a name is never used again.
        `checked`: only of so many, the newest, it is looked whether they are complete; None: of all.

        Reads manifests and no ledger: a byte that has changed elsewhere is found by `verify`, which a restore begins with.
        Newest first: by the epoch of the coordinator that published, then by its clock.
        """
        valid: list[manifest_pb2.SnapshotManifest] = []
        invalid: dict[str, str] = {}
        with self.snapshots() as snapshots:
            for name in snapshots.names():
                if name.startswith(GONE):
                    continue
                if (before := known.get(name)) is not None:
                    valid.append(before)
                    continue
                try:
                    if not is_wire_id(name):
                        raise refuse(Reason.SNAPSHOT_UNSAFE, f"{name[:130]!r} is no snapshot_id.")
                    with snapshots.seen(name) as directory:
                        manifest = self._manifest(directory, name)
                        if checked is None:
                            self._check_complete(directory, manifest)
                        valid.append(manifest)
                except SafepointError as error:
                    invalid[name] = error.problem.message
                except FileNotFoundError:
                    pass  # deleted in between
            valid.sort(key=age, reverse=True)
            for manifest in valid[: checked or 0]:
                if (name := manifest.snapshot_id) not in known:
                    try:
                        with snapshots.seen(name) as directory:
                            self._check_complete(directory, manifest)
                    except (SafepointError, FileNotFoundError) as error:
                        valid.remove(manifest)
                        if isinstance(error, SafepointError):
                            invalid[name] = error.problem.message
        return Listing(tuple(valid), invalid)

    def foreign(self) -> tuple[str, ...]:
        """What lies among the snapshots and is neither one nor what is left of one. A sweep deletes no chunk beside it. Raises
        STORAGE_FAILED."""
        with self.snapshots() as snapshots:
            files = set(snapshots.files())
            there = [name for name in snapshots.names() if not name.startswith(GONE)]
            return tuple(name for name in there if name in files or not is_wire_id(name))

    def newest_epoch(self) -> int:
        """The highest epoch that a published snapshot is of; zero without any. Raises STORAGE_FAILED when the root is gone.

        Whoever publishes after us must have a higher one, or what it saves would count as older than what lies here:
        `pull` brings snapshots of a root whose coordinators were started more often.
        """
        newest = 0
        with self.snapshots() as snapshots:
            for name in snapshots.names():
                if is_wire_id(name):
                    with suppress(SafepointError, FileNotFoundError), snapshots.child(name) as directory:
                        newest = max(newest, self._manifest(directory, name).coordinator_epoch)
        return newest

    def snapshots(self) -> Folder:
        """The directory that all snapshots are in. Raises STORAGE_FAILED when it is gone."""
        gone, step = f"The snapshot root {self.root} is gone.", ""
        try:
            with open_root(self.root) as top:
                gone = f"{self.root}/{SNAPSHOTS} is gone: somebody has moved or removed it."
                step = f"Move it back. If its snapshots are lost: mkdir -m 700 {self.root}/{SNAPSHOTS}, then repeat."
                return top.child(SNAPSHOTS)
        except FileNotFoundError:
            raise refuse(Reason.STORAGE_FAILED, gone, next_step=step) from None

    def _manifest(self, directory: Folder, snapshot_id: str) -> manifest_pb2.SnapshotManifest:
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
                Reason.SNAPSHOT_FOREIGN,
                f"The directory {snapshot_id} holds the snapshot {manifest.snapshot_id}.",
                next_step=MOVED,
            )
        _check_fingerprint(directory, manifest)
        return manifest

    def _check_ledger(self, directory: Folder, manifest: manifest_pb2.SnapshotManifest) -> FileDigest:
        where = directory.path / LEDGER_NAME
        try:
            found = directory.digest(LEDGER_NAME)
        except FileNotFoundError:
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is missing.") from None
        if found != FileDigest(manifest.ledger_size_bytes, manifest.ledger_sha256):
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is damaged: its bytes are not those that were saved.")
        return found

    def _check_complete(self, directory: Folder, manifest: manifest_pb2.SnapshotManifest) -> None:
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


def _first_of(damaged: Sequence[SafepointError]) -> SafepointError:
    """The first, with whose parts are damaged as well."""
    first, others = damaged[0], [error.problem.participant_id for error in damaged[1:]]
    if not others:
        return first
    text = f"{first.problem.message} Damaged as well: what {sentences.names(others)} wrote."
    return type(first)(replace(first.problem, message=text))


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
    directory: Folder, participant_id: str, manifest_sha256: str
) -> tuple[Folder, manifest_pb2.ParticipantManifest]:
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


def as_it_was(reference: manifest_pb2.ParticipantRef) -> Participant:
    """A participant of a snapshot. Raises as `convert.participant`."""
    return convert.participant(reference.capabilities, str(IncarnationId("at-the-cut")), "at the cut")


def _check_fingerprint(directory: Folder, manifest: manifest_pb2.SnapshotManifest) -> None:
    # A restore compares it with who is here: it must be that of the participants whose parts are read, and of no others.
    where = directory.path / MANIFEST_NAME
    try:
        participants = [as_it_was(reference) for reference in manifest.participants]
    except SafepointError as error:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is damaged: {error.problem.message}") from error
    if manifest.topology_fingerprint != fingerprint(participants):
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is damaged: its fingerprint is not that of its participants.")
    # Without this a part whose digest was taken out would be left out of the restore, and its rollouts with it.
    committed = {name for wave in waves(Phase.COMMIT, participants) for name in wave}
    bound = {reference.participant_id for reference in manifest.participants if reference.manifest_sha256}
    if odd := sorted(committed ^ bound):
        what = "binds no manifest of" if odd[0] in committed else "binds a manifest, which it cannot have, of"
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is damaged: it {what} {odd[0]}.", participant_id=odd[0])


def _check_balance(directory: Folder, manifest: manifest_pb2.SnapshotManifest) -> None:
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


def _participant_directory(directory: Folder, participant_id: str) -> Folder:
    try:
        return directory.child(participant_id)
    except FileNotFoundError:
        raise refuse(
            Reason.SNAPSHOT_CORRUPT, f"{directory.path / participant_id} is missing.", participant_id=participant_id
        ) from None


def _participant_manifest(
    part: Folder, reference: manifest_pb2.ParticipantRef
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
            next_step=MOVED,
        )


def _check_noted(found: manifest_pb2.ParticipantManifest, reference: manifest_pb2.ParticipantRef, where: Place) -> None:
    # A coordinator that did not know of weights has named none; one that did has copied what it read. So for requests.
    wrong = [
        *(["weights"] if reference.HasField("weights") and reference.weights != found.weights else []),
        *(["requests"] if reference.engine_requests not in (0, found.sessions) else []),
    ]
    if wrong:
        raise refuse(
            Reason.SNAPSHOT_CORRUPT,
            f"{where / MANIFEST_NAME} is damaged: the {wrong[0]} that it names of {reference.participant_id} are not those of "
            "its own manifest.",
            participant_id=reference.participant_id,
        )


def age(manifest: manifest_pb2.SnapshotManifest) -> tuple[int, int, str]:
    """By which the newest is found: what is saved later has a higher one, whatever clocks say."""
    return (manifest.coordinator_epoch, manifest.create_time.ToNanoseconds(), manifest.snapshot_id)


def _not_found(snapshot_id: str) -> SafepointError:
    return refuse(Reason.SNAPSHOT_NOT_FOUND, f"No snapshot {snapshot_id} is published here.")
