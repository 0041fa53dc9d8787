"""What an upload costs the saves beside it: `PYTHONPATH=.:gen python -m tests.coordinator.bench_uploads [MB]`.

Saves of a small fleet without an upload, then while a large snapshot goes to an S3 server process, in turns; and how fast it
goes. Pauses as the events say them. Fake shims: what is measured is the coordinator's own part of a pause, in the process that uploads.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from coordinator.snapshots import SnapshotStore
from coordinator.uploading import Uploader
from coordinator.wire.objects import objects_at
from tests.coordinator.conftest import Bench
from tests.coordinator.test_sweeping import save
from tests.object_store import S3Server, environment, prefix

CHUNK = 8 << 20
ROUNDS, SAVES = 5, 8


async def main(megabytes: int) -> None:
    server = S3Server()
    server.make_bucket()
    os.setpriority(os.PRIO_PROCESS, server.process.pid, 19)  # a real one is on another machine
    try:
        with environment(AWS_ENDPOINT_URL=server.address), tempfile.TemporaryDirectory() as folder:
            await _measure(Path(folder), megabytes)
    finally:
        server.close()


async def _measure(folder: Path, megabytes: int) -> None:
    large = SnapshotStore(folder / "large", "job-1")
    save(large, "large", [os.urandom(CHUNK) for _ in range(max(1, megabytes * 1_000_000 // CHUNK))])
    bench = Bench(folder / "root")
    await bench.start(agents=4, models=2, resources=4)
    pauses: dict[str, list[float]] = {"without": [], "beside an upload": []}
    rates: list[float] = []
    number = 0
    loop = asyncio.get_running_loop()
    for _ in range(ROUNDS):
        for how, found in pauses.items():
            uploader: Uploader | None = None
            if how != "without":
                objects = objects_at(f"s3://bucket/{prefix()}")
                uploader = Uploader(large, objects, 1, active=bench.running.operations.active_id)
                uploader.start()
                while not uploader.message("large").bytes_done:
                    await asyncio.sleep(0.01)
            for _ in range(SAVES):
                number += 1
                events = await bench.save(f"save-{number}", f"step-{number}", timeout=60)
                resumed = next(event.resumed for event in events if event.WhichOneof("event") == "resumed")
                found.append(resumed.pause.ToMicroseconds() / 1e6)
                await asyncio.sleep(0.1)
            if uploader is not None:
                assert uploader.status().waiting, "it was over before the saves were: give more MB"
                began, before = loop.time(), uploader.message("large").bytes_done
                while uploader.status().waiting:
                    await asyncio.sleep(0.01)
                rates.append((uploader.message("large").bytes_total - before) / (loop.time() - began) / 1e6)
                uploader.close()
    await bench.stop()
    for how, found in pauses.items():
        print(
            f"{how:17} median {statistics.median(found) * 1e3:6.1f} ms  p90 {sorted(found)[int(len(found) * 0.9)] * 1e3:6.1f} ms"
        )
    print(
        f"alone it goes at {statistics.median(rates):.0f} MB/s; most memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB"
    )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
