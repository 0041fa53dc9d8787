"""What each operation left below the root, read back: `docs/history.md` has the format.

The rule: a file of history is never trusted and never in the way. What cannot be read is passed over and counted; what is
there is shown although a part is missing. Reading changes nothing and needs no coordinator.

On a disk an operation has one file, which grows. In an object store nothing grows: there it may have several, which are read as
one, in the order of their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.history_record import Record, meant_by, parse
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.folder import Folder, Place, names_below
from coordinator.wire.folder import place as place_of
from coordinator.wire.ids import is_wire_id
from coordinator.wire.stored_folder import StoredFolder, Where

FORMAT: Final = 1
MAX_NAMED: Final = 1000  # newest operations among which a snapshot is looked for
MAX_LATER: Final = 20
DIRECTORY: Final = "history"
MAX_FILE_BYTES: Final = 2 << 20
MAX_READ_BYTES: Final = 4 << 20  # a newer version may have higher limits
_COORDINATOR: Final = "coordinator"
_NAME: Final = re.compile(r"([0-9]{13})-(.+)\.jsonl")
_AT_ONCE: Final = 16  # requests to a store; a disk is read file by file


def file_name(began_s: float, operation_id: str) -> str:
    """The name of an operation's file: names sort by time, and a writer lets them ascend when its clock does not."""
    return f"{min(max(0, round(began_s * 1000)), 10**13 - 1):013d}-{operation_id}.jsonl"


def place(name: str) -> int:
    """Where a file of that name stands among others: milliseconds since 1970, unless the clock was set back."""
    return int(name[:13])


def names(folder: Folder) -> list[tuple[str, str]]:
    """File name and operation of each, oldest first. Raises SafepointError."""
    found = ((name, _NAME.fullmatch(name)) for name in folder.names())
    return [(name, match[2]) for name, match in found if match is not None and is_wire_id(match[2])]


def by_operation(folder: Folder) -> dict[str, list[str]]:
    """The files of each operation; operations, and the files of each, oldest first. Raises SafepointError."""
    found: dict[str, list[str]] = {}
    for name, operation in names(folder):
        found.setdefault(operation, []).append(name)
    return found


class History:
    """The history of a root, given as a path or as the URL of one in a store. Everything here blocks: callers on an event loop
    use a thread."""

    def __init__(self, root: str | Place) -> None:
        self._root = place_of(root)
        self.path: Place = self._root / _COORDINATOR / DIRECTORY

    def is_there(self) -> bool:
        """Whether anything was ever written of it. Raises STORAGE_FAILED when the root does not answer."""
        try:
            self._open().close()
        except FileNotFoundError:
            return False
        return True

    def newest(self, *, after: int = 0, known: Callable[[str], bool] = lambda _: False) -> Iterator[Record]:
        """As `list`, one by one: no more is read than is asked for, or little more. `known`: operations that are left out, unread."""
        try:
            folder = self._open()
        except FileNotFoundError:
            return
        with folder:
            files = [mine for name, mine in by_operation(folder).items() if place(mine[0]) > after and not known(name)]
            read = partial(_read, folder, progress=False)
            if isinstance(folder, Directory):
                yield from filter(None, map(read, reversed(files)))
                return
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                while files:
                    files, some = files[:-_AT_ONCE], files[-_AT_ONCE:]
                    yield from filter(None, threads.map(read, reversed(some)))

    def list(self, limit: int = 200, *, after: int = 0) -> list[Record]:
        """The newest operations, newest first, without how far participants were. A root without history has none.
        `after`: only those whose `place` is higher.

        Raises STORAGE_FAILED when the root does not answer; a file that cannot be read is passed over.
        """
        return list(islice(self.newest(after=after), limit))

    def find(self, operation_id: str) -> Record | None:
        """One operation with everything that is known of it. Raises as `list`."""
        try:
            with self._open() as folder:
                mine = by_operation(folder).get(operation_id)
                return _read(folder, mine, progress=True) if mine else None
        except FileNotFoundError:
            return None

    def later(self, operation_id: str, began_ms: int, limit: int = MAX_LATER) -> Sequence[Record]:
        """Those that began after an operation, as `list`; `began_ms` counts while no file of it is there. Raises as `list`."""
        try:
            with self._open() as folder:
                mine = by_operation(folder).get(operation_id)
        except FileNotFoundError:
            return []
        return self.list(limit, after=place(mine[0]) if mine else began_ms)

    def named(self, name: str) -> Record | None:
        """As `find`; else the operation that the name of a snapshot means (`meant_by`). Raises as `list`."""
        found = self.find(name)
        if found is not None:
            return found
        meant = meant_by(name, (one.status() for one in islice(self.newest(), MAX_NAMED)))
        return self.find(meant) if meant else None

    def explain(self, operation_id: str = "") -> pb.ExplainResponse | None:
        """As Explain answers, for when no coordinator does: of that operation or the newest on that snapshot (None: it is not
        known), or of the newest that did not succeed. Raises as `list`.
        """
        listed, name = self.list() if operation_id else [], operation_id
        most = 0 if operation_id else MAX_NAMED
        for one in islice(self.newest(), most):  # no more are read than that one and later ones
            listed.append(one)
            if one.outcome != "succeeded":
                name = one.operation_id
                break
        found = self.named(name) if name else None
        if found is None:
            return None if operation_id else pb.ExplainResponse()
        later = [one.status() for one in listed if one.place > found.place]
        return pb.ExplainResponse(operation=found.status(), events=found.kept_events(), later=later[:MAX_LATER])

    def _open(self) -> Directory | StoredFolder:
        """Raises FileNotFoundError, STORAGE_FAILED."""
        if isinstance(self._root, Where):
            return StoredFolder(names_below(self._root)).child(_COORDINATOR).seen(DIRECTORY)
        return Directory.open(Path(self.path))


def _read(folder: Folder, files: Sequence[str], *, progress: bool) -> Record | None:
    """What the files of one operation say; None when they do not say which it is."""
    lines: list[bytes] = []
    for name in files:
        try:
            lines += folder.read(name, MAX_READ_BYTES).split(b"\n")
        except FileNotFoundError:  # pruned meanwhile
            pass
        except SafepointError as error:
            if error.reason not in (Reason.LIMIT_EXCEEDED, Reason.SNAPSHOT_UNSAFE):
                raise
    record = parse(lines, progress=progress)
    return None if record is None else replace(record, place=place(files[0]))
