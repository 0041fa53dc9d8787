"""Files below a directory, opened so that nobody can lead us out of it.

The rule: every path is made of plain segments, every step is opened from the handle of the step before with
O_NOFOLLOW, and what is read is a regular file with one name. A link, a device, a `..` or a second hard link refuses
the snapshot (SNAPSHOT_UNSAFE); crafted archives that delete or read host files are the attack surface of every
checkpoint format. Nothing is ever replaced: `write_new` either makes the file, whole and durable, or leaves nothing.

Standard library only. Everything here blocks: callers on an event loop use a thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, SafepointError, refuse

GONE: Final = ".gone-"  # what begins so is being deleted
MAX_PATH_BYTES: Final = 512
MAX_DEPTH: Final = 16
_SEGMENT: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
_CHUNK: Final = 1 << 20
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: a FIFO must not hang the open
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_MORE_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
# What helps, where the system says what is wrong. Empty: the step of the reason.
STORAGE_HELP: Final = {
    errno.EROFS: "It is mounted read-only: mount it for writing. When nobody has done that, the kernel has, after an error of "
    "the disk; `dmesg` says which.",
    errno.EACCES: "Let this user write there (chown, chmod), or use another directory.",
    errno.EPERM: "Let this user write there (chown, chmod, chattr), or use another directory.",
    errno.EIO: "The disk or its network fails: `dmesg` says how. Mend it, or move the root to another one.",
    errno.ESTALE: "The file server has dropped it: mount it again.",
    errno.EMFILE: "Nothing is wrong with the storage. Start that process with a higher limit (`ulimit -n`), or have it hold fewer.",
    errno.ENFILE: "Nothing is wrong with the storage. Raise the limit of that machine (`sysctl fs.file-max`).",
    errno.ENOMEM: "Nothing is wrong with the storage. Give that process more memory (the limit of its container or of `ulimit -v`, or "
    "the machine's), or have it hold less.",
}


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file was when it was read: size in bytes, lower-case SHA-256 hex."""

    size_bytes: int
    sha256: str


def digest_of(parts: Iterable[bytes]) -> FileDigest:
    """That of the bytes of all parts."""
    hasher, size = hashlib.sha256(), 0
    for part in parts:
        hasher.update(part)
        size += len(part)
    return FileDigest(size, hasher.hexdigest())


def storage_error(error: OSError | MemoryError, doing: str) -> SafepointError:
    """STORAGE_FULL for a full disk or quota, else STORAGE_FAILED; `doing` says what was tried and where: "writing /x".

    Which disk it was must be in the text: the root, a run directory and a temporary one are often three. Where it was no disk
    the text says so: a process that may open no more files, or that gets no more memory, also as a MemoryError.
    """
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        text = f"Process {os.getpid()} gets no more memory; it was {doing}."
        return refuse(Reason.STORAGE_FAILED, text, next_step=STORAGE_HELP[errno.ENOMEM])
    reason = Reason.STORAGE_FULL if error.errno in _FULL else Reason.STORAGE_FAILED
    where = error.filename if isinstance(error.filename, str) and os.path.isabs(error.filename) else ""
    if where and where not in doing:
        doing = f"{doing} ({where})"
    text = f"The storage failed at {doing}: {error.strerror or type(error).__name__}."
    if error.errno in _NO_MORE_FILES:
        text = f"Process {os.getpid()} may open no more files ({error.strerror}); it was {doing}."
    return refuse(reason, text, next_step=STORAGE_HELP.get(error.errno or 0, ""))


def not_of_a_snapshot(error: SafepointError, what: str, next_step: str) -> SafepointError:
    """SNAPSHOT_UNSAFE as STORAGE_FAILED with that step, where what is unsafe belongs to no snapshot; else as it is."""
    if error.reason is not Reason.SNAPSHOT_UNSAFE:
        return error
    return refuse(Reason.STORAGE_FAILED, f"{error.problem.message.rstrip('.')}: {what}.", next_step=next_step)


