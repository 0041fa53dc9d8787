"""One vLLM server, behind the proxy that owns its admission.

The rule: frozen is a state with proof. The doors are closed, the pause was acknowledged, the engine itself says that it is
paused, and for 100 ms no byte has come out of any stream. Drained is a count of the proxy's own requests, never vLLM's
word for it. A pause that somebody else had made is respected: it is not undone when we open.

Modes: HOLD freezes what runs (`keep`), token-exact after opening. DRAIN waits until our own set is empty, at most
`drain_limit_s`, then freezes what is left. ABORT ends what runs; the callers are told by the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, SafepointError, refuse
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
from participant_shims.adapters.vllm_cut import check_weights, totals_of, write_cut
from participant_shims.admission import ANONYMOUS, Doors, Released, Standing
from participant_shims.engine.control import EngineControl
from participant_shims.engine.discovery import Engine
from participant_shims.engine.front import Front, HttpFront, IsStale
from participant_shims.engine.pause_note import PauseNote
from participant_shims.engine.pool import Pool
from participant_shims.engine.proxy import EngineProxy
from participant_shims.engine.record import Record
from participant_shims.engine.requests_file import REQUESTS, Origin, read_requests
from participant_shims.engine.restored_note import RestoredNote
from participant_shims.engine.sharing import Sharing, group_of
from participant_shims.identity import CallIdentity
from participant_shims.running import Pulse

log = logging.getLogger(__name__)

QUIET_S: Final = 0.1  # no byte for so long, and nothing is on its way any more
QUIET_WITHIN_S: Final = 3.0
PATIENT_S: Final = 5.0  # on a machine that is busy, an API server takes a second to say whether it is paused
READS: Final = 4  # turns of the event loop from the arrival of a byte to its record
ABORT_WITHIN_S: Final = 5.0
DIGEST_S: Final = 120.0
LOOK_AGAIN_S: Final = 1.0
LOOK_S: Final = 0.05
SPEAKS_S: Final = 30.0  # how long running streams may be silent after an opening; inside a long prefill they are
MAX_REPLACED: Final = 200_000  # rollouts whose older attempts are refused; a trainer retires them long before
SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What `--vllm` was given. `life`: the shim's directory, where a pause of ours is noted for our successor.

    `rejects`: new requests get a retryable 503 while closed, instead of being parked. `weights`: what a restore does when
    the engine has other weights than those that the snapshot's tokens are of: "refuse", or "mark" (go on, and keep the
    versions apart as segments). `weight_digest`: put the engine's checksums into the snapshot and compare them, too;
    reads all weights at each save. `root`: the snapshot root, where engines of one `policy` continue each other's restored
    requests; those of one model are of one policy unless their names differ.
    """

    participant_id: str
    listen: str
    upstream: str
    life: Path | None = None
    rejects: bool = False
    weights: str = "refuse"
    weight_digest: bool = False
    root: Path | None = None
    policy: str = ""
    drain_limit_s: float = 30.0


