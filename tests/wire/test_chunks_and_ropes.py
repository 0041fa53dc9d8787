"""Chunks and ropes: named by what they hold, whole or not there, and read strictly."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from coordinator.wire.beneath import Directory
from coordinator.wire.chunks import SEAL_AT, Chunk, Chunks, ChunkWriter, Segment, wasted
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.rope import Rope, open_rope, parse

PARTS = [bytes([n]) * (n * 700 + 1) for n in range(60)]


def refusal(raised: pytest.ExceptionInfo[SafepointError]) -> Reason:
    return raised.value.reason


def a_rope(root: Path, parts: list[bytes] = PARTS) -> tuple[Path, Chunks]:
    chunks = Chunks(root)
    out, rope = ChunkWriter(chunks, seal_at=50_000), Rope()
    pieces = [out.add(part) for part in parts]
    out.seal()
    rope.add_inline(b"head")
    for piece in pieces:
        rope.add(piece)
    rope.add_inline(b"tail")
    path = root / "x.rope"
    path.write_bytes(rope.to_bytes())
    return path, chunks


def content(path: Path, chunks: Chunks) -> bytes:
    with Directory.open(path.parent) as directory, open_rope(directory, path.name, chunks) as file:
        return file.read()


def test_a_rope_reads_as_what_was_put_into_it(tmp_path: Path) -> None:
    path, chunks = a_rope(tmp_path)
    assert content(path, chunks) == b"head" + b"".join(PARTS) + b"tail"
    with Directory.open(tmp_path) as directory, open_rope(directory, path.name, chunks) as file:
        assert b"".join(iter(lambda: file.read(777), b"")) == b"head" + b"".join(PARTS) + b"tail"


def test_neighbours_in_a_chunk_are_one_range(tmp_path: Path) -> None:
    path, _ = a_rope(tmp_path)
    listed = parse(path.read_bytes(), "x")
    assert len(listed.ranges) // 3 == len(listed.chunks) + 2


def test_the_same_bytes_are_one_chunk_and_a_damaged_one_is_put_right(tmp_path: Path) -> None:
    chunks = Chunks(tmp_path)
    one = chunks.write(b"abc" * 100)
    assert chunks.write(b"abc" * 100) == one
    assert len(list(chunks.all())) == 1
    chunks.path(one.sha256).write_bytes(b"abd" * 100)
    with pytest.raises(SafepointError) as raised:
        chunks.check(one)
    assert refusal(raised) is Reason.SNAPSHOT_CORRUPT
    chunks.write(b"abc" * 100)
    chunks.check(one)


def test_a_chunk_that_was_found_damaged_is_not_relied_upon_until_its_bytes_are_written_again(tmp_path: Path) -> None:
    chunks = Chunks(tmp_path)
    one = chunks.write(b"abc" * 100)
    chunks.path(one.sha256).write_bytes(b"abd" * 100)
    assert chunks.touch(one)  # the bytes are not read
    with pytest.raises(SafepointError):
        chunks.check(one)
    assert not chunks.touch(one)
    assert chunks.path(one.sha256).read_bytes() == b"abd" * 100
    chunks.write(b"abc" * 100)
    assert chunks.touch(one)
    chunks.check(one)


@pytest.mark.parametrize("name", ["..", "a" * 63, "A" * 64, "../" + "a" * 61, ""])
def test_a_chunk_has_no_other_name_than_a_digest(tmp_path: Path, name: str) -> None:
    with pytest.raises(SafepointError) as raised:
        Chunks(tmp_path).check(Chunk(name, 1))
    assert refusal(raised) is Reason.SNAPSHOT_UNSAFE


def test_a_link_is_no_chunk(tmp_path: Path) -> None:
    chunks = Chunks(tmp_path)
    one = chunks.write(b"abc")
    path = chunks.path(one.sha256)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SafepointError) as raised:
        chunks.check(one)
    assert refusal(raised) is Reason.SNAPSHOT_UNSAFE


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_rope_is_refused_or_reads_as_before(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path, chunks = a_rope(tmp_path, PARTS[:12])
    whole, right = path.read_bytes(), content(path, chunks)
    head, *lines = whole.split(b"\n")
    harm = chance.choice(["byte", "cut", "number", "head", "line", "deep"])
    if harm == "byte":
        at = chance.randrange(len(whole))
        damaged = whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :]
    elif harm == "cut":
        damaged = whole[: chance.randrange(len(whole))]
    elif harm == "number":
        ranges = json.loads(lines[-2])
        ranges[chance.randrange(len(ranges))] = chance.choice([-5, 10**9, 2**70, 0.5, True, "x", None])
        damaged = b"\n".join([head, *lines[:-2], json.dumps(ranges).encode(), lines[-1]])
    elif harm == "head":
        fields = json.loads(head)
        fields[chance.choice(list(fields))] = chance.choice([-1, 10**12, "1", None, True, [1]])
        damaged = b"\n".join([json.dumps(fields).encode(), *lines])
    elif harm == "line":
        damaged = b"\n".join([head, *lines[1:]])
    else:
        damaged = b"[" * 100_000 + b"\n" + whole
    path.write_bytes(damaged)
    try:
        found = content(path, chunks)
    except SafepointError:
        return
    assert len(found) == len(right) or found == right  # the inline bytes are its manifest's digest's to check


def test_a_newer_rope_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    path, chunks = a_rope(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'{"rope":1', b'{"rope":2'))
    with pytest.raises(SafepointError) as raised:
        content(path, chunks)
    assert refusal(raised) is Reason.SNAPSHOT_TOO_NEW


def test_a_rope_over_a_missing_or_shorter_chunk_is_refused_while_it_is_read(tmp_path: Path) -> None:
    path, chunks = a_rope(tmp_path)
    first = parse(path.read_bytes(), "x").chunks[0]
    os.truncate(chunks.path(first.sha256), first.size_bytes - 1)
    with pytest.raises(SafepointError) as raised:
        content(path, chunks)
    assert refusal(raised) is Reason.SNAPSHOT_CORRUPT
    chunks.remove(first.sha256)
    with pytest.raises(SafepointError) as raised:
        content(path, chunks)
    assert refusal(raised) is Reason.SNAPSHOT_CORRUPT


def test_what_is_half_used_or_one_of_very_many_is_written_again() -> None:
    def segment(size: int) -> Segment:
        made = Segment()
        made.chunk = Chunk("a" * 64, size)
        return made

    full, half, unsealed = segment(SEAL_AT), segment(SEAL_AT), Segment()
    assert wasted({full: SEAL_AT, half: SEAL_AT // 2 - 1, unsealed: 5}) == {half, unsealed}
    small = {segment(100): 100 for _ in range(33)}
    assert wasted({full: SEAL_AT, **small}) == small.keys()


def test_a_chunk_that_somebody_left_before_its_name_was_durable_is_made_durable_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync, broken = Directory.sync, True

    def noting(self: Directory) -> None:
        if broken and len(self.path.name) == 2:
            raise OSError(5, "Input/output error")
        sync(self)
        synced.append(self.path)

    monkeypatch.setattr(Directory, "sync", noting)
    with pytest.raises(SafepointError) as failed:
        Chunks(tmp_path).write(b"state")
    assert failed.value.reason is Reason.STORAGE_FAILED
    broken = False
    synced.clear()
    chunk = Chunks(tmp_path).write(b"state")
    folder = Chunks(tmp_path).path(chunk.sha256).parent
    assert {folder, folder.parent, tmp_path} <= set(synced)


def test_a_directory_that_somebody_left_before_its_name_was_durable_is_made_durable_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    synced: list[Path] = []
    monkeypatch.setattr(Directory, "sync", lambda self: synced.append(self.path))
    with Directory.open(tmp_path) as top:
        top.ensure_child("below").close()
    assert synced == [tmp_path]


def test_a_directory_whose_name_cannot_be_made_durable_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()

    def broken(self: Directory) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Directory, "sync", broken)
    with Directory.open(tmp_path) as top, pytest.raises(SafepointError) as failed:
        top.ensure_child("below")
    assert failed.value.reason is Reason.STORAGE_FAILED


def test_the_names_of_folders_are_made_durable_once_for_all_chunks_of_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datas = [bytes([n]) for n in range(50)]
    before = Chunks(tmp_path)
    for data in datas:
        before.write(data)
    synced: list[Path] = []
    sync = Directory.sync

    def noting(self: Directory) -> None:
        synced.append(self.path)
        sync(self)

    monkeypatch.setattr(Directory, "sync", noting)
    chunks = Chunks(tmp_path)
    written = [chunks.write(data) for data in datas]
    assert sorted(synced) == sorted([tmp_path, tmp_path / "chunks", *(chunks.path(c.sha256).parent for c in written)])


def test_a_writer_whose_folders_were_removed_makes_them_again(tmp_path: Path) -> None:
    chunks = Chunks(tmp_path)
    chunks.write(b"one")
    shutil.rmtree(tmp_path / "chunks")
    chunks.check(chunks.write(b"one"))
