"""How often a registration ended at a coordinator that went on: something between ends connections, does not like our pings, or
nothing comes through.

The rule kept here: a coordinator that was started anew ends a registration as well, and that is nothing to mend; so only
ends under one epoch count together. One registration that ends now and then is a network; many within minutes are a setting.
PURE: the time (seconds, monotonic) is given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from coordinator.wire.remarks import COORDINATOR_SILENT, REGISTRATION_ENDS, SILENT

WITHIN_S: Final = 600.0
TIMES: Final = 4
_KEPT: Final = 100
_MAX_WHY: Final = 200  # characters


@dataclass(frozen=True, slots=True)
class End:
    at: float
    epoch: int
    lasted_s: float
    why: str


class Interruptions:
    """The ends of one shim's registrations."""

    def __init__(self) -> None:
        self.ends: deque[End] = deque(maxlen=_KEPT)

    def note(self, now: float, epoch: int, lasted_s: float, why: str) -> None:
        """A registration with the coordinator of that epoch has ended by itself, after `lasted_s` seconds. `why`: empty when
        nothing was said."""
        self.ends.append(End(now, epoch, lasted_s, why[:_MAX_WHY]))

    def warning(self, now: float) -> str:
        """One sentence when it ended several times within minutes; empty else, and once it lasts again."""
        recent = [end for end in self.ends if now - end.at <= WITHIN_S]
        same = [end for end in recent if end.epoch == recent[-1].epoch]
        if len(same) < TIMES:
            return ""
        minutes = f"within {WITHIN_S / 60:.0f} min"
        if all(end.why.startswith(SILENT) for end in same):
            return f"{COORDINATOR_SILENT}: {minutes} {len(same)} times for longer than heartbeats may be away, and it went on each time."
        why = next((end.why.rstrip(".") for end in reversed(same) if end.why), "no reason was given")
        lasted = sorted(end.lasted_s for end in same)
        return (
            f"{REGISTRATION_ENDS}: {minutes} it ended {len(same)} times at a coordinator that went on, after "
            f"{lasted[0]:.0f} to {lasted[-1]:.0f} s each; the last time: {why}."
        )
