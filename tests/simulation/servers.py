"""A small Gym on the simulated loop: agents, models, and resources whose sessions count, each behind its real gate.

The rule: what a rollout's result must be is known from its row alone, and every session keeps which calls it has
executed. So a call that was lost, executed twice or taken from the wrong life shows, in the result or in the snapshot.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable
from http.cookies import SimpleCookie
from pathlib import Path
from random import Random
from typing import Any

import multidict

from coordinator.wire.errors import SafepointError
from participant_shims.gate.asgi import GateMiddleware
from participant_shims.gate.calllog import CallLog
from participant_shims.gate.control import Control, _error
from participant_shims.gate.core import Gate
from participant_shims.gate.describe import Server
from participant_shims.gate.state.sessions import SessionState
from participant_shims.identity import ATTEMPT_HEADER, CALL_HEADER, ROLLOUT_HEADER
from tests.simulation.counting.app import Counting
from tests.simulation.loop import Process, SimLoop
from tests.simulation.network import Network

Json = dict[str, Any]
GAP_S, SILENCE_S = 0.4, 2.0  # between what a gate pushes: rarer than the real ones, since each costs time


class Request:
    """What a handler sees of its request."""

    def __init__(self, session_id: str) -> None:
        self.session = {"session_id": session_id}


class Broken(ConnectionError):
    """The connection to a server broke: the caller asks again."""


class Sessions(SessionState):
    """The sessions of a life, as its gate saves them; `ever`: those that it has made or loaded."""

    def __init__(self) -> None:
        self.server = Counting()
        super().__init__(self.server)
        self.ever: set[str] = set()

    async def load(self, path: str | Path, **more: Any) -> Json:
        done = await super().load(path, **more)
        self.ever.update(self.server.counters)
        return done


class Line:
    """The gate's end of its shim's socket: as gate.control, without a thread."""

    _operation = Control._operation
    _teller = getattr(Control, "_teller", None)
    _numbered = "number" in inspect.signature(Control._operation).parameters

    def __init__(self, gate: Gate, path: str) -> None:
        self._gate, self._path = gate, path
        self._dirty = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[Any] = set()
        gate.on_change = self._dirty.set
        gate.on_opened = lambda cause: self._push({"event": "opened", "cause": cause})

    async def run(self, random: Random) -> None:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=1 << 24)
                self._push({"hello": self._gate.hello()})
                telling = asyncio.create_task(self._tell())
                try:
                    while line := await reader.readline():
                        self._handle(json.loads(line))
                finally:
                    telling.cancel()
            except ConnectionError:
                pass
            await asyncio.sleep(random.uniform(0.05, 0.6))

    async def _tell(self) -> None:
        while True:
            self._push({"event": "status", "status": self._gate.status(20)})
            await asyncio.sleep(GAP_S)
            try:
                await asyncio.wait_for(self._dirty.wait(), SILENCE_S)
            except TimeoutError:
                pass
            self._dirty.clear()

    def _push(self, message: Json) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _handle(self, message: Json) -> None:
        number, op, params = message["id"], message["op"], message.get("params") or {}
        if op == "status":
            self._push({"id": number, "ok": self._gate.status(int(params.get("max_rollouts", 0)))})
            return
        if op == "describe":
            self._push({"id": number, "ok": self._gate.describe()})
            return
        try:
            what: Any = self._operation
            result = (what(op, number) if self._numbered else what(op))(params)
        except Exception as error:
            self._push({"id": number, "error": _error(error, self._gate.log.path, op)})
            return
        if asyncio.iscoroutine(result):
            task = asyncio.ensure_future(self._wait(number, op, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._push({"id": number, "ok": result})

    async def _wait(self, number: int, op: str, work: Any) -> None:
        try:
            self._push({"id": number, "ok": await work})
        except Exception as error:
            self._push({"id": number, "error": _error(error, self._gate.log.path, op)})


class Work:
    """How long things take, and what every answer must be."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.model_s = (0.02, 1.5)
        self.tool_s = (0.005, 0.3)
        self.straggles = 0.0  # share of tool calls that take `straggle_s`
        self.straggle_s = 9.0

    @staticmethod
    def number(row_input: str, turn: int) -> int:
        return (len(row_input) * 7 + turn * 13 + sum(row_input.encode())) % 101 + 1

    @classmethod
    def expected(cls, row: Json) -> Json:
        count, said = row["start"], []
        for turn in range(row["turns"]):
            n = cls.number(row["input"], turn)
            count += n
            said.append([n, count])
        return {"count": count, "said": said}

    def model_time(self) -> float:
        return self.random.uniform(*self.model_s)

    def tool_time(self) -> float:
        if self.straggles and self.random.random() < self.straggles:
            return self.straggle_s
        return self.random.uniform(*self.tool_s)


