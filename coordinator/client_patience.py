"""How long a client call is repeated, and what it says when it gives up.

The rule: a call is repeated only when its effect is unknown or known to be nothing, always with the same operation_id,
and never beyond the caller's deadline. Each kind of failure has a budget of its own, counted from the first failure of
that kind in a row, and the error that is raised names the budget that ran out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tenacity import RetryCallState, retry_if_exception, stop_never, wait_random_exponential
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from coordinator.wire.errors import NOBODY_REACHED, SILENT, Problem, Reason, Refused, SafepointError, Unanswered, refuse
from coordinator.wire.record import FILE, Record, how_to_look, how_to_start

# What a call may be given. Less is over before an answer can come; with far more gRPC's own clock runs over, and every try
# ends at once as if the coordinator were silent.
LEAST_TIMEOUT_S: Final = 0.1
MOST_TIMEOUT_S: Final = 365.0 * 86400

# Seconds the server gets of each call; the caller's `timeout` replaces it.
DEADLINES_S: Final[Mapping[str, float]] = {
    "Save": 600.0,
    "Restore": 1800.0,
    "Prepare": 600.0,
    "Commit": 600.0,
    "Publish": 120.0,
    "Resume": 60.0,
    "Abort": 15.0,
    "GetStatus": 5.0,
    "GetTopology": 30.0,
    "ListSnapshots": 30.0,
    "ReadLedger": 300.0,
    "VerifySnapshot": 1800.0,
    "FetchSnapshot": 1800.0,
    "PruneSnapshots": 300.0,
    "PinSnapshot": 30.0,
    "UnpinSnapshot": 30.0,
    "RetireRollouts": 30.0,
    "Explain": 10.0,
    "ListOperations": 10.0,
    "Watch": 3600.0,
}


def checked_timeout(timeout_s: float | None) -> float | None:
    """Raises Refused(INVALID_ARGUMENT) for what no call can be given; None is the default of its kind."""
    if timeout_s is not None and not LEAST_TIMEOUT_S <= timeout_s <= MOST_TIMEOUT_S:  # also false for nan
        raise refuse(
            Reason.INVALID_ARGUMENT,
            f"timeout must be {LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S:.0f} seconds (a year), not {timeout_s!r}. Nobody was called.",
            next_step="Leave it out for the default of the call, or give it as many seconds as you want to wait.",
        )
    return timeout_s


@dataclass(frozen=True, slots=True)
class Budgets:
    """Seconds for which each kind of failure is repeated.

    `unreachable_s`: no word came at all; a coordinator that its host restarts on another node is back in under 20 s.
    `lost_reply_s`: the answer was lost after it had begun to come. `not_ready_s`: the coordinator says that it is
    starting, or has too much to do.
    """

    unreachable_s: float = 60.0
    lost_reply_s: float = 120.0
    not_ready_s: float = 60.0


class Patience:
    """The time of one client call: deadline, budgets, and the last word. One object per call, not shared."""

    def __init__(
        self,
        method: str,
        about: str,
        timeout_s: float | None,
        budgets: Budgets,
        clock: Callable[[], float] = time.monotonic,
        target: str = "",
        unreachable_s: float | None = None,
    ) -> None:
        """`target`: where the coordinator is looked for, for the advice. `unreachable_s`: at most so much of the budget for one
        that cannot be reached."""
        self.record = Record("")  # of the last try, as far as it came to one
        self._target = target
        self._method = method
        self._about = about
        checked = checked_timeout(timeout_s)
        self._total_s = DEADLINES_S[method] if checked is None else checked
        self._budgets = budgets
        if unreachable_s is not None:
            self._budgets = replace(budgets, unreachable_s=min(budgets.unreachable_s, unreachable_s))
        self._clock = clock
        self._began = clock()
        self._tries = 0
        self._kind = ""
        self._kind_since = 0.0
        self._heard = False
        self._reached = False  # a try may have come to somebody
        self._try_began = self._began
        self._not_before_s = 0.0  # what the peer asked for

    def next_try_s(self) -> float:
        """Begin a try; the seconds it may take. At least a little: the server answers a short deadline with a reason."""
        self._tries += 1
        self._heard = False
        self._try_began = self._clock()
        return max(0.05, self._left())

    def heard(self) -> None:
        """A part of the answer came: what fails from now on is a lost reply.

        Budgets start afresh when a try has gone well for a while; at once would let a peer that always breaks off after
        its first word be called for ever.
        """
        self._heard = True
        if self._kind != "lost_reply" or self._clock() - self._try_began > _WENT_WELL_S:
            self._kind = ""

    def again(self, error: BaseException) -> bool:
        """Whether the call is repeated after `error`."""
        kind = self._kind_of(error)
        if not kind:
            return False
        self._reached |= not _nobody(error)
        hint = error.problem.retry_after_s if isinstance(error, SafepointError) else None
        self._not_before_s = hint or 0.0
        if kind != self._kind:
            self._kind, self._kind_since = kind, self._clock()
        return self._clock() - self._kind_since < self._budget(kind) and self._left() > 0.1

    def pause_s(self) -> float:
        """How long to wait after a stream broke off, before it is begun again."""
        return self.wait_s(random.uniform(0.05, 0.3))

    def wait_s(self, backoff_s: float) -> float:
        """How long to wait before the next try: as the peer asked, and a little more, since it asked others the same."""
        return max(0.0, min(self._not_before_s + backoff_s, self._left() - 0.05))

    def last_word(self, error: SafepointError, operation_id: str = "") -> SafepointError:
        """`error` as the caller gets it: which budget ran out, and what is known of the effect."""
        kind = self._kind_of(error)
        if not kind:
            return error
        spent = self._clock() - self._began
        if self.expired:
            why = f"the deadline of {self._total_s:g} s passed"
        else:
            why = f"the budget for {_BUDGET_NAMES[kind]} is {self._budget(kind):g} s"
        tries = {0: "looking", 1: "one try"}.get(self._tries, f"{self._tries} tries")
        message = f"{self._about}: {error.problem.message.rstrip('. ')}."
        if self.expired or self._budget(kind) > 0:  # who did not mean to wait has given nothing up
            message += f" Gave up after {tries} in {spent:.1f} s: {why}."
        problem = replace(
            error.problem,
            message=message,
            operation_id=error.problem.operation_id or operation_id,
            waited_s=None,
            next_step=self._advice(error.problem, operation_id),
        )
        return type(error)(problem)

    @property
    def expired(self) -> bool:
        """Whether the deadline of the call has passed."""
        return self._left() <= 0.1

    def _advice(self, problem: Problem, operation_id: str) -> str:
        silent = SILENT.items() <= problem.metadata.items()
        if not self._reached:
            return problem.next_step or (how_to_look(self.record) if silent else self._how_to_start())
        if operation_id and self._method != "Abort":
            return (
                f"It may have been done: `safepoint status` says how {operation_id} stands, repeating it with the same "
                "operation_id is safe, and `safepoint abort` ends it."
            )
        if problem.next_step:
            return problem.next_step
        if silent:
            return how_to_look(self.record)
        return "See whether the coordinator runs, and whether it is the one that is named (-c, SAFEPOINT_COORDINATOR)."

    def _how_to_start(self) -> str:
        start = f"Start one with {how_to_start(self._target)}"
        return (
            f"{start}."
            if self._target.startswith(FILE)
            else f"{start}, or name the one that runs (-c, SAFEPOINT_COORDINATOR)."
        )

    def _kind_of(self, error: BaseException) -> str:
        if isinstance(error, Unanswered):
            return "lost_reply" if self._heard else "unreachable"
        if not isinstance(error, Refused) or error.problem.participant_id or error.problem.phase:
            return ""  # how an operation failed, which is recorded: asked again it would say the same
        if error.reason is Reason.UNAVAILABLE or error.problem.retry_after_s is not None:
            return "not_ready"
        return ""

    def _budget(self, kind: str) -> float:
        return float(getattr(self._budgets, kind + "_s"))

    def _left(self) -> float:
        return self._total_s - (self._clock() - self._began)


def _nobody(error: BaseException) -> bool:
    """Whether the call was never sent."""
    return isinstance(error, Unanswered) and NOBODY_REACHED.items() <= error.problem.metadata.items()


_WENT_WELL_S: Final = 5.0
_BUDGET_NAMES: Final = {
    "unreachable": "a coordinator that cannot be reached",
    "lost_reply": "a lost reply",
    "not_ready": "a coordinator that is not ready",
}


def retry_arguments(patience: Patience) -> tuple[retry_base, wait_base, stop_base]:
    """`retry`, `wait` and `stop` for tenacity: full jitter from 0.1 s, at most 2 s, so that many callers spread out."""
    return retry_if_exception(patience.again), _Wait(patience), stop_never


class _Wait(wait_base):
    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._backoff = wait_random_exponential(multiplier=0.1, max=2.0)

    def __call__(self, retry_state: RetryCallState) -> float:
        return self._patience.wait_s(self._backoff(retry_state))
