"""A part of an object store with the methods of `beneath.Directory`.

The rule: the name of a folder that was made leads to a number, and the number to its objects; a number is given once. Whoever
has a folder open goes on in that number, so what a writer that slept does to a folder that has been taken away since changes
nothing of the one that has its name now. On a disk the inode is that number.

    <parent>/<file>                 a file: an object, made once
    <parent>/<name>!<n>!made        the n-th folder of that name
    <parent>/<name>!<n>!gone        it was taken away; the marks stay, so that the number is never given again
    <parent>/<name>!<n>/...         what is in it

Folders right below the root have no number: they are part of the layout, always there, and never taken away. Everything here
blocks.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath
from types import TracebackType
from typing import IO, Final

from coordinator.wire.beneath import GONE, FileDigest, blocks_of, digest_of, lines_of, segments
from coordinator.wire.names import Names, Stored, token

MADE: Final = "made"
TAKEN: Final = "gone"
_MARK: Final = re.compile(r"(.+)!([1-9][0-9]{0,8})!(made|gone)")
_GONE_NAME: Final = re.compile(re.escape(GONE) + r"(.+)!([1-9][0-9]{0,8})")
_AT_ONCE: Final = 8


class Where(str):
    """A place in a store, for messages: its URL."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Where:
        return Where(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last segment."""
        return PurePosixPath(self).name


class StoredFolder:
    """One folder. Methods as those of `beneath.Directory`; nothing has to be closed."""

    __slots__ = ("_key", "_looked", "_names", "_seen", "path")

    def __init__(self, names: Names, key: str = "", path: Where | None = None) -> None:
        """`key`: what the keys of its objects begin with; empty: the root, else with a slash at its end."""
        self._names = names
        self._key = key
        self.path = path or Where(names.url)
        self._seen: dict[str, Stored] = {}  # objects: they never change, so what was seen once may be relied upon
        self._looked = False  # whether everything below was seen

    def __enter__(self) -> StoredFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def close(self) -> None:
        """Nothing is held."""

    def again(self) -> StoredFolder:
        """The same one."""
        return self

    def seen(self, name: str) -> StoredFolder:
        """As `child`. What is below is looked at with one list, so that what is asked about it needs no more; folders that are
        made later are not seen."""
        (segment,) = segments(name)
        beginning = f"{self._key}{segment}!"
        below = {found.key: found for found in self._names.all(beginning)}
        number, there = _number(key for key in below if "/" not in key[len(beginning) :])
        if not there:
            raise FileNotFoundError(str(self.path / name))
        made = self._at(segment, number)
        made._seen, made._looked = below, True
        return made

    def child(self, path: str) -> StoredFolder:
        """A folder below this one. Raises FileNotFoundError."""
        at = self
        for part in segments(path):
            at = at._child(part)
        return at

    def make_child(self, name: str) -> StoredFolder:
        """A new folder. Raises FileExistsError when one has this name."""
        if not self._key:
            return self.child(name)
        (segment,) = segments(name)
        number, there = self._newest(segment)
        if there:
            raise FileExistsError(segment)
        number += 1
        self._create(f"{segment}!{number}!{MADE}", token())
        return self._at(segment, number)

    def ensure_child(self, name: str) -> StoredFolder:
        """A folder below this one, made when it is not there."""
        if not self._key:
            return self.child(name)
        try:
            return self.make_child(name)
        except FileExistsError:
            return self.child(name)

    def names(self) -> list[str]:
        """Files and folders, sorted; of a folder that was taken away and is not deleted yet, a name that begins with GONE."""
        keys, folders = self._near(self._key)
        below = len(self._key)
        found = [key[below:] for key in keys if "!" not in key[below:]]
        marks: dict[str, list[str]] = {}
        for key in keys:
            if (match := _MARK.fullmatch(key[below:])) is not None:
                marks.setdefault(match[1], []).append(key)
        found += [name for name, its in marks.items() if _number(its)[1]]
        found += [GONE + folder[below:] for folder in folders if f"{folder}!{TAKEN}" in keys]
        if not self._key:
            found += [folder for folder in folders if "!" not in folder]
        return sorted(found)

    def files(self) -> list[str]:
        """Those of its names that are no folders."""
        below = len(self._key)
        return sorted(key[below:] for key in self._near(self._key)[0] if "!" not in key[below:])

    def has(self, name: str) -> bool:
        """Whether a file or a folder has this name."""
        return self._info(name) is not None or self.is_directory(name)

    def is_directory(self, name: str) -> bool:
        """Whether a folder has this name."""
        if self._key:
            return self._newest(name)[1]
        return any(self._names.near(f"{name}/"))

    def size_below(self, limit: int) -> int:
        """Bytes of the objects below."""
        return sum(found.size_bytes for found in self._names.all(self._key)[:limit])

    def walk(self, limit: int) -> Iterator[str]:
        """As `Directory.walk`."""
        left = [limit]
        yield from self._walk("", left)

    def _walk(self, prefix: str, left: list[int]) -> Iterator[str]:
        for name in self.names():
            if left[0] <= 0:
                return
            if not name.startswith(GONE) and self.is_directory(name):
                below = self._child(name)
                if not below.names():
                    left[0] -= 1
                    yield f"{prefix}{name}/"
                yield from below._walk(f"{prefix}{name}/", left)
            else:
                left[0] -= 1
                yield prefix + name

    def read(self, path: str, limit: int) -> bytes:
        """The whole file. Raises LIMIT_EXCEEDED, FileNotFoundError."""
        folder, name = self._file(path)
        return self._names.read(folder._key + name, limit)

    def lines(self, path: str, line_limit: int) -> Iterator[bytes]:
        """As `Directory.lines`."""
        with self._copied(path) as file:
            yield from lines_of(file, line_limit, str(self.path / path))

    def blocks(self, path: str, line_limit: int) -> Iterator[bytes]:
        """As `Directory.blocks`."""
        with self._copied(path) as file:
            yield from blocks_of(file, line_limit, str(self.path / path))

    @contextmanager
    def opened(self, path: str) -> Generator[int]:
        """A copy of the file, open for reading. Raises FileNotFoundError."""
        with self._copied(path) as file:
            yield file.fileno()

    def size(self, path: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""
        return self._found(path).size_bytes

    def size_and_time(self, name: str) -> tuple[int, float]:
        """Bytes of a file, and when it was written, by the clock of the store. Raises FileNotFoundError."""
        found = self._found(name)
        return found.size_bytes, found.written_s

    def digest(self, path: str) -> FileDigest:
        """Size and SHA-256 of every byte. Raises FileNotFoundError."""
        folder, name = self._file(path)
        return digest_of(self._names.chunks(folder._key + name))

    def write_new(self, name: str, data: bytes | Iterator[bytes], digest: FileDigest | None = None) -> FileDigest:
        """Make a file that is there whole or not at all. Raises FileExistsError when the name has other bytes.

        One that has these very bytes counts as ours: an answer that was lost cannot be told from it.
        """
        (segment,) = segments(name)
        if isinstance(data, bytes):
            self._create(segment, data)
            return digest or FileDigest(len(data), hashlib.sha256(data).hexdigest())
        hasher, size = hashlib.sha256(), 0
        with tempfile.TemporaryFile() as file:
            for part in data:
                hasher.update(part)
                size += len(part)
                file.write(part)
            file.flush()
            self._create(segment, file.fileno())
        return FileDigest(size, hasher.hexdigest())

    def put_file(self, name: str, file: int) -> None:
        """As `write_new`, of what an open regular file holds."""
        (segment,) = segments(name)
        self._create(segment, file)

    def replace(self, name: str, data: bytes) -> None:
        """Write a file over whatever has the name. For pointers and notes, never for snapshots."""
        (segment,) = segments(name)
        self._names.replace(self._key + segment, data)

    def remove_file(self, name: str) -> None:
        """Remove a file. One that is not there is no error."""
        (segment,) = segments(name)
        self._seen.pop(self._key + segment, None)
        self._names.delete(self._key + segment)

    def take_away(self, name: str) -> str:
        """Take the name from a folder; what it has in `names` from now on. Raises FileNotFoundError."""
        (segment,) = segments(name)
        number, there = self._newest(segment)
        if not there:
            raise FileNotFoundError(segment)
        self._mark_gone(segment, number)
        return f"{GONE}{segment}!{number}"

    def remove_child(self, name: str) -> None:
        """Remove a folder with all that is in it, also one that was taken away. Raises FileNotFoundError."""
        match = _GONE_NAME.fullmatch(name) or _GONE_NAME.fullmatch(self.take_away(name))
        assert match is not None
        self._delete(found.key for found in self._names.all(f"{self._key}{match[1]}!{match[2]}/"))

    def remove_empty(self, name: str) -> bool:
        """Take the name from a folder that holds nothing; whether it did."""
        (segment,) = segments(name)
        number, there = self._newest(segment)
        if not there or self._names.all(f"{self._key}{segment}!{number}/"):
            return False
        self._mark_gone(segment, number)
        return True

    def discard_temporaries(self, name: str = "") -> None:
        """There are none: an object is there whole or not at all."""

    def sync(self) -> None:
        """What was answered is durable."""

    def _child(self, name: str) -> StoredFolder:
        if not self._key:
            return StoredFolder(self._names, f"{name}/", self.path / name)
        number, there = self._newest(name)
        if not there:
            raise FileNotFoundError(str(self.path / name))
        return self._at(name, number)

    def _at(self, name: str, number: int) -> StoredFolder:
        made = StoredFolder(self._names, f"{self._key}{name}!{number}/", self.path / name)
        made._seen, made._looked = self._seen, self._looked
        return made

    def _newest(self, name: str) -> tuple[int, bool]:
        """The highest number of that name, zero without any, and whether it is there."""
        return _number(self._near(f"{self._key}{name}!")[0])

    def _near(self, beginning: str) -> tuple[list[str], list[str]]:
        """Keys that begin so and have no slash after it, and what others begin with, up to that slash."""
        if not self._looked:
            files, folders = self._names.near(beginning)
            return [file.key for file in files], folders
        keys: list[str] = []
        above: set[str] = set()
        for key in self._seen:
            if key.startswith(beginning):
                name, slash, _ = key[len(beginning) :].partition("/")
                if slash:
                    above.add(beginning + name)
                else:
                    keys.append(key)
        return keys, sorted(above)

    def _mark_gone(self, name: str, number: int) -> None:
        key = f"{self._key}{name}!{number}!{TAKEN}"
        try:
            self._names.create(key, token())
        except FileExistsError:
            pass  # somebody else has, and it says the same
        self._seen.clear()
        self._looked = False

    def _file(self, path: str) -> tuple[StoredFolder, str]:
        *above, name = segments(path)
        return (self.child("/".join(above)) if above else self), name

    def _info(self, path: str) -> Stored | None:
        try:
            folder, name = self._file(path)
        except FileNotFoundError:
            return None
        key = folder._key + name
        return self._seen.get(key) or self._names.info(key)

    def _found(self, path: str) -> Stored:
        found = self._info(path)
        if found is None:
            raise FileNotFoundError(str(self.path / path))
        return found

    @contextmanager
    def _copied(self, path: str) -> Generator[IO[bytes]]:
        folder, name = self._file(path)
        with tempfile.TemporaryFile() as file:
            for part in self._names.chunks(folder._key + name):
                file.write(part)
            file.seek(0)
            yield file

    def _create(self, name: str, data: bytes | int) -> None:
        key = self._key + name
        self._names.create(key, data)
        if self._looked:
            size = len(data) if isinstance(data, bytes) else os.fstat(data).st_size
            self._seen[key] = Stored(key, size, 0.0)

    def _delete(self, keys: Iterable[str]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(self._names.delete, keys))


def _number(keys: Iterable[str]) -> tuple[int, bool]:
    """Of the marks of one name: the highest number, zero without any, and whether that folder is there."""
    marks = [match for key in keys if (match := _MARK.fullmatch(key.rpartition("/")[2])) is not None]
    newest = max((int(match[2]) for match in marks), default=0)
    return newest, bool(newest) and not any(int(match[2]) == newest and match[3] == TAKEN for match in marks)
