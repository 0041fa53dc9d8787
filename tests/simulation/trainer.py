"""The trainer of the simulated job: runs rollouts, saves now and then, and knows what every result must be.

The rule: it believes what it is told. An operation whose answer is lost is asked again with the same id; what it was told
once is compared with what the disk shows, for as long as the run lasts.
"""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.wire.errors import Reason, Refused, SafepointError
from coordinator.wire.rpc import error_from_rpc
from tests.simulation.loop import Process
from tests.simulation.servers import Work

if TYPE_CHECKING:
    from tests.simulation.world import World

ASK_AGAIN = frozenset({Reason.UNAVAILABLE})
TRIES = 8


class Trainer:
    """One life of the trainer. `rows` and `results` outlive it, as its own checkpoint would."""

    def __init__(self, world: World, process: Process, life: int) -> None:
        self.world, self.process, self.life = world, process, life
        self.random = Random(f"trainer {world.plan.seed} {life}")
        self.rows: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self.last_failure = Reason.UNSPECIFIED
        self.running: set[asyncio.Task[Any]] = set()

    def row(self, number: int) -> dict[str, Any]:
        random = Random(f"row {self.world.plan.seed} {number}")
        return {
            "_ng_rollout_id": f"r-{number}", "input": "x" * random.randint(1, 9), "start": random.randint(0, 50),
            "turns": random.randint(1, 5),
        }  # fmt: skip

    # ---- rollouts -----------------------------------------------------------------------------------------------------------

    async def roll(self, rows: list[dict[str, Any]], concurrency: int) -> None:
        """Run rows, so many at a time, until all have a result."""
        places = asyncio.Semaphore(concurrency)

        async def one(row: dict[str, Any]) -> None:
            async with places:
                await self._one(row)

        await asyncio.gather(*(one(row) for row in rows))

    async def _one(self, row: dict[str, Any]) -> None:
        name = row["_ng_rollout_id"]
        agents = [n for n in self.world.plan.servers if n.startswith("agent")]
        agent = agents[int(name[2:]) % len(agents)]
        body = json.dumps(row).encode()
        if row not in self.rows:
            self.rows.append(row)
        while True:
            answer = await self.world.http.again(self.process, agent, "POST", "/run", body, [])
            if answer["status"] == 200:
                break
            self.world.trace("trainer", f"{name} failed: {answer['status']} {answer['body'][:120]!r}")
            await asyncio.sleep(0.5)
        self.results[name] = found = json.loads(answer["body"])
        self.world.trace("trainer", f"{name} is done")
        if found != Work.expected(row):
            self.world.violation(f"{name} has the result {found} instead of {Work.expected(row)}")

    # ---- operations ---------------------------------------------------------------------------------------------------------

    async def ask(self, method: str, request: Any, timeout: float, tries: int = TRIES) -> list[Any]:
        """Make a call until it is answered; its messages. Raises SafepointError, the last Unanswered after all tries."""
        for attempt in range(tries):
            try:
                async with self.world.network.dial("coordinator") as channel:
                    stub = coordinator_service_pb2_grpc.CoordinatorStub(channel)
                    call: Any = getattr(stub, method)(request, timeout=timeout)
                    if method in ("Abort", "PruneSnapshots", "GetTopology", "GetStatus", "VerifySnapshot"):
                        return [await call]
                    return [event async for event in call]
            except aio.AioRpcError as error:
                failure = error_from_rpc(error)
                self.world.trace("trainer", f"{method}: {failure.reason.name} {failure.problem.message[:90]}")
                known = isinstance(failure, Refused) and failure.reason not in ASK_AGAIN
                if known or attempt == tries - 1:
                    raise failure from error
            await asyncio.sleep(self.random.uniform(0.2, 1.5))
        raise AssertionError("unreachable")

    async def save(self, operation: str, snapshot: str, tries: int = TRIES) -> bool:
        """One whole save; whether it was told published."""
        lease = self.random.choice([None, None, Duration(seconds=3)])
        options = pb.SaveOptions(lease_ttl=lease) if lease else pb.SaveOptions()
        request = pb.SaveRequest(operation_id=operation, snapshot_id=snapshot, options=options)
        self.world.trace("trainer", f"Save {operation}")
        try:
            events = await self.ask("Save", request, 25.0, tries)
        except SafepointError as error:
            self._failed(operation, snapshot, error)
            return False
        if any(event.WhichOneof("event") == "saved" for event in events):
            self.world.checks.told_published(snapshot, operation)
            return True
        self.world.violation(f"Save {operation} ended with OK and without a result")
        return False

    async def cut(self, operation: str, snapshot: str) -> None:
        """A save in phases, with the trainer's own state in between."""
        begin = pb.PrepareOperationRequest(operation_id=operation, snapshot_id=snapshot)
        calls = (
            ("Prepare", begin), ("Commit", pb.CommitOperationRequest(operation_id=operation)),
            ("Publish", pb.PublishRequest(operation_id=operation)),
            ("Resume", pb.ResumeOperationRequest(operation_id=operation)),
        )  # fmt: skip
        for method, request in calls:
            self.world.trace("trainer", f"{method} {operation}")
            try:
                events = await self.ask(method, request, 15.0)
            except SafepointError as error:
                if method != "Resume":
                    self._failed(operation, snapshot, error)
                await self.abort(operation)
                return
            if method == "Publish" and any(event.WhichOneof("event") == "saved" for event in events):
                self.world.checks.told_published(snapshot, operation)
            await asyncio.sleep(self.random.uniform(0.0, 1.0))

    def _failed(self, operation: str, snapshot: str, error: SafepointError) -> None:
        self.last_failure = error.reason
        if isinstance(error, Refused) and error.reason not in ASK_AGAIN:
            self.world.checks.told_aborted(snapshot, operation, error.reason.name)
            self.blame(operation, error)
        else:
            self.world.checks.decisions.append(f"{operation} unknown")

    def blame(self, operation: str, error: SafepointError) -> None:
        """L5: a failure has one cause, whoever asks and however often, and it names reason, phase and what to do."""
        checks, problem = self.world.checks, error.problem
        if error.reason is Reason.INTERNAL or not problem.message or not problem.advice:
            self.world.violation(f"L5: a failure without a cause: {error}")
        # One that its coordinator began when it was replaced already is in no journal: it is refused like a new one.
        began = operation in checks.behaviour.begun and problem.operation_id in ("", operation)
        unheard_of = error.reason is Reason.UNKNOWN_OPERATION and operation in checks.behaviour.by_a_replaced
        if began and not problem.phase and not unheard_of:
            self.world.violation(f"L5: {operation} failed, and nobody says in which phase: {error}")
        before = [each for name, each in checks.failures if name == operation]
        if before and began and before[-1].reason is not problem.reason:
            self.world.violation(f"L5: {operation} failed for {before[-1].reason.name}, then for {problem.reason.name}")
        checks.failures.append((operation, problem))

    async def restore(self, operation: str, snapshot: str, *, resume: bool) -> SafepointError | None:
        """Restore; its failure, or None."""
        self.world.trace("trainer", f"Restore {operation} from {snapshot}")
        request = pb.RestoreSnapshotRequest(operation_id=operation, snapshot_id=snapshot, resume=resume)
        try:
            await self.ask("Restore", request, 30.0)
        except SafepointError as error:
            if isinstance(error, Refused) and error.reason not in ASK_AGAIN:
                self.blame(operation, error)
            return error
        return None

    async def abort(self, operation: str = "") -> None:
        """Abort what runs."""
        self.world.trace("trainer", f"Abort {operation}")
        try:
            await self.ask("Abort", pb.AbortOperationRequest(operation_id=operation), 5.0, 4)
        except SafepointError as error:
            self.world.trace("trainer", f"Abort: {error.reason.name}")

    async def prune(self, keep: int) -> None:
        """Delete old snapshots."""
        checks = self.world.checks
        checks.keeps = min(keep, checks.keeps or keep)
        try:
            await self.ask("PruneSnapshots", pb.PruneSnapshotsRequest(keep_last=keep), 10.0, 4)
        except SafepointError as error:
            self.world.trace("trainer", f"Prune: {error.reason.name}")

    async def everybody_is_here(self) -> bool:
        """Whether the coordinator knows all servers and has nothing against them."""
        try:
            (found,) = await self.ask("GetTopology", pb.GetTopologyRequest(refresh=True), 5.0, 1)
        except SafepointError:
            return False
        names = {p.capabilities.participant_id for p in found.participants}
        # A restore that has failed stays until it is aborted: that is said of nobody who is here.
        blocking = [each for each in found.findings if each.blocking and each.reason != Reason.FENCED]
        return names == set(self.world.plan.servers) and not blocking

    async def idle(self) -> bool:
        """Whether no operation runs."""
        try:
            (found,) = await self.ask("GetStatus", pb.GetCoordinatorStatusRequest(), 5.0, 1)
        except SafepointError:
            return False
        return not found.HasField("operation") or found.operation.outcome not in (1, 4, 5)
