"""Looks through the built site: no page may load anything from elsewhere.

python -m scripts.docs_site build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

_LOADED: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}


class _Loads(HTMLParser):
    """What a page loads while it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and set((given.get("rel") or "").split()) & {"stylesheet", "icon", "preload", "preconnect"}:
            self.found.append(given.get("href") or "")
        if tag in _LOADED:
            self.found.append(given.get(_LOADED[tag]) or "")


def loads(html: str) -> list[str]:
    """Addresses beyond the site that a page would load."""
    parser = _Loads()
    parser.feed(html)
    return [address for address in parser.found if "//" in address]


def main(directory: str) -> int:
    """Exit code 1 when a page does, or there is none."""
    pages = sorted(Path(directory).rglob("*.html"))
    bad = [f"{page}: {address}" for page in pages for address in loads(page.read_text(encoding="utf-8"))]
    for line in bad:
        print(line, file=sys.stderr)
    return 1 if bad or not pages else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
