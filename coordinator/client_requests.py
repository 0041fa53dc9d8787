"""What the trainer client sends: ids, options and limits, checked before anything leaves.

PURE. The rule: a request is built once per call and repeated unchanged, since the coordinator binds an operation_id to
the digest of its request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, Unanswered, refuse
from coordinator.wire.ids import is_rollout_id, is_wire_id, new_operation_id
from coordinator.wire.terms import QuiesceMode, StragglerPolicy

LATEST: Final = "latest"
MAX_METADATA_ENTRIES: Final = 64
MAX_METADATA_BYTES: Final = 1024
MAX_RETIRED_AT_ONCE: Final = 1024

_E = TypeVar("_E", bound=IntEnum)


def new_snapshot_id() -> str:
    """A name for a snapshot that was given none: sorts by time, for people; the random part makes it unique."""
    return time.strftime("auto-%Y%m%dT%H%M%SZ-", time.gmtime()) + secrets.token_hex(4)


def save_request(
    snapshot_id: str | None,
    operation_id: str | None,
    metadata: Mapping[str, str] | None,
    options: pb.SaveOptions,
) -> pb.SaveRequest:
    return pb.SaveRequest(
        operation_id=operation_id_or_new(operation_id, "save"),
        snapshot_id=checked_snapshot_id(snapshot_id) if snapshot_id is not None else new_snapshot_id(),
        options=options,
        metadata=checked_metadata(metadata or {}),
    )


def save_options(
    quiesce_mode: QuiesceMode | str = "hold",
    straggler_policy: StragglerPolicy | str = "exclude",
    straggler_grace_s: float | None = None,
    lease_s: float | None = None,
    expected_fingerprint: str = "",
    without: Iterable[str] = (),
) -> pb.SaveOptions:
    """Raises Refused: INVALID_ARGUMENT for a mode or policy that does not exist, or a negative time, MALFORMED_ID for a name."""
    gone = list(without)
    for name in gone:
        if not is_wire_id(name):
            raise refuse(Reason.MALFORMED_ID, f"{name!r} cannot name a participant.")
    options = pb.SaveOptions(
        quiesce_mode=cast(Any, int(chosen(QuiesceMode, quiesce_mode, "quiesce_mode"))),
        straggler_policy=cast(Any, int(chosen(StragglerPolicy, straggler_policy, "straggler_policy"))),
        expected_fingerprint=expected_fingerprint,
        without=gone,
    )
    if straggler_grace_s is not None:
        options.straggler_grace.CopyFrom(duration(straggler_grace_s, "straggler_grace"))
    if lease_s is not None:
        options.lease_ttl.CopyFrom(duration(lease_s, "lease"))
    return options


def restore_request(
    snapshot_id: str, operation_id: str | None, resume: bool, lease_s: float | None, elastic: bool = False
) -> pb.RestoreSnapshotRequest:
    request = pb.RestoreSnapshotRequest(
        operation_id=operation_id_or_new(operation_id, "restore"),
        snapshot_id=checked_snapshot_id(snapshot_id),
        resume=resume,
        elastic=elastic,
    )
    if lease_s is not None:
        request.lease_ttl.CopyFrom(duration(lease_s, "lease"))
    return request


def prune_request(
    keep_last: int, keep_every: int | None, keep_interval_s: float | None, dry_run: bool
) -> pb.PruneSnapshotsRequest:
    """None leaves it to the coordinator's settings. Raises Refused(INVALID_ARGUMENT) for what is negative."""
    if min(keep_last, keep_every or 0) < 0:
        raise refuse(Reason.INVALID_ARGUMENT, "keep_last and keep_every must not be negative.")
    request = pb.PruneSnapshotsRequest(keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    if keep_interval_s is not None:
        request.keep_interval.CopyFrom(duration(keep_interval_s, "keep_interval"))
    return request


def operation_id_or_new(operation_id: str | None, kind: str) -> str:
    if operation_id is None:
        return new_operation_id(kind)
    if not is_wire_id(operation_id):
        raise refuse(Reason.MALFORMED_ID, f"{operation_id!r} cannot name an operation.")
    return operation_id


def checked_snapshot_id(snapshot_id: str) -> str:
    """Raises Refused(MALFORMED_ID). `latest` is what a restore asks for and never a name."""
    if snapshot_id == LATEST:
        raise refuse(
            Reason.MALFORMED_ID,
            f"{LATEST!r} cannot name a snapshot: it means the newest one.",
            next_step="Give another name.",
        )
    if not is_wire_id(snapshot_id):
        raise refuse(Reason.MALFORMED_ID, f"{snapshot_id!r} cannot name a snapshot.")
    return snapshot_id


def checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Raises Refused: INVALID_ARGUMENT for what is no text, LIMIT_EXCEEDED beyond 64 entries of 1 KiB."""
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise refuse(
            Reason.LIMIT_EXCEEDED, f"{len(metadata)} metadata entries; at most {MAX_METADATA_ENTRIES} are kept."
        )
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise refuse(Reason.INVALID_ARGUMENT, f"Metadata {key!r} must be text, and its value too.")
        if len(key.encode()) + len(value.encode()) > MAX_METADATA_BYTES:
            raise refuse(
                Reason.LIMIT_EXCEEDED,
                f"Metadata {key[:40]!r} has more than {MAX_METADATA_BYTES} bytes.",
                next_step="Put a path or a digest there, not the thing itself.",
            )
    return dict(metadata)


def checked_rollout_ids(rollout_ids: list[str]) -> list[list[str]]:
    """The ids in parts that fit one call each. Raises Refused(MALFORMED_ID) for one that cannot name a rollout."""
    for rollout_id in rollout_ids:
        if not is_rollout_id(rollout_id):
            raise refuse(Reason.MALFORMED_ID, f"{rollout_id!r} cannot name a rollout.")
    return [rollout_ids[i : i + MAX_RETIRED_AT_ONCE] for i in range(0, len(rollout_ids), MAX_RETIRED_AT_ONCE)]


def chosen(kind: type[_E], value: _E | str, field: str) -> _E:
    """The member that `value` is or names, in any case. Raises Refused(INVALID_ARGUMENT) naming the choices."""
    if isinstance(value, kind):
        return value
    try:
        return kind[str(value).upper()]
    except KeyError:
        choices = ", ".join(member.name.lower() for member in kind if member)
        raise refuse(Reason.INVALID_ARGUMENT, f"{field} {value!r} does not exist. Choose one of: {choices}.") from None


def duration(value_s: float, field: str) -> Duration:
    """Raises Refused(INVALID_ARGUMENT) for what is negative or no number."""
    if not 0 <= value_s < 1e9:  # also false for nan
        raise refuse(Reason.INVALID_ARGUMENT, f"{field} must be a number of seconds from zero up, not {value_s!r}.")
    message = Duration()
    message.FromMicroseconds(round(value_s * 1e6))
    return message


def waits_for_resume(status: pb.GetCoordinatorStatusResponse) -> str:
    """The operation that has not ended; empty when there is none. Whether a resume is due the coordinator decides."""
    ended = (pb.OPERATION_OUTCOME_SUCCEEDED, pb.OPERATION_OUTCOME_ABORTED)
    return "" if status.operation.outcome in ended else status.operation.operation_id


# What is more than a leaving of a save that did not finish: somebody has to look at it.
SPOILT: Final = frozenset(
    {
        Reason.SNAPSHOT_CORRUPT,
        Reason.SNAPSHOT_TOO_NEW,
        Reason.SNAPSHOT_UNSAFE,
        Reason.SNAPSHOT_FOREIGN,
        Reason.LIMIT_EXCEEDED,
    }
)
# What makes "latest" pass over a snapshot: it can never be restored, whatever is done about the servers.
DAMAGED: Final = SPOILT | {Reason.SNAPSHOT_NOT_FOUND}


def may_be_spoilt(invalid: Mapping[str, str]) -> list[str]:
    """Names of directories without a valid manifest, to be asked for why: other names were never those of a snapshot."""
    return [name for name in invalid if is_wire_id(name) and name != LATEST]


def passed_over(invalid: Mapping[str, str], look: Callable[[str], object]) -> dict[str, str]:
    """Which of the directories in which a list has seen no snapshot hold a damaged one, and what is wrong with it. What a save
    has left that did not finish, or that runs, is none. `look` reads the manifest of one; raises what else that raises."""
    found: dict[str, str] = {}
    for name in may_be_spoilt(invalid):
        try:
            look(name)
        except SafepointError as error:
            if error.reason is Reason.SNAPSHOT_NOT_FOUND:
                continue
            if error.reason not in SPOILT:
                raise
        found[name] = invalid[name]
    return found


def no_snapshot(skipped: Mapping[str, str], text: str = "No snapshot is published.") -> Refused:
    """There is nothing that "latest" could mean. Only a root that never had a snapshot is a reason to start anew."""
    if skipped:
        name, why = next(iter(skipped.items()))
        return refuse(
            Reason.SNAPSHOT_CORRUPT,
            f"There are {len(skipped)} snapshots, and none of them verifies: {', '.join(list(skipped)[:5])}. {name}: {why}"[:900],
            next_step="Repair one, or move them all out of the root to start from scratch; nothing was changed.",
        )  # fmt: skip
    return refuse(Reason.SNAPSHOT_NOT_FOUND, text, next_step="Start from scratch, or look at `safepoint snapshots ls`.")


def not_told(causes: Mapping[str, str]) -> Unanswered:
    """A retire that did not reach everybody: participant id to why, empty where nobody said."""
    why = "; ".join(f"{name}: {cause}" for name, cause in sorted(causes.items()) if cause)
    return Unanswered(
        Problem(
            Reason.UNREACHABLE,
            f"Could not tell {', '.join(sorted(causes))} to forget the rollouts.{' ' + why if why else ''}"[:900],
            next_step="Retire the same rollouts again: it is idempotent.",
        )
    )
