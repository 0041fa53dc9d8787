"""The call logs of simulated servers: SQLite as it is, in memory instead of in a file.

The rule: what two connections promise each other holds here too. A reader that has begun sees one state until it ends;
changes that belong together are seen by nobody in between: who tried would be refused, as by a file that is locked.
No file means no system calls, which were a fifth of the time of a run; and a reader has a copy of its own only when
somebody writes while it reads, which few do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# `sqlite3` as `gate.logfile` sees it, but for `connect`.
_AS_IT_IS = {name: getattr(sqlite3, name) for name in ("Error", "OperationalError", "Connection")}


class File:
    """What lies at one path."""

    empty: sqlite3.Connection | None = None  # what a log is after its first opening, to be copied

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.writer: Connection | None = None
        self.readers: set[Connection] = set()  # that have begun, and see what everybody sees: nothing was written since
        self.laid = File.empty is not None
        if File.empty is not None:
            File.empty.backup(self.database)

    def before_change(self) -> None:
        """Who reads keeps what is here now."""
        for reader in self.readers:
            reader.keep()
        self.readers.clear()


class Rows:
    """What a reader has asked for: read at once, since what it was read from may change before it is looked at."""

    def __init__(self, found: sqlite3.Cursor) -> None:
        self._left = iter(found.fetchall())

    def __iter__(self) -> Iterator[Any]:
        return self._left

    def fetchone(self) -> Any:
        return next(self._left, None)

    def fetchall(self) -> list[Any]:
        return list(self._left)


class Connection:
    """What a `LogFile` needs of a connection."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._reads = False
        self._view: sqlite3.Connection | None = None  # of a reader that has begun before somebody else wrote

    @property
    def in_transaction(self) -> bool:
        return self._reads or self._file.writer is self

    def keep(self) -> None:
        """Take a copy of what this reader sees."""
        self._view = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._file.database.backup(self._view)

    def execute(self, text: str, values: Any = ()) -> sqlite3.Cursor | Rows:
        file = self._file
        if self._reads:
            if text in ("COMMIT", "ROLLBACK"):
                self._leave()
                return file.database.cursor()
            return Rows((self._view or file.database).execute(text, values))
        if file.writer not in (None, self):
            raise sqlite3.OperationalError("database is locked")
        if text == "BEGIN":
            self._reads = True
            file.readers.add(self)
        if text == "BEGIN" or text.startswith("PRAGMA"):  # which are about files
            return file.database.cursor()
        if file.readers and not text.startswith("SELECT"):
            file.before_change()
        done = file.database.execute(text, values)
        if text in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
            file.writer = self if text == "BEGIN IMMEDIATE" else None
        return done

    def executemany(self, text: str, values: Any) -> sqlite3.Cursor:
        self._file.before_change()
        return self._file.database.executemany(text, values)

    def _leave(self) -> None:
        self._reads = False
        self._file.readers.discard(self)
        if self._view is not None:
            self._view.close()
            self._view = None

    def executescript(self, text: str) -> None:
        """The schema, which is asked for at each opening."""
        if not self._file.laid:
            self._file.laid = True
            self._file.database.executescript(text)
            File.empty = sqlite3.connect(":memory:")
            self._file.database.backup(File.empty)

    def close(self) -> None:
        self._leave()
        if self._file.writer is self:
            self.execute("ROLLBACK")


class Logs:
    """All of a world, by their paths."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.sqlite3 = SimpleNamespace(**_AS_IT_IS, connect=self.connect)

    def connect(self, path: Path, **_: Any) -> Connection:
        """As `sqlite3.connect`. The path is there afterwards, for those who ask whether it is."""
        found = self.files.get(str(path))
        if found is None:
            path.touch()
            found = self.files[str(path)] = File()
        return Connection(found)

    def close(self) -> None:
        """Forget everything."""
        for file in self.files.values():
            file.database.close()
        self.files.clear()
