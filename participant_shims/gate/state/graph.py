"""An object graph as a flat table, so that shared references and cycles survive and depth is no limit.

The one rule: this module knows no type. A handler per type turns an object into one entry of the table (encode) or an
entry into an object (decode); what it sees of other objects is their number.

    document  {"v": 1, "root": V, "objects": [[TAG, ...], ...]}
    V         null, true, 3, 2.5, "text", or [n]: object n of the table; [-n]: object n-1 of the outer table

Decoding makes the shells of mutable objects first, then the immutable ones with what they are made of, then fills the
shells: instances before hashed containers, so that a hash sees a whole object. Nothing outside the new objects changes.
"""

from __future__ import annotations

import base64
import bisect
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from participant_shims.gate.state.scope import Scope
from participant_shims.gate.state.shapes import a_list, class_of, exact_dict, exact_list

VERSION: Final = 1
# Beyond 53 bits a JSON reader in another language would round, so larger integers are written as hexadecimal text.
INLINE_INT: Final = 2**53
INLINE_TEXT: Final = 96  # longer texts get a number, so that a shared one is written once
COMPRESS_FROM: Final = 512  # bytes
_INLINE_TYPES: Final = frozenset({type(None), bool, int, float, str})
_TEXTS: Final = frozenset({str})

Entry = list[Any]


class Unencodable(Exception):
    """A value that can't be saved. `path` says where it is, `type_name` what, `why` why not."""

    def __init__(self, path: str, type_name: str, why: str = "") -> None:
        super().__init__(f"{path}: {type_name}" + (f" ({why})" if why else ""))
        self.path = path
        self.type_name = type_name
        self.why = why


class Malformed(Exception):
    """A document that can't be decoded. Nothing was changed."""


class Unavailable(Malformed):
    """A sound document that names something which this server does not have (a class not loaded, a place not set up)."""


# Stands in an outer table for what this server does not have.
ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one document may hold."""

    objects: int = 2_000_000
    values: int = 20_000_000
    binary_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Handler:
    """How entries of one tag are decoded.

    `build(decoder, entry)` makes the object. When `deferred`, it may use other objects; otherwise it makes a shell that
    `fill(decoder, entry, shell)`, and after all of those `fill_late`, complete.
    """

    arity: int  # length of the entry, tag included
    build: Callable[[Decoder, Entry], Any]
    fill: Callable[[Decoder, Entry, Any], None] | None = None
    fill_late: Callable[[Decoder, Entry, Any], None] | None = None
    deferred: bool = False


Encode = Callable[["Encoder", Any, int], Entry]


def type_name(value: object) -> str:
    """Module and qualified name of the type of `value`, builtins without module."""
    cls = class_of(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def inline_text(text: str) -> bool:
    """Whether JSON brings `text` back unchanged: it has no lone surrogates (two of them would merge into one)."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def inline_values(values: Sequence[Any]) -> bool:
    """Whether all of `values` can stand in JSON as they are. Fast: most containers hold texts or numbers only."""
    kinds = set(map(type, values))
    if not kinds <= _INLINE_TYPES:
        return False
    if str in kinds and not inline_text("".join(values if kinds <= _TEXTS else (v for v in values if type(v) is str))):
        return False
    if int in kinds and any(type(v) is int and not -INLINE_INT <= v <= INLINE_INT for v in values):
        return False
    return not (float in kinds and any(type(v) is float and not math.isfinite(v) for v in values))


def pack_bytes(data: bytes) -> list[Any]:
    """`[length, base64]`, or `[length, base64, 1]` when compressed, whichever is shorter."""
    if len(data) >= COMPRESS_FROM:
        packed = zlib.compress(data, 1)
        if len(packed) < len(data) * 7 // 8:
            return [len(data), base64.b64encode(packed).decode("ascii"), 1]
    return [len(data), base64.b64encode(data).decode("ascii")]


