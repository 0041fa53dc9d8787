"""When to save. PURE: times are given in seconds, `now` is monotonic.

The rules, in the order in which they win:

1. Before the end: when the job's end is near or somebody told us to go (SIGTERM), one save is due at once, without any gap.
   When less than `last_chance_s` is left it is a *last chance*: nobody waits for stragglers, and the save has what is left.
   One that fails is due again at once, later ones after a short gap. An end that has passed was none: it counts no more.
2. On demand (SIGUSR1): at once, but for the gap.
3. By steps and by time: when `every_steps` or `every_s` have passed since the save before, successful or not.

Between the end of one save and the start of the next there is at least `min_gap_s`, as Flink has it, so that a save that
takes long never leaves a trainer with nothing but saves. A failed save is tried again after the gap; more than
`tolerated_failures` in a row are told to whoever drives, who stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from coordinator.wire.errors import Reason, refuse

# What a save needs for itself when it has to be done by a certain time: the publish, and everybody's opening.
MARGIN_S: Final = 1.0
# Kubernetes' terminationGracePeriodSeconds and Slurm's KillWait are both 30 s by default.
TERM_GRACE_S: Final = 30.0
SNAPSHOT_NAME: Final = "step-{step}"
# A failed save without a gap would be tried again at once, for ever.
RETRY_S: Final = 5.0


class Trigger(Enum):
    """Why a save is due."""

    TIME = "time"
    STEPS = "steps"
    DEMAND = "demand"
    PREEMPTION = "preemption"
    LAST_CHANCE = "last chance"


@dataclass(frozen=True, slots=True)
class SaveRules:
    """When to save. Seconds; 0 turns `every_s`, `every_steps`, `min_gap_s` off.

    `before_end_s`: how long before the known end of the job the last save begins. `last_chance_s`: with less left than
    that, stragglers are not waited for. `tolerated_failures`: in a row; None: any number.

    Raises INVALID_ARGUMENT naming the rule that cannot be kept.
    """

    every_s: float = 0.0
    every_steps: int = 0
    min_gap_s: float = 0.0
    before_end_s: float = 300.0
    last_chance_s: float = 30.0
    tolerated_failures: int | None = 3

    def __post_init__(self) -> None:
        for name in ("every_s", "every_steps", "min_gap_s", "before_end_s", "last_chance_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise refuse(Reason.INVALID_ARGUMENT, f"{name} must be 0 or more, not {getattr(self, name)}.")
        if self.tolerated_failures is not None and self.tolerated_failures < 0:
            raise refuse(
                Reason.INVALID_ARGUMENT, f"tolerated_failures must be 0 or more, not {self.tolerated_failures}."
            )
        if self.last_chance_s > self.before_end_s:
            raise refuse(
                Reason.INVALID_ARGUMENT,
                f"last_chance_s ({self.last_chance_s:g}) is more than before_end_s ({self.before_end_s:g}): every last "
                "save would be a last chance.",
                next_step="Set before_end_s to the time that a save takes and more.",
            )


@dataclass(frozen=True, slots=True)
class Due:
    """A save should begin now. `within_s`: seconds it has, None when nothing presses."""

    trigger: Trigger
    within_s: float | None = None

    @property
    def stragglers_wait(self) -> bool:
        """Whether there is time to wait for stragglers."""
        return self.trigger is not Trigger.LAST_CHANCE

    def __str__(self) -> str:
        if self.within_s is None:
            return self.trigger.value
        return f"{self.trigger.value}, {self.within_s:.0f} s left"


class SaveSchedule:
    """What was saved when, and what is due. `began_at`: now; `ends_at`: when the job ends, None when nobody knows."""

    def __init__(self, rules: SaveRules, began_at: float, ends_at: float | None = None) -> None:
        self.rules = rules
        self.failures = 0  # in a row
        self.saves = 0
        self._ends_at = ends_at
        self._last_at = began_at  # when the save before began, which is what a period counts from
        self._free_at = began_at  # when the gap is over
        self._last_step: int | None = None
        self._demanded = False
        self._final_done = False
        self._final_at = began_at  # when the save before the end may be tried again

    @property
    def exceeded(self) -> bool:
        """Whether more saves in a row have failed than are tolerated."""
        return self.rules.tolerated_failures is not None and self.failures > self.rules.tolerated_failures

    def demand(self) -> None:
        """Somebody wants a save."""
        self._demanded = True

    def ends(self, at: float) -> None:
        """The job ends then; the earliest that was told counts."""
        self._ends_at = at if self._ends_at is None else min(at, self._ends_at)
        self._final_done = False
        self._final_at = float("-inf")

    def due(self, now: float, step: int | None = None) -> Due | None:
        """The save that should begin now. `step`: of the trainer, when it counts them."""
        left = self._left(now)
        if left is not None and left <= self.rules.before_end_s:
            if now < self._final_at:
                return None
            if left <= MARGIN_S:
                return None  # it could not be published any more, and would keep everybody paused for nothing
            last = left <= self.rules.last_chance_s
            return Due(Trigger.LAST_CHANCE if last else Trigger.PREEMPTION, left - MARGIN_S)
        if now < self._free_at:
            return None
        if self._demanded:
            return Due(Trigger.DEMAND)
        if self._steps_due(step):
            return Due(Trigger.STEPS)
        if self.rules.every_s and now - self._last_at >= self.rules.every_s:
            return Due(Trigger.TIME)
        return None

    def wait_s(self, now: float) -> float | None:
        """How long until a save may be due without a step or a signal; None: never."""
        times: list[float] = []
        left = self._left(now)
        if left is not None and left <= MARGIN_S:
            return left
        if left is not None:
            times.append(max(now + left - self.rules.before_end_s, self._final_at))
            if left <= self.rules.before_end_s:
                return max(0.0, times[0] - now)  # nothing else is due before it
        if self._demanded:
            times.append(self._free_at)
        if self.rules.every_s:
            times.append(max(self._free_at, self._last_at + self.rules.every_s))
        return max(0.0, min(times) - now) if times else None

    def begun(self, due: Due, now: float, step: int | None = None) -> None:
        """That save begins: what comes in meanwhile asks for the next one."""
        self._last_at = now
        self._demanded = False
        if step is not None:
            self._last_step = step
        if due.trigger in (Trigger.PREEMPTION, Trigger.LAST_CHANCE):
            self._final_done = True

    def succeeded(self, now: float) -> None:
        """It is published."""
        self.saves += 1
        self.failures = 0
        self._free_at = now + self.rules.min_gap_s

    def failed(self, due: Due, now: float) -> None:
        """It was not published. It is due again after the gap, or at once before the end."""
        self.failures += 1
        self._free_at = now + max(self.rules.min_gap_s, RETRY_S)
        if due.trigger in (Trigger.PREEMPTION, Trigger.LAST_CHANCE):
            self._final_done = False
            left = self._left(now) or 0.0
            self._final_at = now if self.failures == 1 else now + min(RETRY_S, left / 4)
        else:
            self._demanded = True

    def _left(self, now: float) -> float | None:
        """Until the end that a save is still to be made before; None when there is none, or it has passed and we go on."""
        if self._ends_at is not None and now >= self._ends_at:
            self._ends_at = None  # forgotten, so that a later one that is told counts
        return None if self._ends_at is None or self._final_done else self._ends_at - now

    def _steps_due(self, step: int | None) -> bool:
        if step is None or not self.rules.every_steps:
            return False
        if self._last_step is None:
            # The first step that is shown is where counting begins: a restarted trainer must not save at once.
            self._last_step = step
            return False
        return step - self._last_step >= self.rules.every_steps
