"""Which process a note is about: a pid alone may name another one by now.

The rule kept here: a process is known by its pid and the time it began. One that has ended and waits for its parent to
notice is gone.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path


def started(pid: int) -> str:
    """When a process began, in ticks since boot; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text[text.rindex(")") + 2 :].split()
    return "" if fields[0] == "Z" else fields[19]


def lives(pid: int, began: str) -> bool:
    """Whether the process that had `pid` and began at `began` is there still."""
    return bool(began) and started(pid) == began


def own() -> tuple[int, str]:
    """The pid of this process, and when it began."""
    return _own(os.getpid())


@functools.lru_cache(maxsize=1)
def _own(pid: int) -> tuple[int, str]:  # by pid, so that a child does not take itself for its parent
    return pid, started(pid)
