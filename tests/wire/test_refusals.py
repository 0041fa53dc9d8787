"""What the log of whoever refuses says of it: enough to find the caller, nothing that the caller sent, and no flood."""

from __future__ import annotations

import logging

import grpc
import pytest
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.wire.auth import Token
from coordinator.wire.errors import Problem, Reason, Refused
from coordinator.wire.guard import Guard
from coordinator.wire.refusals import EVERY_S, LINES, PARTICIPANT_METADATA_KEY, RECENT_S, Refusals, introduced
from coordinator.wire.rpc import SERVER_OPTIONS, ErrorInterceptor

REGISTER = "/safepoint.v1.Coordinator/Register"
NO_TOKEN = Problem(Reason.UNAUTHENTICATED, "The call carries no valid token.")


class Now:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now() -> Now:
    return Now()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "coordinator.wire.refusals"]


def test_one_that_tries_on_is_a_line_a_minute_with_how_often(caplog: pytest.LogCaptureFixture, now: Now) -> None:
    refusals = Refusals(now)
    for n in range(100):
        refusals.note(f"ipv4:10.0.0.3:{4000 + n}", REGISTER, NO_TOKEN)
    assert said(caplog) == ["refused Register from 10.0.0.3: The call carries no valid token. (UNAUTHENTICATED)"]
    now.s += EVERY_S
    refusals.note("ipv4:10.0.0.3:9", REGISTER, NO_TOKEN)
    assert "99 more since the last line" in said(caplog)[1]


def test_many_callers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture, now: Now) -> None:
    refusals = Refusals(now)
    for n in range(5000):
        refusals.note(f"ipv6:%5Bfd00::{n:x}%5D:7", REGISTER, NO_TOKEN)
    assert len(said(caplog)) == LINES
    assert "from fd00::0:" in said(caplog)[0]
    now.s += EVERY_S
    refusals.note("ipv4:10.0.0.3:1", REGISTER, NO_TOKEN)
    assert f"{5000 - LINES} more calls" in said(caplog)[LINES]
    assert "10.0.0.3" in said(caplog)[LINES + 1]


def test_what_a_stranger_has_made_up_is_not_shown(caplog: pytest.LogCaptureFixture, now: Now) -> None:
    Refusals(now).note("unix:", "/x/\x1b[31mEvil\n2026 INFO all is well", NO_TOKEN)
    assert said(caplog) == [
        "refused an unknown method from this machine: The call carries no valid token. (UNAUTHENTICATED)"
    ]


def test_what_an_operation_tells_itself_is_not_logged(caplog: pytest.LogCaptureFixture, now: Now) -> None:
    Refusals(now).note("unix:", REGISTER, Problem(Reason.FENCED, "Another operation runs."))
    assert said(caplog) == []


def test_a_shim_that_is_kept_out_is_known_until_it_has_given_up(now: Now) -> None:
    refusals = Refusals(now)
    refusals.note("ipv4:10.0.0.3:1", REGISTER, NO_TOKEN)
    now.s += 3
    (one,) = refusals.kept_out()
    assert (one.host, one.ago_s, one.problem) == ("10.0.0.3", 3.0, NO_TOKEN)
    now.s += RECENT_S
    assert refusals.kept_out() == []


def test_how_often_it_has_tried_is_counted_until_it_has_given_up(now: Now) -> None:
    refusals = Refusals(now)
    for _ in range(3):
        refusals.note("ipv4:10.0.0.3:1", REGISTER, NO_TOKEN)
        now.s += 4
    assert [(one.tries, one.ago_s) for one in refusals.kept_out()] == [(3, 4.0)]
    now.s += RECENT_S
    refusals.note("ipv4:10.0.0.3:2", REGISTER, NO_TOKEN)
    assert [one.tries for one in refusals.kept_out()] == [1]


