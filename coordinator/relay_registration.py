"""The RegisterRelay stream: one for all shims of a node, which live as long as it does.

The rule: to the registry a shim behind a relay is as any other; who comes, goes and is refused is decided where it always
is. Only the heartbeat is shared: a relay that is silent is silent for everybody behind it, and its end is theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.protocol.topology import Participant
from coordinator.registration import MAX_CAUSE, Registration, first_of
from coordinator.registry import Registry, Relay, Session
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import IncarnationId, ParticipantId, is_wire_id
from coordinator.wire.rpc import detail_from_problem

log = logging.getLogger(__name__)

MAX_NEWS: Final = 512  # entries of each list of one RelayNews
MAX_ADDRESS: Final = 512
MAX_NONCE: Final = 128
MAX_BEHIND: Final = 4096  # shims of one relay


class RelayRegistration:
    """Serves RegisterRelay streams; `registration` says how often and how they are welcomed."""

    def __init__(self, registry: Registry, registration: Registration) -> None:
        self._registry = registry
        self._registration = registration

    async def serve(self, requests: AsyncIterator[pb.RegisterRelayRequest]) -> AsyncIterator[pb.RegisterRelayEvent]:
        """One stream, from RelayHello to its end. Raises MALFORMED_ID, INVALID_ARGUMENT, and UNREACHABLE after a silence."""
        relay = self._relay(await first_of(requests))
        log.info("%s registered", relay)
        behind = _Behind(self._registry, relay, self._registration.newcomer)
        outgoing: asyncio.Queue[pb.RegisterRelayEvent | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read(behind, requests, outgoing)),
            asyncio.create_task(self._beat(relay, outgoing)),
        ]
        try:
            yield pb.RegisterRelayEvent(welcome=self._registration.welcome(self._registration.heartbeat_s))
            while (event := await outgoing.get()) is not None:
                yield event
            if not behind.over:
                behind.over = "it fell silent"
                raise refuse(
                    Reason.UNREACHABLE,
                    f"Nothing was heard of {relay} for three heartbeats.",
                    next_step="Register again.",
                )
        finally:
            for task in tasks:
                task.cancel()
            behind.end(self._registration.slept(self._registration.heartbeat_s))

    def _relay(self, hello: pb.RelayHello) -> Relay:
        for name, value in (("relay_id", hello.relay_id), ("incarnation_id", hello.incarnation_id)):
            if not is_wire_id(value):
                raise refuse(Reason.MALFORMED_ID, f"{value[:60]!r} is no {name}.")
        if not hello.address or len(hello.address) > MAX_ADDRESS or len(hello.nonce) > MAX_NONCE:
            raise refuse(Reason.INVALID_ARGUMENT, f"The relay {hello.relay_id} names no address that can be used.")
        return Relay(
            hello.relay_id,
            hello.incarnation_id,
            hello.address,
            convert.shim_process(hello.process) if hello.HasField("process") else None,
            hello.nonce,
            self._registry.clock(),
            self._registry.silence_s,
        )

    async def _read(
        self,
        behind: _Behind,
        requests: AsyncIterator[pb.RegisterRelayRequest],
        outgoing: asyncio.Queue[pb.RegisterRelayEvent | None],
    ) -> None:
        try:
            async for request in requests:
                self._registry.beat(behind.relay)
                match request.WhichOneof("message"):
                    case "news":
                        verdicts = behind.news(request.news)
                        if verdicts:
                            outgoing.put_nowait(pb.RegisterRelayEvent(verdicts=pb.RelayVerdicts(verdicts=verdicts)))
                    case "goodbye":
                        behind.over = f"it has ended: {request.goodbye.cause[:MAX_CAUSE]}".rstrip(".")
                        return
                    case _:
                        pass
        finally:
            behind.over = behind.over or "its registration ended"
            outgoing.put_nowait(None)

    async def _beat(self, relay: Relay, outgoing: asyncio.Queue[pb.RegisterRelayEvent | None]) -> None:
        sequence, interval_s = 0, self._registration.heartbeat_s
        while (slept_at := self._registry.clock()) - relay.heard_at <= relay.silence_s:
            await asyncio.sleep(interval_s)
            if self._registry.clock() - slept_at > 2 * interval_s:
                self._registry.beat(relay)  # it was us who slept: its heartbeats wait in our socket
            sequence += 1
            if outgoing.empty():
                outgoing.put_nowait(pb.RegisterRelayEvent(heartbeat=pb.Heartbeat(sequence=sequence)))
        outgoing.put_nowait(None)


class _Behind:
    """Everybody behind one relay."""

    def __init__(self, registry: Registry, relay: Relay, newcomer: Callable[[pb.Hello], Participant]) -> None:
        self._registry = registry
        self._newcomer = newcomer
        self.relay = relay
        self.over = ""  # why the stream has ended
        self._sessions: dict[tuple[str, str], Session] = {}

    def news(self, news: pb.RelayNews) -> list[pb.RelayVerdict]:
        """What has happened, in the order in which it must be read: who is gone makes room for who has come."""
        for end in news.ends[:MAX_NEWS]:
            if is_wire_id(end.participant_id) and is_wire_id(end.incarnation_id):
                self._registry.explain(
                    ParticipantId(end.participant_id), IncarnationId(end.incarnation_id), convert.process_end(end)
                )
        for left in news.left[:MAX_NEWS]:
            session = self._sessions.pop((left.participant_id, left.incarnation_id), None)
            if session is not None:
                self._registry.leave(
                    session, left.why[:MAX_CAUSE] or "its registration ended", left.goodbye[:MAX_CAUSE]
                )
        return [self._join(hello) for hello in news.joined]

    def _join(self, hello: pb.Hello) -> pb.RelayVerdict:
        name = hello.capabilities.participant_id
        verdict = pb.RelayVerdict(participant_id=name, incarnation_id=hello.incarnation_id)
        try:
            if len(self._sessions) >= MAX_BEHIND:
                raise refuse(Reason.LIMIT_EXCEEDED, f"{self.relay} has {MAX_BEHIND} shims already.")
            self._sessions[name, hello.incarnation_id] = self._registry.register(
                self._newcomer(hello), relay=self.relay
            )
        except SafepointError as error:
            verdict.refused.CopyFrom(detail_from_problem(error.problem))
        return verdict

    def end(self, we_slept: str) -> None:
        """The stream has ended, and so have all registrations that came through it. `we_slept` as of `Registry.leave`."""
        for session in self._sessions.values():
            why = f"the relay is gone, {self.over or 'its registration ended'}"
            self._registry.leave(session, why, we_slept=we_slept)
        self._sessions.clear()
