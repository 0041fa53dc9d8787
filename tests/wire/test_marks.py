"""Who is running out of something says so in time: at half, at four fifths and at the limit, once each."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from contextlib import AsyncExitStack
from itertools import chain, pairwise, repeat
from pathlib import Path

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from coordinator.wire.access import Lane
from coordinator.wire.lanes import Lanes, Limit
from coordinator.wire.marks import BELOW, MARKS, Marks, Use
from coordinator.wire.rpc import CHANNEL_OPTIONS, MAX_CONNECTIONS, SERVER_OPTIONS
from coordinator.wire.usage import open_files, raise_open_files, size, space, watch


def at(share: float, name: str = "x") -> Use:
    return Use(name, "Things", share * 200, 200, "things", "Have fewer.")


def told(marks: Marks, *shares: float) -> list[float]:
    return [use.share for share in shares for use in marks.look([at(share)])]


def test_each_mark_is_told_once_when_it_is_passed() -> None:
    assert told(Marks(), 0.1, 0.49, 0.5, 0.6, 0.79, 0.8, 0.99, 1.0, 1.2) == [0.5, 0.8, 1.0]
    assert told(Marks(), 0.9, 0.95) == [0.9]  # one line for two marks


def test_it_is_told_again_only_after_the_use_fell_well_below_the_mark() -> None:
    assert told(Marks(), 0.5, 0.49, 0.5, 0.45, 0.5) == [0.5]
    assert told(Marks(), 0.5, 0.3, 0.5) == [0.5, 0.5]
    assert told(Marks(), 1.0, 0.85, 1.0, 0.3, 0.81) == [1.0, 1.0, 0.81]


@given(st.lists(st.floats(0, 2), max_size=40))
def test_however_a_use_moves_the_log_is_quiet_below_the_marks_and_between_two_falls(shares: list[float]) -> None:
    marks, falls = Marks(), 0
    lines = told(marks, *shares)
    assert all(share >= MARKS[0] for share in lines)
    for before, after in pairwise(shares):
        falls += any(after < mark - BELOW <= before for mark in MARKS)
    assert len(lines) <= len(MARKS) * (1 + falls)


def test_names_are_apart_and_what_is_nearly_full_stays_in_the_status() -> None:
    marks = Marks()
    assert [u.name for u in marks.look([at(0.6, "a"), at(0.9, "b"), Use("c", "None", 3, 0)])] == ["a", "b"]
    assert marks.shares == {"a": pytest.approx(0.6), "b": pytest.approx(0.9), "c": 0.0}
    assert marks.warnings == ["Things: 180 of 200 things are used (90%). Have fewer."]
    assert marks.look([at(0.1, "b")]) == []
    assert marks.warnings == []


def test_little_that_is_full_is_told_in_figures_that_are_not_nothing() -> None:
    assert str(Use("log", "The call log", 0.31, 0.31, "MiB")) == "The call log: 0.3 of 0.3 MiB are used (100%)."
    assert str(Use("files", "Files", 3, 8, "files")) == "Files: 3 of 8 files are used (38%)."
    assert str(Use("memory", "Memory", 1234.5, math.inf)) == "Memory: 1,234 of inf are used (0%)."


def test_a_lane_remembers_the_most_calls_since_it_was_asked() -> None:
    lanes = Lanes(lambda: 0.0, {lane: Limit(3, 3) for lane in Lane})
    with lanes.enter(Lane.WORK, "/m", "a"):
        with lanes.enter(Lane.WORK, "/m", "b"), lanes.enter(Lane.RESERVED, "/Abort", "a"):
            pass
        assert lanes.most() == {"work": (2, 3), "/Abort": (1, 3)}
        assert lanes.most() == {"work": (1, 3), "/Abort": (0, 3)}


def test_the_system_says_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "calls.db").write_bytes(b"x" * (2 << 20))
    uses = {u.name: u for u in (*open_files(), *space("disk", "Disk", tmp_path, ""))}
    with (tmp_path / "one").open("wb"):
        more = {u.name: u for u in open_files()}
    assert more["open_files"].used == uses["open_files"].used + 1
    assert more["open_files"].limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < uses["disk"].share <= 1
    (log,) = size("log", "Log", tmp_path / "calls.db", "")
    assert log.used == 2
    assert list(space("gone", "", tmp_path / "gone", "")) == list(size("gone", "", tmp_path / "gone", "")) == []


def test_as_many_files_may_be_opened_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_what_passes_a_mark_is_in_the_log_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    shares, marks = chain([0.2, 0.55, 0.6], repeat(0.85)), Marks()
    with caplog.at_level(logging.WARNING):
        watching = asyncio.create_task(watch(marks, lambda: [at(next(shares))], every_s=0))
        async with asyncio.timeout(10):
            while not marks.warnings:
                await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert [r.message[:30] for r in caplog.records] == [
        "Things: 110 of 200 things are ",
        "Things: 170 of 200 things are ",
    ]


async def test_connections_beyond_the_limit_are_refused_and_the_others_live() -> None:
    limit = ("grpc.max_allowed_incoming_connections", 3)
    assert ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS) in SERVER_OPTIONS
    options = [limit if name == limit[0] else (name, value) for name, value in SERVER_OPTIONS]
    server = aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncExitStack() as stack:
            links = [
                await stack.enter_async_context(
                    aio.insecure_channel(f"127.0.0.1:{port}", [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
                )
                for _ in range(4)
            ]
            for link in links[:3]:
                async with asyncio.timeout(20):
                    await link.channel_ready()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await links[3].channel_ready()
            await links[0].close()
            async with asyncio.timeout(20):
                await links[3].channel_ready()  # there is room again
    finally:
        await server.stop(0)
