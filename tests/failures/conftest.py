"""A coordinator with fake shims over real gRPC."""

from __future__ import annotations

from tests.coordinator.conftest import bench

__all__ = ["bench"]
