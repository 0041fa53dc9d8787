"""The coordinator's durable log: its epoch, the records of its operations, and how they ended.

The rule: the epoch is raised durably before any participant hears of us, and a record is on the disk before the calls
it covers are made. Whoever reads it after a crash finds every operation that anybody may have heard of.

    <root>/coordinator/epoch-<n>          made with O_EXCL; the highest n is the coordinator that may act, and touches it
    <root>/coordinator/journal-<n>.log    one entry a line: CRC-32 in hex, a space, one JSON object
    <root>/coordinator/reserve            space that is given back when the disk is full, so that what has begun can end

A start reads the newest journal, and writes a new one that holds what still matters: entries of operations that have
not ended, and the last `KEPT_OUTCOMES` outcomes. A last line that is torn was never acknowledged and is dropped; any
other bad line is damage, and we refuse to act without our log (participants then open by their lease).

Everything here blocks: callers on an event loop use a thread. One writer; not safe for several threads at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.ids import OperationId

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

KEPT_OUTCOMES: Final = 1000
MEMBERS: Final = "members"  # an entry of no operation: by name, who takes part, None for one that is gone for good
KEPT_DISMISSED: Final = 1000  # names of those, so that it can be said of them again
ROTATE_BYTES: Final = 16 << 20
MAX_ENTRY_BYTES: Final = 32 << 20  # a topology of some 10,000 participants
_EPOCH: Final = re.compile(r"epoch-([1-9][0-9]{0,17})")
_JOURNAL: Final = re.compile(r"journal-([1-9][0-9]{0,17})\.log")
_LAST_NUMBER: Final = 10**18 - 1  # the highest that those names have; none follows it
_KEPT_EPOCH_FILES: Final = 8
_RESERVE: Final = "reserve"
RESERVE_BYTES: Final = 256 << 10  # for the records of an end, and the mark on a snapshot that is given up
# What may not spend the reserve: with it gone a full disk could not end what they begin.
_BEGINNINGS: Final = frozenset({"begun", MEMBERS})


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. `kind` is "request", the kind of a record of the core, "outcome" or "members"; `data` is plain JSON."""

    operation_id: OperationId
    kind: str
    data: Mapping[str, Any]


@dataclass(slots=True)
class Contents:
    """What a journal held: entries of operations without outcome by operation, outcomes, oldest first, who takes part, and
    who is gone for good, oldest first."""

    open: OrderedDict[OperationId, list[Entry]] = field(default_factory=OrderedDict[OperationId, list[Entry]])
    outcomes: OrderedDict[OperationId, Mapping[str, Any]] = field(
        default_factory=OrderedDict[OperationId, Mapping[str, Any]]
    )
    members: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    dismissed: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])

    def add(self, entry: Entry) -> None:
        """Take one entry in, forgetting the oldest outcome when there are too many."""
        if entry.kind == "outcome":
            self.open.pop(entry.operation_id, None)
            self.outcomes[entry.operation_id] = entry.data
            self.outcomes.move_to_end(entry.operation_id)
            if len(self.outcomes) > KEPT_OUTCOMES:
                self.outcomes.popitem(last=False)
        elif entry.kind == MEMBERS:
            for name, data in entry.data["members"].items():
                if data is None:
                    self.members.pop(name, None)
                    self.dismissed[name] = None
                else:
                    self.members[name] = data
                    self.dismissed.pop(name, None)
            while len(self.dismissed) > KEPT_DISMISSED:
                self.dismissed.popitem(last=False)
        else:
            self.open.setdefault(entry.operation_id, []).append(entry)


