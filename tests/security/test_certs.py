"""`safepoint certs`: what it makes is closed, short-lived, and replaced in place."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.certs import USUAL
from coordinator.cli import app
from coordinator.wire.tls import read_tls
from participant_shims.serve import ServeOptions, serve_environment


def run(*arguments: str) -> Any:
    """The exit code, and the certificates that were printed."""
    ran = CliRunner().invoke(app, ["certs", *arguments, "--json"], catch_exceptions=False)
    return ran.exit_code, json.loads(ran.stdout)


def test_a_cluster_gets_an_authority_and_what_its_processes_need(tmp_path: Path) -> None:
    code, made = run("init", str(tmp_path / "c"), "--job", "run-7")
    assert code == 0
    assert {Path(c["directory"]).name: c["names"] for c in made["certificates"]} == {
        "coordinator": ["safepoint://run-7/coordinator"],
        "shim": ["safepoint://run-7/shim"],
        "relay": ["safepoint://run-7/relay"],
        "trainer": ["safepoint://run-7/operator", "safepoint://run-7/restorer"],
        "observer": ["safepoint://run-7/observer"],
    }
    for path in (tmp_path / "c").glob("*"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
        for key in path.glob("*.key"):
            assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
            assert key.read_text() not in json.dumps(made)
        if path.name != "authority":
            assert read_tls(path) is not None
            assert not (path / "ca.key").exists()


def test_an_authority_is_never_written_over(tmp_path: Path) -> None:
    assert run("init", str(tmp_path))[0] == 0
    before = (tmp_path / "authority" / "ca.key").read_bytes()
    code, said = run("init", str(tmp_path))
    assert (code, said["error"]["reason"]) == (2, "INVALID_ARGUMENT")
    assert (tmp_path / "authority" / "ca.key").read_bytes() == before


def test_renewed_ones_have_the_same_names_and_other_keys(tmp_path: Path) -> None:
    run("init", str(tmp_path))
    assert run("issue", str(tmp_path), "shim", "--instance", "sandbox")[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("*/tls.*")}
    names = [c["names"] for c in run("ls", str(tmp_path))[1]["certificates"]]
    code, renewed = run("renew", str(tmp_path))
    assert code == 0
    assert [c["names"] for c in renewed["certificates"]] == names
    assert ["safepoint://default/shim/sandbox"] in names
    assert all(path.read_bytes() != content for path, content in before.items())


@pytest.mark.parametrize("arguments", [["root"], ["operator", "--name", "../x"], ["shim", "--instance", "a/b"]])
def test_what_names_nothing_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    run("init", str(tmp_path))
    assert run("issue", str(tmp_path), *arguments)[0] == 2
    assert {path.parent.name for path in tmp_path.glob("*/tls.key")} == set(USUAL)


def test_serve_tells_the_servers_where_the_certificate_is(tmp_path: Path) -> None:
    assert serve_environment(ServeOptions(tls_dir=str(tmp_path)), {})["SAFEPOINT_TLS_DIR"] == str(tmp_path)
    assert "SAFEPOINT_TLS_DIR" not in serve_environment(ServeOptions(), {})
