"""The catalog of reasons and the SafepointError family: one table, three readers.

A reason is a stable code. The catalog says for each its gRPC status, whether anything can have been paused when it is
reported, and what the caller does next. `proto/README.md` prints the same table and `errors.proto` the same numbers;
tests hold the three together.

Three kinds of failure, since callers act differently on each:

- `Refused`: the peer said no, with a reason. The effect is known: what the catalog says.
- `Unanswered`: nothing came back. The effect is unknown and is treated as done until status says otherwise (rule 3).
- `Misanswered`: the peer broke the protocol. The operation is void.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from coordinator.wire.terms import Named, Phase


class Reason(Named):
    """Stable codes; numbers equal those of `errors.proto`."""

    UNSPECIFIED = 0
    INVALID_ARGUMENT = 1
    DEADLINE_MISSING = 2
    MALFORMED_ID = 3
    DEADLINE_TOO_SHORT = 4
    REQUEST_CONFLICT = 5
    STALE_EPOCH = 30
    FENCED = 31
    OPERATION_FINISHED = 32
    WRONG_PHASE = 33
    LEASE_LAPSED = 34
    INCARNATION_CHANGED = 35
    UNKNOWN_OPERATION = 36
    ABORTED = 37
    DRAIN_INCOMPLETE = 38
    ACTIVITY_AFTER_PREPARED = 39
    DECLINED = 40
    LEDGER_UNBALANCED = 41
    PHASE_INCOMPLETE = 42
    COORDINATOR_RESTARTED = 43
    UNKNOWN_PARTICIPANT = 60
    DUPLICATE_PARTICIPANT = 61
    ROLE_INVALID = 62
    POLICY_NOT_SERVED = 63
    TOPOLOGY_INVALID = 64
    FINGERPRINT_MISMATCH = 65
    WORKERS_MISSING = 66
    UNREACHABLE = 67
    PROTOCOL_VIOLATION = 68
    UNSUPPORTED = 69
    NOT_FRESH = 70
    SNAPSHOT_NOT_FOUND = 90
    SNAPSHOT_EXISTS = 91
    SNAPSHOT_CORRUPT = 92
    SNAPSHOT_TOO_NEW = 93
    SNAPSHOT_FOREIGN = 94
    SNAPSHOT_UNSAFE = 95
    SNAPSHOT_IN_USE = 96
    STORAGE_FULL = 97
    STORAGE_FAILED = 98
    STATE_UNSUPPORTED = 99
    REPLAY_DIVERGED = 100
    UNAUTHENTICATED = 120
    PERMISSION_DENIED = 121
    LIMIT_EXCEEDED = 122
    INTERNAL = 140
    UNAVAILABLE = 141


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """What a reason means to the one who receives it."""

    code: str  # name of the gRPC status code
    paused: bool  # whether somebody may be paused when this is reported
    next_step: str  # default advice; an error may carry a better one
    aborted: str = ""  # the same once the operation has been aborted, where `next_step` asks for that


def _entry(code: str, paused: bool, next_step: str, aborted: str = "") -> CatalogEntry:
    return CatalogEntry(code, paused, next_step, aborted)


# fmt: off
CATALOG: Final[Mapping[Reason, CatalogEntry]] = MappingProxyType({
    Reason.UNSPECIFIED:             _entry("INTERNAL", True, "Treat as INTERNAL: look into the log of the process."),
    Reason.INVALID_ARGUMENT:        _entry("INVALID_ARGUMENT", False, "Correct the named field and call again."),
    Reason.DEADLINE_MISSING:        _entry("INVALID_ARGUMENT", False, "Set a deadline on the call."),
    Reason.MALFORMED_ID:            _entry("INVALID_ARGUMENT", False, "Use 1 to 128 characters of [A-Za-z0-9._-], the first a letter or digit."),
    Reason.DEADLINE_TOO_SHORT:      _entry("DEADLINE_EXCEEDED", False, "Call again with a longer deadline."),
    Reason.REQUEST_CONFLICT:        _entry("ALREADY_EXISTS", False, "Use a new operation_id, or repeat the first request unchanged."),
    Reason.STALE_EPOCH:             _entry("FAILED_PRECONDITION", False, "Stop: a newer coordinator owns the participants."),
    Reason.FENCED:                  _entry("ABORTED", False, "Wait for the named operation to end, or abort it."),
    Reason.OPERATION_FINISHED:      _entry("FAILED_PRECONDITION", False, "Start a new operation: ids are never reused."),
    Reason.WRONG_PHASE:             _entry("FAILED_PRECONDITION", False, "Call the phases in order; GetStatus says which one is due."),
    Reason.LEASE_LAPSED:            _entry("FAILED_PRECONDITION", False, "Abort the operation: the participant has opened by itself. Renew earlier, or set a longer lease.", "Start a new operation when the named participant runs and is reached in time again, or with a longer lease (`--lease`)."),
    Reason.INCARNATION_CHANGED:     _entry("FAILED_PRECONDITION", True, "Abort the operation and start a new one: a process was restarted in between.", "Start a new operation: a process was restarted in between."),
    Reason.UNKNOWN_OPERATION:       _entry("NOT_FOUND", False, "Look at `safepoint history` for the operations there are."),
    Reason.ABORTED:                 _entry("ABORTED", False, "Start a new operation when the cause is gone."),
    Reason.DRAIN_INCOMPLETE:        _entry("DEADLINE_EXCEEDED", True, "See where the named rollouts stand (`safepoint why --stacks`); give them more time (`--grace`, `--timeout`), or let them restart (`--stragglers exclude`)."),
    Reason.ACTIVITY_AFTER_PREPARED: _entry("ABORTED", True, "Abort: the named participant did not stop. Report it to the maker of its adapter.", "Start a new operation. If it comes again, report it to the maker of the adapter: the named participant did not stop."),
    Reason.DECLINED:                _entry("ABORTED", False, "Mend what the participant says, then start a new operation."),
    Reason.LEDGER_UNBALANCED:       _entry("ABORTED", True, "Abort and report: a rollout is in no state, or in two.", "Report it: a rollout is in no state, or in two."),
    Reason.PHASE_INCOMPLETE:        _entry("DEADLINE_EXCEEDED", True, "Give the operation more time: the message says how far it was."),
    Reason.COORDINATOR_RESTARTED:   _entry("FAILED_PRECONDITION", True, "Abort the operation and start a new one: its coordinator was started again in between.", "Start a new operation: its coordinator was started again in between."),
    Reason.UNKNOWN_PARTICIPANT:     _entry("NOT_FOUND", False, "Look at `safepoint topology` for the participants there are."),
    Reason.DUPLICATE_PARTICIPANT:   _entry("ALREADY_EXISTS", False, "Stop the other shim of that name, or give this one another."),
    Reason.ROLE_INVALID:            _entry("INVALID_ARGUMENT", False, "Declare a role that the server's kind can have."),
    Reason.POLICY_NOT_SERVED:       _entry("FAILED_PRECONDITION", False, "Set role auxiliary on the named model server."),
    Reason.TOPOLOGY_INVALID:        _entry("FAILED_PRECONDITION", False, "Mend every finding; `safepoint topology` lists them."),
    Reason.FINGERPRINT_MISMATCH:    _entry("FAILED_PRECONDITION", False, "Bring the servers back to the configuration of the snapshot, or start without it."),
    Reason.WORKERS_MISSING:         _entry("ABORTED", False, "Repeat in a few seconds: a server replaces a worker that has died. Restart the server if it stays missing, or if its log has a line that begins with `safepoint:`."),
    Reason.UNREACHABLE:             _entry("UNAVAILABLE", True, "See whether the named process lives; then start a new operation."),
    Reason.PROTOCOL_VIOLATION:      _entry("ABORTED", True, "Abort, and report it to the maker of the participant.", "Report it to the maker of the participant."),
    Reason.UNSUPPORTED:             _entry("UNIMPLEMENTED", False, "Ask for something the participant's capabilities offer."),
    Reason.NOT_FRESH:               _entry("FAILED_PRECONDITION", True, "Abort, restart the servers (under `gym env start` all of them), and restore before they get work.", "Restart the servers (under `gym env start` all of them), and restore before they get work."),
    Reason.SNAPSHOT_NOT_FOUND:      _entry("NOT_FOUND", False, "Look at `safepoint snapshots ls` for the snapshots there are."),
    Reason.SNAPSHOT_EXISTS:         _entry("ALREADY_EXISTS", False, "Choose a new snapshot_id: ids are never reused."),
    Reason.SNAPSHOT_CORRUPT:        _entry("DATA_LOSS", False, "Restore an older snapshot: `safepoint restore latest` takes the newest one that verifies."),
    Reason.SNAPSHOT_TOO_NEW:        _entry("UNIMPLEMENTED", False, "Install a Safepoint at least as new as the one that wrote it."),
    Reason.SNAPSHOT_FOREIGN:        _entry("FAILED_PRECONDITION", False, "Use the snapshot root and the job_id of this job."),
    Reason.SNAPSHOT_UNSAFE:         _entry("INVALID_ARGUMENT", False, "Do not restore it: somebody has changed the snapshot."),
    Reason.SNAPSHOT_IN_USE:         _entry("FAILED_PRECONDITION", False, "Wait for the restore to end."),
    Reason.STORAGE_FULL:            _entry("RESOURCE_EXHAUSTED", True, "Free space or prune snapshots, then repeat."),
    Reason.STORAGE_FAILED:          _entry("UNAVAILABLE", True, "See that the snapshot root is mounted and can be written, then repeat."),
    Reason.STATE_UNSUPPORTED:       _entry("FAILED_PRECONDITION", True, "Give the server an export hook, or accept that its rollouts restart; `safepoint inspect` says why."),
    Reason.REPLAY_DIVERGED:         _entry("FAILED_PRECONDITION", True, "Nothing is lost but time: the rollout begins again from its input. It is continued where the agent makes the same calls again: take time, chance (seed it by the rollout) and what is read from outside out of what it sends, or let a server answer them."),
    Reason.UNAUTHENTICATED:         _entry("UNAUTHENTICATED", False, "Send the token that the other side was started with (SAFEPOINT_TOKEN_FILE)."),
    Reason.PERMISSION_DENIED:       _entry("PERMISSION_DENIED", False, "Use credentials that may call this."),
    Reason.LIMIT_EXCEEDED:          _entry("RESOURCE_EXHAUSTED", False, "Stay under the named limit."),
    Reason.INTERNAL:                _entry("INTERNAL", True, "Look for the error id in the log of the process, and report it."),
    Reason.UNAVAILABLE:             _entry("UNAVAILABLE", False, "Try again shortly."),
})
# fmt: on


@dataclass(frozen=True, slots=True)
class Blocked:
    """One rollout that somebody waits for. `age_s` in seconds; `no_client_s`: seconds since its last client left, if it did."""

    rollout_id: str
    attempt: int = 0
    turn: int = 0
    age_s: float = 0.0
    waiting_on: str = ""
    no_client_s: float | None = None

    def __str__(self) -> str:
        where = f", waiting on {self.waiting_on}" if self.waiting_on else ""
        orphaned = f", no client for {self.no_client_s:.0f} s" if self.no_client_s is not None else ""
        return f"{self.rollout_id} (turn {self.turn}, {self.age_s:.0f} s{where}{orphaned})"


# Metadata of UNREACHABLE where the call was never sent, so that it has changed nothing.
NOBODY_REACHED: Final[Mapping[str, str]] = MappingProxyType({"reached": "nobody"})

# Metadata of UNREACHABLE where nothing says that the process is gone: it may be stopped, or too busy to say a word.
SILENT: Final[Mapping[str, str]] = MappingProxyType({"heard": "nothing"})

# Keys of a loss's metadata: how the process ended; and that nobody has ended, and it was the coordinator that did not run.
ENDED: Final = "ended"
SLEPT: Final = "slept"
# Metadata of a refusal at the door: the job of the coordinator that the caller has come to, which is not its own.
JOB: Final = "job_id"
# Metadata of LEASE_LAPSED: the restore whose state the server holds still, so that a Resume of it would find everything.
STILL_LOADED: Final = "still_loaded"


@dataclass(frozen=True, slots=True)
class Problem:
    """A failure as a value: what travels in ErrorDetail, and what the core keeps."""

    reason: Reason
    message: str
    next_step: str = ""
    phase: Phase = Phase.UNSPECIFIED
    participant_id: str = ""
    operation_id: str = ""
    rollouts: tuple[Blocked, ...] = ()
    rollout_count: int = 0
    waited_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    retry_after_s: float | None = None  # the same call may succeed after so many seconds

    @property
    def advice(self) -> str:
        """What to do next: this problem's own advice, else the catalog's."""
        return self.next_step or CATALOG[self.reason].next_step

    def __str__(self) -> str:
        where = " ".join(
            part
            for part in (
                f"[{self.phase.name.lower()}]" if self.phase else "",
                f"{self.participant_id}:" if self.participant_id else "",
            )
            if part
        )
        text = f"{where} {self.message}".strip()
        if self.rollouts:
            shown = ", ".join(str(r) for r in self.rollouts[:5])
            more = max(self.rollout_count, len(self.rollouts)) - min(5, len(self.rollouts))
            text += f" Waiting for {shown}" + (f" and {more} more." if more > 0 else ".")
        if self.waited_s is not None:
            text += f" Waited {self.waited_s:.1f} s."
        return f"{text} Next: {self.advice}"


class SafepointError(Exception):
    """Base of every error a user of Safepoint meets. `problem` has the whole truth; the text is made from it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem

    @property
    def reason(self) -> Reason:
        return self.problem.reason

    @property
    def participant_id(self) -> str:
        return self.problem.participant_id

    @property
    def rollouts(self) -> Sequence[Blocked]:
        return self.problem.rollouts


class Refused(SafepointError):
    """The peer said no. What changed is what the catalog says of the reason."""


class Unanswered(SafepointError):
    """Nothing came back in time. Whether it was done is unknown: treat it as done (rule 3)."""


class Misanswered(SafepointError):
    """The peer answered what the protocol does not allow. The operation is void."""


def refuse(reason: Reason, message: str, **details: object) -> Refused:
    """A `Refused` with a `Problem` made from `details`; for `raise refuse(...)`."""
    return Refused(Problem(reason, message, **details))  # type: ignore[arg-type]
