"""Saves at the right times: `SaveSchedule` with a clock, signals and a client.

In a trainer's loop:

    with Client() as client, Autosave(client, SaveRules(every_steps=20)) as autosave:
        for step in range(steps):
            train(step)
            if autosave.due(step):
                autosave.save(step, metadata={"weights": save_weights()})
            if autosave.ending:
                break

Signals, as long as the `with` lasts and only in the main thread: SIGUSR1 asks for a save; SIGTERM says that the job ends
within `term_grace_s`, and that the loop should leave after one more save. Handlers that were there are called as well.

The end of a Slurm job is read from SLURM_JOB_END_TIME, which Slurm sets in a job's environment (seconds since the epoch).
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, Final, Protocol

from coordinator.client_results import ProgressCallback, SaveResult
from coordinator.client_schedule import SNAPSHOT_NAME, TERM_GRACE_S, Due, SaveRules, SaveSchedule, Trigger
from coordinator.wire.errors import Reason, SafepointError

log = logging.getLogger("safepoint.client")

SLURM_END: Final = "SLURM_JOB_END_TIME"
_IDLE_S: Final = 3600.0
_BY_HAND: Final = Due(Trigger.DEMAND)

Handler = Callable[[int, FrameType | None], Any] | int | None


class Saver(Protocol):
    """What is needed of a client."""

    def save(
        self,
        snapshot_id: str | None = None,
        *,
        straggler_grace: float | None = None,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> SaveResult: ...


class Autosave:
    """One loop's saves. Threads may ask, one at a time saves."""

    def __init__(
        self,
        client: Saver,
        rules: SaveRules,
        *,
        term_grace_s: float = TERM_GRACE_S,
        snapshot_name: str = SNAPSHOT_NAME,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """`snapshot_name`: of saves with a step; without one, names are made from the time."""
        self._client = client
        self._clock = clock
        self._grace_s = term_grace_s
        self._name = snapshot_name
        self._on_progress = on_progress
        self._before: dict[int, Handler] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # the one thing that a signal handler may use
        self._due: Due | None = None
        self.ending = False
        ends_in_s = _slurm_ends_in_s(os.environ if environ is None else environ, wall_clock())
        now = clock()
        self.schedule = SaveSchedule(rules, now, None if ends_in_s is None else now + ends_in_s)

    @classmethod
    def from_config(
        cls,
        client: Saver,
        path: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        on_progress: ProgressCallback | None = None,
    ) -> Autosave:
        """As the section `autosave` of the settings file says (`path`, or SAFEPOINT_CONFIG), and SAFEPOINT_AUTOSAVE_<NAME>.

        It is the coordinator's file; a trainer needs nothing else of it. Raises INVALID_ARGUMENT naming what is wrong.
        """
        from coordinator.client_config import autosave_settings

        found = autosave_settings(path, environ)
        return cls(
            client, found.rules, term_grace_s=found.term_grace_s, snapshot_name=found.snapshot_name, environ=environ,
            clock=clock, wall_clock=wall_clock, on_progress=on_progress,
        )  # fmt: skip

    def __enter__(self) -> Autosave:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGUSR1, self._demanded), (signal.SIGTERM, self._told_to_end)):
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def due(self, step: int | None = None) -> Due | None:
        """Why a save should begin now; None when none should."""
        self._due = self.schedule.due(self._clock(), step)
        return self._due

    def demand(self) -> None:
        """As SIGUSR1: a save is wanted."""
        self.schedule.demand()
        self._wake.put(None)

    def end(self) -> None:
        """As SIGTERM: the job ends within the grace."""
        self.ending = True
        self.schedule.ends(self._clock() + self._grace_s)
        self._wake.put(None)

    def save(self, step: int | None = None, metadata: Mapping[str, str] | None = None) -> SaveResult | None:
        """The save that is due, or one on demand. None when it failed and failures are tolerated: it is tried again.

        Raises what `Client.save` does when more have failed in a row than are tolerated. A failed save leaves nobody
        paused and older snapshots untouched.
        """
        due = self._due or self.schedule.due(self._clock(), step) or _BY_HAND
        self._due = None
        self.schedule.begun(due, self._clock(), step)
        extra = {"trigger": due.trigger.value} | ({"step": str(step)} if step is not None else {})
        name = self._name.format(step=step) if step is not None else None
        try:
            try:
                result = self._save(name, due, extra | dict(metadata or {}))
            except SafepointError as error:
                if name is None or error.reason is not Reason.SNAPSHOT_EXISTS:
                    raise
                # Of a life before, from which an older snapshot was restored: the last chance must not fail over a name.
                log.info("there is a snapshot %s already: this one is named by the time", name)
                result = self._save(None, due, extra | dict(metadata or {}))
        except SafepointError as error:
            self.schedule.failed(due, self._clock())
            if self.schedule.exceeded:
                error.add_note(f"{self.schedule.failures} saves in a row have failed.")
                raise
            log.warning("save (%s) failed, number %d in a row: %s", due, self.schedule.failures, error)
            return None
        self.schedule.succeeded(self._clock())
        log.info("%s (%s)", result.line, due)
        return result

    def _save(self, name: str | None, due: Due, metadata: Mapping[str, str]) -> SaveResult:
        return self._client.save(
            name, straggler_grace=None if due.stragglers_wait else 0.0, timeout=due.within_s, metadata=metadata,
            on_progress=self._on_progress,
        )  # fmt: skip

    def wait(self, longest_s: float = _IDLE_S) -> Due | None:
        """Sleep until a save is due, a signal comes, or `longest_s` have passed; what is due then. For loops without steps."""
        until = self._clock() + longest_s
        while (due := self.due()) is None and not self.ending:
            now = self._clock()
            if now >= until:
                break
            next_s = self.schedule.wait_s(now)
            with suppress(queue.Empty):
                self._wake.get(timeout=until - now if next_s is None else min(next_s, until - now))
        return due

    def _demanded(self, number: int, frame: FrameType | None) -> None:
        self.demand()
        self._pass_on(number, frame)

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        self.end()
        self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


def _slurm_ends_in_s(environ: Mapping[str, str], wall_now: float) -> float | None:
    text = environ.get(SLURM_END, "")
    try:
        left = float(text) - wall_now if text else None
    except ValueError:
        left = math.nan
    if left is not None and not 0 < left < math.inf:
        log.warning("%s=%r is no time that is to come; the end of the job is not known", SLURM_END, text)
        return None
    return left
