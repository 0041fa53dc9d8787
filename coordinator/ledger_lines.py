"""A rollout of a ledger as it lies on disk: one line of protobuf JSON, the message LedgerEntry.

The rule: read strictly, written as any reader of protobuf JSON would expect. By hand and not by the protobuf library,
because a snapshot has hundreds of thousands of lines and they are merged while everybody is paused: this is ten times
as fast. A test holds the two together.
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

from safepoint.v1 import manifest_pb2

from coordinator import convert
from coordinator.protocol.ledger import Line
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import is_rollout_id, is_wire_id
from coordinator.wire.terms import RolloutState

_STATES: Final = {f"ROLLOUT_STATE_{state.name}": state for state in RolloutState}
_NAMES: Final = {state: name for name, state in _STATES.items()}
_MAX_TEXT: Final = 4096
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode


def encode(line: Line) -> bytes:
    """The line with its newline. Empty fields are left out, 64-bit numbers are strings, as protobuf JSON has it."""
    fields: dict[str, object] = {"rollout_id": line.rollout_id}
    if line.attempt:
        fields["attempt"] = line.attempt
    fields["state"] = _NAMES[line.state]
    if line.reason:
        fields["reason"] = line.reason
    if line.participant_id:
        fields["participant_id"] = line.participant_id
    if line.recorded_calls:
        fields["recorded_calls"] = str(line.recorded_calls)
    if line.waiting_on:
        fields["waiting_on"] = line.waiting_on
    if line.input_sha256:
        fields["input_sha256"] = line.input_sha256
    return _encode(fields).encode() + b"\n"


def decode(raw: bytes, where: str, runs_at: str = "") -> Line:
    """What a line says; `where` names the file in messages, `runs_at` the agent when the line names none.

    Raises SNAPSHOT_TOO_NEW for an unknown field or state, SNAPSHOT_CORRUPT for everything else that is wrong.
    """
    try:
        loaded: object = json.loads(raw)
    except (ValueError, RecursionError):
        loaded = None
    if type(loaded) is not dict:
        raise _corrupt(where, raw)
    fields = cast("dict[str, Any]", loaded)
    take = fields.pop
    rollout_id, state, participant_id = take("rollout_id", ""), take("state", ""), take("participant_id", runs_at)
    attempt, calls = _number(take("attempt", 0)), _number(take("recorded_calls", 0))
    reason, waiting_on, input_sha256 = (
        _text(take("reason", "")),
        _text(take("waiting_on", "")),
        _text(take("input_sha256", "")),
    )
    if fields:
        raise refuse(
            Reason.SNAPSHOT_TOO_NEW, f"{where} has a field {next(iter(fields))[:50]!r} that is not known here."
        )
    known = _STATES.get(state) if type(state) is str else None
    if known is None:
        if type(state) is str and state.startswith("ROLLOUT_STATE_"):
            raise refuse(Reason.SNAPSHOT_TOO_NEW, f"{where} has a state {state[:50]!r} that is not known here.")
        raise _corrupt(where, raw)
    if attempt is None or calls is None or reason is None or waiting_on is None or input_sha256 is None:
        raise _corrupt(where, raw)
    if type(rollout_id) is not str or type(participant_id) is not str or attempt >> 32 or calls >> 64:
        raise _corrupt(where, raw)
    if not is_rollout_id(rollout_id) or (
        participant_id != runs_at and participant_id and not is_wire_id(participant_id)
    ):
        raise _corrupt(where, raw)
    return Line(rollout_id, attempt, known, reason, participant_id, calls, waiting_on, input_sha256)


def entry(line: Line) -> manifest_pb2.LedgerEntry:
    """The same as a message."""
    return manifest_pb2.LedgerEntry(
        rollout_id=line.rollout_id,
        attempt=line.attempt,
        state=convert.wire(line.state),
        reason=line.reason,
        participant_id=line.participant_id,
        recorded_calls=line.recorded_calls,
        waiting_on=line.waiting_on,
        input_sha256=line.input_sha256,
    )


def _text(value: object) -> str | None:
    return value if type(value) is str and len(value) <= _MAX_TEXT else None


def _number(value: object) -> int | None:
    if type(value) is int:
        return value if value >= 0 else None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    return None


def _corrupt(where: str, raw: bytes) -> SafepointError:
    return refuse(Reason.SNAPSHOT_CORRUPT, f"{where} has a line that is no rollout: {raw[:100]!r}.")
