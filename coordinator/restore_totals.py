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
from coordinator.protocol.operation import Operation
from coordinator.reporting import snapshot_info
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import SafepointError
from coordinator.wire.ids import SnapshotId
from coordinator.wire.places import Locator, actor_of
from coordinator.wire.terms import RolloutState

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
            drive.reporter.warn(f"The totals are those of the snapshot, {len(diverged)} rollouts restart: {error}")
    if any(placement.from_actor != placement.to_actor for placement in drive.operation.placements):
        try:
            count, first = await asyncio.to_thread(_known_by_old_actor, store, drive.operation)
        except SafepointError:
            count, first = 0, ""  # it was read before anybody was paused; what it would tell is a hint
        if count:
            drive.reporter.warn(
                f"{count} rollouts that are in another actor now are known by Gym's indices, which name their old one (such as "
                f"{first}): their rows have other ids where they are now, and begin again from their input. A _ng_rollout_id in "
                "each row is the same in every actor."
            )
    return done


def _known_by_old_actor(store: SnapshotStore, operation: Operation) -> tuple[int, str]:
    """Rollouts that have moved and whose ids name the agent that they had: how many, and the first."""
    where, actors = Locator(operation.placements), {placement.from_actor for placement in operation.placements}
    count, first = 0, ""
    for raw in store.ledger(operation.snapshot_id):
        line = ledger_lines.decode(raw, operation.snapshot_id)
        moved = where.now_at(line.rollout_id, line.participant_id) != actor_of(line.participant_id, actors)
        if moved and line.rollout_id.endswith(f"@{line.participant_id}"):
            count, first = count + 1, first or line.rollout_id
    return count, first


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
