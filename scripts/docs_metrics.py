"""docs/reference/metrics.md, from the registry that a coordinator serves."""

from __future__ import annotations

from typing import Any

from coordinator.metrics import BUCKETS, Metrics
from coordinator.protocol.topology import Participant
from coordinator.uploading import Figures
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, OperationKind, Role
from scripts.docs_markdown import cell, generated, table


class _Seen:
    """A coordinator with one agent, so that every family has a sample."""

    def epoch(self) -> int:
        return 1

    def participants(self) -> tuple[Participant, ...]:
        mode = CheckpointMode.EXPORT_RESTORE
        return (Participant(ParticipantId("a"), Role.AGENT, "gym.agent", mode, IncarnationId("i"), "h:1"),)

    def missing(self) -> int:
        return 0

    def active(self) -> OperationKind | None:
        return None

    def limits(self) -> dict[str, float]:
        return {"one": 0.0}

    def uploads(self) -> Figures | None:
        return Figures(newest_time_s=1.0)


def render() -> str:
    """The page: each family with its type, labels, unit and help."""
    registry = Metrics(_Seen()).registry
    labels = {_family(c): c._labelnames for c in registry._collector_to_names if hasattr(c, "_labelnames")}
    rows = []
    for family in sorted(registry.collect(), key=lambda f: f.name):
        name = family.name + ("_total" if family.type == "counter" else "")
        sampled = {key for sample in family.samples for key in sample.labels if key != "le"}
        named = [f"`{label}`" for label in labels.get(family.name, sorted(sampled))]
        rows.append((f"`{name}`", family.type, ", ".join(named), _unit(family.name), cell(family.documentation)))
    return (
        generated("Metrics", "`coordinator/metrics.py`")
        + "\nServed at `/metrics` for Prometheus when `metrics_bind` is set; [metrics](../metrics.md) says how, and has a "
        "dashboard. Histograms have the buckets "
        + ", ".join(f"{edge:g}" for edge in BUCKETS)
        + " s.\n\n"
        + table(("name", "type", "labels", "unit", "meaning"), *rows)
    )


def _family(collector: Any) -> str:
    return str(collector.describe()[0].name)


def _unit(name: str) -> str:
    return next((unit for end, unit in (("_seconds", "seconds"), ("_bytes", "bytes")) if name.endswith(end)), "")
