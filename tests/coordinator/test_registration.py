"""Register streams without a network: who leaves is gone, at whatever moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.registration import READ_PER_S, Registration
from coordinator.registry import Registry
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
