"""How the sync client calls: one channel, made again when the coordinator has moved, repeated with patience.

No event loop: trainers fork (data loaders do), and a process that has used grpc.aio crashes in the child. The rule: a
forked child never touches its parent's channel.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import grpc
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1.coordinator_service_pb2_grpc import CoordinatorStub
from tenacity import Retrying

from coordinator.client_outcome import Outcome
from coordinator.client_patience import Budgets, Patience, retry_arguments
from coordinator.client_results import ProgressCallback
from coordinator.wire.access import Access
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.finding import Finder
from coordinator.wire.links import Security
from coordinator.wire.rpc import error_from_rpc
from coordinator.wire.trace import outgoing

log = logging.getLogger("safepoint.client")

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_T = TypeVar("_T")
_Item = TypeVar("_Item", covariant=True)


class _Stream(Protocol[_Item]):
    """What grpc returns for a streaming call."""

    def __iter__(self) -> Iterator[_Item]: ...
    def __next__(self) -> _Item: ...
    def cancel(self) -> object: ...


class Calls:
    """One coordinator as seen from one process. Threads may share it."""

    def __init__(
        self,
        target: str,
        security: Security | None,
        budgets: Budgets,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budgets = budgets
        self.sleep = sleep
        self._clock = clock
        self._target = target
        self._finder = Finder(target)
        self._security = security or Security()
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._former: list[grpc.Channel] = []
        self._made_for: tuple[str, int] = ("", 0)  # address and certificate of the channel
        self._pid = os.getpid()
        self._closed = False

    def _sent(self) -> tuple[tuple[str, str], ...]:
        """What goes along with a call: who we are, and the trace that it is part of."""
        return (*self._metadata, *outgoing())

    def close(self) -> None:
        """Close the channel; in a forked child do nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            for channel in (*self._former, *filter(None, [self._channel])):
                channel.close()
            self._former.clear()
            self._channel = None

    def patience(
        self, method: str, about: str, timeout_s: float | None, unreachable_s: float | None = None
    ) -> Patience:
        """The time of one call; `unreachable_s` as of Patience."""
        return Patience(method, about, timeout_s, self.budgets, self._clock, self._target, unreachable_s)

    def ask(
        self,
        method: str,
        about: str,
        pick: Callable[[CoordinatorStub], grpc.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        timeout_s: float | None,
    ) -> _Response:
        patience = self.patience(method, about, timeout_s)

        def once() -> _Response:
            try:
                return pick(self._stub(patience))(request, timeout=patience.next_try_s(), metadata=self._sent())
            except grpc.RpcError as error:
                raise error_from_rpc(error) from None

        return self._repeated(patience, once)

    def operate(
        self,
        method: str,
        pick: Callable[[CoordinatorStub], grpc.UnaryStreamMultiCallable[_Request, pb.OperationEvent]],
        request: _Request,
        outcome: Outcome,
        timeout_s: float | None,
        on_progress: ProgressCallback | None,
        unreachable_s: float | None = None,
    ) -> None:
        about = f"{method} {outcome.snapshot_id or outcome.operation_id}"
        patience = self.patience(method, about, timeout_s, unreachable_s)
        try:
            for event in self.stream(method, patience, pick, request, outcome.operation_id):
                if outcome.take(event) and on_progress is not None:
                    tell(on_progress, event)
        except SafepointError as error:
            raise outcome.also_failed(error, method) from error.__cause__

    def stream(
        self,
        method: str,
        patience: Patience,
        pick: Callable[[CoordinatorStub], grpc.UnaryStreamMultiCallable[_Request, _Response]],
        request: _Request,
        operation_id: str = "",
    ) -> Iterator[_Response]:
        """Every message of the call, begun again after a lost connection. Leaving the iterator cancels the call."""

        def begin() -> tuple[_Stream[_Response], _Response | None]:
            try:
                call = pick(self._stub(patience))(request, timeout=patience.next_try_s(), metadata=self._sent())
                return call, next(call, None)
            except grpc.RpcError as error:
                raise error_from_rpc(error) from None

        while True:
            call, first = self._repeated(patience, begin, operation_id)
            try:
                if first is None:
                    return
                patience.heard()
                yield first
                for message in call:
                    patience.heard()
                    yield message
                return
            except grpc.RpcError as error:
                failure = error_from_rpc(error)
                if not patience.again(failure):
                    raise patience.last_word(failure, operation_id) from None
                log.info("%s: the connection was lost; the call is repeated: %s", method, failure)
            finally:
                call.cancel()
            self.sleep(patience.pause_s())

    def _repeated(self, patience: Patience, once: Callable[[], _T], operation_id: str = "") -> _T:
        retry, wait, stop = retry_arguments(patience)
        try:
            return Retrying(retry=retry, wait=wait, stop=stop, sleep=self.sleep, reraise=True)(once)
        except SafepointError as error:
            raise self._security.told(patience.last_word(error, operation_id)) from None

    def _stub(self, patience: Patience) -> CoordinatorStub:
        if os.getpid() != self._pid:
            raise refuse(
                Reason.INVALID_ARGUMENT,
                f"This Client was made in process {self._pid} and is used in its fork {os.getpid()}.",
                next_step="Make a Client in the process that uses it; start workers with spawn where you can.",
            )
        with self._lock:
            if self._closed:
                raise refuse(Reason.INVALID_ARGUMENT, "This Client is closed.", next_step="Make another one.")
            record = patience.record = self._finder.find()
            self._metadata = (*self._security.metadata(), *record.metadata())
            made_for = (record.address, self._security.version)
            if self._channel is None or made_for != self._made_for:
                if self._channel is not None:
                    self._former.append(self._channel)  # other threads may still be calling on it
                self._channel = self._security.sync_channel(record.address, Access.COORDINATOR)
                self._made_for = made_for
            return CoordinatorStub(self._channel)


def tell(on_progress: ProgressCallback, event: pb.OperationEvent) -> None:
    """Call back; what the callback raises is logged, since it must not void a save that others are paused for."""
    try:
        on_progress(event)
    except Exception:
        log.exception("on_progress failed; the operation goes on")
