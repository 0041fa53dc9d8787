"""Who owns the pause: DESIGN rules 1 to 4 as a pure state machine.

PURE: no IO, no clock, no asyncio. One rule above all: a finished operation never comes back, and a refused call changes
nothing (but that a Resume or Abort of a stranger is remembered, so that its late Prepare is refused). Driven like this:

    decision = fence.call(Rpc.PREPARE, operation_id, epoch, digest, now, lease_ttl_s=60)
    if decision.ended:            # an operation ended by this call, or its lease was found lapsed:
        ...open admission first, whatever the verdict is
    match decision:
        Accept()  -> do it; then fence.succeeded(...) or fence.failed(...)
        Join()    -> the same request is running: wait for it
        Replay()  -> answer with decision.reply
        Refuse()  -> raise decision.problem

`now` is monotonic seconds. A lapse is found by whoever comes first: the timer (`lapse`), or any call. So a process that
was stopped past its lease can't act on it when it wakes (FAILURES B22).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import ParticipantState as State
from coordinator.wire.terms import Phase

# A save every 10 minutes under one coordinator fills this in 113 days; a record is some 300 bytes.
MAX_FINISHED: Final = 16_384


class Rpc(Enum):
    """The calls that an operation consists of. The value is the phase they belong to."""

    PREPARE = "prepare"
    COMMIT = "commit"
    CONFIRM = "confirm"
    RESTORE = "restore"
    RENEW = "renew lease"
    RESUME = "resume"
    ABORT = "abort"


class Rule(Enum):
    """What a state does with a call of its owner."""

    BEGIN = "starts the phase"
    JOIN = "follows the phase that runs"
    REPLAY = "answers with the recorded reply"
    ACT = "is served each time, since it changes nothing but the lease"
    END = "opens admission and finishes the operation"
    WRONG = "is refused with WRONG_PHASE"


_PHASES: Final = {
    Rpc.PREPARE: Phase.PREPARE, Rpc.COMMIT: Phase.COMMIT, Rpc.CONFIRM: Phase.CONFIRM, Rpc.RESTORE: Phase.RESTORE,
    Rpc.RENEW: Phase.UNSPECIFIED, Rpc.RESUME: Phase.RESUME, Rpc.ABORT: Phase.ABORT,
}  # fmt: skip


def _row(prepare: Rule, commit: Rule, confirm: Rule, restore: Rule, renew: Rule) -> Mapping[Rpc, Rule]:
    return MappingProxyType({
        Rpc.PREPARE: prepare, Rpc.COMMIT: commit, Rpc.CONFIRM: confirm, Rpc.RESTORE: restore, Rpc.RENEW: renew,
        Rpc.RESUME: Rule.END, Rpc.ABORT: Rule.END,  # in every state: a pause can always be left
    })  # fmt: skip


_B, _J, _R, _A, _W = Rule.BEGIN, Rule.JOIN, Rule.REPLAY, Rule.ACT, Rule.WRONG
# CONFIRM is legal in PREPARED too: a participant without state is confirmed and never commits.
LEGAL: Final[Mapping[State, Mapping[Rpc, Rule]]] = MappingProxyType({
    #                          prepare commit confirm restore renew
    State.OPEN:           _row(_B,     _W,    _W,     _B,     _W),
    State.PREPARING:      _row(_J,     _W,    _W,     _W,     _A),
    State.PREPARED:       _row(_R,     _B,    _A,     _W,     _A),
    State.COMMITTING:     _row(_R,     _J,    _W,     _W,     _A),
    State.COMMITTED:      _row(_R,     _R,    _A,     _W,     _A),
    State.RESTORING:      _row(_W,     _W,    _W,     _J,     _A),
    State.RESTORE_FAILED: _row(_W,     _W,    _W,     _B,     _A),
    State.RESTORED:       _row(_W,     _W,    _W,     _R,     _A),
})  # fmt: skip
_BEGUN: Final = {Rpc.PREPARE: State.PREPARING, Rpc.COMMIT: State.COMMITTING, Rpc.RESTORE: State.RESTORING}
_DONE: Final = {Rpc.PREPARE: State.PREPARED, Rpc.COMMIT: State.COMMITTED, Rpc.RESTORE: State.RESTORED}
# Repeating these must not stretch the pause: their lease is the first grant (FAILURES B2).
_GRANTING: Final = frozenset({Rpc.PREPARE, Rpc.RESTORE})


class Cause(Enum):
    """How an operation ended here."""

    RESUMED = "was resumed"
    ABORTED = "was aborted"
    LAPSED = "lost its lease, and admission opened by itself"
    SUPERSEDED = "was taken over by a newer coordinator"
    FAILED = "failed to prepare, and admission opened again"


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that no longer owns the pause: the driver opens admission before it does anything else."""

    operation_id: str
    cause: Cause
    state: State


