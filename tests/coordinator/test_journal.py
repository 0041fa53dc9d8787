"""The journal: what was acknowledged is there after a crash, what is damaged is not acted upon."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator import journal as journal_module
from coordinator.journal import Journal
from coordinator.journal_file import ACCEPT, KEPT_OUTCOMES, Entry, read
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import OperationId


def opened(folder: Path) -> Journal:
    return Journal(Directory.open(folder))


def entry(name: str, kind: str = "begun", **data: Any) -> Entry:
    return Entry(OperationId(name), kind, data)


def the_file(folder: Path) -> Path:
    (found,) = folder.glob("journal-*.log")
    return found


def test_each_start_has_a_higher_epoch_and_knows_what_came_before(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.append(entry("save-1", "begun", record={"a": 1}))
    first.append(entry("save-1", "outcome", outcome="SUCCEEDED"))
    first.append(entry("save-2", "begun", record={"b": 2}))
    first.close()
    second = opened(tmp_path)
    assert (first.epoch, second.epoch) == (1, 2)
    assert list(second.contents.open) == ["save-2"]
    assert second.contents.open[OperationId("save-2")] == [entry("save-2", "begun", record={"b": 2})]
    assert dict(second.contents.outcomes) == {"save-1": {"outcome": "SUCCEEDED"}}
    assert second.owns_epoch()
    assert len(list(tmp_path.glob("journal-*.log"))) == 1
    second.close()


def test_an_older_coordinator_finds_that_it_is_older(tmp_path: Path) -> None:
    old = opened(tmp_path)
    assert old.owns_epoch()
    new = opened(tmp_path)
    assert not old.owns_epoch()
    assert new.owns_epoch()
    old.close()
    new.close()


def test_a_directory_that_was_removed_is_said_with_the_way_on_that_participants_accept(tmp_path: Path) -> None:
    folder = tmp_path / "coordinator"
    folder.mkdir()
    for _ in range(3):
        journal = opened(folder)
        assert journal.lost() is None
    shutil.rmtree(folder)
    problem = journal.lost()
    assert problem is not None
    assert problem.reason is Reason.STORAGE_FAILED
    assert f"{folder} was removed" in problem.message
    with pytest.raises(SafepointError, match="was removed"):
        journal.require_epoch()
    advised = problem.next_step.partition(", then")[0]
    subprocess.run(["/bin/sh", "-c", advised], check=True)
    assert opened(folder).epoch == journal.epoch + 1, "who has served ours would refuse a lower one"


def test_an_epoch_that_was_removed_is_no_newer_coordinator(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    (tmp_path / "epoch-1").unlink()
    problem = journal.lost()
    assert problem is not None
    assert problem.reason is Reason.STORAGE_FAILED
    assert f"{tmp_path / 'epoch-1'} is gone" in problem.message
    with pytest.raises(SafepointError, match="is gone"):
        journal.require_epoch()
    (tmp_path / "epoch-1").touch()  # as it advises
    assert journal.owns_epoch()
    (tmp_path / "epoch-2").touch()
    with pytest.raises(SafepointError, match="newer coordinator") as caught:
        journal.require_epoch()
    assert caught.value.reason is Reason.STALE_EPOCH
    journal.close()


@pytest.mark.parametrize("name", ["epoch-999999999999999999", "journal-999999999999999999.log"])
def test_a_number_that_none_can_follow_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    opened(tmp_path).close()
    (tmp_path / name).touch()
    with pytest.raises(SafepointError, match=name) as caught:
        opened(tmp_path)
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT
    assert str(tmp_path / name) in caught.value.problem.next_step
    (tmp_path / name).unlink()  # as it advises
    journal = opened(tmp_path)
    assert journal.epoch == 2
    journal.close()


def test_an_epoch_of_a_snapshot_that_none_can_follow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SafepointError, match="After the newest snapshot no coordinator can start") as caught:
        Journal(Directory.open(tmp_path), {"the newest snapshot": 2**63})
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT


@pytest.mark.parametrize(
    "name", ["epoch-0", "epoch-007", "epoch-9999999999999999999", "journal-0.log", "journal-03.log"]
)
def test_a_name_that_no_coordinator_makes_is_passed_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for epoch in (1, 2):
        journal = opened(tmp_path)
        assert journal.epoch == epoch
        assert journal.owns_epoch()
        journal.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_torn_tail_is_dropped_and_nothing_else_is_lost(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / os.urandom(6).hex()
    folder.mkdir()
    journal = opened(folder)
    for n in range(3):
        journal.append(entry(f"save-{n}", "begun", n=n))
    journal.close()
    raw = the_file(folder).read_bytes()
    last = raw[:-1].rfind(b"\n") + 1
    cut = data.draw(st.integers(last, len(raw) - 1))
    the_file(folder).write_bytes(raw[:cut])
    again = opened(folder)
    assert list(again.contents.open)[:2] == ["save-0", "save-1"]
    assert len(again.contents.open) == 2 or cut == len(raw) - 1  # without its newline alone the line is whole
    again.append(entry("save-9", "begun"))
    again.close()
    once_more = opened(folder)
    assert "save-9" in once_more.contents.open
    once_more.close()


def test_damage_in_the_middle_stops_the_coordinator(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for n in range(3):
        journal.append(entry(f"save-{n}"))
    journal.close()
    raw = the_file(tmp_path).read_bytes()
    the_file(tmp_path).write_bytes(raw.replace(b"save-1", b"save-X"))
    with pytest.raises(SafepointError, match="line 3") as caught:
        opened(tmp_path)
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT


def refused(folder: Path, reason: Reason, match: str) -> None:
    """A start changes nothing, says what helps, and goes on with a higher epoch once that is done."""
    before = {path.name for path in folder.iterdir() if path.name.startswith("journal-")}
    epochs = {path.name for path in folder.glob("epoch-*")}
    for _ in range(2):
        with pytest.raises(SafepointError, match=match) as caught:
            opened(folder)
        assert caught.value.reason is reason
    assert {path.name for path in folder.iterdir() if path.name.startswith("journal-")} == before
    assert {path.name for path in folder.glob("epoch-*")} == epochs, "who runs goes on"
    assert f"touch {folder / ACCEPT}" in caught.value.problem.next_step
    (folder / ACCEPT).touch()
    after = opened(folder)
    assert not after.contents.open
    assert not after.contents.outcomes
    assert after.epoch > 1
    assert not (folder / ACCEPT).exists(), "one loss is accepted, not the next one too"
    assert {path.name for path in folder.glob("lost-*")} == {f"lost-{name}" for name in before}
    after.close()
    opened(folder).close()


@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_flipped_bit_is_damage_wherever_it_is(tmp_path: Path, written: int) -> None:
    journal = opened(tmp_path)
    for n in range(written):
        journal.append(entry(f"save-{n}"))
    journal.close()
    raw = the_file(tmp_path).read_bytes()
    for bit in range(len(raw) * 8 - 8, len(raw) * 8):  # the newline: without it the line is no torn one
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << (bit % 8)
        the_file(tmp_path).write_bytes(flipped)
        with pytest.raises(SafepointError, match="damaged at line"), Directory.open(tmp_path) as directory:
            read(directory, the_file(tmp_path).name)
    for place in range(0, len(raw) - 1, 7):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << (place % 8)
        the_file(tmp_path).write_bytes(flipped)
        with pytest.raises(SafepointError) as caught, Directory.open(tmp_path) as directory:
            read(directory, the_file(tmp_path).name)
        assert caught.value.reason is Reason.SNAPSHOT_CORRUPT
    refused(tmp_path, Reason.SNAPSHOT_CORRUPT, "is damaged at line")


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_journal_that_was_cut_below_what_it_was_made_with_is_refused(tmp_path: Path, lines: int) -> None:
    for n in range(2):
        journal = opened(tmp_path)
        journal.append(entry(f"save-{n}"))
        journal.close()
    opened(tmp_path).close()  # all of it is in the file from the first moment
    whole = the_file(tmp_path).read_bytes().splitlines(keepends=True)
    assert len(whole) == 3
    the_file(tmp_path).write_bytes(b"".join(whole[:lines]))
    refused(tmp_path, Reason.SNAPSHOT_CORRUPT, "is empty" if lines == 0 else "is cut short")


@pytest.mark.parametrize("keep", [0.3, 0.99])
def test_what_a_file_was_made_with_is_never_torn(tmp_path: Path, keep: float) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1"))
    journal.close()
    opened(tmp_path).close()
    raw = the_file(tmp_path).read_bytes()
    the_file(tmp_path).write_bytes(raw[: int(len(raw) * keep)])
    refused(tmp_path, Reason.SNAPSHOT_CORRUPT, "is damaged at line")


@pytest.mark.parametrize("left", ["epoch-1", "address.json", "reserve", "history"])
def test_where_a_coordinator_has_been_a_missing_journal_is_no_empty_one(tmp_path: Path, left: str) -> None:
    opened(tmp_path).close()
    for path in tmp_path.iterdir():
        path.unlink()
    if left == "history":
        (tmp_path / left).mkdir()
    else:
        (tmp_path / left).write_text('{"address": "127.0.0.1:1", "epoch": 6}' if left == "address.json" else "")
    with pytest.raises(SafepointError, match=f"is not in {tmp_path}, and {left} says") as caught:
        opened(tmp_path)
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert f"touch {tmp_path / ACCEPT}" in caught.value.problem.next_step
    (tmp_path / ACCEPT).touch()
    journal = opened(tmp_path)
    assert journal.epoch == {"epoch-1": 2, "address.json": 7}.get(left, 1)
    journal.close()


def test_a_crash_before_the_first_epoch_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Directory.write_new

    def dies(directory: Directory, name: str, data: Any) -> Any:
        if name.startswith("epoch-"):
            raise KeyboardInterrupt
        return real(directory, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "write_new", dies)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path)
    journal = opened(tmp_path)
    assert journal.epoch == 1
    journal.close()


@pytest.mark.parametrize("gone", ["epoch-*", "address.json", "[ea]*"])
def test_an_epoch_is_never_given_twice_while_anything_in_the_root_remembers_it(tmp_path: Path, gone: str) -> None:
    for _ in range(4):
        opened(tmp_path).close()
    (tmp_path / "address.json").write_text('{"address": "127.0.0.1:1", "epoch": 4}')
    for path in tmp_path.glob(gone):
        path.unlink()
    journal = opened(tmp_path)
    assert journal.epoch == 5
    journal.close()


@pytest.mark.parametrize(
    "said", ["", "[]", "{", '{"epoch": "7"}', '{"epoch": -7}', '{"epoch": 1e400}', '{"epoch": true}']
)
def test_an_address_that_says_no_epoch_counts_for_none(tmp_path: Path, said: str) -> None:
    opened(tmp_path).close()
    (tmp_path / "address.json").write_text(said)
    journal = opened(tmp_path)
    assert journal.epoch == 2
    journal.close()


@pytest.mark.parametrize(("said", "epoch"), [("1e3", 1001), ("41.0", 42), ("40.5", 42)])
def test_an_epoch_counts_however_json_writes_the_number(tmp_path: Path, said: str, epoch: int) -> None:
    opened(tmp_path).close()
    (tmp_path / "address.json").write_text(f'{{"epoch": {said}}}')
    journal = opened(tmp_path)
    assert journal.epoch == epoch
    journal.close()


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _second_name(path: Path) -> None:
    path.with_name("second").hardlink_to(path)


@pytest.mark.parametrize("made", [_link, _second_name, _fifo, _directory])
def test_a_journal_that_is_no_plain_file_is_a_lost_one_and_no_matter_of_a_snapshot(
    tmp_path: Path, made: Callable[[Path], None]
) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1"))
    journal.close()
    made(the_file(tmp_path))
    refused(tmp_path, Reason.STORAGE_FAILED, "the journal that a coordinator has written is not there any more")


def test_a_journal_with_a_line_that_no_coordinator_writes_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.journal_file.MAX_ENTRY_BYTES", 1000)
    opened(tmp_path).close()
    with the_file(tmp_path).open("ab") as file:
        file.write(bytes(2000))
    refused(tmp_path, Reason.SNAPSHOT_CORRUPT, "has a line over 1000 bytes")


@pytest.mark.parametrize("name", ["address.json", ACCEPT])
def test_a_directory_that_a_start_could_not_remove_refuses_it_before_anything_has_changed(
    tmp_path: Path, name: str
) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1"))
    journal.close()
    (tmp_path / name).mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SafepointError, match=f"{name} is a directory") as caught:
        opened(tmp_path)
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert "Move that directory away" in caught.value.problem.next_step
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / name).rmdir()
    after = opened(tmp_path)
    assert list(after.contents.open) == ["save-1"]
    after.close()


def test_an_older_name_that_is_a_directory_is_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert the_file(tmp_path).name == "journal-2.log"
    (tmp_path / "journal-1.log").mkdir()
    opened(tmp_path).close()
    assert (tmp_path / "journal-1.log").is_dir()


@pytest.mark.parametrize("made", [_link, _second_name, _directory])
def test_one_that_runs_writes_its_journal_anew_when_something_else_has_its_name(
    tmp_path: Path, made: Callable[[Path], None]
) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1"))
    made(the_file(tmp_path))
    journal.keep_in_place()
    journal.close()
    after = opened(tmp_path)
    assert list(after.contents.open) == ["save-1"]
    after.close()


def test_a_journal_that_another_start_replaces_meanwhile_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1"))
    journal.close()
    real, beside = Directory.lines, [True]

    def lines(directory: Directory, name: str, limit: int) -> Any:
        if beside:
            beside.clear()
            opened(tmp_path).close()
        return real(directory, name, limit)

    monkeypatch.setattr(Directory, "lines", lines)
    again = opened(tmp_path)
    assert (again.epoch, list(again.contents.open)) == (3, ["save-1"])
    again.close()


@pytest.mark.parametrize("what", ["_write_all", "fsync"])
def test_a_disk_that_fails_the_journal_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = opened(tmp_path)
    monkeypatch.setattr(journal_module if what == "_write_all" else os, what, full)
    with pytest.raises(SafepointError, match=rf"{tmp_path}\S*/journal-2\.log.*No space left") as caught:
        journal.append(entry("save-1"))
    assert caught.value.reason is Reason.STORAGE_FULL
    monkeypatch.undo()
    journal.close()


def test_a_full_disk_leaves_no_torn_line_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1"))
    real = os.write

    def half(fd: int, data: Any) -> int:
        if len(data) > 10:
            return real(fd, bytes(data[:10]))
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(journal_module, "_write_all", lambda fd, data: (half(fd, data), half(fd, b"x")))
    with pytest.raises(SafepointError) as caught:
        journal.append(entry("save-2"))
    assert caught.value.reason is Reason.STORAGE_FULL
    monkeypatch.undo()
    journal.append(entry("save-3"))
    journal.close()
    again = opened(tmp_path)
    assert list(again.contents.open) == ["save-1", "save-3"]
    again.close()


class SmallDisk:
    """A disk on which only what the reserve gives back can be written."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.reserve = folder / "reserve"
        real, real_new = journal_module._write_all, Directory.write_new

        def check() -> None:
            if self.reserve.exists():
                raise OSError(errno.ENOSPC, "full")

        def write_all(fd: int, data: bytes) -> None:
            check()
            real(fd, data)

        def write_new(directory: Directory, name: str, data: Any) -> Any:
            if name == "reserve":
                raise storage_error(OSError(errno.ENOSPC, "full"), "writing reserve")
            try:
                check()
            except OSError as error:
                raise storage_error(error, f"writing {name}") from error
            return real_new(directory, name, data)

        patch.setattr(journal_module, "_write_all", write_all)
        patch.setattr(Directory, "write_new", write_new)


