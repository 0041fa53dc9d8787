"""What one process has appended to a call log: `calls.db.tail-<random>`, beside the database.

The rule: a record is in the kernel, by one write, before anybody acts on it; and it is part of the log: whoever opens the
log brings in first what was appended, by whomever, and notes in the same transaction how far that is (table `tails`).

A record is three numbers (length of the head, length of the body, CRC-32 of both), a head in JSON, and a body. Where less is
there than the numbers say, a process was ended while it wrote, and nobody has acted on that. Anything else that is no record
is damage, and refused: what follows it would be lost without a word.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

FULL_BYTES: Final = 1 << 20  # then it is brought in by its own writer, which takes milliseconds, and begun anew
_NUMBERS: Final = struct.Struct("<III")
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Tail:
    """The tail that this process appends to. Raises sqlite3.OperationalError, MemoryError, as the database does: nothing was
    appended then."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._file = -1
        self.path = database
        self.size = 0
        self.begin()

    def begin(self) -> None:
        """A new file, for what comes from now on; the one before it is the caller's to remove."""
        path = self._database.with_name(f"{self._database.name}.tail-{secrets.token_hex(4)}")
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _as_of_the_database(error) from error
        self.close()
        self._file, self.path, self.size = file, path, 0

    def append(self, head: list[Any], body: bytes = b"") -> None:
        """Write one record."""
        text = dump(head)
        record = _NUMBERS.pack(len(text), len(body), zlib.crc32(body, zlib.crc32(text))) + text + body
        try:
            wrote = os.write(self._file, record)
            if wrote != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._cut()
            raise _as_of_the_database(error) from error
        self.size += wrote

    def _cut(self) -> None:
        """Take back half a record: what is written after it must be found."""
        try:
            os.ftruncate(self._file, self.size)
        except OSError:
            self.close()  # nothing can be appended any more, and each record says so

    def close(self) -> None:
        """Append no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def tails_of(database: Path) -> list[Path]:
    """The tails that lie beside a database."""
    return sorted(database.parent.glob(f"{database.name}.tail-*"))


def records(path: Path, at: int) -> Iterator[tuple[list[Any], bytes, int]]:
    """Head, body and end of the records from `at` on, up to what was not written to its end.

    Raises sqlite3.DatabaseError for damage, OSError.
    """
    with path.open("rb") as file:
        file.seek(at)
        data = file.read()
    place = 0
    while len(data) - place >= _NUMBERS.size:
        head, body, crc = _NUMBERS.unpack_from(data, place)
        begin, end = place + _NUMBERS.size, place + _NUMBERS.size + head + body
        if end > len(data):
            return
        text, content = data[begin : begin + head], data[begin + head : end]
        if zlib.crc32(content, zlib.crc32(text)) != crc:
            raise sqlite3.DatabaseError(f"{path} is damaged at byte {at + place}")
        place = end
        yield json.loads(text), content, at + end


def dump(value: Any) -> bytes:
    """JSON, by orjson where the server has it: it is written while a rollout waits."""
    orjson: Any = sys.modules.get("orjson")
    if orjson is not None:
        with contextlib.suppress(TypeError):  # half a surrogate pair in a header
            return bytes(orjson.dumps(value))
    return json.dumps(value, separators=(",", ":")).encode()


def _as_of_the_database(error: OSError) -> sqlite3.OperationalError | MemoryError:
    if error.errno == errno.ENOMEM:
        return MemoryError()
    return sqlite3.OperationalError("disk is full" if error.errno in _NO_SPACE else f"disk I/O error: {error.strerror}")
