"""gRPC at both ends: errors <-> status, the server interceptor, and the options that the traps of grpc make necessary.

Servicers contain no `try`: they raise SafepointError (or anything), and `ErrorInterceptor` turns it into a status with
an ErrorDetail trailer. Callers call `error_from_rpc`. These two are the only translators.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from safepoint.v1 import errors_pb2

from coordinator.wire.access import MAX_REQUEST_BYTES, Caller
from coordinator.wire.auth import Tokens
from coordinator.wire.beneath import storage_error
from coordinator.wire.deadline import MIN_BUDGET_S, budget
from coordinator.wire.errors import (
    CATALOG,
    NOBODY_REACHED,
    SILENT,
    Blocked,
    Problem,
    Reason,
    Refused,
    SafepointError,
    Unanswered,
    refuse,
)
from coordinator.wire.guard import CALLER, Guard, method_of, parsed, short
from coordinator.wire.lanes import Lanes
from coordinator.wire.terms import Phase

log = logging.getLogger(__name__)

ERROR_TRAILER: Final = "safepoint-error-bin"
MAX_DETAIL_BYTES: Final = 4096  # trailers beyond 8 KiB can replace the status (grpc 37852)
MAX_DETAIL_ROLLOUTS: Final = 20
# One for each of the 10,000 participants that a coordinator takes, and their clients. gRPC ends what comes beyond it.
MAX_CONNECTIONS: Final = 12_000
MAX_CONNECTION_AGE_MS: Final = 3_600_000  # and up to a tenth more or less, at random

# What gRPC says when a peer ends the connection before the first call on it. A refused certificate is not said in words.
_BROKEN_HANDSHAKE: Final = ("Socket closed", "SSL", "Verification", "andshake")
_RAN_ALREADY: Final = "Stream removed"  # a peer that goes while a call runs: there was a handshake
# What it says of a call that was never sent.
_NEVER_LEFT: Final = ("failed to connect to all addresses", "DNS resolution failed")
# What it says where the system of the other end took the connection, and its process never said a word.
_NEVER_SPOKE: Final = "timed out before receiving SETTINGS frame"
_HANDSHAKE: Final = (
    "Both ends need certificates of one authority (SAFEPOINT_TLS_DIR), or neither; `safepoint certs ls` says until when "
    "they are valid, and the other end's log why it refused one."
)

# How often a channel asks whether its peer is there, with and without calls on it. A server has to allow that, and in an
# idle connection it allows one ping in two hours unless it is told otherwise: both ends read it here.
PING_EVERY_MS: Final = 10_000

# Each line answers a trap that was seen; the comment names it.
CHANNEL_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.enable_http_proxy", 0),  # http_proxy captures loopback otherwise
    ("grpc.keepalive_time_ms", PING_EVERY_MS),
    ("grpc.http2.ping_timeout_ms", 10_000),  # keepalive_timeout_ms has no effect; a stopped peer is else never noticed
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # An attempt to connect may last so long: thousands at once take their time, and one that fails is made again later.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # the default delays recovery by up to 20 s
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a few bytes can unpack to the limit of a message
]
SERVER_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.so_reuseport", 0),  # two servers on one port share its traffic silently otherwise
    (
        "grpc.http2.min_ping_interval_without_data_ms",
        PING_EVERY_MS // 2,
    ),  # else "too_many_pings" for the keepalive above
    ("grpc.keepalive_permit_without_calls", 1),  # and for that of a channel between two operations, after 100 s
    ("grpc.http2.max_ping_strikes", 8),  # one that was stopped sends what has piled up; a flood ends its connection
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES + 1024),  # the table of access.py refuses with a reason
    ("grpc.max_metadata_size", 8_192),
    ("grpc.absolute_max_metadata_size", 16_384),
    # Above what the lanes serve of one caller: an Abort must be refused there, if at all, and not wait for a stream.
    ("grpc.max_concurrent_streams", 1_024),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    # New calls then need a new handshake, so a withdrawn certificate makes none; what runs goes on, as long as it takes.
    ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
    ("grpc.compression_enabled_algorithms_bitset", 1),
]


def detail_from_problem(problem: Problem) -> errors_pb2.ErrorDetail:
    """The message that travels, cut to fit a trailer. The reason, the count and the next step always survive."""
    detail = errors_pb2.ErrorDetail(
        reason=cast("errors_pb2.Reason.ValueType", int(problem.reason)),
        message=_cut(problem.message, 1000),
        next_step=_cut(problem.advice, 500),
        phase=cast(Any, int(problem.phase)),
        participant_id=problem.participant_id,
        operation_id=problem.operation_id,
        rollout_count=max(problem.rollout_count, len(problem.rollouts)),
        metadata={_cut(k, 64): _cut(v, 256) for k, v in list(problem.metadata.items())[:16]},
    )
    if problem.waited_s is not None:
        detail.waited.FromMicroseconds(int(problem.waited_s * 1e6))
    if problem.retry_after_s is not None:
        detail.retry_after.FromMicroseconds(int(problem.retry_after_s * 1e6))
    for blocked in problem.rollouts[:MAX_DETAIL_ROLLOUTS]:
        row = detail.rollouts.add(
            rollout_id=blocked.rollout_id, attempt=blocked.attempt, turn=blocked.turn,
            waiting_on=_cut(blocked.waiting_on, 256),
        )  # fmt: skip
        row.age.FromMicroseconds(int(blocked.age_s * 1e6))
        if blocked.no_client_s is not None:
            row.no_client_for.FromMicroseconds(int(blocked.no_client_s * 1e6))
    while detail.ByteSize() > MAX_DETAIL_BYTES and detail.rollouts:
        del detail.rollouts[-1]
    if detail.ByteSize() > MAX_DETAIL_BYTES:
        detail.metadata.clear()
    return detail


def problem_from_detail(detail: errors_pb2.ErrorDetail) -> Problem:
    """The value of a detail. Reasons that this version does not know become INTERNAL, their number in the metadata."""
    try:
        reason, extra = Reason(detail.reason), {}
    except ValueError:
        reason, extra = Reason.INTERNAL, {"unknown_reason": str(detail.reason)}
    try:
        phase = Phase(detail.phase)
    except ValueError:
        phase = Phase.UNSPECIFIED
    return Problem(
        reason=reason,
        message=detail.message,
        next_step=detail.next_step,
        phase=phase,
        participant_id=detail.participant_id,
        operation_id=detail.operation_id,
        rollouts=tuple(
            Blocked(
                r.rollout_id,
                r.attempt,
                r.turn,
                r.age.ToMicroseconds() / 1e6,
                r.waiting_on,
                r.no_client_for.ToMicroseconds() / 1e6 if r.HasField("no_client_for") else None,
            )
            for r in detail.rollouts
        ),
        rollout_count=detail.rollout_count,
        waited_s=detail.waited.ToMicroseconds() / 1e6 if detail.HasField("waited") else None,
        retry_after_s=detail.retry_after.ToMicroseconds() / 1e6 if detail.HasField("retry_after") else None,
        metadata=dict(detail.metadata) | extra,
    )


def error_from_rpc(error: aio.AioRpcError | grpc.RpcError, participant_id: str = "") -> SafepointError:
    """What a failed call means: `Refused` when our trailer came back, else `Unanswered`: its effect is unknown."""
    # The types of a bare RpcError promise less than every real one has; so it is read as what it is.
    raised: Any = error
    code: grpc.StatusCode = raised.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    trailers: Any = raised.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailers or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            detail = errors_pb2.ErrorDetail()
            try:
                detail.ParseFromString(value)
            except DecodeError:
                break  # whoever wrote that, it was no peer of ours: the effect is unknown
            return Refused(problem_from_detail(detail))
    text: str = (raised.details() if hasattr(error, "details") else "") or ""
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return Refused(
            Problem(Reason.UNSUPPORTED, f"The peer does not know this call: {text}", participant_id=participant_id)
        )
    broken = any(sign in text for sign in _BROKEN_HANDSHAKE) and not text.startswith(_RAN_ALREADY)
    known = {"handshake": "broken"} if broken else {}
    if code == grpc.StatusCode.UNAVAILABLE and text.startswith(_NEVER_LEFT) and not participant_id:
        known |= NOBODY_REACHED
    if (code == grpc.StatusCode.DEADLINE_EXCEEDED or _NEVER_SPOKE in text) and not participant_id:
        known |= SILENT
    return Unanswered(
        Problem(
            Reason.UNREACHABLE,
            f"No answer ({code.name}): {text}".rstrip(": "),
            _HANDSHAKE if broken else "",
            participant_id=participant_id,
            metadata=known,
        )
    )


def time_budget(context: aio.ServicerContext[Any, Any]) -> float:
    """Seconds this handler may use.

    Raises Refused: DEADLINE_MISSING without a deadline (grpc.aio reports None, the sync server 9.2e18), and
    DEADLINE_TOO_SHORT when no answer could be sent in time. Nothing has changed then.
    """
    remaining = cast("float | None", context.time_remaining())  # None without a deadline, whatever its type says
    if remaining is None or remaining > 10 * 365 * 86400:
        raise refuse(Reason.DEADLINE_MISSING, "The call carries no deadline.")
    if remaining < MIN_BUDGET_S:
        raise refuse(Reason.DEADLINE_TOO_SHORT, f"Only {max(0.0, remaining):.3f} s were left on arrival.")
    return budget(remaining)


class ErrorInterceptor(aio.ServerInterceptor):
    """Lets the guard decide about a call, and turns what a handler raises into a status. Nothing of an unexpected
    exception leaves.

    Covers unary and streaming methods; unknown ones too, so that they tell nothing to a stranger. `certificates_of`: the
    job whose certificates callers must show.
    """

    def __init__(self, tokens: Tokens | None = None, certificates_of: str = "", lanes: Lanes | None = None) -> None:
        self._guard = Guard(tokens, certificates_of, lanes)
        self.refusals = self._guard.refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        guard, name = self._guard, str(handler_call_details.method)
        try:
            by_token = guard.by_token(handler_call_details.invocation_metadata)
        except SafepointError as error:
            return _refusing(guard, name, error.problem)
        handler = await continuation(handler_call_details)
        if handler is None:
            return _unknown(guard, name, by_token)
        return _wrapped(handler, _Way(guard, name, by_token))


class _Way:
    """The way of one call from its first byte to its handler."""

    def __init__(self, guard: Guard, name: str, by_token: Caller) -> None:
        self._guard, self._name, self._by_token = guard, name, by_token

    def enter(self, context: aio.ServicerContext[Any, Any]) -> AbstractContextManager[None]:
        """Count it in. Raises Refused."""
        who = self._guard.by_certificate(self._by_token, context)
        CALLER.set(who)
        return self._guard.enter(self._name, method_of(self._name), who)

    async def abort(self, context: aio.ServicerContext[Any, Any], error: Exception) -> None:
        """End it with what was raised."""
        if isinstance(error, SafepointError):
            self._guard.refused(self._name, error.problem, context)
        await _abort_with(context, error)

    def request(self, handler: Any, raw: Any) -> Any:
        """The request message, or the messages. Raises Refused."""
        if handler.request_streaming:
            return self._messages(handler, raw)
        return parsed(self._name, method_of(self._name), raw, handler.request_deserializer)

    async def _messages(self, handler: Any, raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in raws:
            yield parsed(self._name, method_of(self._name), raw, handler.request_deserializer)


def _refusing(guard: Guard, name: str, problem: Problem) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse_it(_requests: object, context: aio.ServicerContext[Any, Any]) -> None:
        guard.refused(name, problem, context)
        await _abort(context, problem)

    # As a stream, whatever it is: so that nothing is waited for and nothing is read.
    return grpc.stream_stream_rpc_method_handler(cast(Any, refuse_it))


def _unknown(guard: Guard, name: str, by_token: Caller) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse_it(_requests: object, context: aio.ServicerContext[Any, Any]) -> None:
        try:
            guard.by_certificate(by_token, context)
        except SafepointError as error:
            guard.refused(name, error.problem, context)
            await _abort(context, error.problem)
        await _abort(
            context, Problem(Reason.UNSUPPORTED, f"The peer does not know this call: {_cut(short(name), 100)}.")
        )

    return grpc.stream_stream_rpc_method_handler(cast(Any, refuse_it))


def _as_it_came(raw: bytes) -> bytes:
    return raw


def _wrapped(handler: Any, way: _Way) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.response_streaming:
        method = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )

        async def stream(raw: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            items: Any = None
            try:
                with way.enter(context):
                    items = method(way.request(handler, raw), context)
                    if inspect.isawaitable(
                        items
                    ):  # a handler that writes by itself, as the health service's Watch does
                        await items
                        return
                    async for item in items:
                        yield item
            except Exception as error:
                await way.abort(context, error)
            finally:
                # A caller that leaves ends only this generator: what the handler holds must not wait for the collector.
                close = getattr(items, "aclose", None)
                if close is not None:
                    await close()

        return make(stream, _as_it_came, handler.response_serializer)

    method = handler.stream_unary if handler.request_streaming else handler.unary_unary
    make_unary = (
        grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    )

    async def unary(raw: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            with way.enter(context):
                result = method(way.request(handler, raw), context)
                return await result if inspect.isawaitable(result) else result
        except Exception as error:
            await way.abort(context, error)

    return make_unary(unary, _as_it_came, handler.response_serializer)


async def _abort_with(context: aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, aio.AbortError):  # a handler's own abort, e.g. of the health service
        raise error
    if isinstance(error, SafepointError):
        await _abort(context, error.problem)
    if isinstance(error, MemoryError):
        await _abort(context, storage_error(error, "answering a call").problem)
    error_id = secrets.token_hex(4)
    log.exception("unexpected error %s in a handler", error_id)
    await _abort(
        context,
        Problem(Reason.INTERNAL, "Safepoint failed unexpectedly.", metadata={"error_id": error_id}),
    )


async def _abort(context: aio.ServicerContext[Any, Any], problem: Problem) -> None:
    detail = detail_from_problem(problem)
    code = grpc.StatusCode[CATALOG[problem.reason].code]
    await context.abort(code, _cut(str(problem), 500), ((ERROR_TRAILER, detail.SerializeToString()),))


def _cut(text: str, limit: int) -> str:
    raw = text.encode()
    return text if len(raw) <= limit else raw[: limit - 3].decode(errors="ignore") + "..."


def channel(target: str) -> aio.Channel:
    """A plaintext channel with our options, for what stays on this machine. `links.py` makes the others."""
    return aio.insecure_channel(target, options=CHANNEL_OPTIONS)
