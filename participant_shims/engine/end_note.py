"""How an engine has ended, noted by `safepoint serve` for the shim beside it, which tells the coordinator.

The rule: whoever starts an engine collects its exit code and has read its last lines; nobody else can know them. The note
is for the shims of its writer alone: one that a killed `serve` has left says nothing to the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from participant_shims.gate.process import how_ended
from participant_shims.last_words import quoted

NAME: Final = "ended.json"


def engine_ended(name: str, pid: int, code: int, at_s: float, lines: Sequence[str], hung: bool = False) -> str:
    """What is told of an engine that ended by itself. `code`: as subprocess has it; `at_s`: seconds since 1970; `lines`: the
    last that it has printed; `hung`: it had closed its port and did not end, and was killed for it."""
    how = "closed its port, did not end and was killed" if hung else how_ended(code)
    when = time.strftime("%H:%M:%SZ", time.gmtime(at_s))
    return (
        f"The engine {name} (vLLM, pid {pid}) {how} at {when}, and its shim ended with it. Start its `safepoint serve` "
        f"again.{quoted(lines)}"
    )


class EndNote:
    """In the directory `life`. Nothing here raises OSError: an engine ends without a note too."""

    def __init__(self, life: Path) -> None:
        self._path = life / NAME

    def write(self, by: int, said: str) -> None:
        """`by`: the pid of the `serve` that has seen it; `said`: a sentence."""
        temporary = self._path.with_name(f".{NAME}.{by}")
        try:
            temporary.write_text(json.dumps({"by": by, "said": said}) + "\n")
            temporary.rename(self._path)
        except OSError:
            pass

    def read(self, parent: int) -> str:
        """What the process `parent` has noted; empty when it has noted nothing."""
        try:
            found: Any = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return ""
        note = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        return str(note.get("said", "")) if note.get("by") == parent else ""

    def remove(self) -> None:
        """The shim has been told."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            pass
