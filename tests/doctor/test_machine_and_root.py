"""What of this machine would spoil a save is found, with its fix, and nothing is changed by looking."""

from __future__ import annotations

import datetime
import os
import re
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from coordinator import certs, settings
from coordinator.doctor import Severity, credentials, machine
from coordinator.doctor import root as snapshot_root
from coordinator.doctor.finding import Finding, worst
from coordinator.environment import INTERNAL, VARIABLES
from coordinator.wire.errors import Reason

HUGE = 10**18


def only(findings: list[Finding], severity: Severity) -> Finding:
    found = [finding for finding in findings if finding.severity is severity]
    assert len(found) == 1, findings
    return found[0]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SAFEPOINT_ROOTT", "SAFEPOINT_ROOT"),
        ("SAFEPOINT_ROLE", "SAFEPOINT_ROLES"),
        ("SAFEPOINT_COORDINATOR_LEASE_TTL", "SAFEPOINT_COORDINATOR_LEASE_TTL_S"),
        ("SAFEPOINT_AUTOSAVE_EVERY_STEP", "SAFEPOINT_AUTOSAVE_EVERY_STEPS"),
    ],
)
def test_a_misspelt_variable_is_a_warning_with_the_one_that_was_meant(name: str, meant: str) -> None:
    found = only(list(machine.variables({name: "1", "SAFEPOINT_JOB": "one", "PATH": "/bin"})), Severity.WARNING)
    assert found.subject == name
    assert f"Did you mean {meant}?" == found.fix


def test_a_variable_like_no_other_is_a_warning_without_a_guess() -> None:
    found = only(list(machine.variables({"SAFEPOINT_COLOUR": "1"})), Severity.WARNING)
    assert "Did you mean" not in found.fix


def test_variables_that_are_read_are_well() -> None:
    environ = dict.fromkeys((*VARIABLES, *INTERNAL, *settings.variables()), "1")
    assert only(list(machine.variables(environ)), Severity.OK)


def test_every_variable_that_is_read_is_in_the_table() -> None:
    top = Path(settings.__file__).parents[1]
    sources = [path.read_text() for part in ("coordinator", "participant_shims") for path in (top / part).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"[\"'](SAFEPOINT_[A-Z_]*[A-Z])[\"']", text)}
    assert len(read) > 20
    assert read <= {*VARIABLES, *INTERNAL, *settings.variables()}


@pytest.mark.parametrize(
    "environ",
    [
        {"http_proxy": "http://proxy:3128"},
        {"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "example.org"},
        {"grpc_proxy": "http://proxy:3128", "NO_PROXY": "localhost"},
        {"ALL_PROXY": "socks5://proxy", "no_proxy": "10.0.0.0/8,localhost"},
    ],
)
def test_a_proxy_that_would_capture_loopback_is_a_warning_with_the_variable_to_set(environ: dict[str, str]) -> None:
    found = only(list(machine.proxies(environ)), Severity.WARNING)
    assert "no_proxy" in found.fix
    assert "127.0.0.1" in found.message


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"http_proxy": ""},
        {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"},
        {"http_proxy": "http://proxy:3128", "NO_PROXY": "*"},
        {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.0/8"},
    ],
)
def test_loopback_that_no_proxy_captures_is_well(environ: dict[str, str]) -> None:
    assert [finding.severity for finding in machine.proxies(environ)] == [Severity.OK]


def test_a_python_that_is_too_old_is_an_error_and_one_that_is_untried_a_note() -> None:
    assert only(list(machine.versions((3, 10, 2), "Linux")), Severity.ERROR).reason is Reason.UNSUPPORTED
    assert only(list(machine.versions((3, 14, 0), "Linux")), Severity.NOTE).fix
    assert only(list(machine.versions((3, 12, 1), "Darwin")), Severity.ERROR).subject == "platform"
    assert [finding.severity for finding in machine.versions((3, 13, 0), "Linux")] == [Severity.OK]


def test_the_contract_loads_here() -> None:
    assert [finding.severity for finding in machine.contract()] == [Severity.OK]


@pytest.mark.parametrize("place", ["relative/root", "{tmp}/absent", "{tmp}/file"])
def test_a_root_that_cannot_be_used_is_an_error_that_names_it(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = place.format(tmp=tmp_path)
    found = only(list(snapshot_root.root(path, 0)), Severity.ERROR)
    assert found.subject == path
    assert found.fix
    assert found.reason is Reason.STORAGE_FAILED


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_that_this_user_may_not_write_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert only(list(snapshot_root.root(str(tmp_path), 0)), Severity.ERROR).fix


def test_looking_at_a_root_leaves_nothing_in_it(tmp_path: Path) -> None:
    before = tmp_path.stat().st_mtime_ns
    findings = list(snapshot_root.root(str(tmp_path), 0))
    assert all(finding.severity < Severity.ERROR for finding in findings), findings
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.stat().st_mtime_ns == before, "not even for a moment"


def test_a_root_without_room_for_another_snapshot_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(list(snapshot_root.root(str(tmp_path), HUGE)), Severity.ERROR).reason is Reason.STORAGE_FULL
    monkeypatch.setattr(snapshot_root.shutil, "disk_usage", MagicMock(return_value=SimpleNamespace(free=250_000_000)))
    assert "fewer than 3" in only(list(snapshot_root.root(str(tmp_path), 100_000_000)), Severity.WARNING).message
    assert worst(snapshot_root.root(str(tmp_path), 50_000_000)).severity < Severity.WARNING  # type: ignore[union-attr]


def test_a_root_that_is_mounted_read_only_says_so_and_not_chown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_root.os, "statvfs", MagicMock(return_value=SimpleNamespace(f_flag=os.ST_RDONLY)))
    found = only(list(snapshot_root.root(str(tmp_path), 0)), Severity.ERROR)
    assert "read-only" in found.message
    assert "mount it for writing" in found.fix
    assert "chown" not in found.fix


