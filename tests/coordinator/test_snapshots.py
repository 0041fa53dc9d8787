"""Snapshots on the disk: nothing that is damaged, foreign, newer or hostile is ever taken for one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safepoint.v1 import capabilities_pb2, manifest_pb2

from coordinator import ledger_lines, pruning
from coordinator.protocol.ledger import Line
from coordinator.protocol.operation import Operation
from coordinator.protocol.proofs import Committed
from coordinator.protocol.topology import Participant, Topology
from coordinator.publication import Cut, Publisher
from coordinator.reporting import snapshot_info
from coordinator.retention import Retention
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.manifest_file import SNAPSHOT_KIND, encode, write_participant_manifest
from coordinator.wire.terms import CheckpointMode, OperationKind, Role, RolloutState
from tests.examples import examples

AGENT = ParticipantId("agent")
JUDGE = ParticipantId("judge")
REFUSALS = {
    Reason.SNAPSHOT_NOT_FOUND,
    Reason.SNAPSHOT_CORRUPT,
    Reason.SNAPSHOT_TOO_NEW,
    Reason.SNAPSHOT_FOREIGN,
    Reason.SNAPSHOT_UNSAFE,
    Reason.LIMIT_EXCEEDED,
}


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "root", "job-1")


def make(
    store: SnapshotStore, name: str, publisher: Publisher | None = None, step: str = "7",
    weights: manifest_pb2.Weights | None = None,
) -> manifest_pb2.SnapshotManifest:  # fmt: skip
    """A snapshot of one agent with two rollouts, made by the code that makes real ones."""
    snapshot_id = SnapshotId(name)
    operation = Operation(OperationKind.SAVE, OperationId(f"save-{name}"), snapshot_id)
    store.begin(snapshot_id)
    agent = capabilities_pb2.Capabilities(participant_id=AGENT, role=capabilities_pb2.ROLE_AGENT)
    with store.open(name) as directory, directory.make_child(AGENT) as mine:
        state = mine.write_new("state.bin", b"state" * 10)
        lines = [Line(f"r-{n}", 0, RolloutState.PARKED, recorded_calls=n) for n in range(2)]
        ledger = mine.write_new("ledger.jsonl", map(ledger_lines.encode, lines))
        written = write_participant_manifest(
            mine,
            manifest_pb2.ParticipantManifest(
                format_version=1, operation_id=operation.operation_id, snapshot_id=name, incarnation_id="i-1",
                capabilities=agent, ledger_file="ledger.jsonl", weights=weights,
                files=[
                    manifest_pb2.FileEntry(path="ledger.jsonl", size_bytes=ledger.size_bytes, sha256=ledger.sha256),
                    manifest_pb2.FileEntry(path="state.bin", size_bytes=state.size_bytes, sha256=state.sha256),
                ],
            ),
        )  # fmt: skip
    proof = Committed(
        operation.operation_id, snapshot_id, AGENT, IncarnationId("i-1"), written.sha256,
        size_bytes=state.size_bytes + ledger.size_bytes, ledger_file="ledger.jsonl",
    )  # fmt: skip
    topology = Topology(
        (
            Participant(AGENT, Role.AGENT, "gym.agent", CheckpointMode.EXPORT_RESTORE, IncarnationId("i-1"), "a:1"),
            Participant(
                JUDGE, Role.AUXILIARY_MODEL, "gym.model", CheckpointMode.STATELESS, IncarnationId("i-2"), "b:1"
            ),
        )
    )
    cut = Cut(operation, topology, {AGENT: proof}, {"step": step})
    return (publisher or Publisher(store, epoch=1)).publish(cut, lambda: None).manifest


def refused(call: object, *arguments: object) -> SafepointError:
    with pytest.raises(SafepointError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file() and not p.is_symlink()
    }


def test_a_snapshot_verifies_and_its_ledger_reads_back(store: SnapshotStore) -> None:
    manifest = make(store, "step-1")
    verified = store.verify("step-1")
    assert verified.manifest == manifest
    assert verified.files == 4
    assert verified.unlisted == ()
    assert [r.participant_id for r in manifest.participants] == [AGENT, JUDGE]
    assert manifest.participants[1].manifest_sha256 == ""
    lines = [ledger_lines.decode(raw, "x") for raw in store.ledger("step-1")]
    assert [(line.rollout_id, line.participant_id) for line in lines] == [("r-0", AGENT), ("r-1", AGENT)]
    assert manifest.totals.parked == 2
    assert store.published_by(SnapshotId("step-1"), "save-step-1") == manifest
    assert store.published_by(SnapshotId("step-1"), "another") is None


def test_newest_first_and_what_is_no_snapshot_is_listed_with_why(store: SnapshotStore, tmp_path: Path) -> None:
    clock = iter([1000, 999, 998])  # a wall clock that runs backwards
    publisher = Publisher(store, 1, lambda: next(clock))
    for n in range(3):
        make(store, f"step-{n}", publisher)
    folder = tmp_path / "root" / "snapshots"
    (folder / "step-1" / "agent" / "manifest.json").unlink()
    store.begin(SnapshotId("unfinished"))
    (folder / "a file").write_text("?")
    listing = store.list()
    assert [m.snapshot_id for m in listing.snapshots] == ["step-2", "step-0"]
    assert set(listing.invalid) == {"step-1", "unfinished", "a file"}
    assert "agent" in listing.invalid["step-1"]


def test_a_directory_is_reserved_once(store: SnapshotStore) -> None:
    store.begin(SnapshotId("step-1"))
    assert refused(store.begin, SnapshotId("step-1")).reason is Reason.SNAPSHOT_EXISTS


def test_the_root_of_another_job_is_refused(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    before = contents(tmp_path)
    assert refused(SnapshotStore, tmp_path / "root", "job-2").reason is Reason.SNAPSHOT_FOREIGN
    (tmp_path / "root" / "owner.json").write_text("no json")
    assert refused(SnapshotStore, tmp_path / "root", "job-1").reason is Reason.SNAPSHOT_FOREIGN
    (tmp_path / "root" / "owner.json").write_bytes(before["root/owner.json"])
    assert contents(tmp_path) == before


def test_a_snapshot_of_another_job_or_name_is_refused(store: SnapshotStore, tmp_path: Path) -> None:
    other = SnapshotStore(tmp_path / "other", "job-2")
    make(other, "step-1")
    snapshots = tmp_path / "root" / "snapshots"
    shutil.copytree(tmp_path / "other" / "snapshots" / "step-1", snapshots / "step-1")
    assert refused(store.load, "step-1").reason is Reason.SNAPSHOT_FOREIGN
    make(store, "step-2")
    shutil.copytree(snapshots / "step-2", snapshots / "step-3")
    error = refused(store.load, "step-3")
    assert error.reason is Reason.SNAPSHOT_FOREIGN
    assert "renamed" in error.problem.advice, "another root or job would be no help"


def test_a_part_of_another_snapshot_is_refused(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    make(store, "step-2")
    snapshots = tmp_path / "root" / "snapshots"
    shutil.rmtree(snapshots / "step-2" / "agent")
    shutil.copytree(snapshots / "step-1" / "agent", snapshots / "step-2" / "agent")
    error = refused(store.verify, "step-2")
    assert error.reason is Reason.SNAPSHOT_CORRUPT
    assert error.problem.participant_id == AGENT


@pytest.mark.parametrize("what", ["snapshot", "participant", "file", "ledger", "manifest"])
def test_links_are_refused_and_nothing_changes(store: SnapshotStore, tmp_path: Path, what: str) -> None:
    make(store, "step-1")
    outside = tmp_path / "outside"
    folder = tmp_path / "root" / "snapshots" / "step-1"
    victim = {
        "snapshot": folder,
        "participant": folder / "agent",
        "file": folder / "agent" / "state.bin",
        "ledger": folder / "ledger.jsonl",
        "manifest": folder / "manifest.json",
    }[what]
    shutil.move(victim, outside)
    victim.symlink_to(outside)
    before = contents(tmp_path)
    assert refused(store.verify, "step-1").reason is Reason.SNAPSHOT_UNSAFE
    store.list()
    pruning.prune(store, Retention(1))
    assert contents(tmp_path) == before
    assert victim.is_symlink()


def test_a_list_reads_no_ledger_and_still_misses_one_that_was_cut(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step-1", "step-2", "step-3"):
        make(store, name)
    folder = tmp_path / "root" / "snapshots"
    changed, cut = folder / "step-1" / "ledger.jsonl", folder / "step-2" / "ledger.jsonl"
    changed.chmod(0o600)
    changed.write_bytes(changed.read_bytes().replace(b"r", b"q"))
    cut.write_bytes(cut.read_bytes()[:-1])
    (folder / "step-3" / "ledger.jsonl").unlink()
    read: list[str] = []
    digest = Directory.digest
    monkeypatch.setattr(Directory, "digest", lambda self, path: (read.append(path), digest(self, path))[1])
    listing = store.list()
    assert [m.snapshot_id for m in listing.snapshots] == ["step-1"]
    assert "another size" in listing.invalid["step-2"]
    assert "missing" in listing.invalid["step-3"]
    assert read == []
    assert refused(store.verify, "step-1").reason is Reason.SNAPSHOT_CORRUPT
    assert read


def test_unlisted_files_are_reported_and_ignored(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    folder = tmp_path / "root" / "snapshots" / "step-1"
    (folder / "agent" / "extra").write_text("?")
    (folder / "extra").symlink_to("/etc/passwd")
    assert store.verify("step-1").unlisted == ("agent/extra", "extra")


@pytest.mark.parametrize("name", ["step-9", ".hidden", "a b", "notes.txt"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_lies_among_the_snapshots_and_is_none_is_reported_by_each_verification(
    store: SnapshotStore, name: str, kind: str
) -> None:
    make(store, "step-1")
    store.begin(SnapshotId("in-the-making"))
    added = store.disk / "snapshots" / name
    added.write_text("?") if kind == "file" else added.symlink_to("step-1")
    (store.disk / "snapshots" / ".gone-step-0-12").mkdir()
    assert store.foreign() == (name,)
    assert store.verify("step-1").unlisted == (f"../{name}",)


def test_a_published_snapshot_is_never_discarded(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    assert refused(store.discard, SnapshotId("step-1")).reason is Reason.SNAPSHOT_IN_USE
    store.begin(SnapshotId("step-2"))
    store.discard(SnapshotId("step-2"))
    store.discard(SnapshotId("step-2"))
    assert [p.name for p in (tmp_path / "root" / "snapshots").iterdir()] == ["step-1"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_failing_disk_publishes_nothing(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    make(store, "step-0")

    def broken(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    if call == "write":
        monkeypatch.setattr(Directory, "_write", broken)
    else:
        monkeypatch.setattr(os, call, broken)
    with store.open("step-0") as directory:
        error = refused(directory.write_new, "new", b"x")
    assert error.reason is (Reason.STORAGE_FAILED if code == errno.EIO else Reason.STORAGE_FULL)
    monkeypatch.undo()
    with store.open("step-0") as directory:
        assert [name for name in directory.names() if "new" in name] == []
    store.verify("step-0")


def test_a_manifest_whose_name_may_not_be_durable_counts_once_it_is(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, name, sync = make(store, "step-1"), SnapshotId("step-2"), Directory.sync
    store.begin(name)
    manifest.snapshot_id = name
    synced = list[str]()

    def broken(directory: Directory) -> None:
        raise OSError(errno.EIO, directory.path.name)

    def noted(directory: Directory) -> None:
        sync(directory)
        synced.append(directory.path.name)

    monkeypatch.setattr(Directory, "sync", broken)  # after the link
    assert refused(store.publish, manifest).reason is Reason.STORAGE_FAILED
    assert refused(store.published_by, name, manifest.operation_id).reason is Reason.STORAGE_FAILED
    monkeypatch.setattr(Directory, "sync", noted)
    assert store.published_by(name, "somebody else") is None
    assert synced == []
    assert store.published_by(name, manifest.operation_id) is not None
    assert synced == [name]


def test_publishing_is_forbidden_right_before_the_link(store: SnapshotStore, tmp_path: Path) -> None:
    manifest = make(store, "step-1")
    store.begin(SnapshotId("step-2"))
    manifest.snapshot_id = "step-2"

    def late() -> None:
        raise SafepointError(refused(store.load, "nothing").problem)

    refused(store.publish, manifest, late)
    assert list((tmp_path / "root" / "snapshots" / "step-2").iterdir()) == []


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine") / "root"
    make(SnapshotStore(root, "job-1"), "step-1")
    return root


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_refused_with_a_reason_and_without_a_change(
    pristine: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Truncated, edited, removed, swapped, linked, devices: one random damage, and it is never restored."""
    root = tmp_path / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(pristine, root)
    folder = root / "snapshots" / "step-1"
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    victim = data.draw(st.sampled_from(files))
    raw = victim.read_bytes()
    damage = data.draw(
        st.sampled_from(
            [
                *("truncate", "flip", "insert", "append", "remove", "rename", "empty", "swap", "exchange"),
                *("link", "hardlink", "fifo", "directory"),
            ]
        )
    )
    at = data.draw(st.integers(0, len(raw) - 1))
    if damage == "truncate":
        victim.write_bytes(raw[:at])
    elif damage == "flip":
        victim.write_bytes(raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :])
    elif damage == "insert":
        victim.write_bytes(raw[:at] + data.draw(st.binary(min_size=1, max_size=20)) + raw[at:])
    elif damage == "append":
        victim.write_bytes(raw + data.draw(st.binary(min_size=1, max_size=20)))
    elif damage == "rename":
        victim.rename(victim.with_name(data.draw(st.sampled_from(["a", "ledger.jsonl2", "Manifest.json", ".x"]))))
    elif damage == "exchange":
        other = data.draw(st.sampled_from([f for f in files if f.read_bytes() != raw]))
        victim.write_bytes(other.read_bytes())
        other.write_bytes(raw)
    elif damage == "swap":
        other = data.draw(st.sampled_from([f for f in files if f.read_bytes() != raw]))
        victim.write_bytes(other.read_bytes())
    elif damage == "hardlink":
        os.link(victim, tmp_path / f"second-{os.urandom(4).hex()}")
    else:
        victim.unlink()
        if damage == "empty":
            victim.touch()
        elif damage == "link":
            victim.symlink_to("/etc/passwd")
        elif damage == "fifo":
            os.mkfifo(victim)
        elif damage == "directory":
            victim.mkdir()
    before = contents(root)
    damaged = SnapshotStore(root, "job-1")
    assert refused(damaged.verify, "step-1").reason in REFUSALS
    assert damaged.published_by(SnapshotId("step-1"), "save-step-1") is None or victim != folder / "manifest.json"
    damaged.list()
    pruning.prune(damaged, Retention(1), dry_run=True)
    assert contents(root) == before


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_added_is_named_and_changes_nothing_of_what_is_verified(
    pristine: Path, tmp_path: Path, data: st.DataObject
) -> None:
    root = tmp_path / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(pristine, root)
    folder = root / "snapshots" / "step-1"
    before = SnapshotStore(root, "job-1").verify("step-1")
    where = data.draw(st.sampled_from(["", "agent/", "agent/below/", "judge/"]))
    name = data.draw(st.sampled_from(["extra", ".hidden", "manifest.json~", "state.bin.1", "a b", "\u00fc"]))
    kind = data.draw(st.sampled_from(["file", "directory", "link", "dangling", "fifo", "second name", "copy"]))
    added = folder / where / name
    added.parent.mkdir(exist_ok=True)
    if kind == "file":
        added.write_bytes(data.draw(st.binary(max_size=10)))
    elif kind == "directory":
        added.mkdir()
    elif kind in ("link", "dangling"):
        added.symlink_to("/etc/passwd" if kind == "link" else "nowhere")
    elif kind == "fifo":
        os.mkfifo(added)
    elif kind == "copy":
        shutil.copytree(folder / "agent", added, ignore=shutil.ignore_patterns("below"))
    else:
        other = tmp_path / "foreign"
        other.write_bytes(b"foreign")
        os.link(other, added)
    found = SnapshotStore(root, "job-1").verify("step-1")
    assert (found.files, found.size_bytes, found.manifest) == (before.files, before.size_bytes, before.manifest)
    assert found.unlisted
    told = where + name
    assert any(each == told or each.startswith(f"{told}/") or told.startswith(f"{each}/") for each in found.unlisted)


