"""What one operation is asked to do, and the time limits that the core keeps by itself.

PURE. The one rule: everything here is fixed when the operation begins; what changes lives in `transaction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType

from coordinator.wire.ids import OperationId, ParticipantId, SnapshotId
from coordinator.wire.places import Placement
from coordinator.wire.terms import OperationKind, QuiesceMode, StragglerPolicy


class Outcome(IntEnum):
    """How an operation stands; numbers equal the proto's OperationOutcome."""

    UNSPECIFIED = 0
    RUNNING = 1
    SUCCEEDED = 2
    ABORTED = 3
    FAILED_PAUSED = 4
    PAUSED = 5


class Stage(StrEnum):
    """Where an operation stands. The past participles wait for the trainer's next call."""

    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    CONFIRMING = "confirming"
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    RESTORING = "restoring"
    RESTORED = "restored"
    FAILED_PAUSED = "failed-paused"
    RESUMING = "resuming"
    ABORTING = "aborting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Options:
    """The choices of a save, and the lease of both kinds. Defaults are the coordinator's settings, filled in before."""

    quiesce_mode: QuiesceMode = QuiesceMode.UNSPECIFIED
    straggler_policy: StragglerPolicy = StragglerPolicy.EXCLUDE
    straggler_grace_s: float = 5.0
    lease_ttl_s: float = 30.0
    expected_fingerprint: str = ""
    without: tuple[str, ...] = ()  # participants that are gone for good


@dataclass(frozen=True, slots=True)
class RestoreSource:
    """A part of a snapshot, or the rollouts of it from `first` to before `until`."""

    participant_id: str
    manifest_sha256: str
    first: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class RestorePart:
    """What one participant loads: a part, or `sources`. Neither: there is nothing for it, and it only closes.

    `totals`: the rollouts of what it loads by the lower-case name of their state, which it must account for.
    """

    manifest_sha256: str = ""
    source_participant_id: str = ""  # empty: its own name
    totals: Mapping[str, int] = field(default_factory=dict[str, int])
    sources: tuple[RestoreSource, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether there is anything to load."""
        return bool(self.manifest_sha256 or self.sources)


NO_PARTS: Mapping[ParticipantId, RestorePart] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Operation:
    """One run of save or restore.

    `trainer_driven`: the save stops after prepare, commit and publish until the trainer's next call.
    `resume_when_done`: a restore opens by itself when all is loaded.
    `parts`: restore only; who loads what. Whoever is not named only closes.
    `elastic`: rollouts may go to other actors than those of the snapshot. `placements`: where they go, when it is of actors.
    """

    kind: OperationKind
    operation_id: OperationId
    snapshot_id: SnapshotId
    coordinator_epoch: int = 1
    options: Options = field(default_factory=Options)
    trainer_driven: bool = False
    resume_when_done: bool = False
    parts: Mapping[ParticipantId, RestorePart] = field(default_factory=lambda: NO_PARTS)
    elastic: bool = False
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and counts that the core decides by.

    The reserve lies outside the caller's deadline for the phases, so that a first phase that eats all the time still
    leaves some to open everybody again (FAILURES 27): begin with `deadline = caller's budget - reserve_s`.
    """

    reserve_s: float = 3.0  # for opening everybody; what is not confirmed then is listed, and thaws by its lease
    open_call_s: float = 1.5  # one Resume or Abort call: participants answer within 1 s
    open_wave_s: float = 0.5  # then the next wave is told although this one has not all answered
    confirm_call_s: float = 5.0
    attempts: int = 3  # of a call that got no answer, before the phase fails
    retry_after_s: float = 0.1  # doubles with each attempt
    retry_most_s: float = 2.0
    remind_after_s: float = 60.0  # a restore that waits for its trainer says so; then at doubled intervals,
    remind_most_s: float = 3600.0  # at least so often: once a minute would push everything else out of the history
