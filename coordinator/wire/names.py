"""Names in an object store: made once, read, listed, deleted. What a snapshot root in a store is built on.

The rule: an answer of unknown effect is settled before anybody acts upon it. A PUT that may have been done is made again with
the same bytes; the store refuses a second writer of a name, and then what is there is compared: our own bytes mean that an
earlier try of ours was done, and its answer lost. Whoever must know that he was the first therefore writes bytes that nobody
else does (`token`).

    made once     PUT with `If-None-Match: *`, also for the completion of a multipart upload: the store refuses the second (412)
    seen at once  S3 shows finished writes to every GET and LIST that begins after them
    replaced      only what is a pointer or a note (`replace`): one PUT, so readers find the one or the other, whole

Everything here blocks: callers on an event loop use a thread. Safe for several threads.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from coordinator.wire.beneath import FileDigest, digest_of
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.objects import FsspecObjects, check_url

_TRIES: Final = 3
_AGAIN_S: Final = (0.1, 0.5)
_READ: Final = 1 << 20
_BLOCK: Final = 8 << 20
_SCHEMES: Final = ("s3://", "s3a://")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as the store lists it. `written_s`: seconds since 1970 by the clock of the store."""

    key: str
    size_bytes: int
    written_s: float


class Requests(Protocol):
    """One request each. Keys are below `url`. What fails raises STORAGE_FULL or STORAGE_FAILED, and may have been done."""

    url: str

    def put(self, key: str, data: bytes | int, *, once: bool) -> None:
        """`data`: bytes, or an open regular file, from its beginning. FileExistsError: refused, since the name is there."""
        ...

    def chunks(self, key: str) -> Iterator[bytes]:
        """The bytes of an object. Raises FileNotFoundError."""
        ...

    def info(self, key: str) -> Stored | None:
        """One object; None when it is not there."""
        ...

    def listed(self, beginning: str, *, deep: bool) -> tuple[list[Stored], list[str]]:
        """Objects whose keys begin so, and, unless `deep`, what their keys have in common up to the next slash."""
        ...

    def delete(self, key: str) -> None:
        """One that is not there is no error."""
        ...


class Names:
    """Names below the URL of a store. Methods raise STORAGE_FULL, STORAGE_FAILED, and what they say themselves."""

    def __init__(self, requests: Requests, sleep: Callable[[float], None] = time.sleep) -> None:
        self._requests = requests
        self._sleep = sleep
        self.url = requests.url

    def create(self, key: str, data: bytes | int) -> None:
        """Make an object that is not there. It is there when this returns, with these bytes.

        Raises FileExistsError when the name has other bytes. STORAGE_FAILED: whether it is there is not known, and may
        be decided later by a request that is still under way.
        """
        failed: SafepointError | None = None
        for number in range(_TRIES):
            if number:
                self._sleep(_AGAIN_S[number - 1])
            try:
                self._requests.put(key, data, once=True)
            except FileExistsError:
                try:
                    if self._has(key, data):
                        return
                except FileNotFoundError:
                    continue  # deleted in between
                except SafepointError as error:
                    failed = error
                    continue
                raise
            except SafepointError as error:
                if error.reason is not Reason.STORAGE_FAILED:
                    raise
                failed = error
            else:
                return
        raise failed or refuse(Reason.STORAGE_FAILED, f"{self.url}/{key} is made and deleted again and again.")

    def replace(self, key: str, data: bytes) -> None:
        """Write an object whether it is there or not."""
        self._requests.put(key, data, once=False)

    def read(self, key: str, limit: int) -> bytes:
        """The whole object. Raises FileNotFoundError, LIMIT_EXCEEDED."""
        parts: list[bytes] = []
        size = 0
        for part in self._requests.chunks(key):
            size += len(part)
            if size > limit:
                raise refuse(Reason.LIMIT_EXCEEDED, f"{self.url}/{key} is larger than {limit} bytes.")
            parts.append(part)
        return b"".join(parts)

    def chunks(self, key: str) -> Iterator[bytes]:
        """The bytes of an object, as they are needed. Raises FileNotFoundError."""
        return self._requests.chunks(key)

    def info(self, key: str) -> Stored | None:
        """One object; None when it is not there."""
        return self._requests.info(key)

    def all(self, beginning: str) -> list[Stored]:
        """Every object whose key begins so, by key."""
        return sorted(self._requests.listed(beginning, deep=True)[0], key=lambda found: found.key)

    def near(self, beginning: str) -> tuple[list[Stored], list[str]]:
        """Objects whose keys begin so and have no slash after it; and what the others begin with, without that slash."""
        files, folders = self._requests.listed(beginning, deep=False)
        return files, [folder.rstrip("/") for folder in folders]

    def delete(self, key: str) -> None:
        """Delete an object. One that is not there is no error."""
        self._requests.delete(key)

    def now_s(self) -> float:
        """The time of the store, in seconds since 1970. Writes an object, and deletes it."""
        key = f".now-{secrets.token_hex(4)}"
        self.create(key, token())
        try:
            found = self._requests.info(key)
            return found.written_s if found is not None else 0.0
        finally:
            self._requests.delete(key)

    def _has(self, key: str, data: bytes | int) -> bool:
        return digest_of(self._requests.chunks(key)) == _digest(data)


