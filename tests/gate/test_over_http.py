"""The gate over real HTTP: uvicorn, a Starlette application with a session cookie, aiohttp as the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from coordinator.wire.terms import QuiesceMode
from participant_shims.gate.asgi import GateMiddleware
from participant_shims.gate.calllog import Answer, CallLog
from participant_shims.gate.core import Gate
from participant_shims.gate.describe import Server
from participant_shims.gate.recorded import RecordedResponse
from participant_shims.identity import CallIdentity

HOLD = QuiesceMode.HOLD
CALL = CallIdentity("r-1", 0, "0.1").headers()


class Served:
    """One gated server on a free port."""

    def __init__(self, directory: Path) -> None:
        self.ran: list[str] = []
        self.log = CallLog(directory / "calls.db")
        self.gate = Gate(Server("counter", "gym.resources", "resources", 1), self.log)
        app = Starlette(
            routes=[
                Route("/echo", self._echo, methods=["GET", "POST"]),
                Route("/stream", self._stream, methods=["POST"]),
            ],
            middleware=[Middleware(SessionMiddleware, secret_key="k", session_cookie="Counter___counter")],
        )
        config = uvicorn.Config(
            GateMiddleware(app, self.gate), host="127.0.0.1", port=0, log_level="warning", timeout_keep_alive=30
        )
        self.server = uvicorn.Server(config)
        self.go = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    async def _echo(self, request: Request) -> JSONResponse:
        body = await request.body()
        self.ran.append(request.method)
        if "wait" in request.query_params:
            await self.go.wait()
        request.session["count"] = request.session.get("count", 0) + 1
        response = JSONResponse({"bytes": len(body), "count": request.session["count"]})
        response.set_cookie("second", "2")
        return response

    async def _stream(self, request: Request) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"data: 0\n\n"
            await self.go.wait()
            yield b"data: 1\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = Served(tmp_path)
    task = asyncio.create_task(made.server.serve())
    while not made.server.started:
        await asyncio.sleep(0.01)
    yield made
    made.server.should_exit = True
    await task
    made.log.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=1)  # one connection: what is not kept alive is seen
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), connector=connector) as session:
        yield session


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_one_connection_serves_parked_remembered_and_plain_requests(
    served: Served, http: aiohttp.ClientSession
) -> None:
    big = b"x" * (3 << 20)
    served.gate.close("op", HOLD, 30)
    parked = asyncio.create_task(http.post(served.url + "/echo", data=big, headers=CALL))
    await until(lambda: served.gate.doors.counts().parked == 1)
    assert served.ran == []
    served.gate.open()
    first = await parked
    assert (await first.json())["bytes"] == len(big)
    connections = len(served.server.server_state.connections)
    second = await http.post(served.url + "/echo", data=big, headers=CALL)
    assert await second.read() == await first.read()
    assert second.headers.getall("Set-Cookie") == first.headers.getall("Set-Cookie")
    assert set(first.cookies) == {"Counter___counter", "second"}
    plain = await http.post(served.url + "/echo", data=b"1", cookies={k: m.value for k, m in first.cookies.items()})
    assert await plain.json() == {"bytes": 1, "count": 2}
    assert len(served.server.server_state.connections) == connections == 1
    assert served.ran == ["POST", "POST"]


async def test_get_passes_closed_doors(served: Served, http: aiohttp.ClientSession) -> None:
    served.gate.close("op", HOLD, 30)
    assert (await http.get(served.url + "/echo")).status == 200
    served.gate.open()


async def test_a_client_that_disconnects_while_parked_never_reaches_the_application(served: Served) -> None:
    served.gate.close("op", HOLD, 30)
    async with aiohttp.ClientSession() as session:
        for headers in (CALL, {}):
            leaving = asyncio.create_task(session.post(served.url + "/echo", data=b"1", headers=headers))
            await until(lambda: served.gate.doors.counts().parked == 1)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await until(lambda: served.gate.doors.counts().parked == 0)
    served.gate.open()
    assert served.ran == []


async def test_a_client_that_disconnects_while_its_response_is_held_finds_it_when_it_retries(served: Served) -> None:
    async with aiohttp.ClientSession() as session:
        leaving = asyncio.create_task(session.post(served.url + "/echo?wait=1", data=b"1", headers=CALL))
        await until(lambda: served.ran)
        served.gate.close("op", HOLD, 30)
        served.go.set()
        await until(lambda: served.gate.doors.counts().held == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: served.gate.doors.counts().held == 0)
        served.gate.open()
        again = await session.post(served.url + "/echo?wait=1", data=b"1", headers=CALL)
        assert (await again.json())["count"] == 1
    assert served.ran == ["POST"]


async def test_an_event_stream_is_held_and_goes_on(served: Served, http: aiohttp.ClientSession) -> None:
    response = await http.post(served.url + "/stream", headers=CALL)
    assert await response.content.readany() == b"data: 0\n\n"
    served.gate.close("op", HOLD, 30)
    served.go.set()
    await until(lambda: served.gate.doors.counts().held == 1)
    served.gate.open()
    assert await response.content.read() == b"data: 1\n\n"
    again = await http.post(served.url + "/stream", headers=CALL)
    assert await again.read() == b"data: 0\n\ndata: 1\n\n"


async def test_a_recorded_response_cannot_be_told_from_the_live_one(
    served: Served, http: aiohttp.ClientSession
) -> None:
    live = await http.post(served.url + "/echo", data=b"1")
    body = await live.read()
    answer = Answer(live.status, tuple(live.headers.items()), body, live.reason or "", str(live.url))
    recorded = RecordedResponse("POST", answer.url, answer)
    for name in ("status", "reason", "ok", "method", "url", "content_type", "charset", "headers", "content_length"):
        assert getattr(recorded, name) == getattr(live, name), name
    assert recorded.cookies == live.cookies
    assert await recorded.json() == await live.json()
    assert await recorded.text() == await live.text()
    assert recorded.request_info.real_url == live.request_info.real_url
    assert await recorded.content.read() == body
    assert recorded.content.at_eof()
    async with RecordedResponse("POST", answer.url, answer) as again:
        assert [c async for c in again.content.iter_any()] == [body]
    missing = await http.post(served.url + "/nowhere")
    text = await missing.read()
    gone = RecordedResponse("POST", "http://h/", Answer(404, tuple(missing.headers.items()), text, "Not Found"))
    errors: list[aiohttp.ClientResponseError] = []
    for response in (missing, gone):
        with pytest.raises(aiohttp.ClientResponseError) as error:
            response.raise_for_status()
        errors.append(error.value)
        with pytest.raises(aiohttp.ContentTypeError):
            await response.json()
    assert [(e.status, e.message) for e in errors] == [(404, "Not Found")] * 2
