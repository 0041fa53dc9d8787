"""Sessions as pieces of chunks: one that has not changed since an earlier save is neither encoded nor written again.

The rule: what is not known to be as it was is encoded again. A session is *clean* when no request of it has run since it was
encoded (`touch`), it has its owner and the values that it had at its places, and what it refers to of the server as a whole
has the same numbers. Who may rely on that is decided elsewhere (`isolation`); a session of any other server is encoded anew,
and only its bytes are compared.

`Shelf` is what one process remembers from save to save; `RopeWriter` writes one session file as a rope, the lines of which
are those of `file`. Encoding is on the event loop, writing in one thread at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from coordinator.wire import failpoints
from coordinator.wire.chunks import Chunk, Chunks, ChunkWriter, Piece, Segment, wasted
from coordinator.wire.rope import Rope
from participant_shims.gate.state.file import Lines, SavedSession

SETTLED_FOR_S: Final = 300.0  # chunks that were touched are left alone for longer than that (coordinator.sweeping)
_STANDS_FOR: Final = attrgetter("stands_for")
INLINE_UP_TO: Final = 64 << 10  # bytes of what belongs to the server as a whole; more is worth sharing


@dataclass(slots=True)
class Kept:
    """One session as it was encoded. `line` is None for one without state; `whole`: it has been written, and may be used."""

    session_id: str
    owner: tuple[str, int]
    used: Mapping[int, int]  # what of the server's own objects it refers to: id to number
    owned: tuple[object, ...]  # objects of the server's classes in it
    dirty: bool = False
    whole: bool = False
    digest: bytes = b""
    line: Piece | None = None
    blobs: tuple[str, ...] = ()
    stands_for: int = 0  # bytes of all blobs where they belong, at most


class Shelf:
    """What of the sessions of one worker lies in chunks of one root.

    What a pause has to look at is noted as it changes, on the event loop: a look at each session costs what there is.
    """

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.kept: dict[str, Kept] = {}
        self.owners: dict[str, tuple[str, int]] = {}  # of those that are kept
        self.stale: set[str] = set()  # those of them that are dirty, or not whole
        self.referring: set[str] = set()  # those that refer to objects of the server
        self.owned: dict[int, tuple[str, object]] = {}  # by id: objects of the server's classes, and whose they are
        self.blobs: dict[str, Piece] = {}
        self.shared: tuple[bytes, Piece, tuple[str, ...]] | None = None  # digest of the line, where it is, its blobs
        self.values: dict[str, dict[Any, Any]] = {}  # what each place held when its session was encoded, by key
        self.alive: object = None  # the objects whose ids are in `used`
        self.tried = 0  # how many clean sessions were encoded to see whether they are
        self.suspects: set[str] = set()  # those that were not, unless a request of theirs was running
        self._settled_at = float("-inf")

    def touch(self, session_id: str) -> None:
        """A request of the session has run; of any session when it is not known which."""
        for name in self.kept.keys() if not session_id else self.kept.keys() & {session_id}:
            self.kept[name].dirty = True
            self.stale.add(name)

    def keep(self, kept: Kept) -> None:
        """A session that was encoded now: from here on a request that ends makes it dirty."""
        name = kept.session_id
        self.kept[name], self.owners[name] = kept, kept.owner
        if kept.used:
            self.referring.add(name)
        self.stale.add(name)
        self.written(kept)

    def written(self, kept: Kept) -> None:
        """It may be whole by now."""
        if kept.whole and not kept.dirty and self.kept.get(kept.session_id) is kept:
            self.stale.discard(kept.session_id)

    def drop(self, session_id: str) -> Kept | None:
        """What was kept of a session, which is kept no more."""
        found = self.kept.pop(session_id, None)
        if found is not None:
            del self.owners[session_id]
            self.stale.discard(session_id)
            self.referring.discard(session_id)
            self.release(found)
        return found

    def release(self, kept: Kept) -> None:
        """The objects of a session that is to be encoded again may be another's by now."""
        for at in map(id, kept.owned):
            if at in self.owned and self.owned[at][0] == kept.session_id:
                del self.owned[at]

    def doubt(self) -> None:
        """A write or a save has failed: what lies in no chunk must be found before anything is used."""
        self._settled_at = float("-inf")

    def settle(self, *, tidy: bool) -> None:
        """See that every chunk is still there, and keep it; what was in others is written again. `tidy`: also what wastes them.

        Raises STORAGE_FAILED. Reads no chunk.
        """
        if not tidy and time.monotonic() - self._settled_at < SETTLED_FOR_S:
            return
        used = self._used_blobs()
        self.blobs = {name: piece for name, piece in self.blobs.items() if name in used}
        live: dict[Segment, int] = {}
        for segment, _, length in self._pieces():
            live[segment] = live.get(segment, 0) + length
        gone = {s for s in live if s.chunk is None or not self.chunks.touch(s.chunk)}
        if tidy:
            gone |= wasted(live)
        if gone:
            self._forget(gone)
        self._settled_at = time.monotonic()

    def _used_blobs(self) -> set[str]:
        used = {name for kept in self.kept.values() for name in kept.blobs}
        return used | set(self.shared[2] if self.shared else ())

    def _pieces(self) -> list[Piece]:
        found = [kept.line for kept in self.kept.values() if kept.line is not None]
        return [*found, *self.blobs.values(), *([self.shared[1]] if self.shared else [])]

    def _forget(self, gone: set[Segment]) -> None:
        self.blobs = {name: piece for name, piece in self.blobs.items() if piece[0] not in gone}
        for kept in self.kept.values():
            if (kept.line is not None and kept.line[0] in gone) or not self.blobs.keys() >= set(kept.blobs):
                kept.whole = False
                self.stale.add(kept.session_id)
        if self.shared and (self.shared[1][0] in gone or not self.blobs.keys() >= set(self.shared[2])):
            self.shared = None