def segments(path: str) -> tuple[str, ...]:
    """The segments of a relative path. Raises SNAPSHOT_UNSAFE unless each is plain: [A-Za-z0-9._-], not `.` or `..`."""
    parts = tuple(path.split("/"))
    plain = all(_SEGMENT.fullmatch(p) and p not in {".", ".."} for p in parts)
    if not plain or len(parts) > MAX_DEPTH or len(path.encode()) > MAX_PATH_BYTES:
        raise refuse(Reason.SNAPSHOT_UNSAFE, f"The path {path[:100]!r} is not one that a snapshot may hold.")
    return parts


def lines_of(file: IO[bytes], line_limit: int, where: str) -> Iterator[bytes]:
    """The lines of an open file; `where` names it in messages. Raises as `Directory.lines`."""
    while True:
        try:
            line = file.readline(line_limit + 1)
        except OSError as error:
            raise storage_error(error, f"reading {where}") from error
        if not line:
            return
        if len(line) > line_limit:
            raise refuse(Reason.LIMIT_EXCEEDED, f"{where} has a line over {line_limit} bytes.")
        yield line.rstrip(b"\n")


def blocks_of(file: IO[bytes], line_limit: int, where: str, size: int = 4 * _CHUNK) -> Iterator[bytes]:
    """An open file in blocks of whole lines. Raises as `Directory.blocks`."""
    rest = b""
    while True:
        try:
            read = file.read(size)
        except OSError as error:
            raise storage_error(error, f"reading {where}") from error
        if not read:
            break
        whole, newline, tail = (rest + read).rpartition(b"\n")
        rest = tail if newline else whole + tail
        if len(rest) > line_limit:
            raise refuse(Reason.LIMIT_EXCEEDED, f"{where} has a line over {line_limit} bytes.")
        if newline:
            yield whole + newline
    if rest:
        yield rest


