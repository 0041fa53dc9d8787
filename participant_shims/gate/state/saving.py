"""One save of the sessions of a worker: encoded on the event loop, written in a thread, both in slices.

The rule: what is encoded while admission is closed is the cut; what is encoded before it is used for sessions that no
request has touched since, and for no others. Such *clean* sessions are looked at and not encoded, so that a pause depends on
what has changed. Whether a server's sessions may be left alone is what its source says (`isolation`); it is tried on a few at
each save, and one that has changed by itself ends it for the life of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from participant_shims.gate.state import codec, layout
from participant_shims.gate.state.exporting import Export, Made
from participant_shims.gate.state.file import TOO_LONG, SavedSession, Writer
from participant_shims.gate.state.shelf import Kept, RopeWriter, Shelf, session_digest

SLICE_S: Final = 0.005  # longest time on the loop before it gives way
AHEAD_SLICE_S: Final = 0.002  # the same while the server works
TRIED: Final = 16  # clean sessions that are encoded all the same, ahead of each save
TOO_MUCH: Final = "what it shares with others stands for more than a file may hold"
_SHARED: Final = (
    "The session of rollout {} has changed without a request of its own: from now on all sessions are encoded at every save,"
    " which takes longer."
)

Sessions = Mapping[str, tuple[str, int]]
Told = Callable[[int, int, int], None]  # bytes written or read, sessions done, sessions in all


@dataclass(frozen=True, slots=True)
class Encoding:
    """How sessions are encoded. `encode` gives None for one without state; `whole`: the server's own state, for the codec.

    `tracks`: a session changes by requests of its own alone, as long as it is kept nowhere but in `proven`.
    """

    header: dict[str, Any]
    encode: Callable[[str], Made | None]
    whole: Export | None = None
    tracks: bool = False
    proven: frozenset[str] = frozenset()


class Saving:
    """See the module. `chosen`: the sessions, with their owners. `excluded` are those that cannot be saved, and why."""

    def __init__(self, encoding: Encoding, chosen: Sessions, told: Told | None) -> None:
        self._encoding = encoding
        self._chosen = chosen
        self._told = told
        self._stopped = False
        self._tracks = encoding.tracks
        self.excluded: list[dict[str, Any]] = []
        self.found_shared = ""  # what was found of a server whose sessions change by themselves

    def stop(self) -> None:
        """End at the next slice."""
        self._stopped = True

    def exclude_all(self, reason: str) -> None:
        """None of them can be saved."""
        self.excluded += [_excluded(who, reason) for who in self._chosen.values()]

    # -- a file of its own

    async def to_file(self, path: Path) -> dict[str, Any]:
        """Write everything to one file. Raises OSError, and then removes it."""
        writer = Writer(path)
        try:
            await asyncio.to_thread(writer.open, self._encoding.header)
            if await self._write_shared(writer):
                await self._write_file(writer)
            digest = await asyncio.to_thread(writer.close)
        except BaseException:
            writer.discard()
            raise
        return self._done(writer.sessions, writer.size, path.name, writer.size, digest)

    async def _write_file(self, writer: Writer) -> None:
        batch: list[SavedSession] = []
        begun = time.monotonic()
        for done, session_id in enumerate(self._chosen, 1):
            _, made = self._encode(session_id)
            if made is not None:
                batch.append(SavedSession(session_id, *self._chosen[session_id], made.state))
            if time.monotonic() - begun > SLICE_S:
                self._leave_out(await asyncio.to_thread(writer.write_sessions, batch))
                self._tell(writer.size, done)
                batch, begun = [], time.monotonic()
        self._leave_out(await asyncio.to_thread(writer.write_sessions, batch))
        self._tell(writer.size, len(self._chosen))

    # -- pieces of chunks

    async def to_rope(self, path: Path, shelf: Shelf) -> dict[str, Any]:
        """Write what has changed, and a rope of everything. Raises STORAGE_*, OSError, and then removes the rope."""
        writer = RopeWriter(path, shelf)
        try:
            await asyncio.to_thread(shelf.settle, tidy=False)
            writer.open(self._encoding.header)
            order: list[Kept] = []
            if await self._write_shared(writer):
                stale = self._stale(shelf)
                if self._tracks and self._has_changed_by_itself(shelf):
                    self._tracks = False
                    stale = self._stale(shelf)
                await self._write_stale(writer, shelf, stale, SLICE_S)
                order = list(filter(None, map(shelf.kept.get, self._chosen)))
            self._remember(shelf)
            fits, others = writer.fitting(order)
            self._exclude(others, f"its session can't be saved: {TOO_MUCH}")
            digest = await asyncio.to_thread(writer.finish, fits)
        except BaseException:
            writer.discard()
            raise
        return self._done(writer.sessions, writer.size, path.name, writer.file_size, digest)

    async def ahead(self, shelf: Shelf, within_s: float) -> int:
        """Write what has changed, while the server works; how many sessions. Raises STORAGE_*."""
        until = time.monotonic() + within_s
        await asyncio.to_thread(shelf.settle, tidy=True)
        writer = RopeWriter(None, shelf)
        if self._shared() is None:
            return 0
        stale = self._stale(shelf)
        dirty = set(stale)
        try:
            tried = [session_id for session_id in self._chosen if session_id not in dirty] if self._tracks else []
            await self._write_stale(writer, shelf, stale, AHEAD_SLICE_S, until)
            await self._try_some(shelf, tried)
            self._remember(shelf)
            if self._encoding.whole is not None:
                self._encoding.whole.arrange(shelf.values)
            await asyncio.to_thread(writer.seal)
        except BaseException:
            writer.discard()
            raise
        return len(stale)

    def _stale(self, shelf: Shelf) -> list[str]:
        """The sessions that have to be encoded: all but the clean ones."""
        chosen, whole = self._chosen, self._encoding.whole
        for session_id in shelf.kept.keys() - chosen.keys():  # those that have ended
            shelf.drop(session_id)
        if not self._tracks:
            found = set(chosen)
        else:
            found = shelf.stale & chosen.keys()
            if chosen != shelf.owners:
                owner_of = shelf.owners.get
                found |= {session_id for session_id, owner in chosen.items() if owner_of(session_id) != owner}
            if whole is not None:
                found |= whole.moved(shelf.values) & chosen.keys()
                found |= {
                    name for name in shelf.referring if not whole.still_refers(shelf.kept[name].used)
                } & chosen.keys()
        if whole is not None:
            for session_id in found & shelf.kept.keys():
                shelf.release(shelf.kept[session_id])
            whole.owners = shelf.owned
        return [session_id for session_id in chosen if session_id in found] if found else []

    async def _write_stale(
        self, writer: RopeWriter, shelf: Shelf, stale: Sequence[str], slice_s: float, until: float = float("inf")
    ) -> None:
        batch: list[tuple[SavedSession, Kept, Kept | None]] = []
        clean = len(self._chosen) - len(stale)
        begun = time.monotonic()
        for done, session_id in enumerate(stale, 1):
            before = shelf.drop(session_id)
            encoded, made = self._encode(session_id)
            owner = self._chosen[session_id]
            if self._encoding.whole is not None:
                self._encoding.whole.note(session_id, shelf.values)
            if made is not None:
                kept = Kept(session_id, owner, made.used, made.owned)
                batch.append((SavedSession(session_id, *owner, made.state), kept, before))
                shelf.keep(kept)
            elif encoded:
                shelf.keep(Kept(session_id, owner, {}, (), whole=True))  # without state
            if (now := time.monotonic()) - begun > slice_s:
                await self._write(writer, shelf, batch)
                self._tell(writer.size, clean + done)
                if self._stopped or now > until:
                    return
                batch, begun = [], time.monotonic()
        await self._write(writer, shelf, batch)
        self._tell(writer.size, len(self._chosen))

    async def _write(
        self, writer: RopeWriter, shelf: Shelf, batch: list[tuple[SavedSession, Kept, Kept | None]]
    ) -> None:
        self._leave_out(await asyncio.to_thread(writer.write_sessions, batch) if batch else (), shelf)
        for _, kept, _ in batch:
            shelf.written(kept)

    async def _try_some(self, shelf: Shelf, clean: Sequence[str]) -> None:
        """Encode a few clean sessions; those that differ are suspects, until it shows whether a request of theirs has run."""
        if self._encoding.whole is not None:
            self._encoding.whole.owners = {}  # what they hold by now is not kept
        start = shelf.tried % max(1, len(clean))
        shelf.tried += TRIED
        for session_id in clean[start : start + TRIED]:
            await asyncio.sleep(0)
            known = shelf.kept.get(session_id)
            if self._stopped or known is None or known.dirty or not known.whole:
                continue
            _, made = self._encode(session_id)
            line = session_digest(SavedSession(session_id, *known.owner, made.state)) if made is not None else b""
            if line != known.digest:
                shelf.suspects.add(session_id)

    def _has_changed_by_itself(self, shelf: Shelf) -> bool:
        """Whether a suspect has seen no request: asked when nothing runs any more."""
        suspects, shelf.suspects = shelf.suspects, set()
        for session_id in suspects & self._chosen.keys():
            known = shelf.kept.get(session_id)
            if known is not None and known.whole and not known.dirty:
                self.found_shared = _SHARED.format(self._chosen[session_id][0])
                return True
        return False

    def _remember(self, shelf: Shelf) -> None:
        if self._encoding.whole is not None:
            shelf.alive = self._encoding.whole.alive
        for held in shelf.values.values():  # of sessions that have ended
            for key in held.keys() - self._chosen.keys():
                if layout.session_of(key, self._chosen) is None:
                    del held[key]

    # -- both

    def _shared(self) -> dict[str, Any] | None:
        """What belongs to the server as a whole, empty when that is nothing; None when it can't be saved: then nothing can."""
        if self._encoding.whole is None:
            return {}
        try:
            shared = self._encoding.whole.shared()
            self._tracks = self._tracks and self._encoding.whole.session_places <= self._encoding.proven
            return shared
        except codec.Unencodable as e:
            self.exclude_all(f"state that belongs to the whole server can't be saved: {e}")
            return None

    async def _write_shared(self, writer: Writer | RopeWriter) -> bool:
        """Write what belongs to the server as a whole; False when that can't be saved: then nothing can."""
        shared = self._shared()
        if shared is None or not shared:
            return shared is not None
        if await asyncio.to_thread(writer.write_shared, shared):
            return True
        self.exclude_all(f"state that belongs to the whole server can't be saved: {TOO_LONG}")
        return False

    def _leave_out(self, too_long: Sequence[SavedSession], shelf: Shelf | None = None) -> None:
        self._exclude([saved.session_id for saved in too_long], f"its session can't be saved: {TOO_LONG}")
        for saved in too_long:
            if shelf is not None:
                shelf.drop(saved.session_id)

    def _exclude(self, session_ids: Sequence[str], reason: str) -> None:
        self.excluded += [_excluded(self._chosen[session_id], reason) for session_id in session_ids]

    def _encode(self, session_id: str) -> tuple[bool, Made | None]:
        """Whether the session can be saved, and what it is; None for one without state."""
        try:
            return True, self._encoding.encode(session_id)
        except codec.Unencodable as e:
            self._exclude([session_id], f"its session can't be saved: {e}")
            return False, None

    def _done(self, sessions: int, size: int, name: str, file_size: int, digest: str) -> dict[str, Any]:
        shared = self._encoding.whole.shared_sha256 if self._encoding.whole is not None else ""
        file = {"path": name, "size": file_size, "sha256": digest}
        return {"sessions": sessions, "bytes": size, "file": file, **({"shared": shared} if shared else {})}

    def _tell(self, size: int, done: int) -> None:
        if self._told is not None:
            self._told(size, done, len(self._chosen))


def _excluded(who: tuple[str, int], reason: str) -> dict[str, Any]:
    return {"rollout_id": who[0], "attempt": who[1], "reason": reason[:500]}
