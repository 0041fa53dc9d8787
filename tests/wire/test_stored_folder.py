"""Folders in a store behave as directories of a disk: one that was taken away is no longer in the way of anybody."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.wire.beneath import GONE
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.names import Names
from coordinator.wire.stored_folder import StoredFolder
from tests.stored import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def top(store: MemoryStore) -> StoredFolder:
    return StoredFolder(store.names()).child("snapshots")


def test_a_folder_is_made_once_and_is_there_before_it_holds_anything(top: StoredFolder) -> None:
    with pytest.raises(FileNotFoundError):
        top.child("a")
    top.make_child("a")
    with pytest.raises(FileExistsError):
        top.make_child("a")
    assert top.names() == ["a"]
    assert top.is_directory("a")
    assert top.has("a")
    assert top.child("a").names() == []


def test_who_has_a_folder_open_writes_into_that_one_also_when_its_name_is_given_away_again(top: StoredFolder) -> None:
    slept = top.make_child("a")
    gone = top.take_away("a")
    assert top.names() == []
    slept.write_new("late", b"1")
    now = top.make_child("a")
    slept.write_new("later", b"2")
    assert now.names() == []
    assert top.child("a").names() == []
    assert gone in top.names()
    top.remove_child(gone)
    assert top.names() == ["a"]


def test_a_number_is_never_given_twice(top: StoredFolder, store: MemoryStore) -> None:
    for number in range(1, 4):
        made = top.make_child("a")
        made.write_new("x", b"1")
        assert f"snapshots/a!{number}/x" in store.objects
        top.remove_child("a")
        with pytest.raises(FileNotFoundError):
            top.child("a")
    assert not [key for key in store.objects if "/x" in key]


def test_what_is_below_a_folder_that_was_taken_away_is_named_until_it_is_deleted(top: StoredFolder) -> None:
    top.make_child("a").write_new("x", b"1")
    top.take_away("a")
    (left,) = top.names()
    assert left.startswith(GONE)
    top.remove_child(left)
    assert top.names() == []


def test_an_empty_folder_goes_and_one_with_something_in_it_stays(top: StoredFolder) -> None:
    top.make_child("a")
    assert top.remove_empty("a")
    assert not top.remove_empty("a")
    top.make_child("a").write_new("x", b"1")
    assert not top.remove_empty("a")
    assert top.child("a").has("x")


def test_files_are_read_as_they_were_written(top: StoredFolder) -> None:
    made = top.make_child("a")
    written = made.write_new("ledger", iter([b"one\ntw", b"o\nthree"]))
    assert made.digest("ledger") == written
    assert made.size("ledger") == written.size_bytes == 13
    assert list(made.lines("ledger", 5)) == [b"one", b"two", b"three"]
    assert b"".join(made.blocks("ledger", 5)) == b"one\ntwo\nthree"
    with pytest.raises(SafepointError) as caught:
        list(made.lines("ledger", 4))
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    made.make_child("below").write_new("state", b"1")
    assert made.read("below/state", 1) == b"1"
    assert list(made.walk(10)) == ["below/state", "ledger"]
    assert made.size_below(10) >= 14
    with pytest.raises(FileExistsError):
        made.write_new("ledger", b"another")
    for missing in ("nothing", "nothing/at/all"):
        with pytest.raises(FileNotFoundError):
            made.size(missing)


def test_one_look_answers_for_everything_below(store: MemoryStore, top: StoredFolder) -> None:
    part = top.make_child("a").make_child("agent")
    for name in ("manifest.json", "state", "ledger"):
        part.write_new(name, b"1")
    client = store.client()
    seen = StoredFolder(Names(client)).child("snapshots").seen("a")
    before = client.count
    for name in ("manifest.json", "state", "ledger"):
        assert seen.child("agent").size(name) == 1
    assert seen.names() == ["agent"]
    assert seen.child("agent").names() == ["ledger", "manifest.json", "state"]
    assert client.count == before
    part.write_new("late", b"1")  # what came afterwards is found all the same
    assert seen.child("agent").size("late") == 1


@pytest.mark.parametrize("path", ["..", "a/../b", "a!1", "a b", "", "/a"])
def test_a_path_that_leads_elsewhere_is_refused(top: StoredFolder, path: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: top.child(path), lambda: top.make_child(path), lambda: top.read(path, 1), lambda: top.write_new(path, b"1"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SafepointError) as caught:
            call()
        assert caught.value.reason is Reason.SNAPSHOT_UNSAFE
