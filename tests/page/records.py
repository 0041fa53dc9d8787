"""Operations as the history would have them, made by hand: what is drawn must follow from them alone."""

from __future__ import annotations

from typing import Any

from google.protobuf.duration_pb2 import Duration
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import errors_pb2, manifest_pb2

from coordinator.history_record import Record, Told
from coordinator.wire.terms import Phase

WHO = (
    {"participant_id": "model", "role": "policy_model", "participant_kind": "gym.model", "state_survives_by": "stateless",
     "workers": 1, "depends_on": []},
    {"participant_id": "agent", "role": "agent", "participant_kind": "gym.agent", "state_survives_by": "export_restore",
     "workers": 2, "depends_on": ["model", "box"]},
    {"participant_id": "box", "role": "resources", "participant_kind": "gym.resources",
     "state_survives_by": "export_restore", "workers": 1, "depends_on": []},
)  # fmt: skip


def lasting(seconds: float) -> Duration:
    made = Duration()
    made.FromMicroseconds(round(seconds * 1e6))
    return made


def told(at_s: float, **event: Any) -> Told:
    return Told(at_s, pb.OperationEvent(operation_id="op-1", elapsed=lasting(at_s), **event))


def started(at_s: float, phase: Phase, *names: str, budget_s: float | None = None) -> Told:
    budget = lasting(budget_s) if budget_s is not None else None
    return told(at_s, phase_started=pb.PhaseStarted(phase=int(phase), participant_ids=names, budget=budget))


def finished(at_s: float, phase: Phase) -> Told:
    return told(at_s, phase_finished=pb.PhaseFinished(phase=int(phase), duration=lasting(0.1)))


def called(at_s: float, phase: Phase, name: str, *others: str) -> Told:
    message = pb.ParticipantCalled(phase=int(phase), participant_id=name, also_called=others)
    return told(at_s, participant_called=message)


def moved(at_s: float, phase: Phase, name: str, **counts: Any) -> Told:
    step = pb.ParticipantProgress(phase=int(phase), participant_id=name, **counts)
    return told(at_s, participant_progress=step)


def done(at_s: float, phase: Phase, name: str, *others: str) -> Told:
    return moved(at_s, phase, name, done=True, also_done=others)


def warned(at_s: float, text: str, name: str = "") -> Told:
    return told(at_s, warning=pb.Warning(message=text, participant_id=name))


def failed(at_s: float, reason: errors_pb2.Reason.ValueType, message: str, name: str = "") -> Told:
    detail = errors_pb2.ErrorDetail(
        reason=reason, message=message, next_step="Mend it.", participant_id=name, phase=int(Phase.PREPARE),
        rollouts=[errors_pb2.BlockedRollout(rollout_id="r-1", turn=3, waiting_on="judge")], rollout_count=9,
        waited=lasting(2.5),
    )  # fmt: skip
    return told(
        at_s, failed=pb.Failed(primary=detail, secondary=[errors_pb2.ErrorDetail(reason=reason, message="also")])
    )


def record(*events: Told, outcome: str = "succeeded", elapsed_s: float = 1.0, **fields: Any) -> Record:
    values: dict[str, Any] = {
        "operation_id": "op-1", "operation": "save", "snapshot_id": "step-1", "began_s": 1.7e9, "participants": WHO,
        "job_id": "default", "epoch": 3, "mode": "hold", "stragglers": "exclude", "lease_s": 30.0,
    }  # fmt: skip
    return Record(**values | fields, events=events, outcome=outcome, elapsed_s=elapsed_s)


def a_save() -> Record:
    """A whole save: the model drains for 0.4 s, the box exports for 0.2 s."""
    info = pb.SnapshotInfo(
        snapshot_id="step-1", operation_id="op-1", size_bytes=41_000_000,
        totals=manifest_pb2.LedgerTotals(completed=10, parked=30, pending=22, excluded=2), metadata={"step": "1"},
    )  # fmt: skip
    return record(
        started(0.0, Phase.DISCOVER), finished(0.01, Phase.DISCOVER),
        started(0.02, Phase.PREPARE, "model", "agent", "box", budget_s=60),
        called(0.02, Phase.PREPARE, "model"), moved(0.05, Phase.PREPARE, "model", in_flight=8, parked=2),
        moved(0.2, Phase.PREPARE, "model", in_flight=3, parked=4), done(0.42, Phase.PREPARE, "model"),
        called(0.42, Phase.PREPARE, "agent"), done(0.44, Phase.PREPARE, "agent"),
        called(0.44, Phase.PREPARE, "box"), done(0.46, Phase.PREPARE, "box"), finished(0.46, Phase.PREPARE),
        warned(0.46, "r-7 is left out", "box"),
        started(0.46, Phase.COMMIT, "agent", "box"), called(0.46, Phase.COMMIT, "agent"), done(0.5, Phase.COMMIT, "agent"),
        called(0.5, Phase.COMMIT, "box"), moved(0.55, Phase.COMMIT, "box", bytes_done=10, bytes_total=40),
        moved(0.65, Phase.COMMIT, "box", bytes_done=30, bytes_total=40), done(0.7, Phase.COMMIT, "box"),
        finished(0.7, Phase.COMMIT), started(0.7, Phase.PUBLISH), finished(0.75, Phase.PUBLISH),
        started(0.75, Phase.RESUME, "box", "agent", "model"), finished(0.8, Phase.RESUME),
        told(0.8, resumed=pb.Resumed(pause=lasting(0.78))),
        told(0.81, saved=pb.Saved(snapshot=info, pause=lasting(0.78))),
    )  # fmt: skip
