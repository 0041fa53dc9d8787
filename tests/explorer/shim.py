"""A participant of the small model: the real fence, and around it the least that a server does.

The rule: who owns the pause, and what a call gets, is decided by `participant_shims.fence` alone. What is added is what
an adapter would do when the fence says so (close, export, load, open), and marks that only the checks look at. One step
is one message, so whatever a shim does between two awaits of its event loop is one step here as there.

Not in the model: a shim that dies while its server lives (a crash takes both), and closing or opening that takes time.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import ParticipantState as State
from coordinator.wire.terms import Phase
from participant_shims.fence import Accept, Cause, Ended, Fence, Join, Refuse, Replay, Rpc
from tests.explorer.values import Keys, Table, clone
from tests.explorer.violation import Violation

TTL_S: Final = 10.0
KEYS: Final = Keys()  # time stands still for a fence: leases lapse when the explorer says so
RPCS: Final = {
    Phase.PREPARE: Rpc.PREPARE, Phase.COMMIT: Rpc.COMMIT, Phase.CONFIRM: Rpc.CONFIRM, Phase.RESTORE: Rpc.RESTORE,
    Phase.RESUME: Rpc.RESUME, Phase.ABORT: Rpc.ABORT,
}  # fmt: skip
# In which states a phase of the owner is not begun again, not even when what runs fails.
_DONE: Final = {
    Phase.PREPARE: (State.PREPARING, State.PREPARED, State.COMMITTING, State.COMMITTED),
    Phase.COMMIT: (State.COMMITTED,), Phase.RESTORE: (State.RESTORED,),
}  # fmt: skip
Name = tuple[int, int, int]  # a call: to whom, which phase, the how many-th of those that may still be answered
Ref = tuple[int, int, Name]  # whose call, of which operation, which one
Payload = tuple[str | int, ...]


class Mark(NamedTuple):
    """What really happened here in one operation. `confirmed`: the incarnation that did, or 0; it outlives a crash."""

    frozen: bool = False  # closed without a break since it was prepared
    lapsed: bool = False
    exported: bool = False
    confirmed: int = 0
    over: bool = False  # it has answered Resume or Abort


class Shim(NamedTuple):
    """One participant. `fence`: number of the fence's state. `loaded`: the restore whose state is in it, plus 1."""

    up: bool = True
    incarnation: int = 1
    fence: int = 0
    open: bool = True
    generation: int = 1
    runs: Phase = Phase.UNSPECIFIED
    followers: tuple[Ref, ...] = ()
    loaded: int = 0
    seen: int = 1  # the highest epoch of a call that was served
    marks: tuple[Mark, ...] = ()


class Call(NamedTuple):
    """What a request says. `about`: of Confirm, incarnation and generation."""

    epoch: int
    operation: int
    phase: Phase
    about: tuple[int, ...] = ()


class Served(NamedTuple):
    """The participant after a step, the answer to the caller if there is one, and answers to others who waited."""

    shim: Shim
    answer: Payload = ()
    others: tuple[tuple[Ref, Payload], ...] = ()


class Renewed(NamedTuple):
    """The participant after a RenewLease, why it refused ("" when it did not), and whether it said `still_loaded`."""

    shim: Shim
    refused: str = ""
    still_loaded: bool = False


def refused(reason: Reason) -> Payload:
    """An answer that refuses."""
    return ("refused", reason.name)


def operation_id(operation: int) -> str:
    """The id of an operation of the model."""
    return f"op-{operation}"


