"""The rollouts of a snapshot, merged from what each participant says of them.

PURE. The one rule: every rollout is in exactly one state (rule 11), and the worst news about it wins. What an agent could
not capture, what a server it used could not capture, and what used a server that saves nothing restarts from its input;
only a recorded result is safe from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from coordinator.protocol.topology import Participant
from coordinator.wire.errors import Blocked, Problem, Reason, Refused
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import CheckpointMode, Phase, Role, RolloutState

_NAMED = 20


@dataclass(frozen=True, slots=True)
class Line:
    """One rollout at the cut. Mirrors the proto's LedgerEntry; `participant_id` is the agent that runs it."""

    rollout_id: str
    attempt: int
    state: RolloutState
    reason: str = ""
    participant_id: str = ""
    recorded_calls: int = 0
    waiting_on: str = ""
    input_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a snapshot says of its rollouts. `orphans`: known to other servers and to no agent; not in the ledger."""

    lines: tuple[Line, ...]  # sorted by rollout_id
    totals: Mapping[RolloutState, int]
    orphans: Mapping[str, tuple[ParticipantId, ...]]  # rollout_id -> who knows it


def merge(reports: Iterable[tuple[Participant, Iterable[Line]]]) -> Ledger:
    """The ledger of a snapshot from the ledger files of those who committed.

    Raises Refused with LEDGER_UNBALANCED when a line has no state, when one participant names a rollout twice, or when
    two agents have the same attempt of one rollout in different states. An older attempt that another agent still knows
    is superseded by the newer one. An id that names two rollouts, of different inputs, is no contradiction: ids made of
    indices come again with every batch, and may come to another agent.
    """
    mine: dict[str, Line] = {}
    excluded_elsewhere: dict[str, str] = {}
    touched: dict[str, list[ParticipantId]] = {}
    conflicts: list[Line] = []
    for participant, lines in reports:
        name, seen = participant.participant_id, set[str]()
        for line in lines:
            if line.state == RolloutState.UNSPECIFIED or line.rollout_id in seen:
                twice = "names it twice" if line.rollout_id in seen else "gives it no state"
                raise _unbalanced(f"`{name}` {twice}: rollout {line.rollout_id}.", [line], name)
            seen.add(line.rollout_id)
            if participant.role == Role.AGENT:
                own = _agents_own(participant, line)
                known = mine.get(line.rollout_id)
                if known is not None and _are_two(known, own):
                    mine[line.rollout_id] = _of_two(known, own)
                elif known is None or known.attempt < own.attempt:
                    mine[line.rollout_id] = own
                elif known.attempt == own.attempt and known.state != own.state:
                    conflicts.append(own)
                continue
            touched.setdefault(line.rollout_id, []).append(name)
            reason = _excluded_by(participant, line)
            if reason:
                excluded_elsewhere.setdefault(line.rollout_id, reason)
    if conflicts:
        first = conflicts[0]
        other = mine[first.rollout_id]
        raise _unbalanced(
            f"Rollout {first.rollout_id} is {other.state.name.lower()} at `{other.participant_id}` and "
            f"{first.state.name.lower()} at `{first.participant_id}`.",
            conflicts,
            next_step="Give each rollout an id of its own, when both agents were sent this one: `_ng_rollout_id` in its row. Otherwise"
            " report it: one rollout is in two states.",
        )
    merged = tuple(_final(mine[rollout_id], excluded_elsewhere.get(rollout_id, "")) for rollout_id in sorted(mine))
    totals = Counter(line.state for line in merged)
    return Ledger(
        lines=merged,
        totals={state: totals[state] for state in RolloutState if state != RolloutState.UNSPECIFIED},
        orphans={
            rollout_id: tuple(sorted(who)) for rollout_id, who in sorted(touched.items()) if rollout_id not in mine
        },
    )


def balance(lines: Iterable[Line], totals: Mapping[RolloutState, int]) -> None:
    """Check a stored ledger against its totals, as a restore must.

    Raises Refused with LEDGER_UNBALANCED when a rollout is there twice, has no state, or the totals are others.
    """
    counted: Counter[RolloutState] = Counter()
    before = ""
    for line in lines:
        if line.rollout_id <= before:
            raise _unbalanced(f"The ledger is not sorted, or names rollout {line.rollout_id} twice.", [line])
        if line.state == RolloutState.UNSPECIFIED:
            raise _unbalanced(f"Rollout {line.rollout_id} has no state.", [line])
        before = line.rollout_id
        counted[line.state] += 1
    for state in RolloutState:
        if counted[state] != totals.get(state, 0):
            raise _unbalanced(
                f"The ledger has {counted[state]} rollouts that are {state.name.lower()}, "
                f"and its totals say {totals.get(state, 0)}.",
                [],
            )


def _are_two(one: Line, other: Line) -> bool:
    """Whether lines of one id are of different rollouts: they have different inputs, at different agents."""
    return bool(one.input_sha256 and other.input_sha256) and one.input_sha256 != other.input_sha256


def _of_two(one: Line, other: Line) -> Line:
    """The line for an id that names two rollouts. One that has ended gives way; of two that live neither can be meant."""
    live = [line for line in (one, other) if line.state != RolloutState.COMPLETED]
    if not live:
        return max(one, other, key=lambda line: line.attempt)
    if len(live) == 1:
        return live[0]
    latest = max(live, key=lambda line: line.attempt)
    reason = (
        f"its id names two rollouts, at {one.participant_id} and at {other.participant_id}; "
        "a _ng_rollout_id in each row tells them apart"
    )
    return replace(latest, state=RolloutState.EXCLUDED, reason=reason)


def _agents_own(agent: Participant, line: Line) -> Line:
    if line.participant_id != agent.participant_id:  # comparing is ten times as fast as replacing, and all are paused
        line = replace(line, participant_id=agent.participant_id)
    if line.state != RolloutState.COMPLETED and agent.checkpoint_mode == CheckpointMode.RESTART_ONLY:
        return replace(line, state=RolloutState.EXCLUDED, reason=line.reason or _mode_reason(agent))
    return line


def _excluded_by(server: Participant, line: Line) -> str:
    """Why a server that the rollout used makes it restart; empty when it does not."""
    if server.checkpoint_mode == CheckpointMode.RESTART_ONLY:
        return _mode_reason(server)
    if line.state == RolloutState.EXCLUDED:
        return f"{server.participant_id}: {line.reason or 'it could not be captured'}"
    return ""


def _mode_reason(participant: Participant) -> str:
    why = participant.checkpoint_mode_reason or "its state cannot be saved"
    return f"{participant.participant_id} is restart-only: {why}"


def _final(line: Line, elsewhere: str) -> Line:
    if line.state == RolloutState.COMPLETED:
        return line  # the result is recorded: it never runs again, whatever became of the servers it used
    if line.state == RolloutState.EXCLUDED:
        return line if line.reason else replace(line, reason=elsewhere or f"{line.participant_id} gave no reason")
    return replace(line, state=RolloutState.EXCLUDED, reason=elsewhere) if elsewhere else line


def _unbalanced(message: str, lines: list[Line], participant_id: str = "", next_step: str = "") -> Refused:
    return Refused(
        Problem(
            Reason.LEDGER_UNBALANCED,
            message,
            next_step,
            phase=Phase.PUBLISH,
            participant_id=participant_id,
            rollouts=tuple(Blocked(line.rollout_id, line.attempt) for line in lines[:_NAMED]),
            rollout_count=len(lines),
        )
    )
