"""Sizes, rates and lanes: what is over a limit is refused with the limit's name and a time (FAILURES D11-D16, D31)."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gzip
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from coordinator.client_patience import Budgets, Patience
from coordinator.wire.access import MAX_REQUEST_BYTES, METHODS, Access, Lane
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError
from coordinator.wire.lanes import BURST_S, LIMITS, MAX_CALLERS, Lanes, Limit
from coordinator.wire.links import Security, tls_options
from coordinator.wire.rpc import (
    CHANNEL_OPTIONS,
    SERVER_OPTIONS,
    channel,
    detail_from_problem,
    error_from_rpc,
    problem_from_detail,
)
from tests.security.conftest import answering
from tests.security.test_tokens import Clock

REPOSITORY = Path(__file__).resolve().parents[2]
PING_TIMES = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")
SMALL = {lane: Limit(3, 2) for lane in Lane}


def refusal(lanes: Lanes, lane: Lane, method: str, caller: str) -> Problem:
    with pytest.raises(SafepointError) as raised, lanes.enter(lane, method, caller):
        pass
    assert raised.value.reason is Reason.LIMIT_EXCEEDED
    return raised.value.problem


# ---- lanes -----------------------------------------------------------------------------------------------------------


def test_a_full_lane_is_no_matter_to_a_reserved_method() -> None:
    lanes = Lanes(Clock(), SMALL)
    with ExitStack() as running:
        for lane in (Lane.WORK, Lane.WATCH, Lane.STAY):
            for caller in "abc":
                running.enter_context(lanes.enter(lane, "Save", caller))
            assert refusal(lanes, lane, "Save", "d").metadata["limit"] == "concurrent_calls"
        for caller in "abc":
            running.enter_context(lanes.enter(Lane.RESERVED, "GetStatus", caller))
        refusal(lanes, Lane.RESERVED, "GetStatus", "d")
        for method in ("Abort", "Resume", "Check"):
            running.enter_context(lanes.enter(Lane.RESERVED, method, "d"))  # each has its own


def test_one_caller_does_not_fill_a_lane_alone() -> None:
    lanes = Lanes(Clock(), SMALL)
    with lanes.enter(Lane.WORK, "Save", "a"), lanes.enter(Lane.WORK, "Save", "a"):
        problem = refusal(lanes, Lane.WORK, "Save", "a")
        assert (problem.metadata["limit"], problem.retry_after_s) == ("calls_of_caller", 1.0)
        with lanes.enter(Lane.WORK, "Save", "b"):
            pass


def test_a_caller_that_is_too_fast_waits_and_another_does_not() -> None:
    clock = Clock()
    lanes = Lanes(clock, {lane: Limit(3, 3, per_s=5.0) for lane in Lane})
    for _ in range(int(5 * BURST_S)):
        with lanes.enter(Lane.WORK, "Save", "a"):
            pass
    problem = refusal(lanes, Lane.WORK, "Save", "a")
    assert problem.metadata["limit"] == "calls_per_second"
    assert problem.retry_after_s == pytest.approx(0.2)
    with lanes.enter(Lane.WORK, "Save", "b"):
        pass
    clock.now += problem.retry_after_s or 0
    with lanes.enter(Lane.WORK, "Save", "a"):
        pass


@given(st.lists(st.tuples(st.sampled_from(list(Lane)), st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_what_has_ended_counts_no_more(steps: list[tuple[Lane, str, bool]]) -> None:
    lanes = Lanes(Clock(), SMALL)
    running: list[Any] = []
    for lane, caller, ends in steps:
        if ends and running:
            running.pop().__exit__(None, None, None)
        entered = lanes.enter(lane, "Save", caller)
        try:
            entered.__enter__()
        except SafepointError:
            continue
        running.append(entered)
    for entered in running:
        entered.__exit__(None, None, None)
    for lane in Lane:
        with ExitStack() as all_of_it:
            for caller in "abc":
                all_of_it.enter_context(lanes.enter(lane, "Save", caller))


def test_callers_that_come_and_go_do_not_fill_the_memory() -> None:
    lanes = Lanes(Clock())
    for number in range(3 * MAX_CALLERS):
        with lanes.enter(Lane.WORK, "Save", f"caller-{number}"):
            pass
    kept = {name: len(value) for name, value in vars(lanes).items() if hasattr(value, "__len__")}
    assert max(kept.values()) <= MAX_CALLERS, kept


def test_every_call_of_all_lanes_has_a_stream_of_its_own() -> None:
    """An Abort waits for no stream: on one connection fit all that the lanes serve of one caller."""
    reserved = sum(1 for method in METHODS.values() if method.lane is Lane.RESERVED)
    most = LIMITS[Lane.RESERVED].each * reserved + LIMITS[Lane.WORK].each + LIMITS[Lane.WATCH].each
    assert dict(SERVER_OPTIONS)["grpc.max_concurrent_streams"] > most


# ---- messages --------------------------------------------------------------------------------------------------------


async def failure(link: Any, method: str, request: bytes, **more: Any) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as raised:
        async for _ in link.unary_stream(f"/safepoint.v1.Coordinator/{method}")(request, timeout=5, **more):
            pass
    return raised.value


@pytest.mark.parametrize("method", ["Save", "GetStatus", "RetireRollouts"])
async def test_each_method_takes_so_many_bytes_and_no_more(method: str) -> None:
    limit = METHODS[f"/safepoint.v1.Coordinator/{method}"].max_request_bytes
    unknown_field = b"\xfa\x7f"  # of 2,047, length-delimited: what a newer caller may send
    async with answering(Security()) as address, channel(address) as link:
        fits = await failure(link, method, unknown_field + _varint(limit - 5) + b"x" * (limit - 5))
        assert error_from_rpc(fits).reason is Reason.INTERNAL  # it reached the handler, which does nothing
        over = error_from_rpc(await failure(link, method, unknown_field + _varint(limit) + b"x" * limit))
        assert over.reason is Reason.LIMIT_EXCEEDED
        assert over.problem.metadata == {"limit": "request_bytes"}
        assert over.problem.retry_after_s is None  # the same call never succeeds
        huge = await failure(link, method, b"x" * (MAX_REQUEST_BYTES * 3))
        assert huge.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # by gRPC, before it is in memory


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


@pytest.mark.parametrize("request_bytes", [b"\x08", b"\xff" * 20, b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x00"])
async def test_what_is_no_message_is_refused_and_not_quoted(request_bytes: bytes) -> None:
    async with answering(Security()) as address, channel(address) as link:
        found = error_from_rpc(await failure(link, "Save", request_bytes))
        assert found.reason is Reason.INVALID_ARGUMENT
        assert "cannot be decoded" in str(found)
        # And the connection serves on.
        assert error_from_rpc(await failure(link, "Save", b"")).reason is Reason.INTERNAL


async def test_a_stream_of_what_is_no_message_ends(short_path: Path) -> None:
    async with answering(Security(), f"unix:{short_path}/s.sock") as address, channel(address) as dialled:
        link: Any = dialled
        call = link.stream_stream("/safepoint.v1.Coordinator/Register")(timeout=5)
        with contextlib.suppress(aio.AioRpcError):  # on a busy machine its end may come before the write's
            await call.write(b"\xff" * 20)
        assert await call.code() != grpc.StatusCode.OK


async def test_large_metadata_is_refused() -> None:
    async with answering(Security()) as address, channel(address) as link:
        refused = await failure(link, "Save", b"", metadata=(("x-large", "y" * 20_000),))
        assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_from_rpc(await failure(link, "Save", b"")).reason is Reason.INTERNAL


async def test_a_compressed_request_is_refused() -> None:
    bomb = b"\x0a\x80\x01" + b"x" * 128
    assert len(gzip.compress(bomb)) < len(bomb)
    compressing = grpc.Compression.Gzip
    async with answering(Security()) as address, aio.insecure_channel(address, compression=compressing) as link:
        refused = await failure(link, "Save", bomb)
        assert refused.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
        assert "ompress" in (refused.details() or "")


# ---- the time to come again ------------------------------------------------------------------------------------------


def test_the_time_to_come_again_travels() -> None:
    problem = Problem(Reason.LIMIT_EXCEEDED, "Too much.", retry_after_s=1.5)
    assert problem_from_detail(detail_from_problem(problem)).retry_after_s == 1.5
    assert problem_from_detail(detail_from_problem(Problem(Reason.FENCED, "No."))).retry_after_s is None


async def test_a_full_lane_says_over_the_wire_when_to_come_again() -> None:
    lanes = Lanes(Clock(), {lane: Limit(0, 0) for lane in Lane})
    async with answering(Security(), lanes=lanes) as address, channel(address) as link:
        found = error_from_rpc(await failure(link, "Save", b""))
        assert found.reason is Reason.LIMIT_EXCEEDED
        assert found.problem.retry_after_s == 1.0


def test_a_client_comes_again_then_and_not_when_it_would_not_help() -> None:
    clock = Clock()
    patience = Patience("Save", "Save s", 60.0, Budgets(0, 0, 30), clock)
    patience.next_try_s()
    assert patience.again(Refused(Problem(Reason.LIMIT_EXCEEDED, "Too much.", retry_after_s=2.0)))
    assert patience.wait_s(0.1) == pytest.approx(2.1)
    assert not patience.again(Refused(Problem(Reason.LIMIT_EXCEEDED, "Too large.")))


# ---- pings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("permitted", [True, False])
async def test_an_idle_channel_that_looks_whether_its_peer_is_there_is_no_flood(permitted: bool) -> None:
    """A hundred times as often as in life, and the second ping too many ends the connection."""

    def quickly(options: list[tuple[str, int]], **other: int) -> list[tuple[str, int]]:
        scaled = {k: v // 100 if k in PING_TIMES else v for k, v in options}
        return list({**scaled, **{f"grpc.{k.replace('__', '.')}": v for k, v in other.items()}}.items())

    here = quickly(CHANNEL_OPTIONS)
    there = quickly(SERVER_OPTIONS, http2__max_ping_strikes=1)
    if not permitted:  # what it was before, so that this test is known to see it
        there = [(k, v) for k, v in there if k != "grpc.keepalive_permit_without_calls"]
    server = aio.server(options=there)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}", options=here) as link:
            await link.channel_ready()
            lost = asyncio.create_task(link.wait_for_state_change(grpc.ChannelConnectivity.READY))
            # gRPC sends one a second at most.
            done, _ = await asyncio.wait({lost}, timeout=20 if not permitted else 3.5)
            assert bool(done) is not permitted
            lost.cancel()
    finally:
        await server.stop(None)


def test_every_channel_and_every_server_has_the_options_that_agree() -> None:
    """Made elsewhere, it would have gRPC's own, and a channel of ours would be a flood to it."""
    options: dict[str, set[str]] = {"channel": set(), "server": set()}
    for path in [*REPOSITORY.glob("coordinator/**/*.py"), *REPOSITORY.glob("participant_shims/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("insecure_channel", "secure_channel", "make_server", "_make_server"):
                given = next((ast.unparse(k.value) for k in node.keywords if k.arg == "options"), "none")
                options["server" if "server" in name else "channel"].add(given)
    assert options == {"channel": {"CHANNEL_OPTIONS", "tls_options(peer)"}, "server": {"SERVER_OPTIONS"}}
    with_tls, plain = dict(tls_options(Access.COORDINATOR)), dict(CHANNEL_OPTIONS)
    assert all(with_tls[k] == plain[k] for k in plain if "keepalive" in k or "ping" in k)


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Watch", "/safepoint.v1.Participant/WatchStatus"])
async def test_streams_that_their_caller_leaves_give_their_place_back(method: str, short_path: Path) -> None:
    lanes = Lanes(Clock(), {lane: Limit(2, 2) for lane in Lane})

    async def begun(link: Any) -> Any:
        while True:  # the one before may not have ended there yet
            call = link.unary_stream(method)(b"", timeout=30)
            try:
                await call.read()
            except aio.AioRpcError as error:
                if error_from_rpc(error).reason is not Reason.LIMIT_EXCEEDED:
                    return call
                await asyncio.sleep(0.02)
            else:
                return call

    async with answering(Security(), f"unix:{short_path}/s.sock", lanes=lanes) as address, channel(address) as link:
        async with asyncio.timeout(30):
            for _ in range(20):
                (await begun(link)).cancel()
