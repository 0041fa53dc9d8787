"""Instances of the server's own classes, pydantic models, enums, functions and bound methods.

The one rule: no code of the class takes part. An instance is made by the `__new__` of its built-in base, its attributes
are put where they were: no constructor, no `__setstate__`, no validation, no property. So a class may only be used when
all that its instances are is in their attributes: a base class of unknown origin, or a `__del__` (which says that the
instance owns something outside), refuses.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from participant_shims.gate.state.containers import fill_mapping, fill_set
from participant_shims.gate.state.graph import Decoder, Encode, Encoder, Entry, Handler, Malformed, Unavailable
from participant_shims.gate.state.scope import BUILTIN_TYPES, Scope
from participant_shims.gate.state.shapes import a_class, class_of, exact_list

# The built-in types that own classes may derive from. Mutable ones are made empty and filled.
_MUTABLE: Final[dict[str, type]] = {t.__name__: t for t in (defaultdict, OrderedDict, Counter, dict, list, set, deque)}
_VALUES: Final[dict[str, type]] = {t.__name__: t for t in (tuple, str, int, float, bytes, frozenset)}
BASES: Final = frozenset({*_MUTABLE.values(), *_VALUES.values()})
_BUILTIN_NAMES: Final = {t: name for name, t in BUILTIN_TYPES.items()}
# Objects whose methods are written in C and may be kept as bound methods.
_METHOD_OWNERS: Final = (random.Random, list, dict, set, deque)


def _pydantic() -> Any:
    return sys.modules.get("pydantic")


def is_model(obj: object) -> bool:
    """Whether `obj` is an instance or subclass of pydantic's BaseModel."""
    base = getattr(_pydantic(), "BaseModel", None)
    return base is not None and (isinstance(obj, base) or (isinstance(obj, type) and issubclass(obj, base)))


def base_of(cls: type) -> tuple[str, bool]:
    """Name of the built-in type that `cls` derives from, empty when none, and whether its instances are made empty."""
    for base in cls.__mro__:
        if base in _MUTABLE.values():
            return base.__name__, True
        if base in _VALUES.values():
            return base.__name__, False
    return "", True


def objection(scope: Scope, cls: type) -> str:
    """Why instances of `cls` can't be saved as their attributes; empty when they can."""
    known = scope.verdicts.get(cls)
    if known is None:
        known = scope.verdicts[cls] = _objection(scope, cls)
    return known


def _objection(scope: Scope, cls: type) -> str:
    module = cls.__module__
    model = is_model(cls)
    if not (scope.allows_plain(module) or (scope.allows_data(module) and (model or _is_data(cls)))):
        return "is not a class of the server"
    if scope.name(cls) is None:
        return "its class can't be found again by name"
    if hasattr(cls, "__del__"):
        return "has a __del__: it owns something outside"
    for base in cls.__mro__:
        if not (model and base.__module__.startswith("pydantic.")) and scope.foreign(base, BASES):
            return f"derives from {base.__module__}.{base.__qualname__}"
    return ""


def _is_data(cls: type) -> bool:
    return hasattr(cls, "__dataclass_fields__") or issubclass(cls, tuple)


