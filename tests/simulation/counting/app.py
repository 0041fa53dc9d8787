"""A resources server as one writes it: a counter for each session, and which calls have counted.

The rule: a session is reached by the id of its own request alone, so that the gate may leave alone what no request has
touched; what is kept of it while a handler waits changes in steps, as in real ones.
"""

from __future__ import annotations

from typing import Any


class Counting:
    """See the module. A request has `session`, as Gym's have."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[str, Any]] = {}

    def begin(self, request: Any, start: int) -> None:
        """A new session."""
        self.counters[request.session["session_id"]] = {"count": start, "whole": start, "history": []}

    def session(self, request: Any) -> dict[str, Any]:
        """Raises KeyError for a session of an earlier life."""
        return self.counters[request.session["session_id"]]
