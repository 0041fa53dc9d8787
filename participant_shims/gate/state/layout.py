"""Where a server keeps what it remembers: places, what is per session in them, and whether the rest has changed.

The one rule: places are read and written raw, past validation, properties and `__getattr__`; looking changes nothing.

A place is an attribute of the server object (pydantic field, private attribute, extra), of an object of the server's own
classes that one of those holds, or a global variable of the server's own modules. A place is *session-keyed* when it is a
dictionary with session ids as keys (alone or in a tuple), a set of them, or a dictionary of such dictionaries.
"""

from __future__ import annotations

import hashlib
import re
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, cast

from participant_shims.gate.state import codec
from participant_shims.gate.state.graph import Limits, type_name
from participant_shims.gate.state.objects import is_model
from participant_shims.gate.state.scope import Scope
from participant_shims.gate.state.shapes import a_dict, a_set, a_tuple, class_of, exact_dict, keyed

# A baseline is taken of every attribute at start-up, so it is bounded: larger ones are watched by identity and length.
WATCH: Final = Limits(objects=20_000, values=200_000, binary_bytes=64 << 20)
_SESSION_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# Set by the framework, the same after every start.
_FRAMEWORK: Final = frozenset({"config", "server_client"})
# What a server makes again when it needs it, and in which no rollout has a part: connections, executors, loggers.
_RUNTIME: Final = (
    "aiohttp.",
    "httpx.",
    "openai.",
    "requests.",
    "urllib3.",
    "logging.",
    "concurrent.futures.",
    "nemo_gym.openai_utils.NeMoGymAsyncOpenAI",
    "nemo_gym.server_utils.",
    "starlette.",
    "fastapi.",
    "uvicorn.",
    "asyncio.",
    "_asyncio.",
    "_thread.",
    "threading.",
    "_contextvars.",
)
_SIMPLE: Final = (type(None), bool, int, float, str, bytes, tuple, frozenset)


def looks_like_session(key: object) -> bool:
    """Whether `key` has the form of the ids that Gym's session middleware gives."""
    return isinstance(key, str) and _SESSION_ID.fullmatch(key) is not None


def session_of(key: object, sessions: Collection[str]) -> str | None:
    """The session among `sessions` that a dictionary key belongs to."""
    if isinstance(key, str):
        return key if key in sessions else None
    if a_tuple(key):
        return next((p for p in key if isinstance(p, str) and p in sessions), None)
    return None


def is_container(value: object) -> bool:
    """Whether `value` is a built-in mutable container, or of a class derived from one."""
    return isinstance(value, dict | list | set | deque)


def is_runtime(value: object) -> bool:
    """Whether `value` is machinery that the server makes again, so that losing it loses nothing; also containers of it."""
    if is_container(value) and len(cast("list[Any]", value)):
        members = list(value.values()) if a_dict(value) else list(cast("list[Any]", value))
        return all(not is_container(member) and is_runtime(member) for member in members)
    return type_name(value).startswith(_RUNTIME) or isinstance(value, types.ModuleType | type | types.FunctionType)


@dataclass(frozen=True, slots=True)
class Place:
    """One attribute or global variable. `store` is the raw dictionary that has it under `key`."""

    name: str
    store: MutableMapping[str, Any]
    key: str

    @property
    def value(self) -> Any:
        return self.store.get(self.key)

    def replace(self, value: object) -> None:
        """Put `value` there; a container is filled in place, since others may hold it too."""
        live: Any = self.value
        if class_of(live) is not class_of(value) or not is_container(live):
            self.store[self.key] = value
        elif a_dict(live) and a_dict(value):
            contents = list(value.items())
            put: Any = (
                OrderedDict[Any, Any].__setitem__ if isinstance(live, OrderedDict) else dict[Any, Any].__setitem__
            )
            live.clear()
            for key, item in contents:
                put(live, key, item)
        elif a_set(live) and a_set(value):
            members = set(value)
            live.clear()
            live.update(members)
        else:
            listed = list(cast("list[Any]", value))
            sequence = cast("list[Any]", live)
            sequence.clear()
            sequence.extend(listed)


def _stores(obj: object) -> Iterator[MutableMapping[str, Any]]:
    for part in ("__dict__", "__pydantic_private__", "__pydantic_extra__"):
        if part != "__dict__" and not is_model(obj):
            return
        try:
            found = object.__getattribute__(obj, part)
        except AttributeError:
            continue
        if isinstance(found, dict):
            yield cast("dict[str, Any]", found)


