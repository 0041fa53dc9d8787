"""Endpoints behind policy models: can a vLLM there be paused, and does an engine's shim stand before it?

Facts about vLLM: `/version` answers on every server; `/is_paused` and the other control routes exist only with
VLLM_SERVER_DEV_MODE=1, and from 0.17 on.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Final, cast
from urllib.parse import urlsplit

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.doctor.finding import Finding, Severity
from coordinator.wire.terms import Role

TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 65_536
# Status and body of a GET; status 0: nobody answered.
Get = Callable[[str], tuple[int, bytes]]


def get(url: str) -> tuple[int, bytes]:
    """GET without any proxy, within 2 s."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, ValueError):
        return 0, b""


def engines(answer: pb.GetTopologyResponse, fetch: Get = get) -> Iterator[Finding]:
    """One finding for each endpoint that a policy model uses."""
    people = [info.capabilities for info in answer.participants]
    shims = any(who.role == int(Role.ENGINE) for who in people)
    seen: set[str] = set()
    for who in people:
        if who.role != int(Role.POLICY_MODEL):
            continue
        for url in who.upstream_endpoints:
            base = _base(url)
            if base and base not in seen:
                seen.add(base)
                yield from _endpoint(who.participant_id, base, shims, fetch)


def _endpoint(model: str, base: str, shims: bool, fetch: Get) -> Iterator[Finding]:
    status, body = fetch(base + "/version")
    if status == 0:
        yield Finding(
            "engines", Severity.NOTE, base, f"Nobody answers here at {base}, which `{model}` uses.",
            "Nothing, if only that model server's machine can reach it.",
        )  # fmt: skip
        return
    version = _vllm_version(body) if status == 200 else ""
    if not version:
        yield Finding("engines", Severity.OK, base, f"`{model}` uses an endpoint that is no vLLM")
        return
    control, _ = fetch(base + "/is_paused")
    if control == 404:
        yield Finding(
            "engines", Severity.WARNING if shims else Severity.NOTE, base,
            f"vLLM {version} at {base} has no control routes: it cannot be frozen, and a generation in flight is made "
            "again after a restart.",
            "Start it with VLLM_SERVER_DEV_MODE=1, and put a shim before it: `safepoint shim --vllm LISTEN=UPSTREAM`.",
        )  # fmt: skip
    elif control == 200 and not shims:
        yield Finding(
            "engines", Severity.NOTE, base,
            f"vLLM {version} at {base} can be frozen and has no shim: a generation in flight is made again after a "
            "restart.",
            "`safepoint shim --vllm LISTEN=UPSTREAM --name engine-0`, and point the model server at LISTEN.",
        )  # fmt: skip
    else:
        yield Finding("engines", Severity.OK, base, f"vLLM {version} can be frozen")


def _vllm_version(body: bytes) -> str:
    try:
        loaded: Any = json.loads(body)
    except ValueError:
        return ""
    found: Any = cast("dict[str, Any]", loaded).get("version") if isinstance(loaded, dict) else None
    return found if isinstance(found, str) else ""


def _base(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return f"{parts.scheme}://{parts.netloc}" if parts.scheme in ("http", "https") and parts.netloc else ""
