"""A file system in memory that keeps only what was made durable, beneath the modules that write files.

The rule: what POSIX does not promise does not hold. After a power loss a file has the bytes of its last fsync, all of
them or a part of them; a name that was made, linked, renamed or removed is there or not unless its directory was fsynced
since; a failed fsync leaves pages that count as clean and are lost. A process that dies loses nothing that it wrote.

`SimOs` stands in for the module `os` (and `shutil.rmtree`, and `open`) in the modules that use the snapshot root.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import importlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Generator
from random import Random
from types import SimpleNamespace
from typing import Any

from tests.simulation.loop import PROCESS, Killed, SimLoop

INSTALLED = {
    "participant_shims.export": ("os",),
    "participant_shims.adapters.ledger_file": ("os",),
    "participant_shims.gate.calllog_export": ("os",),
    "participant_shims.gate.state.sessions": ("os",),
    "participant_shims.gate.state.shelf": ("os",),
}
# Of the coordinator every module that is loaded, so that a new file cannot slip past; but for those without the root.
ELSEWHERE = ("cli", "client", "demo", "doctor", "ray_host", "settings", "server", "wire.auth", "wire.tls", "wire.links",
             "wire.listening", "wire.record", "wire.failpoints", "metrics")  # fmt: skip


def _modules() -> dict[str, tuple[str, ...]]:
    found = dict(INSTALLED)
    for name, module in list(sys.modules.items()):
        top, _, rest = name.partition(".")
        if top == "coordinator" and not rest.startswith(ELSEWHERE):
            uses = tuple(each for each in ("os", "shutil") if vars(module).get(each) in (os, shutil))
            if uses:
                found[name] = uses
    return found


class Node:
    """An inode. `durable` is what a power loss leaves: bytes of a file, names of a directory."""

    def __init__(self, number: int, directory: bool, now: float = 0.0) -> None:
        self.number, self.directory = number, directory
        self.touched_s = self.durable_touched_s = now  # by the clock of the file system, which nobody sets
        self.data = bytearray()
        self.durable = b""
        self.clean = True
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        self.pending: list[tuple[tuple[str, Node | None], ...]] = []  # each: names set (or removed: None) as one
        self.links = 0

    def change(self, *names: tuple[str, Node | None]) -> None:
        for name, node in names:
            old = self.names.pop(name, None)
            if old is not None:
                old.links -= 1
            if node is not None:
                self.names[name] = node
                node.links += 1
        self.pending.append(names)


class SimDisk:
    """One file system that all processes see."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loop, self.random = loop, random
        self._numbers = 1
        self.top = Node(1, True)
        self.handles: dict[int, list[Any]] = {}  # fd -> [node, flags, position, process]
        self._next_fd = 1000
        self.full_until = 0.0
        self.fail_fsync = 0  # so many of the next fsyncs fail
        self.fail_fsync_of = ""  # only those of processes whose name begins so
        self.violation: Callable[[str], None] = lambda text: None
        self.fail_read = 0
        self.slow_until = 0.0
        self.slow_s = 0.0
        self.was_slow_at = 0.0
        self.changes = 0
        self.before_publish: Callable[[], float] | None = None  # called once, before a manifest is linked: a delay
        self.on_link: Callable[[str, str, Node], None] = lambda path, name, node: None
        self.on_unlink: Callable[[str], None] = lambda name: None
        self.trace: Callable[[str], None] = lambda text: None

    def handle(self, fd: int) -> list[Any]:
        """An open file. One that was given back may be somebody else's by now: whoever uses it again is wrong."""
        found = self.handles.get(fd)
        if found is None:
            if fd >= 0 and PROCESS.get(self.loop.outside).alive:
                self.violation(f"{PROCESS.get(self.loop.outside).name} uses a file that it has closed")
            raise OSError(errno.EBADF, "Bad file descriptor")
        return found

    # ---- faults -----------------------------------------------------------------------------------------------------------

    def gone(self, directory: Node) -> None:
        """Nothing can be made in a directory that was removed, although somebody holds it open."""
        if directory.links == 0 and directory is not self.top:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    def change(self, what: str, *, space: bool = False) -> None:
        """Before each change: blocking work lets time pass here, and a process may die or the disk fail."""
        process = PROCESS.get(self.loop.outside)
        if not process.alive:
            raise Killed
        slow = self.loop.now < self.slow_until
        if slow:
            self.was_slow_at = self.loop.now
        # Naming and syncing are where an order matters; between other changes little can happen, and a switch is dear.
        dear = what.startswith(("link", "renam", "an fsync")) or self.random.random() < 0.2
        if self.loop.job is not None and (slow or dear):
            self.loop.job.stop_for(
                self.random.uniform(0.5, 1.5) * self.slow_s if slow else self.random.uniform(1e-5, 6e-4)
            )
        if process.crash_in_disk_ops > 0:
            process.crash_in_disk_ops -= 1
            if process.crash_in_disk_ops == 0:
                self.trace(f"{process.name} dies before {what}")
                self.loop.after(0.0, process.kill)
                if self.loop.job is not None:
                    self.loop.job.stop_for(1e9)
        self.changes += 1
        if space and self.loop.now < self.full_until:
            raise OSError(errno.ENOSPC, "No space left on device")

    def power_loss(self) -> None:
        """Everybody must be dead. What was not made durable survives or not, as it happens."""
        mode = self.random.choice(["none", "all", "prefix", "subset"])
        seen: set[int] = set()
        self._lose(self.top, mode, seen)
        self.handles.clear()

    def _lose(self, node: Node, mode: str, seen: set[int]) -> None:
        if node.number in seen:
            return
        seen.add(node.number)
        if not node.directory:
            if bytes(node.data) != node.durable:
                kept = {"none": 0, "all": 1}.get(mode, self.random.randrange(3))
                torn = bytes(node.data[: self.random.randrange(len(node.data) + 1)])
                node.data = bytearray(node.durable if kept == 0 else bytes(node.data) if kept == 1 else torn)
                node.durable = bytes(node.data)
            node.clean = True
            node.touched_s = self.random.choice([node.touched_s, node.durable_touched_s])
            return
        upto = self.random.randrange(len(node.pending) + 1)
        names = dict(node.durable_names)
        for place, change in enumerate(node.pending):
            if (
                mode == "all"
                or (mode == "prefix" and place < upto)
                or (mode == "subset" and self.random.random() < 0.5)
            ):
                for name, target in change:
                    names.pop(name, None)
                    if target is not None:
                        names[name] = target
        node.names, node.durable_names, node.pending = names, dict(names), []
        for name in sorted(names):
            self._lose(names[name], mode, seen)
        if node is self.top:
            self._count_links()

    def _count_links(self) -> None:
        todo, nodes = [self.top], dict[int, Node]()
        counts: dict[int, int] = {}
        while todo:
            for child in todo.pop().names.values():
                counts[child.number] = counts.get(child.number, 0) + 1
                if child.number not in nodes:
                    nodes[child.number] = child
                    if child.directory:
                        todo.append(child)
        for number, node in nodes.items():
            node.links = counts[number]

    # ---- looking, for checks ----------------------------------------------------------------------------------------------

    def read_bytes(self, path: str) -> bytes | None:
        """A file now, without a trace of being read; None when there is none."""
        with contextlib.suppress(OSError):
            return bytes(self.resolve(path).data)
        return None

    def read_text(self, path: str) -> str | None:
        """As `read_bytes`."""
        data = self.read_bytes(path)
        return None if data is None else data.decode()

    def listing(self, path: str) -> list[str]:
        with contextlib.suppress(OSError):
            return sorted(self.resolve(path).names)
        return []

    def content(self, path: str) -> object:
        """All that lies below a directory, to be compared; None when there is none."""
        with contextlib.suppress(OSError):
            return self._content(self.resolve(path))
        return None

    def digest(self) -> str:
        """Of every file; what is in the lines of a log in whichever order, since protobuf gives maps as it likes."""
        hasher = hashlib.sha256()
        todo = [("", self.top)]
        while todo:
            path, node = todo.pop()
            lines = node.data.split(b"\n") if "/coordinator/" in path else [node.data]
            if len(lines) > 1:
                lines = [
                    bytearray(sorted(line[9 * (line[8:9] == b" ") :])) for line in lines
                ]  # without their checksums
            hasher.update(f"{path}\0{len(node.data)}\0".encode() + b"\n".join(lines))
            todo += [(f"{path}/{name}", node.names[name]) for name in sorted(node.names)]
        return hasher.hexdigest()

    def _content(self, node: Node) -> object:
        if not node.directory:
            return bytes(node.data)
        return {name: self._content(child) for name, child in node.names.items()}

    # ---- nodes ------------------------------------------------------------------------------------------------------------

    def new(self, directory: bool) -> Node:
        self._numbers += 1
        return Node(self._numbers, directory, self.loop.now)

    def resolve(self, path: Any, dir_fd: int | None = None) -> Node:
        node = self.top if dir_fd is None else self.handle(dir_fd)[0]
        for part in os.fspath(path).split("/"):
            if part in ("", "."):
                continue
            if not node.directory:
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
            found = node.names.get(part)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            node = found
        return node

    def parent(self, path: Any, dir_fd: int | None = None) -> tuple[Node, str]:
        text = os.fspath(path).rstrip("/")
        head, _, tail = text.rpartition("/")
        return self.resolve(head, dir_fd), tail

    def path_of(self, node: Node, at: Node | None = None, prefix: str = "") -> str:
        at = at or self.top
        if at is node:
            return prefix or "/"
        for name, child in at.names.items():
            if child.directory and (found := self.path_of(node, child, f"{prefix}/{name}")):
                return found
        return ""


