"""What the trainer client answers with, as values, and how they are read from the contract's messages.

PURE but for those messages: no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import manifest_pb2

from coordinator.wire.places import Locator, Placement
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import RolloutState, UploadState, Weights, counted, in_engines

# Called with every event of an operation, in order, each one once. What it raises is logged and the operation goes on.
ProgressCallback = Callable[[pb.OperationEvent], None]


@dataclass(frozen=True, slots=True)
class Totals:
    """Rollouts by where they stood at the cut. Every rollout known at the cut is in exactly one of them."""

    completed: int = 0
    parked: int = 0
    pending: int = 0
    excluded: int = 0

    @property
    def kept_in_flight(self) -> int:
        """Unfinished rollouts that continue after a restore."""
        return self.parked + self.pending

    @property
    def all(self) -> int:
        """Rollouts known at the cut."""
        return self.completed + self.parked + self.pending + self.excluded


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout of a snapshot's ledger: what a trainer dispatches after a restore."""

    rollout_id: str
    attempt: int  # the dispatch that ran at the cut; a restore installs attempt + 1
    state: RolloutState
    reason: str = ""  # why it restarts from its input, when it does
    participant_id: str = ""  # the agent that runs it
    recorded_calls: int = 0
    waiting_on: str = ""
    input_sha256: str = ""
    actor_id: str = (
        ""  # after a restore: the Gym actor that holds it, where it is to be dispatched; empty when there are none
    )

    @property
    def completed(self) -> bool:
        """Its result is recorded: dispatching it again is answered from the record and runs nothing."""
        return self.state is RolloutState.COMPLETED

    @property
    def restarts(self) -> bool:
        """It starts again from its input, for `reason`."""
        return self.state is RolloutState.EXCLUDED


SILENT_UPLOAD_S: Final = (
    30.0  # a chunk has 8 MB: a link that takes longer for one, or a store that hangs, is worth a word
)


@dataclass(frozen=True, slots=True)
class UploadSummary:
    """The copy of a snapshot in the object store. `state`: pending, uploading, uploaded or failed.

    `problem`: why the last try failed, with what to do next. `next_try_s`: seconds until the next one; None when none failed.
    `unchanged_s`: while it is copied, seconds since the last file was there.
    """

    snapshot_id: str
    state: str
    attempts: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    problem: str = ""
    next_try_s: float | None = None
    unchanged_s: float = 0.0

    @property
    def line(self) -> str:
        """For people, such as "failed, the next try in 40 s: ..."."""
        if self.state == "uploading":
            far = f", {size_text(self.bytes_done)} of {size_text(self.bytes_total)}" if self.bytes_total else ""
            silent = f", no file in {self.unchanged_s:.0f} s" if self.unchanged_s >= SILENT_UPLOAD_S else ""
            return f"uploading{far}{silent}"
        if self.state != "failed":
            return self.state
        when = f", the next try in {self.next_try_s:.0f} s" if self.next_try_s is not None else ""
        return f"failed{when}: {self.problem}"


@dataclass(frozen=True, slots=True)
class SnapshotSummary:
    """A published snapshot as lists show it. `create_time_s`: seconds since the epoch, for people only.

    `pin_reason`: why it is never pruned; empty when it is not pinned. Known in lists only, as is `upload`: how far its copy in
    the object store is; None where the coordinator uploads nothing. `weights`: those of each engine at the cut, by its name.
    `engine_requests`: those that were in flight at each engine at the cut, of rollouts or of nobody; engines that had none are
    left out.
    """

    snapshot_id: str
    operation_id: str
    create_time_s: float
    size_bytes: int
    totals: Totals
    participant_ids: tuple[str, ...]
    topology_fingerprint: str
    metadata: Mapping[str, str]
    pin_reason: str = ""
    upload: UploadSummary | None = None
    weights: Mapping[str, Weights] = field(default_factory=dict[str, Weights])
    engine_requests: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def in_engines(self) -> int:
        """Requests that were in flight at engines at the cut."""
        return sum(self.engine_requests.values())


