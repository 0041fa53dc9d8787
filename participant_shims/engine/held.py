"""An engine that a trainer holds in its own process (`AsyncLLM`), behind the same doors as a server behind the proxy.

The rule: callers ask `generate` here instead of the engine's own, and get what it would have said. The engine is always
asked for what is new (DELTA), which is recorded in the step in which it arrives by a task that waits for no caller; from
the record each caller is told in the kind that it asked for. Pauses and resumes go one at a time, by whoever they are.

One event loop: that of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from coordinator.wire.errors import Reason, refuse
from participant_shims.admission import ANONYMOUS, Doors
from participant_shims.engine.continuation import continuation_body, label_of, told_of
from participant_shims.engine.control import CALL_S, CANARY_S, LOOK_S
from participant_shims.engine.discovery import OLDEST, Engine, digest_of, number
from participant_shims.engine.front import IsStale
from participant_shims.engine.held_outputs import (
    Kit,
    Teller,
    body_of,
    ids_or_text,
    load_kit,
    logprobs_back,
    piece_of,
    sum_of,
)
from participant_shims.engine.held_ranks import Ranks
from participant_shims.engine.pool import Pool
from participant_shims.engine.record import Record
from participant_shims.engine.request import COMPLETIONS, make_ask
from participant_shims.identity import CallIdentity

log = logging.getLogger(__name__)


class Ended(Exception):
    """A request was aborted, and the engine told nobody; or its attempt has been replaced by a restore."""


class HeldFront:
    """Before `llm`, an AsyncLLM or what behaves like one."""

    def __init__(
        self, llm: Any, doors: Doors, pool: Pool, is_stale: IsStale, *, weight_version: str = "", kit: Kit | None = None
    ) -> None:  # fmt: skip
        self.where = "the AsyncLLM of this process"
        self.in_flight: dict[str, Record] = {}
        self.spoke_at = 0.0
        self.on_steered: Callable[[str], None] = lambda what: None
        self._llm, self._doors, self._pool, self._is_stale = llm, doors, pool, is_stale
        self._kit = kit or load_kit()
        self._weight_version = weight_version
        self._engine: Engine | None = None
        self._turn = asyncio.Lock()
        self._resumes = 0
        self._life = f"{os.getpid()}-{time.time():.3f}"
        self._readers: dict[str, _Reader] = {}
        self._ranks = Ranks()

    # ---- for callers ----------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, caller: CallIdentity | None = None, **more: Any
    ) -> AsyncGenerator[Any]:
        """As `AsyncLLM.generate`. Parks while the doors are closed. Outputs of a continuation have an attribute
        `safepoint_continued`. Raises Ended besides what the engine raises."""
        if caller is not None and self._is_stale(caller):
            raise Ended(f"Attempt {caller.attempt} of {caller.rollout_id} has been replaced.")
        entry = self._doors.enter(
            caller.rollout_id if caller else ANONYMOUS, caller.attempt if caller else 0, waiting_on=request_id[:256]
        )
        reader: _Reader | None = None
        restored: Record | None = None
        whole = False  # whether its caller has had the last of it
        try:
            await self._doors.admitted(entry)
            record = self._new_record(prompt, sampling_params, request_id, caller)
            restored = await self._claim(record, caller, by_ids=not self._tells_text(sampling_params))
            if restored is not None:
                record = restored
            self.in_flight[request_id] = record
            if record.finished:
                await self._doors.hold(entry)
                whole = True
                yield self._finished(record)
                return
            asked, params = self._question(record, prompt, sampling_params)
            source = self._llm.generate(asked, params, request_id, **more)
            reader = self._readers[request_id] = _Reader(source, record, self._spoke)
            told = Teller(self._kit, record, sampling_params)
            async for output in reader.outputs():
                shown = told.tell(output)
                if shown is not None:
                    await self._doors.hold(entry)
                    whole = bool(output.finished)
                    yield shown
        except BaseException:
            if restored is not None and not whole:
                self._pool.put(restored)  # what a snapshot had must not be lost with one caller
            raise
        finally:
            self._doors.leave(entry)
            self.in_flight.pop(request_id, None)
            self._readers.pop(request_id, None)
            if reader is not None:
                await reader.close()

    @contextlib.asynccontextmanager
    async def steering(self, what: str) -> AsyncGenerator[None]:
        """Hold the line for a control call of the trainer's own (a refit, a sleep): it waits for open doors, and no save
        begins inside it before it is over."""
        while True:
            entry = self._doors.enter(inbound=False, waiting_on=what)
            try:
                await self._doors.admitted(entry)
                async with self._turn:
                    if self._doors.closed:
                        continue
                    yield
                self.on_steered(what)
                return
            finally:
                self._doors.leave(entry)

    # ---- as Front says --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Nothing to do: it is there already."""

    async def stop(self) -> None:
        """End every request."""
        for reader in list(self._readers.values()):
            reader.end(Ended("the shim ends"))

    def knows(self, engine: Engine) -> None:
        """As Front says, like all below."""
        self._engine = engine
        self.weights_are(engine.weight_version)

    def weights_are(self, version: str) -> None:
        self._weight_version = version
        for record in self.in_flight.values():
            record.weights_are(version)

    def end_all(self) -> list[str]:
        ended = list(self._readers)
        for reader in list(self._readers.values()):
            reader.end(Ended("it was aborted, and nobody said so"))
        return ended

    async def is_paused(self, timeout_s: float = LOOK_S) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return bool(await self._llm.is_paused())
        except Exception as error:  # whatever a dead engine raises
            raise refuse(Reason.UNAVAILABLE, f"{self.where} does not say whether it is paused: {error!r}.") from error

    async def pause(self, mode: str) -> float:
        resumes = self._resumes
        async with self._turn:
            if resumes != self._resumes:
                raise refuse(Reason.ABORTED, "The pause was overtaken by a resume.")
            try:
                async with asyncio.timeout(CALL_S):
                    await self._llm.pause_generation(mode=mode, clear_cache=False)
            except Exception as error:
                raise refuse(Reason.UNAVAILABLE, f"{self.where} can't be paused: {error!r}.") from error
            paused_at = asyncio.get_running_loop().time()
            if not await self.is_paused(CALL_S):
                raise refuse(Reason.UNAVAILABLE, f"{self.where} says that it is not paused.")
            return paused_at

    async def resume(self) -> None:
        self._resumes += 1
        async with self._turn:
            try:
                async with asyncio.timeout(CALL_S):
                    await self._llm.resume_generation()
            except Exception as error:
                raise refuse(Reason.UNAVAILABLE, f"{self.where} can't be resumed: {error!r}.") from error

    async def canary(self, model: str) -> str:
        params = self._kit.params(max_tokens=1, temperature=0.0)
        try:
            async with asyncio.timeout(CANARY_S):
                async for _ in self._llm.generate({"prompt_token_ids": [0]}, params, f"canary-{secrets.token_hex(6)}"):
                    pass
        except Exception as error:
            return f"not one token comes out of {self.where}: {error!r}"
        return ""

    async def discover(self) -> Engine:
        if number(self._kit.version) < OLDEST:
            raise refuse(Reason.UNSUPPORTED, f"vLLM {self._kit.version} is too old.", next_step="Take 0.17 or later.")
        config = self._llm.vllm_config
        return Engine(
            version=self._kit.version,
            model=str(config.model_config.model),
            max_model_len=int(config.model_config.max_model_len),
            ranks=int(config.parallel_config.data_parallel_size),
            weight_version=self._weight_version,
            life=self._life,
        )

    async def life(self) -> str:
        return self._life

    async def look_again(self, before: Engine) -> Engine:
        return before

    async def generated(self) -> dict[str, float]:
        return self._ranks.generated(getattr(self._llm, "logger_manager", None))

    async def weight_version(self) -> str:
        return self._weight_version

    async def weight_digest(self, timeout_s: float) -> str:
        ask = getattr(self._llm, "compute_weight_checksums", None)
        if ask is None:
            return ""
        try:
            async with asyncio.timeout(timeout_s):
                workers: list[dict[str, str]] = await ask()
        except Exception as error:  # whatever a dead engine raises
            raise refuse(Reason.UNAVAILABLE, f"{self.where} gives no checksums of its weights: {error!r}.") from error
        # As `/weight_checker` joins them: an engine has the same digest in both forms, and none when names are not its own.
        sums = {name: each for worker in workers for name, each in worker.items()}
        return digest_of(sums) if len(sums) == sum(len(worker) for worker in workers) else ""

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _spoke(self) -> None:
        self.spoke_at = asyncio.get_running_loop().time()

    def _new_record(self, prompt: Any, params: Any, request_id: str, caller: CallIdentity | None) -> Record:
        asked = ids_or_text(prompt)
        body = body_of(asked, params, self._engine.max_model_len if self._engine else 0)
        record = Record(request_id, make_ask(COMPLETIONS, body), created=int(time.time()))
        if caller is not None:
            record.rollout_id, record.attempt, record.call_id = caller.rollout_id, caller.attempt, caller.call_id
        record.prompt_ids = tuple(asked) if isinstance(asked, list) else ()
        record.anew = record.ask.why_anew or ("its prompt has more than text" if asked is None else "")
        record.weights_are(self._weight_version)
        return record

    def _tells_text(self, params: Any) -> bool:
        skips = bool(getattr(self._llm.vllm_config.model_config, "skip_tokenizer_init", False))
        return bool(params.detokenize) and not skips

    async def _claim(self, record: Record, caller: CallIdentity | None, *, by_ids: bool) -> Record | None:
        """The restored record from which this request goes on. `by_ids`: its caller is told no text."""
        if record.ask.body.get("prompt") is None:
            return None
        restored = await self._pool.take(record.ask, caller)
        if restored is None:
            return None
        tally = self._pool.tally
        self._pool.over(restored.request_id)
        if record.anew or (restored.anew and not restored.finished):
            tally.regenerated += 1
            tally.again += len(restored.token_ids)
            return None
        if not restored.finished:
            lost = restored.cut_back(record.ask.max_tokens, by_ids=by_ids)
            tally.again += lost
            if not (restored.prompt_ids and restored.token_ids):
                tally.regenerated += int(lost > 0)
                return None
            restored.weights_are(self._weight_version)
            restored.continued = label_of(restored)
        restored.kept = len(restored.token_ids)
        tally.kept += restored.kept
        tally.exact += int(restored.continued in ("", "exact"))
        tally.not_exact += int(restored.continued not in ("", "exact"))
        restored.request_id, restored.rollout_id = record.request_id, record.rollout_id
        restored.attempt, restored.call_id = record.attempt, record.call_id
        return restored

    def _question(self, record: Record, prompt: Any, params: Any) -> tuple[Any, Any]:
        """What the engine is asked: always for what is new, with log-probabilities, and for what a record lacks."""
        out = params.clone()
        if record.ask.why_untouched or record.ask.body.get("prompt") is None:
            return prompt, out
        out.output_kind = self._kit.kinds.DELTA
        if out.logprobs is None:
            out.logprobs = 0
        if not record.kept:
            return prompt, out
        reach = self._engine.max_model_len if self._engine else 0
        body = continuation_body(record, reach, record.ask.max_tokens)
        out.max_tokens, out.min_tokens = body["max_tokens"], body.get("min_tokens", 0)
        out.seed = body.get("seed", out.seed)
        return {"prompt_token_ids": body["prompt"]}, out

    def _finished(self, record: Record) -> Any:
        """An answer that the snapshot had whole."""
        entries = logprobs_back(record.logprobs, self._kit.logprob) if record.ask.wants_logprobs else None
        made = self._kit.completion_output(
            index=0, text=record.text, token_ids=list(record.token_ids), logprobs=entries,
            cumulative_logprob=sum_of(record) if entries is not None else None,
            finish_reason=record.finish_reason, stop_reason=record.stop_reason,
        )  # fmt: skip
        out = self._kit.request_output(
            request_id=record.request_id, prompt=None, prompt_token_ids=list(record.prompt_ids), prompt_logprobs=None,
            outputs=[made], finished=True,
        )  # fmt: skip
        out.safepoint_continued = told_of(record)
        return out


class _Reader:
    """Reads the engine's outputs and records them, whether anybody listens or not."""

    def __init__(self, source: AsyncIterator[Any], record: Record, spoke: Callable[[], None]) -> None:
        self._source, self._record, self._spoke = source, record, spoke
        self._waiting: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._read())

    async def outputs(self) -> AsyncIterator[Any]:
        """Each output, after it was recorded. Raises what the engine raised, or Ended."""
        while True:
            item = await self._waiting.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def end(self, error: Exception) -> None:
        """Read no more; the caller gets `error`."""
        self._waiting.put_nowait(error)
        self._task.cancel()

    async def close(self) -> None:
        """End the engine's generator, which aborts the request when it runs."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for output in self._source:
                self._spoke()
                record = self._record
                if not record.prompt_ids:
                    record.prompt_ids = tuple(output.prompt_token_ids or ())
                if len(output.outputs) == 1:
                    record.add(piece_of(output.outputs[0]))
                self._waiting.put_nowait(output)
            self._waiting.put_nowait(None)
        except Exception as error:
            self._waiting.put_nowait(error)
