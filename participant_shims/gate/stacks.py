"""Where the tasks of the rollouts stand: their await stacks, as files, lines and functions.

The rule kept here: names of code only, never a value of anybody's, and nothing is kept for it while nobody asks. Read from
the control thread, so also while the event loop is busy; then the loop's own stack says with what.

A handler may run in other tasks than the one that the gate began (middlewares start some): they inherit its scope, by which
they are found where tasks tell their context (Python 3.12). A function that runs in a worker thread has no rollout.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from participant_shims.admission import ANONYMOUS
from participant_shims.gate.core import Gate
from participant_shims.gate.outbound import CURRENT

MAX_FRAMES: Final = 32
_MAX_DEPTH: Final = 1000
_MAX_ROLLOUTS: Final = 1000
# Where an event loop (uvloop's is below Python), and a pool's thread, wait for work.
_IDLE: Final = frozenset({"select", "poll", "get", "wait", "_worker", "run", "run_until_complete", "run_forever"})
_POOLS: Final = ("AnyIO worker thread", "ThreadPoolExecutor", "asyncio_")

Frame = tuple[str, int, str]


def stacks(gate: Gate, loop: asyncio.AbstractEventLoop | None, loop_thread: int, limit: int) -> list[dict[str, Any]]:
    """At most `limit`: what keeps the worker's threads busy, then its rollouts' tasks, the longest-standing first."""
    if loop is None:
        return []
    found = [{"rollout_id": "", "task": task, "frames": frames} for task, frames in _threads(loop_thread)]
    order = {s.rollout_id: n for n, s in enumerate(gate.doors.rollouts(_MAX_ROLLOUTS)[0])}
    mine = sorted(_tasks(gate, loop), key=lambda each: order.get(each[0], _MAX_ROLLOUTS))
    for rollout_id, task, coroutine in mine:
        frames = list(awaited(coroutine))[-MAX_FRAMES:]
        if frames:
            found.append({"rollout_id": rollout_id, "task": task, "frames": frames})
    return found[: max(0, limit)]


def awaited(waiting: Any) -> Iterator[Frame]:
    """What a coroutine waits in, outermost first: its own frame, and that of each that it awaits, up to a future."""
    for _ in range(_MAX_DEPTH):
        for frame, inner in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
            if hasattr(waiting, frame):
                if (here := getattr(waiting, frame)) is not None:
                    yield _place(here)
                waiting = getattr(waiting, inner)
                break
        else:
            return


def _tasks(gate: Gate, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, str, Any]]:
    own: dict[Any, tuple[str, str]] = {}
    for (rollout_id, call_id, _), execution in list(gate.executions.items()):
        if execution.task is not None:
            own[execution.task] = (rollout_id, f"call {call_id}")
    for rollout_id, execution in list(gate.dispatches.running.items()):
        if execution.task is not None:
            own[execution.task] = (rollout_id, "dispatch")
    for task in _all_tasks(loop):
        if task in own:
            yield *own[task], task.get_coro()  # pyright: ignore[reportUnknownMemberType]
            continue
        context: Any = getattr(task, "get_context", None)
        scope: Any = context().get(CURRENT) if context is not None else None
        if scope is not None and scope.identity.rollout_id != ANONYMOUS:
            name = f"call {scope.identity.call_id}, within"
            yield scope.identity.rollout_id, name, task.get_coro()  # pyright: ignore[reportUnknownMemberType]


def _all_tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    for _ in range(5):
        try:
            return asyncio.all_tasks(loop)
        except RuntimeError:  # the set changed while it was read
            continue
    return set()


def _threads(loop_thread: int) -> Iterator[tuple[str, list[Frame]]]:
    """Threads that do something now: the event loop's when it is busy, and those of pools that run handlers."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        name = names.get(number, "")
        if number == loop_thread or name.startswith(_POOLS):
            frames = _outwards(frame)
            if frames and frames[-1][2].rpartition(".")[2] not in _IDLE:
                yield ("event loop" if number == loop_thread else f"thread {name}"[:128]), frames[-MAX_FRAMES:]


def _outwards(frame: FrameType | None) -> list[Frame]:
    found: list[Frame] = []
    while frame is not None and len(found) < _MAX_DEPTH:
        found.append(_place(frame))
        frame = frame.f_back
    return found[::-1]


def _place(frame: FrameType) -> Frame:
    return frame.f_code.co_filename[-256:], frame.f_lineno, frame.f_code.co_qualname[-128:]
