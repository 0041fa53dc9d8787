"""What a relay tells its coordinator of who is behind it, without a network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import convert
from coordinator.registry import Registry
from coordinator.relay.standing import MAX_NEWS, Standing
from coordinator.relay_registration import _Behind
from coordinator.wire.terms import Role
from tests.relay.test_relay_calls import RELAY


class Told(Standing):
    """One that is registered, and keeps what it sends."""

    def __init__(self) -> None:
        super().__init__(pb.RelayHello(relay_id="n1"), "nowhere", "job", None, lambda record: record)  # type: ignore[arg-type,return-value]
        self.welcomed.set()
        self.news: list[pb.RelayNews] = []

    def send(self, request: Any) -> None:
        self.news.append(request.news)

    def here(self) -> list[str]:
        """Whom a coordinator has that has heard all of it, with their incarnations."""
        registry = Registry(lambda: 0.0, 3.0)
        behind = _Behind(registry, RELAY, convert.hello)
        for news in self.news:
            behind.news(news)
        return [f"{who.participant_id} {who.incarnation_id}" for who in registry.participants()]


def hello(name: str, incarnation: str) -> pb.Hello:
    made = pb.Hello(incarnation_id=incarnation, address="127.0.0.1:1")
    made.capabilities.participant_id, made.capabilities.role = name, int(Role.AGENT)  # type: ignore[assignment]
    return made


async def joining(standing: Standing, name: str, incarnation: str) -> asyncio.Task[Any]:
    asked = asyncio.create_task(standing.admit(hello(name, incarnation)))
    await asyncio.sleep(0)
    return asked


async def leaving(standing: Standing, asked: asyncio.Task[Any], name: str, incarnation: str) -> None:
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    standing.leave(name, incarnation, "its registration ended", "")


@pytest.mark.parametrize(
    ("what", "left_over"),
    [
        (["+a", "-a"], []),
        (["+a", "-a", "+a"], ["agent a"]),
        (["+a", "-a", "+a", "-a"], []),
        (["+a", "-a", "+b"], ["agent b"]),
        (["+a", "-a", "+b", "-b", "+a"], ["agent a"]),
    ],
)
async def test_who_comes_and_goes_within_a_moment_is_here_in_the_end_or_is_not(
    what: list[str], left_over: list[str]
) -> None:
    """One that had gone stayed for ever, since comings were told after goings, and kept its successor out."""
    standing = Told()
    asked: dict[str, asyncio.Task[Any]] = {}
    for step in what:
        if step[0] == "+":
            asked[step[1]] = await joining(standing, "agent", step[1])
        else:
            await leaving(standing, asked[step[1]], "agent", step[1])
    async with asyncio.timeout(5):
        while not standing.news:
            await asyncio.sleep(0.001)
    assert standing.here() == left_over
    for task in asked.values():
        task.cancel()
    await asyncio.gather(*asked.values(), return_exceptions=True)


async def test_many_comings_are_told_in_messages_of_bounded_size() -> None:
    standing = Told()
    asked = [asyncio.create_task(standing.admit(hello(f"agent-{n}", "i"))) for n in range(MAX_NEWS + 5)]
    async with asyncio.timeout(5):
        while sum(len(news.joined) for news in standing.news) < len(asked):
            await asyncio.sleep(0.001)
    assert max(len(news.joined) for news in standing.news) <= MAX_NEWS
    assert len(standing.here()) == len(asked)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
