"""What a coordinator counts, for Prometheus.

The rule: metrics follow what is told to everybody else. They are folded from the events of the feed, so that they can
never say anything else than `safepoint status` does, and an operation never waits for them. What is a state and no event
(who is here, which epoch) is read when somebody scrapes.

Names are a promise: `tests/coordinator/metrics.golden` holds each with its labels, unit and help.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.protocol.topology import Participant
from coordinator.uploading import Figures
from coordinator.wire.addresses import host_and_port
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.extras import NotInstalled, install_extra
from coordinator.wire.terms import OperationKind, Phase

# Seconds. A pause under hold is a tenth of a second, a drain may take an hour.
BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
_REMEMBERED: Final = 256


class Observed(Protocol):
    """What is read at a scrape: cheap, without disk or network, from any thread."""

    def epoch(self) -> int: ...

    def participants(self) -> tuple[Participant, ...]: ...

    def missing(self) -> int: ...

    def active(self) -> OperationKind | None: ...

    def limits(self) -> Mapping[str, float]: ...

    def uploads(self) -> Figures | None: ...


class Metrics:
    """Folds the events of all operations. `offer` is called on the coordinator's event loop, scrapes come from anywhere."""

    def __init__(self, observed: Observed) -> None:
        """Raises INVALID_ARGUMENT when prometheus-client is not installed."""
        client = _client()
        self.registry: Any = client.CollectorRegistry()
        self._observed = observed
        self._kinds: dict[str, OperationKind] = {}  # of operations that run
        self._over: deque[str] = deque(maxlen=_REMEMBERED)

        def counter(name: str, text: str, *labels: str) -> Any:
            return client.Counter(name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return client.Gauge(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Any:
            return client.Histogram(name, text, labels, buckets=BUCKETS, registry=self.registry)

        self._operations = counter(
            "safepoint_operations", "Operations that ended, by outcome and primary reason", "kind", "outcome", "reason"
        )
        self._warnings = counter("safepoint_warnings", "Warnings told in operations")
        self._took = histogram("safepoint_operation_seconds", "How long operations took", "kind")
        self._phases = histogram("safepoint_phase_seconds", "How long phases took that everybody finished", "phase")
        self._paused = histogram("safepoint_pause_seconds", "First admission closed to last open, at the gates", "kind")
        self._bytes = gauge("safepoint_snapshot_bytes", "Size of the newest snapshot")
        self._rollouts = gauge("safepoint_snapshot_rollouts", "Rollouts in the newest snapshot's ledger", "state")
        self._published = gauge("safepoint_snapshot_timestamp_seconds", "When the newest snapshot was published")
        self._in_flight = gauge("safepoint_participant_in_flight", "Requests that a phase waits for", "participant")
        self._parked = gauge("safepoint_participant_parked", "Requests parked at a closed gate", "participant")
        self._held = gauge("safepoint_participant_held", "Responses held at a closed gate", "participant")
        self.registry.register(_States(observed))

    def offer(self, event: pb.OperationEvent) -> None:
        """One event of the feed."""
        active = self._observed.active()
        if active is not None:
            self._kinds.setdefault(event.operation_id, active)
        match event.WhichOneof("event"):
            case "phase_started":
                if event.phase_started.phase == int(Phase.RESTORE):
                    self._kinds[event.operation_id] = OperationKind.RESTORE
            case "phase_finished":
                done = event.phase_finished
                self._phases.labels(_phase(done.phase)).observe(convert.seconds(done.duration))
            case "participant_progress":
                self._moved(event.participant_progress)
            case "warning":
                self._warnings.inc()
            case "saved":
                self.newest(event.saved.snapshot)
            case "resumed":
                self._paused.labels(self._kind(event.operation_id)).observe(convert.seconds(event.resumed.pause))
                self._ended(event, "succeeded", "")
            case "failed":
                self._ended(event, "failed", _reason(event.failed.primary.reason))
            case _:
                pass

    def _moved(self, step: pb.ParticipantProgress) -> None:
        if step.done:
            return  # carries no counts
        for gauge, value in ((self._in_flight, step.in_flight), (self._parked, step.parked), (self._held, step.held)):
            gauge.labels(step.participant_id).set(value)

    def newest(self, snapshot: pb.SnapshotInfo) -> None:
        """The newest snapshot: after a save, and at the start of a coordinator, or its age would seem unbounded."""
        self._bytes.set(snapshot.size_bytes)
        self._published.set(snapshot.create_time.ToMicroseconds() / 1e6)
        for state in ("completed", "parked", "pending", "excluded"):
            self._rollouts.labels(state).set(getattr(snapshot.totals, state))

    def _ended(self, event: pb.OperationEvent, outcome: str, reason: str) -> None:
        if event.operation_id in self._over:
            return  # a restore that failed stands still, and ends once more when it is aborted
        kind = self._kind(event.operation_id)
        self._operations.labels(kind, outcome, reason).inc()
        self._took.labels(kind).observe(convert.seconds(event.elapsed))
        self._kinds.pop(event.operation_id, None)
        self._over.append(event.operation_id)
        for gauge in (self._in_flight, self._parked, self._held):
            gauge.clear()  # nobody waits for anything now; a participant that has left must not stay for ever

    def _kind(self, operation_id: str) -> str:
        return self._kinds.get(operation_id, OperationKind.UNSPECIFIED).name.lower()


class _States:
    """Read at each scrape."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._core: Any = importlib.import_module("prometheus_client.core")

    def collect(self) -> Iterator[Any]:
        """Called by prometheus-client."""
        make, seen = self._core.GaugeMetricFamily, self._observed
        yield make("safepoint_coordinator_epoch", "Which start of the coordinator this is", value=seen.epoch())
        yield make("safepoint_participants_missing", "Who took part, is gone and has not come back", seen.missing())
        people = make("safepoint_participants", "Who takes part now", labels=["role", "state_survives_by"])
        counts = Counter((p.role.name.lower(), p.checkpoint_mode.name.lower()) for p in seen.participants())
        for labels, count in sorted(counts.items()):
            people.add_metric(labels, count)
        yield people
        limits = make(
            "safepoint_limit_used_ratio", "How full a limit of the coordinator is; one is full", labels=["limit"]
        )
        for name, share in sorted(seen.limits().items()):
            limits.add_metric([name], share)
        yield limits
        if (uploads := seen.uploads()) is not None:
            yield from self._uploads(uploads)
        running = make("safepoint_operation_active", "Whether an operation runs or waits", labels=["kind"])
        active = seen.active()
        for kind in (OperationKind.SAVE, OperationKind.RESTORE):
            running.add_metric([kind.name.lower()], float(active is kind))
        yield running

    def _uploads(self, seen: Figures) -> Iterator[Any]:
        make, count = self._core.GaugeMetricFamily, self._core.CounterMetricFamily
        yield make("safepoint_uploads_waiting", "Snapshots that the object store does not have yet", seen.waiting)
        tries = count(
            "safepoint_uploads", "Tries of an upload that ended, by reason; empty for success", labels=["reason"]
        )
        for reason, number in sorted({"": seen.succeeded, **(seen.failed or {})}.items()):
            tries.add_metric([reason], number)
        yield tries
        yield count("safepoint_uploaded_bytes", "Bytes of snapshots that were uploaded", seen.uploaded_bytes)
        if seen.newest_time_s:
            text = "When the newest snapshot that the object store has was published"
            yield make("safepoint_uploaded_timestamp_seconds", text, seen.newest_time_s)


class MetricsServer:
    """Serves `/metrics` from a thread of its own, so that a scrape is answered whatever the event loop does."""

    def __init__(self, metrics: Metrics, bind: str) -> None:
        """`bind`: host:port, port 0 for any. Raises INVALID_ARGUMENT, and UNAVAILABLE when the port is taken."""
        host, port = metrics_address(bind)
        try:
            server, thread = _client().start_http_server(port, host.strip("[]"), metrics.registry)
            server.set_app(_only_metrics(server.get_app()))  # its own answers whatever the path is
        except OSError as error:
            raise refuse(
                Reason.UNAVAILABLE, f"The address {bind} for metrics cannot be bound: {error.strerror or error}.",
                next_step="Stop what listens there, or set `metrics_bind` to another address; port 0 takes a free one.",
            ) from error  # fmt: skip
        self.metrics = metrics
        self._server: Any = server
        self._thread: threading.Thread = thread
        self.address = f"{host}:{server.server_port}"

    def close(self) -> None:
        """Stop serving; twice is harmless."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics_address(bind: str) -> tuple[str, int]:
    """Host and port of `/metrics`. Raises INVALID_ARGUMENT for what is none, and when prometheus-client is not installed."""
    try:
        address = host_and_port(bind)
    except ValueError as error:
        raise refuse(Reason.INVALID_ARGUMENT, f"metrics_bind {error}.") from None
    _client()
    return address


def _client() -> Any:
    # By name: without it everything but `metrics_bind` works, and strict checkers leave it alone.
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        raise NotInstalled(
            "metrics_bind is set and prometheus-client is not installed.",
            f"{install_extra('metrics')}, or leave metrics_bind empty.",
        ) from error


def _only_metrics(app: Callable[..., Any]) -> Callable[..., Any]:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ.get("PATH_INFO") == "/metrics":
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"There is nothing here but /metrics.\n"]

    return answer


def _phase(number: int) -> str:
    try:
        return Phase(number).name.lower()
    except ValueError:
        return f"phase_{number}"


def _reason(number: int) -> str:
    try:
        return Reason(number).name
    except ValueError:
        return f"REASON_{number}"
