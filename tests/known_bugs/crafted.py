"""Snapshots with a fault in them, made from real ones: plain damage, and hostile changes under digests that are right.

The rule: whoever changes something below a digest makes every digest above it right again, as an attacker would, so that a
refusal comes from the check that is meant and not from a digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safepoint.v1 import manifest_pb2

from coordinator.wire.beneath import Directory
from coordinator.wire.manifest_file import (
    PARTICIPANT_KIND,
    SNAPSHOT_KIND,
    encode,
    read_participant_manifest,
    read_snapshot_manifest,
)

PART = "agent-0"


def envelope(kind: str, body: bytes, version: int = 1) -> bytes:
    """A manifest file of any body, with the digest it needs."""
    head = {"safepoint": kind, "version": version, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + body


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def change_snapshot(snapshot: Path, change: Callable[[manifest_pb2.SnapshotManifest], None]) -> None:
    """Another snapshot manifest, rightly digested."""
    with Directory.open(snapshot) as directory:
        manifest, _ = read_snapshot_manifest(directory)
    change(manifest)
    rewrite(snapshot / "manifest.json", encode(SNAPSHOT_KIND, manifest))


def change_part(snapshot: Path, change: Callable[[manifest_pb2.ParticipantManifest], None]) -> None:
    """Another participant manifest, and the snapshot manifest that vouches for it."""
    with Directory.open(snapshot / PART) as directory:
        manifest, _ = read_participant_manifest(directory)
    change(manifest)
    data = encode(PARTICIPANT_KIND, manifest)
    rewrite(snapshot / PART / "manifest.json", data)
    digest = hashlib.sha256(data).hexdigest()

    def vouch(whole: manifest_pb2.SnapshotManifest) -> None:
        next(r for r in whole.participants if r.participant_id == PART).manifest_sha256 = digest

    change_snapshot(snapshot, vouch)


def change_body(path: Path, kind: str, change: Callable[[dict[str, Any]], None], version: int = 1) -> None:
    """A manifest whose JSON is changed by hand: fields that no message of ours has."""
    document = json.loads(path.read_bytes().partition(b"\n")[2])
    change(document)
    rewrite(path, envelope(kind, json.dumps(document).encode(), version))


def change_ledger(snapshot: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Another ledger, and the digest that vouches for it; totals stay."""
    path = snapshot / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    rewrite(path, data)

    def vouch(whole: manifest_pb2.SnapshotManifest) -> None:
        whole.ledger_sha256, whole.ledger_size_bytes = hashlib.sha256(data).hexdigest(), len(data)

    change_snapshot(snapshot, vouch)


def name_file(path: str) -> Callable[[Path], None]:
    """The part's first file has this path."""

    def damage(snapshot: Path) -> None:
        def change(manifest: manifest_pb2.ParticipantManifest) -> None:
            manifest.files[0].path = path

        change_part(snapshot, change)

    return damage


def truncate(name: str) -> Callable[[Path], None]:
    return lambda snapshot: rewrite(snapshot / name, (snapshot / name).read_bytes()[:-1])


def edit(name: str) -> Callable[[Path], None]:
    def damage(snapshot: Path) -> None:
        data = bytearray((snapshot / name).read_bytes())
        data[len(data) // 2] ^= 1
        rewrite(snapshot / name, bytes(data))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda snapshot: (snapshot / name).unlink()


def link_file(snapshot: Path) -> None:
    """A file is a link to one with the same bytes."""
    victim, outside = snapshot / PART / "state.bin", snapshot.parents[1] / "outside.bin"
    shutil.move(victim, outside)
    victim.symlink_to(outside)


def link_directory(snapshot: Path) -> None:
    outside = snapshot.parents[1] / "outside"
    shutil.move(snapshot / PART, outside)
    (snapshot / PART).symlink_to(outside)


def link_ledger(snapshot: Path) -> None:
    outside = snapshot.parents[1] / "outside.jsonl"
    shutil.move(snapshot / "ledger.jsonl", outside)
    (snapshot / "ledger.jsonl").symlink_to(outside)


def second_name(snapshot: Path) -> None:
    os.link(snapshot / PART / "state.bin", snapshot.parents[1] / "second-name")


def fifo(snapshot: Path) -> None:
    (snapshot / PART / "state.bin").unlink()
    os.mkfifo(snapshot / PART / "state.bin")


def renamed_from(snapshot: Path) -> None:
    """The directory holds another snapshot of this job."""
    other = snapshot.with_name("step-0")
    shutil.rmtree(snapshot)
    shutil.copytree(other, snapshot)


def swapped_part(snapshot: Path) -> None:
    """The part of another snapshot lies where this one's was."""
    shutil.rmtree(snapshot / PART)
    shutil.copytree(snapshot.with_name("step-0") / PART, snapshot / PART)


def swapped_part_vouched_for(snapshot: Path) -> None:
    """The same, and the manifest vouches for it."""
    swapped_part(snapshot)
    digest = hashlib.sha256((snapshot / PART / "manifest.json").read_bytes()).hexdigest()

    def vouch(whole: manifest_pb2.SnapshotManifest) -> None:
        next(r for r in whole.participants if r.participant_id == PART).manifest_sha256 = digest

    change_snapshot(snapshot, vouch)


def set_whole(**fields: Any) -> Callable[[Path], None]:
    def damage(snapshot: Path) -> None:
        def change(manifest: manifest_pb2.SnapshotManifest) -> None:
            for name, value in fields.items():
                setattr(manifest, name, value)

        change_snapshot(snapshot, change)

    return damage


def unknown_field(snapshot: Path) -> None:
    change_body(snapshot / "manifest.json", SNAPSHOT_KIND, lambda document: document.update(compression="zstd"))


def newer_envelope(snapshot: Path) -> None:
    change_body(snapshot / "manifest.json", SNAPSHOT_KIND, lambda document: None, version=2)


def unknown_state(snapshot: Path) -> None:
    change_ledger(snapshot, lambda lines: lines[0].update(state="ROLLOUT_STATE_FOO"))


def state_that_is_none(snapshot: Path) -> None:
    change_ledger(snapshot, lambda lines: lines[0].update(state="foo"))


def lost_rollout(snapshot: Path) -> None:
    change_ledger(snapshot, lambda lines: lines.pop())


def doubled_rollout(snapshot: Path) -> None:
    change_ledger(snapshot, lambda lines: lines.__setitem__(1, dict(lines[0])))


def moved_rollout(snapshot: Path) -> None:
    change_ledger(snapshot, lambda lines: lines[0].update(state="ROLLOUT_STATE_COMPLETED"))


def escaping_participant(snapshot: Path) -> None:
    def change(whole: manifest_pb2.SnapshotManifest) -> None:
        next(r for r in whole.participants if r.participant_id == PART).participant_id = "../step-0/agent-0"

    change_snapshot(snapshot, change)


def unpublished(snapshot: Path) -> None:
    """A save that died before its manifest."""
    (snapshot / "manifest.json").unlink()
