"""What a case of the fault matrix has shown, and the file and the words in which it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from coordinator.wire.errors import SafepointError


@dataclass
class Result:
    """One row. `thaw_s`: from the fault until the last gate was open; `lost`: rollouts without their result, or without a line in a ledger."""

    name: str
    process: str
    failpoint: str
    fault: str
    trigger: str
    ok: bool = True
    what_happened: str = ""
    thaw_s: float = 0.0
    lost: int = 0
    restarted: int = 0
    repeated: int = 0
    next_save: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    def blame(self, what: str) -> None:
        """Something that must not be."""
        self.ok = False
        self.wrong.append(what)

    def happened(self, what: str) -> None:
        self.what_happened += ("; " if self.what_happened else "") + what


def say(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, SafepointError):
        who = f" by {error.problem.participant_id}" if error.problem.participant_id else ""
        return f"{error.reason.name}{who}"
    return f"{type(error).__name__}: {str(error)[:80]}"


def as_json(failpoints: int, lease_s: float, results: list[Result]) -> str:
    """build/faults.json. `lease_s`: of every participant, which bounds `thaw_s` when the owner of the pause is gone."""
    rows = [
        {
            "name": r.name, "process": r.process, "failpoint": r.failpoint, "fault": r.fault, "trigger": r.trigger,
            "ok": r.ok, "what_happened": r.what_happened, "thaw_s": r.thaw_s, "lost": r.lost, "restarted": r.restarted,
            "repeated": r.repeated, "next_save": r.next_save, "seconds": r.seconds, "wrong": r.wrong,
        }
        for r in results
    ]  # fmt: skip
    return json.dumps({"failpoints": failpoints, "lease_s": lease_s, "cases": rows}, indent=1) + "\n"
