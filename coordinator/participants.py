"""The coordinator's end of the Participant service: one method per call, on a channel per participant or through its relay.

The rule: a call ends in exactly one of a proof, `Refused` (a reason came back), `Unanswered` (nothing did: its effect
is unknown) or `Misanswered` (the protocol was broken). Nothing is repeated here, the core decides that; a stream that
is left early is cancelled, else it would run until its channel closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from grpc import aio
from safepoint.v1 import (
    capabilities_pb2,
    manifest_pb2,
    participant_service_pb2,
    participant_service_pb2_grpc,
    relay_service_pb2_grpc,
)

from coordinator import convert
from coordinator.phase_requests import request_of
from coordinator.protocol import events as core
from coordinator.protocol.proofs import Progress, Proof
from coordinator.protocol.topology import Participant
from coordinator.registry import Relay
from coordinator.relay_calls import Fanout
from coordinator.stubs import Stubs
from coordinator.wire.access import Access
from coordinator.wire.auth import Metadata
from coordinator.wire.errors import Misanswered, Problem, Reason
from coordinator.wire.ids import OperationId
from coordinator.wire.links import Security
from coordinator.wire.rpc import error_from_rpc
from coordinator.wire.terms import Phase, counted

OnProgress = Callable[[Progress], None]
OnClosed = Callable[[], None]
ReplyT = TypeVar("ReplyT")

if TYPE_CHECKING:  # these classes are generic, and the stub's is there, for checkers alone
    StreamT = TypeVar("StreamT", bound=aio.UnaryStreamCall[Any, Any])
    PrepareCall = aio.UnaryStreamCall[participant_service_pb2.PrepareRequest, participant_service_pb2.PrepareEvent]
    CommitCall = aio.UnaryStreamCall[participant_service_pb2.CommitRequest, participant_service_pb2.CommitEvent]
    RestoreCall = aio.UnaryStreamCall[participant_service_pb2.RestoreRequest, participant_service_pb2.RestoreEvent]


_ONE_TOKEN = (
    "Give the coordinator and this participant one token: compare the files that SAFEPOINT_TOKEN_FILE names for each. Both read "
    "theirs again within a second, without a restart."
)


class Participants:
    """Calls to participants, under the epoch of this coordinator. Belongs to the event loop it is used on.

    `dial` makes the channel to an address; a simulated network has its own. `relay_of` says through which relay a
    participant, by name and incarnation, is called.
    """

    def __init__(
        self,
        epoch: int,
        security: Security | None = None,
        dial: Callable[[str], aio.Channel] | None = None,
        relay_of: Callable[[str, str], Relay | None] = lambda name, incarnation_id: None,
    ) -> None:
        self._epoch = epoch
        self._security = security or Security()
        self._relay_of = relay_of
        self._stubs = Stubs(
            dial or self._security.dial(Access.SHIM),
            participant_service_pb2_grpc.ParticipantStub,
            lambda: self._security.version,
        )
        self._fanout = Fanout(
            Stubs(
                dial or self._security.dial(Access.RELAY),
                relay_service_pb2_grpc.RelayStub,
                lambda: self._security.version,
            )
        )
        # What goes along with a call, by operation and participant: the context of its span, where traces are on.
        self.carried: Callable[[str, str], Metadata] = lambda operation_id, participant_id: ()

    async def close(self) -> None:
        """Close all channels. Calls that run end without answer."""
        await asyncio.gather(self._stubs.close(), self._fanout.close())

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Close the channels to everybody else. Only while no operation runs: calls on them end without answer."""
        await asyncio.gather(self._stubs.keep_only(addresses), self._fanout.keep_only(addresses))

    async def perform(
        self, whom: Participant, call: core.Call, on_progress: OnProgress, on_closed: OnClosed
    ) -> tuple[Proof, Any]:
        """Make a call of the core: the proof, and the message it was read from.

        `on_closed` is called when the participant says that admission is closed, `on_progress` at each later step.
        Raises Refused, Unanswered, Misanswered, each with phase and participant filled in.
        """
        stub = self._reach(whom)
        metadata = (*self._metadata, *self.carried(call.operation_id, whom.participant_id))
        request = request_of(call, self._epoch)
        proof: tuple[Proof, Any] | None = None
        with _errors(whom.participant_id, call.phase, call.operation_id):
            match call.arguments:
                case core.PrepareArguments():
                    with _left(stub.Prepare(request, timeout=call.timeout_s, metadata=metadata)) as prepare:
                        proof = await _until_prepared(prepare, on_progress, on_closed)
                case core.CommitArguments():
                    with _left(stub.Commit(request, timeout=call.timeout_s, metadata=metadata)) as export:
                        proof = await _until_committed(export, on_progress)
                case core.ConfirmArguments():
                    confirmed = await stub.Confirm(request, timeout=call.timeout_s, metadata=metadata)
                    proof = convert.confirmed(confirmed), confirmed
                case core.RestoreArguments():
                    with _left(stub.Restore(request, timeout=call.timeout_s, metadata=metadata)) as load:
                        proof = await _until_restored(load, on_progress, on_closed)
                case core.ResumeArguments():
                    resumed = await stub.Resume(request, timeout=call.timeout_s, metadata=metadata)
                    proof = convert.opened(resumed), resumed
                case core.AbortArguments():
                    aborted = await stub.Abort(request, timeout=call.timeout_s, metadata=metadata)
                    proof = convert.opened(aborted), aborted
        if proof is None:
            raise Misanswered(
                Problem(
                    Reason.PROTOCOL_VIOLATION,
                    f"{whom.participant_id} ended its answer without the proof of {call.phase.name.lower()}.",
                    phase=call.phase, participant_id=whom.participant_id, operation_id=call.operation_id,
                )
            )  # fmt: skip
        return proof

    async def renew(self, whom: Participant, operation_id: OperationId, ttl_s: float, timeout_s: float) -> float:
        """Renew a lease: the seconds that are left of it. Raises as `perform`."""
        request = participant_service_pb2.RenewLeaseRequest(
            context=participant_service_pb2.OperationContext(operation_id=operation_id, coordinator_epoch=self._epoch),
            lease_ttl=convert.duration(ttl_s),
        )
        stub = self._reach(whom)
        with _errors(whom.participant_id, Phase.UNSPECIFIED, operation_id):
            reply = await stub.RenewLease(request, timeout=timeout_s, metadata=self._metadata)
        return convert.seconds(reply.lease_remaining)

    async def precopy(self, whom: Participant, within_s: float) -> None:
        """Have a participant write ahead of a save, for so long. Raises as `perform`."""
        request = participant_service_pb2.PrecopyRequest(coordinator_epoch=self._epoch)
        with _errors(whom.participant_id, Phase.DISCOVER, ""):
            await self._reach(whom).Precopy(request, timeout=within_s, metadata=self._metadata)

    async def describe(
        self, whom: Participant | str, timeout_s: float
    ) -> participant_service_pb2.GetCapabilitiesResponse:
        """Ask what a participant is, or who listens at an address. Raises as `perform`."""
        stub = self._stubs.to(whom) if isinstance(whom, str) else self._reach(whom)
        with _errors("", Phase.DISCOVER, ""):
            return await _reply(
                stub.GetCapabilities(
                    participant_service_pb2.GetCapabilitiesRequest(), timeout=timeout_s, metadata=self._metadata
                )
            )

    async def status(
        self, whom: Participant, max_rollouts: int, timeout_s: float, max_stacks: int = 0
    ) -> tuple[capabilities_pb2.ParticipantStatus, Sequence[capabilities_pb2.TaskStack]]:
        """The participant's own status, and so many stacks of its tasks. Raises as `perform`."""
        with _errors(whom.participant_id, Phase.UNSPECIFIED, ""):
            reply = await self._reach(whom).GetStatus(
                participant_service_pb2.GetStatusRequest(max_rollouts=max_rollouts, max_stacks=max_stacks),
                timeout=timeout_s,
                metadata=self._metadata,
            )
        return reply.status, reply.stacks

    async def retire(self, whom: Participant, rollout_ids: Sequence[str], timeout_s: float) -> int:
        """Tell a participant to forget all attempts of rollouts; how many it knew. Raises as `perform`."""
        request = participant_service_pb2.RetireAttemptsRequest(
            coordinator_epoch=self._epoch,
            attempts=[participant_service_pb2.AttemptRef(rollout_id=r, attempt=2**32 - 1) for r in rollout_ids],
        )
        with _errors(whom.participant_id, Phase.UNSPECIFIED, ""):
            reply = await self._reach(whom).RetireAttempts(request, timeout=timeout_s, metadata=self._metadata)
        return reply.retired

    @property
    def _metadata(self) -> Metadata:
        return self._security.metadata(Access.COORDINATOR)

    def _reach(self, whom: Participant) -> participant_service_pb2_grpc.ParticipantAsyncStub:
        """How it is called now. Who was behind a relay that is gone is called at its own address."""
        relay = self._relay_of(whom.participant_id, whom.incarnation_id)
        if relay is None:
            return self._stubs.to(whom.address)
        through = self._fanout.calls_through(relay, whom.participant_id, whom.incarnation_id)
        return cast("participant_service_pb2_grpc.ParticipantAsyncStub", through)


