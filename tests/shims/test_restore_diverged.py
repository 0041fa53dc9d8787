"""A restore that cannot bring everything back names every rollout that restarts, however many, also to who asks again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.terms import RolloutState
from participant_shims.adapter import LedgerLine, Loaded, Progress, WrittenFile
from tests.shims.shim_fakes import FakeAdapter, collect, serve
from tests.shims.test_service import saved


class Losing(FakeAdapter):
    """Loads everything and loses `lost` sessions."""

    lost = 0

    async def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        async for step in super().load(directory, files):
            if isinstance(step, Loaded):
                lines = [LedgerLine(f"r-{n}", 0, RolloutState.EXCLUDED, "gone") for n in range(self.lost)]
                step = replace(step, diverged=tuple(lines))
            yield step


@pytest.mark.parametrize("lost", [0, 3, 20, 21, 1000, 2500])
async def test_every_rollout_that_restarts_is_named(short_path: Path, lost: int) -> None:
    adapter = Losing()
    adapter.lost = lost
    async with serve(adapter, short_path) as shim:
        committed = await saved(shim)
        events: list[list[Any]] = [await collect(shim.restore(committed.manifest_sha256)) for _ in range(2)]
    for answer in events:  # the second is from the record
        restored = answer[-1].restored
        assert (restored.diverged_count, len(restored.diverged)) == (lost, min(lost, 20))
        batches = [event.diverged.entries for event in answer if event.HasField("diverged")]
        assert all(len(batch) <= 1000 for batch in batches)
        named = [entry.rollout_id for batch in batches for entry in batch] or [e.rollout_id for e in restored.diverged]
        assert named == [f"r-{n}" for n in range(lost)]
    assert adapter.calls.count("load") == 1
