"""The Coordinator service: what trainers, the command line and shims call.

The rule: a handler checks what it was sent, asks `operations`, and streams what comes. It contains no `try` that turns
one failure into another; the interceptor translates. Status and Abort touch no disk and take no lock.

Every call needs a deadline, but Register and Watch: they last as long as their caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from google.protobuf.message import Message
from grpc import aio
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2_grpc, manifest_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert, kept_out, ledger_lines, pruning, roots_seen
from coordinator.answers import COMMIT, PUBLISH, RESUME, START
from coordinator.driver import Drive, Identity
from coordinator.explaining import explain, list_operations
from coordinator.following import follow_answer, replay, watch
from coordinator.operations import Operations, fenced
from coordinator.outcomes import Ended
from coordinator.preflight import LOOKS
from coordinator.protocol import events as core
from coordinator.protocol import sentences
from coordinator.protocol.operation import Operation, Options, Outcome
from coordinator.protocol.topology import Participant, fingerprint, gone_from, validate
from coordinator.registration import Registration, check_end
from coordinator.relay_registration import RelayRegistration
from coordinator.reporting import snapshot_info
from coordinator.retention import Retention
from coordinator.settings import Settings
from coordinator.status import ANSWER_WITHIN_S, MAX_STACKS_OF, coordinator_status
from coordinator.wire.clipping import MAX_CAUSE_BYTES, clipped
from coordinator.wire.errors import CATALOG, Problem, Reason, SafepointError, refuse
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId, is_rollout_id, is_wire_id
from coordinator.wire.rpc import time_budget
from coordinator.wire.terms import CheckpointMode, OperationKind
from coordinator.wire.trace import incoming

Context = aio.ServicerContext[Any, Any]
log = logging.getLogger(__name__)

LEDGER_AT_ONCE: Final = 1000
MAX_RETIRED: Final = 1024
DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
PAGED_FOR_S: Final = 60.0  # what a page has found serves the next one for so long
MAX_RETIRE_CAUSE_BYTES: Final = 500
MAX_GIVEN_UP: Final = 1000
MAX_INVALID: Final = 1000  # names in one ListSnapshotsResponse, which must stay under 4 MiB


class CoordinatorService(coordinator_service_pb2_grpc.CoordinatorServicer):
    """See `proto/safepoint/v1/coordinator_service.proto`: every method holds what is written there."""

    def __init__(self, operations: Operations, registration: Registration) -> None:
        self._operations = operations
        self._registration = registration
        self._relays = RelayRegistration(operations.discovery.registry, registration)
        self._paged: Mapping[str, manifest_pb2.SnapshotManifest] = {}  # of whoever is being sent a list page by page
        self._forgetting: asyncio.TimerHandle | None = None
        self._given_up: dict[str, None] = {}  # ids that were aborted before their call came, in that order

    # ---- who takes part ---------------------------------------------------------------------------------------------

    async def Register(
        self, request_iterator: AsyncIterator[pb.RegisterRequest], context: Context
    ) -> AsyncIterator[pb.RegisterEvent]:
        async for event in self._registration.serve(request_iterator):
            yield event

    async def RegisterRelay(
        self, request_iterator: AsyncIterator[pb.RegisterRelayRequest], context: Context
    ) -> AsyncIterator[pb.RegisterRelayEvent]:
        async for event in self._relays.serve(request_iterator):
            yield event

    async def ReportEnd(self, request: pb.ReportEndRequest, context: Context) -> pb.ReportEndResponse:
        time_budget(context)
        check_end(request)
        self._operations.discovery.registry.explain(
            ParticipantId(request.participant_id), IncarnationId(request.incarnation_id), convert.process_end(request)
        )
        return pb.ReportEndResponse()

    async def GetTopology(self, request: pb.GetTopologyRequest, context: Context) -> pb.GetTopologyResponse:
        time_budget(context)
        discovery = self._operations.discovery
        problems = await (discovery.ask_everybody() if request.refresh else discovery.ask_static())
        states = await discovery.ask_how_they_are()
        problems += filter(None, (look(who, status) for who, status in states for look in LOOKS))
        if (active := self._operations.active) is not None and active.outcome is Outcome.FAILED_PAUSED:
            problems.append(fenced(active).problem)
        topology = discovery.topology()
        findings = [_finding_from_problem(problem) for problem in problems]
        at_the_door = self._operations.kept_out()
        refused, missing = kept_out.parted(topology.missing, at_the_door)
        of_missing = [*gone_from(topology.missing)]
        rest = [found for found in validate(topology) if found not in of_missing]
        findings += refused + [convert.finding(found) for found in (*gone_from(missing), *rest)]
        findings += map(kept_out.finding, at_the_door)
        findings += self._unseen_roots(states)
        return pb.GetTopologyResponse(
            participants=[discovery.info(p) for p in topology.participants],
            fingerprint=fingerprint(topology.participants),
            findings=findings,
        )

    def _unseen_roots(
        self, states: Iterable[tuple[Participant, capabilities_pb2.ParticipantStatus]]
    ) -> Iterator[pb.Finding]:
        operations = self._operations
        seen = [
            (who.participant_id, status.root)
            for who, status in states
            if status.HasField("root") and who.checkpoint_mode is not CheckpointMode.STATELESS
        ]
        for one in roots_seen.unseen(operations.root_mark, operations.settings.root, seen)[0]:
            names = one.participant_ids
            yield pb.Finding(
                participant_id=names[0] if len(names) == 1 else "",
                message=f"{'' if len(names) == 1 else f'{sentences.names(names)}: '}The shim {one.text}.",
                next_step=one.next_step, reason=convert.wire(one.reason),
            )  # fmt: skip

    # ---- whole operations -------------------------------------------------------------------------------------------

    async def Save(self, request: pb.SaveRequest, context: Context) -> AsyncIterator[pb.OperationEvent]:
        budget_s = time_budget(context)
        operation = self._save(request.operation_id, request.snapshot_id, request.options, trainer_driven=False)
        identity = Identity(_digest(request), convert.metadata(request.metadata), self._trace(context))
        async for event in self._run("Save", operation, identity, budget_s):
            yield event

    async def Restore(self, request: pb.RestoreSnapshotRequest, context: Context) -> AsyncIterator[pb.OperationEvent]:
        budget_s = time_budget(context)
        operation = Operation(
            kind=OperationKind.RESTORE,
            operation_id=_operation_id(request.operation_id),
            snapshot_id=_snapshot_id(request.snapshot_id),
            coordinator_epoch=self._operations.journal.epoch,
            options=Options(lease_ttl_s=convert.lease_ttl(request.lease_ttl, self._operations.settings.lease_ttl_s)),
            resume_when_done=request.resume,
            elastic=request.elastic,
        )
        async for event in self._run(
            "Restore", operation, Identity(_digest(request), {}, self._trace(context)), budget_s
        ):
            yield event

    # ---- trainer-driven phases --------------------------------------------------------------------------------------

    async def Prepare(self, request: pb.PrepareOperationRequest, context: Context) -> AsyncIterator[pb.OperationEvent]:
        budget_s = time_budget(context)
        operation = self._save(request.operation_id, request.snapshot_id, request.options, trainer_driven=True)
        async for event in self._run(
            "Prepare", operation, Identity(_digest(request), {}, self._trace(context)), budget_s
        ):
            yield event

    async def Commit(self, request: pb.CommitOperationRequest, context: Context) -> AsyncIterator[pb.OperationEvent]:
        budget_s = time_budget(context)
        until = self._until(budget_s, self._operations.settings.commit_timeout_s)
        found = self._named(request.operation_id)
        event = core.CommitRequested(self._operations.clock(), until)
        async for told in self._go_on("Commit", COMMIT, found, _digest(request), event, budget_s):
            yield told

    async def Publish(self, request: pb.PublishRequest, context: Context) -> AsyncIterator[pb.OperationEvent]:
        budget_s = time_budget(context)
        metadata = convert.metadata(request.metadata)
        until = self._until(budget_s, self._operations.settings.commit_timeout_s)
        found = self._named(request.operation_id)
        if isinstance(found, Drive) and PUBLISH not in found.answers:
            found.identity.metadata = metadata
        event = core.PublishRequested(self._operations.clock(), until)
        async for told in self._go_on("Publish", PUBLISH, found, _digest(request), event, budget_s):
            yield told

    async def Resume(self, request: pb.ResumeOperationRequest, context: Context) -> AsyncIterator[pb.OperationEvent]:
        budget_s = time_budget(context)
        operation_id = _operation_id(request.operation_id)
        active = self._operations.active
        if active is None:
            ended = self._operations.past.of(operation_id)
            if ended is not None and "resumed" in ended.results:
                yield ended.results["resumed"]
            else:
                yield pb.OperationEvent(operation_id=operation_id, sequence=1, resumed=pb.Resumed())
            return
        found = self._named(operation_id)
        event = core.ResumeRequested(self._operations.clock())
        async for told in self._go_on("Resume", RESUME, found, _digest(request), event, budget_s):
            yield told

    async def Abort(self, request: pb.AbortOperationRequest, context: Context) -> pb.AbortOperationResponse:
        budget_s = min(time_budget(context), ANSWER_WITHIN_S) * 0.9
        if request.operation_id:
            _operation_id(request.operation_id)
        drive = self._operations.active
        if drive is None or request.operation_id not in ("", drive.operation.operation_id):
            self._give_up(request.operation_id)
            return pb.AbortOperationResponse()
        cause = clipped(request.cause, MAX_CAUSE_BYTES)
        await self._operations.abort(drive, cause, budget_s)
        return pb.AbortOperationResponse(
            operation_id=drive.operation.operation_id,
            acknowledged=drive.transaction.acknowledged,
            unconfirmed=drive.unconfirmed,
        )

    async def RetireRollouts(self, request: pb.RetireRolloutsRequest, context: Context) -> pb.RetireRolloutsResponse:
        budget_s = time_budget(context)
        if not 1 <= len(request.rollout_ids) <= MAX_RETIRED:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"rollout_ids has {len(request.rollout_ids)} entries; 1 to {MAX_RETIRED}."
            )
        for rollout_id in request.rollout_ids:
            if not is_rollout_id(rollout_id):
                raise refuse(Reason.MALFORMED_ID, f"{rollout_id[:260]!r} cannot name a rollout.")
        everybody = self._operations.discovery.registry.participants()
        told = await asyncio.gather(*(self._retire(p, request.rollout_ids, budget_s) for p in everybody))
        causes = {str(p.participant_id): c for p, c in zip(everybody, told, strict=True) if isinstance(c, str)}
        return pb.RetireRolloutsResponse(
            retired=sum(count for count in told if isinstance(count, int)), unconfirmed=list(causes), causes=causes
        )

    # ---- looking ----------------------------------------------------------------------------------------------------

    async def GetStatus(
        self, request: pb.GetCoordinatorStatusRequest, context: Context
    ) -> pb.GetCoordinatorStatusResponse:
        budget_s = time_budget(context)
        stacks_of = frozenset(request.stacks_of[:MAX_STACKS_OF])
        return await coordinator_status(
            self._operations, request.participants, request.max_rollouts, budget_s, stacks_of
        )  # fmt: skip

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchEvent]:
        operations, operation_id = self._operations, request.operation_id
        if operation_id:
            _operation_id(operation_id)

        def over() -> bool:
            return operations.active is None or operations.active.operation.operation_id != operation_id

        async def status() -> pb.GetCoordinatorStatusResponse:
            return await coordinator_status(operations, ask=False, max_rollouts=0, budget_s=ANSWER_WITHIN_S)

        async for event in watch(operations.feed, operation_id, status, over):
            yield event

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        time_budget(context)
        if request.operation_id:
            _operation_id(request.operation_id)
        return await explain(self._operations, request.operation_id)

    async def ListOperations(self, request: pb.ListOperationsRequest, context: Context) -> pb.ListOperationsResponse:
        time_budget(context)
        return await list_operations(self._operations, request.page_size)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    async def ListSnapshots(self, request: pb.ListSnapshotsRequest, context: Context) -> pb.ListSnapshotsResponse:
        time_budget(context)
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        # A page is no reason to read every manifest again.
        known = self._paged if request.page_token else dict[str, manifest_pb2.SnapshotManifest]()
        listing = await asyncio.to_thread(self._operations.store.list, known)
        pinned = await asyncio.to_thread(pruning.pins, self._operations.store)
        found = list(listing.snapshots)
        start = 0
        if request.page_token:
            # The token is the last snapshot that was sent: what was published or pruned meanwhile shifts nothing.
            names = [manifest.snapshot_id for manifest in found]
            if request.page_token not in names:
                raise refuse(Reason.INVALID_ARGUMENT, "The page_token is of a snapshot that is gone. Begin again.")
            start = names.index(request.page_token) + 1
        page = found[start : start + size]
        more = start + size < len(found)
        self._keep_for_next_page({manifest.snapshot_id: manifest for manifest in found} if more else {})
        infos = [snapshot_info(manifest, pinned.get(manifest.snapshot_id, "")) for manifest in page]
        if self._operations.uploader is not None:
            for info in infos:
                info.upload.CopyFrom(self._operations.uploader.message(info.snapshot_id))
        return pb.ListSnapshotsResponse(
            snapshots=infos,
            next_page_token=page[-1].snapshot_id if page and more else "",
            invalid=dict(list(listing.invalid.items())[:MAX_INVALID]),
        )

    def _keep_for_next_page(self, found: Mapping[str, manifest_pb2.SnapshotManifest]) -> None:
        self._paged = found
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        if found:
            nothing: dict[str, manifest_pb2.SnapshotManifest] = {}
            self._forgetting = asyncio.get_running_loop().call_later(PAGED_FOR_S, self._keep_for_next_page, nothing)

    async def ReadLedger(self, request: pb.ReadLedgerRequest, context: Context) -> AsyncIterator[pb.ReadLedgerEvent]:
        time_budget(context)
        lines = self._operations.store.ledger(_snapshot_id(request.snapshot_id))

        def some() -> list[manifest_pb2.LedgerEntry]:
            where = f"the ledger of {request.snapshot_id}"
            return [ledger_lines.entry(ledger_lines.decode(raw, where)) for raw in islice(lines, LEDGER_AT_ONCE)]

        try:
            while entries := await asyncio.to_thread(some):
                yield pb.ReadLedgerEvent(entries=entries)
        finally:
            with suppress(ValueError):  # the reader has left while a thread reads: it closes the file when it ends
                lines.close()

    async def VerifySnapshot(self, request: pb.VerifySnapshotRequest, context: Context) -> pb.VerifySnapshotResponse:
        time_budget(context)
        verified = await asyncio.to_thread(self._operations.store.verify, _snapshot_id(request.snapshot_id))
        return pb.VerifySnapshotResponse(
            manifest=verified.manifest,
            files=verified.files,
            size_bytes=verified.size_bytes,
            unlisted=verified.unlisted,
        )

    async def FetchSnapshot(self, request: pb.FetchSnapshotRequest, context: Context) -> pb.FetchSnapshotResponse:
        time_budget(context)
        name = _snapshot_id(request.snapshot_id) if request.snapshot_id else ""
        fetching = self._operations.fetching
        assert fetching is not None
        done = await fetching.fetch(name, request.url)
        return pb.FetchSnapshotResponse(
            snapshot=snapshot_info(done.manifest), files=done.files, size_bytes=done.size_bytes, found=done.found,
            skipped=done.skipped,
        )  # fmt: skip

    async def PruneSnapshots(self, request: pb.PruneSnapshotsRequest, context: Context) -> pb.PruneSnapshotsResponse:
        time_budget(context)
        operations = self._operations
        retention = _retention(request, operations.settings)
        spared = await asyncio.to_thread(pruning.spared, operations.store, retention)  # reads: before the lock
        async with operations.storage_lock:
            pruned = await operations.housekeeping.prune(retention, dry_run=request.dry_run, spare=spared)
        kept = dict(islice(pruned.kept.items(), MAX_INVALID))
        return pb.PruneSnapshotsResponse(deleted=pruned.deleted, size_bytes=pruned.size_bytes, kept=kept)

    async def PinSnapshot(self, request: pb.PinSnapshotRequest, context: Context) -> pb.PinSnapshotResponse:
        time_budget(context)
        operations, snapshot_id = self._operations, _snapshot_id(request.snapshot_id)
        async with operations.storage_lock:  # a prune that has looked already would delete it all the same
            await asyncio.to_thread(operations.journal.require_epoch)
            manifest = await asyncio.to_thread(pruning.pin, operations.store, snapshot_id, request.reason)
        return pb.PinSnapshotResponse(snapshot=snapshot_info(manifest, request.reason))

    async def UnpinSnapshot(self, request: pb.UnpinSnapshotRequest, context: Context) -> pb.UnpinSnapshotResponse:
        time_budget(context)
        operations, snapshot_id = self._operations, _snapshot_id(request.snapshot_id)
        async with operations.storage_lock:
            await asyncio.to_thread(operations.journal.require_epoch)
            reason = await asyncio.to_thread(pruning.unpin, operations.store, snapshot_id)
        return pb.UnpinSnapshotResponse(pin_reason=reason)

    # ---- within -----------------------------------------------------------------------------------------------------

    def _save(self, operation_id: str, snapshot_id: str, options: pb.SaveOptions, *, trainer_driven: bool) -> Operation:
        settings = self._operations.settings
        return Operation(
            kind=OperationKind.SAVE,
            operation_id=_operation_id(operation_id),
            snapshot_id=_snapshot_id(snapshot_id),
            coordinator_epoch=self._operations.journal.epoch,
            options=convert.options(options, settings.straggler_grace_s, settings.lease_ttl_s),
            trainer_driven=trainer_driven,
        )

    async def _run(
        self, call: str, operation: Operation, identity: Identity, budget_s: float
    ) -> AsyncIterator[pb.OperationEvent]:
        found = self._operations.known(operation.operation_id, identity.digest, call)
        if isinstance(found, Ended):
            async for event in replay(found, call):
                yield event
            return
        if found is not None:  # a repeat: the pause still has an owner
            found.post(core.TrainerHeard(self._operations.clock()))
        elif operation.operation_id in self._given_up:
            raise refuse(Reason.OPERATION_FINISHED, f"{operation.operation_id} was aborted before it was asked for.",
                         operation_id=operation.operation_id)  # fmt: skip
        drive = found or self._operations.begin(operation, identity, budget_s)
        answer, _ = drive.answers.ask(START, identity.digest)
        async for event in follow_answer(drive, self._operations.feed, call, answer, budget_s, from_start=True):
            yield event

    def _give_up(self, operation_id: str) -> None:
        # Of nothing that is known: its call may be on its way, and its caller is gone. It would pause everybody for nobody.
        if operation_id:
            self._given_up[operation_id] = None
            while len(self._given_up) > MAX_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]

    async def _go_on(
        self, call: str, name: str, found: Drive | Ended, digest: str, request: core.Request, budget_s: float
    ) -> AsyncIterator[pb.OperationEvent]:
        if isinstance(found, Ended):
            async for event in replay(found, call):
                yield event
            return
        answer, first = found.answers.ask(name, digest)
        found.post(request if first else core.TrainerHeard(self._operations.clock()))
        async for event in follow_answer(found, self._operations.feed, call, answer, budget_s, from_start=False):
            yield event

    def _trace(self, context: Context) -> dict[str, str]:
        """The caller's trace context, where traces are on."""
        return incoming(context.invocation_metadata()) if self._operations.settings.traces else {}

    def _named(self, operation_id: str) -> Drive | Ended:
        name = _operation_id(operation_id)
        active = self._operations.active
        if active is not None and active.operation.operation_id == name:
            if not active.started:
                raise refuse(Reason.WRONG_PHASE, f"{name} has not begun yet.", operation_id=name)
            return active
        ended = self._operations.past.of(name)
        if ended is not None:
            return ended
        if active is not None:
            raise fenced(active)
        raise refuse(Reason.UNKNOWN_OPERATION, f"No operation {name} is known here.", operation_id=name)

    def _until(self, budget_s: float, longest_s: float) -> float:
        return self._operations.clock() + min(budget_s * 2 / 3, longest_s)  # a third is kept for opening everybody

    async def _retire(self, who: Participant, rollout_ids: Sequence[str], budget_s: float) -> int | str:
        """How many it knew, or why it could not be told."""
        try:
            return await self._operations.participants.retire(who, rollout_ids, budget_s)
        except SafepointError as error:
            log.warning("%s was not told to forget rollouts: %s", who.participant_id, error)
            return clipped(str(error), MAX_RETIRE_CAUSE_BYTES)


