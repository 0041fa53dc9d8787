"""What the proxy costs, measured at the shim's own process; see `bench_proxy` for how."""

from __future__ import annotations

import asyncio

import pytest

from tests.vllm.bench_proxy import bench
from tests.vllm.test_freeze import MEASURES, figure

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


async def test_the_cost_of_a_request_and_of_a_token() -> None:
    found = await asyncio.to_thread(bench, 50 if MEASURES else 5)
    for name, value in found.items():
        figure(f"proxy: {name}", value)
    costs = {name: value for name, value in found.items() if name.startswith("ms CPU") and "bare pump" not in name}
    worst = max(costs.values())
    # A guard against a cost of another order, on whatever machine; the figures are the finding.
    assert worst < (0.15 if MEASURES else 1.0), found
    # What is added to a pump that reads nothing, in the same minute: this holds on a slow machine, too.
    assert all(cost < 20 * found[f"{name}, bare pump"] for name, cost in costs.items()), found
    assert max(value for name, value in found.items() if name.startswith("us CPU a token")) < 500
