"""Who takes part in this job, across restarts of the coordinator: the registry's knowledge, kept in the journal.

The rule: whoever has taken part takes part until somebody says that it is gone for good, or a restored snapshot says that
it never was here; a coordinator that starts again misses everybody who has not come back. No operation begins before all
its participants are durably known.

One journal entry holds all changes since the one before, so that thousands of shims that come at once cost a few writes.
Wall-clock times are in it for people, and decide nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from coordinator.journal_file import MEMBERS, Entry, heard_at
from coordinator.journals import AnyJournal
from coordinator.protocol.records import participant_from_json, participant_to_json
from coordinator.protocol.topology import NEVER, Participant
from coordinator.registry import Registry
from coordinator.wire.errors import Problem, SafepointError
from coordinator.wire.ids import OperationId, ParticipantId
from coordinator.wire.terms import Role

log = logging.getLogger(__name__)


class Membership:
    """Follows the registry. `append` makes a journal entry durable; `wall` gives seconds since 1970."""

    def __init__(
        self, journal: AnyJournal, registry: Registry, append: Callable[[Entry], Awaitable[None]],
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._append = append
        self._wall = wall
        self._changed: dict[ParticipantId, dict[str, Any] | None] = {}  # None: gone for good
        self._writing: asyncio.Task[None] | None = None
        self._ended = False
        members = journal.contents.members
        self._names = set(members)  # of whom the journal says that they take part, or is about to
        self.known = bool(members or journal.contents.dismissed)
        registry.recall_dismissed(journal.contents.dismissed)
        for name, data in members.items():
            try:
                who = participant_from_json(data["participant"])
            except (
                KeyError,
                ValueError,
                TypeError,
            ) as error:  # of a newer version: it can be missed no better than by name
                log.warning("what the journal says of %s cannot be read: %r", name, error)
                continue
            registry.miss(who, f"{NEVER}; last heard {_when(heard_at(data))} by a coordinator before this one")
        registry.follow(self._lost, self._joined, gone_for_good=self._dismissed)

    def assume(self, members: Iterable[Participant]) -> None:
        """Who was in the newest snapshot: members as well when the journal, lost or of an older version, knows nobody."""
        if not self.known:
            for who in members:
                if self._registry.get(who.participant_id) is None:
                    self._registry.miss(who, f"{NEVER}; it was part of the newest snapshot")

    async def settled(self) -> None:
        """Wait until everything that is known is durable, or the journal has failed: then no operation begins anyway."""
        while self._writing is not None:
            await asyncio.wait({self._writing})

    def end(self) -> None:
        """This coordinator stops: that its connections end now says nothing of who takes part."""
        self._ended = True

    def _joined(self, who: Participant) -> None:
        self._note(who, {})

    def _lost(self, who: Participant, problem: Problem) -> None:
        self._note(who, {"lost": problem.message})

    def _dismissed(self, names: Iterable[ParticipantId]) -> None:
        self._names.difference_update(names)
        self._changed |= dict.fromkeys(names)
        self._write()

    def _note(self, who: Participant, more: dict[str, str]) -> None:
        if who.role is not Role.AUXILIARY_MODEL:
            self._names.add(who.participant_id)
            self._changed[who.participant_id] = {
                "participant": participant_to_json(who), "heard_at": round(self._wall(), 3), **more,
            }  # fmt: skip
            self._write()
        elif who.participant_id in self._names:  # its role was another one; it is missed no more
            self._dismissed([who.participant_id])

    def _write(self) -> None:
        if self._writing is None and not self._ended:
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._changed:
                changed, self._changed = self._changed, {}
                await self._append(Entry(OperationId(""), MEMBERS, {"members": changed}))
        except SafepointError as error:
            log.warning("who takes part is known to this coordinator only: %s", error)
        finally:
            self._writing = None


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) if at else "at some time"
