"""Traces: the context that goes along with calls (W3C: `traceparent`, `tracestate`), and who takes spans in this process.

The rule: OpenTelemetry is loaded by SAFEPOINT_TRACES and by nothing else of ours. Without it a server looks at no header and
starts no span; a trainer that traces by itself has its context sent along, since then the library is loaded anyway.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc
from grpc import aio

from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.extras import NotInstalled, install_extra

VARIABLE: Final = "SAFEPOINT_TRACES"
_API: Final = "opentelemetry.trace"
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
HEADERS: Final = ("traceparent", "tracestate")
_MAX_STATE: Final = 512

Metadata = tuple[tuple[str, str], ...]


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is to take spans."""
    return environ.get(VARIABLE, "").lower() in ("1", "true", "yes", "on")


def outgoing() -> Metadata:
    """The context of the span that runs now, to be sent along; nothing where OpenTelemetry is not in use."""
    if _API not in sys.modules:
        return ()
    carrier: dict[str, str] = {}
    propagation: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    propagation.TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def incoming(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The context that came with a call; empty when there was none that can be one."""
    found = {key: value for key, value in metadata or () if key in HEADERS and isinstance(value, str)}
    if not _TRACEPARENT.fullmatch(found.get("traceparent", "")):
        return {}
    return {key: value for key, value in found.items() if len(value) <= _MAX_STATE}


class Tracer:
    """Starts spans of one service. Made once a process that traces."""

    def __init__(self, service: str, provider: Any = None) -> None:
        """`provider`: for tests; else the process's own, made with an OTLP exporter when nobody has set one up.

        Raises INVALID_ARGUMENT when OpenTelemetry is not installed.
        """
        try:
            self._api: Any = importlib.import_module(_API)
            propagation: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
            if provider is None:
                provider = self._api.get_tracer_provider()
                if isinstance(provider, self._api.ProxyTracerProvider):
                    provider = _provider(service)
                    self._api.set_tracer_provider(provider)
        except ImportError as error:
            raise _missing(error) from error
        self._propagator: Any = propagation.TraceContextTextMapPropagator()
        self._tracer: Any = provider.get_tracer("safepoint")

    def start(self, name: str, parent: Any, **attributes: Any) -> Any:
        """A span that has begun. `parent`: another span, or what `incoming` gave; its owner ends it."""
        if isinstance(parent, dict):
            context = self._propagator.extract(parent) if parent else self._new()
        else:
            context = self._api.set_span_in_context(parent, self._new())
        named = {f"safepoint.{key}": value for key, value in attributes.items() if value not in (None, "")}
        return self._tracer.start_span(name, context=context, attributes=named)

    def carried(self, span: Any) -> Metadata:
        """What goes along with a call that is made within `span`."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._api.set_span_in_context(span, self._new()))
        return tuple(carrier.items())

    def fail(self, span: Any, reason: str, message: str) -> None:
        """Mark a span as failed."""
        span.set_attribute("safepoint.reason", reason)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, f"{reason}: {message}"[:500]))

    @staticmethod
    def _new() -> Any:
        context: Any = importlib.import_module("opentelemetry.context")
        return context.Context()


class SpanInterceptor(aio.ServerInterceptor):
    """A span for each phase that a participant is asked for, within the one of whoever asks."""

    PHASES: Final = frozenset({"Prepare", "Commit", "Confirm", "Restore", "Resume", "Abort"})

    def __init__(self, tracer: Tracer, participant_id: Callable[[], str]) -> None:
        self._tracer = tracer
        self._participant_id = participant_id

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        name = str(handler_call_details.method).rpartition("/")[2]
        if handler is None or name not in self.PHASES:
            return handler  # type: ignore[no-any-return]
        parent, tracer = incoming(handler_call_details.invocation_metadata), self._tracer

        def begin(request: Any) -> Any:
            return tracer.start(
                f"safepoint.shim.{name.lower()}", parent, participant_id=self._participant_id(),
                operation_id=request.context.operation_id,
            )  # fmt: skip

        async def stream(request: Any, context: Any) -> Any:
            span = begin(request)
            try:
                async for item in handler.unary_stream(request, context):
                    yield item
            except Exception as error:
                _fail(tracer, span, error)
                raise
            finally:
                span.end()

        async def unary(request: Any, context: Any) -> Any:
            span = begin(request)
            try:
                return await handler.unary_unary(request, context)
            except Exception as error:
                _fail(tracer, span, error)
                raise
            finally:
                span.end()

        made = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        work: Any = stream if handler.response_streaming else unary
        return made(work, handler.request_deserializer, handler.response_serializer)


def _fail(tracer: Tracer, span: Any, error: Exception) -> None:
    if isinstance(error, SafepointError):
        tracer.fail(span, error.reason.name, error.problem.message)
    else:
        tracer.fail(span, "INTERNAL", type(error).__name__)


def _provider(service: str) -> Any:
    """As OpenTelemetry's own variables say: OTEL_TRACES_EXPORTER (default otlp), OTEL_EXPORTER_OTLP_ENDPOINT, and so on."""
    sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
    resources: Any = importlib.import_module("opentelemetry.sdk.resources")
    export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": service}))
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if name.strip() in ("", "none"):
            continue
        wanted_name = "otlp_proto_http" if name.strip() == "otlp" else name.strip()
        points = importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=wanted_name)
        points = points or importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=name.strip())
        if not points:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"Traces are wanted and there is no exporter {name.strip()!r}.",
                next_step=f"{install_extra('otel')}, or name another one in OTEL_TRACES_EXPORTER (console, none).",
            )  # fmt: skip
        provider.add_span_processor(export.BatchSpanProcessor(next(iter(points)).load()()))
    return provider


def _missing(error: ImportError) -> SafepointError:
    return NotInstalled(
        f"Traces are wanted and OpenTelemetry is not installed ({error.name}).",
        f"{install_extra('otel')}, or leave {VARIABLE} and the setting `traces` off.",
    )
