"""A real server (uvicorn, starlette) to stand behind the proxy, which writes down what reached it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket


@dataclass
class Reached:
    """What reached the server."""

    paths: list[str] = field(default_factory=list)
    clients: set[Any] = field(default_factory=set)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    left: int = 0
    port: int = 0


def application(reached: Reached) -> Starlette:
    def note(request: Request) -> None:
        reached.paths.append(request.url.path)
        reached.clients.add(request.client)

    async def echo(request: Request) -> Response:
        note(request)
        body = await request.body()
        response = JSONResponse({"size": len(body), "sha256": hashlib.sha256(body).hexdigest(),
                                 "seen": request.headers.get("x-seen", "")})  # fmt: skip
        response.set_cookie("session", "a=b; c", httponly=True)
        response.set_cookie("other", request.cookies.get("session", "none"))
        return response

    async def slow(request: Request) -> Response:
        note(request)
        await reached.go.wait()
        return JSONResponse({"ok": True})

    async def events(request: Request) -> Response:
        note(request)

        async def produce() -> AsyncIterator[str]:
            for n in range(3):
                yield f"data: {n}\n\n"
                if n == 0:
                    await reached.go.wait()

        return StreamingResponse(produce(), media_type="text/event-stream")

    async def big(request: Request) -> Response:
        note(request)
        return Response(b"z" * 1_000_000, media_type="application/octet-stream")

    async def status(request: Request) -> Response:
        note(request)
        return Response(status_code=int(request.path_params["code"]))

    async def broken(request: Request) -> Response:
        note(request)

        async def produce() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError("the server dies inside its response")

        return StreamingResponse(produce())

    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello " + await websocket.receive_text())
        await websocket.close()

    return Starlette(
        routes=[
            Route("/echo", echo, methods=["POST", "GET", "PUT"]),
            Route("/slow", slow, methods=["POST"]),
            Route("/events", events, methods=["POST"]),
            Route("/big", big, methods=["POST", "GET", "HEAD"]),
            Route("/status/{code}", status, methods=["POST"]),
            Route("/broken", broken, methods=["POST"]),
            WebSocketRoute("/ws", socket),
        ]
    )


@asynccontextmanager
async def running_server() -> AsyncIterator[Reached]:
    reached = Reached()
    config = uvicorn.Config(application(reached), host="127.0.0.1", port=0, log_level="critical", http="h11")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    reached.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield reached
    finally:
        reached.go.set()
        server.should_exit = server.force_exit = True
        await task
