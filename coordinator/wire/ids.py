"""Ids on the wire, as types that cannot be confused.

An operation is not the snapshot it makes (upstream lost a review to that), so each kind of id is a type of its own.
The pattern is upstream's: it starts with a letter or digit, then letters, digits, dot, dash, underscore, at most 128
characters. It is also what makes an id safe as a file name.
"""

from __future__ import annotations

import re
import secrets
from typing import Final, NewType

OperationId = NewType("OperationId", str)
SnapshotId = NewType("SnapshotId", str)
ParticipantId = NewType("ParticipantId", str)
IncarnationId = NewType("IncarnationId", str)
RolloutId = NewType("RolloutId", str)

MAX_ID_LENGTH: Final = 128
_WIRE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Rollout ids come from the trainer's rows and are free text within limits: no control characters, no separators of ours.
_ROLLOUT_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=-]{0,255}")


def is_wire_id(text: str) -> bool:
    """Whether `text` may name an operation, a snapshot, a participant or an incarnation."""
    return _WIRE_ID.fullmatch(text) is not None


def is_rollout_id(text: str) -> bool:
    """Whether `text` may name a rollout (1 to 256 characters)."""
    return _ROLLOUT_ID.fullmatch(text) is not None


def new_incarnation_id() -> IncarnationId:
    """A fresh 128-bit id for one lifetime of one process."""
    return IncarnationId("i-" + secrets.token_hex(16))


def new_operation_id(kind: str) -> OperationId:
    """A fresh operation id that says its kind, e.g. `save-3f9a...`."""
    return OperationId(f"{kind}-{secrets.token_hex(8)}")
