"""Wrong usage, where a drawn box would be out of place: with --json an error object, in a pipe plain lines.

The rule: whoever asked for JSON reads stdout, and finds there why nothing was done.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from coordinator.cli_exit import ExitCode
from coordinator.cli_output import emit
from coordinator.wire.errors import Reason

# Typer has its own copy of Click, or uses the one that is installed; this is the class that both have.
_USAGE_ERROR: Final[Any] = typer.BadParameter.__mro__[1]
_HOW: Final = "Correct the command; `--help` says what it takes."


class Commands(TyperGroup):
    """The command line as a whole."""

    def main(self, args: Any = None, *rest: Any, **extra: Any) -> Any:
        """As it is, but for wrong usage."""
        given = list(sys.argv[1:] if args is None else args)
        ours = given[: given.index("--")] if "--" in given else given
        if "--json" not in ours:
            if ours and not {"--help", "-h"} & set(ours) and not sys.stderr.isatty():
                self.rich_markup_mode = None  # by which errors are shown, and the help of this level
            return super().main(args, *rest, **extra)
        try:
            code = super().main(args, *rest, **(extra | {"standalone_mode": False}))
        except _USAGE_ERROR as error:
            told = {"reason": Reason.INVALID_ARGUMENT.name, "message": error.format_message(), "next_step": _HOW}
            emit({"error": told | {"exit_code": int(ExitCode.USAGE)}})
            sys.exit(int(ExitCode.USAGE))
        sys.exit(code if isinstance(code, int) else 0)
