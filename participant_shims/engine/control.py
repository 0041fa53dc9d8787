"""Pausing and resuming one vLLM server.

The rule: one control call at a time, and every call's outcome is known before the next. vLLM's pauses do not nest, a pause
that races with a resume can wedge a data-parallel engine for good, and a call whose answer is lost may have been served:
then `/is_paused` is asked until it says. Parameters go into the query string, since the server ignores a body (and then
aborts everything). `mode=wait` is never used: it leaves preempted requests behind and says 200.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final, TypeVar

from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.remarks import NO_SUCH_VLLM
from participant_shims.engine.call import Answer, NotSent, Unknown, call

log = logging.getLogger(__name__)

# A pause waits for the step that runs; inside a long prefill that was 1.2 s.
CALL_S: Final = 10.0
LOOK_S: Final = 0.7  # one look, so that status answers within its second
SETTLE_S: Final = 20.0  # how long an unknown outcome is asked after
AGAIN_S: Final = 0.1
CANARY_S: Final = 30.0
ResultT = TypeVar("ResultT")


class EngineControl:
    """The one writer of control calls to `target` (host:port)."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._turn = asyncio.Lock()
        self._resumes = (
            0  # asked for so far: a pause that has not been sent when another one comes is not sent any more
        )
        self._holder = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def is_paused(self, timeout_s: float = LOOK_S) -> bool:
        """What the engine itself says. Raises UNAVAILABLE when it says nothing within `timeout_s` seconds."""
        try:
            answer = await call(self.target, "GET", "/is_paused", timeout_s=timeout_s)
        except (NotSent, Unknown) as error:
            raise refuse(Reason.UNAVAILABLE, f"vLLM at {self.target} does not answer: {error}.") from error
        paused = answer.value("is_paused")
        if answer.status == 200 and isinstance(paused, bool):
            return paused
        raise self._refused("/is_paused", answer)

    async def pause(self, mode: str) -> float:
        """Pause with `keep` (frozen; token-exact after resume) or `abort`; returns once `/is_paused` says so.

        The time, in seconds of the event loop, from which on it was paused: that of the acknowledgement.
        Raises ABORTED when a resume was asked for meanwhile: then nothing was sent, or it is undone. Raises UNAVAILABLE
        when the engine can't be made to say that it is paused; it may be.
        """
        assert mode in ("keep", "abort")
        return await self._finish(self._pause(mode, self._resumes))

    async def resume(self) -> None:
        """Resume; returns once `/is_paused` says so, or the engine is not there any more. May be repeated."""
        self._resumes += 1
        await self._finish(self._resume())

    @contextlib.asynccontextmanager
    async def turn(self, what: str, wait_s: float = CALL_S) -> AsyncGenerator[None]:
        """Hold the line for somebody else's control call. Raises UNAVAILABLE when one takes longer than `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise refuse(Reason.UNAVAILABLE, f"A control call to {self.target} is under way: {self._holder}.") from None
        self._holder = what
        try:
            yield
        finally:
            self._turn.release()

    async def canary(self, model: str, timeout_s: float = CANARY_S) -> str:
        """Whether one token comes out, which /health does not tell: empty, or what is wrong. Not while paused."""
        ask = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0, "stream": False}
        try:
            answer = await call(self.target, "POST", "/v1/completions", ask, timeout_s=timeout_s)
        except (NotSent, Unknown) as error:
            return f"not one token comes out of vLLM at {self.target}: {error}"
        return "" if answer.status == 200 else f"vLLM at {self.target} answers {answer.status} to one token"

    # ---- parts ----------------------------------------------------------------------------------------------------

    async def _finish(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        # A caller that is cancelled must not cut a call off in the middle: its outcome would be unknown.
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("a control call failed: %s", task.exception())

    async def _pause(self, mode: str, resumes: int) -> float:
        loop = asyncio.get_running_loop()
        async with self.turn(f"pause {mode}", SETTLE_S):
            end = loop.time() + SETTLE_S
            path = f"/pause?mode={mode}&clear_cache=false"
            while True:
                if resumes != self._resumes:
                    raise refuse(Reason.ABORTED, f"The pause of {self.target} was overtaken by a resume.")
                answer = await self._send(path, end)
                if answer is not None and answer.status != 200:
                    raise self._refused(path, answer)
                answered_at = loop.time()
                if await self._settled(True, end):
                    return loop.time() if answer is None else answered_at

    def _refused(self, path: str, answer: Answer) -> SafepointError:
        if answer.status >= 500:
            said = f"vLLM at {self.target} answered {path} with {answer.status}: {answer.body[:200]!r}."
            return refuse(Reason.UNAVAILABLE, said)
        return refuse(
            Reason.UNAVAILABLE,
            f"What listens at {self.target} answered {path.partition('?')[0]} with {answer.status}: {NO_SUCH_VLLM}.",
            next_step="Either vLLM runs there without VLLM_SERVER_DEV_MODE=1, or another server has its port: see what listens "
            "there, and start vLLM on that port with that variable; then save again.",
        )

    async def _resume(self) -> None:
        async with self.turn("resume", SETTLE_S):
            end = asyncio.get_running_loop().time() + SETTLE_S
            while True:
                try:
                    answer = await self._send("/resume", end)
                    if answer is not None and answer.status != 200:
                        raise refuse(Reason.UNAVAILABLE, f"/resume was answered {answer.status}.")
                    if await self._settled(False, end):
                        return
                except NotSent:
                    log.info("nothing to resume: vLLM at %s is not there", self.target)
                    return

    async def _send(self, path: str, end: float) -> Answer | None:
        """The answer; None when the outcome is unknown. Raises NotSent; UNAVAILABLE for a pause that was never sent."""
        left = end - asyncio.get_running_loop().time()
        if left <= 0:
            raise refuse(Reason.UNAVAILABLE, f"vLLM at {self.target} does not settle after {path}.")
        try:
            return await call(self.target, "POST", path, timeout_s=min(CALL_S, left))
        except Unknown as error:
            log.warning("%s; asking what became of it", error)
            return None
        except NotSent as error:
            if path == "/resume":
                raise
            raise refuse(Reason.UNAVAILABLE, f"{error}.") from error

    async def _settled(self, wanted: bool, end: float) -> bool:
        """Whether the engine says that it is as `wanted`; False when it says that it is not. Waits while it is silent."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                answer = await call(self.target, "GET", "/is_paused", timeout_s=max(0.05, min(2.0, end - loop.time())))
                paused = answer.value("is_paused")
                if isinstance(paused, bool):
                    return paused is wanted
            except Unknown:
                pass
            except NotSent:
                if not wanted:
                    raise
            if loop.time() >= end:
                raise refuse(Reason.UNAVAILABLE, f"vLLM at {self.target} does not say whether it is paused.")
            await asyncio.sleep(AGAIN_S)
