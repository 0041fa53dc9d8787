"""The table of failures as Markdown.

python -m tests.failures.render          rewrites docs/failures.md
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.failures.table import ROWS, SECTIONS
from tests.known_bugs.table import Row

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
# Words that mean something here, and where that is said: the first use of each leads there.
WORDS: Final = {
    "cut": "concepts.md#why-the-cut-is-consistent",
    "fence": "concepts.md#when-processes-die",
    "thaw": "concepts.md#when-processes-die",
    "lease": "concepts.md#when-processes-die",
}


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
    left = dict(WORDS)
    for title, rows in SECTIONS.items():
        if rows:
            lines = [
                "| # | failure | what happens | held by |",
                "| --- | --- | --- | --- |",
                *(_line(row, left) for row in rows),
            ]
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _linked(text: str, left: dict[str, str]) -> str:
    """With a link at each word that is `left`, which it is no more then."""
    for word, place in list(left.items()):
        noun = r"(?:the|its|a) " if word == "cut" else ""  # a stream or a file may be cut, too
        text, found = re.subn(rf"\b({noun})({word}(?:s|ed|d)?)\b", rf"\1[\2]({place})", text, count=1, flags=re.I)
        if found:
            del left[word]
    return text


def _line(row: Row, left: dict[str, str]) -> str:
    held = "<br>".join(f"`{test}`" for test in row.tests) or f"*No test:* {row.reason}"
    return (
        "| "
        + " | ".join(
            cell.replace("|", "\\|") for cell in (row.id, _linked(row.source, left), _linked(row.rule, left), held)
        )
        + " |"
    )


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