@dataclass(slots=True)
class Encoder:
    """One document in the making. `outer` maps ids of objects that another document holds to their numbers there."""

    scope: Scope
    exact: Mapping[type, Encode]
    other: Encode
    limits: Limits = field(default_factory=Limits)
    outer: Mapping[int, int] = field(default_factory=dict[int, int])
    root_name: str = "value"
    root_is_named: bool = False  # the keys of the root are names of attributes, which matters to messages only
    objects: list[Entry] = field(default_factory=list[Entry])
    memo: dict[int, int] = field(default_factory=dict[int, int])
    used: dict[int, int] = field(default_factory=dict[int, int])  # what of `outer` the document refers to
    # Address ranges of array buffers, ascending and disjoint: arrays that share memory would come back separate.
    buffers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    kept: list[Any] = field(default_factory=list[Any])  # by number; also keeps ids from being reused
    origins: list[tuple[int, str | None, Any]] = field(default_factory=list[tuple[int, str | None, Any]])
    _pending: deque[int] = field(default_factory=deque[int])
    _values: int = 0

    def document(self, root: object) -> dict[str, Any]:
        """The document of `root`. Raises Unencodable."""
        value = self.value(root, -1, None, None)
        while self._pending:
            number = self._pending.popleft()
            obj = self.kept[number]
            handler = self.exact.get(class_of(obj), self.other)
            self.objects[number] = handler(self, obj, number)
        return {"v": VERSION, "root": value, "objects": self.objects}

    def value(self, obj: Any, owner: int, attribute: str | None, key: Any) -> Any:
        """What stands for `obj` in an entry of object `owner`; `attribute` or else `key` says where, for messages."""
        kind = class_of(obj)
        if obj is None or kind is bool:
            return obj
        if kind is int and -INLINE_INT <= obj <= INLINE_INT:
            return obj
        if kind is float and math.isfinite(obj):
            return obj
        if kind is str and len(obj) <= INLINE_TEXT and inline_text(obj):
            return obj
        number = self.memo.get(id(obj))
        if number is None:
            outer = self.outer.get(id(obj))
            if outer is not None:
                self.used[id(obj)] = outer
                return [-outer - 1]
            number = len(self.kept)
            if number >= self.limits.objects:
                raise self.refuse(owner, obj, f"more than {self.limits.objects:,} objects")
            self.memo[id(obj)] = number
            self.kept.append(obj)
            self.origins.append((owner, attribute, key))
            self.objects.append([])
            self._pending.append(number)
        return [number]

    def attribute(self, obj: Any, owner: int, name: str) -> Any:
        """The value that stands for attribute `name` of object `owner`."""
        return self.value(obj, owner, name, None)

    def items(self, values: Iterable[Any], owner: int) -> list[Any]:
        """The values of a sequence."""
        listed: list[Any] = values if a_list(values) else list(values)
        self._count(owner, len(listed))
        if inline_values(listed):
            return list(listed)
        return [self.value(item, owner, None, index) for index, item in enumerate(listed)]

    def pairs(self, mapping: Iterable[tuple[Any, Any]], owner: int) -> list[Any]:
        """Keys and values of a mapping, alternating, in order."""
        out: list[Any] = []
        for key, item in mapping:
            out.append(self.value(key, owner, None, key))
            out.append(self.value(item, owner, None, key))
        self._count(owner, len(out))
        return out

    def named(self, mapping: Mapping[str, Any], owner: int) -> list[Any]:
        """Names and values of attributes, alternating, in order."""
        out: list[Any] = []
        for name, item in mapping.items():
            if type(name) is not str:
                raise self.refuse(owner, mapping, f"attribute name {name!r} is no text")
            out.append(self.value(name, owner, name, None))
            out.append(self.value(item, owner, name, None))
        self._count(owner, len(out))
        return out

    def path(self, number: int) -> str:
        """Where object `number` is, e.g. `session['sandbox'].process`."""
        parts: list[str] = []
        while number >= 0 and len(parts) < 40:
            owner, attribute, key = self.origins[number]
            if attribute is None and owner == 0 and self.root_is_named and type(key) is str:
                attribute = key
            if attribute is not None:
                parts.append(f".{attribute}")
            elif owner >= 0:
                text = repr(key) if type(key) in _INLINE_TYPES else f"<{type_name(key)}>"
                parts.append(f"[{text[:60]}]")
            number = owner
        return self.root_name + "".join(reversed(parts))

    def refuse(self, number: int, obj: object, why: str = "") -> Unencodable:
        """The error for object `number`, or something in it; for `raise encoder.refuse(...)`."""
        return Unencodable(self.path(number), type_name(obj), why)

    def buffer(self, number: int, obj: object, start: int, size: int) -> None:
        """Note the memory of an array; raises Unencodable when it overlaps with that of another one."""
        if not size:
            return
        at = bisect.bisect(self.buffers, (start, start + size))
        overlaps = (at and self.buffers[at - 1][1] > start) or (
            at < len(self.buffers) and self.buffers[at][0] < start + size
        )
        if overlaps:
            raise self.refuse(number, obj, "shares its memory with another array")
        self.buffers.insert(at, (start, start + size))

    def _count(self, owner: int, values: int) -> None:
        self._values += values
        if self._values > self.limits.values:
            raise self.refuse(owner, self.kept[owner], f"more than {self.limits.values:,} values")


