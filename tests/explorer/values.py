"""Copies and keys of the real core's objects: what lets a state of it be one small number.

The rule: nothing of the core is written down again here. Objects are walked as they are, field by field, so that a field
that is added tomorrow is part of the key tomorrow. What is left out of keys is listed below, each with the reason why
no decision can depend on it; whoever adds to the list says so there.

Times are keyed relative to now, since the core compares times and adds durations, and never looks at one by itself. The
core's own convention tells them apart: a number whose name ends in `_s` is a duration, every other float is a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, Final, cast

from coordinator.wire.errors import Problem

ATOMS: Final = (int, float, str, bytes, bool, type(None), Enum, frozenset, MappingProxyType)
DURATIONS: Final = frozenset({"_remind_gap"})
# Class and field; "" is any class.
LEFT_OUT: Final = frozenset({
    ("", "_limits"), ("", "_operation"), ("", "operation"), ("", "topology"), ("Course", "participants"),
    ("PhaseRun", "_participants"), ("Transaction", "_recovered"),  # fixed when the operation begins; `Core` has it
    ("Course", "phase_began"), ("Course", "_stood_since"), ("PhaseRun", "began"),  # only told: how long something took
    ("Course", "secondary"), ("Course", "_unheld"), ("Finish", "secondary"), ("AbortArguments", "cause"),  # only told
    ("Opening", "_arguments"), ("Call", "timeout_s"),  # sentences; the end of a call comes when the explorer says so
    ("Course", "_remind_at"), ("Course", "_remind_gap"),  # reminders only warn
    ("Transaction", "_fresh"),  # looked at by the very next RecordFailed only, which belongs to the same step here
    ("CallBook", "_stale"),  # tells one kind of Ignored from another
    ("CallBook", "_last_no"), ("Call", "call_no"),  # numbers go by their names, see `key`
    ("Fence", "_lease_generation"), ("Fence", "_participant_id"), ("Fence", "_max_finished"),
    ("_Finished", "failed_digest"),  # requests of one operation are all alike here
})  # fmt: skip
# Once everybody is told to open, nobody looks at what had been shown, nor at the phase that was.
LEFT_OUT_OPENING: Final = frozenset({
    ("Evidence", "prepared"), ("Evidence", "committed"), ("Evidence", "restored"), ("Evidence", "lease_until"),
    ("Evidence", "progress"), ("Course", "deadline"), ("Course", "run"), ("Course", "abort_wanted"),
    ("Course", "late_warned"), ("Course", "_owner_until"), ("Course", "opened_alone"),
})  # fmt: skip
# Who reads these tells people: nothing is decided by them.
ONLY_TOLD: Final = frozenset({
    ("Finish", "primary"), ("Finish", "unconfirmed"), ("Evidence", "opened"), ("Opening", "acknowledged"),
    ("Opening", "told"), ("Opening", "_operation_id"), ("Opening", "_not_ours"),
    ("Opening", "_calls"), ("Opening", "_gone"),  # those of the course
})  # fmt: skip
CAUSES: Final = frozenset(
    {"primary", "lost"}
)  # why it came to an end: whether a phase is named is all that is looked at
# When a call was sent is only asked for while leases are reckoned with.
ONLY_TOLD_OPENING: Final = frozenset({("Running", "sent_at")})
NUMBERED: Final = frozenset({"_running", "_closing"})  # fields whose keys are numbers of calls


@cache
def _names(kind: Any) -> tuple[str, ...] | None:
    """The fields of a class with slots or of a dataclass; None for one with a dictionary."""
    if is_dataclass(kind):
        return tuple(f.name for f in fields(kind))
    slots = getattr(kind, "__slots__", None)
    return tuple(slots) if slots else None


@cache
def _is_shared(kind: Any) -> bool:
    """Whether what is of this class never changes."""
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return issubclass(kind, ATOMS) or kind is tuple or (parameters is not None and bool(parameters.frozen))


@cache
def _left_out(kind: Any, opening: bool, plain: bool) -> frozenset[str]:
    """The fields of a class that are no part of keys."""
    all_of_them = LEFT_OUT
    all_of_them |= frozenset() if plain else ONLY_TOLD
    all_of_them |= LEFT_OUT_OPENING | ONLY_TOLD_OPENING if opening else frozenset()
    return frozenset(name for whose, name in all_of_them if whose in ("", kind.__name__))


@cache
def _is_mapping(kind: Any) -> bool:
    return issubclass(kind, Mapping)


@cache
def _is_atom(kind: Any) -> bool:
    return kind in (int, str, bool, type(None)) or issubclass(kind, Enum)


def _kind(value: Any) -> Any:
    return type(value)


def _each(value: Any) -> list[Any]:
    return list(value)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items())


def clone(value: Any, made: dict[int, Any]) -> Any:
    """A copy that shares what cannot change. `made` keeps parts that are shared by two fields shared in the copy."""
    kind = _kind(value)
    if _is_shared(kind):
        return value
    known = made.get(id(value))
    if known is not None:
        return known
    copy: Any = None
    if kind in (OrderedDict, dict):
        copy = made[id(value)] = kind()
        for name, each in _items(value):
            copy[name] = each if _is_shared(_kind(each)) else clone(each, made)
    elif kind is list:
        copy = made[id(value)] = [clone(each, made) for each in _each(value)]
    elif kind is set:
        copy = made[id(value)] = set(_each(value))
    else:
        copy = made[id(value)] = kind.__new__(kind)
        names = _names(kind)
        for name in tuple(vars(cast(object, value))) if names is None else names:
            each = getattr(value, name)
            setattr(copy, name, each if _is_shared(_kind(each)) else clone(each, made))
    return copy


class Keys:
    """Makes keys. `calls`: a name for each number of a call that may still be answered, since only their order of birth
    could tell numbers apart, and nothing asks for it. `opening`: whether everybody is being told to open. `plain`: leave
    in what could be left out.
    """

    def __init__(
        self,
        now: float = 0.0,
        calls: Mapping[int, Hashable] | None = None,
        *,
        opening: bool = False,
        plain: bool = False,
    ) -> None:
        self._now = now
        self._calls = calls or {}
        self._plain = plain
        self._opening = opening and not plain

    def of(self, value: Any, name: str = "") -> Hashable:
        """What of a value can decide anything, as something that can be hashed."""
        kind = _kind(value)
        if kind is float:
            return float(value) if name.endswith("_s") or name in DURATIONS else round(value - self._now, 6)
        if _is_atom(kind):
            return value  # type: ignore[no-any-return]
        if kind is Problem:
            if name in CAUSES and not self._plain:
                return bool(value.phase)
            return value.reason, value.phase, value.participant_id
        if _is_mapping(kind):
            if name == "progress":
                return frozenset(_each(value))  # who has said something; what it said is only told on
            if name in NUMBERED:
                calls = self._calls
                return frozenset(
                    (calls[number], self.of(below, name)) for number, below in _items(value) if number in calls
                )
            items = [(each, self.of(below, name)) for each, below in _items(value)]
            return tuple(items) if kind is OrderedDict else frozenset(items)
        if kind in (set, frozenset):
            return frozenset(_each(value))
        if kind in (list, tuple):
            return tuple([self.of(each, name) for each in _each(value)])
        names, left_out = _names(kind), _left_out(kind, self._opening, self._plain)
        if names is None:
            return kind.__name__, *[self.of(b, n) for n, b in vars(cast(object, value)).items() if n not in left_out]
        return kind.__name__, *[self.of(getattr(value, each), each) for each in names if each not in left_out]


class Table:
    """Numbers for values that were seen: equal keys get one number, and the first value stands for all of them."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.values: list[Any] = []

    def number(self, its_key: Hashable, value: Any) -> int:
        """The number of this key; `value` is kept when it is new."""
        found = self._numbers.get(its_key)
        if found is None:
            found = self._numbers[its_key] = len(self.values)
            self.values.append(value)
        return found

    def __len__(self) -> int:
        return len(self.values)