def test_on_a_full_disk_what_has_begun_ends_with_the_reserve_and_nothing_new_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1", "begun"))
    assert (tmp_path / "reserve").stat().st_size >= 64 << 10
    with monkeypatch.context() as patch:
        SmallDisk(tmp_path, patch)
        with pytest.raises(SafepointError) as caught:
            journal.append(entry("save-2", "begun"))
        assert caught.value.reason is Reason.STORAGE_FULL
        assert (tmp_path / "reserve").exists(), "a beginning must not spend it"
        journal.append(entry("save-1", "aborting"))
        assert not (tmp_path / "reserve").exists()
        journal.append(entry("save-1", "outcome"))
        with pytest.raises(SafepointError) as caught:
            journal.append(entry("save-3", "begun"))
        assert caught.value.reason is Reason.STORAGE_FULL, "there is room for it, and none to end it"
    journal.append(entry("save-4", "begun"))
    assert (tmp_path / "reserve").exists(), "there is space again"
    journal.close()
    again = opened(tmp_path)
    assert list(again.contents.open) == ["save-4"]
    assert list(again.contents.outcomes) == ["save-1"]
    again.close()


def test_a_coordinator_starts_on_a_full_disk_so_that_it_can_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    journal.append(entry("save-1", "begun"))
    journal.close()
    with monkeypatch.context() as patch:
        SmallDisk(tmp_path, patch)
        again = opened(tmp_path)
        assert list(again.contents.open) == ["save-1"]
        again.append(entry("save-1", "outcome"))
        assert not again.spend_reserve(), "there is none left"
        again.close()