class Shims:
    """Steps of participants. Pure: equal arguments give the same result, which is kept."""

    def __init__(self, operations: int) -> None:
        self._fences = Table()
        self._served: dict[tuple[Shim, Call, Ref | None], Served] = {}
        self._moved: dict[tuple[object, ...], Served] = {}
        self._renewed: dict[tuple[Shim, int, int], Renewed] = {}
        fence = Fence("p")
        self.first = Shim(fence=self._fences.number(KEYS.of(fence), fence), marks=(Mark(),) * operations)

    def fence(self, shim: Shim) -> Fence:
        """Its fence. Look, do not touch."""
        fence: Fence = self._fences.values[shim.fence]
        return fence

    def owner(self, shim: Shim) -> int:
        """The operation that owns its pause; -1 when none does."""
        name = self.fence(shim).operation_id
        return int(name.partition("-")[2]) if name else -1

    # ---- calls ------------------------------------------------------------------------------------------------------

    def serve(self, shim: Shim, call: Call, ref: Ref | None) -> Served:
        """One request arrives. Raises Violation when a rule of fences is broken."""
        known = self._served.get((shim, call, ref))
        if known is None:
            known = self._served[shim, call, ref] = self._serve(shim, call, ref)
            self._check(shim, call, known)
        return known

    def _serve(self, shim: Shim, call: Call, ref: Ref | None) -> Served:
        name, rpc = operation_id(call.operation), RPCS[call.phase]
        if rpc is Rpc.CONFIRM and call.about[0] != shim.incarnation:
            return Served(shim, refused(Reason.INCARNATION_CHANGED))
        fence: Fence = clone(self.fence(shim), {})
        decision = fence.call(rpc, name, call.epoch, rpc.value, 0.0, TTL_S)
        after, others = self._ended(shim, decision.ended)
        if isinstance(decision, Refuse):
            return self._done(after, fence, refused(decision.problem.reason), others)
        after = after._replace(seen=max(after.seen, call.epoch))
        if isinstance(decision, Replay):
            assert isinstance(decision.reply, tuple)
            return self._done(after, fence, decision.reply, others)
        if rpc in (Rpc.RESUME, Rpc.ABORT):
            if rpc is Rpc.ABORT and after.loaded == call.operation + 1 and not after.marks[call.operation].over:
                after = after._replace(loaded=0)  # what was resumed is nobody's any more
            answer: Payload = ("opened",)
            fence.record_end(rpc, name, answer)
            return self._done(_mark(after, call.operation, over=True), fence, answer, others)
        if rpc is Rpc.CONFIRM:
            if after.open or call.about[1] != after.generation:
                return self._done(after, fence, refused(Reason.ACTIVITY_AFTER_PREPARED), others)
            mark = after.marks[call.operation]
            if mark.frozen and mark.exported:
                after = _mark(after, call.operation, confirmed=after.incarnation)
            return self._done(after, fence, ("confirmed", after.incarnation, after.generation), others)
        if isinstance(decision, Accept):
            if rpc is not Rpc.COMMIT and after.open:
                after = after._replace(open=False, generation=after.generation + 1)
            after = after._replace(runs=call.phase, followers=())
        else:
            assert isinstance(decision, Join)
        if ref is not None and ref not in after.followers:
            after = after._replace(followers=tuple(sorted((*after.followers, ref))))
        return self._done(after, fence, (), others)

    def ends(self, shim: Shim, *, well: bool) -> Served:
        """The phase that runs ends. Everybody who follows it is answered."""
        how = "ends" if well else "fails"
        known = self._moved.get((shim, how))
        if known is None:
            known = self._moved[shim, how] = self._ends(shim, well=well)
            if well:
                self._check_recorded(shim, known)
        return known

    def _ends(self, shim: Shim, *, well: bool) -> Served:
        phase, operation = shim.runs, self.owner(shim)
        name, rpc = operation_id(operation), RPCS[phase]
        fence: Fence = clone(self.fence(shim), {})
        after = shim._replace(runs=Phase.UNSPECIFIED, followers=())
        if not well:
            ended = fence.failed(rpc, name, Problem(Reason.DECLINED, "No."))
            after, _ = self._ended(after, ended)
            return self._all(after, fence, refused(Reason.DECLINED), shim.followers)
        answer: Payload = (phase.name.lower(), after.incarnation, after.generation)
        refusal = fence.succeeded(rpc, name, answer, 0.0)
        if refusal is not None:
            return self._all(after, fence, refused(refusal.problem.reason), shim.followers)
        if phase == Phase.PREPARE:
            # What an incarnation before had confirmed is on the disk and stays true: a request that was on its way then
            # may still close this one.
            stands = after.marks[operation].confirmed not in (0, after.incarnation)
            begun = {} if stands else {"exported": False, "confirmed": 0}
            after = _mark(after, operation, frozen=True, lapsed=False, **begun)
        elif phase == Phase.COMMIT:
            after = _mark(after, operation, exported=after.marks[operation].frozen)
        else:
            after = after._replace(loaded=operation + 1)
        return self._all(after, fence, answer, shim.followers)

    def renews(self, shim: Shim, operation: int, epoch: int) -> Renewed:
        """RenewLease. Time is not counted: whether the lease lapses is a step of its own."""
        known = self._renewed.get((shim, operation, epoch))
        if known is None:
            known = self._renewed[shim, operation, epoch] = self._renews(shim, operation, epoch)
        return known

    def _renews(self, shim: Shim, operation: int, epoch: int) -> Renewed:
        fence: Fence = clone(self.fence(shim), {})
        verdict = fence.call(Rpc.RENEW, operation_id(operation), epoch, "", 0.0, TTL_S)
        if not isinstance(verdict, Refuse):
            return Renewed(self._done(shim._replace(seen=max(shim.seen, epoch)), fence, (), ()).shim)
        # What it refuses may raise its epoch all the same. That counts as no call that was served: whether an older
        # coordinator must be kept out from now on is asked where it would do harm (I5), and not of the number.
        reason = verdict.problem.reason
        lapsed = reason is Reason.LEASE_LAPSED
        still = lapsed and shim.loaded == operation + 1
        return Renewed(self._done(shim, fence, (), ()).shim, reason.name, still)

    # ---- time and death -----------------------------------------------------------------------------------------------

    def lapses(self, shim: Shim) -> Served:
        """Its lease lapses, found by its own timer."""
        known = self._moved.get((shim, "lapses"))
        if known is None:
            known = self._moved[shim, "lapses"] = self._lapses(shim)
        return known

    def _lapses(self, shim: Shim) -> Served:
        fence: Fence = clone(self.fence(shim), {})
        ended = fence.lapse(fence.operation_id, fence.lease_generation, float("inf"))
        after, others = self._ended(shim, ended)
        return self._done(after, fence, (), others)

    def dies(self, shim: Shim) -> Shim:
        """The process is gone; what it had confirmed is on the disk."""
        marks = tuple(Mark(exported=m.exported, confirmed=m.confirmed) for m in shim.marks)
        return self.first._replace(up=False, incarnation=shim.incarnation, marks=marks)

    def comes_back(self, shim: Shim) -> Shim:
        """Another incarnation, which knows nothing."""
        return shim._replace(up=True, incarnation=shim.incarnation + 1)

    def forgets(self, shim: Shim, operation: int) -> Shim:
        """Without what was marked for an operation that nobody can publish any more."""
        over = Mark(over=shim.marks[operation].over)
        return shim if shim.marks[operation] == over else _mark(shim, operation, **over._asdict())

    def has_done(self, shim: Shim, call: Call) -> bool:
        """Whether this incarnation never begins again what this call asks for."""
        fence, name = self.fence(shim), operation_id(call.operation)
        if name in fence._finished:
            return call.phase in (Phase.PREPARE, Phase.COMMIT, Phase.RESTORE)
        return fence.operation_id == name and fence.state in _DONE.get(call.phase, ())

    def never_heard_of(self, shim: Shim, operation: int) -> Shim:
        """As if it had never been called for an operation of which nobody will speak any more."""
        fence: Fence = clone(self.fence(shim), {})
        fence._finished.pop(operation_id(operation), None)
        marks = (*shim.marks[:operation], Mark(), *shim.marks[operation + 1 :])
        return self._done(shim._replace(marks=marks), fence, (), ()).shim

    # ---- parts --------------------------------------------------------------------------------------------------------

    def _ended(self, shim: Shim, ended: Ended | None) -> tuple[Shim, tuple[tuple[Ref, Payload], ...]]:
        """What `Operations.apply` does: stop the phase, open."""
        if ended is None:
            return shim, ()
        operation = int(ended.operation_id.partition("-")[2])
        lapsed = ended.cause is Cause.LAPSED
        answer = refused(Reason.LEASE_LAPSED if lapsed else Reason.OPERATION_FINISHED)
        others = tuple((ref, answer) for ref in shim.followers)
        marks = tuple(m._replace(frozen=False) for m in shim.marks)
        gone = ended.cause in (Cause.ABORTED, Cause.SUPERSEDED) and shim.loaded == operation + 1
        after = shim._replace(
            open=True, generation=shim.generation + (not shim.open), runs=Phase.UNSPECIFIED, followers=(),
            loaded=0 if gone else shim.loaded, marks=marks,
        )  # fmt: skip
        return _mark(after, operation, lapsed=lapsed), others

    def _done(self, shim: Shim, fence: Fence, answer: Payload, others: tuple[tuple[Ref, Payload], ...]) -> Served:
        return Served(shim._replace(fence=self._fences.number(KEYS.of(fence), fence)), answer, others)

    def _all(self, shim: Shim, fence: Fence, answer: Payload, followers: tuple[Ref, ...]) -> Served:
        return self._done(shim, fence, (), tuple((ref, answer) for ref in followers))

    def _check(self, before: Shim, call: Call, served: Served) -> None:
        after = served.shim
        if call.epoch < before.seen and (after != before or served.answer[:1] != ("refused",)):
            raise Violation("I6", f"a call of epoch {call.epoch} was served although epoch {before.seen} had been")
        owner = self.owner(after)
        if owner >= 0 and after.marks[owner].over:
            raise Violation("I8", f"operation {owner} owns the pause again after its end was answered")
        if 0 <= self.owner(before) != owner >= 0 and call.epoch <= before.seen:
            raise Violation("I14", f"operation {owner} took the pause of operation {self.owner(before)}")
        if owner >= 0 and after.open:
            raise Violation("I3", f"admission is open although operation {owner} owns the pause")
        again = self._serve(after, call, None)
        if again.shim != after:
            raise Violation("I9", f"a repeated {call.phase.name} changes the participant")
        if served.answer and again.answer != served.answer:
            raise Violation("I9", f"a repeated {call.phase.name} gets {again.answer} instead of {served.answer}")

    def _check_recorded(self, before: Shim, served: Served) -> None:
        """A repeat of what was just done gets the same answer, and does nothing."""
        call = Call(before.seen, self.owner(before), before.runs)
        try:
            again = self._serve(served.shim, call, None)
        except KeyError:
            raise Violation("I9", f"the answer to {call.phase.name} was not recorded") from None
        answers = {payload for _, payload in served.others} or {again.answer}
        if again.shim != served.shim or answers != {again.answer}:
            raise Violation("I9", f"a repeated {call.phase.name} is not answered with what was recorded")


def _mark(shim: Shim, operation: int, **changes: bool | int) -> Shim:
    marks = list(shim.marks)
    marks[operation] = marks[operation]._replace(**changes)  # type: ignore[arg-type]
    return shim._replace(marks=tuple(marks))
