"""What the page shows beside one operation: the list of them, snapshots, who takes part, two snapshots compared.

Everything here blocks and reads: it is called in the threads of the page's server.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any, Final, Protocol

from safepoint.v1 import manifest_pb2

from coordinator import ledger_lines, pruning
from coordinator.page.past import Past
from coordinator.page.timeline import Document, totals
from coordinator.protocol.topology import Missing, Participant
from coordinator.snapshot_reading import SnapshotReader
from coordinator.wire.terms import OperationKind, RolloutState

MAX_OPERATIONS: Final = 100
MAX_SNAPSHOTS: Final = 100
MAX_ROLLOUTS: Final = 100  # shown of a difference
MAX_LEDGER: Final = 200_000  # lines that are compared


class Looked(Protocol):
    """What the page reads of a coordinator that runs: cheap, without disk or network, from any thread."""

    def epoch(self) -> int: ...

    def participants(self) -> tuple[Participant, ...]: ...

    def gone(self) -> tuple[Missing, ...]: ...

    def running(self) -> tuple[str, OperationKind] | None: ...


def overview(looked: Looked, past: Past, listed: Document) -> Document:
    """The start of the page: what is now, what was, and the snapshots as `listing` gave them. Raises STORAGE_FAILED."""
    running = looked.running()
    name = running[0] if running is not None else ""
    people = [*map(participant, looked.participants()), *map(missing, looked.gone())]
    told = {
        "epoch": looked.epoch(), "running": name, "operations": past.summaries(name), "operation_limit": MAX_OPERATIONS,
        "participants": people,
    }  # fmt: skip
    return told | listed


def listing(reader: SnapshotReader, known: dict[str, manifest_pb2.SnapshotManifest]) -> Document:
    """The newest snapshots, and what is none. Reads every manifest that is not `known`, which it keeps up to date, and those of
    participants of the newest alone. Raises STORAGE_FAILED.
    """
    found, pinned = reader.list(known, MAX_SNAPSHOTS), pruning.pins(reader)
    known.clear()
    known.update((manifest.snapshot_id, manifest) for manifest in found.snapshots)
    return {
        "snapshots": [snapshot(m, pinned.get(m.snapshot_id, "")) for m in found.snapshots[:MAX_SNAPSHOTS]],
        "snapshot_count": len(found.snapshots), "invalid": dict(islice(found.invalid.items(), 20)),
    }  # fmt: skip


def participant(who: Participant) -> Document:
    """One who takes part."""
    return {
        "participant_id": who.participant_id, "role": who.role.name.lower(), "kind": who.kind,
        "state_survives_by": who.checkpoint_mode.name.lower(), "workers": who.configured_workers,
        "depends_on": list(who.depends_on), "address": who.address, "reason": who.checkpoint_mode_reason, "missing": "",
    }  # fmt: skip


def missing(gone: Missing) -> Document:
    """One who took part and is gone."""
    return participant(gone.participant) | {"missing": gone.why or "it is gone"}


def snapshot(manifest: manifest_pb2.SnapshotManifest, pin_reason: str = "") -> Document:
    """One snapshot, and what of each participant is in it."""
    return {
        "snapshot_id": manifest.snapshot_id, "operation_id": manifest.operation_id,
        "created_s": manifest.create_time.ToMicroseconds() / 1e6,
        "size_bytes": sum(reference.size_bytes for reference in manifest.participants) + manifest.ledger_size_bytes,
        "totals": totals(manifest.totals), "in_engines": sum(r.engine_requests for r in manifest.participants),
        "metadata": dict(manifest.metadata), "pin_reason": pin_reason,
        "fingerprint": manifest.topology_fingerprint,
        "participants": [
            {"participant_id": reference.participant_id, "size_bytes": reference.size_bytes,
             "sha256": reference.manifest_sha256}
            for reference in manifest.participants
        ],
    }  # fmt: skip


def verified(reader: SnapshotReader, snapshot_id: str) -> Document:
    """Every byte was read and compared. Raises SafepointError that names the file that is damaged."""
    found = reader.verify(snapshot_id)
    return {"snapshot_id": snapshot_id, "files": found.files, "size_bytes": found.size_bytes,
            "unlisted": list(found.unlisted)}  # fmt: skip


def difference(reader: SnapshotReader, before: str, after: str) -> Document:
    """What changed from one snapshot to another. Raises SafepointError when one cannot be read."""
    old, new = reader.load(before), reader.load(after)
    sizes = [{r.participant_id: r.size_bytes for r in manifest.participants} for manifest in (old, new)]
    names = sorted(set(sizes[0]) | set(sizes[1]))
    return {
        "before": snapshot(old), "after": snapshot(new),
        "same_topology": old.topology_fingerprint == new.topology_fingerprint,
        "participants": [{"participant_id": n, "before": sizes[0].get(n), "after": sizes[1].get(n)} for n in names],
        "metadata": {
            key: [old.metadata.get(key), new.metadata.get(key)]
            for key in sorted({*old.metadata, *new.metadata})
            if old.metadata.get(key) != new.metadata.get(key)
        },
        "rollouts": _rollouts(_ledger(reader, before), _ledger(reader, after)),
    }  # fmt: skip


def _ledger(reader: SnapshotReader, snapshot_id: str) -> dict[str, manifest_pb2.LedgerEntry]:
    where = f"the ledger of {snapshot_id}"
    lines = reader.ledger(snapshot_id)
    try:
        entries = (ledger_lines.entry(ledger_lines.decode(raw, where)) for raw in islice(lines, MAX_LEDGER))
        return {entry.rollout_id: entry for entry in entries}
    finally:
        lines.close()


def _rollouts(old: dict[str, manifest_pb2.LedgerEntry], new: dict[str, manifest_pb2.LedgerEntry]) -> Document:
    counts = Counter[str]()
    rows: list[Document] = []
    for name in sorted(set(old) | set(new)):
        change = _change(old.get(name), new.get(name))
        counts[change] += 1
        if change != "unchanged" and len(rows) < MAX_ROLLOUTS:
            rows.append(
                {"rollout_id": name, "change": change, "before": _entry(old.get(name)), "after": _entry(new.get(name))}
            )
    return {"counts": dict(counts), "rows": rows, "cut_off": max(len(old), len(new)) >= MAX_LEDGER}


def _change(old: manifest_pb2.LedgerEntry | None, new: manifest_pb2.LedgerEntry | None) -> str:
    if old is None or new is None:
        return "new" if old is None else "gone"
    if old.attempt != new.attempt:
        return "began again"
    if old.state != new.state:
        return _state(new)
    return "went on" if new.recorded_calls > old.recorded_calls else "unchanged"


def _entry(entry: manifest_pb2.LedgerEntry | None) -> Any:
    if entry is None:
        return None
    return {"state": _state(entry), "attempt": entry.attempt, "calls": entry.recorded_calls, "reason": entry.reason}


def _state(entry: manifest_pb2.LedgerEntry) -> str:
    return {member.value: member.name.lower() for member in RolloutState}.get(entry.state, "")
