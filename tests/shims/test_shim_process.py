"""The shim as a process: what it prints, that it is alone, how it goes; and `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2
from safepoint.v1 import capabilities_pb2, participant_service_pb2_grpc
from safepoint.v1 import participant_service_pb2 as pb

from coordinator.cli_exit import ExitCode
from coordinator.metrics import metrics_address
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.extras import NotInstalled
from coordinator.wire.rpc import channel
from coordinator.wire.terms import ParticipantState
from coordinator.wire.trace import Tracer
from participant_shims import proxy_http
from participant_shims.adapters.gym import GymAdapter
from participant_shims.cli import EXIT_ANOTHER, EXIT_MISSING, EXIT_USAGE, _registers_at, main
from participant_shims.serve import BOOTSTRAP, ServeOptions, run_serve, serve_environment
from participant_shims.shim import Shim, ShimOptions, only_shim_of
from tests.shims.proxy_server import running_server
from tests.shims.shim_fakes import answer, collect, refused

REPOSITORY = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_")}
    return kept | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}"} | more


@contextlib.contextmanager
def shim_process(*arguments: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "participant_shims.cli", "shim", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**more),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield process, json.loads(line) if line else {}
    finally:
        process.terminate()
        process.communicate(timeout=10)


def wait(condition: Any, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


async def test_a_shim_process_serves_is_alone_and_opens_when_it_goes(short_path: Path) -> None:
    async with running_server() as server:
        arguments = [
            "--proxy", f"127.0.0.1:0=127.0.0.1:{server.port}", "--name", "judge-tool", "--role", "resources",
            "--checkpoint-mode", "stateless", "--life", str(short_path / "life"), "--root", str(short_path),
        ]  # fmt: skip
        with shim_process(*arguments) as (process, announced):
            assert announced["participant_id"] == "judge-tool"
            assert announced["pid"] == process.pid
            host, _, port = announced["listens"].partition(":")  # port 0 was asked for
            socket.create_connection((host, int(port)), 5).close()
            assert json.loads((short_path / "life" / "shim.json").read_text()) == announced
            async with channel(announced["address"]) as link:
                stub = participant_service_pb2_grpc.ParticipantStub(link)
                reply = await answer(stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=10))
                assert reply.incarnation_id == announced["incarnation_id"]
                seen = capabilities_pb2.ParticipantStatus()
                while not seen.HasField("root"):  # as soon as its thread has looked
                    seen = (await answer(stub.GetStatus(pb.GetStatusRequest(), timeout=10))).status
                assert (seen.root.path, bool(seen.root.problem)) == (str(short_path), True), (
                    "no coordinator has been there"
                )
                request = pb.PrepareRequest(context=pb.OperationContext(operation_id="op-1", coordinator_epoch=1))
                request.lease_ttl.FromSeconds(60)
                events = await collect(stub.Prepare(request, timeout=10))
                assert events[-1].prepared.workers[0].pid == process.pid
                second = await asyncio.to_thread(
                    subprocess.run, [sys.executable, "-m", "participant_shims.cli", "shim", *arguments],
                    capture_output=True, text=True, env=environment(), timeout=30,
                )  # fmt: skip
                assert second.returncode == EXIT_ANOTHER
                assert f"pid {process.pid}" in second.stderr
                assert second.stdout == ""
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 10) == 0
            assert not (short_path / "life" / "shim.json").exists()


@pytest.mark.parametrize(
    ("target", "root", "registers_at"),
    [
        ("", "/data", "file:/data/coordinator/address.json"), ("", "s3://b/p/", "file:s3://b/p/coordinator/address.json"),
        ("h:1", "/data", "h:1"), ("none", "/data", ""), ("", "", ""),
    ],
)  # fmt: skip
def test_a_shim_finds_the_coordinator_of_its_root_as_commands_and_trainers_do(
    target: str, root: str, registers_at: str
) -> None:
    assert _registers_at(target, root) == registers_at


def test_a_shim_that_registers_nowhere_says_so_in_the_log_of_its_server(short_path: Path) -> None:
    says, said = os.pipe()
    with os.fdopen(says) as lines:
        arguments = ["--life", str(short_path / "life"), "--name", "counter"]
        process = subprocess.Popen(
            [sys.executable, "-m", "participant_shims.cli", "shim", *arguments], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env=environment(SAFEPOINT_SHIM_SAYS=str(said)), pass_fds=[said],
        )  # fmt: skip
        os.close(said)
        try:
            line = lines.readline()
        finally:
            process.terminate()
            process.wait(10)
    assert "registers nowhere" in line
    assert "set SAFEPOINT_ROOT" in line


async def test_a_killed_shim_gives_its_lock_back(short_path: Path) -> None:
    with only_shim_of(short_path), pytest.raises(SafepointError) as raised, only_shim_of(short_path):
        pass
    assert raised.value.reason is Reason.DUPLICATE_PARTICIPANT
    assert "SAFEPOINT_RUN_DIR of its own" in raised.value.problem.advice, "the other one may be of another job"
    with only_shim_of(short_path):
        pass


def test_a_shim_goes_when_its_server_is_gone(short_path: Path) -> None:
    # The parent is a process that starts the shim and is then killed, as a server is.
    script = (
        "import subprocess,sys,time,os\n"
        "p=subprocess.Popen([sys.executable,'-m','participant_shims.cli','shim','--life',sys.argv[1],"
        "'--name','counter','--parent-pid',str(os.getpid())],stdout=subprocess.PIPE,stderr=subprocess.DEVNULL)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(short_path / "life")], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert parent.stdout is not None
    shim = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait(lambda: not shim.is_running() or shim.status() == psutil.STATUS_ZOMBIE)


async def test_a_shim_without_gates_is_unavailable_and_healthy(short_path: Path) -> None:
    options = ShimOptions(short_path, "counter", bind="unix")
    async with Shim(options, GymAdapter(short_path, "counter")) as shim, channel(shim.address) as link:
        stub = participant_service_pb2_grpc.ParticipantStub(link)
        error = await refused(answer(stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=5)))
        assert error.reason is Reason.UNAVAILABLE
        check = link.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=5) == b"\x08\x01"  # SERVING
        states = health_pb2.HealthListResponse.FromString(
            await link.unary_unary("/grpc.health.v1.Health/List")(b"", timeout=5)
        ).statuses
        assert {name: state.status for name, state in states.items()} == {"": 1, "safepoint.v1.Participant": 1}
        status = await answer(stub.GetStatus(pb.GetStatusRequest(), timeout=5))
        assert status.status.state == ParticipantState.OPEN
        assert "0 of 1 workers" in status.status.waiting_for


async def test_a_token_guards_everything_health_too(short_path: Path) -> None:
    token = short_path / "token"
    token.write_text("t" * 64)
    token.chmod(0o600)
    options = ShimOptions(short_path, "counter", bind="127.0.0.1:0", token_file=str(token))
    async with Shim(options, GymAdapter(short_path, "counter")) as shim, channel(shim.address) as link:
        stub = participant_service_pb2_grpc.ParticipantStub(link)
        error = await refused(answer(stub.GetStatus(pb.GetStatusRequest(), timeout=5)))
        assert error.reason is Reason.UNAUTHENTICATED
        stream = await refused(collect(stub.WatchStatus(pb.WatchStatusRequest(), timeout=5)))
        assert stream.reason is Reason.UNAUTHENTICATED
        metadata = (("authorization", "Bearer " + "t" * 64),)
        await answer(stub.GetStatus(pb.GetStatusRequest(), timeout=5, metadata=metadata))
        check = link.unary_unary("/grpc.health.v1.Health/Check")
        assert (await refused(answer(check(b"", timeout=5)))).reason is Reason.UNAUTHENTICATED
        assert await check(b"", timeout=5, metadata=metadata) == b"\x08\x01"


@pytest.mark.parametrize(
    ("bind", "reason"),
    [("0.0.0.0:0", Reason.INVALID_ARGUMENT), ("nowhere", Reason.INVALID_ARGUMENT), ("host:", Reason.INVALID_ARGUMENT)],
)
async def test_a_bind_that_is_open_or_senseless_is_refused(short_path: Path, bind: str, reason: Reason) -> None:
    with pytest.raises(SafepointError) as raised:
        async with Shim(ShimOptions(short_path, "counter", bind=bind), GymAdapter(short_path, "counter")):
            pass
    assert raised.value.reason is reason


def test_bad_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shim"]) == EXIT_USAGE
    assert "--life" in capsys.readouterr().err
    assert main(["shim", "--proxy", "127.0.0.1:0"]) == EXIT_USAGE
    assert main(["serve"]) == EXIT_USAGE
    assert "after --" in capsys.readouterr().err
    assert main(["serve", "--role", "policy", "--", "true"]) == EXIT_USAGE
    assert "--name" in capsys.readouterr().err
    assert main(["serve", "--", "no-such-command-here"]) == 127


# ---- serve -----------------------------------------------------------------------------------------------------------


def test_serve_sets_the_gates_folder_first_and_only_what_it_was_given() -> None:
    options = ServeOptions(name="policy_model", role="policy", coordinator="10.0.0.1:7")
    set_ = serve_environment(options, {"PYTHONPATH": "/mine", "SAFEPOINT_ROLES": "judge=auxiliary,policy_model=agent"})
    path = set_["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(BOOTSTRAP)
    assert path[-1] == "/mine"
    assert set_["SAFEPOINT_ROLES"] == "judge=auxiliary,policy_model=policy"
    assert set(set_) == {"PYTHONPATH", "SAFEPOINT_ROLES", "SAFEPOINT_COORDINATOR"}
    assert serve_environment(ServeOptions(), {"PYTHONPATH": set_["PYTHONPATH"]}).keys() <= {"PYTHONPATH"}
    with pytest.raises(ValueError, match="--name"):
        serve_environment(ServeOptions(role="policy"), {})


def test_what_is_relative_in_serves_environment_is_absolute_in_that_of_its_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").symlink_to("..data")  # a mounted secret is replaced behind its link
    environ = {
        "SAFEPOINT_ROOT": "root",
        "SAFEPOINT_RUN_DIR": "run",
        "SAFEPOINT_TOKEN_FILE": "token",
        "SAFEPOINT_TLS_DIR": "tls",
    }
    set_ = serve_environment(ServeOptions(root="other"), environ)
    assert {name: set_[name] for name in environ} == {
        "SAFEPOINT_ROOT": f"{tmp_path}/other", "SAFEPOINT_RUN_DIR": f"{tmp_path}/run",
        "SAFEPOINT_TOKEN_FILE": f"{tmp_path}/token", "SAFEPOINT_TLS_DIR": f"{tmp_path}/tls",
    }  # fmt: skip


def test_a_shim_with_a_relative_root_says_why_it_cannot_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shim", "--life", "/nowhere", "--root", "snapshots"]) == EXIT_USAGE
    assert "absolute path, not 'snapshots'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "missing", [NotInstalled("s3 needs s3fs.", "pip install it"), ModuleNotFoundError("no aiohttp", name="aiohttp")]
)
def test_a_missing_package_is_the_exit_code_of_a_missing_package(
    missing: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(*_: object) -> None:
        raise missing

    monkeypatch.setattr("participant_shims.shim.serve_shim", serve)
    assert main(["shim", "--life", "/nowhere"]) == EXIT_MISSING == int(ExitCode.MISSING)
    assert ("s3fs" if isinstance(missing, NotInstalled) else "aiohttp") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "load"),
    [
        ("httptools", proxy_http.load_httptools),
        ("prometheus_client", lambda: metrics_address("127.0.0.1:0")),
        ("opentelemetry", lambda: Tracer("test")),
    ],
)
def test_every_optional_package_that_is_missing_is_told_as_one(
    module: str, load: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(NotInstalled, match=r"Next: pip install "):
        load()


@pytest.mark.parametrize("command", ["shim", "serve", "inspect"])
def test_help_teaches_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert f"  safepoint {command} " in shown[shown.index("example") :]


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_serve_passes_the_exit_code_on(code: str, expected: int) -> None:
    assert run_serve(ServeOptions(), [sys.executable, "-c", code]) == expected


def test_whoever_ran_serve_does_not_get_orphans_of_others_afterwards() -> None:
    assert run_serve(ServeOptions(), [sys.executable, "-c", ""]) == 0
    script = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    leader = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    orphan = psutil.Process(int(leader.stdout))
    try:
        assert orphan.ppid() != os.getpid()
    finally:
        orphan.kill()


def serve_in_process(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "participant_shims.cli", "serve", "--", sys.executable, "-c", script],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_serve_forwards_sigterm_and_leaves_no_orphans() -> None:
    script = (
        "import subprocess,sys,signal,time\n"
        "p=subprocess.Popen([sys.executable,'-c','import signal,time; signal.signal(15, signal.SIG_IGN);"
        "print(1, flush=True); time.sleep(60)'], stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\n"
        "signal.signal(15, lambda *a: sys.exit(5))\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = serve_in_process(script)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 5
    process.stdout.close()
    assert gone(child)  # though it ignored SIGTERM


def test_serve_gates_only_what_is_a_gym_server() -> None:
    script = "import sys; print('participant_shims.gate.install' in sys.modules)"
    process = serve_in_process(script)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out.strip()) == (0, "False")


async def test_a_shim_logs_json_with_its_name_and_the_operation(short_path: Path) -> None:
    async with running_server() as server:
        arguments = [
            "--proxy", f"127.0.0.1:0=127.0.0.1:{server.port}", "--name", "judge-tool", "--role", "resources",
            "--checkpoint-mode", "stateless", "--life", str(short_path / "life"), "--root", str(short_path),
        ]  # fmt: skip
        with shim_process(*arguments, SAFEPOINT_LOG_FORMAT="json") as (process, announced):
            async with channel(announced["address"]) as link:
                stub = participant_service_pb2_grpc.ParticipantStub(link)
                context = pb.OperationContext(operation_id="op-1", coordinator_epoch=1)
                request = pb.PrepareRequest(context=context)
                request.lease_ttl.FromSeconds(60)
                await collect(stub.Prepare(request, timeout=10))
                await answer(stub.Abort(pb.AbortRequest(context=context, cause="a test"), timeout=10))
            process.terminate()
            assert process.stderr is not None
            err = await asyncio.to_thread(process.stderr.read)
    lines = [json.loads(line) for line in err.splitlines()]
    assert all(line["participant_id"] == "judge-tool" for line in lines)
    assert {line["operation_id"] for line in lines if "operation_id" in line} == {"op-1"}
    mine = [line["message"] for line in lines if line.get("operation_id") == "op-1"]
    assert "abort of op-1: a test" in mine, lines
