"""The tasks that the demo's trainer dispatches: half of them stateful, half stateless.

PURE. A row is what NeMo Gym's agents take at `/run`. The rule it keeps: every row carries its own `_ng_rollout_id` and
its own words, so that no two rollouts have a conversation in common and a repeated model call can be told from a second
first one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

COUNTER_AGENT: Final = "counter_agent"
SYNONYMS_AGENT: Final = "synonyms_agent"
# The tool with which a stateful rollout reads its session's state; the policy uses it last of all.
READER: Final = "get_counter_value"

_WORDS: Final = ("arid", "brisk", "calm", "dim", "eager", "faint", "grand", "hushed", "idle", "jolly", "keen", "lucid")


@dataclass(frozen=True, slots=True)
class Task:
    """One rollout to dispatch: its id, the agent that runs it, and the body of `/run`."""

    rollout_id: str
    agent: str
    row: dict[str, Any]


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
    }


def _row(rollout_id: str, agent: str, number: int, text: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": text}], "tools": list(tools)},
        "_ng_rollout_id": rollout_id,
        "_ng_task_index": number,
        "_ng_rollout_index": 0,
        "agent_ref": {"type": "responses_api_agents", "name": agent},
    }


def _counter_task(number: int, chance: random.Random) -> Task:
    """A counter on the resources server, which is right only if every increment was done once."""
    rollout_id = f"counter-{number:03d}"
    initial, missing = chance.randint(1, 9), chance.randint(1, 3)
    tools = [
        _tool("increment_counter", "Add to the counter.", {"count": {"type": "integer", "enum": [1, 2]}}),
        _tool(READER, "Read the counter.", {}),
    ]
    text = f"Task {number}: the counter is {initial}. Make it {initial + missing}."
    row = _row(rollout_id, COUNTER_AGENT, number, text, tools)
    return Task(rollout_id, COUNTER_AGENT, {**row, "initial_count": initial, "expected_count": initial + missing})


def _synonyms_task(number: int, chance: random.Random) -> Task:
    """Words whose values are asked for one by one and handed in at the end; the resources server keeps nothing."""
    rollout_id = f"synonyms-{number:03d}"
    words = chance.sample(_WORDS, 2)
    values = [sum(map(ord, word)) for word in words]
    tools = [
        _tool("get_synonym_value", "Get the value of a word.", {"synonym": {"type": "string", "enum": words}}),
        _tool(
            "extract_synonym_values",
            "Hand in the values.",
            {"synonym_values": {"type": "array", "items": {"type": "integer", "enum": values}}},
        ),
    ]
    row = _row(rollout_id, SYNONYMS_AGENT, number, f"Task {number}: hand in {words[0]}.", tools)
    return Task(
        rollout_id,
        SYNONYMS_AGENT,
        {
            **row,
            "id": number,
            "expected_synonyms": words[:1],
            "expected_synonym_values": values[:1],
            "minefield_label": words[1],
            "minefield_label_value": values[1],
        },
    )


def make_tasks(count: int, seed: int) -> list[Task]:
    """`count` tasks, stateful and stateless in turn; the same for the same seed."""
    chance = random.Random(seed)
    return [(_synonyms_task if number % 2 else _counter_task)(number, chance) for number in range(count)]
