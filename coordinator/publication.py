"""From what everybody has committed to a snapshot: checked, merged, published.

The rule: nothing that a participant claims goes into the snapshot manifest unless the disk shows it: its manifest has
the digest of its proof and names this cut, its files are there with their sizes, and the rollouts of all ledgers
balance. The manifest is linked last, inside every lease and under our epoch, or not at all.

Blocks; called in a thread while everybody is paused, so it reads what must be read and no more: the bytes of the files
were digested as they were written, and are compared when they are verified or restored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator import convert, ledger_merge
from coordinator.protocol.ledger import Line, refuse_ambiguous
from coordinator.protocol.operation import Operation
from coordinator.protocol.proofs import Committed
from coordinator.protocol.topology import Participant, Topology, fingerprint
from coordinator.snapshot_reading import MAX_LEDGER_LINE, blamed_on, participant_files
from coordinator.snapshots import SnapshotStore
from coordinator.wire import failpoints
from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Problem, Reason, Refused, refuse
from coordinator.wire.folder import Folder
from coordinator.wire.ids import ParticipantId, SnapshotId
from coordinator.wire.manifest_file import LEDGER_NAME, MANIFEST_NAME, PLAIN_FORMAT
from coordinator.wire.terms import Phase, Role, StragglerPolicy

SEEN_WITHIN_S: Final = 3.0
LOOK_EVERY_S: Final = 0.1
_AT_ONCE: Final = 16
_SAVE_AGAIN: Final = "Save again: it is written anew then. If it happens again, look at the disk."


@dataclass(frozen=True, slots=True)
class Cut:
    """What a save has gathered. `metadata` is the trainer's."""

    operation: Operation
    topology: Topology
    committed: Mapping[ParticipantId, Committed]
    metadata: Mapping[str, str]
    restored_from: manifest_pb2.RestoredFrom | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """The manifest that was linked, rollouts that only servers know, which nobody runs any more, and ids at two agents."""

    manifest: manifest_pb2.SnapshotManifest
    orphans: tuple[str, ...]
    ambiguous: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one participant has written; `size_bytes` with its chunks."""

    report: ledger_merge.Report
    weights: manifest_pb2.Weights | None
    size_bytes: int


class Publisher:
    """Writes the snapshots of one coordinator, of at most `max_bytes` each (0: no limit)."""

    def __init__(
        self,
        store: SnapshotStore,
        epoch: int,
        wall_clock_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], None] = time.sleep,
        max_bytes: int = 0,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._sleep = sleep
        self._epoch = epoch
        self._wall_clock_ns = wall_clock_ns
        self._last_ns = 0

    def publish(self, cut: Cut, still_valid: Callable[[], None]) -> Publication:
        """Make the snapshot. `still_valid` is called right before the manifest is linked, and raises to forbid it.

        Raises PROTOCOL_VIOLATION and SNAPSHOT_CORRUPT (a participant's proof and the disk disagree), SNAPSHOT_UNSAFE,
        LEDGER_UNBALANCED, STORAGE_FULL (also for more than `max_bytes`), STORAGE_FAILED, and what `still_valid` raises.
        Whether the manifest is there then, only the disk knows.
        """
        snapshot_id = cut.operation.snapshot_id
        by_name = {p.participant_id: p for p in cut.topology.participants}
        failpoints.reach("publication.before_ledger")
        self._until_seen(snapshot_id, cut.committed)
        with self._store.open(snapshot_id) as directory:
            committed = sorted(cut.committed.items())
            root = self._store.root  # a store has said of each chunk that it has it
            shared = _SharedChunks(Chunks(root), self._sleep) if isinstance(root, Path) else None
            read = partial(_read_part, directory, shared, cut.operation)
            found = self._each(read, [(by_name[name], proof) for name, proof in committed])
            parts = {name: part for (name, _), part in zip(committed, found, strict=True)}
            self._check_size(snapshot_id, parts)
            merged = ledger_merge.merge([part.report for part in found])
            if cut.operation.options.straggler_policy == StragglerPolicy.FAIL:
                refuse_ambiguous(merged.ambiguous)
            try:
                written = directory.write_new(LEDGER_NAME, merged.blocks)
            except FileExistsError:
                raise refuse(Reason.SNAPSHOT_UNSAFE, f"{directory.path / LEDGER_NAME} was there already.") from None
        failpoints.reach("publication.after_ledger")
        manifest = manifest_pb2.SnapshotManifest(
            format_version=PLAIN_FORMAT,
            snapshot_id=snapshot_id,
            operation_id=cut.operation.operation_id,
            job_id=self._store.job_id,
            coordinator_epoch=self._epoch,
            topology_fingerprint=fingerprint(cut.topology.participants),
            participants=[
                _reference(by_name[name], cut.committed.get(name), parts.get(name)) for name in sorted(by_name)
            ],
            ledger_sha256=written.sha256,
            ledger_size_bytes=written.size_bytes,
            totals=convert.ledger_totals(merged.totals),
            metadata=cut.metadata,
            restored_from=cut.restored_from,
        )
        manifest.create_time.FromNanoseconds(self._next_ns())
        self._store.publish(manifest, still_valid)
        return Publication(manifest, merged.orphans, merged.ambiguous)

    def _check_size(self, snapshot_id: SnapshotId, parts: Mapping[ParticipantId, _Part]) -> None:
        size = sum(part.size_bytes for part in parts.values())
        if self._max_bytes and size > self._max_bytes:
            largest = max(parts, key=lambda name: parts[name].size_bytes)
            raise refuse(
                Reason.STORAGE_FULL,
                f"{snapshot_id} has {size} bytes, and max_snapshot_bytes allows {self._max_bytes}; {largest} has the most, "
                f"{parts[largest].size_bytes}.",
                next_step="Set max_snapshot_bytes higher, or let the servers hold less.",
                phase=Phase.PUBLISH, participant_id=largest,
            )  # fmt: skip

    def _each(
        self, read: Callable[[Participant, Committed], _Part], parts: list[tuple[Participant, Committed]]
    ) -> list[_Part]:
        """Reads all parts. From a store several at once: everybody is paused, and most of the time is its answers'."""
        if isinstance(self._store.root, Path):
            return [read(*part) for part in parts]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(read, [who for who, _ in parts], [proof for _, proof in parts]))

    def _until_seen(self, snapshot_id: SnapshotId, names: Iterable[ParticipantId]) -> None:
        """Wait, a little, for the parts that were committed on other machines: a network file system shows them late.

        What is missing after that is said by whoever reads it; what is there is decided by its digest.
        """
        left_s = SEEN_WITHIN_S
        awaited = set(names)
        while True:
            awaited -= self._seen(snapshot_id, awaited)
            if not awaited or left_s <= 0:
                return
            self._sleep(LOOK_EVERY_S)
            left_s -= LOOK_EVERY_S

    def _seen(self, snapshot_id: SnapshotId, names: set[ParticipantId]) -> set[ParticipantId]:
        # Opened anew and listed: names that are not there are cached longer than what a directory holds.
        with self._store.open(snapshot_id) as directory:
            here = names.intersection(directory.names())
            return {name for name in here if _has_manifest(directory, name)}

    def _next_ns(self) -> int:
        # Ascends within an epoch, so that "newest" survives a wall clock that is set back.
        self._last_ns = max(self._wall_clock_ns(), self._last_ns + 1)
        return self._last_ns


