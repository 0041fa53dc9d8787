"""The fence under any order of calls, repeats, epochs, outcomes and lapses: invariants I6, I8, I9, I15, I19.

`Door` performs what decisions say, as the service does, so that "admission open" is what a server would really be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import ParticipantState as State
from participant_shims.fence import Accept, Decision, Ended, Fence, Join, Refuse, Replay, Rpc
from tests.examples import examples

TTL_S = 10.0
OPERATION_IDS = [f"op-{n}" for n in range(6)]
OPERATIONS = st.sampled_from(OPERATION_IDS)
EPOCHS = st.integers(1, 4)
DIGESTS = st.sampled_from(["d", "e"])
BEGINS = {State.PREPARING: Rpc.PREPARE, State.COMMITTING: Rpc.COMMIT, State.RESTORING: Rpc.RESTORE}


@dataclass
class Door:
    """Admission of a server, and what was ever answered."""

    open: bool = True
    closed_by: str = ""
    replies: dict[tuple[str, Rpc], object] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)  # operation -> the highest epoch when it was last ended


class FenceMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([3, 8, 100]))
    def begin(self, size: int) -> None:
        self.fence = Fence("p", size)
        self.size = size
        self.door = Door()
        self.now = 0.0
        self.timers: list[tuple[str, int, float]] = []
        self.high = 0

    # ---- what the service would do --------------------------------------------------------------------------------

    def _perform_end(self, ended: Ended | None) -> None:
        if ended is not None:
            self.door.open, self.door.closed_by = True, ""
            self.door.ended[ended.operation_id] = self.fence.highest_epoch

    def _picture(self) -> tuple[object, ...]:
        f = self.fence
        return f.state, f.operation_id, f.highest_epoch, f.lease_remaining(self.now), f.lease_generation

    @rule(rpc=st.sampled_from(list(Rpc)), operation=OPERATIONS, epoch=EPOCHS, digest=DIGESTS)
    def call(self, rpc: Rpc, operation: str, epoch: int, digest: str) -> None:
        before, owner_before, high_before = self._picture(), self.fence.operation_id, self.fence.highest_epoch
        left, ended_before = self.fence.lease_remaining(self.now), set(self.door.ended)
        decision: Decision = self.fence.call(rpc, operation, epoch, digest, self.now, TTL_S)
        lapsed = left is not None and left <= 0
        self._perform_end(decision.ended)
        if lapsed:
            assert decision.ended is not None, "a call that found the lease lapsed must open"
            assert decision.ended.operation_id == owner_before
        if isinstance(decision, Refuse):
            assert decision.problem.message
            if (
                not lapsed
            ):  # I6, and "a refused call changes nothing"; but who asks after what is over fences its elders
                asked = (
                    rpc is Rpc.RENEW and operation in ended_before and self.fence.highest_epoch == epoch > high_before
                )
                assert self._picture() == ((*before[:2], epoch, *before[3:]) if asked else before)
        if epoch < high_before:
            assert isinstance(decision, Refuse)
            assert decision.problem.reason is Reason.STALE_EPOCH
            return
        if rpc in (Rpc.RESUME, Rpc.ABORT):
            self._ended(rpc, operation, epoch, decision)
        elif isinstance(decision, Accept):
            # Memory is bounded, and the epoch is the high-water mark: what is forgotten is of an older epoch, whose own
            # late messages are stale. Only a newer coordinator that reuses an id could get here, and none does.
            forgotten = self.door.ended.pop(operation, epoch) < epoch and self.size < len(OPERATION_IDS)
            assert forgotten or operation not in ended_before, "I8: a finished operation came back"
            assert self.fence.operation_id == operation
            if rpc in (Rpc.PREPARE, Rpc.RESTORE):
                assert self.door.open or self.door.closed_by == operation
                self.door.open, self.door.closed_by = False, operation
        elif isinstance(decision, Join):
            assert BEGINS[self.fence.state] is rpc
        elif isinstance(decision, Replay):
            assert decision.reply == self.door.replies[operation, rpc]  # I9
        if decision.lease_generation:
            remaining = self.fence.lease_remaining(self.now)
            assert remaining is not None
            self.timers.append((self.fence.operation_id, decision.lease_generation, self.now + remaining))

    def _ended(self, rpc: Rpc, operation: str, epoch: int, decision: Decision) -> None:
        if isinstance(decision, Refuse):  # only for somebody else's active operation
            assert decision.problem.reason is Reason.FENCED
            assert self.fence.operation_id not in ("", operation)
        elif isinstance(decision, Accept):
            self.door.open, self.door.closed_by = True, ""
            self.fence.record_end(rpc, operation, f"{rpc.name} of {operation}")
            self.door.replies[operation, rpc] = f"{rpc.name} of {operation}"
        else:
            assert isinstance(decision, Replay)
            assert decision.reply == self.door.replies[operation, rpc]
        self.door.ended[operation] = self.fence.highest_epoch

    @precondition(lambda self: self.fence.state in BEGINS)
    @rule(good=st.booleans(), closed=st.booleans())
    def phase_ends(self, good: bool, closed: bool) -> None:
        operation, rpc = self.fence.operation_id, BEGINS[self.fence.state]
        if good:
            reply = f"{rpc.name} of {operation} at {self.now}"
            refusal = self.fence.succeeded(rpc, operation, reply, self.now)
            if refusal is None:
                self.door.replies[operation, rpc] = reply
            else:
                self._perform_end(refusal.ended)
            return
        ended = self.fence.failed(rpc, operation, Problem(Reason.DECLINED, "no"), closed=closed)
        self._perform_end(ended)
        if rpc is Rpc.RESTORE and not closed:
            self.door.open, self.door.closed_by = True, ""

    @rule(operation=OPERATIONS, rpc=st.sampled_from([Rpc.PREPARE, Rpc.COMMIT, Rpc.RESTORE]))
    def a_phase_of_a_past_operation_ends_late(self, operation: str, rpc: Rpc) -> None:
        if operation == self.fence.operation_id:
            return
        before = self._picture()
        left = self.fence.lease_remaining(self.now)
        refusal = self.fence.succeeded(rpc, operation, "late", self.now)
        assert refusal is not None
        self._perform_end(refusal.ended)
        if left is None or left > 0:
            assert self._picture() == before

    @precondition(lambda self: self.fence.operation_id)
    @rule(rpc=st.sampled_from([Rpc.RESUME, Rpc.ABORT]))
    def an_owner_can_always_end_it(self, rpc: Rpc) -> None:  # I15
        operation = self.fence.operation_id
        decision = self.fence.call(rpc, operation, self.fence.highest_epoch, "", self.now)
        assert isinstance(decision, Accept)
        assert decision.ended is not None
        assert self.fence.state is State.OPEN
        self._perform_end(decision.ended)
        self._ended(rpc, operation, 0, decision)

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.9, 10.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.timers)
    @rule(data=st.data())
    def a_timer_fires(self, data: st.DataObject) -> None:
        operation, generation, due = data.draw(st.sampled_from(self.timers))
        owner, current = self.fence.operation_id, self.fence.lease_generation
        left = self.fence.lease_remaining(self.now)
        ended = self.fence.lapse(operation, generation, self.now)
        self._perform_end(ended)
        if (operation, generation) != (owner, current) or left is None or left > 0:
            assert ended is None, "a timer of another lease must do nothing"
        else:
            assert ended is not None
            assert self.now >= due

    # ---- what must always hold ------------------------------------------------------------------------------------

    @invariant()
    def the_epoch_never_falls(self) -> None:
        assert self.fence.highest_epoch >= self.high
        self.high = self.fence.highest_epoch

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.fence.remembered <= self.size

    @invariant()
    def admission_is_closed_only_for_an_owner(self) -> None:
        assert self.door.open == (self.fence.operation_id == "")
        assert self.door.closed_by == self.fence.operation_id
        assert self.fence.operation_id not in self.door.ended or self.fence.operation_id == ""


FenceMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestFence = FenceMachine.TestCase
