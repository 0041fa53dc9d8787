"""How operations have ended, as values that outlive the process: in the journal, and for whoever asks again.

The rule: what is answered to a repeat after a restart is what was answered before. The events that tell results are kept
as protobuf JSON, read leniently: a newer version may have written them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp
from safepoint.v1 import coordinator_service_pb2

from coordinator import convert
from coordinator.driver import Drive
from coordinator.protocol.operation import Outcome
from coordinator.reporting import failure
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.slow_stores import ASKED
from coordinator.wire.terms import OperationKind, Phase, in_engines

LEASES: Final = 1.5  # after so many leases even a server that was stopped has found out that it is over
RESULTS: Final = ("saved", "restored", "resumed", "failed")


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that has ended."""

    operation_id: OperationId
    snapshot_id: SnapshotId
    kind: OperationKind
    outcome: Outcome
    digest: str
    phase: Phase
    elapsed_s: float
    unconfirmed: tuple[str, ...]
    results: dict[str, coordinator_service_pb2.OperationEvent] = field(
        default_factory=dict[str, coordinator_service_pb2.OperationEvent]
    )
    history: tuple[coordinator_service_pb2.OperationEvent, ...] = ()  # in memory only
    began_ms: int = 0  # milliseconds since 1970, for people; 0: not known
    open_by: float | None = None  # of this coordinator's clock: leases have freed everybody then; None: not known

    @property
    def failed(self) -> coordinator_service_pb2.Failed | None:
        """Why it ended without success."""
        event = self.results.get("failed")
        return event.failed if event is not None and self.outcome is not Outcome.SUCCEEDED else None

    def status(self) -> coordinator_service_pb2.OperationStatus:
        """As GetStatus and Explain show it."""
        return coordinator_service_pb2.OperationStatus(
            operation_id=self.operation_id,
            snapshot_id=self.snapshot_id,
            kind=convert.wire(self.kind),
            outcome=convert.wire(self.outcome),
            phase=convert.wire(self.phase),
            elapsed=convert.duration(self.elapsed_s),
            failure=self.failed,
            unconfirmed=self.unconfirmed,
            begin_time=began(self.began_ms),
        )

    def summary(self) -> coordinator_service_pb2.OperationSummary:
        """As ListOperations shows it."""
        results = self.results
        pause = next((getattr(results[n], n).pause for n in ("resumed", "saved") if n in results), None)
        snapshot = next((getattr(results[n], n).snapshot for n in ("saved", "restored") if n in results), None)
        return coordinator_service_pb2.OperationSummary(operation=self.status(), snapshot=snapshot, pause=pause)

    def to_json(self) -> dict[str, Any]:
        """For the journal."""
        return {
            "snapshot_id": self.snapshot_id,
            "kind": self.kind.name,
            "outcome": self.outcome.name,
            "digest": self.digest,
            "phase": self.phase.name,
            "elapsed_s": self.elapsed_s,
            "unconfirmed": list(self.unconfirmed),
            "began_ms": self.began_ms,
            "results": {
                name: json_format.MessageToDict(event, preserving_proto_field_name=True)
                for name, event in self.results.items()
            },
        }


def ended(drive: Drive) -> Ended:
    """What has become of an operation whose drive is done."""
    events = {name: getattr(drive.answers, name) for name in RESULTS}
    return Ended(
        operation_id=drive.operation.operation_id,
        snapshot_id=drive.operation.snapshot_id,
        kind=drive.operation.kind,
        outcome=drive.outcome,
        digest=drive.identity.digest,
        phase=drive.transaction.phase,
        elapsed_s=drive.elapsed_s,
        unconfirmed=tuple(drive.unconfirmed),
        results={name: event for name, event in events.items() if event is not None},
        history=tuple(drive.reporter.history),
        began_ms=drive.began_ms,
        open_by=drive.began_at + drive.elapsed_s + LEASES * drive.operation.options.lease_ttl_s,
    )


