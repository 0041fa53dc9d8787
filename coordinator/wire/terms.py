"""Roles, phases and modes: the enums of the contract, and the values that all sides name, for code that must not import protobuf.

Numbers equal those of the proto; `tests/wire/test_terms.py` compares them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

# Features that a participant may name in its Capabilities, and others act upon.
PRECOPY: Final = "precopy"  # it serves Precopy
FOREIGN_STATE: Final = "foreign_state"  # it takes `sources` in Restore: what others have saved, and parts of it


def counted(number: int, what: str, one: str = "", more: str = "") -> str:
    """A number of things for people: "1 rollout", "3 rollouts"; with the verb for each: "1 rollout restarts"."""
    verb = one if number == 1 else more
    return f"{number} {what}" + "s" * (number != 1) + (f" {verb}" if verb else "")


def in_engines(requests: int, what: str = "kept") -> str:
    """A part of a line about a snapshot, "6 requests in engines kept, "; empty where there are none."""
    return f"{counted(requests, 'request')} in engines {what}, " if requests else ""


class Named(IntEnum):
    """A number on the wire, a name for people: `print(rollout.state)` says `COMPLETED`, and it equals its number."""

    def __str__(self) -> str:
        return self.name


class Role(Named):
    """Which place a server has among the waves of a phase. There is no default."""

    UNSPECIFIED = 0
    POLICY_MODEL = 1
    AUXILIARY_MODEL = 2
    AGENT = 3
    RESOURCES = 4
    ENGINE = 5


class Phase(Named):
    """One step of an operation."""

    UNSPECIFIED = 0
    DISCOVER = 1
    PREPARE = 2
    COMMIT = 3
    CONFIRM = 4
    PUBLISH = 5
    RESTORE = 6
    RESUME = 7
    ABORT = 8


class CheckpointMode(Named):
    """How the state of a participant survives."""

    UNSPECIFIED = 0
    EXPORT_RESTORE = 1
    REPLAY = 2
    RESTART_ONLY = 3
    STATELESS = 4


class QuiesceMode(Named):
    """What happens to work in flight when admission closes."""

    UNSPECIFIED = 0
    HOLD = 1
    DRAIN = 2
    ABORT = 3


class StragglerPolicy(Named):
    """What becomes of an operation when a rollout cannot be captured in time."""

    UNSPECIFIED = 0
    EXCLUDE = 1
    FAIL = 2


class ParticipantState(Named):
    """Where a participant stands."""

    UNSPECIFIED = 0
    OPEN = 1
    PREPARING = 2
    PREPARED = 3
    COMMITTING = 4
    COMMITTED = 5
    RESTORING = 6
    RESTORE_FAILED = 7
    RESTORED = 8


class Activity(Named):
    """Where a live rollout stands at one participant."""

    UNSPECIFIED = 0
    RUNNING = 1
    PARKED = 2
    HELD = 3
    CALLING = 4


class RolloutState(Named):
    """Where a rollout stands at the cut; exactly one of them (DESIGN rule 11)."""

    UNSPECIFIED = 0
    COMPLETED = 1
    PARKED = 2
    PENDING = 3
    EXCLUDED = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a policy. `version`: as the trainer has named them. `digest_sha256`: SHA-256 hex over the engine's own
    checksums of them. Each is empty when it is not known."""

    version: str = ""
    digest_sha256: str = ""

    def __str__(self) -> str:
        named = f"version {self.version!r}" if self.version else "without a version"
        return named + (f", digest {self.digest_sha256}" if self.digest_sha256 else "")


class OperationKind(Named):
    """What an operation does."""

    UNSPECIFIED = 0
    SAVE = 1
    RESTORE = 2


class UploadState(Named):
    """Whether a snapshot is in the object store."""

    UNSPECIFIED = 0
    PENDING = 1
    UPLOADING = 2
    UPLOADED = 3
    FAILED = 4
