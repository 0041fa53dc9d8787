"""docs/reference/cli.md, from the commands themselves: what `--help` says, on one page."""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any, Final

from typer.main import get_command

from coordinator.cli import app
from participant_shims.cli import _parser  # the two commands that are forwarded have a parser of their own
from scripts.docs_markdown import cell, generated, table

_FORWARDED: Final = ("shim", "serve")


def render() -> str:
    """The page. One section a command, in the order of `safepoint --help`."""
    root: Any = get_command(app)
    parts = [
        generated("Commands", "the commands themselves (`coordinator/cli.py`)"),
        "Every command has `--help`, and those that print something have `--json`: one JSON document on standard output, "
        "or one a line for commands that stream, also when the command fails. In a pipe there are no colours and no bars.\n"
        "Exit codes stand at the end of `safepoint --help`; [errors](errors.md) has them by reason.\n",
        "## safepoint\n\nOptions that stand before the command:\n\n" + options(root),
    ]
    for name, command in commands(root, "safepoint"):
        parts.append(section(name, command))
    return "\n".join(parts)


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every command below a group, with its whole name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        elif not command.hidden:
            yield f"{prefix} {name}", command


def section(name: str, command: Any) -> str:
    """One command: what it does, its arguments and options, an example."""
    if name.split()[1] in _FORWARDED:
        return _forwarded(name, command)
    text, example = _help(command.help or "")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, *(_placeholder(p) for p in arguments), "[OPTIONS]"])
    parts = [f"## {name}\n", text, f"\n```text\n{usage}\n```\n"]
    if arguments:
        parts.append(
            table(("argument", "meaning"), *((f"`{_placeholder(p)}`", cell(p.help or "")) for p in arguments)) + "\n"
        )
    parts.append(options(command))
    if example:
        parts.append(f"\n```bash\n{example}\n```\n")
    return "\n".join(parts)


def options(command: Any) -> str:
    """A table of the options; `--help` goes without saying."""
    rows = []
    kinds = typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden and "--help" not in parameter.opts:
            names = _names(parameter, kinds.get(parameter.name, str))
            rows.append((names, cell(parameter.help or ""), _default(parameter), _variables(parameter)))
    return table(("option", "meaning", "default", "variable"), *rows) if rows else "No options.\n"


def _help(text: str) -> tuple[str, str]:
    """What a docstring says, and its example."""
    body, _, example = inspect.cleandoc(text).partition("Example:")
    return re.sub(r"\[/?[a-z ]+\]", "", body).strip(), example.strip()


def _placeholder(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).strip("[]").upper()
    return name if parameter.required else f"[{name}]"


def _names(parameter: Any, kind: Any) -> str:
    takes = "" if parameter.is_flag or parameter.count else f" {parameter.metavar or _kind(kind)}"
    return "<br>".join(f"`{name}{takes}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _kind(kind: Any) -> str:
    inner = [kind, *typing.get_args(kind)]
    return "INTEGER" if int in inner else "NUMBER" if float in inner else "TEXT"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value in (None, "", False, [], ()) or str(value) in ("", "Sentinel.UNSET"):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _variables(parameter: Any) -> str:
    named = parameter.envvar or ()
    return ", ".join(f"`{name}`" for name in ([named] if isinstance(named, str) else named))


def _forwarded(name: str, command: Any) -> str:
    text, example = _help(command.help or "")
    chosen = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices[name.split()[1]]
    rows = []
    for action in chosen._actions:
        if action.option_strings and "--help" not in action.option_strings and action.help != argparse.SUPPRESS:
            takes = "" if action.nargs == 0 else f" {_argparse_metavar(action)}"
            default = "" if action.default in (None, "", False, [], argparse.SUPPRESS) else f"`{action.default}`"
            rows.append(
                ("<br>".join(f"`{o}{takes}`" for o in action.option_strings), cell(_expanded(action)), default, "")
            )
    usage = f"{name} [OPTIONS]" + (" -- COMMAND [ARGUMENT ...]" if name.endswith("serve") else "")
    parts = [
        f"## {name}\n",
        text,
        f"\n```text\n{usage}\n```\n",
        table(("option", "meaning", "default", "variable"), *rows),
    ]
    return "\n".join([*parts, f"\n```bash\n{example}\n```\n"] if example else parts)


def _argparse_metavar(action: argparse.Action) -> str:
    if action.choices:
        return "\\|".join(str(choice) for choice in action.choices)
    metavar = action.metavar or action.dest.upper()
    return metavar if isinstance(metavar, str) else " ".join(metavar)


def _expanded(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
