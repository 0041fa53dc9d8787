"""A whole deployment of real Gym servers for the sections that need state: shims, coordinator, sessions of any size."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safepoint.v1 import coordinator_service_pb2 as pb

from benchmarks.gate.load import closed_loop, request
from coordinator.client_results import SaveResult
from coordinator.wire.terms import Phase
from participant_shims.identity import CallIdentity
from tests.gym.fleet import counter_config
from tests.gym.whole import Whole, whole

CONNECTIONS: Final = 16
FILL_WITHIN_S: Final = 300.0


@contextmanager
def on_disk() -> Generator[Path]:
    """A folder on the disk, with a path that is short enough for Unix sockets below it."""
    path = Path(tempfile.mkdtemp(prefix="spb-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def config(openai_url: str) -> dict[str, Any]:
    """Agent, policy model, and a counter whose sessions can be filled."""
    made = counter_config(openai_url)
    servers = made["counter"]["resources_servers"]
    servers["large_sessions"] = servers.pop("example_session_state_mgmt")
    return made


@asynccontextmanager
async def deployment(directory: Path, servers: dict[str, Any], life: str = "a") -> AsyncIterator[Whole]:
    """Everything started and registered. With another `life` and the same directory: new servers, the same snapshots."""
    async with whole(directory, servers, life=life) as job:
        yield job


@dataclass
class Sessions:
    """Sessions at the counter, each of a rollout of its own. A session keeps its cookie from when it was first filled."""

    job: Whole
    cookies: dict[int, str] = field(default_factory=dict[int, str])

    async def fill(self, which: range, kilobytes: int, seed: int) -> None:
        """Give these sessions new notes. Raises RuntimeError when the server does not answer 200."""
        port = int(self.job.fleet.url("counter").rpartition(":")[2])
        left = iter(which)
        numbers = {"sent": seed * 10_000_000}

        def next_request() -> tuple[bytes, Any] | None:
            number = next(left, None)
            if number is None:
                return None
            numbers["sent"] += 1
            headers = CallIdentity(f"s-{number}", 0, f"0.{numbers['sent']}").headers()
            if number in self.cookies:
                headers["cookie"] = self.cookies[number]
            body = f'{{"kilobytes": {kilobytes}, "seed": {seed * 1_000_000 + number}}}'.encode()
            return request(port, "/fill", body, headers), number

        def answered(number: Any, head: bytes) -> None:
            for line in head.split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name.lower() == b"set-cookie":
                    self.cookies[number] = value.partition(b";")[0].strip().decode()

        await closed_loop(port, next_request, CONNECTIONS, FILL_WITHIN_S, answered)


@dataclass(frozen=True, slots=True)
class Saved:
    """A save and how long its phases took (seconds)."""

    result: SaveResult
    phases: dict[Phase, float]


async def save(job: Whole, snapshot_id: str) -> Saved:
    """Take a snapshot."""
    phases: dict[Phase, float] = {}

    def note(event: pb.OperationEvent) -> None:
        if event.HasField("phase_finished"):
            phases[Phase(event.phase_finished.phase)] = event.phase_finished.duration.ToMicroseconds() / 1e6

    return Saved(await job.client.save(snapshot_id, on_progress=note), phases)


async def restore(job: Whole, snapshot_id: str) -> float:
    """Load a snapshot into fresh servers and resume; the seconds that loading took."""
    phases: dict[Phase, float] = {}

    def note(event: pb.OperationEvent) -> None:
        if event.HasField("phase_finished"):
            phases[Phase(event.phase_finished.phase)] = event.phase_finished.duration.ToMicroseconds() / 1e6

    await job.client.restore(snapshot_id, on_progress=note)
    await job.client.resume()
    return phases[Phase.RESTORE]
