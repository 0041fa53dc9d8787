"""How to add what is optional to this installation.

The rule: a command that a person is told to type works. Safepoint is on no package index, so it is named by where it was
installed from.
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from coordinator.wire.errors import Problem, Reason, Refused


class NotInstalled(Refused):
    """What was asked for needs a package that is optional and not here. Nothing was changed."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(Problem(Reason.INVALID_ARGUMENT, message, next_step))


def install_extra(*extras: str) -> str:
    """`pip install '/where/it/came/from[tls]'`."""
    return "pip install " + shlex.quote(f"{_source()}[{','.join(extras)}]")


def _source() -> str:
    """A checkout or a wheel as pip has noted it; else the checkout that this file lies in."""
    try:
        noted: Any = json.loads(distribution("safepoint").read_text("direct_url.json") or "{}")
        url = str(cast("dict[str, Any]", noted).get("url", ""))
    except (PackageNotFoundError, OSError, ValueError, AttributeError):
        url = ""
    if url.startswith("file:"):
        return unquote(urlsplit(url).path)
    checkout = Path(__file__).resolve().parents[2]
    return str(checkout) if (checkout / "pyproject.toml").is_file() else "safepoint"
