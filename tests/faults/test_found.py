"""What the fault matrix has found, each as a small test of its own."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import storage_error
from coordinator.wire.ids import SnapshotId
from tests.coordinator.conftest import Bench, until


async def test_a_name_that_was_reserved_and_never_begun_is_free_after_a_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "root")
    SnapshotStore(bench.root, "default").begin(SnapshotId("step-1"))  # then the coordinator died
    try:
        await bench.start()
        assert (await bench.save("save-1", "step-1"))[-1].saved.snapshot.snapshot_id == "step-1"
    finally:
        await bench.stop()


async def test_a_name_that_holds_something_is_not_freed_by_a_start(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "default")
    store.begin(SnapshotId("step-1"))
    (tmp_path / "snapshots" / "step-1" / "agent").mkdir()
    coordinator = await serve(Settings(root=str(tmp_path)))
    try:
        assert (tmp_path / "snapshots" / "step-1" / "agent").is_dir()
    finally:
        await coordinator.kill()


async def test_a_deletion_that_a_crash_cut_short_is_finished_by_the_next_start(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, "default")
    store.begin(SnapshotId("step-1"))
    half = tmp_path / "snapshots" / ".gone-step-1-0a1b2c3d"
    (tmp_path / "snapshots" / "step-1").rename(half)
    (half / "calls.jsonl").write_text("x")
    coordinator = await serve(Settings(root=str(tmp_path)))
    try:
        await until(lambda: not half.exists())
    finally:
        await coordinator.kill()


async def test_a_disk_that_cannot_be_tidied_keeps_no_coordinator_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: object) -> None:
        raise storage_error(OSError(errno.EIO, "Input/output error"), "removing something")

    monkeypatch.setattr(SnapshotStore, "forget_reserved", refused)
    monkeypatch.setattr(SnapshotStore, "finish_deletions", refused)
    coordinator = await serve(Settings(root=str(tmp_path)))
    await coordinator.kill()
