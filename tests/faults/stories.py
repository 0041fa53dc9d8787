"""What goes on when a fault comes: one story for each trigger.

The rule it keeps: a story arms, triggers, and returns when the fault has come and gone and whoever asked for something has
been answered; what is left is judged elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

from coordinator.wire.chunks import Chunks
from tests.faults.cases import Trigger
from tests.faults.cut import compare_sessions, generated, recorded_of
from tests.faults.fleet import COORDINATOR, LEASE_S, SERVERS
from tests.faults.lane import SAVE_S, SLACK_S, Lane
from tests.faults.rollouts import Live


async def _save(lane: Lane) -> None:
    lane.f.arm(lane.case.owner, lane.case.specification)
    await lane.fault_in(lane.saving())


async def _slow_save(lane: Lane) -> None:
    lane.f.arm(COORDINATOR, "publication.before_ledger=1*delay(1500)")
    await _save(lane)


async def _failed_save(lane: Lane) -> None:
    cause = "shim.before_sync=1*error(EIO)"
    mine = lane.case.specification
    if lane.case.owner == "counter":
        mine = f"{mine};{cause}"
    else:
        lane.f.arm("counter", cause)
    lane.f.arm(lane.case.owner, mine)
    await lane.fault_in(lane.saving())


async def _lapse(lane: Lane) -> None:
    if (
        lane.case.of_server
    ):  # a gate is left alone by its shim as well, and by the coordinator that would tell the next one to open it
        lane.f.arm(lane.case.owner, f"{lane.case.specification};shim.after_manifest=1*kill")
        lane.f.arm(COORDINATOR, "registration.before_welcome=1*kill")
    else:
        lane.f.arm(lane.case.owner, lane.case.specification)
        lane.f.arm(COORDINATOR, "driver.before_confirm=1*kill")
    await lane.fault_in(lane.saving())


async def _recovery(lane: Lane) -> None:
    lane.f.arm(COORDINATOR, "snapshots.before_publish=1*kill")
    saving = asyncio.create_task(lane.saving())
    await lane.until_hit(COORDINATOR, "snapshots.before_publish")
    await asyncio.to_thread(lane.f.processes[COORDINATOR].wait)
    lane.f.arm(COORDINATOR, lane.case.specification)
    lane.f.start(COORDINATOR)
    await lane.fault_in(saving)


async def _prune(lane: Lane) -> None:
    chunks = Chunks(lane.f.root)
    old = [chunks.path(chunks.write(f"of nobody, {lane.name('chunk')}".encode()).sha256) for _ in range(3)]
    for path in old:
        os.utime(path, (0, 0))
    lane.f.arm(lane.case.owner, lane.case.specification)
    await lane.fault_in(lane.call("prune", lane.client.prune(1, timeout=SAVE_S)))
    await lane.healthy()
    await lane.client.prune(1, timeout=SAVE_S)
    if left := [path.name for path in old if path.exists()]:
        lane.result.blame(f"chunks that nothing names are left: {', '.join(left)}")


async def _start(lane: Lane) -> None:
    lane.f.kill(COORDINATOR)
    lane.f.arm(COORDINATOR, lane.case.specification)
    lane.f.start(COORDINATOR)
    await lane.fault_in(None)


async def _shim_start(lane: Lane) -> None:
    server = lane.case.owner if lane.case.owner != COORDINATOR else lane.case.detail
    lane.f.arm(lane.case.owner, lane.case.specification)
    lane.f.signal(f"{server}/shim", signal.SIGKILL)
    await lane.fault_in(None)


async def _traffic(lane: Lane) -> None:
    lane.f.arm(lane.case.owner, lane.case.specification)
    await lane.fault_in(None)


async def _restore(lane: Lane) -> None:
    left = await _fresh(lane)
    lane.f.arm(lane.case.owner, lane.case.specification)
    restoring = asyncio.create_task(lane.call("restore", lane.client.restore(lane.last, timeout=SAVE_S)))
    await lane.fault_in(restoring, restoring=True)
    # Whatever became of it: abort, start anew, restore again. The snapshot has to be as good as before.
    await lane.client.abort("the restore met a fault", timeout=10)
    lane.result.thaw_s = 0.0
    lane.t0 = time.monotonic()
    lane.blame_closed(await lane.watch.open(LEASE_S + SLACK_S, lane.f.runs), "after the abort")
    lane.result.thaw_s = round(lane.watch.thaw_s(lane.t0), 2)
    await _anew(lane)
    await _restored(lane, left)
    _again(lane, left)


async def _restored(lane: Lane, left: list[Live]) -> None:
    await lane.client.restore(lane.last, timeout=SAVE_S)
    await compare_sessions(lane, left)
    await lane.client.resume(timeout=10)


async def _resume(lane: Lane) -> None:
    left = await _fresh(lane)
    await _restored(lane, left)
    lane.f.arm(lane.case.owner, lane.case.specification)
    _again(lane, left)
    await lane.fault_in(None)


async def _fresh(lane: Lane) -> list[Live]:
    """Save while rollouts run, kill every server, and start fresh ones: as after a crash of everything."""
    lane.last = (await lane.client.save(lane.name("to-restore"), timeout=SAVE_S)).snapshot_id
    left = await lane.trainer.stop()
    lane.before = left
    lane.recorded = await recorded_of(lane, lane.last)
    lane.finished = {turn: lane.engine.generated[turn] for turn in generated(lane.recorded)}
    await _anew(lane)
    return left


async def _anew(lane: Lane) -> None:
    lane.f.disarm()
    lane.f.kill(*SERVERS)
    await lane.healthy()


def _again(lane: Lane, left: list[Live]) -> None:
    for each in left:
        lane.trainer.dispatch(each)
    lane.trainer.go()


STORY: dict[Trigger, Callable[[Lane], Awaitable[None]]] = {
    Trigger.SAVE: _save,
    Trigger.SLOW_SAVE: _slow_save,
    Trigger.FAILED_SAVE: _failed_save,
    Trigger.LAPSE: _lapse,
    Trigger.RECOVERY: _recovery,
    Trigger.START: _start,
    Trigger.SHIM_START: _shim_start,
    Trigger.TRAFFIC: _traffic,
    Trigger.PRUNE: _prune,
    Trigger.RESTORE: _restore,
    Trigger.RESUME: _resume,
}
