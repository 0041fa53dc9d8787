"""Who is waited for and why, as one sentence: the same one in status, logs and errors.

PURE. The one rule: a "not yet" names phase, participant, rollouts and time. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from coordinator.protocol.events import Slept
from coordinator.protocol.operation import Operation, Stage
from coordinator.protocol.proofs import Prepared, Progress
from coordinator.wire.errors import CATALOG, ENDED, SLEPT, Blocked, Problem, Reason
from coordinator.wire.ids import ParticipantId, SnapshotId
from coordinator.wire.terms import Phase, QuiesceMode, counted

WE_SLEPT: Final = "Repeat it. See what stopped the coordinator: SIGSTOP, a suspended machine, or one without processor time or memory to spare."
_OF_TIME: Final = frozenset({Reason.DRAIN_INCOMPLETE, Reason.UNREACHABLE, Reason.PHASE_INCOMPLETE})
_NAMED = 5  # names in one sentence; all are in the status
_EXCLUDED_NAMED = 3
_MAX_ROLLOUTS = 20
_DOING = {
    Phase.PREPARE: "quiescing",
    Phase.COMMIT: "exporting",
    Phase.CONFIRM: "confirming the freeze",
    Phase.RESTORE: "loading",
    Phase.RESUME: "opening",
    Phase.ABORT: "opening",
}


def names(participant_ids: Sequence[str]) -> str:
    """A few names, and how many more."""
    shown = ", ".join(participant_ids[:_NAMED])
    more = len(participant_ids) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def excluded(proof: Prepared, snapshot_id: SnapshotId) -> str:
    """Who is left out of the cut, and where the rest of them is listed once it is published."""
    shown = ", ".join(map(str, proof.excluded[:_EXCLUDED_NAMED]))
    more = proof.excluded_count - min(len(proof.excluded), _EXCLUDED_NAMED)
    ends = "is excluded: a restore begins it" if proof.excluded_count == 1 else "are excluded: a restore begins them"
    text = f"{counted(proof.excluded_count, 'rollout')} could not quiesce and {ends} again from the input"
    if not shown:
        return f"{text}; `safepoint snapshots show {snapshot_id} --rollouts` names them."
    rest = f" and {more} more, which `safepoint snapshots show {snapshot_id} --rollouts` names" if more > 0 else ""
    return f"{text}: {shown}{rest}."


def not_excluded(proof: Prepared) -> str:
    """The same under the policy that such a cut is not wanted; the error names them."""
    return f"{counted(proof.excluded_count, 'rollout')} could not quiesce, and the straggler policy is fail."


def once_open(problem: Problem, mode: QuiesceMode) -> Problem:
    """The same problem for whoever reads of it when everybody is open: advice to abort is no advice any more.

    `mode` is what the operation asked for: only after a drain is a hold something else to try. Advice that is not the
    catalog's stays as it is.
    """
    entry = CATALOG[problem.reason]
    if problem.next_step not in ("", entry.next_step):
        return problem
    if problem.reason == Reason.DRAIN_INCOMPLETE and mode == QuiesceMode.DRAIN:
        step = f"{entry.next_step} A save with `--mode hold` does not wait for what models generate."
        return replace(problem, next_step=step)
    return replace(problem, next_step=entry.aborted) if entry.aborted else problem


def waiting(
    phase: Phase, who: Sequence[ParticipantId], progress: Mapping[ParticipantId, Progress], waited_s: float
) -> str:
    """Why a phase is not further."""
    each = "; ".join(f"{name} ({_said(phase, progress.get(name))})" for name in who[:_NAMED])
    more = f"; and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
    return f"{phase.name.lower()}: waiting {waited_s:.1f} s for {each}{more}."


def checking(doing: str, who: Sequence[ParticipantId], waited_s: float) -> str:
    """What keeps an operation before its first phase. `doing` follows the names of `who`; without any it stands alone."""
    if who:
        return f"discover: waiting {waited_s:.1f} s for {names(who)} {doing}; nobody is paused."
    return f"discover: {doing}, for {waited_s:.1f} s; nobody is paused."


def still_closed(closed: Collection[ParticipantId]) -> str:
    """Who is paused by a restore that has failed: `closed` are those that have neither gone nor opened by themselves."""
    return "Who has closed stays paused" if closed else "Nobody is paused any more, since leases have lapsed"


def standing(stage: Stage, phase: Phase, waited_s: float, closed: Collection[ParticipantId]) -> str:
    """Why an operation is not further when no participant is waited for; empty when it has ended or not begun."""
    calls = {Stage.PREPARED: "Commit", Stage.COMMITTED: "Publish", Stage.PUBLISHED: "Resume", Stage.RESTORED: "Resume"}
    if stage in calls:
        done = f"{phase.name.lower()}: done; everybody is paused until the trainer calls {calls[stage]}."
        return f"{done} {unattended(stage, waited_s)}" if stage == Stage.RESTORED and waited_s >= 60 else done
    if stage == Stage.PUBLISHING:
        return f"publish: writing the snapshot manifest for {waited_s:.1f} s."
    if stage == Stage.FAILED_PAUSED:
        held = still_closed(closed)
        return f"restore: failed. {held} until Abort." if closed else f"restore: failed. {held}; it waits for Abort."
    return ""


def in_the_way(
    operation: Operation, stage: Stage, phase: Phase, elapsed_s: float, primary: Problem | None, why: str = "",
    left_s: float | None = None, closed: Collection[ParticipantId] = (),
) -> Problem:  # fmt: skip
    """Why no other operation can begin, and which call ends that one: some end by themselves, and some never do.

    `why`: whom it waits for, as one sentence. `left_s`: the longest that its phase goes on by itself, when that is known.
    `closed`: who may be closed by it still.
    """
    name = f"{operation.kind.name.lower()} {operation.operation_id}"
    text, step = (
        f"{name} of {operation.snapshot_id} runs since {elapsed_s:.1f} s. It is in {why or phase.name.lower() + '.'}",
        "",
    )
    text += f" That phase ends in {max(0.0, left_s):.1f} s at the latest." if left_s is not None else ""
    if stage == Stage.FAILED_PAUSED:
        cause = f" It failed because: {primary.message}" if primary is not None else ""
        held = (
            f"{still_closed(closed)} until it is aborted" if closed else f"{still_closed(closed)}; it waits for Abort"
        )
        text = f"{name} of {operation.snapshot_id} has failed. {held}.{cause}"
        step = "`safepoint abort` opens everybody without the snapshot. `safepoint why` says what has to be mended before the next try."
    elif stage == Stage.RESTORED:
        text = f"{name} of {operation.snapshot_id} is done, and everybody is paused until it is resumed."
        step = "`safepoint resume` goes on with what was loaded, `safepoint abort` without it."
    return Problem(Reason.FENCED, text, step, operation_id=operation.operation_id)


def unattended(stage: Stage, waited_s: float) -> str:
    """That a restore has been waiting for its trainer, and the ways out."""
    text = f"It has waited {waited_s / 60:.0f} min for the trainer, and nothing opens by itself"
    if stage == Stage.FAILED_PAUSED:
        return f"{text}: the restore has failed, and Abort (safepoint abort) opens everybody without the snapshot."
    return (
        f"{text}: Resume (safepoint resume) opens everybody with what was loaded, Abort (safepoint abort) without it."
    )


def unheard(who: Sequence[ParticipantId], waited_s: float) -> str:
    """Why a restore that a coordinator found in its journal is not resumed yet."""
    return (
        f"This coordinator has started after the restore, and has yet to hear from {names(who)} that what was restored is "
        f"still there ({waited_s:.0f} s)."
    )


def deadline_passed(
    operation: Operation,
    phase: Phase,
    who: Sequence[ParticipantId],
    progress: Mapping[ParticipantId, Progress],
    waited_s: float,
    *,
    called: bool = True,
    reserve_s: float = 0.0,
) -> Problem:
    """The Problem of a phase that did not end in time, with what those who are late last said.

    `called` is False when the time was over before they could be called at all. `reserve_s` of the caller's time are not
    spent on phases: whoever has given 8 s and waited 5 is told where the rest is.
    """
    rollouts, count = blocked(who, progress)
    silent = not called or any(name not in progress for name in who)
    each = "; ".join(f"{name} ({_said(phase, progress.get(name), brief=bool(rollouts))})" for name in who[:_NAMED])
    draining = phase == Phase.PREPARE
    kept = f" {reserve_s:.1f} s of the time that was given are kept for opening everybody." if reserve_s else ""
    text = f"The deadline passed while {names(who)} {'was' if len(who) == 1 else 'were'} {_DOING.get(phase, 'busy')}: {each}."
    return Problem(
        # Work that does not end, a participant that works and is not done, and one that says nothing are three things.
        Reason.DRAIN_INCOMPLETE if draining else Reason.UNREACHABLE if silent else Reason.PHASE_INCOMPLETE,
        (text if called else f"The deadline passed before {names(who)} could be called.") + kept,
        next_step="See whether the named participants still work, and give the operation more time."
        if silent and not draining
        else "",
        phase=phase,
        participant_id=who[0] if len(who) == 1 else "",
        operation_id=operation.operation_id,
        rollouts=rollouts,
        rollout_count=count,
        waited_s=waited_s,
    )


def as_we_know(problem: Problem) -> Problem:
    """What a participant has answered, for whoever asked us. The snapshot is there, we have found it or made it: who does not
    see it has another root, and a trainer that is told of no snapshot begins from scratch."""
    if problem.reason is not Reason.SNAPSHOT_NOT_FOUND:
        return problem
    return replace(problem, reason=Reason.STORAGE_FAILED, message=f"It does not see the snapshot. {problem.message}")


def of_our_sleep(problem: Problem, slept: Slept | None, lease_ttl_s: float) -> Problem:
    """The Problem of a phase that came to nothing since the coordinator itself did not run: then nobody it names is at fault.

    That is so when a participant has left it for that, when a lease lapsed that was not renewed for half of its time or
    longer, and when half of the time that the phase has taken, or more, was slept. Else it is `problem` as it was.
    """
    lapsed = problem.reason is Reason.LEASE_LAPSED
    message = f"{slept.said} {problem.message}" if slept is not None else problem.message
    if SLEPT in problem.metadata:
        if slept is not None:  # how the one that left first can be looked for is of no interest: it is well
            message = f"{slept.said} Registrations ended meanwhile, that of {problem.participant_id} among them."
    else:
        missed_s = lease_ttl_s if lapsed else problem.waited_s if problem.reason in _OF_TIME else None
        if slept is None or missed_s is None or ENDED in problem.metadata or slept.seconds < missed_s / 2:
            return problem
    reason = problem.reason if lapsed else Reason.UNREACHABLE
    return replace(problem, reason=reason, message=message, next_step=WE_SLEPT, participant_id="")


def went_with(problem: Problem, progress: Progress | None, prepared: Prepared | None) -> Problem:
    """The Problem of a participant that is gone, with the work that went with it, as far as it had said."""
    counts = prepared or progress
    if counts is None:
        return problem
    held = {"in flight": progress.in_flight if progress else 0, "parked": counts.parked, "held": counts.held}
    said = ", ".join(f"{count} {where}" for where, count in held.items() if count)
    if not said:
        return problem
    rollouts = problem.rollouts or (progress.waiting_for[:_MAX_ROLLOUTS] if progress else ())
    count = max(problem.rollout_count, len(rollouts), progress.waiting_for_count if progress else 0)
    message = f"{problem.message.rstrip('.')}. It had {said} when it was last heard."
    return replace(problem, message=message, rollouts=rollouts, rollout_count=count)


def explained(problem: Problem, how: str) -> Problem:
    """The Problem of a participant that is gone, with how its process ended."""
    message = f"{problem.message.rstrip('.')}. {how.rstrip('.')}."
    return replace(problem, message=message, metadata={**problem.metadata, ENDED: how})


def blocked(
    who: Sequence[ParticipantId], progress: Mapping[ParticipantId, Progress]
) -> tuple[tuple[Blocked, ...], int]:
    """The rollouts that those participants wait for, the oldest first, and how many there are in all."""
    said = [progress[name] for name in who if name in progress]
    rollouts = sorted((r for each in said for r in each.waiting_for), key=lambda r: (-r.age_s, r.rollout_id))
    count = sum(max(each.waiting_for_count, len(each.waiting_for)) for each in said)
    return tuple(rollouts[:_MAX_ROLLOUTS]), count


def _said(phase: Phase, progress: Progress | None, *, brief: bool = False) -> str:
    if progress is None:
        return "has reported nothing"
    if phase == Phase.PREPARE:
        count = max(progress.waiting_for_count, len(progress.waiting_for))
        some = ", ".join(str(rollout) for rollout in progress.waiting_for[:3])
        more = f" and {count - 3} more" if count > 3 else ""
        what = f"{progress.in_flight} in flight"
        if brief:
            return what  # the Problem names the rollouts itself
        return f"{what}: {some}{more}" if some else f"{what}, {counted(count, 'rollout')}" if count else what
    bytes_of = f" of {progress.bytes_total}" if progress.bytes_total else ""
    items_of = f" of {progress.items_total}" if progress.items_total else ""
    items = "item" if (progress.items_total or progress.items_done) == 1 else "items"
    return f"{progress.bytes_done}{bytes_of} bytes, {progress.items_done}{items_of} {items}"
