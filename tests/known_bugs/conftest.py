"""The benches of the bug list: a coordinator with fake shims over real gRPC, and a small Gym behind real gates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.conftest import bench
from tests.gate.world import World
from tests.shims.conftest import short_path

__all__ = ["bench", "short_path", "world"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "first")
    yield made
    made.close()
