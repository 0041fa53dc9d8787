"""A Coordinator that keeps the contract as far as a client can see, with a knob for every way a call can go wrong.

It runs as a real grpc.aio server behind the real interceptor, so statuses and trailers are those of the real one. It
is idempotent on operation_id as the contract says, counts what it was really asked to do, and refuses a call without a
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import manifest_pb2
from safepoint.v1.coordinator_service_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

from coordinator.wire.auth import Token
from coordinator.wire.errors import Problem, Reason, Refused, refuse
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor, time_budget


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one call: after `after` messages. Without a problem the connection seems lost."""

    problem: Problem | None = None
    after: int = 0
    hang: bool = False
    end: bool = False  # end the stream well, too early


LOST = Fault()


def snapshot_info(snapshot_id: str, operation_id: str = "save-1", **totals: int) -> pb.SnapshotInfo:
    info = pb.SnapshotInfo(
        snapshot_id=snapshot_id,
        operation_id=operation_id,
        size_bytes=41_200_000,
        totals=manifest_pb2.LedgerTotals(**({"completed": 3, "parked": 60, "pending": 2} | totals)),
        participant_ids=["agent", "counter", "policy_model"],
        topology_fingerprint="ab" * 32,
    )
    info.create_time.FromSeconds(1_790_000_000)
    return info