def test_a_directory_that_a_newer_coordinator_removes_while_it_is_being_reserved_is_refused_as_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, newer = SnapshotStore(tmp_path / "root", "default"), SnapshotStore(tmp_path / "root", "default")
    sync = Directory.sync

    def slow(directory: Directory) -> None:
        sync(directory)
        monkeypatch.undo()
        newer.forget_reserved()

    monkeypatch.setattr(Directory, "sync", slow)
    with pytest.raises(SafepointError) as caught:
        old.begin(SnapshotId("step-1"))
    assert caught.value.reason is Reason.STALE_EPOCH
    newer.begin(SnapshotId("step-1"))


@pytest.mark.parametrize("edit", ["a participant removed", "another schema", "no role", "no fingerprint"])
def test_a_manifest_whose_fingerprint_is_not_that_of_its_participants_is_damaged(
    store: SnapshotStore, tmp_path: Path, edit: str
) -> None:
    manifest = make(store, "step-1")
    match edit:
        case "a participant removed":
            del manifest.participants[0]
        case "another schema":
            manifest.participants[0].capabilities.state_schema = "2"
        case "no role":
            manifest.participants[0].capabilities.ClearField("role")
        case _:
            manifest.topology_fingerprint = ""
    path = tmp_path / "root" / "snapshots" / "step-1" / "manifest.json"
    path.write_bytes(encode(SNAPSHOT_KIND, manifest))  # its envelope is right
    for call in (store.load, store.verify):
        assert refused(call, "step-1").reason is Reason.SNAPSHOT_CORRUPT
    assert store.list().snapshots == ()
    assert "is damaged" in store.list().invalid["step-1"]


