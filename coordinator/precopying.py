"""Before a save closes anybody: everybody who can is asked to write what is not going to change.

The rule: it may take time and may fail, and the save that follows is right all the same; nobody is paused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from coordinator.participants import Participants
from coordinator.protocol.topology import Participant
from coordinator.wire.errors import SafepointError
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import PRECOPY, Role

log = logging.getLogger(__name__)

LONGEST_S: Final = 300.0
SHARE: Final = 0.4  # of the time that is left: the save itself needs some too
LEAST_S: Final = 0.5
LOOK_EVERY_S: Final = 0.5


class Ahead:
    """One round of asking. `is_here` says whether a participant is still the one that it was: who has gone silent is not
    waited for, the phases that follow name it."""

    def __init__(
        self, participants: Participants, everybody: Iterable[Participant], is_here: Callable[[Participant], bool]
    ) -> None:
        self._participants, self._is_here = participants, is_here
        whom = [p for p in everybody if PRECOPY in p.features and p.role is not Role.AUXILIARY_MODEL]
        self._left = {p.participant_id: p for p in whom}

    def waiting(self) -> tuple[ParticipantId, ...]:
        """Who has not answered yet."""
        return tuple(self._left)

    async def ask(self, left_s: float) -> None:
        """Ask all of them at once, and wait until they are done; `left_s`: seconds until the save must have ended."""
        within_s = min(LONGEST_S, left_s * SHARE)
        if within_s > LEAST_S:
            await asyncio.gather(*(self._ask(who, within_s) for who in list(self._left.values())))
        self._left.clear()

    async def _ask(self, who: Participant, within_s: float) -> None:
        asking = asyncio.ensure_future(self._participants.precopy(who, within_s))
        try:
            while not (await asyncio.wait({asking}, timeout=LOOK_EVERY_S))[0]:
                if not self._is_here(who):
                    log.warning("%s writes nothing ahead of the save: it is not here any more", who.participant_id)
                    return
            await asking
        except SafepointError as error:
            log.warning("%s writes nothing ahead of the save: %s", who.participant_id, error)
        finally:
            asking.cancel()
            del self._left[who.participant_id]
