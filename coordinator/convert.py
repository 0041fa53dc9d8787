"""Protobuf messages <-> the core's values, both ways and total.

The rule: live messages are read leniently. An enum value that this version does not know becomes UNSPECIFIED, which
the core refuses where it matters; a proof that is not there at all is the caller's to report. Nothing here decides.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2, manifest_pb2, participant_service_pb2

from coordinator.protocol import proofs
from coordinator.protocol.operation import Options, RestoreSource
from coordinator.protocol.topology import Finding, Participant, ShimProcess
from coordinator.registry import Relay
from coordinator.wire.errors import Blocked, Reason, refuse
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId, is_wire_id
from coordinator.wire.manifest_file import LEDGER_NAME, MANIFEST_NAME
from coordinator.wire.places import Placement
from coordinator.wire.terms import CheckpointMode, QuiesceMode, Role, RolloutState, StragglerPolicy

EnumT = TypeVar("EnumT", bound=IntEnum)

_RESERVED = frozenset((MANIFEST_NAME, LEDGER_NAME))
_MAX_METADATA = 64
_MAX_NAMED = 1000
_MAX_METADATA_BYTES = 1024


def enum(kind: type[EnumT], number: int) -> EnumT:
    """The member of that number; UNSPECIFIED for one that this version does not know."""
    try:
        return kind(number)
    except ValueError:
        return kind(0)


def wire(member: IntEnum) -> Any:
    """The number of a member, for a field of a message: the stubs give every enum a type of its own."""
    return int(member)


def duration(seconds: float) -> Duration:
    """`seconds`, to the microsecond; negative ones are zero."""
    out = Duration()
    out.FromMicroseconds(round(max(0.0, seconds) * 1e6))
    return out


def seconds(value: Duration) -> float:
    """The seconds of a duration."""
    return value.ToMicroseconds() / 1e6


# ---- participants ---------------------------------------------------------------------------------------------------


def participant(
    capabilities: capabilities_pb2.Capabilities, incarnation_id: str, address: str,
    process: coordinator_service_pb2.ShimProcess | None = None,
) -> Participant:  # fmt: skip
    """A participant as it describes itself. Raises MALFORMED_ID, INVALID_ARGUMENT."""
    name = capabilities.participant_id
    if not is_wire_id(name) or not is_wire_id(incarnation_id):
        raise refuse(Reason.MALFORMED_ID, f"{name[:130]!r} or its incarnation {incarnation_id[:130]!r} is no id.")
    if name.lower() in _RESERVED:  # also where a file system does not tell cases apart
        raise refuse(
            Reason.MALFORMED_ID, f"{name} cannot name a participant: a file of that name lies in each snapshot.",
            next_step="Give the server another name.", participant_id=name,
        )  # fmt: skip
    if not address or len(address) > 512:
        raise refuse(Reason.INVALID_ARGUMENT, f"{name} names no address.", participant_id=name)
    return Participant(
        participant_id=ParticipantId(name),
        # Without one it is known, and a blocking finding of every topology: whoever is turned away is seen by nobody.
        role=enum(Role, capabilities.role),
        kind=capabilities.kind,
        checkpoint_mode=enum(CheckpointMode, capabilities.checkpoint_mode),
        incarnation_id=IncarnationId(incarnation_id),
        address=address,
        quiesce_modes=tuple(enum(QuiesceMode, mode) for mode in capabilities.quiesce_modes),
        configured_workers=capabilities.configured_workers,
        state_schema=capabilities.state_schema,
        checkpoint_mode_reason=capabilities.checkpoint_mode_reason,
        depends_on=tuple(capabilities.depends_on),
        upstream_endpoints=tuple(capabilities.upstream_endpoints),
        config_digest=capabilities.config_digest,
        features=tuple(capabilities.features),
        shim_version=capabilities.shim_version,
        actor_id=capabilities.actor_id,
        process=None if process is None else shim_process(process),
    )


def shim_process(said: coordinator_service_pb2.ShimProcess) -> ShimProcess:
    """The process that has announced itself."""
    return ShimProcess(said.host[:255], said.pid, said.log_path[:1024], said.watched)


def hello(said: coordinator_service_pb2.Hello) -> Participant:
    """A participant as its shim announces it. Raises as `participant`."""
    process = said.process if said.HasField("process") else None
    return participant(said.capabilities, said.incarnation_id, said.address, process)


def capabilities(found: Participant) -> capabilities_pb2.Capabilities:
    """What a participant described itself as."""
    return capabilities_pb2.Capabilities(
        participant_id=found.participant_id,
        role=wire(found.role),
        kind=found.kind,
        checkpoint_mode=wire(found.checkpoint_mode),
        checkpoint_mode_reason=found.checkpoint_mode_reason,
        quiesce_modes=[wire(mode) for mode in found.quiesce_modes],
        configured_workers=found.configured_workers,
        state_schema=found.state_schema,
        depends_on=found.depends_on,
        upstream_endpoints=found.upstream_endpoints,
        config_digest=found.config_digest,
        features=found.features,
        shim_version=found.shim_version,
        actor_id=found.actor_id,
    )


def finding(found: Finding) -> coordinator_service_pb2.Finding:
    return coordinator_service_pb2.Finding(
        blocking=found.blocking, reason=wire(found.reason), participant_id=found.participant_id, message=found.message,
        next_step=found.next_step,
    )  # fmt: skip


def participant_info(found: Participant, relay: Relay | None = None) -> coordinator_service_pb2.ParticipantInfo:
    """A participant as topology and status show it, and the relay that it is behind."""
    info = coordinator_service_pb2.ParticipantInfo(
        capabilities=capabilities(found), incarnation_id=found.incarnation_id, address=found.address
    )
    if found.process is not None:
        info.process.CopyFrom(process_info(found.process))
    if relay is not None:
        info.relay.relay_id, info.relay.address = relay.relay_id, relay.address
        if relay.process is not None:
            info.relay.process.CopyFrom(process_info(relay.process))
    return info


def process_info(process: ShimProcess) -> coordinator_service_pb2.ShimProcess:
    return coordinator_service_pb2.ShimProcess(
        host=process.host, pid=process.pid, log_path=process.log_path, watched=process.watched
    )


def process_end(report: coordinator_service_pb2.ReportEndRequest) -> str:
    """How a shim's process ended, as a sentence."""
    match report.WhichOneof("end"):
        case "signal":
            return f"It was ended by signal {report.signal}{_named(report.signal)}."
        case "exit_code":
            return f"It ended with exit code {report.exit_code}."
        case _:
            return "It has ended."


