"""Everything that was started is killed, also what hides its mark."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import psutil

from coordinator.demo.fleet import MARK, kill_marked

# A leader that carries the mark, and an orphan in its session that does not, as vLLM's engine process becomes.
LEADER = f"""
import os, subprocess, sys, time
clean = {{k: v for k, v in os.environ.items() if k != {MARK!r}}}
print(subprocess.Popen(["sleep", "600"], env=clean).pid, flush=True)
time.sleep(600)
"""


def test_what_hides_its_mark_is_killed_with_the_session_of_one_that_has_it() -> None:
    mark = secrets.token_hex(8)
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    hidden = int(leader.stdout.readline())
    assert kill_marked(mark) == 2
    leader.wait(10)
    assert not psutil.pid_exists(hidden) or psutil.Process(hidden).status() == psutil.STATUS_ZOMBIE
    assert kill_marked(mark) == 0
