"""The coordinator's own status: what runs, who is there, how they are.

The rule: it answers within a second whatever else is stuck, or within the time that the caller has given it beyond that.
Participants are asked many at once, whoever blocks first, and each has a part of that second; whoever does not answer, or
of a large fleet was not asked in that time, is listed without a status and with the reason. Disk is never touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from safepoint.v1 import coordinator_service_pb2

from coordinator import convert, kept_out, outcomes
from coordinator.operations import Operations
from coordinator.protocol.operation import Outcome
from coordinator.protocol.topology import Participant, gone_from
from coordinator.wire.errors import SafepointError
from coordinator.wire.ids import ParticipantId

ANSWER_WITHIN_S: Final = 1.0
ASKED_WITHIN: Final = 0.7  # of that; the rest is for the answer itself
ASKED_AT_ONCE: Final = 128  # thousands at once would all be answered late
MAX_ROLLOUTS: Final = 1000
MAX_STACKS: Final = 20  # of one participant
MAX_STACKS_OF: Final = 20  # participants


async def coordinator_status(
    operations: Operations, ask: bool, max_rollouts: int, budget_s: float, stacks_of: Collection[str] = ()
) -> coordinator_service_pb2.GetCoordinatorStatusResponse:
    """The status now. `ask`: also every participant's own, of at most `max_rollouts` rollouts each.

    `stacks_of`: of these participants what the tasks of their rollouts wait for, as well.
    """
    everybody = operations.discovery.registry.participants()
    timeout_s = min(budget_s, ANSWER_WITHIN_S) * ASKED_WITHIN
    until = operations.clock() + timeout_s + max(0.0, budget_s - ANSWER_WITHIN_S)
    few = asyncio.Semaphore(ASKED_AT_ONCE)

    async def one(who: Participant) -> coordinator_service_pb2.ParticipantHealth:
        stacks = MAX_STACKS if who.participant_id in stacks_of else 0
        async with few:
            left_s = min(timeout_s, until - operations.clock())
            if left_s > 0:
                return await _health(operations, who, max_rollouts, stacks, left_s)
        return coordinator_service_pb2.ParticipantHealth(
            info=operations.discovery.info(who), reachable=True,
            problem=f"Not asked: of {len(everybody):,} participants not all can be in the time that there was. Give more (`--timeout`).",
        )  # fmt: skip

    if ask:
        running = operation_status(operations)
        blocking = set(running.pending_participants if running is not None else ())
        first = sorted(everybody, key=lambda who: who.participant_id not in blocking)
        asked = dict(zip(first, await asyncio.gather(*map(one, first)), strict=True))
        healths = [asked[who] for who in everybody]
    else:
        healths = [
            coordinator_service_pb2.ParticipantHealth(info=operations.discovery.info(p), reachable=True)
            for p in everybody
        ]
    at_the_door = operations.kept_out()
    refused, missing = kept_out.parted(operations.discovery.registry.missing(), at_the_door)
    return coordinator_service_pb2.GetCoordinatorStatusResponse(
        coordinator_epoch=operations.journal.epoch,
        job_id=operations.settings.job_id,
        operation=operation_status(operations),
        participants=healths,
        latest_snapshot_id=operations.latest_snapshot_id,
        snapshot_root=operations.settings.root,
        kept_out=map(kept_out.finding, at_the_door),
        missing=[*refused, *map(convert.finding, gone_from(missing))],
        root_mark=operations.root_mark,
        wall_time=_now(),
        upload=operations.uploader.status() if operations.uploader is not None else None,
    )


def _now() -> Timestamp:
    """What the clock of this machine says, for people."""
    at = Timestamp()
    at.GetCurrentTime()
    return at


def operation_status(operations: Operations) -> coordinator_service_pb2.OperationStatus | None:
    """The operation that runs, or else the last one: of those who had not confirmed its end without whom their lease has
    freed since, and without who is here and has heard."""
    if operations.active is not None:
        return outcomes.running_status(operations.active, operations.clock(), operations.store.root)
    ended = operations.past.last()
    if ended is None:
        return None
    status = ended.status()
    if ended.outcome is not Outcome.FAILED_PAUSED:
        freed = ended.open_by is not None and operations.clock() >= ended.open_by
        here, told = operations.discovery.registry.get, operations.settling.waiting()
        status.unconfirmed[:] = [
            name for name in ended.unconfirmed if not freed and (name in told or here(ParticipantId(name)) is None)
        ]
    return status


async def _health(
    operations: Operations, who: Participant, max_rollouts: int, max_stacks: int, timeout_s: float
) -> coordinator_service_pb2.ParticipantHealth:
    health = coordinator_service_pb2.ParticipantHealth(info=operations.discovery.info(who))
    try:
        rollouts = min(max_rollouts, MAX_ROLLOUTS)
        status, stacks = await operations.participants.status(who, rollouts, timeout_s, max_stacks)
    except SafepointError as error:
        health.problem = str(error.problem.message)
    else:
        health.reachable = True
        health.status.CopyFrom(status)
        health.stacks.extend(stacks)
    return health