def token() -> bytes:
    """Bytes that nobody else writes."""
    return b"%s\n" % secrets.token_hex(16).encode()


class S3Requests(FsspecObjects):
    """A prefix of an S3 bucket. Credentials and endpoint come from the environment."""

    _fs: Any

    def put(self, key: str, data: bytes | int, *, once: bool) -> None:
        if isinstance(data, int):
            assert once, "what is replaced is small"
            self.put_new(key, data)
            return
        path = f"{self._path}/{key}"
        with self._told(f"writing {self.url}/{key}"), self._refusal(path, key):
            self._fs.pipe_file(path, data, mode="create" if once else "overwrite")

    def chunks(self, key: str) -> Iterator[bytes]:
        """One request for what is small, which most objects are."""
        path, at, size = f"{self._path}/{key}", 0, _BLOCK
        while at < size:
            with self._told(f"reading {self.url}/{key}"):
                try:
                    block: bytes = self._fs.cat_file(path, start=at, end=at + _BLOCK)
                except OSError as error:
                    if error.errno == errno.EINVAL and self.size(key) == 0:
                        return  # of nothing there is no range
                    raise
                if not at and len(block) == _BLOCK:
                    size = self.size(key) or 0
            yield block
            at += _BLOCK

    def info(self, key: str) -> Stored | None:
        with self._told(f"looking at {self.url}/{key}"):
            try:
                found = self._fs.info(f"{self._path}/{key}", refresh=True)
            except FileNotFoundError:
                return None
            if found.get("type") == "directory":
                return None
            return Stored(key, int(found["size"]), found["LastModified"].timestamp())

    def listed(self, beginning: str, *, deep: bool) -> tuple[list[Stored], list[str]]:
        bucket, _, prefix = f"{self._path}/".partition("/")
        asked: dict[str, str] = {"Bucket": bucket, "Prefix": prefix + beginning}
        if not deep:
            asked["Delimiter"] = "/"
        files: list[Stored] = []
        folders: list[str] = []
        with self._told(f"listing {self.url}/{beginning}"):
            while True:
                page = self._fs.call_s3("list_objects_v2", **asked)
                for found in page.get("Contents", ()):
                    key = found["Key"][len(prefix) :]
                    files.append(Stored(key, int(found["Size"]), found["LastModified"].timestamp()))
                folders += [found["Prefix"][len(prefix) :] for found in page.get("CommonPrefixes", ())]
                if not page.get("IsTruncated"):
                    return files, folders
                asked["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        with self._told(f"deleting {self.url}/{key}"):
            bucket, _, below = f"{self._path}/{key}".partition("/")
            self._fs.call_s3("delete_object", Bucket=bucket, Key=below)


def is_store(root: str) -> bool:
    """Whether a root is in an object store."""
    return root.startswith(_SCHEMES)


def names_at(url: str) -> Names:
    """The names below a root's URL. Raises INVALID_ARGUMENT for one that cannot be a root, NotInstalled."""
    check_url(url)
    if not is_store(url):
        raise refuse(
            Reason.INVALID_ARGUMENT, f"A snapshot root cannot be at {url}: only S3 is known to refuse the second writer of a name.",
            next_step="Give s3://bucket/prefix, or a directory.",
        )  # fmt: skip
    return Names(S3Requests(url))


def _digest(data: bytes | int) -> FileDigest:
    if isinstance(data, bytes):
        return digest_of((data,))
    os.lseek(data, 0, os.SEEK_SET)
    return digest_of(iter(partial(os.read, data, _READ), b""))
