"""Runs cases of the fault matrix on fleets, one after the other on each.

The rule it keeps: the next case begins on a fleet that is as it was before; one that cannot be healed is replaced, and the
case that broke it has failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from tests.faults import cases as c
from tests.faults.cases import Case
from tests.faults.judge import judge
from tests.faults.lane import Lane
from tests.faults.outside import outside
from tests.faults.result import Result, say
from tests.faults.stories import STORY


async def run_case(lane: Lane, case: Case) -> Result:
    """Put the fleet through one case. Never raises for what the case shows; a fleet that is beyond healing, ConnectionError."""
    result = Result(case.name, case.process, case.failpoint, case.fault, case.trigger.value)
    began = time.monotonic()
    lane.f.forget_hits()
    lane.result, lane.case = result, case
    lane.before = lane.trainer.in_flight()
    lane.t0 = began
    try:
        if case.fault in c.OUTSIDE:
            await outside(lane, case)
        else:
            await STORY[case.trigger](lane)
        lane.f.disarm()
        await judge(lane)
    except Exception as error:
        result.blame(f"the case did not come to its end: {say(error)}")
        raise ConnectionError(str(error)) from error
    finally:
        lane.f.disarm()
        result.seconds = round(time.monotonic() - began, 1)
    return result


async def run_lane(lane: Lane, queue: list[Case], told: Callable[[Result], None]) -> list[Result]:
    """Take cases from the queue until it is empty. A fleet that a case has left broken is replaced by a fresh one."""
    results: list[Result] = []
    while queue:
        with contextlib.suppress(ConnectionError):
            async with lane.fleet():
                while queue:
                    case = queue.pop(0)
                    try:
                        await run_case(lane, case)
                    finally:
                        results.append(lane.result)
                        told(lane.result)
    return results
