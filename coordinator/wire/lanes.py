"""How many calls a server serves at once, and how fast one caller may make them.

The rule: no flood keeps an operation from being ended. Abort, Resume, status and health have each a lane of its own; what
is long or heavy shares others; and one caller never fills a lane alone where callers can be told apart. Who is over a limit
is refused at once with the time after which to come again, never queued.

Pure: the clock is given. One event loop.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from coordinator.wire.access import Lane
from coordinator.wire.errors import Reason, refuse


@dataclass(frozen=True, slots=True)
class Limit:
    """Of one lane: calls at once in all and of one caller, and calls a second of one caller (zero: not limited)."""

    total: int
    each: int
    per_s: float = 0.0


LIMITS: Final[Mapping[Lane, Limit]] = MappingProxyType(
    {
        Lane.RESERVED: Limit(64, 32, 500.0),
        Lane.WORK: Limit(256, 128, 500.0),
        Lane.WATCH: Limit(128, 64, 500.0),
        Lane.STAY: Limit(4096, 4096),  # a fleet's shims may share one token
    }
)
FULL_AGAIN_AFTER_S: Final = 1.0
BURST_S: Final = 2.0  # a caller that was quiet may make the calls of so many seconds at once
MAX_CALLERS: Final = 1024  # whose rate is remembered


class Lanes:
    """Counts what runs. `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float], limits: Mapping[Lane, Limit] = LIMITS) -> None:
        self._clock = clock
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._running_of: Counter[tuple[str, str]] = Counter()
        self._most: dict[str, tuple[int, int]] = {}
        self._tokens: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()  # what is left, and since when

    @contextmanager
    def enter(self, lane: Lane, method: str, caller: str) -> Generator[None]:
        """Serve one call. Raises LIMIT_EXCEEDED, with the name of the limit and `retry_after_s`; nothing is begun then."""
        limit = self._limits[lane]
        slot = method if lane is Lane.RESERVED else lane.value
        key = (slot, caller)
        if self._running[slot] >= limit.total:
            raise _full(f"{limit.total} calls of lane {slot} run already", "concurrent_calls", FULL_AGAIN_AFTER_S)
        if self._running_of[key] >= limit.each:
            raise _full(
                f"{limit.each} calls of this caller run already in lane {slot}", "calls_of_caller", FULL_AGAIN_AFTER_S
            )
        if limit.per_s:
            self._take(key, limit.per_s)
        self._running[slot] += 1
        self._running_of[key] += 1
        self._most[slot] = max(self._most.get(slot, (0, 0))[0], self._running[slot]), limit.total
        try:
            yield
        finally:
            self._running[slot] -= 1
            self._running_of[key] -= 1
            if not self._running_of[key]:
                del self._running_of[key]  # callers come and go

    def most(self) -> dict[str, tuple[int, int]]:
        """By lane, or method of the reserved one: the most calls at once since this was asked last, and the limit."""
        most, self._most = self._most, {slot: (self._running[slot], total) for slot, (_, total) in self._most.items()}
        return most

    def _take(self, key: tuple[str, str], per_s: float) -> None:
        now = self._clock()
        left, since = self._tokens.pop(key, (per_s * BURST_S, now))
        left = min(per_s * BURST_S, left + (now - since) * per_s)
        allowed = left >= 1.0
        self._tokens[key] = (left - 1.0 if allowed else left, now)
        while len(self._tokens) > MAX_CALLERS:
            self._tokens.popitem(last=False)
        if not allowed:
            raise _full(f"{per_s:g} calls a second of one caller are served", "calls_per_second", (1.0 - left) / per_s)


def _full(what: str, limit: str, retry_after_s: float) -> Exception:
    return refuse(
        Reason.LIMIT_EXCEEDED, f"Too much at once: {what}.",
        next_step=f"Call again in {max(retry_after_s, 0.01):.2g} s, with fewer calls at a time.",
        metadata={"limit": limit}, retry_after_s=retry_after_s,
    )  # fmt: skip
