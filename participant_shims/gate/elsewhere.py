"""Evidence that other processes serve a part of this server's calls: sessions that do not stick to where they began.

The rule kept here: only what has no other explanation is told. That a server lacks calls which their caller has had answered
is how its restart looks as well, and a restart is over once it was told of each rollout. It has no part in it where this very
process has executed calls of that rollout, or has refused it before at an earlier beginning: it was there all the time, and
somebody else behind the same address executed the rest. PURE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coordinator.wire.remarks import SESSIONS_ELSEWHERE
from participant_shims.identity import CallIdentity

_MAX_ROLLOUTS: Final = 10_000


class Elsewhere:
    """What one process has refused for a state that it lacks. `warn` tells people, as `Gate.warn`."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._refused: dict[str, int] = {}  # rollout -> the base at which it was refused last

    def refused(self, call: CallIdentity, executed: bool) -> None:
        """A call is refused, since its caller has answers of earlier ones that are not known here. `executed`: this process
        has executed calls of the rollout."""
        before = self._refused.pop(call.rollout_id, call.base)
        self._refused[call.rollout_id] = call.base
        if len(self._refused) > _MAX_ROLLOUTS:
            del self._refused[next(iter(self._refused))]
        if executed or before != call.base:
            self._warn(
                "sessions elsewhere",
                f"{SESSIONS_ELSEWHERE}: of rollout {call.rollout_id[:100]} some were executed by another process, while this one was "
                "here all the time. Its session is in parts, so it begins again from its input each time, and may never end.",
            )
