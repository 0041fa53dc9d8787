"""Runs that failed once, and the rule that they broke.

The rule: a seed that found a bug stays, under the name of what must hold. A change of the simulation may turn such a run
into another one; so the bugs that a seed found have a test of their own where they lay as well.
"""

from __future__ import annotations

import pytest

from tests.simulation.faults import make
from tests.simulation.story import play

pytestmark = pytest.mark.filterwarnings("ignore")

FOUND = {
    "shims_of_a_replaced_coordinator_find_the_new_one": 14,
    "a_coordinator_whose_journal_has_failed_is_started_again": 8,
    "a_recorded_end_that_is_answered_again_raises_the_epoch": 45,
    "an_operation_aborted_before_its_checks_began_ends": 101,
    "an_opening_ends_although_its_timer_was_early": 170,
    "a_published_save_is_resumed_although_a_timer_was_early": 212,
}


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND.keys())
def test_regression(seed: int) -> None:
    assert play(make(seed)).violations == []
