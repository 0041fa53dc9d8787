"""The coordinator's end of the Relay service: calls that begin together go out in one request to each relay.

The rule: a call through a relay ends exactly as it would have ended without: the same answers, the same refusal, and
when nothing came back, the status of the transport. Whoever calls cannot tell the two apart.

`calls_through` makes what stands in for a participant's stub. A call waits until the loop turns once without another one
beginning, so that a wave is one request, however it is begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
from grpc import aio
from safepoint.v1 import relay_service_pb2 as pb
from safepoint.v1 import relay_service_pb2_grpc

from coordinator.registry import Relay
from coordinator.stubs import Stubs
from coordinator.wire.auth import Metadata
from coordinator.wire.record import NONCE_METADATA_KEY
from coordinator.wire.rpc import ERROR_TRAILER
from coordinator.wire.trace import HEADERS

log = logging.getLogger(__name__)

MAX_TARGETS: Final = 512
MAX_WAVE_BYTES: Final = 256 << 10  # of targets; half of what a relay takes
URGENT: Final = frozenset({"resume", "abort", "renew_lease", "get_status"})
# By method of the Participant service: the name of its request and answer in FanRequest and FanReply.
CALLS: Final = {
    "GetCapabilities": "get_capabilities",
    "Precopy": "precopy",
    "Prepare": "prepare",
    "Commit": "commit",
    "Confirm": "confirm",
    "Restore": "restore",
    "RetireAttempts": "retire_attempts",
    "Resume": "resume",
    "Abort": "abort",
    "RenewLease": "renew_lease",
    "GetStatus": "get_status",
}
METHOD_OF: Final = {kind: method for method, kind in CALLS.items()}
# Of requests that differ from one participant to the next: the fields that do not.
_SHARED: Final = {"confirm": ("context",), "restore": ("context", "snapshot_id", "lease_ttl", "placements")}
_UNANSWERED: Final = "unanswered"
_REFUSED: Final = "refused"


class RelayedCall:
    """One call at one participant, as grpc.aio has them: awaitable, iterable, and can be left."""

    def __init__(self) -> None:
        self.when_left: Callable[[], None] = lambda: None
        self._answers: deque[Any] = deque()
        self._news: asyncio.Future[None] | None = None
        self._error: aio.AioRpcError | None = None
        self.over = False

    def answer(self, message: Any, *, last: bool) -> None:
        """Something has come."""
        if message is not None:
            self._answers.append(message)
        self.over = self.over or last
        self._wake()

    def fail(self, error: aio.AioRpcError) -> None:
        """It ends so."""
        if not self.over:
            self._error, self.over = error, True
            self._wake()

    def cancel(self) -> bool:
        """Wait no longer; what was called goes on."""
        if self.over:
            return False
        self.over = True
        self.when_left()
        self._wake()
        return True

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _next(self) -> Any:
        """The next answer, or None after the last one."""
        while not self._answers:
            if self.over:
                if self._error is not None:
                    raise self._error
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._answers.popleft()

    def __aiter__(self) -> RelayedCall:
        return self

    async def __anext__(self) -> Any:
        found = await self._next()
        if found is None:
            raise StopAsyncIteration
        return found

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            found = yield from self._next().__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if found is None:
            raise _failure(grpc.StatusCode.INTERNAL, "The relay gave no answer.")
        return found


@dataclass(slots=True)
class _Wave:
    """Calls of one method with the same request and the same time, to one relay."""

    relay: Relay
    method: str
    shared: Any
    timeout_s: float
    metadata: Metadata
    size: int = 0  # bytes of all targets
    calls: list[tuple[pb.FanTarget, RelayedCall]] = field(default_factory=list[tuple[pb.FanTarget, RelayedCall]])


class Fanout:
    """All calls of a coordinator through relays."""

    def __init__(self, stubs: Stubs[relay_service_pb2_grpc.RelayAsyncStub]) -> None:
        self._stubs = stubs
        self._begun: dict[tuple[Any, ...], _Wave] = {}
        self._count = self._counted = 0
        self._written: tuple[Any, bytes] = (None, b"")  # the newest request, and how it is told from others
        self._tasks: set[asyncio.Task[None]] = set()

    def calls_through(self, relay: Relay, participant_id: str, incarnation_id: str) -> Any:
        """What stands in for the stub of a participant behind that relay."""
        return _Through(self, relay, participant_id, incarnation_id)

    async def keep_only(self, addresses: Collection[str]) -> None:
        """As of Stubs."""
        await self._stubs.keep_only(addresses)

    async def close(self) -> None:
        """End all calls without answer."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stubs.close()

    def begin(
        self, relay: Relay, target: pb.FanTarget, method: str, request: Any, timeout: float, metadata: Metadata
    ) -> RelayedCall:
        """A call begins; it goes out with those that begin in the same turns of the loop."""
        shared = _without_own(target, CALLS[method], request)
        trace, others = _apart(metadata)
        if trace:
            target.trace.update(trace)
        if shared is not self._written[0]:
            self._written = shared, shared.SerializeToString(deterministic=True)
        key = (relay.incarnation_id, method, self._written[1], timeout, others)
        wave = self._begun.get(key)
        if wave is None:
            wave = self._begun[key] = _Wave(relay, method, shared, timeout, others)
            if len(self._begun) == 1:
                self._counted = self._count
                asyncio.get_running_loop().call_soon(self._look)
        call = RelayedCall()
        wave.calls.append((target, call))
        wave.size += target.ByteSize()
        self._count += 1
        if len(wave.calls) == MAX_TARGETS or wave.size > MAX_WAVE_BYTES:
            del self._begun[key]
            self._send(wave)
        return call

    def _look(self) -> None:
        if self._count != self._counted:
            self._counted = self._count
            asyncio.get_running_loop().call_soon(self._look)
            return
        begun, self._begun = self._begun, {}
        for wave in begun.values():
            self._send(wave)

    def _send(self, wave: _Wave) -> None:
        task = asyncio.create_task(self._make(wave), name=f"{wave.method} through {wave.relay.relay_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make(self, wave: _Wave) -> None:
        relay = wave.relay
        waiting = [(target, call) for target, call in wave.calls if not call.over]  # who has left is not called at all
        if not waiting:
            return
        calls = [call for _, call in waiting]
        error = _failure(grpc.StatusCode.UNKNOWN, f"{relay} ended its answer without this one's.")
        try:
            await self._fan(wave, [target for target, _ in waiting], calls)
        except aio.AioRpcError as failed:
            # Whatever a relay says for itself: whether it has called anybody is not known. So its own reason is text.
            error = _failure(failed.code(), f"through {relay}: {failed.details() or ''}")
        except asyncio.CancelledError:
            error = _failure(grpc.StatusCode.CANCELLED, f"The call through {relay} was left.")
        except Exception as failed:  # it cannot be dialled, or a bug: nobody may wait for ever
            log.warning("the call through %s failed: %r", relay, failed)
            error = _failure(grpc.StatusCode.UNAVAILABLE, f"through {relay}: {failed}")
        for call in calls:
            call.fail(error)

    async def _fan(self, wave: _Wave, targets: list[pb.FanTarget], calls: list[RelayedCall]) -> None:
        """Make one request of a wave, and hand out what comes. Raises as gRPC does."""
        relay, kind = wave.relay, CALLS[wave.method]
        request = pb.FanRequest(targets=targets, **{kind: wave.shared})
        nonce = ((NONCE_METADATA_KEY, relay.nonce),) if relay.nonce else ()
        stub = self._stubs.to(relay.address)
        method = stub.FanUrgent if kind in URGENT else stub.Fan
        fan = method(request, timeout=wave.timeout_s, metadata=(*wave.metadata, *nonce))

        def left() -> None:
            if all(call.over for call in calls):
                fan.cancel()

        for call in calls:
            call.when_left = left
        try:
            async for event in fan:
                for reply in event.replies:
                    if reply.target < len(calls):
                        _deliver(relay, calls[reply.target], reply)
        finally:
            fan.cancel()


class _Through:
    """A stub of the Participant service for one participant behind a relay."""

    def __init__(self, fanout: Fanout, relay: Relay, participant_id: str, incarnation_id: str) -> None:
        self._fanout, self._relay = fanout, relay
        self._participant_id, self._incarnation_id = participant_id, incarnation_id

    def __getattr__(self, method: str) -> Callable[..., RelayedCall]:
        if method not in CALLS:
            raise AttributeError(method)
        return partial(self._begin, method)

    def _begin(self, method: str, request: Any, *, timeout: float, metadata: Metadata = ()) -> RelayedCall:
        target = pb.FanTarget(participant_id=self._participant_id, incarnation_id=self._incarnation_id)
        return self._fanout.begin(self._relay, target, method, request, timeout, metadata)


def _without_own(target: pb.FanTarget, kind: str, request: Any) -> Any:
    """What of a request is the same for everybody; all the rest goes into the target, what is added later too."""
    if kind not in _SHARED:
        return request
    shared, own = type(request)(), getattr(target, kind)
    own.CopyFrom(request)
    for name in _SHARED[kind]:
        own.ClearField(name)
    shared.CopyFrom(request)
    for said, _ in request.ListFields():
        if said.name not in _SHARED[kind]:
            shared.ClearField(said.name)
    return shared


def _apart(metadata: Metadata) -> tuple[dict[str, str], Metadata]:
    """The context of a trace, which is the target's own, and the rest."""
    trace = {key: value for key, value in metadata if key in HEADERS}
    return trace, tuple(pair for pair in metadata if pair[0] not in HEADERS)


def _deliver(relay: Relay, call: RelayedCall, reply: pb.FanReply) -> None:
    kind = reply.WhichOneof("reply")
    if kind == _REFUSED:
        trailers = aio.Metadata((ERROR_TRAILER, reply.refused.SerializeToString()))
        call.fail(_failure(grpc.StatusCode.UNKNOWN, reply.refused.message, trailers))
    elif kind == _UNANSWERED:
        code = getattr(grpc.StatusCode, reply.unanswered.code, grpc.StatusCode.UNKNOWN)
        call.fail(_failure(code, f"behind {relay}: {reply.unanswered.message}"))
    else:
        call.answer(getattr(reply, kind) if kind is not None else None, last=reply.last)


def _failure(code: grpc.StatusCode, text: str, trailers: aio.Metadata | None = None) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), trailers or aio.Metadata(), details=text)