class _SharedChunks:
    """The chunks that a cut names. One that is not there is waited for a little, all of them together: as for parts.

    Not for several threads at once.
    """

    def __init__(self, chunks: Chunks, sleep: Callable[[float], None]) -> None:
        self._chunks, self._sleep = chunks, sleep
        self._left_s = SEEN_WITHIN_S

    def check(self, chunk: Chunk) -> None:
        """Raises SNAPSHOT_CORRUPT unless it is there with its size, and not known to be damaged. Reads no byte."""
        while not self._chunks.has(chunk):
            there = self._chunks.touched_s(chunk.sha256) is not None
            if there or self._left_s <= 0:
                how = "damaged" if there else "missing"
                raise refuse(
                    Reason.SNAPSHOT_CORRUPT, f"The chunk {self._chunks.path(chunk.sha256)} is {how}.",
                    next_step=_SAVE_AGAIN, phase=Phase.PUBLISH,
                )  # fmt: skip
            self._sleep(LOOK_EVERY_S)
            self._left_s -= LOOK_EVERY_S


def _has_manifest(directory: Folder, name: ParticipantId) -> bool:
    try:
        with directory.child(name) as part:
            return MANIFEST_NAME in part.names()
    except FileNotFoundError:
        return False


def _read_part(
    directory: Folder, chunks: _SharedChunks | None, operation: Operation, participant: Participant, proof: Committed
) -> _Part:
    """The part as it is there, once it is that of this cut and everything that it lists is there, by its size."""
    participant_id = participant.participant_id
    with blamed_on(participant_id, Phase.PUBLISH):
        part, manifest = participant_files(directory, participant_id, proof.manifest_sha256)
    with part, blamed_on(participant_id, Phase.PUBLISH):
        named = (
            manifest.capabilities.participant_id,
            manifest.operation_id,
            manifest.snapshot_id,
            manifest.incarnation_id,
        )
        if named != (participant_id, operation.operation_id, operation.snapshot_id, proof.incarnation_id):
            raise Refused(
                Problem(
                    Reason.PROTOCOL_VIOLATION, f"The stored manifest names {named}, which is not this cut.",
                    phase=Phase.PUBLISH, participant_id=participant_id, operation_id=operation.operation_id,
                )
            )  # fmt: skip
        for listed in manifest.files:
            try:
                size = part.size(listed.path)
            except FileNotFoundError:
                size = -1
            if size != listed.size_bytes:
                raise refuse(
                    Reason.SNAPSHOT_CORRUPT,
                    f"{part.path / listed.path} " + ("is missing." if size < 0 else f"has {size} bytes instead of {listed.size_bytes}."),
                    next_step=_SAVE_AGAIN, phase=Phase.PUBLISH, participant_id=participant_id,
                )  # fmt: skip
        for entry in manifest.chunks:
            if chunks is not None:
                chunks.check(Chunk(entry.sha256, entry.size_bytes))
        name = manifest.ledger_file
        blocks = part.blocks(name, MAX_LEDGER_LINE) if name else ()
        return _Part(
            ledger_merge.read(participant, blocks, str(part.path / name)),
            manifest.weights if manifest.HasField("weights") else None,
            sum(file.size_bytes for file in manifest.files) + sum(chunk.size_bytes for chunk in manifest.chunks),
        )


def _reference(participant: Participant, proof: Committed | None, part: _Part | None) -> manifest_pb2.ParticipantRef:
    return manifest_pb2.ParticipantRef(
        participant_id=participant.participant_id,
        manifest_sha256=proof.manifest_sha256 if proof is not None else "",
        size_bytes=proof.size_bytes if proof is not None else 0,
        capabilities=convert.capabilities(participant),
        weights=part.weights if part is not None else None,
        engine_requests=proof.sessions if proof is not None and participant.role is Role.ENGINE else 0,
    )
