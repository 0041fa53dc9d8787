"""Doing it again: the same requests in order, and no answer taken that differs."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as AppRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from participant_shims.gate.state.reexecute import (
    Exchange,
    Request,
    Response,
    asgi_send,
    canonical_digest,
    first_difference,
    reexecute,
    with_session_cookie,
)


def exchange(body: bytes, answer: bytes, target: str = "/t") -> Exchange:
    return Exchange.of(Request("POST", target, (), body), Response(200, (), answer))


async def test_the_requests_of_one_session_run_in_order_and_sessions_beside_each_other() -> None:
    order: list[bytes] = []
    running = peak = 0

    async def send(request: Request) -> Response:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        order.append(request.body)
        running -= 1
        return Response(200, (), b"ok")

    histories = {f"s{n}": [exchange(b"%d-%d" % (n, i), b"ok") for i in range(4)] for n in range(10)}
    assert await reexecute(histories, send, at_once=3) == {}
    assert peak == 3
    for n in range(10):
        assert [b for b in order if b.startswith(b"%d-" % n)] == [b"%d-%d" % (n, i) for i in range(4)]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (Response(500, (), b"{}"), "status 500 and not 200"),
        (Response(200, (), b'{"a": [1, {"b": 3}]}'), "first at $.a[1].b"),
        (Response(200, (), b'{"a": [1]}'), "first at $.a[1]"),
        (Response(200, (), b"no json"), "another answer"),
    ],
)
async def test_another_answer_is_a_divergence_that_says_where(answer: Response, what: str) -> None:
    async def send(request: Request) -> Response:
        return answer

    history = {"s": [exchange(b"", b'{"a": [1, {"b": 2}]}', "/tool?x=1"), exchange(b"never sent", b"")]}
    found = await reexecute(history, send)
    assert "request 0 POST /tool:" in str(found["s"])
    assert what in str(found["s"])
    assert found["s"].expected != found["s"].got


async def test_a_server_that_fails_or_hangs_concerns_one_session() -> None:
    async def send(request: Request) -> Response:
        if request.body == b"hang":
            await asyncio.Event().wait()
        if request.body == b"fail":
            raise ConnectionResetError("gone")
        return Response(200, (), b"1")

    found = await reexecute({b: [exchange(b.encode(), b"1")] for b in ("good", "hang", "fail")}, send, timeout_s=0.05)
    assert set(found) == {"hang", "fail"}
    assert "no answer within" in str(found["hang"])
    assert "gone" in str(found["fail"])


async def test_ignored_fields_do_not_count_and_others_do() -> None:
    async def send(request: Request) -> Response:
        return Response(200, (), request.body)

    same = exchange(b'{"id": 2, "x": {"id": 3, "y": 1}}', b'{"x": {"y": 1, "id": 9}, "id": 1}')
    other = exchange(b'{"id": 1, "x": 2}', b'{"id": 1, "x": 1}')
    found = await reexecute({"same": [same], "other": [other]}, send, ignored=frozenset({"id"}))
    assert set(found) == {"other"}


def test_the_order_of_keys_and_white_space_do_not_count_but_types_do() -> None:
    assert canonical_digest(b'{"a":1,"b":2}') == canonical_digest(b'{ "b": 2, "a": 1 }')
    assert canonical_digest(b'{"a":1}') != canonical_digest(b'{"a":1.0}')
    assert first_difference(b'{"a":1}', b'{"a":true}') == "$.a"


def test_the_first_request_gets_the_cookie_that_its_response_had_set() -> None:
    answered = Response(200, (("set-cookie", "gym=abc; path=/; httponly"), ("set-cookie", "x=1")), b"")
    first = Exchange.of(Request("POST", "/seed_session", (("host", "a"), ("cookie", "x=0")), b"12"), answered)
    sent = with_session_cookie(first)
    assert ("cookie", "x=0; gym=abc") in sent.headers
    assert ("content-length", "2") in sent.headers
    assert not any(name == "host" for name, _ in sent.headers)


def test_a_record_comes_back_from_its_plain_form_and_nothing_else_does() -> None:
    made = Exchange.of(Request("GET", "/x", (("a", "b"),), b"\xff"), Response(201, (("set-cookie", "c=d"),), b"{}"))
    assert Exchange.from_plain(made.to_plain()) == made
    for damaged in (
        [],
        None,
        [*made.to_plain(), 1],
        [1, *made.to_plain()[1:]],
        [*made.to_plain()[:2], [["a"]], *made.to_plain()[3:]],
    ):
        with pytest.raises(TypeError):
            Exchange.from_plain(damaged)


def test_a_long_response_is_compared_by_its_digest_alone() -> None:
    long = json.dumps(["x"] * 100_000).encode()
    made = Exchange.of(Request("POST", "/x"), Response(200, (), long))
    assert made.body is None
    assert made.digest == canonical_digest(long)


async def test_requests_reach_an_application_in_process() -> None:
    async def echo(request: AppRequest) -> JSONResponse:
        body = (await request.body()).decode()
        made = JSONResponse({"q": request.query_params["q"], "body": body, "path": request.url.path})
        made.set_cookie("c", "1")
        return made

    send = asgi_send(Starlette(routes=[Route("/a b", echo, methods=["POST"])]))
    answer = await send(Request("POST", "/a%20b?q=%C3%A9", (), b"hello"))
    assert answer.status == 200
    assert json.loads(answer.body) == {"q": "é", "body": "hello", "path": "/a b"}
    assert any(name == "set-cookie" for name, _ in answer.headers)