def places(server: object, scope: Scope) -> list[Place]:
    """Every place of `server` now, in a stable order."""
    found: list[Place] = []
    for store in _stores(server):
        for name in store:
            if name in _FRAMEWORK or name.startswith("__"):
                continue
            found.append(Place(name, store, name))
            value = store[name]
            if scope.owns(class_of(value).__module__) and not isinstance(value, type | types.FunctionType):
                for inner in _stores(value):
                    found += [Place(f"{name}.{k}", inner, k) for k in inner if not k.startswith("__")]
    for module in scope.own_modules():
        found += _globals(module, scope, server)
    return found


def _globals(module: types.ModuleType, scope: Scope, server: object) -> Iterator[Place]:
    written = scope.aliases.get(module.__name__, module.__name__)
    for name, value in vars(module).items():
        if name.startswith("__") or value is server or isinstance(value, type | types.ModuleType):
            continue
        # Instances of the server's own classes at module level, and mutable or simple values; not typing constructs.
        own = scope.owns(class_of(value).__module__)
        if not (own or is_container(value) or isinstance(value, _SIMPLE)) or callable(cast(object, value)):
            continue
        yield Place(f"{written}:{name}", cast("MutableMapping[str, Any]", vars(module)), name)
        for inner in _stores(cast(object, value)) if own else ():
            yield from (Place(f"{written}:{name}.{k}", inner, k) for k in inner if not k.startswith("__"))


def fingerprint(value: object, scope: Scope) -> tuple[object, ...]:
    """What tells whether `value` has changed: its content when that can be saved and is small, else identity and size."""
    if isinstance(value, type(None) | bool | int | float | str):
        return (type(value), value)
    try:
        text = codec.dumps(codec.encode_with_numbers(value, scope, limits=WATCH).document)
    except codec.Unencodable:
        return ("identity", id(value), len(cast("list[Any]", value)) if is_container(value) else 0)
    return ("content", hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())


def baseline(found: list[Place], scope: Scope) -> dict[str, tuple[object, ...]]:
    """The fingerprint of every place."""
    return {place.name: fingerprint(place.value, scope) for place in found}


def session_keys(value: object, sessions: Collection[str]) -> dict[str, list[Any]]:
    """The keys (or members) of a session-keyed container that belong to each of `sessions`."""
    out: dict[str, list[Any]] = {}
    if keyed(value):
        for key in value:
            owner = session_of(key, sessions)
            if owner is not None:
                out.setdefault(owner, []).append(key)
    return out


def session_places(found: list[Place], sessions: AbstractSet[str], known: AbstractSet[str]) -> list[Place]:
    """The places that are session-keyed: by their keys, or because the source says so (`known` names)."""
    out: list[Place] = []
    for place in found:
        value = place.value
        if not keyed(value):
            continue
        if place.name in known or any(session_of(k, sessions) or looks_like_session(k) for k in value):
            out.append(place)
        elif a_dict(value) and len(value) <= 64:
            for key, inner in value.items():
                known_inside = isinstance(key, str) and keyed(inner)
                if known_inside and any(session_of(k, sessions) or looks_like_session(k) for k in inner):
                    out.append(Place(f"{place.name}[{key!r}]", value, key))
    return out


def remainder(place: Place, sessions: Collection[str]) -> dict[Any, Any] | set[Any]:
    """What a session-keyed container holds under keys that are no session's: it belongs to the server as a whole."""
    value = place.value

    def is_global(key: object) -> bool:
        return session_of(key, sessions) is None and not looks_like_session(key) and not isinstance(key, tuple)

    others = [k for k in cast("set[Any]", value) if not (type(k) is str and k in sessions) and is_global(k)]
    return {k: value[k] for k in others} if a_dict(value) else set(others)


def empty_like(container: object) -> Any:
    """An empty container of the same kind, for a server whose place is not set up yet; None when it can't be made."""
    if exact_dict(container):
        return {}
    if a_dict(container):
        factory: Any = getattr(container, "default_factory", None)
        made: Any = type(container)
        return made(factory) if factory is not None else made()
    return set[Any]() if a_set(container) else None


def global_randomness() -> Mapping[str, Any]:
    """The process-wide generators of `random` and numpy, as objects that the codec saves."""
    import random

    copy = random.Random(0)
    copy.setstate(random.getstate())
    found: dict[str, Any] = {"random": copy}
    numpy = cast(Any, sys.modules.get("numpy"))
    if numpy is not None and numpy.random.get_state(legacy=False)["bit_generator"] == "MT19937":
        state = numpy.random.RandomState(0)
        state.set_state(numpy.random.get_state(legacy=False))
        found["numpy"] = state
    return found


def restore_randomness(saved: Mapping[str, Any]) -> None:
    """Put the process-wide generators where they were."""
    import random

    source = saved.get("random")
    if isinstance(source, random.Random):
        random.setstate(source.getstate())
    numpy = cast(Any, sys.modules.get("numpy"))
    if numpy is not None and "numpy" in saved:
        numpy.random.set_state(saved["numpy"].get_state(legacy=False))
