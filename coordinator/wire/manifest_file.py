"""How manifests lie on disk: one envelope line, then the message as protobuf JSON.

The rule: what is saved is read strictly. The envelope gives kind, version, length and SHA-256 of the body, which are
checked before a byte of the body is parsed; an unknown field or enum value with the right digest can only come from a
newer Safepoint and is refused as such (SNAPSHOT_TOO_NEW), everything else that is wrong is SNAPSHOT_CORRUPT.

    {"safepoint":"participant-manifest","version":1,"bytes":412,"sha256":"9f..."}
    { "format_version": 1, ... }

Both ends use this one copy. Imports the generated messages, so it is not pure. Everything blocks: use a thread.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from safepoint.v1 import manifest_pb2

from coordinator.wire.beneath import FileDigest, segments
from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Reason, Refused, SafepointError, refuse
from coordinator.wire.folder import ChunkStore, Folder
from coordinator.wire.ids import is_wire_id
from coordinator.wire.rope import is_rope, read_rope, root_of

PLAIN_FORMAT: Final = 1
CHUNKED_FORMAT: Final = 2  # of a participant's manifest that names chunks
_NEWEST: Final = {"participant-manifest": CHUNKED_FORMAT, "snapshot-manifest": PLAIN_FORMAT}
MANIFEST_NAME: Final = "manifest.json"
LEDGER_NAME: Final = "ledger.jsonl"  # beside the participants' directories, as the manifest of the snapshot is
PARTICIPANT_KIND: Final = "participant-manifest"
SNAPSHOT_KIND: Final = "snapshot-manifest"
VOID: Final = b'{"safepoint":"void"}\n'  # in place of a manifest: this snapshot is never published
MAX_MANIFEST_BYTES: Final = 64 << 20  # some 300,000 files; a reader must bound what a stranger's file may cost
MAX_FILES: Final = 200_000
MAX_UNLISTED: Final = 100
MAX_EPOCH: Final = 10**15
_MAX_ENVELOPE: Final = 512
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

ManifestT = TypeVar("ManifestT", manifest_pb2.ParticipantManifest, manifest_pb2.SnapshotManifest)


@dataclass(frozen=True, slots=True)
class Verified:
    """What a verification read. `unlisted` are files that nobody vouches for: ignored, at most 100 are named."""

    files: int
    size_bytes: int
    unlisted: tuple[str, ...]


def is_sha256(text: str) -> bool:
    """Whether `text` is lower-case SHA-256 hex."""
    return _SHA256.fullmatch(text) is not None


def encode(kind: str, message: manifest_pb2.ParticipantManifest | manifest_pb2.SnapshotManifest) -> bytes:
    """The bytes of a manifest file, envelope included."""
    body = json_format.MessageToJson(message, preserving_proto_field_name=True, indent=1).encode() + b"\n"
    envelope = {
        "safepoint": kind,
        "version": message.format_version,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(envelope, separators=(",", ":")).encode() + b"\n" + body


def decode(kind: str, data: bytes, into: type[ManifestT], where: str) -> ManifestT:
    """The manifest in `data`; `where` names the file in messages.

    Raises SNAPSHOT_CORRUPT (truncated, edited, of another kind), SNAPSHOT_TOO_NEW (newer version, unknown field or
    enum value), SNAPSHOT_UNSAFE (a path that leaves its directory), LIMIT_EXCEEDED.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise refuse(Reason.LIMIT_EXCEEDED, f"{where} is larger than {MAX_MANIFEST_BYTES} bytes.")
    head, newline, body = data.partition(b"\n")
    version = _check_envelope(kind, head if newline else b"", body, where)
    message = _parse(body, into, where)
    if message.format_version > _NEWEST[kind]:
        raise _too_new(where, f"format {message.format_version}")
    if message.format_version != version:
        raise _corrupt(
            where, "it names no format" if not message.format_version else "its format is not its envelope's"
        )
    if isinstance(message, manifest_pb2.ParticipantManifest):
        _check_participant(message, where)
    else:
        _check_snapshot(message, where)
    return message


def write_participant_manifest(directory: Folder, manifest: manifest_pb2.ParticipantManifest) -> FileDigest:
    """Write `manifest.json` into a participant's directory, durably, never over another. The digest is the file's.

    Raises FileExistsError, STORAGE_FULL, STORAGE_FAILED; then there is no manifest.
    """
    return directory.write_new(MANIFEST_NAME, encode(PARTICIPANT_KIND, manifest))


def write_snapshot_manifest(directory: Folder, manifest: manifest_pb2.SnapshotManifest) -> FileDigest:
    """Publish: as `write_participant_manifest`, for the snapshot. From here on the snapshot exists.

    Raises SNAPSHOT_CORRUPT, SNAPSHOT_UNSAFE for one that no reader would take.
    """
    _check_snapshot(manifest, str(directory.path / MANIFEST_NAME))
    return directory.write_new(MANIFEST_NAME, encode(SNAPSHOT_KIND, manifest))


