"""Which of the trainer's calls is legal at which stage.

PURE. The one rule: an illegal call changes nothing and says what to call instead; a repeated one changes nothing either.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from coordinator.protocol.events import AbortRequested, CommitRequested, Request, ResumeRequested
from coordinator.protocol.operation import Operation, Outcome, Stage
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import Phase

# Stages in which a wave is being called, until the deadline.
CALLING = frozenset({Stage.PREPARING, Stage.COMMITTING, Stage.CONFIRMING, Stage.RESTORING})
# Stages in which a participant that is lost, restarted or open again voids the operation.
BEFORE_PUBLISH = CALLING | {Stage.PREPARED, Stage.COMMITTED, Stage.RESTORED}
# Stages of a trainer-driven save that last as long as the trainer is heard of.
OWNED = frozenset({Stage.PREPARED, Stage.COMMITTED, Stage.PUBLISHED})
# Stages of a restore that last until the trainer calls. A restore that opened by itself would let servers work with the
# snapshot's sessions and without the trainer's weights, and none of them could load it again: it would not be fresh.
UNATTENDED = frozenset({Stage.RESTORED, Stage.FAILED_PAUSED})
OPENING_STAGES = frozenset({Stage.RESUMING, Stage.ABORTING})

_SAVE_ORDER = tuple(Stage)  # the declaration order is that of a save


class Standing(StrEnum):
    """How a legal request is met."""

    DUE = "due"
    REPEATED = "repeated"


def judge(
    request: Request, stage: Stage, outcome: Outcome, phase: Phase, operation: Operation, cause: Problem | None = None
) -> Standing | Problem:
    """Whether `request` is due, a repeat, or illegal: then the Problem to answer with. `cause`: why it does not end well."""
    if isinstance(request, AbortRequested):
        if stage == Stage.PUBLISHED:
            return _illegal("Abort", stage, phase, operation, "Use Resume: the snapshot is published.")
        due = stage in BEFORE_PUBLISH or stage in (Stage.FAILED_PAUSED, Stage.PUBLISHING)
        return Standing.DUE if due else Standing.REPEATED
    if isinstance(request, ResumeRequested):
        if stage in (Stage.PUBLISHED, Stage.RESTORED):
            return Standing.DUE
        on_its_way = stage == Stage.PUBLISHING and not operation.trainer_driven
        if on_its_way or stage == Stage.RESUMING or outcome == Outcome.SUCCEEDED:
            return Standing.REPEATED
        refused = _illegal("Resume", stage, phase, operation, "Use Abort: it is neither published nor restored.")
        return refused if cause is None else _because(refused, cause)
    commits = isinstance(request, CommitRequested)
    name, due_at = ("Commit", Stage.PREPARED) if commits else ("Publish", Stage.COMMITTED)
    if not operation.trainer_driven:
        return _illegal(name, stage, phase, operation, "Follow it with Watch: it goes on by itself.")
    if stage == due_at:
        return Standing.DUE
    if stage == Stage.ABORTING or outcome == Outcome.ABORTED:
        return _too_late(name, stage, phase, operation, cause)
    if _SAVE_ORDER.index(stage) > _SAVE_ORDER.index(due_at):
        return Standing.REPEATED
    return _illegal(name, stage, phase, operation, f"Wait until it is {due_at.value}.")


def _too_late(call: str, stage: Stage, phase: Phase, operation: Operation, cause: Problem | None) -> Problem:
    """As it will be answered once it has ended: by its cause."""
    step = "Start a new operation: this one has failed."
    if cause is None:
        return _illegal(call, stage, phase, operation, step)
    text = f"{call} comes too late, the {operation.kind.name.lower()} is {stage.value}: {cause.message}"
    return replace(cause, message=text, next_step=f"{step} {cause.advice}")


def _because(refused: Problem, cause: Problem) -> Problem:
    """The same refusal, with whom and what the operation failed of."""
    text = f"{refused.message.removesuffix('.')}: {cause.message}"
    return replace(cause, reason=refused.reason, message=text, next_step=f"{refused.next_step} {cause.advice}")


def _illegal(call: str, stage: Stage, phase: Phase, operation: Operation, next_step: str) -> Problem:
    text = f"{call} is not legal now: the {operation.kind.name.lower()} is {stage.value}."
    return Problem(Reason.WRONG_PHASE, text, next_step, phase, operation_id=operation.operation_id)
