"""A root that somebody has moved, emptied or damaged beneath a coordinator: it ends or heals, and says which and why."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from coordinator.alone import require_alone
from coordinator.history_files import OnDisk
from coordinator.journal import ADDRESS_NAME, Journal
from coordinator.journal_file import ACCEPT, Entry
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError
from coordinator.wire.ids import OperationId

BEGUN: dict[str, Any] = {"digest": "", "metadata": {}}


def _zeros(record: Path) -> None:
    record.write_bytes(bytes(70_000))


def _garbage(record: Path) -> None:
    record.write_text("{")


def _link(record: Path) -> None:
    record.unlink()
    record.symlink_to(record.with_name("elsewhere"))


def _second_name(record: Path) -> None:
    record.unlink()
    record.with_name("other").write_text("x")
    record.hardlink_to(record.with_name("other"))


def _empty(file: Path) -> None:
    file.write_bytes(b"")


async def started(root: Path, job_id: str = "default") -> Coordinator:
    """One that is looked at by hand: its own looks come every two seconds."""
    return await serve(Settings(root=str(root), job_id=job_id))


async def test_a_coordinator_whose_directory_was_removed_ends_and_says_how_the_next_one_is_accepted(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    first = await started(root)
    try:
        shutil.rmtree(root / "coordinator")
        unfit = await first._why_unfit()
        assert isinstance(unfit, Problem)
        assert f"{root / 'coordinator'} was removed" in unfit.message
        assert f"epoch-{first.epoch}" in unfit.advice
    finally:
        await first.kill()


@pytest.mark.parametrize("damage", [_zeros, _garbage, _link, _second_name])
async def test_an_address_that_cannot_be_read_counts_as_in_use_until_it_is_healed_by_whoever_runs(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    running = await started(tmp_path)
    record = tmp_path / "coordinator" / ADDRESS_NAME
    try:
        whole = record.read_bytes()
        damage(record)
        with pytest.raises(Refused, match="may run on") as raised:
            require_alone(tmp_path)
        assert raised.value.reason is Reason.SNAPSHOT_IN_USE
        assert str(record) in raised.value.problem.next_step
        assert await running._why_unfit() is None
        assert not record.is_symlink()
        assert record.read_bytes() == whole
        damage_again = damage if damage is not _second_name else _garbage
        damage_again(record)
    finally:
        await running.kill()
    after = await started(tmp_path)  # nor does it keep the next one from starting
    try:
        assert json.loads(record.read_bytes())["epoch"] == 2
    finally:
        await after.kill()


async def test_an_address_that_cannot_be_written_is_said_once_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running = await started(tmp_path)
    record, mark = tmp_path / "coordinator" / ADDRESS_NAME, tmp_path / "coordinator" / "epoch-1"
    try:
        record.unlink()
        record.mkdir()
        touched = mark.stat().st_mtime_ns
        with caplog.at_level(logging.WARNING):
            assert await running._why_unfit() is None
            assert await running._why_unfit() is None
        assert mark.stat().st_mtime_ns > touched
        assert sum(f"{record} is a directory" in line for line in caplog.messages) == 1
        record.rmdir()
        assert await running._why_unfit() is None
        assert record.read_bytes()
    finally:
        await running.kill()


async def test_a_start_that_cannot_write_its_address_is_refused_with_the_cause_and_leaves_nobody_listening(
    tmp_path: Path,
) -> None:
    (tmp_path / "coordinator" / ADDRESS_NAME).mkdir(parents=True)
    socket = tmp_path / "its.sock"
    with pytest.raises(Refused, match="is a directory") as raised:
        await serve(Settings(root=str(tmp_path), bind=f"unix:{socket}"))
    assert raised.value.reason is Reason.STORAGE_FAILED
    assert not socket.exists()


async def test_a_folder_of_the_coordinator_that_is_a_link_is_no_matter_of_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "coordinator").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="a directory of the coordinator's own must be there") as raised:
        await started(tmp_path)
    assert raised.value.reason is Reason.STORAGE_FAILED
    assert f"Move {tmp_path / 'coordinator'} away" in raised.value.problem.next_step


async def test_on_a_full_disk_a_start_writes_its_address_with_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty journal nothing before the address needs space: the epoch and the journal are files without bytes."""
    await (await started(tmp_path)).kill()
    reserve, real = tmp_path / "coordinator" / "reserve", Directory.replace

    def replace(directory: Directory, name: str, data: bytes) -> None:
        if reserve.exists():
            raise storage_error(OSError(errno.ENOSPC, "full"), f"writing {name}")
        real(directory, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "replace", replace)
        again = await started(tmp_path)
    try:
        assert json.loads((tmp_path / "coordinator" / ADDRESS_NAME).read_bytes())["epoch"] == 2
        assert not reserve.exists()
    finally:
        await again.kill()