def slots_of(cls: type) -> dict[str, Any]:
    """The slot descriptors of `cls` by name, nearest first."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__ == "builtins" or base in BASES:
            continue
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                found.setdefault(name, member)
    return found


def _attributes(obj: object) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", object.__getattribute__(obj, "__dict__"))
    except AttributeError:
        return {}


# -- encoding ----------------------------------------------------------------------------------------------------------


def encode_other(encoder: Encoder, obj: Any, number: int) -> Entry:
    """The entry of an object whose exact type no table has."""
    cls = class_of(obj)
    if a_class(obj):
        return _encode_type(encoder, obj, number)
    if isinstance(obj, enum.Enum):
        return _encode_enum(encoder, obj, number)
    if cls is types.FunctionType or cls is types.MethodType or cls is types.BuiltinFunctionType:
        return _encode_function(encoder, obj, number)
    if cls is functools.partial:
        if vars(obj):
            raise encoder.refuse(number, obj, "has attributes of its own")
        return ["pt", *(encoder.attribute(getattr(obj, part), number, part) for part in ("func", "args", "keywords"))]
    why = objection(encoder.scope, cls)
    if why:
        raise encoder.refuse(number, obj, why)
    name = encoder.scope.name(cls)
    if is_model(obj):
        return _encode_model(encoder, obj, number, cast(str, name))
    return _encode_instance(encoder, obj, number, cast(str, name))


def _encode_type(encoder: Encoder, obj: type[Any], number: int) -> Entry:
    if obj in _BUILTIN_NAMES:
        return ["ty", _BUILTIN_NAMES[obj]]
    name = encoder.scope.name(obj)
    if name is None:
        raise encoder.refuse(number, obj, f"{obj.__module__}.{obj.__qualname__} is not a class of the server")
    return ["cl", name]


def _encode_enum(encoder: Encoder, obj: enum.Enum, number: int) -> Entry:
    name = encoder.scope.name(type(obj))
    members = type(obj).__members__
    if name is None:
        raise encoder.refuse(number, obj, "is not an enum of the server")
    own_name: Any = obj.name  # a combination of flags may have none
    if own_name is not None and members.get(own_name) is obj:
        return ["en", name, [own_name]]
    parts = [k for k, v in members.items() if isinstance(obj, enum.Flag) and v.value and cast(Any, v) in obj]
    if not isinstance(obj, enum.Flag) or _combine(type(obj), parts) is not obj:
        raise encoder.refuse(number, obj, "is no combination of members")
    return ["en", name, parts]


def _combine(cls: type[enum.Flag], names: list[str]) -> enum.Flag:
    combined = cls(0)
    for name in names:
        combined |= cls.__members__[name]
    return combined


def _encode_function(encoder: Encoder, obj: Any, number: int) -> Entry:
    if isinstance(obj, types.FunctionType):
        name = encoder.scope.name(obj)
        if name is None:
            raise encoder.refuse(number, obj, f"{obj.__qualname__} can't be found again by name")
        return ["fn", name]
    owner = obj.__self__
    name = obj.__name__
    if owner is None or isinstance(owner, types.ModuleType) or _method(owner, name) != obj:
        raise encoder.refuse(number, obj, f"{name} can't be found again by name")
    return ["bm", encoder.attribute(owner, number, "__self__"), name]


def _method(owner: Any, name: str) -> Any:
    """The bound method of `owner` called `name`, without running a property or `__getattr__`."""
    if name.startswith("__"):
        return None
    if type(owner) in _METHOD_OWNERS:
        return getattr(owner, name, None)
    holder = cast("type[Any]", owner if isinstance(owner, type) else type(owner))
    for base in holder.__mro__:
        member = vars(base).get(name)
        if isinstance(member, types.FunctionType) and not isinstance(owner, type):
            return types.MethodType(member, owner)
        if isinstance(member, classmethod):
            return types.MethodType(cast("Callable[..., Any]", cast(Any, member).__func__), holder)
        if member is not None:
            return None
    return None


def _encode_instance(encoder: Encoder, obj: Any, number: int, name: str) -> Entry:
    slots = {k: v for k, m in slots_of(class_of(obj)).items() if (v := _slot(m, obj)) is not _EMPTY}
    attributes = [encoder.named(_attributes(obj), number), encoder.named(slots, number)]
    kind, empty = base_of(class_of(obj))
    if not kind:
        return ["o", name, *attributes]
    if not empty:
        plain: Any = cast(Any, _VALUES[kind])(obj) if kind not in ("str", "int", "float") else _plain(kind, obj)
        return ["ov", name, *attributes, kind, encoder.value(plain, number, None, kind)]
    extra: Any = None
    payload: list[Any]
    if kind in ("list", "set", "deque"):
        payload = encoder.items(list(cast(Any, _MUTABLE[kind]).__iter__(obj)), number)
        extra = obj.maxlen if kind == "deque" else None
    else:
        items = cast("Iterable[tuple[Any, Any]]", cast(Any, _MUTABLE[kind]).items(obj))
        payload = encoder.pairs(items, number)
        if kind == "defaultdict":
            extra = encoder.attribute(obj.default_factory, number, "default_factory")
    return ["om", name, *attributes, kind, extra, payload]


_EMPTY: Final = object()


def _slot(member: Any, obj: object) -> Any:
    try:
        return member.__get__(obj, type(obj))
    except AttributeError:
        return _EMPTY


def _plain(kind: str, obj: Any) -> Any:
    """The plain value of an instance of a str, int or float subclass, past what its class overrides."""
    if kind == "str":
        return str.__str__(obj)[:] if type(str.__str__(obj)) is str else "".join(str.__iter__(obj))
    return int.__int__(obj) if kind == "int" else float.__float__(obj)


def _encode_model(encoder: Encoder, obj: Any, number: int, name: str) -> Entry:
    parts: list[Any] = [encoder.named(_attributes(obj), number)]
    fields_set = object.__getattribute__(obj, "__pydantic_fields_set__")
    parts.append(sorted(fields_set))
    for part in ("__pydantic_extra__", "__pydantic_private__"):
        state = object.__getattribute__(obj, part)
        # Private attributes that were declared and never set are absent here too.
        parts.append(None if state is None else encoder.named(state, number))
    return ["pm", name, *parts]


# -- decoding ----------------------------------------------------------------------------------------------------------


def _usable(decoder: Decoder, written: Any, *, model: bool, base: str = "") -> type[Any]:
    cls = decoder.scope.find(written)
    if not isinstance(cls, type) or issubclass(cls, enum.Enum):
        raise Unavailable(f"class {str(written)[:100]} is not loaded, or not one of the server")
    found = cast("type[Any]", cls)
    why = objection(decoder.scope, found)
    if why:
        raise Malformed(f"class {str(written)[:100]} {why}")
    if is_model(found) is not model or (not model and base_of(found)[0] != base):
        raise Malformed(f"class {str(written)[:100]} is of another kind now")
    return found


def _shell(decoder: Decoder, entry: Entry) -> Any:
    return object.__new__(_usable(decoder, entry[1], model=False))


def _shell_mutable(decoder: Decoder, entry: Entry) -> Any:
    kind = entry[4]
    if type(kind) is not str or kind not in _MUTABLE:
        raise Malformed("unknown base")
    cls = _usable(decoder, entry[1], model=False, base=kind)
    made = cast(Any, _MUTABLE[kind]).__new__(cls)
    if kind == "deque" and entry[5] is not None:
        if type(entry[5]) is not int:
            raise Malformed("bad deque")
        cast(Any, deque).__init__(made, maxlen=entry[5])
    return made


def _shell_value(decoder: Decoder, entry: Entry) -> Any:
    kind = entry[4]
    if type(kind) is not str or kind not in _VALUES:
        raise Malformed("unknown base")
    cls = _usable(decoder, entry[1], model=False, base=kind)
    plain = decoder.get(entry[5])
    if type(plain) is not _VALUES[kind]:
        raise Malformed("bad value")
    return cast(Any, _VALUES[kind]).__new__(cls, plain)


def _fill_instance(decoder: Decoder, entry: Entry, obj: Any) -> None:
    attributes, slots = decoder.named(entry[2]), decoder.named(entry[3])
    if attributes:
        cast("dict[str, Any]", object.__getattribute__(obj, "__dict__")).update(attributes)
    members = slots_of(class_of(obj))
    for name, value in slots.items():
        if name not in members:
            raise Malformed("no such slot")
        members[name].__set__(obj, value)


def _fill_payload(decoder: Decoder, entry: Entry, obj: Any) -> None:
    kind, extra, payload = entry[4], entry[5], entry[6]
    if kind == "list":
        list[Any].extend(obj, decoder.all(payload))
    elif kind == "deque":
        deque[Any].extend(obj, decoder.all(payload))
    elif kind == "set":
        fill_set(decoder, payload, obj)
    else:
        if kind == "defaultdict":
            factory = decoder.get(extra)
            if factory is not None and not callable(factory):
                raise Malformed("bad default factory")
            vars(defaultdict)["default_factory"].__set__(obj, factory)
        fill_mapping(decoder, payload, obj)


def _shell_model(decoder: Decoder, entry: Entry) -> Any:
    return object.__new__(_usable(decoder, entry[1], model=True))


def _fill_model(decoder: Decoder, entry: Entry, obj: Any) -> None:
    fields_set = entry[3]
    if not exact_list(fields_set) or not all(type(f) is str for f in fields_set):
        raise Malformed("bad set of fields")
    object.__setattr__(obj, "__dict__", decoder.named(entry[2]))
    object.__setattr__(obj, "__pydantic_fields_set__", set(fields_set))
    extra, private = (None if part is None else decoder.named(part) for part in entry[4:6])
    object.__setattr__(obj, "__pydantic_extra__", extra)
    object.__setattr__(obj, "__pydantic_private__", private)


def _read_class(decoder: Decoder, entry: Entry) -> type[Any]:
    found = decoder.scope.find(entry[1])
    if not a_class(found):
        raise Unavailable(f"class {str(entry[1])[:100]} is not loaded, or not one of the server")
    return found


def _read_function(decoder: Decoder, entry: Entry) -> Any:
    found = decoder.scope.find(entry[1])
    if not isinstance(found, types.FunctionType):
        raise Unavailable(f"function {str(entry[1])[:100]} is not loaded, or not one of the server")
    return found


def _read_enum(decoder: Decoder, entry: Entry) -> enum.Enum:
    cls = _read_class(decoder, entry)
    names = entry[2]
    if not issubclass(cls, enum.Enum) or not exact_list(names) or not all(type(n) is str for n in names):
        raise Malformed("bad enum")
    if len(names) == 1:
        return cls.__members__[names[0]]
    if not issubclass(cls, enum.Flag) or len(names) > 64:
        raise Malformed("bad enum")
    return _combine(cls, names)


def _read_method(decoder: Decoder, entry: Entry) -> Any:
    owner = decoder.get(entry[1])
    found = _method(owner, entry[2]) if type(entry[2]) is str else None
    if not isinstance(found, types.MethodType | types.BuiltinMethodType):
        raise Malformed("no such method")
    return found


def _read_partial(decoder: Decoder, entry: Entry) -> Any:
    func, args, keywords = (decoder.get(e) for e in entry[1:])
    if not isinstance(func, types.FunctionType | types.MethodType | types.BuiltinMethodType | type):
        raise Malformed("bad partial function")
    if type(args) is not tuple or type(keywords) is not dict:
        raise Malformed("bad partial function")
    made = functools.partial(cast("Callable[..., Any]", func))
    # Not through the constructor: the keywords are a dictionary that is filled later.
    made.__setstate__((func, args, keywords, None))  # type: ignore[attr-defined]
    return made


EXACT: Final[dict[type, Encode]] = {}

HANDLERS: Final[dict[str, Handler]] = {
    "cl": Handler(2, _read_class),
    "fn": Handler(2, _read_function),
    "en": Handler(3, _read_enum),
    "bm": Handler(3, _read_method, deferred=True),
    "pt": Handler(4, _read_partial, deferred=True),
    "o": Handler(4, _shell, _fill_instance),
    "om": Handler(7, _shell_mutable, _fill_instance, _fill_payload),
    "ov": Handler(6, _shell_value, _fill_instance, deferred=True),
    "pm": Handler(6, _shell_model, _fill_model),
}
