"""How far an operation had come when its call got no answer.

PURE but for the contract's messages. The rule: a call that ran out of time is never a bare timeout (rule 5): what its
stream has told is in the error. An answer of the coordinator is left as it is, which knows better.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire.errors import SafepointError, Unanswered
from coordinator.wire.terms import Phase

_NAMED = 5
_ASKED: Final = {
    "Prepare": Phase.PREPARE, "Commit": Phase.COMMIT, "Publish": Phase.PUBLISH, "Resume": Phase.RESUME,
}  # fmt: skip


class Heard:
    """The phase that the events of one operation have come to, and who was not done with it."""

    def __init__(self) -> None:
        self._phase = Phase.UNSPECIFIED
        self._pending: dict[str, None] = {}

    def take(self, event: pb.OperationEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "phase_started":
            try:
                self._phase = Phase(event.phase_started.phase)
            except ValueError:  # of a newer coordinator
                self._phase = Phase.UNSPECIFIED
            self._pending = dict.fromkeys(event.phase_started.participant_ids)
        elif kind == "participant_progress" and event.participant_progress.done:
            for name in (event.participant_progress.participant_id, *event.participant_progress.also_done):
                self._pending.pop(name, None)
        elif kind == "phase_finished":
            self._pending = {}

    def added_to(self, error: SafepointError, elapsed_s: float, method: str) -> SafepointError:
        """`error`; where no answer came, with phase, time and participants. `elapsed_s`: of the operation, as last told;
        `method`: what was called, which names the phase where nothing was told."""
        if not isinstance(error, Unanswered):
            return error
        if not self._phase:
            asked = _ASKED.get(method, Phase.UNSPECIFIED)
            return Unanswered(replace(error.problem, phase=error.problem.phase or asked))
        who = ", ".join(list(self._pending)[:_NAMED])
        more = len(self._pending) - _NAMED
        waited = f", and waited for {who}" + (f" and {more} more" if more > 0 else "") if who else ""
        heard = f"{error.problem.message} It was last heard of after {elapsed_s:.1f} s in {self._phase.name.lower()}{waited}."
        return Unanswered(replace(error.problem, message=heard, phase=error.problem.phase or self._phase))
