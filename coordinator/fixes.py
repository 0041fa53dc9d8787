"""What helps against those warnings of participants that say more than one thing can be wrong with a server. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coordinator.wire.remarks import (
    COORDINATOR_SILENT,
    ENGINE_SILENT,
    NO_SUCH_VLLM,
    REGISTRATION_ENDS,
    SESSIONS_ELSEWHERE,
    STATE_LOST,
    WORKER_AWAY,
)
from coordinator.wire.rpc import PING_EVERY_MS

FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        REGISTRATION_ENDS: "Let shims dial the coordinator directly. Where a proxy or a load balancer has to be between, let it "
        f"pass HTTP/2 pings every {PING_EVERY_MS // 1000} s and end no stream by its age or for being idle. `Too many pings` is "
        "said by such a proxy, or by a coordinator of another version: install one version of Safepoint everywhere.",
        COORDINATOR_SILENT: "See what keeps the coordinator from speaking: a process that is stopped (where `ps` says T), a machine "
        "without processor time or memory to spare, or a network that loses what it sends.",
        SESSIONS_ELSEWHERE: "Let one server answer at this address: take away what spreads its calls over several processes (a "
        "reverse proxy, replicas of one name, a port that two servers share). More workers are `num_workers` in the server's "
        "configuration: each has a gate then, and calls find the one with their session.",
        STATE_LOST: "Nothing is to be done for the rollout: it has begun again. See why the server, or one of its workers, ended: "
        "its log and `safepoint status` say so.",
        NO_SUCH_VLLM: "Either vLLM runs there without VLLM_SERVER_DEV_MODE=1, or another server has its port: see what listens "
        "there, then start vLLM on that port with that variable (`safepoint serve` sets it). The warning goes when it answers.",
        ENGINE_SILENT: "See whether vLLM lives, by its log: one that is stopped (where `ps` says T) or hangs answers nobody, and a "
        "save is refused. Let it go on, or start it again. The warning goes when it answers.",
        WORKER_AWAY: "Wait: the server starts another worker, and calls go on there. If none comes, see the server's log, and "
        "start it again.",
    }
)
_ELSE: Final = "Mend what the sentence names. It stays until the server ends, also when it is mended."


def fix_of(warning: str) -> str:
    """What helps against a warning."""
    return next((fix for words, fix in FIXES.items() if words in warning), _ELSE)
