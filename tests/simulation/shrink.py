"""Makes a failing run small: faults are left out as long as it still fails in the same way.

The rule: a run fails in the same way when its first violation is of the same kind, so that one bug is not traded for
another on the way down.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.faults import Plan
from tests.simulation.story import Result, play

MAX_RUNS = 60


def kind_of(result: Result) -> str:
    """The kind of the first violation: its text without names and numbers."""
    return re.sub(r"[a-z]+-[\w.-]+|[0-9.]+|'.*?'", "_", result.violations[0])[:60] if result.violations else ""


def shrink(plan: Plan, say: Callable[[str], None] = lambda text: None) -> tuple[Plan, Result]:
    """The smallest plan that was found, with its run. `plan` itself when it does not fail."""
    result = play(plan)
    wanted, runs = kind_of(result), 1
    if not wanted:
        return plan, result
    changed = True
    while changed and runs < MAX_RUNS:
        changed = False
        smaller = [plan.without(event) for event in reversed(plan.events)]
        smaller += [replace(plan, faults_in_restore=False)] if plan.faults_in_restore else []
        smaller += [replace(plan, power_loss_at_end=False)] if plan.power_loss_at_end else []
        smaller += [replace(plan, restarts=False)] if plan.restarts else []
        smaller += [replace(plan, used_on=False)] if plan.used_on else []
        smaller += [replace(plan, coordinator_leaves=False)] if plan.coordinator_leaves else []
        smaller += [replace(plan, ages="")] if plan.ages else []
        smaller += [replace(plan, straggles=0.0)] if plan.straggles else []
        smaller += [replace(plan, rows=1)] if plan.rows > 1 else []
        for candidate in smaller:
            if runs >= MAX_RUNS:
                break
            found = play(candidate)
            runs += 1
            if kind_of(found) == wanted:
                plan, result, changed = candidate, found, True
                say(f"{len(plan.events)} events are enough")
                break
    return plan, result
