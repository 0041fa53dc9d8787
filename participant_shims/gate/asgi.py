"""The gate in the request path: a pure ASGI middleware, the outermost of the server.

The rule kept here: between servers a request is parked, never rejected, and no response is invented, dropped or
changed; the exceptions, which get a 409, are a call of an attempt that is over, and a dispatch of a rollout whose turns a
restore has brought to another actor. What is gated depends on the kind of server: an agent's `/run` (a dispatch) and calls
to it that carry an identity; every POST of resources and models. GET, HEAD, OPTIONS, lifespan and websockets pass
untouched. A server's call to itself is never parked: the rollout that makes it is inside already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from participant_shims.admission import Entry
from participant_shims.gate.caller import Caller
from participant_shims.gate.calllog import Answer, Claim, Stale, Verdict
from participant_shims.gate.core import Gate
from participant_shims.gate.digest import body_sha256, canonical, cookies_of_header, request_digest
from participant_shims.gate.dispatch import rollout_of, wait_for_other_worker
from participant_shims.gate.execution import (
    App,
    Execution,
    Message,
    Receive,
    Scope,
    Send,
    conflict,
    read_body,
    send_answer,
)
from participant_shims.gate.outbound import CURRENT, REFUSED_HEADER, TRACE, TRACE_HEADER, nobody
from participant_shims.gate.replay import Scope as CallScope
from participant_shims.identity import (
    LOWEST_HEADER,
    CallIdentity,
    caller_from_headers,
    done_from_headers,
    finished_from_headers,
    from_headers,
    home_from_headers,
    recorded_from_headers,
)

_UNGATED_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class GateMiddleware:
    """Wraps the application that uvicorn has loaded."""

    def __init__(self, app: App, gate: Gate) -> None:
        self._app = app
        self._gate = gate
        if gate.neighbours is not None:
            gate.neighbours.app = self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            if self._gate.neighbours is not None:
                self._gate.neighbours.state = scope.get("state", {})
            await self._gate.start()
            await self._app(scope, receive, send)
            self._gate.end()
            return
        ungated = kind != "http" or scope["method"] in _UNGATED_METHODS
        headers: dict[str, str] = {}
        identity: CallIdentity | None = None
        if kind == "http" and (not ungated or self._gate.neighbours is not None):
            headers = _headers(scope)
            identity = from_headers(headers)
        if await self._passed_on(identity, headers, scope, receive, send):
            return
        if ungated:
            try:
                await self._app(scope, receive, send)
            finally:
                if self._gate.session_of(scope):
                    self._gate.touched(scope)
            return
        if not self._gate.started:  # a server without lifespan meets its first request here
            await self._gate.start()
        if trace := headers.get(TRACE_HEADER):
            TRACE.set(trace)
        if identity is not None:
            await self._identified(identity, headers, scope, receive, send)
        elif self._gate.is_agent and scope["path"].rstrip("/") == "/run":
            await self._root(headers, scope, receive, send)
        elif self._gate.is_agent:
            CURRENT.set(nobody(home_from_headers(headers)))  # what it sends out is parked with the rest
            await self._app(scope, receive, send)
        else:
            await self._anonymous(scope, receive, send, home=home_from_headers(headers))

    async def _passed_on(
        self, identity: CallIdentity | None, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Whether another worker had to serve this request, and has."""
        neighbours = self._gate.neighbours
        if neighbours is None:
            return False
        rollout_id = identity.rollout_id if identity is not None else home_from_headers(headers)
        if not rollout_id or (home := neighbours.home(rollout_id)) is None:
            return False
        self._gate.count("calls passed on to the worker that has the session")
        await neighbours.pass_on(home, scope, receive, send)
        return True

    # -- work without identity: counted and gated, not remembered

    async def _anonymous(
        self, scope: Scope, receive: Receive, send: Send, body: bytes | None = None, home: str = ""
    ) -> None:
        gate = self._gate
        doors = gate.doors
        entry = doors.enter(exempt=gate.never_closes, waiting_on=scope["path"])
        try:
            with Caller(receive, lambda: doors.abandon(entry)) as caller:
                if body is None and doors.closed and not gate.never_closes:
                    body = await caller.body()  # a parked body must not fill the connection's buffers
                    if body is None:
                        return
                elif body is not None:
                    caller.keep(body)
                if body is not None and not await doors.admitted(entry):
                    return
                gate.served = True

                async def held_send(message: Message) -> None:
                    if not gate.never_closes:
                        await doors.hold(entry)
                    await send(message)

                CURRENT.set(nobody(home))
                try:
                    await self._app(scope, caller.receive, held_send)
                finally:
                    gate.touched(scope)
        finally:
            doors.leave(entry)

    # -- calls of a rollout

    async def _identified(
        self, identity: CallIdentity, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        gate = self._gate
        log = gate.log
        own = gate.is_agent and log.is_own_call(identity)
        body = await read_body(receive)
        if body is None:
            return
        gate.hear(done_from_headers(headers))
        digest = request_digest(
            scope["method"], "", scope["path"], scope.get("query_string", b"").decode("latin-1"), canonical(body),
            cookies_of_header(headers.get("cookie", "")),
        )  # fmt: skip
        key = (identity.rollout_id, identity.call_id, digest)
        exempt = own or gate.never_closes
        entry = gate.doors.enter(
            identity.rollout_id, identity.attempt, turn=gate.turns.get(identity.rollout_id, 0), exempt=exempt, nested=own,
            waiting_on=f"{scope['method']} {scope['path']}",
        )  # fmt: skip
        execution: Execution | None = None
        caller = Caller(receive, lambda: gate.doors.abandon(entry))
        caller.watch()
        try:
            if not await gate.doors.admitted(entry):
                return
            # From here to the start of the execution nothing awaits: a retry cannot slip in between.
            stale = None if own else log.stale(identity)
            if stale is not None:
                gate.count("stale calls refused")
                await send_answer(send, _refusal(stale, identity, gate.name, log.lowest(identity.rollout_id)))
                return
            if gate.knows_another_log(identity, caller_log := caller_from_headers(headers)):
                gate.count("calls refused whose caller has lost its log")
                await send_answer(send, _refusal(Stale.LOG_LOST, identity, gate.name))
                return
            running, remembered = gate.executions.get(key), log.recall(identity, digest)
            if running is not None:
                gate.count("calls joined")
                await self._follow(running, entry, exempt, send)
                return
            if remembered is not None and remembered[0] == digest:
                gate.count("calls answered from memory")
                if exempt or await gate.doors.hold(entry):
                    await send_answer(send, remembered[1])
                return
            if gate.has_lost(identity, finished_from_headers(headers)):
                gate.count("calls refused whose state is lost")
                gate.elsewhere.refused(identity, executed=identity.rollout_id in gate.turns)
                await send_answer(send, _refusal(Stale.STATE_LOST, identity, gate.name))
                return
            if remembered is not None or any(other[:2] == key[:2] for other in gate.executions):
                # Of an agent that died: its next life begins with the same ids. Both are remembered, each by its request,
                # else the cut would hold the effect of the newer one and not its answer.
                gate.count("call ids met again with another request")
            gate.served = True
            execution = gate.executions[key] = Execution(digest)
            execution.task = asyncio.create_task(
                self._execute(execution, identity, scope, body, entry, recorded_from_headers(headers), caller_log)
            )
            await self._follow(execution, entry, exempt, send)
        finally:
            caller.stop()
            self._leave(entry, execution)

    async def _execute(
        self, execution: Execution, identity: CallIdentity, scope: Scope, body: bytes, entry: Entry,
        recorded: Sequence[str], caller: str,
    ) -> None:  # fmt: skip
        gate = self._gate
        run = execution.new_run(passes_on=True)
        execution.scope = scope = dict(scope)
        answer: Answer | None = None
        error: BaseException | None = None
        dispatch = gate.dispatch_for(identity)
        try:
            if dispatch is not None:
                CURRENT.set(gate.dispatches.scope_of(dispatch, identity.call_id))
            else:
                CURRENT.set(CallScope(identity))
            await run.of(self._app, scope, body)
            answer = run.answer()
            elsewhere = dispatch is not gate.dispatches.attempts.get(identity.rollout_id)
            if dispatch is not None and dispatch.diverged and elsewhere:
                # It runs at another agent or worker, which has to learn that it must restart; or did, and a later attempt
                # that runs here has joined this call.
                answer, execution.run = _refusal(Stale.STATE_LOST, identity, gate.name), None
            elif answer is not None:
                gate.remember(identity, execution.digest, answer, scope, body, recorded, caller)
            gate.count_turn(identity.rollout_id)
        except BaseException as caught:
            error = caught
            if isinstance(caught, asyncio.CancelledError):
                raise
        finally:
            gate.touched(scope)
            gate.executions.pop((identity.rollout_id, identity.call_id, execution.digest), None)
            execution.end(answer, error)
            if execution.adopted:
                gate.doors.leave(entry)
            gate.release_dispatch(identity, dispatch)

    # -- dispatches

    async def _root(self, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        gate = self._gate
        body = await read_body(receive)
        if body is None:
            return
        rollout_id = rollout_of(body, headers, gate.participant_id, gate.warn)
        if rollout_id is None:
            await self._anonymous(scope, receive, send, body)
            return
        sha256 = body_sha256(body)
        entry = gate.doors.enter(rollout_id, waiting_on="POST /run")
        execution: Execution | None = None
        caller = Caller(receive, lambda: gate.doors.abandon(entry))
        caller.watch()
        try:
            if not await gate.doors.admitted(entry):
                return
            if moved := gate.log.moved_here(rollout_id, sha256, gate.name):
                gate.doors.leave(entry)
                rollout_id = moved
                entry = gate.doors.enter(rollout_id, waiting_on="POST /run")  # not parked: nothing has awaited since
            if actor := gate.log.held_elsewhere(rollout_id, sha256):
                gate.count("dispatches sent to another actor")
                await send_answer(send, _wrong_actor(rollout_id, gate.participant_id, actor))
                return
            while True:
                claim = gate.dispatches.claim(rollout_id, sha256, body, headers.get("cookie", ""))
                entry.attempt = claim.attempt
                if claim.verdict is Verdict.JOIN and rollout_id not in gate.dispatches.running:
                    gate.count("dispatches joined")
                    await wait_for_other_worker(gate.log, rollout_id)
                    # Its client has it by now, so that a claim would take this dispatch for one of the next epoch.
                    if (result := gate.log.result(rollout_id, sha256)) is None:
                        continue
                    claim = Claim(Verdict.ANSWER, gate.log.attempt_of(rollout_id), result=result)
                break
            gate.served = True
            if claim.verdict is Verdict.CONFLICT:
                caller.keep(body)
                await self._beside(rollout_id, claim, entry, scope, caller.receive, send)
            elif claim.verdict is Verdict.ANSWER and claim.result is not None:
                gate.count("results given again")
                if await gate.doors.hold(entry):
                    await send_answer(send, claim.result)
                    gate.log.delivered(rollout_id, claim.attempt)
            else:
                if claim.verdict is Verdict.JOIN:
                    gate.count("dispatches joined")
                    followed = gate.dispatches.running[rollout_id]
                else:
                    started = execution = gate.dispatches.start(
                        self._app, scope, body, rollout_id, sha256, claim,
                        lambda: gate.doors.leave(entry) if started.adopted else None,
                    )  # fmt: skip
                    followed = execution
                if await self._follow(followed, entry, False, send):
                    gate.log.delivered(rollout_id, gate.log.attempt_of(rollout_id))
        finally:
            caller.stop()
            self._leave(entry, execution)

    async def _beside(
        self, rollout_id: str, claim: Claim, entry: Entry, scope: Scope, receive: Receive, send: Send
    ) -> None:  # fmt: skip
        # Refusing it would break runs that never checkpoint; logging it under the same id would mix two rollouts.
        gate = self._gate
        if not claim.reason:  # with one the log has failed, which is told by itself
            gate.warn(
                "id with two inputs",
                f"Rollout {rollout_id} was dispatched again with another input while it runs. The second one runs, but its"
                " calls are not logged, and a save leaves both out. Repeats of a row that share its _ng_rollout_id do this: leave"
                " it out, and Gym's indices tell them apart.",
            )

        async def held_send(message: Message) -> None:
            await gate.doors.hold(entry)
            await send(message)

        CURRENT.set(nobody(rollout_id))
        with gate.unlogged(rollout_id):
            await self._app(scope, receive, held_send)

    async def _follow(self, execution: Execution, entry: Entry, exempt: bool, send: Send) -> bool:
        async def before_send() -> bool:
            return exempt or await self._gate.doors.hold(entry)

        return await execution.follow(send, before_send)

    def _leave(self, entry: Entry, execution: Execution | None) -> None:
        if execution is None or execution.finished:
            self._gate.doors.leave(entry)
        else:  # it goes on without its client, and stays counted until it ends
            execution.adopted = True
            self._gate.doors.abandon(entry)


def _wrong_actor(rollout_id: str, name: str, actor: str) -> Answer:
    """Beginning it here would make its turns again, and it would run twice."""
    message = (
        f"{name} does not begin rollout {rollout_id}: a restore has brought its turns to actor {actor}. Dispatch it there; "
        "if it is to begin anew, retire it first."
    )
    return _conflict("WRONG_ACTOR", {"message": message, "rollout_id": rollout_id, "actor": actor}, {})


def _headers(scope: Scope) -> dict[str, str]:
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}


def _refusal(stale: Stale, identity: CallIdentity, name: str, lowest: int = 0) -> Answer:
    what = {
        Stale.ATTEMPT: "a later attempt of the rollout has been installed",
        Stale.STATE_LOST: "the state of the rollout is lost here: it has to restart from its input",
        Stale.LOG_LOST: "calls of it that an earlier life of the caller made were executed here: it has to restart from its input",
    }[stale]
    error = {
        "message": f"{unquote(name)} refused this call: {what}.",
        "rollout_id": identity.rollout_id, "attempt": identity.attempt, "call": identity.call_id,
    }  # fmt: skip
    return _conflict(stale.value, error, {LOWEST_HEADER: str(lowest)})


def _conflict(reason: str, error: Mapping[str, object], headers: Mapping[str, str]) -> Answer:
    return conflict({"reason": reason, **error}, {REFUSED_HEADER: reason, **headers})
