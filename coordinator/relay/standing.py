"""A relay's standing announcement: one stream to the coordinator for everybody behind it.

The rule: nobody is welcomed here whom the coordinator has not taken, and whoever is here lost its registration when this
stream is lost. What happens behind the relay within a moment is told together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.relay_registration import MAX_NEWS
from coordinator.wire.access import Access
from coordinator.wire.auth import Metadata, Tokens
from coordinator.wire.errors import Reason, Refused, SafepointError, refuse
from coordinator.wire.record import Record
from coordinator.wire.rpc import problem_from_detail
from coordinator.wire.staying import Staying

GATHER_S: Final = 0.005
MAX_NEWS_BYTES: Final = 256 << 10  # of shims that have come; less than the coordinator takes
COORDINATOR_WITHIN_S: Final = 4.0  # a shim waits so long for a relay that has just begun
VERDICT_WITHIN_S: Final = 5.0

Key = tuple[str, str]


class Standing(Staying):
    """`hello` announces the relay."""

    def __init__(
        self,
        hello: pb.RelayHello,
        target: str,
        job_id: str,
        tokens: Tokens | None,
        dial: Callable[[Record], aio.Channel],
    ) -> None:
        super().__init__("relay", Access.RELAY, target, job_id, tokens, dial=dial)
        self._hello = hello
        self.when_begun: Callable[[float], None] = lambda interval_s: None
        self._joined: list[pb.Hello] = []
        self._left: list[pb.ShimLeft] = []
        self._ends: list[pb.ReportEndRequest] = []
        self._telling: asyncio.TimerHandle | None = None
        self._verdicts: dict[Key, asyncio.Future[None]] = {}  # of those that have none yet
        self._behind: dict[Key, asyncio.Future[None]] = {}  # set when their registrations end from the other side

    # ---- for the door -----------------------------------------------------------------------------------------------

    async def admit(self, hello: pb.Hello) -> asyncio.Future[None]:
        """Have the coordinator take a shim. What is returned is set when it is no longer taken.

        Raises what the coordinator refuses it with, and UNAVAILABLE when it cannot be asked.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COORDINATOR_WITHIN_S):
                await self.welcomed.wait()
        except TimeoutError:
            why = f": {self.trouble.problem.message}" if self.trouble is not None else "."
            raise refuse(Reason.UNAVAILABLE, f"The relay {self._hello.relay_id} has no coordinator{why}") from None
        key = (hello.capabilities.participant_id, hello.incarnation_id)
        verdict = self._verdicts[key] = loop.create_future()
        self._joined.append(hello)
        self._tell_soon()
        try:
            async with asyncio.timeout(VERDICT_WITHIN_S):
                await verdict
        except TimeoutError:
            raise refuse(
                Reason.UNAVAILABLE, f"The coordinator does not answer the relay {self._hello.relay_id}."
            ) from None
        finally:
            if self._verdicts.get(key) is verdict:
                del self._verdicts[key]
        ended = self._behind[key] = loop.create_future()
        return ended

    def leave(self, participant_id: str, incarnation_id: str, why: str, goodbye: str) -> None:
        """A shim's stream has ended."""
        key = (participant_id, incarnation_id)
        self._behind.pop(key, None)
        # Goings are told before comings: one that was not told yet would come after its own going, and stay for ever.
        self._joined = [
            hello for hello in self._joined if (hello.capabilities.participant_id, hello.incarnation_id) != key
        ]
        self._left.append(
            pb.ShimLeft(participant_id=participant_id, incarnation_id=incarnation_id, why=why, goodbye=goodbye)
        )
        self._tell_soon()

    def report(self, end: pb.ReportEndRequest) -> None:
        """How a shim has ended. Raises UNAVAILABLE when there is nobody to tell."""
        if not self.welcomed.is_set():
            raise refuse(Reason.UNAVAILABLE, f"The relay {self._hello.relay_id} has no coordinator.")
        self._ends.append(end)
        self._tell_soon()

    def _tell_soon(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(GATHER_S, self._tell)

    def _tell(self) -> None:
        self._telling = None
        joined, left, ends = self._joined, self._left, self._ends
        self._joined, self._left, self._ends = [], [], []
        # Who is gone first: a successor of the same name comes after it.
        for start in range(0, max(len(left), len(ends)), MAX_NEWS):
            some = slice(start, start + MAX_NEWS)
            self.send(pb.RegisterRelayRequest(news=pb.RelayNews(left=left[some], ends=ends[some])))
        news, size = pb.RelayNews(), 0
        for hello in joined:
            if news.joined and (len(news.joined) == MAX_NEWS or size + hello.ByteSize() > MAX_NEWS_BYTES):
                self.send(pb.RegisterRelayRequest(news=news))
                news, size = pb.RelayNews(), 0
            news.joined.append(hello)
            size += hello.ByteSize()
        if news.joined:
            self.send(pb.RegisterRelayRequest(news=news))

    # ---- the stream -------------------------------------------------------------------------------------------------

    async def first(self) -> tuple[pb.RegisterRelayRequest, Metadata]:
        """RelayHello."""
        return pb.RegisterRelayRequest(hello=self._hello), ()

    def opened(self, stub: Any, requests: AsyncIterator[Any], timeout: float, metadata: Metadata) -> Any:
        """RegisterRelay."""
        return stub.RegisterRelay(requests, timeout=timeout, metadata=metadata)

    def request(self, **message: Any) -> pb.RegisterRelayRequest:
        """A RegisterRelayRequest."""
        return pb.RegisterRelayRequest(**message)

    def begun(self, welcome: pb.Welcome) -> None:
        """How often the coordinator wants to hear of us is how often we want to hear of shims."""
        self.when_begun(welcome.heartbeat_interval.ToMicroseconds() / 1e6)

    def heard(self, event: pb.RegisterRelayEvent) -> None:
        """Verdicts."""
        for verdict in event.verdicts.verdicts:
            key = (verdict.participant_id, verdict.incarnation_id)
            waiting, behind = self._verdicts.get(key), self._behind.get(key)
            if verdict.HasField("refused"):
                refused = Refused(problem_from_detail(verdict.refused))
                for future in (waiting, behind):
                    _settle(future, refused)
            else:
                _settle(waiting, None)

    def ended(self) -> None:
        """Everybody behind has lost its registration with ours."""
        self._joined, self._left, self._ends = [], [], []
        lost = refuse(Reason.UNAVAILABLE, f"The relay {self._hello.relay_id} has lost its coordinator.")
        for future in [*self._verdicts.values(), *self._behind.values()]:
            _settle(future, lost)
        self._verdicts, self._behind = {}, {}


def _settle(future: asyncio.Future[None] | None, error: SafepointError | None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # whoever waits gets it all the same; one that is not waited for must not be complained of
