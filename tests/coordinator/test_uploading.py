"""Uploads of what is published: found by looking, never in the way of an operation, whole in the store or not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import archive, copies, pruning
from coordinator.publication import Publisher
from coordinator.retention import Retention
from coordinator.settings import Settings
from coordinator.snapshots import SnapshotStore
from coordinator.uploading import Uploaded, Uploader, epoch_in_store
from coordinator.wire.chunks import Chunks
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.manifest_file import MAX_EPOCH
from coordinator.wire.objects import LocalObjects, Objects, objects_at, without_secrets
from tests.coordinator.conftest import Bench, until
from tests.coordinator.test_snapshots import make, refused
from tests.coordinator.test_sweeping import save

FAST = 0.0001  # of the waits of the table


class Store:
    """Objects on a disk; what is written is counted, and may be held or fail."""

    def __init__(self, path: Path) -> None:
        self._objects = LocalObjects(path)
        self.url = self._objects.url
        self.chunks, self.names, self.size = self._objects.chunks, self._objects.names, self._objects.size
        self.written: list[str] = []
        self.before: Callable[[str], None] = lambda _: None

    def put_new(self, key: str, file: int) -> None:
        self.before(key)
        self._objects.put_new(key, file)
        self.written.append(key)

    def manifests(self) -> list[str]:
        return [key.split("/")[0] for key in self.written if key.count("/") == 1 and key.endswith("/manifest.json")]


@pytest.fixture
def root(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "root", "job-1")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "objects")


@pytest.fixture
def begin(root: SnapshotStore) -> Iterator[Callable[..., Uploader]]:
    running: list[Uploader] = []

    def made(objects: Objects, epoch: int = 1, **options: Any) -> Uploader:
        running.append(Uploader(root, objects, epoch, jitter=lambda: FAST, **options))
        running[-1].start()
        return running[-1]

    yield made
    for one in running:
        one.close()


def wait(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def idle(uploader: Uploader) -> bool:
    status = uploader.status()
    return not status.looking and not status.waiting


def states(uploader: Uploader, *names: str) -> list[str]:
    return [pb.UploadState.Name(uploader.message(name).state).removeprefix("UPLOAD_STATE_").lower() for name in names]


def test_what_is_published_is_uploaded_newest_first_and_a_restart_finds_what_is_missing_by_looking(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    publisher = Publisher(root, 1)
    for number in (1, 2, 3):
        make(root, f"step-{number}", publisher)
    told: list[Uploaded] = []
    first = begin(store, uploaded=told.append)
    wait(lambda: idle(first) and len(told) == 3)
    assert store.manifests() == ["step-3", "step-2", "step-1"]
    assert [one.operation_id for one in told] == ["save-step-3", "save-step-2", "save-step-1"]
    assert states(first, "step-1", "step-2", "step-3") == ["uploaded"] * 3
    first.close()
    store.written.clear()
    make(root, "step-4", publisher)
    second = begin(store)
    wait(lambda: idle(second))
    assert store.manifests() == ["step-4"]
    assert all("step-4" in key for key in store.written), "what is there is not sent again"
    make(root, "step-5", publisher)
    second.published()
    wait(lambda: second.status().uploaded_last == "step-5")
    assert [one.snapshot_id for one in copies.manifests(store)] == [f"step-{n}" for n in (5, 4, 3, 2, 1)]


def test_an_upload_gives_way_to_an_operation_between_two_objects(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    make(root, "step-1")
    active, asked = "", 0

    def begins(key: str) -> None:
        nonlocal active
        if key == "step-1/agent/state.bin":
            active = "save-2"

    def ask() -> str:
        nonlocal asked
        asked += 1
        return active

    store.before = begins
    uploader = begin(store, active=ask)
    wait(lambda: active == "save-2" and uploader.message("step-1").files_done == 2)
    seen, before = list(store.written), asked
    wait(lambda: asked >= before + 5)  # it has looked again and again, and waits
    assert store.written == seen
    assert store.manifests() == []
    assert states(uploader, "step-1") == ["uploading"]
    active = ""
    wait(lambda: store.manifests() == ["step-1"])


def test_who_holds_a_pause_for_long_does_not_hold_the_upload_as_long(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    make(root, "step-1")
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 5.0
        return now

    begin(store, active=lambda: "restore-1", clock=clock)
    wait(lambda: store.manifests() == ["step-1"])


def test_a_store_that_fails_is_tried_again_and_says_why_until_it_is_back(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    make(root, "step-1")
    failures = 3
    release = threading.Event()

    def fail(key: str) -> None:
        nonlocal failures
        if key.endswith("state.bin") and failures:
            failures -= 1
            if not failures:
                release.wait(20)
            raise refuse(Reason.STORAGE_FAILED, "The object store failed.", next_step="Mend it.")

    store.before = fail
    uploader = begin(store)
    wait(lambda: uploader.message("step-1").attempts == 3)
    assert uploader.figures().failed == {"STORAGE_FAILED": 2}
    said = uploader.message("step-1").problem
    assert (said.message, said.next_step) == ("The object store failed.", "Mend it.")
    assert copies.manifests(store) == []
    assert "has no manifest" in copies.listing(store).invalid["step-1"]
    release.set()
    wait(lambda: idle(uploader))
    assert not uploader.message("step-1").HasField("problem")
    assert uploader.figures().succeeded == 1
    assert uploader.figures().newest_time_s > 0


def test_a_driver_that_raises_what_nobody_expects_does_not_end_the_uploads(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    make(root, "step-1")
    broken = [ZeroDivisionError("no")]

    def fail(key: str) -> None:
        if broken:
            raise broken.pop()

    store.before = fail
    uploader = begin(store)
    wait(lambda: idle(uploader))
    assert uploader.figures().failed == {"INTERNAL": 1}


@pytest.mark.parametrize("damaged", ["agent/state.bin", "ledger.jsonl"])
def test_a_flipped_byte_in_the_root_is_never_uploaded_as_whole_and_holds_nobody_up(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader], damaged: str
) -> None:
    publisher = Publisher(root, 1)
    make(root, "step-1", publisher)
    make(root, "step-2", publisher)
    victim = root.root / "snapshots" / "step-2" / damaged
    raw = victim.read_bytes()
    victim.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    uploader = begin(store)
    wait(lambda: states(uploader, "step-1", "step-2") == ["uploaded", "failed"])
    assert [one.snapshot_id for one in copies.manifests(store)] == ["step-1"]
    said = uploader.message("step-2")
    assert str(victim) in said.problem.message
    assert said.next_try.ToSeconds() >= 0


def test_another_snapshot_of_that_name_in_the_store_is_left_and_told(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader], tmp_path: Path
) -> None:
    other = SnapshotStore(tmp_path / "other", "job-1")
    make(other, "step-1", step="8")
    archive.push(other, "step-1", store)
    make(root, "step-1")
    uploader = begin(store)
    wait(lambda: states(uploader, "step-1") == ["failed"])
    assert "has another step-1/manifest.json" in uploader.message("step-1").problem.message
    assert copies.load(store, "step-1").metadata["step"] == "8"


def test_a_snapshot_that_is_deleted_meanwhile_needs_no_copy(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    make(root, "step-1")
    store.before = lambda _: root.remove("step-1")
    uploader = begin(store)
    wait(lambda: bool(store.written) and idle(uploader))
    assert copies.manifests(store) == []
    assert not uploader.figures().failed


def test_a_prune_leaves_what_is_not_uploaded_yet_up_to_a_limit_and_what_is_being_sent(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    publisher = Publisher(root, 1)
    for number in range(1, 7):
        make(root, f"step-{number}", publisher)
    held = threading.Event()

    def hold(key: str) -> None:
        if key.startswith("step-5/"):
            held.wait(20)

    store.before = hold
    uploader = begin(store)
    wait(lambda: states(uploader, "step-6", "step-5") == ["uploaded", "uploading"])
    planned = pruning.prune(root, Retention(1), also=lambda names: uploader.kept(names, 3), dry_run=True)
    assert planned.deleted == ("step-2", "step-1")
    assert planned.kept == {
        "step-6": "it is the newest",
        "step-5": "it is being uploaded",
        "step-4": "it is not uploaded yet",
        "step-3": "it is not uploaded yet",
    }
    assert pruning.prune(root, Retention(1), also=lambda names: uploader.kept(names, 0), dry_run=True).deleted == (
        "step-4", "step-3", "step-2", "step-1",
    ), "what is being sent stays in any case"  # fmt: skip
    unseen = uploader.kept(["step-7", "step-6"], 1)
    assert unseen == {"step-7": "it is not uploaded yet"}, "one that nobody has looked at is not there either"
    held.set()
    wait(lambda: idle(uploader))
    assert uploader.kept(["step-6", "step-5"], 3) == {}


def test_an_older_coordinator_than_the_store_has_seen_uploads_nothing_that_would_count_as_old(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader], tmp_path: Path
) -> None:
    other = SnapshotStore(tmp_path / "other", "job-1")
    make(other, "step-9", Publisher(other, 7))
    archive.push(other, "step-9", store)
    make(root, "step-10", Publisher(root, 1))
    uploader = begin(store, epoch=1)
    wait(lambda: states(uploader, "step-10") == ["failed"])
    said = uploader.message("step-10").problem
    assert "epoch 7" in said.message
    assert "Start the coordinator again" in said.next_step
    assert [one.snapshot_id for one in copies.manifests(store)] == ["step-9"]


def test_what_is_no_epoch_in_a_store_is_none(store: Store, tmp_path: Path) -> None:
    for name in ("7", "x", str(MAX_EPOCH), "9" * 18, "9" * 30, "-3", ".tmp"):
        (tmp_path / "objects" / ".epochs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "objects" / ".epochs" / name).touch()
    assert copies.newest_epoch(store) == 7


def test_a_store_that_would_take_nothing_is_found_before_there_is_anything_to_upload(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    asked = 0
    names = store.names

    def refuse_twice(below: str = "") -> list[str]:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise refuse(Reason.STORAGE_FAILED, "Who are you?", next_step="Say it.")
        seen.wait(20)
        return names(below)

    store.names = refuse_twice
    seen = threading.Event()
    uploader = begin(store)
    wait(lambda: asked == 3)
    assert uploader.status().problem.next_step == "Say it."
    seen.set()
    wait(lambda: not uploader.status().HasField("problem"))
    make(root, "step-1")
    uploader.published()
    wait(lambda: uploader.status().uploaded_last == "step-1")
    assert asked == 3, "once it has answered it is not asked again"


async def test_a_store_that_does_not_answer_keeps_no_coordinator_from_starting(store: Store) -> None:
    release = threading.Event()

    def hang(below: str = "") -> list[str]:
        release.wait(20)
        return []

    store.names = hang
    assert await epoch_in_store(store, within_s=0.05) == 0
    release.set()

    def fail(below: str = "") -> list[str]:
        raise refuse(Reason.STORAGE_FAILED, "no")

    store.names = fail
    assert await epoch_in_store(store) == 0


def test_of_chunks_only_what_the_store_lacks_is_sent_and_a_damaged_one_is_named(
    root: SnapshotStore, store: Store, begin: Callable[..., Uploader]
) -> None:
    save(root, "a", [b"one", b"two"])
    uploader = begin(store)
    wait(lambda: idle(uploader))
    assert sum(key.startswith(".chunks/") for key in store.written) == 2
    store.written.clear()
    save(root, "b", [b"one", b"three"])
    uploader.published()
    wait(lambda: idle(uploader))
    assert sum(key.startswith(".chunks/") for key in store.written) == 1
    assert copies.verify(store, "b").manifest == root.load("b")
    save(root, "c", [b"one", b"four"])
    four = next(f for f in Chunks(root.root).all() if Chunks(root.root).path(f.sha256).read_bytes() == b"four")
    Chunks(root.root).path(four.sha256).write_bytes(b"fuor")
    uploader.published()
    wait(lambda: states(uploader, "c") == ["failed"])
    assert four.sha256 in uploader.message("c").problem.message
    assert [one.snapshot_id for one in copies.manifests(store)] == ["b", "a"]


def test_what_a_store_repeats_of_the_environment_is_not_repeated() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "AWS_SESSION_TOKEN": "FwoGZXIvYXdz",
        "HOME": "/root/home",
        "X_TOKEN": "a",
    }
    said = without_secrets("key wJalrXUtnFEMI with FwoGZXIvYXdz of /root/home at a", environ)
    assert said == "key *** with *** of /root/home at a"


# ---- a whole coordinator --------------------------------------------------------------------------------------------


async def test_a_save_is_uploaded_after_it_and_status_lists_and_history_say_so(bench: Bench, tmp_path: Path) -> None:
    bench.settings |= {"upload": str(tmp_path / "objects")}
    await bench.start()
    await bench.save()
    uploader = bench.running.uploader
    assert uploader is not None
    await until(lambda: uploader.status().uploaded_last == "step-1")
    status = await bench.status()
    assert (status.upload.url, status.upload.waiting) == (str(tmp_path / "objects"), 0)
    listed = (await bench.stub().ListSnapshots(pb.ListSnapshotsRequest(), timeout=5)).snapshots
    assert [one.upload.state for one in listed] == [pb.UPLOAD_STATE_UPLOADED]
    operations = (await bench.stub().ListOperations(pb.ListOperationsRequest(), timeout=5)).operations
    assert [one.snapshot.upload.state for one in operations] == [pb.UPLOAD_STATE_UPLOADED]
    from coordinator.history import History

    history = History(bench.root)
    await until(lambda: bool(history.list()[0].uploaded))
    assert history.list()[0].uploaded["url"] == str(tmp_path / "objects")
    assert history.list()[0].summary().snapshot.upload.state == pb.UPLOAD_STATE_UPLOADED
    pulled = tmp_path / "pulled"
    archive.pull(objects_at(str(tmp_path / "objects")), "step-1", pulled)
    assert SnapshotStore(pulled, "default").verify("step-1").manifest.snapshot_id == "step-1"


async def test_saves_go_on_and_nothing_unsent_is_pruned_while_the_store_is_away(bench: Bench, tmp_path: Path) -> None:
    """The directory above the store is not there, as that of a disk that is not mounted."""
    bench.settings |= {"upload": str(tmp_path / "mnt" / "objects"), "keep_last": 1, "keep_unsent": 2}
    await bench.start()
    for number in (1, 2, 3, 4):
        await bench.save(f"save-{number}", f"step-{number}")
    store = bench.running.operations.store
    await until(lambda: [m.snapshot_id for m in store.list().snapshots] == ["step-4", "step-3"])
    uploader = bench.running.uploader
    assert uploader is not None
    await until(lambda: any(one.HasField("problem") for one in uploader.status().snapshots))
    problem = next(one.problem for one in uploader.status().snapshots if one.HasField("problem"))
    assert "Mount it" in problem.next_step
    await bench.crash()
    (tmp_path / "mnt").mkdir()
    await bench.restart()
    again = bench.running.uploader
    assert again is not None
    await until(lambda: idle(again) and again.status().uploaded_last != "")
    kept = copies.manifests(objects_at(str(tmp_path / "mnt" / "objects")))
    assert [one.snapshot_id for one in kept] == ["step-4", "step-3"]


async def test_a_coordinator_on_an_empty_disk_counts_as_newer_than_all_that_the_store_has(
    bench: Bench, tmp_path: Path
) -> None:
    other = SnapshotStore(tmp_path / "lost", "default")
    make(other, "step-40", Publisher(other, 7))
    objects = objects_at(str(tmp_path / "objects"))
    archive.push(other, "step-40", objects)
    bench.settings |= {"upload": str(tmp_path / "objects")}
    await bench.start()
    assert bench.running.epoch == 8
    await bench.save("save-41", "step-41")
    uploader = bench.running.uploader
    assert uploader is not None
    await until(lambda: uploader.status().uploaded_last == "step-41")
    assert [one.snapshot_id for one in copies.manifests(objects)] == ["step-41", "step-40"]


@pytest.mark.parametrize("upload", ["s3://key:secret-word@bucket/x", "relative", "s3://"])
def test_a_store_that_is_none_is_refused_before_anything_starts_and_no_secret_is_repeated(
    upload: str, tmp_path: Path
) -> None:
    from coordinator.settings import load_settings

    error = refused(lambda: load_settings(environ={}, root=str(tmp_path), upload=upload))
    assert error.reason is Reason.INVALID_ARGUMENT
    assert "The setting upload as an argument is wrong: it names no object store." in str(error)
    assert "secret-word" not in str(error)


@pytest.mark.parametrize("upload", ["root", "root/snapshots", "."])
def test_root_and_store_do_not_hold_one_another(upload: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not hold one another"):
        Settings(root=str(tmp_path / "root"), upload=str((tmp_path / upload).resolve()))
