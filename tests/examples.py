"""How many examples a property is tried with: a third of what it is worth in every run, all in `make properties`."""

from __future__ import annotations

import os


def examples(worth: int) -> int:
    """`worth`, when SAFEPOINT_EXAMPLES is `all`."""
    return worth if os.environ.get("SAFEPOINT_EXAMPLES") == "all" else max(10, worth // 3)
