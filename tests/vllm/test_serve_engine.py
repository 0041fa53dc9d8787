"""`safepoint serve -- vllm serve ...`: a life of an engine from its start to its last words. The engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.demo.ports import free_ports
from coordinator.wire.staying import MAX_CAUSE_BYTES
from participant_shims import serve_engine
from participant_shims.engine.end_note import EndNote, engine_ended
from participant_shims.leftovers import NAME
from participant_shims.serve_engine import engine_environment, is_vllm, target_of, told_to
from tests.vllm.real_engine import REPOSITORY, Caller
from tests.vllm.scripted_engine import scripted
from tests.vllm.test_control import ASK, until
from tests.vllm.test_engine_shim import collect, coordinating

FAKE = f"""#!{sys.executable}
import asyncio, os, signal, subprocess, sys
sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "gen")!r}]
from tests.vllm.scripted_engine import scripted

async def main():
    orphan = subprocess.Popen(["sleep", "600"])
    async with scripted(port=int(sys.argv[sys.argv.index("--port") + 1])) as engine:
        print("orphan", orphan.pid, "dev", os.environ.get("VLLM_SERVER_DEV_MODE"), "pid", os.getpid(), flush=True)
        gone = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, gone.set)
        while not gone.is_set():
            await asyncio.sleep(0.02)
            engine.step()
    print("told by SIGINT, paused:", engine.paused, file=sys.stderr, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-") as name:
        (Path(name) / "root").mkdir()
        vllm = Path(name) / "vllm"
        vllm.write_text(FAKE)
        vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
        yield Path(name)


@dataclass
class Served:
    process: asyncio.subprocess.Process
    listen: str
    said: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(int(self.said["pid"]))

    @property
    def shim(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(c for c in children if "participant_shims.cli" in c.cmdline())


def command(folder: Path, port: int, listen: str) -> list[str]:
    return [
        sys.executable, "-m", "participant_shims.cli", "serve", "--name", "engine-0", "--listen", listen,
        "--root", str(folder / "root"), "--coordinator", f"file:{folder}/root/coordinator/address.json",
        "--run-dir", str(folder), "--bind", "unix", "--", str(folder / "vllm"), "serve", "model", "--port", str(port),
    ]  # fmt: skip


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_") or k == "SAFEPOINT_TEST_RUN"}
    return {**kept, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}"}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    process = await asyncio.create_subprocess_exec(
        *command(folder, free_ports(1)[0], listen), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY, start_new_session=True, env=environment(),
    )  # fmt: skip
    made = Served(process, listen)
    try:
        assert process.stdout is not None
        words = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().split()
        made.said = dict(zip(words[::2], words[1::2], strict=True))
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.communicate(), 40)


