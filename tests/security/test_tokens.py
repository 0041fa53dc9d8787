"""The bearer token: read closed, rotated alive, never shown, never sent in the clear (FAILURES D5, D6)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator.client import AsyncClient, Budgets, Client, Refused
from coordinator.participants import Participants
from coordinator.wire.access import Access
from coordinator.wire.auth import Token, TokenFile, read_token
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.links import Security, host_of, is_loopback, read_security
from coordinator.wire.rpc import channel
from tests.security.conftest import HEX, answering, token_file
from tests.security.test_access import outcome

OLD, NEW = HEX * 4, HEX[::-1] * 4
STATUS = "/safepoint.v1.Coordinator/GetStatus"


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def replace(path: Path, *lines: str, mode: int = 0o600) -> None:
    token_file(path.with_suffix(".new"), *lines, mode=mode).rename(path)


@pytest.mark.parametrize("secret", ["", "brief", HEX * 2, HEX * 3 + HEX[:15], "x" * 42, "ü" * 64, "a b" * 30])
def test_what_has_fewer_than_256_bits_is_no_token(secret: str) -> None:
    with pytest.raises(SafepointError) as raised:
        Token(secret)
    assert raised.value.reason is Reason.UNAUTHENTICATED
    assert not secret or secret not in str(raised.value)


@pytest.mark.parametrize("secret", [HEX * 4, "x" * 43, "gH3-_" * 9])
def test_256_bits_are_enough(secret: str) -> None:
    assert Token(secret).matches(secret)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o777])
def test_a_file_that_is_open_to_others_stops_the_start(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SafepointError) as raised:
        read_token(token_file(tmp_path / "t", OLD, mode=mode))
    assert raised.value.reason is Reason.UNAUTHENTICATED


def test_a_file_of_another_user_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = token_file(tmp_path / "t", OLD)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    if os.stat(path).st_uid == 0:  # what root gives us we take; so somebody else's it must be
        os.chown(path, 4712, -1)
    with pytest.raises(SafepointError, match="another user"):
        read_token(path)


@pytest.mark.parametrize(
    "lines", [("",), ("# nothing",), ("observer",), (f"nobody {OLD}",), (f"{OLD} {NEW} {OLD}",), (f"observer,  {OLD}",), ("observer x",)]
)  # fmt: skip
def test_a_line_that_is_no_token_stops_the_start_and_is_not_shown(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(SafepointError) as raised:
        read_token(token_file(tmp_path / "t", *lines))
    assert OLD not in str(raised.value)
    assert raised.value.__cause__ is None  # a decoder's error would quote the file


async def test_two_tokens_are_valid_while_they_rotate_and_a_removed_one_is_not(tmp_path: Path) -> None:
    clock, path = Clock(), token_file(tmp_path / "t", OLD)
    tokens = TokenFile(path, clock)

    async def accepted() -> tuple[bool, bool]:
        clock.now += 2
        answers = [await outcome(link, STATUS, (("authorization", f"Bearer {t}"),), False) for t in (OLD, NEW)]
        return answers[0] is None, answers[1] is None

    async with answering(Security(tokens)) as address, channel(address) as link:
        assert await accepted() == (True, False)
        replace(path, OLD, NEW)
        assert await accepted() == (True, True)
        assert tokens.metadata() == (("authorization", f"Bearer {OLD}"),)  # callers send the first
        replace(path, NEW, OLD)
        assert await accepted() == (True, True)
        assert tokens.metadata() == (("authorization", f"Bearer {NEW}"),)
        replace(path, NEW)
        assert await accepted() == (False, True)


@pytest.mark.parametrize("how", ["open", "opened", "gone", "empty", "nonsense"])
def test_a_file_that_became_unusable_lets_nobody_in_until_it_is_mended(tmp_path: Path, how: str) -> None:
    clock, path = Clock(), token_file(tmp_path / "t", OLD)
    tokens = TokenFile(path, clock)
    if how == "gone":
        path.unlink()
    elif how == "opened":  # as it is: what it says is the same
        path.chmod(0o644)
    else:
        replace(path, {"empty": "", "nonsense": "x"}.get(how, OLD), mode=0o644 if how == "open" else 0o600)
    clock.now += 2
    assert tokens.caller_of(OLD) is None
    assert tokens.metadata() == ()
    replace(path, OLD)
    clock.now += 2
    assert tokens.caller_of(OLD) is not None


def test_a_caller_sends_the_token_that_fits_what_it_does(tmp_path: Path) -> None:
    tokens = TokenFile(token_file(tmp_path / "t", "# both", f"observer {OLD}", f"coordinator,shim {NEW}"))
    assert tokens.metadata(Access.COORDINATOR) == (("authorization", f"Bearer {NEW}"),)
    assert tokens.metadata(Access.RESTORER) == (("authorization", f"Bearer {OLD}"),)  # the first, when none fits


async def test_a_token_is_in_no_log_no_text_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, path = Clock(), token_file(tmp_path / "t", OLD)
    with caplog.at_level(logging.DEBUG):
        tokens = TokenFile(path, clock)
        async with answering(Security(tokens)) as address, channel(address) as link:
            await outcome(link, STATUS, tokens.metadata(), False)  # reaches a handler that fails
            await outcome(link, STATUS, (("authorization", f"Bearer {NEW}"),), False)
            replace(path, NEW)
            clock.now += 2
            tokens.caller_of(OLD)
    said = caplog.text + repr(tokens) + repr(Token(OLD)) + repr(Security(tokens)) + str(vars(tokens)["_tokens"])
    assert OLD not in said
    assert NEW not in said


# ---- where it may go -------------------------------------------------------------------------------------------------

FAR = ["10.0.0.3:7", "trainer-0:7", "dns:///trainer-0:7", "ipv4:10.0.0.3:7", "[2001:db8::1]:7", "ipv6:[2001:db8::1]:7",
       "localhost.example.com:7", "127.0.0.1.example.com:7", "0.0.0.0:7", "passthrough:///10.0.0.3:7"]  # fmt: skip
NEAR = ["127.0.0.1:7", "localhost:7", "[::1]:7", "dns:///localhost:7", "ipv4:127.0.0.1:7", "127.8.8.8:7"]


@pytest.mark.parametrize("target", FAR)
async def test_a_token_does_not_leave_this_machine_in_the_clear(tmp_path: Path, target: str) -> None:
    security = Security(TokenFile(token_file(tmp_path / "t", OLD)))
    with pytest.raises(SafepointError) as raised:
        security.channel(target, Access.COORDINATOR)
    assert raised.value.reason is Reason.INVALID_ARGUMENT
    assert "SAFEPOINT_TLS_DIR" in raised.value.problem.advice
    assert "SAFEPOINT_INSECURE" in raised.value.problem.advice
    with pytest.raises(SafepointError):
        security.sync_channel(target, Access.COORDINATOR)


@pytest.mark.parametrize("target", NEAR)
def test_on_this_machine_it_may_travel_in_the_clear(target: str) -> None:
    assert is_loopback(host_of(target))


async def test_it_may_when_it_is_allowed_in_so_many_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = token_file(tmp_path / "t", OLD)
    assert not read_security(path).insecure
    monkeypatch.setenv("SAFEPOINT_INSECURE", "1")
    allowed = read_security(path)
    await allowed.channel(FAR[0], Access.COORDINATOR).close()
    allowed.sync_channel(FAR[0], Access.COORDINATOR).close()
    with pytest.raises(SafepointError):
        read_security(path, insecure=False).channel(FAR[0], Access.COORDINATOR)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_clients_and_the_coordinator_keep_to_it(tmp_path: Path, kind: type) -> None:
    path = token_file(tmp_path / "t", OLD)
    client = kind("10.255.255.1:7", token_file=path, budgets=Budgets(0.1, 0.1, 0.1))
    with pytest.raises(Refused, match="in the clear"):
        await client.status(timeout=2) if kind is AsyncClient else client.status(timeout=2)
    await client.close() if kind is AsyncClient else client.close()
    with pytest.raises(Refused, match="in the clear"):
        await Participants(1, Security(TokenFile(path))).describe("10.255.255.1:7", 2)


async def test_it_does_not_go_to_a_socket_of_another_user(
    short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = Security(TokenFile(token_file(tmp_path / "t", OLD)))
    async with answering(security, f"unix:{short_path}/s.sock") as address:
        async with security.channel(address, Access.COORDINATOR) as link:
            stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
            assert stub is not None
        os.chown(f"{short_path}/s.sock", 4712, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "getuid", lambda: 1)
        with pytest.raises(SafepointError, match="another user"):
            security.channel(address, Access.COORDINATOR)
