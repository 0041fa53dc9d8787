"""The demo with a real vLLM: long generations are in flight at the cut, and go on from their prefixes.

Half of the story is that of `story`. Here the engine is vLLM on a small model with random weights. Most rollouts talk,
greedily and without end, to their limit of tokens; the others act, by seeded chance: they must call a tool at each turn,
which makes random weights act validly. The save comes when the talkers have said at least `LONG` tokens each.

The rule it keeps: the tokens of the uninterrupted run are vLLM's own, without a shim before it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.client_results import SaveResult
from coordinator.demo import story
from coordinator.demo.compare import Outcome, differences
from coordinator.demo.drive import Trainer
from coordinator.demo.engine_figures import (
    EngineFigures,
    longest_running,
    read_engine_log,
    regenerated,
    saved_requests,
    tokens_of,
)
from coordinator.demo.engines import Vllm, tiny_model
from coordinator.demo.figures import Figures
from coordinator.demo.rows import Task, make_tasks
from coordinator.demo.world import World
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import Phase

LONG: Final = 2000  # tokens that each talker has said at the cut
LIMIT: Final = 2800
TURN_TOKENS: Final = 400  # a tool call has about 40; a list of calls ends by chance
MAX_STEPS: Final = 6
LAYERS: Final = 4
WIDTH: Final = 256
FINISH_S: Final = 900.0
# Rounding differs with who is in the same batch.
LOG_PROBS_WITHIN: Final = 2e-3
_ENGINE: Final = "engine"
_MODEL: Final = "policy_model"


def talks(number: int) -> bool:
    """Whether the rollout of that number talks: five of eight, those that have no state of their own among them."""
    return number % 2 == 1 or number % 8 == 0


def make_vllm_tasks(count: int, seed: int) -> list[Task]:
    """The demo's tasks with what a real engine has to be told; the same for the same seed."""
    tasks: list[Task] = []
    for number, task in enumerate(make_tasks(count, seed)):
        params: dict[str, Any] = dict(task.row["responses_create_params"])
        more: dict[str, Any]
        if talks(number):
            # Tools are there, and it uses none: nobody taught it how.
            more = {"ignore_eos": True}
            params |= {"tool_choice": "auto", "max_output_tokens": LIMIT, "temperature": 0.0}
        else:
            # By chance with a seed: what is likeliest for random weights is the same bracket for ever.
            more = {"seed": seed * 1000 + number}
            params |= {"tool_choice": "required", "max_output_tokens": TURN_TOKENS, "temperature": 1.0}
        params["metadata"] = {"extra_body": json.dumps(more)}
        tasks.append(dataclasses.replace(task, row={**task.row, "responses_create_params": params}))
    return tasks


class VllmStory(story.Story):
    """As Story."""

    both_at_once = False
    finish_s = FINISH_S

    def __init__(self, console: Console, rollouts: int, seed: int, folder: Path) -> None:
        model = tiny_model(folder.parent / f"vllm-demo-{LAYERS}x{WIDTH}", layers=LAYERS, width=WIDTH)
        quiet, rough = (Vllm(model, covered, MAX_STEPS) for covered in (False, True))
        super().__init__(console, make_vllm_tasks(rollouts, seed), seed, folder, quiet, rough)
        self._freeze_s = 0.0
        self._ended: dict[str, float] = {}

    async def _to_the_cut(self, trainer: Trainer, world: World, few: int) -> None:
        talkers = [task for number, task in enumerate(self._tasks) if talks(number)]
        trainer.dispatch(talkers)
        log, until = world.policy_log(world.lives), time.monotonic() + FINISH_S
        while True:
            said = longest_running(log.read_text().splitlines()) if log.exists() else []
            if sum(chunks >= LONG for chunks in said) >= len(talkers):
                break
            trainer.raise_failures()
            if time.monotonic() > until or trainer.results:
                raise refuse(Reason.UNAVAILABLE, f"the long generations do not get to {LONG} tokens: {said}")
            await asyncio.sleep(0.2)
        actors = [task for number, task in enumerate(self._tasks) if not talks(number)]
        # None of the actors has to have finished: they act while the others talk.
        trainer.dispatch(actors)
        await asyncio.sleep(1.0)

    async def _save(self, world: World) -> SaveResult:
        def note(event: pb.OperationEvent) -> None:
            progress = event.participant_progress
            if event.HasField("participant_progress") and progress.done and progress.phase == Phase.PREPARE.value:
                self._ended[progress.participant_id] = event.elapsed.ToNanoseconds() / 1e9

        save = await world.client.save(story.SNAPSHOT, timeout=60, metadata={"step": "1"}, on_progress=note)
        # The wave before the engine's is the model's: when that has shown its proof, the engine is called.
        self._freeze_s = self._ended[_ENGINE] - self._ended[_MODEL]
        return save

    def _differences(self, expected: Outcome, actual: Outcome) -> list[str]:
        self._token_exact = sorted(expected.results) == sorted(actual.results) and all(
            tokens_of(expected.results[each]) == tokens_of(actual.results[each]) for each in expected.results
        )
        return differences(expected, actual, log_probs_within=LOG_PROBS_WITHIN, calls_are_drawn=True)

    def _measure(self, done: story.Interrupted, equal: bool) -> Figures:
        lives = [
            read_engine_log(self._rough.policy_log(life).read_text(errors="replace").splitlines(), self._seed)
            for life in (1, 2)
        ]
        requests = self._rough.root / "snapshots" / story.SNAPSHOT / _ENGINE / "requests.jsonl"
        saved = saved_requests(requests.read_text().splitlines())
        plain = self._plain_figures(done, equal, lives[0].generations, lives[1].generations)
        return EngineFigures(
            **dataclasses.asdict(plain),
            tokens_in_flight_at_cut=sum(len(request.token_ids) for request in saved),
            tokens_regenerated=regenerated(saved, lives[1], self._seed),
            freeze_s=round(self._freeze_s, 3),
            token_exact=self._token_exact,
        )


def run_vllm_demo(json: bool = False, rollouts: int = 16, seed: int = 7) -> int:
    """As `run_demo`, with a real vLLM: logs are under build/demo-vllm/, the figures in build/demo-vllm.json."""
    return run(json, rollouts, seed, story.BUILD)


def run(as_json: bool, rollouts: int, seed: int, build: Path) -> int:
    """The same below another folder."""
    return story.show(as_json, "demo-vllm", build, lambda console, folder: VllmStory(console, rollouts, seed, folder))
