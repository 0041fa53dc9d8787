"""Metrics say what events say, under names that are a promise, and cost an operation nothing."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import errors_pb2

from coordinator.metrics import Metrics, MetricsServer
from coordinator.protocol.topology import Participant
from coordinator.uploading import Figures
from coordinator.wire.errors import Reason, Refused
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, OperationKind, Phase, Role
from tests.coordinator.conftest import Bench
from tests.fakes import NEVER, Knobs

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT, DASHBOARD = DOCS / "metrics.md", DOCS / "grafana.json"


class Seen:
    """A coordinator with one agent."""

    def epoch(self) -> int:
        return 7

    def participants(self) -> tuple[Participant, ...]:
        agent = Participant(
            ParticipantId("agent"), Role.AGENT, "gym.agent", CheckpointMode.EXPORT_RESTORE, IncarnationId("i"), "h:1"
        )
        return (agent,)

    def missing(self) -> int:
        return 0

    def active(self) -> OperationKind | None:
        return OperationKind.SAVE

    def uploads(self) -> Figures | None:
        return Figures(2, 5, {"STORAGE_FAILED": 3}, 41_000_000, 1_700_000_000.0)

    def limits(self) -> dict[str, float]:
        return {"open_files": 0.5}


def event(operation_id: str = "save-1", **kind: Any) -> pb.OperationEvent:
    made = pb.OperationEvent(operation_id=operation_id, **kind)
    made.elapsed.FromMilliseconds(1500)
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(name, labels)
    return found


def rows(metrics: Metrics) -> list[str]:
    """The table of docs/metrics.md, as the code has it."""
    return sorted(
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} | "
        f"{', '.join(sorted({k for s in family.samples for k in s.labels if k != 'le'})) or '-'} | {family.documentation} |"
        for family in metrics.registry.collect()
    )


def test_names_labels_and_helps_are_those_that_were_promised() -> None:
    metrics = Metrics(Seen())
    drive(metrics)
    promised = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows(metrics) == promised, "a name that is gone breaks dashboards; a new one goes into docs/metrics.md"


def test_the_dashboard_asks_for_nothing_that_is_not_there() -> None:
    metrics = Metrics(Seen())
    drive(metrics)
    there = {sample.name for family in metrics.registry.collect() for sample in family.samples}
    assert asked_of_the_dashboard() <= there


def test_every_metric_has_a_place_on_the_dashboard() -> None:
    metrics = Metrics(Seen())
    drive(metrics)
    asked = asked_of_the_dashboard()
    families = [family for family in metrics.registry.collect() if family.name.startswith("safepoint_")]
    assert families
    assert not [f.name for f in families if not asked & {sample.name for sample in f.samples}]


def test_panels_lie_beside_each_other() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def asked_of_the_dashboard() -> set[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"safepoint_\w+", target["expr"])
    }


def drive(metrics: Metrics) -> None:
    """One save that ends well and one that fails."""
    started = pb.PhaseStarted(phase=int(Phase.PREPARE))  # type: ignore[arg-type]
    finished = pb.PhaseFinished(phase=int(Phase.PREPARE))  # type: ignore[arg-type]
    finished.duration.FromMilliseconds(200)
    step = pb.ParticipantProgress(participant_id="agent", in_flight=2, parked=3, held=4)
    resumed, saved = pb.Resumed(), pb.Saved()
    resumed.pause.FromMilliseconds(300)
    saved.snapshot.size_bytes = 41
    saved.snapshot.totals.parked = 62
    metrics.offer(event(phase_started=started))
    metrics.offer(event(participant_progress=step))
    metrics.offer(event(phase_finished=finished))
    metrics.offer(event(warning=pb.Warning(message="late")))
    metrics.offer(event(resumed=resumed))
    metrics.offer(event(saved=saved))
    failed = pb.Failed()
    failed.primary.reason = errors_pb2.REASON_DRAIN_INCOMPLETE
    metrics.offer(event("save-2", phase_started=started))
    metrics.offer(event("save-2", participant_progress=step))
    metrics.offer(event("save-2", failed=failed))
    metrics.offer(event("save-3", participant_progress=step))


def test_a_save_that_ends_is_counted_once_with_its_pause_and_totals() -> None:
    metrics = Metrics(Seen())
    drive(metrics)
    assert value(metrics, "safepoint_operations_total", kind="save", outcome="succeeded", reason="") == 1
    assert value(metrics, "safepoint_pause_seconds_sum", kind="save") == 0.3
    assert value(metrics, "safepoint_operation_seconds_sum", kind="save") == 3.0
    assert value(metrics, "safepoint_phase_seconds_sum", phase="prepare") == 0.2
    assert value(metrics, "safepoint_snapshot_rollouts", state="parked") == 62
    assert value(metrics, "safepoint_snapshot_bytes") == 41
    assert value(metrics, "safepoint_warnings_total") == 1


def test_a_failure_is_counted_under_its_reason_and_a_restore_that_is_aborted_after_it_only_once() -> None:
    metrics = Metrics(Seen())
    failed = pb.Failed()
    failed.primary.reason = errors_pb2.REASON_SNAPSHOT_CORRUPT
    metrics.offer(event("r", phase_started=pb.PhaseStarted(phase=int(Phase.RESTORE))))  # type: ignore[arg-type]
    metrics.offer(event("r", failed=failed))
    failed.primary.reason = errors_pb2.REASON_ABORTED
    metrics.offer(event("r", failed=failed))
    of = {"kind": "restore", "outcome": "failed"}
    assert value(metrics, "safepoint_operations_total", **of, reason="SNAPSHOT_CORRUPT") == 1
    assert value(metrics, "safepoint_operations_total", **of, reason="ABORTED") is None


async def test_a_restore_is_counted_as_one_and_a_new_coordinator_knows_the_newest_snapshot(bench: Bench) -> None:
    bench.settings["metrics_bind"] = "127.0.0.1:0"
    await bench.start(agent_0=Knobs(rollouts=2))
    await bench.save()
    await bench.restore()
    await bench.phase("Resume", operation_id="restore-1")
    assert bench.running.metrics is not None
    seen = await asyncio.to_thread(scrape, bench.running.metrics.address)
    assert seen["safepoint_operations_total[('kind', 'restore'), ('outcome', 'succeeded'), ('reason', '')]"] == 1
    assert seen["safepoint_operations_total[('kind', 'save'), ('outcome', 'succeeded'), ('reason', '')]"] == 1
    await bench.crash()
    await bench.restart()
    metrics = bench.running.metrics
    assert metrics is not None
    while not value(metrics.metrics, "safepoint_snapshot_timestamp_seconds"):
        await asyncio.sleep(0.01)
    assert value(metrics.metrics, "safepoint_snapshot_rollouts", state="parked") == 2


def test_nobody_is_shown_as_waiting_once_an_operation_has_ended() -> None:
    metrics = Metrics(Seen())
    drive(metrics)
    assert value(metrics, "safepoint_participant_parked", participant="agent") == 3, "of the one that still runs"
    metrics.offer(event("save-3", failed=pb.Failed()))
    assert value(metrics, "safepoint_participant_parked", participant="agent") is None


def test_events_of_a_newer_version_are_no_failure() -> None:
    metrics = Metrics(Seen())
    metrics.offer(event())
    failed = pb.Failed()
    failed.primary.reason = 9999  # type: ignore[assignment]
    metrics.offer(event(phase_finished=pb.PhaseFinished(phase=99)))  # type: ignore[arg-type]
    metrics.offer(event(failed=failed))
    labels = {"kind": "save", "outcome": "failed", "reason": "REASON_9999"}
    assert value(metrics, "safepoint_operations_total", **labels) == 1


def scrape(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        f"{s.name}{sorted(s.labels.items())}": s.value for f in text_string_to_metric_families(text) for s in f.samples
    }


@pytest.mark.parametrize("bind", ["nonsense", "127.0.0.1:", "127.0.0.1:x"])
def test_a_bind_that_is_no_address_is_refused(bind: str) -> None:
    with pytest.raises(Refused) as caught:
        MetricsServer(Metrics(Seen()), bind)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_a_port_that_is_taken_is_refused_and_one_that_is_closed_is_free_again() -> None:
    server = MetricsServer(Metrics(Seen()), "127.0.0.1:0")
    try:
        with pytest.raises(Refused) as caught:
            MetricsServer(Metrics(Seen()), server.address)
        assert caught.value.reason is Reason.UNAVAILABLE
    finally:
        server.close()
    MetricsServer(Metrics(Seen()), server.address).close()


def test_what_is_not_metrics_is_not_found() -> None:
    server = MetricsServer(Metrics(Seen()), "127.0.0.1:0")
    try:
        for path in ("/", "/metrics/", "/health", "/favicon.ico"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"http://{server.address}{path}", timeout=5)
            assert caught.value.code == 404
            assert b"/metrics" in caught.value.read()
            caught.value.close()
        with urllib.request.urlopen(f"http://{server.address}/metrics?a=b", timeout=5) as answer:
            assert b"safepoint_operation_active" in answer.read()
    finally:
        server.close()


async def test_a_real_coordinator_serves_what_its_saves_have_told(bench: Bench) -> None:
    bench.settings["metrics_bind"] = "127.0.0.1:0"
    await bench.start(agent_0=Knobs(rollouts=3))
    assert bench.running.metrics is not None
    address = bench.running.metrics.address
    before = await asyncio.to_thread(scrape, address)
    assert before["safepoint_coordinator_epoch[]"] == 1
    assert before["safepoint_operation_active[('kind', 'save')]"] == 0
    agents = [value for name, value in before.items() if name.startswith("safepoint_participants[('role', 'agent')")]
    assert agents == [1]
    await bench.save()
    after = await asyncio.to_thread(scrape, address)
    assert after["safepoint_snapshot_rollouts[('state', 'parked')]"] == 3
    assert after["safepoint_pause_seconds_count[('kind', 'save')]"] == 1


async def test_scrapes_are_answered_while_an_operation_waits(bench: Bench) -> None:
    bench.settings["metrics_bind"] = "127.0.0.1:0"
    await bench.start(agent_0=Knobs(inflight=1, drain_after_s=NEVER))
    assert bench.running.metrics is not None
    saving = asyncio.create_task(bench.save(timeout=20))
    address = bench.running.metrics.address
    while not (await asyncio.to_thread(scrape, address))["safepoint_operation_active[('kind', 'save')]"]:
        assert not saving.done()
    saving.cancel()
    await asyncio.wait({saving})


async def test_without_a_bind_nothing_is_counted_or_served(bench: Bench) -> None:
    await bench.start()
    assert bench.running.metrics is None
