"""Real Gym servers: one fleet for the tests of a module, new ones where a test kills them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import Fleet, counter_config


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(endpoint: ScriptedEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(counter_config(endpoint.url), tmp_path_factory.mktemp("f"))
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for Unix sockets below it."""
    return tmp_path_factory.mktemp("g")
