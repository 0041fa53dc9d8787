"""How an operation's progress is shown: bars on a terminal, plain lines in a pipe, nothing when JSON is asked for.

The rule: it writes to stderr only, and what it does can never end the operation.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from coordinator.cli_output import note, quoted_once, short
from coordinator.client_results import ProgressCallback, size_text
from coordinator.client_words import describe

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from safepoint.v1 import coordinator_service_pb2 as pb


@contextlib.contextmanager
def progress(quiet: bool) -> Generator[ProgressCallback | None, None, None]:
    """What to pass as `on_progress`."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield bars.take
    else:
        lines = _Lines()
        yield lines.take


class _Lines:
    """A line for each event that says something new; a participant that only counts on is told once a phase."""

    def __init__(self) -> None:
        self._told: set[tuple[int, str, bool]] = set()

    def take(self, event: pb.OperationEvent) -> None:
        if event.WhichOneof("event") == "participant_progress":
            step = event.participant_progress
            key = (step.phase, step.participant_id, step.done)
            if key in self._told:
                return
            self._told.add(key)
        text = describe(event)
        if text and event.WhichOneof("event") != "failed":  # the command itself says why it failed
            note(quoted_once(text, never=True))


class _Bars:
    """A bar for each participant of the present phase: bytes while exporting, requests while draining."""

    def __init__(self, view: Progress) -> None:
        self._view = view
        self._tasks: dict[str, TaskID] = {}
        self._most: dict[str, int] = {}

    def take(self, event: pb.OperationEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "phase_started":
            for task in self._tasks.values():
                self._view.remove_task(task)
            self._tasks.clear()
            self._most.clear()
        if kind == "participant_progress":
            self._step(event.participant_progress)
        elif kind in ("phase_finished", "warning"):
            self._view.console.print(describe(event), highlight=False, markup=False)

    def _step(self, step: pb.ParticipantProgress) -> None:
        who = step.participant_id
        if who not in self._tasks:
            name = f"{short(step, 'phase')} {who}"
            self._tasks[who] = self._view.add_task(name, total=None, detail="")
        task = self._tasks[who]
        if step.bytes_total:
            self._view.update(task, total=step.bytes_total, completed=step.bytes_done)
        elif step.items_total:
            self._view.update(task, total=step.items_total, completed=step.items_done)
        else:
            most = self._most[who] = max(self._most.get(who, 0), step.in_flight)
            if most:
                self._view.update(task, total=most, completed=most - step.in_flight)
        if step.done:
            self._view.update(task, total=1, completed=1)
        parts = [
            f"{n} {what}"
            for n, what in ((step.in_flight, "in flight"), (step.parked, "parked"), (step.held, "held"))
            if n
        ]
        if step.bytes_done:
            parts.append(size_text(step.bytes_done))
        if step.waiting_for:
            oldest = step.waiting_for[0]
            parts.append(f"waits for {oldest.rollout_id}" + (f" on {oldest.waiting_on}" if oldest.waiting_on else ""))
        self._view.update(task, detail=", ".join(parts))


@contextlib.contextmanager
def _bars() -> Generator[_Bars, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as view:
        yield _Bars(view)
