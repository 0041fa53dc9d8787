"""The Register stream: a shim lives as long as its stream, and no longer than three silent heartbeats.

The rule: an end and a silence are the same to everybody else: the participant is gone, at once. A stalled coordinator
does not take its own sleep for the silence of others. Who joins a large fleet is heard less often, so that heartbeats cost
about the same whatever the size; an end is noticed at once all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.protocol.topology import Participant
from coordinator.registry import Registry, Session
from coordinator.wire import failpoints
from coordinator.wire.errors import JOB, Reason, SafepointError, refuse
from coordinator.wire.guard import caller
from coordinator.wire.ids import is_wire_id

log = logging.getLogger(__name__)

HELLO_WITHIN_S: Final = 5.0
BEATS_PER_S: Final = 100  # of all shims together, about
READ_PER_S: Final = 50  # messages of one stream; those of who sends more wait in its own socket
MAX_CAUSE: Final = 500  # characters of a goodbye


class Awake:
    """For how long this process has not run: when it goes on it finds that everybody has left it, and all of them are well.

    `clock` in seconds, monotonic. `tick` is called every `interval_s` while the process runs, which may change.
    """

    def __init__(self, clock: Callable[[], float], interval_s: Callable[[], float]) -> None:
        self._clock, self._interval_s = clock, interval_s
        self._ticked_at: float | None = None
        self._slept_s, self._woke_at = 0.0, 0.0

    def tick(self) -> bool:
        """Whether it has slept since the last one."""
        slept_s, self._ticked_at = self._since_tick_s(), self._clock()
        if slept_s <= 2 * self._interval_s():
            return False
        self._slept_s, self._woke_at = slept_s, self._ticked_at
        return True

    def slept_s(self, heard_every_s: float) -> float:
        """The sleep that it has just woken from, when who is heard so often has had to take it for gone; zero else."""
        slept_s = self._since_tick_s()
        if slept_s <= 2 * self._interval_s():  # it has ticked since it woke
            slept_s = self._slept_s if self._clock() - self._woke_at <= 2 * self._interval_s() else 0.0
        return slept_s if slept_s > 2 * heard_every_s else 0.0

    def _since_tick_s(self) -> float:
        return self._clock() - self._ticked_at if self._ticked_at is not None else 0.0


class Registration:
    """Serves Register streams. A relay's keeps nobody whom its coordinator does not have: `_admit`."""

    who: ClassVar[str] = "the coordinator"

    def __init__(self, registry: Registry, epoch: int, job_id: str, heartbeat_s: float) -> None:
        self._registry = registry
        self._epoch = epoch
        self._job_id = job_id
        self.heartbeat_s = heartbeat_s
        self.awake = Awake(registry.clock, lambda: self.heartbeat_s)

    async def _admit(self, session: Session, hello: pb.Hello) -> asyncio.Future[None] | None:
        """Whether a shim that the registry has taken may stay: raises what it is refused with. What is returned ends the
        stream, with what it is set to."""
        return None

    def newcomer(self, hello: pb.Hello) -> Participant:
        """Who it is. Raises INVALID_ARGUMENT for one of another job, or that is nobody, and STALE_EPOCH for one that a later
        coordinator has welcomed: it would refuse all that we ask."""
        name = hello.capabilities.participant_id[:128]
        if hello.job_id not in ("", self._job_id):
            raise refuse(
                Reason.INVALID_ARGUMENT,
                f"{name!r} is of job {hello.job_id[:128]!r}, and this coordinator of job {self._job_id!r}.",
                next_step="Start it with the SAFEPOINT_ROOT or SAFEPOINT_COORDINATOR of its own job, or correct SAFEPOINT_JOB.",
                metadata={JOB: self._job_id},
            )
        if hello.highest_epoch > self._epoch:
            raise refuse(
                Reason.STALE_EPOCH,
                f"{name!r} has served epoch {hello.highest_epoch}, and this coordinator has epoch {self._epoch}: a later one has "
                "been started elsewhere, or the files of <root>/coordinator were removed or replaced.",
                next_step="End this coordinator if it is the older one. If its files are lost: touch "
                f"<root>/coordinator/epoch-{hello.highest_epoch} and start it again, or restart the servers.",
            )
        return convert.hello(hello)

    async def serve(self, requests: AsyncIterator[pb.RegisterRequest]) -> AsyncIterator[pb.RegisterEvent]:
        """One stream, from Hello to its end. Raises what the registry refuses, and UNREACHABLE after a silence."""
        hello = await self._hello(requests)
        newcomer = self.newcomer(hello)
        interval_s = max(self.heartbeat_s, len(self._registry) / BEATS_PER_S)
        session = self._registry.register(newcomer, self._registry.silence_s * interval_s / self.heartbeat_s)
        who = session.participant
        log.info("%s registered from %s", who.participant_id, who.address)
        said: list[str] = []
        reading = asyncio.create_task(self._read(session, requests, said))
        why = "its registration ended"
        try:
            ended = await self._admit(session, hello)
            failpoints.reach("registration.before_welcome", who.participant_id)
            yield pb.RegisterEvent(welcome=self.welcome(interval_s))
            failpoints.reach("registration.after_welcome", who.participant_id)
            waits: set[asyncio.Future[None]] = {reading} if ended is None else {reading, ended}
            sequence = 0
            while session.alive:
                done, _ = await asyncio.wait(waits, timeout=interval_s, return_when=asyncio.FIRST_COMPLETED)
                if reading in done:
                    return
                for over in done:
                    over.result()
                sequence += 1
                yield pb.RegisterEvent(heartbeat=pb.Heartbeat(sequence=sequence))
            why = "it fell silent, or has registered again"
            raise _lost(who)
        finally:
            reading.cancel()
            self._registry.leave(session, why, *said, we_slept=self.slept(interval_s))

    def slept(self, heard_every_s: float) -> str:
        """`we_slept` of `Registry.leave`, for who is heard so often."""
        slept_s = self.awake.slept_s(heard_every_s)
        return f"{self.who} did not run, for {slept_s:.1f} s" if slept_s else ""

    def welcome(self, interval_s: float) -> pb.Welcome:
        """What accepts a newcomer."""
        return pb.Welcome(
            coordinator_epoch=self._epoch, heartbeat_interval=convert.duration(interval_s), job_id=self._job_id
        )

    async def reap(self) -> None:
        """Lose whoever is silent; runs for ever, beside the server."""
        self.awake.tick()
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if self.awake.tick():
                self._registry.forgive()  # it was us who slept: heartbeats wait in our sockets
            else:
                self._registry.reap()

    async def _hello(self, requests: AsyncIterator[pb.RegisterRequest]) -> pb.Hello:
        hello: pb.Hello = await first_of(requests)
        participant_id, who = hello.capabilities.participant_id, caller()
        if not who.may_register(participant_id):
            raise refuse(
                Reason.PERMISSION_DENIED, f"{who.name} may not speak for {participant_id[:128]!r}.",
                next_step="Give the shim a certificate of its own name, or one without an instance.",
            )  # fmt: skip
        return hello

    async def _read(self, session: Session, requests: AsyncIterator[pb.RegisterRequest], said: list[str]) -> None:
        loop = asyncio.get_running_loop()
        since, count = loop.time(), 0
        async for request in requests:
            self._registry.beat(session)
            count += 1
            if loop.time() - since >= 1.0:
                since, count = loop.time(), 0
            elif count >= READ_PER_S and not request.HasField("goodbye"):
                await asyncio.sleep(1.0)
            if request.HasField("goodbye"):
                said[:] = [request.goodbye.cause[:MAX_CAUSE]]
                return


