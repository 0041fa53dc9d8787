"""Before a save closes anybody: everybody who can is asked to write what is not going to change.

The rule: it may take time and may fail, and the save that follows is right all the same; nobody is paused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from coordinator.participants import Participants
from coordinator.protocol.topology import Participant
from coordinator.wire.errors import SafepointError
from coordinator.wire.terms import PRECOPY, Role

log = logging.getLogger(__name__)

LONGEST_S: Final = 300.0
SHARE: Final = 0.4  # of the time that is left: the save itself needs some too
LEAST_S: Final = 0.5


async def precopy(participants: Participants, everybody: Iterable[Participant], left_s: float) -> None:
    """Ask all of them at once, and wait until they are done; `left_s`: seconds until the save must have ended."""
    within_s = min(LONGEST_S, left_s * SHARE)
    whom = [p for p in everybody if PRECOPY in p.features and p.role is not Role.AUXILIARY_MODEL]
    if whom and within_s > LEAST_S:
        await asyncio.gather(*(_ask(participants, who, within_s) for who in whom))


async def _ask(participants: Participants, who: Participant, within_s: float) -> None:
    try:
        await participants.precopy(who, within_s)
    except SafepointError as error:
        log.warning("%s writes nothing ahead of the save: %s", who.participant_id, error)
