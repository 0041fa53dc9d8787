"""Calls that leave the server: identified, answered from the log, parked, recorded.

The rule kept here: the agent sees a response only after the log has it, and a recorded call never leaves again. This is
the turn boundary: everything a rollout does to the world passes through `Outbound.request`, which wraps
`nemo_gym.server_utils.ServerClient.request`. Outside of a rollout's scope it changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.remarks import STATE_LOST
from participant_shims.admission import ANONYMOUS, Doors
from participant_shims.gate.calllog import Answer, CallLog, Stale
from participant_shims.gate.digest import canonical, dump, request_digest
from participant_shims.gate.recorded import RecordedResponse
from participant_shims.gate.replay import PATIENCE_S, DivergedError, Scope
from participant_shims.identity import (
    DONE_HEADER,
    FINISHED_HEADER,
    HOME_HEADER,
    LOG_HEADER,
    MAX_RECORDED,
    CallIdentity,
    lowest_from_headers,
)

CURRENT: ContextVar[Scope | None] = ContextVar("safepoint_scope", default=None)
# The trace (W3C) that the request which is handled belongs to; empty when it named none.
TRACE: ContextVar[str] = ContextVar("safepoint_trace", default="")
TRACE_HEADER: Final = "traceparent"
# Set by a gate on the one kind of response that it makes itself; the caller's gate acts on it, no agent ever sees it.
REFUSED_HEADER: Final = "x-safepoint-refused"
_STREAMS: Final = ("text/event-stream", "application/x-ndjson")
_DONE_AT_ONCE: Final = 16
_MAX_DONE: Final = 4096  # ended rollouts that a callee has not been told of; older ones are left to its own limit

Request = Callable[..., Awaitable[Any]]


def nobody(home: str = "") -> Scope:
    """The scope of work that is parked like any other, and neither logged nor answered from a log.

    `home`: the rollout that it is part of, where that is known: its calls must reach the session that they began.
    """
    if not home:
        return _NOBODY
    scope = Scope(CallIdentity(ANONYMOUS, 0, "0"))
    scope.home = home
    return scope


_NOBODY: Final = Scope(CallIdentity(ANONYMOUS, 0, "0"))  # of all whose rollout is not known; nobody changes it


class Outbound:
    """The outbound side of one gate. `own_name`: the server's instance name; `parks`: agents only; `logs`: agents only."""

    def __init__(
        self, doors: Doors, log: CallLog, own_name: str, *, is_agent: bool, patience_s: float = PATIENCE_S,
        participant_id: str = "",
    ) -> None:  # fmt: skip
        self._doors = doors
        self._log = log
        self._own = own_name
        self._is_agent = is_agent
        self._patience_s = patience_s
        self._log_name = log.name_for(participant_id or own_name) if is_agent else ""
        self._recorded: dict[tuple[str, str], dict[str, None]] = {}  # (server, rollout) -> call ids it may forget
        self._servers_of: dict[str, set[str]] = {}
        self._done: dict[str, dict[tuple[str, int], None]] = {}  # server -> ended rollouts
        self.replayed = 0
        self.turns: dict[str, int] = {}

    async def request(
        self, original: Request, client: Any, server_name: str, url_path: str, method: str, **kwargs: Any
    ) -> Any:
        """Make one call for the scope that runs; raises DivergedError when the rollout must restart."""
        scope = CURRENT.get()
        if scope is None:
            return await original(client, server_name, url_path, method, **kwargs)
        if scope.identity.rollout_id == ANONYMOUS:
            return await self._unidentified(original, client, scope.home, server_name, url_path, method, kwargs)
        self._check(scope)
        if hasattr(kwargs.get("json"), "model_dump"):  # as ServerClient.request does it with pydantic models
            kwargs["json"] = kwargs["json"].model_dump(exclude_unset=True)
        what = f"{server_name} {method.upper()} {url_path}"
        digest = _digest(server_name, url_path, method, kwargs)
        own = server_name == self._own
        identity: CallIdentity | None = None
        number = 0
        if self._is_agent and scope.dispatch is not None:
            try:
                record = await scope.match(digest, what, self._patience_s)
            except DivergedError as error:
                raise self._diverge(scope, str(error), strayed=True) from None
            self._check(scope)
            if record is not None:
                identity = CallIdentity(scope.identity.rollout_id, scope.identity.attempt, record.call_id)
                number = record.number
                if record.answer is not None:
                    self.replayed += 1
                    scope.dispatch.answered = True
                    self._turn(identity.rollout_id)
                    self._may_forget(server_name, identity)
                    failpoints.reach("gate.before_replay", server_name)
                    return RecordedResponse(method.upper(), record.answer.url, record.answer)
        if identity is None:
            number = scope.number()
            identity = scope.identity.child(number)
        entry = self._doors.enter(
            identity.rollout_id, identity.attempt, turn=self.turns.get(identity.rollout_id, 0), inbound=False,
            exempt=not self._is_agent, waiting_on=what,
        )  # fmt: skip
        try:
            await self._doors.admitted(entry)
            self._check(scope)
            return await self._live(original, client, scope, identity, number, digest, own, server_name, url_path, method, kwargs)  # fmt: skip
        finally:
            self._doors.leave(entry)

    async def _unidentified(
        self, original: Request, client: Any, home: str, server_name: str, url_path: str, method: str,
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        if home:
            kwargs["headers"] = _with_headers(kwargs.get("headers"), {HOME_HEADER: home})
        what = f"{server_name} {method.upper()} {url_path}"
        entry = self._doors.enter(inbound=False, exempt=not self._is_agent, waiting_on=what)
        try:
            await self._doors.admitted(entry)
            return await original(client, server_name, url_path, method, **kwargs)
        finally:
            self._doors.leave(entry)

    async def _live(
        self, original: Request, client: Any, scope: Scope, identity: CallIdentity, number: int, digest: str, own: bool,
        server_name: str, url_path: str, method: str, kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        logs = self._is_agent and scope.dispatch is not None
        failpoints.reach("gate.before_issue", server_name)
        if logs:
            self._log.issue(
                identity, scope.identity.call_id, number, server_name, own, method.upper(), url_path, digest
            )
        failpoints.reach("gate.after_issue", server_name)
        recorded, ended = self._news_for(server_name, identity)
        headers = identity.headers(recorded)
        # Said also when it is none: an agent may pass on by hand the headers that it was called with.
        headers[FINISHED_HEADER] = str(
            self._log.finished_at(identity.rollout_id, server_name) if logs and not own else 0
        )
        headers[LOG_HEADER] = (logs and self._log_name) or "none"
        if (trace := TRACE.get()) and not _has(kwargs.get("headers"), TRACE_HEADER):
            headers[TRACE_HEADER] = (
                trace  # of the request that this call is made for; who traces by itself has sent its own
            )
        if ended:
            headers[DONE_HEADER] = ",".join(f"{rollout}/{attempt}" for rollout, attempt in ended)
        kwargs["headers"] = _with_headers(kwargs.get("headers"), headers)
        response = await original(client, server_name, url_path, method, **kwargs)
        self._delivered(server_name, identity, recorded, ended)
        pairs = tuple((str(k), str(v)) for k, v in response.headers.items())
        url, phrase = str(response.url), response.reason or ""
        lowered = {k.lower(): v for k, v in pairs}
        refused = lowered.get(REFUSED_HEADER, "")
        if refused:
            await response.read()
            if refused == Stale.STATE_LOST.value and scope.dispatch is not None:
                raise self._diverge(scope, f"{server_name} {STATE_LOST}")
            if refused == Stale.LOG_LOST.value and scope.dispatch is not None:
                scope.dispatch.outrun_by = identity.attempt
                raise self._diverge(
                    scope, f"{server_name} has executed calls of it that an earlier life of this server made"
                )
            lowest = lowest_from_headers(lowered)
            if refused == Stale.ATTEMPT.value and lowest > identity.attempt and scope.dispatch is not None:
                raise self._outrun(scope, server_name, lowest)
            raise refuse(
                Reason.REPLAY_DIVERGED, f"{server_name} refused {identity.call_id} of {identity.rollout_id}: {refused}."
            )
        if lowered.get("content-type", "").partition(";")[0].strip().lower() in _STREAMS:
            head = Answer(response.status, pairs, b"", phrase, url)
            chunks = self._tee(response, scope, identity, own, logs, server_name, head)
            return RecordedResponse(method.upper(), url, head, chunks, response.close)
        body = await response.read()
        answer = Answer(response.status, pairs, body, phrase, url)
        self._record(scope, identity, own, logs, server_name, answer)
        return RecordedResponse(method.upper(), url, answer)

    async def _tee(
        self, response: Any, scope: Scope, identity: CallIdentity, own: bool, logs: bool, server_name: str, head: Answer
    ) -> AsyncIterator[bytes]:
        whole: list[bytes] = []
        async for chunk in response.content.iter_any():
            whole.append(chunk)
            yield chunk
        answer = Answer(head.status, head.headers, b"".join(whole), head.phrase, head.url)
        self._record(scope, identity, own, logs, server_name, answer)

    def _record(
        self, scope: Scope, identity: CallIdentity, own: bool, logs: bool, server_name: str, answer: Answer
    ) -> None:
        # An inner request of the same rollout may have found out, here or in another worker, that it must restart: what
        # it answered is not a response.
        self._check(scope)
        dispatch = scope.dispatch
        if own and dispatch is not None and self._log.diverged(identity.rollout_id, identity.attempt):
            raise self._diverge(scope, "an inner call of it diverged")
        failpoints.reach("gate.before_respond", server_name)
        if logs and not self._log.respond(identity, answer, own):
            raise self._diverge(scope, "a later attempt has taken over")
        failpoints.reach("gate.after_respond", server_name)
        if dispatch is not None:
            dispatch.answered = True
        self._turn(identity.rollout_id)
        if not own:
            self._may_forget(server_name, identity)

    def finished(self, rollout_id: str, attempt: int) -> None:
        """The rollout has ended here: what callees remember of it may go."""
        self.turns.pop(rollout_id, None)
        for server in self._servers_of.pop(rollout_id, ()):
            self._recorded.pop((server, rollout_id), None)
            ended = self._done.setdefault(server, {})
            ended[rollout_id, attempt] = None
            while len(ended) > _MAX_DONE:
                del ended[next(iter(ended))]

    def restarted(self, rollout_id: str) -> None:
        """The rollout begins anew: ids of its old base are of no interest to anybody."""
        self.turns.pop(rollout_id, None)
        for server in self._servers_of.get(rollout_id, ()):
            self._recorded.pop((server, rollout_id), None)

    # -- inner workings

    def _check(self, scope: Scope) -> None:
        if scope.dispatch is not None and scope.dispatch.diverged:
            raise DivergedError(scope.dispatch.diverged)

    def _diverge(self, scope: Scope, reason: str, *, strayed: bool = False) -> DivergedError:
        dispatch = scope.dispatch
        if dispatch is not None:
            self._log.diverge(dispatch.rollout_id, dispatch.attempt, reason)
            dispatch.diverge(reason, strayed=strayed)
        return DivergedError(reason)

    def _outrun(self, scope: Scope, server: str, lowest: int) -> Exception:
        """A callee knows a later attempt than this server, which was killed and started again without its log.

        What has no answer yet begins again above that attempt. What has some may be of a server that was stopped and has
        been replaced meanwhile: it must not outrun its successor in turn.
        """
        dispatch = scope.dispatch
        assert dispatch is not None
        if dispatch.answered:
            dispatch.overtaken = refuse(
                Reason.REPLAY_DIVERGED,
                f"{server} refused a call of {dispatch.rollout_id}: attempt {dispatch.attempt} runs here, and {server} serves"
                f" {lowest} and later ones, which another agent or another life of this server has begun.",
                next_step="Give each rollout a _ng_rollout_id of its own when two agents were sent this one; otherwise dispatch"
                " it again, where it runs now.",
            )  # fmt: skip
            return dispatch.overtaken
        dispatch.outrun_by = lowest
        return self._diverge(
            scope, f"{server} has served attempt {lowest} of it, of a life of this server that has ended"
        )

    def _turn(self, rollout_id: str) -> None:
        if self._is_agent:
            self.turns[rollout_id] = self.turns.get(rollout_id, 0) + 1

    def _may_forget(self, server: str, identity: CallIdentity) -> None:
        self._recorded.setdefault((server, identity.rollout_id), {})[identity.call_id] = None
        self._servers_of.setdefault(identity.rollout_id, set()).add(server)

    def _news_for(self, server: str, identity: CallIdentity) -> tuple[list[str], list[tuple[str, int]]]:
        """What this call may tell its callee: call ids whose answers are recorded, and rollouts that have ended."""
        recorded = self._recorded.get((server, identity.rollout_id), {})
        return list(islice(recorded, MAX_RECORDED)), list(islice(self._done.get(server, {}), _DONE_AT_ONCE))

    def _delivered(
        self, server: str, identity: CallIdentity, recorded: Sequence[str], ended: Sequence[tuple[str, int]]
    ) -> None:
        # Only now: a call that failed may not have arrived. Twice told does no harm, never told stays in memory.
        waiting = self._recorded.get((server, identity.rollout_id), {})
        for call_id in recorded:
            waiting.pop(call_id, None)
        done = self._done.get(server, {})
        for key in ended:
            done.pop(key, None)


def _has(given: Any, name: str) -> bool:
    pairs = given.keys() if hasattr(given, "keys") else (key for key, _ in given or ())
    return any(str(key).lower() == name for key in pairs)


def _with_headers(given: Any, ours: dict[str, str]) -> Any:
    """A copy: the caller may use its dictionary again. Safepoint headers that were passed on by hand are replaced."""
    if not given:
        return dict(ours)
    if hasattr(given, "items"):
        merged: Any = given.copy() if hasattr(given, "copy") else dict(given)
        merged.update(ours)
        return merged
    return [*given, *ours.items()]


def _digest(server: str, url_path: str, method: str, kwargs: Mapping[str, Any]) -> str:
    parts = urlsplit(url_path)
    query = parts.query
    params: Any = kwargs.get("params")
    if isinstance(params, str):
        query += "?" + params
    elif params:
        query += "?" + "&".join(sorted(f"{k}={v}" for k, v in _pairs(params)))
    return request_digest(method, server, parts.path, query, _body(kwargs), _cookies(kwargs.get("cookies")))


def _body(kwargs: Mapping[str, Any]) -> bytes:
    value: Any = kwargs.get("json")
    if value is not None:
        orjson: Any = sys.modules.get("orjson")
        if orjson is not None:
            return bytes(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
        return dump(value)
    data: Any = kwargs.get("data")
    if data is None:
        return b""
    if isinstance(data, str):
        return canonical(data.encode())
    if isinstance(data, (bytes, bytearray)):
        return canonical(bytes(data))
    # A form or a generator: what it will send cannot be read without using it up, so its text stands for it.
    return dump([type(data).__name__, repr(data) if isinstance(data, dict) else ""])  # pyright: ignore[reportUnknownArgumentType]


def _cookies(cookies: Any) -> list[tuple[str, str]]:
    return [(str(k), str(getattr(v, "value", v))) for k, v in _pairs(cookies)] if cookies else []


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if hasattr(value, "items") else value)
