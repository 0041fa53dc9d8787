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
    """What a snapshot says of its rollouts. `orphans`: known to other servers and to no agent; not in the ledger.

    `ambiguous`: those that are excluded since two agents run their id; a save whose stragglers fail does not stand.
    """

    lines: tuple[Line, ...]  # sorted by rollout_id
    totals: Mapping[RolloutState, int]
    orphans: Mapping[str, tuple[ParticipantId, ...]]  # rollout_id -> who knows it
    ambiguous: tuple[Line, ...] = ()


def merge(reports: Iterable[tuple[Participant, Iterable[Line]]]) -> Ledger:
    """The ledger of a snapshot from the ledger files of those who committed.

    Raises Refused with LEDGER_UNBALANCED when a line has no state or when one participant names a rollout twice. An older
    attempt that another agent still knows is superseded by the newer one. The same attempt at two agents, in two states or
    living at both, is two dispatches under one id: excluded, as is an id of two inputs that live. Of two inputs one that has
    ended gives way: ids come again with every batch, and may come to another agent.
    """
    mine: dict[str, Line] = {}
    excluded_elsewhere: dict[str, str] = {}
    touched: dict[str, list[ParticipantId]] = {}
    ambiguous = set[str]()
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
                    mine[line.rollout_id] = chosen = _of_two(known, own)
                    if chosen is not known and chosen is not own:
                        ambiguous.add(line.rollout_id)
                elif known is None or known.attempt < own.attempt:
                    mine[line.rollout_id] = own
                    ambiguous.discard(line.rollout_id)
                elif _dispatched_twice(known, own):
                    mine[line.rollout_id] = _neither(known, own)
                    ambiguous.add(line.rollout_id)
                continue
            touched.setdefault(line.rollout_id, []).append(name)
            reason = _excluded_by(participant, line)
            if reason:
                excluded_elsewhere.setdefault(line.rollout_id, reason)
    merged = tuple(_final(mine[rollout_id], excluded_elsewhere.get(rollout_id, "")) for rollout_id in sorted(mine))
    totals = Counter(line.state for line in merged)
    return Ledger(
        lines=merged,
        totals={state: totals[state] for state in RolloutState if state != RolloutState.UNSPECIFIED},
        orphans={
            rollout_id: tuple(sorted(who)) for rollout_id, who in sorted(touched.items()) if rollout_id not in mine
        },
        ambiguous=tuple(mine[rollout_id] for rollout_id in sorted(ambiguous)),
    )


def refuse_ambiguous(lines: tuple[Line, ...]) -> None:
    """For a save whose straggler policy is fail. Raises Refused with LEDGER_UNBALANCED when an id names two rollouts."""
    if lines:
        raise _unbalanced(
            f"Rollout {lines[0].rollout_id} is at two agents, and the straggler policy is fail: {lines[0].reason}.",
            list(lines),
            next_step="Give each rollout an id of its own (`_ng_rollout_id` in its row), or let such rollouts restart"
            " (`--stragglers exclude`).",
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
    return _neither(*live)


def _dispatched_twice(one: Line, other: Line) -> bool:
    """Whether two agents run one id, as far as their lines show. An agent that only helps another one has no input of it."""
    if one.attempt != other.attempt:
        return False
    lives = one.state not in (RolloutState.COMPLETED, RolloutState.EXCLUDED)
    return one.state != other.state or (lives and bool(one.input_sha256) and one.input_sha256 == other.input_sha256)


def _neither(one: Line, other: Line) -> Line:
    """The line of an id that names two rollouts, of which neither can be meant."""
    reason = (
        f"its id names two rollouts, at {one.participant_id} and at {other.participant_id}; "
        "a _ng_rollout_id of its own in each row tells them apart"
    )
    return replace(max(one, other, key=lambda line: line.attempt), state=RolloutState.EXCLUDED, reason=reason)


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
