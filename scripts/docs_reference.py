"""Writes docs/reference/, or with --check says which of its pages are stale.

    python -m scripts.docs_reference [--check]

The rule: nobody edits those pages by hand. Each module `docs_NAME` beside this one renders one page from its source.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

for _name in [name for name in os.environ if name.startswith("SAFEPOINT_")]:
    del os.environ[_name]  # defaults that come from the environment are nobody's defaults

from scripts import docs_cli, docs_environment, docs_errors, docs_metrics, docs_proto, docs_settings  # noqa: E402

DIRECTORY: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "cli.md": docs_cli.render,
    "settings.md": docs_settings.render,
    "environment.md": docs_environment.render,
    "metrics.md": docs_metrics.render,
    "errors.md": docs_errors.render,
    "protocol.md": docs_proto.render,
}


def tidy(text: str) -> str:
    """Without blanks at line ends and without runs of empty lines."""
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [line for number, line in enumerate(lines) if line or (number and lines[number - 1])]
    return "\n".join(kept).strip() + "\n"


def main(arguments: list[str]) -> int:
    """Exit code 1 when --check finds a stale page."""
    stale = []
    for name, render in PAGES.items():
        path, text = DIRECTORY / name, tidy(render())
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            DIRECTORY.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale and "--check" in arguments:
        print(
            f"stale: {', '.join(f'docs/reference/{name}' for name in stale)}. Run `make docs-reference`.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
