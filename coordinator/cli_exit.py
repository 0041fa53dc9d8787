"""Exit codes of the `safepoint` command: one for each kind of cause, so that scripts can act without reading text.

The rule: the code says what the caller can do about it, and every `Reason` has exactly one. README prints these tables; a
test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from coordinator.wire.errors import CATALOG, Misanswered, Problem, Reason, SafepointError, Unanswered
from coordinator.wire.extras import NotInstalled


class ExitCode(IntEnum):
    """1 is left to Python itself, 2 is what every command line uses for wrong usage."""

    OK = 0
    USAGE = 2
    MISSING = 3
    REFUSED = 4
    UNANSWERED = 5
    DAMAGED = 6
    DRAIN = 7
    STORAGE = 8
    ACCESS = 9
    INTERNAL = 10
    VOID = 11
    NOT_FOUND = 12
    TOPOLOGY = 13
    INTERRUPTED = 130


MEANINGS: Final[Mapping[ExitCode, tuple[str, str]]] = MappingProxyType(
    {
        ExitCode.OK: ("done", "Go on."),
        ExitCode.USAGE: ("wrong arguments; nothing was changed", "Correct the command."),
        ExitCode.MISSING: ("something is missing here: a package, a file, a setting", "Install or set what is named."),
        ExitCode.REFUSED: ("refused, with the reason", "Do what the message says."),
        ExitCode.UNANSWERED: ("nobody answered in time; it may have been done", "Ask `safepoint status`, then repeat."),
        ExitCode.DAMAGED: ("the snapshot is damaged, unsafe, foreign or too new", "Restore another one."),
        ExitCode.DRAIN: (
            "work, an export or a load did not end in time; after a save everybody was told to open again",
            "Repeat with more time, or hold.",
        ),
        ExitCode.STORAGE: ("the storage is full or failed; older snapshots are untouched", "Free space, then repeat."),
        ExitCode.ACCESS: ("no valid token, or one that may not do this", "Set SAFEPOINT_TOKEN_FILE."),
        ExitCode.INTERNAL: ("a bug in Safepoint or in a participant", "Report it with the error id."),
        ExitCode.VOID: ("something changed while everybody was paused: the cut is void", "Repeat with new ids."),
        ExitCode.NOT_FOUND: ("no such snapshot, operation or participant", "Start from scratch, or correct the name."),
        ExitCode.TOPOLOGY: ("the servers as they are cannot be checkpointed together", "Mend every finding."),
        ExitCode.INTERRUPTED: ("interrupted; a running operation goes on", "`safepoint abort` ends it."),
    }
)

_CODES: Final[Mapping[ExitCode, tuple[Reason, ...]]] = {
    ExitCode.USAGE: (
        Reason.INVALID_ARGUMENT,
        Reason.DEADLINE_MISSING,
        Reason.MALFORMED_ID,
        Reason.DEADLINE_TOO_SHORT,
    ),
    ExitCode.REFUSED: (
        Reason.REQUEST_CONFLICT,
        Reason.STALE_EPOCH,
        Reason.FENCED,
        Reason.OPERATION_FINISHED,
        Reason.WRONG_PHASE,
        Reason.ABORTED,
        Reason.DECLINED,
        Reason.UNSUPPORTED,
        Reason.NOT_FRESH,
        Reason.SNAPSHOT_EXISTS,
        Reason.SNAPSHOT_IN_USE,
        Reason.STATE_UNSUPPORTED,
        Reason.REPLAY_DIVERGED,
        Reason.LIMIT_EXCEEDED,
    ),
    ExitCode.UNANSWERED: (Reason.UNREACHABLE, Reason.UNAVAILABLE),
    ExitCode.DAMAGED: (
        Reason.SNAPSHOT_CORRUPT,
        Reason.SNAPSHOT_TOO_NEW,
        Reason.SNAPSHOT_FOREIGN,
        Reason.SNAPSHOT_UNSAFE,
    ),
    ExitCode.DRAIN: (Reason.DRAIN_INCOMPLETE, Reason.PHASE_INCOMPLETE),
    ExitCode.STORAGE: (Reason.STORAGE_FULL, Reason.STORAGE_FAILED),
    ExitCode.ACCESS: (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED),
    ExitCode.INTERNAL: (Reason.UNSPECIFIED, Reason.INTERNAL, Reason.PROTOCOL_VIOLATION, Reason.LEDGER_UNBALANCED),
    ExitCode.VOID: (
        Reason.LEASE_LAPSED,
        Reason.INCARNATION_CHANGED,
        Reason.COORDINATOR_RESTARTED,
        Reason.ACTIVITY_AFTER_PREPARED,
        Reason.WORKERS_MISSING,
    ),
    ExitCode.NOT_FOUND: (Reason.SNAPSHOT_NOT_FOUND, Reason.UNKNOWN_OPERATION, Reason.UNKNOWN_PARTICIPANT),
    ExitCode.TOPOLOGY: (
        Reason.DUPLICATE_PARTICIPANT,
        Reason.ROLE_INVALID,
        Reason.POLICY_NOT_SERVED,
        Reason.TOPOLOGY_INVALID,
        Reason.FINGERPRINT_MISMATCH,
    ),
}
BY_REASON: Final[Mapping[Reason, ExitCode]] = MappingProxyType(
    {reason: code for code, reasons in _CODES.items() for reason in reasons}
)


# The catalog's advice in the words of the command line, where it speaks of what only a program has.
COMMANDS_SAY: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        Reason.INVALID_ARGUMENT: "Correct the named argument or option, and repeat the command.",
        Reason.DEADLINE_MISSING: "Give `--timeout`.",
        Reason.DEADLINE_TOO_SHORT: "Repeat with a longer `--timeout`.",
        Reason.REQUEST_CONFLICT: "Repeat it with the options of the first time, or leave out `--operation-id`.",
        Reason.OPERATION_FINISHED: "Leave out `--operation-id`: an operation is never begun twice.",
        Reason.FENCED: "Wait for the named operation to end, or end it with `safepoint abort`.",
        Reason.WRONG_PHASE: "`safepoint status` says what it waits for, and `safepoint abort` ends it.",
        Reason.SNAPSHOT_EXISTS: "Give another SNAPSHOT_ID, or none: then the name is made from the time. Names are never used again.",
        Reason.SNAPSHOT_FOREIGN: "Use the snapshot root (`--root`) and the job (SAFEPOINT_JOB) that it is of.",
    }
)


def spoken(problem: Problem) -> Problem:
    """The failure for whoever has typed a command: advice that is the catalog's in the words of the command line."""
    words = COMMANDS_SAY.get(problem.reason, "")
    return (
        replace(problem, next_step=words) if words and problem.advice == CATALOG[problem.reason].next_step else problem
    )


def exit_code(error: SafepointError) -> ExitCode:
    """The code of a failure. Nobody's answer, a broken protocol and a missing package weigh more than the reason beside them."""
    if isinstance(error, Unanswered):
        return ExitCode.UNANSWERED
    if isinstance(error, Misanswered):
        return ExitCode.INTERNAL
    if isinstance(error, NotInstalled):
        return ExitCode.MISSING
    return BY_REASON[error.reason]


def epilog() -> str:
    """The table, for the end of `safepoint --help`."""
    rows = "\n".join(f"{code.value:>3}  {meaning}" for code, (meaning, _) in MEANINGS.items())
    return f"Exit codes\n{rows}"
