"""The demo's SIGKILL reaches everything that it started, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from coordinator.demo.fleet import MARK, kill_marked


def test_a_process_that_has_lost_its_environment_dies_with_its_session() -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '60'], env={}).pid, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, MARK: "the-mark"}, start_new_session=True,
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert kill_marked("the-mark") == 2
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.communicate()


def test_our_own_session_is_spared() -> None:
    with subprocess.Popen(["sleep", "60"], env={MARK: "another-mark"}):
        assert kill_marked("another-mark") == 1
