"""Restored records that nobody has asked for yet, and what became of the others.

The rule: a record answers once, here or at another engine (`sharing`). Who asks with the record's own call id gets it
before others, and so does each of several callers with the same question: which of them had which of equal questions makes
no difference to what is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from participant_shims.engine.record import Record
from participant_shims.engine.request import Ask
from participant_shims.engine.sharing import Sharing
from participant_shims.identity import CallIdentity


@dataclass(slots=True)
class Tally:
    """What became of restored records. Tokens: `kept` were not generated again, `again` were."""

    exact: int = 0
    not_exact: int = 0
    regenerated: int = 0
    kept: int = 0
    again: int = 0

    def __str__(self) -> str:
        return (
            f"{self.exact} continued exactly, {self.not_exact} not bit-exact, {self.regenerated} begun anew; "
            f"{self.kept} tokens kept, {self.again} generated again"
        )


class Pool:
    """Records by what was asked. One event loop."""

    def __init__(self, sharing: Sharing | None = None) -> None:
        self.sharing = sharing or Sharing(None, "")
        self.sharing.on_lost = self._lost
        self._by_digest: dict[str, list[Record]] = {}
        self.tally = Tally()
        self.on_over: Callable[[str], None] = lambda request_id: None  # nobody will ask for that one again

    def __len__(self) -> int:
        return sum(len(records) for records in self._by_digest.values())

    def records(self) -> list[Record]:
        """Those that wait."""
        return [record for records in self._by_digest.values() for record in records]

    def put(self, record: Record) -> None:
        """One more."""
        self._by_digest.setdefault(record.ask.digest, []).append(record)

    def replace(self, records: Iterable[Record]) -> None:
        """These and no others: a load may be repeated."""
        self._by_digest.clear()
        self.tally = Tally()
        for record in records:
            self.put(record)

    def forget(self) -> int:
        """All of them are of an engine that is gone: their callers begin anew. How many they were."""
        records = self.records()
        for record in records:
            self.begun_anew(record)
        self._by_digest.clear()
        return len(records)

    def begun_anew(self, record: Record) -> None:
        """What it had is generated again."""
        self.over(record.request_id)
        self.tally.regenerated += 1
        self.tally.again += len(record.token_ids)

    async def take(self, ask: Ask, caller: CallIdentity | None) -> Record | None:
        """The record that answers this question, of this engine or of another one; nobody else gets it then."""
        while (record := self.claim(ask, caller)) is not None:
            try:
                if await self.sharing.is_ours(record):
                    return record
            except BaseException:
                self.put(record)  # its caller has left: it must not be lost with one connection
                raise
            self.on_over(record.request_id)
        return await self.sharing.take(ask, caller)

    def over(self, request_id: str) -> None:
        """Its caller has had it all, or begins anew."""
        self.on_over(request_id)
        self.sharing.over(request_id)

    async def settle(self) -> None:
        """Forget those that have gone on at another engine."""
        taken = {id(record) for record in await self.sharing.taken(self.records())}
        if not taken:
            return
        records = self.records()
        self._by_digest.clear()
        for record in records:
            if id(record) in taken:
                self.on_over(record.request_id)
            else:
                self.put(record)

    def claim(self, ask: Ask, caller: CallIdentity | None) -> Record | None:
        """The record of this engine that answers this question; it is gone from here then."""
        waiting = self._by_digest.get(ask.digest) if self._by_digest else None
        if not waiting:
            return None
        place = 0
        if caller is not None:
            mine = [
                n for n, r in enumerate(waiting) if (r.rollout_id, r.call_id) == (caller.rollout_id, caller.call_id)
            ]
            # Another rollout's record is not taken when both say who they are: that one will ask for it.
            nobodys = [n for n, r in enumerate(waiting) if not r.rollout_id]
            found = mine or nobodys
            if not found:
                return None
            place = found[0]
        record = waiting.pop(place)
        if not waiting:
            del self._by_digest[ask.digest]
        return record

    def _lost(self) -> None:
        self.tally.regenerated += 1

    def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        """Forget what rollouts up to these attempts had; how many rollouts were known."""
        upto = dict(attempts)
        gone = {r.rollout_id for r in self.records() if r.rollout_id and r.attempt <= upto.get(r.rollout_id, -1)}
        left = [r for r in self.records() if not (r.rollout_id in gone and r.attempt <= upto.get(r.rollout_id, -1))]
        stay = {id(record) for record in left}
        for record in self.records():
            if id(record) not in stay:
                self.over(record.request_id)
        self._by_digest.clear()
        for record in left:
            self.put(record)
        return len(gone)