@dataclass(frozen=True, slots=True)
class Accept:
    """Do it. `lease_generation` belongs in the timer that ends the pause; zero when no lease is running."""

    ended: Ended | None = None
    lease_generation: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    """The same request is running: follow it."""

    ended: Ended | None = None
    lease_generation: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """It was done: answer with what was recorded."""

    reply: object
    ended: Ended | None = None
    lease_generation: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """No. Nothing changed, apart from what `ended` says a lapsed clock did."""

    problem: Problem
    ended: Ended | None = None
    lease_generation: int = 0


Decision = Accept | Join | Replay | Refuse


@dataclass(slots=True)
class _Owner:
    operation_id: str
    epoch: int
    state: State
    ttl_s: float
    lease_until: float
    digests: dict[Rpc, str] = field(default_factory=dict[Rpc, str])
    replies: dict[Rpc, object] = field(default_factory=dict[Rpc, object])


@dataclass(slots=True)
class _Finished:
    epoch: int
    cause: Cause
    failed_digest: str = ""
    problem: Problem | None = None
    why: str = ""  # a sentence on how it came to end, when the participant itself has ended it
    replies: dict[Rpc, object] = field(default_factory=dict[Rpc, object])


class Fence:
    """The owner of the pause of one participant, in one incarnation."""

    def __init__(self, participant_id: str, max_finished: int = MAX_FINISHED) -> None:
        self._participant_id = participant_id
        self._max_finished = max_finished
        self._owner: _Owner | None = None
        self._finished: OrderedDict[str, _Finished] = OrderedDict()
        self._highest_epoch = 0
        self._overflow_epoch = 0  # an id of this epoch could not be remembered: nothing new begins in it
        self._lease_generation = 0

    # ---- what it is now -------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where the participant stands. A lapse that nobody has found yet still counts as paused."""
        return self._owner.state if self._owner else State.OPEN

    @property
    def operation_id(self) -> str:
        """The operation that owns the pause; empty when open."""
        return self._owner.operation_id if self._owner else ""

    @property
    def highest_epoch(self) -> int:
        """The highest coordinator_epoch that was served; zero before the first."""
        return self._highest_epoch

    @property
    def remembered(self) -> int:
        """How many finished ids are remembered; never above the limit."""
        return len(self._finished)

    @property
    def lease_generation(self) -> int:
        """Counts each grant and each renewal."""
        return self._lease_generation

    def lease_remaining(self, now: float) -> float | None:
        """Seconds left; None when open."""
        return None if self._owner is None else max(0.0, self._owner.lease_until - now)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(
        self, rpc: Rpc, operation_id: str, epoch: int, digest: str, now: float, lease_ttl_s: float = 0.0
    ) -> Decision:
        """Decide about one call. `digest` covers the request without its context: the epoch is no parameter.

        `lease_ttl_s` is what PREPARE, RESTORE and RENEW ask for.
        """
        ended = self._lapse_if_due(now)
        if epoch < self._highest_epoch:
            return self._refuse(
                rpc, Reason.STALE_EPOCH, operation_id, ended,
                f"Epoch {epoch} is older than {self._highest_epoch}, which this participant serves.",
                {"highest_epoch": str(self._highest_epoch), "epoch": str(epoch)},
            )  # fmt: skip
        ends = rpc in (Rpc.RESUME, Rpc.ABORT)
        past = self._finished.get(operation_id)
        if past is not None:
            if rpc is Rpc.RENEW:
                # Who goes on with a restore acts on the answer that it is loaded still (`Operations.call`): a coordinator
                # before it must not abort that afterwards.
                self._highest_epoch = max(self._highest_epoch, epoch)
            return self._end_again(rpc, operation_id, epoch, past, ended, now) if ends else self._is_over(
                rpc, operation_id, digest, past, ended
            )  # fmt: skip
        owner = self._owner
        if owner is not None and owner.operation_id != operation_id:
            # Only a call that can begin or end an operation takes over, and only for a newer coordinator.
            if epoch <= owner.epoch or not (ends or rpc in _GRANTING):
                if ends:  # not served, but fenced: a prepare of it that is still under way must find it finished
                    self._remember(operation_id, _Finished(epoch, _END_CAUSE[rpc]))
                return self._fenced(rpc, operation_id, ended, now)
            ended = self._finish(Cause.SUPERSEDED)
            owner = None
        if ends:
            return self._end(rpc, operation_id, epoch, ended)
        if owner is None:
            return self._begin(rpc, operation_id, epoch, digest, now, lease_ttl_s, ended)
        return self._of_owner(rpc, owner, epoch, digest, now, lease_ttl_s, ended)

    def may_retire(self, epoch: int, now: float) -> Decision:
        """Whether attempts may be retired by a coordinator of `epoch`: never while an operation is active."""
        ended = self._lapse_if_due(now)
        if epoch < self._highest_epoch:
            return self._refuse(
                None, Reason.STALE_EPOCH, "", ended,
                f"Epoch {epoch} is older than {self._highest_epoch}, which this participant serves.",
            )  # fmt: skip
        if self._owner is not None:
            return self._fenced(None, "", ended, now)
        self._highest_epoch = max(self._highest_epoch, epoch)
        return Accept(ended)

    # ---- outcomes -------------------------------------------------------------------------------------------------

    def succeeded(self, rpc: Rpc, operation_id: str, reply: object, now: float) -> Refuse | None:
        """Record that the phase is done. None, or a Refuse: the operation ended meanwhile and the reply is void."""
        ended = self._lapse_if_due(now)
        owner = self._owner
        if owner is None or owner.operation_id != operation_id or owner.state != _BEGUN[rpc]:
            past = self._finished.get(operation_id)
            return self._is_over(rpc, operation_id, "", past or _Finished(0, Cause.ABORTED), ended)
        owner.state = _DONE[rpc]
        owner.replies[rpc] = reply
        return None

    def failed(self, rpc: Rpc, operation_id: str, problem: Problem, *, closed: bool = True) -> Ended | None:
        """Record that the phase failed. `closed`: whether a restore had closed admission.

        PREPARE: the operation is finished and admission is to be opened. COMMIT: prepared as before, may be repeated.
        RESTORE: stays paused, may be repeated; one that had closed nothing is forgotten as if never asked.
        """
        owner = self._owner
        if owner is None or owner.operation_id != operation_id or owner.state != _BEGUN[rpc]:
            return None
        if rpc is Rpc.PREPARE:
            digest = owner.digests[rpc]
            ended = self._finish(Cause.FAILED)
            record = self._finished[operation_id]
            record.failed_digest, record.problem = digest, problem
            return ended
        if rpc is Rpc.COMMIT:
            owner.state = State.PREPARED
            return None
        if closed:
            owner.state = State.RESTORE_FAILED
        else:
            self._owner = None
        return None

    def record_end(self, rpc: Rpc, operation_id: str, reply: object) -> None:
        """Record what Resume or Abort answered, for its repeats. Until then a repeat opens again, which is harmless."""
        past = self._finished.get(operation_id)
        if past is not None:
            past.replies[rpc] = reply

    def lapse(self, operation_id: str, lease_generation: int, now: float) -> Ended | None:
        """The timer fired. A no-op unless it is for this lease and the lease is over (FAILURES B26)."""
        owner = self._owner
        if owner is None or owner.operation_id != operation_id or lease_generation != self._lease_generation:
            return None
        return self._lapse_if_due(now)

    def force_end(self, cause: Cause, why: str = "") -> Ended | None:
        """The participant itself gives up the pause: it leaves, or its gates opened by their own lease. `why`: a sentence."""
        return self._finish(cause, why) if self._owner else None

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _lapse_if_due(self, now: float) -> Ended | None:
        if self._owner is None or now < self._owner.lease_until:
            return None
        return self._finish(Cause.LAPSED)

    def _begin(
        self, rpc: Rpc, operation_id: str, epoch: int, digest: str, now: float, ttl_s: float, ended: Ended | None
    ) -> Decision:
        if LEGAL[State.OPEN][rpc] is not Rule.BEGIN:
            return self._wrong_phase(rpc, operation_id, State.OPEN, ended)
        if not self._has_room(epoch):
            return self._refuse(
                rpc, Reason.LIMIT_EXCEEDED, operation_id, ended,
                f"{self._max_finished} operations of epoch {epoch} are remembered, and none of them may be forgotten.",
                {"limit": "finished operations"}, "Restart the coordinator: its new epoch makes room.",
            )  # fmt: skip
        self._highest_epoch = max(self._highest_epoch, epoch)
        if len(self._finished) >= self._max_finished:  # a place must be free for this one's own end
            self._forget_oldest()
        self._owner = _Owner(operation_id, epoch, _BEGUN[rpc], ttl_s, now + ttl_s, {rpc: digest})
        self._lease_generation += 1
        return Accept(ended, self._lease_generation)

    def _of_owner(
        self, rpc: Rpc, owner: _Owner, epoch: int, digest: str, now: float, ttl_s: float, ended: Ended | None
    ) -> Decision:
        rule = LEGAL[owner.state][rpc]
        if rule is Rule.WRONG:
            return self._wrong_phase(rpc, owner.operation_id, owner.state, ended)
        known = owner.digests.get(rpc)
        if rule is not Rule.ACT and known is not None and known != digest:
            return self._refuse(
                rpc, Reason.REQUEST_CONFLICT, owner.operation_id, ended,
                f"Operation {owner.operation_id} asked for another {rpc.value} before.",
                {"first_digest": known, "this_digest": digest},
            )  # fmt: skip
        # A restarted coordinator may go on with an operation it finds in its journal; the old one is fenced by it.
        self._highest_epoch = owner.epoch = max(owner.epoch, epoch)
        if rule is Rule.BEGIN:
            owner.state = _BEGUN[rpc]
            owner.digests[rpc] = digest
        if rpc is Rpc.RENEW:
            owner.ttl_s, owner.lease_until = ttl_s, now + ttl_s
            self._lease_generation += 1
        elif rule is Rule.BEGIN or rpc not in _GRANTING:
            owner.lease_until = max(owner.lease_until, now + owner.ttl_s)
            self._lease_generation += 1
        if rule is Rule.REPLAY:
            return Replay(owner.replies[rpc], ended, self._lease_generation)
        return (Join if rule is Rule.JOIN else Accept)(ended, self._lease_generation)

    def _end(self, rpc: Rpc, operation_id: str, epoch: int, ended: Ended | None) -> Decision:
        self._highest_epoch = max(self._highest_epoch, epoch)
        if self._owner is not None:
            self._owner.epoch = max(self._owner.epoch, epoch)
            return Accept(self._finish(_END_CAUSE[rpc]))
        if ended is None or ended.operation_id != operation_id:
            self._remember(operation_id, _Finished(epoch, _END_CAUSE[rpc]))
        return Accept(ended)

    def _end_again(
        self, rpc: Rpc, operation_id: str, epoch: int, past: _Finished, ended: Ended | None, now: float
    ) -> Decision:
        if rpc in past.replies:
            self._highest_epoch = max(self._highest_epoch, epoch)  # it is served: an older one is refused from now on
            return Replay(past.replies[rpc], ended)
        if self._owner is not None:
            if epoch <= self._owner.epoch:
                return self._fenced(rpc, operation_id, ended, now)
            ended = self._finish(Cause.SUPERSEDED)
        self._highest_epoch = max(self._highest_epoch, epoch)
        return Accept(ended)

    def _is_over(self, rpc: Rpc, operation_id: str, digest: str, past: _Finished, ended: Ended | None) -> Refuse:
        if past.problem is not None and rpc is Rpc.PREPARE and digest == past.failed_digest:
            return Refuse(past.problem, ended)
        reason = Reason.LEASE_LAPSED if past.cause is Cause.LAPSED else Reason.OPERATION_FINISHED
        why = past.problem.message if past.problem else past.why.rstrip(".")
        why = f" ({why})" if why else ""
        return self._refuse(
            rpc, reason, operation_id, ended, f"Operation {operation_id} {past.cause.value}{why}.",
            {"ended": past.cause.name.lower()},
        )  # fmt: skip

    def _fenced(self, rpc: Rpc | None, operation_id: str, ended: Ended | None, now: float) -> Refuse:
        owner = self._owner
        assert owner is not None  # only called when there is one
        left_s = max(0.0, owner.lease_until - now)
        return self._refuse(
            rpc, Reason.FENCED, owner.operation_id, ended,
            f"Operation {owner.operation_id} of the coordinator of epoch {owner.epoch} owns the pause "
            f"({owner.state.name.lower()}), for {left_s:.1f} s more unless its lease is renewed.",
            {"asked_for": operation_id, "owner_epoch": str(owner.epoch), "lease_left_s": f"{left_s:.1f}"},
        )  # fmt: skip

    def _wrong_phase(self, rpc: Rpc, operation_id: str, state: State, ended: Ended | None) -> Refuse:
        return self._refuse(
            rpc, Reason.WRONG_PHASE, operation_id, ended,
            f"Operation {operation_id} can't {rpc.value} while the participant is {state.name.lower()}.",
            {"state": state.name.lower()},
        )  # fmt: skip

    def _refuse(
        self, rpc: Rpc | None, reason: Reason, operation_id: str, ended: Ended | None, message: str,
        metadata: Mapping[str, str] = MappingProxyType({}), next_step: str = "",
    ) -> Refuse:  # fmt: skip
        return Refuse(
            Problem(
                reason, message, next_step=next_step, phase=_PHASES[rpc] if rpc else Phase.UNSPECIFIED,
                participant_id=self._participant_id, operation_id=operation_id, metadata=metadata,
            ),
            ended,
        )  # fmt: skip

    def _finish(self, cause: Cause, why: str = "") -> Ended:
        owner = self._owner
        assert owner is not None  # only called when there is one
        self._owner = None
        self._remember(owner.operation_id, _Finished(owner.epoch, cause, why=why))
        return Ended(owner.operation_id, cause, owner.state)

    def _has_room(self, epoch: int) -> bool:
        if epoch <= self._overflow_epoch:
            return False
        if len(self._finished) < self._max_finished:
            return True
        return any(past.epoch < max(epoch, self._highest_epoch) for past in self._finished.values())

    def _remember(self, operation_id: str, record: _Finished) -> None:
        if operation_id in self._finished:
            return
        # While an operation runs, one place is kept for it: the owner itself must always be remembered.
        limit = self._max_finished - (1 if self._owner is not None else 0)
        if len(self._finished) >= limit and not self._forget_oldest():
            # Not remembering is safe only if nothing begins any more in this epoch, so nothing does.
            self._overflow_epoch = max(self._overflow_epoch, record.epoch)
            return
        self._finished[operation_id] = record

    def _forget_oldest(self) -> bool:
        old = next((k for k, past in self._finished.items() if past.epoch < self._highest_epoch), None)
        if old is None:
            return False
        del self._finished[old]
        return True


_END_CAUSE: Final = {Rpc.RESUME: Cause.RESUMED, Rpc.ABORT: Cause.ABORTED}
