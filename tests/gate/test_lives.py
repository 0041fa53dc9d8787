"""When the directory of a life is removed, and by whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from participant_shims.gate.life import bury, create, mark_ended
from participant_shims.gate.process import started
from participant_shims.gate.shim_process import ShimProcess


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a server's main process."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def life_of(pid: int, parent: Path) -> Path:
    life = create("counter", "gym.resources", 1, parent)
    record = json.loads((life / "life.json").read_text())
    (life / "life.json").write_text(json.dumps(record | {"pid": pid, "started": started(pid)}))
    return life


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_life_that_said_that_it_ends_is_buried_once_its_process_is_gone(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    life = life_of(server.pid, tmp_path)
    (life / "ended").touch()
    assert not bury(life, within_s=0.05)
    assert life.exists(), "it still runs"
    end(server)
    assert bury(life)
    assert not life.exists()


def test_a_life_that_was_killed_is_left_until_the_next_one_sweeps_it(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    life = life_of(server.pid, tmp_path)
    end(server)
    assert not bury(life)
    assert (life / "life.json").exists()
    create("counter", "gym.resources", 1, tmp_path)
    assert not life.exists()


def test_only_the_main_process_says_that_a_life_ends(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    other = life_of(server.pid, tmp_path)
    mark_ended(other)  # a worker that ends, or a copy of the process
    assert not (other / "ended").exists()
    mine = create("agent", "gym.agent", 1, tmp_path)
    mark_ended(mine)
    assert (mine / "ended").exists()
    assert json.loads((mine / "life.json").read_text())["pid"] == os.getpid()


def test_a_server_that_ends_its_shim_itself_is_not_waited_for(tmp_path: Path) -> None:
    life = create("counter", "gym.resources", 1, tmp_path)
    mark_ended(life)
    seen = life / "seen"  # what a shim finds at its end
    script = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path('seen').write_text(str(pathlib.Path('ended').exists()))))\n"
        "pathlib.Path('ready').touch()\n"
        "signal.pause()\n"
    )
    shim = ShimProcess([sys.executable, "-c", script], life, os.environ)
    shim.start()
    end_by = time.monotonic() + 20
    while not (life / "ready").exists():
        assert time.monotonic() < end_by
        time.sleep(0.01)
    shim.stop()
    assert seen.read_text() == "False"


def test_what_is_no_life_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ended").touch()
    assert not bury(tmp_path)
    (tmp_path / "life.json").write_text("{}")
    assert not bury(tmp_path)
    mark_ended(tmp_path / "nowhere")
    assert tmp_path.exists()
