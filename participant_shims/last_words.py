"""The last lines that a process has written into its log, for the error that names its death.

The rule: a quote, not the log: a few lines, without control characters, and without what looks like a secret. It goes to
everybody who sees the error. Lines that a logger or an error has written come before what else is printed: servers end their
start with a banner, and the last of that says nothing. Nobody is quoted for another one: `gym env start` gives one file to
all its servers, whose main processes begin each line with `(name) `, and to its head, which does not.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from typing import Final

LINES: Final = 3
LINE_CHARACTERS: Final = 110
BYTES: Final = 260  # in all: with the sentence it stands in, it must fit into a goodbye
_READ: Final = 65_536  # in a shared file others may have written the last pages
_ESCAPES: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
_SECRETS: Final = re.compile(
    r"(?i)((?:authorization|api[_-]?key|access[_-]?key|token|secret|password)\W{1,4}(?:bearer\s+)?|bearer\s+)[^\s'\",;]+"
)
# A piece of a printed configuration: `'url': 'http://...',` on a line of its own.
_PIECE: Final = re.compile(r"""^['"][\w.-]+['"]\s*:""")
_PREFIX: Final = re.compile(r"^\(([\w.-]+)\) ")
_RAY: Final = frozenset({"raylet", "gcs_server", "autoscaler"})  # so Ray prints in the log of whoever uses it
_TELLING: Final = re.compile(
    r"(?i:\b(trace|debug|info|warn|warning|error|critical|fatal|panic|exception|traceback|killed|aborted|fault)\b)"
    r"|\w(Error|Exception|Exit|Interrupt)\b|^\[?\d{4}-\d\d-\d\d|^\[?\d\d:\d\d:\d\d|^File .*, line \d+"
)


def last_words(path: str, name: str = "", workers: int = 1) -> str:
    """` The last of its log: "...", "..."`, or nothing where there is no such file, none that can be read, or none of whose
    lines is known to be of server `name`. Of several `workers` only the main process writes the prefix. Blocks shortly."""
    if not path:
        return ""
    try:
        # NONBLOCK: a FIFO of that name must not hang us.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return ""
            raw = os.pread(fd, _READ, max(0, found.st_size - _READ))
        finally:
            os.close(fd)
    except OSError:
        return ""
    return _quote(_of(name, [_clean(line) for line in raw.decode(errors="replace").splitlines()], workers))


def quoted(lines: Sequence[str]) -> str:
    """The same of lines that somebody has read."""
    return _quote([_clean(line) for line in lines])


def _quote(cleaned: list[str]) -> str:
    lines = [_cut(line) for line in cleaned if any(map(str.isalpha, line)) and not _PIECE.match(line)]
    lines = [line for line in lines if _TELLING.search(line)] or lines
    chosen: list[str] = []
    left = BYTES
    for line in reversed(lines[-LINES:]):  # of what does not fit, the last line is what is wanted
        left -= len(line.encode()) + 4
        if left < 0:
            break
        chosen.insert(0, f'"{line}"')
    return f" The last of its log: {', '.join(chosen)}." if chosen else ""


def _of(name: str, lines: list[str], workers: int) -> list[str]:
    """The lines of that server, without its prefix: those that have it, or all of a file that is its own."""
    writers = [match.group(1) if (match := _PREFIX.match(line)) else "" for line in lines]
    shared = not {"", name, *_RAY}.issuperset(writers)
    if shared or (workers <= 1 and name and name in writers):
        lines = [line for line, writer in zip(lines, writers, strict=True) if name and writer == name]
    return [line.removeprefix(f"({name}) ") for line in lines]


def _clean(line: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", line))
    return _SECRETS.sub(r"\1***", " ".join(text.split())).replace('"', "'")  # so that it is seen where a quote ends


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS else text[: LINE_CHARACTERS - 3] + "..."
