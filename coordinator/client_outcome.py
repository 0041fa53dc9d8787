"""The folding of an operation's events into what the trainer client answers with.

PURE but for the contract's messages: no clock, no sockets. The rule: an operation is done only when its stream has
ended well *and* brought the event that says so. A stream that just stops is `Misanswered`, never a success.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.client_heard import Heard
from coordinator.client_results import (
    PreparedResult,
    RestoreSummary,
    ResumeResult,
    SaveResult,
    rollout_from,
    seconds,
    summary_from,
    totals_from,
)
from coordinator.wire.errors import Misanswered, Problem, Reason, SafepointError
from coordinator.wire.places import Placement, actor_of
from coordinator.wire.rpc import problem_from_detail


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

    def also_failed(self, error: SafepointError, method: str) -> SafepointError:
        """`error` with the secondary causes of the operation as notes, so that a traceback shows all of them.

        Where no answer came to `method`, with how far the operation had come.
        """
        error = self._heard.added_to(error, self.elapsed_s, method)
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
