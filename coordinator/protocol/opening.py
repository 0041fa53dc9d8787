"""Telling everybody to open: resume and abort, wave by wave.

PURE. The one rule: nobody waits for a participant that is stuck. A wave waits a bounded time for its answers, then the
next one is told; who has not answered is told again until it does or its lease must have freed it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.protocol.calls import CallBook, Running
from coordinator.protocol.events import AbortArguments, Effect, ResumeArguments
from coordinator.protocol.operation import Limits, Operation
from coordinator.wire.errors import Reason
from coordinator.wire.ids import ParticipantId
from coordinator.wire.terms import OperationKind, Phase

# With these answers the participant is not closed by this operation (any more).
NOT_OURS = frozenset(
    {Reason.FENCED, Reason.STALE_EPOCH, Reason.OPERATION_FINISHED, Reason.UNKNOWN_OPERATION, Reason.UNKNOWN_PARTICIPANT}
)


class Opening:
    """One resume or abort. `gone` is the caller's live view of who is lost: told, and not waited for."""

    def __init__(
        self,
        phase: Phase,
        waves: Sequence[Sequence[ParticipantId]],
        operation: Operation,
        cause: str,
        calls: CallBook,
        gone: Collection[ParticipantId],
        limits: Limits,
        now: float,
    ) -> None:
        self.phase = phase
        self.told: tuple[ParticipantId, ...] = tuple(p for wave in waves for p in wave)
        self.acknowledged: set[ParticipantId] = set()
        self._arguments = AbortArguments(cause) if phase == Phase.ABORT else ResumeArguments()
        self._operation_id = operation.operation_id
        self._waves = [list(wave) for wave in waves]
        self._wave: frozenset[ParticipantId] = frozenset()  # who was told last
        self._wave_until = now
        self._unsettled = set(self.told)  # shrinks, so that nobody is looked at for each answer of others
        self._wave_unsettled: set[ParticipantId] = set()
        # Who is fenced may hold what a restore had loaded, and must still hear whether it stays.
        self._not_ours = NOT_OURS - {Reason.FENCED} if operation.kind is OperationKind.RESTORE else NOT_OURS
        self._calls = calls
        self._gone = gone
        self._limits = limits
        self._until = now + limits.reserve_s
        self._linger_until = self._until + operation.options.lease_ttl_s  # then its lease has freed everybody

    @property
    def unconfirmed(self) -> tuple[ParticipantId, ...]:
        """Who has not said yet that it is open."""
        return tuple(sorted(self._unsettled))

    def finished(self, now: float) -> bool:
        """Whether everybody was told, and nobody is waited for any more."""
        return not self._waves and (now >= self._until or not self._awaited(self._unsettled))

    def advance(self, now: float) -> list[Effect]:
        """Tell the waves whose turn has come, and repeat what is due."""
        out: list[Effect] = []
        if now < self._linger_until:
            out += [self._call(retry.participant_id, now, retry.attempt) for retry in self._calls.due(now)]
        while self._waves and (now >= self._wave_until or not self._awaited(self._wave_unsettled)):
            wave = self._waves.pop(0)
            self._wave, self._wave_until = frozenset(wave), now + self._limits.open_wave_s
            self._wave_unsettled = self._unsettled.intersection(wave)
            out += [self._call(participant_id, now) for participant_id in wave]
        return out

    def answered(self, running: Running, now: float, *, opened: bool, reason: Reason | None = None) -> None:
        """One opening call ended: `opened`, or refused with `reason`, or not at all."""
        participant_id = running.call.participant_id
        if opened:
            self.acknowledged.add(participant_id)
        if opened or reason in self._not_ours:
            self._unsettled.discard(participant_id)
            self._wave_unsettled.discard(participant_id)
        elif now < self._linger_until:
            self._calls.retry_later(running, now)

    def again(self, participant_id: ParticipantId, now: float) -> list[Effect]:
        """Its late answer says that it is closed: tell it again."""
        self._unsettled.add(participant_id)
        if participant_id in self._wave:
            self._wave_unsettled.add(participant_id)
        self.acknowledged.discard(participant_id)
        if any(participant_id in wave for wave in self._waves):
            return []  # its turn is still to come
        return [self._call(participant_id, now)]

    def next_at(self, now: float) -> float | None:
        """When `advance` has something to do, or `finished` changes, by time alone."""
        retry = self._calls.next_retry()
        times = [retry] if retry is not None and now < self._linger_until else []
        if self._waves:
            times.append(self._wave_until)
        elif now < self._until and self._awaited(self._unsettled):
            times.append(self._until)
        return min(times, default=None)

    def _awaited(self, whom: Collection[ParticipantId]) -> bool:
        return any(p not in self._gone for p in whom)

    def _call(self, participant_id: ParticipantId, now: float, attempt: int = 1) -> Effect:
        return self._calls.make(
            participant_id, self.phase, self._limits.open_call_s, self._operation_id, self._arguments, now, attempt
        )
