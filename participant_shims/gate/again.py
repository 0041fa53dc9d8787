"""The records of requests from which a session is rebuilt, at servers whose state can only be had by doing it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from participant_shims.gate.calllog import Answer
from participant_shims.gate.state.reexecute import Exchange, Request, Response


def exchange_of(scope: Mapping[str, Any], body: bytes, answer: Answer) -> Exchange:
    """The record of one request that was served and of its response."""
    query = scope.get("query_string", b"").decode("latin-1")
    path = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
    headers = tuple((k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in scope["headers"])
    request = Request(scope["method"], f"{path}?{query}" if query else path, headers, body)
    return Exchange.of(request, _response(answer))


def _response(answer: Answer) -> Response:
    return Response(answer.status, tuple((k.lower(), v) for k, v in answer.headers), answer.body)
