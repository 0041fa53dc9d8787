"""What a prune keeps and why: the newest, steps and times, pins, what is in use; and what it never touches."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import archive, pruning
from coordinator.client import AsyncClient
from coordinator.journal import Journal
from coordinator.publication import Publisher
from coordinator.retention import Dated, Retention, plan, step_of
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import SnapshotId
from coordinator.wire.manifest_file import SNAPSHOT_KIND, encode
from coordinator.wire.objects import objects_at
from tests.coordinator.conftest import Bench, unary, until
from tests.coordinator.test_snapshots import make, refused


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "root", "job-1")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "root" / "snapshots").iterdir())


def steps(*numbers: int) -> list[Dated]:
    """Newest first, one a minute."""
    return [Dated(f"step-{n}", 60.0 * place, n) for place, n in enumerate(numbers)][::-1]


# ---- the decision, without a disk ---------------------------------------------------------------------------------------


def test_the_newest_stay() -> None:
    found = plan(steps(0, 10, 20, 30), Retention(2), {})
    assert found.kept == {"step-30": "it is the newest", "step-20": "it is one of the newest 2"}
    assert found.doomed == ("step-10", "step-0")


def test_the_oldest_of_each_so_many_steps_stays_whatever_steps_a_trainer_saves_at() -> None:
    assert plan(steps(0, 50, 100, 150, 200, 250), Retention(1, keep_every=100), {}).doomed == ("step-150", "step-50")
    sevens = plan(steps(7, 14, 21, 28, 35), Retention(1, keep_every=10), {})
    assert sevens.doomed == ("step-28",)  # one in each ten
    assert "steps 10 to 19" in sevens.kept["step-14"]
    assert plan([Dated("a", 1.0), Dated("b", 0.0)], Retention(1, keep_every=10), {}).doomed == ("b",)


def test_the_oldest_of_each_so_much_time_stays() -> None:
    assert plan(steps(0, 1, 2, 3, 4), Retention(1, keep_interval_s=120), {}).doomed == ("step-3", "step-1")


def test_what_is_pinned_in_use_or_the_last_that_can_be_restored_stays_and_every_reason_is_said() -> None:
    found = plan(
        steps(0, 1, 2, 3), Retention(1, keep_every=4), {"step-0": "figure 3", "gone": "?"}, ("step-1",), ("step-2",)
    )
    assert found.doomed == ()
    assert found.kept["step-0"] == "it is the oldest of steps 0 to 3; it is pinned: figure 3"
    assert found.kept["step-1"] == "an operation uses it"
    assert found.kept["step-2"] == "no newer one can be restored"


@pytest.mark.parametrize("wrong", [(0, 0, 0.0), (-1, 0, 0.0), (1, -1, 0.0), (1, 0, -1.0), (1, 0, float("nan"))])
def test_a_retention_that_keeps_nothing_or_makes_no_sense_is_refused(wrong: tuple[int, int, float]) -> None:
    assert refused(Retention, *wrong).reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(("text", "step"), [("40", 40), ("", None), ("-1", None), ("4.5", None), ("\u0664", None)])
def test_a_step_is_an_integer_or_nothing(text: str, step: int | None) -> None:
    assert step_of({"step": text}) == step
    assert step_of({}) is None


@given(
    ages=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 10_000)), max_size=30, unique=True),
    last=st.integers(1, 5), every=st.integers(0, 50), interval=st.sampled_from([0.0, 0.5, 60.0, 1e4]),
    pinned=st.sets(st.integers(0, 29)),
)  # fmt: skip
def test_a_second_prune_deletes_nothing_and_the_newest_always_stays(
    ages: list[tuple[int, int]], last: int, every: int, interval: float, pinned: set[int]
) -> None:
    found = [Dated(f"s-{n}", time, step) for n, (step, time) in enumerate(sorted(ages, reverse=True))]
    pins = {f"s-{n}": "x" for n in pinned}
    retention = Retention(last, every, interval)
    once = plan(found, retention, pins)
    assert sorted([*once.kept, *once.doomed]) == sorted(one.snapshot_id for one in found)
    assert all(once.kept.values())
    assert {one.snapshot_id for one in found[:last]} <= set(once.kept)
    assert not pins.keys() & set(once.doomed)
    left = [one for one in found if one.snapshot_id in once.kept]
    assert plan(left, retention, pins).doomed == ()


# ---- on a disk ----------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_what_is_in_use_and_takes_leavings(store: SnapshotStore, tmp_path: Path) -> None:
    publisher = Publisher(store, 1)
    for n in range(4):
        make(store, f"step-{n}", publisher)
    store.begin(SnapshotId("failed"))
    store.begin(SnapshotId("being-saved"))
    folder = tmp_path / "root" / "snapshots"
    damaged = folder / "step-1" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    in_use = ("step-0", "being-saved")
    dry = pruning.prune(store, Retention(1), in_use, dry_run=True)
    assert dry.deleted == ("step-2", "failed")
    assert dry.size_bytes > 0
    assert len(list(folder.iterdir())) == 6
    assert pruning.prune(store, Retention(1), in_use) == dry
    assert sorted(p.name for p in folder.iterdir()) == ["being-saved", "step-0", "step-1", "step-3"]


def test_a_deletion_that_was_interrupted_leaves_no_snapshot_and_is_finished(
    store: SnapshotStore, tmp_path: Path
) -> None:
    make(store, "step-1")
    folder = tmp_path / "root" / "snapshots"
    (folder / "step-1").rename(folder / ".gone-step-1-abcd")
    assert store.list().snapshots == ()
    assert store.list().invalid == {}
    pruning.prune(store, Retention(1))
    assert list(folder.iterdir()) == []


def test_a_pin_outlives_the_coordinator_and_every_prune_until_it_is_taken_away(
    store: SnapshotStore, tmp_path: Path
) -> None:
    publisher = Publisher(store, 1)
    for n in range(3):
        make(store, f"step-{n}", publisher)
    pruning.pin(store, "step-0", "figure 2")
    pruning.pin(store, "step-0", "figure 3")
    again = SnapshotStore(tmp_path / "root", "job-1")
    assert pruning.pins(again) == {"step-0": "figure 3"}
    assert pruning.prune(again, Retention(1)).deleted == ("step-1",)
    again.verify("step-0")
    assert pruning.unpin(again, "step-0") == "figure 3"
    assert pruning.unpin(again, "step-0") == ""
    assert pruning.prune(again, Retention(1)).deleted == ("step-0",)


@pytest.mark.parametrize("reason", ["", "  ", "x" * 501])
def test_a_pin_needs_a_snapshot_and_a_reason(store: SnapshotStore, reason: str) -> None:
    make(store, "step-1")
    assert refused(pruning.pin, store, "step-1", reason).reason is Reason.INVALID_ARGUMENT
    assert refused(pruning.pin, store, "step-2", "why").reason is Reason.SNAPSHOT_NOT_FOUND
    assert refused(pruning.pin, store, "../step-1", "why").reason is Reason.MALFORMED_ID
    assert refused(pruning.unpin, store, "../step-1").reason is Reason.MALFORMED_ID
    assert pruning.pins(store) == {}


@pytest.mark.parametrize("damage", ["huge", "a link", "a directory"])
def test_a_pin_that_cannot_be_read_still_pins(store: SnapshotStore, tmp_path: Path, damage: str) -> None:
    publisher = Publisher(store, 1)
    make(store, "step-0", publisher)
    make(store, "step-1", publisher)
    pruning.pin(store, "step-0", "why")
    file = tmp_path / "root" / "pins" / "step-0"
    if damage == "huge":
        file.write_bytes(b"x" * 10_000)
    else:
        file.unlink()
        file.mkdir() if damage == "a directory" else file.symlink_to("/etc/passwd")
    found = pruning.prune(store, Retention(1))
    assert found.deleted == ()
    assert "cannot be read" in found.kept["step-0"]
    assert "root:" not in found.kept["step-0"]


def test_without_a_look_at_the_pins_nothing_is_deleted(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(store, 1)
    for n in range(2):
        make(store, f"step-{n}", publisher)
    pruning.pin(store, "step-0", "why")
    real = Directory.names

    def broken(self: Directory) -> list[str]:
        if self.path.name == "pins":
            raise storage_error(OSError(5, "Input/output error"), "listing")
        return real(self)

    monkeypatch.setattr(Directory, "names", broken)
    assert refused(pruning.prune, store, Retention(1)).reason is Reason.STORAGE_FAILED
    assert names(tmp_path) == ["step-0", "step-1"]


def test_when_no_newer_one_verifies_the_newest_that_does_is_spared(store: SnapshotStore, tmp_path: Path) -> None:
    publisher = Publisher(store, 1)
    for n in range(4):
        make(store, f"step-{n}", publisher)
    for n in (2, 3):  # the same size: no list sees it
        file = tmp_path / "root" / "snapshots" / f"step-{n}" / "agent" / "state.bin"
        file.write_bytes(file.read_bytes().replace(b"s", b"S"))
    spare = pruning.spared(store, Retention(1))
    assert spare == {"step-1"}
    found = pruning.prune(store, Retention(1), spare=spare)
    assert found.deleted == ("step-2", "step-0")
    assert found.kept["step-1"] == "no newer one can be restored"
    assert pruning.spared(store, Retention(2)) == set(), "nothing would be deleted, so nothing is read"


def test_the_last_whole_snapshot_is_spared_also_when_its_pin_goes_before_the_deletion(
    store: SnapshotStore, tmp_path: Path
) -> None:
    publisher = Publisher(store, 1)
    for n in range(2):
        make(store, f"step-{n}", publisher)
    pruning.pin(store, "step-0", "figure 3")
    file = tmp_path / "root" / "snapshots" / "step-1" / "agent" / "state.bin"
    file.write_bytes(file.read_bytes().replace(b"s", b"S"))
    spare = pruning.spared(store, Retention(1))  # read before the lock
    pruning.unpin(store, "step-0")
    assert pruning.prune(store, Retention(1), spare=spare).deleted == ()
    store.verify("step-0")


def test_leavings_of_a_crash_are_swept_and_can_never_be_published(store: SnapshotStore, tmp_path: Path) -> None:
    made = make(store, "step-1")
    for name in ("left", "saving"):
        store.begin(SnapshotId(name))
    (tmp_path / "root" / "snapshots" / "step-9").mkdir()
    (tmp_path / "root" / "snapshots" / ".gone-step-8-ab").mkdir()
    assert pruning.sweep(store, {"saving"}) == ["left", "step-9"]
    assert names(tmp_path) == ["saving", "step-1"]
    made.snapshot_id = "left"
    with pytest.raises(SafepointError):
        store.publish(made)
    store.verify("step-1")


# ---- through the coordinator --------------------------------------------------------------------------------------------


async def test_settings_prune_after_each_save_and_a_caller_who_says_nothing_keeps_what_they_keep(bench: Bench) -> None:
    bench.settings |= {"keep_last": 10, "keep_every": 2}
    await bench.start()
    for n in range(4):
        request = pb.SaveRequest(operation_id=f"save-{n}", snapshot_id=f"step-{n}", metadata={"step": str(n)})
        async for _ in bench.stub().Save(request, timeout=20):
            pass
    async with AsyncClient(bench.running.address) as client:
        assert (await client.pin("step-1", "why")).pin_reason == "why"
        assert {s.snapshot_id: s.pin_reason for s in (await client.snapshots()).published}["step-1"] == "why"
        dry = await client.prune(1, dry_run=True)
        assert list(dry.deleted) == []
        assert dry.kept["step-0"] == "it is the oldest of steps 0 to 1"
        assert list((await client.prune(1, keep_every=0, dry_run=True)).deleted) == ["step-2", "step-0"]
        assert list((await client.prune(1, keep_every=0, keep_interval=9e8, dry_run=True)).deleted) == ["step-2"]
        assert await client.unpin("step-1") == "why"
        assert await client.unpin("step-1") == ""
        assert list((await client.prune(1)).deleted) == ["step-1"]


async def test_a_start_sweeps_what_a_crash_left(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    await bench.crash()
    (bench.root / "snapshots" / "half-made").mkdir()
    await bench.restart()
    listed = await unary(bench.stub().ListSnapshots(pb.ListSnapshotsRequest(), timeout=5))
    for _ in range(200):
        if not listed.invalid:
            break
        listed = await unary(bench.stub().ListSnapshots(pb.ListSnapshotsRequest(), timeout=5))
    assert [s.snapshot_id for s in listed.snapshots] == ["step-1"]
    assert dict(listed.invalid) == {}


# ---- snapshots of another root, and coordinators that were replaced -----------------------------------------------------


async def test_what_was_pulled_is_never_newer_than_what_is_saved_afterwards(bench: Bench, tmp_path: Path) -> None:
    elsewhere = SnapshotStore(tmp_path / "elsewhere", "default")
    make(elsewhere, "old", Publisher(elsewhere, 5))  # its coordinator was started more often than ours
    (tmp_path / "objects").mkdir()
    objects = objects_at(f"file://{tmp_path / 'objects'}")
    archive.push(elsewhere, "old", objects)
    archive.pull(objects, "old", bench.root)
    bench.settings["keep_last"] = 2
    await bench.start()
    assert bench.running.epoch == 6
    await bench.save("save-0", "new-0", without=["agent"])  # it was part of "old"
    for n in (1, 2):
        await bench.save(f"save-{n}", f"new-{n}")
    store = SnapshotStore(bench.root, "default")
    await until(lambda: [one.snapshot_id for one in store.list().snapshots] == ["new-2", "new-1"])


async def test_what_was_put_beside_a_running_coordinator_does_not_delete_what_was_just_saved(bench: Bench) -> None:
    await bench.start()
    store = SnapshotStore(bench.root, "default")
    make(store, "old", Publisher(store, 50))
    await bench.save()
    async with AsyncClient(bench.running.address) as client:
        answer = await client.prune(1)
    assert answer.kept == {"old": "it is the newest", "step-1": "it was saved last"}
    await bench.crash()
    await bench.restart()
    assert bench.running.epoch == 51
    await bench.save("save-2", "step-2")
    assert store.list().snapshots[0].snapshot_id == "step-2"


def test_the_epochs_of_a_root_are_counted_from_its_snapshots_too(store: SnapshotStore, tmp_path: Path) -> None:
    assert store.newest_epoch() == 0
    make(store, "step-1", Publisher(store, 7))
    make(store, "step-2", Publisher(store, 9))
    store.begin(SnapshotId("step-3"))
    damaged = tmp_path / "root" / "snapshots" / "step-2" / "manifest.json"
    assert store.newest_epoch() == 9
    for number in (8, 9):  # with and without a log of its own
        journal = Journal(store.directory("coordinator"), {"a snapshot": store.newest_epoch()})
        assert journal.epoch == number + 2
        journal.close()
    damaged.write_bytes(b"")
    assert store.newest_epoch() == 7
    with pytest.raises(SafepointError):
        make(store, "step-4", Publisher(store, 10**18))
    forged = store.load("step-1")
    forged.snapshot_id, forged.coordinator_epoch = "step-4", 10**18
    (tmp_path / "root" / "snapshots" / "step-4" / "manifest.json").write_bytes(encode(SNAPSHOT_KIND, forged))
    assert store.newest_epoch() == 7, "nothing could be newer than that"
    assert "is no epoch" in store.list().invalid["step-4"]


async def test_a_coordinator_that_was_replaced_deletes_nothing_and_pins_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.server.FIT_EVERY_S", 60.0)
    await bench.start()
    for n in range(2):
        await bench.save(f"save-{n}", f"step-{n}")
    await unary(bench.stub().PinSnapshot(pb.PinSnapshotRequest(snapshot_id="step-0", reason="why"), timeout=5))
    store = SnapshotStore(bench.root, "default")
    newer = Journal(store.directory("coordinator"))
    store.begin(SnapshotId("in-progress"))
    stub = bench.stub()
    for call in (
        stub.PruneSnapshots(pb.PruneSnapshotsRequest(keep_last=1), timeout=5),
        stub.PinSnapshot(pb.PinSnapshotRequest(snapshot_id="step-1", reason="why"), timeout=5),
        stub.UnpinSnapshot(pb.UnpinSnapshotRequest(snapshot_id="step-0"), timeout=5),
    ):
        with pytest.raises(SafepointError) as caught:
            await unary(call)
        assert caught.value.reason is Reason.STALE_EPOCH
    operations = bench.running.operations
    await operations.housekeeping.sweep()
    await operations.housekeeping.discard(SnapshotId("in-progress"))
    newer.close()
    assert sorted(path.name for path in (bench.root / "snapshots").iterdir()) == ["in-progress", "step-0", "step-1"]
    assert pruning.pins(store) == {"step-0": "why"}


@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO, errno.EACCES])
async def test_what_a_failed_save_left_goes_with_the_next_save_once_the_disk_takes_changes_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    await bench.start()
    store = bench.running.operations.store
    store.begin(SnapshotId("failed"))
    store.begin(SnapshotId("step-1"))

    def fails(_: SnapshotStore, snapshot_id: str) -> None:
        raise storage_error(OSError(error, "it fails"), f"removing {snapshot_id}")

    housekeeping = bench.running.operations.housekeeping
    with monkeypatch.context() as failing:
        failing.setattr(SnapshotStore, "remove", fails)
        for name in ("failed", "step-1"):
            await housekeeping.discard(SnapshotId(name))
    assert set(store.list().invalid) == {"failed", "step-1"}
    await housekeeping.discard(SnapshotId("step-1"))  # as when it is saved again: nothing is kept in mind of that name
    await bench.save("save-1", "step-1")
    await until(lambda: not store.list().invalid)
    assert [found.snapshot_id for found in store.list().snapshots] == ["step-1"]


def test_one_that_is_replaced_while_it_prunes_deletes_no_more(store: SnapshotStore, tmp_path: Path) -> None:
    publisher = Publisher(store, 1)
    for n in range(4):
        make(store, f"step-{n}", publisher)
    asked: list[None] = []

    def still_ours() -> None:
        asked.append(None)
        if len(asked) == 2:
            raise refuse(Reason.STALE_EPOCH, "replaced")

    with pytest.raises(SafepointError):
        pruning.prune(store, Retention(1), still_ours=still_ours)
    assert names(tmp_path) == ["step-0", "step-1", "step-3"]
    for name in ("left-1", "left-2"):
        store.begin(SnapshotId(name))
    asked.clear()
    with pytest.raises(SafepointError):
        pruning.sweep(store, (), still_ours)
    assert names(tmp_path) == ["left-2", "step-0", "step-1", "step-3"]
