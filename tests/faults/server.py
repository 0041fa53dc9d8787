"""One small server of the fault matrix's fleet: `python -m tests.faults.server`; its name says which.

The agent plays a rollout of some turns: it seeds a counter, asks the policy model for a number, adds it, and has the
counter verified. The counter is right only when every addition was made exactly once. A gate is loaded by the real
bootstrap; `GET /doors` tells what it says of itself, so that a pause is measured where it is felt.
"""

from __future__ import annotations

import json
import os
import uuid
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from participant_shims.gate import install

if TYPE_CHECKING:
    from tests.faults.stub.nemo_gym.server_utils import (
        Config,
        ServerClient,
        SimpleResourcesServer,
        SimpleResponsesAPIAgent,
        SimpleResponsesAPIModel,
        own_name,
    )
else:  # the stand-in, which is on these servers' path and on nobody else's
    from nemo_gym.server_utils import (
        Config,
        ServerClient,
        SimpleResourcesServer,
        SimpleResponsesAPIAgent,
        SimpleResponsesAPIModel,
        own_name,
    )


class SessionId:
    """Gives every session an id, as Gym's middleware does."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["session"].setdefault("session_id", str(uuid.uuid4()))
        await self.app(scope, receive, send)


class Agent(SimpleResponsesAPIAgent):
    """Plays rollouts."""

    def routes(self) -> list[Route]:
        return [Route("/run", self.run, methods=["POST"])]

    async def run(self, request: Request) -> Response:
        row = await request.json()
        rollout_id, start = row["_ng_rollout_id"], row["start"]
        answer, cookies = await self._ask("counter", "/seed", {"start": start}, None)
        total = start
        for turn in range(row["turns"]):
            said, _ = await self._ask("policy_model", "/v1/responses", {"rollout": rollout_id, "turn": turn}, None)
            answer, cookies = await self._ask("counter", "/add", {"n": said["n"], "turn": turn}, cookies)
            total += said["n"]
        verified, _ = await self._ask("counter", "/verify", {"expected": total}, cookies)
        return JSONResponse({"total": total, "count": answer["count"], "reward": verified["reward"]})

    async def _ask(self, server: str, path: str, body: Any, cookies: Any) -> tuple[Any, SimpleCookie]:
        response = await self.server_client.post(server, path, json=body, cookies=cookies)
        if response.status >= 400:
            raise RuntimeError(f"{server}{path} answered {response.status}")
        return await response.json(), response.cookies or cookies


class Counter(SimpleResourcesServer):
    """Keeps one number a session."""

    def __init__(self, config: Config, server_client: ServerClient) -> None:
        super().__init__(config, server_client)
        self.session_id_to_count: dict[str, int] = {}

    def routes(self) -> list[Route]:
        return [
            Route("/seed", self.seed, methods=["POST"]),
            Route("/add", self.add, methods=["POST"]),
            Route("/verify", self.verify, methods=["POST"]),
            Route("/sessions", self.sessions),
        ]

    async def seed(self, request: Request) -> Response:
        self.session_id_to_count[request.session["session_id"]] = (await request.json())["start"]
        return JSONResponse({"count": self.session_id_to_count[request.session["session_id"]]})

    async def add(self, request: Request) -> Response:
        n, session_id = (await request.json())["n"], request.session["session_id"]
        if session_id not in self.session_id_to_count:
            return JSONResponse({"error": "no such session"}, 404)
        self.session_id_to_count[session_id] += n
        return JSONResponse({"count": self.session_id_to_count[session_id]})

    async def verify(self, request: Request) -> Response:
        expected, session_id = (await request.json())["expected"], request.session["session_id"]
        if session_id not in self.session_id_to_count:
            return JSONResponse({"error": "no such session"}, 404)
        return JSONResponse({"reward": float(self.session_id_to_count[session_id] == expected)})

    async def sessions(self, _: Request) -> Response:
        """For the judge; a gate lets it pass."""
        return JSONResponse(list(self.session_id_to_count.values()))


class Model(SimpleResponsesAPIModel):
    """Passes the question on to the engine."""

    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.respond, methods=["POST"])]

    async def respond(self, request: Request) -> Response:
        url = os.environ["FAULTS_ENGINE"]
        async with self.server_client.session().post(url, json=await request.json()) as response:
            return JSONResponse(await response.json(), response.status)


async def doors(_: Request) -> Response:
    """What the gate says of itself; `null` when there is none."""
    gate = install._gate  # pyright: ignore[reportPrivateUsage]
    return JSONResponse(gate.status(0) if gate is not None else None)


def main() -> None:
    """Serve under the name and at the port that the environment gives."""
    name, config = own_name(), json.loads(os.environ["NEMO_GYM_CONFIG_DICT"])
    kinds: dict[str, type[Agent | Counter | Model]] = {"agent": Agent, "counter": Counter, "policy_model": Model}
    server = kinds[name](Config(name), ServerClient(config))
    key = f"safepoint-faults-{name}"  # the same in every life: sessions outlive their server
    app = Starlette(
        routes=[*server.routes(), Route("/doors", doors)],
        middleware=[Middleware(SessionMiddleware, secret_key=key, session_cookie=name), Middleware(SessionId)],
    )
    server.setup_exception_middleware(app)
    port = next(iter(next(iter(config[name].values())).values()))["port"]
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_keep_alive=60)


if __name__ == "__main__":
    main()
