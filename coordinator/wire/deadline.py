"""How much of a caller's time a server may use.

A server ends its own wait before its caller's deadline, so that the answer is "still draining: r-17, r-22" and never a
bare timeout (rule 5; NeMo-RL 4264 review: client timeout equal to the server's long poll hid who was in flight).
"""

from __future__ import annotations

from typing import Final

# One second is enough for a reply across a loaded network; a tenth keeps short deadlines usable.
REPLY_MARGIN_S: Final = 1.0
_SHORT: Final = 10.0
# Below this an answer could not be sent in time, so nothing is begun.
MIN_BUDGET_S: Final = 0.02


def reply_margin(remaining_s: float) -> float:
    """Seconds to keep back of `remaining_s` for the reply: 1 s, or a tenth of a deadline under 10 s."""
    return REPLY_MARGIN_S if remaining_s >= _SHORT else max(0.0, remaining_s) / 10


def budget(remaining_s: float) -> float:
    """Seconds a server may wait when its caller gives up in `remaining_s` seconds; never negative."""
    return max(0.0, remaining_s - reply_margin(remaining_s))
