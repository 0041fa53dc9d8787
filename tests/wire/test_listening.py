"""What address a server announces that listens on all interfaces: one that other machines can dial."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from coordinator.wire import listening

LOOPBACK = "127.0.1.1"  # as Debian and Ubuntu write it into /etc/hosts beside the machine's name
OURS = "10.0.0.3"


def _fails() -> str:
    raise OSError("no such host")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
@pytest.mark.parametrize(
    ("by_name", "by_route", "announced"),
    [
        (lambda: "10.0.0.9", _fails, "10.0.0.9"),
        (lambda: LOOPBACK, lambda: OURS, OURS),
        (_fails, lambda: OURS, OURS),
    ],
    ids=["by its name", "its name is loopback", "its name is nobody's"],
)
def test_a_server_on_all_interfaces_announces_no_loopback_where_there_is_another_address(
    monkeypatch: pytest.MonkeyPatch, host: str, by_name: Callable[[], str], by_route: Callable[[], str], announced: str
) -> None:
    monkeypatch.setattr(listening, "_by_name", by_name)
    monkeypatch.setattr(listening, "_by_route", by_route)
    assert listening._reachable(host) == announced


def test_where_there_is_none_it_is_said_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "_by_name", lambda: LOOPBACK)
    monkeypatch.setattr(listening, "_by_route", _fails)
    assert listening._reachable("0.0.0.0") == "127.0.0.1"
    assert "`advertise`" in caplog.text


def test_the_address_of_the_route_is_one_of_this_machine() -> None:
    try:
        found = listening._by_route()
    except OSError:
        pytest.skip("this machine has no route to others")
    with socket.socket() as ours:
        ours.bind((found, 0))


@pytest.mark.parametrize(
    ("host", "announced"), [("10.1.2.3", "10.1.2.3"), ("localhost", "127.0.0.1"), ("node-7", "node-7")]
)
def test_a_host_that_was_named_is_announced_as_it_is(host: str, announced: str) -> None:
    assert listening._reachable(host) == announced
