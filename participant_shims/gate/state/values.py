"""Value types of the standard library, and locks.

The one rule: an exact round trip, of the type, the order, the identity and every bit, or Unencodable. Types are matched
exactly; instances of subclasses are `objects.py`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import random
import re
import struct
import sys
import threading
import uuid
import zoneinfo
from array import array
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, cast

from participant_shims.gate.state.graph import (
    Decoder,
    Encode,
    Encoder,
    Entry,
    Handler,
    Malformed,
    inline_text,
    pack_bytes,
)
from participant_shims.gate.state.scope import BUILTIN_TYPES
from participant_shims.gate.state.shapes import exact_list

# Parsing a pattern takes time that grows faster than its length.
MAX_PATTERN: Final = 4096
_COUNT: Final = re.compile(r"count\((-?[0-9]{1,300})(?:, (-?[0-9]{1,300}))?\)")
_PATHS: Final = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)


def _text(encoder: Encoder, obj: str, number: int) -> Entry:
    if inline_text(obj):
        return ["s", obj]
    return ["u", pack_bytes(obj.encode("utf-8", "surrogatepass"))]


def _float(encoder: Encoder, obj: float, number: int) -> Entry:
    return ["f", struct.pack(">d", obj).hex()]


def _read_float(text: Any) -> float:
    if type(text) is not str or len(text) != 16:
        raise Malformed("bad float")
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _int(encoder: Encoder, obj: int, number: int) -> Entry:
    return ["i", f"{obj:x}"]


def _read_int(text: Any) -> int:
    if type(text) is not str:
        raise Malformed("bad integer")
    return int(text, 16)


def _range(encoder: Encoder, obj: range, number: int) -> Entry:
    return ["rg", encoder.items([obj.start, obj.stop, obj.step], number)]


def _slice(encoder: Encoder, obj: slice, number: int) -> Entry:
    return ["sl", encoder.items([obj.start, obj.stop, obj.step], number)]


def _datetime(encoder: Encoder, obj: datetime, number: int) -> Entry:
    parts = [obj.year, obj.month, obj.day, obj.hour, obj.minute, obj.second, obj.microsecond, obj.fold]
    return ["dt", parts, encoder.attribute(obj.tzinfo, number, "tzinfo")]


def _time(encoder: Encoder, obj: time, number: int) -> Entry:
    return [
        "tm",
        [obj.hour, obj.minute, obj.second, obj.microsecond, obj.fold],
        encoder.attribute(obj.tzinfo, number, "tzinfo"),
    ]


def _integers(values: Any, count: int) -> list[int]:
    if not exact_list(values) or len(values) != count or not all(type(v) is int for v in values):
        raise Malformed("integers are missing")
    return values


def _read_datetime(decoder: Decoder, entry: Entry) -> datetime:
    *parts, fold = _integers(entry[1], 8)
    return datetime(*parts, tzinfo=decoder.get(entry[2]), fold=fold)  # type: ignore[arg-type, misc]


def _read_time(decoder: Decoder, entry: Entry) -> time:
    hour, minute, second, micro, fold = _integers(entry[1], 5)
    return time(hour, minute, second, micro, tzinfo=decoder.get(entry[2]), fold=fold)


def _timezone(encoder: Encoder, obj: timezone, number: int) -> Entry:
    # __getinitargs__ is the one place where the standard library says whether the name was given or derived.
    init = cast("tuple[Any, ...]", obj.__getinitargs__())  # type: ignore[attr-defined]
    return ["tz", encoder.items(list(init), number)]


def _read_timezone(decoder: Decoder, entry: Entry) -> timezone:
    init = decoder.all(entry[1])
    if not init or len(init) > 2:
        raise Malformed("bad time zone")
    # timezone(0) without a name is the singleton utc; everything else compares by value.
    return timezone(*init)


def _zoneinfo(encoder: Encoder, obj: zoneinfo.ZoneInfo, number: int) -> Entry:
    if not obj.key:
        raise encoder.refuse(number, obj, "has no key")
    return ["zi", obj.key]


def _path(encoder: Encoder, obj: pathlib.PurePath, number: int) -> Entry:
    return ["p", type(obj).__name__, encoder.value(str(obj), number, None, 0)]


def _read_path(decoder: Decoder, entry: Entry) -> pathlib.PurePath:
    kinds = {k.__name__: k for k in _PATHS}
    text = decoder.get(entry[2])
    if type(entry[1]) is not str or entry[1] not in kinds or type(text) is not str:
        raise Malformed("bad path")
    return kinds[entry[1]](text)


def _random(encoder: Encoder, obj: random.Random, number: int) -> Entry:
    if vars(obj).keys() - {"gauss_next"}:
        raise encoder.refuse(number, obj, "has attributes of its own")
    version, words, gauss = obj.getstate()
    packed = array("I", words)
    if sys.byteorder == "big":
        packed.byteswap()
    return ["rn", version, pack_bytes(packed.tobytes()), encoder.attribute(gauss, number, "gauss_next")]


def _read_random(decoder: Decoder, entry: Entry) -> random.Random:
    words = array("I", decoder.binary(entry[2]))
    if sys.byteorder == "big":
        words.byteswap()
    gauss = decoder.get(entry[3])
    if gauss is not None and type(gauss) is not float:
        raise Malformed("bad random state")
    made = random.Random(0)  # a seed, so that no entropy is spent
    made.setstate((entry[1], tuple(words), gauss))
    return made


def _count(encoder: Encoder, obj: itertools.count[Any], number: int) -> Entry:
    match = _COUNT.fullmatch(repr(obj))
    if match is None:
        raise encoder.refuse(number, obj, "counts something other than integers")
    return ["ic", encoder.items([int(match[1]), int(match[2] or 1)], number)]


def _pattern(encoder: Encoder, obj: re.Pattern[Any], number: int) -> Entry:
    if len(obj.pattern) > MAX_PATTERN:
        raise encoder.refuse(number, obj, f"is longer than {MAX_PATTERN} characters")
    return ["re", encoder.attribute(obj.pattern, number, "pattern"), obj.flags]


def _read_pattern(decoder: Decoder, entry: Entry) -> re.Pattern[Any]:
    pattern, flags = decoder.get(entry[1]), entry[2]
    if type(pattern) not in (str, bytes) or len(pattern) > MAX_PATTERN or type(flags) is not int:
        raise Malformed("bad pattern")
    return re.compile(pattern, flags)


# -- locks: one that nobody holds or waits for is nothing but its kind ------------------------------------------------


def _lock(encoder: Encoder, obj: Any, number: int) -> Entry:
    if isinstance(obj, asyncio.Event | threading.Event):
        waiting = getattr(obj, "_waiters", None) if isinstance(obj, asyncio.Event) else None
        if waiting:
            raise encoder.refuse(number, obj, "somebody waits for it")
        return ["lk", _LOCK_NAMES[type(obj)], int(obj.is_set())]
    if isinstance(obj, asyncio.Semaphore):
        if getattr(obj, "_waiters", None):
            raise encoder.refuse(number, obj, "somebody waits for it")
        return ["lk", _LOCK_NAMES[type(obj)], int(cast(Any, obj)._value)]
    held = obj.locked() if hasattr(obj, "locked") else "count=0" not in repr(obj)
    if held:
        raise encoder.refuse(number, obj, "is held")
    return ["lk", _LOCK_NAMES[type(obj)], 0]


_LOCKS: Final[dict[str, Any]] = {
    "asyncio.Lock": asyncio.Lock,
    "asyncio.Event": asyncio.Event,
    "asyncio.Semaphore": asyncio.Semaphore,
    "threading.Lock": threading.Lock,
    "threading.RLock": threading.RLock,
    "threading.Event": threading.Event,
}
_LOCK_NAMES: Final[dict[type, str]] = {
    (type(made()) if name in ("threading.Lock", "threading.RLock") else made): name for name, made in _LOCKS.items()
}


def _read_lock(decoder: Decoder, entry: Entry) -> Any:
    name, value = entry[1], entry[2]
    if type(name) is not str or name not in _LOCKS or type(value) is not int or value < 0:
        raise Malformed("bad lock")
    if name == "asyncio.Semaphore":
        return asyncio.Semaphore(value)
    made = _LOCKS[name]()
    if value and name.endswith("Event"):
        made.set()
    return made


def _builtin_type(decoder: Decoder, entry: Entry) -> type:
    found: type | None = cast("dict[str, type]", BUILTIN_TYPES).get(entry[1]) if type(entry[1]) is str else None
    if found is None:
        raise Malformed("unknown built-in type")
    return found


EXACT: Final[dict[type, Encode]] = {
    str: _text,
    int: _int,
    float: _float,
    complex: lambda e, o, n: ["c", struct.pack(">d", o.real).hex(), struct.pack(">d", o.imag).hex()],
    bytes: lambda e, o, n: ["b", pack_bytes(o)],
    bytearray: lambda e, o, n: ["ba", pack_bytes(bytes(o))],
    range: _range,
    slice: _slice,
    datetime: _datetime,
    date: lambda e, o, n: ["da", [o.year, o.month, o.day]],
    time: _time,
    timedelta: lambda e, o, n: ["td", [o.days, o.seconds, o.microseconds]],
    timezone: _timezone,
    zoneinfo.ZoneInfo: _zoneinfo,
    Decimal: lambda e, o, n: ["de", str(o)],
    Fraction: lambda e, o, n: ["fr", e.items([o.numerator, o.denominator], n)],
    uuid.UUID: lambda e, o, n: ["uu", o.hex],
    random.Random: _random,
    random.SystemRandom: lambda e, o, n: ["sr"],
    itertools.count: _count,
    re.Pattern: _pattern,
    type(Ellipsis): lambda e, o, n: ["el"],
    type(NotImplemented): lambda e, o, n: ["ni"],
    **dict.fromkeys(_PATHS, _path),
    **dict.fromkeys(_LOCK_NAMES, _lock),
}


def _uuid(text: str) -> uuid.UUID:
    return uuid.UUID(hex=text)


def _texts(build: Callable[[str], Any]) -> Handler:
    def read(decoder: Decoder, entry: Entry) -> Any:
        if type(entry[1]) is not str or len(entry[1]) > 100_000:
            raise Malformed("text is missing")
        return build(entry[1])

    return Handler(2, read)


HANDLERS: Final[dict[str, Handler]] = {
    "s": Handler(2, lambda d, e: e[1] if type(e[1]) is str else _bad()),
    "u": Handler(2, lambda d, e: d.binary(e[1]).decode("utf-8", "surrogatepass")),
    "f": Handler(2, lambda d, e: _read_float(e[1])),
    "i": Handler(2, lambda d, e: _read_int(e[1])),
    "c": Handler(3, lambda d, e: complex(_read_float(e[1]), _read_float(e[2]))),
    "b": Handler(2, lambda d, e: d.binary(e[1])),
    "ba": Handler(2, lambda d, e: bytearray(d.binary(e[1]))),
    "rg": Handler(2, lambda d, e: range(*_three(d, e)), deferred=True),
    "sl": Handler(2, lambda d, e: slice(*_three(d, e)), deferred=True),
    "dt": Handler(3, _read_datetime, deferred=True),
    "da": Handler(2, lambda d, e: date(*_integers(e[1], 3))),
    "tm": Handler(3, _read_time, deferred=True),
    "td": Handler(2, lambda d, e: timedelta(*_integers(e[1], 3))),
    "tz": Handler(2, _read_timezone, deferred=True),
    "zi": _texts(zoneinfo.ZoneInfo),
    "de": _texts(Decimal),
    "fr": Handler(2, lambda d, e: Fraction(*d.all(e[1])), deferred=True),
    "uu": _texts(_uuid),
    "p": Handler(3, _read_path, deferred=True),
    "rn": Handler(4, _read_random, deferred=True),
    "sr": Handler(1, lambda d, e: random.SystemRandom()),
    "ic": Handler(2, lambda d, e: itertools.count(*d.all(e[1])), deferred=True),
    "re": Handler(3, _read_pattern, deferred=True),
    "el": Handler(1, lambda d, e: ...),
    "ni": Handler(1, lambda d, e: NotImplemented),
    "lk": Handler(3, _read_lock),
    "ty": Handler(2, _builtin_type),
}


def _three(decoder: Decoder, entry: Entry) -> list[Any]:
    parts = decoder.all(entry[1])
    if len(parts) != 3:
        raise Malformed("three values are missing")
    return parts


def _bad() -> str:
    raise Malformed("text is missing")
