"""The containers of the standard library.

The one rule: mutable ones are made empty and filled later, so that they may contain themselves, and they are filled past
anything that a subclass overrides; `objects.py` uses the same functions for those.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, Final

from participant_shims.gate.state.graph import Decoder, Encode, Encoder, Entry, Handler, Malformed, hashed


def _list(encoder: Encoder, obj: list[Any], number: int) -> Entry:
    return ["l", encoder.items(obj, number)]


def _tuple(encoder: Encoder, obj: tuple[Any, ...], number: int) -> Entry:
    return ["t", encoder.items(obj, number)]


def in_order_of_insertion(members: set[Any] | frozenset[Any]) -> list[Any]:
    """An order of insertion that gives the same order of iteration, where one is found.

    Members whose hashes collide come in the order of insertion, or in reverse. (Texts are hashed with another salt in
    each process, so no program can rely on theirs.)
    """
    listed = list(members)
    backwards = listed[::-1]
    return backwards if list(set(listed)) != listed and list(set(backwards)) == listed else listed


def _set(encoder: Encoder, obj: set[Any], number: int) -> Entry:
    return ["st", encoder.items(in_order_of_insertion(obj), number)]


def _frozenset(encoder: Encoder, obj: frozenset[Any], number: int) -> Entry:
    return ["fs", encoder.items(in_order_of_insertion(obj), number)]


def _deque(encoder: Encoder, obj: deque[Any], number: int) -> Entry:
    return ["dq", obj.maxlen, encoder.items(obj, number)]


def _dict(encoder: Encoder, obj: dict[Any, Any], number: int) -> Entry:
    return ["d", encoder.pairs(obj.items(), number)]


def _ordered(encoder: Encoder, obj: OrderedDict[Any, Any], number: int) -> Entry:
    if vars(obj):
        raise encoder.refuse(number, obj, "has attributes of its own")
    return ["od", encoder.pairs(obj.items(), number)]


def _counter(encoder: Encoder, obj: Counter[Any], number: int) -> Entry:
    if vars(obj):
        raise encoder.refuse(number, obj, "has attributes of its own")
    return ["ct", encoder.pairs(obj.items(), number)]


def _defaultdict(encoder: Encoder, obj: defaultdict[Any, Any], number: int) -> Entry:
    return [
        "dd",
        encoder.attribute(obj.default_factory, number, "default_factory"),
        encoder.pairs(obj.items(), number),
    ]


def _namespace(encoder: Encoder, obj: types.SimpleNamespace, number: int) -> Entry:
    return ["ns", encoder.named(vars(obj), number)]


def fill_mapping(decoder: Decoder, values: Any, target: dict[Any, Any]) -> None:
    """Put alternating keys and values into `target`, past anything that its class overrides."""
    pairs = decoder.pairs(values)
    hashed(key for key, _ in pairs)
    put: Any = OrderedDict[Any, Any].__setitem__ if isinstance(target, OrderedDict) else dict[Any, Any].__setitem__
    for key, value in pairs:
        put(target, key, value)
    if len(target) != len(pairs) or not all(key in target for key, _ in pairs if type(key) is not str):
        raise Malformed("a key occurs twice, or does not find itself")


def fill_set(decoder: Decoder, values: Any, target: set[Any]) -> None:
    """Put values into `target`, past anything that its class overrides."""
    listed = hashed(decoder.all(values))
    set[Any].update(target, listed)
    if len(target) != len(listed):
        raise Malformed("a set member occurs twice")


def _fill_namespace(decoder: Decoder, entry: Entry, target: types.SimpleNamespace) -> None:
    vars(target).update(decoder.named(entry[1]))


def _fill_defaultdict(decoder: Decoder, entry: Entry, target: defaultdict[Any, Any]) -> None:
    factory = decoder.get(entry[1])
    if factory is not None and not callable(factory):
        raise Malformed("bad default factory")
    target.default_factory = factory
    fill_mapping(decoder, entry[2], target)


def _read_deque(decoder: Decoder, entry: Entry) -> deque[Any]:
    if entry[1] is not None and type(entry[1]) is not int:
        raise Malformed("bad deque")
    return deque(maxlen=entry[1])


def _read_frozenset(decoder: Decoder, entry: Entry) -> frozenset[Any]:
    listed = hashed(decoder.all(entry[1]))
    made = frozenset(listed)
    if len(made) != len(listed):
        raise Malformed("a set member occurs twice")
    return made


EXACT: Final[dict[type, Encode]] = {
    list: _list,
    tuple: _tuple,
    set: _set,
    frozenset: _frozenset,
    dict: _dict,
    deque: _deque,
    OrderedDict: _ordered,
    defaultdict: _defaultdict,
    Counter: _counter,
    types.SimpleNamespace: _namespace,
}

# Untyped on purpose: OrderedDict[K, V]() would leave an attribute `__orig_class__` on the instance.
_ORDERED: Final[Any] = OrderedDict
_COUNTED: Final[Any] = Counter
_DEFAULTS: Final[Any] = defaultdict

HANDLERS: Final[dict[str, Handler]] = {
    "l": Handler(2, lambda d, e: [], lambda d, e, o: o.extend(d.all(e[1]))),
    "t": Handler(2, lambda d, e: tuple(d.all(e[1])), deferred=True),
    "st": Handler(2, lambda d, e: set[Any](), fill_late=lambda d, e, o: fill_set(d, e[1], o)),
    "fs": Handler(2, _read_frozenset, deferred=True),
    "d": Handler(2, lambda d, e: {}, fill_late=lambda d, e, o: fill_mapping(d, e[1], o)),
    "od": Handler(2, lambda d, e: _ORDERED(), fill_late=lambda d, e, o: fill_mapping(d, e[1], o)),
    "ct": Handler(2, lambda d, e: _COUNTED(), fill_late=lambda d, e, o: fill_mapping(d, e[1], o)),
    "dd": Handler(3, lambda d, e: _DEFAULTS(None), fill_late=_fill_defaultdict),
    "dq": Handler(3, _read_deque, lambda d, e, o: o.extend(d.all(e[2]))),
    "ns": Handler(2, lambda d, e: types.SimpleNamespace(), _fill_namespace),
}
