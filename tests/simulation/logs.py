"""The call logs of simulated servers: SQLite as it is, in memory instead of in a file.

The rule: what two connections promise each other holds here too. A reader that has begun sees one state until it ends;
changes that belong together are seen by nobody in between: who tried would be refused, as by a file that is locked.
No file means no system calls, which were a fifth of the time of a run.
"""

from __future__ import annotations

import sqlite3
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
        self.laid = File.empty is not None
        if File.empty is not None:
            File.empty.backup(self.database)


class Connection:
    """What a `LogFile` needs of a connection."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._view: sqlite3.Connection | None = None  # of a reader that has begun

    @property
    def in_transaction(self) -> bool:
        return self._view is not None or self._file.writer is self

    def execute(self, text: str, values: Any = ()) -> sqlite3.Cursor:
        file = self._file
        if self._view is not None:
            if text in ("COMMIT", "ROLLBACK"):
                view, self._view = self._view, None
                view.close()
                return file.database.cursor()
            return self._view.execute(text, values)
        if file.writer not in (None, self):
            raise sqlite3.OperationalError("database is locked")
        if text == "BEGIN":
            self._view = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            file.database.backup(self._view)
            return self._view.cursor()
        done = file.database.execute(text, values)
        if text in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
            file.writer = self if text == "BEGIN IMMEDIATE" else None
        return done

    def executemany(self, text: str, values: Any) -> sqlite3.Cursor:
        return self._file.database.executemany(text, values)

    def executescript(self, text: str) -> None:
        """The schema, which is asked for at each opening."""
        if not self._file.laid:
            self._file.laid = True
            self._file.database.executescript(text)
            File.empty = sqlite3.connect(":memory:")
            self._file.database.backup(File.empty)

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
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
