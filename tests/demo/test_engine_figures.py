"""What became of the tokens in flight at the cut is counted from the snapshot and from the engine's own log."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from coordinator.demo.compare import Generations, Outcome, differences
from coordinator.demo.conversation import conversation_digest
from coordinator.demo.engine_figures import (
    EngineFigures,
    EngineLife,
    SavedRequest,
    longest_running,
    read_engine_log,
    regenerated,
    saved_requests,
    tokens_of,
)
from coordinator.demo.engine_log import EngineLog
from coordinator.demo.story_vllm import make_vllm_tasks, talks

SAVED = [SavedRequest((1, 2), (10, 11, 12, 13), True), SavedRequest((5,), (20, 21), True), SavedRequest((6,), (), True)]
FIGURES = EngineFigures(16, 16, 16, 0, 0, 0, 0, 0, 0.5, 100, True, 1000, 20, 0.2, True)


def life(*prompts: tuple[int, ...], begun: tuple[tuple[int, ...], ...] = ()) -> EngineLife:
    return EngineLife(Generations({conversation_digest(7, p): 1 for p in begun}), prompts)


@pytest.mark.parametrize(
    ("second", "lost"),
    [
        (life((1, 2, 10, 11, 12, 13), (5, 20, 21)), 0),
        (life((1, 2, 10, 11, 12), (5, 20)), 2),  # each lost a token
        (life((1, 2, 10, 11, 12, 13), begun=((5,),)), 2),  # one began anew
        (life(begun=((1, 2), (5,))), 6),
        (life(), 0),  # both had ended before the kill, and are answered from their records
        (life((1, 2, 10, 99), begun=((1, 2),)), 4),  # what goes on from other tokens is not its continuation
    ],
)
def test_a_token_is_made_again_when_its_call_begins_anew_or_its_continuation_lacks_it(
    second: EngineLife, lost: int
) -> None:
    assert regenerated(SAVED, second, 7) == lost


def test_two_equal_calls_have_a_continuation_each() -> None:
    twins = [SavedRequest((1,), (10, 11), True), SavedRequest((1,), (10, 11, 12), True)]
    assert regenerated(twins, life((1, 10, 11), (1, 10, 11, 12)), 7) == 0
    assert regenerated(twins, life((1, 10, 11, 12), begun=((1,),)), 7) == 2


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"tokens_regenerated": 21}, False),
        ({"token_exact": False}, False),
        ({"equal_to_uninterrupted": False}, False),
        ({"lost": 1}, False),
    ],
)
def test_the_verdict_needs_the_tokens_too(changes: dict[str, Any], good: bool) -> None:
    assert dataclasses.replace(FIGURES, **changes).good is good


async def test_the_engines_log_says_what_began_what_went_on_and_how_far(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFEPOINT_DEMO_ENGINE_LOG", str(tmp_path / "log"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked = json.loads((await receive())["body"])
        await send({"type": "http.response.start", "status": asked.get("status", 200),
                    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]})  # fmt: skip
        first = {"choices": [], "prompt_token_ids": asked.get("ids")}
        await send({"type": "http.response.body", "body": b"data: %s\n\n" % json.dumps(first).encode()})
        for _ in range(asked["chunks"]):
            await send({"type": "http.response.body", "body": b'data: {"choices": []}\n\n'})
        if asked["ends"]:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    log = EngineLog(app)

    async def call(path: str, **asked: Any) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(asked).encode()}

        async def send(_: Any) -> None:
            return None

        await log({"type": "http", "path": path}, receive, send)

    await call("/v1/chat/completions", ids=[1, 2], chunks=150, ends=True)
    await call("/v1/chat/completions", ids=[3], chunks=250, ends=False)
    await call("/v1/completions", prompt=[3, 9, 9], chunks=2, ends=True)
    await call("/v1/chat/completions", ids=[4], chunks=0, ends=True, status=400)
    lines = [*(tmp_path / "log").read_text().splitlines(), '{"event": "end", "ca']
    found = read_engine_log(lines, 7)
    assert found.generations.begun == {conversation_digest(7, p): 1 for p in ([1, 2], [3])}
    assert found.generations.finished == {conversation_digest(7, [1, 2]): 1}
    assert found.continued == ((3, 9, 9),)
    assert longest_running(lines) == [200]


def test_a_snapshots_requests_are_read_without_their_head() -> None:
    lines = ['{"format": "x"}', '{"path": "/v1/chat/completions", "prompt_ids": [1], "token_ids": [2, 3]}']
    assert saved_requests(lines) == [SavedRequest((1,), (2, 3), True)]


def result(log_prob: float = -0.5, call: str = "a", token: str = "7") -> dict[str, Any]:
    made = {
        "type": "function_call",
        "call_id": call,
        "generation_token_ids": [token],
        "generation_log_probs": [log_prob],
    }
    return {"response": {"output": [made, {"type": "function_call_output", "call_id": call, "output": "1"}]}}


def test_rounding_and_drawn_call_ids_are_forgiven_and_tokens_are_not() -> None:
    def differ(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
        return differences(
            Outcome({"r": one}, {}), Outcome({"r": other}, {}), log_probs_within=1e-3, calls_are_drawn=True
        )

    assert differ(result(), result(-0.5005, "b")) == []
    assert len(differ(result(), result(-0.502))) == 1
    assert len(differ(result(), result(token="8"))) == 1
    assert tokens_of(result()) == [[7]]
    swapped = result(call="a")
    swapped["response"]["output"][1]["call_id"] = "other"
    assert len(differ(result(), swapped)) == 1


def test_most_tasks_talk_to_their_limit_and_the_others_must_act() -> None:
    tasks = make_vllm_tasks(16, 7)
    assert tasks == make_vllm_tasks(16, 7)
    talkers = [task for number, task in enumerate(tasks) if talks(number)]
    assert len(talkers) == 10
    for task in tasks:
        params = task.row["responses_create_params"]
        assert params["tool_choice"] == ("auto" if task in talkers else "required")
    assert {task.agent for task in talkers} == {task.agent for task in tasks}
