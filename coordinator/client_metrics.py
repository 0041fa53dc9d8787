"""A save as numbers for a trainer's dashboard: `Client(on_saved=...)`, with adapters for Weights & Biases and TensorBoard.

    with Client(on_saved=to_wandb(run)) as client: ...
    with Client(on_saved=to_tensorboard(writer)) as client: ...

The rule: what is done with the numbers never harms the save, which is over by then. Neither library is imported here: an
adapter is given the run or the writer, and only calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from coordinator.client_results import SaveResult

log = logging.getLogger("safepoint.client")

PREFIX: Final = "safepoint/"
STEP: Final = "step"  # of the snapshot's metadata

OnSaved = Callable[[Mapping[str, float]], None]


def save_metrics(result: SaveResult) -> dict[str, float]:
    """The numbers of a save. Seconds and bytes as the names say; `safepoint/step` where the metadata has a step."""
    totals = result.totals
    kept = totals.all - totals.excluded
    numbers: dict[str, float] = {
        "pause_s": result.pause_s,
        "elapsed_s": result.elapsed_s,
        "size_bytes": result.size_bytes,
        "rollouts_completed": totals.completed,
        "rollouts_in_flight": totals.kept_in_flight,
        "rollouts_to_restart": totals.excluded,
        "coverage": kept / totals.all if totals.all else 1.0,
        "warnings": len(result.warnings),
    }
    step = _integer(result.snapshot.metadata.get(STEP, ""))
    return {PREFIX + name: float(value) for name, value in numbers.items()} | (
        {PREFIX + STEP: float(step)} if step is not None else {}
    )


def tell(on_saved: OnSaved | None, result: SaveResult) -> SaveResult:
    """Call back with the numbers; what that raises is logged. Returns `result`."""
    if on_saved is not None:
        try:
            on_saved(save_metrics(result))
        except Exception:
            log.exception("on_saved has failed; the snapshot %s is safe", result.snapshot_id)
    return result


def to_wandb(run: Any) -> OnSaved:
    """For a run of Weights & Biases. The numbers join the step that the trainer logs next, as its own do."""

    def on_saved(metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), commit=False)

    return on_saved


def to_tensorboard(writer: Any) -> OnSaved:
    """For a SummaryWriter of TensorBoard: scalars at the step of the metadata, or counted from 0 where there is none."""
    saves = 0

    def on_saved(metrics: Mapping[str, float]) -> None:
        nonlocal saves
        step = int(metrics.get(PREFIX + STEP, saves))
        saves += 1
        for name, value in metrics.items():
            if name != PREFIX + STEP:
                writer.add_scalar(name, value, step)

    return on_saved


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