class Journal:
    """The log of one coordinator. `epoch` is ours; `contents` is what is known, kept up to date."""

    def __init__(self, directory: Directory, above: int = 0) -> None:
        """Raise the epoch and read what is there. `directory` is <root>/coordinator; it is closed with the journal.

        The epoch is higher than `above`, too: that of a snapshot which another root, or a lost directory, has numbered.

        Raises STORAGE_FULL, STORAGE_FAILED, and SNAPSHOT_CORRUPT for a damaged journal, or a name in whose place no
        higher one can come; then nobody has heard of us.
        """
        self._directory = directory
        self._file = -1
        self._size = 0
        self._number = 0  # of the file in use
        self._broken = ""
        self.alive_before = _last_touched(directory)  # when a coordinator was here before us; zero: nobody knows
        newest = max(_numbers(directory, _JOURNAL), default=0)
        if newest >= _LAST_NUMBER:
            raise _used_up(str(directory.path / f"journal-{newest}.log"))
        self.epoch = self.with_reserve(lambda: _raise_epoch(directory, above))
        newest = max(_numbers(directory, _JOURNAL), default=0)
        self.contents = _read(directory, f"journal-{newest}.log") if newest else Contents()
        self.with_reserve(lambda: self._start_file(newest + 1))
        try:
            self._keep_reserve()
        except SafepointError as error:
            log.warning("no save can begin: %s", error)

    def append(self, entry: Entry) -> None:
        """Make an entry durable. Raises STORAGE_FULL or STORAGE_FAILED; then it is not there, not even after a crash.

        After a failed fsync nobody knows what the disk holds: every later append is refused until a restart. A rotation
        that fails is none of the caller's: the entry is durable, the file in use stays, and the next append tries again.
        """
        if self._broken:
            raise refuse(Reason.STORAGE_FAILED, f"The journal has failed: {self._broken}. Restart the coordinator.")
        line = _line(entry)
        if len(line) > MAX_ENTRY_BYTES:
            raise refuse(Reason.LIMIT_EXCEEDED, f"A journal entry is larger than {MAX_ENTRY_BYTES} bytes.")
        if entry.kind in _BEGINNINGS:
            if entry.kind == "begun":
                self._keep_reserve()
            self._write(entry, line)
        else:
            self.with_reserve(lambda: self._write(entry, line))
        self.contents.add(entry)
        if self._size > ROTATE_BYTES and not self.contents.open:
            self._rotate()

    def _write(self, entry: Entry, line: bytes) -> None:
        try:
            failpoints.reach("journal.before_append", entry.kind)
            _write_all(self._file, line)
        except OSError as error:
            self._cut_back(error)
            raise storage_error(error, f"writing the journal {self._path}") from error
        try:
            failpoints.reach("journal.before_fsync", entry.kind)
            os.fsync(self._file)
        except OSError as error:
            self._broken = error.strerror or "fsync"
            raise storage_error(error, f"fsync of the journal {self._path}") from error
        failpoints.reach("journal.after_append", entry.kind)
        self._size += len(line)

    @property
    def _path(self) -> Path:
        return self._directory.path / f"journal-{self._number}.log"

    def spend_reserve(self) -> bool:
        """Give back the space that was kept for this. False when there was none, or the disk does not let go of it."""
        try:
            if not self._directory.has(_RESERVE):
                return False
            self._directory.remove_file(_RESERVE)
            self._directory.sync()
        except (OSError, SafepointError):
            return False
        log.warning("the disk is full: the reserve is spent on ending what has begun")
        return True

    def with_reserve(self, work: Callable[[], ResultT]) -> ResultT:
        """Do it; when the disk is full, once more with the reserve. Raises what `work` raises."""
        try:
            return work()
        except SafepointError as error:
            if error.reason is not Reason.STORAGE_FULL or self._broken or not self.spend_reserve():
                raise
        return work()

    def _keep_reserve(self) -> None:
        """Have the reserve. Raises STORAGE_FULL: then nothing may begin that could not be ended."""
        if not self._directory.has(_RESERVE):
            try:
                self._directory.write_new(_RESERVE, secrets.token_bytes(RESERVE_BYTES))
            except FileExistsError:
                pass  # a coordinator that starts beside us was faster
            except SafepointError as error:
                if error.reason is not Reason.STORAGE_FULL:
                    raise
                raise refuse(
                    Reason.STORAGE_FULL,
                    f"{error.problem.message} {RESERVE_BYTES // 1000} kB must be free in {self._directory.path}: they are kept so "
                    "that what has begun can end when the disk is full.",
                ) from error

    @property
    def path(self) -> Path:
        """Of the file in use."""
        return self._directory.path / f"journal-{self._number}.log"

    @property
    def broken(self) -> str:
        """Why nothing can be appended any more, until a restart; empty while all is well."""
        return self._broken

    def lost(self) -> Problem | None:
        """Why what lies in the root is not ours to change any more, if so. Asked right before a snapshot is published.

        Raises STORAGE_* when the disk does not say.
        """
        path = self._directory.path
        if not self._directory.in_place():
            return Problem(
                Reason.STORAGE_FAILED,
                f"The log of epoch {self.epoch} is not in {path} any more: another directory is there now.",
                next_step="Move the directory that was there back and start a coordinator, or go on with the new one.",
            )
        newest = max(_numbers(self._directory, _EPOCH), default=0)
        if newest > self.epoch:
            return Problem(Reason.STALE_EPOCH, f"A newer coordinator than epoch {self.epoch} has started in this root.")
        if newest < self.epoch:
            return Problem(
                Reason.STORAGE_FAILED,
                f"{path / f'epoch-{self.epoch}'} is gone: somebody has removed it.",
                next_step="Make it again (touch), then start the coordinator: participants refuse one of a lower epoch.",
            )
        return None

    def owns_epoch(self) -> bool:
        """Whether what lies in the root is ours to change. Raises STORAGE_* when the disk does not say."""
        return self.lost() is None

    def note_alive(self) -> None:
        """Note that we are here, for whoever comes after us. Raises STORAGE_*."""
        with suppress(FileNotFoundError):
            self._directory.touch(f"epoch-{self.epoch}")

    def require_epoch(self) -> None:
        """Raise STALE_EPOCH when a coordinator has started after us, STORAGE_FAILED when our log is not in its place."""
        if (problem := self.lost()) is not None:
            raise Refused(problem)

    def close(self) -> None:
        """Give the handles back. Nothing is lost: every append was durable."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._directory.close()

    def _cut_back(self, cause: OSError) -> None:
        # A part of the line may be there (a full disk). Cutting needs no space; without it the next line would follow
        # a torn one and look like damage.
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self._broken = cause.strerror or "write"

    def _rotate(self) -> None:
        number = self._number + 1
        try:
            self._start_file(number)
        except SafepointError as error:
            log.warning("the journal goes on in its file: %s", error)
            if self._number == number or error.reason is Reason.FENCED:
                return  # only an old file is left; or the new one is of a coordinator that has replaced us
            try:
                # It may be there all the same, and a start reads the newest: what is appended from now on would be lost.
                self._directory.remove_file(f"journal-{number}.log")
                self._directory.sync()
            except (OSError, SafepointError) as cause:
                self._broken = f"a half-made rotation stays: {cause}"

    def _start_file(self, number: int) -> None:
        members = {**dict.fromkeys(self.contents.dismissed), **self.contents.members}
        data = b"".join(
            [_line(entry) for entries in self.contents.open.values() for entry in entries]
            + [_line(Entry(name, "outcome", outcome)) for name, outcome in self.contents.outcomes.items()]
            + ([_line(Entry(OperationId(""), MEMBERS, {"members": members}))] if members else [])
        )
        name = f"journal-{number}.log"
        failpoints.reach("journal.before_file")
        try:
            self._directory.write_new(name, data)
            file = self._directory.open_end(name)
        except FileExistsError as error:
            raise refuse(Reason.FENCED, "Another coordinator starts in this root at this moment.") from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._number = file, len(data), number
        failpoints.reach("journal.after_file")
        for old in _numbers(self._directory, _JOURNAL):
            if old < number:
                self._directory.remove_file(f"journal-{old}.log")


def _raise_epoch(directory: Directory, above: int) -> int:
    while True:
        known = sorted(_numbers(directory, _EPOCH))
        epoch = max([*known, above]) + 1
        if epoch > _LAST_NUMBER:
            by_file = bool(known) and known[-1] >= _LAST_NUMBER
            raise _used_up(str(directory.path / f"epoch-{known[-1]}") if by_file else f"a snapshot of epoch {above}")
        failpoints.reach("journal.before_epoch")
        try:
            directory.write_new(f"epoch-{epoch}", b"")
        except FileExistsError:
            continue  # another start was faster; the next number is ours
        for old in known[:-_KEPT_EPOCH_FILES]:
            directory.remove_file(f"epoch-{old}")
        failpoints.reach("journal.after_epoch")
        return epoch


def _used_up(what: str) -> SafepointError:
    return refuse(
        Reason.SNAPSHOT_CORRUPT,
        f"After {what} no coordinator can start: there is no higher number, and no coordinator has counted so far.",
        next_step=f"Move {what} away and start again.",
    )


def _last_touched(directory: Directory) -> float:
    newest = max(_numbers(directory, _EPOCH), default=0)
    try:
        return directory.modified(f"epoch-{newest}")
    except (FileNotFoundError, SafepointError):
        return 0.0


def _numbers(directory: Directory, pattern: re.Pattern[str]) -> list[int]:
    return [int(match[1]) for name in directory.names() if (match := pattern.fullmatch(name))]


def _line(entry: Entry) -> bytes:
    body = json.dumps(
        {"operation_id": entry.operation_id, "kind": entry.kind, "data": entry.data}, separators=(",", ":")
    )
    raw = body.encode()
    return b"%08x %s\n" % (zlib.crc32(raw), raw)


def _read(directory: Directory, name: str) -> Contents:
    contents = Contents()
    torn_at = 0
    for number, line in enumerate(directory.lines(name, MAX_ENTRY_BYTES), start=1):
        if torn_at:
            raise _damaged(directory, name, torn_at)
        entry = _entry(line)
        if entry is None:
            torn_at = number
        else:
            contents.add(entry)
    return contents


def _entry(line: bytes) -> Entry | None:
    checksum, _, raw = line.partition(b" ")
    try:
        if len(checksum) != 8 or int(checksum, 16) != zlib.crc32(raw):
            return None
        loaded = cast("dict[str, Any]", json.loads(raw))
        if not isinstance(loaded["data"], dict):
            return None
        if loaded["kind"] == MEMBERS and not _names_members(loaded["data"]):
            return None
        return Entry(
            OperationId(str(loaded["operation_id"])), str(loaded["kind"]), cast("dict[str, Any]", loaded["data"])
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _names_members(data: Any) -> bool:
    members: Any = data["members"]
    return isinstance(members, dict) and all(
        value is None or isinstance(value, dict) for value in cast("dict[str, Any]", members).values()
    )


def _damaged(directory: Directory, name: str, line: int) -> SafepointError:
    return damaged(directory.path / name, f"is damaged at line {line}")


def damaged(path: Path, how: str) -> SafepointError:
    """The refusal of a journal at that path that cannot be acted upon."""
    return refuse(
        Reason.SNAPSHOT_CORRUPT,
        f"The journal {path} {how}. The coordinator does not act without it.",
        next_step=f"Participants open by their lease. Then move {path} away and start again; snapshots are untouched.",
    )


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
