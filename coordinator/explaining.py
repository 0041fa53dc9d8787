"""What has become of operations: of those in memory, and of those that only the history below the root remembers.

The rule: what is in memory is told at once and wins; the disk is asked in a thread and for a bounded time, and when it does
not answer the answer is shorter, not missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from heapq import merge
from itertools import islice
from math import inf
from typing import Any, Final, TypeVar

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.history import History
from coordinator.history_record import Record
from coordinator.operations import Operations
from coordinator.outcomes import Ended, running_status
from coordinator.protocol.operation import Outcome
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import OperationId

log = logging.getLogger(__name__)
T = TypeVar("T")

READ_WITHIN_S: Final = 2.0
DEFAULT_LISTED: Final = 20
MAX_LISTED: Final = 1000


async def explain(operations: Operations, operation_id: str) -> pb.ExplainResponse:
    """The operation of that id, or the last one that did not finish. Raises UNKNOWN_OPERATION for an id that nobody knows."""
    active = operations.active
    failing = active is not None and active.transaction.primary is not None
    if active is not None and (operation_id == active.operation.operation_id or (failing and not operation_id)):
        status = running_status(active, operations.clock(), operations.store.root)
        return pb.ExplainResponse(operation=status, events=active.reporter.history)
    history = History(operations.settings.root)
    found: Ended | Record | None = operations.past.remembered(operation_id)
    if found is None:
        found = await _read(lambda: _looked_up(history, operations, operation_id), None)
    if found is None:
        found = operations.past.last(operation_id, failed_only=not operation_id)
    if found is None:
        if operation_id:
            raise refuse(Reason.UNKNOWN_OPERATION, f"No operation {operation_id} is known here.")
        return pb.ExplainResponse()
    events = found.history if isinstance(found, Ended) else found.kept_events()
    answer = pb.ExplainResponse(operation=found.status(), events=events)
    if isinstance(found, Ended) and not answer.operation.HasField("begin_time"):  # an earlier coordinator began it
        told = await _read(lambda: history.find(answer.operation.operation_id), None)
        if told is not None:
            answer.operation.CopyFrom(_as_it_is(operations, told.status()))
    if answer.operation.HasField("begin_time"):
        name, began_ms = answer.operation.operation_id, answer.operation.begin_time.ToMilliseconds()
        later = await _read(lambda: list(history.later(name, began_ms)), list[Record]())
        answer.later.extend(_as_it_is(operations, one.status()) for one in later)
    return answer


async def list_operations(operations: Operations, size: int) -> pb.ListOperationsResponse:
    """The newest `size` operations (0: 20), newest first."""
    size = min(size or DEFAULT_LISTED, MAX_LISTED)
    history = History(operations.settings.root)
    found = [record.summary() for record in await _read(lambda: history.list(size), list[Record]())]
    known = {one.operation.operation_id for one in found}
    unwritten = [ended.summary() for ended in operations.past.in_memory() if ended.operation_id not in known]
    if operations.active is not None and operations.active.operation.operation_id not in known:
        unwritten.insert(
            0,
            pb.OperationSummary(operation=running_status(operations.active, operations.clock(), operations.store.root)),
        )
    remembered = {ended.operation_id: ended for ended in operations.past.in_memory()}
    for one in found:
        ended = remembered.get(OperationId(one.operation.operation_id))
        if ended is not None and not one.HasField("snapshot"):  # its last lines are not written yet, or never were
            one.CopyFrom(pb.OperationSummary(operation=one.operation, **_results(ended.summary())))
        one.operation.CopyFrom(_as_it_is(operations, one.operation))
    # Each is newest first. What a full disk kept from being written is older than what was written once there was room.
    listed = list(islice(merge(unwritten, found, key=_began_ms, reverse=True), size))
    if operations.uploader is not None:
        for one in listed:
            saved = one.HasField("snapshot") and one.operation.kind == pb.OPERATION_KIND_SAVE
            if saved and operations.uploader.knows(one.snapshot.snapshot_id):
                one.snapshot.upload.CopyFrom(operations.uploader.message(one.snapshot.snapshot_id))
    return pb.ListOperationsResponse(operations=listed)


def _began_ms(one: pb.OperationSummary) -> float:
    """One that does not say is as new as can be: it was gone on with by this coordinator."""
    return one.operation.begin_time.ToMilliseconds() if one.operation.HasField("begin_time") else inf


def _results(told: pb.OperationSummary) -> dict[str, Any]:
    return {name: getattr(told, name) for name in ("snapshot", "pause") if told.HasField(name)}


def _as_it_is(operations: Operations, status: pb.OperationStatus) -> pb.OperationStatus:
    """What the history says, corrected by what is known: its last lines may not be written yet."""
    active = operations.active
    if active is not None and active.operation.operation_id == status.operation_id:
        return running_status(active, operations.clock(), operations.store.root)
    ended = operations.past.remembered(status.operation_id) or operations.past.of(status.operation_id)
    if ended is None:
        return status
    known = ended.status()
    if not known.HasField("begin_time"):
        known.begin_time.CopyFrom(status.begin_time)
    return known


def _looked_up(history: History, operations: Operations, operation_id: str) -> Record | None:
    if operation_id:
        return history.find(operation_id)
    active = operations.active
    running = active.operation.operation_id if active is not None else ""

    def passed_over(name: str) -> bool:
        """What the journal knows to have succeeded is not read: of a root in a store each is a request."""
        ended = operations.past.of(name)
        return name == running or (ended is not None and ended.outcome is Outcome.SUCCEEDED)

    for found in history.newest(known=passed_over):
        if operations.past.of(found.operation_id) is not None or found.outcome != "succeeded":
            return history.find(found.operation_id)
    return None


async def _read(read: Callable[[], T], otherwise: T) -> T:
    try:
        async with asyncio.timeout(READ_WITHIN_S):
            return await asyncio.to_thread(read)
    except (TimeoutError, SafepointError) as error:
        log.warning("the history cannot be read: %s", error or f"no answer within {READ_WITHIN_S:.0f} s")
        return otherwise
