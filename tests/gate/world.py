"""A small Gym in one process: an agent, a counter with sessions, a model; each an ASGI application behind a real gate.

Calls between them go through the gates' outbound side and straight into the other's middleware, headers and all. A World
can be exported and loaded into a new one, as a restart does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import multidict

from participant_shims.gate import calllog_files
from participant_shims.gate.asgi import GateMiddleware
from participant_shims.gate.calllog import CallLog
from participant_shims.gate.core import Gate
from participant_shims.gate.describe import Server
from tests.gate.clock import Clock

Handler = Callable[[dict[str, Any], Any, dict[str, str]], Awaitable[tuple[int, Any, list[tuple[str, str]]]]]


class Client:
    """One HTTP client's request. `leave()` is its disconnect."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.chunks: list[bytes] = []
        self.gone = asyncio.Event()
        self.done = False

    def leave(self) -> None:
        self.gone.set()

    def json(self) -> Any:
        return json.loads(self.body)

    async def send_request(
        self, app: Any, method: str, path: str, body: bytes = b"", headers: list[tuple[str, str]] | None = None
    ) -> Client:
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = [(k.decode(), v.decode()) for k, v in message["headers"]]
            else:
                self.chunks.append(message.get("body", b""))
                self.body += message.get("body", b"")
                self.done = not message.get("more_body", False)

        path, _, query = path.partition("?")
        await app(
            {
                "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
                "headers": [(k.lower().encode(), v.encode()) for k, v in headers or []],
            },
            receive, send,
        )  # fmt: skip
        return self


class LiveResponse:
    """What aiohttp would return."""

    def __init__(self, client: Client, url: str) -> None:
        self.status, self.reason, self.url = client.status, "OK", url
        self.headers = multidict.CIMultiDict(client.headers)
        self.ok = client.status < 400
        self.cookies: SimpleCookie = SimpleCookie()
        for name, value in client.headers:
            if name == "set-cookie":
                self.cookies.load(value)
        self._client = client
        self.content = self

    async def json(self) -> Any:
        return self._client.json()

    async def read(self) -> bytes:
        return self._client.body

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in self._client.chunks:
            if chunk:
                yield chunk

    def close(self) -> None: ...


class Node:
    """One server."""

    def __init__(self, world: World, name: str, kind: str, role: str, directory: Path) -> None:
        self.world, self.name = world, name
        self.log = CallLog(directory / f"{name}.db", tolerant=True, alone=True)
        self.gate = Gate(Server(name, kind, role, 1), self.log, clock=world.clock, patience_s=0.05)
        self.gate.doors._call_later = world.clock.later
        self.app = GateMiddleware(self._inner, self.gate)
        self.routes: dict[str, Handler] = {}
        self.served: list[str] = []  # paths that really ran

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        body = json.loads(message["body"]) if message["body"] else None
        self.served.append(scope["path"])
        try:
            status, answer, extra = await self.routes[scope["path"]](scope, body, headers)
        except Exception as error:  # as Gym's own middleware does
            status, answer, extra = 500, repr(error), []
        if callable(answer):
            await send({"type": "http.response.start", "status": status,
                        "headers": [(b"content-type", b"text/event-stream")]})  # fmt: skip
            async for chunk in answer():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        raw = json.dumps(answer).encode()
        pairs = [("content-type", "application/json"), ("content-length", str(len(raw))), *extra]
        await send({"type": "http.response.start", "status": status,
                    "headers": [(k.encode(), v.encode()) for k, v in pairs]})  # fmt: skip
        await send({"type": "http.response.body", "body": raw, "more_body": False})

    async def post(self, server: str, path: str, body: Any = None, cookies: Any = None, **kwargs: Any) -> Any:
        """What an agent calls: ServerClient.post."""
        return await self.gate.outbound.request(
            self.world.send, self, server, path, "POST", json=body, cookies=cookies, **kwargs
        )


