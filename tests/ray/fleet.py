"""Three real shim processes and what a test asks of them; a trainer in a thread; a Ray cluster of small nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from safepoint.v1 import participant_service_pb2, participant_service_pb2_grpc

from coordinator.client import Client
from coordinator.snapshots import SnapshotStore
from coordinator.wire.terms import ParticipantState

REPOSITORY = Path(__file__).resolve().parents[2]
SHIMS = {"model-0": "policy", "agent-0": "agent", "resources-0": "resources"}
HOST = "safepoint_host"  # the custom resource of nodes that may host a coordinator
T = TypeVar("T")


def soon(look: Callable[[], T], within_s: float = 60.0, what: str = "it") -> T:
    """What `look` returns once that is true; exceptions count as not yet."""
    end = time.monotonic() + within_s
    last: object = None
    while True:
        try:
            if found := look():
                return found
            last = found
        except Exception as error:  # a coordinator that is being restarted fails in many ways
            last = error
        assert time.monotonic() < end, f"{what} did not happen in {within_s} s: {last!r}"
        time.sleep(0.05)


class Shims:
    """The participants of one job. Their processes outlive every coordinator."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> Shims:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SAFEPOINT_") or k == "SAFEPOINT_TEST_RUN"}
        environment = kept | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}"}
        for name, role in SHIMS.items():
            life = self.life(name)
            life.mkdir(mode=0o700)
            arguments = ["--life", str(life), "--name", name, "--role", role, "--root", str(self.root)]
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.ray.light_shim", *arguments],
                stdout=subprocess.DEVNULL, stderr=(life / "err.log").open("w"), text=True, env=environment,
            )  # fmt: skip
        for name, process in self.processes.items():
            while not (self.life(name) / "shim.json").exists():
                assert process.poll() is None, (self.life(name) / "err.log").read_text()
                time.sleep(0.05)
        return self

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def life(self, name: str) -> Path:
        return self.folder / name

    # ---- what they do -------------------------------------------------------------------------------------------------

    def hold(self, name: str, step: str, count: int | None = None) -> None:
        (self.life(name) / (f"hold.{step}" if count is None else f"hold.{step}.{count}")).touch()

    def release(self) -> None:
        for name in SHIMS:
            for hold in self.life(name).glob("hold.*"):
                hold.unlink()

    def steps(self, name: str, step: str) -> list[float]:
        """The monotonic times at which it was taken."""
        try:
            lines = (self.life(name) / "steps.log").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [entry["at"] for entry in map(json.loads, lines) if entry["step"] == step]

    def status(self, name: str) -> Any:
        with grpc.insecure_channel(f"unix:{self.life(name)}/shim.sock") as link:
            stub = participant_service_pb2_grpc.ParticipantStub(link)
            return stub.GetStatus(participant_service_pb2.GetStatusRequest(), timeout=5).status

    def states(self) -> dict[str, ParticipantState]:
        return {name: ParticipantState(self.status(name).state) for name in SHIMS}

    def all_open(self) -> bool:
        return set(self.states().values()) == {ParticipantState.OPEN}

    # ---- the disk -----------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """The address record."""
        return json.loads((self.root / "coordinator" / "address.json").read_text())  # type: ignore[no-any-return]

    def verify(self, snapshot_id: str) -> None:
        """Every byte of a published snapshot."""
        SnapshotStore(self.root, "default").verify(snapshot_id)

    def published(self) -> set[str]:
        return {m.snapshot_id for m in SnapshotStore(self.root, "default").list().snapshots}


class Trainer:
    """A client that finds its coordinator by the record, and calls from a thread."""

    def __init__(self, target: str) -> None:
        self.client = Client(target)
        self._pool = ThreadPoolExecutor(2)

    def begin(self, call: Callable[[Client], T]) -> Future[T]:
        return self._pool.submit(call, self.client)

    def all_here(self, epoch: int = 1) -> bool:
        """Whether everybody has registered with a coordinator of at least that epoch."""
        topology = self.client.topology(timeout=5)
        here = {p.capabilities.participant_id for p in topology.participants}
        return here == set(SHIMS) and self.client.status(timeout=5).coordinator_epoch >= epoch

    def close(self) -> None:
        self.client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def running_shims() -> Iterator[Shims]:
    """Shims in a folder of their own; its name is short, for their sockets."""
    with tempfile.TemporaryDirectory(prefix="sp-") as name:
        made = Shims(Path(name))
        made.root.mkdir()
        try:
            yield made.start()
        finally:
            made.stop()


@contextmanager
def trainer_of(shims: Shims, target: str = "") -> Iterator[Trainer]:
    made = Trainer(target or f"file:{shims.root}/coordinator/address.json")
    try:
        yield made
    finally:
        made.close()
