"""How the async client calls: one channel in one event loop, made again when the coordinator has moved.

The rule: a channel belongs to the loop it was first used on, and a process that has used one must not fork.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1.coordinator_service_pb2_grpc import CoordinatorStub
from tenacity import AsyncRetrying

from coordinator.client_calls import tell
from coordinator.client_outcome import Outcome
from coordinator.client_patience import Budgets, Patience, retry_arguments
from coordinator.client_results import ProgressCallback
from coordinator.wire.access import Access
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.finding import Finder
from coordinator.wire.links import Security
from coordinator.wire.rpc import error_from_rpc
from coordinator.wire.trace import outgoing

if TYPE_CHECKING:
    from safepoint.v1.coordinator_service_pb2_grpc import CoordinatorAsyncStub

log = logging.getLogger("safepoint.client")

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_T = TypeVar("_T")


class AsyncCalls:
    """One coordinator as seen from one event loop."""

    def __init__(
        self,
        target: str,
        security: Security | None,
        budgets: Budgets,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budgets = budgets
        self.sleep = sleep
        self._clock = clock
        self._target = target
        self._finder = Finder(target)
        self._security = security or Security()
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._channel: aio.Channel | None = None
        self._former: list[aio.Channel] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._made_for: tuple[str, int] = ("", 0)  # address and certificate of the channel
        self._pid = os.getpid()
        self._closed = False

    def _sent(self) -> tuple[tuple[str, str], ...]:
        """What goes along with a call: who we are, and the trace that it is part of."""
        return (*self._metadata, *outgoing())

    async def close(self) -> None:
        """Close the channel; in a forked child do nothing."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        channels = [*self._former, *filter(None, [self._channel])]
        self._former.clear()
        self._channel = None
        for closing in channels:
            await closing.close()

    def patience(
        self, method: str, about: str, timeout_s: float | None, unreachable_s: float | None = None
    ) -> Patience:
        """The time of one call; `unreachable_s` as of Patience."""
        return Patience(method, about, timeout_s, self.budgets, self._clock, self._target, unreachable_s)

    async def ask(
        self,
        method: str,
        about: str,
        pick: Callable[[CoordinatorAsyncStub], aio.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        patience = self.patience(method, about, timeout_s)

        async def once() -> _Response:
            try:
                return await pick(await self._stub(patience))(
                    request, timeout=patience.next_try_s(), metadata=self._sent()
                )
            except aio.AioRpcError as error:
                raise error_from_rpc(error) from None

        return await self._repeated(patience, once)

    async def operate(
        self,
        method: str,
        pick: Callable[[CoordinatorAsyncStub], aio.UnaryStreamMultiCallable[_Request, pb.OperationEvent]],
        request: _Request,
        outcome: Outcome,
        timeout_s: float | None,
        on_progress: ProgressCallback | None,
        unreachable_s: float | None = None,
    ) -> None:
        about = f"{method} {outcome.snapshot_id or outcome.operation_id}"
        patience = self.patience(method, about, timeout_s, unreachable_s)
        try:
            async with aclosing(self.stream(method, patience, pick, request, outcome.operation_id)) as events:
                async for event in events:
                    if outcome.take(event) and on_progress is not None:
                        tell(on_progress, event)
        except SafepointError as error:
            raise outcome.also_failed(error, method) from error.__cause__

    async def stream(
        self,
        method: str,
        patience: Patience,
        pick: Callable[[CoordinatorAsyncStub], aio.UnaryStreamMultiCallable[_Request, _Response]],
        request: _Request,
        operation_id: str = "",
    ) -> AsyncGenerator[_Response, None]:
        """Every message of the call, begun again after a lost connection. Leaving the iterator cancels the call."""

        async def begin() -> tuple[aio.UnaryStreamCall[_Request, _Response], _Response | None]:
            try:
                call = pick(await self._stub(patience))(request, timeout=patience.next_try_s(), metadata=self._sent())
                return call, await anext(aiter(call), None)
            except aio.AioRpcError as error:
                raise error_from_rpc(error) from None

        while True:
            call, first = await self._repeated(patience, begin, operation_id)
            try:
                if first is None:
                    return
                patience.heard()
                yield first
                async for message in call:
                    patience.heard()
                    yield message
                return
            except aio.AioRpcError as error:
                failure = error_from_rpc(error)
                if not patience.again(failure):
                    raise patience.last_word(failure, operation_id) from None
                log.info("%s: the connection was lost; the call is repeated: %s", method, failure)
            finally:
                call.cancel()
            await self.sleep(patience.pause_s())

    async def _repeated(self, patience: Patience, once: Callable[[], Awaitable[_T]], operation_id: str = "") -> _T:
        retry, wait, stop = retry_arguments(patience)
        try:
            return await AsyncRetrying(retry=retry, wait=wait, stop=stop, sleep=self.sleep, reraise=True)(once)
        except SafepointError as error:
            raise self._security.told(patience.last_word(error, operation_id)) from None

    async def _stub(self, patience: Patience) -> CoordinatorAsyncStub:
        if os.getpid() != self._pid:
            raise refuse(
                Reason.INVALID_ARGUMENT,
                f"This AsyncClient was made in process {self._pid} and is used in its fork {os.getpid()}.",
                next_step="Make one in the process that uses it; where workers are forked use the sync Client.",
            )
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if loop is not self._loop:
            raise refuse(
                Reason.INVALID_ARGUMENT,
                "This AsyncClient is used in two event loops.",
                next_step="Make one AsyncClient for each loop.",
            )
        if self._closed:
            raise _closed()
        record = patience.record = await self._finder.found()
        if self._closed:
            raise _closed()
        self._metadata = (*self._security.metadata(), *record.metadata())
        made_for = (record.address, self._security.version)
        if self._channel is None or made_for != self._made_for:
            if self._channel is not None:
                self._former.append(self._channel)  # calls may still be running on it
            self._channel = self._security.channel(record.address, Access.COORDINATOR)
            self._made_for = made_for
        return CoordinatorStub(self._channel)


def _closed() -> SafepointError:
    return refuse(Reason.INVALID_ARGUMENT, "This AsyncClient is closed.", next_step="Make another one.")
