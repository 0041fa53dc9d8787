"""What a reply must show: one proof for each phase, and the progress that comes before it.

PURE. A proof is what the participant claims; `transaction` compares it with what was discovered and asked, and only
then counts it. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from coordinator.wire.errors import Blocked
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.terms import RolloutState

NO_TOTALS: Mapping[RolloutState, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Prepared:
    """Admission is closed and nothing that the cut covers moves."""

    incarnation_id: IncarnationId
    generation: int  # counts each opening and closing of admission in this incarnation
    workers: tuple[str, ...]  # ids of the workers that acknowledged, each once
    workers_silent: tuple[str, ...] = ()  # ids of connected workers that did not
    excluded: tuple[Blocked, ...] = ()  # at most 20 of them
    excluded_count: int = 0
    parked: int = 0
    held: int = 0
    quiesce_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Committed:
    """Everything that the participant's manifest lists is durable."""

    operation_id: OperationId
    snapshot_id: SnapshotId
    participant_id: ParticipantId
    incarnation_id: IncarnationId
    manifest_sha256: str  # of the stored manifest.json, envelope included
    size_bytes: int = 0
    totals: Mapping[RolloutState, int] = field(default_factory=lambda: NO_TOTALS)
    sessions: int = 0
    recorded_calls: int = 0
    ledger_file: str = ""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The freeze was never broken since `Prepared`, and lasts at least `lease_remaining_s` more."""

    incarnation_id: IncarnationId
    generation: int
    lease_remaining_s: float


@dataclass(frozen=True, slots=True)
class RestoredProof:
    """The snapshot is loaded; admission is closed."""

    snapshot_id: SnapshotId
    incarnation_id: IncarnationId
    generation: int
    sessions: int = 0
    totals: Mapping[RolloutState, int] = field(default_factory=lambda: NO_TOTALS)
    diverged_count: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """Admission is open. `closed_for_s` is None when it was open already. `warnings`: what a restore had loaded and is lost."""

    released_parked: int = 0
    released_held: int = 0
    closed_for_s: float | None = None
    warnings: tuple[str, ...] = ()


Proof = Prepared | Committed | Confirmed | RestoredProof | Opened


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one participant is within a phase: what errors and `why_waiting` name."""

    in_flight: int = 0
    parked: int = 0
    held: int = 0
    waiting_for: tuple[Blocked, ...] = ()  # the oldest, at most 20
    waiting_for_count: int = 0
    bytes_done: int = 0
    bytes_total: int = 0  # zero when not known
    items_done: int = 0
    items_total: int = 0
