"""A shim stays announced: against a coordinator that refuses, dies, moves, falls silent, or is another job's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from safepoint.v1 import capabilities_pb2, coordinator_service_pb2_grpc
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire.errors import JOB, Problem, Reason, Refused, refuse
from coordinator.wire.remarks import COORDINATOR_SILENT, REGISTRATION_ENDS, SILENT
from coordinator.wire.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS, ErrorInterceptor
from coordinator.wire.staying import AnotherJob
from participant_shims.interruptions import TIMES, WITHIN_S, Interruptions
from participant_shims.registration import Registration
from tests.shims.shim_fakes import until


class FakeCoordinator(coordinator_service_pb2_grpc.CoordinatorServicer):
    """Registers whoever comes, unless a knob says otherwise. `beats` counts what was heard."""

    def __init__(self, job_id: str = "job", epoch: int = 1, interval_s: float = 0.05) -> None:
        self.job_id, self.epoch, self.interval_s = job_id, epoch, interval_s
        self.hellos: list[pb.Hello] = []
        self.beats = 0
        self.silent = False
        self.refuses = 0
        self.ends = False
        self.another_job = ""  # as a coordinator of that job it refuses everybody
        self.server: aio.Server | None = None

    async def Register(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.RegisterEvent]:
        first = await anext(request_iterator)
        self.hellos.append(first.hello)
        if self.another_job:
            problem = Problem(
                Reason.INVALID_ARGUMENT, f"This is a coordinator of job {self.another_job!r}.",
                metadata={JOB: self.another_job},
            )  # fmt: skip
            raise Refused(problem)
        if self.refuses:
            self.refuses -= 1
            raise refuse(Reason.DUPLICATE_PARTICIPANT, "Somebody has this name.")
        welcome = pb.Welcome(coordinator_epoch=self.epoch, job_id=self.job_id)
        welcome.heartbeat_interval.FromMilliseconds(int(self.interval_s * 1000))
        yield pb.RegisterEvent(welcome=welcome)
        listening = asyncio.create_task(self._listen(request_iterator))
        try:
            while True:
                await asyncio.sleep(self.interval_s)
                if self.ends:
                    return
                if not self.silent:
                    yield pb.RegisterEvent(heartbeat=pb.Heartbeat())
        finally:
            listening.cancel()

    async def _listen(self, requests: Any) -> None:
        async for request in requests:
            self.beats += request.HasField("heartbeat")

    async def start(self, target: str) -> None:
        self.server = aio.server(interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS)
        coordinator_service_pb2_grpc.add_CoordinatorServicer_to_server(self, self.server)
        self.server.add_insecure_port(target)
        await self.server.start()

    async def die(self) -> None:
        if self.server is not None:
            await self.server.stop(0)


async def capabilities() -> capabilities_pb2.Capabilities:
    return capabilities_pb2.Capabilities(participant_id="counter")


def registration(target: str, tell: Callable[[str], None] = print) -> Registration:
    return Registration(target, capabilities, "i-1", "127.0.0.1:7", "job", wait_s=(0.02, 0.1), tell=tell)


async def test_it_says_who_it_is_and_beats_both_ways(short_path: Path) -> None:
    coordinator = FakeCoordinator(epoch=7)
    await coordinator.start(f"unix:{short_path}/c.sock")
    shim = registration(f"unix:{short_path}/c.sock")
    running = asyncio.create_task(shim.run())
    await until(lambda: coordinator.beats >= 3)
    hello = coordinator.hellos[0]
    assert (hello.capabilities.participant_id, hello.incarnation_id, hello.address) == ("counter", "i-1", "127.0.0.1:7")
    assert shim.coordinator_epoch == 7
    assert shim.welcomed.is_set()
    assert len(coordinator.hellos) == 1
    running.cancel()
    await coordinator.die()


async def test_it_finds_a_coordinator_that_moved(short_path: Path) -> None:  # H20
    address = short_path / "address.json"
    shim = registration(f"file:{address}")
    running = asyncio.create_task(shim.run())  # before there is any coordinator
    old, new = FakeCoordinator(epoch=1), FakeCoordinator(epoch=2)
    await old.start(f"unix:{short_path}/old.sock")
    address.write_text(json.dumps({"address": f"unix:{short_path}/old.sock"}))
    await until(lambda: shim.coordinator_epoch == 1)
    await old.die()
    await new.start(f"unix:{short_path}/new.sock")
    address.write_text(json.dumps({"address": f"unix:{short_path}/new.sock"}))
    await until(lambda: shim.coordinator_epoch == 2, 10)
    running.cancel()
    await new.die()


async def test_it_does_not_stay_with_a_coordinator_older_than_one_it_has_had(short_path: Path) -> None:
    """An old view of the record leads to one that is replaced and does not know it yet."""
    address = short_path / "address.json"
    old, new = FakeCoordinator(epoch=1), FakeCoordinator(epoch=2)
    await old.start(f"unix:{short_path}/old.sock")
    await new.start(f"unix:{short_path}/new.sock")
    address.write_text(json.dumps({"address": f"unix:{short_path}/new.sock"}))
    shim = registration(f"file:{address}")
    running = asyncio.create_task(shim.run())
    await until(lambda: shim.coordinator_epoch == 2)
    address.write_text(json.dumps({"address": f"unix:{short_path}/old.sock"}))
    await new.die()
    await until(lambda: len(old.hellos) >= 2)
    assert shim.coordinator_epoch == 2
    assert not shim.welcomed.is_set()
    newest = FakeCoordinator(epoch=3)
    await newest.start(f"unix:{short_path}/newest.sock")
    address.write_text(json.dumps({"address": f"unix:{short_path}/newest.sock"}))
    await until(lambda: shim.coordinator_epoch == 3, 10)
    running.cancel()
    await old.die()
    await newest.die()


async def test_a_coordinator_that_falls_silent_counts_as_gone(short_path: Path) -> None:  # H7
    coordinator = FakeCoordinator()
    await coordinator.start(f"unix:{short_path}/c.sock")
    running = asyncio.create_task(registration(f"unix:{short_path}/c.sock").run())
    await until(lambda: len(coordinator.hellos) == 1)
    coordinator.silent = True
    await until(lambda: len(coordinator.hellos) >= 2)
    running.cancel()
    await coordinator.die()


async def test_a_refused_shim_tries_on(short_path: Path) -> None:
    coordinator = FakeCoordinator()
    coordinator.refuses = 3
    await coordinator.start(f"unix:{short_path}/c.sock")
    shim = registration(f"unix:{short_path}/c.sock")
    running = asyncio.create_task(shim.run())
    await until(shim.welcomed.is_set)
    assert len(coordinator.hellos) == 4
    running.cancel()
    await coordinator.die()


async def test_that_it_is_refused_is_told_its_server_once_and_that_nobody_answers_is_not(short_path: Path) -> None:
    told: list[str] = []
    shim = registration(f"unix:{short_path}/c.sock", told.append)
    running = asyncio.create_task(shim.run())
    await until(lambda: shim.trouble is not None)  # nobody is there
    assert told == []
    coordinator = FakeCoordinator()
    coordinator.refuses = 3
    await coordinator.start(f"unix:{short_path}/c.sock")
    await asyncio.wait_for(shim.welcomed.wait(), 5)
    (line,) = told
    assert "not registered" in line
    assert "Somebody has this name." in line
    running.cancel()
    await coordinator.die()


async def test_a_server_that_is_not_up_yet_is_waited_for(short_path: Path) -> None:
    coordinator = FakeCoordinator()
    await coordinator.start(f"unix:{short_path}/c.sock")
    tries = 0

    async def describe() -> capabilities_pb2.Capabilities:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise refuse(Reason.UNAVAILABLE, "The server is not up.")
        return await capabilities()

    shim = Registration(f"unix:{short_path}/c.sock", describe, "i-1", "a:1", "job", wait_s=(0.01, 0.02))
    running = asyncio.create_task(shim.run())
    await until(shim.welcomed.is_set)
    running.cancel()
    await coordinator.die()


async def test_a_shim_leaves_a_coordinator_of_another_job(short_path: Path) -> None:
    coordinator = FakeCoordinator(job_id="other")
    await coordinator.start(f"unix:{short_path}/c.sock")
    with pytest.raises(AnotherJob) as raised:
        async with asyncio.timeout(5):
            await registration(f"unix:{short_path}/c.sock").run()
    assert "'other'" in raised.value.problem.message
    await coordinator.die()


async def test_a_shim_says_whose_it_is_and_leaves_when_the_coordinator_refuses_another_jobs(short_path: Path) -> None:
    coordinator = FakeCoordinator(epoch=7)
    await coordinator.start(f"unix:{short_path}/c.sock")
    shim = registration(f"unix:{short_path}/c.sock")
    running = asyncio.create_task(shim.run())
    await until(shim.welcomed.is_set)
    assert (coordinator.hellos[0].job_id, coordinator.hellos[0].highest_epoch) == ("job", 0)
    coordinator.ends, coordinator.another_job = True, "other"
    with pytest.raises(AnotherJob) as raised:
        async with asyncio.timeout(5):
            await running
    assert (coordinator.hellos[1].job_id, coordinator.hellos[1].highest_epoch) == ("job", 7)
    assert "of job 'other'" in raised.value.problem.message
    assert shim.trouble is raised.value
    await coordinator.die()


async def test_a_shim_that_was_refused_to_the_end_leaves_no_task_and_one_line(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = FakeCoordinator()
    coordinator.refuses = 1000
    await coordinator.start(f"unix:{short_path}/c.sock")
    before = asyncio.all_tasks()
    shim = registration(f"unix:{short_path}/c.sock")
    running = asyncio.create_task(shim.run())
    await until(lambda: len(coordinator.hellos) >= 6)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    def left() -> list[str]:  # a gRPC server's own tasks for a call come and go
        return [repr(task) for task in asyncio.all_tasks() - before if "_consume_request_iterator" in repr(task)]

    await until(lambda: not left())
    said = [r.getMessage() for r in caplog.records if r.name == "coordinator.wire.staying"]
    assert len(said) == 1
    assert "Somebody has this name." in said[0]
    assert shim.trouble is not None
    assert shim.trouble.reason is Reason.DUPLICATE_PARTICIPANT
    await coordinator.die()


async def test_a_sleep_of_its_own_is_not_taken_for_the_silence_of_the_coordinator() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[pb.RegisterEvent] = loop.create_future()

    class Call:
        async def read(self) -> pb.RegisterEvent:
            return await answer

    waiting = asyncio.create_task(Registration._next(Call(), 0.05))
    await asyncio.sleep(0)
    answering = threading.Timer(0.1, loop.call_soon_threadsafe, (answer.set_result, pb.RegisterEvent()))
    answering.start()
    answering.join()  # the loop stands still until the answer is there
    assert await waiting == pb.RegisterEvent()


async def test_registrations_that_end_again_and_again_at_one_coordinator_are_told(short_path: Path) -> None:
    """A proxy that ends each stream after a while: everything works, and now and then a save is refused."""
    coordinator = FakeCoordinator(epoch=3)
    await coordinator.start(f"unix:{short_path}/c.sock")
    shim = registration(f"unix:{short_path}/c.sock")
    running = asyncio.create_task(shim.run())
    await until(shim.welcomed.is_set)
    assert shim.warning() == ""
    coordinator.ends = True
    await until(lambda: bool(shim.warning()))
    assert f"ended {TIMES} times" in shim.warning()
    assert shim.warning().startswith(REGISTRATION_ENDS)
    running.cancel()
    await coordinator.die()


async def test_a_peer_that_does_not_like_our_pings_is_told_by_its_own_words() -> None:
    """Servers ping back nothing here and send nothing, as a proxy between may: gRPC's own limits end the connection."""
    coordinator = FakeCoordinator(interval_s=50)
    coordinator.server = aio.server(
        options=[("grpc.http2.min_ping_interval_without_data_ms", 300_000), ("grpc.http2.max_ping_strikes", 1)]
    )
    coordinator_service_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, coordinator.server)
    port = coordinator.server.add_insecure_port("127.0.0.1:0")
    await coordinator.server.start()
    options = list((dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 100}).items())
    shim = Registration(
        f"127.0.0.1:{port}", capabilities, "i-1", "127.0.0.1:7", "job", wait_s=(0.02, 0.1),
        dial=lambda record: aio.insecure_channel(record.address, options=options),
    )  # fmt: skip
    running = asyncio.create_task(shim.run())
    await until(lambda: bool(shim.interruptions.ends))
    assert shim.interruptions.ends[0].why == "No answer (UNAVAILABLE): Too many pings"
    running.cancel()
    await coordinator.die()


