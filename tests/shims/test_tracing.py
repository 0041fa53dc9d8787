"""Traces: one tree from the trainer's span over the coordinator's phases to the shims, read back from memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coordinator.client_async import AsyncClient
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire import trace
from coordinator.wire.errors import Problem, Reason, SafepointError
from participant_shims import shim as shim_module
from tests.coordinator.conftest import Bench
from tests.fakes import Knobs
from tests.shims.proxy_server import running_server
from tests.shims.test_with_coordinator import registered, shims


@dataclass
class Tracing:
    """A provider that keeps spans in memory."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    provider: TracerProvider = field(default_factory=TracerProvider)

    def spans(self) -> dict[str, Any]:
        """By name; the last of each."""
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def parent(self, name: str) -> str:
        spans = self.spans()
        ids = {span.context.span_id: span.name for span in spans.values()}
        parent = spans[name].parent
        return ids.get(parent.span_id, "?") if parent is not None else ""


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    made = Tracing()
    made.provider.add_span_processor(SimpleSpanProcessor(made.exporter))
    for module in ("coordinator.server", "participant_shims.shim"):
        monkeypatch.setattr(f"{module}.Tracer", lambda service: trace.Tracer(service, made.provider))
    yield made
    made.provider.shutdown()


async def test_a_save_is_one_tree_from_the_trainer_to_the_shims(
    short_path: Path, tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim_module, "wanted", lambda: True)
    coordinator = await serve(
        Settings(root=str(short_path / "root"), bind=f"unix:{short_path}/c.sock", heartbeat_s=0.2, traces=True)
    )
    try:
        async with running_server() as server, shims(short_path, server) as running:
            await registered(running, 1)
            async with AsyncClient(coordinator.address) as client:
                with tracing.provider.get_tracer("trainer").start_as_current_span("train step"):
                    await client.save("step-1", operation_id="save-1")
    finally:
        await coordinator.kill()
    spans = tracing.spans()
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert tracing.parent("safepoint.save") == "train step"
    for phase in ("discover", "prepare", "commit", "confirm", "publish", "resume"):
        assert tracing.parent(f"safepoint.{phase}") == "safepoint.save"
    for name in ("policy", "agent", "sandbox"):
        assert tracing.parent(f"safepoint.prepare {name}") == "safepoint.prepare"
    by_id = {span.context.span_id: span.name for span in tracing.exporter.get_finished_spans()}
    shim = [(s.attributes["safepoint.participant_id"], by_id[s.parent.span_id])
            for s in tracing.exporter.get_finished_spans() if s.name == "safepoint.shim.commit"]  # fmt: skip
    assert sorted(shim) == [("agent", "safepoint.commit agent"), ("sandbox", "safepoint.commit sandbox")]
    done = spans["safepoint.save"]
    assert done.attributes["safepoint.operation_id"] == "save-1"
    assert done.attributes["safepoint.outcome"] == "succeeded"
    assert done.attributes["safepoint.pause_s"] >= 0
    parts = [span for span in spans.values() if span.name.startswith("safepoint.prepare ")]
    whole = spans["safepoint.prepare"]
    assert all(whole.start_time <= part.start_time <= part.end_time <= whole.end_time for part in parts)


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path / "root")
    made.settings["traces"] = True
    yield made
    await made.stop()


async def test_a_failure_is_at_the_participant_the_phase_and_the_operation(bench: Bench, tracing: Tracing) -> None:
    await bench.start(agent_0=Knobs(fail_on={"Commit": Problem(Reason.STORAGE_FULL, "The disk is full.")}))
    with pytest.raises(SafepointError):
        await bench.save()
    spans = tracing.spans()
    for name in ("safepoint.save", "safepoint.commit agent-0"):
        assert not spans[name].status.is_ok, name
        assert spans[name].attributes["safepoint.reason"] == "STORAGE_FULL", name
    assert spans["safepoint.prepare"].status.is_ok
    assert not spans["safepoint.commit"].status.is_ok
    assert tracing.parent("safepoint.save") == "", "nobody had sent a context"
    assert tracing.parent("safepoint.abort") == "safepoint.save"


async def test_every_span_of_an_operation_has_ended_when_it_has(bench: Bench, tracing: Tracing) -> None:
    await bench.start(agent_0=Knobs(lose_reply={"Prepare": 1}))
    await bench.save()
    await bench.save("save-2", "step-2")
    names = [span.name for span in tracing.exporter.get_finished_spans()]
    assert names.count("safepoint.save") == 2
    assert names.count("safepoint.prepare agent-0") >= 3, "a call that is made again is a span of its own"


@pytest.mark.parametrize("broken", ["start", "carried", "fail"])
async def test_a_tracer_that_fails_ends_no_save(
    bench: Bench, tracing: Tracing, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(trace.Tracer, broken, fails)
    await bench.start()
    assert (await bench.save())[-1].WhichOneof("event") == "saved"


@pytest.mark.parametrize("sent", ["", "nonsense", "00-" + "0" * 31 + "-1-01", "x" * 5000])
def test_a_context_that_is_none_is_not_taken(sent: str) -> None:
    assert trace.incoming([("traceparent", sent), ("other", "x")]) == {}


def test_nothing_of_opentelemetry_is_loaded_while_it_is_off(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from coordinator.client import Client\n"
        "from coordinator.server import serve\n"
        "from coordinator.settings import Settings\n"
        "import participant_shims.shim, participant_shims.gate.asgi\n"
        "async def main():\n"
        f"    c = await serve(Settings(root={str(tmp_path / 'root')!r}))\n"
        "    client = Client(c.address)\n"
        "    await asyncio.to_thread(client.status)\n"
        "    client.close(); await c.kill()\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]", done.stderr


async def test_wanted_and_not_installed_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(SafepointError, match=r"pip install .*\[otel\]") as caught:
        await serve(Settings(root=str(tmp_path / "root"), traces=True))
    assert caught.value.reason is Reason.INVALID_ARGUMENT
