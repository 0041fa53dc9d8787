"""The Register stream: a shim lives as long as its stream, and no longer than three silent heartbeats.

The rule: an end and a silence are the same to everybody else: the participant is gone, at once. A stalled coordinator
does not take its own sleep for the silence of others. Who joins a large fleet is heard less often, so that heartbeats cost
about the same whatever the size; an end is noticed at once all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.protocol.topology import Participant
from coordinator.registry import Registry, Session
from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.guard import caller

log = logging.getLogger(__name__)

HELLO_WITHIN_S: Final = 5.0
BEATS_PER_S: Final = 100  # of all shims together, about
MAX_CAUSE: Final = 500  # characters of a goodbye


class Registration:
    """Serves Register streams."""

    def __init__(self, registry: Registry, epoch: int, job_id: str, heartbeat_s: float) -> None:
        self._registry = registry
        self._epoch = epoch
        self._job_id = job_id
        self._heartbeat_s = heartbeat_s

    async def serve(self, requests: AsyncIterator[pb.RegisterRequest]) -> AsyncIterator[pb.RegisterEvent]:
        """One stream, from Hello to its end. Raises what the registry refuses, and UNREACHABLE after a silence."""
        newcomer = await self._hello(requests)
        interval_s = max(self._heartbeat_s, len(self._registry) / BEATS_PER_S)
        session = self._registry.register(newcomer, self._registry.silence_s * interval_s / self._heartbeat_s)
        who = session.participant
        log.info("%s registered from %s", who.participant_id, who.address)
        said: list[str] = []
        reading = asyncio.create_task(self._read(session, requests, said))
        why = "its registration ended"
        try:
            failpoints.reach("registration.before_welcome", who.participant_id)
            yield pb.RegisterEvent(
                welcome=pb.Welcome(
                    coordinator_epoch=self._epoch,
                    heartbeat_interval=convert.duration(interval_s),
                    job_id=self._job_id,
                )
            )
            failpoints.reach("registration.after_welcome", who.participant_id)
            sequence = 0
            while session.alive:
                await asyncio.wait({reading}, timeout=interval_s)
                if reading.done():
                    return
                sequence += 1
                yield pb.RegisterEvent(heartbeat=pb.Heartbeat(sequence=sequence))
            why = "it fell silent, or has registered again"
            raise _lost(who)
        finally:
            reading.cancel()
            self._registry.leave(session, why, *said)

    async def reap(self) -> None:
        """Lose whoever is silent; runs for ever, beside the server."""
        loop = asyncio.get_running_loop()
        while True:
            slept_at = loop.time()
            await asyncio.sleep(self._heartbeat_s)
            if loop.time() - slept_at > 2 * self._heartbeat_s:
                self._registry.forgive()  # it was us who slept: heartbeats wait in our sockets
            else:
                self._registry.reap()

    async def _hello(self, requests: AsyncIterator[pb.RegisterRequest]) -> Participant:
        try:
            # Not `wait_for`: until Python 3.12 it forgets that it was cancelled when its answer comes in the same moment, and
            # the stream of somebody who is gone would hold the name against the successor.
            async with asyncio.timeout(HELLO_WITHIN_S):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise refuse(Reason.INVALID_ARGUMENT, "The stream began without Hello.") from None
        if first.WhichOneof("message") != "hello":
            raise refuse(Reason.INVALID_ARGUMENT, "The first message must be Hello.")
        hello = first.hello
        participant_id, who = hello.capabilities.participant_id, caller()
        if not who.may_register(participant_id):
            raise refuse(
                Reason.PERMISSION_DENIED, f"{who.name} may not speak for {participant_id[:128]!r}.",
                next_step="Give the shim a certificate of its own name, or one without an instance.",
            )  # fmt: skip
        return convert.participant(
            hello.capabilities,
            hello.incarnation_id,
            hello.address,
            hello.process if hello.HasField("process") else None,
        )

    async def _read(self, session: Session, requests: AsyncIterator[pb.RegisterRequest], said: list[str]) -> None:
        async for request in requests:
            self._registry.beat(session)
            if request.HasField("goodbye"):
                said[:] = [request.goodbye.cause[:MAX_CAUSE]]
                return


def _lost(who: Participant) -> SafepointError:
    return refuse(
        Reason.UNREACHABLE,
        f"Nothing was heard of {who.participant_id} for three heartbeats.",
        next_step="Register again.",
        participant_id=who.participant_id,
    )