def test_a_shim_of_another_kind_or_version_is_missed_too_and_its_tries_are_no_lines(
    now: Now, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(now)
    problem = Problem(Reason.UNSUPPORTED, "It speaks safepoint.v2.")
    refusals.note("ipv4:10.0.0.3:1", REGISTER, problem)
    assert [one.problem for one in refusals.kept_out()] == [problem]
    assert said(caplog) == []


def test_only_shims_are_missed_and_only_those_refused_for_who_they_are(now: Now) -> None:
    refusals = Refusals(now)
    refusals.note("ipv4:10.0.0.3:1", "/safepoint.v1.Coordinator/GetStatus", NO_TOKEN)
    refusals.note("ipv4:10.0.0.4:1", REGISTER, Problem(Reason.LIMIT_EXCEEDED, "There are too many."))
    assert refusals.kept_out() == []


def test_shims_of_one_host_are_told_apart_by_who_they_say_they_are_and_nonsense_is_not_repeated(
    now: Now, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(now)
    for says in ("cart", "agent", "cart", "", "\x1b[31mEvil", "x" * 500):
        refusals.note("ipv4:10.0.0.3:1", REGISTER, NO_TOKEN, says)
    assert {one.says: one.tries for one in refusals.kept_out()} == {"cart": 2, "agent": 1, "": 3}
    assert "cart" not in caplog.text, "what a stranger sent is in no log"
    assert introduced("cart") == ((PARTICIPANT_METADATA_KEY, "cart"),)
    assert introduced("k\u00e4se") == (), "no header can carry it"


def test_a_shim_that_tries_on_is_one_and_strangers_cannot_fill_the_memory(now: Now) -> None:
    refusals = Refusals(now)
    for n in range(5000):
        refusals.note(f"ipv4:10.0.{n % 256}.{n % 250}:1", REGISTER, NO_TOKEN)
        now.s += 0.001
    assert len(refusals.kept_out()) == LINES
    for _ in range(5000):
        refusals.note("ipv4:10.1.0.1:1", REGISTER, NO_TOKEN)
    assert [one.host for one in refusals.kept_out()].count("10.1.0.1") == 1


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ((), "carries no token"),
        ((("authorization", ""),), "carries no token"),
        ((("authorization", "Bearer "),), "carries no token"),
        ((("authorization", "Bearer " + "b2" * 32),), "carries no valid token"),
        ((("authorization", b"Bearer \xff"),), "carries no valid token"),
    ],
)
def test_a_forgotten_token_and_a_wrong_one_are_told_apart(
    metadata: tuple[tuple[str, str | bytes], ...], said: str
) -> None:
    with pytest.raises(Refused, match=said) as caught:
        Guard(Token("a1" * 32)).by_token(metadata)
    assert caught.value.reason is Reason.UNAUTHENTICATED
    assert "b2" not in str(caught.value)


@pytest.mark.parametrize("method", ["GetStatus", "NoSuchMethod"])
async def test_a_server_logs_a_wrong_token_and_never_shows_it(method: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    right, wrong = "a1" * 32, "b2" * 32
    server = aio.server(interceptors=[ErrorInterceptor(Token(right))], options=SERVER_OPTIONS)
    coordinator_service_pb2_grpc.add_CoordinatorServicer_to_server(
        coordinator_service_pb2_grpc.CoordinatorServicer(), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as link:
        call = link.unary_unary(
            f"/safepoint.v1.Coordinator/{method}",
            request_serializer=pb.GetCoordinatorStatusRequest.SerializeToString,
        )
        with pytest.raises(grpc.RpcError):
            await call(pb.GetCoordinatorStatusRequest(), timeout=5, metadata=(("authorization", f"Bearer {wrong}"),))
    await server.stop(0)
    (line,) = said(caplog)
    assert "from 127.0.0.1: The call carries no valid token. (UNAUTHENTICATED)" in line
    assert wrong not in caplog.text
    assert right not in caplog.text
