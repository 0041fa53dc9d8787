"""An engine in this process that behaves like AsyncLLM until a script says otherwise. It generates by `step()`."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from participant_shims.adapters.vllm import VllmAdapter, VllmOptions
from participant_shims.engine.held import HeldFront
from participant_shims.engine.held_outputs import Kit


class Kind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class Params:
    temperature: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    structured_outputs: Any = None
    detokenize: bool = True
    output_kind: Kind = Kind.CUMULATIVE

    def clone(self) -> Params:
        return copy.copy(self)


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Completion:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None = None
    stop_reason: Any = None


class Output:
    def __init__(self, request_id: str, prompt: Any, prompt_token_ids: Any, prompt_logprobs: Any, outputs: Any,
                 finished: bool) -> None:  # fmt: skip
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, prompt_token_ids
        self.prompt_logprobs, self.outputs, self.finished = prompt_logprobs, outputs, finished


KIT = Kit("0.32.0", Params, Kind, Logprob, Output, Completion)


@dataclass
class FakeLLM:
    """`leaks`: goes on while it is paused, on its last rank. `aborts_silently`: an abort tells nobody. `checksums`: of its weights;
    empty: it has none. `weight_version`: what the trainer that holds it has named them."""

    weight_version: str = ""
    checksums: dict[str, str] = field(default_factory=dict)
    paused: bool = False
    leaks: bool = False
    aborts_silently: bool = False
    deaf: bool = False
    full: bool = False  # it has one slot: who comes later waits
    slow_s: float = 0.0  # how long control calls take
    max_model_len: int = 4096
    # As of `Scripted`: while something runs, control calls are answered when a step ends.
    between_steps: str = ""
    waiting: list[tuple[str, asyncio.Future[None]]] = field(default_factory=list)
    looks: int = 0  # at is_paused
    calls: list[str] = field(default_factory=list)
    asked: list[tuple[Any, Params]] = field(default_factory=list)
    running: dict[int, asyncio.Queue[int]] = field(default_factory=dict)
    aborted: int = 0
    serial: Any = field(default_factory=lambda: itertools.count(1))
    ranks: int = 2
    logger_manager: Any = None

    def __post_init__(self) -> None:
        self.logger_manager = SimpleNamespace(stat_loggers=[], engine_indexes=list(range(self.ranks)))
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="tiny", max_model_len=self.max_model_len, skip_tokenizer_init=False),
            parallel_config=SimpleNamespace(data_parallel_size=self.ranks),
        )

    def step(self, tokens: int = 1) -> None:
        if self.paused and not self.leaks:
            return
        for queue in list(self.running.values())[: 1 if self.full else None]:
            for _ in range(tokens):
                queue.put_nowait(1)
                for logger in self.logger_manager.stat_loggers if self.logger_manager else []:
                    logger.record(
                        None, SimpleNamespace(num_generation_tokens=1), mm_cache_stats=None, engine_idx=self.ranks - 1
                    )

        if self.between_steps == "pause first":
            self.waiting.sort(reverse=True)
        for _, turn in self.waiting:
            turn.set_result(None)
        self.waiting.clear()

    async def _turn(self, what: str) -> None:
        if self.between_steps and self.running and not self.paused:
            self.waiting.append((what, asyncio.get_running_loop().create_future()))
            await self.waiting[-1][1]

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        return [{name: each} for name, each in self.checksums.items()]  # a worker for each

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")
        await asyncio.sleep(self.slow_s)
        await self._turn("/pause")
        self.paused = True
        if mode == "abort" and not self.aborts_silently:
            for queue in self.running.values():
                queue.put_nowait(-1)

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        await self._turn("/resume")
        self.paused = False

    async def is_paused(self) -> bool:
        self.looks += 1
        if self.deaf:
            await asyncio.sleep(3600)
        await self._turn("/is_paused")
        return self.paused

    async def generate(self, prompt: Any, params: Params, request_id: str) -> AsyncIterator[Output]:
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else list(prompt)
        if not request_id.startswith("canary"):
            assert params.output_kind is Kind.DELTA or params.n > 1
            self.asked.append((prompt, params))
        mine = next(self.serial)
        queue = self.running[mine] = asyncio.Queue()
        said = 0
        try:
            while params.max_tokens is None or said < params.max_tokens:
                if await queue.get() < 0:
                    yield Output(request_id, None, ids, None, [Completion(0, "", [], 0.0, [], "abort")], True)
                    return
                # The same token at the same place, whatever was prompt and what was generated before.
                token = 100 + len(ids) + said
                said += 1
                last = said == params.max_tokens
                logprobs = None if params.logprobs is None else [{token: Logprob(-0.5, 1, f"w{token}")}]
                mute = not params.detokenize or self.vllm_config.model_config.skip_tokenizer_init
                text = "" if mute else f"w{token}"
                made = Completion(0, text, [token], -0.5 * said, logprobs, "length" if last else None)
                yield Output(request_id, None, ids, None, [made], last)
        except GeneratorExit:
            self.aborted += 1
            raise
        finally:
            del self.running[mine]


@asynccontextmanager
async def held(llm: FakeLLM, life: Path, **options: Any) -> AsyncIterator[tuple[VllmAdapter, HeldFront]]:
    version = options.pop("weight_version", "")
    adapter = VllmAdapter(
        VllmOptions("engine", "", "", life, **options),
        lambda doors, pool, stale: HeldFront(llm, doors, pool, stale, weight_version=version, kit=KIT),
    )
    await adapter.start(lambda: None)
    await adapter.describe()
    front = adapter.front
    assert isinstance(front, HeldFront)
    try:
        yield adapter, front
    finally:
        await adapter.stop()
