"""Starts a fleet, and takes one cut of it: from prepare to resume, with the seconds and the CPU of whoever controls it."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from benchmarks.fleets import work
from benchmarks.fleets.processes import Worker
from coordinator.wire.rpc import CHANNEL_OPTIONS

PROCESSES: Final = 2  # of participants, in every fleet: as many as the machine has processors
SHARE: Final = 1_000  # participants of one process at most: they share its connection, which carries 1,024 streams
SAVE_WITHIN_S: Final = 180.0
CALM_ABOVE: Final = 100
TMPFS: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Taken:
    """One cut. `overhead_s`: what it took beyond the longest drain; CPU of the coordinator, of all participants, of all
    relays."""

    elapsed_s: float
    overhead_s: float
    cpu_s: float
    participants_cpu_s: float
    relays_cpu_s: float = 0.0


class Fleet(Protocol):
    """Participants and whoever controls them, running."""

    def cut(self, drain_s: tuple[float, float] = (0.0, 0.0)) -> Taken: ...


@contextmanager
def scratch(prefix: str) -> Generator[Path]:
    """A folder in memory where there is one: what is compared here is control, not the disk."""
    where = TMPFS if TMPFS.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix=f"safepoint-bench-{prefix}-", dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def shares(fleet: list[work.Member]) -> list[list[tuple[str, str]]]:
    """Who lives in which process."""
    count = max(PROCESSES, -(-len(fleet) // SHARE))
    return [share for n in range(count) if (share := [(m.name, m.role) for m in fleet[n::count]])]


class _Cpu:
    """What the processes of a fleet have used since the last look."""

    def __init__(self, control: Worker, participants: list[Worker]) -> None:
        self._control, self._participants = control, participants

    def used(self) -> tuple[float, float]:
        return self._control.cpu_s(), sum(worker.cpu_s() for worker in self._participants)


class OurFleet:
    """Safepoint."""

    def __init__(
        self, members: list[work.Member], control: Worker, participants: list[Worker], address: str,
        relays: Sequence[Worker] = (),
    ) -> None:  # fmt: skip
        self.control, self._relays = control, relays
        self._cpu = _Cpu(control, participants)
        self._members = members
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = coordinator_service_pb2_grpc.CoordinatorStub(self._channel)
        self._numbers = itertools.count()
        seen = len(self.stub.GetTopology(pb.GetTopologyRequest(), timeout=SAVE_WITHIN_S).participants)
        if seen != len(members):
            raise RuntimeError(f"{seen} of {len(members)} participants are registered")

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def cut(self, drain_s: tuple[float, float] = (0.0, 0.0)) -> Taken:
        """A save, as its caller sees it. Raises RuntimeError when it fails."""
        operation = work.operation_name(f"save-{next(self._numbers)}", drain_s)
        request = pb.SaveRequest(operation_id=operation, snapshot_id=f"s-{operation}")
        request.options.straggler_grace.FromSeconds(60)
        before, began, theirs = self._cpu.used(), time.perf_counter(), self.relays_cpu_s()
        last = None
        for last in self.stub.Save(request, timeout=SAVE_WITHIN_S):
            if last.HasField("failed"):
                raise RuntimeError(f"the save failed: {last.failed.primary.message}")
        elapsed = time.perf_counter() - began
        if last is None or not last.HasField("saved"):
            raise RuntimeError("the save did not end")
        taken = _taken(operation, self._members, elapsed, before, self._cpu.used())
        return replace(taken, relays_cpu_s=self.relays_cpu_s() - theirs)

    def relays_cpu_s(self) -> float:
        """What all relays have used."""
        return sum(relay.cpu_s() for relay in self._relays)


@contextmanager
def ours(count: int, relays: int = 0) -> Generator[OurFleet]:
    """Shims and a coordinator, all registered, behind so many relays if any. Each relay is a process."""
    members = work.members(count)
    with scratch("ours") as root, ExitStack() as stack:
        # Hundreds of shims share one process and its loop, which may be busy for longer than three beats of one shim.
        calm = {"SAFEPOINT_COORDINATOR_HEARTBEAT_S": "5"} if count > CALM_ABOVE else {}
        coordinator = stack.enter_context(
            Worker(
                "coordinator.cli", "coordinator", "--root", str(root), log=root / "coordinator.log", environment=calm
            )
        )
        address = coordinator.ready()["address"]
        between = [_relay(stack, root, address, number) for number in range(relays)]
        for relay in between:
            relay.ready()
        plans = [
            json.dumps(
                {"root": str(root), "members": share, "coordinator": address,
                 "relays": [f"file:{root}/relay-{n}/address.json" for n in range(relays)]}
            )
            for share in shares(members)
        ]  # fmt: skip
        workers = [
            stack.enter_context(Worker("benchmarks.fleets.ours", plan, log=root / "participants.log")) for plan in plans
        ]
        for worker in workers:
            worker.ready()
        fleet = OurFleet(members, coordinator, workers, address, between)
        stack.callback(fleet.close)
        yield fleet


def _relay(stack: ExitStack, root: Path, coordinator: str, number: int) -> Worker:
    options = ("relay", "-c", coordinator, "--dir", str(root / f"relay-{number}"), "--name", f"n{number}")
    return stack.enter_context(Worker("coordinator.cli", *options, log=root / "relays.log"))


class AskedFleet:
    """A fleet whose control is a worker process that takes cuts by itself."""

    def __init__(
        self, members: list[work.Member], control: Worker, participants: list[Worker], directory: Path
    ) -> None:
        self.control = control
        self._cpu = _Cpu(control, participants)
        self._members = members
        self._directory = directory
        self._numbers = itertools.count()
        self.waits = ""

    def cut(self, drain_s: tuple[float, float] = (0.0, 0.0)) -> Taken:
        """One checkpoint, as the control itself measures it."""
        operation = work.operation_name(f"save-{next(self._numbers)}", drain_s)
        directory = self._directory / operation
        directory.mkdir()
        before = self._cpu.used()
        answer = self.control.ask(id=operation, directory=str(directory), waits=self.waits)
        return _taken(operation, self._members, answer["elapsed_s"], before, self._cpu.used())


@contextmanager
def peer(count: int) -> Generator[AskedFleet]:
    """Upstream's design. Set `waits` of what it yields (see `peer_control`); `longpoll` at first."""
    with _asked(count, ["benchmarks.fleets.peer_servers"], ["benchmarks.fleets.peer_control"]) as fleet:
        fleet.waits = "longpoll"
        yield fleet


