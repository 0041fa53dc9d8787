"""Faults that no failpoint makes: signals out of nowhere, the disk below the fleet, a link between two of it.

The rule it keeps: what was done to the machine is undone whatever happens; what this user may not do is said, not passed
over.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from pathlib import Path

from tests.faults import cases as c
from tests.faults.cases import Case, Trigger
from tests.faults.fleet import COORDINATOR, LEASE_S
from tests.faults.lane import ROOT_MB, SAVE_S, SLACK_S, STOPPED_S, Lane
from tests.faults.one_way import OneWay


async def outside(lane: Lane, case: Case) -> None:
    """Do one of `cases.OUTSIDE`, and wait until it has come and gone."""
    match case.fault:
        case c.KILL_IDLE:
            pid = lane.f.pid(case.process)
            lane.f.signal(case.process, signal.SIGKILL)
            await lane.until_dead(pid)
            lane.f.start()
        case c.STOP_IDLE:
            lane.f.signal(case.process, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            lane.f.signal(case.process, signal.SIGCONT)
        case c.FULL_ROOT:
            await _with_full(lane, lane.f.root)
        case c.FULL_RUN_DIR:
            await _with_full(lane, lane.f.run_dir)
        case c.READ_ONLY_ROOT:
            await _on_read_only_root(lane)
        case _:
            await _one_way(lane, case.fault)
    lane.result.thaw_s = round(lane.watch.thaw_s(lane.t0), 2) if case.trigger is Trigger.SAVE else 0.0


def _cannot_mount(lane: Lane, folder: Path) -> bool:
    if folder in lane.mounts:
        return False
    lane.result.happened("not done: this user may not mount")
    return True


async def _on_read_only_root(lane: Lane) -> None:
    """No disk can be made read-only under a coordinator that writes: it finds it so when it starts."""
    if _cannot_mount(lane, lane.f.root):
        return
    lane.f.kill(COORDINATOR)
    _remount(lane, "ro")
    try:
        lane.f.start(COORDINATOR)
        await lane.until_ended(COORDINATOR, "on a read-only root")
    finally:
        _remount(lane, "rw")


def _remount(lane: Lane, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how},size={ROOT_MB}m", str(lane.f.root)], check=True)


async def _with_full(lane: Lane, folder: Path) -> None:
    if _cannot_mount(lane, folder):
        return
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"x" * (1 << 12))
    try:
        await asyncio.sleep(1.0)
        lane.t0 = time.monotonic()
        await lane.saving()
        lane.blame_closed(await lane.watch.open(LEASE_S + SLACK_S), "on a full disk")
    finally:
        filler.unlink()


async def _one_way(lane: Lane, fault: str) -> None:
    """The counter's shim is reached through a forwarder that stops one direction while a save runs."""
    lane.f.extra["counter"] = {"SAFEPOINT_ADVERTISE": "127.0.0.2"}
    lane.f.kill("counter")
    await lane.healthy()
    port = int(str(lane.f.shim("counter")["address"]).rpartition(":")[2])
    try:
        async with OneWay("127.0.0.2", port, "127.0.0.1") as link:
            await lane.healthy()
            await lane.call("save through the forwarder", lane.client.save(lane.name("through"), timeout=SAVE_S))
            link.drop_requests, link.drop_replies = fault == c.DROP_REQUESTS, fault == c.DROP_REPLIES
            lane.t0 = time.monotonic()
            await lane.saving(timeout=5)
            # The operation's own deadline ends it; until then its owner renews the leases of the others.
            lane.blame_closed(await lane.watch.open(5 + LEASE_S + SLACK_S), "behind the broken link")
            lane.result.thaw_s = round(lane.watch.thaw_s(lane.t0), 2)
    finally:
        del lane.f.extra["counter"]
        lane.f.kill("counter")
