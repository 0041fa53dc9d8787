"""Commands that start processes, as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator import certs
from coordinator.cli import app
from coordinator.client import Budgets, Client
from coordinator.wire.access import Access
from tests.cli.conftest import Safepoint
from tests.docs.render_tables import ROOT

GYM = ROOT / ".venv-gym" / "bin" / "python"


def start(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
    variables = os.environ | {"SAFEPOINT_COORDINATOR": "", "SAFEPOINT_ROOT": "", "SAFEPOINT_TOKEN_FILE": ""} | env
    if not variables.get("GRPC_VERBOSITY"):
        variables.pop("GRPC_VERBOSITY", None)
    return subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", *arguments], env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def json_lines(text: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    return lines


def test_with_json_logs_everything_on_standard_error_is_json(tmp_path: Path) -> None:
    """What is said beside the log is, too, and gRPC's core, which cannot write JSON, is silent."""
    authority, ours = tmp_path / "certs", tmp_path / "certs" / "server"
    certs.init(authority, "j1")
    ours.mkdir(exist_ok=True)
    certs.Authority.read(authority).issue(ours, certs.names_for("j1", list(Access)))
    process = start(
        "coordinator", "--root", "relative", "--job", "j1", "--log-format", "json", cwd=tmp_path,
        SAFEPOINT_TLS_DIR=str(ours), GRPC_VERBOSITY="",
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:  # gRPC's core has something to say of that
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(10)
            with suppress(OSError):
                stranger.recv(100)
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
    finally:
        process.kill()
        process.wait()
    assert code == 0, err
    said = [line["message"] for line in json_lines(err)]
    assert any(text.startswith("the root is ") for text in said), said
    assert any("export SAFEPOINT_COORDINATOR=file:" in text for text in said), said


@pytest.mark.parametrize(
    "arguments", [("coordinator", "--root", "{file}"), ("shim", "--root", "relative"), ("shim", "--role", "policy")]
)
def test_with_json_logs_why_nothing_started_is_json_too(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    filled = [argument.format(file=tmp_path / "file") for argument in arguments]
    code, _, err = finish(start(*filled, cwd=tmp_path, SAFEPOINT_LOG_FORMAT="json"))
    assert code == 2, err
    (line,) = json_lines(err)
    assert line["level"] == "error"


def test_a_coordinator_announces_itself_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    root = tmp_path / "root"
    process = start("coordinator", "--root", str(root), "--job", "j1", "--lease", "20")
    try:
        assert process.stdout is not None
        announced = json.loads(process.stdout.readline())
        file = root / "coordinator" / "address.json"
        assert json.loads(file.read_text())["address"] == announced["address"]
        with Client(f"file:{file}", budgets=Budgets(5, 5, 5)) as client:
            status = client.status()
            assert (status.job_id, status.coordinator_epoch) == ("j1", announced["epoch"])
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
        assert code == 0, err
        assert "SAFEPOINT_COORDINATOR=file:" in err
    finally:
        process.kill()
        process.wait()


def test_a_coordinator_needs_a_root_and_says_how_to_give_one() -> None:
    code, out, err = finish(start("coordinator"))
    assert code == 2
    assert out == ""
    assert "SAFEPOINT_ROOT" in err


def test_a_misspelt_setting_is_named(tmp_path: Path) -> None:
    file = tmp_path / "safepoint.yaml"
    file.write_text(f"root: {tmp_path}\nleese_ttl_s: 5\n")
    code, _, err = finish(start("coordinator", "--config", str(file)))
    assert code == 2
    assert "Did you mean lease_ttl_s?" in err


@pytest.mark.parametrize(
    ("option", "helps"), [("--bind", "SAFEPOINT_TOKEN_FILE"), ("--page-bind", "127.0.0.1:0"), ("METRICS", "host:port")]
)
def test_an_address_that_is_refused_makes_nothing(tmp_path: Path, option: str, helps: str) -> None:
    env: dict[str, str] = {}
    arguments = [option, "0.0.0.0:0"]
    if option == "METRICS":
        arguments, env = [], {"SAFEPOINT_COORDINATOR_METRICS_BIND": "nowhere"}
    code, out, err = finish(start("coordinator", "--root", str(tmp_path / "root"), *arguments, **env))
    assert (code, out) == (2, "")
    assert helps in err
    assert "export SAFEPOINT_COORDINATOR" not in err, "nobody serves there"
    assert os.listdir(tmp_path) == [], "exit code 2 says that nothing was changed"


def test_serve_passes_on_arguments_and_exit_code(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['SAFEPOINT_ROOT'], sys.argv[1:]); sys.exit(7)"
    process = start("serve", "--root", str(tmp_path), "--", sys.executable, "-c", script, "--json", "-x")
    code, out, err = finish(process)
    assert code == 7, err
    assert out.strip() == f"{tmp_path} ['--json', '-x']"


def test_shim_without_a_server_is_wrong_usage() -> None:
    code, _, err = finish(start("shim"))
    assert code == 2
    assert "--proxy" in err


def test_inspect_reads_a_source_without_gym(tmp_path: Path) -> None:
    server = tmp_path / "counting"
    server.mkdir()
    (server / "app.py").write_text(
        "from nemo_gym.base_resources_server import SimpleResourcesServer\n"
        "from nemo_gym.server_utils import SESSION_ID_KEY\n"
        "from pydantic import Field\n\n\n"
        "class Counting(SimpleResourcesServer):\n"
        "    counts: dict[str, int] = Field(default_factory=dict)\n\n"
        "    async def count(self, request):\n"
        "        session_id = request.session[SESSION_ID_KEY]\n"
        "        self.counts[session_id] = 1\n\n\n"
        "if __name__ == '__main__':\n"
        "    Counting.run_webserver()\n"
    )
    code, out, err = finish(start("inspect", str(server), "--no-probe", "--json"))
    assert code == 0, err
    report = json.loads(out)
    assert report["verdict"] == "codec"
    assert [a["name"] for a in report["session_attributes"]] == ["counts"]
    code, _, _ = finish(start("inspect", str(tmp_path / "nothing"), "--no-probe"))
    assert code == 2


@pytest.mark.gym
def test_inspect_tries_an_installed_server() -> None:
    server = next((GYM.parents[1] / "lib").glob("python3.*/site-packages/resources_servers/example_session_state_mgmt"))
    began = time.monotonic()
    code, out, err = finish(start("inspect", str(server), "--python", str(GYM)))
    assert code == 0, err
    assert "verdict   codec" in out
    assert "3 saved" in out
    assert time.monotonic() - began < 60


def test_where_metrics_are_is_announced_when_any_port_was_asked_for(tmp_path: Path) -> None:
    relative = os.path.relpath(tmp_path / "root")  # where we stand; others stand elsewhere
    process = start("coordinator", "--root", relative, SAFEPOINT_COORDINATOR_METRICS_BIND="127.0.0.1:0")
    try:
        assert process.stdout is not None
        announced = json.loads(process.stdout.readline())
        with urllib.request.urlopen(f"http://{announced['metrics']}/metrics", timeout=60) as answer:
            assert b"safepoint_" in answer.read()
        process.send_signal(signal.SIGTERM)
        code, _, err = finish(process)
        assert code == 0, err
        assert f"the root is {tmp_path}/root" in err
        assert f"file:{tmp_path}/root/coordinator/address.json" in err
    finally:
        process.kill()
        process.wait()


def test_the_version_is_an_option_too() -> None:
    ran = CliRunner().invoke(app, ["--version"])
    assert (ran.exit_code, ran.stdout.split()[0]) == (0, "safepoint")


def test_version_names_the_contract() -> None:
    code, out, _ = finish(start("version", "--json"))
    assert code == 0
    assert json.loads(out)["contract"] == "safepoint.v1"
    assert json.loads(out)["grpcio"]


def test_an_actor_is_kept_to_the_nodes_that_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from coordinator import ray_host

    asked: list[object] = []

    def begin(*arguments: object) -> str:
        asked.extend(arguments[1:])
        return "10.0.0.3:7"

    monkeypatch.setattr(ray_host, "connect", asked.append)
    monkeypatch.setattr(ray_host, "start", begin)
    monkeypatch.setattr(ray_host, "disconnect", lambda: None)
    ran = CliRunner().invoke(
        app, ["coordinator", "--root", str(tmp_path), "--ray", "--ray-address", "head:1", "--ray-resource", "has_root"]
    )
    assert ran.exit_code == 0, ran.output
    assert asked == ["head:1", "safepoint", "safepoint", {"has_root": 0.001}]
    assert json.loads(ran.stdout)["address"] == "10.0.0.3:7"


def test_a_root_that_is_a_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = Safepoint("").run("coordinator", "--root", str(tmp_path / "file"))
    assert ran.code == 2
    assert f"The snapshot root {tmp_path / 'file'} is a file" in ran.err


@pytest.mark.parametrize("roles", ["model=polcy", "model", "model=engine"])
def test_a_role_that_does_not_exist_starts_no_server(
    roles: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, _, role = roles.partition("=")
    command = ["--", sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    given = ["--name", name, "--role", role] if role else []
    monkeypatch.setenv("SAFEPOINT_ROLES", "" if role else roles)
    ran = Safepoint("").run("serve", *given, *command)
    assert ran.code == 2
    assert "choose one of: policy, " in ran.err
    assert not (tmp_path / "ran").exists()
