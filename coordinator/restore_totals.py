"""What a restore has come to, in numbers: the snapshot's totals, corrected by what the servers found when they loaded it.

The rule: a rollout counts once. One that the snapshot had in flight and that restarts all the same counts as excluded, with
its reason; what had finished, or was excluded anyway, stays what it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from safepoint.v1 import coordinator_service_pb2, manifest_pb2

from coordinator import convert, ledger_lines
from coordinator.driver import Drive
from coordinator.reporting import snapshot_info
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import SafepointError
from coordinator.wire.ids import SnapshotId
from coordinator.wire.terms import RolloutState, counted

MAX_DIVERGED: Final = 20  # named; all are counted


async def restore_done(store: SnapshotStore, drive: Drive) -> coordinator_service_pb2.RestoreDone:
    """The event that ends a restore. When the ledger cannot be read, the totals are those of the snapshot, with a warning."""
    done = coordinator_service_pb2.RestoreDone()
    if drive.manifest is not None:
        done.snapshot.CopyFrom(snapshot_info(drive.manifest))
        done.totals.CopyFrom(drive.manifest.totals)
    done.placements.extend(map(convert.placement, drive.operation.placements))
    diverged: dict[str, manifest_pb2.LedgerEntry] = {}
    for reply in drive.replies.values():
        done.sessions += reply.sessions
        diverged |= {entry.rollout_id: entry for entry in reply.diverged}
    if diverged and drive.manifest is not None:
        try:
            await asyncio.to_thread(_move_to_excluded, store, drive.operation.snapshot_id, diverged, done)
        except SafepointError as error:
            drive.reporter.warn(
                f"The totals are those of the snapshot, {counted(len(diverged), 'rollout', 'restarts', 'restart')}: {error}"
            )
    return done


def _move_to_excluded(
    store: SnapshotStore,
    snapshot_id: SnapshotId,
    diverged: Mapping[str, manifest_pb2.LedgerEntry],
    done: coordinator_service_pb2.RestoreDone,
) -> None:
    for raw in store.ledger(snapshot_id):
        line = ledger_lines.decode(raw, snapshot_id)
        if line.rollout_id not in diverged or line.state not in (RolloutState.PARKED, RolloutState.PENDING):
            continue
        field = line.state.name.lower()
        setattr(done.totals, field, getattr(done.totals, field) - 1)
        done.totals.excluded += 1
        done.diverged_count += 1
        if len(done.diverged) < MAX_DIVERGED:
            done.diverged.append(diverged[line.rollout_id])
