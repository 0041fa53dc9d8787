"""The settings file: YAML as it was meant, with the line of each name.

The rule: what two readers would take differently is refused. YAML lets a name stand twice and takes the last, so that a
line which somebody has read and trusts does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import yaml

from coordinator.wire.errors import Reason, Refused, refuse

MAX_FILE_BYTES: Final = 64 << 10
# What the YAML library raises for values that are none, such as the 99th of a month, `!!int ""`, or what is too deep.
_UNREADABLE: Final = (
    yaml.YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError,
)  # fmt: skip
_CORRECT_PATH: Final = "Correct the path, --config or SAFEPOINT_CONFIG, or the file's mode."


@dataclass(frozen=True, slots=True)
class Entry:
    """One value, and where it stands: `path:line`."""

    name: str  # dotted within a section
    value: Any
    where: str


def entries(path: str | os.PathLike[str], section: str) -> Iterator[Entry]:
    """Every name of the file, those of `section` dotted. Raises INVALID_ARGUMENT for what cannot be read or stands twice."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        loader: Any = yaml.SafeLoader(text.decode("utf-8"))
        node: Any = loader.get_single_node()
        if node is not None:
            _require_once(node, path, set())
        loaded: object = loader.construct_document(node) if node is not None else None
    except Refused:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        what = ": ".join(part for part in (error.context, error.problem) if part)
        raise refuse(
            Reason.INVALID_ARGUMENT, f"The settings file {path} is no YAML{where}: {what}.",
            next_step=f"Correct {path}{where}.",
        ) from error  # fmt: skip
    except OSError as error:
        raise refuse(
            Reason.INVALID_ARGUMENT, f"The settings file {path} cannot be read: {error.strerror or error}.",
            next_step=_CORRECT_PATH,
        ) from error  # fmt: skip
    except _UNREADABLE as error:
        raise refuse(
            Reason.INVALID_ARGUMENT, f"The settings file {path} cannot be read: {error}.",
            next_step=f"Correct {path}, or name another file.",
        ) from error  # fmt: skip
    lines, sections = _lines(node), _inside(node)
    for name, value in _mapping(loaded, f"The settings file {path}").items():
        if name != section:
            yield Entry(name, value, f"{path}:{lines.get(name, 1)}")
            continue
        below = _lines(sections.get(section))
        for inner, part in _mapping(value, f"The section {section} in {path}").items():
            yield Entry(f"{section}.{inner}", part, f"{path}:{below.get(inner, lines.get(section, 1))}")


def _require_once(node: Any, path: str | os.PathLike[str], looked: set[int]) -> None:
    """Raise INVALID_ARGUMENT when a name stands twice in one mapping, at any depth."""
    if id(node) in looked:  # an anchor may hold itself, or stand a million times
        return
    looked.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in cast("list[Any]", node.value):
            _require_once(item, path, looked)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in _pairs(cast(Any, node)):
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise refuse(
                    Reason.INVALID_ARGUMENT,
                    f"The settings file {path} says {key.value} twice, in line {seen[key.value]} and in line {line}: only "
                    "the last would count.",
                    next_step=f"Take one of them out of {path}.",
                )
            seen[key.value] = line
        _require_once(value, path, looked)


def _lines(node: Any) -> dict[str, int]:
    return {str(key.value): key.start_mark.line + 1 for key, _ in _pairs(node)}


def _inside(node: Any) -> dict[str, Any]:
    return {str(key.value): value for key, value in _pairs(node)}


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    return cast("list[tuple[Any, Any]]", node.value) if isinstance(node, yaml.MappingNode) else []


def _mapping(loaded: object, what: str) -> dict[str, Any]:
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise refuse(
            Reason.INVALID_ARGUMENT, f"{what} does not hold names and values.",
            next_step="Write one `name: value` a line; `safepoint config show` prints such a file.",
        )  # fmt: skip
    return {str(name): value for name, value in cast("dict[object, Any]", loaded).items()}
