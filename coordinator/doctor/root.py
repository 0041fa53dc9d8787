"""The snapshot root as this machine sees it: there, ours, synced, with room for more.

The rule: nothing appears in it, not even for a moment. What an fsync costs is measured on a file without a name
(O_TMPFILE), which vanishes when it is closed; where the file system has none, it is not measured.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from coordinator.client_results import size_text
from coordinator.doctor.finding import Finding, Severity
from coordinator.journal import RESERVE_BYTES
from coordinator.snapshot_reading import OWNER, SNAPSHOTS, SnapshotReader
from coordinator.wire.beneath import STORAGE_HELP, storage_error
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.folder import names_below
from coordinator.wire.names import is_store
from coordinator.wire.stored_folder import Where

# A save fsyncs each file, each folder and the manifest; at this cost for one of them a small save takes a second.
SLOW_SYNC_S: Final = 0.1
SLOW_ANSWER_S: Final = 0.3
_PROBE_BYTES: Final = 4096
_TRIES: Final = 5
_NAMED: Final = 5
# Room for this many snapshots of the newest one's size is enough not to speak of.
ROOM_FOR: Final = 3
# File systems whose content is gone after a restart of the machine.
VOLATILE: Final = frozenset({"tmpfs", "ramfs"})
_MOUNTS: Final = Path("/proc/self/mountinfo")


def root(path: str, newest_bytes: int, clock: Callable[[], float] = time.monotonic) -> Iterator[Finding]:
    """`newest_bytes`: size of the newest snapshot, 0 when there is none."""
    if is_store(path):
        yield _store(path, clock)
        return
    folder = Path(path)
    if not folder.is_absolute():
        yield _bad(path, "The root is not an absolute path.", "Give an absolute path: others have other folders.")
        return
    try:
        inside = folder.is_dir()
    except OSError as error:
        yield _bad(path, f"The root cannot be seen: {error.strerror}.", "Correct the path or its permissions.")
        return
    if not inside:
        yield _bad(path, "The root is not there, or no folder.", f"mkdir -p {path}, on storage that all machines see.")
        return
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        yield _bad(path, "The root is on a file system that is mounted read-only.", STORAGE_HELP[errno.EROFS])
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield _bad(path, "The root cannot be read and written by this user.", f"chown or chmod {path}.")
        return
    yield _place(folder)
    yield from _foreign(folder)
    yield _room(folder, newest_bytes)
    yield _sync(folder, clock)


def _store(url: str, clock: Callable[[], float]) -> Finding:
    """Read only: what a store must do is tried by the coordinator's start."""
    try:
        names = names_below(Where(url))
        owned = names.info(OWNER) is not None  # the first answer takes a connection as well
        before = clock()
        names.near(f"{SNAPSHOTS}/")
        took = clock() - before
    except SafepointError as error:
        return Finding("root", Severity.ERROR, url, error.problem.message, error.problem.next_step, error.reason)
    if took > SLOW_ANSWER_S:
        return Finding(
            "root", Severity.WARNING, url, f"The store of the root answers in {took * 1000:.0f} ms: some ten answers are in a pause.",
            "Use a store that is nearer, or a root on a disk with `upload`.",
        )  # fmt: skip
    has = "a root" if owned else "no root yet"
    return Finding("root", Severity.OK, url, f"The store answers in {took * 1000:.0f} ms, and has {has} there")


def _place(folder: Path) -> Finding:
    kind = file_system(folder)
    if kind in VOLATILE:
        return Finding(
            "root", Severity.WARNING, str(folder),
            f"The root is on {kind}: snapshots are gone when the machine restarts.",
            "Put the root on a disk or a shared directory.",
        )  # fmt: skip
    return Finding("root", Severity.OK, str(folder), f"The root is writable (file system {kind or 'unknown'})")


def _foreign(folder: Path) -> Iterator[Finding]:
    if not (folder / SNAPSHOTS).is_dir():
        return  # no coordinator has used it yet
    found = SnapshotReader(folder, "").foreign()
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        yield Finding(
            "root", Severity.WARNING, str(folder / SNAPSHOTS),
            f"What lies there is no snapshot: {', '.join(map(repr, found[:_NAMED]))}{more}. As long as it does, what pruned "
            "snapshots alone have needed stays on the disk.",
            "Move it elsewhere: Safepoint has not written it.",
        )  # fmt: skip


def _room(folder: Path, newest_bytes: int) -> Finding:
    free = shutil.disk_usage(folder).free
    if free < RESERVE_BYTES and not (folder / "coordinator" / "reserve").exists():
        return Finding(
            "root", Severity.ERROR, str(folder),
            f"{size_text(free)} are free. The coordinator keeps {size_text(RESERVE_BYTES)} aside, so that what has begun can "
            "end when the disk is full; without that no save begins.",
            "Free space, or `safepoint snapshots prune`.", Reason.STORAGE_FULL,
        )  # fmt: skip
    if free < newest_bytes:
        return Finding(
            "root", Severity.ERROR, str(folder),
            f"{size_text(free)} are free, less than the newest snapshot has ({size_text(newest_bytes)}).",
            "Free space, or `safepoint snapshots prune`.", Reason.STORAGE_FULL,
        )  # fmt: skip
    if free < ROOM_FOR * newest_bytes:
        return Finding(
            "root", Severity.WARNING, str(folder),
            f"{size_text(free)} are free: room for fewer than {ROOM_FOR} snapshots like the newest "
            f"({size_text(newest_bytes)}).",
            "Free space, or set keep_last.",
        )  # fmt: skip
    return Finding("root", Severity.OK, str(folder), f"{size_text(free)} are free")


def _sync(folder: Path, clock: Callable[[], float]) -> Finding:
    try:
        costs = sorted(_sync_once(folder, clock) for _ in range(_TRIES))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return Finding(
                "root", Severity.NOTE, str(folder),
                "The cost of an fsync is not measured: the file system has no files without names.",
                "`safepoint save` shows how long its commit takes.",
            )  # fmt: skip
        failed = storage_error(error, "a try")
        return Finding(
            "root", Severity.ERROR, str(folder), f"A file in the root cannot be written: {error.strerror}.",
            failed.problem.advice, failed.reason,
        )  # fmt: skip
    median = costs[len(costs) // 2]
    if median > SLOW_SYNC_S:
        return Finding(
            "root", Severity.WARNING, str(folder),
            f"An fsync takes {median * 1000:.0f} ms: each save needs several of them while everybody is paused.",
            "Use faster storage for the root.",
        )  # fmt: skip
    return Finding("root", Severity.OK, str(folder), f"An fsync takes {median * 1000:.1f} ms")


def _sync_once(folder: Path, clock: Callable[[], float]) -> float:
    descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, b"\0" * _PROBE_BYTES)
        before = clock()
        os.fsync(descriptor)
        return clock() - before
    finally:
        os.close(descriptor)


def file_system(folder: Path, mounts: Path = _MOUNTS) -> str:
    """The kind of file system that holds `folder`, as the kernel names it; empty when it does not say."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
        place = str(folder.resolve())
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        fields, dash, after = line.partition(" - ")
        parts = fields.split()
        if not dash or len(parts) < 5:
            continue
        point = parts[4].encode().decode("unicode_escape")  # the kernel writes a space as \040
        beneath = place == point or place.startswith(point.rstrip("/") + "/")
        # Later lines lie over earlier ones of the same place.
        if beneath and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def _bad(path: str, message: str, fix: str) -> Finding:
    return Finding("root", Severity.ERROR, path, message, fix, Reason.STORAGE_FAILED)
