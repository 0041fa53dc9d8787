"""The history of operations, written while they run: `docs/history.md` has the format, `history` reads it.

The rule: an operation never waits for its history and never fails by it. What happens is taken in on the event loop and
written by one thread (`history_files`); when the disk is full, slow or broken, lines are dropped and counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from google.protobuf import json_format
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import history
from coordinator.driver import Drive
from coordinator.history_files import Batch, File, Files
from coordinator.outcomes import Ended
from coordinator.protocol.topology import Participant
from coordinator.uploading import Uploaded
from coordinator.wire.terms import Phase

GAP_S: Final = 0.1  # between two steps of one participant
GAP_SHARE: Final = (
    0.02  # and of the time that the phase has taken: a drain of an hour is no longer than one of a minute
)
MAX_PROGRESS_BYTES: Final = 1 << 20
MAX_PENDING_BYTES: Final = 4 << 20  # in memory, while the disk does not answer
CLOSE_WITHIN_S: Final = 1.0


class HistoryWriter:
    """Takes in events on the coordinator's event loop. `files` is used by one thread of ours alone."""

    def __init__(self, files: Files, job_id: str, wall_clock: Callable[[], float] = time.time) -> None:
        self.files = files
        self._job_id = job_id
        self._wall_clock = wall_clock
        self._drives: dict[str, tuple[Drive, File]] = {}
        self._pending: Batch = []
        self._pending_bytes = 0
        self._prune = False
        self._flushing: asyncio.Task[None] | None = None
        self._closing = False
        self._hurry = asyncio.Event()  # what is there is to be written now
        self._thread = ThreadPoolExecutor(1, "history")  # one thread: lines keep their order

    def began(self, drive: Drive, *, taken_over: bool = False) -> None:
        """An operation begins, or is gone on with after a restart. Call before its first event."""
        now, operation = self._wall_clock(), drive.operation
        drive.began_ms = 0 if taken_over else round(now * 1000)
        file = File(history.file_name(now, operation.operation_id), taken_over)
        self._drives[operation.operation_id] = (drive, file)
        file.head = _line({
            "kind": "operation", "format": history.FORMAT, "operation_id": operation.operation_id,
            "operation": operation.kind.name.lower(), "snapshot_id": operation.snapshot_id, "job_id": self._job_id,
            "epoch": operation.coordinator_epoch, "time": round(now, 3), "trainer_driven": operation.trainer_driven,
            "mode": operation.options.quiesce_mode.name.lower(),
            "stragglers": operation.options.straggler_policy.name.lower(), "lease_s": operation.options.lease_ttl_s,
        })  # fmt: skip
        self._put(file, file.head)

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
                self._put(file, _line({"kind": "participants", "at": at, "participants": who}))
        is_progress = kind == "participant_progress"
        if is_progress and not event.participant_progress.done and not self._wanted(file, event):
            return
        line = json_format.MessageToDict(event, preserving_proto_field_name=True)
        self._put(file, _line({"kind": "progress" if is_progress else "event", "event": line}))

    def ended(self, drive: Drive, ended: Ended) -> None:
        """An operation has ended; nothing more of it is written."""
        _, file = self._drives.pop(ended.operation_id, (None, None))
        if file is None:
            return
        self._prune = True
        self._put(file, _line({
            "kind": "ended", "time": round(self._wall_clock(), 3), "outcome": ended.outcome.name.lower(),
            "phase": ended.phase.name.lower(), "elapsed_s": round(ended.elapsed_s, 6),
            "unconfirmed": list(ended.unconfirmed), "dropped": file.dropped,
        }), always=True)  # fmt: skip
        self._hurry.set()

    def uploaded(self, done: Uploaded) -> None:
        """The snapshot of an operation is in the object store; that is noted where the operation is, if it still is."""
        file = File(history.file_name(0.0, done.operation_id), taken_over=True, only_there=True)
        self._put(file, _line({
            "kind": "uploaded", "time": round(self._wall_clock(), 3), "url": done.url, "files": done.files,
            "size_bytes": done.size_bytes, "found": done.found, "took_s": round(done.took_s, 3), "attempts": done.attempts,
        }))  # fmt: skip

    async def close(self) -> None:
        """Write what is there, if the disk takes it soon."""
        self._closing = True
        self._hurry.set()
        if self._flushing is not None:
            await asyncio.wait({self._flushing}, timeout=CLOSE_WITHIN_S)
        self._thread.submit(self.files.close)
        self._thread.shutdown(wait=False)

    def _wanted(self, file: File, event: pb.OperationEvent) -> bool:
        """Whether this step says something new enough; those that are left out are not missing."""
        at, step = event.elapsed.ToMicroseconds() / 1e6, event.participant_progress
        key = (int(step.phase), step.participant_id)
        if at < file.next_at.get(key, 0.0) or file.size > MAX_PROGRESS_BYTES:
            return False
        file.next_at[key] = at + max(GAP_S, GAP_SHARE * (at - file.phase_began_s))
        return True

    def _put(self, file: File, data: bytes, *, always: bool = False) -> None:
        full = file.size + len(data) > history.MAX_FILE_BYTES
        if self._closing:
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
            left = False
            while self._pending or left:
                if not self._closing:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self.files.gap_s):
                            await self._hurry.wait()
                    self._hurry.clear()
                batch, self._pending = self._pending, []
                prune, self._prune = self._prune, False
                left = await loop.run_in_executor(self._thread, self.files.write, batch, prune)
                left = left and not self._closing
                self._pending_bytes -= sum(len(data) for _, data in batch)
        finally:
            self._flushing = None


def _line(what: dict[str, Any]) -> bytes:
    return json.dumps(what, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _participant(who: Participant) -> dict[str, Any]:
    return {
        "participant_id": who.participant_id, "role": who.role.name.lower(), "participant_kind": who.kind,
        "state_survives_by": who.checkpoint_mode.name.lower(), "workers": who.configured_workers,
        "depends_on": list(who.depends_on),
    }  # fmt: skip
