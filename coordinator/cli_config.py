"""Commands about the settings file: what is in force and where it comes from, and its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli_options import AsJson
from coordinator.cli_output import emit, reporting, say

if TYPE_CHECKING:
    from coordinator.settings import Resolved

Config = Annotated[
    str, typer.Option("--config", envvar="SAFEPOINT_CONFIG", metavar="FILE", help="The YAML file with settings.")
]

app = typer.Typer(help="The settings: what is in force, where it comes from, and the schema of the file.")


@app.command("show")
def show_settings(config: Config = "", as_json: AsJson = False) -> None:
    """Print every setting with its value, its default and where it comes from: default, file, environment or argument.

    The output is a settings file with comments. What arguments would make of it: safepoint coordinator ... --show-settings

    Example: safepoint config show --config safepoint.yaml
    """
    with reporting(as_json):
        from coordinator.settings import resolve

        print_settings(resolve(config or None, need_root=False), as_json)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of the file. Editors complete and check names with it.

    Example: safepoint config schema > safepoint.schema.json
    """
    from coordinator.settings import schema

    say(json.dumps(schema(), indent=2))


def print_settings(resolved: Resolved, as_json: bool) -> None:
    """All settings, as JSON or as a file with comments."""
    if as_json:
        emit(
            {
                "settings": {
                    one.name: {
                        "value": one.value,
                        "default": one.default,
                        "source": one.source.value,
                        "where": one.where,
                    }
                    for one in resolved.every()
                }
            }
        )
    else:
        say("\n".join(_lines(resolved)))


def _lines(resolved: Resolved) -> Iterator[str]:
    """The file that would say the same, with the origins as comments."""
    inside = ""
    for one in resolved.every():
        section, _, name = one.name.rpartition(".")
        if section and section != inside:
            yield f"{section}:"
        inside = section
        if one.value is None and one.name == "root":
            yield f"# {'root: not set':38} # required"
            continue
        entry = f"{'  ' if section else ''}{name}: {json.dumps(one.value)}"
        source = f"{one.source.value} {one.where}".strip()
        changed = "" if one.source.value == "default" or one.name == "root" else f"; default {json.dumps(one.default)}"
        yield f"{entry:40} # {source}{changed}"
