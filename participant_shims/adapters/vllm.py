"""One vLLM server, behind the proxy that owns its admission.

The rule: doors, records and the engine's pause move together. How it is frozen is `vllm_freeze`'s, what a restore brought
`vllm_restored`'s, what a snapshot holds `vllm_cut`'s.

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

from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.remarks import ENGINE_SILENT, NO_SUCH_VLLM, WEIGHT_DIGEST
from coordinator.wire.terms import CheckpointMode, QuiesceMode, Role, Weights
from participant_shims.adapter import (
    Closed,
    Description,
    Drain,
    Exported,
    Loaded,
    Opened,
    Part,
    Progress,
    Snapshot,
    Stillness,
    Worker,
    WrittenFile,
)
from participant_shims.adapters.vllm_cut import check_weights, totals_of, weights_at_cut, write_cut
from participant_shims.adapters.vllm_freeze import PATIENT_S, Freeze, live
from participant_shims.adapters.vllm_restored import Restored
from participant_shims.admission import Doors, Released
from participant_shims.engine.control import EngineControl
from participant_shims.engine.discovery import Engine
from participant_shims.engine.front import Front, HttpFront, IsStale
from participant_shims.engine.pool import Pool
from participant_shims.engine.proxy import EngineProxy
from participant_shims.engine.record import Record
from participant_shims.engine.requests_file import REQUESTS, Origin, read_requests
from participant_shims.engine.sharing import group_of
from participant_shims.proxy import not_bound
from participant_shims.running import Pulse

log = logging.getLogger(__name__)

DIGEST_S: Final = 120.0
DRAIN_LIMIT_S: Final = 30.0
LOOK_AGAIN_S: Final = 1.0
LOOK_S: Final = 0.05
WATCH_EVERY_S: Final = 10.0
SPEAKS_S: Final = 30.0  # how long running streams may be silent after an opening; inside a long prefill they are


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What `--vllm` was given. `life`: the shim's directory, where a pause of ours is noted for our successor.

    `rejects`: new requests get a retryable 503 while closed, instead of being parked. `weights`: what a restore does when
    the engine has other weights than those that the snapshot's tokens are of: "refuse", or "mark" (go on, and keep the
    versions apart as segments). `weight_digest`: put the engine's checksums into the snapshot and compare them, too;
    reads all weights at each save. `root`: the snapshot root, where engines of one `policy` continue each other's restored
    requests; those of one model are of one policy unless their names differ. `drain_limit_s`: how long a drain waits for what
    runs, which is frozen then.
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
    drain_limit_s: float = DRAIN_LIMIT_S


class VllmAdapter:
    """Doors and records are in our own process. `make_front`: what stands before the engine, when it is no proxy."""

    def __init__(self, options: VllmOptions, make_front: Callable[[Doors, Pool, IsStale], Front] | None = None) -> None:
        self._options = options
        self._pulse = Pulse()
        self._changed: Callable[[], None] = lambda: None
        self.doors = Doors(on_change=self._moved, on_lapse=self._lapsed)
        self.restored = Restored(options.participant_id, options.life, options.root)
        self.pool, is_stale = self.restored.pool, self.restored.is_stale
        self._settling: asyncio.Task[None] | None = None
        self.front: Front = (
            make_front(self.doors, self.pool, is_stale)
            if make_front is not None
            else HttpFront(options.listen, options.upstream, self.doors, self.pool, is_stale, rejects=options.rejects)
        )
        self.front.on_steered = self._steered
        if isinstance(self.front, HttpFront):  # an engine in this process has no other life
            self.proxy.serving.is_same_engine = self._is_same_engine
        self.freeze = Freeze(
            options.participant_id, options.life, options.drain_limit_s, self.front, self.doors, self._pulse,
            self._same_engine,
        )  # fmt: skip
        self._engine: Engine | None = None
        self._looking: asyncio.Task[Engine] | None = None
        self._comparing: asyncio.Task[bool] | None = None
        self._released: Released | None = None  # what an opening has released that is not over yet
        self._wedged = self._silent = ""
        self._wedged_at = 0.0  # loop time
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
        if self.restored.left_behind():
            # Whoever had asked the shim before this one asks again within a moment, and must not be answered anew.
            with contextlib.suppress(SafepointError, TimeoutError):
                async with asyncio.timeout(PATIENT_S):
                    await self.describe()
        try:
            await self.front.start()
        except OSError as error:
            raise not_bound(self._options.listen, error) from error
        self._spawn(self._settle)
        self._spawn(self._watch)

    async def stop(self) -> None:
        self.doors.open("stop")
        if self.freeze.ours:
            try:
                async with asyncio.timeout(2.0):
                    await self.freeze.resume()
            except (SafepointError, TimeoutError) as error:
                log.error("vLLM at %s may still be paused: %s", self.target, error)
        for task in [*self._tasks, *([self._looking] if self._looking else [])]:
            task.cancel()
        self.restored.sharing.close()
        await self.front.stop()

    async def describe(self) -> Description:
        engine = self._engine or await self._discover()
        features = [f"vllm-{engine.version}"]
        features += ["continues-tool-calls"] if engine.derenders else []
        features += ["rejects-when-paused"] if engine.rejects_when_paused else []
        features += [WEIGHT_DIGEST] if self._options.weight_digest else []
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
            await self.restored.bring_back(engine)
        return self._engine

    # ---- closing --------------------------------------------------------------------------------------------------

    async def close(self, operation_id: str, mode: QuiesceMode, lease_ttl_s: float) -> Closed:
        await self.describe()
        self.freeze.over()
        generation = self.doors.close(operation_id, mode, lease_ttl_s)
        # A rank of a data-parallel engine has no voice of its own: all of them have stopped, or the pause fails.
        return Closed(self._workers(), self.freeze.counts(), generation)

    def quiesce(self, mode: QuiesceMode, exclude_after_s: float | None) -> AsyncIterator[Drain]:
        return self.freeze.quiesce(mode, exclude_after_s)

    async def still(self) -> Stillness:
        return await self.freeze.still()

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
        gone = self.pool.forget()
        log.warning(
            "vLLM at %s was started anew; %d requests that its callers had not asked for yet are gone",
            self.target,
            gone,
        )
        self._engine = now
        self.front.knows(now)

    async def _is_same_engine(self) -> bool:
        """Whether the engine is the one that has run what waits for its callers; else that is forgotten. Once for all who ask."""
        if self._comparing is None or self._comparing.done():
            self._comparing = asyncio.create_task(self._compare())
        return await asyncio.shield(self._comparing)

    async def _compare(self) -> bool:
        before = self._engine
        try:
            await self._same_engine()
        except SafepointError as error:
            log.warning("what vLLM at %s had cannot be continued: %s", self.target, error)
            return False
        return self._engine is before

    # ---- state ----------------------------------------------------------------------------------------------------

    async def export(self, directory: Path) -> AsyncIterator[Progress | Exported]:
        engine = self._engine
        assert engine is not None  # describe has come first
        origin, weights = Origin(engine.model, engine.version), await self._weights(digest=self._options.weight_digest)
        # Restored ones that nobody has asked for yet are as much in flight as before.
        await self.pool.settle()
        records = [*self.front.in_flight.values(), *self.pool.records()]
        async for step in write_cut(directory, origin, weights, records, self._options.participant_id):
            yield step

    def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        return self.load_part(Part(directory, tuple(files)))

    async def load_part(self, part: Part) -> AsyncIterator[Progress | Loaded]:
        """As of an adapter. Raises FINGERPRINT_MISMATCH when the engine has other weights than at the cut."""
        records: list[Record] = []
        origin, group = Origin("", ""), ""
        if any(f.path == REQUESTS for f in part.files):
            origin, records = await asyncio.to_thread(read_requests, part.directory)
            await self._same_engine()  # what is loaded now is of the engine that is there now
            then = weights_at_cut(part, origin)
            now = await self._weights(digest=bool(then.digest_sha256))
            self.front.weights_are(now.version)
            marks = self._options.weights == "mark"
            check_weights(then, now, self.target, marks=marks)
            model = self._engine.model if self._engine else ""
            weights = [] if marks else [now.version, now.digest_sha256]
            group = group_of(self._options.policy, model, weights)
        await self.restored.take(records, origin, self.doors.operation_id, self._engine, group)
        size = sum(f.size_bytes for f in part.files)
        yield Progress(size, size, len(records), len(records))
        yield Loaded(sessions=len(records), totals=totals_of(records), generation=self.doors.generation)

    async def unload(self) -> None:
        """Forget what a load brought. May be repeated."""
        await self.restored.unload()

    async def loaded_by(self) -> str:
        """Whose load is in here, and was neither kept nor forgotten."""
        return await self.restored.loaded_by()

    async def keep(self) -> None:
        """What was loaded is there for good."""
        await self.restored.keep()

    # ---- opening --------------------------------------------------------------------------------------------------

    async def open(self) -> Opened:
        """The engine first, so that what is released does not wait for it again. Doors open whatever it says."""
        was_ours = self.freeze.ours
        try:
            if was_ours:
                await self.freeze.resume()
        finally:
            self.restored.sharing.open()
            released = self.doors.open()
            self.freeze.over()
            if released.closed_for_s is not None:
                self._released = released
        shown, self._released = self._released or released, None
        if was_ours:
            self._spawn(self._look_alive)
        return Opened(shown.parked, shown.held, shown.closed_for_s)

    async def renew(self, lease_ttl_s: float) -> None:
        self.doors.renew(lease_ttl_s)

    async def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        return self.restored.retire(attempts)

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
            counts=self.freeze.counts(),
            generation=self.doors.generation,
            closed=self.doors.closed,
            rollouts=tuple(live(s) for s in shown),
            rollout_count=count,
            waiting_for="; ".join(remarks),
            anonymous_requests=self.doors.anonymous_total,
            closed_for_s=self.doors.closed_for_s,
            warnings=tuple(filter(None, (self._silent, self._wedged and f"{ENGINE_SILENT}: {self._wedged}."))),
        )

    # ---- parts ----------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Undo a pause that a shim before us has left. Then get to know the engine, however long it takes to start: requests
        are recorded only from then on."""
        await self.freeze.settle()
        while self._engine is None:
            try:
                await self.describe()
            except SafepointError as error:
                if error.reason is not Reason.UNAVAILABLE:
                    log.error("%s", error)
                    return
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _watch(self) -> None:
        """Now and then, whether it is there, and still the same: a save is not the first to notice that it is stopped, or that another server has
        its port. One that could not be resumed when its lease lapsed is resumed when it can be."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._engine is None:
                continue  # `_settle` waits for it
            before = self._silent, self._wedged
            try:
                if self.freeze.ours and not self.doors.closed:  # it could not be resumed when it should have been
                    await self.freeze.resume()
                await self.front.is_paused(PATIENT_S)
                if not self.doors.closed:  # a save has to find out by itself
                    await self._same_engine()
                self._silent = ""
            except SafepointError as error:
                said = error.problem.message
                known = NO_SUCH_VLLM in said or error.reason is Reason.INCARNATION_CHANGED
                self._silent = said if known else f"{ENGINE_SILENT}: {said}"
            if self.front.spoke_at > self._wedged_at:
                self._wedged = ""
            if (self._silent, self._wedged) != before:
                log.warning("%s", self._silent or f"{self.target} answers again")
                self._changed()

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
        self._wedged_at = asyncio.get_running_loop().time()
        if self._wedged:
            log.error("%s", self._wedged)
            self._changed()

    def _lapsed(self, operation_id: str) -> None:
        if self.freeze.ours:
            log.warning("the lease of %s lapsed: resuming vLLM at %s", operation_id, self.target)
            self._spawn(self.freeze.resume)

    def _steered(self, path: str) -> None:
        self._spawn(self._learn_weights)
        log.info("somebody's POST %s was passed on", path)

    async def _weights(self, *, digest: bool) -> Weights:
        """Those that the engine has. `digest`: also their digest, empty where it tells none. Raises UNAVAILABLE."""
        told = await self.front.weight_digest(DIGEST_S) if digest else ""
        return Weights(await self.front.weight_version(), told)

    async def _learn_weights(self) -> None:
        self.front.weights_are(await self.front.weight_version())

    def _workers(self) -> tuple[Worker, ...]:
        ranks = self._engine.ranks if self._engine else 1
        return tuple(Worker(f"rank-{n}", os.getpid(), True) for n in range(ranks))

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
