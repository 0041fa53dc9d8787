"""What a value of unknown origin is, in a way that type checkers believe.

The one rule: `exact_*` ask for the very type, as the codec must; the others accept subclasses, as a look at a server's
attributes must.
"""

from __future__ import annotations

from typing import Any, TypeGuard


def exact_list(value: object) -> TypeGuard[list[Any]]:
    return type(value) is list


def exact_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    return type(value) is dict


def a_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def a_set(value: object) -> TypeGuard[set[Any]]:
    return isinstance(value, set)


def a_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def a_tuple(value: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def a_class(value: object) -> TypeGuard[type[Any]]:
    return isinstance(value, type)


def keyed(value: object) -> TypeGuard[dict[Any, Any] | set[Any]]:
    """A dictionary or a set."""
    return isinstance(value, dict | set)


def class_of(value: object) -> type[Any]:
    """The type of `value`."""
    found: type[Any] = type(value)  # pyright: ignore[reportUnknownVariableType]
    return found
