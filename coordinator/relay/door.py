"""What a relay serves to shims: the part of the Coordinator service that they call.

The rule: a shim cannot tell a relay from a coordinator. It is welcomed under the coordinator's epoch once the coordinator
has taken it, is refused with the coordinator's own words, and its stream ends when the relay's does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator import convert
from coordinator.protocol.topology import Participant
from coordinator.registration import Registration, check_end
from coordinator.registry import Registry, Session
from coordinator.relay.standing import Standing
from coordinator.wire.errors import ENDED, Problem, Reason, refuse
from coordinator.wire.rpc import time_budget
from coordinator.wire.staying import MISSED_BEATS

Context = aio.ServicerContext[Any, Any]


class RelayedRegistration(Registration):
    """Register streams of shims behind a relay."""

    who = "the relay"

    def __init__(self, registry: Registry, standing: Standing, job_id: str) -> None:
        super().__init__(registry, 0, job_id, registry.silence_s / MISSED_BEATS)
        self._standing = standing
        self._behind: dict[str, Session] = {}  # by incarnation
        standing.when_begun = self._begun
        registry.follow(self._lost, lambda who: None)

    def newcomer(self, hello: pb.Hello) -> Participant:
        """Who it is. Whether it is of this job, and not of a later coordinator, is the coordinator's to say."""
        return convert.hello(hello)

    async def _admit(self, session: Session, hello: pb.Hello) -> asyncio.Future[None]:
        self._behind[hello.incarnation_id] = session
        asked = asyncio.ensure_future(self._standing.admit(hello))
        try:
            while not asked.done():
                await asyncio.wait({asked}, timeout=self.heartbeat_s)
                self._registry.beat(session)  # a shim that was not welcomed yet has nothing to say
        finally:
            asked.cancel()
        return asked.result()

    def _begun(self, interval_s: float) -> None:
        self.heartbeat_s = interval_s
        self._registry.silence_s = interval_s * MISSED_BEATS

    def welcome(self, interval_s: float) -> pb.Welcome:
        """As the coordinator has welcomed the relay."""
        return pb.Welcome(
            coordinator_epoch=self._standing.coordinator_epoch,
            heartbeat_interval=convert.duration(interval_s),
            job_id=self._job_id,
        )

    def _lost(self, who: Participant, problem: Problem) -> None:
        session = self._behind.pop(who.incarnation_id, None)
        if session is not None:  # the coordinator says who it was and behind which relay; what is left is why
            goodbye = problem.metadata.get(ENDED, "")
            self._standing.leave(who.participant_id, who.incarnation_id, session.why, goodbye)


if TYPE_CHECKING:  # which would have all of the methods written down
    Servicer = object
else:
    Servicer = coordinator_service_pb2_grpc.CoordinatorServicer


class Door(Servicer):
    """Register and ReportEnd. All else of the service is the coordinator's own, and is refused as not served here."""

    def __init__(self, registration: RelayedRegistration, standing: Standing) -> None:
        self._registration = registration
        self._standing = standing

    async def Register(
        self, request_iterator: AsyncIterator[pb.RegisterRequest], context: Context
    ) -> AsyncIterator[pb.RegisterEvent]:
        async for event in self._registration.serve(request_iterator):
            yield event

    async def ReportEnd(self, request: pb.ReportEndRequest, context: Context) -> pb.ReportEndResponse:
        time_budget(context)
        check_end(request)
        self._standing.report(request)
        return pb.ReportEndResponse()


def _elsewhere(door: Door, request: object, context: Context) -> None:
    raise refuse(
        Reason.UNSUPPORTED, "This is a relay, which serves shims.",
        next_step="Call the coordinator: its address is below its root, and in the relay's own record.",
    )  # fmt: skip


for _method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name:
    if _method not in vars(Door):
        setattr(Door, _method, _elsewhere)
