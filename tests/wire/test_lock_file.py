"""One holder at a time; and what is no holder is not taken for one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.relay import host
from coordinator.wire import listening
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.lock_file import hold
from participant_shims.gate.life import claim_worker
from participant_shims.shim import only_shim_of


def test_one_holds_it_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = hold(path)
    assert first is not None
    assert hold(path) is None
    os.close(first)
    again = hold(path)
    assert again is not None
    os.close(again)


def test_a_program_that_is_started_does_not_inherit_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = hold(path)
    assert held is not None
    program = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as other:
        assert other.stdout is not None
        other.stdout.readline()  # it runs: between fork and exec a child has what its parent has
        os.close(held)
        again = hold(path)
        other.communicate(b"\n")
    assert again is not None
    os.close(again)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SafepointError) as caught:
        hold(tmp_path / "lock")
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert not (tmp_path / "elsewhere").exists()


def as_shim(path: Path) -> None:
    with only_shim_of(path):
        pass


HOLDERS = {
    "a worker": lambda path: claim_worker(path, 2),
    "a shim": as_shim,
    "a relay": lambda path: host._own(path),
    "a socket": lambda path: listening._lock(path / "server.sock"),
}


@pytest.mark.parametrize("who", sorted(HOLDERS))
def test_a_file_system_without_locks_is_not_told_as_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(SafepointError) as caught:
        HOLDERS[who](tmp_path)
    assert caught.value.reason is Reason.STORAGE_FAILED
    assert "cannot be locked" in caught.value.problem.message
    assert "local disk" in caught.value.problem.advice
