"""What each participant and each coordinator must do with a call, whatever the others do.

The rule: nothing here asks the code under test what it believes. Leases are counted from what arrived and was answered,
owners from doors and answers, ends from what was said; what a fence remembers is looked at from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from safepoint.v1 import errors_pb2

from coordinator.relay_calls import METHOD_OF
from coordinator.wire.errors import Reason
from tests.simulation.faults import FINISHED_IDS, LEASE_S

if TYPE_CHECKING:
    from coordinator.server import Coordinator
    from participant_shims.shim import Shim
    from tests.simulation.loop import Process
    from tests.simulation.network import ClientCall, ServerCall
    from tests.simulation.world import World

GRANTING = ("Prepare", "Restore")
RENEWING = ("Commit", "Confirm", "RenewLease")
ENDING = ("Resume", "Abort")
CHANGING = (*GRANTING, *RENEWING, *ENDING)
AT_ONCE_S = 1.1  # within which an end must be answered, on a network without delay
LATE_S = 0.6
START_WITHIN_S = 3.0
# What an end may be refused with: it is not served, its owner is another, or the server behind the shim is silent.
MAY_REFUSE_ENDS = frozenset({Reason.STALE_EPOCH, Reason.FENCED, Reason.UNAVAILABLE, Reason.DEADLINE_TOO_SHORT})
KEPT_IN_MEMORY = 4  # for the simulation: larger in earnest, as all of these
KEPT_OUTCOMES = {True: 4, False: 12}  # with little memory, or not


class Behaviour:
    """See the module. Asked by `Checks`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shims: dict[str, tuple[str, Shim]] = {}
        self.lease_until: dict[tuple[str, str], float] = {}  # (incarnation, operation): at the latest
        self._ttl: dict[tuple[str, str], float] = {}
        self._first: dict[tuple[str, str], float] = {}  # when it was first asked for
        self._granted: set[tuple[str, str]] = set()
        self._arrived: dict[ServerCall, tuple[float, float, bool]] = {}  # call: when, how long away till then, lapsed
        self._epoch_of: dict[str, int] = {}
        self._over: set[tuple[str, str]] = set()  # (incarnation, operation) that has ended there in some way
        self._holder: dict[str, str] = {}  # incarnation -> the operation that it was prepared by last
        self._finished: dict[str, dict[str, int]] = {}  # incarnation -> what its fence remembered
        self._exports: set[tuple[str, str]] = set()
        self._closings: set[tuple[str, str]] = set()
        self._starting: dict[Process, float] = {}
        self.begun: set[str] = set()  # operations for which a participant was called
        self.by_a_replaced: set[str] = set()  # those that a coordinator has begun when a newer one served already

    # ---- who comes ----------------------------------------------------------------------------------------------------

    def shim_started(self, name: str, shim: Shim) -> None:
        self.shims[shim.incarnation_id] = (name, shim)
        if self.world.plan.little_memory:
            shim.service.operations.fence._max_finished = FINISHED_IDS
        adapter: Any = shim.service.operations.adapter
        close, export = adapter.close, adapter.export
        incarnation = shim.incarnation_id

        async def closing(operation: str, mode: Any, ttl_s: float) -> Any:
            key = (incarnation, operation)
            if key in self._closings and not operation.startswith("restore"):
                self.world.violation(f"I9: {name} closes for {operation} a second time")
            self._closings.add(key)
            return await close(operation, mode, ttl_s)

        async def exporting(directory: Any, *more: Any) -> Any:
            key = (incarnation, shim.service.operations.fence.operation_id)
            if key in self._exports:
                self.world.violation(f"I9: {name} exports for {key[1]} a second time")
            whole = False
            async for step in export(directory, *more):
                whole = whole or type(step).__name__ == "Exported"
                if whole:
                    self._exports.add(key)
                yield step

        adapter.close, adapter.export = closing, exporting

    def coordinator_starts(self, process: Process) -> None:
        self._starting[process] = self.world.loop.now

    def coordinator_started(self, process: Process, running: Coordinator) -> None:
        """L4: whoever hangs, a start is bounded."""
        took = self.world.loop.now - self._starting[process] - process.away_s
        if took > START_WITHIN_S and self.world.disk.was_slow_at < self._starting[process]:
            self.world.violation(f"L4: {process.name} took {took:.1f} s to start")

    # ---- calls --------------------------------------------------------------------------------------------------------

    def sent(self, process: Process, method: str, request: Any) -> None:
        """I14: a coordinator begins one operation at a time. What a relay passes on later is no call of its own."""
        if process.name.startswith("relay-"):
            return
        if method == "Fan":
            kind = request.WhichOneof("call")
            method, request = METHOD_OF[kind], getattr(request, kind)
        if method not in (*GRANTING, "Commit", "Confirm") or not hasattr(request, "context"):
            return
        running = self.world.checks.coordinators.get(request.context.coordinator_epoch)
        active = running.operations.active if running is not None else None
        operation = request.context.operation_id
        if operation not in self.begun and request.context.coordinator_epoch < max(
            self.world.checks.coordinators, default=0
        ):
            self.by_a_replaced.add(operation)
        self.begun.add(operation)
        if running is not None and (active is None or active.operation.operation_id != operation):
            self.world.violation(f"I14: {process.name} calls {method} of {operation}, and that is not what runs")

    def called(self, call: ServerCall, request: Any, incarnation: str) -> None:
        now, operation = self.world.loop.now, request.context.operation_id
        self._epoch_of.setdefault(operation, request.context.coordinator_epoch)
        key = (incarnation, operation)
        if call.name in GRANTING:
            self._first.setdefault(key, now)
        lapsed = key in self._granted and now > self.lease_until[key] + 0.001
        self._arrived[call] = (now, call.process.away_s, lapsed)
        if call.name in GRANTING or call.name == "RenewLease":
            self._ttl[key] = max(self._ttl.get(key, 0.0), request.lease_ttl.ToTimedelta().total_seconds())
        if not lapsed:
            self._extend(call, key)

    def replied(self, call: ServerCall, reply: Any, incarnation: str, name: str, final: bool) -> None:
        """A message of a participant: the call was served."""
        operation = call.request.context.operation_id
        key = (incarnation, operation)
        arrived, _, lapsed = self._arrived.get(call, (0.0, 0.0, False))
        if call.name in ENDING:
            self._over.add(key)
            return
        if lapsed and (final or call.name in RENEWING):
            self.world.violation(
                f"I3: {name} serves {call.name} of {operation} {arrived - self.lease_until[key]:.1f} s after its lease"
            )
        if not lapsed:
            self._extend(call, key)
        self._granted.add(key)
        holder = self._holder.get(incarnation, "")
        if holder and holder != operation and (incarnation, holder) not in self._over:
            same = self._epoch_of.get(holder) == self._epoch_of.get(operation)
            if same and call.name in GRANTING and self.lease_until.get((incarnation, holder), 0.0) > arrived + 0.001:
                self.world.violation(f"I14: {name} serves {operation} while {holder} of the same epoch owns it")
        if call.name in GRANTING:
            self._holder[incarnation] = operation

    def _extend(self, call: ServerCall, key: tuple[str, str]) -> None:
        # An upper bound: a call that is not served is counted as well, but for repeats of the one that granted.
        if call.name in RENEWING or call.name == "Restore" or (call.name == "Prepare" and key not in self._granted):
            until = self.world.loop.now + self._ttl.get(key, LEASE_S)
            self.lease_until[key] = max(self.lease_until.get(key, 0.0), until)

    def call_ended(self, call: ServerCall, code: Any, trailers: Any, incarnation: str) -> None:
        """I15: an end is served in every state, at once, without a disk."""
        arrived, away, _ = self._arrived.pop(call, (0.0, 0.0, False))
        name = self.shims[incarnation][0]
        if call.request is not None and reason_of(trailers) is Reason.LEASE_LAPSED:
            key = (incarnation, call.request.context.operation_id)
            if self.world.loop.now < self._first.get(key, 0.0) + self._ttl.get(key, 0.0) - 0.01:
                self.world.violation(f"I20: the lease of {key[1]} at {name} has lapsed before its time")
        if call.request is None or call.name not in ENDING or code is grpc.StatusCode.CANCELLED:
            if code is not grpc.StatusCode.OK and call.name == "Prepare" and call.request is not None:
                self._over.add((incarnation, call.request.context.operation_id))
            return
        operation = call.request.context.operation_id
        took = self.world.loop.now - arrived - (call.process.away_s - away)
        if took > AT_ONCE_S:
            self.world.violation(f"I15: {name} needs {took:.1f} s to answer {call.name} of {operation}")
        reason = reason_of(trailers)
        if code is not grpc.StatusCode.OK and reason not in MAY_REFUSE_ENDS:
            self.world.violation(f"I15: {name} refuses {call.name} of {operation} with {reason.name}")

    def refused(self, call: ServerCall, trailers: Any) -> None:
        """I9: whoever asks for the operation that runs follows it."""
        detail = detail_of(trailers)
        asked = getattr(call.request, "operation_id", "")
        if asked and detail.reason == Reason.FENCED and detail.operation_id == asked:
            self.world.violation(f"I9: {call.name} of {asked} is refused, since {asked} runs")

    def too_late(self, call: ClientCall, served: ServerCall) -> None:
        """L5: whoever waits for a participant is told who is waited for, before its own deadline."""
        process = served.process
        if call.name in CHANGING and process.alive and call.process.away_s == 0.0 and process.away_s == 0.0:
            self.world.violation(f"L5: {process.name} lets the deadline of {call.name} pass without a word")

    # ---- now and then ---------------------------------------------------------------------------------------------------

    def opened(self, incarnation: str, operation: str) -> None:
        """The doors of its server have opened: whatever owned them does not any more."""
        self._over.add((incarnation, operation))

    def watch(self) -> None:
        """Nobody stays closed beyond the lease that was granted, and memory stays bounded (I19)."""
        now = self.world.loop.now
        for incarnation, (name, shim) in self.shims.items():
            process = self.world.shim_processes.get(name)
            if self.world.shims.get(name) is not shim or process is None or not process.alive or process.paused:
                continue
            server = self.world.http.servers[name]
            doors, quiet = server.gate.doors, now - LATE_S
            until = self.lease_until.get((incarnation, doors.operation_id))
            awake = process.woke_at < quiet and server.process.woke_at < quiet and not server.process.paused
            if doors.closed and until is not None and awake and server.process.alive and until < quiet:
                self.world.violation(
                    f"L1: {name} is closed for {doors.operation_id} {now - until:.1f} s after its lease"
                )
            self._remembers(incarnation, name, shim)
        kept = KEPT_OUTCOMES[self.world.plan.little_memory]
        for running in self.world.checks.coordinators.values():
            operations = running.operations
            if len(operations.past) > KEPT_IN_MEMORY or len(operations.journal.contents.outcomes) > kept:
                self.world.violation(f"I19: the coordinator of epoch {running.epoch} remembers too much")

    def _remembers(self, incarnation: str, name: str, shim: Shim) -> None:
        fence = shim.service.operations.fence
        if fence.remembered > fence._max_finished:
            self.world.violation(f"I19: the fence of {name} remembers {fence.remembered} operations")
        now = {operation: past.epoch for operation, past in fence._finished.items()}
        for operation, epoch in self._finished.get(incarnation, {}).items():
            if operation not in now and epoch >= fence.highest_epoch:
                self.world.violation(f"I19: {name} has forgotten {operation} of epoch {epoch}, which could come again")
        self._finished[incarnation] = now


def reason_of(trailers: Any) -> Reason:
    """The reason that a failed call carries."""
    return Reason(detail_of(trailers).reason)


def detail_of(trailers: Any) -> errors_pb2.ErrorDetail:
    """What a failed call carries; empty when it is nothing."""
    found = next((value for key, value in trailers or () if key == "safepoint-error-bin"), b"")
    return errors_pb2.ErrorDetail.FromString(found)
