"""Who was refused, by whoever refused: a caller with a wrong token sees its own error, and nobody else did.

The rule: a line in the log names the caller's host, the method and the reason, and never what the caller sent. A caller
that tries on is one line a minute, and all of them together are a few: a log that a stranger can fill is a full disk. A shim
that is kept out is remembered as well, so that whoever misses a server hears of it.

One event loop; the clock is given.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from coordinator.wire.access import METHODS, Access
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import is_wire_id

log = logging.getLogger(__name__)

EVERY_S: Final = 60.0
LINES: Final = 20  # in all, in each EVERY_S
RECENT_S: Final = 30.0  # a shim tries again every few seconds: one that has been quiet for so long is in, or gone
_KNOWN: Final = 256
# What is refused because of who calls. A call that comes at the wrong time is its operation's to tell.
LOGGED: Final = frozenset(
    {Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.LIMIT_EXCEEDED, Reason.DUPLICATE_PARTICIPANT}
)


# With these a shim is kept out for who or what it is, such as one of another version; the finding about it has the same reason, and blocks nothing.
KEPT_OUT: Final = frozenset({
    Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.INVALID_ARGUMENT, Reason.MALFORMED_ID, Reason.ROLE_INVALID,
    Reason.UNSUPPORTED, Reason.PROTOCOL_VIOLATION, Reason.DUPLICATE_PARTICIPANT, Reason.STALE_EPOCH,
})  # fmt: skip
PARTICIPANT_METADATA_KEY: Final = "safepoint-participant"  # of a shim's call, so that a refusal can name it
_FOR_SHIMS: Final = frozenset({Access.SHIM})


def is_of_kept_out(reason: int, *, blocking: bool, is_here: bool) -> bool:
    """Whether a finding is about a shim that is kept out. `is_here`: whether its participant is registered: then a role that
    is likely wrong is only warned of."""
    return not blocking and reason in KEPT_OUT and not (is_here and reason == Reason.ROLE_INVALID)


@dataclass(frozen=True, slots=True)
class KeptOut:
    """A shim that was refused for who or what it is. `ago_s`: seconds since its last try; `tries`: without a long break.

    `says`: the participant that it says it is, which is an id and else unproven; empty when it did not say.
    """

    host: str
    ago_s: float
    problem: Problem
    tries: int = 1
    says: str = ""


def introduced(participant_id: str) -> tuple[tuple[str, str], ...]:
    """What a shim's call carries so that whoever refuses it unheard can say whose it was."""
    return ((PARTICIPANT_METADATA_KEY, participant_id),) if is_wire_id(participant_id) else ()


class Refusals:
    """`clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: OrderedDict[tuple[str, str, Reason], tuple[float, int]] = OrderedDict()  # when, and how many since
        self._window, self._lines, self._unshown = float("-inf"), 0, 0
        self._kept_out: OrderedDict[tuple[str, str, Reason], tuple[float, Problem, int]] = OrderedDict()

    def note(self, peer: str, method: str, problem: Problem, says: str = "") -> None:
        """One call was refused. `peer`: as gRPC names it, `ipv4:10.0.0.3:4711`; `method`: its whole name; `says`: the
        participant that the caller says it is, whatever it sent."""
        # A name that is not in the table is the caller's own text.
        host, name = _host(peer), method.rpartition("/")[2] if method in METHODS else "an unknown method"
        key, now = (host, name, problem.reason), self._clock()
        if problem.reason in KEPT_OUT and method in METHODS and METHODS[method].access == _FOR_SHIMS:
            who = (host, says if is_wire_id(says) else "", problem.reason)
            before, _, tries = self._kept_out.pop(who, (now, problem, 0))
            self._kept_out[who] = now, problem, 1 if now - before > RECENT_S else tries + 1
            while len(self._kept_out) > LINES:
                self._kept_out.popitem(last=False)
        if problem.reason not in LOGGED:
            return
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

    def kept_out(self) -> list[KeptOut]:
        """The shims that were refused within the last RECENT_S for who they are, one for each host, name and reason."""
        now = self._clock()
        return [
            KeptOut(host, now - at, problem, tries, says)
            for (host, says, _), (at, problem, tries) in self._kept_out.items()
            if now - at <= RECENT_S
        ]


def _host(peer: str) -> str:
    """The caller's host; for a Unix socket there is none."""
    kind, _, address = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return "this machine"
    return address.rpartition(":")[0].strip("[]")
