"""What the trainer client answers with, and the folding of an operation's events into it.

PURE but for the contract's messages: no clock, no sockets. The rule: an operation is done only when its stream has
ended well *and* brought the event that says so. A stream that just stops is `Misanswered`, never a success.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from safepoint.v1 import capabilities_pb2, manifest_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.client_heard import Heard
from coordinator.wire.errors import Blocked, Misanswered, Problem, Reason, SafepointError
from coordinator.wire.places import Locator, Placement, actor_of
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.terms import Phase, RolloutState, UploadState

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
    the object store is; None where the coordinator uploads nothing.
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
            f"{self.totals.excluded} to restart, {size_text(self.size_bytes)}"
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
    def line(self) -> str:
        """One line for the training log."""
        text = (
            f"restored {self.snapshot_id}: {self.totals.kept_in_flight} in flight continue, "
            f"{self.totals.completed} answered from record, {self.totals.excluded} restart, {self.sessions} sessions"
        )
        moved = sum(p.from_actor != p.to_actor for p in self.placements)
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


class Outcome:
    """Folds the events of one operation, over as many repeats of the call as it took, into its result."""

    def __init__(self, operation_id: str, snapshot_id: str = "") -> None:
        self.operation_id = operation_id
        self.snapshot_id = snapshot_id
        self.elapsed_s = 0.0
        self.saved: pb.Saved | None = None
        self.restored: pb.RestoreDone | None = None
        self.resumed: pb.Resumed | None = None
        self.failed: pb.Failed | None = None
        self.warnings: list[str] = []
        self._waiting: dict[str, tuple[int, int]] = {}
        self._participants: dict[str, None] = {}
        self._lease_s: float | None = None
        self._heard = Heard()
        self._last_sequence = 0

    def take(self, event: pb.OperationEvent) -> bool:
        """Fold `event`; whether it is news. A repeated call replays events that were seen already."""
        kind = event.WhichOneof("event")
        # Results are folded even when their number is old: a restarted coordinator counts from the start again.
        if kind == "saved":
            self.saved = event.saved
        elif kind == "restored":
            self.restored = event.restored
        elif kind == "resumed":
            self.resumed = event.resumed
        elif kind == "failed":
            self.failed = event.failed
        if event.sequence and event.sequence <= self._last_sequence:
            return False
        self._last_sequence = event.sequence
        self.elapsed_s = seconds(event.elapsed)
        self._heard.take(event)
        if kind == "warning":
            who = f"{event.warning.participant_id}: " if event.warning.participant_id else ""
            self.warnings.append(who + event.warning.message)
        elif kind == "phase_started":
            self._participants.update(dict.fromkeys(event.phase_started.participant_ids))
            self._lease_s = seconds(event.phase_started.lease_ttl) or self._lease_s
        elif kind == "participant_progress":
            step = event.participant_progress
            if step.parked or step.held or not step.done:  # the news that somebody is done carries no counts
                self._waiting[step.participant_id] = (step.parked, step.held)
        return True

    def also_failed(self, error: SafepointError) -> SafepointError:
        """`error` with the secondary causes of the operation as notes, so that a traceback shows all of them.

        Where no answer came, with how far the operation had come.
        """
        error = self._heard.added_to(error, self.elapsed_s)
        for detail in self.failed.secondary if self.failed else ():
            error.add_note(f"Also: {problem_from_detail(detail)}")
        return error

    def save_result(self) -> SaveResult:
        """Raises Misanswered when no Saved has come."""
        if self.saved is None:
            raise self._incomplete("Saved")
        pause = seconds(self.resumed.pause) if self.resumed else seconds(self.saved.pause)
        unconfirmed = self.resumed.unconfirmed if self.resumed else self.saved.unconfirmed
        return SaveResult(
            summary_from(self.saved.snapshot), pause, self.elapsed_s, tuple(unconfirmed), tuple(self.warnings)
        )

    def prepared_result(self) -> PreparedResult:
        return PreparedResult(
            self.operation_id,
            self.snapshot_id,
            tuple(self._participants),
            sum(parked for parked, _ in self._waiting.values()),
            sum(held for _, held in self._waiting.values()),
            self.elapsed_s,
            tuple(self.warnings),
            self._lease_s,
        )

    def resume_result(self) -> ResumeResult:
        if self.resumed is None or not self.resumed.HasField("pause"):  # nobody was paused by it
            return ResumeResult(None)
        return ResumeResult(
            seconds(self.resumed.pause),
            tuple(self.resumed.acknowledged),
            tuple(self.resumed.unconfirmed),
            tuple(self.warnings),
        )

    def restore_summary(self, resume: bool, skipped: Mapping[str, str]) -> RestoreSummary:
        """Raises Misanswered when no RestoreDone has come."""
        if self.restored is None:
            raise self._incomplete("RestoreDone")
        done = self.restored
        now = {p.to_actor_id for p in done.placements}
        return RestoreSummary(
            operation_id=self.operation_id,
            snapshot=summary_from(done.snapshot),
            sessions=done.sessions,
            totals=totals_from(done.totals),
            # Whoever could not bring it back has it now, and says so under its present name.
            diverged=tuple(
                replace(rollout_from(entry), actor_id=actor_of(entry.participant_id, now)) for entry in done.diverged
            ),
            diverged_count=done.diverged_count,
            paused=not (resume and self.resumed is not None),
            elapsed_s=self.elapsed_s,
            pause_s=seconds(self.resumed.pause) if self.resumed else None,
            warnings=tuple(self.warnings),
            skipped=dict(skipped),
            placements=tuple(
                Placement(p.from_actor_id, p.to_actor_id, p.rollouts_from, p.rollouts_until) for p in done.placements
            ),
        )

    def _incomplete(self, wanted: str) -> Misanswered:
        return Misanswered(
            Problem(
                Reason.PROTOCOL_VIOLATION,
                f"The coordinator ended the call well, without the event {wanted}.",
                next_step=f"`safepoint status` says how operation {self.operation_id} stands; report this.",
                operation_id=self.operation_id,
            )
        )


def seconds(duration: object) -> float:
    """Seconds of a protobuf Duration."""
    return duration.ToMicroseconds() / 1e6  # type: ignore[attr-defined, no-any-return]


def no_client_s(rollout: capabilities_pb2.RolloutActivity) -> float | None:
    """Seconds since the last client that waited for it left; None while somebody waits."""
    return seconds(rollout.no_client_for) if rollout.HasField("no_client_for") else None


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


def _phase(number: int) -> str:
    try:
        return Phase(number).name.lower()
    except ValueError:
        return f"phase {number}"


def describe(event: pb.OperationEvent) -> str:
    """One line for people; empty for an event that tells them nothing: that a participant is called, or one not known here."""
    kind = event.WhichOneof("event")
    at = f"{seconds(event.elapsed):7.2f} s  "
    if kind == "phase_started":
        count = len(event.phase_started.participant_ids)
        return f"{at}{_phase(event.phase_started.phase)}" + (f": {count} participants" if count else "")
    if kind == "phase_finished":
        return f"{at}{_phase(event.phase_finished.phase)}: done in {seconds(event.phase_finished.duration):.2f} s"
    if kind == "participant_progress":
        return at + _progress_text(event.participant_progress)
    if kind == "warning":
        who = f"{event.warning.participant_id}: " if event.warning.participant_id else ""
        return f"{at}warning: {who}{event.warning.message}"
    if kind == "saved":
        return f"{at}saved {event.saved.snapshot.snapshot_id}"
    if kind == "restored":
        return f"{at}restored {event.restored.snapshot.snapshot_id}, {event.restored.sessions} sessions"
    if kind == "resumed":
        return f"{at}resumed after {seconds(event.resumed.pause):.2f} s of pause"
    if kind == "failed":
        return f"{at}failed: {problem_from_detail(event.failed.primary)}"
    return ""


def _progress_text(step: pb.ParticipantProgress) -> str:
    parts = ["done" if step.done else ""]
    if step.bytes_done:
        parts.append(size_text(step.bytes_done) + (f" of {size_text(step.bytes_total)}" if step.bytes_total else ""))
    if step.items_done and not step.bytes_done:
        parts.append(f"{step.items_done} items" + (f" of {step.items_total}" if step.items_total else ""))
    parts += [
        f"{n} {what}" for n, what in ((step.in_flight, "in flight"), (step.parked, "parked"), (step.held, "held")) if n
    ]
    if step.waiting_for:
        shown = ", ".join(
            str(Blocked(r.rollout_id, r.attempt, r.turn, seconds(r.age), r.waiting_on, no_client_s(r)))
            for r in step.waiting_for[:3]
        )
        more = max(step.waiting_for_count, len(step.waiting_for)) - min(3, len(step.waiting_for))
        parts.append(f"waiting for {shown}" + (f" and {more} more" if more > 0 else ""))
    also = f" and {len(step.also_done)} more" if step.also_done else ""
    return f"{_phase(step.phase)} {step.participant_id}{also}: {', '.join(p for p in parts if p) or 'working'}"