def is_void(directory: Folder) -> bool:
    """Whether the name of a snapshot's manifest was taken by VOID. Raises FileNotFoundError when nobody has it."""
    return directory.size(MANIFEST_NAME) == len(VOID) and directory.read(MANIFEST_NAME, len(VOID)) == VOID


def read_participant_manifest(
    directory: Folder, expected_sha256: str = ""
) -> tuple[manifest_pb2.ParticipantManifest, FileDigest]:
    """The manifest of a participant's directory. Raises as `decode`, also when the file's digest is not the expected."""
    data, found = _read(directory, expected_sha256)
    where = str(directory.path / MANIFEST_NAME)
    return decode(PARTICIPANT_KIND, data, manifest_pb2.ParticipantManifest, where), found


def read_snapshot_manifest(directory: Folder) -> tuple[manifest_pb2.SnapshotManifest, FileDigest]:
    """The manifest of a snapshot's directory. Raises as `decode`; FileNotFoundError when it was never published."""
    data, found = _read(directory, "")
    where = str(directory.path / MANIFEST_NAME)
    return decode(SNAPSHOT_KIND, data, manifest_pb2.SnapshotManifest, where), found


def verify_files(
    directory: Folder, manifest: manifest_pb2.ParticipantManifest, chunks: ChunkStore | None = None
) -> Verified:
    """Read every byte that the manifest lists, chunks too, and compare sizes and digests.

    `chunks`: those of the root; None for a directory of a disk, which shows where they are.

    Raises SNAPSHOT_CORRUPT naming the first file that is missing or differs, and how many chunks, SNAPSHOT_UNSAFE for links and devices.
    """
    size = 0
    for entry in manifest.files:
        where = directory.path / entry.path
        try:
            found = directory.digest(entry.path)
        except FileNotFoundError:
            raise _corrupt(str(where), "it is listed and not there") from None
        if found.size_bytes != entry.size_bytes:
            raise _corrupt(str(where), f"it has {found.size_bytes} bytes instead of {entry.size_bytes}")
        if found.sha256 != entry.sha256:
            raise _corrupt(str(where), "its bytes are not those that were saved")
        size += found.size_bytes
    size += _verify_chunks(directory, manifest, chunks or Chunks(root_of(Path(directory.path))))
    listed = {entry.path for entry in manifest.files} | {MANIFEST_NAME}
    unlisted = [path for path in directory.walk(len(listed) + MAX_UNLISTED) if path not in listed]
    return Verified(len(manifest.files) + len(manifest.chunks), size, tuple(unlisted[:MAX_UNLISTED]))


def _verify_chunks(directory: Folder, manifest: manifest_pb2.ParticipantManifest, chunks: ChunkStore) -> int:
    """The bytes of all chunks, every one of which was read, and is one that a rope of the manifest names."""
    listed = {Chunk(entry.sha256, entry.size_bytes) for entry in manifest.chunks}
    named = {
        chunk for entry in manifest.files if is_rope(entry.path) for chunk in read_rope(directory, entry.path).chunks
    }
    if named != listed:
        raise _corrupt(str(directory.path / MANIFEST_NAME), "its chunks are not those of its files")
    damaged: list[SafepointError] = []
    for chunk in sorted(listed, key=lambda chunk: chunk.sha256):
        try:
            chunks.check(chunk)
        except SafepointError as error:  # the others are read as well: no save relies on what is found damaged here
            if error.reason not in (Reason.SNAPSHOT_CORRUPT, Reason.SNAPSHOT_UNSAFE):
                raise
            damaged.append(error)
    if damaged:
        first, more = damaged[0].problem, len(damaged) - 1
        so_are = f" And {more} more of its chunks cannot be used." if more else ""
        raise refuse(first.reason, first.message + so_are)
    return sum(chunk.size_bytes for chunk in listed)


def _read(directory: Folder, expected_sha256: str) -> tuple[bytes, FileDigest]:
    data = directory.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    found = FileDigest(len(data), hashlib.sha256(data).hexdigest())
    if expected_sha256 and found.sha256 != expected_sha256:
        raise _corrupt(str(directory.path / MANIFEST_NAME), "it is not the one that the snapshot names")
    return data, found


def _check_envelope(kind: str, head: bytes, body: bytes, where: str) -> int:
    """The version that it names."""
    try:
        envelope: object = json.loads(head) if len(head) <= _MAX_ENVELOPE else None
    except (ValueError, RecursionError):
        envelope = None
    if not isinstance(envelope, dict):
        raise _corrupt(where, "its first line is no envelope")
    fields = cast("dict[str, Any]", envelope)
    version = fields.get("version")
    if type(version) is int and version > _NEWEST[kind]:
        raise _too_new(where, f"version {version}")
    if fields.get("safepoint") != kind or type(version) is not int or version < PLAIN_FORMAT:
        raise _corrupt(where, f"its envelope is not that of a {kind}")
    if set(fields) != {"safepoint", "version", "bytes", "sha256"}:
        raise _corrupt(where, "its envelope has other fields than it should")
    if fields["bytes"] != len(body) or type(fields["bytes"]) is not int:
        raise _corrupt(where, f"it has {len(body)} bytes instead of {fields['bytes']!s:.20}")
    if fields["sha256"] != hashlib.sha256(body).hexdigest():
        raise _corrupt(where, "its bytes are not those that were saved")
    return version


