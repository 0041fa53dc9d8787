"""Chunks in an object store: `chunks` says what a chunk is; here it is an object that is made once, and never touched.

The rule: nobody relies on an object that may be about to be deleted. An object of a chunk is deleted at the earliest GRACE_S after
it was written, when no part names the chunk, or when a younger object has the same bytes; and a save relies only on those that are
younger than TRUST_S, and writes others again beside them. What lies between, half a day, is longer than any operation, so one
that relied on an object has written its name, or has ended, before anybody looks whether it is needed. All ages are by the clock
of the store.

    <root>/chunks/<first two digits>/<sha256>.<n>      the n-th object of those bytes

Everything here blocks. Safe for several threads.
"""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from coordinator.wire import failpoints
from coordinator.wire.beneath import FileDigest, digest_of, storage_error
from coordinator.wire.chunks import CHUNKS, Chunk, Chunks, Found
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.names import Names

GRACE_S: Final = 24 * 3600.0
TRUST_S: Final = 12 * 3600.0
_KEY: Final = re.compile(rf"{CHUNKS}/[0-9a-f]{{2}}/([0-9a-f]{{64}})\.([1-9][0-9]{{0,8}})")


class StoredChunks:
    """The chunks of one root."""

    grace_s: ClassVar[float] = GRACE_S

    def __init__(self, names: Names, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._names = names
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[Chunk, float] = {}  # when we no longer rely on an object that we have seen
        self._looked = False

    def send(self, chunk: Chunk, source: Chunks) -> bool:
        """Have the chunk in the store for a save that names it, from a local one; whether it was sent.

        Raises STORAGE_FULL, STORAGE_FAILED, SNAPSHOT_CORRUPT when the local one is not what it says.
        """
        with self._lock:
            if not self._looked:
                self._look()
            if self._until.get(chunk, 0.0) > self._clock():
                return False
        began = self._clock()
        newest = max((number for _, number in self._objects(chunk.sha256)), default=0)
        source.check(chunk)
        with source.opened(chunk.sha256) as file:
            self._names.create(self._key(chunk.sha256, newest + 1), file)
        with self._lock:
            self._until[chunk] = began + TRUST_S
        return True

    def relied_upon(self, chunk: Chunk) -> bool:
        """Whether a save may name it now."""
        with self._lock:
            return self._until.get(chunk, 0.0) > self._clock()

    def check(self, chunk: Chunk) -> None:
        """Read every byte. Raises SNAPSHOT_CORRUPT for a chunk that is missing or another."""
        if digest_of(self.read(chunk.sha256)) != FileDigest(chunk.size_bytes, chunk.sha256):
            raise refuse(
                Reason.SNAPSHOT_CORRUPT,
                f"The chunk {self._where(chunk.sha256)} is damaged: its bytes are not those that were saved.",
            )

    def read(self, sha256: str) -> Iterator[bytes]:
        """The bytes of a chunk, unchecked. Raises SNAPSHOT_CORRUPT when it is missing."""
        for key, _ in sorted(self._objects(sha256), key=lambda found: -found[1]):
            try:
                yield from self._names.chunks(key)
            except FileNotFoundError:
                continue  # deleted, since a younger one has come
            return
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"The chunk {self._where(sha256)} is missing.")

    @contextmanager
    def opened(self, sha256: str) -> Generator[int]:
        """A copy of a chunk, open for reading. Raises as `read`."""
        with tempfile.TemporaryFile() as file:
            for part in self.read(sha256):
                file.write(part)
            file.flush()
            yield file.fileno()

    def all(self) -> Iterator[Found]:
        """Every object of a chunk."""
        for found in self._names.all(f"{CHUNKS}/"):
            if (match := _KEY.fullmatch(found.key)) is not None:
                yield Found(match[1], found.size_bytes, found.written_s, found.key)

    def touched_s(self, name: str, /) -> float | None:
        """When an object was written; None when it is not there."""
        found = self._names.info(name)
        return found.written_s if found is not None else None

    def remove(self, name: str, /) -> None:
        """Delete an object of a chunk. One that is not there is no error. Raises STORAGE_FAILED."""
        self._reach("chunks.before_remove", name)
        self._names.delete(name)
        self._reach("chunks.after_remove", name)

    def discard_temporaries(self, older_than_s: float) -> None:
        """There are none."""

    def _look(self) -> None:
        """What is there and young enough. Once: what others write afterwards is found when it is to be made again."""
        now_s, now = 0.0, self._clock()
        for found in self.all():
            now_s = now_s or self._names.now_s()
            chunk, left = Chunk(found.sha256, found.size_bytes), TRUST_S - (now_s - found.touched_s)
            self._until[chunk] = max(self._until.get(chunk, 0.0), now + left)
        self._looked = True

    def _objects(self, sha256: str) -> list[tuple[str, int]]:
        files, _ = self._names.near(f"{CHUNKS}/{sha256[:2]}/{sha256}.")
        return [(found.key, int(match[2])) for found in files if (match := _KEY.fullmatch(found.key)) is not None]

    def _key(self, sha256: str, number: int) -> str:
        return f"{CHUNKS}/{sha256[:2]}/{sha256}.{number}"

    def _where(self, sha256: str) -> str:
        return f"{self._names.url}/{CHUNKS}/{sha256[:2]}/{sha256}"

    def _reach(self, place: str, name: str) -> None:
        try:
            failpoints.reach(place, name)
        except OSError as error:
            raise storage_error(error, f"deleting {self._names.url}/{name}") from error
