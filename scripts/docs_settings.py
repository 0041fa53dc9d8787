"""docs/reference/settings.md, from the model of the settings: its fields, their bounds, and what is said beside each."""

from __future__ import annotations

import inspect
import io
import tokenize
import typing
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coordinator.settings import Settings, variable_of
from scripts.docs_markdown import cell, generated, table

_BOUNDS: Final = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))


def render() -> str:
    """The page: the file, the variables, and a table for each model."""
    parts = [
        generated("Settings", "`coordinator/settings.py`"),
        "What `safepoint coordinator` is started with: a YAML file (`--config`), then the environment, then arguments; "
        "the later wins. A name that nobody knows is an error with a suggestion. Durations are seconds, lists in a "
        "variable are separated by commas.\n\n"
        "```yaml\nroot: /data/safepoint\nlease_ttl_s: 20\nkeep_last: 3\n```\n",
    ]
    for prefix, model in models(Settings, ""):
        parts += ([f"## `{prefix}`\n"] if prefix else []) + [_table(model, prefix)]
    return "\n".join(parts)


def models(model: type[BaseModel], prefix: str) -> list[tuple[str, type[BaseModel]]]:
    """The model, and those that are values of its fields."""
    found = [(prefix, model)]
    for name, field in model.model_fields.items():
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += models(part, f"{prefix}.{name}" if prefix else name)
    return found


def _table(model: type[BaseModel], prefix: str) -> str:
    said = _comments(model)
    rows = []
    for name, field in model.model_fields.items():
        meaning = field.description or said.get(name, "")
        rows.append(
            (
                f"`{name}`",
                _type(field),
                _default(field),
                f"`{variable_of(f'{prefix}.{name}' if prefix else name)}`",
                cell(meaning),
            )
        )
    return table(("setting", "type", "default", "variable", "meaning"), *rows)


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """What stands behind each field, on its line."""
    source = inspect.getsource(model)
    lines: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.split(":")[0].strip() in model.model_fields:
            lines[token.start[0]] = token.string.lstrip("# ")
    rows = source.splitlines()
    return {rows[number - 1].split(":")[0].strip(): text for number, text in lines.items()}


def _type(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    name = getattr(annotation, "__name__", str(annotation))
    name = {"str": "text", "float": "number", "int": "integer", "bool": "true, false", "tuple": "list"}.get(name, name)
    bounds = [
        f"{word} {getattr(item, key):g}"
        for item in field.metadata
        for key, word in _BOUNDS
        if getattr(item, key, None) is not None
    ]
    return cell(", ".join([name, *bounds]))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value in ("", (), None):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
