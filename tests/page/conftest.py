"""A real coordinator with fake shims, as the coordinator's own tests have it."""

from tests.coordinator.conftest import bench

__all__ = ["bench"]
