"""A command that writes a root itself goes on only when nobody can be using it."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from coordinator.alone import require_alone
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, Refused


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


def test_where_none_has_ever_run_or_its_socket_is_gone_nobody_is(tmp_path: Path) -> None:
    require_alone(tmp_path)
    announce(tmp_path, f"unix:{tmp_path}/gone.sock")
    require_alone(tmp_path)
