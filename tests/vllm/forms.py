"""An engine behind the proxy and one in the trainer's process, for tests that hold of both. Both engines are scripted: they say
the same tokens to the same question, a token for each `step()`.

The rule: what is only here in one form is not asked of it here; `Form` has what both have.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from participant_shims.adapters.vllm import VllmAdapter
from participant_shims.engine.held import HeldFront
from participant_shims.engine.record import Record
from participant_shims.identity import CallIdentity
from tests.vllm.held_fake import FakeLLM, Kind, Params, held
from tests.vllm.real_engine import Caller, Said
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import ASK, covered, until

RANKS = 2
PROMPT = [1, 2, 3]
WHOLE = [103 + n for n in range(8)]  # what is said to it

both_forms = pytest.mark.parametrize("form", ["behind the proxy", "in process"])


class Form(ABC):
    """One engine, of two ranks if nothing else is said, in one of the forms."""

    engine: Scripted | FakeLLM

    def __init__(self) -> None:
        self.adapter: VllmAdapter
        self._before = 0  # questions that had reached the engine when this shim began

    @abstractmethod
    async def _ask(self, said: Said, caller: CallIdentity | None, more: dict[str, Any]) -> Said: ...

    @abstractmethod
    def steers(self) -> Any:
        """A control call of somebody else's, a resume; ends when it is over."""

    @abstractmethod
    def asked(self) -> list[tuple[list[int], int, int | None]]:
        """Of each question that reached the engine: prompt, max_tokens and seed."""

    @abstractmethod
    def covered(self, life: Path, **options: Any) -> Any:
        """Another shim before the same engine, whose adapter this is from now on."""

    def ask(self, caller: CallIdentity | None = None, said: Said | None = None, **more: Any) -> asyncio.Task[Said]:
        """Ask for 8 tokens, greedily, and read as they come; `more`: as of vLLM's sampling parameters."""
        return asyncio.create_task(self._ask(said if said is not None else Said(), caller, more))

    async def running(self, requests: int = 1) -> None:
        """Until so many have reached the engine through this shim, and wait for their tokens."""
        await until(lambda: len(self.asked()) - self._before >= requests)

    async def recorded(self, tokens: int) -> Record:
        """The one request in flight, when so many tokens of it are recorded."""
        await until(lambda: [len(r.token_ids) for r in self.adapter.front.in_flight.values()] == [tokens])
        return next(iter(self.adapter.front.in_flight.values()))

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """It generates all the time, if it is not paused."""

        async def go_on() -> None:
            while True:
                self.engine.step()
                await asyncio.sleep(0.02)

        going = asyncio.create_task(go_on())
        try:
            yield
        finally:
            await ended(going)


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them; their callers have left."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _BehindProxy(Form):
    def __init__(self, engine: Scripted) -> None:
        super().__init__()
        self.engine: Scripted = engine
        self._caller: Caller

    async def _ask(self, said: Said, caller: CallIdentity | None, more: dict[str, Any]) -> Said:
        return await self._caller.stream({**ASK, **more}, said, caller.headers() if caller else None)

    async def steers(self) -> None:
        assert (await self._caller.post("/resume", None))[0] == 200

    def asked(self) -> list[tuple[list[int], int, int | None]]:
        return [(b["prompt"], b["max_tokens"], b.get("seed")) for b in self.engine.bodies if b.get("stream")]

    @asynccontextmanager
    async def covered(self, life: Path, **options: Any) -> AsyncIterator[Form]:
        self._before = len(self.asked())
        life.mkdir(exist_ok=True)  # noqa: ASYNC240
        async with covered(self.engine, life, **options) as (self.adapter, self._caller):
            yield self


class _InProcess(Form):
    def __init__(self, engine: FakeLLM) -> None:
        super().__init__()
        self.engine: FakeLLM = engine
        self._front: HeldFront
        self._serial = 0

    async def _ask(self, said: Said, caller: CallIdentity | None, more: dict[str, Any]) -> Said:
        self._serial += 1
        params = Params(**{"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "output_kind": Kind.DELTA, **more})
        async for out in self._front.generate(list(PROMPT), params, f"q-{self._serial}", caller=caller):
            made = out.outputs[0]
            said.ids += made.token_ids
            said.text += made.text
            said.logprobs += [next(iter(each.values())).logprob for each in made.logprobs or []]
            said.finish = made.finish_reason or said.finish
            said.label = getattr(out, "safepoint_continued", said.label)
        return said

    async def steers(self) -> None:
        async with self._front.steering("resume"):
            await self.engine.resume_generation()

    def asked(self) -> list[tuple[list[int], int, int | None]]:
        return [
            (list(p["prompt_token_ids"] if isinstance(p, dict) else p), params.max_tokens or 0, params.seed)
            for p, params in self.engine.asked
        ]

    @asynccontextmanager
    async def covered(self, life: Path, **options: Any) -> AsyncIterator[Form]:
        self._before = len(self.asked())
        life.mkdir(exist_ok=True)  # noqa: ASYNC240
        async with held(self.engine, life, weight_version=self.engine.weight_version, **options) as (
            self.adapter,
            self._front,
        ):
            yield self


@asynccontextmanager
async def engine_of(form: str, ranks: int = RANKS, **knobs: Any) -> AsyncIterator[Form]:
    """The engine, before which nothing stands yet. `knobs`: what both have: `weight_version`, `checksums`, `leaks`."""
    if form == "in process":
        yield _InProcess(FakeLLM(ranks=ranks, **knobs))
        return
    async with scripted(parallel={"data_parallel_size": ranks}, **knobs) as engine:
        yield _BehindProxy(engine)


@asynccontextmanager
async def made(form: str, life: Path, knobs: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Form]:
    """An engine and a shim before it."""
    async with engine_of(form, **(knobs or {})) as it, it.covered(life, **options):
        yield it
