"""A server that can't be loaded into, through the proxy in front of it.

The rule: it claims no more than a proxy can know. It sees requests and who they belong to, never state: the server is
stateless, or whatever rollouts have touched it restart (then the ledger names them, so that nobody continues one).
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import Activity, CheckpointMode, QuiesceMode, Role, RolloutState
from participant_shims.adapter import (
    Closed,
    Counts,
    Description,
    Drain,
    Exported,
    LedgerLine,
    LiveRollout,
    Loaded,
    Opened,
    Progress,
    Snapshot,
    Stillness,
    Worker,
    WrittenFile,
)
from participant_shims.adapters.ledger_file import LEDGER, read_ledger, write_ledger
from participant_shims.admission import ANONYMOUS, Doors, Standing
from participant_shims.identity import MAX_ATTEMPT, CallIdentity
from participant_shims.proxy import Proxy, not_bound
from participant_shims.running import Pulse

MAX_SEEN: Final = 200_000  # rollouts that touched the server; a trainer retires them long before
SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """What `--proxy` was given. `checkpoint_mode`: "stateless" or "restart_only"."""

    participant_id: str
    role: Role
    listen: str
    upstream: str
    kind: str = "proxy"
    checkpoint_mode: str = "restart_only"


class ProxyAdapter:
    """The doors are here, in the shim's own process: one worker, and it always answers."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._mode = CheckpointMode[options.checkpoint_mode.upper()]
        self._pulse = Pulse()
        self._changed: Callable[[], None] = lambda: None
        self.doors = Doors(on_change=self._moved)
        self.proxy = Proxy(options.listen, options.upstream, self.doors, self._is_stale)
        self.proxy.on_call = self._remember
        self._seen: OrderedDict[str, int] = OrderedDict()  # rollout -> highest attempt that called
        self._min_attempt: dict[str, int] = {}
        self._excluded: set[str] = set()
        self._served = False

    async def start(self, on_change: Callable[[], None]) -> None:
        self._changed = on_change
        try:
            await self.proxy.start()
        except OSError as error:
            raise not_bound(self._options.listen, error) from error

    @property
    def listens(self) -> str:
        """Where it takes calls, host:port; empty before it does."""
        return self.proxy.address

    async def stop(self) -> None:
        self.doors.open("stop")
        await self.proxy.stop()

    async def describe(self) -> Description:
        stateless = self._mode is CheckpointMode.STATELESS
        return Description(
            participant_id=self._options.participant_id,
            role=self._options.role,
            kind=self._options.kind,
            checkpoint_mode=self._mode,
            state_schema="proxy-ledger-v1",
            checkpoint_mode_reason=""
            if stateless
            else "It is behind a proxy, which can't see its state: rollouts that have called it restart.",
            upstream_endpoints=(self._options.upstream,) if self._options.role is Role.POLICY_MODEL else (),
        )

    async def close(self, operation_id: str, mode: QuiesceMode, lease_ttl_s: float) -> Closed:
        generation = self.doors.close(operation_id, mode, lease_ttl_s)
        self._excluded.clear()
        return Closed(self._workers(), self._counts(), generation)

    async def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        loop = asyncio.get_running_loop()
        give_up = None if exclude_after_s is None else loop.time() + exclude_after_s
        while True:
            seen = self._pulse.beats
            counts = self._counts()
            if not self.doors.closed:
                raise refuse(Reason.LEASE_LAPSED, f"{self._options.participant_id} has opened by its lease.")
            if counts.in_flight == 0 or self._is_quiet_when_closed(mode):
                held = counts.held + counts.in_flight
                yield Drain(Counts(0, counts.parked, held), quiesced=True)
                return
            standing, count = self.doors.rollouts(SHOWN, only=(Activity.RUNNING,))
            waiting = tuple(_live(s) for s in standing)
            yield Drain(counts, waiting, count)
            left = None if give_up is None else give_up - loop.time()
            if left is not None and left <= 0:
                every = tuple(_live(s) for s in self.doors.rollouts(count, only=(Activity.RUNNING,))[0])
                self._excluded.update(r.rollout_id for r in every)
                yield Drain(Counts(0, counts.parked, counts.held), quiesced=True, excluded=every)
                return
            await self._pulse.wait(seen, min(1.0, left) if left is not None else 1.0)

    async def still(self) -> Stillness:
        moving = sorted(set(self.doors.running()) - self._excluded)
        if not self.doors.closed:
            return Stillness(self.doors.generation, "Admission is open.")
        if moving and not self._is_quiet_when_closed(self.doors.mode):
            return Stillness(self.doors.generation, f"Requests of {', '.join(moving[:5])} run.")
        return Stillness(self.doors.generation)

    async def export(self, directory: Path) -> AsyncIterator[Progress | Exported]:
        lines = self._ledger()
        if not lines:
            yield Exported()
            return
        written = await asyncio.to_thread(write_ledger, directory, lines, self._options.participant_id)
        yield Progress(written.size_bytes, written.size_bytes, len(lines), len(lines))
        yield Exported((written,), LEDGER, {RolloutState.EXCLUDED: len(lines)})

    async def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        if self._served and self._mode is not CheckpointMode.STATELESS:
            raise refuse(Reason.NOT_FRESH, f"{self._options.participant_id} has served work since it started.")
        lines = await asyncio.to_thread(_lost, directory) if any(f.path == LEDGER for f in files) else []
        for line in lines:  # whoever still runs such an attempt would meet a server that has lost its state
            self._replace(line.rollout_id, line.attempt + 1)
        yield Loaded(
            totals={RolloutState.EXCLUDED: len(lines)} if lines else {},
            generation=self.doors.generation,
        )

    async def open(self) -> Opened:
        released = self.doors.open()
        return Opened(released.parked, released.held, released.closed_for_s)

    async def renew(self, lease_ttl_s: float) -> None:
        self.doors.renew(lease_ttl_s)

    async def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        known = 0
        for rollout_id, named in attempts:
            # Above MAX_ATTEMPT: every one that was seen. The id may come again, and goes on counting from there.
            attempt = named if named <= MAX_ATTEMPT else self._seen.get(rollout_id, -1)
            if 0 <= self._seen.get(rollout_id, attempt + 1) <= attempt:
                del self._seen[rollout_id]
                known += 1
            if attempt >= 0:
                self._replace(rollout_id, attempt + 1)
        return known

    async def status(self, max_rollouts: int) -> Snapshot:
        shown, count = self.doors.rollouts(max_rollouts)
        return Snapshot(
            workers=self._workers(),
            counts=self._counts(),
            generation=self.doors.generation,
            closed=self.doors.closed,
            rollouts=tuple(_live(s) for s in shown),
            rollout_count=count,
            anonymous_requests=self.doors.anonymous_total,
            closed_for_s=self.doors.closed_for_s,
            fresh=not self._served,
        )

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _is_quiet_when_closed(self, mode: QuiesceMode) -> bool:
        # As for gated servers: a model's responses are held, and an agent behind a proxy restarts its rollouts anyway.
        return self._options.role is Role.AGENT or (
            self._options.role in (Role.POLICY_MODEL, Role.AUXILIARY_MODEL) and mode is QuiesceMode.HOLD
        )

    def _ledger(self) -> list[LedgerLine]:
        """Rollouts that can't continue: with a stateful server all that have called it, else those that were given up."""
        if self._mode is CheckpointMode.STATELESS:
            return []
        reason = f"{self._options.participant_id} can't save its state"
        return [LedgerLine(r, attempt, RolloutState.EXCLUDED, reason) for r, attempt in sorted(self._seen.items())]

    def _counts(self) -> Counts:
        tally = self.doors.counts()
        return Counts(tally.in_flight, tally.parked, tally.held)

    def _workers(self) -> tuple[Worker, ...]:
        return (Worker("worker-0", os.getpid(), True),)

    def _is_stale(self, call: CallIdentity) -> bool:
        return call.attempt < self._min_attempt.get(call.rollout_id, 0)

    def _replace(self, rollout_id: str, min_attempt: int) -> None:
        self._min_attempt[rollout_id] = max(min_attempt, self._min_attempt.pop(rollout_id, 0))
        while len(self._min_attempt) > MAX_SEEN:
            del self._min_attempt[next(iter(self._min_attempt))]

    def _remember(self, call: CallIdentity) -> None:
        self._seen[call.rollout_id] = max(call.attempt, self._seen.pop(call.rollout_id, 0))
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _moved(self) -> None:
        self._served = self._served or self.doors.counts().in_flight > 0
        self._pulse.beat()
        self._changed()


def _live(s: Standing) -> LiveRollout:
    return LiveRollout(s.rollout_id or ANONYMOUS, s.activity, s.attempt, s.turn, s.age_s, s.waiting_on, s.no_client_s)


def _lost(directory: Path) -> list[LedgerLine]:
    with Directory.open(directory) as opened:
        return list(read_ledger(opened))
