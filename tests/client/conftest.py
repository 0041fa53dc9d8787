"""One suite, two clients: `driver` calls the methods of both."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coordinator.client import AsyncClient, Client
from tests.client.driver import QUICK, Driver
from tests.client.fake_coordinator import FakeCoordinator


@pytest.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator().serve() as running:
        yield running


@pytest.fixture(params=["sync", "async"])
async def driver(request: pytest.FixtureRequest, fake: FakeCoordinator) -> AsyncIterator[Driver]:
    sync = request.param == "sync"
    made = Driver((Client if sync else AsyncClient)(fake.address, budgets=QUICK), sync)
    yield made
    await made.close()
