"""A participant's part, below a directory and in a store: whole when its manifest is there, and nobody else's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safepoint.v1 import capabilities_pb2, manifest_pb2

from coordinator import pruning, sweeping
from coordinator.protocol.operation import Operation
from coordinator.protocol.proofs import Committed
from coordinator.protocol.topology import Participant, Topology
from coordinator.publication import Cut, Publisher
from coordinator.retention import Retention
from coordinator.snapshots import SnapshotStore
from coordinator.wire.chunks import Chunks, ChunkWriter
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.names import Names
from coordinator.wire.rope import Rope, open_content
from coordinator.wire.stored_chunks import GRACE_S, TRUST_S
from coordinator.wire.terms import CheckpointMode, OperationKind, Role
from participant_shims.adapter import WrittenFile
from participant_shims.adapters.ledger_file import snapshot_ledger
from participant_shims.export import Exports
from participant_shims.messages import written_files
from participant_shims.stored_export import StoredExports
from tests.stored import Lost, MemoryRequests, MemoryStore

NAME = ParticipantId("counter")


def described(name: ParticipantId) -> capabilities_pb2.Capabilities:
    return capabilities_pb2.Capabilities(participant_id=name, role=capabilities_pb2.ROLE_RESOURCES, kind="gym")


WHO = described(NAME)


class Machine:
    """One participant on a machine of its own."""

    def __init__(
        self, exports: Exports | StoredExports, client: MemoryRequests | None = None, name: ParticipantId = NAME
    ) -> None:
        self.exports = exports
        self.client = client
        self.name = name

    def write(self, snapshot_id: str, operation_id: str, texts: list[bytes]) -> list[WrittenFile]:
        """What an adapter does: a rope of these texts, a file in a folder, and one that is empty."""
        directory = self.exports.begin(snapshot_id, operation_id)
        assert self.exports.root is not None
        rope = Rope()
        out = ChunkWriter(Chunks(self.exports.root), seal_at=1)
        for text in texts:
            rope.add(out.add(text))
        out.seal()
        (directory / "notes").mkdir()
        files = {"sessions.rope": rope.to_bytes(), "notes/a.json": b"{}", "empty": b""}
        for path, data in files.items():
            (directory / path).write_bytes(data)
        return [WrittenFile(p, len(d), hashlib.sha256(d).hexdigest()) for p, d in sorted(files.items())]

    def save(self, snapshot_id: str, texts: list[bytes], operation_id: str = "") -> Committed:
        operation_id = operation_id or f"save-{snapshot_id}"
        files = self.write(snapshot_id, operation_id, texts)
        return self.finish(snapshot_id, operation_id, files)

    def finish(self, snapshot_id: str, operation_id: str, files: list[WrittenFile]) -> Committed:
        chunks = self.exports.chunks(snapshot_id, files)
        manifest = manifest_pb2.ParticipantManifest(
            format_version=2, operation_id=operation_id, snapshot_id=snapshot_id, incarnation_id="i-1",
            capabilities=described(self.name),
            files=[manifest_pb2.FileEntry(path=f.path, size_bytes=f.size_bytes, sha256=f.sha256) for f in files],
            chunks=[manifest_pb2.ChunkEntry(sha256=c.sha256, size_bytes=c.size_bytes) for c in chunks],
        )  # fmt: skip
        digest = self.exports.finish(snapshot_id, files, manifest)
        return Committed(OperationId(operation_id), SnapshotId(snapshot_id), self.name, IncarnationId("i-1"), digest)


class Job:
    """A root and who uses it."""

    def __init__(self, path: Path, memory: MemoryStore | None) -> None:
        self.path, self.memory = path, memory
        self.root = memory.root() if memory is not None else str(path / "root")
        self.store = SnapshotStore(self.root, "job-1")
        self.count = 0

    def machine(self, name: ParticipantId = NAME) -> Machine:
        self.count += 1
        if self.memory is None:
            return Machine(Exports(Path(self.root), name), name=name)
        client = self.memory.client()
        names = Names(client, sleep=lambda _: None)
        return Machine(StoredExports(names, self.path / f"spool-{self.count}", name), client, name)

    def publish(self, *proofs: Committed) -> None:
        first = proofs[0]
        operation = Operation(OperationKind.SAVE, OperationId(first.operation_id), SnapshotId(first.snapshot_id))
        who = tuple(
            Participant(
                p.participant_id, Role.RESOURCES, "gym", CheckpointMode.EXPORT_RESTORE, IncarnationId("i-1"), "a:1"
            )
            for p in proofs
        )
        cut = Cut(operation, Topology(who), {p.participant_id: p for p in proofs}, {})
        Publisher(self.store, epoch=1).publish(cut, lambda: None)


@pytest.fixture(params=["disk", "store"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return Job(tmp_path, MemoryStore() if request.param == "store" else None)


@pytest.fixture
def stored(tmp_path: Path) -> Job:
    return Job(tmp_path, MemoryStore())


def refusal(call: Callable[[], object]) -> Reason:
    with pytest.raises(SafepointError) as caught:
        call()
    return caught.value.reason


def test_a_part_is_brought_to_another_machine_byte_for_byte(job: Job) -> None:
    job.store.begin(SnapshotId("step-1"))
    texts = [b"one" * 1000, b"two", b"three"]
    proof = job.machine().save("step-1", texts)
    assert refusal(lambda: job.machine().exports.verify("step-1", NAME, proof.manifest_sha256, WHO)) is (
        Reason.SNAPSHOT_NOT_FOUND
    )
    job.publish(proof)
    assert job.store.verify("step-1").unlisted == ()
    part = job.machine().exports.verify("step-1", NAME, proof.manifest_sha256, WHO)
    with open_content(part.directory / "sessions.rope") as content:
        assert content.read() == b"".join(texts)
    assert (part.directory / "notes/a.json").read_bytes() == b"{}"
    assert [file.path for file in written_files(part.manifest)] == ["empty", "notes/a.json", "sessions.rope"]


def test_what_has_not_changed_is_there_already(job: Job) -> None:
    mine = job.machine()
    for number in range(3):
        job.store.begin(SnapshotId(f"step-{number}"))
        job.publish(mine.save(f"step-{number}", [b"same" * 100, f"{number}".encode()]))
    chunks = list(job.store.chunks().all())
    assert len(chunks) == 4
    for number in range(3):
        assert job.store.verify(f"step-{number}")


def test_nobody_writes_where_the_coordinator_has_made_no_place_or_somebody_else_writes(job: Job) -> None:
    mine = job.machine()
    assert refusal(lambda: mine.exports.begin("step-1", "save-1")) is Reason.SNAPSHOT_NOT_FOUND
    job.store.begin(SnapshotId("step-1"))
    mine.exports.begin("step-1", "save-1")
    assert refusal(lambda: job.machine().exports.begin("step-1", "save-1")) is Reason.SNAPSHOT_EXISTS
    assert refusal(lambda: mine.exports.begin("step-1", "save-2")) is Reason.SNAPSHOT_EXISTS


def test_a_second_try_of_the_same_operation_begins_anew(job: Job) -> None:
    job.store.begin(SnapshotId("step-1"))
    mine = job.machine()
    mine.write("step-1", "save-step-1", [b"half"])
    job.publish(mine.save("step-1", [b"whole"]))
    assert job.store.verify("step-1").unlisted == ()
    assert refusal(lambda: mine.exports.begin("step-1", "save-step-1")) is Reason.SNAPSHOT_EXISTS


def test_what_an_aborted_operation_wrote_is_removed_and_a_published_part_stays(job: Job) -> None:
    mine = job.machine()
    job.store.begin(SnapshotId("step-1"))
    mine.save("step-1", [b"state"])
    mine.exports.discard("step-1", "another")
    with job.store.open("step-1") as directory:
        assert directory.names() == [NAME]
    mine.exports.discard("step-1", "save-step-1")
    with job.store.open("step-1") as directory:
        assert directory.names() == []
    job.publish(mine.save("step-1", [b"state"]))
    mine.exports.discard("step-1", "save-step-1")
    assert job.store.verify("step-1")


def test_a_file_that_is_not_what_its_writer_says_gives_no_manifest(job: Job) -> None:
    job.store.begin(SnapshotId("step-1"))
    mine = job.machine()
    files = mine.write("step-1", "save-1", [b"state"])
    wrong = [WrittenFile(f.path, f.size_bytes + (f.path == "empty"), f.sha256) for f in files]
    assert refusal(lambda: mine.finish("step-1", "save-1", wrong)) is Reason.PROTOCOL_VIOLATION
    with job.store.open("step-1") as directory, directory.child(NAME) as part:
        assert "manifest.json" not in part.names()


def test_a_part_of_another_participant_or_kind_is_refused(job: Job) -> None:
    job.store.begin(SnapshotId("step-1"))
    proof = job.machine().save("step-1", [b"state"])
    job.publish(proof)
    other = capabilities_pb2.Capabilities(participant_id=NAME, kind="another")
    exports = job.machine().exports
    assert refusal(lambda: exports.verify("step-1", NAME, proof.manifest_sha256, other)) is Reason.SNAPSHOT_FOREIGN
    assert refusal(lambda: exports.verify("step-1", NAME, "0" * 64, WHO)) is Reason.SNAPSHOT_CORRUPT
    assert refusal(lambda: exports.verify("step-1", "nobody", "0" * 64, WHO)) is Reason.SNAPSHOT_CORRUPT


# ---- in a store -----------------------------------------------------------------------------------------------------


def test_every_object_that_is_missing_or_another_is_found_on_the_way(stored: Job) -> None:
    assert stored.memory is not None
    objects = stored.memory.objects
    stored.store.begin(SnapshotId("step-1"))
    proof = stored.machine().save("step-1", [b"one", b"two"])
    stored.publish(proof)
    keys = [k for k in stored.memory.keys("") if k.startswith("chunks/") or f"/{NAME}!1/" in k]
    for key in keys:
        if key.endswith("!made"):
            continue
        kept = objects.pop(key)
        exports = stored.machine().exports
        assert (
            refusal(lambda e=exports: e.verify("step-1", NAME, proof.manifest_sha256, WHO)) is Reason.SNAPSHOT_CORRUPT
        )  # type: ignore[misc]
        objects[key] = kept
        if kept.data:
            data = kept.data
            kept.data = bytes([data[0] ^ 1]) + data[1:]
            assert (
                refusal(lambda e=exports: e.verify("step-1", NAME, proof.manifest_sha256, WHO))
                is Reason.SNAPSHOT_CORRUPT
            )  # type: ignore[misc]
            kept.data = data
    stored.machine().exports.verify("step-1", NAME, proof.manifest_sha256, WHO)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_line_that_breaks_once_at_each_request_loses_nothing(stored: Job, when: str) -> None:
    mine = stored.machine()
    assert mine.client is not None
    seen: set[str] = set()

    def lost(method: str, key: str) -> None:
        if method == "PUT" and key not in seen:
            seen.add(key)
            raise Lost("the line broke")

    setattr(mine.client, when, lost)
    stored.store.begin(SnapshotId("step-1"))
    stored.publish(mine.save("step-1", [b"one", b"two"]))
    assert len(seen) >= 7
    assert stored.store.verify("step-1").unlisted == ()


def test_what_was_sent_ahead_is_not_sent_in_the_pause(stored: Job) -> None:
    mine = stored.machine()
    assert mine.client is not None
    assert mine.exports.root is not None
    out = ChunkWriter(Chunks(mine.exports.root), seal_at=1)
    out.add(b"state" * 1000)
    mine.exports.ahead(lambda: True)
    sent: list[str] = []
    mine.client.after = lambda method, key: sent.append(key) if method == "PUT" else None
    stored.store.begin(SnapshotId("step-1"))
    stored.publish(mine.save("step-1", [b"state" * 1000]))
    assert not [key for key in sent if key.startswith("chunks/")]


def test_sending_ahead_stops_when_it_is_told_to(stored: Job) -> None:
    mine = stored.machine()
    assert mine.exports.root is not None
    out = ChunkWriter(Chunks(mine.exports.root), seal_at=1)
    for number in range(5):
        out.add(f"{number}".encode())
    asked: list[bool] = []
    mine.exports.ahead(lambda: (asked.append(True), len(asked) < 3)[1])
    assert len(list(stored.store.chunks().all())) == 2


def test_a_sweep_deletes_what_nothing_names_and_never_what_a_save_has_just_relied_upon(stored: Job) -> None:
    assert stored.memory is not None
    mine = stored.machine()
    for number in range(2):
        stored.store.begin(SnapshotId(f"step-{number}"))
        stored.publish(mine.save(f"step-{number}", [b"shared", f"only of {number}".encode()]))
    stored.memory.now_s += TRUST_S + 10
    # Another process, since ours would have to wait for as long as the store says has gone by.
    other = stored.machine()
    stored.store.begin(SnapshotId("step-2"))
    proof = other.save("step-2", [b"shared", b"only of 2"])
    stored.memory.now_s += GRACE_S - TRUST_S
    swept = sweeping.sweep(stored.store)  # the older object with the bytes of a younger one
    assert swept.chunks == 1
    stored.publish(proof)
    pruning.prune(stored.store, Retention(1))
    assert stored.store.verify("step-2")
    assert {found.size_bytes for found in stored.store.chunks().all()} == {len(b"shared"), len(b"only of 2")}


def test_what_a_shim_before_this_one_left_of_parts_is_deleted_and_its_chunks_stay(stored: Job) -> None:
    stored.store.begin(SnapshotId("step-1"))
    mine = stored.machine()
    mine.write("step-1", "save-1", [b"state"])
    spool = mine.exports.root
    assert spool is not None
    assert stored.memory is not None
    StoredExports(stored.memory.names(), spool, NAME)
    assert list((spool / "snapshots").iterdir()) == []
    assert [found.size_bytes for found in Chunks(spool).all()] == [5]


def test_copies_on_this_machine_that_nothing_uses_are_forgotten(stored: Job) -> None:
    mine = stored.machine()
    spool = mine.exports.root
    assert spool is not None
    for number in range(2):
        stored.store.begin(SnapshotId(f"step-{number}"))
        mine.save(f"step-{number}", [f"{number}".encode()])
        for found in Chunks(spool).all():
            os.utime(Chunks(spool).path(found.sha256), (0, 0))
    stored.store.begin(SnapshotId("step-9"))
    mine.save("step-9", [b"9"])
    assert len(list(Chunks(spool).all())) == 1
    assert list((spool / "snapshots" / "step-9").iterdir()) == []


def test_several_parts_of_one_snapshot_and_its_ledger_are_brought_side_by_side(job: Job) -> None:
    """A restore of several Gym actors loads what more than one participant has saved, and reads whose each rollout was."""
    job.store.begin(SnapshotId("step-1"))
    north, south = ParticipantId("north.counter"), ParticipantId("south.counter")
    proofs = [job.machine(name).save("step-1", [name.encode()]) for name in (north, south)]
    job.publish(*proofs)
    reader = job.machine(north).exports
    for _ in range(2):  # a restore may be repeated
        for proof in proofs:
            name = proof.participant_id
            reader.verify("step-1", name, proof.manifest_sha256, described(name))
        snapshot = reader.published("step-1")
        for name in (north, south):
            with open_content(snapshot / name / "sessions.rope") as content:
                assert content.read() == name.encode()
        assert list(snapshot_ledger(snapshot)) == []
    assert refusal(lambda: reader.published("step-2")) is Reason.SNAPSHOT_NOT_FOUND
