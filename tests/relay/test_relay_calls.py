"""The coordinator's end of a Fan, without a network: whatever happens to it, each call of it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio
from safepoint.v1 import errors_pb2, participant_service_pb2
from safepoint.v1 import participant_service_pb2 as participant_pb
from safepoint.v1 import relay_service_pb2 as pb

from coordinator.registry import Relay
from coordinator.relay.fanning import for_target
from coordinator.relay_calls import CALLS, MAX_TARGETS, Fanout
from coordinator.wire.errors import Reason, Refused, Unanswered, refuse
from coordinator.wire.rpc import error_from_rpc

RELAY = Relay("n1", "i-relay", "127.0.0.1:1", None, "", 0.0, 3.0)


class Stubs:
    """In place of channels: `answers` is what each Fan ends with, after its events."""

    def __init__(self, *events: pb.FanEvent, error: Exception | None = None) -> None:
        self.events, self.error = events, error
        self.asked: list[pb.FanRequest] = []

    def to(self, address: str) -> Any:
        if isinstance(self.error, Refused):
            raise self.error
        return self

    def Fan(self, request: pb.FanRequest, timeout: float, metadata: Any) -> Any:
        self.asked.append(request)
        return self._call()

    FanUrgent = Fan

    def _call(self) -> Any:
        stubs = self

        class Call:
            def cancel(self) -> None: ...

            async def __aiter__(self) -> AsyncIterator[pb.FanEvent]:
                for event in stubs.events:
                    yield event
                if stubs.error is not None:
                    raise stubs.error

        return Call()


def confirm(fanout: Fanout, name: str, generation: int = 1) -> Any:
    request = participant_pb.ConfirmRequest(incarnation_id=f"i-{name}", admission_generation=generation)
    request.context.operation_id, request.context.coordinator_epoch = "save-1", 7
    return fanout.calls_through(RELAY, name, f"i-{name}").Confirm(request, timeout=5.0, metadata=())


async def failure(call: Any) -> Any:
    with pytest.raises(aio.AioRpcError) as failed:
        async with asyncio.timeout(5):
            await call
    return error_from_rpc(failed.value)


async def test_what_is_each_ones_own_travels_beside_what_all_share() -> None:
    stubs = Stubs()
    fanout = Fanout(stubs)  # type: ignore[arg-type]
    calls = [confirm(fanout, f"p-{n}", n + 1) for n in range(3)]
    for call in calls:
        await failure(call)
    (request,) = stubs.asked
    assert request.confirm == participant_pb.ConfirmRequest(context=request.confirm.context)
    assert [(t.participant_id, t.confirm.admission_generation) for t in request.targets] == [
        ("p-0", 1), ("p-1", 2), ("p-2", 3),
    ]  # fmt: skip


async def test_one_refusal_and_one_silence_are_those_of_their_own_calls() -> None:
    event = pb.FanEvent()
    event.replies.add(target=0, last=True).confirm.admission_generation = 5
    event.replies.add(target=1, last=True).refused.reason = errors_pb2.REASON_LEASE_LAPSED
    silent = event.replies.add(target=2, last=True)
    silent.unanswered.code, silent.unanswered.message = "DEADLINE_EXCEEDED", "too late"
    event.replies.add(target=99, last=True)  # of nobody
    fanout = Fanout(Stubs(event))  # type: ignore[arg-type]
    good, refused, unheard = (confirm(fanout, f"p-{n}") for n in range(3))
    assert (await good).admission_generation == 5
    found = await failure(refused)
    assert isinstance(found, Refused)
    assert found.reason is Reason.LEASE_LAPSED
    found = await failure(unheard)
    assert isinstance(found, Unanswered)
    assert "DEADLINE_EXCEEDED" in found.problem.message
    assert "behind relay n1 (127.0.0.1:1): too late" in found.problem.message, "and the relay is named"


@pytest.mark.parametrize(
    "error",
    [
        aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details="Socket closed"),
        refuse(Reason.INVALID_ARGUMENT, "The token would travel in the clear."),
        aio.UsageError("Channel is closed."),
        None,
    ],
)
async def test_however_a_fan_ends_who_has_no_answer_is_unanswered_and_the_relay_named(error: Exception | None) -> None:
    """Also when the relay itself refuses: whether it has called anybody is not known."""
    fanout = Fanout(Stubs(error=error))  # type: ignore[arg-type]
    found = await failure(confirm(fanout, "p-0"))
    assert isinstance(found, Unanswered)
    assert "relay n1" in found.problem.message


async def test_who_has_left_before_it_goes_out_is_not_called() -> None:
    stubs = Stubs()
    fanout = Fanout(stubs)  # type: ignore[arg-type]
    left, stays = confirm(fanout, "p-0"), confirm(fanout, "p-1")
    left.cancel()
    await failure(stays)
    assert [[t.participant_id for t in request.targets] for request in stubs.asked] == [["p-1"]]


async def test_a_large_wave_goes_out_in_requests_of_bounded_size() -> None:
    stubs = Stubs()
    fanout = Fanout(stubs)  # type: ignore[arg-type]
    calls = [confirm(fanout, f"p-{n}") for n in range(MAX_TARGETS + 3)]
    await asyncio.gather(*(failure(call) for call in calls))
    assert [len(request.targets) for request in stubs.asked] == [MAX_TARGETS, 3]


def filled(message: Any) -> Any:
    """A message in which every field says something."""
    for field in message.DESCRIPTOR.fields:
        many = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if field.message_type is not None:
            filled(getattr(message, field.name).add() if many else getattr(message, field.name))
        elif many:
            getattr(message, field.name).append("x")
        else:
            setattr(message, field.name, "x" if field.cpp_type == field.CPPTYPE_STRING else 7)
    return message


@pytest.mark.parametrize("method", sorted(CALLS))
async def test_whatever_a_request_says_arrives_beside_that_of_another_participant(method: str) -> None:
    """Every field of every call, also those that are added to the contract later."""
    request_type = participant_service_pb2.DESCRIPTOR.services_by_name["Participant"].methods_by_name[method].input_type
    request = filled(getattr(participant_pb, request_type.name)())
    stubs = Stubs()
    fanout = Fanout(stubs)  # type: ignore[arg-type]
    for name in ("p-0", "p-1"):
        through = fanout.calls_through(RELAY, name, f"i-{name}")
        last = getattr(through, method)(request, timeout=5.0, metadata=())
    await failure(last)
    (asked,) = stubs.asked
    assert [arrives(asked, target) for target in asked.targets] == [request, request]


def arrives(asked: pb.FanRequest, target: pb.FanTarget) -> Any:
    """What a relay makes of it."""
    return for_target(getattr(asked, asked.WhichOneof("call")), asked.WhichOneof("call"), target)
