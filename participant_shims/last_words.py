"""The last lines that a process has written into its log, for the error that names its death.

The rule: a quote, not the log: a few lines, without control characters, and without what looks like a secret. It goes to
everybody who sees the error. Lines that a logger or an error has written come before what else is printed: servers end their
start with a banner, and the last of that says nothing.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Final

LINES: Final = 3
LINE_CHARACTERS: Final = 110
BYTES: Final = 260  # in all: with the sentence it stands in, it must fit into a goodbye
_READ: Final = 8_192
_ESCAPES: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)")
_SECRETS: Final = re.compile(
    r"(?i)((?:authorization|api[_-]?key|access[_-]?key|token|secret|password)\W{1,4}(?:bearer\s+)?|bearer\s+)[^\s'\",;]+"
)
# A piece of a printed configuration: `'url': 'http://...',` on a line of its own.
_PIECE: Final = re.compile(r"""^['"][\w.-]+['"]\s*:""")
_TELLING: Final = re.compile(
    r"(?i:\b(trace|debug|info|warn|warning|error|critical|fatal|panic|exception|traceback|killed|aborted|fault)\b)"
    r"|\w(Error|Exception|Exit|Interrupt)\b|^\[?\d{4}-\d\d-\d\d|^\[?\d\d:\d\d:\d\d|^File .*, line \d+"
)


def last_words(path: str) -> str:
    """` The last of its log: "...", "..."`, or nothing where there is no such file, or none that can be read. Blocks shortly."""
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
    cleaned = map(_clean, raw.decode(errors="replace").splitlines())
    lines = [line for line in cleaned if any(map(str.isalpha, line)) and not _PIECE.match(line)]
    lines = [line for line in lines if _TELLING.search(line)] or lines
    quoted: list[str] = []
    left = BYTES
    for line in reversed(lines[-LINES:]):  # of what does not fit, the last line is what is wanted
        left -= len(line.encode()) + 4
        if left < 0:
            break
        quoted.insert(0, f'"{line}"')
    return f" The last of its log: {', '.join(quoted)}." if quoted else ""


def _clean(line: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in _ESCAPES.sub("", line))
    text = _SECRETS.sub(r"\1***", " ".join(text.split())).replace('"', "'")  # so that it is seen where a quote ends
    return text if len(text) <= LINE_CHARACTERS else text[: LINE_CHARACTERS - 3] + "..."
