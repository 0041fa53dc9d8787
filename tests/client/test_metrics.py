"""A save as numbers: told to a callback that cannot harm it, and by adapters to the usual dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from coordinator.client import Client, save_metrics, to_tensorboard, to_wandb
from coordinator.client_async import AsyncClient
from coordinator.client_results import SaveResult, SnapshotSummary, Totals
from tests.client.fake_coordinator import FakeCoordinator

RESULT = SaveResult(
    SnapshotSummary("step-40", "save-1", 0.0, 41_000_000, Totals(3, 60, 2, 5), (), "", {"step": "40"}), 0.31, 0.85
)


def test_the_numbers_of_a_save() -> None:
    assert save_metrics(RESULT) == {
        "safepoint/pause_s": 0.31, "safepoint/elapsed_s": 0.85, "safepoint/size_bytes": 41e6,
        "safepoint/rollouts_completed": 3.0, "safepoint/rollouts_in_flight": 62.0, "safepoint/rollouts_to_restart": 5.0,
        "safepoint/coverage": 65 / 70, "safepoint/warnings": 0.0, "safepoint/step": 40.0,
    }  # fmt: skip


def test_weights_and_biases_gets_them_with_the_trainers_next_step() -> None:
    logged: list[tuple[Mapping[str, float], bool]] = []
    to_wandb(SimpleNamespace(log=lambda values, commit: logged.append((values, commit))))(save_metrics(RESULT))
    assert logged[0][0]["safepoint/pause_s"] == 0.31
    assert logged[0][1] is False


def test_tensorboard_gets_scalars_at_the_step_or_counted() -> None:
    scalars: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: scalars.append((name, value, step)))
    tell = to_tensorboard(writer)
    tell(save_metrics(RESULT))
    assert ("safepoint/size_bytes", 41e6, 40) in scalars
    tell({"safepoint/pause_s": 0.5})
    assert scalars[-1] == ("safepoint/pause_s", 0.5, 1)


async def test_each_save_is_told_once_and_a_callback_that_fails_harms_nothing(fake: FakeCoordinator) -> None:
    told: list[Mapping[str, float]] = []

    def on_saved(metrics: Mapping[str, float]) -> None:
        told.append(metrics)
        raise RuntimeError("the dashboard is down")

    async with AsyncClient(fake.address, on_saved=on_saved) as client:
        result: Any = await client.save("step-40")
        assert result.snapshot_id == "step-40"
        async with client.cut("step-41") as cut:
            assert len(told) == 1
        assert cut.result is not None
    assert [one["safepoint/pause_s"] for one in told] == [0.31, 0.52]


def test_the_sync_client_takes_it_too() -> None:
    assert Client("127.0.0.1:9", on_saved=lambda metrics: None)._on_saved is not None