@dataclass(frozen=True, slots=True)
class SnapshotList:
    """`published` newest first; `invalid` maps directories that hold no valid snapshot to why. Those never restore."""

    published: tuple[SnapshotSummary, ...]
    invalid: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A published, durable snapshot.

    `pause_s`: first admission closed to last admission open, as measured at the gates. `unconfirmed`: participants that
    have not acknowledged the resume; they are told again and thaw by their lease. `elapsed_s`: of the whole operation.
    """

    snapshot: SnapshotSummary
    pause_s: float
    elapsed_s: float
    unconfirmed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def snapshot_id(self) -> str:
        return self.snapshot.snapshot_id

    @property
    def operation_id(self) -> str:
        return self.snapshot.operation_id

    @property
    def totals(self) -> Totals:
        return self.snapshot.totals

    @property
    def size_bytes(self) -> int:
        return self.snapshot.size_bytes

    @property
    def line(self) -> str:
        """One line for the training log.

        "To restart" are rollouts that a restore begins from their input: stragglers, state that cannot be saved, and
        dispatches that have failed. None of them is lost: the ledger names each with its reason.
        """
        text = (
            f"snapshot {self.snapshot_id}: paused {self.pause_s:.2f} s, {self.totals.kept_in_flight} in flight kept, "
            f"{in_engines(self.snapshot.in_engines)}{self.totals.excluded} to restart, {size_text(self.size_bytes)}"
        )
        if self.unconfirmed:
            text += f"; not heard from since: {', '.join(self.unconfirmed)}"
        return text

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class PreparedResult:
    """Everybody is paused. `parked` and `held` are requests as the participants last reported them.

    `lease_s`: the operation is aborted when the trainer calls nothing for so long; None when the coordinator does not say.
    """

    operation_id: str
    snapshot_id: str
    participant_ids: tuple[str, ...]
    parked: int
    held: int
    elapsed_s: float
    warnings: tuple[str, ...] = ()
    lease_s: float | None = None


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """Admission is open. `pause_s` is None when there was nothing to resume.

    `warnings`: what was lost between the restore and this, such as a worker process with the sessions it had loaded.
    """

    pause_s: float | None
    acknowledged: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortResult:
    """What an abort ended. `operation_id` is empty when no operation was active."""

    operation_id: str
    acknowledged: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """A snapshot that is loaded everywhere.

    `paused`: admission is still closed, and only a resume opens it. `totals`: rollouts as they continue now.
    `diverged`: at most 20 of the `diverged_count` rollouts that restart although the snapshot had them.
    `skipped`: for "latest", newer snapshots that did not verify, and why.
    `placements`: where the rollouts of each Gym actor are now; empty for a snapshot without actors.
    """

    operation_id: str
    snapshot: SnapshotSummary
    sessions: int
    totals: Totals
    diverged: tuple[Rollout, ...]
    diverged_count: int
    paused: bool
    elapsed_s: float
    pause_s: float | None = None
    warnings: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    placements: tuple[Placement, ...] = ()

    @property
    def snapshot_id(self) -> str:
        return self.snapshot.snapshot_id

    @property
    def weights_compared_by(self) -> str:
        """How engines have shown that they have the weights of the snapshot: "digest", or "version" where it holds no digest of
        each; then other weights of that version were not noticed. Empty where no engine took part."""
        weights = self.snapshot.weights.values()
        return "" if not weights else "digest" if all(its.digest_sha256 for its in weights) else "version"

    @property
    def line(self) -> str:
        """One line for the training log. The requests of engines, which the coordinator counts as sessions, are told apart."""
        sessions = max(0, self.sessions - self.snapshot.in_engines)
        text = (
            f"restored {self.snapshot_id}: {self.totals.kept_in_flight} in flight continue, "
            f"{in_engines(self.snapshot.in_engines, 'continue when they are asked again')}"
            f"{self.totals.completed} answered from record, {self.totals.excluded} restart, {counted(sessions, 'session')}"
        )
        moved = sum(p.from_actor != p.to_actor for p in self.placements)
        text += f", weights compared by {self.weights_compared_by}" if self.snapshot.in_engines else ""
        text += f", spread over {len({p.to_actor for p in self.placements})} actors" if moved else ""
        return text + (", still paused" if self.paused else "")

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class RestoreResult(RestoreSummary):
    """`RestoreSummary` of the sync client."""

    read_ledger: Callable[[], Iterator[Rollout]] = field(default=lambda: iter(()), repr=False, compare=False)

    def rollouts(self) -> Iterator[Rollout]:
        """The ledger of the snapshot, read from the coordinator while iterating, sorted by rollout_id."""
        where = Locator(self.placements)
        return (_located(rollout, where) for rollout in self.read_ledger())


async def _no_rollouts() -> AsyncIterator[Rollout]:
    nothing: tuple[Rollout, ...] = ()
    for rollout in nothing:
        yield rollout


@dataclass(frozen=True, slots=True)
class AsyncRestoreResult(RestoreSummary):
    """`RestoreSummary` of the async client."""

    read_ledger: Callable[[], AsyncIterator[Rollout]] = field(default=_no_rollouts, repr=False, compare=False)

    def rollouts(self) -> AsyncIterator[Rollout]:
        """The ledger of the snapshot, read from the coordinator while iterating, sorted by rollout_id."""
        where = Locator(self.placements)
        return (_located(rollout, where) async for rollout in self.read_ledger())


def _located(rollout: Rollout, where: Locator) -> Rollout:
    return replace(rollout, actor_id=where.now_at(rollout.rollout_id, rollout.participant_id))


def seconds(duration: object) -> float:
    """Seconds of a protobuf Duration."""
    return duration.ToMicroseconds() / 1e6  # type: ignore[attr-defined, no-any-return]


_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(size_bytes: int) -> str:
    """A size for people, in decimal units: "41 MB", "1.4 GB"."""
    for factor, unit in _UNITS:
        if size_bytes >= factor:
            value = size_bytes / factor
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{size_bytes} B"


def totals_from(message: manifest_pb2.LedgerTotals) -> Totals:
    return Totals(message.completed, message.parked, message.pending, message.excluded)


def rollout_from(entry: manifest_pb2.LedgerEntry) -> Rollout:
    """Lenient, as all live replies are: a state that this version does not know is UNSPECIFIED."""
    try:
        state = RolloutState(entry.state)
    except ValueError:
        state = RolloutState.UNSPECIFIED
    return Rollout(
        entry.rollout_id, entry.attempt, state, entry.reason, entry.participant_id, entry.recorded_calls,
        entry.waiting_on, entry.input_sha256,
    )  # fmt: skip


def summary_from(info: pb.SnapshotInfo) -> SnapshotSummary:
    return SnapshotSummary(
        info.snapshot_id,
        info.operation_id,
        info.create_time.ToMicroseconds() / 1e6,
        info.size_bytes,
        totals_from(info.totals),
        tuple(info.participant_ids),
        info.topology_fingerprint,
        dict(info.metadata),
        info.pin_reason,
        upload_from(info.upload) if info.HasField("upload") else None,
        {name: Weights(its.version, its.digest_sha256) for name, its in sorted(info.weights.items())},
        dict(sorted(info.engine_requests.items())),
    )


def upload_from(told: pb.SnapshotUpload) -> UploadSummary:
    return UploadSummary(
        told.snapshot_id,
        _upload_state(told.state),
        told.attempts,
        told.bytes_done,
        told.bytes_total,
        str(problem_from_detail(told.problem)) if told.HasField("problem") else "",
        seconds(told.next_try) if told.HasField("next_try") else None,
        seconds(told.unchanged_for),
    )


def _upload_state(number: int) -> str:
    known = number in set(UploadState) and number != UploadState.UNSPECIFIED
    return UploadState(number).name.lower() if known else "unknown"