def _named(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


# ---- proofs and progress --------------------------------------------------------------------------------------------


def prepared(reply: participant_service_pb2.Prepared) -> proofs.Prepared:
    """The proof of prepare. A worker that acknowledged twice counts once."""
    acknowledged = {w.worker_id for w in reply.workers if w.acknowledged}
    return proofs.Prepared(
        incarnation_id=IncarnationId(reply.incarnation_id),
        generation=reply.admission_generation,
        workers=tuple(sorted(acknowledged)),
        workers_silent=tuple(sorted({w.worker_id for w in reply.workers} - acknowledged)),
        excluded=blocked(reply.excluded),
        excluded_count=reply.excluded_count,
        parked=reply.parked,
        held=reply.held,
        quiesce_s=seconds(reply.quiesce_time),
    )


def committed(reply: participant_service_pb2.Committed) -> proofs.Committed:
    """The proof of commit."""
    manifest = reply.manifest
    return proofs.Committed(
        operation_id=OperationId(manifest.operation_id),
        snapshot_id=SnapshotId(manifest.snapshot_id),
        participant_id=ParticipantId(manifest.capabilities.participant_id),
        incarnation_id=IncarnationId(manifest.incarnation_id),
        manifest_sha256=reply.manifest_sha256,
        size_bytes=sum(e.size_bytes for e in manifest.files) + sum(c.size_bytes for c in manifest.chunks),
        totals=totals(manifest.totals),
        sessions=manifest.sessions,
        recorded_calls=manifest.recorded_calls,
        ledger_file=manifest.ledger_file,
    )


def confirmed(reply: participant_service_pb2.ConfirmResponse) -> proofs.Confirmed:
    """The proof of confirm."""
    return proofs.Confirmed(
        incarnation_id=IncarnationId(reply.incarnation_id),
        generation=reply.admission_generation,
        lease_remaining_s=seconds(reply.lease_remaining),
    )


def restored(reply: participant_service_pb2.Restored) -> proofs.RestoredProof:
    """The proof of restore."""
    return proofs.RestoredProof(
        snapshot_id=SnapshotId(reply.snapshot_id),
        incarnation_id=IncarnationId(reply.incarnation_id),
        generation=reply.admission_generation,
        sessions=reply.sessions,
        totals=totals(reply.totals),
        diverged_count=reply.diverged_count,
    )


MAX_WARNINGS: Final = 20  # of one resume, each of so many characters
MAX_WARNING: Final = 1000


def opened(reply: participant_service_pb2.ResumeResponse | participant_service_pb2.AbortResponse) -> proofs.Opened:
    """The proof of resume and abort."""
    return proofs.Opened(
        released_parked=reply.released_parked,
        released_held=reply.released_held,
        closed_for_s=seconds(reply.closed_for) if reply.HasField("closed_for") else None,
        warnings=tuple(text[:MAX_WARNING] for text in reply.warnings[:MAX_WARNINGS])
        if isinstance(reply, participant_service_pb2.ResumeResponse)
        else (),
    )


def drain_progress(event: participant_service_pb2.DrainProgress) -> proofs.Progress:
    """How far a prepare is."""
    return proofs.Progress(
        in_flight=event.in_flight,
        parked=event.parked,
        held=event.held,
        waiting_for=blocked(event.waiting_for),
        waiting_for_count=event.waiting_for_count,
    )


def export_progress(event: participant_service_pb2.ExportProgress) -> proofs.Progress:
    """How far a commit or a load is."""
    return proofs.Progress(
        bytes_done=event.bytes_done,
        bytes_total=event.bytes_total,
        items_done=event.items_done,
        items_total=event.items_total,
    )


def blocked(rows: Iterable[capabilities_pb2.RolloutActivity]) -> tuple[Blocked, ...]:
    """At most 20 rollouts that are waited for."""
    listed = list(rows)[:20]
    return tuple(
        Blocked(
            r.rollout_id, r.attempt, r.turn, seconds(r.age), r.waiting_on,
            seconds(r.no_client_for) if r.HasField("no_client_for") else None,
        )
        for r in listed
    )  # fmt: skip


def activities(rows: Iterable[Blocked]) -> list[capabilities_pb2.RolloutActivity]:
    """The same, as progress shows it."""
    return [
        capabilities_pb2.RolloutActivity(
            rollout_id=r.rollout_id,
            attempt=r.attempt,
            turn=r.turn,
            activity=capabilities_pb2.ACTIVITY_RUNNING,
            age=duration(r.age_s),
            waiting_on=r.waiting_on,
            no_client_for=None if r.no_client_s is None else duration(r.no_client_s),
        )
        for r in rows
    ]


# ---- where rollouts go ----------------------------------------------------------------------------------------------


def placement(found: Placement) -> manifest_pb2.Placement:
    """Where some rollouts go."""
    return manifest_pb2.Placement(
        from_actor_id=found.from_actor,
        to_actor_id=found.to_actor,
        rollouts_from=found.first,
        rollouts_until=found.until,
    )


def restore_source(found: RestoreSource) -> participant_service_pb2.RestoreSource:
    """A part of a snapshot to load, or some rollouts of it."""
    return participant_service_pb2.RestoreSource(
        participant_id=found.participant_id,
        manifest_sha256=found.manifest_sha256,
        rollouts_from=found.first,
        rollouts_until=found.until,
    )


# ---- ledgers --------------------------------------------------------------------------------------------------------


def totals(message: manifest_pb2.LedgerTotals) -> dict[RolloutState, int]:
    """How many rollouts stand where; only those that there are."""
    counted = {
        RolloutState.COMPLETED: message.completed,
        RolloutState.PARKED: message.parked,
        RolloutState.PENDING: message.pending,
        RolloutState.EXCLUDED: message.excluded,
    }
    return {state: count for state, count in counted.items() if count}


def ledger_totals(counts: Mapping[RolloutState, int]) -> manifest_pb2.LedgerTotals:
    """The same, as a message."""
    return manifest_pb2.LedgerTotals(
        completed=counts.get(RolloutState.COMPLETED, 0),
        parked=counts.get(RolloutState.PARKED, 0),
        pending=counts.get(RolloutState.PENDING, 0),
        excluded=counts.get(RolloutState.EXCLUDED, 0),
    )


# ---- requests of the trainer ----------------------------------------------------------------------------------------


def options(message: coordinator_service_pb2.SaveOptions, grace_s: float, lease_s: float) -> Options:
    """The choices of a save; `grace_s` and `lease_s` are the settings for what is left open. Raises INVALID_ARGUMENT."""
    for name, kind, number in (
        ("quiesce_mode", QuiesceMode, message.quiesce_mode),
        ("straggler_policy", StragglerPolicy, message.straggler_policy),
    ):
        if number and not enum(cast("type[IntEnum]", kind), number):
            raise refuse(Reason.INVALID_ARGUMENT, f"options.{name} {int(number)} is not known here.")
    return Options(
        quiesce_mode=enum(QuiesceMode, message.quiesce_mode),
        straggler_policy=enum(StragglerPolicy, message.straggler_policy) or StragglerPolicy.EXCLUDE,
        straggler_grace_s=_within("straggler_grace", seconds(message.straggler_grace) or grace_s, 0, 86_400),
        lease_ttl_s=lease_ttl(message.lease_ttl, lease_s),
        expected_fingerprint=message.expected_fingerprint,
        without=_participant_ids(message.without),
    )


def _participant_ids(names: Iterable[str]) -> tuple[str, ...]:
    found = tuple(names)
    if len(found) > _MAX_NAMED:
        raise refuse(Reason.LIMIT_EXCEEDED, f"options.without has {len(found)} names; {_MAX_NAMED} are allowed.")
    for name in found:
        if not is_wire_id(name):
            raise refuse(Reason.MALFORMED_ID, f"{name[:60]!r} in options.without cannot name a participant.")
    return found


def lease_ttl(message: Duration, otherwise_s: float) -> float:
    """A lease of 1 s to 1 h; `otherwise_s` when none is given."""
    return _within("lease_ttl", seconds(message) or otherwise_s, 1, 3600)


def metadata(given: Mapping[str, str]) -> dict[str, str]:
    """The trainer's metadata. Raises LIMIT_EXCEEDED beyond 64 entries of 1 KiB."""
    if len(given) > _MAX_METADATA:
        raise refuse(Reason.LIMIT_EXCEEDED, f"metadata has {len(given)} entries; {_MAX_METADATA} are allowed.")
    for key, value in given.items():
        if len(key.encode()) + len(value.encode()) > _MAX_METADATA_BYTES:
            raise refuse(Reason.LIMIT_EXCEEDED, f"metadata {key[:50]!r} is larger than {_MAX_METADATA_BYTES} bytes.")
    return dict(given)


def _within(name: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise refuse(Reason.INVALID_ARGUMENT, f"{name} is {value:g} s; it must be {least:g} to {most:g} s.")
    return value
