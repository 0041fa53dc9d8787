"""Chunks in a store: nobody relies on an object that a sweep may delete, and a sweep deletes none that somebody relies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.names import Names
from coordinator.wire.stored_chunks import GRACE_S, TRUST_S, StoredChunks
from tests.stored import MemoryStore


class World:
    """A store and a participant, whose clocks go on together."""

    def __init__(self, path: Path) -> None:
        self.store = MemoryStore()
        self.local = Chunks(path)
        self.now = 0.0
        self.mine = self.participant()

    def participant(self) -> StoredChunks:
        return StoredChunks(self.store.names(), lambda: self.now)

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.store.now_s += seconds

    def keys(self) -> list[str]:
        return [key.rpartition(".")[2] for key in self.store.keys("chunks/")]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_what_is_there_is_not_sent_again_by_whoever_has_sent_it_or_comes_after(world: World) -> None:
    chunk = world.local.write(b"state")
    assert world.mine.send(chunk, world.local)
    assert not world.mine.send(chunk, world.local)
    assert not world.participant().send(chunk, world.local)
    assert world.keys() == ["1"]
    world.mine.check(chunk)
    assert b"".join(world.mine.read(chunk.sha256)) == b"state"


@pytest.mark.parametrize("successor", [False, True])
def test_an_object_that_is_old_is_not_relied_upon_and_another_is_made_beside_it(world: World, successor: bool) -> None:
    chunk = world.local.write(b"state")
    world.mine.send(chunk, world.local)
    world.after(TRUST_S - 1)
    assert not (world.participant() if successor else world.mine).send(chunk, world.local)
    world.after(2)
    assert (world.participant() if successor else world.mine).send(chunk, world.local)
    assert world.keys() == ["1", "2"]


def test_what_is_relied_upon_is_never_old_enough_to_be_deleted_while_an_operation_can_run() -> None:
    assert GRACE_S - TRUST_S >= 12 * 3600  # a restore may take half an hour, a commit ten minutes


def test_two_that_send_the_same_bytes_at_once_make_one_object(world: World) -> None:
    chunk = world.local.write(b"state")
    other = world.participant()
    other.send(world.local.write(b"something else"), world.local)  # it has looked
    world.mine.send(chunk, world.local)
    assert other.send(chunk, world.local)
    assert sorted(world.keys()) == ["1", "1", "2"]


def test_a_damaged_local_copy_is_not_sent(world: World) -> None:
    chunk = world.local.write(b"state")
    world.local.path(chunk.sha256).write_bytes(b"stale")
    with pytest.raises(SafepointError) as caught:
        world.mine.send(chunk, world.local)
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT
    assert not world.keys()


def test_a_chunk_that_is_missing_or_another_is_refused(world: World) -> None:
    chunk = world.local.write(b"state")
    for damage in (None, b"stat", b"stale"):
        world.store.objects.clear()
        if damage is not None:
            world.mine = world.participant()
            world.mine.send(chunk, world.local)
            world.store.objects[world.store.keys("chunks/")[0]].data = damage
        with pytest.raises(SafepointError) as caught:
            world.mine.check(chunk)
        assert caught.value.reason is Reason.SNAPSHOT_CORRUPT
    assert Chunk(chunk.sha256, 5) == chunk


def test_a_reader_goes_on_to_an_older_object_when_the_younger_is_deleted_in_between(world: World) -> None:
    chunk = world.local.write(b"state")
    world.mine.send(chunk, world.local)
    world.after(TRUST_S + 1)
    world.mine.send(chunk, world.local)
    client = world.store.client()
    first = [True]

    def deleted(method: str, key: str) -> None:
        if method == "GET" and first[0]:
            first[0] = False
            del world.store.objects[key]

    client.before = deleted
    assert b"".join(StoredChunks(Names(client)).read(chunk.sha256)) == b"state"
