"""docs/reference/environment.md, from the table of variables."""

from __future__ import annotations

from coordinator.environment import VARIABLES
from scripts.docs_markdown import generated, table


def render() -> str:
    """The page."""
    rows = ((f"`{name}`", who, says) for name, (who, says) in VARIABLES.items())
    return "\n".join(
        (
            generated("Variables of the environment", "`coordinator/environment.py`"),
            "A variable that begins with `SAFEPOINT_` and is neither here nor among the [settings](settings.md) is read by "
            "nobody: `safepoint doctor` names it, and what was probably meant.\n",
            table(("variable", "read by", "meaning"), *rows),
        )
    )
