"""A participant's `ledger.jsonl`: one LedgerEntry a line, protobuf JSON, field names as in the contract.

The rule: what is read is checked line by line; a line that can't be read refuses the file. Blocks: use a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from google.protobuf import json_format
from safepoint.v1 import manifest_pb2

from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.manifest_file import MANIFEST_NAME, read_snapshot_manifest
from coordinator.wire.terms import RolloutState
from participant_shims.adapter import LedgerLine, WrittenFile

LEDGER: Final = "ledger.jsonl"
MAX_LINE_BYTES: Final = 64 << 10
_encode = json.JSONEncoder(separators=(",", ":")).encode


def write_ledger(directory: Path, lines: Sequence[LedgerLine], participant_id: str) -> WrittenFile:
    """Write `ledger.jsonl`, durably. Raises OSError; a partial file is left for the caller to remove."""
    digest, size = hashlib.sha256(), 0
    fd = os.open(directory / LEDGER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as out:
        for line in lines:
            raw = encode(line, participant_id)
            out.write(raw)
            digest.update(raw)
            size += len(raw)
        out.flush()
        os.fsync(out.fileno())
    return WrittenFile(LEDGER, size, digest.hexdigest())


def encode(line: LedgerLine, participant_id: str) -> bytes:
    """A line with its newline, as protobuf JSON has it: empty fields are left out, 64-bit numbers are strings.

    By hand, since everybody is paused while it is written and there may be many; a test holds it and the message together.
    """
    fields: dict[str, object] = {"rollout_id": line.rollout_id}
    if line.attempt:
        fields["attempt"] = line.attempt
    fields["state"] = f"ROLLOUT_STATE_{line.state.name}"
    if line.reason:
        fields["reason"] = line.reason
    fields["participant_id"] = participant_id
    if line.recorded_calls:
        fields["recorded_calls"] = str(line.recorded_calls)
    if line.waiting_on:
        fields["waiting_on"] = line.waiting_on
    if line.input_sha256:
        fields["input_sha256"] = line.input_sha256
    return _encode(fields).encode() + b"\n"


def snapshot_ledger(snapshot: Path) -> Iterator[LedgerLine]:
    """The lines of the ledger of a whole snapshot, whose digest is compared first; none when it has no ledger.

    Raises SNAPSHOT_CORRUPT, SNAPSHOT_UNSAFE.
    """
    with Directory.open(snapshot) as directory:
        if not directory.has(LEDGER) or not directory.has(MANIFEST_NAME):
            return
        manifest, _ = read_snapshot_manifest(directory)
        if directory.digest(LEDGER).sha256 != manifest.ledger_sha256:
            raise refuse(Reason.SNAPSHOT_CORRUPT, f"{snapshot / LEDGER} is damaged.")
        yield from read_ledger(directory)


def read_ledger(directory: Directory) -> Iterator[LedgerLine]:
    """The lines of the ledger in `directory`. Raises SNAPSHOT_CORRUPT, SNAPSHOT_UNSAFE; FileNotFoundError."""
    for number, raw in enumerate(directory.lines(LEDGER, MAX_LINE_BYTES), 1):
        entry = manifest_pb2.LedgerEntry()
        try:
            json_format.Parse(raw.decode(), entry)
            state = RolloutState(int(entry.state))
        except (json_format.ParseError, ValueError) as error:
            raise refuse(
                Reason.SNAPSHOT_CORRUPT, f"Line {number} of {directory.path / LEDGER} can't be read: {error}."
            ) from error
        yield LedgerLine(
            rollout_id=entry.rollout_id,
            attempt=entry.attempt,
            state=state,
            reason=entry.reason,
            recorded_calls=entry.recorded_calls,
            waiting_on=entry.waiting_on,
            input_sha256=entry.input_sha256,
            participant_id=entry.participant_id,
        )