def test_the_weights_that_a_part_names_are_in_the_manifest_of_the_snapshot_and_in_lists(store: SnapshotStore) -> None:
    weights = manifest_pb2.Weights(version="step-40", digest_sha256="ab" * 32)
    agent, judge = make(store, "step-1", weights=weights).participants
    assert (agent.weights, judge.HasField("weights")) == (weights, False)
    assert store.part_manifest(agent, "step-1").weights == weights
    assert dict(snapshot_info(store.load("step-1")).weights) == {AGENT: weights}
    plain = make(store, "step-2")
    assert not plain.participants[0].HasField("weights")
    assert dict(snapshot_info(plain).weights) == {}


def test_a_manifest_that_names_other_weights_than_its_parts_is_damaged_and_one_that_names_none_is_of_an_older_version(
    store: SnapshotStore, tmp_path: Path
) -> None:
    manifest = make(store, "step-1", weights=manifest_pb2.Weights(version="step-40"))
    path = tmp_path / "root" / "snapshots" / "step-1" / "manifest.json"
    manifest.participants[0].weights.version = "step-41"
    path.write_bytes(encode(SNAPSHOT_KIND, manifest))  # its envelope is right
    error = refused(store.verify, "step-1")
    assert error.reason is Reason.SNAPSHOT_CORRUPT
    assert f"the weights that it names of {AGENT}" in str(error)
    manifest.participants[0].ClearField("weights")
    path.write_bytes(encode(SNAPSHOT_KIND, manifest))
    assert store.verify("step-1").manifest == manifest