@dataclass
class FakeCoordinator(CoordinatorServicer):
    """`faults[rpc]` are used up one a call; `asked` lists every request, `done` what was really carried out, once."""

    token: str = ""
    faults: dict[str, deque[Fault]] = field(default_factory=lambda: defaultdict(deque))
    asked: list[tuple[str, object]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    budgets: list[float] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    damaged: dict[str, Reason] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)  # in the object store s3://bucket/run, newest first
    skipped: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, pb.SnapshotUpload] = field(default_factory=dict)
    invalid: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)  # of the snapshot that is restored
    rollouts: list[manifest_pb2.LedgerEntry] = field(default_factory=list)
    placements: list[manifest_pb2.Placement] = field(default_factory=list)
    ledger_part: int = 2
    unconfirmed: list[str] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # of a save
    phase: str = ""  # of the trainer-driven operation: prepared, committed, published
    active: str = ""
    blocking: tuple[str, ...] = ()  # whom the active one waits for
    findings: list[pb.Finding] = field(default_factory=list)
    address: str = ""
    snapshot_root: str = "/snapshots"
    root_mark: str = ""
    _records: dict[str, bytes] = field(default_factory=dict)

    def names(self) -> list[str]:
        """The RPCs that were called, in order."""
        return [name for name, _ in self.asked]

    def requests(self, name: str) -> list[object]:
        return [request for called, request in self.asked if called == name]

    def fail(self, rpc: str, *faults: Fault | Problem) -> None:
        self.faults[rpc].extend(f if isinstance(f, Fault) else Fault(f) for f in faults)

    # Operations

    async def Save(self, request, context):
        self._bind(request)
        async for event in self._play("Save", request, context, self._save_events(request)):
            yield event

    async def _save_events(self, request) -> AsyncIterator[pb.OperationEvent]:
        number = 0
        for number, phase in enumerate((2, 3, 4, 5), start=1):
            event = pb.OperationEvent(operation_id=request.operation_id, sequence=2 * number - 1)
            event.phase_started.phase = phase
            event.phase_started.participant_ids.extend(["agent", "counter"])
            yield event
            event = pb.OperationEvent(operation_id=request.operation_id, sequence=2 * number)
            event.participant_progress.phase = phase
            event.participant_progress.participant_id = "agent"
            event.participant_progress.parked = 62
            event.participant_progress.bytes_done = 20_000_000 if phase == 3 else 0
            event.participant_progress.bytes_total = 41_000_000 if phase == 3 else 0
            yield event
        if request.snapshot_id not in self.published:
            self.published.insert(0, request.snapshot_id)
            self.done.append(f"save {request.snapshot_id}")
        for text in self.warnings:
            number += 1
            event = pb.OperationEvent(operation_id=request.operation_id, sequence=2 * number)
            event.warning.message = text
            yield event
        event = pb.OperationEvent(operation_id=request.operation_id, sequence=2 * number + 1)
        event.saved.snapshot.CopyFrom(snapshot_info(request.snapshot_id, request.operation_id))
        event.saved.snapshot.metadata.update(request.metadata)
        event.saved.pause.FromMilliseconds(310)
        event.saved.unconfirmed.extend(self.unconfirmed)
        yield event

    async def Restore(self, request, context):
        self._bind(request)
        async for event in self._play("Restore", request, context, self._restore_events(request)):
            yield event

    async def _restore_events(self, request) -> AsyncIterator[pb.OperationEvent]:
        if request.snapshot_id not in self.published:
            raise refuse(Reason.SNAPSHOT_NOT_FOUND, f"No snapshot {request.snapshot_id}.")
        event = pb.OperationEvent(operation_id=request.operation_id, sequence=1)
        event.restored.snapshot.CopyFrom(snapshot_info(request.snapshot_id))
        event.restored.snapshot.metadata.update(self.metadata)
        event.restored.sessions = 64
        event.restored.totals.CopyFrom(manifest_pb2.LedgerTotals(completed=3, parked=61, pending=0, excluded=1))
        event.restored.diverged.add(rollout_id="r-9", state=4, reason="the agent uses time")
        event.restored.diverged_count = 1
        event.restored.placements.extend(self.placements)
        self.active = "" if request.resume else request.operation_id
        yield event
        if request.resume:
            yield self._resumed(request.operation_id, 2)

    def _resumed(self, operation_id: str, sequence: int) -> pb.OperationEvent:
        event = pb.OperationEvent(operation_id=operation_id, sequence=sequence)
        event.resumed.pause.FromMilliseconds(520)
        event.resumed.acknowledged.extend(["agent", "counter"])
        event.resumed.unconfirmed.extend(self.unconfirmed)
        return event

    # Trainer-driven phases

    async def Prepare(self, request, context):
        self._bind(request)
        async for event in self._play("Prepare", request, context, self._prepare_events(request)):
            yield event

    async def _prepare_events(self, request):
        event = pb.OperationEvent(operation_id=request.operation_id, sequence=1)
        event.phase_started.phase = 2
        event.phase_started.participant_ids.extend(["agent", "counter"])
        yield event
        event = pb.OperationEvent(operation_id=request.operation_id, sequence=2)
        event.participant_progress.participant_id = "agent"
        event.participant_progress.parked = 62
        event.participant_progress.done = True
        self.phase, self.active = "prepared", request.operation_id
        yield event

    async def Commit(self, request, context):
        async for event in self._play("Commit", request, context, self._commit_events(request)):
            yield event

    async def _commit_events(self, request):
        self._need("prepared", "committed")
        self.phase = "committed"
        event = pb.OperationEvent(operation_id=request.operation_id, sequence=3)
        event.phase_finished.phase = 3
        yield event

    async def Publish(self, request, context):
        async for event in self._play("Publish", request, context, self._publish_events(request)):
            yield event

    async def _publish_events(self, request):
        self._need("committed", "published")
        self.phase = "published"
        name = next(r.snapshot_id for n, r in self.asked if n == "Prepare" and r.operation_id == request.operation_id)
        if name not in self.published:
            self.published.insert(0, name)
            self.done.append(f"publish {name}")
        event = pb.OperationEvent(operation_id=request.operation_id, sequence=4)
        event.saved.snapshot.CopyFrom(snapshot_info(name, request.operation_id))
        event.saved.snapshot.metadata.update(request.metadata)
        yield event

    async def Resume(self, request, context):
        async for event in self._play("Resume", request, context, self._resume_events(request)):
            yield event

    async def _resume_events(self, request):
        if request.operation_id == self.active and self.phase in ("prepared", "committed"):
            raise refuse(Reason.WRONG_PHASE, "The save is not published.")
        if self.active:
            self.done.append("resume")
            self.active = self.phase = ""
            yield self._resumed(request.operation_id, 5)
        else:
            yield pb.OperationEvent(operation_id=request.operation_id, sequence=1, resumed=pb.Resumed())

    async def Abort(self, request, context):
        await self._unary("Abort", request, context)
        aborted = self.active if request.operation_id in ("", self.active) else ""
        if aborted:
            self.active = self.phase = ""
            self.done.append("abort")
        return pb.AbortOperationResponse(operation_id=aborted, acknowledged=["agent"], unconfirmed=self.unconfirmed)

    # Looking

    async def GetStatus(self, request, context):
        await self._unary("GetStatus", request, context)
        response = pb.GetCoordinatorStatusResponse(
            coordinator_epoch=3, job_id="default", snapshot_root=self.snapshot_root, root_mark=self.root_mark,
            latest_snapshot_id=self.published[0] if self.published else "",
        )  # fmt: skip
        if self.active:
            response.operation.operation_id = self.active
            response.operation.kind = pb.OPERATION_KIND_SAVE
            response.operation.outcome = pb.OPERATION_OUTCOME_RUNNING
            response.operation.phase = 2
            response.operation.waiting_for = "counter drains: 2 requests of r-17, r-22"
            response.operation.pending_participants.extend(self.blocking)
        health = response.participants.add(reachable=True)
        health.info.capabilities.participant_id = "agent"
        health.info.capabilities.role, health.info.capabilities.kind = 3, "gym.agent"
        health.info.address = "127.0.0.1:7001"
        if request.participants:
            health.status.participant_id = "agent"
            health.status.state = 1
            health.status.in_flight = 62
            for number in range(min(request.max_rollouts, 2)):
                health.status.rollouts.add(rollout_id=f"r-{number}", activity=4, turn=3, waiting_on="judge")
        return response

    async def GetTopology(self, request, context):
        await self._unary("GetTopology", request, context)
        response = pb.GetTopologyResponse(fingerprint="ab" * 32, findings=self.findings)
        info = response.participants.add(incarnation_id="i-1", address="127.0.0.1:7001")
        info.capabilities.participant_id = "agent"
        info.capabilities.role = 3
        info.capabilities.checkpoint_mode = 1
        info.capabilities.configured_workers = 1
        return response

    async def Watch(self, request, context):
        async for event in self._play("Watch", request, context, self._watch_events(request)):
            yield event

    async def _watch_events(self, request):
        first = pb.WatchEvent()
        first.status.coordinator_epoch = 3
        yield first
        event = pb.WatchEvent()
        event.operation_event.operation_id = request.operation_id or "save-1"
        event.operation_event.warning.message = "a slow disk"
        yield event
        if not request.operation_id:
            await asyncio.Event().wait()

    async def ListSnapshots(self, request, context):
        await self._unary("ListSnapshots", request, context)
        start = int(request.page_token or 0)
        size = min(request.page_size or 100, 2)
        response = pb.ListSnapshotsResponse(
            snapshots=[self._listed(name) for name in self.published[start : start + size]], invalid=self.invalid
        )
        if start + size < len(self.published):
            response.next_page_token = str(start + size)
        return response

    async def ReadLedger(self, request, context):
        if request.snapshot_id in self.invalid:
            self._must_be_whole(request.snapshot_id)
        async for event in self._play("ReadLedger", request, context, self._ledger_events()):
            yield event

    async def _ledger_events(self):
        for start in range(0, len(self.rollouts), self.ledger_part):
            yield pb.ReadLedgerEvent(entries=self.rollouts[start : start + self.ledger_part])

    async def VerifySnapshot(self, request, context):
        await self._unary("VerifySnapshot", request, context)
        self._must_be_whole(request.snapshot_id)
        return pb.VerifySnapshotResponse(files=4, size_bytes=41_200_000)

    def _must_be_whole(self, name):
        if name in self.damaged:
            raise refuse(self.damaged[name], f"{name}/agent/calls.jsonl is damaged.")
        if name not in self.published:
            raise refuse(Reason.SNAPSHOT_NOT_FOUND, f"No snapshot {name}.")

    def _listed(self, name):
        info = snapshot_info(name)
        if name in self.uploads:
            info.upload.CopyFrom(self.uploads[name])
        return info

    async def FetchSnapshot(self, request, context):
        await self._unary("FetchSnapshot", request, context)
        if not self.stored or request.url not in ("", "s3://bucket/run"):
            raise refuse(Reason.INVALID_ARGUMENT, "This coordinator fetches from elsewhere.")
        name = request.snapshot_id or self.stored[0]
        if name not in self.stored:
            raise refuse(Reason.SNAPSHOT_NOT_FOUND, f"There is no copy of {name}.")
        found = name in self.published
        if not found:
            self.published.insert(0, name)
        return pb.FetchSnapshotResponse(
            snapshot=snapshot_info(name), files=0 if found else 5, size_bytes=0 if found else 41_200_000, found=found,
            skipped=self.skipped,
        )  # fmt: skip

    async def PruneSnapshots(self, request, context):
        await self._unary("PruneSnapshots", request, context)
        gone = self.published[request.keep_last :]
        if not request.dry_run:
            del self.published[request.keep_last :]
        kept = dict.fromkeys(self.published[: request.keep_last], "it is the newest")
        return pb.PruneSnapshotsResponse(deleted=gone, size_bytes=1000 * len(gone), kept=kept)

    async def PinSnapshot(self, request, context):
        await self._unary("PinSnapshot", request, context)
        self.pins[request.snapshot_id] = request.reason
        return pb.PinSnapshotResponse(
            snapshot=pb.SnapshotInfo(snapshot_id=request.snapshot_id, pin_reason=request.reason)
        )

    async def UnpinSnapshot(self, request, context):
        await self._unary("UnpinSnapshot", request, context)
        return pb.UnpinSnapshotResponse(pin_reason=self.pins.pop(request.snapshot_id, ""))

    async def RetireRollouts(self, request, context):
        await self._unary("RetireRollouts", request, context)
        return pb.RetireRolloutsResponse(
            retired=len(request.rollout_ids), unconfirmed=self.unconfirmed, causes=self.causes
        )

    async def Explain(self, request, context):
        await self._unary("Explain", request, context)
        response = pb.ExplainResponse()
        response.operation.operation_id = request.operation_id or "save-1"
        response.operation.snapshot_id = "step-40"
        response.operation.kind = pb.OPERATION_KIND_SAVE
        response.operation.outcome = pb.OPERATION_OUTCOME_ABORTED
        response.operation.phase = 2
        primary = response.operation.failure.primary
        primary.reason = int(Reason.DRAIN_INCOMPLETE)
        primary.message = "counter still drains."
        primary.participant_id = "counter"
        primary.phase = 2
        primary.rollouts.add(rollout_id="r-17", turn=4, waiting_on="judge")
        primary.rollout_count = 31
        return response

    async def ListOperations(self, request, context):
        await self._unary("ListOperations", request, context)
        one = pb.OperationSummary(snapshot=snapshot_info("step-40"))
        one.operation.operation_id, one.operation.snapshot_id = "save-1", "step-40"
        one.operation.kind, one.operation.outcome = pb.OPERATION_KIND_SAVE, pb.OPERATION_OUTCOME_SUCCEEDED
        one.operation.begin_time.FromSeconds(1_796_000_000)
        one.operation.elapsed.FromMilliseconds(850)
        one.pause.FromMilliseconds(310)
        return pb.ListOperationsResponse(operations=[one])

    # How a call goes

    def _need(self, *phases: str) -> None:
        if self.phase not in phases:
            raise refuse(Reason.WRONG_PHASE, f"The phase is {self.phase or 'none'}.")

    def _bind(self, request) -> None:
        raw = request.SerializeToString(deterministic=True)
        if self._records.setdefault(request.operation_id, raw) != raw:
            raise refuse(Reason.REQUEST_CONFLICT, "The operation_id came with another request.")

    async def _play(self, name, request, context, events):
        self.budgets.append(time_budget(context))
        self.asked.append((name, request))
        fault = self.faults[name].popleft() if self.faults[name] else None
        count = 0
        if fault and fault.after == 0:
            await self._fail(fault, context)
            if fault.end:
                return
        async for event in events:
            yield event
            count += 1
            if fault and count == fault.after:
                if fault.end:
                    return
                async for _ in events:  # what was asked is done although the answer is lost
                    pass
                await self._fail(fault, context)

    async def _unary(self, name, request, context) -> None:
        self.budgets.append(time_budget(context))
        self.asked.append((name, request))
        if self.faults[name]:
            await self._fail(self.faults[name].popleft(), context)

    async def _fail(self, fault: Fault, context) -> None:
        if fault.end:
            return
        if fault.hang:
            await asyncio.Event().wait()
        if fault.problem is not None:
            raise Refused(fault.problem)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    @contextlib.asynccontextmanager
    async def serve(self, address: str | None = None) -> AsyncIterator[FakeCoordinator]:
        """Serve on a Unix socket of its own, or on `address`."""
        with tempfile.TemporaryDirectory(prefix="sp-") as folder:  # short: a socket path has at most 107 characters
            self.address = address or f"unix:{Path(folder) / 's'}"
            token = Token(self.token) if self.token else None
            server = aio.server(interceptors=[ErrorInterceptor(token)], options=SERVER_OPTIONS)
            add_CoordinatorServicer_to_server(self, server)
            server.add_insecure_port(self.address)
            await server.start()
            try:
                yield self
            finally:
                await server.stop(0)


def entries(*names: str, state: int = 2) -> Sequence[manifest_pb2.LedgerEntry]:
    return [manifest_pb2.LedgerEntry(rollout_id=name, attempt=1, state=state, recorded_calls=3) for name in names]
