"""Root dispatches at an agent: which rollout a `/run` belongs to, and its attempts.

The rule kept here: a result that nobody has yet is not made again, a rollout that was cut short goes on from its recorded
calls, and one that cannot repeat them restarts from its input, visibly, behind the back of its client.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from coordinator.wire import failpoints
from coordinator.wire.errors import Refused
from coordinator.wire.ids import is_rollout_id
from participant_shims.gate.calllog import Answer, CallLog, Claim, Verdict
from participant_shims.gate.execution import App, Execution, Run, conflict
from participant_shims.gate.execution import Scope as AsgiScope
from participant_shims.gate.outbound import CURRENT, Outbound, nobody
from participant_shims.gate.replay import STRAYED, Dispatch, Scope
from participant_shims.identity import ROLLOUT_HEADER, root

log = logging.getLogger(__name__)

# A restart begins without records, so a second one has another cause (a server lost its state meanwhile).
MAX_RESTARTS: Final = 5
# What a handler gets to end by itself after its rollout has diverged.
_GRACE_S: Final = 5.0
_MALFORMED: Final = "malformed rollout id"


def rollout_of(
    body: bytes, headers: dict[str, str], agent: str, warn: Callable[[str, str], None] = lambda kind, sentence: None
) -> str | None:
    """The rollout id of a row; None for work without identity.

    Indices are those of one batch and come again in the next one, where the row may be another agent's; the servers that
    agents share must not take its first attempt for an old one of the other. So an id made of indices names its agent, and
    that one's Gym actor, where there are several: each counts its own batch.

    An id that cannot be one is never refused: a run that does not checkpoint must not break on it. `warn` is told, since
    a row that lost its id this way is not continued by it after a restore.
    """
    try:
        row: Any = json.loads(body)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        explicit = row.get("_ng_rollout_id")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(explicit, (str, int)) and not isinstance(explicit, bool) and is_rollout_id(str(explicit)):
            return str(explicit)
        if explicit is not None:
            warn(_MALFORMED, _malformed("_ng_rollout_id", explicit))  # pyright: ignore[reportUnknownArgumentType]
        task, index = row.get("_ng_task_index"), row.get("_ng_rollout_index")  # pyright: ignore
        if isinstance(task, (int, str)) and isinstance(index, (int, str)) and is_rollout_id(f"{task}-{index}@{agent}"):
            return f"{task}-{index}@{agent}"
    given = headers.get(ROLLOUT_HEADER, "")
    if given and not is_rollout_id(given):
        warn(_MALFORMED, _malformed(ROLLOUT_HEADER, given))
    return given if is_rollout_id(given) else None


def _malformed(where: str, value: object) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return (
        f"{where} {shown[:60]!r} is not used: an id has 1 to 256 characters of A-Z a-z 0-9 . _ : @ + = - and begins with a"
        " letter or digit. Its row is known by its indices, or by nothing and then is not saved."
    )


class Dispatches:
    """The dispatches that run in this process."""

    def __init__(self, calls: CallLog, outbound: Outbound, warn: Callable[[str, str], None]) -> None:
        self._log = calls
        self._warn = warn
        self._outbound = outbound
        self.running: dict[str, Execution] = {}
        self.attempts: dict[str, Dispatch] = {}
        self.diverged_total = 0

    def claim(self, rollout_id: str, sha256: str, body: bytes, cookie: str) -> Claim:
        """As CallLog.claim; the caller starts what it is told in the same event-loop step."""
        failpoints.reach("gate.before_claim")
        claim = self._log.claim(rollout_id, sha256, body, cookie)
        failpoints.reach("gate.after_claim")
        return claim

    def start(
        self, app: App, scope: AsgiScope, body: bytes, rollout_id: str, sha256: str, claim: Claim, on_end: Callable[[], None]
    ) -> Execution:  # fmt: skip
        """Run a claimed dispatch in a task of its own; `on_end` is called when it is over."""
        execution = Execution(sha256)
        self.running[rollout_id] = execution
        if claim.cookie is not None:
            scope = with_cookie(scope, claim.cookie)
        execution.task = asyncio.create_task(self._run(app, scope, body, rollout_id, claim, execution, on_end))
        return execution

    async def _run(
        self, app: App, scope: AsgiScope, body: bytes, rollout_id: str, claim: Claim, execution: Execution,
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        attempt, base = claim.attempt, claim.base
        answer: Answer | None = None
        error: BaseException | None = None
        try:
            for _ in range(MAX_RESTARTS + 1):
                dispatch = self.attempts[rollout_id] = Dispatch(rollout_id, attempt, base)
                try:
                    answer = await self._once(app, dict(scope), body, dispatch, execution)
                except Exception as caught:
                    error = caught
                if dispatch.overtaken is not None and (answer is None or answer.status >= 500):
                    answer = _conflict(dispatch, dispatch.overtaken)  # however the agent has failed over it
                if not dispatch.diverged and answer is not None and answer.status < 400:
                    if left := dispatch.leftover():
                        dispatch.diverge(left, strayed=True)
                    elif self._log.diverged(rollout_id, attempt):
                        dispatch.diverge("an inner call of it diverged")
                if not dispatch.diverged or self._log.attempt_of(rollout_id) != attempt:
                    break
                why = dispatch.diverged
                if dispatch.outrun_by < 0:  # else nothing is lost by it, and nobody has anything to mend
                    self.diverged_total += 1
                    text = f"Rollout {rollout_id} began again from its input after attempt {attempt}: {why}."
                    self._warn("diverged", f"{text} {STRAYED}" if dispatch.strayed else text)
                    why = f"replay diverged: {why}"
                self._outbound.restarted(rollout_id)
                answer = error = None
                begun = self._log.restart(rollout_id, attempt, why[:1000], dispatch.outrun_by)
                if begun is None:  # what is recorded cannot be forgotten: the client gets its result all the same
                    answer = await self._unlogged(app, dict(scope), body, execution, rollout_id)
                    break
                attempt = base = begun
            if answer is not None:
                failpoints.reach("gate.before_result")
                self._log.finish(rollout_id, attempt, answer)
                failpoints.reach("gate.after_result")
                self._outbound.finished(rollout_id, attempt)
            else:
                self._log.interrupt(rollout_id, attempt)
        except BaseException as caught:
            self._log.interrupt(rollout_id, attempt)
            error = caught
            if isinstance(caught, asyncio.CancelledError):
                raise
        finally:
            self.running.pop(rollout_id, None)
            self.attempts.pop(rollout_id, None)
            execution.end(answer, error if answer is None else None)
            on_end()

    async def _unlogged(
        self, app: App, scope: AsgiScope, body: bytes, execution: Execution, rollout_id: str
    ) -> Answer | None:
        run: Run = execution.new_run(passes_on=False)
        execution.scope = scope
        CURRENT.set(nobody(rollout_id))
        await run.of(app, scope, body)
        return run.answer()

    async def _once(
        self, app: App, scope: AsgiScope, body: bytes, dispatch: Dispatch, execution: Execution
    ) -> Answer | None:
        identity = root(dispatch.rollout_id, dispatch.attempt, dispatch.base)
        run: Run = execution.new_run(passes_on=False)
        execution.scope = scope

        async def handler() -> None:
            CURRENT.set(self.scope_of(dispatch, identity.call_id))
            await run.of(app, scope, body)

        task = asyncio.create_task(handler())
        signal = asyncio.create_task(dispatch.signal.wait())
        try:
            await asyncio.wait({task, signal}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                # The handler has been told by an exception in one of its calls; one that swallows it is ended.
                await asyncio.wait({task}, timeout=_GRACE_S)
                task.cancel()
            await _settled(task, dispatch)
        finally:
            signal.cancel()
            task.cancel()
        return run.answer()

    def scope_of(self, dispatch: Dispatch, call_id: str) -> Scope:
        """The scope of one call of a dispatch, with its records."""
        scope = dispatch.scopes.get(call_id)
        if scope is None:
            records = self._log.records(dispatch.rollout_id, call_id)
            identity = root(dispatch.rollout_id, dispatch.attempt, dispatch.base)
            if call_id != identity.call_id:
                identity = type(identity)(dispatch.rollout_id, dispatch.attempt, call_id)
            scope = dispatch.scopes[call_id] = Scope(identity, records, dispatch)
        return scope


def _conflict(dispatch: Dispatch, refusal: Refused) -> Answer:
    problem = refusal.problem
    return conflict({
        "reason": problem.reason.name, "message": problem.message, "next_step": problem.advice,
        "rollout_id": dispatch.rollout_id, "attempt": dispatch.attempt,
    })  # fmt: skip


async def _settled(task: asyncio.Task[None], dispatch: Dispatch) -> None:
    """Wait for the handler; once the dispatch is diverged, how it ends does not matter."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        if not dispatch.diverged:
            raise
    except Exception:
        if not dispatch.diverged:
            raise


async def wait_for_other_worker(
    calls: CallLog, rollout_id: str, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Wait until the worker that runs the rollout is done with it, or gone."""
    while calls.runs_elsewhere(rollout_id):
        await sleep(0.1)


def with_cookie(scope: AsgiScope, cookie: str) -> AsgiScope:
    """A copy of the ASGI scope with this Cookie header: cookies enter digests, so a continued dispatch gets its own."""
    headers = [(k, v) for k, v in scope.get("headers", ()) if k.lower() != b"cookie"]
    if cookie:
        headers.append((b"cookie", cookie.encode("latin-1", "replace")))
    return {**scope, "headers": headers}


__all__ = ["Dispatches", "Verdict", "rollout_of", "wait_for_other_worker", "with_cookie"]