@contextmanager
def bare(count: int) -> Generator[AskedFleet]:
    """The limit."""
    with _asked(count, ["benchmarks.fleets.bare", "serve"], ["benchmarks.fleets.bare", "control"]) as fleet:
        yield fleet


@contextmanager
def peer_servers(count: int) -> Generator[dict[str, int]]:
    """The peer's participants alone: name -> port."""
    with scratch("peer") as root, ExitStack() as stack:
        _, where = _serving(stack, ["benchmarks.fleets.peer_servers"], work.members(count), root)
        yield where


@contextmanager
def _asked(count: int, serve: list[str], control: list[str]) -> Generator[AskedFleet]:
    members = work.members(count)
    with scratch(serve[0].rpartition(".")[2]) as root, ExitStack() as stack:
        workers, where = _serving(stack, serve, members, root)
        plan = json.dumps([(member.name, member.role, where[member.name]) for member in members])
        controller = stack.enter_context(Worker(*control, plan, log=root / "control.log"))
        controller.ready()
        yield AskedFleet(members, controller, workers, root)


def _serving(
    stack: ExitStack, serve: list[str], members: list[work.Member], root: Path
) -> tuple[list[Worker], dict[str, Any]]:
    workers = [
        stack.enter_context(Worker(*serve, json.dumps(share), log=root / "servers.log")) for share in shares(members)
    ]
    return workers, {name: at for worker in workers for name, at in worker.ready().items()}


def _taken(
    operation: str, members: list[work.Member], elapsed: float, before: tuple[float, float], after: tuple[float, float]
) -> Taken:
    overhead = elapsed - work.last_drain_s(operation, members)
    return Taken(elapsed, overhead, after[0] - before[0], after[1] - before[1])
