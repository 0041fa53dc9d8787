"""Await stacks of a worker's tasks: which code a rollout waits in, and nothing of what it holds."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from participant_shims.admission import Doors
from participant_shims.gate.stacks import MAX_FRAMES, awaited, stacks

SECRET = "s3cr3t-value"


async def deepest(token: str, until: asyncio.Event) -> None:
    await until.wait()


async def middle(token: str, until: asyncio.Event, depth: int) -> None:
    if depth:
        await middle(token, until, depth - 1)
    else:
        await deepest(token, until)


def gate(**executions: asyncio.Task[Any]) -> Any:
    doors = Doors()
    for rollout_id in executions:
        doors.enter(rollout_id)
    running = {(name, "2", "digest"): SimpleNamespace(task=task) for name, task in executions.items()}
    return SimpleNamespace(executions=running, dispatches=SimpleNamespace(running={}), doors=doors)


@pytest.fixture
async def waiting() -> AsyncIterator[Any]:
    release = asyncio.Event()
    tasks = [asyncio.create_task(middle(SECRET, release, depth)) for depth in (2, 100)]
    await asyncio.sleep(0)
    yield gate(r1=tasks[0], r2=tasks[1])
    release.set()
    await asyncio.gather(*tasks)


async def test_the_code_that_a_rollout_waits_in_is_named_outermost_first(waiting: Any) -> None:
    found = stacks(waiting, asyncio.get_running_loop(), 0, 10)
    assert [(one["rollout_id"], one["task"]) for one in found] == [("r1", "call 2"), ("r2", "call 2")]
    functions = [frame[2] for frame in found[0]["frames"]]
    assert functions == ["middle", "middle", "middle", "deepest", "Event.wait"]
    assert all(frame[0].endswith(".py") and frame[1] > 0 for frame in found[0]["frames"])


async def test_the_innermost_frames_stay_and_no_value_is_told(waiting: Any) -> None:
    found = stacks(waiting, asyncio.get_running_loop(), 0, 10)
    assert len(found[1]["frames"]) == MAX_FRAMES
    assert found[1]["frames"][-2][2] == "deepest"
    assert SECRET not in json.dumps(found)


async def test_no_more_than_asked_for(waiting: Any) -> None:
    assert len(stacks(waiting, asyncio.get_running_loop(), 0, 1)) == 1
    assert stacks(waiting, asyncio.get_running_loop(), 0, 0) == []
    assert stacks(waiting, None, 0, 10) == []


async def test_a_busy_event_loop_says_with_what(waiting: Any) -> None:
    """Asked from another thread while the loop runs Python code for long, as a control thread does."""
    loop, me, found = asyncio.get_running_loop(), threading.get_ident(), list[Any]()
    busy = threading.Event()

    def ask() -> None:
        busy.wait(20)
        found.extend(stacks(waiting, loop, me, 10))

    def crunch_numbers() -> None:
        busy.set()
        end = time.monotonic() + 20
        while not found and time.monotonic() < end:
            sum(range(1000))

    asking = threading.Thread(target=ask)
    asking.start()
    crunch_numbers()
    asking.join()
    assert found[0]["task"] == "event loop"
    assert any("crunch_numbers" in frame[2] for frame in found[0]["frames"])
    assert found[0]["rollout_id"] == ""


async def test_generators_are_followed_too() -> None:
    release = asyncio.Event()

    class Old:
        def __await__(self) -> Any:
            return (yield from release.wait().__await__())

    async def uses() -> None:
        await Old()

    task = asyncio.create_task(uses())
    await asyncio.sleep(0)
    names = [frame[2].rpartition(".")[2] for frame in awaited(task.get_coro())]
    release.set()
    await task
    assert names[:2] == ["uses", "__await__"]
