"""The journal of a coordinator whose root is in an object store: as `journal`, without rename and append.

The rule: one object an entry, made once, numbered without a gap; whoever is second at a number is told so by the store. A start
makes the next number of every log that a coordinator before it may still write, so that one that slept finds its log sealed at
its next entry, however long it slept.

    coordinator/epoch/<n>               made once; the highest n may act
    coordinator/journal/<n>/0           what mattered when epoch n began, whole: from here on it has a log
    coordinator/journal/<n>/<number>    an entry; or again what mattered, after which nothing before it is read; or the seal
    coordinator/alive/<n>-<k>           a coordinator was here when this was written

A start reads the newest log, raises the epoch, seals downwards from there until it meets a log, reads that to its seal, and makes
its own. So a log is complete, or it is not there; a start that dies on the way has sealed what it replaces and left nothing that
counts. Seals stay, 200 bytes a start: without one an old number could be made again.

An entry whose answer was lost is settled before anything else is written: its number is taken by something that says nothing, so
that a request that is still under way comes second, or what is there is compared.

Everything here blocks: callers on an event loop use a thread. One writer; not safe for several threads at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from coordinator.journal import ADDRESS_NAME, announced
from coordinator.journal_file import (
    ACCEPT,
    HEAD,
    MAX_ENTRY_BYTES,
    Contents,
    Entry,
    damaged,
    entries_in,
    line,
    lost,
    whole,
)
from coordinator.wire import failpoints
from coordinator.wire.beneath import storage_error
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.folder import Folder
from coordinator.wire.ids import OperationId
from coordinator.wire.names import Names, Stored, token
from coordinator.wire.stored_folder import StoredFolder, Where

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

FOLDER: Final = "coordinator"
ROTATE_ENTRIES: Final = 1000
ROTATE_BYTES: Final = 16 << 20
ALIVE_EVERY_S: Final = 10.0
_EPOCHS: Final = f"{FOLDER}/epoch/"
_LOGS: Final = f"{FOLDER}/journal/"
_ALIVE: Final = f"{FOLDER}/alive/"
_SEAL: Final = "seal"
_NOTHING: Final = "nothing"  # in place of an entry that was not made
_WRITER: Final = "writer"
_KEPT_EPOCHS: Final = 8
_LAST_NUMBER: Final = 10**18 - 1
_AT_ONCE: Final = 8
_LARGEST: Final = 2 * MAX_ENTRY_BYTES + (1 << 20)


@dataclass(slots=True)
class _Log:
    """What was read of the log of one epoch. `contents`: None without one. `sealed_by`: an epoch; zero: by nobody."""

    contents: Contents | None
    next: int
    sealed_by: int = 0


class StoredJournal:
    """The log of one coordinator. `epoch` is ours; `contents` is what is known, kept up to date."""

    broken = ""  # why nothing can be appended any more, until a restart

    def __init__(
        self, names: Names, above: Mapping[str, int] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raise the epoch, seal what was before, read it, and begin a log. `above` as for `Journal`.

        Raises STORAGE_FULL, STORAGE_FAILED (also for a journal that is lost), SNAPSHOT_CORRUPT for a damaged one, and FENCED when
        another start was faster; then nobody has heard of us.
        """
        self._names = names
        self._clock = clock
        self._writer = secrets.token_hex(8)
        self._next = 0
        self._first = 0  # number of the object that says what mattered last
        self._size = 0
        self._doubt: bytes | None = None  # what may be there at the next number, or not
        self._replaced = 0  # the epoch that has sealed our log
        self._alive = 0
        self._alive_at = -ALIVE_EVERY_S
        self.path = Where(names.url) / FOLDER
        self.contents = Contents()
        there = self._names.all(f"{FOLDER}/")
        alive_before = max((found.written_s for found in there), default=0.0)
        accepted = any(found.key == f"{FOLDER}/{ACCEPT}" for found in there)
        if not accepted:
            self._look(there)  # before the epoch: a start that is refused must not end the coordinator that runs
        self.epoch = self._raise_epoch(there, above or {})
        contents = self._seal_below(accepted)
        if contents is None and not accepted:
            raise lost(self.path, f"epoch/{self.epoch}")
        self.contents = contents or Contents()
        self.contents.nobody_is_here(alive_before)
        self._begin()
        self._tidy(there)

    # ---- a start ----------------------------------------------------------------------------------------------------

    def _look(self, there: list[Stored]) -> None:
        """Read the newest log and change nothing; make the first where no coordinator has been. Raises as the start."""
        logs = _logs(there)
        try:
            if any(self._read(epoch, logs[epoch]).contents is not None for epoch in sorted(logs, reverse=True)):
                return
        except SafepointError:
            again = self._names.all(f"{FOLDER}/")
            if max(_logs(again), default=0) <= max(logs):
                raise
            self._look(again)  # another start has made a log, and deleted what it replaces
            return
        signs = [found.key for found in there if found.key.startswith((_EPOCHS, _LOGS, f"{FOLDER}/{ADDRESS_NAME}"))]
        if signs:
            raise lost(self.path, signs[0])
        try:
            self._names.create(_key(0, 0), whole(0, (), writer=self._writer))
        except FileExistsError:
            pass  # another start was faster

    def _raise_epoch(self, there: list[Stored], above: Mapping[str, int]) -> int:
        known = _epochs(there)
        floors = [*above.values(), announced(self.folder()), *known, *_logs(there)]
        epoch = max(floors, default=0) + 1
        while epoch <= _LAST_NUMBER:
            failpoints.reach("journal.before_epoch")
            try:
                self._names.create(f"{_EPOCHS}{epoch}", token())
            except FileExistsError:
                epoch += 1  # another start was faster
                continue
            failpoints.reach("journal.after_epoch")
            return epoch
        raise refuse(
            Reason.SNAPSHOT_CORRUPT, f"In {self.path} no coordinator can start: there is no higher number.",
            next_step="Delete what has that number, and start again.",
        )  # fmt: skip

    def _seal_below(self, accepted: bool) -> Contents | None:
        """Seal every log that a coordinator before us may write, from the newest down to the first that is one. What it says."""
        there = self._names.all(f"{FOLDER}/")
        logs = _logs(there)
        for epoch in sorted({*_epochs(there), *logs}, reverse=True):
            if epoch > self.epoch:
                raise _fenced()
            try:
                contents = self._seal(epoch, logs.get(epoch, []), accepted) if epoch < self.epoch else None
            except SafepointError:
                if not self.owns_epoch():
                    raise _fenced() from None  # it has deleted what we were reading
                raise
            if contents is not None:
                return contents
        return None

    def _seal(self, epoch: int, numbers: list[int], accepted: bool) -> Contents | None:
        while True:
            found = _Log(None, max(numbers, default=-1) + 1) if accepted else self._read(epoch, numbers)
            if found.sealed_by > self.epoch:
                raise _fenced()
            if found.sealed_by:
                return found.contents
            seal = Entry(OperationId(""), _SEAL, {"epoch": self.epoch, _WRITER: self._writer})
            try:
                self._names.create(_key(epoch, found.next), line(seal))
            except FileExistsError:  # it has gone on, or somebody else has sealed it
                numbers = [*numbers, found.next]
                continue
            return found.contents

    def _begin(self) -> None:
        failpoints.reach("journal.before_file")
        data = whole(self.epoch, self.contents.entries(), writer=self._writer)
        try:
            self._names.create(_key(self.epoch, 0), data)
        except FileExistsError:
            raise _fenced() from None
        self._next, self._size = 1, 0
        failpoints.reach("journal.after_file")

    def _tidy(self, there: list[Stored]) -> None:
        """Delete what no start will read: of each older log all but its last object, which is its seal."""
        doomed = [f"{FOLDER}/{ACCEPT}"] if any(found.key == f"{FOLDER}/{ACCEPT}" for found in there) else []
        doomed += [f"{_EPOCHS}{epoch}" for epoch in sorted(_epochs(there))[:-_KEPT_EPOCHS]]
        for epoch, numbers in _logs(there).items():
            doomed += [_key(epoch, number) for number in numbers if epoch < self.epoch and number != max(numbers)]
        doomed += [found.key for found in there if found.key.startswith(_ALIVE)]
        self._delete(doomed)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _read(self, epoch: int, numbers: list[int]) -> _Log:
        """The log of an epoch. `numbers`: of its objects that are known. Raises SNAPSHOT_CORRUPT, STORAGE_FAILED."""
        if not numbers:
            return _Log(None, 0)
        last = max(numbers)
        first = last
        there = set(numbers)
        while first - 1 in there:
            first -= 1  # what is below a gap was deleted, when it was no longer needed
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            objects = list(threads.map(partial(self._object, epoch), range(first, last + 1)))
        found = _Log(None, last + 1)
        for entries in objects:
            head, data = entries[0], entries[0].data
            if head.kind == HEAD:
                found.contents = Contents()
                for entry in entries[1:]:
                    found.contents.add(entry)
            elif head.kind == _SEAL and type(data.get("epoch")) is int:
                found.sealed_by = data["epoch"]
            elif head.kind != _NOTHING and found.contents is not None:
                found.contents.add(head)
        if found.contents is None and (first, last) != (0, 0) and not (found.sealed_by and first == last):
            raise self._damaged(_key(epoch, first), "has nothing before it")
        return found

    def _object(self, epoch: int, number: int) -> list[Entry]:
        key = _key(epoch, number)
        try:
            entries = entries_in(self._names.read(key, _LARGEST))
        except FileNotFoundError:
            raise self._damaged(key, "is gone") from None
        except SafepointError as error:
            if error.reason is Reason.LIMIT_EXCEEDED:
                raise self._damaged(key, "is larger than any that is written") from error
            raise
        if entries is None:
            raise self._damaged(key, "is damaged")
        return entries

    # ---- entries ----------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """Make an entry durable. Raises STORAGE_FULL or STORAGE_FAILED; then it is not there, and never will be, unless the store
        did not even say that; the next one settles it. Raises STALE_EPOCH when a coordinator after us has sealed our log.
        """
        if self.broken:
            raise refuse(Reason.STORAGE_FAILED, f"The journal has failed: {self.broken}. Restart the coordinator.")
        text = line(entry)
        if len(text) > MAX_ENTRY_BYTES:
            raise refuse(Reason.LIMIT_EXCEEDED, f"A journal entry is larger than {MAX_ENTRY_BYTES} bytes.")
        try:
            failpoints.reach("journal.before_append", entry.kind)
        except OSError as error:
            raise storage_error(error, f"writing the journal {self.path}") from error
        if self._doubt is not None:
            self._settle()
        self._put(text + self._signed())
        failpoints.reach("journal.after_append", entry.kind)
        self._size += len(text)
        self.contents.add(entry)
        if not self.contents.open and (self._next - self._first > ROTATE_ENTRIES or self._size > ROTATE_BYTES):
            self._rotate()

    def _put(self, data: bytes) -> None:
        while True:
            try:
                self._names.create(_key(self.epoch, self._next), data)
            except FileExistsError:
                if not self._is_ours():
                    raise self._why_taken() from None
                self._next += 1  # something of ours whose answer was lost
                continue
            except SafepointError:
                self._doubt = data
                made = False
                with suppress(SafepointError):
                    made = self._settle()
                if not made:
                    raise
                return
            self._next += 1
            return

    def _settle(self) -> bool:
        """After an answer of unknown effect: see to it that the entry will never be there, or find that it is. Which of them.

        Raises STORAGE_* while the store does not say: then nothing else can be written either.
        """
        key = _key(self.epoch, self._next)
        made = False
        try:
            self._names.create(key, line(Entry(OperationId(""), _NOTHING, {_WRITER: self._writer})))
        except FileExistsError:
            if not self._is_ours():
                raise self._why_taken() from None
            made = self._names.read(key, _LARGEST) == self._doubt
        self._doubt = None
        self._next += 1
        return made

    def _is_ours(self) -> bool:
        """Whether we have made the next number. Raises STORAGE_*."""
        entries = self._object(self.epoch, self._next)
        return any(entry.data.get(_WRITER) == self._writer for entry in entries)

    def _why_taken(self) -> SafepointError:
        head = self._object(self.epoch, self._next)[0]
        by = head.data.get("epoch")
        if head.kind == _SEAL and type(by) is int:
            self._replaced = by
            return Refused(self._stale())
        self.broken = f"{self.path}/journal/{self.epoch}/{self._next} is not ours"
        return refuse(Reason.STORAGE_FAILED, f"The journal has failed: {self.broken}.")

    def _signed(self) -> bytes:
        """What makes an entry one that nobody else writes, and no other one of ours."""
        return line(Entry(OperationId(""), _WRITER, {_WRITER: self._writer, "number": self._next}))

    def _rotate(self) -> None:
        """Say again what matters. A failure is none of the caller's: the entry is durable, and the next one tries again."""
        before = self._next
        try:
            self._put(whole(self.epoch, self.contents.entries(), writer=self._writer, number=str(before)))
        except SafepointError as error:
            log.warning("the journal goes on without a rotation: %s", error)
            return
        old, self._first, self._size = self._first, self._next - 1, 0
        self._delete(_key(self.epoch, number) for number in range(old, self._first))

    # ---- whose it is ------------------------------------------------------------------------------------------------

    def lost(self) -> Problem | None:
        """Why what lies in the root is not ours to change any more, if so. Raises STORAGE_* when the store does not say."""
        if self._replaced:
            return self._stale()
        newest = newest_epoch(self._names)
        if newest > self.epoch:
            self._replaced = newest
            return self._stale()
        if newest < self.epoch:
            return Problem(
                Reason.STORAGE_FAILED, f"{self.path}/epoch/{self.epoch} is gone: somebody has deleted it.",
                next_step="Start the coordinator again.",
            )  # fmt: skip
        return None

    def owns_epoch(self) -> bool:
        """Whether what lies in the root is ours to change. Raises STORAGE_* when the store does not say."""
        return self.lost() is None

    def require_epoch(self) -> None:
        """Raise what `lost` says."""
        if (problem := self.lost()) is not None:
            raise Refused(problem)

    def note_alive(self) -> None:
        """Note that we are here, for whoever comes after us; at most each ALIVE_EVERY_S. Raises STORAGE_*."""
        now = self._clock()
        if now - self._alive_at < ALIVE_EVERY_S:
            return
        self._names.replace(f"{_ALIVE}{self.epoch}-{self._alive + 1}", token())
        if self._alive:
            self._names.delete(f"{_ALIVE}{self.epoch}-{self._alive}")
        self._alive, self._alive_at = self._alive + 1, now

    def keep_in_place(self) -> None:
        """Nobody can put another object in place of one of ours; what is deleted is found by the next start."""

    def spend_reserve(self) -> bool:
        """There is none: what cannot be written fails the beginning of an operation, and an end needs no store."""
        return False

    def with_reserve(self, work: Callable[[], ResultT]) -> ResultT:
        """Do it."""
        return work()

    def folder(self) -> Folder:
        """<root>/coordinator."""
        return StoredFolder(self._names).child(FOLDER)

    def close(self) -> None:
        """Nothing is held."""

    def _stale(self) -> Problem:
        return Problem(
            Reason.STALE_EPOCH,
            f"A newer coordinator than epoch {self.epoch} has started in this root: {self._replaced}.",
        )

    def _damaged(self, key: str, how: str) -> SafepointError:
        return damaged(self.path, f"has an object {self._names.url}/{key} that {how}")

    def _delete(self, keys: Iterable[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for done in [threads.submit(self._names.delete, key) for key in keys]:
                try:
                    done.result()
                except SafepointError as error:
                    log.warning("an object that is not needed any more stays: %s", error)


def newest_epoch(names: Names) -> int:
    """The highest epoch that a coordinator of this root has had; zero when there was none. Raises STORAGE_FAILED."""
    return max(_epochs(names.near(_EPOCHS)[0]), default=0)


def _key(epoch: int, number: int) -> str:
    return f"{_LOGS}{epoch}/{number}"


def _epochs(there: Iterable[Stored]) -> list[int]:
    names = (found.key.removeprefix(_EPOCHS) for found in there if found.key.startswith(_EPOCHS))
    return [int(name) for name in names if _is_number(name)]


def _logs(there: Iterable[Stored]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for one in there:
        epoch, _, number = one.key.removeprefix(_LOGS).partition("/")
        if one.key.startswith(_LOGS) and _is_number(epoch) and _is_number(number):
            found.setdefault(int(epoch), []).append(int(number))
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18 and str(int(text)) == text


def _fenced() -> SafepointError:
    return refuse(Reason.FENCED, "Another coordinator starts in this root at this moment.")
