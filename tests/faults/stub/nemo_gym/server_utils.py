"""The parts of `nemo_gym.server_utils` that a gate meets: how servers call each other, and the server object.

The rule it keeps: whatever it does differs from Gym's own only in size. A call that finds nobody is made again with the
same headers, as Gym's is; a call that was answered is not.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp

RETRY_S = 0.1
GIVE_UP_S = 30.0


class ServerClient:
    """Calls servers by their names. `global_config_dict`: the whole deployment, as Gym resolves it."""

    def __init__(self, global_config_dict: dict[str, Any]) -> None:
        self.global_config_dict = global_config_dict
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """One for the process; made on its event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )  # fmt: skip
        return self._session

    async def request(self, server_name: str, url_path: str, method: str, **kwargs: Any) -> Any:
        """One call; made again while nobody listens there, or the connection breaks before an answer."""
        section: dict[str, Any] = next(iter(self.global_config_dict[server_name].values()))
        port = next(iter(section.values()))["port"]
        until = asyncio.get_running_loop().time() + GIVE_UP_S
        while True:
            try:
                return await self.session().request(method, f"http://127.0.0.1:{port}{url_path}", **kwargs)
            except (aiohttp.ClientConnectionError, ConnectionError):
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(RETRY_S)

    async def post(self, server_name: str, url_path: str, **kwargs: Any) -> Any:
        """POST."""
        return await self.request(server_name, url_path, "POST", **kwargs)


class Config:
    """What `server.config` says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_workers = 1


class ErrorsToResponses:
    """An ASGI middleware; 500 for an exception."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            body = repr(error).encode()
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 500, "headers": headers})
            await send({"type": "http.response.body", "body": body})


class SimpleServer:
    """The server object that the gate meets."""

    def __init__(self, config: Config, server_client: ServerClient) -> None:
        self.config = config
        self.server_client = server_client

    def setup_exception_middleware(self, app: Any) -> Any:
        """Called once, with the application: whatever a handler raises becomes a response, as in Gym."""
        app.add_middleware(ErrorsToResponses)
        return app


class SimpleResponsesAPIAgent(SimpleServer):
    """An agent."""


class SimpleResourcesServer(SimpleServer):
    """Resources."""


class SimpleResponsesAPIModel(SimpleServer):
    """A model."""


def own_name() -> str:
    """The name of the server that this process is."""
    return os.environ["NEMO_GYM_CONFIG_PATH"]
