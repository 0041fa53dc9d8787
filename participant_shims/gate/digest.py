"""Digests of requests: what decides whether a call is the same call made again.

PURE. Key order of a JSON body and of cookies do not count; everything else does. A number is compared as it is written
(1 and 1.0 differ): a digest that is too strict makes a call run again, one that is too lax answers the wrong call.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any


def canonical(body: bytes) -> bytes:
    """`body` with the keys of its JSON in order and without white space; unchanged when it is not JSON.

    By orjson where the server has it (a tenth of the time): a server's two lives share an environment.
    """
    if body[:1] not in (b"{", b"["):
        return body
    orjson: Any = sys.modules.get("orjson")
    try:
        if orjson is not None:
            return bytes(orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS))
        return dump(json.loads(body))
    except (ValueError, TypeError, RecursionError):
        return body


def dump(value: Any) -> bytes:
    """Canonical JSON of a value. Raises TypeError for what JSON cannot say."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def body_sha256(body: bytes) -> str:
    """SHA-256 hex of a row, whatever the order of its keys. By the standard library alone: it is in ledgers."""
    try:
        return hashlib.sha256(dump(json.loads(body))).hexdigest()
    except (ValueError, RecursionError):
        return hashlib.sha256(body).hexdigest()


def request_digest(
    method: str, target: str, path: str, query: str, body: bytes, cookies: Iterable[tuple[str, str]]
) -> str:
    """SHA-256 hex over one request. `target`: name of the server, or empty at the server itself; `body`: canonical."""
    parts: list[bytes] = []
    for part in (method.upper(), target, path, query):
        raw = part.encode("utf-8", "surrogatepass")
        parts.append(b"%d:%b" % (len(raw), raw))
    for name, value in sorted(cookies):
        raw = f"{name}={value}".encode("utf-8", "surrogatepass")
        parts.append(b"c%d:%b" % (len(raw), raw))
    parts += (b"b%d:" % len(body), body)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def cookies_of_header(value: str) -> list[tuple[str, str]]:
    """The pairs of a Cookie header."""
    pairs: list[tuple[str, str]] = []
    for part in value.split(";"):
        name, sep, text = part.strip().partition("=")
        if sep:
            pairs.append((name.strip(), text.strip()))
    return pairs
