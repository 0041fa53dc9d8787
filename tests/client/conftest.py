"""One suite, two clients: `driver` calls the methods of both."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coordinator.client import AsyncClient, Budgets, Client
from tests.client.driver import QUICK, Driver
from tests.client.fake_coordinator import FakeCoordinator


@pytest.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator().serve() as running:
        yield running


@pytest.fixture(params=["sync", "async"])
async def driver(request: pytest.FixtureRequest, fake: FakeCoordinator) -> AsyncIterator[Driver]:
    """`hasty` marks a test whose calls must be given up: its budgets are short."""
    sync = request.param == "sync"
    budgets = QUICK if request.node.get_closest_marker("hasty") else Budgets()
    made = Driver((Client if sync else AsyncClient)(fake.address, budgets=budgets), sync)
    yield made
    await made.close()
