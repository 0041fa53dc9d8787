"""What is left after a case, and whether it may be so.

The rule it keeps: a case is over when the fleet is as it was before: everybody runs and is registered, every gate is
open, every rollout that was in flight has its result, the snapshots are whole, nothing is left lying about, and the next
save succeeds.
"""

from __future__ import annotations

import asyncio
import re
import time

from coordinator.wire.errors import SafepointError
from tests.faults import cases as c
from tests.faults.cases import Trigger
from tests.faults.fleet import SERVERS
from tests.faults.lane import SAVE_S, Lane
from tests.faults.result import say

FINISH_WITHIN_S = 30.0
TIDY_WITHIN_S = 6.0
_TEMPORARY = re.compile(r"\..+")


async def judge(lane: Lane) -> None:
    """Heal, then look at everything."""
    result, case = lane.result, lane.case
    await lane.healthy()
    if not result.what_happened:
        result.happened(f"all are back after {time.monotonic() - lane.t0:.1f} s")
    lost = await lane.trainer.finish(lane.before, FINISH_WITHIN_S)
    for each in lost:
        result.blame(each.wrong or f"{each.rollout_id} has no result after {each.dispatches} dispatches")
    result.lost += len(lost)
    await _next_save(lane)
    restored = case.trigger in (Trigger.RESTORE, Trigger.RESUME)
    result.restarted = 0 if restored else sum(each.dispatches > 1 for each in lane.before)
    if case.trigger is Trigger.RESTORE:
        # It brings back what is recorded in the snapshot; what was made after that is made again, and that is right.
        again = {turn: lane.engine.generated[turn] - before for turn, before in lane.finished.items()}
        result.repeated = sum(again.values())
        if result.repeated:
            turns = ", ".join(f"{rollout_id}/{turn}" for (rollout_id, turn), times in sorted(again.items()) if times)
            result.blame(f"{result.repeated} generations of the snapshot's calls were made again: {turns}"[:300])
        if not lane.finished:
            result.blame("the snapshot had no finished call: nothing was shown")
    else:
        result.repeated = lane.engine.repeated(each.rollout_id for each in lane.before)
    if not case.of_server and not restored and case.fault not in (c.DROP_REPLIES, c.DROP_REQUESTS):
        if result.restarted:
            result.blame(f"{result.restarted} rollouts were cut off although their servers lived")
        if result.repeated:
            result.blame(f"{result.repeated} finished generations were made again")
    await _tidy(lane)
    done = lane.trainer.take_done()
    if done:
        await lane.client.retire(done, timeout=10)


async def _next_save(lane: Lane) -> None:
    result = lane.result
    known = {each.rollout_id for each in lane.trainer.in_flight() if lane.engine.knows(each.rollout_id)}
    try:
        saved = await lane.client.save(lane.name("next"), timeout=SAVE_S)
    except SafepointError as error:
        result.next_save = say(error)
        result.blame(f"the next save: {error}")
        return
    must = known & {each.rollout_id for each in lane.trainer.in_flight()}
    lines = {rollout.rollout_id async for rollout in lane.client.ledger(saved.snapshot_id)}
    if missing := must - lines:
        result.lost += len(missing)
        result.blame(f"in no line of the ledger: {', '.join(sorted(missing))}")
    result.next_save = f"{saved.totals.all} rollouts, {saved.pause_s:.2f} s"
    listed = await lane.client.snapshots()
    names = {each.snapshot_id for each in listed.published}
    for name in {lane.last, saved.snapshot_id} | ({lane.tried} & names):
        try:
            await lane.client.verify(name, timeout=20)
        except SafepointError as error:
            result.blame(f"snapshot {name}: {error}")
    if lane.tried and lane.case.trigger is not Trigger.TRAFFIC:
        published = lane.tried in names
        result.happened("published" if published else "not published")
        if lane.case.published not in (None, published):
            result.blame("it is on the wrong side of the commit point")
        if lane.told not in (None, published):
            result.blame("the caller was told otherwise")
    lane.last, lane.tried = saved.snapshot_id, ""


async def _tidy(lane: Lane) -> None:
    until = time.monotonic() + TIDY_WITHIN_S
    while leaks := set(await _leaks(lane)) - lane.known_leaks:
        if time.monotonic() > until:
            lane.result.blame(f"left behind: {', '.join(sorted(leaks)[:5])}")
            lane.known_leaks |= leaks  # a leak is one case's
            return
        await asyncio.sleep(0.1)


async def _leaks(lane: Lane) -> list[str]:
    listed = await lane.client.snapshots()
    names = {each.snapshot_id for each in listed.published}
    leaks = [f"{name}: {why}" for name, why in listed.invalid.items()]
    for path in lane.f.root.rglob("*"):
        where = path.relative_to(lane.f.root)
        if _TEMPORARY.fullmatch(path.name) or (
            len(where.parts) == 2 and where.parts[0] == "snapshots" and path.name not in names
        ):
            leaks.append(str(where))
    lives = {lane.f.life(name) for name in SERVERS}
    leaks += [path.name for path in lane.f.run_dir.iterdir() if path not in lives]
    leaks += [str(p.relative_to(lane.f.run_dir)) for p in lane.f.run_dir.rglob("*") if _TEMPORARY.fullmatch(p.name)]
    leaks += [f"tmp/{path.name}" for path in lane.f.temporary.iterdir()]
    return leaks
