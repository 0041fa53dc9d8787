"""What is saved is read strictly, and nobody leads a reader out of its directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safepoint.v1 import capabilities_pb2, manifest_pb2

from coordinator.wire import manifest_file
from coordinator.wire.beneath import Directory, segments
from coordinator.wire.errors import Reason, SafepointError
from tests.examples import examples

KIND = manifest_file.PARTICIPANT_KIND


def a_manifest(*files: manifest_pb2.FileEntry) -> manifest_pb2.ParticipantManifest:
    return manifest_pb2.ParticipantManifest(
        format_version=1,
        operation_id="save-1",
        snapshot_id="step-1",
        incarnation_id="i-1",
        capabilities=capabilities_pb2.Capabilities(
            participant_id="agent", role=capabilities_pb2.ROLE_AGENT, depends_on=["policy"]
        ),
        files=files,
        sessions=3,
    )


def decode(data: bytes) -> manifest_pb2.ParticipantManifest:
    return manifest_file.decode(KIND, data, manifest_pb2.ParticipantManifest, "x/manifest.json")


def enveloped(body: bytes, **changes: object) -> bytes:
    import hashlib

    fields = {"safepoint": KIND, "version": 1, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(fields | changes).encode() + b"\n" + body


def reason_of(data: bytes) -> Reason:
    with pytest.raises(SafepointError) as caught:
        decode(data)
    return caught.value.reason


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with Directory.open(tmp_path) as opened:
        yield opened


def test_weights_are_named_where_there_are_any_and_with_a_digest_that_is_one() -> None:
    manifest = a_manifest()
    assert b"weights" not in manifest_file.encode(KIND, manifest)  # an older version reads it
    manifest.weights.version = "step-40"
    assert decode(manifest_file.encode(KIND, manifest)).weights == manifest_pb2.Weights(version="step-40")
    manifest.weights.digest_sha256 = "ab" * 32
    assert decode(manifest_file.encode(KIND, manifest)) == manifest
    manifest.weights.digest_sha256 = "ab"
    assert reason_of(manifest_file.encode(KIND, manifest)) is Reason.SNAPSHOT_CORRUPT


def test_a_manifest_reads_back_as_it_was_written(directory: Directory) -> None:
    written = manifest_file.write_participant_manifest(directory, a_manifest())
    message, found = manifest_file.read_participant_manifest(directory, written.sha256)
    assert message == a_manifest()
    assert found == written
    assert os.listdir(directory.path) == ["manifest.json"]


def test_a_manifest_is_never_replaced(directory: Directory) -> None:
    manifest_file.write_participant_manifest(directory, a_manifest())
    before = (directory.path / "manifest.json").read_bytes()
    other = a_manifest()
    other.sessions = 4
    with pytest.raises(FileExistsError):
        manifest_file.write_participant_manifest(directory, other)
    assert (directory.path / "manifest.json").read_bytes() == before
    assert os.listdir(directory.path) == ["manifest.json"]


def test_another_manifest_than_the_named_one_is_corrupt(directory: Directory) -> None:
    manifest_file.write_participant_manifest(directory, a_manifest())
    with pytest.raises(SafepointError) as caught:
        manifest_file.read_participant_manifest(directory, "0" * 64)
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_damage_to_the_bytes_is_refused(data: st.DataObject) -> None:
    whole = manifest_file.encode(KIND, a_manifest(manifest_pb2.FileEntry(path="a/b", size_bytes=1, sha256="a" * 64)))
    position = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.sampled_from(
            [
                whole[:position],
                whole[:position] + bytes([whole[position] ^ data.draw(st.integers(1, 255))]) + whole[position + 1 :],
                whole[:position] + b"x" + whole[position:],
                whole + whole[position:],
            ]
        )
    )
    assert reason_of(damaged) in {Reason.SNAPSHOT_CORRUPT, Reason.SNAPSHOT_TOO_NEW}


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_with_a_reason(data: bytes) -> None:
    assert reason_of(data) is Reason.SNAPSHOT_CORRUPT


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format_version": 3}, Reason.SNAPSHOT_TOO_NEW),
        ({"format_version": 2}, Reason.SNAPSHOT_CORRUPT),
        ({"brand_new": 1}, Reason.SNAPSHOT_TOO_NEW),
        ({"capabilities": {"participant_id": "agent", "role": "ROLE_WIZARD"}}, Reason.SNAPSHOT_TOO_NEW),
        ({"capabilities": {"participant_id": "agent", "role": 99}}, Reason.SNAPSHOT_TOO_NEW),
        ({"capabilities": {"participant_id": "agent", "quiesce_modes": [1, 99]}}, Reason.SNAPSHOT_TOO_NEW),
        ({"capabilities": {"participant_id": ".."}}, Reason.SNAPSHOT_CORRUPT),
        ({"format_version": 0}, Reason.SNAPSHOT_CORRUPT),
        ({"sessions": "many"}, Reason.SNAPSHOT_CORRUPT),
        ({"files": [{"path": "../x", "sha256": "a" * 64}]}, Reason.SNAPSHOT_UNSAFE),
        ({"files": [{"path": "/etc/passwd", "sha256": "a" * 64}]}, Reason.SNAPSHOT_UNSAFE),
        ({"files": [{"path": "manifest.json", "sha256": "a" * 64}]}, Reason.SNAPSHOT_UNSAFE),
        ({"files": [{"path": "b", "sha256": "a" * 64}, {"path": "a", "sha256": "a" * 64}]}, Reason.SNAPSHOT_CORRUPT),
        ({"files": [{"path": "a", "sha256": "A" * 64}]}, Reason.SNAPSHOT_CORRUPT),
        ({"ledger_file": "ledger.jsonl"}, Reason.SNAPSHOT_CORRUPT),
    ],
)
def test_a_well_digested_body_is_still_read_strictly(change: dict[str, object], expected: Reason) -> None:
    whole = manifest_file.encode(KIND, a_manifest())
    body = json.loads(whole.partition(b"\n")[2]) | change
    assert reason_of(enveloped(json.dumps(body).encode())) is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 3}, Reason.SNAPSHOT_TOO_NEW),
        ({"version": 2}, Reason.SNAPSHOT_CORRUPT),
        ({"version": True}, Reason.SNAPSHOT_CORRUPT),
        ({"safepoint": manifest_file.SNAPSHOT_KIND}, Reason.SNAPSHOT_CORRUPT),
        ({"extra": 1}, Reason.SNAPSHOT_CORRUPT),
        ({"bytes": 1}, Reason.SNAPSHOT_CORRUPT),
    ],
)
def test_the_envelope_is_checked_before_the_body(change: dict[str, object], expected: Reason) -> None:
    body = manifest_file.encode(KIND, a_manifest()).partition(b"\n")[2]
    assert reason_of(enveloped(body, **change)) is expected


def test_deep_nesting_is_refused() -> None:
    assert reason_of(enveloped(b'{"capabilities":' + b"[" * 100_000)) is Reason.SNAPSHOT_CORRUPT


@pytest.mark.parametrize(
    "path", ["", ".", "..", "a/../b", "/a", "a//b", "a/", "a\\b", "a b", "é", "a\0", "a/" * 17 + "a", "a" * 600]
)
def test_paths_with_other_than_plain_segments_are_unsafe(path: str) -> None:
    with pytest.raises(SafepointError) as caught:
        segments(path)
    assert caught.value.reason is Reason.SNAPSHOT_UNSAFE


@pytest.mark.parametrize("kind", ["link", "linked-directory", "hardlink", "fifo", "directory", "device"])
def test_only_plain_files_are_read(directory: Directory, kind: str, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text("x")
    path = "victim"
    if kind == "link":
        (tmp_path / "victim").symlink_to(secret)
    elif kind == "linked-directory":
        (tmp_path / "sub").symlink_to(outside)
        path = "sub/secret"
    elif kind == "hardlink":
        os.link(secret, tmp_path / "victim")
    elif kind == "fifo":
        os.mkfifo(tmp_path / "victim")
    elif kind == "directory":
        (tmp_path / "victim").mkdir()
    else:
        (tmp_path / "victim").symlink_to("/dev/zero")
    for read in (
        lambda: directory.digest(path),
        lambda: directory.read(path, 10),
        lambda: list(directory.lines(path, 10)),
    ):
        with pytest.raises(SafepointError) as caught:
            read()
        assert caught.value.reason is Reason.SNAPSHOT_UNSAFE


def test_a_write_that_was_interrupted_after_the_link_is_still_readable(directory: Directory) -> None:
    directory.write_new("manifest.json", b"hello")
    os.link(directory.path / "manifest.json", directory.path / ".manifest.json.abc")
    assert directory.read("manifest.json", 10) == b"hello"
    directory.discard_temporaries("manifest.json")
    assert os.listdir(directory.path) == ["manifest.json"]


def test_removing_a_directory_removes_links_and_never_what_they_point_at(directory: Directory, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-kept"
    outside.mkdir()
    (outside / "file").write_text("x")
    directory.make_child("gone").close()
    (tmp_path / "gone" / "link").symlink_to(outside)
    directory.remove_child("gone")
    assert (outside / "file").read_text() == "x"
    (tmp_path / "gone").symlink_to(outside)
    with pytest.raises(SafepointError):
        directory.remove_child("gone")
    assert (outside / "file").read_text() == "x"


def test_verification_names_the_file_that_is_wrong_and_reports_the_unlisted(
    directory: Directory, tmp_path: Path
) -> None:
    written = directory.write_new("state.json", b"hello")
    entry = manifest_pb2.FileEntry(path="state.json", size_bytes=written.size_bytes, sha256=written.sha256)
    (tmp_path / "stray").write_text("?")
    assert manifest_file.verify_files(directory, a_manifest(entry)) == manifest_file.Verified(1, 5, ("stray",))
    for damage in (b"hellO", b"hell", b"", None):
        (tmp_path / "state.json").unlink()
        if damage is not None:
            (tmp_path / "state.json").write_bytes(damage)
        with pytest.raises(SafepointError, match=r"state\.json") as caught:
            manifest_file.verify_files(directory, a_manifest(entry))
        assert caught.value.reason is Reason.SNAPSHOT_CORRUPT
        (tmp_path / "state.json").touch()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(depth=st.integers(1, 4))
def test_walking_stops_at_its_limit(directory: Directory, depth: int) -> None:
    for number in range(10):
        (directory.path / f"f{number}").touch()
    assert len(list(directory.walk(depth))) == depth
