"""Telling a shim that has come, or did not confirm, how the operation that it holds something of has ended.

The rule: nobody is asked for a cut before it has heard. A shim holds something of an operation that is over (or that
nobody here knows) when its reply of then was lost, when the coordinator was gone, or when it replaced a shim that had
loaded a snapshot. It is told until it answers or is gone; an operation that begins meanwhile waits a little for that.
So it does for those whom the operation before it still tells itself, since they had not said in time that they are open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

from coordinator.driver import Drive
from coordinator.outcomes import Ended
from coordinator.preflight import DESCRIBE_TIMEOUT_S, Discovery
from coordinator.protocol import events as core
from coordinator.protocol.operation import Outcome
from coordinator.protocol.topology import Participant
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.ids import OperationId, ParticipantId
from coordinator.wire.terms import Phase, Role

log = logging.getLogger(__name__)

_OPEN_CALL_S: Final = 2.0
_AGAIN_S: Final = (0.2, 5.0)  # doubles from the first to the second
_WAIT_S: Final = 3.0


class Settling:
    """Who is being told. `active`: the operation that runs; `ended`: how one ended, if its id is used up.

    `lingering`: operations that have ended and tell on by themselves.
    """

    def __init__(
        self,
        discovery: Discovery,
        active: Callable[[], Drive | None],
        ended: Callable[[str], Ended | None],
        lingering: Collection[Drive],
    ) -> None:
        self._discovery = discovery
        self._active = active
        self._ended = ended
        self._lingering = lingering
        self._tasks: dict[ParticipantId, asyncio.Task[None]] = {}

    def begin(self, who: Participant) -> None:
        """Find out what it holds, and tell it. Takes the place of what was begun for another one of that name."""
        if who.role is Role.AUXILIARY_MODEL:
            return  # never paused, and nothing is loaded into it
        name = who.participant_id
        before = self._tasks.get(name)
        if before is not None:
            before.cancel()
        task = self._tasks[name] = asyncio.create_task(self._until_told(who), name=f"settle {name}")
        task.add_done_callback(lambda done: self._tasks.pop(name) if self._tasks.get(name) is done else None)

    def waiting(self) -> list[ParticipantId]:
        """Who has not heard yet."""
        return sorted({*self._tasks, *(name for drive in self._lingering for name in self._told_by(drive))})

    async def wait(self, longest_s: float) -> None:
        """Until everybody has heard, at most so long: who has not refuses what it may not do yet."""
        telling = {*self._tasks.values(), *(d.task for d in self._lingering if d.task and self._told_by(d))}
        if telling:
            await asyncio.wait(telling, timeout=max(0.0, min(longest_s, _WAIT_S)))

    def _told_by(self, drive: Drive) -> list[ParticipantId]:
        """Whom an operation that has ended tells still; nobody waits for those that are gone."""
        if not drive.unconfirmed:
            return []
        members = {each.participant_id: each for each in drive.transaction.topology.participants}
        return [name for name in drive.unconfirmed if self._is_here(members[name])]

    async def stop(self) -> None:
        """Tell nobody anything more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_told(self, who: Participant) -> None:
        gap, most = _AGAIN_S
        while self._is_here(who):
            try:
                if await self._tell(who):
                    return
            except SafepointError as error:
                log.info("%s has not heard yet how its last operation ended: %s", who.participant_id, error)
                if error.reason is Reason.STALE_EPOCH:
                    return  # a newer coordinator tells it
                await asyncio.sleep(gap)
                gap = min(2 * gap, most)

    async def _tell(self, who: Participant) -> bool:
        """Whether it holds nothing of an operation any more. Raises what it or the network does."""
        participants = self._discovery.participants
        described = await participants.describe(who.address, DESCRIBE_TIMEOUT_S)
        operation_id = OperationId(described.operation_id)
        if not operation_id:
            return True
        active = self._active()
        if active is not None and active.operation.operation_id == operation_id:
            await active.done.wait()  # it tells everybody itself; whom it does not reach is asked again
            return False
        ended = self._ended(operation_id)
        resumed = ended is not None and ended.outcome is Outcome.SUCCEEDED
        phase = Phase.RESUME if resumed else Phase.ABORT
        log.warning("%s holds %s, which does not run here: telling it to open", who.participant_id, operation_id)
        call = core.Call(
            0, who.participant_id, phase, _OPEN_CALL_S, operation_id,
            core.ResumeArguments() if resumed else core.AbortArguments("The operation does not run any more."),
        )  # fmt: skip
        await participants.perform(who, call, lambda _: None, lambda: None)
        return True

    def _is_here(self, who: Participant) -> bool:
        here = self._discovery.registry.get(who.participant_id)
        return here is not None and (here.incarnation_id, here.address) == (who.incarnation_id, who.address)
