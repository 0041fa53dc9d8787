"""Classes such as servers keep in their sessions, and servers that keep them; and a comparison that spares no bit."""

from __future__ import annotations

import enum
import math
import random
import struct
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from participant_shims.gate.state.scope import Scope

SCOPE = Scope(own=("tests.state.samples",))


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True)
class Frozen:
    name: str
    parts: tuple[int, ...] = ()


@dataclass(slots=True)
class Slotted:
    a: int
    b: list[int] = field(default_factory=list)


class Board:
    """A plain object with a constructor that must not run again."""

    made = 0

    def __init__(self, size: int) -> None:
        type(self).made += 1
        self.cells = [[0] * size for _ in range(size)]
        self.__secret = size

    def put(self, row: int, column: int) -> int:
        self.cells[row][column] += 1
        return self.cells[row][column] + self.__secret

    @classmethod
    def standard(cls) -> Board:
        return cls(3)

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "closed", False):
            raise AttributeError("a decoder that uses setattr is wrong")
        object.__setattr__(self, name, value)

    def __getstate__(self) -> object:
        raise AssertionError("the codec runs no code of the class")

    __setstate__ = __reduce_ex__ = __getstate__  # type: ignore[assignment]


class MixedSlots(Slotted):
    def __init__(self) -> None:
        super().__init__(1)
        self.extra = "x"


class Names(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        raise AssertionError("the codec goes past what a class overrides")


class Stack(list[int]):
    label = "stack"


class Label(str):
    pass


class Owner:
    def __del__(self) -> None:
        pass


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: str
    content: Any = None
    _seen: int = PrivateAttr(default=0)

    def model_post_init(self, context: Any, /) -> None:
        if self.role == "forbidden":
            raise AssertionError("validation ran")


def double(x: int) -> int:
    return 2 * x


# -- servers -----------------------------------------------------------------------------------------------------------

RULES = {"limit": [1, 2, 3]}
TOTALS: dict[str, int] = {}


class Config(BaseModel):
    name: str = "sample"
    options: dict[str, Any] = Field(default_factory=lambda: {"lookup": {0: "#"}})


class Server(BaseModel):
    """As a Gym resources server: session dictionaries, private attributes, global state."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="allow")
    config: Config = Field(default_factory=Config)
    session_state: dict[str, Any] = Field(default_factory=dict)
    _metrics: defaultdict[str, list[int]] = PrivateAttr(default_factory=lambda: defaultdict(list))
    _finished: set[str] = PrivateAttr(default_factory=set)
    _served: int = PrivateAttr(default=0)
    _cache: dict[str, Any] = PrivateAttr(default_factory=dict)
    _client: Any = PrivateAttr(default=None)

    def seed_session(self, session_id: str, state: Any) -> None:
        self.session_state[session_id] = state
        self._metrics[session_id].append(1)
        self._served += 1

    def verify(self, session_id: str) -> None:
        self._finished.add(session_id)


class HookedServer(BaseModel):
    session_state: dict[str, Any] = Field(default_factory=dict)

    def safepoint_export_session(self, session_id: str) -> Any:
        if session_id.startswith("f"):
            raise RuntimeError("not this one")
        return {"depth": len(self.session_state[session_id])}

    def safepoint_import_session(self, session_id: str, state: Any) -> None:
        self.session_state[session_id] = [object()] * state["depth"]


class StatelessServer(BaseModel):
    config: Config = Field(default_factory=Config)

    def verify(self, session_id: str) -> float:
        return 1.0


# -- comparison --------------------------------------------------------------------------------------------------------


def same(a: Any, b: Any, seen: dict[int, int] | None = None) -> bool:
    """Whether two values are alike in type, order, identity within each, and every bit of every number."""
    seen = {} if seen is None else seen
    if type(a) is not type(b):
        return False
    if id(a) in seen:
        return seen[id(a)] == id(b)
    if not isinstance(a, (int, str, float, bytes, type(None))):
        seen[id(a)] = id(b)
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b) or (
            math.isnan(a) and math.isnan(b) and _bits(a) == _bits(b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        left, right = list(dict.items(a)), list(dict.items(b))
        same_factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        pairs = zip(left, right, strict=False)
        return (
            len(left) == len(right)
            and same_factory
            and all(same(k, m, seen) and same(v, w, seen) for (k, v), (m, w) in pairs)
        )
    if isinstance(a, (list, tuple, deque)):
        limit = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limit and len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, random.Random):
        return a.getstate() == b.getstate()
    if isinstance(a, Decimal):
        return repr(a) == repr(b)
    if isinstance(a, BaseModel):
        parts = ("__dict__", "__pydantic_extra__", "__pydantic_private__", "__pydantic_fields_set__")
        return all(same(getattr(a, part), getattr(b, part), seen) for part in parts)
    return bool(a == b)


def _bits(x: float) -> bytes:
    return struct.pack(">d", x)


__all__ = ["SCOPE", "OrderedDict", "same"]
