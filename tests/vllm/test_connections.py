"""Kept connections on both sides of the proxy: who closes one says so before, and one that the engine has just closed
costs its caller nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from participant_shims.proxy_http import Head, Messages, load_httptools
from tests.vllm.canned_engine import END, HEAD, INFO, MIDDLE, Canned
from tests.vllm.shims import shim_before
from tests.vllm.test_control import ASK, until

STREAM = HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"


class Engine(Canned):
    """Answers each request in full; knobs are of the class that `engine` makes."""

    links: list[Engine]
    closes: list[str]  # what it does with a request on a connection that it has answered on before
    says_close = False  # answers with `connection: close`, and keeps to it
    refuses = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.answered: list[str] = []
        self.gone = False
        self.links.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True

    def answer(self, path: str, body: bytes) -> None:
        if self.answered and self.closes and path not in INFO:
            what = self.closes.pop(0)
            if what == "in the middle":
                self.transport.write(STREAM + b"\r\n" + MIDDLE)
            self.transport.close()
            return
        self.answered.append(path)
        last = b"connection: close\r\n" if self.says_close and path not in INFO else b""
        if self.refuses and path == "/v1/completions":
            raw = json.dumps({"error": {"code": self.refuses, "message": "scripted"}}).encode()
            self.transport.write(
                b"HTTP/1.1 %d No\r\n%scontent-length: %d\r\n\r\n%s" % (self.refuses, last, len(raw), raw)
            )
        elif path == "/v1/completions":
            self.transport.write(STREAM + last + b"\r\n" + MIDDLE + END)
        else:
            raw = json.dumps(INFO.get(path, {"status": "done"})).encode()
            self.transport.write(HEAD + last + b"content-length: %d\r\n\r\n%s" % (len(raw), raw))
        if last:
            self.transport.close()


@asynccontextmanager
async def engine(**knobs: Any) -> AsyncIterator[tuple[type[Engine], str]]:
    made: type[Engine] = type("Made", (Engine,), {"links": [], "closes": [], **knobs})
    server = await asyncio.get_running_loop().create_server(lambda: made(0.0), "127.0.0.1", 0)
    try:
        yield made, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for link in made.links:
            link.transport.abort()


class KeptAlive:
    """A client that uses one connection for all it asks, and never leaves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.messages = Messages(reader, load_httptools(), responses=True)

    @classmethod
    async def dial(cls, address: str) -> KeptAlive:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def post(self, path: str, body: Any) -> Head:
        """The head of the answer, which was read to its end."""
        raw = json.dumps(body).encode()
        self.writer.write(
            b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(raw)) + raw
        )
        async with asyncio.timeout(5):
            head = await self.messages.next()
            assert isinstance(head, Head), "the connection was closed before an answer"
            while True:
                event = await self.messages.next()
                assert event is not None, "the connection was closed inside an answer"
                if not hasattr(event, "data"):
                    return head

    async def ended(self) -> bool:
        """Whether the other side closes, when it is given the time for it."""
        try:
            async with asyncio.timeout(0.1):
                return await self.reader.read(1) == b""
        except TimeoutError:
            return False


@pytest.mark.parametrize("says_close", [False, True])
@pytest.mark.parametrize("refuses", [0, 400, 503])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/update_weight_version", {"new_version": "v"}),  # a control call of somebody else
        ("/v1/completions", {}),  # a whole answer
        ("/v1/completions", {"stream": True}),
        ("/v1/completions", {"n": 2, "stream": True}),  # as it came
        ("/tokenize", {}),  # whatever else is posted
    ],
)
async def test_who_closes_a_connection_has_said_so_in_its_answer(
    tmp_path: Path, path: str, more: dict[str, Any], refuses: int, says_close: bool
) -> None:
    async with engine(says_close=says_close, refuses=refuses) as (_, target), shim_before(target, tmp_path) as adapter:
        client = await KeptAlive.dial(adapter.proxy.address)
        for _ in range(3):
            head = await client.post(path, {**ASK, **more, "max_tokens": 1})
            if not head.keep_alive:
                assert await client.ended()
                client.writer.close()
                client = await KeptAlive.dial(adapter.proxy.address)
        if head.keep_alive:
            assert not await client.ended()
        client.writer.close()


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2, "stream": True}])
async def test_a_request_that_meets_a_connection_that_the_engine_has_just_closed_is_asked_anew(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """The engine closes connections that were idle; the request was in nobody's hands, and nothing was generated."""
    async with engine(closes=["at once"]) as (made, target), shim_before(target, tmp_path) as adapter:
        client = await KeptAlive.dial(adapter.proxy.address)
        for _ in range(3):
            assert (await client.post("/v1/completions", {**ASK, **more, "max_tokens": 1})).status == 200
        client.writer.close()
        assert sum(link.answered.count("/v1/completions") for link in made.links) == 3
        await until(lambda: not adapter.proxy.in_flight)


async def test_a_request_that_was_begun_to_be_answered_is_not_asked_anew(tmp_path: Path) -> None:
    async with engine(closes=["in the middle"]) as (made, target), shim_before(target, tmp_path) as adapter:
        client = await KeptAlive.dial(adapter.proxy.address)
        await client.post("/v1/completions", {**ASK, "max_tokens": 1})
        with pytest.raises((AssertionError, ConnectionError)):
            await client.post("/v1/completions", {**ASK, "max_tokens": 2})
        client.writer.close()
        assert sum(link.answered.count("/v1/completions") for link in made.links) == 1


@pytest.mark.parametrize("path", ["/update_weight_version", "/v1/completions", "/tokenize"])
async def test_no_connection_to_the_engine_outlives_the_one_for_which_it_was_made(tmp_path: Path, path: str) -> None:
    async with engine() as (made, target), shim_before(target, tmp_path) as adapter:
        client = await KeptAlive.dial(adapter.proxy.address)
        for asked in ("/v1/completions", path, path):
            await client.post(asked, {**ASK, "max_tokens": 1})
        await until(lambda: sum(not link.gone for link in made.links) <= 1)
        client.writer.close()
        await until(lambda: all(link.gone for link in made.links))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("path", ["/update_weight_version", "/v1/completions"])
async def test_a_caller_that_sends_its_body_only_when_it_is_asked_for_is_asked(
    tmp_path: Path, path: str, waits: bool
) -> None:
    async with engine() as (_, target), shim_before(target, tmp_path) as adapter:
        client = await KeptAlive.dial(adapter.proxy.address)
        body = json.dumps({**ASK, "max_tokens": 1}).encode()
        head = b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-Continue\r\ncontent-length: %d\r\n\r\n"
        client.writer.write(head % (path.encode(), len(body)) + (b"" if waits else body))
        async with asyncio.timeout(5):
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            if waits:
                client.writer.write(body)
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        client.writer.close()
