"""A clock that a test moves, and what a door needs of the loop's timers."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[_Timer] = []

    def __call__(self) -> float:
        return self.now

    def later(self, delay: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(self.now + delay, call)
        self._timers.append(timer)
        return timer

    def move(self, seconds: float, *, fire: bool = True) -> None:
        """Time passes; without `fire` no timer runs, as in a process that was stopped."""
        self.now += seconds
        if fire:
            for timer in [t for t in self._timers if t.at <= self.now]:
                self._timers.remove(timer)
                if not timer.cancelled:
                    timer.call()


class _Timer:
    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True
