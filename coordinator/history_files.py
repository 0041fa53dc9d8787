"""Where the lines of the history go: appended to a file on a disk, or each time a new object in a store.

The rule: nothing here raises, and nobody waits for it: what cannot be written is dropped on a disk, and in a store kept within
limits until it answers. A note in the log says so once. Nothing is written on a disk while little space is left: that is the
journal's. Everything here runs in the one thread of `history_writing`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from coordinator import history
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import SafepointError
from coordinator.wire.folder import Folder

log = logging.getLogger(__name__)

GAP_ON_DISK_S: Final = 0.05  # lines are written together: a thread that wakes for each would slow the operation
GAP_IN_STORE_S: Final = 10.0  # an object each: only what takes long, and may be cut off, is written before its end
MAX_TOTAL_BYTES: Final = 64 << 20
MAX_UNSENT_BYTES: Final = 4 << 20
LEAST_FREE_BYTES: Final = 1 << 20


@dataclass(slots=True)
class File:
    """What is known of one operation's file. Identity counts: it is one operation of one coordinator."""

    name: str
    taken_over: bool
    head: bytes = b""  # the line that says which operation it is, and whose
    placed: bool = False  # its name is final
    only_there: bool = False  # nothing is written where nothing is
    size: int = 0
    dropped: int = 0
    phase_began_s: float = 0.0
    told_participants: bool = False
    next_at: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])


Batch = list[tuple[File, bytes]]


class Files(Protocol):
    """`gap_s`: how long lines are gathered, unless their operation ends."""

    gap_s: float

    def write(self, batch: Batch, prune: bool) -> bool:
        """Write lines in order; whether some are left that are to be tried again. `prune`: an operation has ended, so another
        one may be too many."""
        ...

    def close(self) -> None: ...


class OnDisk:
    """`directory` gives <root>/coordinator: by a handle and not by its path, where another coordinator's root may be by now."""

    gap_s = GAP_ON_DISK_S

    def __init__(self, directory: Callable[[], Directory], keep: int) -> None:
        """`keep`: the newest so many operations stay."""
        self.coordinator_directory = directory
        self._keep = keep
        self._directory: Directory | None = None
        self._told = _Told()

    def write(self, batch: Batch, prune: bool) -> bool:
        try:
            directory = self._open()
            if directory.free_bytes() < LEAST_FREE_BYTES:
                raise OSError("less than 1 MiB is free")
            joined: dict[str, list[bytes]] = {}
            for file, data in batch:
                if file.taken_over:
                    mine = [name for name, operation in history.names(directory) if file.name[14:-6] == operation]
                    file.name, file.taken_over = (mine or [file.name])[-1], False
                    data = b"\n" + data  # the last line before it may be torn
                    file.placed = bool(mine)
                    if file.only_there and not mine:
                        continue
                if not file.placed:
                    file.name, file.placed = after_others(directory, file.name, joined), True
                joined.setdefault(file.name, []).append(data)
            for name, parts in joined.items():
                directory.append(name, b"".join(parts))
            self._told.well()
            if prune:
                _forget(directory, self._keep)
        except (OSError, SafepointError) as error:
            for file, _ in batch:
                file.dropped += 1
            self.close()
            self._told.failed(error)
        return False

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _open(self) -> Directory:
        if self._directory is None:
            with self.coordinator_directory() as ours:
                self._directory = ours.ensure_child(history.DIRECTORY)
        return self._directory


@dataclass(slots=True)
class _Unsent:
    """An object that is not there yet. Its bytes stay as they are: an answer that was lost is told by them."""

    file: File
    data: bytes
    name: str = ""


class InStore:
    """`folder` gives <root>/coordinator."""

    gap_s = GAP_IN_STORE_S

    def __init__(self, folder: Callable[[], Folder], keep: int) -> None:
        """`keep`: the newest so many operations stay."""
        self._coordinator_folder = folder
        self._keep = keep
        self._unsent: list[_Unsent] = []
        self._told = _Told()

    def write(self, batch: Batch, prune: bool) -> bool:
        self._gather(batch)
        try:
            with self._coordinator_folder() as ours, _below(ours) as folder:
                while self._unsent:
                    first = self._unsent[0]
                    first.name = first.name or after_others(folder, first.file.name)
                    try:
                        folder.write_new(first.name, first.data)
                    except FileExistsError:  # another coordinator has made it meanwhile
                        first.name = after_others(folder, first.name, [first.name])
                        continue
                    del self._unsent[0]
                self._told.well()
                if prune:
                    _forget(folder, self._keep)
        except (OSError, SafepointError) as error:
            self._told.failed(error)
        return bool(self._unsent)

    def close(self) -> None:
        """Nothing is held."""

    def _gather(self, batch: Batch) -> None:
        """One object of the lines of each operation, which begins with whose it is."""
        joined: dict[int, _Unsent] = {}
        for file, data in batch:
            one = joined.setdefault(id(file), _Unsent(file, b"" if data == file.head else file.head))
            one.data += data
        self._unsent += joined.values()
        while sum(len(one.data) for one in self._unsent) > MAX_UNSENT_BYTES:
            self._unsent.pop(0).file.dropped += 1


class _Told:
    """That it fails is said once, until it does not."""

    def __init__(self) -> None:
        self._failing = False

    def well(self) -> None:
        self._failing = False

    def failed(self, error: Exception) -> None:
        if not self._failing:
            log.warning("the history of operations is not written: %s", error)
        self._failing = True


def after_others(folder: Folder, name: str, unwritten: Iterable[str] = ()) -> str:
    """The same name, later than all that are there: a clock that was set back must not make the newest the oldest."""
    there = [other for other, _ in history.names(folder)]
    newest = max(map(history.place, (*there, *unwritten)), default=-1)
    return name if history.place(name) > newest else history.file_name((newest + 1) / 1000, name[14:-6])


def _below(coordinator: Folder) -> Folder:
    """Its folder of history, with one look at all that is in it."""
    try:
        return coordinator.seen(history.DIRECTORY)
    except FileNotFoundError:
        return coordinator.ensure_child(history.DIRECTORY)


def _forget(folder: Folder, keep: int) -> None:
    left = MAX_TOTAL_BYTES
    for number, files in enumerate(reversed(history.by_operation(folder).values())):
        for name in files:
            with suppress(FileNotFoundError):
                left -= folder.size(name)
        if number and (number >= keep or left < 0):
            for name in files:
                folder.remove_file(name)