class World:
    """`turns`: model calls of a rollout; `chance`: an agent that does something else each time."""

    def __init__(self, directory: Path, turns: int = 3) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.turns = turns
        self.clock = Clock()
        self.nodes = {
            "agent": Node(self, "agent", "gym.agent", "agent", directory),
            "counter": Node(self, "counter", "gym.resources", "resources", directory),
            "model": Node(self, "model", "gym.model", "policy_model", directory),
            "helper": Node(self, "helper", "gym.agent", "agent", directory),
        }
        self.counters: dict[str, int] = {}
        self.chance: itertools.count[int] | None = None
        self.model_calls: list[str] = []
        self.block: dict[str, asyncio.Event] = {}  # path -> handlers wait for it
        self.hold_model_at: int | None = None  # the turn whose generation waits
        self.held_model = False
        self._model = asyncio.Event()
        self.lose: set[str] = set()  # paths whose next response is lost on the way
        self.on_send: Callable[[str, str], None] | None = None
        self._sessions = itertools.count()
        self.incarnation = "a"
        self.agent.routes = {"/run": self._run, "/v1/responses": self._loop}
        self.nodes["helper"].routes = {"/v1/responses": self._help}
        self.counter.routes = {"/seed": self._seed, "/add": self._add, "/verify": self._verify}
        self.model.routes = {"/v1/responses": self._generate, "/stream": self._stream}

    @property
    def agent(self) -> Node:
        return self.nodes["agent"]

    @property
    def counter(self) -> Node:
        return self.nodes["counter"]

    @property
    def model(self) -> Node:
        return self.nodes["model"]

    def close(self) -> None:
        for node in self.nodes.values():
            node.log.close()

    def let_model_go(self) -> None:
        self._model.set()

    # -- the wire

    async def send(self, node: Node, server: str, path: str, method: str, **kwargs: Any) -> LiveResponse:
        headers = [(str(k), str(v)) for k, v in (kwargs.get("headers") or {}).items()]
        cookies = kwargs.get("cookies")
        if cookies:
            pairs = [f"{k}={getattr(v, 'value', v)}" for k, v in cookies.items()]
            headers.append(("cookie", "; ".join(pairs)))
        body = json.dumps(kwargs["json"]).encode() if kwargs.get("json") is not None else b""
        if self.on_send is not None:
            self.on_send(server, path)
        while True:
            client = await Client().send_request(self.nodes[server].app, method, path, body, headers)
            if path in self.lose:  # the client retries, as Gym's does, with the same headers
                self.lose.discard(path)
                continue
            return LiveResponse(client, f"http://{server}{path}")

    async def run(self, row: dict[str, Any], client: Client | None = None) -> Client:
        """A client's POST /run."""
        return await (client or Client()).send_request(self.agent.app, "POST", "/run", json.dumps(row).encode())

    # -- the servers

    async def _wait(self, path: str) -> None:
        if path in self.block:
            await self.block[path].wait()

    async def _run(self, scope: Any, row: Any, headers: dict[str, str]) -> Any:
        seeded = await self.agent.post("counter", "/seed", {"start": row.get("start", 0)})
        inner = await self.agent.post("agent", "/v1/responses", {"input": row["input"]}, cookies=seeded.cookies)
        if not inner.ok:
            return 500, await inner.json(), []
        result = await inner.json()
        verified = await self.agent.post("counter", "/verify", result, cookies=inner.cookies)
        return 200, await verified.json(), []

    async def _loop(self, scope: Any, body: Any, headers: dict[str, str]) -> Any:
        cookies: Any = SimpleCookie(headers.get("cookie", ""))
        said: list[Any] = []
        for turn in range(self.turns):
            ask = {"input": body["input"], "said": said, "turn": turn}
            if self.chance is not None:
                ask["chance"] = next(self.chance)
            answer = await self.agent.post("model", "/v1/responses", ask)
            step = await answer.json()
            added = await self.agent.post("counter", "/add", {"n": step["n"]}, cookies=cookies)
            cookies = added.cookies
            said.append([step["n"], await added.json()])
        return 200, {"said": said}, [("set-cookie", f"s={cookies['s'].value}; path=/")]

    async def run_with_helper(self, scope: Any, row: Any, headers: dict[str, str]) -> Any:
        """An agent that leaves the work to another agent."""
        helped = await self.agent.post("helper", "/v1/responses", {"input": row["input"]})
        return helped.status, await helped.json(), []

    async def _help(self, scope: Any, body: Any, headers: dict[str, str]) -> Any:
        said: list[Any] = []
        for turn in range(self.turns):
            ask = {"input": body["input"], "said": said, "turn": turn}
            if self.chance is not None:
                ask["chance"] = next(self.chance)
            answer = await self.nodes["helper"].post("model", "/v1/responses", ask)
            said.append((await answer.json())["n"])
        return 200, {"said": said}, []

    async def run_in_parallel(self, scope: Any, row: Any, headers: dict[str, str]) -> Any:
        """An agent that follows three lines of thought at once."""

        async def think(line: int) -> list[int]:
            said: list[int] = []
            for turn in range(self.turns):
                ask = {"input": row["input"], "line": line, "said": said, "turn": turn}
                said.append((await (await self.agent.post("model", "/v1/responses", ask)).json())["n"])
            return said

        return 200, {"said": await asyncio.gather(*(think(line) for line in range(3)))}, []

    async def _seed(self, scope: Any, body: Any, headers: dict[str, str]) -> Any:
        session = f"{self.incarnation}{next(self._sessions)}"
        self.counters[session] = body["start"]
        return 200, {}, [("set-cookie", f"s={session}; path=/; httponly"), ("set-cookie", "other=1; path=/")]

    async def _add(self, scope: Any, body: Any, headers: dict[str, str]) -> Any:
        await self._wait("/add")
        session = SimpleCookie(headers["cookie"])["s"].value
        self.counters[session] += body["n"]
        return 200, {"count": self.counters[session]}, [("set-cookie", f"s={session}; path=/")]

    async def _verify(self, scope: Any, body: Any, headers: dict[str, str]) -> Any:
        session = SimpleCookie(headers["cookie"])["s"].value
        return 200, {"count": self.counters[session], "said": body["said"]}, []

    async def _generate(self, scope: Any, body: Any, headers: dict[str, str]) -> Any:
        await self._wait("/v1/responses")
        if body["turn"] == self.hold_model_at:
            self.held_model = True
            await self._model.wait()
        self.model_calls.append(json.dumps(body, sort_keys=True))
        return 200, {"n": len(body["input"]) + body["turn"]}, []

    async def _stream(self, scope: Any, body: Any, headers: dict[str, str]) -> Any:
        async def chunks() -> AsyncIterator[bytes]:
            for i in range(3):
                await self._wait(f"chunk{i}")
                yield f"data: {i}\n\n".encode()

        return 200, chunks, []

    # -- a restart

    def lose_counter(self, directory: Path) -> None:
        """The counter alone is killed and started again: sessions that it does not know begin at zero, as Gym's do."""
        self._lose("counter", "gym.resources", "resources", directory)
        self.counters = defaultdict(int)

    def lose_agent(self, directory: Path) -> None:
        """The agent alone is killed and started again: its log is a new one."""
        self._lose("agent", "gym.agent", "agent", directory)

    def lose_helper(self, directory: Path) -> None:
        """The other agent likewise."""
        self._lose("helper", "gym.agent", "agent", directory)

    def _lose(self, name: str, kind: str, role: str, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        before = self.nodes[name]
        before.log.close()
        self.nodes[name] = Node(self, name, kind, role, directory)
        self.nodes[name].routes = before.routes

    def restarted(
        self, directory: Path, excluded: dict[str, str] | None = None, edit: Callable[[Path], None] = lambda _: None
    ) -> World:
        """A new world with the logs and the session state of this one. `edit` may change an exported file."""
        new = World(directory, self.turns)
        new.incarnation = self.incarnation + "x"
        new.counters = dict(self.counters)
        for name, node in self.nodes.items():
            out = directory / f"export-{name}"
            out.mkdir()
            calllog_files.export(node.log, out)
            edit(out / calllog_files.FILE)
            calllog_files.load(new.nodes[name].log, [out / calllog_files.FILE], excluded)
        return new


async def until(condition: Callable[[], Any], steps: int = 2000) -> None:
    """Let the loop run until the condition holds."""
    for _ in range(steps):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")
