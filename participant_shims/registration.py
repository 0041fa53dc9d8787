"""A shim's standing announcement at the coordinator, or at the relay of its node, which it cannot tell from one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from grpc import aio
from safepoint.v1 import capabilities_pb2
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire import failpoints
from coordinator.wire.access import Access
from coordinator.wire.auth import Metadata, Tokens
from coordinator.wire.errors import Reason, SafepointError, Unanswered
from coordinator.wire.record import Record
from coordinator.wire.refusals import introduced
from coordinator.wire.rpc import channel
from coordinator.wire.staying import FIRST_WAIT_S, MAX_WAIT_S, Staying
from participant_shims.interruptions import Interruptions


class Registration(Staying):
    """One shim's. `describe` may raise UNAVAILABLE: the server is not up yet, and it is tried again."""

    def __init__(
        self,
        target: str,
        describe: Callable[[], Awaitable[capabilities_pb2.Capabilities]],
        incarnation_id: str,
        address: str,
        job_id: str,
        tokens: Tokens | None = None,
        wait_s: tuple[float, float] = (FIRST_WAIT_S, MAX_WAIT_S),
        dial: Callable[[Record], aio.Channel] = lambda record: channel(record.address),
        process: pb.ShimProcess | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__("shim", Access.SHIM, target, job_id, tokens, wait_s, dial)
        self._tell = tell  # whoever looks for the server and does not know our log: why we are refused
        self._process = process
        self._describe = describe
        self._incarnation_id = incarnation_id
        self._address = address
        self.interruptions = Interruptions()
        self._welcomed_at = 0.0

    def warning(self) -> str:
        """What is to be mended, as a sentence, when its registration ends again and again; empty else."""
        return self.interruptions.warning(asyncio.get_running_loop().time())

    async def first(self) -> tuple[pb.RegisterRequest, Metadata]:
        """Hello."""
        capabilities = await self._describe()
        hello = pb.Hello(
            capabilities=capabilities, incarnation_id=self._incarnation_id, address=self._address, process=self._process,
            job_id=self._job_id, highest_epoch=self.coordinator_epoch,
        )  # fmt: skip
        failpoints.reach("shim.before_register")
        return pb.RegisterRequest(hello=hello), introduced(capabilities.participant_id)

    def opened(self, stub: Any, requests: AsyncIterator[Any], timeout: float, metadata: Metadata) -> Any:
        """Register."""
        return stub.Register(requests, timeout=timeout, metadata=metadata)

    def request(self, **message: Any) -> pb.RegisterRequest:
        """A RegisterRequest."""
        return pb.RegisterRequest(**message)

    def begun(self, welcome: pb.Welcome) -> None:
        """It is registered."""
        failpoints.reach("shim.after_register")
        self._welcomed_at = asyncio.get_running_loop().time()

    def ended(self) -> None:
        """It is registered no more."""
        why = self.trouble.problem.message if self.trouble is not None else ""
        now = asyncio.get_running_loop().time()
        self.interruptions.note(now, self.coordinator_epoch, now - self._welcomed_at, why)

    def said(self, error: SafepointError) -> None:
        """One that is away, or a server that is not up yet, is no news to those who start them."""
        if not isinstance(error, Unanswered) and error.reason not in (Reason.UNREACHABLE, Reason.UNAVAILABLE):
            self._tell(f"its shim is not registered, and tries on: {error}")