def _digest(request: Message) -> str:
    """SHA-256 of what was asked, and of which call: a Save and a Restore of the same ids have the same bytes.

    A message field that is there and empty says the same as one that is not there.
    """
    for field, value in request.ListFields():
        if isinstance(value, Message) and value.ByteSize() == 0:
            request.ClearField(field.name)
    kind = request.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(kind + b"\0" + request.SerializeToString(deterministic=True)).hexdigest()


def _operation_id(text: str) -> OperationId:
    if not is_wire_id(text):
        raise refuse(Reason.MALFORMED_ID, f"{text[:130]!r} is no operation_id.")
    return OperationId(text)


def _snapshot_id(text: str) -> SnapshotId:
    if not is_wire_id(text):
        raise refuse(Reason.MALFORMED_ID, f"{text[:130]!r} is no snapshot_id.")
    return SnapshotId(text)


def _retention(request: pb.PruneSnapshotsRequest, settings: Settings) -> Retention:
    """What the caller asks for; what it leaves open is as configured."""
    every = request.keep_every if request.HasField("keep_every") else settings.keep_every
    interval = request.keep_interval
    interval_s = interval.ToMilliseconds() / 1e3 if request.HasField("keep_interval") else settings.keep_interval_s
    return Retention(request.keep_last, every, interval_s)


def _finding_from_problem(problem: Problem) -> pb.Finding:
    return pb.Finding(
        blocking=True,
        reason=convert.wire(problem.reason),
        participant_id=problem.participant_id,
        message=problem.message,
        next_step=problem.next_step or CATALOG[problem.reason].next_step,
    )