def from_json(operation_id: OperationId, data: Mapping[str, Any]) -> Ended:
    """What `to_json` wrote. Raises KeyError, ValueError or json_format.ParseError for what it cannot have written."""
    return Ended(
        operation_id=operation_id,
        snapshot_id=SnapshotId(data["snapshot_id"]),
        kind=OperationKind[data["kind"]],
        outcome=Outcome[data["outcome"]],
        digest=data["digest"],
        phase=Phase[data["phase"]],
        elapsed_s=data["elapsed_s"],
        unconfirmed=tuple(data["unconfirmed"]),
        results={
            name: json_format.ParseDict(event, coordinator_service_pb2.OperationEvent(), ignore_unknown_fields=True)
            for name, event in cast("dict[str, Any]", data["results"]).items()
        },
        began_ms=int(data.get("began_ms", 0)),
    )


def running_status(drive: Drive, now: float, root: object) -> coordinator_service_pb2.OperationStatus:
    """As GetStatus shows an operation that has not ended. `root`: where snapshots are."""
    transaction, operation = drive.transaction, drive.operation
    status = coordinator_service_pb2.OperationStatus(
        operation_id=operation.operation_id,
        snapshot_id=operation.snapshot_id,
        kind=convert.wire(operation.kind),
        outcome=convert.wire(drive.outcome),
        phase=convert.wire(transaction.phase),
        elapsed=convert.duration(drive.elapsed_s),
        waiting_for=" ".join(filter(None, (drive.why_waiting(now), ASKED.slow(str(root))))),
        pending_participants=drive.pending,
        unconfirmed=drive.unconfirmed,
        begin_time=began(drive.began_ms),
    )
    if not drive.started:
        status.phase_elapsed.CopyFrom(convert.duration(drive.elapsed_s))
    elif (time := transaction.phase_time(now)) is not None:
        status.phase_elapsed.CopyFrom(convert.duration(time[0]))
        if time[1] is not None:
            status.phase_budget.CopyFrom(convert.duration(time[1]))
    if transaction.primary is not None:
        status.failure.CopyFrom(failure(transaction.primary, transaction.secondary))
    return status


def began(began_ms: int) -> Timestamp | None:
    """When an operation began, as a message; None when it is not known."""
    if not began_ms:
        return None
    at = Timestamp()
    at.FromMilliseconds(began_ms)
    return at


def fields(found: Ended) -> dict[str, Any]:
    """An operation in numbers and names, for a structured log. Seconds and bytes as the names say."""
    summary = found.summary()
    out: dict[str, Any] = {
        "operation_id": found.operation_id, "operation": found.kind.name.lower(), "snapshot_id": found.snapshot_id,
        "outcome": found.outcome.name.lower(), "elapsed_s": round(found.elapsed_s, 3),
    }  # fmt: skip
    if found.failed is not None:
        primary = problem_from_detail(found.failed.primary)
        out |= {"reason": primary.reason.name, "phase": primary.phase.name.lower(), "blamed": primary.participant_id}
    if summary.HasField("pause"):
        out["pause_s"] = round(convert.seconds(summary.pause), 3)
    if summary.HasField("snapshot"):
        totals = summary.snapshot.totals
        out |= {
            "size_bytes": summary.snapshot.size_bytes, "completed": totals.completed,
            "in_flight": totals.parked + totals.pending, "to_restart": totals.excluded,
            "engine_requests": sum(summary.snapshot.engine_requests.values()),
        }  # fmt: skip
    return out


def line(found: Ended) -> str:
    """One line for a log: what an operation came to, and why not further."""
    said = fields(found)
    text = f"{said['operation']} {found.operation_id}: {said['outcome']}"
    if "reason" in said:
        who = f" at {said['blamed']}" if said["blamed"] else ""
        return f"{text} {said['reason']}{who}"
    if "size_bytes" in said:
        text += (
            f": snapshot {found.snapshot_id}, {said['in_flight']} in flight kept, "
            f"{in_engines(said['engine_requests'])}{said['completed']} completed, {said['to_restart']} to restart, {said['size_bytes']} bytes"
        )
    return text + (f", paused {said['pause_s']:.2f} s" if "pause_s" in said else "")
