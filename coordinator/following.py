"""Streams of events to those who follow an operation, or all of them.

The rule: the answer never depends on the stream. Events may be dropped for a slow reader; the result comes from the
operation itself, and the last event that tells it is always sent. Leaving a stream ends nothing but the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from safepoint.v1 import coordinator_service_pb2

from coordinator.driver import Drive
from coordinator.feed import Feed
from coordinator.outcomes import Ended
from coordinator.protocol.operation import Outcome
from coordinator.wire.errors import Problem, Reason, Refused
from coordinator.wire.rpc import problem_from_detail

Event = coordinator_service_pb2.OperationEvent
Status = coordinator_service_pb2.GetCoordinatorStatusResponse

# Names of the events that tell the result of each call, in the order in which they are sent.
RESULTS_OF: Final = {
    "Save": ("resumed", "saved"),
    "Restore": ("restored", "resumed"),
    "Prepare": (),
    "Commit": (),
    "Publish": ("saved",),
    "Resume": ("resumed",),
}


async def follow_answer(
    drive: Drive, feed: Feed, call: str, answer: asyncio.Future[None], budget_s: float, *, from_start: bool
) -> AsyncIterator[Event]:
    """The events of an operation until `call` is answered; raises the failure it is answered with.

    `from_start`: what happened before is sent first. Raises UNAVAILABLE when the caller's time is over first: the
    operation goes on, and the same call follows it again.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + budget_s
    last = 0
    with feed.follow(drive.operation.operation_id) as follower:
        for past in list(drive.reporter.history) if from_start else ():
            last = past.sequence
            yield past
        while True:
            while (event := follower.take()) is not None:
                if event.sequence > last:
                    last = event.sequence
                    yield event
            if answer.done():
                break
            left_s = until - loop.time()
            if left_s <= 0:
                raise Refused(_goes_on(drive, call))
            waiting = asyncio.ensure_future(follower.wait())
            try:
                await asyncio.wait({waiting, answer}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
    answer.result()
    for name in RESULTS_OF[call]:
        told: Event | None = getattr(drive.answers, name)
        if told is not None and told.sequence > last:  # told before this caller came, or dropped
            yield told


async def replay(ended: Ended, call: str) -> AsyncIterator[Event]:
    """The recorded outcome of an operation that has ended, to whoever asks again; raises its failure."""
    for event in ended.history:
        yield event
    if ended.outcome is not Outcome.SUCCEEDED:
        failed = ended.failed
        if failed is None:
            raise Refused(Problem(Reason.ABORTED, "It was aborted.", operation_id=ended.operation_id))
        if not ended.history:
            yield ended.results["failed"]
        raise Refused(problem_from_detail(failed.primary))
    if not ended.history:
        for name in RESULTS_OF[call]:
            if name in ended.results:
                yield ended.results[name]


async def watch(
    feed: Feed, operation_id: str, status: Callable[[], Awaitable[Status]], ended: Callable[[], bool]
) -> AsyncIterator[coordinator_service_pb2.WatchEvent]:
    """The status, then every event; the status again after events were dropped. Ends when that one operation has."""
    with feed.follow(operation_id) as follower:
        yield coordinator_service_pb2.WatchEvent(status=await status())
        while True:
            if follower.resync():
                yield coordinator_service_pb2.WatchEvent(status=await status())
            while (event := follower.take()) is not None:
                yield coordinator_service_pb2.WatchEvent(operation_event=event)
            if operation_id and ended():
                return
            try:
                async with asyncio.timeout(1.0):
                    await follower.wait()
            except TimeoutError:
                pass  # look again whether it has ended


def _goes_on(drive: Drive, call: str) -> Problem:
    transaction, operation = drive.transaction, drive.operation
    now = asyncio.get_running_loop().time()
    return Problem(
        Reason.UNAVAILABLE,
        f"{call} {operation.operation_id} goes on. {drive.why_waiting(now)}".strip(),
        f"Call {call} again with the same operation_id to follow it, or Abort.",
        transaction.phase,
        operation_id=operation.operation_id,
        waited_s=drive.elapsed_s,
    )
