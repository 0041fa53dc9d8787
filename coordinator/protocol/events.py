"""What goes into the core and what comes out: events and effects, and nothing else.

PURE. The one rule: `Transaction.step(event)` returns effects in the order in which they must be performed; a Record
precedes the calls that it covers. How they are driven:

    effects = transaction.step(Begin(now, deadline, operation, topology))
    for effect in effects:
        Record     append to the journal and fsync. If that fails and `required`: drop the rest of this list and step
                   RecordFailed. If it is not required: log the failure and go on (opening never needs a disk). Records
                   that only help recovery come after the calls: whatever has no manifest is presumed aborted.
        Call       start the RPC, do not wait. Its end is stepped as Replied, RefusedBy, NoAnswer or Misanswered with the
                   same call_no, its stream events before that as ProgressReported. Never repeat it: the core does.
        Cancel     cancel the RPC of call_no, if it runs. Its end may still be stepped; it is then ignored.
        Publish    write the snapshot; step Published or PublishFailed. Look at `transaction.publish_until()` right
                   before the manifest is linked, and fail with LEASE_LAPSED when that time has passed.
        SetTimer   step Tick(now) at that time. Replaces the timer before it; `at=None` removes it.
        Announce   tell whoever follows the operation.
        Ignored    a reply that decides nothing; count it.
        Await      the operation stands still until the trainer's next call; answer the call that led here.
        Reject     the request just stepped (CommitRequested ...) is not legal now; nothing changed. Answer with it.
        Finish     the operation has ended; answer everybody. A later step can only return opening calls and Ignored.

Between steps the driver renews the leases of `transaction.leases()` every third of the lease, and steps LeaseRenewed or
LeaseLost. All times (`now`, `deadline`, `at`) are seconds of one monotonic clock; durations end in `_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from coordinator.protocol.operation import Operation, Outcome, RestoreSource, Stage
from coordinator.protocol.proofs import Committed, Progress, Proof
from coordinator.protocol.topology import Topology
from coordinator.wire.errors import Problem
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.places import Placement
from coordinator.wire.terms import Phase, QuiesceMode, StragglerPolicy

# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Start. `deadline` is when the phases up to publish must have ended; `Limits.reserve_s` comes on top of it."""

    now: float
    deadline: float
    operation: Operation
    topology: Topology


@dataclass(frozen=True, slots=True)
class Recover:
    """After `Transaction.from_records`: settle what the journal held."""

    now: float


@dataclass(frozen=True, slots=True)
class Replied:
    """A call ended with OK and this proof."""

    now: float
    call_no: int
    proof: Proof


@dataclass(frozen=True, slots=True)
class RefusedBy:
    """A call ended with a reason: the effect is known."""

    now: float
    call_no: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A call ended without answer: it counts as applied (rule 3), and is repeated a few times."""

    now: float
    call_no: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class Misanswered:
    """A call ended with something the protocol does not allow, e.g. a stream that ends before its proof."""

    now: float
    call_no: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """A running call said how far it is."""

    now: float
    call_no: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class ParticipantLost:
    """Its registration ended or fell silent. Within `explained_within_s` seconds somebody may say how; zero: nobody will."""

    now: float
    participant_id: ParticipantId
    problem: Problem
    explained_within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LossExplained:
    """How the process of a participant that is lost has ended. `how`: a sentence."""

    now: float
    participant_id: ParticipantId
    how: str


@dataclass(frozen=True, slots=True)
class IncarnationChanged:
    """A shim of that name registered with another incarnation."""

    now: float
    participant_id: ParticipantId
    incarnation_id: IncarnationId


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """RenewLease answered. `sent_at` is when it was sent: the remainder counts from there, to be safe."""

    now: float
    participant_id: ParticipantId
    sent_at: float
    lease_remaining_s: float


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """RenewLease was refused (LEASE_LAPSED, OPERATION_FINISHED, ...): the participant is not closed for us any more.

    A renewal without answer is no such event: the next one is tried.
    """

    now: float
    participant_id: ParticipantId
    problem: Problem


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """A required Record could not be made durable; the effects after it were not performed."""

    now: float
    problem: Problem


@dataclass(frozen=True, slots=True)
class Published:
    """The snapshot's manifest is durable: the one commit point is passed."""

    now: float


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The manifest is not there and never will be. When the driver can't know, it must look at the disk first."""

    now: float
    problem: Problem


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True)
class Slept:
    """The coordinator has not run, for so many seconds while the operation ran; given before anything that comes of it.

    `said`: that, as a sentence.
    """

    now: float
    seconds: float
    said: str


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The trainer or a person gives up."""

    now: float
    cause: str = ""


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """Trainer-driven: go on with commit, until `deadline`."""

    now: float
    deadline: float


@dataclass(frozen=True, slots=True)
class PublishRequested:
    """Trainer-driven: confirm and publish, until `deadline`."""

    now: float
    deadline: float


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Open admission after publish or restore."""

    now: float


