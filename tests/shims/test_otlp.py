"""Spans over the wire: coordinator and shims as processes, a receiver of OTLP, and one tree of what all of them sent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from coordinator.client import Client
from tests.shims.test_shim_process import environment, shim_process, wait

ROLES = {"policy": "policy", "agent": "agent", "sandbox": "resources"}


class Receiver(ThreadingHTTPServer):
    """What an OpenTelemetry collector listens with: OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.spans: list[tuple[str, str, bytes, bytes, bytes]] = []  # service, name, trace, id, parent
        self.url = f"http://127.0.0.1:{self.server_port}"

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                self.spans += [(service, s.name, s.trace_id, s.span_id, s.parent_span_id) for s in scope.spans]


class _Post(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        assert self.headers.get("content-encoding", "identity") == "identity"
        self.server.take(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


@contextlib.contextmanager
def coordinator_process(root: Path, **more: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "coordinator", "--root", str(root)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(**more),
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def shim(name: str, role: str, target: int, path: Path, **more: str) -> AbstractContextManager[object]:
    arguments = {
        "proxy": f"127.0.0.1:0=127.0.0.1:{target}", "name": name, "role": role, "life": path / name, "root": path / "root",
        "coordinator": f"file:{path}/root/coordinator/address.json",
    }  # fmt: skip
    return shim_process(*(word for key, value in arguments.items() for word in (f"--{key}", str(value))), **more)


def test_what_coordinator_and_shims_export_is_one_tree(short_path: Path) -> None:
    root = short_path / "root"
    root.mkdir()
    with receiver() as otlp:
        traced = {"SAFEPOINT_TRACES": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.url}
        with contextlib.ExitStack() as stack:
            stack.enter_context(coordinator_process(root, **traced))
            for name, role in ROLES.items():
                stack.enter_context(shim(name, role, otlp.server_port, short_path, **traced))
            address = root / "coordinator" / "address.json"
            wait(address.exists, 30)
            with Client(f"file:{address}") as client:
                wait(lambda: len(client.topology().participants) == len(ROLES), 30)
                client.save("step-1", operation_id="save-1")
        # Each has ended in order, and has sent what it had.
        by_id = {span_id: (service, name) for service, name, _, span_id, _ in otlp.spans}
        parents = {(service, name): by_id.get(parent) for service, name, _, _, parent in otlp.spans}
    ours, theirs = "safepoint-coordinator", "safepoint-shim"
    assert len({trace for _, _, trace, _, _ in otlp.spans}) == 1
    assert parents[ours, "safepoint.prepare"] == (ours, "safepoint.save")
    for name in ROLES:
        assert parents[ours, f"safepoint.prepare {name}"] == (ours, "safepoint.prepare")
    assert parents[theirs, "safepoint.shim.prepare"] in {(ours, f"safepoint.prepare {name}") for name in ROLES}
    assert [name for service, name, *_ in otlp.spans if service == theirs].count("safepoint.shim.prepare") == len(ROLES)
