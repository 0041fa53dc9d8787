"""What surrounds a gate: bootstrap, lives, the shim's process, the control line."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from coordinator.wire.errors import Reason, Refused, SafepointError
from coordinator.wire.terms import QuiesceMode
from participant_shims.gate import bootstrap_path, life
from participant_shims.gate.calllog import CallLog, Stale
from participant_shims.gate.control import Control
from participant_shims.gate.core import Gate
from participant_shims.gate.describe import Server, describe_server, state_mode
from participant_shims.gate.shim_process import ShimProcess, command, shim_environment
from participant_shims.identity import CallIdentity
from tests.gym.shim_line import ShimLine


def within(seconds: float, condition: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.02)


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("NEMO_GYM_CONFIG_PATH", "PYTHONPATH")}
    return subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=60)


def test_the_bootstrap_does_nothing_outside_of_a_gym_server() -> None:
    done = python(
        "import sys; print([m for m in sys.modules if 'participant_shims' in m])", PYTHONPATH=bootstrap_path()
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("gym", ["", "some_server"])
def test_the_bootstrap_shadows_no_other_sitecustomize(tmp_path: Path, gym: str) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    done = python("pass", PYTHONPATH=f"{bootstrap_path()}:{tmp_path}", NEMO_GYM_CONFIG_PATH=gym)
    assert (done.stdout.strip(), done.stderr) == ("the other one", "")


def test_a_gate_that_fails_is_said_once_and_the_server_runs(tmp_path: Path) -> None:
    code = (
        "import sys, types\n"
        "import participant_shims.gate.describe as d\n"
        "def broken(*a): raise RuntimeError('broken')\n"
        "d.describe_server = broken\n"
        "from participant_shims.gate import install\n"
        "install._meet('app', object()); 1/0"
    )
    code = code.replace(
        "install._meet('app', object()); 1/0",
        "[install._quietly(lambda: install._meet('app', object())) for _ in range(3)]\nprint('serving')",
    )
    done = python(code, PYTHONPATH=bootstrap_path(), NEMO_GYM_CONFIG_PATH="x", SAFEPOINT_RUN_DIR=str(tmp_path))
    assert done.stdout.strip() == "serving"
    assert done.stderr.count("without a gate") == 1
    assert "broken" in done.stderr


def test_what_a_server_has_loaded_is_not_looked_through_again_and_again_for_garbage() -> None:
    done = python(
        "import gc, os\n"
        "import participant_shims.gate.asgi as asgi\n"
        "from participant_shims.gate import install, life\n"
        "app = object()\n"
        "install._servers.append((app, object()))\n"
        "os.environ[life.LIFE_VARIABLE] = '/nowhere'\n"
        "install.build_gate = lambda server, life, app: None\n"
        "asgi.GateMiddleware = lambda app, gate: app\n"
        "before = gc.get_freeze_count()\n"
        "install._wrap(app)\n"
        "print(before, gc.get_freeze_count() > 10_000)",
        PYTHONPATH=bootstrap_path() + os.pathsep + os.pathsep.join(sys.path),
    )
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_an_unimportable_gate_does_not_stop_a_server(tmp_path: Path) -> None:
    fake = tmp_path / "participant_shims"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('not here')\n")
    done = python("print('serving')", PYTHONPATH=f"{bootstrap_path()}:{tmp_path}", NEMO_GYM_CONFIG_PATH="x")
    assert done.stdout.strip() == "serving"
    assert done.stderr.count("the gate is not loaded") == 1


def test_a_life_is_closed_to_others_and_swept_when_its_process_is_gone(tmp_path: Path) -> None:
    parent = tmp_path / "run"
    child = (
        "from pathlib import Path; from participant_shims.gate.life import create;"
        f"print(create('agent', 'gym.agent', 1, Path({str(parent)!r})))"
    )
    dead = Path(python(child, PYTHONPATH=os.pathsep.join(sys.path)).stdout.strip())
    assert dead.is_dir()
    assert dead.stat().st_mode & 0o777 == 0o700
    mine = life.create("agent", "gym.agent", 1, parent)
    assert not dead.exists()
    other = life.create("agent", "gym.agent", 1, parent)  # this process lives: its directories stay
    assert mine.exists()
    assert other.exists()


def test_a_run_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(Refused) as refused:
        life.create("agent", "gym.agent", 1, parent)
    assert refused.value.reason is Reason.PERMISSION_DENIED
    with pytest.raises(Refused) as refused:
        life.create("agent", "gym.agent", 1, tmp_path / ("x" * 100))
    assert "too long" in str(refused.value)


def test_a_replaced_worker_takes_the_place_of_the_dead_one(tmp_path: Path) -> None:
    first, fd = life.claim_worker(tmp_path, 2)
    second, other = life.claim_worker(tmp_path, 2)
    assert (first, second) == ("worker-0", "worker-1")
    with pytest.raises(Refused):
        life.claim_worker(tmp_path, 2)
    os.close(fd)
    again, fd = life.claim_worker(tmp_path, 2)
    assert again == "worker-0"
    os.close(fd)
    os.close(other)


def test_a_shim_that_dies_is_started_again_and_ends_with_the_server(tmp_path: Path) -> None:
    shim = ShimProcess([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, dict(os.environ))
    shim.start()
    try:
        within(20, lambda: shim._process and psutil.Process(shim._process.pid).cmdline()[1:2] == ["-c"])
        first = shim._process
        assert first is not None
        first.kill()
        within(20, lambda: shim.starts == 2)
    finally:
        shim.stop()
    assert shim._process is not None
    assert shim._process.poll() is not None


def test_why_a_shim_takes_no_part_is_a_line_in_the_log_of_its_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "from participant_shims.ends import tell_server; tell_server('refused:\\n no token'); import time; time.sleep(600)"
    shim = ShimProcess([sys.executable, "-c", script], tmp_path, os.environ)
    shim.start()
    seen = ""

    def said() -> bool:
        nonlocal seen
        seen += capfd.readouterr().err
        return "\n" in seen

    try:
        within(20, said)
    finally:
        shim.stop()
    assert "safepoint: refused: no token\n" in seen


def test_a_shim_that_lived_long_is_replaced_as_fast_as_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived = iter([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3600.0, 0.0])
    now = 0.0
    waits: list[float] = []

    class Dead:
        pid = 0

        def wait(self) -> int:
            nonlocal now
            now += next(lived)
            return 1

    class Stopping:
        def is_set(self) -> bool:
            return False

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) == 8

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: Dead())
    shim = ShimProcess(["shim"], tmp_path, {}, lambda: now)
    shim._stopping = Stopping()  # type: ignore[assignment]
    shim._keep()
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 0.2, 0.2]


def test_a_shim_does_not_outlive_a_server_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from participant_shims.gate.shim_process import ShimProcess\n"
        f"s = ShimProcess([sys.executable, '-c', 'import time; time.sleep(600)'], Path({str(tmp_path)!r}), dict(os.environ))\n"
        "s.start()\n"
        "while s._process is None: time.sleep(0.01)\n"
        "print(s._process.pid, flush=True); time.sleep(600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    shim = psutil.Process(int(server.stdout.readline()))
    within(20, lambda: shim.cmdline()[1:2] == ["-c"])
    server.kill()
    server.wait()
    server.stdout.close()
    within(20, lambda: not shim.is_running() or shim.status() == psutil.STATUS_ZOMBIE)


def test_the_shims_environment_is_not_that_of_a_gym_server() -> None:
    env = shim_environment(
        {
            "NEMO_GYM_CONFIG_PATH": "x",
            "NEMO_GYM_CONFIG_DICT": "{}",
            "PYTHONPATH": f"{bootstrap_path()}:/other",
            "A": "1",
        }
    )
    assert "NEMO_GYM_CONFIG_PATH" not in env
    assert bootstrap_path() not in env["PYTHONPATH"].split(":")
    assert env["PYTHONPATH"].startswith("/other:")
    assert command(Path("/l"), {"SAFEPOINT_SHIM_PYTHON": "/p"}) == [
        "/p",
        "-m",
        "participant_shims.cli",
        "shim",
        "--life",
        "/l",
    ]


async def test_status_is_answered_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls.db")
    gate = Gate(Server("model", "gym.model", "policy_model", 1), log)
    control = Control(gate, tmp_path / "gate.sock")
    busy, blocked, done, over = (threading.Event() for _ in range(4))

    async def serve() -> None:  # the server's own loop, in a thread here
        gate.doors.enter("r-7", waiting_on="POST /v1/responses")
        gate.on_start = control.start
        await gate.start()
        while not busy.is_set():
            await asyncio.sleep(0.01)
        blocked.set()
        done.wait(20)  # a handler that blocks the loop
        while not over.is_set():
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    async with ShimLine(tmp_path) as shim:
        thread.start()
        line = await shim.worker()
        busy.set()
        assert await asyncio.to_thread(blocked.wait, 20)
        status = await line.ask("status", within_s=5, max_rollouts=10)
        assert status["rollouts"][0]["rollout_id"] == "r-7"
        closing = asyncio.create_task(line.ask("close", operation_id="op", mode="hold", lease_s=5))
        await asyncio.sleep(0)  # it is sent before the question that it must not delay
        await line.ask("status", within_s=5, max_rollouts=0)
        assert not closing.done()  # closing is the loop's affair
        done.set()
        await closing
    over.set()
    control.stop()
    thread.join(10)
    log.close()


async def test_a_disk_that_fails_a_gate_is_named(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls.db")
    gate = Gate(Server("model", "gym.model", "policy_model", 1), log)
    control = Control(gate, tmp_path / "gate.sock")

    async def full(*_: object) -> dict[str, object]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gate.export = full  # type: ignore[method-assign]
    gate.on_start = control.start
    await gate.start()
    try:
        async with ShimLine(tmp_path) as shim:
            line = await shim.worker()
            with pytest.raises(AssertionError, match=r"STORAGE_FULL.*export in /data/snapshots/s1/policy.*No space"):
                await line.ask("export", directory="/data/snapshots/s1/policy")
    finally:
        control.stop()
        log.close()


async def test_a_gate_of_a_server_with_more_than_a_thousand_connections_has_its_line(tmp_path: Path) -> None:
    gate = Gate(Server("model", "gym.model", "policy_model", 1), CallLog(tmp_path / "calls.db"))
    with ExitStack() as held:
        held.callback(gate.log.close)
        first = os.open(os.devnull, os.O_RDONLY)
        held.callback(os.close, first)
        while (descriptor := os.dup(first)) <= 1024:  # above which select() takes none
            held.callback(os.close, descriptor)
        held.callback(os.close, descriptor)
        control = Control(gate, tmp_path / "gate.sock")
        gate.on_start = control.start
        await gate.start()
        held.callback(control.stop)
        for generation in (1, 3):  # opening counts too; a shim that starts again is found again
            async with ShimLine(tmp_path) as shim:
                line = await shim.worker()
                answer = await line.ask("close", operation_id="op", mode="drain", lease_s=9)
                assert answer["generation"] == generation
                await line.ask("open")


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_gate_whose_call_log_was_removed_refuses_to_close_and_says_so(tmp_path: Path, replaced: bool) -> None:
    """What clears old files took it: a shim that starts then would read an empty one, and save no rollout."""
    log = CallLog(tmp_path / "calls.db")
    gate = Gate(Server("model", "gym.model", "policy_model", 1), log)
    await gate.start()
    gate.close("op-1", QuiesceMode.HOLD, 9)
    gate.open()
    for name in os.listdir(tmp_path):
        os.unlink(tmp_path / name)
    other = CallLog(tmp_path / "calls.db") if replaced else None
    with pytest.raises(SafepointError, match=r"calls\.db was removed or replaced.*Restart the server") as caught:
        gate.close("op-2", QuiesceMode.HOLD, 9)
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert not gate.doors.closed
    for each in (log, other):
        if each is not None:
            each.close()


async def test_a_gate_finds_its_shim_again_and_survives_nonsense(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls.db")
    gate = Gate(Server("model", "gym.model", "policy_model", 1), log)
    control = Control(gate, tmp_path / "gate.sock")
    gate.on_start = control.start
    await gate.start()
    try:
        async with ShimLine(tmp_path) as shim:
            line = await shim.worker()
            with pytest.raises(AssertionError, match="UNSUPPORTED"):
                await line.ask("explode")
            with pytest.raises(AssertionError, match="INTERNAL"):
                await line.ask("close")  # without its parameters
            assert not gate.doors.closed
            line._writer.write(b"this is not JSON\n")
        async with ShimLine(tmp_path) as shim:
            line = await shim.worker()
            answer = await line.ask("close", operation_id="op", mode="drain", lease_s=9)
            assert answer["generation"] == 1
            assert (await line.ask("open"))["closed_for_s"] > 0
    finally:
        control.stop()
        log.close()


def test_a_server_is_described_by_its_class_and_configuration() -> None:
    class SimpleResponsesAPIModel: ...

    class Client:
        global_config_dict = {  # noqa: RUF012
            "judge": {
                "responses_api_models": {"vllm_model": {"base_url": ["http://a/v1"], "api_key": "secret", "model": "m"}}
            }
        }

    class Config:
        name, num_workers = "judge", 2

    class Judge(SimpleResponsesAPIModel):
        config, server_client = Config(), Client()

    found = describe_server(Judge(), {"SAFEPOINT_ROLES": "policy_model=policy, judge=auxiliary"})
    assert (found.kind, found.role, found.configured_workers) == ("gym.model", "auxiliary_model", 2)
    assert found.upstream_endpoints == ("http://a/v1",)
    assert describe_server(Judge(), {}).role == ""  # none is guessed
    Client.global_config_dict["judge"]["responses_api_models"]["vllm_model"]["api_key"] = "other"
    assert describe_server(Judge(), {}).config_digest == found.config_digest
    Client.global_config_dict["judge"]["responses_api_models"]["vllm_model"]["model"] = "other"
    assert describe_server(Judge(), {}).config_digest != found.config_digest


def test_the_state_mode_is_for_all_servers_or_for_one() -> None:
    assert state_mode("a", {}) == "codec"
    assert state_mode("a", {"SAFEPOINT_STATE": "restart_only"}) == "restart_only"
    assert state_mode("a", {"SAFEPOINT_STATE": "a=reexecute,b=stateless"}) == "reexecute"
    assert state_mode("c", {"SAFEPOINT_STATE": "a=reexecute,b=stateless"}) == "codec"


def test_life_records_are_what_the_shim_reads(tmp_path: Path) -> None:
    made = life.create("my server", "gym.agent", 3, tmp_path / "run")
    record = json.loads((made / "life.json").read_text())
    assert record["server_name"] == "my server"
    assert record["configured_workers"] == 3
    assert made.name.startswith("my_server-")


class OneSession:
    """A session state with one session, which cannot be brought back, of rollout r-1."""

    wants_requests = False
    warning = ""
    loads = 0

    def __init__(self) -> None:
        self.wanted: list[set[str] | None] = []
        self.fails: Exception | None = None
        self.waits_for: asyncio.Event | None = None

    def describe(self) -> dict[str, object]:
        return {"checkpoint_mode": "export_restore", "state_schema": "gym-session-v1"}

    def before_first_request(self) -> None: ...

    def record(self, session_id: str, exchange: object) -> None: ...

    def touch(self, session_id: str) -> None: ...

    def doubt(self) -> None:
        pass

    async def precopy(self, sessions: object, root: Path, within_s: float) -> int:
        return 0

    def forget(self, session_id: str) -> None: ...

    def freshness(self) -> bool:
        return True

    async def export(
        self, path: Path, sessions: object, skip: set[str], told: object = None, root: object = None
    ) -> dict[str, object]:
        lost = {"rollout_id": "r-2", "attempt": 3, "reason": "it holds a socket"}
        return {"sessions": 1, "bytes": 2, "excluded": [lost], "file": {"path": path.name, "size": 2, "sha256": "0"}}

    async def load(
        self, path: Path, *, told: object = None, only: set[str] | None = None, **_: object
    ) -> dict[str, object]:
        self.loads += 1
        self.wanted.append(only)
        if self.waits_for is not None:
            await self.waits_for.wait()
        if self.fails is not None:
            raise self.fails
        return {"sessions": 1, "diverged": [{"rollout_id": "r-1", "attempt": 4, "reason": "it answered differently"}]}


async def test_a_load_of_other_rollouts_of_the_same_files_or_of_other_bytes_is_no_repeat(tmp_path: Path) -> None:
    """A restore on three actors is given up, one of them goes, and the same snapshot is restored on the other two."""
    part = {"directory": str(tmp_path), "files": ["w.sessions.rope"], "sha256": ["a"], "some": True}
    log = CallLog(tmp_path / "calls.db")
    sessions = OneSession()
    gate = Gate(Server("counter", "gym.resources", "resources", 1), log, sessions)
    gate.close("op", QuiesceMode.HOLD, 60)
    log.bind("s-1", "r-1", 0)
    for _ in range(2):
        await gate.load([part])
    assert sessions.wanted == [{"s-1"}]
    log.bind("s-2", "r-2", 0)
    await gate.load([part])
    assert sessions.wanted == [{"s-1"}, {"s-1", "s-2"}]
    await gate.load([part | {"sha256": ["b"]}])
    assert sessions.loads == 3
    log.close()


async def test_after_a_load_that_failed_the_one_before_is_no_repeat(tmp_path: Path) -> None:
    """A part of what has failed may lie over what the first had loaded: of the same sessions, as they were at another time."""
    part = {"directory": str(tmp_path), "files": ["w.sessions.rope"], "sha256": ["a"], "some": False}
    log = CallLog(tmp_path / "calls.db")
    sessions = OneSession()
    gate = Gate(Server("counter", "gym.resources", "resources", 1), log, sessions)
    gate.close("op", QuiesceMode.HOLD, 60)
    await gate.load([part])
    sessions.fails = OSError("a disk that cannot be read")
    with pytest.raises(OSError, match="a disk"):
        await gate.load([part | {"sha256": ["b"]}])
    sessions.fails = None
    await gate.load([part])
    assert sessions.loads == 3
    log.close()


async def test_a_load_waits_for_one_that_was_given_up_and_goes_on(tmp_path: Path) -> None:
    part = {"directory": str(tmp_path), "files": ["w.sessions.rope"], "sha256": ["a"], "some": False}
    log = CallLog(tmp_path / "calls.db")
    sessions = OneSession()
    sessions.waits_for = asyncio.Event()
    gate = Gate(Server("counter", "gym.resources", "resources", 1), log, sessions)
    gate.close("op", QuiesceMode.HOLD, 60)
    loads = [asyncio.create_task(gate.load([part | {"sha256": [digest]}])) for digest in "ab"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert sessions.loads == 1, "the second would change the same sessions"
    sessions.waits_for.set()
    await asyncio.gather(*loads)
    assert sessions.loads == 2
    log.close()


async def test_what_sessions_lose_is_excluded_at_export_and_refused_after_a_load(tmp_path: Path) -> None:
    part = {"directory": str(tmp_path), "files": ["w.sessions.jsonl"], "some": False}
    log = CallLog(tmp_path / "calls.db")
    sessions = OneSession()
    gate = Gate(Server("counter", "gym.resources", "resources", 1), log, sessions)
    with pytest.raises(Refused, match="open"):
        await gate.export(str(tmp_path), "w.")
    with pytest.raises(Refused, match="open"):
        await gate.load([part])
    gate.close("op", QuiesceMode.HOLD, 60)
    done = await gate.export(str(tmp_path), "w.")
    assert [f["path"] for f in done["files"]] == ["w.sessions.jsonl"]
    assert log.excluded() == [("r-2", 3, "it holds a socket")]
    first = await gate.load([part])
    assert await gate.load([part]) == first
    assert sessions.loads == 1
    # The agent continues attempt 5 of base 0, and is told that what it builds on is not there.
    assert log.stale(CallIdentity("r-1", 5, "0.3")) is Stale.STATE_LOST
    assert log.stale(CallIdentity("r-1", 6, "6.1")) is None
    gate.served = True
    with pytest.raises(Refused) as refused:
        await gate.load([part])
    assert refused.value.reason is Reason.NOT_FRESH
    gate.open()
    assert log.excluded() == []
    log.close()