def test_ends_count_together_within_minutes_and_under_one_coordinator_only() -> None:
    ends = Interruptions()
    assert ends.warning(0.0) == ""
    for n in range(TIMES):
        ends.note(n, n, 1.0, "it was started anew")  # a coordinator that crashes has another epoch each time
    assert ends.warning(TIMES) == ""
    for n in range(TIMES):
        assert ends.warning(100 + 60 * n) == ""
        ends.note(100 + 60 * n, 9, 58.0 + n, "No answer (UNAVAILABLE): Socket closed.")
    now = 100 + 60 * TIMES
    assert f"ended {TIMES} times at a coordinator that went on, after 58 to {57 + TIMES} s each" in ends.warning(now)
    assert ends.warning(now).endswith("the last time: No answer (UNAVAILABLE): Socket closed.")
    assert ends.warning(now + WITHIN_S) == "", "it lasts again"


def test_a_coordinator_that_is_stopped_now_and_then_is_not_taken_for_a_proxy_that_ends_streams() -> None:
    ends = Interruptions()
    for n in range(TIMES):
        ends.note(10.0 * n, 3, 8.0, f"{SILENT} for 3.0 s.")
    assert ends.warning(10.0 * TIMES).startswith(f"{COORDINATOR_SILENT}: within 10 min {TIMES} times")
    ends.note(10.0 * TIMES, 3, 8.0, "The coordinator ended the registration (OK).")
    assert ends.warning(10.0 * TIMES).startswith(REGISTRATION_ENDS)
