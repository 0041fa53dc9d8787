"""Adapter values <-> messages of the contract.

The rule: nothing here decides. Requests are checked for form (ids, epochs, durations, enums) and refused before anything
has seen them; values are copied field by field. The only file of the shim that knows both vocabularies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from safepoint.v1 import capabilities_pb2, manifest_pb2
from safepoint.v1 import participant_service_pb2 as pb

from coordinator.wire.chunks import Chunk
from coordinator.wire.clipping import clipped
from coordinator.wire.errors import Blocked, Reason, refuse
from coordinator.wire.ids import is_wire_id
from coordinator.wire.manifest_file import CHUNKED_FORMAT, MAX_EPOCH, PLAIN_FORMAT
from coordinator.wire.terms import Activity, QuiesceMode, RolloutState, StragglerPolicy, Weights
from participant_shims.adapter import (
    Closed,
    Description,
    Drain,
    Exported,
    LedgerLine,
    LiveRollout,
    Loaded,
    Progress,
    Snapshot,
    TaskStack,
    Worker,
    WrittenFile,
)

SHIM_VERSION: Final = "0.1.0"
MIN_LEASE_S: Final = 1.0
MAX_LEASE_S: Final = 3600.0
MAX_LISTED: Final = 20  # rollouts in a reply; the rest is counted, and read with GetStatus
MAX_DIVERGED_ONCE: Final = 1000
MAX_WARNING_BYTES: Final = 500
MAX_STACKS: Final = 100
MAX_ASKED: Final = 1000  # rollouts that one status may hold


class WithContext(Protocol):
    """A request that belongs to an operation."""

    @property
    def context(self) -> pb.OperationContext: ...


# ---- requests: form ---------------------------------------------------------------------------------------------------


def operation_of(request: WithContext) -> tuple[str, int]:
    """The operation id and the epoch of the caller. Raises MALFORMED_ID, INVALID_ARGUMENT."""
    context = request.context
    if not is_wire_id(context.operation_id):
        raise refuse(Reason.MALFORMED_ID, f"{context.operation_id[:60]!r} is no operation_id.")
    return context.operation_id, epoch_of(context.coordinator_epoch)


def epoch_of(epoch: int) -> int:
    """The epoch of a caller. Raises INVALID_ARGUMENT for one that is missing, or so high that none could follow it.

    Whatever is served is the lowest that is served from then on: one mad call must not shut every coordinator out.
    """
    if epoch < 1:
        raise refuse(Reason.INVALID_ARGUMENT, "coordinator_epoch is missing: it is at least 1.")
    if epoch > MAX_EPOCH:
        raise refuse(Reason.INVALID_ARGUMENT, f"coordinator_epoch is {epoch}; it is at most {MAX_EPOCH}.")
    return epoch


def request_digest(request: Message) -> str:
    """SHA-256 hex of the request without its context, which says who asks and not what for."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("context")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()


def wire_id(text: str, field: str) -> str:
    """`text` when it is an id. Raises MALFORMED_ID naming `field`."""
    if not is_wire_id(text):
        raise refuse(Reason.MALFORMED_ID, f"{text[:60]!r} is no {field}.")
    return text


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def lease_ttl(duration: Duration) -> float:
    """Seconds of a lease. Raises INVALID_ARGUMENT unless it is 1 s to 1 h."""
    ttl = seconds(duration)
    if not MIN_LEASE_S <= ttl <= MAX_LEASE_S:
        raise refuse(Reason.INVALID_ARGUMENT, f"lease_ttl is {ttl:.3f} s; it must be 1 s to 1 h.")
    return ttl


def quiesce_mode(asked: int, offered: Iterable[QuiesceMode]) -> QuiesceMode:
    """The mode to use: hold where it is offered and nothing was asked. Raises UNSUPPORTED for one not offered."""
    modes = tuple(offered)
    if asked == 0:
        return QuiesceMode.HOLD if QuiesceMode.HOLD in modes else modes[0]
    for mode in modes:
        if int(mode) == asked:
            return mode
    names = ", ".join(m.name.lower() for m in modes)
    raise refuse(Reason.UNSUPPORTED, f"Quiesce mode {asked} is not offered here; these are: {names}.")


