"""Register streams without a network: who leaves is gone, at whatever moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.registration import READ_PER_S, Awake, Registration
from coordinator.registry import Registry
from coordinator.wire.errors import Problem
from tests.coordinator.test_parts import participant, registry


def serving(made: Registry, requests: asyncio.Queue[pb.RegisterRequest]) -> asyncio.Task[None]:
    async def messages() -> AsyncIterator[pb.RegisterRequest]:
        while True:
            yield await requests.get()

    async def serve() -> None:
        async for _ in Registration(made, 1, "default", 1.5).serve(messages()):
            pass

    return asyncio.create_task(serve())


@pytest.mark.parametrize("steps", range(8))
async def test_a_stream_that_is_cancelled_while_its_hello_arrives_registers_nobody(steps: int) -> None:
    # A coordinator that was stopped finds both at once. A stream that goes on would hold the name against its successor.
    made, _, _, _ = registry()
    requests: asyncio.Queue[pb.RegisterRequest] = asyncio.Queue()
    task = serving(made, requests)
    for _ in range(4):
        await asyncio.sleep(0)
    who = participant("i-1")
    hello = pb.Hello(capabilities=convert.capabilities(who), incarnation_id=who.incarnation_id, address=who.address)
    requests.put_nowait(pb.RegisterRequest(hello=hello))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    ended = task.done()
    task.cancel()
    assert ended
    assert made.participants() == ()


async def test_who_joins_a_large_fleet_is_heard_less_often_and_may_be_silent_for_as_many_beats() -> None:
    made, clock, lost, _ = registry()
    for number in range(1000):
        made.register(participant(name=f"p-{number}"))
    requests: asyncio.Queue[pb.RegisterRequest] = asyncio.Queue()

    async def messages() -> AsyncIterator[pb.RegisterRequest]:
        while True:
            yield await requests.get()

    who = participant(name="late")
    hello = pb.Hello(capabilities=convert.capabilities(who), incarnation_id=who.incarnation_id, address=who.address)
    requests.put_nowait(pb.RegisterRequest(hello=hello))
    stream = Registration(made, 1, "default", 1.0).serve(messages())
    welcome = (await anext(stream)).welcome
    assert welcome.heartbeat_interval.seconds == 10
    clock.now = 29.0
    made.reap()
    assert [participant.participant_id for participant in made.participants()] == ["late"]
    clock.now = 31.0
    made.reap()
    assert not made.participants()
    assert len(lost) == 1001
    await stream.aclose()  # type: ignore[attr-defined]


async def test_who_sends_more_than_its_heartbeats_is_read_no_faster_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _, _, _ = registry()
    beats: list[object] = []
    monkeypatch.setattr(Registry, "beat", lambda _, session: beats.append(session))
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[pb.RegisterRequest] = asyncio.Queue()
    who = participant("i-1")
    hello = pb.Hello(capabilities=convert.capabilities(who), incarnation_id=who.incarnation_id, address=who.address)
    requests.put_nowait(pb.RegisterRequest(hello=hello))
    for _ in range(10 * READ_PER_S):
        requests.put_nowait(pb.RegisterRequest(heartbeat=pb.Heartbeat()))
    task = serving(made, requests)
    with monkeypatch.context() as patch:
        now = loop.time()
        patch.setattr(loop, "time", lambda: now)  # no time passes: nobody who sleeps wakes
        for _ in range(20 * READ_PER_S):
            await asyncio.sleep(0)
    assert len(beats) == READ_PER_S
    task.cancel()
    await asyncio.wait({task}, timeout=10)


def test_a_sleep_is_known_before_and_after_the_first_tick_that_follows_it_and_for_a_while() -> None:
    now = 0.0
    awake = Awake(lambda: now, lambda: 1.0)
    now += 100.0
    assert not awake.slept_s(1.0), "nobody ticks"
    awake.tick()
    for _ in range(3):
        now += 1.2
        assert not awake.slept_s(1.0)
        assert not awake.tick()
    now += 5.0
    assert awake.slept_s(1.0) == pytest.approx(5.0)
    assert awake.tick()
    assert awake.slept_s(1.0) == pytest.approx(5.0)
    assert not awake.slept_s(3.0), "who is heard every 3 s leaves later"
    now += 1.0
    assert not awake.tick()
    assert awake.slept_s(1.0) == pytest.approx(5.0)
    now += 1.5
    assert not awake.tick()
    assert not awake.slept_s(1.0), "who leaves now has another reason"


async def test_who_left_while_the_coordinator_did_not_run_is_not_said_to_be_gone() -> None:
    made, clock, _, _ = registry()
    problems: list[Problem] = []
    made.follow(lambda _, problem: problems.append(problem), lambda _: None)
    requests: asyncio.Queue[pb.RegisterRequest | None] = asyncio.Queue()

    async def messages() -> AsyncIterator[pb.RegisterRequest]:
        while (request := await requests.get()) is not None:
            yield request

    who = participant("i-1")
    hello = pb.Hello(capabilities=convert.capabilities(who), incarnation_id=who.incarnation_id, address=who.address)
    requests.put_nowait(pb.RegisterRequest(hello=hello))
    registration = Registration(made, 1, "default", 1.5)
    stream = registration.serve(messages())
    assert (await anext(stream)).HasField("welcome")
    registration.awake.tick()
    clock.now += 7.0
    requests.put_nowait(None)
    assert [event async for event in stream] == []
    (problem,) = problems
    assert "has left: its registration ended" in problem.message
    assert "while the coordinator did not run, for 7.0 s" in problem.message
    assert "See what stopped the coordinator" in problem.advice
