"""The calls that run, and those that are to be made again.

PURE. The one rule: each call number ends once. Whatever comes for it later decides nothing, and is named for what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.protocol.events import Arguments, Call, Cancel, Verdict
from coordinator.protocol.operation import Limits
from coordinator.wire.ids import OperationId, ParticipantId
from coordinator.wire.terms import Phase

CLOSING = frozenset({Phase.PREPARE, Phase.RESTORE})
OPENING = frozenset({Phase.RESUME, Phase.ABORT})


@dataclass(frozen=True, slots=True)
class Running:
    """A call that has not ended. `attempt` counts from 1."""

    call: Call
    sent_at: float
    attempt: int


@dataclass(frozen=True, slots=True)
class Retry:
    """A call that got no answer and is made again at `at`."""

    at: float
    participant_id: ParticipantId
    phase: Phase
    attempt: int


class CallBook:
    """Numbers calls, and knows which of them still count."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._last_no = 0
        self._running: dict[int, Running] = {}
        self._stale: set[int] = set()
        self._retries: dict[ParticipantId, Retry] = {}
        # Calls that may close admission, for ever: a late proof of one of them means that somebody has to open again.
        self._closing: dict[int, ParticipantId] = {}

    def make(
        self,
        participant_id: ParticipantId,
        phase: Phase,
        timeout_s: float,
        operation_id: OperationId,
        arguments: Arguments,
        now: float,
        attempt: int = 1,
    ) -> Call:
        """A new call; it takes the place of a retry that was due for this participant."""
        self._last_no += 1
        self._retries.pop(participant_id, None)
        call = Call(self._last_no, participant_id, phase, timeout_s, operation_id, arguments)
        self._running[call.call_no] = Running(call, now, attempt)
        if phase in CLOSING:
            self._closing[call.call_no] = participant_id
        return call

    def get(self, call_no: int) -> Running | None:
        """The call while it runs."""
        return self._running.get(call_no)

    def end(self, call_no: int) -> Running | Verdict:
        """The call ends now; a verdict when it does not run."""
        running = self._running.pop(call_no, None)
        if running is not None:
            return running
        if call_no in self._stale:
            self._stale.discard(call_no)
            return Verdict.STALE
        return Verdict.DUPLICATE if 0 < call_no <= self._last_no else Verdict.UNKNOWN

    def retry_later(self, running: Running, now: float) -> float:
        """Make this call again after a delay that doubles; returns when."""
        delay = min(self._limits.retry_after_s * 2.0 ** min(running.attempt - 1, 10), self._limits.retry_most_s)
        call = running.call
        self._retries[call.participant_id] = Retry(now + delay, call.participant_id, call.phase, running.attempt + 1)
        return now + delay

    def due(self, now: float) -> list[Retry]:
        """The retries whose time has come, in order; they are taken out."""
        due = sorted((r for r in self._retries.values() if r.at <= now), key=lambda r: (r.at, r.participant_id))
        for retry in due:
            del self._retries[retry.participant_id]
        return due

    def next_retry(self) -> float | None:
        """When the next retry is due."""
        return min((r.at for r in self._retries.values()), default=None)

    def cancel_all(self) -> list[Cancel]:
        """Nothing that runs counts any more."""
        cancelled = [Cancel(no, running.call.participant_id) for no, running in sorted(self._running.items())]
        self._stale.update(self._running)
        self._running.clear()
        self._retries.clear()
        return cancelled

    def forget(self, call_nos: list[int]) -> list[ParticipantId]:
        """These calls were never performed; whom they would have gone to."""
        never = [self._running.pop(no).call.participant_id for no in call_nos if no in self._running]
        for no in call_nos:
            self._closing.pop(no, None)
        return never

    def take_closing(self, call_no: int) -> ParticipantId | None:
        """Whom this call may have closed; once."""
        return self._closing.pop(call_no, None)
