"""Runs that failed once, and the rule that they broke.

The rule: a seed that found a bug stays, under the name of what must hold, for as long as taking the fix away makes it
fail again (`mutants` does that). What no short run finds again has a test of its own here, without a seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safepoint.v1 import manifest_pb2

from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import SnapshotId
from tests.simulation.faults import make
from tests.simulation.story import play

pytestmark = pytest.mark.filterwarnings("ignore")

FOUND = {
    "a_save_that_the_next_coordinator_gave_up_is_not_published": 39,
    "what_was_told_published_is_not_deleted_by_the_next_coordinator": 54,
    "a_recorded_end_that_is_answered_again_raises_the_epoch": 23,
    "a_coordinator_that_starts_slowly_does_not_hide_the_one_that_replaced_it": 13,
}


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND.keys())
def test_regression(seed: int) -> None:
    assert play(make(seed)).violations == []


def test_a_snapshot_that_was_given_up_is_never_published(tmp_path: Path) -> None:
    store, name = SnapshotStore(tmp_path / "root", "default"), SnapshotId("step-1")
    store.begin(name)
    store.void(name)
    store.void(name)  # as a third coordinator would
    manifest = manifest_pb2.SnapshotManifest(snapshot_id=name, operation_id="save-1", job_id="default")
    with pytest.raises(SafepointError) as caught:
        store.publish(manifest)
    assert caught.value.reason is Reason.STALE_EPOCH
    assert store.published_by(name, "save-1") is None
    assert store.list().snapshots == ()
    store.discard(name)
    assert not (tmp_path / "root" / "snapshots" / name).exists()
    store.void(name)  # nothing is there: nothing can be published
