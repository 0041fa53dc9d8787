"""What helps against those warnings of participants that say more than one thing can be wrong with a server. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coordinator.wire.remarks import REGISTRATION_ENDS, SESSIONS_ELSEWHERE
from coordinator.wire.rpc import PING_EVERY_MS

FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        REGISTRATION_ENDS: "Let shims dial the coordinator directly. Where a proxy or a load balancer has to be between, let it "
        f"pass HTTP/2 pings every {PING_EVERY_MS // 1000} s and end no stream by its age or for being idle. `Too many pings` is "
        "said by such a proxy, or by a coordinator of another version: install one version of Safepoint everywhere.",
        SESSIONS_ELSEWHERE: "Let one server answer at this address: take away what spreads its calls over several processes (a "
        "reverse proxy, replicas of one name, a port that two servers share). More workers are `num_workers` in the server's "
        "configuration: each has a gate then, and calls find the one with their session.",
    }
)
_ELSE: Final = "See README, `Beside your own Gym servers`."


def fix_of(warning: str) -> str:
    """What helps against a warning, which may begin with the name of a worker."""
    return next((fix for opening, fix in FIXES.items() if opening in warning), _ELSE)
