"""What an engine's stream costs in writes, and in which order it is told. No sockets: bytes are handed in."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from participant_shims.engine.record import Record, read_piece
from participant_shims.engine.request import make_ask
from participant_shims.engine.stream import Failure, Stream
from participant_shims.proxy import Link, Upstream
from participant_shims.proxy_http import Messages, load_httptools

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(number: int) -> bytes:
    choice = {"index": 0, "text": f"w{number}", "token_ids": [number], "finish_reason": None}
    return b"data: " + json.dumps({"id": "x", "model": "m", "choices": [choice]}).encode() + b"\n\n"


def body(*events: bytes) -> bytes:
    """Each in a chunk of its own, as vLLM sends them."""
    return b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events)


END = body(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Bench:
    """A stream that is passed on. `may`: whether the doors are open."""

    def __init__(self) -> None:
        self.link = Link()
        self.record = Record("sp-1", make_ask("/v1/completions", {"prompt": [1], "stream": True}))
        upstream = Upstream(self.link, Messages(self.link.reader, load_httptools(), responses=True))
        self.spoke = 0
        self.stream = Stream(upstream, self.record, read_piece, self._speak)
        self.may = True
        self.opened = asyncio.Event()
        self.written: list[tuple[bytes, bool]] = []
        self.passing = asyncio.create_task(self._pass())

    def _speak(self) -> None:
        self.spoke += 1

    async def _pass(self) -> None:
        await self.stream.head()
        await self.stream.pass_on(
            lambda chunk, piece: piece.raw, lambda told, ended: self.written.append((told, ended)), lambda: self.may,
            self._hold,
        )  # fmt: skip

    async def _hold(self) -> None:
        while not self.may:
            self.opened.clear()
            await self.opened.wait()

    async def comes(self, data: bytes) -> None:
        self.link.data_received(data)
        for _ in range(5):
            await asyncio.sleep(0)

    def open(self) -> None:
        self.may = True
        self.opened.set()


async def test_what_comes_in_one_step_leaves_in_one_write() -> None:
    bench = Bench()
    await bench.comes(HEAD)
    assert bench.written == [(b"", False)]  # the head of the answer waits for no token
    await bench.comes(body(*map(event, range(50))))
    assert bench.written[1:] == [(b"".join(map(event, range(50))), False)]
    assert bench.spoke == 1
    await bench.comes(body(event(50)) + END)
    assert bench.written[2:] == [(event(50), True)]
    await bench.passing
    assert bench.record.token_ids == list(range(51))


async def test_an_answer_that_is_there_at_once_is_one_write() -> None:
    bench = Bench()
    await bench.comes(HEAD + body(event(0)) + END)
    await bench.passing
    assert bench.written == [(event(0), True)]


async def test_an_end_that_comes_alone_is_told_once() -> None:
    bench = Bench()
    await bench.comes(HEAD + body(event(0)))
    await bench.comes(END)
    await bench.passing
    assert bench.written == [(event(0), False), (b"", True)]


async def test_what_comes_while_closed_is_recorded_and_told_in_order_afterwards_with_the_end() -> None:
    bench = Bench()
    await bench.comes(HEAD + body(event(0)))
    bench.may = False
    await bench.comes(body(event(1), event(2)))
    assert bench.written == [(event(0), False)]
    assert bench.record.token_ids == [0, 1, 2]
    await bench.comes(body(event(3)) + END)
    assert bench.written == [(event(0), False)]
    bench.open()
    await bench.passing
    assert b"".join(told for told, _ in bench.written) == b"".join(map(event, range(4)))
    assert [ended for _, ended in bench.written] == [False, True]


async def test_an_answer_that_was_told_to_its_end_is_not_held_by_doors_that_close_then() -> None:
    bench = Bench()
    await bench.comes(HEAD)
    bench.link.data_received(body(event(0)) + END)
    bench.may = False  # before whoever passes it on has woken up
    await asyncio.wait_for(bench.passing, 5)
    assert bench.written[-1] == (event(0), True)


@pytest.mark.parametrize("split", [1, 7, 40])
async def test_however_the_bytes_are_cut_each_event_is_told_whole(split: int) -> None:
    bench = Bench()
    whole = HEAD + body(*map(event, range(5))) + END
    for at in range(0, len(whole), split):
        await bench.comes(whole[at : at + split])
    await bench.passing
    assert b"".join(told for told, _ in bench.written) == b"".join(map(event, range(5)))
    assert [ended for _, ended in bench.written].count(True) == 1


async def test_an_error_inside_a_stream_comes_after_what_was_said() -> None:
    bench = Bench()
    await bench.comes(HEAD + body(event(0)))
    await bench.comes(body(event(1), b'data: {"error": {"code": 500}}\n\n'))
    with pytest.raises(Failure):
        await bench.passing
    assert bench.written == [(event(0), False), (event(1), False)]


async def test_a_transport_of_another_event_loop_is_taken() -> None:
    """uvloop's is of no class of asyncio's: refused, the connection would hang without a word."""

    class Foreign:
        def get_extra_info(self, name: str) -> None: ...

        def is_closing(self) -> bool:
            return True

    link = Link()
    link.connection_made(cast(Any, Foreign()))
    assert link.writer is not None
