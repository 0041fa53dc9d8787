"""gRPC at both ends: errors <-> status, the server interceptor, and the options that the traps of grpc make necessary.

Servicers contain no `try`: they raise SafepointError (or anything), and `ErrorInterceptor` turns it into a status with
an ErrorDetail trailer. Callers call `error_from_rpc`. These two are the only translators.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

import grpc
from grpc import aio
from safepoint.v1 import errors_pb2

from coordinator.wire.auth import TOKEN_METADATA_KEY, Token, bearer
from coordinator.wire.deadline import MIN_BUDGET_S, budget
from coordinator.wire.errors import CATALOG, Blocked, Problem, Reason, Refused, SafepointError, Unanswered, refuse
from coordinator.wire.terms import Phase

log = logging.getLogger(__name__)

ERROR_TRAILER: Final = "safepoint-error-bin"
MAX_DETAIL_BYTES: Final = 4096  # trailers beyond 8 KiB can replace the status (grpc 37852)
MAX_DETAIL_ROLLOUTS: Final = 20

# Each line answers a trap that was seen; the comment names it.
CHANNEL_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.enable_http_proxy", 0),  # http_proxy captures loopback otherwise
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # keepalive_timeout_ms has no effect; a stopped peer is else never noticed
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.min_reconnect_backoff_ms", 100),  # the default back-off delays recovery by up to 20 s
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
]
SERVER_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.so_reuseport", 0),  # two servers on one port share its traffic silently otherwise
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # else "too_many_pings" for the keepalive above
    ("grpc.http2.max_ping_strikes", 0),
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
    for blocked in problem.rollouts[:MAX_DETAIL_ROLLOUTS]:
        row = detail.rollouts.add(
            rollout_id=blocked.rollout_id, attempt=blocked.attempt, turn=blocked.turn,
            waiting_on=_cut(blocked.waiting_on, 256),
        )  # fmt: skip
        row.age.FromMicroseconds(int(blocked.age_s * 1e6))
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
        if blocked.no_client_s is not None:
            row.no_client_for.FromMicroseconds(int(blocked.no_client_s * 1e6))
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
            )  # fmt: skip
            for r in detail.rollouts
        ),
        rollout_count=detail.rollout_count,
        waited_s=detail.waited.ToMicroseconds() / 1e6 if detail.HasField("waited") else None,
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
            detail.ParseFromString(value)
            return Refused(problem_from_detail(detail))
    text: str = (raised.details() if hasattr(error, "details") else "") or ""
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return Refused(
            Problem(Reason.UNSUPPORTED, f"The peer does not know this call: {text}", participant_id=participant_id)
        )
    return Unanswered(
        Problem(
            Reason.UNREACHABLE,
            f"No answer ({code.name}): {text}".rstrip(": "),
            participant_id=participant_id,
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
    """Checks the token, and turns what a handler raises into a status. Nothing of an unexpected exception leaves.

    Covers unary and streaming methods; unknown methods need the token too, so that they tell nothing to a stranger.
    """

    def __init__(self, token: Token | None = None, open_methods: frozenset[str] = frozenset()) -> None:
        self._token = token
        self._open_methods = open_methods

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if self._token is not None and handler_call_details.method not in self._open_methods:
            metadata = dict(handler_call_details.invocation_metadata or ())
            if not self._token.matches(bearer(cast("str | None", metadata.get(TOKEN_METADATA_KEY)))):
                return grpc.unary_unary_rpc_method_handler(_refuse_stranger)
        handler = await continuation(handler_call_details)
        return _wrapped(handler) if handler is not None else None


async def _refuse_stranger(_request: object, context: aio.ServicerContext[Any, Any]) -> None:
    await _abort(context, Problem(Reason.UNAUTHENTICATED, "The call carries no valid token."))


def _wrapped(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    if handler.response_streaming:
        method = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )

        async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            items: Any = None
            try:
                items = method(request, context)
                if inspect.isawaitable(items):  # a handler that writes by itself, as the health service's Watch does
                    await items
                    return
                async for item in items:
                    yield item
            except Exception as error:
                await _abort_with(context, error)
            finally:
                # A caller that leaves ends only this generator: what the handler holds must not wait for the collector.
                close = getattr(items, "aclose", None)
                if close is not None:
                    await close()

        return make(stream, handler.request_deserializer, handler.response_serializer)

    method = handler.stream_unary if handler.request_streaming else handler.unary_unary
    make_unary = (
        grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    )

    async def unary(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            result = method(request, context)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            await _abort_with(context, error)

    return make_unary(unary, handler.request_deserializer, handler.response_serializer)


async def _abort_with(context: aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, aio.AbortError):  # a handler's own abort, e.g. of the health service
        raise error
    if isinstance(error, SafepointError):
        await _abort(context, error.problem)
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
    """A plaintext channel with our options. Belongs to the event loop it is first used on."""
    return aio.insecure_channel(target, options=CHANNEL_OPTIONS)
