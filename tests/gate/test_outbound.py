"""What a call carries beside its identity: news for its callee, kept until the callee has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from participant_shims.admission import Doors
from participant_shims.gate.calllog import CallLog
from participant_shims.gate.digest import request_digest
from participant_shims.gate.outbound import CURRENT, TRACE, Outbound
from participant_shims.gate.replay import Dispatch, Scope
from participant_shims.identity import DONE_HEADER, RECORDED_HEADER, root


class Answered:
    """What aiohttp would return."""

    status, reason, url = 200, "OK", "http://counter/add"
    headers: dict[str, str] = {}  # noqa: RUF012

    async def read(self) -> bytes:
        return b"{}"


class Callee:
    """Keeps the news of each call; `breaks` makes the next one fail on its way."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.breaks = False

    async def request(self, client: Any, server: str, path: str, method: str, **kwargs: Any) -> Answered:
        headers = kwargs["headers"]
        self.heard.append((headers.get(RECORDED_HEADER, ""), headers.get(DONE_HEADER, "")))
        if self.breaks:
            raise ConnectionError("reset")
        return Answered()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CallLog]:
    made = CallLog(tmp_path / "calls.db")
    yield made
    made.close()


async def test_news_is_told_again_until_a_call_that_carried_it_is_answered(log: CallLog) -> None:
    callee, outbound = Callee(), Outbound(Doors(), log, "agent", is_agent=True)

    async def call() -> None:
        await outbound.request(callee.request, None, "counter", "/add", "POST", json={})

    for rollout_id in ("r-0", "r-1"):
        log.claim(rollout_id, "sha", b"{}", "")
        CURRENT.set(Scope(root(rollout_id, 0, 0), [], Dispatch(rollout_id, 0, 0)))
        await call()
    outbound.finished("r-0", 0)
    assert callee.heard == [("", ""), ("", "")]
    callee.breaks = True
    with pytest.raises(ConnectionError):
        await call()
    callee.breaks = False
    await call()
    await call()
    assert callee.heard[2:] == [("0.1", "r-0/0"), ("0.1", "r-0/0"), ("0.3", "")]


@pytest.mark.parametrize("given", [None, {"x-a": "1"}, [("x-a", "1")]])
async def test_the_trace_of_a_request_goes_along_with_the_calls_made_for_it(log: CallLog, given: Any) -> None:
    sent: list[Any] = []

    async def request(client: Any, server: str, path: str, method: str, **kwargs: Any) -> Answered:
        sent.append(dict(kwargs["headers"]))
        return Answered()

    outbound = Outbound(Doors(), log, "agent", is_agent=True)
    CURRENT.set(Scope(root("r-1", 0, 0)))
    await outbound.request(request, None, "counter", "/add", "POST", json={}, headers=given)
    assert "traceparent" not in sent[-1], "the request named none"
    TRACE.set("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    await outbound.request(request, None, "counter", "/add", "POST", json={"n": 1}, headers=given)
    assert sent[-1]["traceparent"] == TRACE.get()
    own = {"traceparent": "00-" + "c" * 32 + "-" + "d" * 16 + "-01"}
    await outbound.request(request, None, "counter", "/add", "POST", json={"n": 2}, headers=own)
    assert sent[-1]["traceparent"] == own["traceparent"], "a server that traces by itself has sent its own"


def test_the_digest_of_a_request_is_the_one_that_snapshots_hold() -> None:
    cookies = [("b", "2"), ("a", "1\udce9")]
    assert request_digest("post", "model", "/v1/r\u00e9", "a=1", b'{"x":1}', cookies) == (
        "27f85012f5f6c523e3489177671416595edd7a40791a451f4e96b4d5efeef4aa"
    )
