"""Which process a note is about: a pid alone may name another one by now.

The rule kept here: a process is known by its pid and the time it began. One that has ended and waits for its parent to
notice is gone.
"""

from __future__ import annotations

import functools
import os
import signal
import stat
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


def standstill(pid: int) -> str:
    """Why a process that lives does nothing, as the end of a sentence, with what helps; empty when the kernel sees it run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    match text[text.rindex(")") + 2 : text.rindex(")") + 3]:
        case "T" | "t":
            return f"is stopped: `kill -CONT {pid}` lets it go on, `kill -9 {pid}` ends it"
        case "D":
            return "waits for a disk or a file server: look at the machine's log, and at its mounts"
        case _:
            return ""


def fate(pid: int, began: str) -> str:
    """How the process that had `pid` and began at `began` ended, as the end of a sentence; empty while it lives.

    The exit code of another's child can be seen only until its parent has collected it.
    """
    if lives(pid, began):
        return ""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "has ended"
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] != "Z" or (began and fields[19] != began):
        return "has ended"  # collected, and the number may be somebody else's by now
    status = int(fields[49])
    return how_ended(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def how_ended(code: int) -> str:
    """The same for one's own child. `code`: as subprocess has it, negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else ""
    return f"was ended by signal {-code}" + (f" ({name})" if name else "")


def output_of(pid: int) -> str:
    """The file that the standard error of a process goes to; empty when it is no file, or cannot be seen."""
    link = f"/proc/{pid}/fd/2"
    try:
        return os.readlink(link) if stat.S_ISREG(os.stat(link).st_mode) else ""
    except OSError:
        return ""


def own() -> tuple[int, str]:
    """The pid of this process, and when it began."""
    return _own(os.getpid())


@functools.lru_cache(maxsize=1)
def _own(pid: int) -> tuple[int, str]:  # by pid, so that a child does not take itself for its parent
    return pid, started(pid)
