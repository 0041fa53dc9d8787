"""The list of operations, read once: what has ended does not change any more.

The rule: while a save runs, only what is not settled is read again; a list of a hundred would cost the coordinator seconds
of its processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from coordinator.history import History
from coordinator.page.timeline import Document, summary

SETTLED_S: Final = 30.0  # so long after it was last seen to run, an operation without an end was cut off


class Past:
    """Summaries of the newest operations. Not thread-safe."""

    def __init__(self, history: History, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = history
        self._limit = limit
        self._clock = clock
        self._known: dict[str, Document] = {}  # oldest first
        self._places: dict[str, int] = {}  # of those in the history
        self._seen: dict[str, float] = {}  # of those without an end: when they were last seen to run

    def summaries(self, running: str) -> list[Document]:
        """Newest first. `running`: the operation that runs now, or empty. Raises STORAGE_FAILED."""
        now = self._clock()
        for name, one in self._known.items():
            if not one["outcome"] and (name == running or name not in self._seen):
                self._seen[name] = now
        open_ones = [name for name, at in self._seen.items() if now - at < SETTLED_S and name in self._known]
        after = max(self._places.values(), default=0)
        if open_ones:
            after = min(self._places[name] for name in open_ones) - 1
        fresh = self._history.list(self._limit, after=after)
        kept = {name: one for name, one in self._known.items() if self._places[name] <= after}
        kept |= {record.operation_id: summary(record) for record in reversed(fresh)}
        self._known = dict(list(kept.items())[-self._limit :])
        places = self._places | {record.operation_id: record.place for record in fresh}
        self._places = {name: places[name] for name in self._known}
        self._seen = {n: at for n, at in self._seen.items() if n in self._known and not self._known[n]["outcome"]}
        return list(reversed(self._known.values()))
