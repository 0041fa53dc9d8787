"""What must be equal between an interrupted run and an uninterrupted one, and what was done twice.

PURE. The rule it keeps: everything is compared but what a server draws anew for each answer (ids and times); a field that
is not known here is compared too. So a difference that nobody thought of shows up as one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

# Drawn by NeMo Gym for each answer: uuids and clocks. Call ids are not among them: the policy makes them from the
# conversation, so they must be equal.
_RESPONSE_DRAWN: Final = frozenset({"id", "created_at", "completed_at"})
_ITEM_DRAWN: Final = frozenset({"id"})


def canonical(result: Mapping[str, Any], *, calls_are_drawn: bool = False) -> dict[str, Any]:
    """A rollout's result without what is drawn anew for each answer.

    `calls_are_drawn`: the engine draws ids of tool calls, too; they are then numbered in the order in which they come.
    """
    response = dict(cast(Mapping[str, Any], result.get("response") or {}))
    items = cast(Sequence[Mapping[str, Any]], response.get("output") or ())
    output = [{k: v for k, v in item.items() if k not in _ITEM_DRAWN} for item in items]
    if calls_are_drawn:
        numbers: dict[str, int] = {}
        for item in output:
            if "call_id" in item:
                item["call_id"] = numbers.setdefault(item["call_id"], len(numbers))
    response["output"] = output
    return {**result, "response": {k: v for k, v in response.items() if k not in _RESPONSE_DRAWN}}


def first_difference(left: object, right: object, path: str = "", log_probs_within: float = 0.0) -> str:
    """Where two JSON values differ first, as a path with both values; empty when they are equal.

    `log_probs_within`: how far log-probabilities of generated tokens may be apart.
    """
    ends: tuple[object, object] = (left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        one, other = cast(Mapping[str, object], left), cast(Mapping[str, object], right)
        for key in sorted({*one, *other}):
            if key not in one or key not in other:
                return f"{path}.{key} is only in {'the first' if key in one else 'the second'}"
            if found := first_difference(one[key], other[key], f"{path}.{key}", log_probs_within):
                return found
        return ""
    if isinstance(left, list) and isinstance(right, list):
        mine, theirs = cast(list[object], left), cast(list[object], right)
        for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if found := first_difference(a, b, f"{path}[{index}]", log_probs_within):
                return found
        return "" if len(mine) == len(theirs) else f"{path} has {len(mine)} and {len(theirs)} items"
    if log_probs_within and ".generation_log_probs[" in path and isinstance(left, float) and isinstance(right, float):
        return "" if abs(left - right) <= log_probs_within else f"{path}: {left} and {right}"
    # repr: 1 and 1.0 and True are three different answers, and a NaN equals itself.
    return "" if repr(ends[0]) == repr(ends[1]) else f"{path}: {_short(ends[0])} and {_short(ends[1])}"


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run ended with: each rollout's result, and the last that its environment said of its own state."""

    results: Mapping[str, Mapping[str, Any]]
    states: Mapping[str, object]


def differences(
    expected: Outcome, actual: Outcome, *, log_probs_within: float = 0.0, calls_are_drawn: bool = False
) -> list[str]:
    """One sentence for each rollout that is not equal: answer, tokens, log-probabilities, reward, environment state."""
    found: list[str] = []
    for rollout_id in sorted({*expected.results, *actual.results}):
        if rollout_id not in actual.results or rollout_id not in expected.results:
            where = "interrupted" if rollout_id not in actual.results else "uninterrupted"
            found.append(f"{rollout_id} has no result in the {where} run")
            continue
        left, right = (
            canonical(each.results[rollout_id], calls_are_drawn=calls_are_drawn) for each in (expected, actual)
        )
        if difference := first_difference(left, right, log_probs_within=log_probs_within):
            found.append(f"{rollout_id}{difference}")
    for rollout_id in sorted({*expected.states, *actual.states}):
        left_state, right_state = expected.states.get(rollout_id), actual.states.get(rollout_id)
        if difference := first_difference(left_state, right_state):
            found.append(f"{rollout_id} state{difference}")
    return found


def final_states(results: Mapping[str, Mapping[str, Any]], reader: str) -> dict[str, object]:
    """For each rollout that used the tool `reader`: what that said the last time, which is the state its session ended in."""
    states: dict[str, object] = {}
    for rollout_id, result in results.items():
        items = cast(Sequence[Mapping[str, Any]], result["response"]["output"])
        readings = {item["call_id"] for item in items if item.get("type") == "function_call" and item["name"] == reader}
        for item in items:
            if item.get("type") == "function_call_output" and item["call_id"] in readings:
                states[rollout_id] = json.loads(item["output"])
    return states


@dataclass(frozen=True, slots=True)
class Generations:
    """What one life of the policy generated, by conversation digest, from its log."""

    begun: Mapping[str, int] = field(default_factory=dict[str, int])
    finished: Mapping[str, int] = field(default_factory=dict[str, int])


def read_generations(lines: Iterable[str]) -> Generations:
    """Count a policy's log. A torn last line is a write that the kill cut short, and counts for nothing."""
    begun: dict[str, int] = {}
    finished: dict[str, int] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        counts = {"begin": begun, "end": finished}.get(entry["event"])
        if counts is not None:
            counts[entry["digest"]] = counts.get(entry["digest"], 0) + 1
    return Generations(begun, finished)


def prompts_in(value: object) -> Iterator[tuple[int, ...]]:
    """The prompt tokens of every model answer inside a JSON value, however deep, JSON text within it included."""
    if isinstance(value, str):
        if '"prompt_token_ids"' in value:
            try:
                yield from prompts_in(json.loads(value))
            except ValueError:
                return
    elif isinstance(value, list):
        for each in cast(list[object], value):
            yield from prompts_in(each)
    elif isinstance(value, Mapping):
        fields = cast(Mapping[str, object], value)
        ids = fields.get("prompt_token_ids")
        if isinstance(ids, list) and ids:
            yield tuple(int(cast(int, each)) for each in cast(list[object], ids))
        for key, each in fields.items():
            if key != "prompt_token_ids":
                yield from prompts_in(each)
