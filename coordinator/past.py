"""How the operations of this coordinator ended: the last ones in memory, with their events, and those before in the journal.

The rule: whose id is used up is answered from here for ever after, as far as the journal remembers; who was refused before
anything was paused is in memory alone, for whoever asks why, and its id may be used again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator import outcomes
from coordinator.journals import AnyJournal
from coordinator.outcomes import Ended
from coordinator.protocol.operation import Outcome
from coordinator.wire.ids import OperationId
from coordinator.wire.terms import OperationKind

KEPT_IN_MEMORY: Final = 20  # ended operations with their events, for Explain


class Past:
    """What has ended. Belongs to the event loop of its coordinator."""

    def __init__(self, journal: AnyJournal) -> None:
        self._journal = journal
        self._memory: OrderedDict[OperationId, Ended] = OrderedDict()
        self._used_up: set[OperationId] = set()  # those of `_memory` whose id is

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._memory)

    def keep(self, ended: Ended) -> None:
        """From now on it is the last one."""
        self._memory[ended.operation_id] = ended
        self._memory.move_to_end(ended.operation_id)
        while len(self._memory) > KEPT_IN_MEMORY:
            self._used_up.discard(self._memory.popitem(last=False)[0])

    def use_up(self, operation_id: OperationId) -> None:
        """Its id means that operation for ever."""
        self._used_up.add(operation_id)

    def of(self, operation_id: str) -> Ended | None:
        """How the operation of that id ended, if its id is used up."""
        name = OperationId(operation_id)
        if name in self._used_up:
            return self._memory[name]
        data = self._journal.contents.outcomes.get(name)
        return outcomes.from_json(name, data) if data is not None else None

    def remembered(self, operation_id: str = "") -> Ended | None:
        """The operation of that id, or the last one that failed, as far as it is in memory."""
        if operation_id:
            return self._memory.get(OperationId(operation_id))
        return next((ended for ended in reversed(self._memory.values()) if ended.failed is not None), None)

    def in_memory(self) -> list[Ended]:
        """The last operations that ended, the newest first."""
        return list(reversed(self._memory.values()))

    def last(self, operation_id: str = "", failed_only: bool = False) -> Ended | None:
        """The last operation that ended, or the one of that id; also one that was refused before anything was paused."""
        if operation_id:
            return self._memory.get(OperationId(operation_id)) or self.of(operation_id)
        for ended in reversed(self._memory.values()):
            if not failed_only or ended.failed is not None:
                return ended
        for name in reversed(list(self._journal.contents.outcomes)):
            ended_before = self.of(name)
            if ended_before is not None and (not failed_only or ended_before.failed is not None):
                return ended_before
        return None

    def last_restore(self) -> manifest_pb2.RestoredFrom | None:
        """What runs now was restored from, when that was of actors; as far back as outcomes are remembered."""
        written = self._journal.contents.outcomes
        kinds = {name: data.get("kind") for name, data in written.items()}
        kinds |= {name: ended.kind.name for name, ended in self._memory.items()}
        for name in reversed([name for name, kind in kinds.items() if kind == OperationKind.RESTORE.name]):
            found = self._memory.get(name) or self.of(name)
            event = found.results.get("restored") if found is not None else None
            if found is not None and found.outcome is Outcome.SUCCEEDED and event is not None:
                placements = event.restored.placements
                told = manifest_pb2.RestoredFrom(
                    snapshot_id=found.snapshot_id, operation_id=name, placements=placements
                )
                return told if placements else None
        return None