class Http:
    """Plain HTTP between servers, and from the trainer: a connection breaks with either of its ends."""

    def __init__(self, loop: SimLoop, network: Network) -> None:
        self.loop, self.network = loop, network
        self.servers: dict[str, GymServer] = {}

    async def once(self, source: Process, name: str, method: str, path: str, body: bytes, headers: Any) -> Json:
        """One exchange: status, headers, body. Raises Broken."""
        server = self.servers.get(name)
        if server is None or not server.process.alive:
            await asyncio.sleep(0.002)
            raise Broken(name)
        future: asyncio.Future[Json] = self.loop.create_future()
        gone = asyncio.Event()

        def broken() -> None:
            source.soon(lambda: None if future.done() else future.set_exception(Broken(name)))

        def arrive() -> None:
            if server.process.alive:
                server.process.on_kill.append(broken)
                server.process.spawn(serve(), f"{method} {path}")
                weather = self.network.weather
                if weather.lose and self.network.random.random() < 3 * weather.lose:
                    self.loop.after(self.network.random.uniform(0.002, 0.4), broken)  # while it is being served
            else:
                broken()

        async def serve() -> None:
            answer: Json = {"status": 0, "headers": [], "body": b""}
            given = False

            async def receive() -> Json:
                nonlocal given
                if not given:
                    given = True
                    return {"type": "http.request", "body": body, "more_body": False}
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Json) -> None:
                if message["type"] == "http.response.start":
                    answer["status"] = message["status"]
                    answer["headers"] = [(k.decode(), v.decode()) for k, v in message["headers"]]
                else:
                    answer["body"] += message.get("body", b"")
                    if not message.get("more_body", False):
                        when = self.network.way(server.process, source, 0.0, broken)
                        if when is not None:
                            self.loop.at(when, source, lambda: source.deliver(done, answer))

            scope = {
                "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
                "headers": [(k.lower().encode(), v.encode()) for k, v in headers],
            }  # fmt: skip
            try:
                await server.app(scope, receive, send)
            except Exception as error:
                server.log_error(error)
                broken()

        def done(answer: Json) -> None:
            if not future.done():
                future.set_result(answer)

        when = self.network.way(source, server.process, 0.0, broken)
        if when is not None:
            self.loop.at(when, server.process, arrive)
        try:
            return await asyncio.wait_for(future, 60.0)
        except TimeoutError:
            raise Broken(name) from None
        finally:
            server.process.soon(gone.set)

    async def again(self, source: Process, name: str, method: str, path: str, body: bytes, headers: Any) -> Json:
        """As Gym's client: the same request until it is answered."""
        wait_s = 0.1
        while True:
            try:
                return await self.once(source, name, method, path, body, headers)
            except Broken:
                await asyncio.sleep(wait_s)
                wait_s = min(2.0, wait_s * 2)


class Response:
    """What aiohttp would return."""

    def __init__(self, answer: Json, url: str) -> None:
        self.status, self.reason, self.url = answer["status"], "OK", url
        self.headers = multidict.CIMultiDict(answer["headers"])
        self._body = answer["body"]
        self.ok = self.status < 400

    async def read(self) -> bytes:
        return self._body

    def close(self) -> None: ...


