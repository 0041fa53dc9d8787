"""Errors, deadlines and the token, through a real grpc.aio server on a Unix socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from safepoint.v1 import participant_service_pb2 as pb
from safepoint.v1 import participant_service_pb2_grpc as services

from coordinator.wire import rpc
from coordinator.wire.auth import Token, read_token
from coordinator.wire.errors import CATALOG, Blocked, Problem, Reason, Refused, SafepointError, Unanswered, refuse
from coordinator.wire.terms import Phase

SECRET = "s3cret-" + "x" * 40
MANY = tuple(Blocked(f"rollout-{n:05d}-{'x' * 200}", n, 4, 83.5, "judge " * 60) for n in range(900))


class Servicer(services.ParticipantServicer):
    """Handlers that fail as a test says; `entered` and `left` count streams."""

    def __init__(self) -> None:
        self.fail: Callable[[], BaseException] | None = None
        self.budgets: list[float] = []
        self.peers: set[str] = set()
        self.left = asyncio.Event()

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.budgets.append(rpc.time_budget(context))
        self.peers.add(context.peer())
        if self.fail:
            raise self.fail()
        return pb.GetStatusResponse()

    async def Prepare(self, request: Any, context: Any) -> AsyncIterator[Any]:
        rpc.time_budget(context)
        try:
            yield pb.PrepareEvent(admission_closed=pb.AdmissionClosed(in_flight=3))
            if self.fail:
                raise self.fail()
            await asyncio.sleep(60)
        finally:
            self.left.set()


@asynccontextmanager
async def serving(tmp_path: Path, token: Token | None = None) -> AsyncIterator[tuple[Servicer, aio.Channel]]:
    server = aio.server(interceptors=[rpc.ErrorInterceptor(token)], options=rpc.SERVER_OPTIONS)
    servicer = Servicer()
    services.add_ParticipantServicer_to_server(servicer, server)
    checks = health.aio.HealthServicer()
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    target = f"unix:{tmp_path}/s.sock"
    assert server.add_insecure_port(target)
    await server.start()
    try:
        async with rpc.channel(target) as channel:
            yield servicer, channel
    finally:
        await server.stop(None)


async def failure(call: Awaitable[Any]) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_reason_arrives_with_its_status_and_all_that_it_says(tmp_path: Path) -> None:
    problem = Problem(
        Reason.FENCED, "Operation save-1 owns the fence.", "Wait.", Phase.PREPARE, "agent", "save-1",
        MANY[:2], 2, 1.25, {"digest": "ab"},
    )  # fmt: skip
    async with serving(tmp_path) as (servicer, channel):
        servicer.fail = lambda: Refused(problem)
        error = await failure(services.ParticipantStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5))
    assert error.code() == grpc.StatusCode.ABORTED
    read = rpc.error_from_rpc(error)
    assert isinstance(read, Refused)
    assert read.reason == Reason.FENCED
    assert read.problem.metadata == {"digest": "ab"}
    assert (read.problem.phase, read.participant_id, read.problem.operation_id) == (Phase.PREPARE, "agent", "save-1")
    assert (read.problem.waited_s, read.problem.advice, len(read.rollouts)) == (1.25, "Wait.", 2)


@pytest.mark.parametrize("streaming", [False, True])
async def test_900_rollouts_neither_replace_the_status_nor_pass_4_kib(tmp_path: Path, streaming: bool) -> None:
    problem = Problem(
        Reason.DRAIN_INCOMPLETE, "é" * 5000, "n" * 5000, Phase.PREPARE, "agent", "save-1", MANY, 900, 9.0,
        {f"k{n}": "v" * 400 for n in range(40)},
    )  # fmt: skip
    async with serving(tmp_path) as (servicer, channel):
        servicer.fail = lambda: Refused(problem)
        stub = services.ParticipantStub(channel)
        if streaming:
            call = stub.Prepare(pb.PrepareRequest(), timeout=5)
            await call.read()
            error = await failure(call.read())
        else:
            error = await failure(stub.GetStatus(pb.GetStatusRequest(), timeout=5))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    raw = dict(error.trailing_metadata() or ())[rpc.ERROR_TRAILER]
    assert len(raw) <= rpc.MAX_DETAIL_BYTES
    read = rpc.error_from_rpc(error).problem
    assert read.reason == Reason.DRAIN_INCOMPLETE
    assert read.rollout_count == 900
    assert read.next_step.startswith("nnn")
    assert read.message.startswith("é")


async def test_rollouts_of_usual_length_are_named_up_to_twenty(tmp_path: Path) -> None:
    rollouts = tuple(Blocked(f"r-{n}", 0, 4, 83.0, "judge") for n in range(900))
    detail = rpc.detail_from_problem(Problem(Reason.DRAIN_INCOMPLETE, "Still draining.", rollouts=rollouts))
    assert [row.rollout_id for row in detail.rollouts] == [f"r-{n}" for n in range(20)]
    assert detail.rollout_count == 900


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_survives_the_wire(reason: Reason) -> None:
    detail = rpc.detail_from_problem(Problem(reason, "x"))
    assert rpc.problem_from_detail(detail).reason == reason
    assert detail.next_step == CATALOG[reason].next_step


def test_a_reason_of_a_newer_peer_is_internal_and_its_number_is_kept() -> None:
    detail = rpc.detail_from_problem(Problem(Reason.FENCED, "x"))
    detail.reason = 9999  # type: ignore[assignment]
    read = rpc.problem_from_detail(detail)
    assert (read.reason, read.metadata["unknown_reason"]) == (Reason.INTERNAL, "9999")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_call_without_deadline_is_refused(tmp_path: Path, streaming: bool) -> None:
    async with serving(tmp_path) as (servicer, channel):
        stub = services.ParticipantStub(channel)
        call = stub.Prepare(pb.PrepareRequest()).read() if streaming else stub.GetStatus(pb.GetStatusRequest())
        error = await failure(call)
        assert servicer.budgets == []
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.error_from_rpc(error).reason == Reason.DEADLINE_MISSING


async def test_a_handler_gets_less_time_than_its_caller_has(tmp_path: Path) -> None:
    async with serving(tmp_path) as (servicer, channel):
        await services.ParticipantStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5)
    # gRPC rounds the deadline up on the wire, so that 5 s arrive as a little more: the margin has to cover that, too.
    assert 3.5 < servicer.budgets[0] < 4.75


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_unexpected_exception_becomes_internal_and_its_text_stays_here(
    tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (servicer, channel):
        servicer.fail = lambda: ValueError("password=hunter2")
        stub = services.ParticipantStub(channel)
        with caplog.at_level(logging.ERROR):
            if streaming:
                call = stub.Prepare(pb.PrepareRequest(), timeout=5)
                await call.read()
                error = await failure(call.read())
            else:
                error = await failure(stub.GetStatus(pb.GetStatusRequest(), timeout=5))
    assert error.code() == grpc.StatusCode.INTERNAL
    read = rpc.error_from_rpc(error)
    assert read.reason == Reason.INTERNAL
    assert "hunter2" not in f"{error.details()} {error.trailing_metadata()} {read}"
    assert read.problem.metadata["error_id"] in caplog.text
    assert "hunter2" in caplog.text


async def test_a_stream_that_its_caller_leaves_ends_the_handler(tmp_path: Path) -> None:
    async with serving(tmp_path) as (servicer, channel):
        call = services.ParticipantStub(channel).Prepare(pb.PrepareRequest(), timeout=30)
        await call.read()
        assert not servicer.left.is_set()
        call.cancel()
        await asyncio.wait_for(servicer.left.wait(), 5)


async def test_nobody_there_means_unanswered_and_not_refused(tmp_path: Path) -> None:
    async with rpc.channel(f"unix:{tmp_path}/nobody.sock") as channel:
        error = await failure(services.ParticipantStub(channel).GetStatus(pb.GetStatusRequest(), timeout=0.5))
    read = rpc.error_from_rpc(error, "agent")
    assert isinstance(read, Unanswered)
    assert (read.reason, read.participant_id) == (Reason.UNREACHABLE, "agent")


@pytest.mark.parametrize(
    ("text", "certificates"),
    [
        ("Socket closed", True),
        ("Ssl handshake failed: SSL_ERROR_SSL", True),
        ("Stream removed (Socket closed)", False),  # a peer that was killed while it answered
        ("failed to connect to all addresses", False),
    ],
)
def test_certificates_are_looked_at_for_a_handshake_that_broke_and_not_for_a_call_that_ran(
    text: str, certificates: bool
) -> None:
    none = aio.Metadata()
    failure = rpc.error_from_rpc(aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, text))
    assert isinstance(failure, Unanswered)
    assert ("certs" in failure.problem.advice) is certificates
    assert ("handshake" in failure.problem.metadata) is certificates


async def test_a_method_that_the_peer_lacks_is_refused_as_unsupported(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, channel):
        error = await failure(channel.unary_unary("/safepoint.v1.Participant/Newer")(b"", timeout=5))
    read = rpc.error_from_rpc(error)
    assert isinstance(read, Refused)
    assert read.reason == Reason.UNSUPPORTED


@pytest.mark.parametrize("offered", [None, "Bearer wrong", f"Basic {SECRET}", "Bearer ", f"Bearer {SECRET}x"])
@pytest.mark.parametrize("kind", ["unary", "stream", "unknown", "health"])
async def test_without_the_token_every_method_is_refused_even_unknown_ones(
    tmp_path: Path, kind: str, offered: str | None
) -> None:
    metadata = (("authorization", offered),) if offered is not None else None
    async with serving(tmp_path, Token(SECRET)) as (servicer, channel):
        stub = services.ParticipantStub(channel)
        if kind == "unary":
            call: Awaitable[Any] = stub.GetStatus(pb.GetStatusRequest(), timeout=5, metadata=metadata)
        elif kind == "stream":
            call = stub.Prepare(pb.PrepareRequest(), timeout=5, metadata=metadata).read()
        elif kind == "unknown":
            call = channel.unary_unary("/safepoint.v1.Participant/Nope")(b"", timeout=5, metadata=metadata)
        else:
            call = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5, metadata=metadata
            )
        error = await failure(call)
        assert servicer.budgets == []
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert rpc.error_from_rpc(error).reason == Reason.UNAUTHENTICATED
    assert SECRET not in f"{error.details()} {error.trailing_metadata()}"


async def test_with_the_token_unary_streaming_and_health_calls_pass(tmp_path: Path) -> None:
    token = Token(SECRET)
    async with serving(tmp_path, token) as (_, channel):
        stub = services.ParticipantStub(channel)
        await stub.GetStatus(pb.GetStatusRequest(), timeout=5, metadata=token.metadata())
        stream = stub.Prepare(pb.PrepareRequest(), timeout=5, metadata=token.metadata())
        assert (await stream.read()).admission_closed.in_flight == 3
        stream.cancel()
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=5, metadata=token.metadata()
        )
        # A handler that writes by itself instead of yielding: the interceptor must know both.
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_a_connection_that_has_grown_old_is_made_anew_and_no_call_notices() -> None:
    assert 0 < dict(rpc.SERVER_OPTIONS)["grpc.max_connection_age_ms"] <= 3_600_000
    options = list((dict(rpc.SERVER_OPTIONS) | {"grpc.max_connection_age_ms": 200}).items())
    server, servicer = aio.server(interceptors=[rpc.ErrorInterceptor(None)], options=options), Servicer()
    services.add_ParticipantServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{port}") as link, asyncio.timeout(30):
            stub = services.ParticipantStub(link)
            stream = stub.Prepare(pb.PrepareRequest(), timeout=60)
            assert (await stream.read()).HasField("admission_closed")
            while len(servicer.peers) < 4:
                await stub.GetStatus(pb.GetStatusRequest(), timeout=5)
                await asyncio.sleep(0.01)  # a caller that is faster is refused
            assert not stream.done()
            assert not servicer.left.is_set()
            stream.cancel()
    finally:
        await server.stop(None)


def test_a_token_never_prints_itself_and_short_ones_are_refused() -> None:
    token = Token(SECRET)
    assert SECRET not in f"{token!r} {token}"
    assert token.matches(SECRET)
    assert not token.matches(SECRET[:-1])
    with pytest.raises(SafepointError, match="shorter"):
        Token("short")


def test_a_token_file_that_is_missing_or_open_to_others_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAFEPOINT_TOKEN_FILE", raising=False)
    assert read_token() is None
    path = tmp_path / "token"
    with pytest.raises(SafepointError, match="cannot be read"):
        read_token(path)
    path.write_text(SECRET + "\n", encoding="ascii")
    path.chmod(0o640)
    with pytest.raises(SafepointError, match="open to other users"):
        read_token(path)
    path.chmod(0o600)
    monkeypatch.setenv("SAFEPOINT_TOKEN_FILE", str(path))
    token = read_token()
    assert token is not None
    assert token.caller_of(SECRET)
    assert not token.caller_of(SECRET[:-1])


def test_a_handlers_refusal_is_an_exception_with_attributes() -> None:
    error = refuse(Reason.DECLINED, "No.", participant_id="agent")
    assert (error.reason, error.participant_id) == (Reason.DECLINED, "agent")