def test_a_manifest_that_counts_other_requests_than_its_parts_is_damaged(store: SnapshotStore, tmp_path: Path) -> None:
    manifest = make(store, "step-1")
    manifest.participants[0].engine_requests = 6
    (tmp_path / "root" / "snapshots" / "step-1" / "manifest.json").write_bytes(encode(SNAPSHOT_KIND, manifest))
    assert f"the requests that it names of {AGENT}" in str(refused(store.verify, "step-1"))


@pytest.mark.parametrize("who", [AGENT, JUDGE])
def test_a_manifest_that_binds_other_parts_than_those_that_were_committed_is_damaged(
    store: SnapshotStore, tmp_path: Path, who: str
) -> None:
    manifest = make(store, "step-1")
    (reference,) = [each for each in manifest.participants if each.participant_id == who]
    reference.manifest_sha256 = "" if who == AGENT else "ab" * 32
    path = tmp_path / "root" / "snapshots" / "step-1" / "manifest.json"
    path.write_bytes(encode(SNAPSHOT_KIND, manifest))  # its envelope is right
    for call in (store.load, store.verify):
        error = refused(call, "step-1")
        assert (error.reason, error.problem.participant_id) == (Reason.SNAPSHOT_CORRUPT, who)
    assert store.list().snapshots == ()


def test_where_the_directory_of_all_snapshots_is_gone_the_next_step_brings_it_back(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = SnapshotStore(root, "job-1")
    (root / "snapshots").rmdir()
    with pytest.raises(SafepointError) as refused:
        store.begin(SnapshotId("step-1"))
    advice = refused.value.problem.advice
    assert refused.value.reason is Reason.STORAGE_FAILED
    assert "If its snapshots are lost: mkdir" in advice
    command = advice.partition("If its snapshots are lost: ")[2].partition(", then")[0]
    subprocess.run(["/bin/sh", "-c", command], check=True)
    store.begin(SnapshotId("step-1"))
