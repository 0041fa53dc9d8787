"""The coordinator's durable log: its epoch, the records of its operations, and how they ended.

The rule: the epoch is raised durably before any participant hears of us, and a record is on the disk before the calls
it covers are made. Whoever reads it after a crash finds every operation that anybody may have heard of.

    <root>/coordinator/epoch-<n>          made with O_EXCL; the highest n is the coordinator that may act, and touches it
    <root>/coordinator/journal-<n>.log    one entry a line: `journal_file`
    <root>/coordinator/reserve            space that is given back when the disk is full, so that what has begun can end

A start reads the newest journal, and writes a new one that holds what still matters: entries of operations that have
not ended, and the last `KEPT_OUTCOMES` outcomes. A root has a journal before it has an epoch, and is never without one:
where a coordinator has been and none is there, or it is damaged, we refuse to act without our log (participants then open
by their lease), until a person says that it is lost.

Everything here blocks: callers on an event loop use a thread. One writer; not safe for several threads at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar, cast

from coordinator.journal_file import (
    ACCEPT,
    MAX_ENTRY_BYTES,
    MEMBERS,
    Contents,
    Entry,
    epoch_of,
    line,
    lost,
    read,
    whole,
)
from coordinator.presence import enter
from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.folder import Folder
from coordinator.wire.record import epoch_in

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

ROTATE_BYTES: Final = 16 << 20
_EPOCH: Final = re.compile(r"epoch-([1-9][0-9]{0,17})")
_JOURNAL: Final = re.compile(r"journal-([1-9][0-9]{0,17})\.log")
_LAST_NUMBER: Final = 10**18 - 1  # the highest that those names have; none follows it
_KEPT_EPOCH_FILES: Final = 8
# What only a coordinator that has its journal leaves.
ADDRESS_NAME: Final = "address.json"
HISTORY: Final = "history"
_MAX_ADDRESS: Final = 1 << 16
# What must be no directory, and what helps then.
_NO_DIRECTORY: Final = {
    ADDRESS_NAME: ("A coordinator writes its address there, and nobody finds it without.", ""),
    ACCEPT: (
        "It must be a file, which the start that goes on without its journal removes.",
        " and make a file: touch {}",
    ),
}
_RESERVE: Final = "reserve"
RESERVE_BYTES: Final = 256 << 10  # for the records of an end, and the mark on a snapshot that is given up
# What may not spend the reserve: with it gone a full disk could not end what they begin.
_BEGINNINGS: Final = frozenset({"begun", MEMBERS})


class Journal:
    """The log of one coordinator. `epoch` is ours; `contents` is what is known, kept up to date."""

    def __init__(self, directory: Directory, above: Mapping[str, int] | None = None) -> None:
        """Raise the epoch and read what is there. `directory` is <root>/coordinator; it is closed with the journal.

        The epoch is higher than those of `above`, too: what says so (for people), and the epoch that it has. A snapshot may be
        of another root, and files of ours may be lost.

        Raises STORAGE_FULL, STORAGE_FAILED (also for a journal that is lost), and SNAPSHOT_CORRUPT for a damaged one, or a name
        in whose place no higher one can come; then nobody has heard of us.
        """
        self._directory = directory
        self._file = -1
        self._size = 0
        self._number = 0  # of the file in use
        self._broken = ""
        self.epoch = 0
        self.contents = Contents()
        try:
            self._start(above or {})
        except BaseException:
            self.close()  # nobody must see us there any more
            raise

    def _start(self, above: Mapping[str, int]) -> None:
        directory = self._directory
        enter(directory)
        alive_before = _last_touched(directory)  # when a coordinator was here before us; zero: nobody knows
        for name in _NO_DIRECTORY:  # while nothing has changed yet
            require_no_directory(directory, name)
        accepted = directory.has(ACCEPT)
        if not accepted:
            self._begin_root()
        newest, made_by = self._at_newest(_epoch_if_known if accepted else epoch_of)
        if newest >= _LAST_NUMBER:
            raise _used_up(str(self._of(newest)))
        if not accepted:
            self._at_newest(read)  # before the epoch: a start that is refused must not end the coordinator that runs
        said = {str(self._of(newest)): made_by or 0, str(directory.path / ADDRESS_NAME): announced(directory)}
        self.epoch = self.with_reserve(lambda: _raise_epoch(directory, {**above, **said}))
        if accepted:
            newest = self._put_aside()
        else:
            newest, contents = self._at_newest(read)  # anew: the one before us may have gone on
            if contents is None:
                raise lost(directory.path, f"epoch-{self.epoch}")
            self.contents = contents
        self.contents.nobody_is_here(alive_before)
        self.with_reserve(lambda: self._start_file(newest + 1))
        directory.remove_file(ACCEPT)
        try:
            self._keep_reserve()
        except SafepointError as error:
            log.warning("no save can begin: %s", error)

    def _begin_root(self) -> None:
        """Make the first journal where no coordinator has been. Raises STORAGE_FAILED where one has, and there is none."""
        there = self._directory.names()  # once: another start may make names meanwhile, the journal first
        if _among(there, _JOURNAL):
            return
        signs = [*(f"epoch-{number}" for number in _among(there, _EPOCH)), ADDRESS_NAME, _RESERVE, HISTORY]
        for sign in signs:
            if sign in there:
                raise lost(self._directory.path, sign)
        with suppress(FileExistsError):  # another start was faster
            self._directory.write_new(_name(1), whole(0, ()))

    def _at_newest(self, look: Callable[[Directory, str], ResultT]) -> tuple[int, ResultT | None]:
        """The number of the newest journal and what it says; zero and None without one."""
        while newest := max(_numbers(self._directory, _JOURNAL), default=0):
            with suppress(FileNotFoundError):  # another start has written the next one
                return newest, look(self._directory, _name(newest))
        return 0, None

    def _put_aside(self) -> int:
        """Keep what is there for people, since one of them has said that it is lost to us. The number of the last one."""
        log.warning("%s is there: this coordinator begins with an empty journal", self._directory.path / ACCEPT)
        numbers = _numbers(self._directory, _JOURNAL)
        for number in numbers:
            with suppress(FileNotFoundError):  # another start has
                self._directory.rename_child(_name(number), f"lost-{_name(number)}")
        return max(numbers, default=0)

    def _of(self, number: int) -> Path:
        return self._directory.path / _name(number)

    def append(self, entry: Entry) -> None:
        """Make an entry durable. Raises STORAGE_FULL or STORAGE_FAILED; then it is not there, not even after a crash.

        After a failed fsync nobody knows what the disk holds: every later append is refused until a restart. A rotation
        that fails is none of the caller's: the entry is durable, the file in use stays, and the next append tries again.
        """
        if self._broken:
            raise refuse(Reason.STORAGE_FAILED, f"The journal has failed: {self._broken}. Restart the coordinator.")
        text = line(entry)
        if len(text) > MAX_ENTRY_BYTES:
            raise refuse(Reason.LIMIT_EXCEEDED, f"A journal entry is larger than {MAX_ENTRY_BYTES} bytes.")
        if entry.kind in _BEGINNINGS:
            if entry.kind == "begun":
                self._keep_reserve()
            self._write(entry, text)
        else:
            self.with_reserve(lambda: self._write(entry, text))
        self.contents.add(entry)
        if self._size > ROTATE_BYTES and not self.contents.open:
            self._rotate()

    def _write(self, entry: Entry, text: bytes) -> None:
        try:
            failpoints.reach("journal.before_append", entry.kind)
            _write_all(self._file, text)
        except OSError as error:
            self._cut_back(error)
            raise storage_error(error, f"writing the journal {self.path}") from error
        try:
            failpoints.reach("journal.before_fsync", entry.kind)
            os.fsync(self._file)
        except OSError as error:
            self._broken = error.strerror or "fsync"
            raise storage_error(error, f"fsync of the journal {self.path}") from error
        failpoints.reach("journal.after_append", entry.kind)
        self._size += len(text)

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

    def folder(self) -> Directory:
        """<root>/coordinator as we have opened it, for the caller to close. Raises STORAGE_FAILED."""
        return self._directory.again()

    @property
    def path(self) -> Path:
        """Of the file in use."""
        return self._of(self._number)

    @property
    def broken(self) -> str:
        """Why nothing can be appended any more, until a restart; empty while all is well."""
        return self._broken

    def lost(self) -> Problem | None:
        """Why what lies in the root is not ours to change any more, if so. Asked right before a snapshot is published.

        Raises STORAGE_* when the disk does not say.
        """
        path = self._directory.path
        if self._directory.removed():
            return Problem(
                Reason.STORAGE_FAILED,
                f"{path} was removed, and the log of epoch {self.epoch} with it.",
                next_step=f"mkdir -p {path} && touch {path / ACCEPT} {path / f'epoch-{self.epoch}'}, then start a coordinator: "
                "participants refuse one of a lower epoch.",
            )
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

    def keep_in_place(self) -> None:
        """Write the file anew when somebody has removed or changed it: what matters is in memory. Where appends are made."""
        if self._broken or self._file < 0:
            return
        try:
            if self._directory.size(_name(self._number)) == self._size:
                return
        except FileNotFoundError:
            pass
        except SafepointError as error:
            if error.reason is not Reason.SNAPSHOT_UNSAFE:  # a link or the like is there now, and not what we wrote
                raise
        log.warning("%s was removed or changed: it is written anew", self.path)
        self._rotate()

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
                self._directory.remove_file(_name(number))
                self._directory.sync()
            except (OSError, SafepointError) as cause:
                self._broken = f"a half-made rotation stays: {cause}"

    def _start_file(self, number: int) -> None:
        data = whole(self.epoch, self.contents.entries())
        name = _name(number)
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
            if old < number and not self._directory.is_directory(_name(old)):  # that is none of ours
                self._directory.remove_file(_name(old))


def _raise_epoch(directory: Directory, above: Mapping[str, int]) -> int:
    while True:
        known = sorted(_numbers(directory, _EPOCH))
        floors = {**above, **{str(directory.path / f"epoch-{number}"): number for number in known}}
        epoch = max(floors.values(), default=0) + 1
        if epoch > _LAST_NUMBER:
            raise _used_up(max(floors, key=lambda what: floors[what]))
        failpoints.reach("journal.before_epoch")
        try:
            directory.write_new(f"epoch-{epoch}", b"")
        except FileExistsError:
            continue  # another start was faster; the next number is ours
        for old in known[:-_KEPT_EPOCH_FILES]:
            directory.remove_file(f"epoch-{old}")
        failpoints.reach("journal.after_epoch")
        return epoch


def announced(directory: Folder) -> int:
    """The epoch of the coordinator that wrote its address; zero when that cannot be read, or is none."""
    try:
        loaded: object = json.loads(directory.read(ADDRESS_NAME, _MAX_ADDRESS))
    except (FileNotFoundError, SafepointError, ValueError, RecursionError):
        return 0
    epoch = epoch_in(cast("dict[str, object]", loaded)) if isinstance(loaded, dict) else 0
    return epoch if 0 < epoch < _LAST_NUMBER else 0


def _epoch_if_known(directory: Directory, name: str) -> int:
    """As `epoch_of`; zero for a journal that cannot be read, where somebody has said that it is lost."""
    try:
        return epoch_of(directory, name)
    except SafepointError as error:
        log.warning("what is put aside does not say its epoch: %s", error.problem.message)
        return 0


def require_no_directory(directory: Folder, name: str) -> None:
    """Refuse a directory in the place of a file that we could neither replace nor remove then. Raises STORAGE_FAILED."""
    if directory.is_directory(name):
        why, instead = _NO_DIRECTORY[name]
        path = directory.path / name
        raise refuse(
            Reason.STORAGE_FAILED, f"{path} is a directory. {why}",
            next_step=f"Move that directory away{instead.format(path)}.",
        )  # fmt: skip


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
    return _among(directory.names(), pattern)


def _among(names: Iterable[str], pattern: re.Pattern[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := pattern.fullmatch(name))]


def _name(number: int) -> str:
    return f"journal-{number}.log"


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
