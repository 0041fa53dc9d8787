"""`requests.jsonl`: the requests in flight at the cut, one a line, after a line that says of which engine.

Of which weights they are is in the manifest of the part. Files of older versions say it in that line, too, and are read.

The rule: saved files are read strictly; what can't be read refuses the file, by line. Blocks: use a thread.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire import failpoints
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import Weights
from participant_shims.adapter import WrittenFile
from participant_shims.engine.record import Record, record_from_json

REQUESTS: Final = "requests.jsonl"
FORMAT: Final = "vllm-requests-v1"
MAX_LINE_BYTES: Final = 512 << 20  # a million tokens with their log-probabilities


@dataclass(frozen=True, slots=True)
class Origin:
    """The engine that generated what the file holds. `weights`: as read from a file of an older version; never written."""

    model: str
    engine_version: str
    weights: Weights | None = None


def write_requests(directory: Path, origin: Origin, lines: Sequence[str]) -> WrittenFile:
    """Write the file, durably. `lines` are encoded records. Raises OSError; a partial file is left to be removed."""
    failpoints.reach("engine.before_requests")
    digest, size = hashlib.sha256(), 0
    head = {"format": FORMAT, "count": len(lines), "model": origin.model, "engine_version": origin.engine_version}
    fd = os.open(directory / REQUESTS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as out:
        for line in (json.dumps(head), *lines):
            raw = line.encode("utf-8", "surrogatepass") + b"\n"
            out.write(raw)
            digest.update(raw)
            size += len(raw)
        out.flush()
        failpoints.reach("engine.before_requests_fsync")
        os.fsync(out.fileno())
    return WrittenFile(REQUESTS, size, digest.hexdigest())


def encode(record: Record) -> str:
    """A line. Made on the event loop, where the record can't change meanwhile."""
    return json.dumps(record.to_json(), separators=(",", ":"))


def read_requests(directory: Path) -> tuple[Origin, list[Record]]:
    """What was written. Raises SNAPSHOT_CORRUPT, SNAPSHOT_TOO_NEW, SNAPSHOT_UNSAFE; FileNotFoundError."""
    records: list[Record] = []
    with Directory.open(directory) as opened:
        lines = opened.lines(REQUESTS, MAX_LINE_BYTES)
        head = _object(next(iter(lines), b""), 1, directory)
        if head.get("format") != FORMAT:
            raise refuse(
                Reason.SNAPSHOT_TOO_NEW,
                f"{directory / REQUESTS} is of the format {head.get('format')!r}, not {FORMAT}.",
            )
        try:
            version = head.get("weight_version")
            weights = Weights(str(version), str(head["weight_digest"])) if version is not None else None
            origin = Origin(str(head["model"]), str(head["engine_version"]), weights)
            count = int(head["count"])
        except (KeyError, ValueError) as error:
            raise _corrupt(directory, 1, repr(error)) from error
        for number, raw in enumerate(lines, 2):
            try:
                records.append(record_from_json(_object(raw, number, directory)))
            except (KeyError, TypeError, ValueError) as error:
                raise _corrupt(directory, number, repr(error)) from error
    if len(records) != count:
        raise _corrupt(directory, count + 1, f"{len(records)} of {count} requests are there")
    return origin, records


def _object(raw: bytes, number: int, directory: Path) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise _corrupt(directory, number, str(error)) from error
    if not isinstance(found, dict):
        raise _corrupt(directory, number, "it is no object")
    return cast("dict[str, Any]", found)


def _corrupt(directory: Path, number: int, why: str) -> Exception:
    return refuse(Reason.SNAPSHOT_CORRUPT, f"Line {number} of {directory / REQUESTS} can't be read: {why}.")