@dataclass(frozen=True, slots=True)
class TrainerHeard:
    """Any other call of the trainer for this operation, such as a repeated Prepare: its pause still has an owner."""

    now: float


Request = AbortRequested | CommitRequested | PublishRequested | ResumeRequested
Event = (
    Begin
    | Recover
    | Replied
    | RefusedBy
    | NoAnswer
    | Misanswered
    | ProgressReported
    | ParticipantLost
    | LossExplained
    | IncarnationChanged
    | LeaseRenewed
    | LeaseLost
    | RecordFailed
    | Slept
    | Published
    | PublishFailed
    | Tick
    | TrainerHeard
    | Request
)

# ---- effects --------------------------------------------------------------------------------------------------------


class RecordKind(StrEnum):
    """What the journal holds of an operation, in this order."""

    BEGUN = "begun"  # operation and topology; everybody in it may hear of the operation from now on
    PUBLISHING = "publishing"  # the manifest may be there: ask the disk
    PUBLISHED = "published"
    RESTORED = "restored"
    FAILED_PAUSED = "failed-paused"
    RESUMING = "resuming"
    ABORTING = "aborting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Record:
    """Make this durable before what follows. `data` is plain JSON. `records.ended` reads an ENDED one."""

    kind: RecordKind
    data: Mapping[str, object]
    required: bool = True


@dataclass(frozen=True, slots=True)
class PrepareArguments:
    """For Participant.Prepare."""

    quiesce_mode: QuiesceMode
    straggler_policy: StragglerPolicy
    straggler_grace_s: float
    lease_ttl_s: float


@dataclass(frozen=True, slots=True)
class CommitArguments:
    """For Participant.Commit."""

    snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class ConfirmArguments:
    """For Participant.Confirm."""

    incarnation_id: IncarnationId
    generation: int


@dataclass(frozen=True, slots=True)
class RestoreArguments:
    """For Participant.Restore."""

    snapshot_id: SnapshotId
    manifest_sha256: str
    source_participant_id: str
    lease_ttl_s: float
    sources: tuple[RestoreSource, ...] = ()
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumeArguments:
    """For Participant.Resume."""


@dataclass(frozen=True, slots=True)
class AbortArguments:
    """For Participant.Abort."""

    cause: str


Arguments = PrepareArguments | CommitArguments | ConfirmArguments | RestoreArguments | ResumeArguments | AbortArguments


@dataclass(frozen=True, slots=True)
class Call:
    """Call the participant; `timeout_s` is the RPC's deadline. The context is that of `operation_id` and our epoch."""

    call_no: int
    participant_id: ParticipantId
    phase: Phase
    timeout_s: float
    operation_id: OperationId
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this call any more."""

    call_no: int
    participant_id: ParticipantId


@dataclass(frozen=True, slots=True)
class Publish:
    """Write ledger and snapshot manifest. `committed` has everybody who commits; others bind with an empty digest.

    `valid_until`: what `publish_until()` says now; renewals may move it.
    """

    snapshot_id: SnapshotId
    committed: Mapping[ParticipantId, Committed]
    valid_until: float


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Wake the core at this time."""

    at: float | None


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """A phase began; who is called, in the order of the waves. `budget_s`: the longest it may take; None: unbounded."""

    phase: Phase
    participant_ids: tuple[ParticipantId, ...]
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class ParticipantDone:
    """One participant has shown the proof of the phase."""

    phase: Phase
    participant_id: ParticipantId


@dataclass(frozen=True, slots=True)
class PhaseFinished:
    """A phase ended well."""

    phase: Phase
    duration_s: float


@dataclass(frozen=True, slots=True)
class Warned:
    """Something a person should know; the operation goes on."""

    message: str
    participant_id: ParticipantId | None = None


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell whoever follows."""

    what: PhaseStarted | ParticipantDone | PhaseFinished | Warned


class Verdict(StrEnum):
    """Why a reply decides nothing."""

    DUPLICATE = "duplicate"  # of a call that has ended
    STALE = "stale"  # of a phase or an operation that is over
    UNKNOWN = "unknown"  # of no call of ours


@dataclass(frozen=True, slots=True)
class Ignored:
    """A reply that decided nothing."""

    call_no: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Await:
    """The operation stands still: PREPARED, COMMITTED, PUBLISHED, RESTORED, or FAILED_PAUSED with the cause."""

    stage: Stage
    primary: Problem | None = None
    secondary: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is not legal now. Nothing changed."""

    problem: Problem


@dataclass(frozen=True, slots=True)
class Finish:
    """The end. `unconfirmed`: who has not said that it is open; it thaws by its lease."""

    outcome: Outcome
    primary: Problem | None = None
    secondary: tuple[Problem, ...] = ()
    unconfirmed: tuple[ParticipantId, ...] = ()
    published: bool = False


Effect = Record | Call | Cancel | Publish | SetTimer | Announce | Ignored | Await | Reject | Finish
