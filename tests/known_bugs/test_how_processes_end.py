"""An operation that meets a dead process says how it ended and where its log is (E9): real servers, shims and signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire.errors import Reason, SafepointError
from participant_shims.ends import Predecessor, ServerWatch, predecessor_in
from participant_shims.gate import life
from participant_shims.gate.process import fate, output_of, standstill, started
from participant_shims.gate.shim_process import ANNOUNCEMENT, BEFORE_VARIABLE, ShimProcess
from tests.coordinator.conftest import Bench, unary, until

REPOSITORY = Path(__file__).resolve().parents[2]


def start(bench: Bench, run_dir: Path, log: Path) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_") or k.startswith("SAFEPOINT_TEST")}
    environment = kept | {
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}", "SAFEPOINT_ROOT": str(bench.root),
        "SAFEPOINT_COORDINATOR": bench.running.address,
    }  # fmt: skip
    argv = [sys.executable, "-m", "tests.known_bugs.gated_server", str(run_dir), "sandbox"]
    with log.open("w") as err:
        return subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=err, text=True, cwd=REPOSITORY, env=environment, start_new_session=True
        )


@asynccontextmanager
async def gated_server(bench: Bench, run_dir: Path, log: Path) -> AsyncIterator[tuple[subprocess.Popen[str], Path]]:
    """A registered server named "sandbox" with work that does not end."""
    server = start(bench, run_dir, log)
    assert server.stdout is not None
    try:
        said = json.loads(await asyncio.to_thread(server.stdout.readline))
        await until(lambda: bench.running.operations.discovery.registry.get("sandbox") is not None, 60)
        yield server, Path(said["life"])
    finally:
        server.stdout.close()
        for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait()


async def failing_save(bench: Bench, kill: Any) -> SafepointError:
    """A save that waits for the sandbox while `kill` is called."""
    saving = asyncio.create_task(bench.save(timeout=60, straggler_policy=2, quiesce_mode=2))

    def waited_for() -> bool:
        active = bench.running.operations.active
        return active is not None and "r-1" in active.transaction.why_waiting(0)

    await until(waited_for, 60)
    kill()
    with pytest.raises(SafepointError) as caught:
        await saving
    return caught.value


async def test_the_error_of_a_killed_shim_has_its_signal_its_pid_and_its_log(bench: Bench, short_path: Path) -> None:
    await bench.start(resources=0)
    async with gated_server(bench, short_path / "run", short_path / "server.log") as (_, at):
        pid = int(json.loads((at / ANNOUNCEMENT).read_text())["pid"])
        error = await failing_save(bench, lambda: os.kill(pid, signal.SIGKILL))
        problem = error.problem
        assert (problem.reason, problem.participant_id) == (Reason.UNREACHABLE, "sandbox")
        assert "signal 9 (SIGKILL)" in problem.message
        assert f"pid {pid} on " in problem.message
        assert f"log {at / 'shim.log'}" in problem.message
        assert problem.metadata["log_path"] == str(at / "shim.log")
        assert "signal 9" in problem.metadata["ended"]
        assert [r.rollout_id for r in problem.rollouts] == ["r-1"], "its last state is told as well"
        assert bench.all_open()


async def test_the_error_of_a_killed_server_has_its_signal_its_pid_and_its_log(bench: Bench, short_path: Path) -> None:
    await bench.start(resources=0)
    log = short_path / "server.log"
    async with gated_server(bench, short_path / "run", log) as (server, _):
        with log.open("ab") as out:
            out.write(b"MemoryError: 3 GB\n")
        error = await failing_save(bench, lambda: os.kill(server.pid, signal.SIGKILL))
        # Either its gate is missed first, or its shim has said goodbye first.
        assert error.participant_id == "sandbox"
        assert "ended by signal 9 (SIGKILL)" in error.problem.message
        assert f"pid {server.pid}" in error.problem.message
        registry = bench.running.operations.discovery.registry
        await until(lambda: bool(registry.missing()), 20)
        assert f"Its server (pid {server.pid}, log {log}) was ended by signal 9" in registry.missing()[0].why
        assert '"MemoryError: 3 GB".' in registry.missing()[0].why
        assert '"MemoryError: 3 GB".' in error.problem.message


async def test_a_shim_that_is_told_to_go_says_so_before_it_goes(bench: Bench, short_path: Path) -> None:
    await bench.start(resources=0)
    async with gated_server(bench, short_path / "run", short_path / "server.log") as (server, at):
        lost: list[str] = []
        bench.running.operations.discovery.registry.follow(lambda _, why: lost.append(why.message), lambda _: None)
        os.kill(int(json.loads((at / ANNOUNCEMENT).read_text())["pid"]), signal.SIGTERM)
        await until(lambda: bool(lost), 30)
        assert f"It was told to end by SIGTERM, while its server (pid {server.pid}) lives." in lost[0]


async def test_a_report_of_an_end_removes_nobody_and_may_be_repeated(bench: Bench) -> None:
    await bench.start()
    request = pb.ReportEndRequest(
        participant_id="agent-0", incarnation_id=bench.shims["agent-0"].incarnation_id, exit_code=3
    )
    for _ in range(2):
        await unary(bench.stub().ReportEnd(request, timeout=5))
    registry = bench.running.operations.discovery.registry
    assert registry.get("agent-0") is not None
    with pytest.raises(SafepointError) as caught:
        await unary(bench.stub().ReportEnd(pb.ReportEndRequest(participant_id="../x", incarnation_id="i"), timeout=5))
    assert caught.value.reason is Reason.MALFORMED_ID
    await bench.shims["agent-0"].stop()
    await until(lambda: bool(registry.missing()))
    why = registry.missing()[0].why
    assert why.count("It ended with exit code 3.") == 1, "it was told before the loss was noticed"
    for code in (3, 3, 4):
        request.exit_code = code
        await unary(bench.stub().ReportEnd(request, timeout=5))
    assert registry.missing()[0].why == why, "a process ends once"


async def test_the_end_of_one_that_is_missed_is_told_once(bench: Bench) -> None:
    await bench.start()
    await bench.shims["agent-0"].stop()
    registry = bench.running.operations.discovery.registry
    await until(lambda: bool(registry.missing()))
    told: list[str] = []
    registry.follow(lambda _, __: None, lambda _: None, lambda _, how: told.append(how))
    for code in (3, 3, 4):
        request = pb.ReportEndRequest(
            participant_id="agent-0", incarnation_id=bench.shims["agent-0"].incarnation_id, exit_code=code
        )
        await unary(bench.stub().ReportEnd(request, timeout=5))
    assert told == ["It ended with exit code 3."]
    assert registry.missing()[0].why.endswith(told[0])
    assert registry.missing()[0].why.count("It ended") == 1


@pytest.mark.parametrize(
    ("code", "how"),
    [("raise SystemExit(3)", "ended with exit code 3"), ("import os; os.kill(os.getpid(), 9)", "was ended by signal 9 (SIGKILL)")],
)  # fmt: skip
def test_how_a_process_ended_is_seen_until_its_parent_has_collected_it(code: str, how: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    began = started(process.pid)
    assert fate(process.pid, began) == ""
    process.stdin.write(b"\n")
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert fate(process.pid, began) == how
    process.wait()
    assert fate(process.pid, began) == "has ended"


def test_a_process_that_is_stopped_is_told_from_one_that_is_busy(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert standstill(process.pid) == ""
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert f"is stopped: `kill -CONT {process.pid}`" in standstill(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert standstill(process.pid) == ""


def test_where_a_process_writes_is_its_log_when_that_is_a_file(tmp_path: Path) -> None:
    with (tmp_path / "x.log").open("w") as out:
        process = subprocess.Popen([sys.executable, "-S", "-E", "-c", "input()"], stdin=subprocess.PIPE, stderr=out)
    try:
        assert output_of(process.pid) == str(tmp_path / "x.log")
    finally:
        process.kill()
        process.communicate()
    assert output_of(process.pid) == ""


def test_a_successor_is_told_who_was_here_before_and_how_it_ended(tmp_path: Path) -> None:
    script = (
        "import json, os, pathlib, sys\n"
        f"said = os.environ['{BEFORE_VARIABLE}']\n"
        "seen = pathlib.Path('seen'); seen.write_text((seen.read_text() if seen.exists() else '') + said + '\\n')\n"
        f"pathlib.Path('{ANNOUNCEMENT}').write_text(json.dumps("
        "{'participant_id': 'a', 'incarnation_id': f'i-{os.getpid()}', 'pid': os.getpid()}))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    shim = ShimProcess([sys.executable, "-c", script], tmp_path, dict(os.environ))
    shim.start()
    try:
        seen = tmp_path / "seen"
        for _ in range(3000):
            if seen.exists() and len(seen.read_text().splitlines()) >= 2:
                break
            shim._stopping.wait(0.01)
    finally:
        shim.stop()
    first, second = seen.read_text().splitlines()[:2]
    assert first == "", "there, and empty: it is watched, and the first"
    found = predecessor_in(second)
    assert found is not None
    assert (found.participant_id, found.code) == ("a", -9)
    assert predecessor_in("nonsense") is None
    assert predecessor_in('{"participant_id": "a"}') is None
    assert isinstance(found, Predecessor)


async def test_why_a_shim_ends_is_its_server_or_whoever_told_it(short_path: Path) -> None:
    assert await ServerWatch(short_path).why_told(signal.SIGTERM) == "It was told to end by SIGTERM."
    mine = life.create("agent", "gym.agent", 1, short_path / "run")
    assert "while its server" in await ServerWatch(mine).why_told(signal.SIGINT)


@pytest.mark.parametrize("waits_for_its_shim", [False, True])
async def test_a_server_that_ends_is_not_said_to_live_although_its_process_takes_its_time(
    waits_for_its_shim: bool, short_path: Path
) -> None:
    mine = life.create("agent", "gym.agent", 1, short_path / "run")
    watch = ServerWatch(mine)
    life.mark_ended(mine)
    if waits_for_its_shim:
        life.unmark_ended(mine)
    said = await watch.why_told(signal.SIGTERM)
    assert said == f"Its server (pid {os.getpid()}) has ended in good order, and it ended with it."