async def _reply(call: Awaitable[ReplyT]) -> ReplyT:
    return await call


# A step of a stream that this version does not know is skipped: none of the branches below takes it.


async def _until_prepared(call: PrepareCall, on_progress: OnProgress, on_closed: OnClosed) -> tuple[Proof, Any] | None:
    async for event in call:
        match event.WhichOneof("event"):
            case "admission_closed":
                on_closed()
            case "drain_progress":
                on_progress(convert.drain_progress(event.drain_progress))
            case "prepared":
                return convert.prepared(event.prepared), event.prepared
            case _:
                pass
    return None


async def _until_committed(call: CommitCall, on_progress: OnProgress) -> tuple[Proof, Any] | None:
    async for event in call:
        match event.WhichOneof("event"):
            case "export_progress":
                on_progress(convert.export_progress(event.export_progress))
            case "committed":
                return convert.committed(event.committed), event.committed
            case _:
                pass
    return None


async def _until_restored(call: RestoreCall, on_progress: OnProgress, on_closed: OnClosed) -> tuple[Proof, Any] | None:
    """The message that is returned lists everything that diverged, however many there are."""
    diverged: dict[str, manifest_pb2.LedgerEntry] = {}
    async for event in call:
        match event.WhichOneof("event"):
            case "admission_closed":
                on_closed()
            case "load_progress":
                on_progress(convert.export_progress(event.load_progress))
            case "diverged":
                diverged |= {entry.rollout_id: entry for entry in event.diverged.entries}
            case "restored":
                restored = event.restored
                diverged |= {entry.rollout_id: entry for entry in restored.diverged}
                if len(diverged) < restored.diverged_count:
                    # Totals without their names would be a guess: which of them had finished, or were lost before?
                    text = f"It says that {counted(restored.diverged_count, 'rollout', 'restarts', 'restart')}, and names {len(diverged)}."
                    raise Misanswered(Problem(Reason.PROTOCOL_VIOLATION, text))
                del restored.diverged[:]
                restored.diverged.extend(diverged.values())
                return convert.restored(restored), restored
            case _:
                pass
    return None


@contextmanager
def _left(call: StreamT) -> Generator[StreamT]:
    try:
        yield call
    finally:
        call.cancel()  # harmless for one that has ended


@contextmanager
def _errors(participant_id: str, phase: Phase, operation_id: str) -> Generator[None]:
    try:
        yield
    except aio.AioRpcError as error:
        failure = error_from_rpc(cast("grpc.RpcError", error), participant_id)
        found = failure.problem
        message, next_step = found.message, found.next_step
        if found.reason is Reason.UNAUTHENTICATED:  # said to its caller, which is this process; nobody else can mend it
            message, next_step = f"It refuses the coordinator: {message}", _ONE_TOKEN
        filled = Problem(
            reason=found.reason, message=message, next_step=next_step,
            phase=found.phase or phase, participant_id=found.participant_id or participant_id,
            operation_id=found.operation_id or operation_id, rollouts=found.rollouts,
            rollout_count=found.rollout_count, waited_s=found.waited_s, metadata=found.metadata,
        )  # fmt: skip
        raise type(failure)(filled) from error
