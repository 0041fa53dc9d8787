"""The benches of the bug list: a coordinator with fake shims over real gRPC, and a small Gym behind real gates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.conftest import bench
from tests.gate.world import World

__all__ = ["bench", "world"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "first")
    yield made
    made.close()
