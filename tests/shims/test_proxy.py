"""The proxy in front of a real server: what passes, what parks, what is held, and that nothing is invented."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from coordinator.wire.errors import SafepointError
from coordinator.wire.extras import NotInstalled
from coordinator.wire.terms import Activity, QuiesceMode
from participant_shims.admission import Doors
from participant_shims.identity import CallIdentity
from participant_shims.proxy import Proxy
from participant_shims.proxy_http import load_httptools
from tests.shims.proxy_server import Reached, running_server
from tests.shims.shim_fakes import until

IDENTITY = CallIdentity("r-7", 0, "0.3").headers()


@dataclass
class Bench:
    doors: Doors
    proxy: Proxy
    server: Reached
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://{self.proxy.address}"

    def close(self, mode: QuiesceMode = QuiesceMode.HOLD) -> None:
        self.doors.close("op-1", mode, 60)

    def post(self, path: str, **more: Any) -> asyncio.Task[tuple[int, bytes]]:
        async def send() -> tuple[int, bytes]:
            async with self.http.post(self.url + path, **more) as response:
                return response.status, await response.read()

        return asyncio.create_task(send())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running_server() as server, aiohttp.ClientSession() as http:
        doors = Doors()
        proxy = Proxy("127.0.0.1:0", f"127.0.0.1:{server.port}", doors, lambda call: call.attempt < 0)
        await proxy.start()
        yield Bench(doors, proxy, server, http)
        await proxy.stop()


async def test_requests_and_responses_pass_unchanged_cookies_included(bench: Bench) -> None:
    direct = f"http://127.0.0.1:{bench.server.port}"
    got = []
    for base in (bench.url, direct):
        async with bench.http.post(base + "/echo", data=b"abc", headers={"X-Seen": "yes", "cookie": "session=q"}) as r:
            kept = [(k, v) for k, v in r.headers.items() if k.lower() != "date"]
            got.append((r.status, r.reason, kept, await r.read()))
    assert got[0] == got[1]
    assert len([k for k, _ in got[0][2] if k.lower() == "set-cookie"]) == 2


async def test_a_connection_is_kept_alive_on_both_sides(bench: Bench) -> None:
    for _ in range(5):
        async with bench.http.post(bench.url + "/echo", data=b"x") as response:
            await response.read()
    assert len(bench.server.clients) == 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_big_bodies_pass_in_both_directions(bench: Bench, chunked: bool) -> None:
    body = bytes(range(256)) * 4096

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async with bench.http.post(bench.url + "/echo", data=pieces() if chunked else body) as response:
        assert (await response.json())["sha256"] == hashlib.sha256(body).hexdigest()
    async with bench.http.post(bench.url + "/big") as response:
        assert await response.read() == b"z" * 1_000_000
    async with bench.http.head(bench.url + "/big") as response:
        assert (response.status, response.content_length) == (200, 1_000_000)
    async with bench.http.get(bench.url + "/echo") as response:
        assert response.status == 200


@pytest.mark.parametrize("code", [200, 204, 304, 429, 503])
async def test_the_servers_own_status_is_passed_on(bench: Bench, code: int) -> None:
    async with bench.http.post(bench.url + f"/status/{code}") as response:
        assert response.status == code
    async with bench.http.post(bench.url + "/echo", data=b"x") as response:
        assert response.status == 200


async def test_a_closed_door_parks_and_opening_releases_in_order(bench: Bench) -> None:
    bench.close()
    calls = [
        bench.post("/echo", data=b"x" * 1_000_000, headers=CallIdentity(f"r-{n}", 0, "0.1").headers()) for n in range(3)
    ]
    await until(lambda: bench.doors.counts().parked == 3)
    assert bench.server.paths == []
    assert {s.rollout_id for s in bench.doors.rollouts(9)[0]} == {"r-0", "r-1", "r-2"}
    assert bench.doors.rollouts(1)[0][0].waiting_on == "POST /echo"
    assert bench.doors.open().parked == 3
    assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200, 200]
    await until(lambda: bench.doors.counts().in_flight == 0)


async def test_reads_pass_a_closed_door(bench: Bench) -> None:
    bench.close()
    async with bench.http.get(bench.url + "/echo") as response:
        assert response.status == 200


async def test_a_client_that_leaves_while_parked_is_never_sent(bench: Bench) -> None:
    bench.close()
    call = bench.post("/echo", data=b"x" * 500_000, headers=IDENTITY)
    await until(lambda: bench.doors.counts().parked == 1)
    call.cancel()
    await until(lambda: bench.doors.counts().parked == 0)
    bench.doors.open()
    async with bench.http.get(bench.url + "/echo") as response:  # the proxy has done all it would do
        await response.read()
    assert bench.server.paths == ["/echo"]


async def test_a_response_is_held_under_hold_and_not_under_drain(bench: Bench) -> None:
    held = bench.post("/slow", headers=IDENTITY)
    await until(lambda: bench.server.paths == ["/slow"])
    bench.close()
    assert bench.doors.counts().in_flight == 1
    bench.server.go.set()
    await until(lambda: bench.doors.counts().held == 1)
    assert bench.doors.counts().in_flight == 0
    assert not held.done()
    assert bench.doors.open().held == 1
    assert (await held)[0] == 200

    bench.server.go.clear()
    drained = bench.post("/slow", headers=IDENTITY)
    await until(lambda: bench.server.paths == ["/slow", "/slow"])
    bench.close(QuiesceMode.DRAIN)
    bench.server.go.set()
    assert (await drained)[0] == 200


async def test_a_stream_waits_before_its_next_piece(bench: Bench) -> None:
    async with bench.http.post(bench.url + "/events", headers=IDENTITY) as response:
        assert response.content_type == "text/event-stream"
        assert await response.content.readuntil(b"\n\n") == b"data: 0\n\n"
        bench.close()
        bench.server.go.set()
        await until(lambda: bench.doors.counts().held == 1)
        assert bench.doors.rollouts(1, only=(Activity.HELD,))[0][0].rollout_id == "r-7"
        bench.doors.open()
        assert await response.content.read() == b"data: 1\n\ndata: 2\n\n"


async def test_a_lost_server_is_a_lost_connection_and_never_a_status(bench: Bench) -> None:
    with pytest.raises(aiohttp.ClientError):
        async with bench.http.post(bench.url + "/broken") as response:
            await response.read()
    proxy = Proxy("127.0.0.1:0", "127.0.0.1:1", Doors())  # nobody listens at port 1
    await proxy.start()
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await bench.http.post(f"http://{proxy.address}/echo", data=b"x")
    await proxy.stop()


async def test_a_request_is_sent_once_even_when_its_answer_is_lost(bench: Bench) -> None:
    with pytest.raises(aiohttp.ClientError):
        async with bench.http.post(bench.url + "/broken", data=b"x") as response:
            await response.read()
    assert bench.server.paths == ["/broken"]


async def test_a_client_that_leaves_is_told_to_the_server_and_counted_out(bench: Bench) -> None:
    call = bench.post("/slow", headers=IDENTITY)
    await until(lambda: bench.doors.counts().in_flight == 1)
    await until(lambda: bench.server.paths == ["/slow"])
    call.cancel()
    await until(lambda: bench.doors.counts().in_flight == 0)


async def test_a_call_of_a_replaced_attempt_is_refused_and_never_sent(bench: Bench) -> None:
    bench.proxy._is_stale = lambda call: call.attempt < 1
    async with bench.http.post(bench.url + "/echo", headers=IDENTITY) as response:
        assert response.status == 409
        assert (await response.json())["error"]["reason"] == "STALE_ATTEMPT"
    assert bench.server.paths == []


async def test_what_is_not_http_ends_the_connection(bench: Bench) -> None:
    host, _, port = bench.proxy.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
    assert b"200" not in await reader.read()
    writer.close()


async def test_pipelined_requests_are_answered_in_order(bench: Bench) -> None:
    host, _, port = bench.proxy.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    one = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n"
    last = b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nab"
    writer.write(one + b"a" + last)
    answers = await reader.read()
    assert answers.index(b'"size":1') < answers.index(b'"size":2')
    writer.close()


async def test_a_client_that_waits_for_100_continue_gets_it(bench: Bench) -> None:
    async with bench.http.post(bench.url + "/echo", data=b"abc", expect100=True) as response:
        assert (await response.json())["size"] == 3


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("asks", [H2C, b"connection: keep-alive, upgrade\r\nupgrade: websocket\r\n"])
async def test_a_request_that_offers_another_protocol_passes_the_doors_like_any_other(
    bench: Bench, asks: bytes
) -> None:
    host, _, port = bench.proxy.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    bench.close()
    one = b"POST /echo HTTP/1.1\r\nhost: x\r\nx-seen: yes\r\n" + asks + b"content-length: 3\r\n\r\nabc"
    writer.write(one + b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nde")
    await until(lambda: bench.doors.counts().parked == 1)
    assert bench.server.paths == []
    bench.doors.open()
    answers = await asyncio.wait_for(reader.read(), 5)
    assert answers.index(b'"size":3') < answers.index(b'"size":2')
    assert b'"seen":"yes"' in answers
    assert bench.server.paths == ["/echo", "/echo"]
    writer.close()


async def test_a_connection_that_the_server_does_not_upgrade_ends_with_its_answer(bench: Bench) -> None:
    host, _, port = bench.proxy.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    bench.close()
    writer.write(b"GET /big HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nde")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    assert answer.endswith(b"z" * 1_000_000)
    assert bench.server.paths == ["/big"]
    writer.close()


async def test_nobody_gets_a_tunnel_for_the_asking(bench: Bench) -> None:
    host, _, port = bench.proxy.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\nPOST /echo HTTP/1.1\r\nhost: x\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert bench.server.paths == []
    writer.close()


async def test_a_websocket_passes_closed_doors() -> None:
    async def greet(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str("hello " + await socket.receive_str())
        await socket.close()
        return socket

    app = web.Application()
    app.add_routes([web.get("/ws", greet)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    doors = Doors()
    proxy = Proxy("127.0.0.1:0", f"127.0.0.1:{runner.addresses[0][1]}", doors)
    await proxy.start()
    doors.close("op-1", QuiesceMode.HOLD, 60)
    async with aiohttp.ClientSession() as http, http.ws_connect(f"http://{proxy.address}/ws") as socket:
        await socket.send_str("you")
        assert await socket.receive_str() == "hello you"
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    await proxy.stop()
    await runner.cleanup()


async def test_an_answer_that_comes_before_its_request_is_whole_says_that_the_connection_ends_with_it(
    bench: Bench,
) -> None:
    host, _, port = bench.proxy.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /status/429 HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\nthe beginning")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert b"429" in head.partition(b"\r\n")[0]
    assert b"connection: close" in head.lower()
    writer.write(b"x" * 50_000)  # what is still on its way does not reset the connection under the answer
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await until(lambda: not bench.proxy._serving)


async def test_the_proxy_costs_little(bench: Bench) -> None:
    async def cost(base: str, n: int) -> float:
        begun = time.process_time()
        for _ in range(n):
            async with bench.http.post(base + "/status/200") as response:
                await response.read()
        return (time.process_time() - begun) / n

    await cost(bench.url, 20)
    through, direct = await cost(bench.url, 150), await cost(f"http://127.0.0.1:{bench.server.port}", 150)
    assert (
        through - direct < 0.004
    )  # seconds of CPU a request; a machine under load measures up to three times the usual


def test_without_httptools_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(SafepointError) as raised:
        load_httptools()
    assert isinstance(raised.value, NotInstalled)
    assert "[proxy]" in raised.value.problem.next_step