def test_a_root_with_less_than_what_the_coordinator_keeps_says_how_much_it_needs_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_root.shutil, "disk_usage", MagicMock(return_value=SimpleNamespace(free=100_000)))
    found = only(list(snapshot_root.root(str(tmp_path), 0)), Severity.ERROR)
    assert found.reason is Reason.STORAGE_FULL
    assert "262 kB" in found.message
    assert "so that what has begun can end" in found.message
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "coordinator" / "reserve").touch()  # it has it already
    assert all(f.severity < Severity.ERROR for f in snapshot_root.root(str(tmp_path), 0))


def test_a_slow_fsync_is_a_warning_with_its_cost(tmp_path: Path) -> None:
    ticks = count()
    findings = list(snapshot_root.root(str(tmp_path), 0, clock=lambda: next(ticks) * 0.25))
    assert "250 ms" in only(findings, Severity.WARNING).message


def test_what_lies_among_the_snapshots_and_is_none_is_a_warning(tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    (snapshots / "step-1").mkdir(parents=True)
    assert worst(snapshot_root.root(str(tmp_path), 0)).severity < Severity.WARNING  # type: ignore[union-attr]
    (snapshots / "notes.txt").write_text("?")
    (snapshots / "~old").mkdir()
    found = only(list(snapshot_root.root(str(tmp_path), 0)), Severity.WARNING)
    assert found.subject == str(snapshots)
    assert "'notes.txt', '~old'" in found.message
    assert "Move it" in found.fix


def test_a_root_on_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_root, "file_system", MagicMock(return_value="tmpfs"))
    assert "tmpfs" in only(list(snapshot_root.root(str(tmp_path), 0)), Severity.WARNING).message


def test_the_file_system_is_that_of_the_longest_mount_and_the_last_one_over_it(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:5 / {tmp_path} rw shared:1 - tmpfs tmpfs rw\n"
        f"3 1 0:6 / {tmp_path} rw - nfs4 server:/x rw\n"
        f"4 1 0:7 / {spaced} rw - overlay overlay rw\n"
        "5 1 0:8\n"
    )
    (tmp_path / "a b").mkdir()
    assert snapshot_root.file_system(tmp_path, mounts) == "nfs4"
    assert snapshot_root.file_system(tmp_path / "a b", mounts) == "overlay"
    assert snapshot_root.file_system(Path("/"), mounts) == "ext4"
    assert snapshot_root.file_system(tmp_path, tmp_path / "absent") == ""


def test_a_token_that_is_open_short_or_absent_is_an_error_and_none_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAFEPOINT_TOKEN_FILE", raising=False)
    file = tmp_path / "token"
    file.write_text("x" * 64)
    file.chmod(0o644)
    assert "chmod 600" in only(list(credentials.token(str(file))), Severity.ERROR).fix
    file.chmod(0o600)
    assert [finding.severity for finding in credentials.token(str(file))] == [Severity.OK]
    file.write_text("short")
    assert only(list(credentials.token(str(file))), Severity.ERROR).fix
    assert only(list(credentials.token(str(tmp_path / "absent"))), Severity.ERROR).reason is Reason.UNAUTHENTICATED
    assert only(list(credentials.token("")), Severity.NOTE).fix


def test_a_certificate_that_is_absent_expired_or_about_to_expire_is_told_with_the_command_that_renews_it(
    tmp_path: Path,
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    certs.init(tmp_path, "default")
    mine = str(tmp_path / "trainer")

    def at(days: float) -> Finding:
        (found,) = credentials.certificates(mine, now + datetime.timedelta(days=days))
        return found

    assert at(0).severity is Severity.OK
    assert (at(80).severity, "certs renew" in at(80).fix) == (Severity.WARNING, True)
    assert (at(91).severity, at(91).reason) == (Severity.ERROR, Reason.UNAUTHENTICATED)
    assert "certs renew" in at(91).fix
    assert at(-1).severity is Severity.ERROR  # a machine whose clock is behind
    (tmp_path / "trainer" / "tls.key").chmod(0o644)
    assert at(0).severity is Severity.ERROR
    (tmp_path / "trainer" / "tls.key").chmod(0o600)
    certs.init(tmp_path / "another", "default")
    (tmp_path / "another" / "authority" / "ca.crt").replace(tmp_path / "trainer" / "ca.crt")
    assert at(0).severity is Severity.ERROR
    assert [f.severity for f in credentials.certificates("", now)] == [Severity.NOTE]
