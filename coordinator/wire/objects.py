"""Objects below a URL, as copies of snapshots need them: put when absent, read, list. No rename, no append, no lock.

The rule: an object is there whole or not at all, and never replaced. How each store keeps it:

    S3 and what speaks it   one PUT (or the completion of a multipart upload) with `If-None-Match: *`: the store itself
                            refuses the second writer, and readers see the object only when it is complete
    a local directory       `open` with O_EXCL below a temporary name, then a hard link, as everywhere in this project
    other fsspec stores     the object is looked for, then written: two writers at the same moment may both succeed, so what
                            must be there once is written last and has the same bytes whoever writes it

`archive` is what is built on this. Everything here blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from coordinator.wire.beneath import Directory, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.extras import NotInstalled, install_extra
from coordinator.wire.slow_stores import ASKED

_CHUNK: Final = 4 << 20
_PART: Final = 8 << 20
_PARTS_AT_ONCE: Final = 4
_MOST_PARTS: Final = 9000  # S3 takes 10,000
_WHAT_A_STORE_IS: Final = (
    "Give s3://bucket/prefix, another URL that fsspec knows, or an absolute path, without credentials."
)


_NEXT: Final = (
    "See that the URL is right, that the store answers, and that the credentials and the endpoint in the environment may "
    "read and write there; then repeat: what is there is not sent again."
)
_NEXT_RIGHTS: Final = (
    "The store does not accept these credentials, or they may not do this there. Give whoever copies, which is the "
    "coordinator for the setting `upload`, others: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role of the "
    "machine for S3; what is in the environment counts at its start."
)
_LEAST_SECRET: Final = 8  # shorter ones would be found in any text
_SECRET_NAMES: Final = ("SECRET", "TOKEN", "PASSWORD", "ACCESS_KEY")
_NEXT_FULL: Final = "Free space in the object store, or copy to another one; then repeat."
_STUMBLED: Final = (LookupError, TypeError, AttributeError)


class Objects(Protocol):
    """Objects by key; a key is a path of plain segments. `url` is for messages.

    Methods raise FileExistsError and FileNotFoundError, for the caller to explain, STORAGE_FULL, and STORAGE_FAILED for
    everything else that the store says.
    """

    url: str

    def put_new(self, key: str, file: int) -> None:
        """Make an object of what an open regular file holds, from its beginning. Raises FileExistsError."""
        ...

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when it is not there."""
        ...

    def chunks(self, key: str) -> Iterator[bytes]:
        """The bytes of an object, as they are needed. Raises FileNotFoundError."""
        ...

    def names(self, below: str = "") -> list[str]:
        """First segments of all keys, sorted; or those that follow `below`, a key's beginning without its last slash."""
        ...


class LocalObjects:
    """A directory, such as one on a mounted disk. The first object makes it, when the one above it is there: a disk that is
    not mounted is no empty store."""

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._path = path

    def put_new(self, key: str, file: int) -> None:
        *folders, name = key.split("/")
        with suppress(OSError):  # why it is not there is told below
            self._path.mkdir(mode=0o700, exist_ok=True)
        with self._advised(), self._top() as top:
            at = top
            for folder in folders:
                below = at.ensure_child(folder)
                if at is not top:
                    at.close()
                at = below
            with at:
                at.write_new(name, _read(file))

    def size(self, key: str) -> int | None:
        if self._is_to_be_made():
            return None
        try:
            with self._advised(), self._top() as top:
                return top.size(key)
        except FileNotFoundError:
            return None

    def chunks(self, key: str) -> Iterator[bytes]:
        with self._advised(), self._top() as top, top.opened(key) as file:
            yield from _read(file)

    def names(self, below: str = "") -> list[str]:
        if below and self._is_to_be_made():
            return []  # whoever asks for all of it means a store that is there
        with self._advised(), self._top() as top:
            if not below:
                return top.names()
            try:
                with top.child(below) as folder:
                    return folder.names()
            except FileNotFoundError:
                return []

    @contextmanager
    def _advised(self) -> Generator[None]:
        """The catalog's advice is about the snapshot root, and this is another disk."""
        try:
            yield
        except SafepointError as error:
            if error.reason not in (Reason.STORAGE_FULL, Reason.STORAGE_FAILED) or error.problem.next_step:
                raise
            full = error.reason is Reason.STORAGE_FULL
            step = _NEXT_FULL if full else f"See that {self._path} is mounted and can be written, then repeat."
            raise refuse(error.reason, error.problem.message, next_step=step) from error
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            failed = storage_error(error, f"copying to or from {self._path}")
            step = f"See that {self._path} and the snapshot root are mounted, then repeat."
            raise refuse(failed.reason, failed.problem.message, next_step=step) from error

    def _is_to_be_made(self) -> bool:
        return not self._path.exists() and self._path.parent.is_dir()

    def _top(self) -> Directory:
        try:
            return Directory.open(self._path)
        except FileNotFoundError:
            near = self._path if self._path.parent.is_dir() else self._path.parent
            raise refuse(
                Reason.STORAGE_FAILED, f"The store {self._path} is not there: there is no directory {near}.",
                next_step=f"Mount it, or correct the path; a push makes {self._path} when {self._path.parent} is there.",
            ) from None  # fmt: skip


