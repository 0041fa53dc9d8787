"""The order of everything, as one table: which roles a phase calls, in which waves, and what each reply must show.

PURE, and the only file that names a role beside a phase. The one rule: order is data; a new order is a new row, never an
`if` elsewhere.

Why this order. A save closes those that feed work before those that do it, so that nothing enters a server that is
closed already; state is read from agents first, since what they recorded bounds what the others must remember; opening
goes the other way round, so that whoever wakes up finds what it calls open. Auxiliary models (judges, reward models) are
in no wave: paused servers wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from coordinator.protocol.operation import Operation, Stage
from coordinator.protocol.proofs import Committed, Confirmed, Opened, Prepared, Proof, RestoredProof
from coordinator.protocol.topology import Participant
from coordinator.wire.deadline import MIN_BUDGET_S
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import CheckpointMode, OperationKind, Phase, Role

P, E, A, R = Role.POLICY_MODEL, Role.ENGINE, Role.AGENT, Role.RESOURCES

ALL_MODES: Final = frozenset(CheckpointMode) - {CheckpointMode.UNSPECIFIED}
# A restart-only server commits too: its ledger says which rollouts touched it and must restart.
WITH_STATE: Final = ALL_MODES - {CheckpointMode.STATELESS}


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """One row. `waves`: sets of roles, called one after the other, everybody within a wave at once."""

    waves: tuple[frozenset[Role], ...]
    proof: type[Proof] | None
    joins: frozenset[CheckpointMode]
    abortable: bool


def _waves(*roles: Role) -> tuple[frozenset[Role], ...]:
    return tuple(frozenset({role}) for role in roles)


# fmt: off
PHASES: Final[Mapping[Phase, PhaseSpec]] = MappingProxyType({
    #                         waves                       proof          who joins   abortable
    Phase.PREPARE: PhaseSpec(_waves(P, E, A, R),          Prepared,      ALL_MODES,  True),
    Phase.COMMIT:  PhaseSpec(_waves(A, P, E, R),          Committed,     WITH_STATE, True),
    Phase.CONFIRM: PhaseSpec((frozenset({P, E, A, R}),),  Confirmed,     ALL_MODES,  True),
    Phase.PUBLISH: PhaseSpec((),                          None,          ALL_MODES,  False),
    Phase.RESTORE: PhaseSpec(_waves(P, E, A, R),          RestoredProof, ALL_MODES,  True),
    Phase.RESUME:  PhaseSpec(_waves(R, E, P, A),          Opened,        ALL_MODES,  False),
    Phase.ABORT:   PhaseSpec(_waves(R, E, P, A),          Opened,        ALL_MODES,  False),
})
# fmt: on

# The programs: each phase in turn. A trainer-driven save stops after those in STOPS until the next call.
SAVE: Final = (Phase.PREPARE, Phase.COMMIT, Phase.CONFIRM, Phase.PUBLISH, Phase.RESUME)
RESTORE: Final = (Phase.RESTORE, Phase.RESUME)


STAGES: Final[Mapping[Phase, Stage]] = MappingProxyType(
    {
        Phase.PREPARE: Stage.PREPARING,
        Phase.COMMIT: Stage.COMMITTING,
        Phase.CONFIRM: Stage.CONFIRMING,
        Phase.PUBLISH: Stage.PUBLISHING,
        Phase.RESTORE: Stage.RESTORING,
        Phase.RESUME: Stage.RESUMING,
        Phase.ABORT: Stage.ABORTING,
    }
)
STOPS: Final[Mapping[Phase, Stage]] = MappingProxyType(
    {
        Phase.PREPARE: Stage.PREPARED,
        Phase.COMMIT: Stage.COMMITTED,
        Phase.PUBLISH: Stage.PUBLISHED,
        Phase.RESTORE: Stage.RESTORED,
    }
)


# The programs' phases that the caller's time is for: publishing and opening have their own.
_TIMED: Final = frozenset({Phase.PREPARE, Phase.COMMIT, Phase.CONFIRM, Phase.RESTORE})
# What a wave needs at the least: participants refuse a call that arrives with less than `MIN_BUDGET_S`, and it has to arrive.
WAVE_LEAST_S: Final = 2 * MIN_BUDGET_S


def too_short(operation: Operation, participants: Sequence[Participant], left_s: float) -> Problem | None:
    """Why `left_s` cannot be enough for the waves that this operation calls one after the other; None when it may be.

    Asked before anybody is: else policy models were closed, and an agent behind them refused for want of time.
    """
    program = SAVE if operation.kind == OperationKind.SAVE else RESTORE
    timed = program[:1] if operation.trainer_driven else [phase for phase in program if phase in _TIMED]
    count = sum(len(waves(phase, participants)) for phase in timed)
    least_s = max(1, count) * WAVE_LEAST_S
    if left_s >= least_s:
        return None
    return Problem(
        Reason.DEADLINE_TOO_SHORT,
        f"{max(0.0, left_s):.2f} s are left for {count} waves of calls, which need {least_s:.2f} s at the least. "
        "Nobody was asked. (Of a short time a third is kept for opening everybody again.)",
        next_step="Repeat it with more time (`--timeout`): 1 s is the least that can be enough.",
    )


def waves(phase: Phase, participants: Iterable[Participant]) -> list[list[ParticipantId]]:
    """Who is called in `phase`, wave by wave, each sorted by id. Waves that nobody is in are left out."""
    spec = PHASES[phase]
    joining = [p for p in participants if p.checkpoint_mode in spec.joins]
    found = [sorted(p.participant_id for p in joining if p.role in roles) for roles in spec.waves]
    return [wave for wave in found if wave]
