"""A shim that is no shim: the real Participant service over real gRPC, with knobs for everything that goes wrong.

The rule: what is not turned by a knob behaves as the contract says (fence, lease, idempotent phases, files on disk), so
that a test shows what the coordinator makes of one fault and of nothing else.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from safepoint.v1 import (
    capabilities_pb2,
    coordinator_service_pb2,
    coordinator_service_pb2_grpc,
    manifest_pb2,
    participant_service_pb2,
    participant_service_pb2_grpc,
)

from coordinator.wire.beneath import FileDigest
from coordinator.wire.errors import STILL_LOADED, Blocked, Problem, Reason, Refused, refuse
from coordinator.wire.folder import Folder, open_root, place
from coordinator.wire.ids import new_incarnation_id
from coordinator.wire.manifest_file import read_participant_manifest, verify_files, write_participant_manifest
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor, channel, time_budget
from coordinator.wire.terms import CheckpointMode, Phase, Role
from tests.in_time import Stopwatch

S = capabilities_pb2


@dataclass
class Knobs:
    """Faults. Method names are those of the Participant service."""

    inflight: int = 0  # requests that must end before Prepared
    drain_after_s: float = 0.0  # they end so long after closing; math.inf: never
    ebbs: bool = False  # they end one by one, and their responses are held
    hang_on: set[str] = field(default_factory=set)  # never answers these
    fail_on: dict[str, Problem] = field(default_factory=dict)  # refuses these, each time
    crash_on: set[str] = field(default_factory=set)  # raises something unexpected
    die_at: str = ""  # the process ends in this method, after its first step
    silent_workers: int = 0  # of the configured ones
    served: bool = False  # what its status says of work since the start
    ack_but_ignore: set[str] = field(default_factory=set)  # says OK and does nothing
    lose_reply: dict[str, int] = field(default_factory=dict)  # does it, then the connection "breaks", so many times
    lie: str = ""  # "operation", "digest", "missing-file", "generation", "no-proof"
    slow_s: dict[str, float] = field(default_factory=dict)  # waits first
    rollouts: int = 0  # parked rollouts in its ledger
    ledger: list[manifest_pb2.LedgerEntry] | None = None  # exactly these instead
    diverged: list[manifest_pb2.LedgerEntry] = field(default_factory=list)  # what it says of a restore
    restored_totals: manifest_pb2.LedgerTotals | None = None  # instead of those of its manifest
    resume_warnings: tuple[str, ...] = ()  # what it says was lost before the resume
    shared_state: str = ""  # the digest of what it says belongs to no rollout
    names_all: bool = True  # of the diverged ones, when there are more than Restored lists


class FakeShim(participant_service_pb2_grpc.ParticipantServicer):
    """One participant. `await start()`, then `await register(...)` or give its address to the static list."""

    def __init__(
        self,
        participant_id: str,
        role: Role,
        root: Path | str,
        knobs: Knobs | None = None,
        *,
        workers: int = 1,
        mode: CheckpointMode = CheckpointMode.EXPORT_RESTORE,
        depends_on: tuple[str, ...] = (),
        upstream_endpoints: tuple[str, ...] = (),
        config_digest: str = "",
        kind: str = "fake",
        in_question: str = "",
        actor_id: str = "",
        features: tuple[str, ...] = (),
    ) -> None:
        self.participant_id = participant_id
        self.root = root
        self.knobs = knobs or Knobs()
        self.workers = workers
        self.incarnation_id = str(new_incarnation_id())
        self.capabilities = capabilities_pb2.Capabilities(
            participant_id=participant_id,
            role=int(role),
            kind=kind,
            checkpoint_mode=int(mode),
            quiesce_modes=[S.QUIESCE_MODE_HOLD, S.QUIESCE_MODE_DRAIN],
            configured_workers=workers,
            state_schema="fake-v1",
            depends_on=depends_on,
            upstream_endpoints=upstream_endpoints,
            config_digest=config_digest,
            actor_id=actor_id,
            features=features,
        )
        self.asked_to_restore: participant_service_pb2.RestoreRequest | None = None
        self.state: int = S.PARTICIPANT_STATE_OPEN
        self.operation_id = ""
        self.in_question = in_question  # a restore whose state is loaded, and whose end it has not heard
        self.heard: list[tuple[str, str]] = []  # how it ended
        self.epoch = 0
        self.generation = 0
        self.finished: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.thawed_by_lease = 0
        self.opened_by: list[str] = []
        self.aborted: list[str] = []
        self.retired: dict[str, int] = {}
        self.closed_at: float | None = None
        self.beating = True
        self.address = ""
        self._lease: asyncio.TimerHandle | None = None
        self._lease_until = 0.0
        # Its owner is in this process too, and gets no processor while it gets none: that is not its owner's silence.
        self._clock = Stopwatch()
        self._committed: participant_service_pb2.Committed | None = None
        self._server: aio.Server | None = None
        self._registration: asyncio.Task[None] | None = None
        self._channel: aio.Channel | None = None
        self.registered = asyncio.Event()
        self.refused: grpc.RpcError | None = None
        self.dead = False

    # ---- life -------------------------------------------------------------------------------------------------------

    async def start(self, address: str = "127.0.0.1:0") -> FakeShim:
        self._server = aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        participant_service_pb2_grpc.add_ParticipantServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def register(self, coordinator: str) -> FakeShim:
        """Announce; returns when the coordinator has said Welcome. Raises what it said instead."""
        self.refused = None  # of a stream that broke with the last coordinator
        self.registered.clear()
        self._channel = channel(coordinator)
        self._registration = asyncio.create_task(self._register())
        await asyncio.wait(
            {self._registration, waiter := asyncio.create_task(self.registered.wait())},
            return_when=asyncio.FIRST_COMPLETED, timeout=5,
        )  # fmt: skip
        waiter.cancel()
        if self.refused is not None:
            raise self.refused
        assert self.registered.is_set(), "no Welcome within 5 s"
        return self

    async def _register(self) -> None:
        assert self._channel is not None
        stub = coordinator_service_pb2_grpc.CoordinatorStub(self._channel)
        call = stub.Register()
        try:
            hello = coordinator_service_pb2.Hello(
                capabilities=self.capabilities, incarnation_id=self.incarnation_id, address=self.address
            )
            await call.write(coordinator_service_pb2.RegisterRequest(hello=hello))
            welcome = (await call.read()).welcome
            self.epoch = max(self.epoch, welcome.coordinator_epoch)
            self.registered.set()
            interval = welcome.heartbeat_interval.ToMicroseconds() / 1e6
            reader = asyncio.create_task(self._drain(call))
            try:
                while not reader.done():
                    if self.beating:
                        await call.write(
                            coordinator_service_pb2.RegisterRequest(heartbeat=coordinator_service_pb2.Heartbeat())
                        )
                    await asyncio.wait({reader}, timeout=interval)
            finally:
                reader.cancel()
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            if isinstance(error, aio.AioRpcError):
                self.refused = error
            else:
                with suppress(aio.AioRpcError):
                    await call.read()
        finally:
            call.cancel()

    @staticmethod
    async def _drain(call: Any) -> None:
        with suppress(aio.AioRpcError, asyncio.CancelledError):
            while await call.read() is not aio.EOF:
                pass

    async def leave(self) -> None:
        """The registration stream breaks; the Participant service goes on."""
        if self._registration is not None:
            self._registration.cancel()
            with suppress(asyncio.CancelledError, aio.AioRpcError):
                await self._registration
            self._registration = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        self.registered.clear()

    async def stop(self) -> None:
        """As kill -9: connections break, nothing is said."""
        self.dead = True
        if self._lease is not None:
            self._lease.cancel()
        if self._server is not None:
            await self._server.stop(None)
        await self.leave()

    @property
    def open(self) -> bool:
        return self.state == S.PARTICIPANT_STATE_OPEN

    def count(self, method: str) -> int:
        return sum(1 for name, _ in self.calls if name == method)

    # ---- knobs ------------------------------------------------------------------------------------------------------

    async def _enter(self, method: str, context: participant_service_pb2.OperationContext | None) -> None:
        self.calls.append((method, context.operation_id if context else ""))
        if method in self.knobs.slow_s:
            end = self._clock.seconds + self.knobs.slow_s[method]
            while (left_s := end - self._clock.seconds) > 0:
                await asyncio.sleep(left_s)
        if method in self.knobs.hang_on:
            await asyncio.Event().wait()
        if method in self.knobs.fail_on:
            raise Refused(self.knobs.fail_on[method])
        if method in self.knobs.crash_on:
            raise RuntimeError("a secret of the fake")

    async def _die_at(self, method: str) -> None:
        if self.knobs.die_at == method:
            self.knobs.die_at = ""
            self._dying = asyncio.create_task(self.stop())
            await asyncio.Event().wait()

    async def _after(self, method: str, context: Any) -> None:
        if self.knobs.lose_reply.get(method, 0) > 0:
            self.knobs.lose_reply[method] -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    # ---- fence ------------------------------------------------------------------------------------------------------

    def _fence(self, context: participant_service_pb2.OperationContext) -> None:
        if context.coordinator_epoch < self.epoch:
            raise refuse(Reason.STALE_EPOCH, f"{context.coordinator_epoch} is older than {self.epoch}.",
                         participant_id=self.participant_id)  # fmt: skip
        self.epoch = context.coordinator_epoch
        if context.operation_id in self.finished:
            reason = (
                Reason.LEASE_LAPSED if self.finished[context.operation_id] == "lease" else Reason.OPERATION_FINISHED
            )
            loaded = {STILL_LOADED: self.in_question} if self.in_question == context.operation_id else {}
            raise refuse(
                reason, f"{context.operation_id} has ended here.", participant_id=self.participant_id, metadata=loaded
            )
        if self.operation_id and self.operation_id != context.operation_id:
            raise refuse(Reason.FENCED, f"{self.operation_id} owns the fence.", operation_id=self.operation_id,
                         participant_id=self.participant_id)  # fmt: skip

    def _close(self, operation_id: str, state: int, ttl_s: float) -> None:
        if self.open:
            self.generation += 1
            self.closed_at = time.monotonic()
        self.operation_id, self.state = operation_id, state
        self._renew(ttl_s)

    def _renew(self, ttl_s: float) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease_until = self._clock.seconds + ttl_s
        self._lease = asyncio.get_running_loop().call_later(ttl_s, self._thaw)

    def _thaw(self) -> None:
        if (left_s := self._lease_until - self._clock.seconds) > 0:
            self._lease = asyncio.get_running_loop().call_later(left_s, self._thaw)
            return
        self.thawed_by_lease += 1
        if self.state == S.PARTICIPANT_STATE_RESTORED:
            self.in_question = self.operation_id
        self._open("lease")

    def _open(self, why: str) -> float | None:
        if self._lease is not None:
            self._lease.cancel()
        if self.operation_id:
            self.finished[self.operation_id] = why
        closed_for = time.monotonic() - self.closed_at if self.closed_at is not None else None
        if not self.open:
            self.generation += 1
            self.opened_by.append(why)
        self.state, self.operation_id, self.closed_at, self._committed = S.PARTICIPANT_STATE_OPEN, "", None, None
        return closed_for

    def _workers(self) -> list[capabilities_pb2.WorkerStatus]:
        return [
            capabilities_pb2.WorkerStatus(worker_id=f"worker-{n}", pid=1000 + n, acknowledged=True)
            for n in range(self.workers - self.knobs.silent_workers)
        ]

    # ---- the service ------------------------------------------------------------------------------------------------

    async def GetCapabilities(self, request: Any, context: Any) -> Any:
        await self._enter("GetCapabilities", None)
        return participant_service_pb2.GetCapabilitiesResponse(
            capabilities=self.capabilities, incarnation_id=self.incarnation_id, state=self.state,
            operation_id=self.operation_id or self.in_question, coordinator_epoch=self.epoch,
        )  # fmt: skip

    async def Prepare(self, request: Any, context: Any) -> AsyncIterator[Any]:
        budget_s = time_budget(context)
        began = time.monotonic()
        await self._enter("Prepare", request.context)
        if self.in_question:
            raise refuse(Reason.UNAVAILABLE, f"How {self.in_question} ended is not known here.")
        self._fence(request.context)
        if "Prepare" not in self.knobs.ack_but_ignore:
            self._close(request.context.operation_id, S.PARTICIPANT_STATE_PREPARING, _seconds(request.lease_ttl))
        yield participant_service_pb2.PrepareEvent(
            admission_closed=participant_service_pb2.AdmissionClosed(
                workers=self._workers(), in_flight=self.knobs.inflight
            )
        )
        await self._die_at("Prepare")
        while self.knobs.inflight and time.monotonic() - began < self.knobs.drain_after_s:
            waited = time.monotonic() - began
            left = self.knobs.inflight - self._ended(waited)
            rows = [
                capabilities_pb2.RolloutActivity(
                    rollout_id=f"r{n + 1}", turn=3, activity=S.ACTIVITY_RUNNING, waiting_on="judge"
                )
                for n in range(min(20, left))
            ]
            for row in rows:
                row.age.FromMicroseconds(int(waited * 1e6))
            yield participant_service_pb2.PrepareEvent(
                drain_progress=participant_service_pb2.DrainProgress(
                    in_flight=left, held=self.knobs.inflight - left, waiting_for=rows, waiting_for_count=left
                )
            )
            if waited >= budget_s:
                raise Refused(
                    Problem(
                        Reason.DRAIN_INCOMPLETE, f"{self.knobs.inflight} requests have not ended.",
                        phase=Phase.PREPARE, participant_id=self.participant_id,
                        rollouts=tuple(Blocked(f"r{n + 1}", 0, 3, waited, "judge") for n in range(min(20, self.knobs.inflight))),
                        rollout_count=self.knobs.inflight, waited_s=waited,
                    )
                )  # fmt: skip
            if self.operation_id != request.context.operation_id:
                raise refuse(Reason.OPERATION_FINISHED, "It was overtaken.", participant_id=self.participant_id)
            await asyncio.sleep(0.05)
        if "Prepare" not in self.knobs.ack_but_ignore:
            self.state = S.PARTICIPANT_STATE_PREPARED
        await self._after("Prepare", context)
        if self.knobs.lie == "no-proof":
            return
        yield participant_service_pb2.PrepareEvent(
            prepared=participant_service_pb2.Prepared(
                incarnation_id=self.incarnation_id, workers=self._workers(), admission_generation=self.generation,
                parked=self.knobs.rollouts,
            )
        )  # fmt: skip

    async def Commit(self, request: Any, context: Any) -> AsyncIterator[Any]:
        time_budget(context)
        await self._enter("Commit", request.context)
        self._fence(request.context)
        if self.state not in {S.PARTICIPANT_STATE_PREPARED, S.PARTICIPANT_STATE_COMMITTED}:
            raise refuse(Reason.WRONG_PHASE, "It is not prepared.", participant_id=self.participant_id)
        yield participant_service_pb2.CommitEvent(
            export_progress=participant_service_pb2.ExportProgress(items_total=self.knobs.rollouts)
        )
        await self._die_at("Commit")
        if self._committed is None:
            self._committed = await asyncio.to_thread(self._export, request.context.operation_id, request.snapshot_id)
        self.state = S.PARTICIPANT_STATE_COMMITTED
        await self._after("Commit", context)
        yield participant_service_pb2.CommitEvent(committed=self._committed)

    def _export(self, operation_id: str, snapshot_id: str) -> participant_service_pb2.Committed:
        entries = self.knobs.ledger
        if entries is None:
            entries = [
                manifest_pb2.LedgerEntry(
                    rollout_id=f"{self.participant_id}-r{n}", state=manifest_pb2.ROLLOUT_STATE_PARKED,
                    participant_id=self.participant_id, recorded_calls=3,
                )
                for n in range(self.knobs.rollouts)
            ]  # fmt: skip
        totals = manifest_pb2.LedgerTotals(
            completed=sum(e.state == manifest_pb2.ROLLOUT_STATE_COMPLETED for e in entries),
            parked=sum(e.state == manifest_pb2.ROLLOUT_STATE_PARKED for e in entries),
            pending=sum(e.state == manifest_pb2.ROLLOUT_STATE_PENDING for e in entries),
            excluded=sum(e.state == manifest_pb2.ROLLOUT_STATE_EXCLUDED for e in entries),
        )
        with (
            self._snapshot(snapshot_id) as snapshot,
            snapshot.make_child(self.participant_id) as mine,
        ):
            state = b"state of " + self.participant_id.encode()
            files: dict[str, FileDigest] = {"state.bin": mine.write_new("state.bin", state)}
            if entries:
                lines = (_ledger_line(entry) for entry in entries)
                files["ledger.jsonl"] = mine.write_new("ledger.jsonl", lines)
            manifest = manifest_pb2.ParticipantManifest(
                format_version=1,
                operation_id=operation_id if self.knobs.lie != "operation" else "another-operation",
                snapshot_id=snapshot_id,
                incarnation_id=self.incarnation_id,
                capabilities=self.capabilities,
                files=[
                    manifest_pb2.FileEntry(path=path, size_bytes=found.size_bytes, sha256=found.sha256)
                    for path, found in sorted(files.items())
                ],
                ledger_file="ledger.jsonl" if entries else "",
                totals=totals,
                sessions=1,
                shared_state_sha256=self.knobs.shared_state,
                recorded_calls=sum(entry.recorded_calls for entry in entries),
            )
            written = write_participant_manifest(mine, manifest)
            if self.knobs.lie == "missing-file":
                mine.remove_file("state.bin")
        digest = written.sha256 if self.knobs.lie != "digest" else "0" * 64
        return participant_service_pb2.Committed(manifest=manifest, manifest_sha256=digest)

    async def Confirm(self, request: Any, context: Any) -> Any:
        time_budget(context)
        await self._enter("Confirm", request.context)
        self._fence(request.context)
        if self.knobs.lie == "generation":
            self.generation += 2
        if request.admission_generation != self.generation:
            raise refuse(Reason.ACTIVITY_AFTER_PREPARED, "It has been open in between.",
                         participant_id=self.participant_id)  # fmt: skip
        await self._die_at("Confirm")
        await self._after("Confirm", context)
        return participant_service_pb2.ConfirmResponse(
            incarnation_id=self.incarnation_id, admission_generation=self.generation,
            lease_remaining=_duration(self._lease_until - self._clock.seconds),
        )  # fmt: skip

    async def Restore(self, request: Any, context: Any) -> AsyncIterator[Any]:
        time_budget(context)
        await self._enter("Restore", request.context)
        self._fence(request.context)
        self._close(request.context.operation_id, S.PARTICIPANT_STATE_RESTORING, _seconds(request.lease_ttl))
        yield participant_service_pb2.RestoreEvent(
            admission_closed=participant_service_pb2.AdmissionClosed(workers=self._workers())
        )
        await self._die_at("Restore")
        self.asked_to_restore = request
        totals = self._of_sources(request)
        if request.manifest_sha256:
            with (
                self._snapshot(request.snapshot_id) as snapshot,
                snapshot.child(request.source_participant_id or self.participant_id) as mine,
            ):
                manifest, _ = read_participant_manifest(mine, request.manifest_sha256)
                verify_files(mine, manifest)
                totals = manifest.totals
        if "RestoreLoad" in self.knobs.fail_on:
            self.state = S.PARTICIPANT_STATE_RESTORE_FAILED
            raise Refused(self.knobs.fail_on["RestoreLoad"])
        self.state = S.PARTICIPANT_STATE_RESTORED
        diverged = self.knobs.diverged
        if len(diverged) > 20 and self.knobs.names_all:
            for start in range(0, len(diverged), 1000):
                batch = participant_service_pb2.RestoreDiverged(entries=diverged[start : start + 1000])
                yield participant_service_pb2.RestoreEvent(diverged=batch)
        yield participant_service_pb2.RestoreEvent(
            restored=participant_service_pb2.Restored(
                snapshot_id=request.snapshot_id, incarnation_id=self.incarnation_id, sessions=1,
                totals=self.knobs.restored_totals or totals, diverged=diverged[:20], diverged_count=len(diverged),
                admission_generation=self.generation,
            )
        )  # fmt: skip

    def _ended(self, waited_s: float) -> int:
        """How many of those in flight have, so long after closing."""
        return int(self.knobs.inflight * waited_s / self.knobs.drain_after_s) if self.knobs.ebbs else 0

    def _snapshot(self, snapshot_id: str) -> Folder:
        with open_root(place(self.root)) as root:
            return root.child(f"snapshots/{snapshot_id}")

    def _of_sources(self, request: participant_service_pb2.RestoreRequest) -> manifest_pb2.LedgerTotals:
        """The rollouts in the ranges that it is to load, counted from the ledgers of their parts."""
        counted: Counter[str] = Counter()
        for source in request.sources:
            path = Path(self.root) / "snapshots" / request.snapshot_id / source.participant_id / "ledger.jsonl"
            for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
                until = source.rollouts_until
                if source.rollouts_from <= line["rollout_id"] and (not until or line["rollout_id"] < until):
                    counted[line["state"].removeprefix("ROLLOUT_STATE_").lower()] += 1
        return manifest_pb2.LedgerTotals(**counted)

    async def Resume(self, request: Any, context: Any) -> Any:
        closed_for = await self._opening("Resume", request, context)
        reply = participant_service_pb2.ResumeResponse(warnings=self.knobs.resume_warnings)
        if closed_for is not None:
            reply.closed_for.CopyFrom(_duration(closed_for))
        return reply

    async def Abort(self, request: Any, context: Any) -> Any:
        closed_for = await self._opening("Abort", request, context)
        self.aborted.append(request.context.operation_id)
        reply = participant_service_pb2.AbortResponse()
        if closed_for is not None:
            reply.closed_for.CopyFrom(_duration(closed_for))
        return reply

    async def _opening(self, method: str, request: Any, context: Any) -> float | None:
        time_budget(context)
        await self._enter(method, request.context)
        if self.in_question == request.context.operation_id:
            self.in_question = ""
            self.heard.append((method, request.context.operation_id))
        if request.context.operation_id in self.finished and self.operation_id != request.context.operation_id:
            return None
        self._fence(request.context)
        if method in self.knobs.ack_but_ignore:
            return None
        await self._die_at(method)
        self.finished[request.context.operation_id] = method
        closed_for = self._open(method) if self.operation_id == request.context.operation_id else None
        await self._after(method, context)
        return closed_for

    async def RenewLease(self, request: Any, context: Any) -> Any:
        time_budget(context)
        await self._enter("RenewLease", request.context)
        self._fence(request.context)
        if self.operation_id != request.context.operation_id:
            raise refuse(Reason.WRONG_PHASE, "It is not closed.", participant_id=self.participant_id)
        self._renew(_seconds(request.lease_ttl))
        return participant_service_pb2.RenewLeaseResponse(lease_remaining=request.lease_ttl)

    async def RetireAttempts(self, request: Any, context: Any) -> Any:
        await self._enter("RetireAttempts", None)
        for attempt in request.attempts:
            self.retired[attempt.rollout_id] = attempt.attempt
        return participant_service_pb2.RetireAttemptsResponse(retired=len(request.attempts))

    async def GetStatus(self, request: Any, context: Any) -> Any:
        await self._enter("GetStatus", None)
        return participant_service_pb2.GetStatusResponse(
            status=capabilities_pb2.ParticipantStatus(
                participant_id=self.participant_id, incarnation_id=self.incarnation_id, state=self.state,
                operation_id=self.operation_id, coordinator_epoch=self.epoch, workers=self._workers(),
                served=self.knobs.served,
            )
        )  # fmt: skip


def _ledger_line(entry: manifest_pb2.LedgerEntry) -> bytes:
    import json

    fields = {
        "rollout_id": entry.rollout_id,
        "attempt": entry.attempt,
        "state": manifest_pb2.RolloutState.Name(entry.state),
        "reason": entry.reason,
        "participant_id": entry.participant_id,
        "recorded_calls": str(entry.recorded_calls),
        "waiting_on": entry.waiting_on,
        "input_sha256": entry.input_sha256,
    }
    return json.dumps({k: v for k, v in fields.items() if v}).encode() + b"\n"


def _seconds(value: Any) -> float:
    return float(value.ToMicroseconds() / 1e6)


def _duration(value: float) -> Any:
    from google.protobuf.duration_pb2 import Duration

    out = Duration()
    out.FromMicroseconds(int(max(0.0, value) * 1e6))
    return out


NEVER = math.inf
