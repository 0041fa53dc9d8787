"""The journal's records of one operation: how they are written, and what they say when they are read again.

PURE. The one rule: presumed abort. An operation counts as published only if the snapshot's manifest is there; whatever
else the last record says, a save without it is aborted, and everybody that the first record names may have heard of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, cast

from coordinator.protocol.events import Finish, Record, RecordKind
from coordinator.protocol.operation import Operation, Options, Outcome, RestorePart, RestoreSource
from coordinator.protocol.topology import Participant, ShimProcess, Topology
from coordinator.wire.errors import Blocked, Problem, Reason
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.places import Placement
from coordinator.wire.terms import CheckpointMode, OperationKind, Phase, QuiesceMode, Role, StragglerPolicy

MAX_SECONDARY = 20


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the records of one operation say."""

    operation: Operation
    topology: Topology
    last: RecordKind
    primary: Problem | None
    finish: Finish | None


def begun(operation: Operation, topology: Topology) -> Record:
    """Everything that is needed to open everybody again without anything else."""
    who = {
        "participants": [participant_to_json(each) for each in topology.participants],
        "policy_endpoints": list(topology.policy_endpoints),
        "missing": [_plain(asdict(each)) for each in topology.missing],
    }
    return Record(RecordKind.BEGUN, {"operation": _operation_to_json(operation), "topology": who})


def publishing(operation: Operation) -> Record:
    """From now on only the disk knows whether the snapshot exists."""
    return Record(RecordKind.PUBLISHING, {"operation_id": operation.operation_id, "snapshot_id": operation.snapshot_id})


def reached(kind: RecordKind, operation: Operation) -> Record:
    """A point that recovery can do without, only less exactly: never required."""
    return Record(kind, {"operation_id": operation.operation_id}, required=False)


def resuming(operation: Operation) -> Record:
    """The one commit point of a restore. Required: a coordinator that did not know of it would let the trainer abort, and
    servers that have resumed would go on with what the others forget."""
    return Record(RecordKind.RESUMING, {"operation_id": operation.operation_id})


def failing(kind: RecordKind, operation: Operation, primary: Problem) -> Record:
    """The decision to give up. Not required: without it recovery decides the same, and opening needs no disk."""
    return Record(kind, {"operation_id": operation.operation_id, "primary": problem_to_json(primary)}, required=False)


def ended(operation: Operation, finish: Finish) -> Record:
    """The outcome, for whoever asks again."""
    data: dict[str, object] = {
        "operation_id": operation.operation_id,
        "outcome": finish.outcome.name,
        "published": finish.published,
        "primary": problem_to_json(finish.primary) if finish.primary else None,
        "secondary": [problem_to_json(problem) for problem in finish.secondary],
        "unconfirmed": list(finish.unconfirmed),
    }
    return Record(RecordKind.ENDED, data, required=False)


def read_ended(record: Record) -> Finish:
    """What `ended` wrote. Raises KeyError or ValueError when it is none."""
    data = cast("Mapping[str, Any]", record.data)
    return Finish(
        outcome=Outcome[data["outcome"]],
        primary=problem_from_json(data["primary"]) if data["primary"] else None,
        secondary=tuple(problem_from_json(each) for each in data["secondary"]),
        unconfirmed=tuple(ParticipantId(each) for each in data["unconfirmed"]),
        published=bool(data["published"]),
    )


def read(records: Sequence[Record]) -> Recovered:
    """What the records of one operation say, in the order in which they were written.

    Raises ValueError when the first is not BEGUN: without it nobody knows who may be paused.
    """
    if not records or records[0].kind != RecordKind.BEGUN:
        raise ValueError("the records of an operation begin with BEGUN")
    first = cast("Mapping[str, Any]", records[0].data)
    primary: Problem | None = None
    finish: Finish | None = None
    for record in records[1:]:
        if record.kind == RecordKind.ENDED:
            finish = read_ended(record)
        elif record.data.get("primary"):
            primary = problem_from_json(cast("Mapping[str, Any]", record.data["primary"]))
    return Recovered(
        operation=_operation_from_json(first["operation"]),
        topology=_topology_from_json(first["topology"]),
        last=records[-1].kind,
        primary=primary,
        finish=finish,
    )