async def answers(listen: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(600):
            with contextlib.suppress(aiohttp.ClientError):
                if (await Caller(http, listen).get("/version"))["version"]:
                    return
            await asyncio.sleep(0.05)
    raise AssertionError("nobody answers behind the shim")


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_an_engine_takes_part_with_control_turned_on_and_leaves_nothing_behind(folder: Path) -> None:
    async with serving(folder) as served, coordinating(folder) as (_, stub), aiohttp.ClientSession() as http:
        assert served.said["dev"] == "1"
        await answers(served.listen)
        assert (await Caller(http, served.listen).whole(ASK)).text.endswith("w110")

        async def incarnation() -> str:
            for _ in range(400):
                topology = await stub.GetTopology(pb.GetTopologyRequest(), timeout=5)
                for each in topology.participants:
                    if each.capabilities.participant_id == "engine-0":
                        return str(each.incarnation_id)
                await asyncio.sleep(0.05)
            raise AssertionError("it did not register")

        first = await incarnation()
        # A shim that dies alone is another incarnation of the same engine, at the same address.
        served.shim.kill()
        for _ in range(400):
            if await incarnation() != first:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("no new shim")
        await answers(served.listen)

        orphan, shim, engine = int(served.said["orphan"]), served.shim.pid, served.engine.pid
        served.process.terminate()
        _, errors = await asyncio.wait_for(served.process.communicate(), 40)
        assert served.process.returncode == 0
        assert "told by SIGINT, paused: False" in errors.decode()
        assert "ended by itself" not in errors.decode()
        assert gone(orphan)
        assert gone(shim)
        assert gone(engine)


async def test_an_engine_that_dies_is_told_of_with_its_last_lines_and_its_group_is_killed(folder: Path) -> None:
    async with serving(folder) as served:
        await answers(served.listen)
        orphan, shim = int(served.said["orphan"]), served.shim.pid
        served.engine.send_signal(signal.SIGKILL)
        _, errors = await asyncio.wait_for(served.process.communicate(), 40)
        assert served.process.returncode == 128 + signal.SIGKILL
        report = errors.decode()
        assert "vLLM (engine-0, pid " in report
        assert "signal SIGKILL" in report
        assert f"  | orphan {orphan}" in report
        assert gone(orphan)
        assert gone(shim)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_the_coordinator_is_told_how_an_engine_ended_and_what_it_said_last(
    folder: Path, number: signal.Signals
) -> None:
    """While a trainer holds it frozen: the operation is refused with that, and so is the next."""
    async with coordinating(folder) as (core, stub), serving(folder) as served:
        await answers(served.listen)
        registry = core.operations.discovery.registry
        await until(lambda: registry.get("engine-0") is not None, 20)
        prepare = pb.PrepareOperationRequest(operation_id="s-1", snapshot_id="snap")
        await collect(stub.Prepare(prepare, timeout=20))
        assert core.operations.active is not None
        pid = served.engine.pid
        served.engine.send_signal(number)
        _, errors = await asyncio.wait_for(served.process.communicate(), 40)
        assert "ended by itself" in errors.decode()
        how = "was ended by signal 9 (SIGKILL)" if number is signal.SIGKILL else "ended with exit code 0"
        last = f"orphan {served.said['orphan']}" if number is signal.SIGKILL else "told by SIGINT, paused: True"
        await until(lambda: bool(registry.missing()), 20)
        explained = (await stub.Explain(pb.ExplainRequest(), timeout=10)).operation
        for why in (registry.missing()[0].why, explained.failure.primary.message):
            assert f"The engine engine-0 (vLLM, pid {pid}) {how} at " in why
            assert "Start its `safepoint serve` again." in why
            assert f'"{last}' in why or f', "{last}' in why
            assert "SIGTERM" not in why
        assert not await asyncio.to_thread((folder / "engine-0-vllm" / "ended.json").exists), "it is for this end alone"


async def test_who_is_left_when_everything_was_killed_is_ended_by_the_next_start(folder: Path) -> None:
    async with serving(folder) as served:
        await answers(served.listen)
        orphan = await noted(folder, served)
        for process in (psutil.Process(served.process.pid), served.shim, served.engine):
            process.kill()
        await served.process.wait()
        assert not gone(orphan)
        async with serving(folder) as again:
            assert gone(orphan)
            again.process.terminate()
            _, errors = await asyncio.wait_for(again.process.communicate(), 40)
        line = next(line for line in errors.decode().splitlines() if "before this one was killed" in line)
        assert "engine-0" in line
        assert f"{orphan} sleep" in line


async def test_an_engine_ends_with_the_serve_that_was_killed_beside_it(folder: Path) -> None:
    async with serving(folder) as served:
        await answers(served.listen)
        orphan, engine, shim = await noted(folder, served), served.engine.pid, served.shim.pid
        served.process.kill()
        await until(lambda: gone(engine) and gone(orphan) and gone(shim), 20)
        _, errors = await served.process.communicate()
        assert "`safepoint serve` was killed; its engine is ended with it" in errors.decode()


async def test_an_engine_that_is_served_is_not_served_twice(folder: Path) -> None:
    async with serving(folder) as served:
        await answers(served.listen)
        twice = await asyncio.create_subprocess_exec(*command(folder, free_ports(1)[0], served.listen), cwd=REPOSITORY,
                                                     stderr=asyncio.subprocess.PIPE, env=environment())  # fmt: skip
        _, errors = await asyncio.wait_for(twice.communicate(), 30)
        assert twice.returncode == 3
        assert f"served already, by pid {served.process.pid}" in errors.decode()
        assert "of another job, give that job a SAFEPOINT_RUN_DIR of its own" in errors.decode()
        assert not gone(served.engine.pid)


async def noted(folder: Path, served: Served) -> int:
    """The process that the engine has started, once it is noted."""
    orphan = int(served.said["orphan"])
    await until(lambda: f"[{orphan}, " in (folder / "engine-0-vllm" / NAME).read_text(), 10)
    return orphan


async def test_a_vllm_whose_port_another_server_has_is_not_begun_with(folder: Path) -> None:
    """Its shim would cover the other one, and a save would pause it twice."""
    async with scripted() as other:
        ran = await asyncio.create_subprocess_exec(*command(folder, other.port, "127.0.0.1:0"), cwd=REPOSITORY,
                                                   stderr=asyncio.subprocess.PIPE, env=environment())  # fmt: skip
        _, said = await asyncio.wait_for(ran.communicate(), 30)
        assert ran.returncode == 3
        assert f"another server listens at 127.0.0.1:{other.port}" in said.decode()
        assert other.calls == []


def test_an_engine_that_has_closed_its_port_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "CLOSED_S", 0.2)
    monkeypatch.setattr(serve_engine, "LOOK_S", 0.02)
    port = free_ports(1)[0]
    closes = f"""
import socket, time
with socket.create_server(("127.0.0.1", {port})) as listening:
    listening.accept()
time.sleep(600)
"""
    engine = subprocess.Popen([sys.executable, "-c", closes], start_new_session=True)
    try:
        code = serve_engine._watch(engine, Alone(), [], Alone(), serve_engine._Port(f"127.0.0.1:{port}"))  # type: ignore[arg-type]
    finally:
        engine.kill()
    assert code == -signal.SIGKILL


