"""One operation of one coordinator in the small model: the real `Transaction`, stepped.

The rule: the core is stepped as the driver steps it, and nothing of what it decides is known here. Time stands still
between steps; it moves when a timer goes off, to the time the core had asked for. What a step gives depends on the
state, the event and whether the journal still takes records of this coordinator, so each is stepped once and kept.

Local checks: a repeated reply changes nothing (I9), whatever is not published can be aborted at once and without the
disk (I15), calls go out in the order of the waves (I18), and who gives up says why (L5).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final, NamedTuple, cast

from coordinator.protocol import events as core
from coordinator.protocol.events import Effect, Event, Record
from coordinator.protocol.legality import OPENING_STAGES
from coordinator.protocol.operation import Limits, Operation, Options, Outcome, Stage
from coordinator.protocol.proofs import Committed, Confirmed, Opened, Prepared, Proof, RestoredProof
from coordinator.protocol.topology import Participant, Topology
from coordinator.protocol.transaction import Transaction
from coordinator.wire.errors import STILL_LOADED, Problem, Reason
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.terms import CheckpointMode, OperationKind, Phase, Role
from tests.explorer.shim import TTL_S, Name, Payload, operation_id
from tests.explorer.values import Keys, Table, clone
from tests.explorer.violation import Violation

NAMES: Final = (ParticipantId("agent"), ParticipantId("policy"), ParticipantId("resources"))
AGENT, POLICY, RESOURCES = 0, 1, 2
_ROLES: Final = (Role.AGENT, Role.POLICY_MODEL, Role.RESOURCES)
_KINDS: Final = ("gym.agent", "gym.model", "gym.resources")
DEADLINE: Final = 8.0
# Few repeats fit into the deadline and the lease: a call that is made again changes nothing but the time.
LIMITS: Final = Limits(retry_after_s=2.0, retry_most_s=16.0, attempts=2)
OPENING: Final = (Phase.RESUME, Phase.ABORT)
# The order once more, written down by hand: what is tested is not asked for its own table.
ORDER: Final = {
    Phase.PREPARE: (POLICY, AGENT, RESOURCES), Phase.COMMIT: (AGENT, POLICY, RESOURCES),
    Phase.RESTORE: (POLICY, AGENT, RESOURCES), Phase.RESUME: (RESOURCES, POLICY, AGENT),
    Phase.ABORT: (RESOURCES, POLICY, AGENT),
}  # fmt: skip
KINDS: Final = {
    "save": (OperationKind.SAVE, False), "restore": (OperationKind.RESTORE, False), "driven": (OperationKind.SAVE, True),
}  # fmt: skip

# What a step asks for: ("record", number, required), ("call", name, who, phase, about), ("cancel", name).
Output = tuple[str | int | bool | tuple[int, ...], ...]
What = tuple[Hashable, ...]


class Op(NamedTuple):
    """One operation at one coordinator. `core`: number of the state; -1 when it is over. `told`: who was told to open.

    `publishing`: 0 nobody asked, 1 asked, 2 the manifest is there and the core has not heard of it.
    """

    operation: int
    epoch: int
    incarnations: tuple[int, ...]
    core: int
    publishing: int = 0
    told: frozenset[int] = frozenset()
    outcome: str = ""


class At(NamedTuple):
    """A state of the core, when it is, when it wants to be woken, and its calls that may still be answered."""

    transaction: Transaction
    now: float
    timer_at: float | None
    calls: dict[Name, int]

    def runs(self, name: Name) -> bool:
        """Whether this call is still waited for."""
        number = self.calls.get(name)
        return number is not None and self.transaction.course.calls.get(number) is not None


class Cores:
    """Steps of operations. Pure: equal arguments give the same result, which is kept."""

    def __init__(self, program: tuple[str, ...], *, plain: bool = False) -> None:
        self.program = program
        self._plain = plain
        self.states = Table()
        self.records = Table()
        self._known: dict[tuple[Op, What, bool], tuple[Op, tuple[Output, ...]]] = {}

    def at(self, op: Op) -> At:
        """Its state. Look, do not touch."""
        found: At = self.states.values[op.core]
        return found

    def is_restore(self, operation: int) -> bool:
        """Whether it is one."""
        return self.program[operation] == "restore"

    # ---- steps --------------------------------------------------------------------------------------------------------

    def begin(
        self, operation: int, epoch: int, incarnations: tuple[int, ...], owns: bool
    ) -> tuple[Op, tuple[Output, ...]]:
        """A coordinator begins it with these incarnations."""
        return self.step(Op(operation, epoch, incarnations, -1), ("begin",), owns)

    def recover(
        self, operation: int, epoch: int, journal: tuple[int, ...], published: bool
    ) -> tuple[Op, tuple[Output, ...]]:
        """Another coordinator finds it in the journal."""
        return self.step(Op(operation, epoch, (), -1), ("recover", journal, published), True)

    def step(self, op: Op, what: What, owns: bool) -> tuple[Op, tuple[Output, ...]]:
        """What comes of one event. `owns`: whether the journal takes records of this coordinator."""
        known = self._known.get((op, what, owns))
        if known is None:
            known = self._known[op, what, owns] = self._step(op, what, owns)
        return known

    def without(self, op: Op, name: Name) -> Op:
        """After it is known that this call is never answered: what its answer might have shown is not kept for it."""
        at = self.at(op)
        if self._plain or name not in at.calls or at.runs(name):
            return op
        left = at._replace(calls={each: number for each, number in at.calls.items() if each != name})
        return op._replace(core=self.states.number(self._key(op, left), left))

    def _step(self, op: Op, what: What, owns: bool) -> tuple[Op, tuple[Output, ...]]:
        now, timer_at, calls = 0.0, None, dict[Name, int]()
        if what[0] == "begin":
            transaction = Transaction(LIMITS)
        elif what[0] == "recover":
            journal: Any = what[1]
            found: list[Record] = [self.records.values[number] for number in journal]
            transaction = Transaction.from_records(
                found, published=bool(what[2]), coordinator_epoch=op.epoch, limits=LIMITS
            )
            op = op._replace(incarnations=tuple(
                int(p.incarnation_id.partition("-")[2]) for p in transaction.topology.participants
            ))  # fmt: skip
        else:
            at = self.at(op)
            transaction, now, timer_at = clone(at.transaction, {}), at.now, at.timer_at
            calls = dict(at.calls)
        if what[0] == "tick":
            assert timer_at is not None
            now, timer_at = max(now, timer_at), None
        event = self._event(op, what, now, calls)
        effects = transaction.step(event)
        if what[0] in ("replied", "refused", "no answer") and not self._plain:
            # Nothing is heard of this call any more: what another answer to it might show is not kept for it.
            calls.pop(cast(Name, what[1]), None)
        after, out = self._performed(op, transaction, effects, At(transaction, now, timer_at, calls), owns)
        if what[0] == "replied":
            self._repeated(transaction, event, now, calls)
        return after, out

    def _performed(
        self, op: Op, transaction: Transaction, effects: list[Effect], at: At, owns: bool
    ) -> tuple[Op, tuple[Output, ...]]:
        out: list[Output] = []
        while effects:
            effect = effects.pop(0)
            match effect:
                case Record(required=required):
                    if not owns and required:
                        problem = Problem(Reason.FENCED, "Another coordinator has started.")
                        effects = transaction.step(core.RecordFailed(at.now, problem))
                    elif owns:
                        out.append(("record", self._record(op, effect), required))
                case core.Call():
                    who = NAMES.index(effect.participant_id)
                    self._in_order(op, transaction, who, effect.phase)
                    if effect.phase in OPENING:
                        op = op._replace(told=op.told | {who})
                    out.append(("call", _named(at.calls, who, effect), who, int(effect.phase), _about(effect)))
                case core.Cancel(call_no=number):
                    out.append(("cancel", next(name for name, each in at.calls.items() if each == number)))
                case core.Publish():
                    op = op._replace(publishing=1)
                case core.SetTimer(at=timer_at):
                    at = at._replace(timer_at=timer_at)
                case core.Finish(outcome=outcome, primary=primary):
                    if outcome is not Outcome.SUCCEEDED and (primary is None or not primary.phase):
                        raise Violation("L5", f"it ended as {outcome.name} and does not say why, or where")
                    op = op._replace(outcome=outcome.name)
                case _:
                    pass
        fresh = len(self.states)
        still = {number for field in ("_running", "_closing") for number in getattr(transaction.course.calls, field)}
        at = at._replace(calls={name: number for name, number in at.calls.items() if number in still})
        op = op._replace(core=self.states.number(self._key(op, at), at))
        if op.core == fresh:
            self._can_be_aborted(op)
        return op, tuple(out)

    def _key(self, op: Op, at: At) -> Hashable:
        timer = None if at.timer_at is None else round(at.timer_at - at.now, 6)
        return self._keys(at).of(at.transaction), timer, op.operation, op.incarnations

    def _keys(self, at: At) -> Keys:
        calls = {number: name for name, number in at.calls.items()}
        return Keys(at.now, calls, opening=at.transaction.stage in OPENING_STAGES | {Stage.ENDED}, plain=self._plain)

    def _event(self, op: Op, what: What, now: float, calls: dict[Name, int]) -> Event:
        number: Any = what[1] if len(what) > 1 else None
        if what[0] in ("replied", "refused", "no answer"):
            number = calls.get(number, -1)  # -1: a call that is long forgotten
        match what[0]:
            case "begin":
                return core.Begin(now, now + DEADLINE, self._operation(op), _topology(op.incarnations))
            case "recover":
                return core.Recover(now)
            case "replied":
                payload: Any = what[2]
                return core.Replied(now, number, self._proof(op, payload, int(what[3])))  # type: ignore[call-overload]
            case "refused":
                reason: Any = what[2]
                return core.RefusedBy(now, number, Problem(Reason[reason], "No."))
            case "no answer":
                return core.NoAnswer(now, number, Problem(Reason.UNREACHABLE, "No answer."))
            case "lost":
                return core.ParticipantLost(now, NAMES[number], Problem(Reason.UNREACHABLE, "Its registration ended."))
            case "restarted":
                return core.IncarnationChanged(now, NAMES[number], _incarnation(int(what[2])))  # type: ignore[call-overload]
            case "lease lost":
                reason, still = str(what[2]), bool(what[3])
                kept = {STILL_LOADED: operation_id(op.operation)} if still else {}
                return core.LeaseLost(now, NAMES[number], Problem(Reason[reason], "It has opened.", metadata=kept))
            case "lease renewed":
                return core.LeaseRenewed(now, NAMES[number], now, TTL_S)
            case "abort":
                return core.AbortRequested(now, "a person")
            case "commit":
                return core.CommitRequested(now, now + DEADLINE)
            case "publish":
                return core.PublishRequested(now, now + DEADLINE)
            case "resume":
                return core.ResumeRequested(now)
            case "published":
                return core.Published(now)
            case "publish failed":
                return core.PublishFailed(now, Problem(Reason.STORAGE_FAILED, "The disk."))
            case _:
                return core.Tick(now)

    # ---- parts --------------------------------------------------------------------------------------------------------

    def _operation(self, op: Op) -> Operation:
        kind, driven = KINDS[self.program[op.operation]]
        return Operation(
            kind, OperationId(operation_id(op.operation)), SnapshotId(f"step-{op.operation}"),
            coordinator_epoch=op.epoch, options=Options(lease_ttl_s=TTL_S), trainer_driven=driven,
        )  # fmt: skip

    def _proof(self, op: Op, payload: Payload, who: int) -> Proof:
        name, snapshot = OperationId(operation_id(op.operation)), SnapshotId(f"step-{op.operation}")
        if payload[0] == "opened":
            return Opened()
        incarnation, generation = _incarnation(int(payload[1])), int(payload[2])
        match payload[0]:
            case "prepare":
                return Prepared(incarnation, generation, ("w-0",))
            case "commit":
                return Committed(name, snapshot, NAMES[who], incarnation, "0a" * 32)
            case "confirmed":
                return Confirmed(incarnation, generation, TTL_S)
            case _:
                return RestoredProof(snapshot, incarnation, generation)

    def _record(self, op: Op, record: Record) -> int:
        # Causes are for people: what a coordinator that starts again does depends on the kinds alone.
        found = op.operation, op.incarnations, record.kind, record.data.get("outcome"), record.required
        return self.records.number(found, record)

    def _in_order(self, op: Op, transaction: Transaction, who: int, phase: Phase) -> None:
        order = ORDER.get(phase)
        if order is None:
            return
        evidence = transaction.evidence
        shown: dict[Phase, Any] = {
            Phase.PREPARE: evidence.prepared,
            Phase.COMMIT: evidence.committed,
            Phase.RESTORE: evidence.restored,
        }
        for earlier in order[: order.index(who)]:
            name = NAMES[earlier]
            if phase in shown and name not in shown[phase]:
                raise Violation("I18", f"{NAMES[who]} is told to {phase.name} before {name} has shown its proof")
            if phase in OPENING and name in evidence.attempted and earlier not in op.told:
                raise Violation("I18", f"{NAMES[who]} is told to {phase.name} before {name} is")

    def _repeated(self, after: Transaction, event: Event, now: float, calls: dict[Name, int]) -> None:
        """`event` was stepped and comes again."""
        transaction = clone(after, {})
        told = [e for e in transaction.step(event) if not isinstance(e, (core.Ignored, core.SetTimer))]
        if any(not isinstance(e, core.Call) or e.phase not in OPENING for e in told):
            raise Violation("I9", f"a repeated reply makes the coordinator act: {told}")
        # A proof that voided the operation says, when it comes again, that its participant closed: it is told once more.
        more = {(-1, -1, e.call_no): e.call_no for e in told if isinstance(e, core.Call)}
        keys = self._keys(At(transaction, now, None, calls | more))
        before = keys.of(after if transaction.course.opening is None else transaction)
        transaction.step(event)
        if keys.of(transaction) != before:
            raise Violation("I9", "a repeated reply changes the coordinator")

    def _can_be_aborted(self, op: Op) -> None:
        at = self.at(op)
        stage = at.transaction.stage
        if at.transaction.published or stage in (Stage.IDLE, Stage.ENDED, Stage.RESUMING):
            return
        transaction = clone(at.transaction, {})
        effects = transaction.step(core.AbortRequested(at.now, "a check"))
        if any(isinstance(e, core.Reject) or (isinstance(e, Record) and e.required) for e in effects):
            raise Violation("I15", f"an operation that is {stage} cannot be aborted without more ado")
        if transaction.stage not in (Stage.ABORTING, Stage.ENDED, Stage.PUBLISHING):
            raise Violation("I15", f"an abort while {stage} leads to {transaction.stage}")


def _topology(incarnations: tuple[int, ...]) -> Topology:
    return Topology(tuple(
        Participant(
            NAMES[who], _ROLES[who], _KINDS[who], CheckpointMode.EXPORT_RESTORE, _incarnation(number), f"unix:/run/{who}.sock"
        )
        for who, number in enumerate(incarnations)
    ))  # fmt: skip


def _incarnation(number: int) -> IncarnationId:
    return IncarnationId(f"i-{number}")


def _named(calls: dict[Name, int], who: int, call: core.Call) -> Name:
    """A name that no call has which may still be answered."""
    nth = 0
    while (who, int(call.phase), nth) in calls:
        nth += 1
    name = who, int(call.phase), nth
    calls[name] = call.call_no
    return name


def _about(call: core.Call) -> tuple[int, ...]:
    arguments = call.arguments
    if isinstance(arguments, core.ConfirmArguments):
        return int(arguments.incarnation_id.partition("-")[2]), arguments.generation
    return ()
