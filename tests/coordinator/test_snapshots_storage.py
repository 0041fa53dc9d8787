"""What a file system may do to a snapshot root: lack what we need, be full, show late what another machine wrote."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.publication import SEEN_WITHIN_S, Publisher
from coordinator.snapshots import SnapshotStore
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, SafepointError, refuse
from participant_shims import export
from participant_shims.export import until_seen
from tests.coordinator.test_snapshots import make, refused


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["link", "rename", "mkdir"])
def test_a_file_system_that_cannot_hold_snapshots_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    SnapshotStore(tmp_path, "job-1")

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, broken)
    error = refused(SnapshotStore, tmp_path, "job-1")
    assert error.reason is Reason.STORAGE_FAILED
    assert os.strerror(code) in error.problem.message


def test_a_file_system_whose_link_replaces_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SnapshotStore(tmp_path, "job-1")

    def link(src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int, **_: Any) -> None:
        os.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "link", link)
    error = refused(SnapshotStore, tmp_path, "job-1")
    assert error.reason is Reason.STORAGE_FAILED
    assert "replaced" in error.problem.message


def test_the_probe_leaves_nothing_and_removes_what_one_before_left(tmp_path: Path) -> None:
    (tmp_path / ".probe-ab").mkdir()
    (tmp_path / ".probe-ab" / "once").write_text("1")
    SnapshotStore(tmp_path, "job-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner.json", "snapshots"]


def test_a_start_beside_us_may_take_our_probe_for_a_leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Directory.write_new

    def write_new(self: Directory, name: str, data: Any) -> Any:
        written = real(self, name, data)
        if name == "once":
            shutil.rmtree(self.path)
        return written

    monkeypatch.setattr(Directory, "write_new", write_new)
    SnapshotStore(tmp_path, "job-1")


def test_a_full_disk_does_not_keep_a_coordinator_from_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(tmp_path, "job-1")
    make(store, "step-1")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Directory, "_write", full)
    monkeypatch.setattr(os, "mkdir", _only_what_exists(os.mkdir))
    again = SnapshotStore(tmp_path, "job-1")
    again.verify("step-1")
    assert refused(SnapshotStore, tmp_path, "job-2").reason is Reason.SNAPSHOT_FOREIGN


def _only_what_exists(real: Any) -> Any:
    def mkdir(path: str | Path, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if str(path).startswith(".probe-"):
            raise OSError(errno.ENOSPC, "full")
        real(path, mode, dir_fd=dir_fd)

    return mkdir


@pytest.mark.parametrize("hidden", ["the directory", "the manifest"])
def test_parts_that_another_machine_wrote_are_waited_for_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    store = SnapshotStore(tmp_path, "job-1")
    slept: list[float] = []
    publisher = Publisher(store, 1, sleep=slept.append)
    real = Directory.names

    late = "agent" if hidden == "the directory" else "manifest.json"

    def names(self: Directory) -> list[str]:
        return [name for name in real(self) if name != late or len(slept) >= 3]

    monkeypatch.setattr(Directory, "names", names)
    make(store, "step-1", publisher)
    assert len(slept) == 3
    store.verify("step-1")


def test_a_part_that_never_comes_is_waited_for_within_bounds_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SnapshotStore(tmp_path, "job-1")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        shutil.rmtree(tmp_path / "snapshots" / "step-1" / "agent", ignore_errors=True)

    publisher = Publisher(store, 1, sleep=sleep)

    def unseen(*_: object) -> set[str]:
        return set()

    monkeypatch.setattr(Publisher, "_seen", unseen)
    error = refused(make, store, "step-1", publisher)
    assert error.reason is Reason.SNAPSHOT_CORRUPT
    assert "missing" in error.problem.message
    assert error.problem.participant_id == "agent"
    assert sum(slept) == pytest.approx(SEEN_WITHIN_S, abs=0.2)


async def test_a_shim_looks_again_for_a_directory_that_the_coordinator_has_just_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(export.asyncio, "sleep", sleep)
    answers: list[Any] = [refuse(Reason.SNAPSHOT_NOT_FOUND, "not yet")] * 3 + ["there"]

    async def look() -> str:
        found = answers.pop(0)
        if isinstance(found, SafepointError):
            raise found
        return str(found)

    assert await until_seen(look) == "there"
    assert len(slept) == 3
    answers[:] = [refuse(Reason.SNAPSHOT_NOT_FOUND, "never")] * 1000
    with pytest.raises(SafepointError, match="never"):
        await until_seen(look)
    assert sum(slept[3:]) == pytest.approx(export.SEEN_WITHIN_S, abs=0.2)
    answers[:] = [refuse(Reason.STORAGE_FULL, "at once")]
    with pytest.raises(SafepointError, match="at once"):
        await until_seen(look)