class Alone:
    """Neither a shim beside the engine nor a note of who runs."""

    sessions = ()

    def keep(self) -> None: ...

    def end(self) -> None: ...

    def note(self, *sessions: int) -> None: ...


def test_a_command_that_starts_vllm_is_known_and_so_is_where_it_listens() -> None:
    serve = ["/opt/venv/bin/vllm", "serve", "model"]
    assert is_vllm(serve)
    assert is_vllm(["python", "/opt/venv/bin/vllm", "serve", "model"])
    assert is_vllm(["python", "-m", "vllm.entrypoints.openai.api_server"])
    assert not is_vllm(["python", "app.py", "serve", "vllm"])
    assert not is_vllm(["ng_run", "+config_paths=[vllm]"])
    assert not is_vllm([])
    assert target_of(serve) == "127.0.0.1:8000"
    assert target_of([*serve, "--host", "0.0.0.0", "--port=8123"]) == "127.0.0.1:8123"
    assert target_of([*serve, "--host=10.0.0.7", "--port", "80"]) == "10.0.0.7:80"
    assert target_of([*serve, "--host", "fd00::1"]) == "[fd00::1]:8000"


@pytest.mark.parametrize(
    ("written", "flags", "where", "key"),
    [
        ("port: 12323\nhost: 10.0.0.7\napi-key: [sk-x, sk-y]\n", [], "10.0.0.7:12323", "sk-x"),
        ("port: 12323\napi_key: sk-x\n", ["--port", "8123", "--api-key=sk-z"], "127.0.0.1:8123", "sk-z"),
        ("port: 12323\nhost: null\nuds: false\n", ["--port=1", "--port", "2"], "127.0.0.1:2", ""),
        ("tensor-parallel-size: 4\n", [], "127.0.0.1:8000", ""),
    ],
)
def test_where_it_listens_is_read_in_its_config_file_which_flags_beat(
    tmp_path: Path, written: str, flags: list[str], where: str, key: str
) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(written)
    for given in (["--config", str(path)], [f"--config={path}"]):
        assert target_of(["vllm", "serve", "model", *given, *flags]) == where
        assert told_to(["vllm", "serve", "model", *given, *flags]).get("api-key", "") == key


@pytest.mark.parametrize("written", [None, "port: [", "[1, 2]", "uds: /tmp/x", "ssl_keyfile: k", "port: 0"])
def test_a_config_file_that_says_nothing_usable_is_refused_by_name(tmp_path: Path, written: str | None) -> None:
    path = tmp_path / "vllm.yaml"
    if written is not None:
        path.write_text(written)
    unusable = str(path) if written is None or "[" in written else r"can't be covered|--port 0"
    with pytest.raises(ValueError, match=unusable):
        target_of(["vllm", "serve", "model", "--config", str(path)])


@pytest.mark.parametrize("flags", [["--uds", "/tmp/x"], ["--ssl-keyfile=k"], ["--port", "0"], ["--port", "x"]])
def test_what_no_proxy_can_stand_before_is_refused(flags: list[str]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        target_of(["vllm", "serve", "model", *flags])


def test_control_that_was_turned_off_on_purpose_is_not_turned_on() -> None:
    assert engine_environment({}) == {"VLLM_SERVER_DEV_MODE": "1"}
    assert engine_environment({"VLLM_SERVER_DEV_MODE": "1"}) == {}
    with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=0"):
        engine_environment({"VLLM_SERVER_DEV_MODE": "0"})


def test_an_end_is_told_by_the_shims_of_whoever_has_seen_it_and_by_no_other(tmp_path: Path) -> None:
    note = EndNote(tmp_path)
    assert note.read(7) == ""
    note.write(7, "It ended.")
    assert (note.read(7), note.read(8)) == ("It ended.", "")
    for unreadable in ("", "[]", "{", "{}"):
        (tmp_path / "ended.json").write_text(unreadable)
        assert note.read(7) == ""
    note.remove()
    note.remove()
    EndNote(tmp_path / "absent").write(7, "It ended.")


def test_an_engine_that_was_killed_since_it_did_not_end_is_told_as_that() -> None:
    said = engine_ended("e" * 128, 1 << 22, -9, 0.0, ["x" * 2000] * 20, hung=True)
    assert "closed its port, did not end and was killed at 00:00:00Z" in said
    assert "signal" not in said
    plain = engine_ended("e", 5, 3, 0.0, ["Bearer abc", "ValueError: no model"])
    assert "ended with exit code 3" in plain
    assert 'The last of its log: "ValueError: no model".' in plain
    assert len(engine_ended("e", 1 << 22, -9, 0.0, ["y" * 2000] * 20, hung=True).encode()) <= MAX_CAUSE_BYTES
