"""Snapshots that come back from the store into the root of a coordinator that runs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import archive, copies
from coordinator.publication import Publisher
from coordinator.retention import Retention
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.objects import Objects, objects_at
from tests.coordinator.conftest import Bench, unary, until
from tests.coordinator.test_snapshots import contents, make


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "objects")


@pytest.fixture
def objects(url: str) -> Objects:
    return objects_at(url)


@pytest.fixture
async def other(tmp_path: Path, url: str) -> AsyncIterator[Bench]:
    """Another machine, with an empty disk and the same store."""
    made = Bench(tmp_path / "other")
    made.settings["upload"] = url
    yield made
    await made.stop()


def pushed(tmp_path: Path, objects: Objects, name: str, epoch: int = 1, job: str = "default") -> SnapshotStore:
    elsewhere = SnapshotStore(tmp_path / f"elsewhere-{job}", job)
    make(elsewhere, name, Publisher(elsewhere, epoch))
    archive.push(elsewhere, name, objects)
    return elsewhere


async def fetch(bench: Bench, snapshot_id: str = "", url: str = "") -> pb.FetchSnapshotResponse:
    request = pb.FetchSnapshotRequest(snapshot_id=snapshot_id, url=url)
    answer: pb.FetchSnapshotResponse = await unary(bench.stub().FetchSnapshot(request, timeout=20))
    return answer


async def refusal(bench: Bench, snapshot_id: str = "", url: str = "") -> SafepointError:
    with pytest.raises(SafepointError) as caught:
        await fetch(bench, snapshot_id, url)
    return caught.value


async def test_what_a_lost_machine_has_uploaded_is_restored_on_another_one(
    bench: Bench, other: Bench, url: str
) -> None:
    bench.settings["upload"] = url
    await bench.start()
    for number in (1, 2):
        await bench.save(f"save-{number}", f"step-{number}")
    uploader = bench.running.uploader
    assert uploader is not None
    await until(lambda: not uploader.status().looking and not uploader.status().waiting)
    await bench.crash()
    await other.start()
    brought = await fetch(other, url=url)
    assert (brought.snapshot.snapshot_id, brought.found) == ("step-2", False)
    assert (await fetch(other, "step-2")).found
    assert (await other.status()).latest_snapshot_id == "step-2"
    await other.restore(snapshot_id="step-2", resume=True)
    assert other.all_open()
    await other.save("save-3", "step-3")
    again = other.running.uploader
    assert again is not None
    await until(lambda: again.status().uploaded_last == "step-3")
    assert [one.snapshot_id for one in copies.manifests(objects_at(url))] == ["step-3", "step-2", "step-1"]
    listed = other.running.operations.store.list().snapshots
    assert [one.snapshot_id for one in listed] == ["step-3", "step-2"], (
        "what is saved now is newer than what was fetched"
    )


async def test_nothing_is_fetched_from_elsewhere(bench: Bench, other: Bench, url: str) -> None:
    await bench.start_coordinator()
    none = await refusal(bench, "step-1", url)
    assert none.reason is Reason.INVALID_ARGUMENT
    assert "--upload" in none.problem.next_step
    await other.start_coordinator()
    elsewhere = await refusal(other, "step-1", "http://169.254.169.254/latest")
    assert elsewhere.reason is Reason.INVALID_ARGUMENT
    assert url in elsewhere.problem.message
    assert "snapshots pull" in elsewhere.problem.next_step


async def test_what_would_count_as_newer_than_what_is_saved_is_not_brought(
    other: Bench, objects: Objects, tmp_path: Path
) -> None:
    await other.start_coordinator()
    pushed(tmp_path, objects, "step-9", epoch=9)
    error = await refusal(other, "step-9")
    assert error.reason is Reason.STALE_EPOCH
    assert "Start the coordinator again" in error.problem.next_step
    await other.crash()
    await other.restart()
    assert other.running.epoch == 10
    assert not (await fetch(other, "step-9")).found


@pytest.mark.parametrize("snapshot_id", ["", "step-1"])
async def test_a_copy_that_is_not_there_is_not_found(
    other: Bench, objects: Objects, snapshot_id: str, url: str
) -> None:
    os.mkdir(url)
    await other.start_coordinator()
    assert (await refusal(other, snapshot_id)).reason is Reason.SNAPSHOT_NOT_FOUND


async def test_a_copy_of_another_job_or_a_damaged_one_or_another_of_the_name_changes_nothing(
    other: Bench, objects: Objects, tmp_path: Path, url: str
) -> None:
    await other.start_coordinator()
    pushed(tmp_path, objects, "step-1", job="job-9")
    pushed(tmp_path, objects, "step-2")
    pushed(tmp_path, objects, "step-3")
    victim = Path(url) / "step-2" / "agent" / "state.bin"
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    mine = other.running.operations.store
    make(mine, "step-3", Publisher(mine, 1))
    before = contents(mine.root / "snapshots")
    assert (await refusal(other, "step-1")).reason is Reason.SNAPSHOT_FOREIGN
    damaged = await refusal(other, "step-2")
    assert damaged.reason is Reason.SNAPSHOT_CORRUPT
    assert "step-2/agent/state.bin is damaged" in damaged.problem.message
    assert (await refusal(other, "step-3")).reason is Reason.SNAPSHOT_EXISTS
    assert contents(mine.root / "snapshots") == before


class Held:
    """A store that gives the ledger when it is told to."""

    def __init__(self, objects: Objects) -> None:
        self._objects, self.url = objects, objects.url
        self.names, self.size, self.put_new = objects.names, objects.size, objects.put_new
        self.reached, self.release = threading.Event(), threading.Event()

    def chunks(self, key: str) -> Iterator[bytes]:
        if key.endswith("step-1/ledger.jsonl"):
            self.reached.set()
            self.release.wait(20)
        return self._objects.chunks(key)


async def test_a_prune_never_meets_a_fetch_and_all_that_ask_for_it_wait_for_one_copy(
    other: Bench, objects: Objects, tmp_path: Path
) -> None:
    await other.start_coordinator()
    pushed(tmp_path, objects, "step-1")
    operations = other.running.operations
    assert operations.fetching is not None
    held = Held(objects)
    operations.fetching._objects = held
    first, second = (asyncio.create_task(fetch(other, "step-1")) for _ in range(2))
    await until(held.reached.is_set)
    async with operations.storage_lock:
        assert (await operations.housekeeping.prune(Retention(1))).deleted == ()
    await operations.housekeeping.sweep()
    with pytest.raises(SafepointError) as caught:
        await other.save("save-1", "step-1")
    assert caught.value.reason in (Reason.SNAPSHOT_EXISTS, Reason.TOPOLOGY_INVALID)
    first.cancel()
    held.release.set()
    assert not (await second).found
    assert operations.store.verify("step-1").manifest.snapshot_id == "step-1"


async def test_a_fetch_that_a_kill_has_cut_short_is_swept_and_can_be_repeated(
    other: Bench, objects: Objects, tmp_path: Path
) -> None:
    await other.start_coordinator()
    pushed(tmp_path, objects, "step-1")
    half = other.running.operations.store
    await other.crash()
    half.root.joinpath("snapshots", "step-1", "agent").mkdir(parents=True)
    half.root.joinpath("snapshots", "step-1", "agent", "state.bin").write_bytes(b"half")
    await other.restart()
    await until(lambda: not half.root.joinpath("snapshots", "step-1").exists())
    assert not (await fetch(other, "step-1")).found


async def test_the_newest_is_fetched_with_a_word_of_those_too_damaged_to_be_taken(
    other: Bench, tmp_path: Path, url: str, objects: Objects
) -> None:
    pushed(tmp_path, objects, "step-1")
    (Path(url) / "step-2").mkdir()
    (Path(url) / "step-2" / "manifest.json").write_bytes(b"no manifest")
    await other.start()
    brought = await fetch(other)
    assert brought.snapshot.snapshot_id == "step-1"
    assert list(brought.skipped) == ["step-2"]
    assert "manifest.json" in brought.skipped["step-2"]
    assert not (await fetch(other, "step-1")).skipped, "it was named"