class SimOs:
    """What the modules see as `os`."""

    PathLike = os.PathLike

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        if name.startswith("O_"):
            return getattr(os, name)
        if name in ("fspath", "path", "umask", "getpid", "stat_result"):
            return getattr(os, name)
        raise AttributeError(f"the simulated disk has no os.{name}")

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        disk = self._disk
        if flags & os.O_CREAT:
            disk.change(f"creating {path}", space=True)
            directory, name = disk.parent(path, dir_fd)
            node = directory.names.get(name)
            if node is not None and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "File exists", str(path))
            if node is None:
                disk.gone(directory)
                node = disk.new(False)
                directory.change((name, node))
        else:
            node = disk.resolve(path, dir_fd)
        if flags & os.O_DIRECTORY and not node.directory:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path))
        if node.directory and flags & (os.O_WRONLY | os.O_RDWR):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        disk._next_fd += 1
        disk.handles[disk._next_fd] = [node, flags, 0, PROCESS.get(disk.loop.outside)]
        return disk._next_fd

    def close(self, fd: int) -> None:
        self._disk.handles.pop(fd, None)

    def read(self, fd: int, size: int) -> bytes:
        handle = self._disk.handle(fd)
        if self._disk.fail_read > 0:
            self._disk.fail_read -= 1
            raise OSError(errno.EIO, "Input/output error")
        data = bytes(handle[0].data[handle[2] : handle[2] + size])
        handle[2] += len(data)
        return data

    def write(self, fd: int, data: Any) -> int:
        disk = self._disk
        raw = bytes(data)
        try:
            disk.change("a write", space=True)
        except OSError:
            part = disk.random.randrange(len(raw) + 1) if raw else 0
            if part:  # a short write first, as a full disk does
                self._put(fd, raw[:part])
                return part
            raise
        self._put(fd, raw)
        return len(raw)

    def _put(self, fd: int, raw: bytes) -> None:
        node, flags, position, _ = handle = self._disk.handle(fd)
        if flags & os.O_APPEND:
            position = len(node.data)
        node.data[position : position + len(raw)] = raw
        node.clean = False
        node.touched_s = self._disk.loop.now
        handle[2] = position + len(raw)

    def ftruncate(self, fd: int, size: int) -> None:
        node = self._disk.handle(fd)[0]
        del node.data[size:]
        node.clean = False

    def fsync(self, fd: int) -> None:
        disk = self._disk
        disk.change("an fsync")
        node: Node = disk.handle(fd)[0]
        if disk.fail_fsync > 0 and PROCESS.get(disk.loop.outside).name.startswith(disk.fail_fsync_of):
            disk.fail_fsync -= 1
            node.clean = True  # the pages count as written now, and are not
            raise OSError(errno.EIO, "Input/output error")
        if node.directory:
            node.durable_names, node.pending = dict(node.names), []
        elif not node.clean:
            node.durable, node.clean = bytes(node.data), True
            node.durable_touched_s = node.touched_s

    def fstat(self, fd: int) -> Any:
        return self._stat(self._disk.handle(fd)[0])

    def fstatvfs(self, fd: int) -> Any:
        self._disk.handle(fd)
        free = 0 if self._disk.loop.now < self._disk.full_until else 1 << 30
        return SimpleNamespace(f_bavail=free, f_frsize=1)

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        return self._stat(self._disk.resolve(path, dir_fd))

    @staticmethod
    def _stat(node: Node) -> Any:
        return SimpleNamespace(
            st_mode=(stat.S_IFDIR | 0o700) if node.directory else (stat.S_IFREG | 0o600),
            st_size=len(node.data), st_nlink=node.links, st_dev=1, st_ino=node.number, st_mtime=node.touched_s,
        )  # fmt: skip

    def utime(self, fd: int, times: tuple[float, float] | None = None) -> None:
        self._disk.change("a touch")
        self._disk.handle(fd)[0].touched_s = self._disk.loop.now if times is None else times[1]

    def statvfs(self, path: Any) -> Any:
        return SimpleNamespace(f_bavail=0 if self._disk.loop.now < self._disk.full_until else 1 << 30, f_frsize=4096)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return bytes(self._disk.handle(fd)[0].data[offset : offset + length])

    def listdir(self, fd: int) -> list[str]:
        return list(self._disk.handle(fd)[0].names)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._disk.change(f"mkdir {path}", space=True)
        directory, name = self._disk.parent(path, dir_fd)
        self._disk.gone(directory)
        if name in directory.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        directory.change((name, self._disk.new(True)))

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        done = ""
        for part in os.fspath(path).strip("/").split("/"):
            done += "/" + part
            with contextlib.suppress(FileExistsError):
                self.mkdir(done)
                self._disk.parent(done)[0].durable_names.update(self._disk.parent(done)[0].names)  # an operator made it

    def link(
        self, src: str, dst: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:  # fmt: skip
        disk = self._disk
        racing = disk.before_publish
        depth = disk.path_of(disk.parent(dst, dst_dir_fd)[0]).count("/")  # 3: of a snapshot, not of a part of it
        if racing is not None and disk.loop.job is not None and dst == "manifest.json" and depth == 3:
            disk.before_publish = None
            disk.loop.job.stop_for(racing())
        disk.change(f"linking {dst}", space=True)
        node = disk.resolve(src, src_dir_fd)
        directory, name = disk.parent(dst, dst_dir_fd)
        disk.gone(directory)
        if name in directory.names:
            raise FileExistsError(errno.EEXIST, "File exists", dst)
        directory.change((name, node))
        disk.on_link(disk.path_of(directory), name, node)

    def rename(self, src: str, dst: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        disk = self._disk
        disk.change(f"renaming {src} to {dst}", space=True)
        node = disk.resolve(src, src_dir_fd)
        directory, old = disk.parent(src, src_dir_fd)
        into, new = disk.parent(dst, dst_dir_fd)
        assert directory is into, "nobody renames between directories"
        directory.change((old, None), (new, node))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._disk.change(f"unlinking {path}")
        directory, name = self._disk.parent(path, dir_fd)
        if name not in directory.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        directory.change((name, None))
        self._disk.on_unlink(name)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        directory, name = self._disk.parent(path, dir_fd)
        node = directory.names.get(name)
        if node is not None and node.names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        self.unlink(path, dir_fd=dir_fd)

    def fdopen(self, fd: int, mode: str = "r", buffering: int = -1) -> Any:
        return SimFile(self, fd)

    def rmtree(self, path: str, *, dir_fd: int | None = None) -> None:
        directory, name = self._disk.parent(path, dir_fd)
        node = directory.names.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if not node.directory:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
        self._clear(node)
        self._disk.change(f"removing {path}")
        if node.names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        if directory.names.get(name) is node:
            directory.change((name, None))

    def _clear(self, node: Node) -> None:
        for name in sorted(node.names):
            child = node.names.get(name)
            if child is not None and child.directory:
                self._clear(child)
            self._disk.change(f"removing {name}")
            if child is not None and child.directory and child.names:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", name)
            if child is not None and node.names.get(name) is child:
                node.change((name, None))

    def open_file(self, path: Any, mode: str = "r") -> Any:
        if "b" not in mode:
            return builtins.open(path, mode, encoding="utf-8")
        return SimFile(self, self.open(path, os.O_RDONLY))


class SimFile(io.RawIOBase):
    """A buffered binary file: one write reaches the disk at flush and close."""

    def __init__(self, system: SimOs, fd: int) -> None:
        super().__init__()
        self._system, self._fd, self._out = system, fd, bytearray()

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        self._out += data
        return len(data)

    def flush(self) -> None:
        if self._fd >= 0 and self._out:
            view = bytes(self._out)
            self._out.clear()
            while view:
                view = view[self._system.write(self._fd, view) :]

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self.flush()
            finally:
                self._system.close(self._fd)
                self._fd = -1
        super().close()

    def read(self, size: int = -1) -> bytes:
        return self._system.read(self._fd, size if size >= 0 else 1 << 40)

    def readline(self, size: int | None = -1) -> bytes:
        node, _, position, _ = handle = self._system._disk.handle(self._fd)
        end = node.data.find(b"\n", position)
        end = len(node.data) if end < 0 else end + 1
        if size is not None and size >= 0:
            end = min(end, position + size)
        handle[2] = end
        return bytes(node.data[position:end])


@contextlib.contextmanager
def installed(disk: SimDisk) -> Generator[SimOs]:
    """Put the disk beneath the modules that write files; the real one is back afterwards."""
    system = SimOs(disk)
    before: list[tuple[Any, str, Any]] = []
    missing = object()
    removing = SimpleNamespace(rmtree=system.rmtree)
    for name, attributes in _modules().items():
        module = importlib.import_module(name)
        for attribute in attributes:
            before.append((module, attribute, module.__dict__.get(attribute, missing)))
            setattr(module, attribute, {"os": system, "shutil": removing, "open": system.open_file}[attribute])
    try:
        yield system
    finally:
        for module, attribute, value in before:
            if value is missing:
                delattr(module, attribute)
            else:
                setattr(module, attribute, value)
