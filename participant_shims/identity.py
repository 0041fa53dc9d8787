"""Who a call belongs to: rollout, attempt, and a call id that is the same when the call is made again.

PURE, and the only file that knows the header names.

Call ids are hierarchical. A rollout is dispatched at an agent's `/run`; that dispatch opens the scope `<base>`, where
`base` is the attempt at which the rollout last began from its input. The n-th call made in a scope is `<scope>.<n>`, and
a call opens a scope of its own at the server that serves it. So a call of an agent to itself, or of one agent to
another, nests without a special case:

    /run of r-7 (base 0)          scope 0
      POST /seed_session          call  0.1
      POST self /v1/responses     call  0.2    opens scope 0.2 at the same server
        POST model /v1/responses  call  0.2.1
        POST tool                 call  0.2.2
      POST /verify                call  0.3

A rollout that continues after a restore is attempt N+1 with the same base, so the calls it repeats have the same ids; a
rollout that restarts from its input gets base N+1, so that nothing of the old one can be taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.wire.ids import is_rollout_id

ROLLOUT_HEADER: Final = "x-safepoint-rollout"
ATTEMPT_HEADER: Final = "x-safepoint-attempt"
CALL_HEADER: Final = "x-safepoint-call"
# Call ids of the same rollout at the same callee whose responses the caller has recorded: the callee may forget them.
RECORDED_HEADER: Final = "x-safepoint-recorded"
# Dispatches that have ended at their agent, as `rollout/attempt` with commas: the callee forgets them as a whole. They
# may be of other rollouts than the call's, since an ended rollout makes no further call that could carry the news.
DONE_HEADER: Final = "x-safepoint-done"
# How many calls of the same rollout the caller has seen this callee finish: one that has executed fewer lost its state.
FINISHED_HEADER: Final = "x-safepoint-finished"
# Whose call log the call is in, as `caller/log`; a word without a slash when it is in none.
LOG_HEADER: Final = "x-safepoint-log"
# On a call that is not logged, of a rollout that is known: the worker of its callee that has the session follows from it.
HOME_HEADER: Final = "x-safepoint-home"
# On the refusal of a stale attempt: the lowest one that its callee would serve.
LOWEST_HEADER: Final = "x-safepoint-lowest"
HEADERS: Final = frozenset(
    {
        ROLLOUT_HEADER,
        ATTEMPT_HEADER,
        CALL_HEADER,
        RECORDED_HEADER,
        DONE_HEADER,
        FINISHED_HEADER,
        LOG_HEADER,
        HOME_HEADER,
    }
)

_CALL_ID: Final = re.compile(r"[0-9]{1,10}(\.[0-9]{1,10}){0,32}")
MAX_ATTEMPT: Final = 999_999_999  # nine digits travel; whoever names a higher one means every attempt that there was
MAX_CALLER: Final = 1024
MAX_RECORDED: Final = 64  # ids in one RECORDED header; more travel with later calls


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """One call of one attempt of one rollout. `call_id` is also the scope that the call opens where it is served."""

    rollout_id: str
    attempt: int
    call_id: str

    @property
    def base(self) -> int:
        """The attempt at which the rollout last began from its input."""
        return int(self.call_id.partition(".")[0])

    def child(self, number: int) -> CallIdentity:
        """The `number`-th call (counted from 1) made in this call's scope."""
        return CallIdentity(self.rollout_id, self.attempt, f"{self.call_id}.{number}")

    def headers(self, recorded: Iterable[str] = ()) -> dict[str, str]:
        """What travels with the call."""
        out = {
            ROLLOUT_HEADER: self.rollout_id,
            ATTEMPT_HEADER: str(self.attempt),
            CALL_HEADER: self.call_id,
        }
        listed = ",".join(list(recorded)[:MAX_RECORDED])
        if listed:
            out[RECORDED_HEADER] = listed
        return out


def root(rollout_id: str, attempt: int, base: int) -> CallIdentity:
    """The dispatch itself: the scope of a rollout's outermost calls."""
    return CallIdentity(rollout_id, attempt, str(base))


def from_headers(headers: Mapping[str, str]) -> CallIdentity | None:
    """The identity that a request carries (`headers` in lower case); None when it carries none or a malformed one."""
    rollout_id, attempt, call_id = (headers.get(h, "") for h in (ROLLOUT_HEADER, ATTEMPT_HEADER, CALL_HEADER))
    if not (is_rollout_id(rollout_id) and attempt.isascii() and attempt.isdigit() and len(attempt) <= 9):
        return None
    if _CALL_ID.fullmatch(call_id) is None or int(call_id.partition(".")[0]) > int(attempt):
        return None
    return CallIdentity(rollout_id, int(attempt), call_id)


def recorded_from_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Call ids that the caller has recorded and the callee may forget."""
    ids = headers.get(RECORDED_HEADER, "").split(",")[:MAX_RECORDED]
    return tuple(i for i in ids if _CALL_ID.fullmatch(i))


def finished_from_headers(headers: Mapping[str, str]) -> int:
    """How many calls of this rollout the caller has seen the callee finish; 0 when it does not say."""
    return _number(headers.get(FINISHED_HEADER, ""))


def caller_from_headers(headers: Mapping[str, str]) -> str:
    """The log that the call is in, as `caller/log`; empty when it is in none."""
    value = headers.get(LOG_HEADER, "")
    return value if "/" in value and len(value) <= MAX_CALLER else ""


def home_from_headers(headers: Mapping[str, str]) -> str:
    """The rollout that a call which is not logged belongs to; empty when it says none."""
    value = headers.get(HOME_HEADER, "")
    return value if is_rollout_id(value) else ""


def lowest_from_headers(headers: Mapping[str, str]) -> int:
    """The lowest attempt that a callee serves, which has refused a stale one; 0 when it does not say."""
    return _number(headers.get(LOWEST_HEADER, ""))


def _number(value: str) -> int:
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else 0


def done_from_headers(headers: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Rollouts, each with its last attempt, that have ended at the caller."""
    out: list[tuple[str, int]] = []
    for item in headers.get(DONE_HEADER, "").split(",")[:MAX_RECORDED]:
        rollout_id, _, attempt = item.rpartition("/")
        if is_rollout_id(rollout_id) and attempt.isascii() and attempt.isdigit() and len(attempt) <= 9:
            out.append((rollout_id, int(attempt)))
    return tuple(out)