class FsspecObjects:
    """A store that fsspec knows, by URL. Credentials and endpoints come from its environment, never from the URL."""

    def __init__(self, url: str) -> None:
        """Raises INVALID_ARGUMENT for a URL that is none; NotInstalled when its store needs a package that is not here."""
        self.url = url.rstrip("/")
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._fs, self._path = core.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            scheme = url.partition(":")[0]
            by_extra = scheme in ("s3", "s3a") or error.name == "fsspec"
            raise NotInstalled(
                f"{url} cannot be used: {str(error).rstrip('.')}.",
                f"{install_extra('s3')}."
                if by_extra
                else f"Install what is named; the extra s3 has no store for {scheme}://.",
            ) from error
        except ValueError as error:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"{url} cannot be used: {error}.", next_step=_WHAT_A_STORE_IS
            ) from error

    def put_new(self, key: str, file: int) -> None:
        # By the open file's own name, not by its path: what was checked is what is sent.
        path = f"{self._path}/{key}"
        with self._told(f"writing {self.url}/{key}"):
            if not self._conditional and self._fs.exists(path):
                raise FileExistsError(key)
            with self._refusal(path, key):
                self._fs.put_file(f"/proc/self/fd/{file}", path, **self._how(file))

    def size(self, key: str) -> int | None:
        with self._told(f"looking at {self.url}/{key}"):
            try:
                return int(self._fs.info(f"{self._path}/{key}")["size"])
            except FileNotFoundError:
                return None

    def chunks(self, key: str) -> Iterator[bytes]:
        doing = f"reading {self.url}/{key}"
        with self._told(doing):
            opened = self._fs.open(f"{self._path}/{key}", "rb")
        with opened as file:
            while True:
                with self._told(doing):
                    chunk = file.read(_CHUNK)
                if not chunk:
                    return
                yield chunk

    def names(self, below: str = "") -> list[str]:
        path = f"{self._path}/{below}" if below else self._path
        with self._told(f"listing {self.url}"):
            try:
                found: list[str] = self._fs.ls(path, detail=False)
            except FileNotFoundError:
                return []  # prefixes are not made, they are there when something has them
            return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def _how(self, file: int) -> dict[str, Any]:
        """Once, and in parts: s3fs holds ten of 50 MB at a time, which is more than a coordinator is to need."""
        if not self._conditional:
            return {}
        part = max(_PART, math.ceil(os.fstat(file).st_size / _MOST_PARTS))
        return {"mode": "create", "chunksize": part, "max_concurrency": _PARTS_AT_ONCE}

    @property
    def _conditional(self) -> bool:
        return "s3" in self._fs.protocol or self._fs.protocol == "s3"

    @contextmanager
    def _refusal(self, path: str, key: str) -> Generator[None]:
        """What a store says to a writer: that there is no place, or that he is the second."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # not what is written: there is no such bucket
                raise refuse(
                    Reason.STORAGE_FAILED, f"There is no place {self.url} to write to: {error}."[:900],
                    next_step="Make the bucket, or correct the URL; then repeat.",
                ) from error  # fmt: skip
            # A store that refuses the second writer without saying which condition failed.
            if error.errno == errno.EINVAL and self._fs.exists(path):
                raise FileExistsError(key) from error
            raise

    @contextmanager
    def _told(self, doing: str) -> Generator[None]:
        try:
            with ASKED.asking(doing):
                yield
        except (SafepointError, FileExistsError, FileNotFoundError):
            raise
        except Exception as error:  # every store has exceptions of its own
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason, next_step = (Reason.STORAGE_FULL, _NEXT_FULL) if full else (Reason.STORAGE_FAILED, _NEXT)
            # A driver that stumbles says nothing of its cause: then the name of what it raised only misleads.
            said = (
                "its answer was not understood" if isinstance(error, _STUMBLED) else f"{type(error).__name__}: {error}"
            )
            if not full and _is_about_rights(error):
                next_step = _NEXT_RIGHTS
            text = without_secrets(f"The object store failed at {doing}: {said}", os.environ)
            raise refuse(reason, text[:900], next_step=next_step) from error


def objects_at(url: str) -> Objects:
    """The objects below a URL, or below an absolute path. Raises as `check_url`, and what `FsspecObjects` raises."""
    check_url(url)
    path = url.removeprefix("file://")  # fsspec's own writes in place: what is cut short would be there
    return LocalObjects(Path(path)) if path.startswith("/") else FsspecObjects(url)


def check_url(url: str) -> None:
    """Raise INVALID_ARGUMENT for what names no store, without saying what it is: it may hold a password."""
    if url.removeprefix("file://").startswith("/"):
        return
    _, named, place = url.partition("://")
    # Without a place it would be one below this directory.
    if not named or not place.strip("/") or "::" in url or any(sign in url for sign in "@?#"):
        raise refuse(Reason.INVALID_ARGUMENT, "What is given names no object store.", next_step=_WHAT_A_STORE_IS)


def is_url(text: str) -> bool:
    """Whether a root that is given is a store, and not a directory."""
    return "://" in text


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """The text without the values of variables whose name says that they are secret: a store's error may repeat them."""
    for name, value in environ.items():
        if len(value) >= _LEAST_SECRET and any(word in name.upper() for word in _SECRET_NAMES):
            text = text.replace(value, "***")
    return text


def _is_about_rights(error: Exception) -> bool:
    return isinstance(error, PermissionError) or "credential" in f"{type(error).__name__} {error}".lower()


def _read(file: int) -> Iterator[bytes]:
    os.lseek(file, 0, os.SEEK_SET)
    while chunk := os.read(file, _CHUNK):
        yield chunk