def excludes(policy: int) -> bool:
    """Whether stragglers are excluded. Raises UNSUPPORTED for a policy that this version does not know."""
    if policy not in set(StragglerPolicy):
        raise refuse(Reason.UNSUPPORTED, f"Straggler policy {policy} is not known here.")
    return policy != StragglerPolicy.FAIL


# ---- values -> messages -----------------------------------------------------------------------------------------------


def duration(value_s: float) -> Duration:
    """Seconds as a message; never negative."""
    out = Duration()
    out.FromMicroseconds(max(0, round(value_s * 1e6)))
    return out


def capabilities(description: Description) -> capabilities_pb2.Capabilities:
    """The fixed description of a participant."""
    return capabilities_pb2.Capabilities(
        participant_id=description.participant_id,
        role=cast(Any, int(description.role)),
        kind=description.kind,
        checkpoint_mode=cast(Any, int(description.checkpoint_mode)),
        checkpoint_mode_reason=clipped(description.checkpoint_mode_reason, 1000),
        quiesce_modes=cast(Any, [int(m) for m in description.quiesce_modes]),
        configured_workers=description.configured_workers,
        state_schema=description.state_schema,
        depends_on=description.depends_on,
        upstream_endpoints=description.upstream_endpoints,
        config_digest=description.config_digest,
        features=description.features,
        shim_version=SHIM_VERSION,
        actor_id=description.actor_id,
    )


def workers(values: Iterable[Worker]) -> list[capabilities_pb2.WorkerStatus]:
    """Worker processes."""
    return [
        capabilities_pb2.WorkerStatus(worker_id=w.worker_id, pid=w.pid, acknowledged=w.acknowledged) for w in values
    ]


def activity(value: LiveRollout) -> capabilities_pb2.RolloutActivity:
    """A live rollout."""
    return capabilities_pb2.RolloutActivity(
        rollout_id=value.rollout_id,
        attempt=value.attempt,
        turn=value.turn,
        activity=cast(Any, int(value.activity)),
        age=duration(value.age_s),
        waiting_on=clipped(value.waiting_on, 256),
        no_client_for=None if value.no_client_s is None else duration(value.no_client_s),
    )


def admission_closed(closed: Closed) -> pb.AdmissionClosed:
    """The first event of a prepare or a restore."""
    return pb.AdmissionClosed(workers=workers(closed.workers), in_flight=closed.counts.in_flight)


def drain_progress(drain: Drain) -> pb.DrainProgress:
    """Who is still waited for."""
    return pb.DrainProgress(
        in_flight=drain.counts.in_flight,
        parked=drain.counts.parked,
        held=drain.counts.held,
        waiting_for=[activity(r) for r in drain.waiting_for[:MAX_LISTED]],
        waiting_for_count=max(drain.waiting_for_count, len(drain.waiting_for)),
    )


def export_progress(progress: Progress) -> pb.ExportProgress:
    """How far an export or a load is."""
    return pb.ExportProgress(
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        items_done=progress.items_done,
        items_total=progress.items_total,
    )


def stacks(values: Iterable[TaskStack]) -> list[capabilities_pb2.TaskStack]:
    """Where tasks stand."""
    return [
        capabilities_pb2.TaskStack(
            rollout_id=each.rollout_id, worker_id=each.worker_id, task=each.task,
            frames=[capabilities_pb2.StackFrame(file=f, line=max(0, n), function=name) for f, n, name in each.frames],
        )
        for each in values
    ]  # fmt: skip


def blocked(value: LiveRollout) -> Blocked:
    """A rollout as an error names it."""
    waiting_on = value.waiting_on or ("" if value.activity is Activity.UNSPECIFIED else value.activity.name.lower())
    return Blocked(value.rollout_id, value.attempt, value.turn, value.age_s, waiting_on, value.no_client_s)


def totals(values: Mapping[RolloutState, int]) -> manifest_pb2.LedgerTotals:
    """Rollouts by state."""
    return manifest_pb2.LedgerTotals(
        completed=values.get(RolloutState.COMPLETED, 0),
        parked=values.get(RolloutState.PARKED, 0),
        pending=values.get(RolloutState.PENDING, 0),
        excluded=values.get(RolloutState.EXCLUDED, 0),
    )


def ledger_entry(line: LedgerLine, participant_id: str) -> manifest_pb2.LedgerEntry:
    """One rollout of a ledger."""
    return manifest_pb2.LedgerEntry(
        rollout_id=line.rollout_id,
        attempt=line.attempt,
        state=cast(Any, int(line.state)),
        reason=line.reason,
        participant_id=participant_id,
        recorded_calls=line.recorded_calls,
        waiting_on=line.waiting_on,
        input_sha256=line.input_sha256,
    )


