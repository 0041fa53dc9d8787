"""The coordinator as an actor: one per name, restarted by Ray under a higher epoch, errors with their reasons."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.rpc import channel
from tests.ray.conftest import Nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def status(address: str) -> Any:
    async def ask() -> Any:
        async with channel(address) as opened:
            stub: Any = coordinator_service_pb2_grpc.CoordinatorStub(opened)
            return await stub.GetStatus(pb.GetCoordinatorStatusRequest(), timeout=5)

    return asyncio.run(ask())


def test_two_that_start_it_at_once_get_one_coordinator(nodes: Nodes, tmp_path: Path) -> None:
    from coordinator import ray_host

    settings = Settings(root=str(tmp_path))
    try:
        with ThreadPoolExecutor(2) as pool:
            addresses = set(pool.map(lambda _: ray_host.start(settings, "race"), range(2)))
        assert len(addresses) == 1
        assert ray_host.find("race") == addresses.pop()
        with pytest.raises(SafepointError) as caught:
            ray_host.start(Settings(root=str(tmp_path / "other")), "race")
        assert caught.value.reason is Reason.REQUEST_CONFLICT
    finally:
        ray_host.stop("race")
    with pytest.raises(SafepointError) as caught:
        ray_host.find("race")
    assert caught.value.reason is Reason.UNAVAILABLE


def test_a_killed_coordinator_comes_back_under_a_higher_epoch(nodes: Nodes, tmp_path: Path) -> None:
    from coordinator import ray_host

    try:
        before = ray_host.start(Settings(root=str(tmp_path)), "again")
        assert status(before).coordinator_epoch == 1
        actor = nodes.ray.get_actor("again", namespace=ray_host.NAMESPACE)
        os.kill(nodes.ray.get(actor.pid.remote()), signal.SIGKILL)
        end = time.monotonic() + 30
        while True:
            try:
                after = ray_host.find("again")
                if after != before or status(after).coordinator_epoch > 1:
                    break
            except Exception:
                assert time.monotonic() < end, "it did not come back"
            time.sleep(0.2)
        assert status(after).coordinator_epoch == 2
        written = json.loads((tmp_path / "coordinator" / "address.json").read_text())
        assert written["address"] == after
        assert written["epoch"] == 2
    finally:
        ray_host.stop("again")


def test_a_coordinator_that_cannot_start_says_why_and_leaves_no_actor(nodes: Nodes, tmp_path: Path) -> None:
    from coordinator import ray_host

    (tmp_path / "owner.json").write_text('{"job_id": "another"}')
    with pytest.raises(SafepointError) as caught:
        ray_host.start(Settings(root=str(tmp_path)), "foreign")
    assert caught.value.reason is Reason.SNAPSHOT_FOREIGN
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            nodes.ray.get_actor("foreign", namespace=ray_host.NAMESPACE)
        except ValueError:
            return
        time.sleep(0.1)
    pytest.fail("the actor is still there")
