"""What a test may leave behind, found even where it hides: processes, and servers of grpc.aio.

A process is known by a mark in its environment, which children inherit. One that writes its title over its environment
(vLLM's engine core, Ray's workers) is known by who started it: its parent, or its process group or session when the
parent is gone. Who leads a group was started by us, or was seen while it lived.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc.aio._server import Server  # aio.Server is its abstract base


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


def command_of(pid: int) -> str:
    """For people."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
