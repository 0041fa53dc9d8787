"""Chunks: sealed files that the parts of several snapshots share, so that what has not changed is not written again.

The rule: a chunk is named by the SHA-256 of its bytes, is there whole and durable or not at all, and is never changed. A
snapshot refers to chunks by name and size; whoever writes one that is there already has written nothing. Deletion is the
coordinator's alone, and only of chunks that no part names and nobody has written or asked for in a while (`touch`).

Whoever finds a damaged chunk dates it to 1970, so that no save relies on it: the next one writes again what it needs of it.
Where that comes to the same bytes it is put right, for every snapshot that names it.

    <root>/chunks/<first two digits>/<sha256>

Standard library only. Everything here blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, FileDigest, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse

CHUNKS: Final = "chunks"
GRACE_S: Final = 3600.0  # longer than any operation, and than writers rely on a touch (SETTLED_FOR_S of shims)
SEAL_AT: Final = 8 << 20  # bytes; one larger record is a chunk of its own
_DAMAGED_S: Final = 0.0  # the time of last use that says so
_NAME: Final = re.compile(r"[0-9a-f]{64}")
_FOLDER: Final = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk as a snapshot names it. `sha256`: lower-case hex."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk as it lies there; `touched_s`: when it was last written or asked for, by the clock of the storage.

    `name`: by which it is removed; in a store, where several objects may have its bytes, that of one.
    """

    sha256: str
    size_bytes: int
    touched_s: float
    name: str


class Chunks:
    """The chunks below a snapshot root, which is configured and trusted. Makes what is missing when it writes.

    That the name of a folder is durable is seen to once, not for each chunk: none of us removes one.
    """

    grace_s: ClassVar[float] = GRACE_S

    def __init__(self, root: Path) -> None:
        self.root = root
        self._durable: set[str] = set()

    def write(self, data: bytes) -> Chunk:
        """Make the chunk of these bytes, durably. One that is there and damaged is put right, since its name says what it was.

        Raises STORAGE_FULL, STORAGE_FAILED: then it is not there.
        """
        digest = FileDigest(len(data), hashlib.sha256(data).hexdigest())
        with self._told(digest.sha256):
            failpoints.reach("chunks.before_write", digest.sha256)
        with self._folder(digest.sha256, make=True) as folder:
            try:
                folder.write_new(digest.sha256, data, digest)
            except FileExistsError:
                if folder.digest(digest.sha256) != digest:
                    folder.replace(digest.sha256, data)
                self._sync(folder)  # whoever made it may have failed, or died, before its name was durable
                folder.touch(digest.sha256)
        return Chunk(digest.sha256, digest.size_bytes)

    def has(self, chunk: Chunk) -> bool:
        """Whether it is there with its size, and not known to be damaged. Reads no byte."""
        try:
            with self._folder(chunk.sha256) as folder:
                return _is_sound(folder, chunk)
        except FileNotFoundError:
            return False

    def touch(self, chunk: Chunk) -> bool:
        """As `has`; what is there is not deleted for a while."""
        try:
            with self._folder(chunk.sha256) as folder:
                if not _is_sound(folder, chunk):
                    return False
                folder.touch(chunk.sha256)
                return True
        except FileNotFoundError:
            return False

    def check(self, chunk: Chunk) -> None:
        """Read every byte. Raises SNAPSHOT_CORRUPT for a chunk that is missing or another, SNAPSHOT_UNSAFE for a link.

        One that is damaged is not relied upon by saves from then on, if we may date it.
        """
        where = self.path(chunk.sha256)
        try:
            with self._folder(chunk.sha256) as folder:
                damaged = folder.digest(chunk.sha256) != FileDigest(chunk.size_bytes, chunk.sha256)
                if damaged:
                    with suppress(SafepointError):
                        folder.touch(chunk.sha256, _DAMAGED_S)
        except FileNotFoundError:
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"The chunk {where} is missing.") from None
        if damaged:
            raise refuse(
                Reason.SNAPSHOT_CORRUPT, f"The chunk {where} is damaged: its bytes are not those that were saved."
            )

    def take(self, chunk: Chunk, data: Iterator[bytes]) -> bool:
        """Make a chunk of what comes from elsewhere; False when it was there, whole. Raises SNAPSHOT_CORRUPT for other bytes."""
        with self._folder(chunk.sha256, make=True) as folder:
            expected = FileDigest(chunk.size_bytes, chunk.sha256)
            with suppress(FileNotFoundError):
                if folder.digest(chunk.sha256) == expected:
                    self._sync(folder)
                    folder.touch(chunk.sha256)
                    return False
                folder.remove_file(chunk.sha256)  # damaged: what comes has its bytes
            if folder.write_new(chunk.sha256, data) != expected:
                folder.remove_file(chunk.sha256)
                raise refuse(Reason.SNAPSHOT_CORRUPT, f"The chunk {chunk.sha256} that was read is damaged.")
            return True

    @contextmanager
    def opened(self, sha256: str) -> Generator[int]:
        """A chunk, open for reading. Raises SNAPSHOT_CORRUPT when it is missing, SNAPSHOT_UNSAFE."""
        try:
            with self._folder(sha256) as folder, folder.opened(sha256) as file:
                yield file
        except FileNotFoundError:
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"The chunk {self.path(sha256)} is missing.") from None

    def all(self) -> Iterator[Found]:
        """Every chunk that is there, by name. What has no name of a chunk is passed over."""
        try:
            with Directory.open(self.root) as top, top.child(CHUNKS) as chunks:
                for prefix in filter(_FOLDER.fullmatch, chunks.names()):
                    with chunks.child(prefix) as folder:
                        for name in filter(_NAME.fullmatch, folder.names()):
                            with suppress(FileNotFoundError):
                                size, touched_s = folder.size_and_time(name)
                                yield Found(name, size, touched_s, name)
        except FileNotFoundError:
            return

    def touched_s(self, sha256: str, /) -> float | None:
        """When a chunk was last written or asked for, by the clock of the file system; None when it is not there."""
        try:
            with self._folder(sha256) as folder:
                return folder.size_and_time(sha256)[1]
        except FileNotFoundError:
            return None

    def remove(self, sha256: str, /) -> None:
        """Delete a chunk. One that is not there is no error. Raises STORAGE_FAILED."""
        with self._told(sha256):
            failpoints.reach("chunks.before_remove", sha256)
        with suppress(FileNotFoundError), self._folder(sha256) as folder:
            folder.remove_file(sha256)
        with self._told(sha256):
            failpoints.reach("chunks.after_remove", sha256)

    def discard_temporaries(self, older_than_s: float) -> None:
        """Remove what writers that were killed have left, of before that time. Raises STORAGE_FAILED."""
        with suppress(FileNotFoundError), Directory.open(self.root) as top, top.child(CHUNKS) as chunks:
            for prefix in filter(_FOLDER.fullmatch, chunks.names()):
                with chunks.child(prefix) as folder:
                    for name in folder.names():
                        with suppress(FileNotFoundError):
                            if name.startswith(".") and folder.size_and_time(name)[1] < older_than_s:
                                folder.remove_file(name)

    def path(self, sha256: str) -> Path:
        """Where a chunk lies, for messages."""
        return self.root / CHUNKS / sha256[:2] / sha256

    def _folder(self, sha256: str, *, make: bool = False) -> Directory:
        if not _NAME.fullmatch(sha256):
            raise refuse(Reason.SNAPSHOT_UNSAFE, f"{sha256[:80]!r} is no name of a chunk.")
        prefix = sha256[:2]
        with Directory.open(self.root) as top:
            if not make or prefix in self._durable:
                try:
                    with top.child(CHUNKS) as chunks:
                        return chunks.child(prefix)
                except FileNotFoundError:
                    if not make:
                        raise
            with top.ensure_child(CHUNKS) as chunks:
                there = chunks.names()
                folder = chunks.ensure_child(prefix)  # and with its name those of all that were there
                self._durable.update(there, (prefix,))
                return folder

    @contextmanager
    def _told(self, sha256: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, f"using {self.path(sha256)}") from error

    def _sync(self, directory: Directory) -> None:
        try:
            directory.sync()
        except OSError as error:
            raise storage_error(error, f"writing below {self.root / CHUNKS}") from error