def _parse(body: bytes, into: type[ManifestT], where: str) -> ManifestT:
    try:
        text = body.decode("utf-8")
        message = json_format.Parse(text, into(), max_recursion_depth=32)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        try:
            json_format.Parse(body.decode("utf-8"), into(), ignore_unknown_fields=True, max_recursion_depth=32)
        except (json_format.ParseError, ValueError, RecursionError):
            raise _corrupt(where, f"it cannot be read: {str(error)[:200]}") from error
        raise _too_new(where, str(error)[:200]) from error
    unknown = next(_unknown_enums(message), "")
    if unknown:
        raise _too_new(where, unknown)
    return message


def _unknown_enums(message: Message) -> Iterator[str]:
    # protobuf JSON accepts numbers for enums, unknown ones too.
    for field, value in cast("list[tuple[FieldDescriptor, Any]]", message.ListFields()):
        values: list[Any] = [value] if isinstance(value, (int, str, Message)) else list(value)
        if field.enum_type is not None:
            known = field.enum_type.values_by_number
            yield from (f"value {number} of {field.name}" for number in values if number not in known)
        elif field.message_type is not None:
            for below in values:
                if isinstance(below, Message):  # the keys of a map are not
                    yield from _unknown_enums(below)


def _check_participant(message: manifest_pb2.ParticipantManifest, where: str) -> None:
    for name in (message.operation_id, message.snapshot_id, message.incarnation_id):
        if not is_wire_id(name):
            raise _corrupt(where, f"{name[:50]!r} is no id")
    if not is_wire_id(message.capabilities.participant_id):
        raise _corrupt(where, "it names no participant")
    if len(message.files) > MAX_FILES:
        raise refuse(Reason.LIMIT_EXCEEDED, f"{where} lists more than {MAX_FILES} files.")
    paths = [entry.path for entry in message.files]
    for entry in message.files:
        if segments(entry.path)[-1] == MANIFEST_NAME and "/" not in entry.path:
            raise refuse(Reason.SNAPSHOT_UNSAFE, f"{where} lists itself.")
        if not is_sha256(entry.sha256):
            raise _corrupt(where, f"{entry.path} has no digest")
    if paths != sorted(set(paths)):
        raise _corrupt(where, "its files are not sorted, or one is listed twice")
    chunks = [chunk.sha256 for chunk in message.chunks]
    if not all(is_sha256(chunk.sha256) and chunk.size_bytes for chunk in message.chunks):
        raise _corrupt(where, "one of its chunks has no digest or size")
    if chunks != sorted(set(chunks)):
        raise _corrupt(where, "its chunks are not sorted, or one is listed twice")
    if bool(chunks) is not (message.format_version == CHUNKED_FORMAT):
        raise _corrupt(where, "its format is not one for what it holds")
    if message.ledger_file and message.ledger_file not in set(paths):
        raise _corrupt(where, "its ledger is not among its files")
    if message.shared_state_sha256 and not is_sha256(message.shared_state_sha256):
        raise _corrupt(where, "its digest of shared state is none")
    _check_weights(message.weights, where)


def _check_weights(weights: manifest_pb2.Weights, where: str) -> None:
    if weights.digest_sha256 and not is_sha256(weights.digest_sha256):
        raise _corrupt(where, "its digest of weights is none")


def _check_snapshot(message: manifest_pb2.SnapshotManifest, where: str) -> None:
    for name in (message.operation_id, message.snapshot_id, message.job_id):
        if not is_wire_id(name):
            raise _corrupt(where, f"{name[:50]!r} is no id")
    if message.coordinator_epoch > MAX_EPOCH:  # nothing could be newer
        raise _corrupt(where, f"{message.coordinator_epoch} is no epoch")
    names = [reference.participant_id for reference in message.participants]
    for reference in message.participants:
        if not is_wire_id(reference.participant_id):
            raise refuse(Reason.SNAPSHOT_UNSAFE, f"{where} names {reference.participant_id[:50]!r} as a participant.")
        if reference.capabilities.participant_id != reference.participant_id:
            raise _corrupt(where, f"{reference.participant_id} has the capabilities of another participant")
        if reference.manifest_sha256 and not is_sha256(reference.manifest_sha256):
            raise _corrupt(where, f"{reference.participant_id} has no digest")
        _check_weights(reference.weights, where)
    if names != sorted(set(names)):
        raise _corrupt(where, "its participants are not sorted, or one is listed twice")
    if not is_sha256(message.ledger_sha256):
        raise _corrupt(where, "its ledger has no digest")


def _corrupt(where: str, why: str) -> SafepointError:
    return refuse(Reason.SNAPSHOT_CORRUPT, f"{where} is damaged: {why}.")


def _too_new(where: str, what: str) -> Refused:
    return refuse(Reason.SNAPSHOT_TOO_NEW, f"{where} was written by a newer Safepoint: {what}.")