class VllmAdapter:
    """Doors and records are in our own process. `make_front`: what stands before the engine, when it is no proxy."""

    def __init__(self, options: VllmOptions, make_front: Callable[[Doors, Pool, IsStale], Front] | None = None) -> None:
        self._options = options
        self._pulse = Pulse()
        self._changed: Callable[[], None] = lambda: None
        self.doors = Doors(on_change=self._moved, on_lapse=self._lapsed)
        self.sharing = Sharing(options.root, options.participant_id)
        self.pool = Pool(self.sharing)
        self._settling: asyncio.Task[None] | None = None
        self.front: Front = (
            make_front(self.doors, self.pool, self._is_stale)
            if make_front is not None
            else HttpFront(
                options.listen, options.upstream, self.doors, self.pool, self._is_stale, rejects=options.rejects
            )
        )
        self.front.on_steered = self._steered
        self._restored = RestoredNote(options.life)
        self.pool.on_over = self._restored.over
        self._min_attempt_before: dict[str, int] | None = None  # as it was before the last load
        self._note = PauseNote(options.life)
        self._min_attempt: dict[str, int] = {}
        self._engine: Engine | None = None
        self._looking: asyncio.Task[Engine] | None = None
        self._ours = False  # whether a pause of ours may be in force
        self._frozen_at: float | None = None  # loop time from which on nothing may come any more
        self._released: Released | None = None  # what an opening has released that is not over yet
        self._wedged = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def proxy(self) -> EngineProxy:
        """The proxy, where there is one."""
        assert isinstance(self.front, HttpFront)
        return self.front.proxy

    @property
    def listens(self) -> str:
        """Where it takes calls, host:port; empty where there is no proxy."""
        return self.proxy.address if isinstance(self.front, HttpFront) else ""

    @property
    def control(self) -> EngineControl:
        """Its control calls."""
        assert isinstance(self.front, HttpFront)
        return self.front.control

    @property
    def target(self) -> str:
        """The engine, for people."""
        return self.front.where

    async def start(self, on_change: Callable[[], None]) -> None:
        self._changed = on_change
        if self._restored.there():
            # Whoever had asked the shim before this one asks again within a moment, and must not be answered anew.
            with contextlib.suppress(SafepointError, TimeoutError):
                async with asyncio.timeout(PATIENT_S):
                    await self.describe()
        try:
            await self.front.start()
        except OSError as error:
            raise refuse(Reason.UNAVAILABLE, f"{self._options.listen} can't be bound: {error.strerror}.") from error
        self._spawn(self._settle)

    async def stop(self) -> None:
        self.doors.open("stop")
        if self._ours:
            try:
                async with asyncio.timeout(2.0):
                    await self._resume()
            except (SafepointError, TimeoutError) as error:
                log.error("vLLM at %s may still be paused: %s", self.target, error)
        for task in [*self._tasks, *([self._looking] if self._looking else [])]:
            task.cancel()
        self.sharing.close()
        await self.front.stop()

    async def describe(self) -> Description:
        engine = self._engine or await self._discover()
        features = [f"vllm-{engine.version}"]
        features += ["continues-tool-calls"] if engine.derenders else []
        features += ["rejects-when-paused"] if engine.rejects_when_paused else []
        return Description(
            participant_id=self._options.participant_id,
            role=Role.ENGINE,
            kind="vllm",
            checkpoint_mode=CheckpointMode.EXPORT_RESTORE,
            state_schema="vllm-requests-v1",
            quiesce_modes=(QuiesceMode.HOLD, QuiesceMode.DRAIN, QuiesceMode.ABORT),
            configured_workers=engine.ranks,
            config_digest=engine.config_digest,
            features=tuple(features),
        )

    async def _discover(self) -> Engine:
        """Look at the server: once, for all who wait, and to the end when they do not."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.front.discover())
        engine = await asyncio.shield(self._looking)
        if self._engine is None:
            self._engine = engine
            self.front.knows(engine)
            await self._bring_back(engine)
        return self._engine

    # ---- closing --------------------------------------------------------------------------------------------------

    async def close(self, operation_id: str, mode: QuiesceMode, lease_ttl_s: float) -> Closed:
        await self.describe()
        self._frozen_at = None
        generation = self.doors.close(operation_id, mode, lease_ttl_s)
        # A rank of a data-parallel engine has no voice of its own: all of them have stopped, or the pause fails.
        return Closed(self._workers(), self._counts(), generation)

    async def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        aborted: list[LiveRollout] = []
        # Its metrics take a while to write: whether it is still the same is looked at while it stops.
        looking = asyncio.create_task(self._same_engine())
        try:
            async for drain in self._quiesce(mode, exclude_after_s, aborted):
                yield drain
            await looking
        except SafepointError as error:
            if error.reason is not Reason.UNAVAILABLE:
                raise
            # It was waited for: asking again shortly would only wait once more, with everybody paused.
            raise refuse(
                Reason.DECLINED, error.problem.message,
                next_step=f"See whether vLLM at {self.target} lives, by its log; then save again.",
            ) from error  # fmt: skip
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        await self._until_quiet()
        self._frozen_at = asyncio.get_running_loop().time()
        failpoints.reach("engine.after_quiet")
        counts = self._counts()
        yield Drain(Counts(0, counts.parked, counts.held + counts.in_flight), quiesced=True, excluded=tuple(aborted))

    async def _quiesce(
        self, mode: QuiesceMode, exclude_after_s: float | None, aborted: list[LiveRollout]
    ) -> AsyncIterator[Drain]:
        if mode is QuiesceMode.DRAIN:
            limit = self._options.drain_limit_s
            async for drain in self._until_empty(limit if exclude_after_s is None else min(limit, exclude_after_s)):
                yield drain
        elif mode is QuiesceMode.ABORT:
            aborted += self._all_running()
            yield Drain(self._counts(), tuple(aborted[:SHOWN]), len(aborted))
            await self._pause("abort")
            async for drain in self._until_empty(ABORT_WITHIN_S):
                yield drain
            if left := self.front.end_all():
                log.error("vLLM told nobody that it aborted %s: their connections were cut", ", ".join(left[:20]))
                async for drain in self._until_empty(ABORT_WITHIN_S):
                    yield drain
        if mode is not QuiesceMode.ABORT:
            await self._pause("keep")
        self.doors.mode = QuiesceMode.HOLD  # what is left is frozen, and so is its way to the caller

    async def still(self) -> Stillness:
        generation = self.doors.generation
        if not self.doors.closed:
            return Stillness(generation, "Admission is open.")
        if self._frozen_at is None:
            return Stillness(generation)
        if self.front.spoke_at > self._frozen_at:
            return Stillness(generation, f"{self._options.participant_id} generated after it was frozen.")
        try:
            if not await self.front.is_paused(PATIENT_S):
                return Stillness(generation, f"Somebody has resumed vLLM at {self.target}, or it was restarted.")
        except SafepointError as error:
            # Whether it kept still nobody can say; an engine that is gone has not.
            return Stillness(generation, f"{error.problem.message} See whether it lives, by its log.", Reason.DECLINED)
        return Stillness(generation)

    async def _same_engine(self) -> None:
        """Look again when the server was started anew behind us. Raises INCARNATION_CHANGED when it is another one now."""
        await self.describe()
        engine = self._engine
        if engine is None or not engine.life or await self.front.life() == engine.life:
            return
        now = await self.front.look_again(engine)
        if now.config_digest != engine.config_digest:
            raise refuse(
                Reason.INCARNATION_CHANGED,
                f"vLLM at {self.target} was started anew as another server ({now.model}, {now.max_model_len} tokens; it "
                f"was {engine.model}, {engine.max_model_len}).",
                next_step="Restart the shim, which then describes the new one.",
            )
        log.warning("vLLM at %s was started anew", self.target)
        self._engine = now
        self.front.knows(now)

    async def _until_empty(self, limit_s: float) -> AsyncIterator[Drain]:
        """Progress until nothing of ours runs, or `limit_s` seconds are over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while True:
            seen = self._pulse.beats
            self._check_closed()
            counts = self._counts()
            if counts.in_flight == 0 or loop.time() >= end:
                return
            standing, count = self.doors.rollouts(SHOWN, only=(Activity.RUNNING,))
            yield Drain(counts, tuple(_live(s) for s in standing), count)
            await self._pulse.wait(seen, min(1.0, end - loop.time()))

    async def _pause(self, mode: str) -> None:
        """Raises UNAVAILABLE, ABORTED; LEASE_LAPSED when the doors opened meanwhile."""
        self._check_closed()
        if not self._ours and await self.front.is_paused(PATIENT_S):
            log.warning("vLLM at %s is paused already, by somebody else; it stays so when we open", self.target)
            return
        self._ours = True
        self._note.write(self.doors.operation_id)
        failpoints.reach("engine.before_pause")
        await self.front.pause(mode)
        failpoints.reach("engine.after_pause")
        self._check_closed()

    async def _until_quiet(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            quiet_at = max(begun, self.front.spoke_at) + QUIET_S
            if quiet_at <= loop.time():
                # Were we the ones who stood still, what came meanwhile is read only now.
                for _ in range(READS):
                    await asyncio.sleep(0.001)
                if quiet_at == max(begun, self.front.spoke_at) + QUIET_S:
                    return
                continue
            if loop.time() - begun > QUIET_WITHIN_S:
                who = ", ".join(sorted(r.request_id for r in self.front.in_flight.values() if not r.finished)[:5])
                raise refuse(
                    Reason.ACTIVITY_AFTER_PREPARED,
                    f"vLLM at {self.target} says that it is paused and goes on generating ({who or 'unrecorded requests'}).",
                    next_step="Restart it: a rank of it did not stop.",
                )
            await asyncio.sleep(max(0.0, quiet_at - loop.time()))
            self._check_closed()

    def _check_closed(self) -> None:
        if not self.doors.closed:
            raise refuse(Reason.LEASE_LAPSED, f"{self._options.participant_id} has opened by its lease.")

    # ---- state ----------------------------------------------------------------------------------------------------

    async def export(self, directory: Path) -> AsyncIterator[Progress | Exported]:
        engine = self._engine
        assert engine is not None  # describe has come first
        digest = await self.front.weight_digest(DIGEST_S) if self._options.weight_digest else ""
        origin = Origin(engine.model, engine.version, await self.front.weight_version(), digest)
        # Restored ones that nobody has asked for yet are as much in flight as before.
        await self.pool.settle()
        records = [*self.front.in_flight.values(), *self.pool.records()]
        async for step in write_cut(directory, origin, records, self._options.participant_id):
            yield step

    async def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        records: list[Record] = []
        origin = Origin("", "", "")
        shared: tuple[str, str] | None = None
        if any(f.path == REQUESTS for f in files):
            origin, records = await asyncio.to_thread(read_requests, directory)
            digest = await self.front.weight_digest(DIGEST_S) if self._options.weight_digest else ""
            now = Origin(origin.model, "", await self.front.weight_version(), digest)
            self.front.weights_are(now.weight_version)
            marks = self._options.weights == "mark"
            check_weights(origin, now, self.target, marks=marks)
            model = self._engine.model if self._engine else ""
            weights = [] if marks else [now.weight_version, now.weight_digest]
            shared = self.doors.operation_id, group_of(self._options.policy, model, weights)
        if self._min_attempt_before is None:
            self._min_attempt_before = dict(self._min_attempt)
        self._take(records)
        if shared is not None:
            await asyncio.to_thread(self.sharing.publish, shared, records)
        engine_life = self._engine.life if self._engine else ""
        await asyncio.to_thread(self._restored.write, self.doors.operation_id, engine_life, origin, records, shared)
        size = sum(f.size_bytes for f in files)
        yield Progress(size, size, len(records), len(records))
        yield Loaded(sessions=len(records), totals=totals_of(records), generation=self.doors.generation)

    async def unload(self) -> None:
        """Forget what a load brought. May be repeated."""
        if not await self.loaded_by():
            return
        self.pool.replace([])
        if self._min_attempt_before is not None:
            self._min_attempt, self._min_attempt_before = self._min_attempt_before, None
        else:  # the shim that loaded is gone: what it had replaced before is not known, and retired long since
            self._min_attempt.clear()
        await asyncio.to_thread(self.sharing.withdraw)
        await asyncio.to_thread(self._restored.forget)

    async def loaded_by(self) -> str:
        """Whose load is in here, and was neither kept nor forgotten."""
        return await asyncio.to_thread(self._restored.loaded_by)

    async def keep(self) -> None:
        """What was loaded is there for good."""
        self._min_attempt_before = None
        await asyncio.to_thread(self._restored.keep)

    async def _bring_back(self, engine: Engine) -> None:
        """What a shim before us had loaded into this engine, and nobody has asked for yet."""
        records = await asyncio.to_thread(self._restored.read, engine.life)
        if records and not len(self.pool):
            log.info("%d restored requests of the shim before this one wait for their callers", len(records))
            self._take(records)
        where = await asyncio.to_thread(self._restored.shared, engine.life)
        # While its restore is not resumed nobody looks for what others have: not all of it may be there.
        self.sharing.join(where, records, opened=not await self.loaded_by())

    def _take(self, records: Sequence[Record]) -> None:
        self.pool.replace(records)
        for record in records:
            if record.rollout_id:
                self._replace(record.rollout_id, record.attempt + 1)

    # ---- opening --------------------------------------------------------------------------------------------------

    async def open(self) -> Opened:
        """The engine first, so that what is released does not wait for it again. Doors open whatever it says."""
        was_ours = self._ours
        try:
            if was_ours:
                await self._resume()
        finally:
            self.sharing.open()
            released = self.doors.open()
            self._frozen_at = None
            if released.closed_for_s is not None:
                self._released = released
        shown, self._released = self._released or released, None
        if was_ours:
            self._spawn(self._look_alive)
        return Opened(shown.parked, shown.held, shown.closed_for_s)

    async def renew(self, lease_ttl_s: float) -> None:
        self.doors.renew(lease_ttl_s)

    async def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        for rollout_id, attempt in attempts:
            self._replace(rollout_id, attempt + 1)
        return self.pool.retire(attempts)

    async def status(self, max_rollouts: int) -> Snapshot:
        shown, count = self.doors.rollouts(max_rollouts)
        remarks = [self._wedged] if self._wedged else []
        if len(self.pool):
            if self._settling is None or self._settling.done():  # seen by the next status: this one waits for no disk
                self._settling = self._spawn(self.pool.settle)
            remarks.append(f"{len(self.pool)} restored requests wait for their callers")
        if self.pool.tally != type(self.pool.tally)():
            remarks.append(f"restored requests: {self.pool.tally}")
        return Snapshot(
            workers=self._workers(),
            counts=self._counts(),
            generation=self.doors.generation,
            closed=self.doors.closed,
            rollouts=tuple(_live(s) for s in shown),
            rollout_count=count,
            waiting_for="; ".join(remarks),
            anonymous_requests=self.doors.anonymous_total,
            closed_for_s=self.doors.closed_for_s,
        )

    # ---- parts ----------------------------------------------------------------------------------------------------

    async def _resume(self) -> None:
        failpoints.reach("engine.before_resume")
        await self.front.resume()
        failpoints.reach("engine.after_resume")
        self._ours = False
        self._note.remove()

    async def _settle(self) -> None:
        """Undo what a shim before us has left paused: its noted pause, never somebody else's. Then get to know the
        engine, however long it takes to start: requests are recorded only from then on."""
        if self._note.there():
            log.warning("the shim before this one ended while vLLM at %s was paused by it", self.target)
            try:
                await self._resume()
            except SafepointError as error:
                log.error("%s", error)
        while self._engine is None:
            try:
                await self.describe()
            except SafepointError as error:
                if error.reason is not Reason.UNAVAILABLE:
                    log.error("%s", error)
                    return
                await asyncio.sleep(LOOK_AGAIN_S)

    async def alive(self) -> str:
        """Whether the engine does something, which its /health does not tell: empty, or what is wrong.

        Asks whether it is paused, which it must answer at once. When it is not, the next byte of what runs shows it; one
        token is asked for only when nothing comes, since it would wait for a slot behind what runs.
        """
        try:
            if await self.front.is_paused(PATIENT_S) or self._engine is None:
                return ""
        except SafepointError as error:
            return error.problem.message
        if await self._speaks():
            return ""
        wrong = await self.front.canary(self._engine.model)
        return "" if self.doors.closed else wrong  # closed meanwhile: then no token was to come

    async def _speaks(self) -> bool:
        """Whether something comes out of what runs, within SPEAKS_S; at once when nothing runs."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self.front.spoke_at <= begun:
            if loop.time() - begun > SPEAKS_S or all(r.finished for r in self.front.in_flight.values()):
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def _look_alive(self) -> None:
        self._wedged = await self.alive()
        if self._wedged:
            log.error("%s", self._wedged)
            self._changed()

    def _lapsed(self, operation_id: str) -> None:
        if self._ours:
            log.warning("the lease of %s lapsed: resuming vLLM at %s", operation_id, self.target)
            self._spawn(self._resume)

    def _steered(self, path: str) -> None:
        self._spawn(self._learn_weights)
        log.info("somebody's POST %s was passed on", path)

    async def _learn_weights(self) -> None:
        self.front.weights_are(await self.front.weight_version())

    def _all_running(self) -> tuple[LiveRollout, ...]:
        count = self.doors.rollouts(0, only=(Activity.RUNNING,))[1]
        return tuple(_live(s) for s in self.doors.rollouts(count, only=(Activity.RUNNING,))[0])

    def _counts(self) -> Counts:
        tally = self.doors.counts()
        return Counts(tally.in_flight, tally.parked, tally.held)

    def _workers(self) -> tuple[Worker, ...]:
        ranks = self._engine.ranks if self._engine else 1
        return tuple(Worker(f"rank-{n}", os.getpid(), True) for n in range(ranks))

    def _is_stale(self, call: CallIdentity) -> bool:
        return call.attempt < self._min_attempt.get(call.rollout_id, 0)

    def _replace(self, rollout_id: str, min_attempt: int) -> None:
        self._min_attempt[rollout_id] = max(min_attempt, self._min_attempt.pop(rollout_id, 0))
        while len(self._min_attempt) > MAX_REPLACED:
            del self._min_attempt[next(iter(self._min_attempt))]

    def _moved(self) -> None:
        self._pulse.beat()
        self._changed()

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work()
            except SafepointError as error:
                log.warning("%s", error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _live(s: Standing) -> LiveRollout:
    return LiveRollout(s.rollout_id or ANONYMOUS, s.activity, s.attempt, s.turn, s.age_s, s.waiting_on)
