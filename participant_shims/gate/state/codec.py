"""`gym-session-v1`: Python values as JSON text and back, without pickle.

The one rule: what comes back is what was there (types, order, identity and cycles within one document), or the value is
Unencodable and says where. Reading runs no code of any document: classes are looked up in loaded modules of the
allow-list, instances are made without their constructors, and a bad document raises Malformed and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from participant_shims.gate.state import arrays, containers, frames, objects, values
from participant_shims.gate.state.graph import (
    Decoder,
    Encode,
    Encoder,
    Handler,
    Limits,
    Malformed,
    Unavailable,
    Unencodable,
    type_name,
)
from participant_shims.gate.state.scope import Scope

SCHEMA: Final = "gym-session-v1"
MAX_TEXT: Final = 256 * 1024 * 1024  # characters of one document

_HANDLERS: Final[Mapping[str, Handler]] = (
    values.HANDLERS | containers.HANDLERS | objects.HANDLERS | arrays.HANDLERS | frames.HANDLERS
)
_exact: dict[tuple[bool, bool], dict[type, Encode]] = {}


def _encoders() -> dict[type, Encode]:
    key = (arrays.loaded(), frames.loaded())
    if key not in _exact:
        _exact[key] = values.EXACT | containers.EXACT | arrays.exact() | frames.exact()
    return _exact[key]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document, and the numbers of its objects by id. `kept` keeps the ids valid. `used`: what it refers to of the outer."""

    document: dict[str, Any]
    numbers: Mapping[int, int]
    kept: Sequence[Any]
    used: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A value, and the objects of its document by number."""

    value: Any
    objects: Sequence[Any]


def encode_with_numbers(
    value: object,
    scope: Scope,
    *,
    name: str = "session",
    outer: Mapping[int, int] | None = None,
    limits: Limits | None = None,
    named: bool = False,
) -> Encoded:
    """Encode `value`; objects whose id is in `outer` are written as references to that document.

    `name` begins the path in messages; `named` says that the keys of `value` are names of attributes. Raises Unencodable.
    """
    encoder = Encoder(
        _make_scope(scope), _encoders(), objects.encode_other, limits or Limits(), outer or {}, name, named
    )
    try:
        document = encoder.document(value)
    except Unencodable:
        raise
    except Exception as e:  # an object of the server that breaks when it is looked at can't be saved, and that is all
        raise Unencodable(name, type_name(value), f"{type(e).__name__} while it was read: {str(e)[:200]}") from e
    return Encoded(document, encoder.memo, encoder.kept, encoder.used)


def _make_scope(scope: Scope | None) -> Scope:
    return scope if scope is not None else Scope()


def encode(value: object, scope: Scope | None = None, *, name: str = "session") -> dict[str, Any]:
    """The document of `value`. Raises Unencodable with the path of what can't be saved."""
    return encode_with_numbers(value, _make_scope(scope), name=name).document


def decode_with_objects(
    document: Any, scope: Scope, *, outer: Sequence[Any] = (), limits: Limits | None = None
) -> Decoded:
    """Decode a document whose `[-n]` refer to `outer`. Raises Malformed; nothing was changed then."""
    decoder = Decoder(scope, _HANDLERS, limits or Limits(), outer)
    return Decoded(decoder.document(document), decoder.built)


def decode(document: Any, scope: Scope | None = None, *, limits: Limits | None = None) -> Any:
    """The value of a document. Raises Malformed; nothing was changed then."""
    return decode_with_objects(document, _make_scope(scope), limits=limits).value


def dumps(document: Any) -> str:
    """A document as one line of JSON text."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def loads(text: str | bytes) -> Any:
    """JSON text as a document, strictly. Raises Malformed."""
    if len(text) > MAX_TEXT:
        raise Malformed(f"longer than {MAX_TEXT:,} characters")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise Malformed(f"not JSON: {str(e)[:200]}") from e


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


__all__ = [
    "SCHEMA",
    "Decoded",
    "Encoded",
    "Limits",
    "Malformed",
    "Scope",
    "Unavailable",
    "Unencodable",
    "decode",
    "decode_with_objects",
    "dumps",
    "encode",
    "encode_with_numbers",
    "loads",
]
