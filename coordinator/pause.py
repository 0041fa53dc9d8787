"""How long an operation has paused a job, measured at the gates.

    pause = max over p of (closed_at[p] + closed_for[p])  -  min over p of closed_at[p]

`closed_for[p]` is what participant p itself says it was closed for, measured there. `closed_at[p]` is when its
AdmissionClosed arrived here or, when that is earlier, when its resume reply arrived less `closed_for[p]`: news can be late
and never early. So the length of a closing is the participant's own, and only the offsets between participants are ours:
a late message neither lengthens the pause nor hides a part of it. Where a participant does not say, the arrival of its
reply bounds it from above. Who has not opened yet is not counted; the summary lists it as unconfirmed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.wire.ids import ParticipantId


@dataclass(slots=True)
class PauseMeter:
    """Times are seconds of one monotonic clock."""

    _closed_at: dict[ParticipantId, float] = field(default_factory=dict[ParticipantId, float])
    _opened_at: dict[ParticipantId, float] = field(default_factory=dict[ParticipantId, float])

    def closed(self, participant_id: ParticipantId, now: float) -> None:
        """Its admission is closed. The first report counts: a repeated prepare closes nothing."""
        self._closed_at.setdefault(participant_id, now)

    def opened(self, participant_id: ParticipantId, now: float, closed_for_s: float | None) -> None:
        """Its admission is open again. None for a participant that was open already, and then never for us."""
        closed_at = self._closed_at.get(participant_id)
        if closed_at is None:
            return
        if participant_id in self._opened_at:
            return
        if closed_for_s is None:
            self._opened_at[participant_id] = now
            return
        self._closed_at[participant_id] = closed_at = min(closed_at, now - closed_for_s)
        self._opened_at[participant_id] = closed_at + closed_for_s

    def seconds(self) -> float:
        """First closed to last open, of those that are known to be open; zero before the first."""
        if not self._opened_at:
            return 0.0
        return max(0.0, max(self._opened_at.values()) - min(self._closed_at.values()))
