"""What has ended is read once; what has not is read again until it has, or was cut off."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any, cast

import pytest
from safepoint.v1 import manifest_pb2

from coordinator.history import History
from coordinator.history_record import Record
from coordinator.page import overview
from coordinator.page.past import SETTLED_S, Past
from coordinator.snapshot_reading import SnapshotReader
from coordinator.wire.folder import Folder
from tests.coordinator.conftest import Bench
from tests.page.records import record


class Disk:
    """A history of which each reading is counted."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.read: list[list[str]] = []

    def put(self, name: str, began_s: float, outcome: str, place: int = 0) -> None:
        place = place or round(began_s * 1000)
        self.records[name] = record(operation_id=name, began_s=began_s, outcome=outcome, place=place)

    def list(self, limit: int = 200, *, after: int = 0) -> list[Record]:
        found = sorted(self.records.values(), key=lambda r: -r.place)
        found = [r for r in found if r.place > after][:limit]
        self.read.append([r.operation_id for r in found])
        return found


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['operation_id']} {row['outcome']}".strip() for row in rows]


def a_past(disk: Disk, clock: list[float], limit: int = 100) -> Past:
    return Past(cast(History, disk), limit, lambda: clock[0])


def test_what_has_ended_is_read_once() -> None:
    disk, clock = Disk(), [0.0]
    for number in range(5):
        disk.put(f"op-{number}", 100 + number, "succeeded")
    past = a_past(disk, clock)
    assert names(past.summaries("")) == [f"op-{n} succeeded" for n in (4, 3, 2, 1, 0)]
    disk.put("op-5", 105, "")
    assert names(past.summaries("op-5"))[:2] == ["op-5", "op-4 succeeded"]
    assert disk.read[1:] == [["op-5"]]


def test_what_begins_after_the_clock_was_set_back_is_listed_and_first() -> None:
    disk, clock = Disk(), [0.0]
    disk.put("op-0", 5000, "succeeded")
    past = a_past(disk, clock)
    past.summaries("")
    disk.put("op-1", 1400, "succeeded", place=5_000_001)
    assert names(past.summaries("")) == ["op-1 succeeded", "op-0 succeeded"]
    past.summaries("")
    assert disk.read[1:] == [["op-1"], []], "and it is read once as well"


def test_what_runs_is_read_again_until_it_has_ended() -> None:
    disk, clock = Disk(), [0.0]
    disk.put("op-0", 100, "succeeded")
    disk.put("op-1", 101, "")
    past = a_past(disk, clock)
    past.summaries("op-1")
    clock[0] += 1000
    past.summaries("op-1")
    disk.put("op-1", 101, "aborted")
    clock[0] += 1
    assert names(past.summaries("")) == ["op-1 aborted", "op-0 succeeded"], "its last line came after it had ended"
    past.summaries("")
    assert disk.read == [["op-1", "op-0"], ["op-1"], ["op-1"], []]


def test_what_was_cut_off_is_not_read_for_ever() -> None:
    disk, clock = Disk(), [0.0]
    disk.put("op-0", 100, "")
    disk.put("op-1", 101, "succeeded")
    past = a_past(disk, clock)
    past.summaries("")
    past.summaries("")
    assert disk.read[-1] == ["op-1", "op-0"]
    clock[0] += SETTLED_S
    assert names(past.summaries("")) == ["op-1 succeeded", "op-0"]
    assert disk.read[-1] == []


def test_the_oldest_go_when_there_are_too_many() -> None:
    disk, clock = Disk(), [0.0]
    past = a_past(disk, clock, limit=3)
    for number in range(6):
        disk.put(f"op-{number}", 100 + number, "succeeded")
        past.summaries("")
    assert names(past.summaries("")) == ["op-5 succeeded", "op-4 succeeded", "op-3 succeeded"]


async def test_a_snapshot_that_was_listed_is_not_read_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 500 it took four seconds after each save, on a busy machine."""
    await bench.start()
    for number in range(3):
        await bench.save(f"save-{number}", f"step-{number}")
    reader, known = SnapshotReader(str(bench.root), "default"), dict[str, manifest_pb2.SnapshotManifest]()
    before = await asyncio.to_thread(overview.listing, reader, known)
    await bench.save("save-3", "step-3")
    await asyncio.to_thread(shutil.rmtree, bench.root / "snapshots" / "step-0")
    read: list[str] = []
    manifest = SnapshotReader._manifest

    def counted(self: SnapshotReader, directory: Folder, snapshot_id: str) -> manifest_pb2.SnapshotManifest:
        read.append(snapshot_id)
        return manifest(self, directory, snapshot_id)

    monkeypatch.setattr(SnapshotReader, "_manifest", counted)
    after = await asyncio.to_thread(overview.listing, reader, known)
    assert read == ["step-3"]
    assert [one["snapshot_id"] for one in after["snapshots"]] == ["step-3", "step-2", "step-1"]
    assert after["snapshots"][1:] == before["snapshots"][:2]
    assert sorted(known) == ["step-1", "step-2", "step-3"]


async def test_a_part_that_is_missing_is_found_in_those_that_are_shown(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.start()
    for number in range(3):
        await bench.save(f"save-{number}", f"step-{number}")
    for name in ("step-0", "step-2"):
        await asyncio.to_thread(shutil.rmtree, bench.root / "snapshots" / name / "agent-0")
    reader = SnapshotReader(str(bench.root), "default")
    monkeypatch.setattr(overview, "MAX_SNAPSHOTS", 2)
    found = await asyncio.to_thread(overview.listing, reader, {})
    assert list(found["invalid"]) == ["step-2"]
    assert [one["snapshot_id"] for one in found["snapshots"]] == ["step-1", "step-0"]
    assert list((await asyncio.to_thread(reader.list)).invalid) == ["step-0", "step-2"], "whoever asks for all has all"
