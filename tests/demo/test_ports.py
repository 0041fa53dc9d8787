"""Ports that are chosen before their server starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.demo import ports
from coordinator.demo.ports import free_ports


def test_no_port_is_one_that_the_system_gives_to_connections_and_none_is_given_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = tmp_path / "range"
    known.write_text("22000\t60999\n")
    monkeypatch.setattr(ports, "_RANGE", known)
    given = [port for _ in range(12) for port in free_ports(5)]
    assert len(set(given)) == 60
    assert all(20_000 <= port < 22_000 for port in given)


def test_a_port_that_somebody_listens_on_or_has_just_chosen_is_not_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = tmp_path / "range"
    known.write_text("21000 60999")
    monkeypatch.setattr(ports, "_RANGE", known)
    monkeypatch.setattr(ports, "_KEPT", 1000)
    look = "import sys; from coordinator.demo.ports import free_ports; print(*free_ports(64), flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", look], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    theirs = {int(port) for port in other.stdout.readline().split()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ports, "_FIRST", taken.getsockname()[1])
        known.write_text(f"{taken.getsockname()[1] + 1000} 60999")
        taken.listen()
        assert taken.getsockname()[1] not in free_ports(900)
    monkeypatch.setattr(ports, "_FIRST", min(theirs))
    known.write_text(f"{min(theirs) + 1000} 60999")
    assert not theirs & set(free_ports(800))
    other.communicate()


@pytest.mark.parametrize("text", ["1024 65535", None, "nothing"])
def test_ports_are_found_where_the_system_leaves_none_or_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    known = tmp_path / "range"
    if text is not None:
        known.write_text(text)
    monkeypatch.setattr(ports, "_RANGE", known)
    assert len(set(free_ports(50))) == 50
