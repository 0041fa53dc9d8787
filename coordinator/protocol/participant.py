"""One server under the protocol as discovery knows it, and what may be wrong with it.

PURE. The one rule: what a participant says of itself is kept as it said it; whether it is right is judged elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.wire.errors import CATALOG, Reason
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, QuiesceMode, Role


@dataclass(frozen=True, slots=True)
class ShimProcess:
    """Where the shim of a participant runs, for people. `watched`: somebody will say how it ended."""

    host: str
    pid: int
    log_path: str = ""
    watched: bool = False

    def __str__(self) -> str:
        log = f", log {self.log_path}" if self.log_path else ""
        return f"pid {self.pid} on {self.host}{log}"


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
    process: ShimProcess | None = None
    actor_id: str = ""  # the Gym actor that it belongs to; then its id is "<actor_id>.<name of the server>"

    @property
    def server_name(self) -> str:
        """Its name within its actor, which other actors may have as well; its id when it belongs to none."""
        return self.participant_id.removeprefix(f"{self.actor_id}.") if self.actor_id else str(self.participant_id)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (`blocking`: operations are refused) or costly with a topology."""

    blocking: bool
    reason: Reason
    participant_id: str
    message: str
    next_step: str


def finding_of(reason: Reason, who: str, message: str, next_step: str = "", *, blocking: bool = True) -> Finding:
    """A finding with the next step of its reason, unless it has one of its own."""
    return Finding(blocking, reason, who, message, next_step or CATALOG[reason].next_step)


def has_gate(kind: str) -> bool:
    """Whether a gate is loaded into servers of that kind (`Participant.kind`): one reads variables and sees tasks."""
    return kind.startswith("gym.")


def give_role(kind: str, server_name: str, *roles: str) -> str:
    """How a server that takes part as `kind` gets one of these roles: one with a gate by a variable, another by what starts
    its shim."""
    if not has_gate(kind):
        return f"Give {' or '.join(f'`--role {role}`' for role in roles)} where the shim of `{server_name}` is started, and start it again."
    named = " or ".join(f'"{server_name}={role}"' for role in roles)
    return f"Set {named} in SAFEPOINT_ROLES beside what is there, and restart the server."