def _is_sound(folder: Directory, chunk: Chunk) -> bool:
    size, when_s = folder.size_and_time(chunk.sha256)
    return size == chunk.size_bytes and when_s != _DAMAGED_S


class Segment:
    """A chunk in the making, or one that is there: `chunk` is None until it is sealed."""

    __slots__ = ("chunk",)

    def __init__(self) -> None:
        self.chunk: Chunk | None = None


Piece = tuple[Segment, int, int]  # bytes of a segment: where they begin, and how many


class ChunkWriter:
    """Gathers records into chunks. Not for two threads at once. What was not sealed is in no chunk."""

    def __init__(self, chunks: Chunks, seal_at: int = SEAL_AT) -> None:
        self._chunks = chunks
        self._seal_at = seal_at
        self._parts: list[bytes] = []
        self._size = 0
        self._segment = Segment()

    def add(self, record: bytes) -> Piece:
        """Where the record is. Writes a chunk when enough has been gathered: raises STORAGE_FULL, STORAGE_FAILED."""
        if self._parts and self._size + len(record) > self._seal_at:
            self.seal()
        piece = (self._segment, self._size, len(record))
        self._parts.append(record)
        self._size += len(record)
        if self._size >= self._seal_at:
            self.seal()
        return piece

    def seal(self) -> None:
        """Write what was gathered. Raises STORAGE_FULL, STORAGE_FAILED: its pieces are of no chunk then."""
        parts, segment = self._parts, self._segment
        self._parts, self._size, self._segment = [], 0, Segment()
        if parts:
            segment.chunk = self._chunks.write(b"".join(parts))


def read_exactly(file: int, offset: int, length: int) -> bytes:
    """Bytes of an open chunk. Raises SNAPSHOT_CORRUPT when it ends before them, STORAGE_FAILED."""
    parts: list[bytes] = []
    while length > 0:
        try:
            part = os.pread(file, length, offset)
        except OSError as error:
            raise storage_error(error, "reading a chunk") from error
        if not part:
            raise refuse(Reason.SNAPSHOT_CORRUPT, "A chunk is shorter than what is said to be in it.")
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


def wasted(live: Mapping[Segment, int], few: int = 32) -> set[Segment]:
    """Segments that are better written again than kept: not sealed, less than half in use, or one of very many small ones.

    `live`: bytes in use of each. It bounds what a root holds to twice what its snapshots need, and the files of a rope.
    """
    sizes = {segment: segment.chunk.size_bytes if segment.chunk is not None else 0 for segment in live}
    small = [segment for segment, size in sizes.items() if size < SEAL_AT // 8]
    found = {segment for segment, size in sizes.items() if live[segment] * 2 < size or not size}
    return found | set(small) if len(small) > few else found
