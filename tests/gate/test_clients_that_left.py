"""Work that nobody waits for any more: it runs to its end, is counted, and is shown to have no client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.terms import QuiesceMode
from participant_shims.gate.caller import Caller
from participant_shims.identity import ATTEMPT_HEADER, CALL_HEADER, ROLLOUT_HEADER
from tests.gate.world import Client, Node, World, until

ADD = b'{"n": 4}'
MINE = [(ROLLOUT_HEADER, "r-9"), (ATTEMPT_HEADER, "0"), (CALL_HEADER, "0.1"), ("cookie", "s=s0")]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path / "world")
    made.counters["s0"] = 0
    made.block["/add"] = asyncio.Event()
    yield made
    made.close()


def call(world: World, client: Client) -> Awaitable[Client]:
    return client.send_request(world.counter.app, "POST", "/add", ADD, MINE)


def without_identity(world: World, client: Client) -> Awaitable[Client]:
    return client.send_request(world.counter.app, "POST", "/add", ADD, [("cookie", "s=s0")])


def dispatch(world: World, client: Client) -> Awaitable[Client]:
    return world.run({"_ng_rollout_id": "r-9", "input": "abc"}, client)


def shown(node: Node) -> list[dict[str, Any]]:
    return list(node.gate.status(20)["rollouts"])


@pytest.mark.parametrize(
    ("send", "where", "rollout_id"),
    [(call, "counter", "r-9"), (without_identity, "counter", "anonymous"), (dispatch, "agent", "r-9")],
)
async def test_it_is_shown_with_how_long_it_has_had_no_client(
    world: World, send: Callable[[World, Client], Awaitable[Client]], where: str, rollout_id: str
) -> None:
    node, client = world.nodes[where], Client()
    running = asyncio.ensure_future(send(world, client))
    await until(lambda: "/add" in world.counter.served)
    world.clock.move(3)
    assert "no_client_s" not in shown(node)[0]
    client.leave()
    await until(lambda: "no_client_s" in shown(node)[0])
    world.clock.move(12)
    assert (shown(node)[0]["rollout_id"], shown(node)[0]["no_client_s"]) == (rollout_id, 12)
    world.block["/add"].set()
    await running
    await until(lambda: not shown(node))


async def test_a_client_that_comes_back_for_it_is_waited_for_again(world: World) -> None:
    first, second = Client(), Client()
    tasks = [asyncio.ensure_future(call(world, first))]
    await until(lambda: "/add" in world.counter.served)
    first.leave()
    await until(lambda: "no_client_s" in shown(world.counter)[0])
    tasks.append(asyncio.ensure_future(call(world, second)))
    await until(lambda: "no_client_s" not in shown(world.counter)[0])
    world.block["/add"].set()
    await asyncio.gather(*tasks)
    assert second.json() == {"count": 4}
    assert world.counter.served == ["/add"]


async def test_a_request_whose_task_was_ended_has_no_client_either(world: World) -> None:
    sent = asyncio.ensure_future(call(world, Client()))
    await until(lambda: "/add" in world.counter.served)
    sent.cancel()
    await asyncio.gather(sent, return_exceptions=True)
    assert shown(world.counter)[0]["no_client_s"] == 0
    world.block["/add"].set()
    await until(lambda: not shown(world.counter))


async def test_what_is_given_up_says_that_it_had_no_client(world: World) -> None:
    client = Client()
    running = asyncio.ensure_future(call(world, client))
    await until(lambda: "/add" in world.counter.served)
    client.leave()
    await until(lambda: "no_client_s" in shown(world.counter)[0])
    world.clock.move(7)
    world.counter.gate.close("op-1", QuiesceMode.DRAIN, 60)
    status = world.counter.gate.status(20)
    assert (status["orphan_count"], status["orphans_for_s"]) == (1, 7)
    assert [r["no_client_s"] for r in status["waiting_for"]] == [7]
    world.counter.gate.exclude()
    assert "no client for 7 s" in world.counter.log.excluded()[0][2]
    world.block["/add"].set()
    await running


async def test_no_message_of_a_client_is_lost_to_an_application_that_listens_for_its_end() -> None:
    sent = [
        {"type": "http.request", "body": b"a", "more_body": True},
        {"type": "http.request", "body": b"b", "more_body": False},
    ]
    gone = asyncio.Event()
    left: list[int] = []

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    with Caller(receive, lambda: left.append(1)) as caller:
        assert [(await caller.receive())["body"] for _ in range(2)] == [b"a", b"b"]
        listening = asyncio.ensure_future(caller.receive())
        await asyncio.sleep(0)
        listening.cancel()  # as an application does when its response is complete
        gone.set()
        assert [(await caller.receive())["type"] for _ in range(2)] == ["http.disconnect"] * 2
    assert left == [1]
