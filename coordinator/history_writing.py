"""The history of operations, written while they run: `docs/history.md` has the format, `history` reads it.

The rule: an operation never waits for its history and never fails by it. What happens is taken in on the event loop and
written by one thread; when the disk is full, slow or broken, lines are dropped and counted. Nothing is written while little
space is left: that is the journal's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import json_format
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import history
from coordinator.driver import Drive
from coordinator.outcomes import Ended
from coordinator.protocol.topology import Participant
from coordinator.uploading import Uploaded
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import SafepointError
from coordinator.wire.terms import Phase

log = logging.getLogger(__name__)

GAP_S: Final = 0.1  # between two steps of one participant
GAP_SHARE: Final = (
    0.02  # and of the time that the phase has taken: a drain of an hour is no longer than one of a minute
)
MAX_PROGRESS_BYTES: Final = 1 << 20
MAX_TOTAL_BYTES: Final = 64 << 20
MAX_PENDING_BYTES: Final = 4 << 20  # in memory, while the disk does not answer
LEAST_FREE_BYTES: Final = 1 << 20
CLOSE_WITHIN_S: Final = 1.0
GATHER_S: Final = 0.05  # lines are written together: a thread that wakes for each would slow the operation


@dataclass(slots=True)
class _File:
    """What is known of one operation's file."""

    name: str
    taken_over: bool
    placed: bool = False  # its name is final
    only_there: bool = False  # nothing is written where nothing is
    size: int = 0
    dropped: int = 0
    phase_began_s: float = 0.0
    told_participants: bool = False
    next_at: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])


