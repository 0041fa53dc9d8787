"""A save that the trainer drives: its own state goes into the same cut as the rollouts.

The rule: whatever happens in the body, everybody is told to open again when it is left. While it runs, its last call is
repeated, since a coordinator that hears nothing for a lease takes the trainer for dead and aborts.

    with client.cut("step-40") as cut:          # everybody is paused from here
        torch.save(model.state_dict(), path)
        cut.metadata["weights"] = path          # goes into the snapshot's manifest
    print(cut.result)                           # committed, published, resumed

An exception in the body aborts: no snapshot is made, and the exception goes on. A coordinator that cannot be reached for a
lease is not looked for any longer: everybody has opened by then, and whoever answers later has aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.client_patience import checked_timeout
from coordinator.client_results import PreparedResult, ProgressCallback, ResumeResult, SaveResult, seconds
from coordinator.wire.errors import Reason, Refused, SafepointError, Unanswered

if TYPE_CHECKING:
    from coordinator.client_async import AsyncClient
    from coordinator.client_sync import Client

log = logging.getLogger("safepoint.client")

_UNTOLD_LEASE_S: Final = 9.0  # of a coordinator that is too old to say its lease: shorter than any sensible one
_RENEW_TIMEOUT_S: Final = 5.0
_SETTLE_TIMEOUT_S: Final = 15.0  # of a resume after a publish that was not answered: leases free everybody without it


class CutState:
    """What a cut knows, sync or async. `prepared` is set in the body, `result` after it."""

    def __init__(self, request: pb.SaveRequest, timeout_s: float | None, on_progress: ProgressCallback | None) -> None:
        self.operation_id: str = request.operation_id
        self.snapshot_id: str = request.snapshot_id
        # Goes into the manifest. At most 64 entries of 1 KiB.
        self.metadata: dict[str, str] = {}
        self.prepared: PreparedResult | None = None
        self.result: SaveResult | None = None
        self._options = request.options
        self._timeout_s = checked_timeout(timeout_s)  # here: a cut that is entered aborts when it fails
        self._on_progress = on_progress
        self._committed = False
        self._heard_at = 0.0  # monotonic seconds: when the coordinator last answered

    def _heard(self) -> None:
        self._heard_at = time.monotonic()

    @property
    def _lease_s(self) -> float | None:
        told_s = self.prepared.lease_s if self.prepared is not None else None
        return told_s or seconds(self._options.lease_ttl) or None

    @property
    def _renew_every_s(self) -> float:
        return (self._lease_s or _UNTOLD_LEASE_S) / 3

    @property
    def _look_for_s(self) -> float | None:
        """How long a commit looks for a coordinator that cannot be reached: until the lease is over, and not only once."""
        if self._lease_s is None:
            return None
        return round(max(_RENEW_TIMEOUT_S, self._lease_s - (time.monotonic() - self._heard_at)), 1)

    def _finished(self, published: SaveResult, resumed: ResumeResult) -> SaveResult:
        pause = resumed.pause_s if resumed.pause_s is not None else published.pause_s
        return replace(published, pause_s=pause, unconfirmed=resumed.unconfirmed)


def _abort_timeout_s(error: BaseException | None) -> float | None:
    """Who was not answered has waited already."""
    return _RENEW_TIMEOUT_S if isinstance(error, Unanswered) else None


def _cause(error: BaseException | None) -> str:
    return f"the trainer's own part failed: {type(error).__name__}: {error}" if error else "the trainer gave up"


def _not_published_yet(error: SafepointError) -> bool:
    return isinstance(error, Refused) and error.reason is Reason.WRONG_PHASE


class Cut(CutState):
    """Context manager of the sync client; see the module."""

    def __init__(
        self, client: Client, request: pb.SaveRequest, timeout_s: float | None, on_progress: ProgressCallback | None
    ) -> None:
        super().__init__(request, timeout_s, on_progress)
        self._client = client
        self._left = threading.Event()

    def __enter__(self) -> Cut:
        try:
            self.prepared = self._client.prepare(
                self.snapshot_id,
                self.operation_id,
                self._options,
                timeout=self._timeout_s,
                on_progress=self._on_progress,
            )
        except BaseException as error:
            self._give_up(error)
            raise
        self._heard()
        threading.Thread(target=self._renew, name=f"renew {self.operation_id}", daemon=True).start()
        return self

    def _renew(self) -> None:
        while not self._left.wait(self._renew_every_s):
            try:
                if self._committed:
                    self._client.commit(self.operation_id, timeout=_RENEW_TIMEOUT_S)
                else:
                    self._client.prepare(self.snapshot_id, self.operation_id, self._options, timeout=_RENEW_TIMEOUT_S)
                self._heard()
            except Refused as error:
                if not self._left.is_set():
                    log.warning("the cut of %s is void: %s", self.snapshot_id, error)
                return
            except SafepointError as error:
                log.info("renewing %s: %s", self.operation_id, error)

    def commit(self) -> None:
        """Let everybody export now instead of at the end of the body, e.g. while your own state is written."""
        if not self._committed:
            self._client.commit(
                self.operation_id,
                timeout=self._timeout_s,
                unreachable=self._look_for_s,
                on_progress=self._on_progress,
            )
            self._heard()
            self._committed = True

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left.set()
        if exc_type is not None:
            self._give_up(exc)
            return
        try:
            self.commit()
        except BaseException as error:
            self._give_up(error)
            raise
        try:
            published = self._client.publish(
                self.operation_id, self.metadata, timeout=self._timeout_s, on_progress=self._on_progress
            )
        except BaseException as error:
            self._settle(error)
            raise
        self.result = published
        with _naming_what_is_published(self.snapshot_id):
            resumed = self._client.resume(self.operation_id, on_progress=self._on_progress)
        self.result = self._client.saved(self._finished(published, resumed))

    def _settle(self, error: BaseException) -> None:
        """Publish failed, perhaps after the manifest was written: resume if so, else abort."""
        if not isinstance(error, Refused):
            try:
                self._client.resume(self.operation_id, timeout=_SETTLE_TIMEOUT_S)
            except SafepointError as refusal:
                if not _not_published_yet(refusal):
                    error.add_note(f"Resume failed too: {refusal}")
                    return
            else:
                error.add_note(
                    f"Everybody was told to resume; whether {self.snapshot_id} is published, its listing says."
                )
                return
        self._give_up(error)

    def _give_up(self, error: BaseException | None) -> None:
        try:
            self._client.abort(_cause(error), operation_id=self.operation_id, timeout=_abort_timeout_s(error))
        except SafepointError as failure:
            if error is not None:
                error.add_note(f"The abort was not confirmed, leases free the participants: {failure}")


class AsyncCut(CutState):
    """Context manager of the async client; see the module."""

    def __init__(
        self,
        client: AsyncClient,
        request: pb.SaveRequest,
        timeout_s: float | None,
        on_progress: ProgressCallback | None,
    ) -> None:
        super().__init__(request, timeout_s, on_progress)
        self._client = client
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncCut:
        try:
            self.prepared = await self._client.prepare(
                self.snapshot_id,
                self.operation_id,
                self._options,
                timeout=self._timeout_s,
                on_progress=self._on_progress,
            )
        except BaseException as error:
            await self._give_up(error)
            raise
        self._heard()
        self._renewing = asyncio.create_task(self._renew(), name=f"renew {self.operation_id}")
        return self

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_every_s)
            try:
                if self._committed:
                    await self._client.commit(self.operation_id, timeout=_RENEW_TIMEOUT_S)
                else:
                    await self._client.prepare(
                        self.snapshot_id, self.operation_id, self._options, timeout=_RENEW_TIMEOUT_S
                    )
                self._heard()
            except Refused as error:
                log.warning("the cut of %s is void: %s", self.snapshot_id, error)
                return
            except SafepointError as error:
                log.info("renewing %s: %s", self.operation_id, error)

    async def commit(self) -> None:
        """Let everybody export now instead of at the end of the body, e.g. while your own state is written."""
        if not self._committed:
            await self._client.commit(
                self.operation_id,
                timeout=self._timeout_s,
                unreachable=self._look_for_s,
                on_progress=self._on_progress,
            )
            self._heard()
            self._committed = True

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if exc_type is not None:
            await self._give_up(exc)
            return
        try:
            await self.commit()
        except BaseException as error:
            await self._give_up(error)
            raise
        try:
            published = await self._client.publish(
                self.operation_id, self.metadata, timeout=self._timeout_s, on_progress=self._on_progress
            )
        except BaseException as error:
            await self._settle(error)
            raise
        self.result = published
        with _naming_what_is_published(self.snapshot_id):
            resumed = await self._client.resume(self.operation_id, on_progress=self._on_progress)
        self.result = self._client.saved(self._finished(published, resumed))

    async def _settle(self, error: BaseException) -> None:
        if not isinstance(error, Refused):
            try:
                await self._client.resume(self.operation_id, timeout=_SETTLE_TIMEOUT_S)
            except SafepointError as refusal:
                if not _not_published_yet(refusal):
                    error.add_note(f"Resume failed too: {refusal}")
                    return
            else:
                error.add_note(
                    f"Everybody was told to resume; whether {self.snapshot_id} is published, its listing says."
                )
                return
        await self._give_up(error)

    async def _give_up(self, error: BaseException | None) -> None:
        # A cancellation is delivered once: in a task that is being cancelled this call still goes out.
        try:
            await self._client.abort(_cause(error), operation_id=self.operation_id, timeout=_abort_timeout_s(error))
        except SafepointError as failure:
            if error is not None:
                error.add_note(f"The abort was not confirmed, leases free the participants: {failure}")


@contextlib.contextmanager
def _naming_what_is_published(snapshot_id: str) -> Generator[None, None, None]:
    try:
        yield
    except SafepointError as error:
        error.add_note(f"Snapshot {snapshot_id} is published and durable; only the resume failed.")
        raise
