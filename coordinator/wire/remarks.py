"""Warnings of a participant's status that have a fix of their own.

The rule: who writes such a sentence and who reads it share what it begins with, so that `safepoint doctor` knows its fix; to
everybody else it is a sentence. PURE.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coordinator.wire.rpc import PING_EVERY_MS

REGISTRATION_ENDS: Final = "Its registration does not last"

FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        REGISTRATION_ENDS: "Let shims dial the coordinator directly. Where a proxy or a load balancer has to be between, let it "
        f"pass HTTP/2 pings every {PING_EVERY_MS // 1000} s and end no stream by its age or for being idle. `Too many pings` is "
        "said by such a proxy, or by a coordinator of another version: install one version of Safepoint everywhere.",
    }
)


def fix_of(warning: str) -> str:
    """What helps against a warning; empty when that is not known."""
    return next((fix for opening, fix in FIXES.items() if opening in warning), "")
