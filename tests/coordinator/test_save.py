"""A save over real gRPC: what is said, what is on the disk, and that everybody is open afterwards."""

from __future__ import annotations

from tests.coordinator.conftest import Bench, kinds
from tests.fakes import Knobs


async def test_a_save_publishes_a_snapshot_and_everybody_is_open(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=3))
    events = await bench.save()
    assert kinds(events)[-2:] == ["resumed", "saved"]
    saved = events[-1].saved
    assert saved.snapshot.snapshot_id == "step-1"
    assert saved.snapshot.totals.parked == 3
    assert saved.pause.ToMicroseconds() > 0
    assert not saved.unconfirmed
    assert bench.all_open()
    assert [shim.opened_by for shim in bench.shims.values()] == [["Resume"]] * 3
    assert (bench.root / "snapshots" / "step-1" / "manifest.json").is_file()
    sequences = [event.sequence for event in events]
    assert sequences == sorted(set(sequences))