class RopeWriter(Lines):
    """Writes the session file of one save, or ahead of it (`path` None). As `file.Writer`; not for two threads at once."""

    def __init__(self, path: Path | None, shelf: Shelf) -> None:
        super().__init__()
        self.path = path
        self.size = 0  # bytes of content that were encoded so far
        self.sessions = 0
        self.chunks: tuple[Chunk, ...] = ()
        self.file_size = 0
        self._shelf = shelf
        self._out = ChunkWriter(shelf.chunks)
        self._named: list[str] = []  # blobs of the line that is being made
        self._named_size = 0
        self._head_stands_for = 0
        self._head: list[bytes | Piece] = []
        self._head_blobs: tuple[str, ...] = ()

    def open(self, header: dict[str, Any]) -> None:
        """Begin. Nothing is made yet."""
        failpoints.reach("sessions.before_write")
        self._head.append(self.header(header))

    def write_shared(self, shared: dict[str, Any]) -> bool:
        """What belongs to the server as a whole; False when no reader would take it. Raises STORAGE_*."""
        line = self.shared(shared)
        self._head_blobs, self._named = tuple(dict.fromkeys(self._named)), []
        self._head_stands_for, self._named_size = self._named_size, 0
        if len(line) > self.max_line:
            return False
        digest = hashlib.sha256(line).digest()
        known = self._shelf.shared
        if known is not None and known[0] == digest:
            self._head.append(known[1])
        elif len(line) <= INLINE_UP_TO:
            self._head.append(line)
        else:
            piece = self._out.add(line)
            self._shelf.shared = (digest, piece, self._head_blobs)
            self._head.append(piece)
        return True

    def write_sessions(self, sessions: list[tuple[SavedSession, Kept, Kept | None]]) -> list[SavedSession]:
        """Sessions, each with what is kept of it and what was kept before; those that no reader would take are returned.

        Raises STORAGE_*: these are not kept then.
        """
        too_long: list[SavedSession] = []
        for saved, kept, before in sessions:
            line = self.session(saved)
            kept.blobs, self._named = tuple(dict.fromkeys(self._named)), []
            kept.stands_for, self._named_size = self._named_size, 0
            if len(line) > self.max_line:
                too_long.append(saved)
                continue
            kept.digest = hashlib.sha256(line).digest()
            if before is not None and before.whole and before.digest == kept.digest and before.line is not None:
                kept.line = before.line
            else:
                kept.line = self._out.add(line)
            kept.whole = True
            self.size += len(line)
        return too_long

    def put_blob(self, digest: str, size: int, line: Callable[[], bytes]) -> bool:
        self._named.append(digest)
        self._named_size += (
            2 * size
        )  # as if it were nobody else's: what a file may stand for is bounded when it is finished
        if digest not in self._shelf.blobs:
            self._shelf.blobs[digest] = self._out.add(line())
        return True

    def seal(self) -> None:
        """What was written so far is durable. Raises STORAGE_*."""
        self._out.seal()

    def fitting(self, order: Sequence[Kept]) -> tuple[Sequence[Kept], list[str]]:
        """The sessions that one file may hold, as far as what their blobs stand for goes, and the names of the others."""
        size = self._head_stands_for + sum(map(_STANDS_FOR, order))
        if size <= self.limits.total_bytes and len(self._shelf.blobs) <= self.limits.parts:
            return order, []
        fits: list[Kept] = []
        others: list[str] = []
        stands_for, blobs = self._head_stands_for, set(self._head_blobs)
        for kept in order:
            if kept.blobs:
                more = [name for name in kept.blobs if name not in blobs]
                stands_for += kept.stands_for
                if stands_for > self.limits.total_bytes or len(blobs) + len(more) > self.limits.parts:
                    stands_for -= kept.stands_for
                    others.append(kept.session_id)
                    continue
                blobs.update(more)
            fits.append(kept)
        return fits, others

    def finish(self, order: Sequence[Kept]) -> str:
        """Write the rope of these sessions, durably; the SHA-256 hex of its own file. Raises STORAGE_*, OSError."""
        assert self.path is not None
        self.seal()
        rope, blobs = Rope(), self._shelf.blobs
        first, *rest = self._head
        assert isinstance(first, bytes)
        rope.add_inline(first)
        self._emit(rope, self._head_blobs)
        for part in rest:
            if isinstance(part, bytes):
                rope.add_inline(part)
            else:
                rope.add(part)
        have = self.blobs
        pieces: list[Piece] = []
        for kept in order:
            if kept.line is None:
                continue
            for digest in kept.blobs:
                if digest not in have:
                    have.add(digest)
                    pieces.append(blobs[digest])
            pieces.append(kept.line)
            self.sessions += 1
        rope.add(*pieces)
        rope.add_inline(self.footer(self.sessions))
        data = rope.to_bytes()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            failpoints.reach("sessions.before_fsync")
            os.fsync(file.fileno())
        self.chunks, self.size, self.file_size = rope.chunks, rope.size_bytes, len(data)
        return hashlib.sha256(data).hexdigest()

    def _emit(self, rope: Rope, digests: tuple[str, ...]) -> None:
        for digest in digests:
            if digest not in self.blobs:
                self.blobs.add(digest)
                rope.add(self._shelf.blobs[digest])

    def discard(self) -> None:
        """Remove what was made of the file. Chunks stay: what they hold may be used the next time."""
        self._shelf.doubt()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


class _Unwritten(Lines):
    def put_blob(self, digest: str, size: int, line: Callable[[], bytes]) -> bool:
        return True


def session_digest(saved: SavedSession) -> bytes:
    """The digest of the session's line, as `Kept` has it."""
    return hashlib.sha256(_Unwritten().session(saved)).digest()