async def first_of(requests: AsyncIterator[Any]) -> Any:
    """The hello that a stream begins with. Raises INVALID_ARGUMENT when it does not."""
    try:
        # Not `wait_for`: until Python 3.12 it forgets that it was cancelled when its answer comes in the same moment, and
        # the stream of somebody who is gone would hold the name against the successor.
        async with asyncio.timeout(HELLO_WITHIN_S):
            first = await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise refuse(Reason.INVALID_ARGUMENT, "The stream began without Hello.") from None
    if first.WhichOneof("message") != "hello":
        raise refuse(Reason.INVALID_ARGUMENT, "The first message must be Hello.")
    return first.hello


def check_end(request: pb.ReportEndRequest) -> None:
    """Raise MALFORMED_ID, PERMISSION_DENIED for what its sender may not report."""
    for name, value in (("participant_id", request.participant_id), ("incarnation_id", request.incarnation_id)):
        if not is_wire_id(value):
            raise refuse(Reason.MALFORMED_ID, f"{value[:60]!r} is no {name}.")
    if not caller().may_register(request.participant_id):
        raise refuse(Reason.PERMISSION_DENIED, f"{caller().name} may not speak for {request.participant_id}.")


def _lost(who: Participant) -> SafepointError:
    return refuse(
        Reason.UNREACHABLE,
        f"Nothing was heard of {who.participant_id} for three heartbeats.",
        next_step="Register again.",
        participant_id=who.participant_id,
    )