async def test_one_whose_root_was_replaced_by_that_of_another_ends_and_leaves_the_other_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = await started(root, "one")
    second: Coordinator | None = None
    try:
        root.rename(tmp_path / "root.old")
        assert await first._why_unfit() is None, "a share may come back"
        assert not root.exists()
        with pytest.raises(SafepointError, match="looking for"):
            first.operations.journal.require_epoch()
        second = await started(root, "two")
        theirs = (root / "coordinator" / ADDRESS_NAME).read_bytes()
        unfit = await first._why_unfit()
        assert isinstance(unfit, Problem)
        assert unfit.reason is Reason.STORAGE_FAILED
        assert "another directory is there" in unfit.message
        assert str(root / "coordinator") in unfit.message
        assert (root / "coordinator" / ADDRESS_NAME).read_bytes() == theirs
        first.keep_announced()  # it may have been on its way here
        assert (root / "coordinator" / ADDRESS_NAME).read_bytes() == theirs
        assert first.history is not None
        assert isinstance(first.history.files, OnDisk)
        with first.history.files.coordinator_directory() as folder:
            assert not folder.in_place(), "nor does it write history into a root that is not its own"
        with pytest.raises(Refused, match="another directory is there"):
            first.operations.journal.require_epoch()
        assert await second._why_unfit() is None
    finally:
        await first.kill()
        if second is not None:
            await second.kill()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"record": []},
        {"record": {}},
        {"record": {"operation": {}, "topology": {}}},
        {"record": {"operation": {"snapshot_id": "a", "kind": "SAVE"}, "topology": {"participants": []}}},
        {"record": {"operation": 7, "topology": 8}},
        {"record": None},
    ],
)
async def test_a_journal_that_says_whole_nonsense_of_an_operation_is_damaged_and_nobody_acts_by_it(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    await (await started(tmp_path)).kill()
    made = Journal(Directory.open(tmp_path / "coordinator"))
    made.append(Entry(OperationId("save-1"), "begun", BEGUN | data))
    made.close()
    with pytest.raises(SafepointError, match="save-1") as raised:
        await started(tmp_path)
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT
    accept = tmp_path / "coordinator" / ACCEPT
    assert f"touch {accept}" in raised.value.problem.next_step
    accept.touch()  # what it advises helps
    await (await started(tmp_path)).kill()


OUTCOME: dict[str, Any] = {
    "snapshot_id": "step-1", "kind": "SAVE", "outcome": "ABORTED", "digest": "", "phase": "PREPARE", "elapsed_s": 1.0,
    "unconfirmed": [], "began_ms": 0, "results": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"kind": None},
        {"kind": "DREAM"},
        {"outcome": "LOST"},
        {"phase": 7},
        {"elapsed_s": "long"},
        {"elapsed_s": 1e300},
        {"unconfirmed": 7},
        {"unconfirmed": [7]},
        {"results": []},
        {"results": {"failed": {"elapsed": "x"}}},
        {"began_ms": "then"},
        {"began_ms": 10**30},
        {"snapshot_id": []},
    ],
)
async def test_an_outcome_that_no_coordinator_writes_is_damage_and_no_crash(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    await (await started(tmp_path)).kill()
    made = Journal(Directory.open(tmp_path / "coordinator"))
    made.append(Entry(OperationId("save-0"), "outcome", OUTCOME))
    made.append(Entry(OperationId("save-1"), "outcome", {n: v for n, v in (OUTCOME | change).items() if v is not None}))
    made.close()
    with pytest.raises(SafepointError, match="says of save-1 what no coordinator writes") as raised:
        await started(tmp_path)
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT


async def test_a_journal_that_is_removed_or_emptied_beneath_a_root_is_refused_until_that_is_accepted(
    tmp_path: Path,
) -> None:
    """FAILURES 40: a start that has lost its log looks like the first one, and is none."""
    for damage in (Path.unlink, _empty):
        await (await started(tmp_path)).kill()
        (journal,) = (tmp_path / "coordinator").glob("journal-*.log")
        damage(journal)
        with pytest.raises(SafepointError, match=r"acts? without it"):
            await started(tmp_path)
        (tmp_path / "coordinator" / ACCEPT).touch()
        await (await started(tmp_path)).kill()


@pytest.mark.parametrize("damage", [Path.unlink, _empty])
async def test_a_coordinator_that_runs_writes_its_journal_anew_when_somebody_has_removed_or_emptied_it(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    running = await started(tmp_path)
    try:
        running.operations.journal.append(Entry(OperationId("save-0"), "outcome", OUTCOME))
        assert await running._why_unfit() is None
        damage(running.operations.journal.path)
        caplog.clear()
        assert await running._why_unfit() is None
        assert await running._why_unfit() is None
        assert sum("removed or changed" in line for line in caplog.messages) == 1
    finally:
        await running.kill()
    after = await started(tmp_path)
    try:
        assert list(after.operations.journal.contents.outcomes) == ["save-0"]
    finally:
        await after.kill()


async def test_after_its_epochs_were_removed_a_coordinator_has_none_of_those_that_were(tmp_path: Path) -> None:
    first = await started(tmp_path)
    try:
        (tmp_path / "coordinator" / "epoch-1").unlink()
        second = await started(tmp_path)
        try:
            assert (first.epoch, second.epoch) == (1, 2)
        finally:
            await second.kill()
    finally:
        await first.kill()


@pytest.mark.parametrize("data", [[], None, "text", 7])
def test_an_entry_without_fields_is_damage(tmp_path: Path, data: Any) -> None:
    journal = Journal(Directory.open(tmp_path))
    for held in (data, dict[str, Any]()):
        journal.append(Entry(OperationId("save-1"), "begun", held))
    journal.close()
    with pytest.raises(SafepointError, match="damaged at line 2") as raised:
        Journal(Directory.open(tmp_path))
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT


def test_threads_that_list_one_directory_at_once_see_all_of_it(tmp_path: Path) -> None:
    """A journal is asked by several threads whether its epoch is still there: one that missed it said that it was gone."""
    names = sorted(f"epoch-{number}" for number in range(300))
    for name in names:
        (tmp_path / name).touch()
    with Directory.open(tmp_path) as directory, ThreadPoolExecutor(2) as threads:
        seen = threads.map(lambda _: [directory.names() == names for _ in range(400)], range(2))
        assert all(itertools.chain.from_iterable(seen))
