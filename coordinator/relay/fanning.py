"""The Relay service: one call at many shims, and what they answer in batches.

The rule: requests and answers go through unread. A target that fails is one answer among others; nothing that one does
keeps another's answer for longer than a moment, and the last answer of all leaves at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from grpc import aio
from safepoint.v1 import participant_service_pb2_grpc, relay_service_pb2_grpc
from safepoint.v1 import relay_service_pb2 as pb

from coordinator.registry import Registry
from coordinator.relay_calls import MAX_TARGETS, METHOD_OF, URGENT
from coordinator.stubs import Stubs
from coordinator.wire.auth import Metadata
from coordinator.wire.clipping import clipped
from coordinator.wire.errors import Reason, Refused, refuse
from coordinator.wire.rpc import detail_from_problem, error_from_rpc, time_budget
from coordinator.wire.trace import incoming

GATHER_S: Final = 0.025  # an answer that is not the last of all waits so long for others
MAX_EVENT_BYTES: Final = 1 << 20
MAX_MESSAGE_BYTES: Final = 500
_STREAMS: Final = {"prepare": "prepared", "commit": "committed", "restore": "restored"}  # by call: its last step
# Steps that the next ones overtake.
_PROGRESS: Final = frozenset({"drain_progress", "export_progress", "load_progress"})

Context = aio.ServicerContext[Any, Any]


class Fanning(relay_service_pb2_grpc.RelayServicer):
    """`metadata`: what a call of this relay carries."""

    def __init__(
        self,
        registry: Registry,
        stubs: Stubs[participant_service_pb2_grpc.ParticipantAsyncStub],
        metadata: Callable[[], Metadata],
    ) -> None:
        self._registry, self._stubs, self._metadata = registry, stubs, metadata

    async def Fan(self, request: pb.FanRequest, context: Context) -> AsyncIterator[pb.FanEvent]:
        async for event in self._fan(request, context, urgent=False):
            yield event

    async def FanUrgent(self, request: pb.FanRequest, context: Context) -> AsyncIterator[pb.FanEvent]:
        async for event in self._fan(request, context, urgent=True):
            yield event

    async def _fan(self, request: pb.FanRequest, context: Context, *, urgent: bool) -> AsyncIterator[pb.FanEvent]:
        time_budget(context)
        kind = request.WhichOneof("call")
        if kind is None or (kind in URGENT) != urgent:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"{kind or 'Nothing'} is no call of {'FanUrgent' if urgent else 'Fan'}."
            )
        if not 1 <= len(request.targets) <= MAX_TARGETS:
            raise refuse(Reason.INVALID_ARGUMENT, f"{len(request.targets)} targets were given; 1 to {MAX_TARGETS}.")
        remaining = context.time_remaining()
        assert remaining is not None  # time_budget has refused it
        timeout_s = remaining - min(0.2, remaining / 50)
        answers = _Answers(len(request.targets))
        shared = getattr(request, kind)
        tasks = [
            asyncio.create_task(self._call(kind, shared, target, number, timeout_s, answers))
            for number, target in enumerate(request.targets)
        ]
        try:
            async for event in answers.batches():
                yield event
        finally:
            for task in tasks:
                task.cancel()

    async def _call(
        self, kind: str, shared: Any, target: pb.FanTarget, number: int, timeout_s: float, answers: _Answers
    ) -> None:
        reply = pb.FanReply(target=number, last=True)
        try:
            if await self._make(kind, shared, target, number, timeout_s, answers):
                return
        except aio.AioRpcError as error:
            found = error_from_rpc(error)
            if isinstance(found, Refused):
                reply.refused.CopyFrom(detail_from_problem(found.problem))
            else:
                _unanswered(reply, error.code(), error.details() or "")
        except Exception as error:  # an address that cannot be dialled, or a bug: that target's alone
            _unanswered(reply, grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__}: {error}")
        answers.add(reply)

    async def _make(
        self, kind: str, shared: Any, target: pb.FanTarget, number: int, timeout_s: float, answers: _Answers
    ) -> bool:
        """Make one call: whether its last answer has come. Raises as gRPC does."""
        who = self._registry.get(target.participant_id)
        if who is None or who.incarnation_id != target.incarnation_id:
            raise _not_here(target)
        request = for_target(shared, kind, target)
        metadata = (*self._metadata(), *incoming(target.trace.items()).items())
        call = getattr(self._stubs.to(who.address), METHOD_OF[kind])(request, timeout=timeout_s, metadata=metadata)
        try:
            if kind not in _STREAMS:
                answers.add(pb.FanReply(target=number, last=True, **{kind: await call}))
                return True
            async for step in call:
                last = step.WhichOneof("event") == _STREAMS[kind]
                answers.add(pb.FanReply(target=number, last=last, **{kind: step}))
                if last:
                    return True
            return False
        finally:
            call.cancel()


class _Answers:
    """What has come of the targets of one Fan and was not sent yet."""

    def __init__(self, targets: int) -> None:
        self._left = targets
        self._replies: list[pb.FanReply] = []
        self._progress: dict[int, int] = {}  # of a target: where its last step is that a later one overtakes
        self._some = asyncio.Event()
        self._all = asyncio.Event()

    def add(self, reply: pb.FanReply) -> None:
        """In the order of each target."""
        overtaken = self._progress.pop(reply.target, None)
        if overtaken is not None and reply.WhichOneof("reply") is not None:
            self._replies[overtaken] = pb.FanReply(target=reply.target)  # left out below
        kind = reply.WhichOneof("reply")
        if kind in _STREAMS and getattr(reply, kind).WhichOneof("event") in _PROGRESS:
            self._progress[reply.target] = len(self._replies)
        self._replies.append(reply)
        self._some.set()
        if reply.last:
            self._left -= 1
            if not self._left:
                self._all.set()

    async def batches(self) -> AsyncIterator[pb.FanEvent]:
        """Events until every target has had its last answer."""
        while self._left or self._replies:
            await self._some.wait()
            if self._left:
                await asyncio.wait([gather := asyncio.ensure_future(self._all.wait())], timeout=GATHER_S)
                gather.cancel()
            for event in self._taken():
                yield event

    def _taken(self) -> list[pb.FanEvent]:
        replies, self._replies, self._progress = self._replies, [], {}
        self._some.clear()
        events: list[pb.FanEvent] = [pb.FanEvent()]
        size = 0
        for reply in replies:
            if not reply.last and reply.WhichOneof("reply") is None:
                continue
            if size > MAX_EVENT_BYTES:
                events.append(pb.FanEvent())
                size = 0
            events[-1].replies.append(reply)
            size += reply.ByteSize()
        return events


def for_target(shared: Any, kind: str, target: pb.FanTarget) -> Any:
    """The request of one target: what all share, and its own."""
    if target.WhichOneof("own") != kind:
        return shared
    request = type(shared)()
    request.CopyFrom(shared)
    request.MergeFrom(getattr(target, kind))
    return request


def _not_here(target: pb.FanTarget) -> aio.AioRpcError:
    text = f"{target.participant_id} of incarnation {target.incarnation_id} is not registered here"
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), details=text)


def _unanswered(reply: pb.FanReply, code: grpc.StatusCode, text: str) -> None:
    reply.unanswered.code = code.name
    reply.unanswered.message = clipped(text, MAX_MESSAGE_BYTES)
