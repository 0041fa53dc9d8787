"""How fast state is saved and restored, beside the disk that takes the same bytes and the digest that is made of them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path
from typing import Final

from benchmarks import live
from benchmarks.measure import ratio, spread
from benchmarks.results import Curves, Results, Table
from benchmarks.scale import Scale
from coordinator.wire.terms import Phase
from tests.gym.endpoint import ScriptedEndpoint

SESSION_KB: Final = 100
BLOCK: Final = 1 << 20


def run(scale: Scale, results: Results) -> None:
    """Fills `throughput_vs_disk`."""
    rows: list[tuple[str, ...]] = []
    lines: dict[str, list[tuple[float, float, float, float]]] = {"save": [], "restore": []}
    for megabytes in scale.state_mb:
        found = asyncio.run(_measure(megabytes, scale.state_runs))
        slower = [min(disk, digest) for disk, digest in zip(found["disk"], found["digest"], strict=True)]
        both = [min(save, restore) for save, restore in zip(found["save"], found["restore"], strict=True)]
        results.ratios["throughput_vs_disk"] = ratio(both, slower)  # of the largest state: the last one
        for name, values in found.items():
            against = str(ratio(values, slower)) if name in ("save", "restore") else ""
            rows.append((f"{megabytes} MB", name, str(spread(values)), against))
        for name, points in lines.items():
            took = spread(megabytes / value for value in found[name])
            points.append((megabytes, took.median, took.low, took.high))
        results.figures[f"throughput_mb_s_{megabytes}"] = found
        print(f"  {megabytes} MB: " + ", ".join(f"{name} {spread(v)} MB/s" for name, v in found.items()), flush=True)
    note = (
        f"Sessions of {SESSION_KB} kB of text in a real Gym server, all of them new in each save. MB are those of the state. "
        "Time is that of the phases that move it: of a save what is written ahead, while the server works, and the commit; of "
        "a restore the load. `disk`: write and fsync of the same bytes; `digest`: SHA-256 of them in memory."
    )
    results.tables.append(
        Table("Save and restore throughput", ("state", "what", "MB/s", "of the slower one"), rows, note)
    )
    results.curves.append(Curves("state", "Time by size of the state", "state, MB", "phase, s", lines))


async def _measure(megabytes: int, runs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("save", "disk", "digest", "restore")}
    with live.on_disk() as directory, ScriptedEndpoint() as endpoint:
        servers = live.config(endpoint.url)
        async with live.deployment(directory, servers) as job:
            sessions = live.Sessions(job)
            which = range(megabytes * 1000 // SESSION_KB)
            for turn in range(runs + 1):
                await sessions.fill(which, SESSION_KB, turn + 1)
                taken = await live.save(job, f"s-{turn}")
                if turn:  # the first one is for warming up
                    found["save"].append(megabytes / (taken.phases[Phase.DISCOVER] + taken.phases[Phase.COMMIT]))
                    found["disk"].append(megabytes / await asyncio.to_thread(_write, directory / "plain", megabytes))
                    found["digest"].append(megabytes / await asyncio.to_thread(_digest, megabytes))
        for turn in range(runs):
            async with live.deployment(directory, servers, life=f"b{turn}") as job:
                found["restore"].append(megabytes / await live.restore(job, f"s-{runs}"))
    return found


def _write(path: Path, megabytes: int) -> float:
    block = os.urandom(BLOCK)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


def _digest(megabytes: int) -> float:
    block = os.urandom(BLOCK)
    began = time.perf_counter()
    digest = hashlib.sha256()
    for _ in range(megabytes):
        digest.update(block)
    return time.perf_counter() - began
