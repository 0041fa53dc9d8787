"""The table of failures as Markdown.

python -m tests.failures.render          rewrites docs/failures.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.failures.table import ROWS, SECTIONS
from tests.known_bugs.table import Row

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "failures.md"


def document() -> str:
    """The whole page."""
    tested = sum(bool(row.tests) for row in ROWS)
    parts = [
        "# Failures, and the tests that show what happens then\n",
        "Each row is a failure, what Safepoint does then, and the tests that hold it to that.\n"
        f"{len(ROWS)} rows: {tested} are held by tests, {len(ROWS) - tested} say why there is none.\n"
        "A name that ends in `.txt` is a scenario of the pure core, with every effect in its order.\n"
        "Tests below `ray/` kill nodes of a real Ray cluster: `make test-ray`.\n"
        "Rendered from `tests/failures/table.py` by `python -m tests.failures.render`; a test compares.\n",
    ]
    for title, rows in SECTIONS.items():
        if rows:
            lines = ["| # | failure | what happens | held by |", "| --- | --- | --- | --- |", *map(_line, rows)]
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(row: Row) -> str:
    held = "<br>".join(f"`{test}`" for test in row.tests) or f"*No test:* {row.reason}"
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (row.id, row.source, row.rule, held)) + " |"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
