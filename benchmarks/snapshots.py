"""What a save costs when little has changed: python -m benchmarks.snapshots [--sessions 100 10000] [--kb 100] [--runs 5]

One deployment of real Gym servers with so many live sessions, of each a rollout; a first save, then saves after 1 % of the
sessions has changed. Prints and writes `build/bench-snapshots.json`: bytes that the first and the later saves write, pauses and
their ratio, what the state is written at beside disk and digest, and the most memory that the shim and the coordinator (which
here also makes the load) have had.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks import live
from benchmarks.live import Sessions
from benchmarks.measure import machine, ratio, spread
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.whole import announced

CHANGED: Final = 100  # one of so many
SETTLE_S: Final = 1.0


def on_disk(root: Path) -> int:
    """Bytes of everything that snapshots are made of."""
    found = 0
    for top in ("snapshots", "chunks"):
        for folder, _, names in os.walk(root / top):
            found += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
    return found


def peak_mb(pid: int) -> float:
    """The most memory that a process has had, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} does not tell its memory")


async def measure(sessions: int, kilobytes: int, runs: int, within_s: float) -> dict[str, Any]:
    """All figures of one number of sessions."""
    numbers = itertools.count(1)
    with live.on_disk() as directory, ScriptedEndpoint() as endpoint:
        async with live.deployment(directory, live.config(endpoint.url)) as job:
            held = Sessions(job)
            await held.fill(range(sessions), kilobytes, next(numbers))
            shim = int(announced(job.fleet, "counter")["pid"])

            async def save() -> tuple[float, float, int]:
                before, began = on_disk(job.root), time.monotonic()
                result = await job.client.save(f"s-{next(numbers)}", timeout=within_s)
                return result.pause_s, time.monotonic() - began, on_disk(job.root) - before

            first = await save()
            later: list[tuple[float, float, int]] = []
            for _ in range(runs):
                await held.fill(range(max(1, sessions // CHANGED)), kilobytes, next(numbers))
                await asyncio.sleep(SETTLE_S)
                later.append(await save())
            return {
                "sessions": sessions,
                "first_bytes": first[2],
                "first_s": first[1],
                "first_pause_s": first[0],
                "later_bytes": [each[2] for each in later],
                "later_s": [each[1] for each in later],
                "pause_s": [each[0] for each in later],
                "shim_peak_mb": peak_mb(shim),
                "coordinator_peak_mb": peak_mb(os.getpid()),
                "mb_s": first[2] / 1e6 / first[1],
                "alone_mb_s": min(_disk(directory, first[2]), _digest(first[2])),
            }


def _disk(directory: Path, size: int) -> float:
    block, began = os.urandom(1 << 20), time.monotonic()
    with open(directory / "bytes", "wb") as out:
        for _ in range(max(1, size >> 20)):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    return size / 1e6 / (time.monotonic() - began)


def _digest(size: int) -> float:
    block, began, digest = os.urandom(1 << 20), time.monotonic(), hashlib.sha256()
    for _ in range(max(1, size >> 20)):
        digest.update(block)
    return size / 1e6 / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a save costs when little has changed.")
    parser.add_argument("--sessions", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--kb", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--within", type=float, default=600.0, help="seconds for one save")
    parser.add_argument("--out", type=Path, default=Path("build/bench-snapshots.json"))
    given = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "kilobytes": given.kb, "runs": given.runs, "sizes": []}
    for sessions in given.sessions:
        found = asyncio.run(measure(sessions, given.kb, given.runs, given.within))
        report["sizes"].append(found)
        share = spread(value / found["first_bytes"] for value in found["later_bytes"])
        print(f"{sessions} sessions of {given.kb} kB")
        print(
            f"  first save      {found['first_bytes'] / 1e6:.1f} MB, {found['mb_s']:.0f} MB/s (alone {found['alone_mb_s']:.0f})"
        )
        print(f"  1 % changed     {share.scaled(100)} % of that")
        print(f"  pause, ms       {spread(found['pause_s']).scaled(1000)}; first {found['first_pause_s'] * 1000:.0f}")
        print(
            f"  peak memory, MB shim {found['shim_peak_mb']:.0f}, coordinator {found['coordinator_peak_mb']:.0f}",
            flush=True,
        )
    few, *_, many = report["sizes"] if len(report["sizes"]) > 1 else [report["sizes"][0]] * 2
    report["ratios"] = {
        "pause_by_sessions": asdict(ratio(many["pause_s"], few["pause_s"])),
        "second_save_bytes": asdict(spread(value / many["first_bytes"] for value in many["later_bytes"])),
    }
    print(f"pause at {many['sessions']} / at {few['sessions']}: {ratio(many['pause_s'], few['pause_s'])}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
