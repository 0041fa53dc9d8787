"""Who takes part in an operation, and whether they can be checkpointed together.

PURE. The one rule: roles are declared, never guessed, and nothing is paused before every blocking finding is mended.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, QuiesceMode, Role


@dataclass(frozen=True, slots=True)
class Participant:
    """One server under the protocol, as discovered. Mirrors the proto's Capabilities and ParticipantInfo."""

    participant_id: ParticipantId
    role: Role
    kind: str
    checkpoint_mode: CheckpointMode
    incarnation_id: IncarnationId
    address: str
    quiesce_modes: tuple[QuiesceMode, ...] = (QuiesceMode.HOLD, QuiesceMode.DRAIN)
    configured_workers: int = 1
    state_schema: str = ""
    checkpoint_mode_reason: str = ""
    depends_on: tuple[str, ...] = ()
    upstream_endpoints: tuple[str, ...] = ()
    config_digest: str = ""
    features: tuple[str, ...] = ()
    shim_version: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """All participants. `policy_endpoints`: where the trainer serves its policy; empty when not configured."""

    participants: tuple[Participant, ...]
    policy_endpoints: tuple[str, ...] = ()
