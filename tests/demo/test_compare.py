"""The comparison: it forgives what is drawn anew for each answer, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from coordinator.demo.compare import Outcome, differences, final_states, prompts_in
from coordinator.demo.rows import make_tasks


def result() -> dict[str, Any]:
    return {
        "responses_create_params": {"input": []},
        "response": {
            "id": "resp_1",
            "created_at": 1,
            "output": [
                {"id": "msg_1", "type": "message", "content": [{"text": "so"}]},
                {
                    "id": "call_1",
                    "type": "function_call",
                    "call_id": "call_1",
                    "prompt_token_ids": [256, 104],
                    "generation_token_ids": [1, 2],
                    "generation_log_probs": [-0.5, -1.25],
                },
            ],
        },
        "reward": 1.0,
    }


def test_ids_and_times_that_gym_draws_for_each_answer_do_not_count() -> None:
    other = result()
    other["response"] |= {"id": "resp_2", "created_at": 2}
    other["response"]["output"][0]["id"] = "msg_2"
    assert differences(Outcome({"r": result()}, {}), Outcome({"r": other}, {})) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("reward",), 0.0),
        (("reward",), 1),
        (("response", "output", 1, "generation_token_ids", 1), 3),
        (("response", "output", 1, "generation_log_probs", 0), -0.5000000001),
        (("response", "output", 1, "call_id"), "call_2"),
        (("response", "output", 0, "content", 0, "text"), "so "),
        (("surprise",), None),
    ],
)
def test_any_other_difference_is_named_with_its_path(path: tuple[Any, ...], value: object) -> None:
    other = copy.deepcopy(result())
    at: Any = other
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    found = differences(Outcome({"r": result()}, {}), Outcome({"r": other}, {}))
    assert len(found) == 1
    assert found[0].startswith("r.")
    assert str(path[-1]) in found[0]


def test_a_missing_result_a_shorter_answer_and_other_session_state_are_differences() -> None:
    short = result()
    short["response"]["output"].pop()
    assert differences(Outcome({"r": result()}, {}), Outcome({}, {})) == ["r has no result in the interrupted run"]
    assert "2 and 1 items" in differences(Outcome({"r": result()}, {}), Outcome({"r": short}, {}))[0]
    assert differences(Outcome({}, {"r": {"n": 4}}), Outcome({}, {"r": {"n": 5}})) == ["r state.n: 4 and 5"]
    assert differences(Outcome({}, {"r": {"n": 4}}), Outcome({}, {})) != []


def test_the_final_state_is_what_the_environment_said_last() -> None:
    def said(call_id: str, name: str, output: str) -> list[dict[str, Any]]:
        return [
            {"type": "function_call", "call_id": call_id, "name": name},
            {"type": "function_call_output", "call_id": call_id, "output": output},
        ]

    output = [*said("a", "read", '{"count":1}'), *said("b", "add", "{}"), *said("c", "read", '{"count":3}')]
    results = {"r": {"response": {"output": output}}, "s": {"response": {"output": said("d", "add", "{}")}}}
    assert final_states(results, "read") == {"r": {"count": 3}}


def test_prompts_are_found_in_json_text_inside_json() -> None:
    record = {"status": 200, "body": json.dumps(result()), "more": [result()["response"]["output"]]}
    assert list(prompts_in(record)) == [(256, 104), (256, 104)]


def test_no_two_tasks_share_an_id_or_a_conversation_and_a_seed_makes_the_same_ones() -> None:
    tasks = make_tasks(64, 7)
    assert tasks == make_tasks(64, 7)
    assert tasks != make_tasks(64, 8)
    assert len({task.rollout_id for task in tasks}) == 64
    assert len({json.dumps(task.row["responses_create_params"]) for task in tasks}) == 64