class HistoryWriter:
    """Takes in events on the coordinator's event loop. `directory` gives <root>/coordinator, in the thread: by a
    handle and not by its path, where another coordinator's root may be by now."""

    def __init__(
        self, directory: Callable[[], Directory], job_id: str, keep: int, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`keep`: the newest so many files stay."""
        self._coordinator_directory = directory
        self._job_id = job_id
        self._keep = keep
        self._wall_clock = wall_clock
        self._drives: dict[str, tuple[Drive, _File]] = {}
        self._pending: list[tuple[_File, bytes]] = []
        self._pending_bytes = 0
        self._prune = False
        self._flushing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "history")  # one thread: lines keep their order
        self._directory: Directory | None = None
        self._told_failure = False

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def began(self, drive: Drive, *, taken_over: bool = False) -> None:
        """An operation begins, or is gone on with after a restart. Call before its first event."""
        now, operation = self._wall_clock(), drive.operation
        drive.began_ms = 0 if taken_over else round(now * 1000)
        file = _File(history.file_name(now, operation.operation_id), taken_over)
        self._drives[operation.operation_id] = (drive, file)
        self._put(file, {
            "kind": "operation", "format": history.FORMAT, "operation_id": operation.operation_id,
            "operation": operation.kind.name.lower(), "snapshot_id": operation.snapshot_id, "job_id": self._job_id,
            "epoch": operation.coordinator_epoch, "time": round(now, 3), "trainer_driven": operation.trainer_driven,
            "mode": operation.options.quiesce_mode.name.lower(),
            "stragglers": operation.options.straggler_policy.name.lower(), "lease_s": operation.options.lease_ttl_s,
        })  # fmt: skip

    def offer(self, event: pb.OperationEvent) -> None:
        """One event of the feed."""
        found = self._drives.get(event.operation_id)
        if found is None:
            return
        drive, file = found
        kind = event.WhichOneof("event")
        if kind == "phase_started":
            file.phase_began_s = event.elapsed.ToMicroseconds() / 1e6
            if not file.told_participants and event.phase_started.phase != int(Phase.DISCOVER):
                file.told_participants = True
                who = [_participant(p) for p in drive.transaction.topology.participants]
                at = round(event.elapsed.ToMicroseconds() / 1e6, 6)
                self._put(file, {"kind": "participants", "at": at, "participants": who})
        is_progress = kind == "participant_progress"
        if is_progress and not event.participant_progress.done and not self._wanted(file, event):
            return
        line = json_format.MessageToDict(event, preserving_proto_field_name=True)
        self._put(file, {"kind": "progress" if is_progress else "event", "event": line})

    def ended(self, drive: Drive, ended: Ended) -> None:
        """An operation has ended; nothing more of it is written."""
        _, file = self._drives.pop(ended.operation_id, (None, None))
        if file is None:
            return
        self._prune = True
        self._put(file, {
            "kind": "ended", "time": round(self._wall_clock(), 3), "outcome": ended.outcome.name.lower(),
            "phase": ended.phase.name.lower(), "elapsed_s": round(ended.elapsed_s, 6),
            "unconfirmed": list(ended.unconfirmed), "dropped": file.dropped,
        }, always=True)  # fmt: skip

    def uploaded(self, done: Uploaded) -> None:
        """The snapshot of an operation is in the object store; that is noted where the operation is, if it still is."""
        file = _File(history.file_name(0.0, done.operation_id), taken_over=True, only_there=True)
        self._put(file, {
            "kind": "uploaded", "time": round(self._wall_clock(), 3), "url": done.url, "files": done.files,
            "size_bytes": done.size_bytes, "found": done.found, "took_s": round(done.took_s, 3), "attempts": done.attempts,
        })  # fmt: skip

    async def close(self) -> None:
        """Write what is there, if the disk takes it soon."""
        self._closing.set()
        if self._flushing is not None:
            await asyncio.wait({self._flushing}, timeout=CLOSE_WITHIN_S)
        self._thread.submit(self._close_directory)
        self._thread.shutdown(wait=False)

    def _wanted(self, file: _File, event: pb.OperationEvent) -> bool:
        """Whether this step says something new enough; those that are left out are not missing."""
        at, step = event.elapsed.ToMicroseconds() / 1e6, event.participant_progress
        key = (int(step.phase), step.participant_id)
        if at < file.next_at.get(key, 0.0) or file.size > MAX_PROGRESS_BYTES:
            return False
        file.next_at[key] = at + max(GAP_S, GAP_SHARE * (at - file.phase_began_s))
        return True

    def _put(self, file: _File, line: dict[str, Any], *, always: bool = False) -> None:
        data = json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        full = file.size + len(data) > history.MAX_FILE_BYTES
        if self._closing.is_set():
            return  # the thread takes nothing any more
        if not always and (full or self._pending_bytes + len(data) > MAX_PENDING_BYTES):
            file.dropped += 1
            return
        file.size += len(data)
        self._pending.append((file, data))
        self._pending_bytes += len(data)
        if self._flushing is None:
            self._flushing = asyncio.ensure_future(self._flush())

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._pending:
                if not self._closing.is_set():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(GATHER_S):
                            await self._closing.wait()
                batch, self._pending = self._pending, []
                prune, self._prune = self._prune, False
                await loop.run_in_executor(self._thread, self._write, batch, prune)
                self._pending_bytes -= sum(len(data) for _, data in batch)
        finally:
            self._flushing = None

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _write(self, batch: list[tuple[_File, bytes]], prune: bool) -> None:
        """Raises nothing: what cannot be written is dropped."""
        try:
            directory = self._open()
            if directory.free_bytes() < LEAST_FREE_BYTES:
                raise OSError("less than 1 MiB is free")
            joined: dict[str, list[bytes]] = {}
            for file, data in batch:
                if file.taken_over:
                    mine = [name for name, operation in history.names(directory) if file.name[14:-6] == operation]
                    file.name, file.taken_over = (mine or [file.name])[-1], False
                    data = b"\n" + data  # the last line before it may be torn
                    file.placed = bool(mine)
                    if file.only_there and not mine:
                        continue
                if not file.placed:
                    file.name, file.placed = _after_others(directory, file.name, joined), True
                joined.setdefault(file.name, []).append(data)
            for name, parts in joined.items():
                directory.append(name, b"".join(parts))
            self._told_failure = False
            if prune:
                self._forget(directory)
        except (OSError, SafepointError) as error:
            for file, _ in batch:
                file.dropped += 1
            self._close_directory()
            if not self._told_failure:
                log.warning("the history of operations is not written: %s", error)
                self._told_failure = True

    def _open(self) -> Directory:
        if self._directory is None:
            with self._coordinator_directory() as ours:
                self._directory = ours.ensure_child(history.DIRECTORY)
        return self._directory

    def _close_directory(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _forget(self, directory: Directory) -> None:
        files = [name for name, _ in history.names(directory)]
        left = MAX_TOTAL_BYTES
        for number, name in enumerate(reversed(files)):
            with suppress(FileNotFoundError):
                left -= directory.size(name)
            if number and (number >= self._keep or left < 0):
                directory.remove_file(name)


def _after_others(directory: Directory, name: str, unwritten: Iterable[str] = ()) -> str:
    """The same name, later than all that are there: a clock that was set back must not make the newest the oldest."""
    there = [other for other, _ in history.names(directory)]
    newest = max(map(history.place, (*there, *unwritten)), default=-1)
    return name if history.place(name) > newest else history.file_name((newest + 1) / 1000, name[14:-6])


def _participant(who: Participant) -> dict[str, Any]:
    return {
        "participant_id": who.participant_id, "role": who.role.name.lower(), "participant_kind": who.kind,
        "state_survives_by": who.checkpoint_mode.name.lower(), "workers": who.configured_workers,
        "depends_on": list(who.depends_on),
    }  # fmt: skip