class Missing(Exception):
    """Objects that have to be made first; internal to decoding."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


_UNSET: Final = object()


@dataclass(slots=True)
class Decoder:
    """One document being read. `outer` are the objects of the document that `[-n]` refers to."""

    scope: Scope
    handlers: Mapping[str, Handler]
    limits: Limits = field(default_factory=Limits)
    outer: Sequence[Any] = ()
    built: list[Any] = field(default_factory=list[Any])
    _binary: int = 0

    def document(self, document: Any) -> Any:
        """The root object. Raises Malformed, whatever the document is; nothing but new objects was touched."""
        try:
            return self._document(document)
        except Malformed:
            raise
        except RecursionError:
            raise Malformed("objects are nested too deeply") from None
        except Exception as e:  # whatever a hostile entry provokes in a constructor or a hash is one kind of failure
            raise Malformed(f"{type(e).__name__}: {str(e)[:200]}") from e

    def _document(self, document: Any) -> Any:
        if not exact_dict(document) or set(document) != {"v", "root", "objects"}:
            raise Malformed("not a session document")
        if document["v"] != VERSION or type(document["v"]) is not int:
            raise Malformed(f"document version {str(document['v'])[:20]} is not {VERSION}")
        objects = document["objects"]
        if not exact_list(objects) or len(objects) > self.limits.objects:
            raise Malformed("object table missing or too long")
        values = 0
        chosen: list[Handler] = []
        for number, entry in enumerate(objects):
            handler = self.handlers.get(entry[0]) if exact_list(entry) and entry and type(entry[0]) is str else None
            if handler is None:
                raise Malformed(f"object {number} is of no known kind")
            if len(entry) != handler.arity:
                raise Malformed(f"object {number} ({entry[0]}) has {len(entry)} fields")
            values += sum(len(part) for part in entry if exact_list(part))
            chosen.append(handler)
        if values > self.limits.values:
            raise Malformed("too many values")
        self.built = [_UNSET] * len(objects)
        for number, handler in enumerate(chosen):
            if not handler.deferred:
                self.built[number] = handler.build(self, objects[number])
        for number, handler in enumerate(chosen):
            if handler.deferred:
                self._build(number, objects, chosen)
        for number, handler in enumerate(chosen):
            if handler.fill is not None:
                handler.fill(self, objects[number], self.built[number])
        for number, handler in enumerate(chosen):
            if handler.fill_late is not None:
                handler.fill_late(self, objects[number], self.built[number])
        return self.get(document["root"])

    def _build(self, first: int, objects: list[Entry], chosen: list[Handler]) -> None:
        stack = [first]
        opened: set[int] = set()
        while stack:
            number = stack[-1]
            if self.built[number] is not _UNSET:
                stack.pop()
                continue
            try:
                self.built[number] = chosen[number].build(self, objects[number])
                stack.pop()
            except Missing as missing:
                opened.add(number)
                if not opened.isdisjoint(missing.numbers):
                    raise Malformed(f"object {number} contains itself") from None
                stack.extend(missing.numbers)

    def get(self, value: Any) -> Any:
        """The object that a value of an entry stands for."""
        if not exact_list(value):
            if type(value) not in _INLINE_TYPES:
                raise Malformed("a value is neither plain nor a reference")
            return value
        if len(value) != 1 or type(value[0]) is not int:
            raise Malformed("bad reference")
        number = value[0]
        if number < 0:
            if -number > len(self.outer):
                raise Malformed("reference to no outer object")
            shared = self.outer[-number - 1]
            if shared is ABSENT:
                raise Unavailable("it refers to something that this server has not set up")
            return shared
        if number >= len(self.built):
            raise Malformed("reference to no object")
        found = self.built[number]
        if found is _UNSET:
            raise Missing([number])
        return found

    def all(self, values: Any) -> list[Any]:
        """The objects that a list of values stands for."""
        if not exact_list(values):
            raise Malformed("a list of values is missing")
        if set(map(type, values)) <= _INLINE_TYPES:
            return list(values)
        missing: list[int] = []
        out: list[Any] = []
        for value in values:
            try:
                out.append(self.get(value))
            except Missing as e:
                missing += e.numbers
        if missing:
            raise Missing(missing)
        return out

    def pairs(self, values: Any) -> list[tuple[Any, Any]]:
        """Keys and values that alternate in `values`."""
        listed = self.all(values)
        if len(listed) % 2:
            raise Malformed("a key without a value")
        return list(zip(listed[::2], listed[1::2], strict=True))

    def named(self, values: Any) -> dict[str, Any]:
        """Attribute names and values that alternate in `values`."""
        out: dict[str, Any] = {}
        for name, value in self.pairs(values):
            if type(name) is not str or name in out:
                raise Malformed("bad attribute name")
            out[name] = value
        return out

    def binary(self, packed: Any) -> bytes:
        """The bytes that `pack_bytes` packed; never makes more than was declared and allowed."""
        if not exact_list(packed) or len(packed) not in (2, 3) or type(packed[1]) is not str:
            raise Malformed("bad binary")
        size = packed[0]
        if type(size) is not int or size < 0:
            raise Malformed("bad binary size")
        self._binary += size
        if self._binary > self.limits.binary_bytes:
            raise Malformed(f"more than {self.limits.binary_bytes:,} bytes of binary data")
        data = base64.b64decode(packed[1], validate=True)
        if len(packed) == 3:
            if packed[2] != 1:
                raise Malformed("unknown compression")
            inflater = zlib.decompressobj()
            data = inflater.decompress(data, size + 1)
            if not inflater.eof or inflater.unused_data:
                raise Malformed("bad compressed data")
        if len(data) != size:
            raise Malformed("binary data has another length than declared")
        return data


def hashed(keys: Iterable[Any]) -> list[Any]:
    """`keys`, checked so that filling a dict or set with them takes linear time.

    Numbers are hashed without salt, so a hostile document could otherwise make every key collide.
    """
    listed = list(keys)
    if set(map(type, listed)) <= {str}:
        return listed
    seen: dict[int, int] = {}
    for key in listed:
        if type(key) is not str:
            code = hash(key)
            seen[code] = seen.get(code, 0) + 1
            if seen[code] > 1000:
                raise Malformed("too many keys with one hash")
    return listed


__all__ = [
    "ABSENT",
    "VERSION",
    "Decoder",
    "Encode",
    "Encoder",
    "Entry",
    "Handler",
    "Limits",
    "Malformed",
    "Missing",
    "Unavailable",
    "Unencodable",
    "hashed",
    "inline_text",
    "pack_bytes",
    "type_name",
]
