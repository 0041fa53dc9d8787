"""Safepoint's own participants: many shims in one process, each with its own server, registration and adapter.

    python -m benchmarks.fleets.ours '{"root": "/dev/shm/x", "coordinator": "file:...", "relays": [], "members": [["agent-0", "agent"]]}'

Prints one line when all are registered; runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.fleets import work
from coordinator.wire.terms import Activity, CheckpointMode, QuiesceMode, Role
from participant_shims.adapter import (
    Closed,
    Counts,
    Description,
    Drain,
    Exported,
    LiveRollout,
    Loaded,
    Opened,
    Progress,
    Snapshot,
    Stillness,
    Worker,
    WrittenFile,
)
from participant_shims.shim import Shim, ShimOptions

ROLES = {work.POLICY: Role.POLICY_MODEL, work.AGENT: Role.AGENT, work.RESOURCES: Role.RESOURCES}
REGISTERING_AT_ONCE = 20


class SmallAdapter:
    """A server that drains for as long as `work` says and whose state is one small file."""

    def __init__(self, member: work.Member) -> None:
        self._member = member
        self._generation = 0
        self._closed_at: float | None = None
        self._busy_until = 0.0
        self._workers = (Worker("w0", os.getpid(), True),)

    async def start(self, on_change: Callable[[], None]) -> None: ...

    async def stop(self) -> None: ...

    async def describe(self) -> Description:
        return Description(
            self._member.name, ROLES[self._member.role], "benchmark", CheckpointMode.EXPORT_RESTORE, "benchmark/1"
        )

    async def close(self, operation_id: str, mode: QuiesceMode, lease_ttl_s: float) -> Closed:
        now = time.monotonic()
        self._generation += 1
        self._closed_at = now
        self._busy_until = work.quiet_at(operation_id, self._member.name, self._member.role, now)
        return Closed(self._workers, self._counts(), self._generation)

    async def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        left = self._busy_until - time.monotonic()
        if left > 0:  # as the gates do: told at once when the last handler ends
            yield Drain(self._counts(), (LiveRollout("r-1", Activity.UNSPECIFIED),), 1)
            await asyncio.sleep(left)
        yield Drain(Counts(parked=1), quiesced=True)

    async def still(self) -> Stillness:
        return Stillness(self._generation)

    async def export(self, directory: Path) -> AsyncIterator[Progress | Exported]:
        path = directory / work.RECORDS
        path.write_bytes(work.EXPORT)
        digest = hashlib.sha256(work.EXPORT).hexdigest()
        yield Exported((WrittenFile(work.RECORDS, len(work.EXPORT), digest),))

    async def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        yield Loaded(generation=self._generation)

    async def open(self) -> Opened:
        if self._closed_at is None:
            return Opened()
        closed_for, self._closed_at = time.monotonic() - self._closed_at, None
        self._generation += 1
        return Opened(1, 0, closed_for)

    async def renew(self, lease_ttl_s: float) -> None: ...

    async def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        return 0

    async def status(self, max_rollouts: int) -> Snapshot:
        return Snapshot(self._workers, self._counts(), self._generation, self._closed_at is not None)

    def _counts(self) -> Counts:
        return Counts(in_flight=1 if self._busy_until > time.monotonic() else 0)


async def main(plan: str) -> None:
    given = json.loads(plan)
    root = Path(given["root"])
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    with tempfile.TemporaryDirectory(prefix="lives-", dir=root) as lives:
        async with AsyncExitStack() as stack:
            few = asyncio.Semaphore(REGISTERING_AT_ONCE)

            async def join(name: str, role: str) -> None:
                async with few:
                    found = given["relays"] or [given["coordinator"]]
                    options = ShimOptions(Path(lives), name, found[zlib.crc32(name.encode()) % len(found)], root)
                    shim = await stack.enter_async_context(Shim(options, SmallAdapter(work.Member(name, role))))
                    assert shim.registration is not None
                    await shim.registration.welcomed.wait()

            await asyncio.gather(*(join(name, role) for name, role in given["members"]))
            print("{}", flush=True)
            await told.wait()
            os._exit(0)  # thousands of good-byes would only cost time; the coordinator is ended as well


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
