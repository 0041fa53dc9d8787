"""Ropes: a file of a snapshot whose bytes lie in chunks, in the order in which they are read.

The rule: a rope is read strictly. Its own file is small, listed in the manifest with its digest, and says of which chunks the
content is made; every chunk that it names is listed in the manifest too, so that verifying both verifies every byte. What is
read of a rope is a stream of bytes, in which nothing tells whether it lay in one file or in a hundred chunks.

    {"rope":1,"bytes":N,"chunks":n,"ranges":m,"inline":k}      N bytes of content
    ["<sha256>",size]                                          n lines, in the order of their first use
    [chunk,offset,length,chunk,offset,length,...]              m ranges, up to 1,000 a line; chunk -1 is what follows
    k bytes                                                    content that lies here

Both ends use this one copy. Standard library only. Everything here blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

from coordinator.wire.beneath import Directory
from coordinator.wire.chunks import Chunk, Chunks, Piece, Segment, read_exactly
from coordinator.wire.errors import Reason, SafepointError, refuse

FORMAT: Final = 1
SUFFIX: Final = ".rope"
MAX_ROPE_BYTES: Final = 256 << 20
MAX_CHUNKS: Final = 1_000_000
MAX_RANGES: Final = 5_000_000
_A_LINE: Final = 1000
_BUFFER: Final = 1 << 20
_OPEN_AT_ONCE: Final = 32
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_INLINE: Final = -1


class _Reads(Protocol):
    """A directory, or a folder of another kind of root."""

    @property
    def path(self) -> Any: ...
    def read(self, path: str, limit: int) -> bytes: ...


class Rope:
    """A rope in the making."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._segments: list[Segment] = []
        self._ranges: list[int] = []
        self._inline: list[bytes] = []
        self._inline_size = 0
        self._end = (-2, 0)  # segment and offset at which the last range ends
        self.size_bytes = 0

    def add(self, *pieces: Piece) -> None:
        """Content that lies in chunks. In one loop: a save of many sessions adds them all while everybody waits."""
        numbers, ranges, total = self._numbers, self._ranges, 0
        last, end = self._end
        at: Segment | None = None
        for segment, offset, length in pieces:
            if segment is not at:
                at, number = segment, numbers.get(id(segment), -2)
                if number < 0:
                    number = numbers[id(segment)] = len(self._segments)
                    self._segments.append(segment)
                if number != last:
                    last, end = number, -1
            if offset == end:
                ranges[-1] += length  # neighbours are one range
            else:
                ranges += (last, offset, length)
            end = offset + length
            total += length
        self._end = (last, end)
        self.size_bytes += total

    def add_inline(self, content: bytes) -> None:
        """Content that lies in the rope's own file."""
        self._append(_INLINE, self._inline_size, len(content))
        self._inline.append(content)
        self._inline_size += len(content)

    def _append(self, number: int, offset: int, length: int) -> None:
        if self._end == (number, offset):
            self._ranges[-1] += length  # neighbours are one range
        else:
            self._ranges += (number, offset, length)
        self._end = (number, offset + length)
        self.size_bytes += length

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks that it is made of. Raises STORAGE_FAILED when one was never sealed."""
        found: list[Chunk] = []
        for segment in self._segments:
            if segment.chunk is None:
                raise refuse(Reason.STORAGE_FAILED, "A chunk of the snapshot was not written.")
            found.append(segment.chunk)
        return tuple(found)

    def to_bytes(self) -> bytes:
        """Its own file."""
        chunks, ranges = self.chunks, self._ranges
        head = {
            "rope": FORMAT, "bytes": self.size_bytes, "chunks": len(chunks), "ranges": len(ranges) // 3,
            "inline": self._inline_size,
        }  # fmt: skip
        lines = [json.dumps(head, separators=(",", ":"))]
        lines += [f'["{chunk.sha256}",{chunk.size_bytes}]' for chunk in chunks]
        step = 3 * _A_LINE
        lines += [
            json.dumps(ranges[start : start + step], separators=(",", ":")) for start in range(0, len(ranges), step)
        ]
        return "\n".join(lines).encode() + b"\n" + b"".join(self._inline)


@dataclass(frozen=True, slots=True)
class Listed:
    """A rope that was read: its chunks, flat triples of ranges, and where its own content begins in its file."""

    chunks: tuple[Chunk, ...]
    ranges: Sequence[int]
    inline_at: int
    size_bytes: int


def is_rope(path: str) -> bool:
    """Whether a file of a snapshot is a rope: its name says so."""
    return path.endswith(SUFFIX)


def read_rope(directory: _Reads, path: str) -> Listed:
    """What a rope is made of. Raises SNAPSHOT_CORRUPT, SNAPSHOT_TOO_NEW, LIMIT_EXCEEDED, FileNotFoundError; no chunk is read."""
    return parse(directory.read(path, MAX_ROPE_BYTES), str(directory.path / path))


def parse(data: bytes, where: str) -> Listed:
    """As `read_rope`; `where` names the file in messages."""
    lines = io.BytesIO(data)
    try:
        loaded: object = json.loads(lines.readline(1024))
        head = cast("dict[str, int]", loaded) if isinstance(loaded, dict) else {}
        if any(type(value) is not int or value < 0 for value in head.values()) or head.get("rope", 0) < 1:
            raise ValueError("no rope")
        if head["rope"] > FORMAT:
            raise refuse(Reason.SNAPSHOT_TOO_NEW, f"{where} has format {head['rope']}; {FORMAT} is known here.")
        if set(head) != {"rope", "bytes", "chunks", "ranges", "inline"}:
            raise ValueError("its first line")
        if head["chunks"] > MAX_CHUNKS or head["ranges"] > MAX_RANGES:
            raise refuse(Reason.LIMIT_EXCEEDED, f"{where} has too many chunks or ranges.")
        chunks = tuple(_chunk(json.loads(lines.readline(256))) for _ in range(head["chunks"]))
        ranges: list[int] = []
        while len(ranges) < 3 * head["ranges"]:
            some: object = json.loads(lines.readline(128 << 10))
            if not isinstance(some, list) or set(map(type, cast("list[object]", some))) != {int}:
                raise ValueError("a line of ranges")
            ranges += cast("list[int]", some)
        inline_at = lines.tell()
        _check_ranges(ranges, head, chunks, len(data) - inline_at)
    except SafepointError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is no rope: {str(error)[:100]}.") from None
    return Listed(chunks, ranges, inline_at, head["bytes"])


def open_rope(directory: Directory, path: str, chunks: Chunks) -> BinaryIO:
    """The content of a rope, to be read from its beginning to its end. Raises as `read_rope`, now or while it is read."""
    return cast("BinaryIO", io.BufferedReader(_Stream(directory.read(path, MAX_ROPE_BYTES), path, chunks), _BUFFER))


def open_content(path: Path) -> BinaryIO:
    """The content of a file of a snapshot, a rope or not, where it lies: <root>/snapshots/<id>/<participant>/<file>.

    For files that were verified. Raises OSError as `open` does, and as `open_rope`.
    """
    if not is_rope(path.name):
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb", _BUFFER)
    with Directory.open(path.parent) as directory:
        return open_rope(directory, path.name, Chunks(root_of(path.parent)))


def root_of(part: Path) -> Path:
    """The root of the snapshot that a participant's directory is of."""
    return part.parents[2]


