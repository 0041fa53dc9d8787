"""Who gets the page, and that nobody can change anything through it. Without a browser, against the real server."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.page import serving
from coordinator.page.serving import Page, PageServer
from coordinator.protocol.topology import Missing, Participant
from coordinator.wire.errors import Reason, Refused
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, OperationKind, Role


class Looked:
    """A coordinator with one agent, and one that is gone."""

    def epoch(self) -> int:
        return 3

    def participants(self) -> tuple[Participant, ...]:
        mode = CheckpointMode.EXPORT_RESTORE
        return (Participant(ParticipantId("agent"), Role.AGENT, "gym.agent", mode, IncarnationId("i"), "h:1"),)

    def gone(self) -> tuple[Missing, ...]:
        return (Missing(self.participants()[0], 4.0, "it was killed"),)

    def running(self) -> tuple[str, OperationKind] | None:
        return None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "snapshots").mkdir()
    return tmp_path


@pytest.fixture
def server(root: Path) -> Iterator[PageServer]:
    made = PageServer(Page(Looked(), str(root), "default"), "127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture
def keyed(root: Path) -> Iterator[PageServer]:
    made = PageServer(Page(Looked(), str(root), "default"), "127.0.0.1:0", "right")
    yield made
    made.close()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(*server.address.split(":"), timeout=60)  # type: ignore[arg-type]
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": server.address} | {k.replace("_", "-"): v for k, v in headers.items()}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def test_the_page_and_its_parts_are_served(server: PageServer) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/draw.js", "text/javascript"),
                       ("/views.js", "text/javascript"), ("/live.js", "text/javascript")):  # fmt: skip
        status, headers, text = ask(server, path)
        assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert text == serving.static(path.strip("/") or "index.html")


def test_the_overview_has_who_takes_part_and_who_is_gone(server: PageServer) -> None:
    status, _, text = ask(server, "/api/overview")
    found = json.loads(text)
    assert status == 200
    assert (found["epoch"], found["operations"], found["snapshots"]) == (3, [], [])
    assert [who["missing"] for who in found["participants"]] == ["", "it was killed"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.", "10.0.0.1:80", "", "[::2]:80"]
)
def test_a_name_that_is_not_this_machines_leads_nowhere(server: PageServer, host: str) -> None:
    """DNS rebinding: the browser thinks that it talks to evil.example."""
    for path in ("/", "/api/overview", "/events"):
        assert ask(server, path, Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:80"])
def test_this_machines_names_lead_here_by_any_port(server: PageServer, host: str) -> None:
    """ssh -L forwards from another port."""
    assert ask(server, "/api/overview", Host=host)[0] == 200


def test_two_hosts_are_none(server: PageServer) -> None:
    raw = f"GET / HTTP/1.1\r\nHost: {server.address}\r\nHost: evil.example\r\n\r\n"
    assert said(server, raw.encode()).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_but_reading_is_allowed(server: PageServer, method: str) -> None:
    status, headers, _ = ask(server, "/api/overview", method)
    assert status == 405
    assert "access-control-allow-origin" not in headers


def test_a_method_that_nobody_knows_is_refused_and_a_body_is_not_read_as_a_request(server: PageServer) -> None:
    body = f"GET /api/overview HTTP/1.1\r\nHost: {server.address}\r\n\r\n"
    raw = f"POST / HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    answer = said(server, raw.encode())
    assert answer.count(b"HTTP/1.1") == 1
    assert said(server, f"BREW / HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode()).split()[1] == b"501"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_pages_are_answered_nothing(server: PageServer, site: str) -> None:
    for path in ("/api/overview", "/api/verify/step-1", "/events", "/draw.js"):
        assert ask(server, path, Sec_Fetch_Site=site)[0] == 403
    assert ask(server, "/", Sec_Fetch_Site=site)[0] == 200, "a link may lead here"


def test_every_answer_forbids_what_the_page_does_not_need(server: PageServer) -> None:
    for path in ("/", "/api/overview", "/nothing"):
        headers = ask(server, path)[1]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path", ["/../page.css", "/static/page.css", "/api/operation/../../owner.json", "/api/snapshot/..%2f..%2fetc",
             "/api/nothing", "/api/difference?before=..&after=x", "/report.js"],
)  # fmt: skip
def test_what_is_not_there_is_not_there(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] in (400, 404)


def test_an_address_that_is_too_long_is_refused(server: PageServer) -> None:
    assert ask(server, "/api/operation/" + "a" * 3000)[0] == 414


def test_with_a_key_nothing_is_told_without_it(keyed: PageServer) -> None:
    assert ask(keyed, "/")[0] == ask(keyed, "/api/overview")[0] == ask(keyed, "/events?key=wrong")[0] == 403
    status, headers, _ = ask(keyed, "/?key=right")
    assert status == 200
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=Strict" in headers["set-cookie"]
    assert ask(keyed, "/api/overview", Cookie=headers["set-cookie"].split(";")[0])[0] == 200
    assert ask(keyed, "/api/overview", Cookie="safepoint_page=wrong")[0] == 403
    assert json.loads(keyed.record())["url"].endswith("?key=right")


@pytest.mark.parametrize(
    "bind", ["0.0.0.0:0", "10.0.0.1:80", ":80", "127.0.0.1", "127.0.0.1:x", "host:1", "127.0.0.1:70000"]
)
def test_what_is_not_loopback_is_refused(root: Path, bind: str) -> None:
    with pytest.raises(Refused) as refusal:
        PageServer(Page(Looked(), str(root), "default"), bind)
    assert refusal.value.reason is Reason.INVALID_ARGUMENT


def test_a_port_that_is_taken_is_named(root: Path, server: PageServer) -> None:
    with pytest.raises(Refused) as refusal:
        PageServer(Page(Looked(), str(root), "default"), server.address)
    assert refusal.value.reason is Reason.UNAVAILABLE
    assert server.address in str(refusal.value)


def test_changes_are_told_and_a_close_ends_who_listens(server: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.address.split(":")[1])), timeout=60) as listening:
        listening.sendall(f"GET /events HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode())
        stream = listening.makefile("rb")
        while stream.readline() not in (b"data: 0\n", b""):
            pass
        server.page.offer(pb.OperationEvent())
        assert stream.readline() == b"\n"
        assert stream.readline() == b"data: 1\n"
        server.page.close()
        assert stream.read() == b"\n", "the stream ends"


def test_so_many_may_listen_and_one_more_is_told(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ones = []
    try:
        for _ in range(serving.MAX_STREAMS):
            one = socket.create_connection(("127.0.0.1", int(server.address.split(":")[1])), timeout=60)
            one.sendall(f"GET /events HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode())
            assert one.recv(12) == b"HTTP/1.1 200"
            open_ones.append(one)
        assert ask(server, "/events")[0] == 503
        assert ask(server, "/api/overview")[0] == 200, "and everything else goes on"
    finally:
        for one in open_ones:
            one.close()


def test_a_page_that_was_closed_makes_room_for_another(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LOOK_S", 0.02)
    address = ("127.0.0.1", int(server.address.split(":")[1]))
    for _ in range(serving.MAX_STREAMS):
        with socket.create_connection(address, timeout=60) as one:
            one.sendall(f"GET /events HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode())
            assert one.recv(12) == b"HTTP/1.1 200"
    end = time.monotonic() + 10
    while True:
        with socket.create_connection(address, timeout=60) as one:
            one.sendall(f"GET /events HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode())
            if one.recv(12) == b"HTTP/1.1 200":
                return
        assert time.monotonic() < end


def test_more_connections_than_there_is_room_for_are_let_go(server: PageServer) -> None:
    address = ("127.0.0.1", int(server.address.split(":")[1]))
    silent = [socket.create_connection(address, timeout=60) for _ in range(serving.MAX_CONNECTIONS)]
    try:
        end = time.monotonic() + 10
        while (
            answer := said(server, f"GET / HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode())
        ) and time.monotonic() < end:
            pass  # the last of the silent ones may not have been taken in yet
        assert answer == b""
    finally:
        for one in silent:
            one.close()
    end = time.monotonic() + 10
    while not said(server, f"GET / HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode()):
        assert time.monotonic() < end, "there is room again once they have left"


def test_a_client_that_says_nothing_is_let_go() -> None:
    assert serving._Handler.timeout == serving.IDLE_S


def test_one_snapshot_is_verified_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, began, go = Page(Looked(), str(root), "default"), threading.Event(), threading.Event()

    def slow(reader: Any, name: str) -> dict[str, Any]:
        began.set()
        go.wait(10)
        return {}

    monkeypatch.setattr(serving.overview, "verified", slow)
    first = threading.Thread(target=page.verify, args=("step-1",))
    first.start()
    began.wait(10)
    with pytest.raises(Refused) as refusal:
        page.verify("step-2")
    assert refusal.value.reason is Reason.UNAVAILABLE
    go.set()
    first.join()
    assert page.verify("step-2") == {}


def test_the_overview_is_made_once_for_all_who_look(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    now = [100.0]
    monkeypatch.setattr(serving.overview, "listing", lambda *_: {})
    monkeypatch.setattr(serving.overview, "overview", lambda *_: made.append(1) or {"n": len(made)})
    monkeypatch.setattr(serving.time, "monotonic", lambda: now[0])
    page = Page(Looked(), str(root), "default")
    assert [page.overview()["n"], page.overview()["n"]] == [1, 1]
    page.offer(pb.OperationEvent())
    assert page.overview()["n"] == 1, "not at each event"
    now[0] += serving.BUSY_S
    assert page.overview()["n"] == 2
    now[0] += serving.CALM_S - 0.1
    assert page.overview()["n"] == 2
    now[0] += 0.1
    assert page.overview()["n"] == 3


def test_snapshots_are_listed_when_an_operation_has_ended_and_not_at_each_look(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    now = [100.0]
    monkeypatch.setattr(serving.overview, "listing", lambda *_: made.append(1) or {"snapshots": len(made)})
    monkeypatch.setattr(serving.time, "monotonic", lambda: now[0])
    page = Page(Looked(), str(root), "default")

    def looked() -> int:
        now[0] += serving.CALM_S
        return int(page.overview()["snapshots"])

    assert [looked(), looked()] == [1, 1]
    page.offer(pb.OperationEvent(phase_started=pb.PhaseStarted()))
    assert looked() == 1
    page.offer(pb.OperationEvent(saved=pb.Saved()))
    assert [looked(), looked()] == [2, 2]
    now[0] += serving.LISTED_S
    assert looked() == 3


def test_a_root_that_is_gone_is_said(root: Path, server: PageServer) -> None:
    (root / "snapshots").rmdir()
    status, _, text = ask(server, "/api/overview")
    assert status == 500
    assert json.loads(text)["reason"] == "STORAGE_FAILED"


def said(server: PageServer, raw: bytes) -> bytes:
    """Everything that comes back."""
    try:
        with socket.create_connection(("127.0.0.1", int(server.address.split(":")[1])), timeout=60) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            found = b""
            while part := connection.recv(65536):
                found += part
            return found
    except ConnectionError:
        return b""