def participant_manifest(
    exported: Exported,
    chunks: Sequence[Chunk],
    operation_id: str,
    snapshot_id: str,
    incarnation_id: str,
    what: capabilities_pb2.Capabilities,
) -> manifest_pb2.ParticipantManifest:
    """What was written, files sorted by path, chunks by name. An older reader can do without the field of chunks only if it is empty."""
    return manifest_pb2.ParticipantManifest(
        format_version=CHUNKED_FORMAT if chunks else PLAIN_FORMAT,
        operation_id=operation_id,
        snapshot_id=snapshot_id,
        incarnation_id=incarnation_id,
        capabilities=what,
        files=[
            manifest_pb2.FileEntry(path=f.path, size_bytes=f.size_bytes, sha256=f.sha256)
            for f in sorted(exported.files, key=lambda f: f.path)
        ],
        ledger_file=exported.ledger_file,
        totals=totals(exported.totals),
        sessions=exported.sessions,
        recorded_calls=exported.recorded_calls,
        chunks=[manifest_pb2.ChunkEntry(sha256=chunk.sha256, size_bytes=chunk.size_bytes) for chunk in chunks],
        shared_state_sha256=exported.shared_state_sha256,
        weights=_weights(exported.weights),
    )


def _weights(weights: Weights | None) -> manifest_pb2.Weights | None:
    return manifest_pb2.Weights(version=weights.version, digest_sha256=weights.digest_sha256) if weights else None


def weights_of(manifest: manifest_pb2.ParticipantManifest) -> Weights | None:
    """What it says of weights; None when it says nothing."""
    named = manifest.weights
    return Weights(named.version, named.digest_sha256) if manifest.HasField("weights") else None


def written_files(manifest: manifest_pb2.ParticipantManifest) -> tuple[WrittenFile, ...]:
    """The files that a load gets."""
    return tuple(WrittenFile(f.path, f.size_bytes, f.sha256) for f in manifest.files)


def restored(loaded: Loaded, snapshot_id: str, incarnation_id: str, generation: int) -> pb.Restored:
    """The proof that a snapshot is loaded."""
    return pb.Restored(
        snapshot_id=snapshot_id,
        incarnation_id=incarnation_id,
        sessions=loaded.sessions,
        totals=totals(loaded.totals),
        diverged=[ledger_entry(line, "") for line in loaded.diverged[:MAX_LISTED]],
        diverged_count=len(loaded.diverged),
        admission_generation=generation,
    )


def diverged(loaded: Loaded) -> list[pb.RestoreEvent]:
    """What comes before `restored`: everything that restarts, when that cannot list all of it."""
    lines = loaded.diverged if len(loaded.diverged) > MAX_LISTED else ()
    return [
        pb.RestoreEvent(
            diverged=pb.RestoreDiverged(
                entries=[ledger_entry(line, "") for line in lines[start : start + MAX_DIVERGED_ONCE]]
            )
        )
        for start in range(0, len(lines), MAX_DIVERGED_ONCE)
    ]


def warning(text: str) -> str:
    """A sentence for people, cut to the limit of a status."""
    return clipped(text, MAX_WARNING_BYTES)


def status(snapshot: Snapshot) -> capabilities_pb2.ParticipantStatus:
    """The server's part of a status; the service adds who owns the pause."""
    out = capabilities_pb2.ParticipantStatus(
        in_flight=snapshot.counts.in_flight,
        parked=snapshot.counts.parked,
        held=snapshot.counts.held,
        workers=workers(snapshot.workers),
        rollouts=[activity(r) for r in snapshot.rollouts[:MAX_ASKED]],
        rollout_count=snapshot.rollout_count,
        waiting_for=snapshot.waiting_for,
        anonymous_requests=snapshot.anonymous_requests,
        served=not snapshot.fresh,
        warnings=[warning(w) for w in snapshot.warnings[-MAX_LISTED:]],
        replayed_calls=snapshot.replayed_calls,
        diverged_rollouts=snapshot.diverged_rollouts,
    )
    if snapshot.closed_for_s is not None:
        out.closed_for.CopyFrom(duration(snapshot.closed_for_s))
    return out
