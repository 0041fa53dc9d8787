"""What became of the tokens that a real engine had generated at the cut, and the verdict on it.

PURE. The rule it keeps: counted from the snapshot's requests and from the engine's own log (`engine_log`): a request that
the second life of the engine began anew costs all of its tokens, one that it continued only those that its new prompt
lacks, and one that it never saw again cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from coordinator.demo.compare import Generations
from coordinator.demo.conversation import conversation_digest
from coordinator.demo.figures import Figures

# Of the tokens in flight; what has to be made again are those of constrained calls and of characters cut in two.
MOST_REGENERATED: Final = 0.02


@dataclass(frozen=True, slots=True)
class EngineLife:
    """What one life of the engine generated. `continued`: the prompts of what went on from a prefix."""

    generations: Generations
    continued: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SavedRequest:
    """One request in flight at the cut."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    chat: bool


def read_engine_log(lines: Iterable[str], seed: int) -> EngineLife:
    """Count an engine's log. A torn last line is a write that the kill cut short, and counts for nothing."""
    begun: dict[str, int] = {}
    finished: dict[str, int] = {}
    continued: list[tuple[int, ...]] = []
    running: dict[int, str] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["event"] == "begin":
            digest = running[entry["call"]] = conversation_digest(seed, entry["prompt"])
            begun[digest] = begun.get(digest, 0) + 1
        elif entry["event"] == "continue":
            continued.append(tuple(entry["prompt"]))
        elif entry["event"] == "end" and entry["call"] in running:
            digest = running[entry["call"]]
            finished[digest] = finished.get(digest, 0) + 1
    return EngineLife(Generations(begun, finished), tuple(continued))


def longest_running(lines: Iterable[str]) -> list[int]:
    """How many chunks each unfinished call has, by the engine's log; the most first."""
    chunks: dict[int, int] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["event"] == "progress":
            chunks[entry["call"]] = entry["chunks"]
        elif entry["event"] == "end":
            chunks.pop(entry["call"], None)
    return sorted(chunks.values(), reverse=True)


def saved_requests(lines: Iterable[str]) -> list[SavedRequest]:
    """What a snapshot's `requests.jsonl` holds. Raises ValueError, KeyError for what is none."""
    found: list[SavedRequest] = []
    for number, line in enumerate(lines):
        raw = json.loads(line)
        if number:  # the first line says of which engine
            ids = [tuple(int(token) for token in raw[name]) for name in ("prompt_ids", "token_ids")]
            found.append(SavedRequest(ids[0], ids[1], "chat" in raw["path"]))
    return found


def regenerated(saved: Sequence[SavedRequest], life: EngineLife, seed: int) -> int:
    """How many of the saved tokens this life of the engine generated again."""
    lost = 0
    begun, continued = dict(life.generations.begun), list(life.continued)
    for request in sorted(saved, key=lambda r: -len(r.token_ids)):
        end = len(request.prompt_ids)
        mine = [
            prompt
            for prompt in continued
            if prompt[:end] == request.prompt_ids and prompt[end:] == request.token_ids[: len(prompt) - end]
        ]
        digest = conversation_digest(seed, request.prompt_ids)
        if mine:
            longest = max(mine, key=len)
            continued.remove(longest)
            lost += len(request.token_ids) - (len(longest) - end)
        elif begun.get(digest):
            begun[digest] -= 1
            lost += len(request.token_ids)
    return lost


def tokens_of(result: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of every model call of a rollout's result, in order."""
    items = cast("Sequence[Mapping[str, Any]]", result["response"]["output"])
    return [
        [int(token) for token in item["generation_token_ids"]]
        for item in items
        if item.get("generation_token_ids") is not None
    ]


@dataclass(frozen=True)
class EngineFigures(Figures):
    """The demo's figures with a real engine; the JSON line in this order.

    `tokens_in_flight_at_cut`: tokens of generations that ran at the cut; `tokens_regenerated`: of those, the ones that
    were made again. `freeze_s`: from the engine's prepare call to its proof. `token_exact`: every token of every
    rollout is that of the uninterrupted run.
    """

    tokens_in_flight_at_cut: int
    tokens_regenerated: int
    freeze_s: float
    token_exact: bool

    @property
    def good(self) -> bool:
        """Whether the promise was kept: as without an engine, and the tokens as well."""
        few = self.tokens_regenerated <= MOST_REGENERATED * self.tokens_in_flight_at_cut
        return super().good and self.token_exact and few
