"""The table of known bugs as Markdown.

python -m tests.known_bugs.render          rewrites docs/known-bugs.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.known_bugs.table import ROWS, SECTIONS, Row

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "known-bugs.md"


def document() -> str:
    """The whole page."""
    tested = sum(bool(row.tests) for row in ROWS)
    parts = [
        "# Known bugs, and the tests that keep them out\n",
        "What others ran into when they paused, saved and restored rollouts that run, each turned into a rule.\n"
        f"{len(ROWS)} rows: {tested} are held by tests, {len(ROWS) - tested} say why there is none.\n"
        "Rendered from `tests/known_bugs/table.py` by `python -m tests.known_bugs.render`; a test compares.\n",
    ]
    for title, rows in SECTIONS.items():
        lines = ["| # | seen in | rule | held by |", "| --- | --- | --- | --- |", *map(_line, rows)]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(row: Row) -> str:
    held = "<br>".join(f"`{test}`" for test in row.tests) or f"*No test:* {row.reason}"
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (row.id, row.source, row.rule, held)) + " |"


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(), encoding="utf-8")
