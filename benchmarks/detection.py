"""How long after the last request has finished it is known elsewhere: streams, long-poll, and polls.

Every participant is told beforehand when, on the machine's clock, its last request ends. What is measured is from then to
the moment at which the asking process has the answer, for each participant by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, Final

import aiohttp
from safepoint.v1 import coordinator_service_pb2 as pb

from benchmarks.fleets import fleets, work
from benchmarks.fleets.fleets import OurFleet
from benchmarks.measure import in_turn, percentile, ratio, spread
from benchmarks.results import Results, Table
from benchmarks.scale import Scale
from coordinator import convert
from coordinator.participants import Participants
from coordinator.protocol import events as core
from coordinator.protocol.topology import Participant
from coordinator.wire.ids import OperationId
from coordinator.wire.terms import Phase, QuiesceMode, StragglerPolicy

COUNT: Final = 40
BEGIN_S: Final = 0.4  # for all to be asked before the first is quiet
DRAINING_S: Final = 0.8
TIMEOUT_S: Final = 30.0
PREFIX: Final = "/ng-control/v1/checkpoint"


def run(scale: Scale, results: Results) -> None:
    """Fills `drain_detection_vs_poll_200ms`."""
    rounds = max(3, scale.drains // COUNT)
    with ExitStack() as stack, asyncio.Runner() as runner:
        ours = stack.enter_context(fleets.ours(COUNT))
        ports = stack.enter_context(fleets.peer_servers(COUNT))
        asking = runner.run(Asking.begin(whom(ours), ports))
        numbers = itertools.count()

        def contender(ask: Callable[[str], Awaitable[list[float]]]) -> Callable[[], list[float]]:
            def once() -> list[float]:
                begin = time.monotonic() + BEGIN_S
                return runner.run(
                    _bounded(ask(work.operation_name_at(f"detect-{next(numbers)}", (begin, begin + DRAINING_S))))
                )

            return once

        contenders = {
            "stream (Safepoint)": contender(asking.by_stream),
            "HTTP long-poll": contender(asking.by_long_poll),
            "HTTP poll, 50 ms": contender(lambda operation: asking.by_poll(operation, 0.05)),
            "HTTP poll, 200 ms": contender(lambda operation: asking.by_poll(operation, 0.2)),
        }
        for warm in contenders.values():
            warm()
        delays = in_turn(contenders, rounds)
        runner.run(asking.end())
    p99 = {name: [percentile(delay, 0.99) for delay in found] for name, found in delays.items()}
    results.ratios["drain_detection_vs_poll_200ms"] = ratio(p99["HTTP poll, 200 ms"], p99["stream (Safepoint)"])
    rows = [
        (name, str(spread(percentile(d, 0.5) for d in found).scaled(1000)), str(spread(p99[name]).scaled(1000)))
        for name, found in delays.items()
    ]
    note = f"{COUNT} participants, each round {DRAINING_S} s of drains that end one after the other."
    results.tables.append(Table("From the end of a drain until it is known", ("how", "p50, ms", "p99, ms"), rows, note))
    results.figures["drain_detection_p99_s"] = p99
    for row in rows:
        print(f"  {row[0]}: p50 {row[1]} ms, p99 {row[2]} ms", flush=True)


class Asking:
    """One process that asks all participants, in either way. Answers are delays in seconds, of the resources servers."""

    def __init__(self, fleet: list[Participant], ports: dict[str, int], http: aiohttp.ClientSession) -> None:
        self._fleet, self._ports, self._http = fleet, ports, http
        self._participants = Participants(epoch=1_000_000)  # above the fleet's own coordinator, which is idle
        self._call_no = itertools.count(1)

    @staticmethod
    async def begin(fleet: list[Participant], ports: dict[str, int]) -> Asking:
        return Asking(fleet, ports, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

    async def end(self) -> None:
        await self._http.close()
        await self._participants.close()

    async def by_stream(self, operation: str) -> list[float]:
        async def one(whom: Participant) -> float:
            prepare = core.PrepareArguments(QuiesceMode.HOLD, StragglerPolicy.EXCLUDE, TIMEOUT_S, TIMEOUT_S)
            await self._perform(whom, Phase.PREPARE, operation, prepare)
            return time.monotonic() - work.quiet_at(operation, whom.participant_id, work.RESOURCES, 0.0)

        found = await asyncio.gather(*map(one, self._fleet))
        await asyncio.gather(
            *(self._perform(whom, Phase.RESUME, operation, core.ResumeArguments()) for whom in self._fleet)
        )
        return found

    async def by_long_poll(self, operation: str) -> list[float]:
        return await self._by_http(operation, lambda url, asked: self._post(f"{url}/prepare", {**asked, "wait": True}))

    async def by_poll(self, operation: str, every_s: float) -> list[float]:
        async def wait(url: str, asked: dict[str, Any]) -> None:
            reply = await self._post(f"{url}/prepare", asked)
            await asyncio.sleep(random.uniform(0, every_s))  # no poll knows when the drain will end
            while not reply["report"]["ready"]:
                await asyncio.sleep(every_s)
                async with self._http.get(f"{url}/status") as response:
                    reply = await response.json()

        return await self._by_http(operation, wait)

    async def _by_http(self, operation: str, wait: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> list[float]:
        asked = {"checkpoint_id": operation, "deadline_ts": time.time() + TIMEOUT_S}
        names = [name for name in self._ports if name.startswith(work.RESOURCES)]

        async def one(name: str) -> float:
            url = f"http://127.0.0.1:{self._ports[name]}{PREFIX}"
            await wait(url, asked)
            delay = time.monotonic() - work.quiet_at(operation, name, work.RESOURCES, 0.0)
            await self._post(f"{url}/resume", asked)
            return delay

        return await asyncio.gather(*map(one, names))

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        async with self._http.post(url, json=body) as response:
            response.raise_for_status()
            return await response.json()

    async def _perform(self, whom: Participant, phase: Phase, operation: str, arguments: core.Arguments) -> None:
        call = core.Call(next(self._call_no), whom.participant_id, phase, TIMEOUT_S, OperationId(operation), arguments)
        await self._participants.perform(whom, call, lambda _: None, lambda: None)


def whom(fleet: OurFleet) -> list[Participant]:
    """The resources servers of a fleet, as its coordinator knows them."""
    found: list[Participant] = []
    for info in fleet.stub.GetTopology(pb.GetTopologyRequest(), timeout=TIMEOUT_S).participants:
        if info.capabilities.participant_id.startswith(work.RESOURCES):
            found.append(convert.participant(info.capabilities, info.incarnation_id, info.address))
    return found


async def _bounded(asking: Awaitable[list[float]]) -> list[float]:
    async with asyncio.timeout(TIMEOUT_S):
        return await asking