def problem_to_json(problem: Problem) -> dict[str, object]:
    """A Problem as plain JSON."""
    return {
        "reason": problem.reason.name,
        "message": problem.message,
        "next_step": problem.next_step,
        "phase": problem.phase.name,
        "participant_id": problem.participant_id,
        "operation_id": problem.operation_id,
        "rollouts": [asdict(rollout) for rollout in problem.rollouts],
        "rollout_count": problem.rollout_count,
        "waited_s": problem.waited_s,
        "metadata": dict(problem.metadata),
    }


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """What `problem_to_json` wrote. A reason or phase of a newer version is kept as text, not lost."""
    reason, extra = (Reason[data["reason"]], {}) if data["reason"] in Reason.__members__ else (
        Reason.INTERNAL, {"unknown_reason": str(data["reason"])}
    )  # fmt: skip
    return Problem(
        reason=reason,
        message=data["message"],
        next_step=data["next_step"],
        phase=Phase[data["phase"]] if data["phase"] in Phase.__members__ else Phase.UNSPECIFIED,
        participant_id=data["participant_id"],
        operation_id=data["operation_id"],
        rollouts=tuple(Blocked(**each) for each in data["rollouts"]),
        rollout_count=data["rollout_count"],
        waited_s=data["waited_s"],
        metadata={**data["metadata"], **extra},
    )


def in_operation(problem: Problem, operation: Operation, phase: Phase, participant_id: str = "") -> Problem:
    """The same problem, with what its reporter left open filled in."""
    return replace(
        problem,
        phase=problem.phase or phase,
        participant_id=problem.participant_id or participant_id,
        operation_id=problem.operation_id or operation.operation_id,
    )


def _operation_to_json(operation: Operation) -> dict[str, object]:
    return {
        "kind": operation.kind.name,
        "operation_id": operation.operation_id,
        "snapshot_id": operation.snapshot_id,
        "coordinator_epoch": operation.coordinator_epoch,
        "options": _plain(asdict(operation.options)),
        "trainer_driven": operation.trainer_driven,
        "resume_when_done": operation.resume_when_done,
        "parts": {name: _part_to_json(part) for name, part in operation.parts.items()},
    } | _of_actors(operation)


def _part_to_json(part: RestorePart) -> dict[str, object]:
    data = asdict(part)
    return data if part.sources else {name: value for name, value in data.items() if name != "sources"}


def _of_actors(operation: Operation) -> dict[str, object]:
    out: dict[str, object] = {"elastic": True} if operation.elastic else {}
    if operation.placements:
        out["placements"] = [asdict(placement) for placement in operation.placements]
    return out


def _operation_from_json(data: Mapping[str, Any]) -> Operation:
    options = dict(data["options"])
    options["quiesce_mode"] = QuiesceMode[options["quiesce_mode"]]
    options["straggler_policy"] = StragglerPolicy[options["straggler_policy"]]
    options["without"] = tuple(options.get("without", ()))
    return Operation(
        kind=OperationKind[data["kind"]],
        operation_id=OperationId(data["operation_id"]),
        snapshot_id=SnapshotId(data["snapshot_id"]),
        coordinator_epoch=data["coordinator_epoch"],
        options=Options(**options),
        trainer_driven=data["trainer_driven"],
        resume_when_done=data["resume_when_done"],
        parts={ParticipantId(name): _part_from_json(part) for name, part in data["parts"].items()},
        elastic=data.get("elastic", False),
        placements=tuple(Placement(**placement) for placement in data.get("placements", ())),
    )


def _part_from_json(data: Mapping[str, Any]) -> RestorePart:
    fields = dict(data)
    fields["sources"] = tuple(RestoreSource(**each) for each in data.get("sources", ()))
    return RestorePart(**fields)


def _topology_from_json(data: Mapping[str, Any]) -> Topology:
    return Topology(
        tuple(participant_from_json(each) for each in data["participants"]), tuple(data["policy_endpoints"])
    )


def participant_to_json(participant: Participant) -> dict[str, Any]:
    """A participant as plain JSON."""
    return dict(_participant_to_json(participant))


@lru_cache(maxsize=10_000)  # everybody is in the first record of each operation, and mostly as in the last one
def _participant_to_json(participant: Participant) -> Mapping[str, Any]:
    return cast("dict[str, Any]", _plain(asdict(participant)))


def participant_from_json(data: Mapping[str, Any]) -> Participant:
    """What `participant_to_json` wrote. Raises KeyError, ValueError or TypeError when it is none."""
    fields = dict(data)
    fields["role"] = Role[fields["role"]]
    fields["checkpoint_mode"] = CheckpointMode[fields["checkpoint_mode"]]
    fields["quiesce_modes"] = tuple(QuiesceMode[mode] for mode in fields["quiesce_modes"])
    fields["participant_id"] = ParticipantId(fields["participant_id"])
    fields["incarnation_id"] = IncarnationId(fields["incarnation_id"])
    fields["process"] = ShimProcess(**fields["process"]) if fields.get("process") else None
    for name in ("depends_on", "upstream_endpoints", "features"):
        fields[name] = tuple(fields[name])
    return Participant(**fields)


def _plain(value: Any) -> Any:
    """Enums by name: numbers in a log are for nobody."""
    if isinstance(value, (Role, CheckpointMode, QuiesceMode, StragglerPolicy)):
        return value.name
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value
