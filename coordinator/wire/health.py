"""The standard health service of gRPC, as the coordinator and every shim serve it: whether a process serves, and no more.

The rule: all three methods of grpc.health.v1 answer. grpcio-health-checking has `List` in its contract and does not serve it.
"""

from __future__ import annotations

import importlib
from typing import Any

import grpc

# Without types: the package has none.
_health: Any = importlib.import_module("grpc_health.v1.health")
_health_pb2: Any = importlib.import_module("grpc_health.v1.health_pb2")
_health_grpc: Any = importlib.import_module("grpc_health.v1.health_pb2_grpc")

SERVICE: str = _health.SERVICE_NAME


class Health:
    """The state of one server and of the services that it names: all the same, not serving until that is said."""

    def __init__(self, server: grpc.aio.Server, *names: str) -> None:
        """`names`: the full names of the services; the empty name of the server as a whole is added."""
        self._names = ("", *names)
        self._state = _health_pb2.HealthCheckResponse.NOT_SERVING
        self._served: Any = _health.aio.HealthServicer()
        self._served.List = self._list
        _health_grpc.add_HealthServicer_to_server(self._served, server)

    async def serving(self) -> None:
        """From now on everything serves."""
        await self._set(_health_pb2.HealthCheckResponse.SERVING)

    async def stopping(self) -> None:
        """Nothing serves any more; who watches is told, and it stays so."""
        await self._set(_health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._served.enter_graceful_shutdown()

    async def _set(self, state: Any) -> None:
        self._state = state
        for name in self._names:
            await self._served.set(name, state)

    async def _list(self, _request: Any, _context: Any) -> Any:
        one = _health_pb2.HealthCheckResponse(status=self._state)
        return _health_pb2.HealthListResponse(statuses=dict.fromkeys(self._names, one))
