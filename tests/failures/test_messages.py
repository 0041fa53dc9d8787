"""Messages that are no messages, tries that come all at once, and connections that are half there."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc
import pytest
from grpc import aio
from safepoint.v1 import capabilities_pb2

from coordinator.client_patience import Budgets, Patience, retry_arguments
from coordinator.protocol.operation import Limits
from coordinator.settings import Settings
from coordinator.wire.errors import Problem, Reason, Unanswered
from coordinator.wire.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS, channel
from coordinator.wire.terms import Role
from participant_shims.registration import Registration
from tests.coordinator.conftest import Bench, until
from tests.fakes import FakeShim

METHODS = {"Coordinator": ["Save", "Restore", "Abort", "GetStatus"], "Participant": ["Prepare", "Commit", "Abort"]}


@pytest.mark.parametrize("service", METHODS)
async def test_bytes_that_are_no_request_change_nothing_and_the_connection_stays(
    bench: Bench, service: str
) -> None:  # 18
    await bench.start()
    shim = bench.shims["agent-0"]
    target = bench.running.address if service == "Coordinator" else shim.address
    before = (list(shim.calls), shim.state, bench.running.operations.past.last())
    async with channel(target) as link:
        for method, garbage in itertools.product(
            METHODS[service], (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"\x07")
        ):
            raw: Any = link.unary_stream(f"/safepoint.v1.{service}/{method}")
            call = raw(garbage, timeout=5)
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
        assert link.get_state() is grpc.ChannelConnectivity.READY
    assert (list(shim.calls), shim.state, bench.running.operations.past.last()) == before
    assert bench.running.operations.active is None
    assert (await bench.save())[-1].saved.snapshot.snapshot_id == "step-1"


def test_the_tries_of_a_thousand_trainers_are_spread_by_chance_and_bounded_by_their_budget() -> None:  # 19
    now = [0.0]

    class State:
        attempt_number = 4

    waits = []
    for _ in range(1000):
        patience = Patience("Save", "Save", 600.0, Budgets(unreachable_s=20.0), lambda: now[0])
        waits.append(retry_arguments(patience)[1](State()))  # type: ignore[arg-type]
    assert max(waits) <= 2.0
    assert max(sum(low <= wait < low + 0.05 for wait in waits) for low in (n / 20 for n in range(40))) < 200
    gone = Unanswered(Problem(Reason.UNREACHABLE, "Nobody is there."))
    patience = Patience("Save", "Save", 600.0, Budgets(unreachable_s=20.0), lambda: now[0])
    tries = 0
    while patience.again(gone):
        tries += 1
        now[0] += max(0.05, retry_arguments(patience)[1](State()))  # type: ignore[arg-type]
    assert now[0] < 23
    assert tries < 400


async def test_the_tries_of_a_thousand_shims_are_spread_by_chance_and_grow_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # 19
    class Enough(BaseException):
        """So many waits were seen."""

    async def capabilities() -> capabilities_pb2.Capabilities:
        raise Unanswered(Problem(Reason.UNREACHABLE, "Not yet."))

    every: list[list[float]] = []
    for _ in range(1000):
        waits: list[float] = []

        async def sleep(delay_s: float, waits: list[float] = waits) -> None:
            waits.append(delay_s)
            if len(waits) == 8:
                raise Enough

        monkeypatch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(Enough):
            await Registration("unix:/nowhere", capabilities, "i-1", "a:1", "job").run()
        monkeypatch.undo()
        every.append(waits)
    for number in range(8):
        waits_then = [waits[number] for waits in every]
        assert max(waits_then) > 1.8 * min(waits_then)
        assert max(waits_then) <= 5.0
    sums = sorted(sum(waits) for waits in every)
    assert sums[-1] - sums[0] > 5  # a minute after a coordinator died they come one by one
    assert min(waits[-1] for waits in every) >= 2.5


def test_calls_to_a_participant_are_repeated_a_few_times_with_growing_gaps() -> None:  # 19
    limits = Limits()
    assert limits.attempts <= 3
    assert limits.retry_after_s * 2 ** (limits.attempts - 1) <= limits.retry_most_s


def test_a_peer_that_vanished_is_noticed_long_before_a_phase_ends() -> None:  # 75
    """Without FIN or RST only a ping tells. Both ends must agree, or the pings themselves end the connection."""
    here, there = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    settings = Settings(root="/r")
    noticed_s = (here["grpc.keepalive_time_ms"] + here["grpc.http2.ping_timeout_ms"]) / 1000
    assert noticed_s < min(settings.prepare_timeout_s, settings.commit_timeout_s, settings.restore_timeout_s)
    assert here["grpc.keepalive_permit_without_calls"] == there["grpc.keepalive_permit_without_calls"] == 1
    assert there["grpc.http2.min_ping_interval_without_data_ms"] < here["grpc.keepalive_time_ms"]
    assert settings.heartbeat_s * settings.missed_heartbeats < settings.lease_ttl_s


async def test_a_shim_whose_connection_is_only_half_there_is_lost_after_three_heartbeats(bench: Bench) -> None:  # 75
    """Its bytes are taken and go nowhere: no FIN, no RST."""
    await bench.start(agents=0)
    swallow = asyncio.Event()
    host, _, port = bench.running.address.rpartition(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if not swallow.is_set():
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer), return_exceptions=True)

    link = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{link.sockets[0].getsockname()[1]}"
    shim = FakeShim("agent-0", Role.AGENT, bench.root)
    bench.shims["agent-0"] = shim
    await shim.start()
    await shim.register(address)
    registry = bench.running.operations.discovery.registry
    assert registry.get("agent-0") is not None
    swallow.set()
    await until(lambda: registry.get("agent-0") is None)
    assert "silent" in registry.missing()[0].why
    link.close()
