"""What a killed life of an engine has left is ended by the next one, and nobody else is. The processes are real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from participant_shims.gate.process import started
from participant_shims.leftovers import NAME, Leftovers, Reaped, StillRuns, end_what_is_left

# A leader that has a child, says its pid, and is killed alone: as vLLM's API server and its engine.
_LEADER = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


class Tree:
    """A session of two processes."""

    def __init__(self) -> None:
        self.leader = subprocess.Popen(
            [sys.executable, "-c", _LEADER], start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        assert self.leader.stdout is not None
        self.child = int(self.leader.stdout.readline())

    @property
    def session(self) -> int:
        return self.leader.pid

    def behead(self) -> None:
        self.leader.kill()
        self.leader.wait()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.session, signal.SIGKILL)
        self.leader.wait()
        assert self.leader.stdout is not None
        self.leader.stdout.close()


@pytest.fixture
def tree() -> Iterator[Tree]:
    made = Tree()
    yield made
    made.end()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield made
    made.kill()
    made.wait()


def noted(life: Path, *sessions: int, **changes: Any) -> Leftovers:
    """A note whose writer is gone."""
    Leftovers(life).note(*sessions)
    path = life / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "by": [2**22 + 1, "1"], **changes}))
    return Leftovers(life)


def test_an_engine_that_outlived_its_server_is_ended_by_the_next_life(tmp_path: Path, tree: Tree) -> None:
    left = noted(tmp_path, tree.session)
    tree.behead()
    assert started(tree.child)
    assert left.reap() == Reaped(ended=(f"{tree.child} sleep",))
    assert not started(tree.child)
    assert left.reap() == Reaped()  # and is forgotten


def test_who_was_started_after_the_note_is_ended_with_the_others(tmp_path: Path, tree: Tree) -> None:
    left = noted(tmp_path, tree.session, sessions={tree.session: [[tree.session, started(tree.session)]]})
    assert {name.partition(" ")[0] for name in left.reap().ended} == {str(tree.session), str(tree.child)}


def test_nothing_is_ended_while_the_one_who_runs_it_lives(
    tmp_path: Path, tree: Tree, bystander: subprocess.Popen[bytes]
) -> None:
    left = noted(tmp_path, tree.session, by=[bystander.pid, started(bystander.pid)])
    with pytest.raises(StillRuns) as found:
        left.reap()
    assert found.value.pid == bystander.pid
    end_what_is_left(tmp_path)
    assert started(tree.child)
    assert started(tree.session)


@pytest.mark.parametrize("which", ["another start", "another session", "another boot"])
def test_who_is_not_provably_ours_is_named_and_left_alone(
    tmp_path: Path, bystander: subprocess.Popen[bytes], which: str
) -> None:
    pid, began = bystander.pid, started(bystander.pid)
    if which == "another start":  # the number of our session was given to somebody else
        left = noted(tmp_path, pid, sessions={pid: [[pid, str(int(began) - 1)]]})
    elif which == "another session":
        left = noted(tmp_path, pid, sessions={2**22 + 1: [[pid, began]]})
    else:
        left = noted(tmp_path, pid, boot="before")
    found = left.reap()
    assert found.ended == found.stay == ()
    assert found.unproved == ((f"{pid} sleep",) if which == "another start" else ())
    assert started(pid) == began


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"boot": "", "by": [], "sessions": {}}', '{"sessions": 5}'])
def test_a_note_that_cannot_be_read_ends_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert Leftovers(tmp_path).reap() == Reaped()


def test_a_directory_that_cannot_be_written_costs_the_note_only(tmp_path: Path, tree: Tree) -> None:
    (tmp_path / "file").write_text("")
    left = Leftovers(tmp_path / "file")
    left.note(tree.session)
    assert left.reap() == Reaped()
    assert started(tree.child)


def test_a_session_is_noted_with_all_who_are_in_it_as_soon_as_it_is_new(tmp_path: Path, tree: Tree) -> None:
    left = Leftovers(tmp_path)
    left.note(tree.session)
    known = json.loads((tmp_path / NAME).read_text())["sessions"][str(tree.session)]
    assert [pid for pid, _ in known] == [tree.session, tree.child]
    other = Tree()
    try:
        left.note(tree.session, other.session)
        assert str(other.session) in json.loads((tmp_path / NAME).read_text())["sessions"]
    finally:
        other.end()