class GymServer:
    """One life of one server. `life` counts: a session of an earlier life is not known any more."""

    def __init__(
        self, process: Process, http: Http, work: Work, name: str, kind: str, role: str, life: int,
        directory: Path, targets: dict[str, str],
    ) -> None:  # fmt: skip
        self.process, self.http, self.work = process, http, work
        self.name, self.kind, self.life, self.targets = name, kind, life, targets
        self.sessions = Sessions() if kind == "gym.resources" else None
        self.log = CallLog(directory / "calls.db", tolerant=True, alone=True)
        loop = process.loop
        self.gate = Gate(
            Server(name, kind, role, 1, depends_on=tuple(sorted(set(targets.values()))) if kind == "gym.agent" else ()),
            self.log,
            self.sessions,
            clock=loop.time,
        )
        self.app = GateMiddleware(self._inner, self.gate)
        self.line = Line(self.gate, str(directory / "gate.sock"))
        self.violation: Callable[[str], None] = lambda text: None
        self.finished: set[tuple[str, str]] = set()  # calls that a restored snapshot has the answers to
        self.attempts: dict[str, int] = {}  # the first attempt of each rollout that a restore has brought
        # (rollout, call) whose answer the agent has: in which attempt, and since when
        self.acted_on: dict[tuple[str, str], tuple[int, float]] = {}
        self._numbers = itertools.count()
        self.routes: dict[str, Any] = {
            "/run": self._run, "/v1/responses": self._loop if kind == "gym.agent" else self._generate,
            "/seed": self._seed, "/add": self._add, "/verify": self._verify,
        }  # fmt: skip

    async def main(self) -> None:
        await self.gate.start()
        await self.line.run(self.process.loop.random)

    def log_error(self, error: Exception) -> None:
        if not isinstance(error, SafepointError):
            self.violation(f"the gate of {self.name} raised {error!r}")

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        self.process.loop.kept.append(scope)
        cookie = SimpleCookie(headers.get("cookie", ""))
        scope["session"] = {"session_id": cookie["s"].value} if "s" in cookie else {}
        try:
            status, answer, extra = await self.routes[scope["path"]](scope, json.loads(message["body"]), headers)
        except Exception as error:  # as Gym's own middleware does
            status, answer, extra = 500, repr(error), []
        raw = json.dumps(answer).encode()
        pairs = [("content-type", "application/json"), ("content-length", str(len(raw))), *extra]
        encoded = [(k.encode(), v.encode()) for k, v in pairs]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": raw, "more_body": False})

    # ---- an agent ---------------------------------------------------------------------------------------------------------

    async def post(self, server: str, path: str, body: Any, cookies: Any = None) -> Any:
        return await self.gate.outbound.request(self._send, self, server, path, "POST", json=body, cookies=cookies)

    async def _send(self, client: Any, server: str, path: str, method: str, **kwargs: Any) -> Response:
        headers = [(str(k), str(v)) for k, v in (kwargs.get("headers") or {}).items()]
        if self.gate.doors.closed and server != self.name:
            self.violation(f"I3: a call to {server} leaves {self.name}, which is closed")
        if kwargs.get("cookies"):
            headers.append(("cookie", "; ".join(f"{k}={getattr(v, 'value', v)}" for k, v in kwargs["cookies"].items())))
        body = json.dumps(kwargs["json"]).encode()
        answer = await self.http.again(self.process, server, method, path, body, headers)
        rollout, call, attempt = self._call(dict(headers))
        if server != self.name and answer["status"] == 200:
            # It acts on the answer as soon as it has it: nothing comes between here and the gate's own record.
            self.process.loop.call_soon(self.acted_on.__setitem__, (rollout, call), (attempt, self.process.loop.now))
        return Response(answer, f"http://{server}{path}")

    async def _run(self, scope: Any, row: Json, headers: Any) -> Any:
        seeded = await self.post(self.targets["resources"], "/seed", {"start": row["start"]})
        inner = await self.post(self.name, "/v1/responses", row, cookies=seeded.cookies)
        if not inner.ok:
            return 500, "the loop failed", []
        verified = await self.post(self.targets["resources"], "/verify", await inner.json(), cookies=inner.cookies)
        return (200 if verified.ok else 500), await verified.json(), []

    async def _loop(self, scope: Any, row: Json, headers: Any) -> Any:
        cookies: Any = SimpleCookie(headers.get("cookie", ""))
        said: list[Any] = []
        for turn in range(row["turns"]):
            answer = await self.post(self.targets["model"], "/v1/responses", {"input": row["input"], "turn": turn})
            if not answer.ok:
                return 500, "no answer", []
            n = (await answer.json())["n"]
            added = await self.post(self.targets["resources"], "/add", {"n": n}, cookies=cookies)
            if not added.ok:
                return 500, "no session", []
            cookies = added.cookies
            said.append([n, (await added.json())["count"]])
        return 200, {"said": said}, [("set-cookie", f"s={cookies['s'].value}; path=/")]

    # ---- a model, and resources -------------------------------------------------------------------------------------------

    async def _generate(self, scope: Any, body: Json, headers: Any) -> Any:
        self._not_again(self._call(headers))
        await asyncio.sleep(self.work.model_time())
        return 200, {"n": self.work.number(body["input"], body["turn"])}, []

    def _call(self, headers: Any) -> list[Any]:
        return [headers.get(ROLLOUT_HEADER, ""), headers.get(CALL_HEADER, ""), int(headers.get(ATTEMPT_HEADER, 0))]

    def _not_again(self, call: list[Any]) -> None:
        if call[2] < self.attempts.get(call[0], 0):
            self.violation(f"I16: {self.name} serves attempt {call[2]} of {call[0]}, which a restore has replaced")
        if (call[0], call[1]) in self.finished:
            self.violation(f"I16: {self.name} is asked for {call[1]} of {call[0]} again, although its answer was saved")

    def _did(self, scope: Any, session_id: str, call: list[Any]) -> None:
        assert self.sessions is not None
        self._not_again(call)
        scope["session"] = {"session_id": session_id}
        state = self.sessions.server.session(Request(session_id))
        if any(done[:2] == call[:2] for done in state["history"]):
            self.violation(f"I9: {self.name} executes {call[1]} of {call[0]} a second time in one session")
        if any(done[0] == call[0] and done[2] > call[2] for done in state["history"]):
            self.violation(f"I16: {self.name} serves attempt {call[2]} of {call[0]} after a later one")
        state["history"].append(call)

    async def _seed(self, scope: Any, body: Json, headers: Any) -> Any:
        assert self.sessions is not None
        await asyncio.sleep(self.work.tool_time())
        session_id = f"{self.name}.{self.life}.{next(self._numbers)}"
        self.sessions.server.begin(Request(session_id), body["start"])
        self.sessions.ever.add(session_id)
        self._did(scope, session_id, self._call(headers))
        return 200, {}, [("set-cookie", f"s={session_id}; path=/")]

    async def _add(self, scope: Any, body: Json, headers: Any) -> Any:
        assert self.sessions is not None
        session_id = SimpleCookie(headers["cookie"])["s"].value
        before = self.sessions.server.session(Request(session_id))  # one of an earlier life is not there: KeyError, 500
        half = body["n"] // 2  # as a real handler, it changes the session in steps
        before["count"] += half
        await asyncio.sleep(self.work.tool_time())
        if self.sessions.server.session(Request(session_id)) is not before:
            raise KeyError(session_id)
        before["count"] += body["n"] - half
        before["whole"] = before["count"]
        self._did(scope, session_id, self._call(headers))
        return 200, {"count": before["count"]}, [("set-cookie", f"s={session_id}; path=/")]

    async def _verify(self, scope: Any, body: Json, headers: Any) -> Any:
        assert self.sessions is not None
        session_id = SimpleCookie(headers["cookie"])["s"].value
        await asyncio.sleep(self.work.tool_time())
        self._did(scope, session_id, self._call(headers))
        state = self.sessions.server.session(Request(session_id))
        return 200, {"count": state["count"], "said": body["said"]}, []
