"""A coordinator whose root is in a store: it is found, it is replaced, and its store may fail while it runs."""

from __future__ import annotations

import json

import pytest

from coordinator import server
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError
from tests.coordinator.conftest import until
from tests.stored import Lost, MemoryStore, quiet


@pytest.fixture(autouse=True)
def it_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIT_EVERY_S", 0.02)


async def started(url: str) -> Coordinator:
    return await serve(Settings(root=url, heartbeat_s=0.2))


async def test_one_that_starts_is_found_and_the_one_before_it_ends_by_itself() -> None:
    memory = MemoryStore()
    first = await started(memory.root())
    second = await started(memory.root())
    try:
        await until(lambda: first.unfit is not None)
        assert first.unfit is not None
        assert first.unfit.reason is Reason.STALE_EPOCH
        assert second.epoch == 2
        said = json.loads(memory.objects["coordinator/address.json"].data)
        assert said["address"] == second.address
        # One that was slow has written its own address over the newer one: that is put right.
        memory.names().replace("coordinator/address.json", first.announcement().encode())
        await until(lambda: second.address in memory.objects["coordinator/address.json"].data.decode())
    finally:
        await first.kill()
        await second.kill()


async def test_a_store_that_is_away_for_a_while_ends_nobody() -> None:
    memory = MemoryStore()
    client = memory.client()
    running = await started(memory.root(client))

    looks = 0

    def away(_method: str, _key: str) -> None:
        nonlocal looks
        looks += 1
        raise Lost("no route")

    try:
        client.before = away
        await until(lambda: looks > 5)
        assert running.unfit is None
        client.before = quiet
        del memory.objects["coordinator/address.json"]
        await until(lambda: "coordinator/address.json" in memory.objects)
        assert running.unfit is None
    finally:
        await running.kill()


async def test_a_store_of_another_job_is_refused_before_anything_is_changed() -> None:
    memory = MemoryStore()
    running = await started(memory.root())
    await running.kill()
    before = memory.keys("coordinator/")
    with pytest.raises(SafepointError) as caught:
        await serve(Settings(root=memory.url, job_id="another"))
    assert caught.value.reason is Reason.SNAPSHOT_FOREIGN
    assert memory.keys("coordinator/") == before
