"""What a process and its disk have left, as the system says it, and a look at it every few seconds.

The rule: looking costs a few system calls, never fails anything, and what the system does not say is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from coordinator.wire.marks import Marks, Use
from coordinator.wire.rpc import MAX_CONNECTIONS

log = logging.getLogger(__name__)

EVERY_S: Final = 5.0
_FILES: Final = Path("/proc/self/fd")


def raise_open_files() -> None:
    """Let this process open as many files as the system lets it: each connection is one, and 1,024 is the usual default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.info("this process may open %d files: %s", soft, error)


def open_files() -> Iterator[Use]:
    """Of this process, and how many of them are connections."""
    kinds: list[str] = []
    for name in os.listdir(_FILES) if _FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile, as the one that listed them
            kinds.append(os.readlink(_FILES / name))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "Raise `ulimit -n` for this process before it cannot accept connections."
    yield Use("open_files", "Open files", len(kinds), soft, "files", advice)
    sockets = sum(kind.startswith("socket:") for kind in kinds)
    advice = "Beyond that new ones are refused: see who opens so many, and use one client a process."
    yield Use("connections", "Connections", sockets, MAX_CONNECTIONS, "connections", advice)


def space(name: str, what: str, folder: Path, advice: str) -> Iterator[Use]:
    """Of the file system that has `folder`, as this user may fill it."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return
    used = found.f_blocks - found.f_bfree
    mib = found.f_frsize / (1 << 20)
    yield Use(name, f"{what} {folder}", used * mib, (used + found.f_bavail) * mib, "MiB", advice)


def size(name: str, what: str, file: Path, advice: str) -> Iterator[Use]:
    """Of a file that grows, against itself and what is free beside it."""
    try:
        used, found = file.stat().st_size, os.statvfs(file.parent)
    except OSError:
        return
    free = found.f_bavail * found.f_frsize
    yield Use(name, f"{what} {file}", used / (1 << 20), (used + free) / (1 << 20), "MiB", advice)


async def watch(marks: Marks, uses: Callable[[], Iterable[Use]], every_s: float = EVERY_S) -> None:
    """Look for ever, and say what passes a mark in the log of this process."""
    while True:
        for use in marks.look(await asyncio.to_thread(lambda: list(uses()))):
            log.warning("%s", use)
        await asyncio.sleep(every_s)
