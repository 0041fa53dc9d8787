"""Who was refused, in the log of whoever refused: a caller with a wrong token sees its own error, and nobody else did.

The rule: a line names the caller's host, the method and the reason, and never what the caller sent. A caller that tries on
is one line a minute, and all of them together are a few: a log that a stranger can fill is a full disk.

One event loop; the clock is given.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote

from coordinator.wire.access import METHODS
from coordinator.wire.errors import Problem, Reason

log = logging.getLogger(__name__)

EVERY_S: Final = 60.0
LINES: Final = 20  # in all, in each EVERY_S
_KNOWN: Final = 256
# What is refused because of who calls. A call that comes at the wrong time is its operation's to tell.
LOGGED: Final = frozenset(
    {Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.LIMIT_EXCEEDED, Reason.DUPLICATE_PARTICIPANT}
)


class Refusals:
    """`clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: OrderedDict[tuple[str, str, Reason], tuple[float, int]] = OrderedDict()  # when, and how many since
        self._window, self._lines, self._unshown = float("-inf"), 0, 0

    def note(self, peer: str, method: str, problem: Problem) -> None:
        """One call was refused. `peer`: as gRPC names it, `ipv4:10.0.0.3:4711`; `method`: its whole name."""
        if problem.reason not in LOGGED:
            return
        # A name that is not in the table is the caller's own text.
        host, name = _host(peer), method.rpartition("/")[2] if method in METHODS else "an unknown method"
        key, now = (host, name, problem.reason), self._clock()
        at, more = self._told.pop(key, (float("-inf"), 0))
        if now - at < EVERY_S:
            self._told[key] = at, more + 1
            return
        if now - self._window >= EVERY_S:
            if self._unshown:
                log.warning("%d more calls were refused in the minute before, and not shown", self._unshown)
            self._window, self._lines, self._unshown = now, 0, 0
        if self._lines >= LINES:
            self._unshown += 1
            return
        self._lines += 1
        self._told[key] = now, 0
        while len(self._told) > _KNOWN:
            self._told.popitem(last=False)
        log.warning(
            "refused %s from %s: %s%s (%s)", name, host, problem.message, f" {more} more since the last line" * bool(more),
            problem.reason.name,
        )  # fmt: skip


def _host(peer: str) -> str:
    """The caller's host; for a Unix socket there is none."""
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return "this machine"
    return address.rpartition(":")[0].strip("[]")
