"""Runs that failed once, and the rule that they broke.

The rule: a run that finds a bug stays, under the name of what must hold, for as long as taking the fix away makes it fail
again: that is a mutant, and the seed is its hint. What no short run finds again has a test of its own here, without one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safepoint.v1 import manifest_pb2

from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import SnapshotId
from tests.simulation import mutants
from tests.simulation.faults import Event, Plan, make
from tests.simulation.story import play

pytestmark = pytest.mark.filterwarnings("ignore")

# What had gone wrong, and the mutant that takes its fix away: the run that notices it is the run that stays.
FOUND = {
    "a_save_that_the_next_coordinator_gave_up_is_not_published": "the name decides",
    "a_coordinator_that_was_replaced_does_not_publish": "epoch at publish",
    "a_recorded_end_that_is_answered_again_raises_the_epoch": "epoch not raised by a replay",
    "a_save_whose_directory_a_newer_coordinator_removes_says_so": "a reservation that is gone has a reason",
    "a_coordinator_that_starts_slowly_does_not_hide_the_one_that_replaced_it": "the address is kept",
    "a_coordinator_that_was_replaced_lets_its_shims_go": "replaced coordinators leave",
    "a_coordinator_whose_journal_has_failed_stops": "a failed journal is the end",
    "an_operation_whose_checks_are_cancelled_before_their_first_step_ends": "cancelled checks end",
    "a_publish_whose_last_fsync_failed_outlives_a_loss_of_power": "what is found is made durable",
    "a_timer_that_is_early_still_moves_the_core": "early timers",
}
HINTS: dict[str, int] = json.loads(mutants.HINTS.read_text(encoding="utf-8"))


MUTANTS = {mutant.name: mutant for mutant in mutants.MUTANTS}
IN_A_RUN = {what: name for what, name in FOUND.items() if not MUTANTS[name].test}  # the others have a test elsewhere


@pytest.mark.parametrize("name", IN_A_RUN.values(), ids=IN_A_RUN.keys())
def test_regression(name: str) -> None:
    assert play(make(HINTS.get(name, 1), MUTANTS[name].faults)).violations == []


# What was wrong was a check, not what it looked at.


def test_a_save_that_fences_with_little_memory_refuse_after_a_sweep_is_not_one_that_fails() -> None:
    result = play(replace(
        make(1), events=(), duration_s=1.0, rows=1, straggles=0.0, restarts=True, used_on=True, ages="quiet", little_memory=True,
        coordinator_leaves=False, power_loss_at_end=False, faults_in_restore=False,
    ))  # fmt: skip
    assert result.violations == []
    begun = next(n for n, line in enumerate(result.trace) if line.endswith("Save meanwhile"))
    ended = next(n for n, line in enumerate(result.trace) if line.endswith("Save aged"))
    assert any("LIMIT_EXCEEDED" in line for line in result.trace[begun:ended])


def test_an_operation_of_a_coordinator_that_was_replaced_already_may_be_known_to_nobody() -> None:
    events = (
        Event(1.1717740581470149, "pause trainer", "model-0", 2.4303375198357733),
        Event(1.2866931039265512, "second coordinator", "model-0", 0.03845202403226822, "stopped at its start"),
        Event(2.036532436311931, "second coordinator", "model-0", 12.042897330749634),
        Event(3.2609228362393328, "cut", value=1),
        Event(4.20651301325287, "pause trainer", "model-0", 12.11956267884052),
        Event(5.041328763258452, "pause trainer", "agent-0", 0.05987072276461666),
        Event(5.984567086705098, "save", value=2),
        Event(6.44024088469534, "leave and come back", "model-0", 0.33293701832924194),
    )
    servers = {
        "agent-0": ("gym.agent", "agent"), "model-0": ("gym.model", "policy_model"), "tools-0": ("gym.resources", "resources"),
    }  # fmt: skip
    result = play(Plan(
        702, servers, events, duration_s=9.685832108754493, rows=6, concurrency=4, straggles=0.0, power_loss_at_end=True,
        little_memory=True, same_ports=True, wall_skew_s=3600.0, offsets={
            "agent-0": 1121.6405344019536, "model-0": 1491.8446267976465, "tools-0": 2512.5201425558953,
            "coordinator": 234.06614126484982, "trainer": 1984.6950513244687,
        },
    ))  # fmt: skip
    assert result.violations == []
    assert any("UNKNOWN_OPERATION" in line for line in result.trace)


def test_a_snapshot_that_was_given_up_is_never_published(tmp_path: Path) -> None:
    store, name = SnapshotStore(tmp_path / "root", "default"), SnapshotId("step-1")
    store.begin(name)
    store.void(name)
    store.void(name)  # as a third coordinator would
    manifest = manifest_pb2.SnapshotManifest(snapshot_id=name, operation_id="save-1", job_id="default")
    manifest.ledger_sha256 = "0" * 64
    with pytest.raises(SafepointError) as caught:
        store.publish(manifest)
    assert caught.value.reason is Reason.STALE_EPOCH
    assert store.published_by(name, "save-1") is None
    assert store.list().snapshots == ()
    store.discard(name)
    assert not (tmp_path / "root" / "snapshots" / name).exists()
    store.void(name)  # nothing is there: nothing can be published
