"""The Participant service: each RPC goes to the fence, then to the adapter.

The rule: no decisions here. The fence says whether a call is served, the adapter does it, the contract's comments say
what holds afterwards; this file checks form, wires the three together and keeps the deadline: a server ends its own wait
before its caller does, so that the answer names who is still waited for. No `try` for translation: the interceptor of
coordinator.wire.rpc turns what is raised into a status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from google.protobuf.message import Message
from grpc import aio
from safepoint.v1 import capabilities_pb2, participant_service_pb2_grpc
from safepoint.v1 import participant_service_pb2 as pb

from coordinator.wire import failpoints, logs
from coordinator.wire.clipping import clipped
from coordinator.wire.deadline import MIN_BUDGET_S
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.ids import is_rollout_id
from coordinator.wire.marks import Marks
from coordinator.wire.rpc import time_budget
from coordinator.wire.slow_stores import ASKED
from coordinator.wire.terms import ParticipantState, Phase, QuiesceMode, Role, counted
from participant_shims import messages, placed
from participant_shims.adapter import Adapter, Drain, Exported, Loaded, Opened, Progress, TakesForeign
from participant_shims.export import Exports, until_seen
from participant_shims.fence import Accept, Join, Refuse, Replay, Rpc
from participant_shims.operations import Clock, Operations
from participant_shims.precopying import export, precopy
from participant_shims.root_watch import RootWatch
from participant_shims.running import Running
from participant_shims.stored_export import StoredExports

log = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]
EventT = TypeVar("EventT")
MAX_ATTEMPTS: Final = 1024
# Stragglers are given up before their waiter is, so that the answer is "prepared, one excluded".
GRACE_SHARE: Final = 0.9
WATCH_EVERY_S: Final = 1.0
WATCH_AT_MOST_EVERY_S: Final = 0.05
MAX_WARNINGS: Final = 20  # of one resume, each of so many bytes
MAX_WARNING_BYTES: Final = 1000
MAX_WATCHERS: Final = 64  # each asks the gates for a status at each change; the calls of the owner must get through
WATCH_INTERVALS: Final = (0.1, 60.0)


class ParticipantService(participant_service_pb2_grpc.ParticipantServicer):
    """Served by the shim beside one server. `root` is the snapshot root; without it nothing can be committed. `exports`: for a
    root that is no directory."""

    def __init__(
        self,
        adapter: Adapter,
        participant_id: str,
        incarnation_id: str,
        root: Path | None = None,
        clock: Clock | None = None,
        exports: Exports | StoredExports | None = None,
        actor_id: str = "",
    ) -> None:
        self.operations = Operations(adapter, participant_id, incarnation_id, clock, actor_id)
        self.exports = exports or Exports(root, participant_id)
        self._fence = self.operations.fence
        self._snapshots: dict[str, str] = {}  # operation -> the snapshot it writes, to be discarded if it is aborted
        self._watchers = 0
        self.marks = Marks()  # how full the limits of this process are, once somebody looks
        self.of_registration: Callable[[], str] = str  # what its registration warns of
        self.root_watch: RootWatch | None = None  # where somebody looks at the root
        self.operations.on_abandoned = self._discard

    async def start(self) -> None:
        """Begin to serve: before the first RPC."""
        await self.operations.start()

    async def stop(self) -> None:
        """End, leaving admission open."""
        await self.operations.stop()

    # ---- discovery ------------------------------------------------------------------------------------------------

    async def GetCapabilities(
        self, request: pb.GetCapabilitiesRequest, context: Context
    ) -> pb.GetCapabilitiesResponse:  # fmt: skip
        time_budget(context)
        return pb.GetCapabilitiesResponse(
            capabilities=messages.capabilities(await self.operations.describe()),
            incarnation_id=self.operations.incarnation_id,
            state=cast(Any, int(self._fence.state)),
            operation_id=await self.operations.held(),
            coordinator_epoch=self._fence.highest_epoch,
        )

    # ---- save -----------------------------------------------------------------------------------------------------

    async def Precopy(self, request: pb.PrecopyRequest, context: Context) -> pb.PrecopyResponse:
        budget_s = time_budget(context)
        began = time.monotonic()
        await precopy(self.operations.adapter, self._fence, request.coordinator_epoch, self.exports.root, budget_s)

        def goes_on() -> bool:
            return time.monotonic() - began < budget_s * 0.9 and self._fence.state is ParticipantState.OPEN

        await asyncio.to_thread(self.exports.ahead, goes_on)
        return pb.PrecopyResponse()

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> AsyncIterator[pb.PrepareEvent]:
        budget_s = time_budget(context)
        operation_id, epoch = messages.operation_of(request)
        ttl_s = messages.lease_ttl(request.lease_ttl)
        excludes = messages.excludes(request.straggler_policy)
        description = await self.operations.describe()
        mode = messages.quiesce_mode(request.quiesce_mode, description.quiesce_modes)
        if description.role is Role.AUXILIARY_MODEL:
            raise refuse(Reason.UNSUPPORTED, f"{description.participant_id} is an auxiliary model: it is never paused.")
        grace_s = messages.seconds(request.straggler_grace) or budget_s
        self.operations.require_settled()
        exclude_after_s = min(grace_s, budget_s * GRACE_SHARE) if excludes else None
        # Under hold only handlers are waited for, and everybody is paused meanwhile: one that outlasts the grace has hung.
        longest_s = min(grace_s, budget_s) if mode is QuiesceMode.HOLD and not excludes else budget_s
        running = self._enter(
            Rpc.PREPARE, operation_id, epoch, request, ttl_s,
            partial(self._prepare, mode=mode, ttl_s=ttl_s, exclude_after_s=exclude_after_s),
        )  # fmt: skip
        async for event in running.follow(longest_s, partial(self._still_draining, running)):
            yield event

    async def _prepare(
        self, running: Running[pb.PrepareEvent], mode: QuiesceMode, ttl_s: float, exclude_after_s: float | None
    ) -> pb.PrepareEvent:
        adapter, operations = self.operations.adapter, self.operations
        await operations.settle_opening()
        await operations.settle_unloading()
        begun = operations.clock.now()
        failpoints.reach("shim.before_close")
        closed = await adapter.close(running.operation_id, mode, ttl_s)
        failpoints.reach("shim.after_close")
        operations.closed = closed
        running.first(pb.PrepareEvent(admission_closed=messages.admission_closed(closed)))
        drain = Drain(closed.counts)
        async for drain in adapter.quiesce(mode, exclude_after_s):
            running.drain = drain
            if not drain.quiesced:
                running.progress(pb.PrepareEvent(drain_progress=messages.drain_progress(drain)))
        await operations.check_freeze(closed.generation)
        failpoints.reach("shim.before_prepared")
        return pb.PrepareEvent(
            prepared=pb.Prepared(
                incarnation_id=operations.incarnation_id,
                workers=messages.workers(closed.workers),
                admission_generation=closed.generation,
                parked=drain.counts.parked,
                held=drain.counts.held,
                excluded=[messages.activity(r) for r in drain.excluded[: messages.MAX_LISTED]],
                excluded_count=len(drain.excluded),
                quiesce_time=messages.duration(operations.clock.now() - begun),
            )
        )

    async def Commit(self, request: pb.CommitRequest, context: Context) -> AsyncIterator[pb.CommitEvent]:
        budget_s = time_budget(context)
        operation_id, epoch = messages.operation_of(request)
        snapshot_id = messages.wire_id(request.snapshot_id, "snapshot_id")
        running = self._enter(
            Rpc.COMMIT, operation_id, epoch, request, 0.0, partial(self._commit, snapshot_id=snapshot_id)
        )
        async for event in running.follow(budget_s, partial(self._still_moving, running, "written")):
            yield event

    async def _commit(self, running: Running[pb.CommitEvent], snapshot_id: str) -> pb.CommitEvent:
        operations, exports, operation_id = self.operations, self.exports, running.operation_id
        closed = operations.closed
        assert closed is not None  # the fence lets nobody commit who has not prepared
        what = messages.capabilities(await operations.describe())
        await operations.check_freeze(closed.generation)
        running.resting(pb.CommitEvent(export_progress=pb.ExportProgress()))
        self._snapshots[operation_id] = snapshot_id
        begin = partial(exports.begin, snapshot_id, operation_id)
        directory = await until_seen(partial(operations.on_disk, begin))
        try:
            failpoints.reach("shim.before_export")
            exported = Exported()
            async for step in export(operations.adapter, directory, exports.root):
                if isinstance(step, Exported):
                    exported = step
                else:
                    running.progress(pb.CommitEvent(export_progress=messages.export_progress(step)))
            failpoints.reach("shim.after_export")
            chunks = await operations.on_disk(partial(exports.chunks, snapshot_id, exported.files))
            manifest = messages.participant_manifest(
                exported, chunks, operation_id, snapshot_id, operations.incarnation_id, what
            )
            await operations.check_freeze(closed.generation)
            digest = await operations.on_disk(partial(exports.finish, snapshot_id, exported.files, manifest))
        except Exception:
            await operations.on_disk(partial(self._discard_quietly, snapshot_id, operation_id))
            raise
        return pb.CommitEvent(committed=pb.Committed(manifest=manifest, manifest_sha256=digest))

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        budget_s = time_budget(context)
        operation_id, epoch = messages.operation_of(request)
        operations = self.operations
        if request.incarnation_id != operations.incarnation_id:
            raise refuse(
                Reason.INCARNATION_CHANGED, f"This is {operations.incarnation_id}, not {request.incarnation_id[:60]}.",
                phase=Phase.CONFIRM, participant_id=operations.participant_id, operation_id=operation_id,
            )  # fmt: skip
        self._renewed(operations.call(Rpc.CONFIRM, operation_id, epoch, messages.request_digest(request)))
        try:
            async with asyncio.timeout(budget_s):
                await operations.check_freeze(request.admission_generation)
        except TimeoutError:
            raise refuse(
                Reason.UNAVAILABLE, "The server has not said in time whether it kept still.", phase=Phase.CONFIRM
            ) from None
        # Asked again after the wait: the lease may have lapsed while the server was looked at.
        operations.call(Rpc.CONFIRM, operation_id, epoch, messages.request_digest(request))
        failpoints.reach("shim.before_confirmed")
        return pb.ConfirmResponse(
            incarnation_id=operations.incarnation_id,
            admission_generation=request.admission_generation,
            lease_remaining=self._lease(),
        )

    # ---- restore --------------------------------------------------------------------------------------------------

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> AsyncIterator[pb.RestoreEvent]:
        budget_s = time_budget(context)
        operation_id, epoch = messages.operation_of(request)
        messages.wire_id(request.snapshot_id, "snapshot_id")
        if request.source_participant_id:
            messages.wire_id(request.source_participant_id, "source_participant_id")
        placed.check(request)
        ttl_s = messages.lease_ttl(request.lease_ttl)
        await self.operations.describe()
        running = self._enter(
            Rpc.RESTORE, operation_id, epoch, request, ttl_s, partial(self._restore, request=request, ttl_s=ttl_s)
        )
        async for event in running.follow(budget_s, partial(self._still_moving, running, "loaded")):
            yield event

    async def _restore(
        self, running: Running[pb.RestoreEvent], request: pb.RestoreRequest, ttl_s: float
    ) -> pb.RestoreEvent:
        operations = self.operations
        description = await operations.describe()
        plan = await until_seen(partial(operations.on_disk, partial(placed.plan, request, description, self.exports)))
        await operations.settle_opening()
        await operations.settle_unloading()
        mode = messages.quiesce_mode(0, description.quiesce_modes)
        closed = await operations.adapter.close(running.operation_id, mode, ttl_s)
        operations.closed = closed
        running.first(pb.RestoreEvent(admission_closed=messages.admission_closed(closed)))
        loaded = Loaded(generation=closed.generation)
        if plan.parts:
            running.progress(pb.RestoreEvent(load_progress=messages.export_progress(Progress())))
            failpoints.reach("shim.before_load")
            operations.loaded_by = running.operation_id
            async for step in placed.load(operations.adapter, plan.parts):
                if isinstance(step, Loaded):
                    loaded = step
                else:
                    running.progress(pb.RestoreEvent(load_progress=messages.export_progress(step)))
            absent = plan.sessions - loaded.sessions - loaded.left - len(loaded.diverged)
            if absent > 0:  # neither loaded nor said to be lost: a rollout would go on without its state
                raise refuse(
                    Reason.SNAPSHOT_CORRUPT,
                    f"{absent} of the {plan.sessions} sessions that were saved are in no file that was loaded.",
                )
        if isinstance(operations.adapter, TakesForeign) and plan.elsewhere:
            await operations.adapter.note_elsewhere(plan.elsewhere)
        failpoints.reach("shim.after_load")
        for event in messages.diverged(loaded):
            running.first(event)
        generation = loaded.generation or closed.generation
        return pb.RestoreEvent(
            restored=messages.restored(loaded, request.snapshot_id, operations.incarnation_id, generation)
        )

    # ---- the end of an operation ----------------------------------------------------------------------------------

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        opened = await self._end(Rpc.RESUME, request, context)
        self._snapshots.pop(request.context.operation_id, None)
        response = pb.ResumeResponse(
            released_parked=opened.released_parked,
            released_held=opened.released_held,
            warnings=[clipped(told, MAX_WARNING_BYTES) for told in opened.warnings[:MAX_WARNINGS]],
        )
        if opened.closed_for_s is not None:
            response.closed_for.CopyFrom(messages.duration(opened.closed_for_s))
        return response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        logs.about(request.context.operation_id[:128])
        if request.cause:
            log.warning("abort of %s: %s", request.context.operation_id[:128], request.cause[:1000])
        opened = await self._end(Rpc.ABORT, request, context)
        self._discard(request.context.operation_id)  # a lapsed operation still has its files
        response = pb.AbortResponse(released_parked=opened.released_parked, released_held=opened.released_held)
        if opened.closed_for_s is not None:
            response.closed_for.CopyFrom(messages.duration(opened.closed_for_s))
        return response

    async def _end(self, rpc: Rpc, request: pb.ResumeRequest | pb.AbortRequest, context: Context) -> Opened:
        time_budget(context)
        operation_id, epoch = messages.operation_of(request)
        return await self.operations.end(rpc, operation_id, epoch, messages.request_digest(request))

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        time_budget(context)
        operation_id, epoch = messages.operation_of(request)
        ttl_s = messages.lease_ttl(request.lease_ttl)
        failpoints.reach("shim.before_renew")
        self._renewed(self.operations.call(Rpc.RENEW, operation_id, epoch, "", ttl_s), ttl_s)
        return pb.RenewLeaseResponse(lease_remaining=self._lease())

    # ---- rollouts -------------------------------------------------------------------------------------------------

    async def RetireAttempts(
        self, request: pb.RetireAttemptsRequest, context: Context
    ) -> pb.RetireAttemptsResponse:  # fmt: skip
        budget_s = time_budget(context)
        if not 1 <= len(request.attempts) <= MAX_ATTEMPTS:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"{len(request.attempts)} attempts are named; 1 to 1,024 are allowed."
            )
        epoch = messages.epoch_of(request.coordinator_epoch)
        for attempt in request.attempts:
            if not is_rollout_id(attempt.rollout_id):
                raise refuse(Reason.MALFORMED_ID, f"{attempt.rollout_id[:60]!r} is no rollout_id.")
        decision = self._fence.may_retire(epoch, self.operations.clock.now())
        self.operations.apply(decision.ended)
        if isinstance(decision, Refuse):
            raise Refused(decision.problem)
        try:
            async with asyncio.timeout(budget_s):
                known = await self.operations.adapter.retire([(a.rollout_id, a.attempt) for a in request.attempts])
        except TimeoutError:
            raise refuse(Reason.UNAVAILABLE, "The server has not confirmed in time; repeat the call.") from None
        return pb.RetireAttemptsResponse(retired=known)

    # ---- status ---------------------------------------------------------------------------------------------------

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        time_budget(context)
        stacks = self.operations.stacks(min(request.max_stacks, messages.MAX_STACKS))
        status, found = await asyncio.gather(self._status(request.max_rollouts), stacks)
        return pb.GetStatusResponse(status=status, stacks=messages.stacks(found))

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusEvent]:  # fmt: skip
        time_budget(context)
        low, high = WATCH_INTERVALS
        interval = min(high, max(low, messages.seconds(request.interval) or WATCH_EVERY_S))
        if self._watchers >= MAX_WATCHERS:
            raise refuse(
                Reason.LIMIT_EXCEEDED, f"{MAX_WATCHERS} calls watch this participant already.",
                metadata={"limit": "watchers"},
            )  # fmt: skip
        changed = self.operations.changed
        self._watchers += 1
        try:
            # Nothing is queued: a slow reader stops this generator at its `yield`, and the next status is the newest.
            while True:
                seen = changed.beats
                yield pb.WatchStatusEvent(status=await self._status(request.max_rollouts))
                await asyncio.sleep(WATCH_AT_MOST_EVERY_S)
                remaining = context.time_remaining()
                if remaining < MIN_BUDGET_S:
                    return
                await changed.wait(seen, min(interval, remaining))
        finally:
            self._watchers -= 1

    async def _status(self, max_rollouts: int) -> capabilities_pb2.ParticipantStatus:
        snapshot, remark = await self.operations.look(min(max_rollouts, messages.MAX_ASKED))
        fence, operations = self._fence, self.operations
        out = messages.status(snapshot) if snapshot is not None else capabilities_pb2.ParticipantStatus()
        out.participant_id = operations.participant_id
        out.incarnation_id = operations.incarnation_id
        out.state = cast(Any, int(fence.state))
        out.operation_id = fence.operation_id
        out.coordinator_epoch = fence.highest_epoch
        out.last_failure = operations.last_failure
        if operations.forgetting.left:
            out.warnings.append(messages.warning(f"{operations.forgetting.left}. It is tried again."))
        if operations.in_question and fence.state is ParticipantState.OPEN:
            text = f"What restore {operations.in_question} had loaded is in the server; whether it was resumed is not known here."
            out.warnings.append(messages.warning(text))
        out.warnings.extend(messages.warning(text) for text in self.marks.warnings)
        if text := self.of_registration():
            out.warnings.append(messages.warning(text))
        if len(out.warnings) > messages.MAX_LISTED:
            del out.warnings[: -messages.MAX_LISTED]
        if waits := "; ".join(filter(None, (remark, ASKED.slow()))):
            out.waiting_for = waits
        if self.root_watch is not None and (seen := self.root_watch.seen()) is not None:
            out.root.CopyFrom(seen)
        if fence.state is not ParticipantState.OPEN:
            out.lease_remaining.CopyFrom(self._lease())
        out.wall_time.GetCurrentTime()  # for people
        return out

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _enter(
        self, rpc: Rpc, operation_id: str, epoch: int, request: Message, ttl_s: float,
        phase: Callable[[Running[EventT]], Awaitable[EventT]],
    ) -> Running[EventT]:  # fmt: skip
        """The phase to follow: a new one, the one that runs, or the one that was recorded."""
        decision = self.operations.call(rpc, operation_id, epoch, messages.request_digest(request), ttl_s)
        if isinstance(decision, Replay):
            running = cast("Running[EventT]", decision.reply)
        elif isinstance(decision, Join):
            joined = self.operations.running
            assert joined is not None  # the fence says that it runs
            running = cast("Running[EventT]", joined)
        else:
            running = Running[EventT](rpc, operation_id)
            self.operations.begin(running, partial(phase, running))
        if rpc is Rpc.COMMIT:
            self._renewed(decision)
        return running

    def _renewed(self, decision: Accept | Join | Replay | Refuse, ttl_s: float = 0.0) -> None:
        """Pass the lease on to the gates. Not waited for: a gate that misses it opens, and the cut is void, safely.

        Nor is a gate waited for whose lease is over: the others would stand still for a process that hangs.
        """
        if decision.lease_generation:
            left_s = self._fence.lease_remaining(self.operations.clock.now())
            if left_s:
                self.operations.spawn(self._renew_gates(self._fence.operation_id, max(left_s, ttl_s)))

    async def _renew_gates(self, operation_id: str, ttl_s: float) -> None:
        try:
            await self.operations.adapter.renew(ttl_s)
        except SafepointError as error:
            log.warning("a gate has not renewed its lease: %s", error)
            if error.reason is Reason.LEASE_LAPSED:
                self.operations.hold_is_lost(operation_id, error.problem.message)

    def _lease(self) -> Any:
        return messages.duration(self._fence.lease_remaining(self.operations.clock.now()) or 0.0)

    def _still_draining(self, running: Running[Any], waited_s: float) -> Problem:
        drain = running.drain
        waiting = drain.waiting_for if drain else ()
        count = max(drain.waiting_for_count, len(waiting)) if drain else 0
        what = (
            f"{counted(count, 'rollout', 'still moves', 'still move')}."
            if drain
            else "Admission has not closed at every worker yet."
        )
        return Problem(
            Reason.DRAIN_INCOMPLETE, what, phase=Phase.PREPARE, participant_id=self.operations.participant_id,
            operation_id=running.operation_id, rollouts=tuple(messages.blocked(r) for r in waiting[: messages.MAX_LISTED]),
            rollout_count=count, waited_s=waited_s,
        )  # fmt: skip

    def _still_moving(self, running: Running[Any], what: str, waited_s: float) -> Problem:
        return Problem(
            Reason.PHASE_INCOMPLETE, f"The state is still being {what}.",
            next_step="Repeat the call with a longer deadline to join it, or abort.",
            phase=Phase.COMMIT if running.rpc is Rpc.COMMIT else Phase.RESTORE,
            participant_id=self.operations.participant_id, operation_id=running.operation_id, waited_s=waited_s,
        )  # fmt: skip

    def _discard(self, operation_id: str) -> None:
        snapshot_id = self._snapshots.pop(operation_id, "")
        if snapshot_id:
            self.operations.spawn(self.operations.on_disk(partial(self._discard_quietly, snapshot_id, operation_id)))

    def _discard_quietly(self, snapshot_id: str, operation_id: str) -> None:
        # What can't be removed now lies in a snapshot that was never published; the coordinator removes it.
        try:
            self.exports.discard(snapshot_id, operation_id)
        except SafepointError as error:
            log.warning("what %s wrote is not removed: %s", operation_id, error)
