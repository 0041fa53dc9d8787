"""A command that writes a root itself goes on only when nobody can be using it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from pathlib import Path

import pytest

from coordinator.alone import require_alone
from coordinator.presence import enter
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, Refused, SafepointError


def announce(root: Path, address: str) -> None:
    (root / "coordinator").mkdir(parents=True)
    (root / "coordinator" / "address.json").write_text(json.dumps({"address": address, "epoch": 1, "nonce": "n"}))


async def test_a_coordinator_that_runs_is_named_with_what_helps_this_command(tmp_path: Path) -> None:
    running = await serve(Settings(root=str(tmp_path)))
    try:
        with pytest.raises(Refused, match="A coordinator runs on") as raised:
            await asyncio.to_thread(require_alone, tmp_path, "", "Stop it first.")
        assert (raised.value.reason, raised.value.problem.next_step) == (Reason.SNAPSHOT_IN_USE, "Stop it first.")
    finally:
        await running.kill()
    await asyncio.to_thread(require_alone, tmp_path)


def test_one_that_is_stopped_may_go_on_at_any_moment(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        announce(tmp_path, f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Refused, match="may live") as raised:
            require_alone(tmp_path)
    assert raised.value.reason is Reason.SNAPSHOT_IN_USE
    assert str(tmp_path / "coordinator" / "address.json") in raised.value.problem.next_step
    require_alone(tmp_path)  # nobody listens there any more


async def test_one_whose_address_is_gone_or_old_is_seen_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.server.FIT_EVERY_S", 60.0)
    running = await serve(Settings(root=str(tmp_path)))
    record = tmp_path / "coordinator" / "address.json"
    try:
        record.unlink()
        with pytest.raises(Refused, match=r"A coordinator runs on .* has not written its address") as raised:
            require_alone(tmp_path)
        assert raised.value.reason is Reason.SNAPSHOT_IN_USE
        record.write_text(json.dumps({"address": f"unix:{tmp_path}/gone.sock", "epoch": 1, "nonce": "n"}))
        with pytest.raises(Refused, match=r"A coordinator runs on .* does not listen at"):
            require_alone(tmp_path)
        other = await serve(Settings(root=str(tmp_path)))  # it may be replaced at any time
        await other.kill()
        record.unlink()
        with pytest.raises(Refused, match="A coordinator runs on"):
            require_alone(tmp_path)
    finally:
        await running.kill()
    require_alone(tmp_path)


async def test_a_start_that_is_refused_is_not_seen_any_more(tmp_path: Path) -> None:
    await (await serve(Settings(root=str(tmp_path)))).kill()
    (journal,) = (tmp_path / "coordinator").glob("journal-*.log")
    journal.write_bytes(b"")
    with pytest.raises(SafepointError, match="is empty"):
        await serve(Settings(root=str(tmp_path)))
    (tmp_path / "coordinator" / "address.json").unlink()
    require_alone(tmp_path)


@pytest.mark.parametrize("kind", [errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF])
async def test_where_the_file_system_has_no_locks_that_is_said_and_the_address_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: int
) -> None:
    def none(*_: object) -> None:
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr("fcntl.flock", none)
    running = await serve(Settings(root=str(tmp_path)))
    try:
        assert any("no lock on" in line for line in caplog.messages)
        with pytest.raises(Refused, match="A coordinator runs on"):
            await asyncio.to_thread(require_alone, tmp_path)
    finally:
        await running.kill()
    await asyncio.to_thread(require_alone, tmp_path)


def test_a_start_waits_for_a_command_that_only_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([BlockingIOError(errno.EWOULDBLOCK, "held"), None])

    def flock(*_: object) -> None:
        if (error := next(tries)) is not None:
            raise error

    monkeypatch.setattr("fcntl.flock", flock)
    with Directory.open(tmp_path) as directory:
        assert enter(directory)


def test_where_none_has_ever_run_or_its_socket_is_gone_nobody_is(tmp_path: Path) -> None:
    require_alone(tmp_path)
    announce(tmp_path, f"unix:{tmp_path}/gone.sock")
    require_alone(tmp_path)