class Directory:
    """An open directory and a label for messages. Close it, or use it in `with`.

    Methods raise SafepointError: SNAPSHOT_UNSAFE for what is no plain file or directory, STORAGE_FULL and
    STORAGE_FAILED for what the system says; and FileNotFoundError or FileExistsError, for the caller to explain.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Directory:
        """A directory that we were configured with: trusted, so links on the way to it are followed."""
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), Path(path))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, f"opening {os.fspath(path)}") from error

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the handle back. Twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def again(self) -> Directory:
        """Another handle of the same directory, wherever its path leads by now. Raises STORAGE_FAILED."""
        try:
            return Directory(os.open(".", _DIRECTORY, dir_fd=self._fd), self.path)
        except OSError as error:
            raise storage_error(error, f"opening {self.path}") from error

    def fileno(self) -> int:
        """The handle, for what only the system can do with it."""
        return self._fd

    def free_bytes(self) -> int:
        """What is free on its file system for us. Raises STORAGE_FAILED."""
        try:
            found = os.fstatvfs(self._fd)
        except OSError as error:
            raise storage_error(error, f"looking at {self.path}") from error
        return found.f_bavail * found.f_frsize

    def removed(self) -> bool:
        """Whether somebody has removed it, as far as its own file system says: it is nowhere any more. Raises STORAGE_FAILED."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError as error:
            if error.errno == errno.ESTALE:  # so says NFS
                return True
            raise storage_error(error, f"looking for {self.path}") from error

    def in_place(self) -> bool:
        """Whether its path still leads to it, and not to a directory that came later. Raises STORAGE_FAILED for no path."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._fd)
        except OSError as error:
            raise storage_error(error, f"looking for {self.path}") from error
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def child(self, path: str) -> Directory:
        """A directory below this one."""
        return self._descend(segments(path), path)

    def seen(self, name: str) -> Directory:
        """As `child`, for whoever is going to ask about much of what is below; nothing is to be gained here."""
        return self.child(name)

    def make_child(self, name: str) -> Directory:
        """A new directory (mode 0700), made durable. Raises FileExistsError when anything has this name."""
        (segment,) = segments(name)
        try:
            failpoints.reach("disk.before_make", segment)
            os.mkdir(segment, 0o700, dir_fd=self._fd)
            try:
                self.sync()
            except OSError:  # nobody knows whether it will be there: then it must not be there now
                os.rmdir(segment, dir_fd=self._fd)
                raise
        except FileExistsError:
            raise
        except OSError as error:
            raise storage_error(error, f"making {self.path / name}") from error
        return self.child(name)

    def ensure_child(self, name: str) -> Directory:
        """A directory below this one, made when it is not there; durable either way.

        One that is there may be of somebody who failed, or died, before its name was durable.
        """
        try:
            return self.make_child(name)
        except FileExistsError:
            pass
        try:
            self.sync()
        except OSError as error:
            raise storage_error(error, f"making {self.path / name}") from error
        return self.child(name)

    def names(self) -> list[str]:
        """What is in it, sorted; names only, nothing in it is opened."""
        try:
            # Of a description of its own: threads that list one description at once share its offset, and miss names.
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                return sorted(os.listdir(fd))
            finally:
                os.close(fd)
        except OSError as error:
            raise storage_error(error, f"listing {self.path}") from error

    def files(self) -> list[str]:
        """Those of its names that are no directories: files, links, devices."""
        return [name for name in self.names() if not self.is_directory(name)]

    def has(self, name: str) -> bool:
        """Whether anything has this name, a dangling link included."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def is_directory(self, name: str) -> bool:
        """Whether this name is a directory, and no link to one."""
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def size_below(self, limit: int) -> int:
        """Bytes of the files below, of at most `limit` of them. For people: what a deletion frees."""
        total = 0
        for path in self.walk(limit):
            try:
                total += os.stat(path, dir_fd=self._fd, follow_symlinks=False).st_size
            except OSError:
                pass  # gone in between
        return total

    def walk(self, limit: int) -> Iterator[str]:
        """Paths of everything below, sorted within each directory; links are named, never followed.

        Of directories only empty ones are named, with a slash at the end.

        Stops after `limit` paths, so that a huge tree costs no more than a large one.
        """
        left = [limit]
        yield from self._walk("", 0, left)

    def _walk(self, prefix: str, depth: int, left: list[int]) -> Iterator[str]:
        for name in self.names():
            if left[0] <= 0:
                return
            path = prefix + name
            if self.is_directory(name) and depth < MAX_DEPTH and _SEGMENT.fullmatch(name):
                with self._descend((name,), path) as below:
                    if not below.names():
                        left[0] -= 1
                        yield path + "/"
                    yield from below._walk(path + "/", depth + 1, left)
            else:
                left[0] -= 1
                yield path

    def read(self, path: str, limit: int) -> bytes:
        """The whole file. Raises LIMIT_EXCEEDED beyond `limit` bytes, FileNotFoundError when it is not there."""
        fd = self._open_file(path)
        try:
            chunks: list[bytes] = []
            size = 0
            while chunk := os.read(fd, _CHUNK):
                size += len(chunk)
                if size > limit:
                    raise refuse(Reason.LIMIT_EXCEEDED, f"{self.path / path} is larger than {limit} bytes.")
                chunks.append(chunk)
            return b"".join(chunks)
        except OSError as error:
            raise storage_error(error, f"reading {self.path / path}") from error
        finally:
            os.close(fd)

    def lines(self, path: str, line_limit: int) -> Iterator[bytes]:
        """The lines of a file without their newline, read as they are needed. LIMIT_EXCEEDED for a longer line."""
        with os.fdopen(self._open_file(path), "rb", buffering=_CHUNK) as file:
            yield from lines_of(file, line_limit, str(self.path / path))

    def blocks(self, path: str, line_limit: int, size: int = 4 * _CHUNK) -> Iterator[bytes]:
        """A file in blocks of whole lines, some `size` bytes each, read as they are needed. LIMIT_EXCEEDED as `lines`."""
        with os.fdopen(self._open_file(path), "rb", buffering=0) as file:
            yield from blocks_of(file, line_limit, str(self.path / path), size)

    @contextmanager
    def opened(self, path: str) -> Generator[int]:
        """A plain file, open for reading. Raises FileNotFoundError when it is not there."""
        fd = self._open_file(path)
        try:
            yield fd
        finally:
            os.close(fd)

    def size(self, path: str) -> int:
        """Bytes of a plain file. Raises FileNotFoundError when it is not there."""
        fd = self._open_file(path)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def size_and_time(self, name: str) -> tuple[int, float]:
        """Bytes of whatever has the name, and when it was written or touched, in seconds. Raises FileNotFoundError."""
        found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        return found.st_size, found.st_mtime

    def modified(self, path: str) -> float:
        """When a plain file was last written or touched, seconds since 1970. Raises FileNotFoundError when it is not there."""
        fd = self._open_file(path)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)

    def touch(self, path: str, when_s: float | None = None) -> None:
        """Note when a plain file was as it should be: now, or `when_s`, seconds since 1970. Not durable.

        Raises FileNotFoundError when it is not there, STORAGE_FAILED.
        """
        fd = self._open_file(path)
        try:
            os.utime(fd, None if when_s is None else (when_s, when_s))
        except OSError as error:
            raise storage_error(error, f"touching {self.path / path}") from error
        finally:
            os.close(fd)

    def digest(self, path: str) -> FileDigest:
        """Size and SHA-256 of every byte. Raises FileNotFoundError when it is not there."""
        fd = self._open_file(path)
        try:
            return digest_of(iter(partial(os.read, fd, _CHUNK), b""))
        except OSError as error:
            raise storage_error(error, f"reading {self.path / path}") from error
        finally:
            os.close(fd)

    def write_new(self, name: str, data: bytes | Iterator[bytes], digest: FileDigest | None = None) -> FileDigest:
        """Make a file that is there whole and durable, or not at all: temporary name, fsync, link, fsync of the directory.

        `digest`: that of `data`, when it is known already.

        Raises FileExistsError when anything has the name: a link never replaces, a rename would. A crash may leave the
        temporary name behind, which readers ignore (`_one_name`) and `discard_temporaries` removes.
        """
        (segment,) = segments(name)
        temporary = f".{segment}.{secrets.token_hex(6)}"
        try:
            try:
                written = self._write(temporary, segment, data, digest)
                failpoints.reach("disk.before_link", segment)
                os.link(temporary, segment, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
                failpoints.reach("disk.after_link", segment)
            finally:
                self._unlink(temporary)
            self.sync()
        except FileExistsError:
            raise
        except OSError as error:
            raise storage_error(error, f"writing {self.path / name}") from error
        return written

    def replace(self, name: str, data: bytes) -> None:
        """Write a file over whatever has the name: whole and durable, or as it was. For pointers, never for snapshots."""
        (segment,) = segments(name)
        temporary = f".{segment}.{secrets.token_hex(6)}"
        try:
            try:
                self._write(temporary, segment, data)
                failpoints.reach("disk.before_replace", segment)
                os.rename(temporary, segment, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except OSError:
                self._unlink(temporary)
                raise
            self.sync()
        except OSError as error:
            raise storage_error(error, f"writing {self.path / name}") from error

    def append(self, name: str, data: bytes) -> None:
        """Add to a file that readers never rely on, made when it is not there. Not durable; a part of `data` may be there."""
        (segment,) = segments(name)
        try:
            fd = os.open(segment, _APPEND, 0o600, dir_fd=self._fd)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
        except OSError as error:
            raise storage_error(error, f"writing {self.path / name}") from error

    def open_end(self, name: str) -> int:
        """A handle that writes at the end of a file of ours that is there: the caller closes it."""
        (segment,) = segments(name)
        try:
            return os.open(segment, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
        except OSError as error:
            raise storage_error(error, f"opening {self.path / name}") from error

    def remove_file(self, name: str) -> None:
        """Remove a name that is no directory. One that is not there is no error."""
        (segment,) = segments(name)
        try:
            self._unlink(segment)
        except OSError as error:
            raise storage_error(error, f"removing {self.path / name}") from error

    def discard_temporaries(self, name: str = "") -> None:
        """Remove what an interrupted write of `name`, or without one of any name, left."""
        for found in self.names():
            if found.startswith(f".{name}." if name else "."):
                self.remove_file(found)

    def remove_child(self, name: str) -> None:
        """Remove a directory below this one with all that is in it. Links in it are removed, never followed."""
        (segment,) = segments(name)
        try:
            shutil.rmtree(segment, dir_fd=self._fd)  # walks by handles, and refuses when `segment` is a link
            self.sync()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, f"removing {self.path / name}") from error

    def take_away(self, name: str) -> str:
        """Take the name from a directory below this one, durably; the name that it has until it is removed.

        Raises FileNotFoundError.
        """
        gone = f"{GONE}{name[:100]}-{secrets.token_hex(4)}"
        self.rename_child(name, gone)
        return gone

    def remove_empty(self, name: str) -> bool:
        """Remove a directory below this one that holds nothing; whether it did. Anything else stays as it is."""
        (segment,) = segments(name)
        try:
            os.rmdir(segment, dir_fd=self._fd)
            self.sync()
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR}:
                return False
            raise storage_error(error, f"removing {self.path / name}") from error
        return True

    def rename_child(self, name: str, to: str) -> None:
        """Rename a directory within this one, durably."""
        (old,), (new,) = segments(name), segments(to)
        try:
            os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            self.sync()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, f"renaming {self.path / name}") from error

    def sync(self) -> None:
        """fsync of the directory itself: what was made, linked or removed in it survives a power loss."""
        try:
            failpoints.reach("disk.before_sync", self.path.name)
            os.fsync(self._fd)
        except OSError as error:
            error.filename = str(self.path)  # the system was given a handle, and cannot say whose
            raise

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass

    def _write(
        self, name: str, segment: str, data: bytes | Iterator[bytes], digest: FileDigest | None = None
    ) -> FileDigest:
        failpoints.reach("disk.before_write", segment)
        hasher = hashlib.sha256()
        size = 0
        fd = os.open(name, _CREATE, 0o600, dir_fd=self._fd)
        with os.fdopen(fd, "wb", buffering=_CHUNK) as file:
            for chunk in (data,) if isinstance(data, bytes) else data:
                if digest is None:
                    hasher.update(chunk)
                size += len(chunk)
                file.write(chunk)
            file.flush()
            failpoints.reach("disk.before_fsync", segment)
            os.fsync(file.fileno())
        return digest or FileDigest(size, hasher.hexdigest())

    def _open_file(self, path: str) -> int:
        parts = segments(path)
        if len(parts) > 1:
            with self._descend(parts[:-1], path) as parent:
                return parent._open_file(parts[-1])
        try:
            fd = os.open(path, _READ, dir_fd=self._fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:
                raise _unsafe(self.path / path, "a link or a socket") from error
            raise storage_error(error, f"opening {self.path / path}") from error
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or not self._one_name(path, info):
            os.close(fd)
            raise _unsafe(self.path / path, "no regular file with one name")
        return fd

    def _one_name(self, name: str, info: os.stat_result) -> bool:
        """One name, not counting temporary ones of a `write_new` that was interrupted between link and unlink."""
        if info.st_nlink == 1:
            return True
        leftover = 0
        for found in self.names():
            if found.startswith(f".{name}."):
                other = os.stat(found, dir_fd=self._fd, follow_symlinks=False)
                leftover += (other.st_dev, other.st_ino) == (info.st_dev, info.st_ino)
        return info.st_nlink == 1 + leftover

    def _descend(self, parts: tuple[str, ...], path: str) -> Directory:
        fd = self._fd
        for part in parts:
            try:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
            except FileNotFoundError:
                raise
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                    raise _unsafe(self.path / path, "no plain directory") from error
                raise storage_error(error, f"opening {self.path / path}") from error
            finally:
                if fd != self._fd:
                    os.close(fd)
            fd = below
        return Directory(fd, self.path.joinpath(*parts))


def _unsafe(path: Path, what: str) -> SafepointError:
    return refuse(Reason.SNAPSHOT_UNSAFE, f"{path} is {what}.")
