"""Chunks of snapshots: verified, swept when nothing names them, carried by copies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import capabilities_pb2, manifest_pb2

from coordinator import archive, copies, pruning, sweeping
from coordinator.protocol.operation import Operation
from coordinator.protocol.proofs import Committed
from coordinator.protocol.topology import Participant, Topology
from coordinator.publication import SEEN_WITHIN_S, Cut, Publisher
from coordinator.retention import Retention
from coordinator.snapshots import SnapshotStore
from coordinator.wire.chunks import Chunk, Chunks, ChunkWriter
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.manifest_file import read_participant_manifest, verify_files, write_participant_manifest
from coordinator.wire.objects import LocalObjects
from coordinator.wire.rope import Rope
from coordinator.wire.terms import CheckpointMode, OperationKind, Role

LONG_AGO = 1_000_000_000.0


BOX = ParticipantId("box")


def save(
    store: SnapshotStore,
    name: str,
    texts: list[bytes],
    *,
    publish: bool = True,
    after_commit: Callable[[], None] = bool,
    sleep: Callable[[float], None] = lambda _: None,
) -> None:
    """A snapshot of one participant, whose state is a rope of these texts, each a chunk of its own."""
    operation = Operation(OperationKind.SAVE, OperationId(f"save-{name}"), SnapshotId(name))
    chunks, rope = Chunks(store.root), Rope()
    out = ChunkWriter(chunks, seal_at=1)
    for text in texts:
        rope.add(out.add(text))
    out.seal()
    store.begin(SnapshotId(name))
    with store.open(name) as directory, directory.make_child(BOX) as part:
        file = part.write_new("w.sessions.rope", rope.to_bytes())
        found = sorted(rope.chunks, key=lambda chunk: chunk.sha256)
        manifest = manifest_pb2.ParticipantManifest(
            format_version=2, operation_id=operation.operation_id, snapshot_id=name, incarnation_id="i-1",
            capabilities=capabilities_pb2.Capabilities(participant_id=BOX, role=capabilities_pb2.ROLE_RESOURCES),
            files=[manifest_pb2.FileEntry(path="w.sessions.rope", size_bytes=file.size_bytes, sha256=file.sha256)],
            chunks=[manifest_pb2.ChunkEntry(sha256=c.sha256, size_bytes=c.size_bytes) for c in found],
        )  # fmt: skip
        written = write_participant_manifest(part, manifest)
    proof = Committed(operation.operation_id, operation.snapshot_id, BOX, IncarnationId("i-1"), written.sha256)
    box = Participant(BOX, Role.RESOURCES, "gym", CheckpointMode.EXPORT_RESTORE, IncarnationId("i-1"), "a:1")
    after_commit()
    if publish:
        Publisher(store, epoch=1, sleep=sleep).publish(Cut(operation, Topology((box,)), {BOX: proof}, {}), lambda: None)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "root", "job-1")


def grow_old(store: SnapshotStore) -> None:
    for found in Chunks(store.root).all():
        os.utime(Chunks(store.root).path(found.sha256), (LONG_AGO, LONG_AGO))


def there(store: SnapshotStore) -> set[bytes]:
    chunks = Chunks(store.root)
    return {chunks.path(found.sha256).read_bytes() for found in chunks.all()}


@pytest.mark.parametrize("how", ["removed", "cut short", "found damaged"])
def test_a_part_whose_chunk_is_not_there_any_more_is_not_published(store: SnapshotStore, how: str) -> None:
    chunks = Chunks(store.root)
    save(store, "a", [b"one"])
    (path,) = [chunks.path(found.sha256) for found in chunks.all()]

    def harm() -> None:
        if how == "removed":
            path.unlink()
        elif how == "cut short":
            path.write_bytes(b"on")
        else:
            path.write_bytes(b"two")
            with pytest.raises(SafepointError):
                store.verify("a")

    with pytest.raises(SafepointError) as raised:
        save(store, "b", [b"one"], after_commit=harm)
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT
    assert str(path) in raised.value.problem.message
    assert [one.snapshot_id for one in store.list().snapshots] == ["a"]


def test_every_chunk_that_is_damaged_is_relied_upon_no_more_and_the_first_is_named_with_how_many(
    store: SnapshotStore,
) -> None:
    save(store, "a", [b"one", b"two", b"three"])
    chunks = Chunks(store.root)
    found = sorted(chunks.all(), key=lambda one: one.sha256)
    chunks.path(found[0].sha256).write_bytes(b"?" * found[0].size_bytes)
    chunks.path(found[2].sha256).write_bytes(b"?" * found[2].size_bytes)
    with pytest.raises(SafepointError) as raised:
        store.verify("a")
    assert str(chunks.path(found[0].sha256)) in raised.value.problem.message
    assert "1 more of its chunks" in raised.value.problem.message
    assert [chunks.has(Chunk(one.sha256, one.size_bytes)) for one in found] == [False, True, False]


def test_a_chunk_that_another_machine_wrote_is_waited_for_a_little(store: SnapshotStore) -> None:
    chunks, slept = Chunks(store.root), list[float]()
    hidden = store.root / "not seen yet"

    def path() -> Path:
        return chunks.path(hashlib.sha256(b"one").hexdigest())

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            hidden.rename(path())

    save(store, "a", [b"one"], after_commit=lambda: path().rename(hidden), sleep=sleep)
    assert len(slept) == 3
    store.verify("a")


def test_chunks_that_never_come_are_waited_for_once_and_damaged_ones_not_at_all(store: SnapshotStore) -> None:
    slept: list[float] = []

    def removed() -> None:
        for found in list(Chunks(store.root).all()):
            Chunks(store.root).remove(found.sha256)

    with pytest.raises(SafepointError, match="is missing"):
        save(store, "a", [b"one", b"two"], after_commit=removed, sleep=slept.append)
    assert sum(slept) == pytest.approx(SEEN_WITHIN_S, abs=0.2)
    slept.clear()

    def damaged() -> None:
        for found in Chunks(store.root).all():
            Chunks(store.root).path(found.sha256).write_bytes(b"a byte more")

    with pytest.raises(SafepointError, match="is damaged"):
        save(store, "b", [b"one", b"two"], after_commit=damaged, sleep=slept.append)
    assert not slept


def test_a_flipped_bit_in_any_chunk_is_found_and_names_it(store: SnapshotStore) -> None:
    save(store, "a", [b"one", b"two"])
    store.verify("a")
    for found in list(Chunks(store.root).all()):
        path = Chunks(store.root).path(found.sha256)
        right = path.read_bytes()
        path.write_bytes(bytes([right[0] ^ 1]) + right[1:])
        with pytest.raises(SafepointError) as raised:
            store.verify("a")
        assert raised.value.reason is Reason.SNAPSHOT_CORRUPT
        assert found.sha256 in raised.value.problem.message
        path.write_bytes(right)
    store.verify("a")


@pytest.mark.parametrize("change", ["less", "more", "other size"])
def test_a_manifest_names_exactly_the_chunks_of_its_ropes(store: SnapshotStore, change: str) -> None:
    save(store, "a", [b"one", b"two"], publish=False)
    extra = Chunks(store.root).write(b"three")
    with store.open("a") as directory, directory.child("box") as part:
        manifest, _ = read_participant_manifest(part)
        if change == "less":
            del manifest.chunks[0]
        elif change == "more":
            manifest.chunks.add(sha256=extra.sha256, size_bytes=extra.size_bytes)
        else:
            manifest.chunks[0].size_bytes += 1
        with pytest.raises(SafepointError) as raised:
            verify_files(part, manifest)
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT


def test_a_chunk_goes_with_the_last_part_that_names_it(store: SnapshotStore) -> None:
    save(store, "a", [b"only a", b"both"])
    save(store, "b", [b"both", b"only b"])
    grow_old(store)
    assert pruning.prune(store, Retention(2)).deleted == ()
    assert there(store) == {b"only a", b"both", b"only b"}
    dry = pruning.prune(store, Retention(1), dry_run=True)
    assert there(store) == {b"only a", b"both", b"only b"}
    done = pruning.prune(store, Retention(1))
    assert done.deleted == ("a",)
    assert done.size_bytes == dry.size_bytes
    assert there(store) == {b"both", b"only b"}
    store.verify("b")


def test_while_a_save_runs_no_chunk_is_swept_whatever_a_clock_says_of_its_age(store: SnapshotStore) -> None:
    save(store, "a", [b"published"])
    Chunks(store.root).write(b"written by a save, and named by no manifest yet")
    grow_old(store)  # as when the storage's clock has jumped
    assert pruning.prune(store, Retention(1), {"b"}, writing=True).deleted == ()
    assert len(there(store)) == 2
    pruning.prune(store, Retention(1))
    assert there(store) == {b"published"}


def test_chunks_of_a_save_that_is_not_published_and_young_ones_stay(store: SnapshotStore) -> None:
    save(store, "a", [b"published"])
    save(store, "b", [b"in the making"], publish=False)
    Chunks(store.root).write(b"old and of nobody")
    grow_old(store)
    Chunks(store.root).write(b"written ahead of a save")
    touched = Chunks(store.root).write(b"asked for")
    os.utime(Chunks(store.root).path(touched.sha256), (LONG_AGO, LONG_AGO))
    assert Chunks(store.root).touch(touched)
    assert sweeping.sweep(store).chunks == 1
    assert there(store) == {b"published", b"in the making", b"written ahead of a save", b"asked for"}


def test_a_chunk_that_is_asked_for_while_it_is_looked_who_names_it_stays(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, unwanted = Chunks(store.root).write(b"of a save that begins"), Chunks(store.root).write(b"of nobody")
    grow_old(store)
    named = sweeping.named

    def while_reading(*args: Any) -> set[str]:
        found = named(*args)
        assert Chunks(store.root).touch(wanted)
        return found

    monkeypatch.setattr(sweeping, "named", while_reading)
    assert sweeping.sweep(store) == sweeping.Swept(1, unwanted.size_bytes)
    assert there(store) == {b"of a save that begins"}


def test_a_part_that_cannot_be_read_keeps_every_chunk(store: SnapshotStore) -> None:
    save(store, "a", [b"one"])
    save(store, "b", [b"two"])
    Chunks(store.root).write(b"of nobody")
    grow_old(store)
    path = store.root / "snapshots" / "a" / "box" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-5])
    swept = sweeping.sweep(store)
    assert (swept.chunks, "damaged" in swept.unread) == (0, True)
    assert there(store) == {b"one", b"two", b"of nobody"}


def test_a_replaced_coordinator_sweeps_nothing(store: SnapshotStore) -> None:
    Chunks(store.root).write(b"of nobody")
    grow_old(store)

    def replaced() -> None:
        raise RuntimeError("replaced")

    with pytest.raises(RuntimeError):
        sweeping.sweep(store, still_ours=replaced)
    assert there(store) == {b"of nobody"}


def test_copies_share_chunks_and_a_pull_brings_and_checks_them(store: SnapshotStore, tmp_path: Path) -> None:
    save(store, "a", [b"only a", b"both"])
    save(store, "b", [b"both", b"only b"])
    (tmp_path / "copies").mkdir()
    objects = LocalObjects(tmp_path / "copies")
    archive.push(store, "a", objects)
    assert archive.push(store, "b", objects).found == 1
    assert {one.snapshot_id for one in copies.manifests(objects)} == {"a", "b"}
    archive.pull(objects, "b", tmp_path / "new")
    SnapshotStore(tmp_path / "new", "job-1").verify("b")
    for path in (tmp_path / "copies" / ".chunks").rglob("*"):
        if path.is_file() and path.read_bytes() == b"only a":
            path.write_bytes(b"0nly a")
    with pytest.raises(SafepointError) as raised:
        archive.pull(objects, "a", tmp_path / "new")
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT
    SnapshotStore(tmp_path / "new", "job-1").verify("b")


class Slow:
    """A store that takes more than the grace for each chunk; with the last one it lets somebody sweep."""

    def __init__(self, objects: LocalObjects, into: SnapshotStore) -> None:
        self.url, self.names, self.size = objects.url, objects.names, objects.size
        self._objects, self._into, self._given = objects, into, 0

    def put_new(self, key: str, file: int) -> None:
        raise AssertionError

    def chunks(self, key: str) -> Iterator[bytes]:
        if key.startswith(".chunks/"):
            self._given += 1
            if self._given == 2:
                grow_old(self._into)
            if self._given == 3:
                assert sweeping.sweep(self._into) == sweeping.Swept()
        return self._objects.chunks(key)


def test_what_is_fetched_for_longer_than_the_grace_is_not_swept_before_it_is_named(
    store: SnapshotStore, tmp_path: Path
) -> None:
    save(store, "a", [b"one", b"two", b"three"])
    objects = LocalObjects(tmp_path / "objects")
    archive.push(store, "a", objects)
    into = SnapshotStore(tmp_path / "new", "job-1")
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1000.0
        return now

    archive.pull(Slow(objects, into), "a", into.root, clock=clock)
    assert into.verify("a").manifest == store.load("a")
