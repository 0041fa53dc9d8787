"""What hides from a mark in the environment is found, and nobody else's process is; a server that was left ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.leftovers import RUN_FOLDER, Row, processes, started_by

ME = Row(pid=100, parent=90, group=80, session=70, began=1000)
LEADER = 200  # started by us in a session of its own, and dead


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(Row(201, 1, LEADER, LEADER, 1100), id="its session was ours"),
        pytest.param(Row(201, 1, LEADER, 70, 1100), id="its group was ours"),
        pytest.param(Row(201, 100, 201, 201, 1100), id="its parent is us"),
        pytest.param(Row(201, 1, 201, 201, 1100, marked=True), id="it has the mark"),
        pytest.param(Row(201, 1, 80, 70, 1100), id="it is an orphan in our group"),
    ],
)
def test_one_that_hides_is_found_and_what_it_has_started_too(ours: Row) -> None:
    below = Row(202, ours.pid, 202, 202, 1200)
    beside = Row(203, 1, 203, ours.pid, 1200)  # its leader was one of ours
    assert set(started_by(ME.pid, [beside, below, ours, ME], {LEADER})) == {ours, below, beside}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Row(90, 1, 80, 70, 900), id="our parent"),
        pytest.param(Row(101, 90, 80, 70, 1100), id="the end of our pipe"),
        pytest.param(Row(200, 1, LEADER, LEADER, 400), id="one that had the number before"),
        pytest.param(Row(300, 1, 300, 300, 1100), id="a stranger"),
    ],
)
def test_nobody_elses_is_taken(other: Row) -> None:
    assert started_by(ME.pid, [ME, other], {LEADER}) == []


def test_a_real_process_without_parent_and_environment_is_found() -> None:
    script = "import os, subprocess; print(subprocess.Popen(['sleep', '60'], env={}, stdout=subprocess.DEVNULL).pid)"
    leader = subprocess.run(
        [sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE, text=True, check=True
    )
    pid = int(leader.stdout)
    try:
        rows = list(processes("NO=mark"))
        orphan = next(row for row in rows if row.pid == pid)
        assert not orphan.marked
        assert orphan.session != os.getsid(0)
        assert pid not in {row.pid for row in started_by(os.getpid(), rows)}
        assert pid in {row.pid for row in started_by(os.getpid(), rows, {orphan.session})}
    finally:
        os.kill(pid, 9)


LEAVES_A_SERVER = """
import gc
import sys

from grpc import aio

async def test_it_fails():
    server = aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert False

def test_its_server_is_collected():
    for name in ("last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
"""


def pytest_in(folder: Path, **kwargs: Any) -> subprocess.Popen[str]:
    """A run of what lies in `folder`, with everything that holds for our tests."""
    root = Path(__file__).resolve().parents[1]
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", str(folder)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'gen'}", "TMPDIR": str(folder)}, **kwargs,
    )  # fmt: skip


def test_a_server_that_a_failed_test_left_does_not_hang_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES_A_SERVER)
    said, _ = pytest_in(tmp_path).communicate(timeout=60)
    assert "1 failed, 1 passed" in said
    assert "a gRPC server that was not stopped, by the end of test_it.py::test_it_fails" in said


LEAVES_FILES = """
import os
import pathlib
import subprocess
import sys
import tempfile
import time

def test_it_is_ended_in_the_middle(tmp_path):
    code = "import os, tempfile; tempfile.mkdtemp(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code])
    pathlib.Path(os.environ["XDG_RUNTIME_DIR"], "safepoint").mkdir()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=lambda by: by.name)
def test_what_killed_processes_leave_is_gone_after_the_run_or_after_the_next(
    tmp_path: Path, by: signal.Signals
) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES_FILES)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -s\n")
    run = pytest_in(tmp_path)
    assert run.stdout is not None
    while run.stdout.readline().strip(".\n") != "ready":
        assert run.poll() is None
    (folder,) = tmp_path.glob(f"{RUN_FOLDER}*")
    assert len(list(folder.glob("[!r]*"))) == 2, "what it and its child have made"
    run.send_signal(by)
    run.communicate(timeout=60)
    if by is signal.SIGKILL:
        os.utime(folder, (0, 0))  # some time later
        (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
        assert "1 passed" in pytest_in(tmp_path).communicate(timeout=60)[0]
    assert not list(tmp_path.glob(f"{RUN_FOLDER}*"))
