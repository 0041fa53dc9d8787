"""Keeps a process announced at the coordinator, for ever: a shim, or a relay with all who are behind it.

The rule: a coordinator may die, move and come back as often as it likes; whoever stays finds it again, says the same
thing, and never ends because of it. The address is looked up at each try, the stream counts as dead after three silent
intervals (TCP alone would not notice a stopped peer), and tries are spread by chance, so that thousands don't dial at
once. Where the record is a relay's, and the relay stays away, the coordinator behind it is dialled in turn with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.wire.access import Access
from coordinator.wire.auth import Metadata, Tokens
from coordinator.wire.clipping import clipped
from coordinator.wire.errors import JOB, Problem, Reason, SafepointError, Unanswered
from coordinator.wire.record import Record, looked_up
from coordinator.wire.remarks import SILENT
from coordinator.wire.rpc import channel, error_from_rpc

log = logging.getLogger(__name__)

FIRST_WAIT_S: Final = 0.2
MAX_WAIT_S: Final = 5.0
WELCOME_WITHIN_S: Final = 10.0
MAX_CAUSE_BYTES: Final = 500
GOODBYE_WITHIN_S: Final = 0.3  # a server that is told to end has a second in Gym, and its shim no more
MISSED_BEATS: Final = 3
BEYOND_AFTER_S: Final = 5.0  # a relay that was killed is started again by its host within seconds
# Every call has a deadline. When this one is over the process registers again, as after a lost connection.
STREAM_DEADLINE_S: Final = 30 * 86_400.0
# gRPC's words, now and then, for a refusal that comes before our Hello has left. The next try tells the reason.
_OVERTAKEN: Final = "Internal error from Core"


class AnotherJob(SafepointError):
    """The coordinator belongs to another job: this process must leave."""


class Staying:
    """One standing announcement. `who`: what this process is, such as "shim"; `access`: what it has at the coordinator."""

    def __init__(
        self,
        who: str,
        access: Access,
        target: str,
        job_id: str,
        tokens: Tokens | None = None,
        wait_s: tuple[float, float] = (FIRST_WAIT_S, MAX_WAIT_S),
        dial: Callable[[Record], aio.Channel] = lambda record: channel(record.address),
    ) -> None:
        self._who, self._access = who, access
        self._dial = dial
        self._target = target
        self._job_id = job_id
        self._tokens = tokens
        self._first_wait_s, self._max_wait_s = wait_s
        self._outgoing: asyncio.Queue[Any] | None = None  # of the present stream; None in it ends it
        self._over = asyncio.Event()  # set while there is no stream
        self._away_since: float | None = None  # of the loop's clock: since then nobody has welcomed us
        self._beyond_next = False
        self._said = ""
        self.trouble: SafepointError | None = None  # why it is not registered; None while it is
        self.coordinator_epoch = 0  # of the coordinator that welcomed last; zero before the first
        self.welcomed = asyncio.Event()  # set while registered

    async def first(self) -> tuple[Any, Metadata]:
        """The first message of a stream, and what the call carries. Raises SafepointError when it cannot be said yet."""
        raise NotImplementedError

    def opened(self, stub: Any, requests: AsyncIterator[Any], timeout: float, metadata: Metadata) -> Any:
        """The call."""
        raise NotImplementedError

    def request(self, **message: Any) -> Any:
        """A message of the stream: `heartbeat` or `goodbye`."""
        raise NotImplementedError

    def begun(self, welcome: pb.Welcome) -> None:
        """It is registered."""

    def heard(self, event: Any) -> None:
        """Something that is no heartbeat, or is one, has come."""

    def ended(self) -> None:
        """It is no longer registered; called before the next try."""

    def said(self, error: SafepointError) -> None:
        """Why it is not registered has been logged."""

    async def run(self) -> None:
        """Register and stay registered until cancelled. Raises AnotherJob."""
        wait_s = self._first_wait_s
        while True:
            try:
                await self._once()
                wait_s = self._first_wait_s
            except aio.AioRpcError as error:
                if error.details() != _OVERTAKEN:
                    refusal = error_from_rpc(error)
                    if JOB in refusal.problem.metadata:
                        self.trouble = AnotherJob(refusal.problem)
                        raise self.trouble from error
                    self._say(refusal)
            except AnotherJob as error:
                self.trouble = error
                raise
            except SafepointError as error:
                self._say(error)
            if self.welcomed.is_set():
                wait_s = self._first_wait_s
                self.welcomed.clear()
                self._away_since = None
                self.ended()
            elif self._away_since is None:
                self._away_since = asyncio.get_running_loop().time()
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, self._max_wait_s)

    def send(self, request: Any) -> None:
        """Send a message on the present stream; without one it is dropped."""
        if self._outgoing is not None and self.welcomed.is_set():
            self._outgoing.put_nowait(request)

    async def say_goodbye(self, cause: str) -> None:
        """Tell why this process ends; waits a moment for the coordinator to have heard it. Cancel `run` afterwards."""
        if self._outgoing is None or not self.welcomed.is_set():
            return
        goodbye = pb.Goodbye(cause=clipped(cause, MAX_CAUSE_BYTES))
        self._outgoing.put_nowait(self.request(goodbye=goodbye))
        self._outgoing.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_WITHIN_S):
                await self._over.wait()

    async def _once(self) -> None:
        hello, introduction = await self.first()
        outgoing: asyncio.Queue[Any] = asyncio.Queue()
        outgoing.put_nowait(hello)

        async def requests() -> AsyncIterator[Any]:
            while (request := await outgoing.get()) is not None:
                yield request

        record = await self._where()
        async with self._dial(record) as link:
            stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
            metadata = (
                *(self._tokens.metadata(self._access) if self._tokens else ()), *record.metadata(), *introduction,
            )  # fmt: skip
            self._outgoing = outgoing
            self._over.clear()
            call = self.opened(stub, requests(), STREAM_DEADLINE_S, metadata)
            try:
                event = await self._next(call, WELCOME_WITHIN_S)
                if not event.HasField("welcome"):
                    raise Unanswered(Problem(Reason.PROTOCOL_VIOLATION, "The coordinator did not begin with Welcome."))
                await self._stay(call, event.welcome, outgoing)
            finally:
                self._outgoing = None
                self._over.set()
                outgoing.put_nowait(None)  # gRPC's task that takes requests would wait for the next one for ever
                call.cancel()  # leaving the loop alone would leave the stream open

    async def _where(self) -> Record:
        """Whom to dial now. Raises Unanswered while nobody has written it."""
        record = await looked_up(self._target)
        away_s = asyncio.get_running_loop().time() - self._away_since if self._away_since is not None else 0.0
        if not record.beyond or away_s < BEYOND_AFTER_S:
            return record
        self._beyond_next = not self._beyond_next
        return await looked_up(record.beyond) if self._beyond_next else record

    async def _stay(self, call: Any, welcome: pb.Welcome, outgoing: asyncio.Queue[Any]) -> None:
        if welcome.job_id != self._job_id:
            raise AnotherJob(
                Problem(
                    Reason.INVALID_ARGUMENT,
                    f"The coordinator at {self._target} is of job {welcome.job_id!r}, this {self._who} of {self._job_id!r}.",
                    next_step="Correct SAFEPOINT_JOB or SAFEPOINT_COORDINATOR.",
                )
            )
        if welcome.coordinator_epoch < self.coordinator_epoch:
            # What it asks would be refused; and the newer one needs us to be registered with it.
            raise Unanswered(
                Problem(
                    Reason.STALE_EPOCH,
                    f"The coordinator at {self._target} has epoch {welcome.coordinator_epoch}; epoch "
                    f"{self.coordinator_epoch} has been here. It is an older one, or its root was replaced.",
                    next_step="End the older one; after its root was replaced, restart this server.",
                )
            )
        interval_s = min(60.0, max(0.05, welcome.heartbeat_interval.ToMicroseconds() / 1e6 or 1.0))
        self.coordinator_epoch = welcome.coordinator_epoch
        self.welcomed.set()
        self.begun(welcome)
        self._said, self.trouble = "", None
        log.info("registered at %s, epoch %d", self._target, welcome.coordinator_epoch)
        beating = asyncio.create_task(self._beat(outgoing, interval_s))
        try:
            while True:
                self.heard(await self._next(call, interval_s * MISSED_BEATS))
        finally:
            beating.cancel()

    async def _beat(self, outgoing: asyncio.Queue[Any], interval_s: float) -> None:
        sequence = 0
        while True:
            await asyncio.sleep(interval_s)
            sequence += 1
            if outgoing.empty():  # a stalled connection must not pile up beats
                outgoing.put_nowait(self.request(heartbeat=pb.Heartbeat(sequence=sequence)))

    @staticmethod
    async def _next(call: Any, within_s: float) -> Any:
        # Not `timeout`: after a sleep of our own it would end a wait whose answer has come meanwhile.
        reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({reading}, timeout=within_s)
        finally:
            if not reading.done():
                reading.cancel()
        if not reading.done():
            raise Unanswered(Problem(Reason.UNREACHABLE, f"{SILENT} for {within_s:.1f} s."))
        event: Any = reading.result()
        if event is aio.EOF:
            code = await call.code()
            raise Unanswered(Problem(Reason.UNREACHABLE, f"The coordinator ended the registration ({code.name})."))
        return event

    def _say(self, error: SafepointError) -> None:
        self.trouble = error
        # A coordinator that is away for an hour is one line in the log, not thousands.
        if error.problem.message != self._said:
            self._said = error.problem.message
            log.warning("not registered, trying on: %s", error)
            self.said(error)
