"""JSON, quickly where orjson is there (`safepoint[proxy]`), and the same without it.

The rule: what the one can't read or write is left to the other: numbers that JSON does not know, half a surrogate pair.
"""

from __future__ import annotations

import importlib
import json
from typing import Any


def _fast() -> Any:
    try:
        return importlib.import_module("orjson")
    except ImportError:
        return None


_orjson: Any = _fast()


def loads(raw: bytes) -> Any:
    """The value. Raises ValueError (and RecursionError)."""
    if _orjson is not None:
        try:
            return _orjson.loads(raw)
        except ValueError:
            pass
    return json.loads(raw)


def dumps(value: Any) -> bytes:
    """As UTF-8, without spaces."""
    if _orjson is not None:
        try:
            return bytes(_orjson.dumps(value))
        except (TypeError, ValueError):
            pass
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
