"""Keeps a shim announced at the coordinator, for ever.

The rule: a coordinator may die, move and come back as often as it likes; the shim finds it again, says the same thing,
and never ends because of it. The address is looked up at each try, the stream counts as dead after three silent
intervals (TCP alone would not notice a stopped peer), and tries are spread by chance, so that thousands of shims don't
dial at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

from grpc import aio
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2_grpc
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire import failpoints
from coordinator.wire.access import Access
from coordinator.wire.auth import Tokens
from coordinator.wire.errors import Problem, Reason, SafepointError, Unanswered
from coordinator.wire.record import looked_up
from coordinator.wire.refusals import introduced
from coordinator.wire.rpc import channel, error_from_rpc
from participant_shims.interruptions import Interruptions
from participant_shims.messages import seconds

log = logging.getLogger(__name__)

FIRST_WAIT_S: Final = 0.2
MAX_WAIT_S: Final = 5.0
WELCOME_WITHIN_S: Final = 10.0
MAX_CAUSE_BYTES: Final = 500
GOODBYE_WITHIN_S: Final = 0.3  # a server that is told to end has a second in Gym, and its shim no more
MISSED_BEATS: Final = 3
# Every call has a deadline. When this one is over the shim registers again, as after a lost connection.
STREAM_DEADLINE_S: Final = 30 * 86_400.0
# gRPC's words, now and then, for a refusal that comes before our Hello has left. The next try tells the reason.
_OVERTAKEN: Final = "Internal error from Core"


class AnotherJob(SafepointError):
    """The coordinator belongs to another job: this shim must leave."""


class Registration:
    """One shim's standing announcement. `describe` may raise UNAVAILABLE: the server is not up yet, and it is tried again."""

    def __init__(
        self,
        target: str,
        describe: Callable[[], Awaitable[capabilities_pb2.Capabilities]],
        incarnation_id: str,
        address: str,
        job_id: str,
        tokens: Tokens | None = None,
        wait_s: tuple[float, float] = (FIRST_WAIT_S, MAX_WAIT_S),
        dial: Callable[[str], aio.Channel] = channel,
        process: pb.ShimProcess | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._dial = dial
        self._tell = tell  # whoever looks for the server and does not know our log: why we are refused
        self._process = process
        self._outgoing: asyncio.Queue[pb.RegisterRequest | None] | None = None  # of the present stream; None ends it
        self._over = asyncio.Event()  # set while there is no stream
        self._target = target
        self._describe = describe
        self._incarnation_id = incarnation_id
        self._address = address
        self._job_id = job_id
        self._tokens = tokens
        self._first_wait_s, self._max_wait_s = wait_s
        self._said = ""
        self.trouble: SafepointError | None = None  # why it is not registered; None while it is
        self.coordinator_epoch = 0  # of the coordinator that welcomed last; zero before the first
        self.welcomed = asyncio.Event()  # set while registered
        self.interruptions = Interruptions()
        self._welcomed_at = 0.0

    async def run(self) -> None:
        """Register and stay registered until cancelled. Raises AnotherJob."""
        wait_s = self._first_wait_s
        while True:
            try:
                await self._once()
                wait_s = self._first_wait_s
            except aio.AioRpcError as error:
                if error.details() != _OVERTAKEN:
                    self._say(error_from_rpc(error))
            except AnotherJob:
                raise
            except SafepointError as error:
                self._say(error)
            if self.welcomed.is_set():
                why = self.trouble.problem.message if self.trouble is not None else ""
                now = asyncio.get_running_loop().time()
                self.interruptions.note(now, self.coordinator_epoch, now - self._welcomed_at, why)
                wait_s = self._first_wait_s
                self.welcomed.clear()
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(wait_s * 2, self._max_wait_s)

    def warning(self) -> str:
        """What is to be mended, as a sentence, when its registration ends again and again; empty else."""
        return self.interruptions.warning(asyncio.get_running_loop().time())

    async def say_goodbye(self, cause: str) -> None:
        """Tell why this shim ends; waits a moment for the coordinator to have heard it. Cancel `run` afterwards."""
        if self._outgoing is None or not self.welcomed.is_set():
            return
        self._outgoing.put_nowait(
            pb.RegisterRequest(goodbye=pb.Goodbye(cause=cause.encode()[:MAX_CAUSE_BYTES].decode(errors="ignore")))
        )
        self._outgoing.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_WITHIN_S):
                await self._over.wait()

    async def _once(self) -> None:
        capabilities = await self._describe()
        hello = pb.Hello(
            capabilities=capabilities, incarnation_id=self._incarnation_id, address=self._address, process=self._process
        )
        outgoing: asyncio.Queue[pb.RegisterRequest | None] = asyncio.Queue()
        outgoing.put_nowait(pb.RegisterRequest(hello=hello))

        async def requests() -> AsyncIterator[pb.RegisterRequest]:
            while (request := await outgoing.get()) is not None:
                yield request

        record = await looked_up(self._target)
        async with self._dial(record.address) as link:
            failpoints.reach("shim.before_register")
            stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
            metadata = (
                *(self._tokens.metadata(Access.SHIM) if self._tokens else ()), *record.metadata(),
                *introduced(capabilities.participant_id),
            )  # fmt: skip
            self._outgoing = outgoing
            self._over.clear()
            call = stub.Register(requests(), timeout=STREAM_DEADLINE_S, metadata=metadata)
            try:
                first = await self._next(call, WELCOME_WITHIN_S)
                if not first.HasField("welcome"):
                    raise Unanswered(Problem(Reason.PROTOCOL_VIOLATION, "The coordinator did not begin with Welcome."))
                await self._stay(call, first.welcome, outgoing)
            finally:
                self._outgoing = None
                self._over.set()
                outgoing.put_nowait(None)  # gRPC's task that takes requests would wait for the next one for ever
                call.cancel()  # leaving the loop alone would leave the stream open

    async def _stay(self, call: Any, welcome: pb.Welcome, outgoing: asyncio.Queue[pb.RegisterRequest | None]) -> None:
        if welcome.job_id != self._job_id:
            raise AnotherJob(
                Problem(
                    Reason.INVALID_ARGUMENT,
                    f"The coordinator at {self._target} is of job {welcome.job_id!r}, this shim of {self._job_id!r}.",
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
        interval_s = min(60.0, max(0.05, seconds(welcome.heartbeat_interval) or 1.0))
        self.coordinator_epoch = welcome.coordinator_epoch
        failpoints.reach("shim.after_register")
        self.welcomed.set()
        self._welcomed_at = asyncio.get_running_loop().time()
        self._said, self.trouble = "", None
        log.info("registered at %s, epoch %d", self._target, welcome.coordinator_epoch)
        beating = asyncio.create_task(_beat(outgoing, interval_s))
        try:
            while True:
                await self._next(call, interval_s * MISSED_BEATS)
        finally:
            beating.cancel()

    @staticmethod
    async def _next(call: Any, within_s: float) -> pb.RegisterEvent:
        # Not `timeout`: after a sleep of our own it would end a wait whose answer has come meanwhile.
        reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
        try:
            await asyncio.wait({reading}, timeout=within_s)
        finally:
            if not reading.done():
                reading.cancel()
        if not reading.done():
            raise Unanswered(Problem(Reason.UNREACHABLE, f"The coordinator has been silent for {within_s:.1f} s."))
        event: Any = reading.result()
        if event is aio.EOF:
            code = await call.code()
            raise Unanswered(Problem(Reason.UNREACHABLE, f"The coordinator ended the registration ({code.name})."))
        return cast(pb.RegisterEvent, event)

    def _say(self, error: SafepointError) -> None:
        self.trouble = error
        # A coordinator that is away for an hour is one line in the log, not thousands.
        if error.problem.message != self._said:
            self._said = error.problem.message
            log.warning("not registered, trying on: %s", error)
            # One that is away, or a server that is not up yet, is no news to those who start them.
            if not isinstance(error, Unanswered) and error.reason not in (Reason.UNREACHABLE, Reason.UNAVAILABLE):
                self._tell(f"its shim is not registered, and tries on: {error}")


async def _beat(outgoing: asyncio.Queue[pb.RegisterRequest | None], interval_s: float) -> None:
    sequence = 0
    while True:
        await asyncio.sleep(interval_s)
        sequence += 1
        if outgoing.empty():  # a stalled connection must not pile up beats
            outgoing.put_nowait(pb.RegisterRequest(heartbeat=pb.Heartbeat(sequence=sequence)))