def test_after_a_failed_fsync_nothing_more_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(SafepointError) as caught:
        journal.append(entry("save-1"))
    assert caught.value.reason is Reason.STORAGE_FAILED
    monkeypatch.undo()
    with pytest.raises(SafepointError):
        journal.append(entry("save-2"))
    journal.close()


@pytest.mark.parametrize("fails", ["write", "sync", "open", "remove"])
def test_a_rotation_that_fails_is_no_failure_of_the_entry_and_loses_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 1)
    journal = opened(tmp_path)
    real, real_open = Directory.write_new, os.open

    def write_new(self: Directory, name: str, data: Any) -> Any:
        written = None if fails == "write" else real(self, name, data)
        if fails in ("write", "sync"):  # a failed fsync of the directory comes when the file is there
            raise storage_error(OSError(errno.ENOSPC, "full"), "rotating")
        return written

    def full_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_APPEND:
            raise OSError(errno.EMFILE, "too many")
        return real_open(path, flags, *args, **kwargs)

    def remove_file(self: Directory, name: str) -> None:
        raise storage_error(OSError(errno.EIO, "broken"), "removing")

    with monkeypatch.context() as patched:
        if fails in ("write", "sync"):
            patched.setattr(Directory, "write_new", write_new)
        elif fails == "open":
            patched.setattr(os, "open", full_open)
        else:
            patched.setattr(Directory, "remove_file", remove_file)
        journal.append(entry("save-1", "outcome"))
        journal.append(entry("save-2", "outcome"))
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 1 << 20)
    journal.append(entry("save-3"))
    journal.close()
    again = opened(tmp_path)
    assert list(again.contents.outcomes) == ["save-1", "save-2"]
    assert list(again.contents.open) == ["save-3"]
    again.close()


def test_a_rotation_that_cannot_be_undone_stops_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 1)
    journal = opened(tmp_path)

    def broken(*_: Any) -> Any:
        raise storage_error(OSError(errno.EIO, "broken"), "rotating")

    monkeypatch.setattr(Directory, "write_new", broken)
    monkeypatch.setattr(Directory, "remove_file", broken)
    journal.append(entry("save-1", "outcome"))  # durable, and said so
    with pytest.raises(SafepointError, match="half-made rotation"):
        journal.append(entry("save-2", "outcome"))
    monkeypatch.undo()
    journal.close()
    again = opened(tmp_path)
    assert list(again.contents.outcomes) == ["save-1"]
    again.close()


def test_memory_and_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 200_000)
    journal = opened(tmp_path)
    for n in range(KEPT_OUTCOMES + 500):
        journal.append(entry(f"save-{n}", "begun", text="x" * 100))
        journal.append(entry(f"save-{n}", "outcome", text="x" * 100))
    assert len(journal.contents.outcomes) == KEPT_OUTCOMES
    assert the_file(tmp_path).stat().st_size < 600_000
    journal.close()
