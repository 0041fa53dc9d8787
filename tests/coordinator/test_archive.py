"""Copies in object stores: on a disk, in fsspec's memory and on a real S3 server; whole or not there, and never replaced."""

from __future__ import annotations

import errno
import importlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import archive, copies, pruning
from coordinator.publication import Publisher
from coordinator.retention import Retention
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import SnapshotId
from coordinator.wire.objects import FsspecObjects, LocalObjects, Objects, objects_at
from tests.coordinator.test_snapshots import contents, make, refused
from tests.object_store import a_server, environment


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of an S3 server that is a process of its own."""
    pytest.importorskip("s3fs")
    with a_server() as server, environment(AWS_ENDPOINT_URL=server.address):
        yield "s3://bucket"


@pytest.fixture(params=["disk", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "disk":
        (tmp_path / "objects").mkdir()
        return objects_at(f"file://{tmp_path / 'objects'}")
    if request.param == "memory":
        return objects_at(f"memory://{uuid.uuid4().hex}")
    return objects_at(f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}")


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "root", "job-1")


def put(objects: Objects, key: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "put").write_bytes(data)
    with Directory.open(tmp_path) as directory, directory.opened("put") as file:
        objects.put_new(key, file)


class Broken:
    """A store that fails at one of its writes."""

    def __init__(self, objects: Objects, at: int) -> None:
        self._objects, self._left, self.url = objects, at, objects.url
        self.chunks, self.names, self.size = objects.chunks, objects.names, objects.size

    def put_new(self, key: str, file: int) -> None:
        if self._left == 0:
            raise ConnectionError("the line is cut")
        self._left -= 1
        self._objects.put_new(key, file)


def test_a_snapshot_comes_back_as_it_was(store: SnapshotStore, objects: Objects, tmp_path: Path) -> None:
    publisher = Publisher(store, 1)
    for name in ("step-1", "step-2"):
        make(store, name, publisher)
        archive.push(store, name, objects)
    assert [one.snapshot_id for one in copies.manifests(objects)] == ["step-2", "step-1"]
    other = tmp_path / "other"
    copied = archive.pull(objects, "step-1", other)
    again = SnapshotStore(other, "job-1")
    assert again.verify("step-1") == store.verify("step-1")
    assert copied.files == 5
    assert contents(other / "snapshots" / "step-1") == contents(tmp_path / "root" / "snapshots" / "step-1")
    assert refused(archive.pull, objects, "step-1", other).reason is Reason.SNAPSHOT_EXISTS
    assert refused(archive.pull, objects, "step-9", other).reason is Reason.SNAPSHOT_NOT_FOUND
    assert [m.snapshot_id for m in again.list().snapshots] == ["step-1"]


def test_nothing_in_a_store_is_ever_replaced(store: SnapshotStore, objects: Objects, tmp_path: Path) -> None:
    put(objects, "a/b", b"first", tmp_path)
    with pytest.raises(FileExistsError):
        put(objects, "a/b", b"second", tmp_path)
    assert b"".join(objects.chunks("a/b")) == b"first"
    with pytest.raises(FileNotFoundError):
        list(objects.chunks("a/c"))
    make(store, "step-1")
    assert archive.push(store, "step-1", objects).found == 0
    assert archive.push(store, "step-1", objects).found == 5, "a repeat finds what is there"
    foreign = SnapshotStore(tmp_path / "foreign", "job-2")
    make(foreign, "step-1", Publisher(foreign, 2))
    error = refused(archive.push, foreign, "step-1", objects)
    assert error.reason is Reason.SNAPSHOT_EXISTS
    archive.pull(objects, "step-1", tmp_path / "other")
    SnapshotStore(tmp_path / "other", "job-1").verify("step-1")


def test_a_push_that_is_cut_short_is_no_copy_and_a_repeat_completes_it(
    store: SnapshotStore, objects: Objects, tmp_path: Path
) -> None:
    make(store, "step-1")
    for at in range(5):
        with pytest.raises(ConnectionError):
            archive.push(store, "step-1", Broken(objects, at))
        assert copies.manifests(objects) == []
        assert refused(archive.pull, objects, "step-1", tmp_path / "other").reason is Reason.SNAPSHOT_NOT_FOUND
        assert not (tmp_path / "other").exists()
    assert archive.push(store, "step-1", objects).found == 4
    archive.pull(objects, "step-1", tmp_path / "other")


@pytest.mark.parametrize("damaged", ["agent/state.bin", "agent/manifest.json", "ledger.jsonl", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "longer", "gone"])
def test_a_copy_that_is_damaged_is_refused_and_the_root_stays_as_it_was(
    store: SnapshotStore, tmp_path: Path, damaged: str, how: str
) -> None:
    make(store, "step-1")
    (tmp_path / "objects").mkdir()
    objects = LocalObjects(tmp_path / "objects")
    archive.push(store, "step-1", objects)
    victim = tmp_path / "objects" / "step-1" / damaged
    raw = victim.read_bytes()
    change: dict[str, Callable[[], Any]] = {
        "flip": lambda: victim.write_bytes(raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:]),
        "cut": lambda: victim.write_bytes(raw[:-1]),
        "longer": lambda: victim.write_bytes(raw + b"x" * 10_000),
        "gone": victim.unlink,
    }
    change[how]()
    other = SnapshotStore(tmp_path / "other", "job-1")
    before = contents(tmp_path / "other")
    error = refused(archive.pull, objects, "step-1", tmp_path / "other")
    gone = how == "gone" and damaged == "manifest.json"
    assert error.reason is (Reason.SNAPSHOT_NOT_FOUND if gone else Reason.SNAPSHOT_CORRUPT)
    assert contents(tmp_path / "other") == before
    assert other.list().snapshots == ()
    other.begin(SnapshotId("step-1"))  # the name is free


def test_a_root_of_another_job_takes_no_copy(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    (tmp_path / "objects").mkdir()
    objects = LocalObjects(tmp_path / "objects")
    archive.push(store, "step-1", objects)
    SnapshotStore(tmp_path / "other", "job-2")
    assert refused(archive.pull, objects, "step-1", tmp_path / "other").reason is Reason.SNAPSHOT_FOREIGN


def test_a_damaged_snapshot_is_not_pushed(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    (tmp_path / "root" / "snapshots" / "step-1" / "agent" / "state.bin").write_bytes(b"?")
    (tmp_path / "objects").mkdir()
    assert refused(archive.push, store, "step-1", LocalObjects(tmp_path / "objects")).reason is Reason.SNAPSHOT_CORRUPT
    assert list((tmp_path / "objects").iterdir()) == []


@pytest.mark.parametrize(
    "url", ["", "relative", "no-such-store://x", "simplecache::s3://b", "s3://", "s3:///", "s3://key:secret@b/x"]
)
def test_a_url_that_names_no_store_is_refused_without_its_secrets(url: str) -> None:
    error = refused(objects_at, url)
    assert error.reason is Reason.INVALID_ARGUMENT
    assert "secret" not in str(error)


def test_a_disk_that_is_not_mounted_is_no_empty_store(tmp_path: Path) -> None:
    assert refused(copies.manifests, objects_at(str(tmp_path / "mnt"))).reason is Reason.STORAGE_FAILED


def test_a_store_that_does_not_answer_is_a_failure_of_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = importlib.import_module("fsspec.implementations.memory")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(memory.MemoryFileSystem, "ls", broken)
    with pytest.raises(SafepointError, match="no credentials") as caught:
        FsspecObjects("memory://somewhere").names()
    assert caught.value.reason is Reason.STORAGE_FAILED


def test_a_push_makes_the_directory_of_a_store_and_nothing_above_it(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    archive.push(store, "step-1", objects_at(str(tmp_path / "objects")))
    assert [one.snapshot_id for one in copies.manifests(objects_at(str(tmp_path / "objects")))] == ["step-1"]
    for ask in (
        lambda: archive.push(store, "step-1", objects_at(str(tmp_path / "disk" / "run-7"))),
        lambda: archive.pull(objects_at(str(tmp_path / "disk" / "run-7")), "step-1", tmp_path / "other"),
        lambda: copies.manifests(objects_at(str(tmp_path / "disk" / "run-7"))),
    ):
        error = refused(ask)
        assert error.reason is Reason.STORAGE_FAILED
        assert f"there is no directory {tmp_path / 'disk'}." in error.problem.message
        assert "Mount it, or correct the path" in error.problem.next_step
    assert not (tmp_path / "disk").exists()


class Interrupted:
    """A store of which something happens to the root once it has given so many objects."""

    def __init__(self, objects: Objects, after: int, what: Callable[[], object]) -> None:
        self._objects, self._left, self._what, self.url = objects, after, what, objects.url
        self.names = objects.names

    def chunks(self, key: str) -> Iterator[bytes]:
        if self._left == 0:
            self._what()
        self._left -= 1
        return self._objects.chunks(key)


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_pull_that_a_coordinator_has_swept_harms_nothing_that_is_saved_under_its_name(
    store: SnapshotStore, tmp_path: Path, after: int
) -> None:
    make(store, "step-1")
    objects = objects_at(str(tmp_path / "objects"))
    archive.push(store, "step-1", objects)
    other = SnapshotStore(tmp_path / "other", "job-1")

    def start_and_save() -> None:
        pruning.sweep(other, ())
        make(other, "step-1", Publisher(other, 9))

    error = refused(archive.pull, Interrupted(objects, after, start_and_save), "step-1", tmp_path / "other")
    assert error.reason in (Reason.SNAPSHOT_IN_USE, Reason.STORAGE_FAILED)
    assert other.verify("step-1").manifest.coordinator_epoch == 9


def test_a_pull_writes_no_manifest_when_a_coordinator_has_started_meanwhile(
    store: SnapshotStore, tmp_path: Path
) -> None:
    make(store, "step-1")
    objects = objects_at(str(tmp_path / "objects"))
    archive.push(store, "step-1", objects)

    def started() -> None:
        raise refuse(Reason.SNAPSHOT_IN_USE, "A coordinator runs.")

    assert refused(archive.pull, objects, "step-1", tmp_path / "other", started).reason is Reason.SNAPSHOT_IN_USE
    assert contents(tmp_path / "other" / "snapshots") == {}
    archive.pull(objects, "step-1", tmp_path / "other")


class Watched:
    """A store before whose write number `at` something happens to the root."""

    def __init__(self, objects: Objects, at: int, what: Callable[[], object]) -> None:
        self._objects, self._left, self._what, self.url = objects, at, what, objects.url
        self.chunks, self.names, self.size = objects.chunks, objects.names, objects.size

    def put_new(self, key: str, file: int) -> None:
        if self._left == 0:
            self._what()
        self._left -= 1
        self._objects.put_new(key, file)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_push_whose_snapshot_is_pruned_meanwhile_says_so_and_leaves_no_copy(
    store: SnapshotStore, tmp_path: Path, at: int
) -> None:
    make(store, "step-1")
    objects = objects_at(str(tmp_path / "objects"))
    error = refused(archive.push, store, "step-1", Watched(objects, at, lambda: store.remove("step-1")))
    assert error.reason is Reason.SNAPSHOT_NOT_FOUND
    assert "deleted while it was copied" in error.problem.message
    assert copies.manifests(objects) == []


def test_a_push_that_misses_a_file_of_a_snapshot_that_is_there_calls_it_damaged(
    store: SnapshotStore, tmp_path: Path
) -> None:
    make(store, "step-1")
    lost = tmp_path / "root" / "snapshots" / "step-1" / "ledger.jsonl"
    objects = objects_at(str(tmp_path / "objects"))
    error = refused(archive.push, store, "step-1", Watched(objects, 0, lost.unlink))
    assert error.reason is Reason.SNAPSHOT_CORRUPT
    assert "ledger.jsonl" in error.problem.message


def test_a_pull_that_was_killed_names_the_way_out_and_it_is_one(store: SnapshotStore, tmp_path: Path) -> None:
    make(store, "step-1")
    objects = objects_at(str(tmp_path / "objects"))
    archive.push(store, "step-1", objects)
    other = SnapshotStore(tmp_path / "other", "job-1")
    other.begin(SnapshotId("step-1"))  # as a pull does first
    (tmp_path / "other" / "snapshots" / "step-1" / "ledger.jsonl").write_bytes(b"half")
    error = refused(archive.pull, objects, "step-1", tmp_path / "other")
    assert error.reason is Reason.SNAPSHOT_EXISTS
    assert "of a pull that was cut short" in error.problem.message
    assert "safepoint snapshots prune --keep 1000000" in error.problem.next_step
    assert pruning.prune(other, Retention(1_000_000)).deleted == ("step-1",)
    archive.pull(objects, "step-1", tmp_path / "other")
    error = refused(archive.pull, objects, "step-1", tmp_path / "other")
    assert "already" in error.problem.message
    assert "snapshots verify" in error.problem.next_step
    other.verify("step-1")


@pytest.mark.parametrize(
    "error",
    [ConnectionError("refused"), IndexError("tuple index out of range"), OSError(errno.ENOSPC, "full")],
    ids=["silent", "stumbles", "full"],
)
def test_what_fails_in_a_store_is_advised_about_the_store_and_not_about_the_root(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory: Any = importlib.import_module("fsspec.implementations.memory")

    def broken(*_: Any, **__: Any) -> None:
        raise error

    for name in ("ls", "info", "open", "exists"):
        monkeypatch.setattr(memory.MemoryFileSystem, name, broken)
    objects = FsspecObjects("memory://somewhere")
    asks: list[Callable[[], object]] = [
        objects.names, lambda: objects.size("a"), lambda: list(objects.chunks("a")),
        lambda: put(objects, "a", b"", tmp_path),
    ]  # fmt: skip
    full = getattr(error, "errno", 0) == errno.ENOSPC
    for ask in asks:
        told = refused(ask)
        assert told.reason is (Reason.STORAGE_FULL if full else Reason.STORAGE_FAILED)
        assert ("Free space in the object store" if full else "the store answers") in told.problem.next_step
        assert "tuple index" not in told.problem.message


def test_a_bucket_that_is_not_there_is_named_by_a_push(store: SnapshotStore, s3: str) -> None:
    make(store, "step-1")
    error = refused(archive.push, store, "step-1", objects_at("s3://no-such-bucket/run"))
    assert error.reason is Reason.STORAGE_FAILED
    assert "s3://no-such-bucket/run" in error.problem.message
    assert "snapshot root" not in error.problem.advice


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_directory_that_fails_is_advised_about_that_directory_and_not_about_the_root(
    number: int, monkeypatch: pytest.MonkeyPatch, store: SnapshotStore, tmp_path: Path
) -> None:
    make(store, "step-1")

    def broken(self: Directory, name: str, *_: object) -> None:
        raise storage_error(OSError(number, "no"), f"writing {self.path / name}")

    monkeypatch.setattr(Directory, "write_new", broken)
    error = refused(archive.push, store, "step-1", objects_at(str(tmp_path / "objects")))
    assert error.reason is (Reason.STORAGE_FAILED if number == errno.EIO else Reason.STORAGE_FULL)
    assert error.problem.next_step
    assert "snapshot root is mounted" not in error.problem.next_step
