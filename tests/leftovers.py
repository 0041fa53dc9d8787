"""What a test may leave behind, found even where it hides: processes, servers of grpc.aio, temporary files.

A process is known by a mark in its environment, which children inherit. One that writes its title over its environment
(vLLM's engine core, Ray's workers) is known by who started it: its parent, or its process group or session when the
parent is gone. Who leads a group was started by us, or was seen while it lived.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc.aio._server import Server  # aio.Server is its abstract base

RUN_FOLDER = "spt-"
_JUST_MADE_S = 30.0


@dataclass(frozen=True)
class Row:
    """One living process. `began`: ticks since the machine started; `marked`: it has our mark."""

    pid: int
    parent: int
    group: int
    session: int
    began: int
    marked: bool = False


def processes(mark: str) -> Iterator[Row]:
    """All that can be looked at. `mark`: NAME=VALUE of the environment."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                continue
            marked = mark.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        parent, group, session = map(int, fields[1:4])
        yield Row(int(folder.name), parent, group, session, int(fields[19]), marked)


def started_by(me: int, rows: Iterable[Row], leaders: Collection[int] = ()) -> list[Row]:
    """Those that process `me` has started, and what those have started. `leaders`: pids of ours, dead ones too."""
    all_rows = list(rows)
    mine = next(row for row in all_rows if row.pid == me)
    later = [row for row in all_rows if row.pid != me and row.began >= mine.began]
    found: dict[int, Row] = {}
    before = -1
    while before != len(found):
        before = len(found)
        pids = {me, *found}
        groups = (pids | set(leaders)) - {me}  # with us there may be others in our own group: the end of a pipe
        for row in later:
            orphan = row.parent == 1 and mine.group in (row.group, row.session)
            if row.marked or row.parent in pids or row.group in groups or row.session in groups or orphan:
                found[row.pid] = row
    return list(found.values())


def note_started(noted: Callable[[int], None]) -> Callable[[], None]:
    """Tell the pid of everything that `subprocess` starts from now on; what undoes it."""
    make = subprocess.Popen.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        noted(self.pid)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]

    def undo() -> None:
        subprocess.Popen.__init__ = make  # type: ignore[method-assign]

    return undo


def stop_servers_with_their_loop(told: Callable[[str], None]) -> Callable[[], None]:
    """From now on a server of grpc.aio that still runs when its loop ends is stopped then, and told of; what undoes it.

    One whose object goes away while it runs hangs the process for good: its destructor joins a thread that waits for a
    queue that the server holds. A loop that ends finishes its async generators, so each server gets one that stops it.
    """
    start = Server.start

    async def stopping(server: Any) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            if server._server.is_running():
                told("a gRPC server that was not stopped")
                await server.stop(0)

    async def started(self: Any) -> None:
        await start(self)
        self.stopping = stopping(self)
        await anext(self.stopping)

    Server.start = started  # type: ignore[method-assign]

    def undo() -> None:
        Server.start = start  # type: ignore[method-assign]

    return undo


def temporary_files_of_one_run() -> Callable[[], None]:
    """From now on what this process and its children write for a while lies in a folder of its own; what removes it.

    A process that is killed does not tidy up: whatever it has left goes with the folder. A run that was killed itself is
    tidied up after by the next one, which sees by a lock that nobody lives there any more.
    """
    shared = Path(tempfile.gettempdir())
    for stale in shared.glob(f"{RUN_FOLDER}*"):
        _remove_unless_used(stale)
    folder = Path(tempfile.mkdtemp(prefix=RUN_FOLDER, dir=shared))  # a short name: sockets lie deep below it
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "ray").mkdir()  # Ray takes it to be there
    ours = {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    # pytest's own folders stay where people look for them: it keeps those of the last three runs.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(shared))
    tempfile.tempdir = str(folder)

    def remove() -> None:
        tempfile.tempdir = None
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)

    return remove


def _remove_unless_used(folder: Path) -> None:
    try:
        if time.time() - folder.stat().st_mtime < _JUST_MADE_S:
            return  # its maker may not have locked it yet
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # somebody else's, or somebody else was faster
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)


def command_of(pid: int) -> str:
    """For people."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