class _Stream(io.RawIOBase):
    """The bytes of a rope, a range at a time. Memory: its own file, and one buffer."""

    def __init__(self, data: bytes, path: str, chunks: Chunks) -> None:
        self._listed = parse(data, path)
        self._inline = data[self._listed.inline_at :]
        self._chunks = chunks
        self._next = 0  # in ranges
        self._left = (0, 0, 0)
        self._files: dict[int, tuple[int, ExitStack]] = {}

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        number, offset, left = self._left
        while not left:
            if self._next >= len(self._listed.ranges):
                return 0
            number, offset, left = self._listed.ranges[self._next : self._next + 3]
            self._next += 3
        length = min(left, len(view))
        if number == _INLINE:
            view[:length] = self._inline[offset : offset + length]
        else:
            view[:length] = read_exactly(self._file(number), offset, length)
        self._left = (number, offset + length, left - length)
        return length

    def close(self) -> None:
        for _, held in self._files.values():
            held.close()
        self._files = {}
        super().close()

    def _file(self, number: int) -> int:
        found = self._files.get(number)
        if found is None:
            while len(self._files) >= _OPEN_AT_ONCE:
                self._files.pop(next(iter(self._files)))[1].close()
            with ExitStack() as stack:
                file = stack.enter_context(self._chunks.opened(self._listed.chunks[number].sha256))
                found = self._files[number] = (file, stack.pop_all())
        return found[0]


def _chunk(line: Any) -> Chunk:
    sha256, size = line
    if type(sha256) is not str or not _SHA256.fullmatch(sha256) or type(size) is not int or size < 1:
        raise ValueError("a line of a chunk")
    return Chunk(sha256, size)


def _check_ranges(ranges: list[int], head: dict[str, int], chunks: Sequence[Chunk], inline: int) -> None:
    """Every range lies where it says, every chunk is used, and the lengths are those of the first line."""
    if len(ranges) != 3 * head["ranges"] or inline != head["inline"]:
        raise ValueError("its lengths")
    sizes = [chunk.size_bytes for chunk in chunks] + [inline]  # -1 is the last one
    used: set[int] = set()
    total = 0
    for number, offset, length in zip(
        islice(ranges, 0, None, 3), islice(ranges, 1, None, 3), islice(ranges, 2, None, 3), strict=True
    ):
        if not -1 <= number < len(chunks) or offset < 0 or length < 1 or offset + length > sizes[number]:
            raise ValueError("a range")
        used.add(number)
        total += length
    if total != head["bytes"] or len(used - {_INLINE}) != len(chunks) or len({c.sha256 for c in chunks}) != len(chunks):
        raise ValueError("its sums")
