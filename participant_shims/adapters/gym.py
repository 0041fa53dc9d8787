"""A NeMo Gym server, through the gates in its worker processes.

The rule: the server is closed when every configured worker has said so, and the cut is whole only while each of those
processes stays connected, closed, and in the generation it was closed in. A worker that does not answer is an error
with its name, never a zero.

Who has to be quiet for a cut (ARCHITECTURE, "The cut"): an agent is as soon as it is closed, since nothing it does can
leave it; a model under hold as well, since its responses wait; everybody else when no handler runs any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.terms import FOREIGN_STATE, PRECOPY, CheckpointMode, QuiesceMode, Role
from participant_shims.adapter import (
    Closed,
    Counts,
    Description,
    Drain,
    Elsewhere,
    Exported,
    LiveRollout,
    Loaded,
    Opened,
    Part,
    Progress,
    Snapshot,
    Stillness,
    TaskStack,
    Worker,
    WrittenFile,
)
from participant_shims.adapters.gate_link import GateHub, GateLink, GateStatus, Json, read_rollout, read_status
from participant_shims.adapters.gates import ANSWER_WITHIN_S, Gates, kind_of
from participant_shims.adapters.gym_state import GymState
from participant_shims.adapters.gym_terms import (
    join_warnings,
    mode_named,
    role_named,
    sum_counts,
)
from participant_shims.admission import ANONYMOUS
from participant_shims.gate.process import standstill
from participant_shims.running import Pulse

log = logging.getLogger(__name__)

CLOSE_WITHIN_S: Final = 5.0  # a worker whose loop is busy for longer is declined; it is asked to open again
EXCLUDE_WITHIN_S: Final = 2.0
SHOWN: Final = 20
_KIND_ROLES: Final = {"agent": Role.AGENT, "resources": Role.RESOURCES}


@dataclass(slots=True)
class _Pause:
    """One closing: which process closed in which of its generations. `excluded` are rollouts that are given up."""

    operation_id: str
    mode: QuiesceMode
    lease_until: float
    workers: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # id -> pid, generation
    excluded: set[str] = field(default_factory=set[str])
    held_until: dict[str, float] = field(default_factory=dict[str, float])  # id -> the lease that it has confirmed


class GymAdapter:
    """The adapter of one life of a Gym server. `life` is its directory, whose lock the caller holds."""

    def __init__(self, life: Path, participant_id: str, role: Role = Role.UNSPECIFIED) -> None:
        self._participant_id = participant_id
        self._role = role
        self._hub = GateHub(life / "gate.sock", self._join, self._event, self._leave)
        self._state = GymState(life / "calls.db", participant_id)
        self._gates = Gates(participant_id)
        self._links = self._gates.here
        self._changed: Callable[[], None] = lambda: None
        self._pulse = Pulse()
        self._described: Description | None = None
        self._pause: _Pause | None = None
        self._last_operation = ""
        self._generation = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()  # close and open reach the gates one after the other, never interleaved

    # ---- life -----------------------------------------------------------------------------------------------------

    async def start(self, on_change: Callable[[], None]) -> None:
        self._changed = on_change
        await self._hub.start()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self._hub.stop()

    async def describe(self) -> Description:
        links = self._gates.all(Reason.UNAVAILABLE)
        told = await self._gates.ask(links, "describe", {}, ANSWER_WITHIN_S)
        hello, first = links[0].hello, told[0]
        kind = kind_of(links[0])
        mode = mode_named(str(first.get("checkpoint_mode", "")))
        role = self._role or role_named(str(first.get("role") or "")) or _KIND_ROLES.get(kind, Role.UNSPECIFIED)
        reason = str(first.get("mode_reason") or "")
        for other in told[1:]:  # one worker that can't export makes the whole server lose its rollouts
            if mode_named(str(other.get("checkpoint_mode", ""))) is CheckpointMode.RESTART_ONLY:
                mode, reason = CheckpointMode.RESTART_ONLY, str(other.get("mode_reason") or reason)
        self._described = Description(
            participant_id=self._participant_id,
            role=role,
            kind=f"gym.{kind}",
            checkpoint_mode=mode,
            checkpoint_mode_reason=reason,
            state_schema=str(first.get("state_schema") or "gym-v1"),
            configured_workers=hello.configured_workers,
            depends_on=tuple(str(n) for n in first.get("depends_on") or ()),
            upstream_endpoints=tuple(str(n) for n in first.get("upstream_endpoints") or ()),
            config_digest=str(first.get("config_digest") or ""),
            features=(
                PRECOPY,
                FOREIGN_STATE,
                *(f"{k}={v}" for k, v in sorted(dict(first.get("versions") or {}).items())),
            ),
        )
        return self._described

    # ---- closing --------------------------------------------------------------------------------------------------

    async def close(self, operation_id: str, mode: QuiesceMode, lease_ttl_s: float) -> Closed:
        async with self._order:
            now = asyncio.get_running_loop().time()
            pause = _Pause(operation_id, mode, now + lease_ttl_s)
            self._pause, self._last_operation = pause, operation_id
            try:
                links = self._gates.all(Reason.WORKERS_MISSING)
                answers = await self._gates.ask(links, "close", _closing(pause, lease_ttl_s), CLOSE_WITHIN_S)
                statuses = [self._closed_status(link, a) for link, a in zip(links, answers, strict=True)]
                for link, status in zip(links, statuses, strict=True):
                    pause.workers[link.worker_id] = (link.hello.pid, status.generation)
                    pause.held_until[link.worker_id] = now + lease_ttl_s
            except BaseException:
                self._pause = None
                # Those that did close are opened again: a server that is half closed would stop its callers for a lease.
                self._spawn(self._open_all(), "re-open after a failed close")
                raise
            self._generation += 1
            self._moved()
            return Closed(self._workers(), sum_counts(statuses), self._generation)

    async def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        pause = self._pause
        if pause is None:
            raise refuse(Reason.WRONG_PHASE, f"{self._participant_id} is not closed.")
        loop = asyncio.get_running_loop()
        give_up = None if exclude_after_s is None else loop.time() + exclude_after_s
        if self._is_quiet_when_closed(mode):
            counts = sum_counts(await self._statuses())
            # Under hold a generation that still runs is a response that will be held.
            yield Drain(Counts(0, counts.parked, counts.held + counts.in_flight), quiesced=True)
            return
        while True:
            seen = self._pulse.beats
            statuses = await self._statuses()
            self._check_whole(pause)
            counts = sum_counts(statuses)
            waiting = sorted((r for s in statuses for r in s.waiting_for), key=lambda r: -r.age_s)
            if counts.in_flight == 0:
                yield Drain(Counts(0, counts.parked, counts.held), quiesced=True)
                return
            yield Drain(counts, tuple(waiting[:SHOWN]), sum(s.waiting_for_count for s in statuses))
            left = None if give_up is None else give_up - loop.time()
            if left is not None and exclude_after_s is not None:
                left = min(left, _until_orphans_go(statuses, exclude_after_s))
            if left is not None and left <= 0:
                excluded = await self._exclude(pause, waiting)
                yield Drain(Counts(0, counts.parked, counts.held), quiesced=True, excluded=excluded)
                return
            # Gates push each change; the second is for the ages that are shown.
            await self._pulse.wait(seen, min(1.0, left) if left is not None else 1.0)

    async def still(self) -> Stillness:
        pause = self._pause
        if pause is None:
            return Stillness(self._generation, "Admission is open.")
        try:
            statuses = await self._statuses()
            self._check_whole(pause)
        except SafepointError as error:
            return Stillness(self._generation, error.problem.message, error.reason)
        if not self._is_quiet_when_closed(pause.mode):
            moving = sorted({r.rollout_id for s in statuses for r in s.waiting_for} - pause.excluded)
            more = sum(s.waiting_for_count for s in statuses) > len(pause.excluded)
            if moving or more:
                who = ", ".join(moving[:5]) or "a rollout"
                return Stillness(self._generation, f"Work of {who} runs at {self._participant_id}.")
        return Stillness(self._generation)

    # ---- state ----------------------------------------------------------------------------------------------------

    async def precopy(self, root: Path, within_s: float) -> None:
        described = self._described or await self.describe()
        if described.checkpoint_mode is not CheckpointMode.STATELESS:
            await self._state.precopy(self._gates.all(Reason.WORKERS_MISSING), root, within_s)

    async def export(self, directory: Path, root: Path | None = None) -> AsyncIterator[Progress | Exported]:
        links = self._gates.all(Reason.WORKERS_MISSING)
        # It is the same for the whole life: a worker that is too busy to say it again must not fail a save.
        described = self._described or await self.describe()
        async with aclosing(self._state.export(links, described, directory, root)) as steps:
            async for step in steps:
                yield step

    def doubt(self) -> None:
        self._state.doubt()

    def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        return self.load_parts([Part(directory, tuple(files))])

    async def load_parts(self, parts: Sequence[Part]) -> AsyncIterator[Progress | Loaded]:
        links = self._gates.all(Reason.WORKERS_MISSING)
        if not await self._is_fresh():
            raise refuse(Reason.NOT_FRESH, f"{self._participant_id} has served work since it started.")
        async with aclosing(self._state.load(links, parts, self._last_operation)) as steps:
            async for step in steps:
                yield replace(step, generation=self._generation) if isinstance(step, Loaded) else step

    async def note_elsewhere(self, held: Sequence[Elsewhere]) -> None:
        await self._state.note_elsewhere(held)

    async def unload(self) -> None:
        await self._state.unload(self._is_fresh)

    async def loaded_by(self) -> str:
        return await self._state.loaded_by()

    async def keep(self) -> None:
        await self._state.keep()

    async def _is_fresh(self) -> bool:
        return all(s.fresh for s in await self._statuses())

    # ---- opening --------------------------------------------------------------------------------------------------

    async def open(self) -> Opened:
        self._pause = None
        async with self._order:
            return await self._open_all()

    async def left_closed_for(self) -> str:
        if self._last_operation:  # since then it is closed for nobody but us
            return ""
        links = self._gates.all(Reason.UNAVAILABLE)
        answers = await self._gates.ask(links, "status", {"max_rollouts": 0}, ANSWER_WITHIN_S)
        return next((s.operation_id for s in map(read_status, answers) if s.closed), "")

    async def renew(self, lease_ttl_s: float) -> None:
        pause, clock = self._pause, asyncio.get_running_loop().time
        asked_at, links = clock(), list(self._links.values())
        if pause is not None:
            pause.lease_until = asked_at + lease_ttl_s
        asking = (link.request("renew", {"lease_s": lease_ttl_s}, ANSWER_WITHIN_S) for link in links)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        if pause is not None:
            confirmed = {
                link.worker_id for link, a in zip(links, answers, strict=True) if not isinstance(a, BaseException)
            }
            pause.held_until |= dict.fromkeys(confirmed & pause.workers.keys(), asked_at + lease_ttl_s)
            for worker_id, until in pause.held_until.items():
                if clock() >= until:  # it opens as soon as it can, and cannot say so: nobody else shall wait for it
                    pid = pause.workers[worker_id][0]
                    how = standstill(pid) or "does not answer: see how busy its machine is, and what its threads do"
                    text = f"Worker {worker_id} of {self._participant_id} has confirmed no lease that still runs. Its process (pid {pid}) {how}."
                    raise refuse(Reason.LEASE_LAPSED, text)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        links = self._gates.all(Reason.WORKERS_MISSING)
        answers = await self._gates.ask(links, "retire", {"attempts": [list(a) for a in attempts]}, None)
        return max(int(a.get("known") or 0) for a in answers)  # the workers share one call log

    async def status(self, max_rollouts: int) -> Snapshot:
        links = list(self._links.values())
        answered = await self._gates.refresh(links, max_rollouts)
        statuses = [link.status for link in links]
        rollouts = sorted((r for s in statuses for r in s.rollouts), key=lambda r: -r.age_s)
        remarks = [
            f"{link.worker_id} does not answer. {link.standing}"
            for link, ok in zip(links, answered, strict=True)
            if not ok
        ]
        if missing := self._gates.missing():
            remarks.append(missing)
        closed_for = [s.closed_for_s for s in statuses if s.closed_for_s is not None]
        return Snapshot(
            workers=self._workers(),
            counts=sum_counts(statuses),
            generation=self._generation,
            closed=all(s.closed for s in statuses) if statuses else self._pause is not None,
            rollouts=tuple(rollouts[:max_rollouts]),
            rollout_count=sum(s.rollout_count for s in statuses),
            waiting_for="; ".join(remarks),
            anonymous_requests=sum(s.anonymous_requests for s in statuses),
            closed_for_s=max(closed_for) if closed_for else None,
            fresh=all(s.fresh for s in statuses),
            warnings=(
                *join_warnings({link.worker_id: link.status for link in links}),
                *self._state.lost(self._links, self._gates.left),
            ),
            replayed_calls=sum(s.replayed_calls for s in statuses),
            diverged_rollouts=sum(s.diverged_rollouts for s in statuses),
        )

    async def stacks(self, limit: int) -> list[TaskStack]:
        return await self._gates.stacks(list(self._links.values()), limit)

    # ---- gates come, speak and go ---------------------------------------------------------------------------------

    def _join(self, link: GateLink) -> None:
        old = self._links.get(link.worker_id)
        if old is not None and old.connected:
            old.lost()  # the same worker dialled again before we saw its old connection end
        self._links[link.worker_id] = link
        if self._pause is not None:
            self._spawn(self._close_newcomer(link, self._pause), f"close {link.worker_id}, which joined while closed")
        elif self._last_operation:
            self._spawn(self._open_newcomer(link, self._last_operation), f"open {link.worker_id}, which missed it")
        self._moved()

    async def _close_newcomer(self, link: GateLink, pause: _Pause) -> None:
        # The worker that was closed may only have lost its connection: then its generation has not moved.
        left = pause.lease_until - asyncio.get_running_loop().time()
        if left > 0 and pause is self._pause:
            self._closed_status(link, await link.request("close", _closing(pause, left), CLOSE_WITHIN_S))

    async def _open_newcomer(self, link: GateLink, operation_id: str) -> None:
        status = read_status(await link.request("status", {"max_rollouts": 0}, ANSWER_WITHIN_S))
        if status.closed and status.operation_id in ("", operation_id) and self._pause is None:
            await link.request("open", {}, ANSWER_WITHIN_S)

    def _event(self, link: GateLink, message: Json) -> None:
        if message["event"] == "status":
            status = read_status(message["status"])
            if status.generation >= link.status.generation:  # one made before a close must not undo its answer
                link.status = status
        elif message["event"] == "opened":
            log.warning("worker %s opened by itself: %s", link.worker_id, message.get("cause"))
        self._moved()

    def _leave(self, link: GateLink) -> None:
        self._gates.leave(link)
        self._moved()

    def _moved(self) -> None:
        self._pulse.beat()
        self._changed()

    # ---- parts ----------------------------------------------------------------------------------------------------

    async def _statuses(self) -> list[GateStatus]:
        pause, now = self._pause, asyncio.get_running_loop().time()
        return await self._gates.statuses(None if pause is None else pause.lease_until - now)

    def _is_quiet_when_closed(self, mode: QuiesceMode) -> bool:
        kind = self._gates.kind
        return kind == "agent" or (kind == "model" and mode is QuiesceMode.HOLD)

    def _closed_status(self, link: GateLink, answer: Json) -> GateStatus:
        operation_id = self._pause.operation_id if self._pause else ""
        status = read_status({"closed": True, "operation_id": operation_id, **answer})
        link.status = status
        return status

    def _check_whole(self, pause: _Pause) -> None:
        """Raise unless every worker that closed is there, closed, and has not been open in between."""
        for worker_id, (pid, generation) in pause.workers.items():
            link = self._links.get(worker_id)
            if link is None:
                left = self._gates.left.get(worker_id)
                how = f": {left.fate}" if left is not None and left.hello.pid == pid else ""
                words = left.last_words if how and left is not None else ""
                raise refuse(
                    Reason.WORKERS_MISSING, f"Worker {worker_id} (pid {pid}) left after it had closed{how}.{words}"
                )
            if link.hello.pid != pid:
                raise refuse(
                    Reason.WORKERS_MISSING, f"Worker {worker_id} was restarted: pid {link.hello.pid}, not {pid}."
                )
            if not link.status.closed or link.status.generation != generation:
                raise refuse(
                    Reason.ACTIVITY_AFTER_PREPARED,
                    f"Admission of worker {worker_id} opened (generation {generation}, now {link.status.generation}).",
                )

    async def _exclude(self, pause: _Pause, waiting: Sequence[LiveRollout]) -> tuple[LiveRollout, ...]:
        answers = await self._gates.ask(self._gates.all(Reason.WORKERS_MISSING), "exclude", {}, EXCLUDE_WITHIN_S)
        out = [read_rollout(raw) for answer in answers for raw in cast("list[Any]", answer.get("excluded") or [])]
        # Work without identity can't be excluded by name; it is in no snapshot anyway, and it may not veto one.
        out += [r for r in waiting if r.rollout_id == ANONYMOUS]
        pause.excluded |= {r.rollout_id for r in out}
        return tuple(out)

    async def _open_all(self) -> Opened:
        links = list(self._links.values())
        answers = await self._gates.ask(links, "open", {}, ANSWER_WITHIN_S)
        closed_for = [float(a["closed_for_s"]) for a in answers if a.get("closed_for_s") is not None]
        lost = self._state.lost(self._links, self._gates.left)
        self._state.opened()
        if closed_for:
            self._generation += 1
        self._moved()
        return Opened(
            released_parked=sum(int(a.get("released_parked") or 0) for a in answers),
            released_held=sum(int(a.get("released_held") or 0) for a in answers),
            closed_for_s=max(closed_for) if closed_for else None,
            warnings=lost,
        )

    def _workers(self) -> tuple[Worker, ...]:
        closed = self._pause is not None
        return tuple(
            Worker(name, link.hello.pid, link.status.closed == closed) for name, link in sorted(self._links.items())
        )

    def _spawn(self, work: Any, what: str) -> None:
        async def run() -> None:
            try:
                await work
            except SafepointError as error:
                log.warning("%s: %s", what, error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _closing(pause: _Pause, lease_s: float) -> Json:
    return {"operation_id": pause.operation_id, "mode": pause.mode.name.lower(), "lease_s": lease_s}


def _until_orphans_go(statuses: Sequence[GateStatus], after_s: float) -> float:
    """Seconds until everything that is waited for has had no client for `after_s`; infinite while something has one."""
    orphaned = [s for s in statuses if s.orphan_count]
    if not orphaned or any(s.orphan_count < s.waiting_for_count for s in statuses):
        return math.inf
    return after_s - min(s.orphans_for_s for s in orphaned)
