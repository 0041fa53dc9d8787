"""The small model: coordinators, three participants, a network, a disk, and what may happen next.

The rule: everything that may happen in a state is in `steps`, and nothing else happens. Steps that cost are faults, and
are bounded by the state's budget; the others are free, in any order. A step is one message, one write, one death.

What is free: any order in which messages arrive; participants that take as long as they like; leases that lapse at any
time; renewals that find it out, and what they are told then (that a restore is loaded still, or nothing); a trainer that
waits as long as it likes; timers once nothing that they wait for moves; a coordinator that was replaced and leaves.
What costs: a request that is late (its caller has given up), a request that comes twice, a reply that is lost, a timer
that goes off before what it waits for, a phase or a write that fails, a crash, an abort by a person.

Which states are one, and what is left out, is said in `tidy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from coordinator.protocol.events import RecordKind
from coordinator.protocol.legality import BEFORE_PUBLISH, OWNED, UNATTENDED
from coordinator.protocol.operation import Outcome, Stage
from coordinator.wire.terms import Phase
from tests.explorer.core import AGENT, NAMES, OPENING, ORDER, RESOURCES, Op, Output, What
from tests.explorer.shim import Call, Name, Ref, Served, Shim
from tests.explorer.tidy import Tidy
from tests.explorer.violation import Violation
from tests.explorer.world import (
    ABORTED,
    BEGIN,
    CLOSES,
    LAPSE,
    LEAVES,
    NOBODY,
    NOT_BEGUN,
    NOTHING,
    RESUMED,
    THERE,
    VOID,
    Budget,
    Message,
    Notice,
    Reply,
    Request,
    State,
    Step,
    changed,
    paid_of,
    with_net,
    without_one,
)


class Arrival(NamedTuple):
    """What comes of a request. `sent`: numbers of the replies."""

    shim: Shim
    call: Call
    served: Served
    after: int
    sent: tuple[int, ...]


class Model(Tidy):
    """The rules of the small world. `split`: a crashed coordinator may live on beside the next one."""

    def __init__(self, program: tuple[str, ...], budget: Budget, *, split: bool = False, plain: bool = False) -> None:
        super().__init__(program, budget, plain=plain)
        self.split = split
        self._arrivals: dict[tuple[int, Request], Arrival] = {}

    # ---- what may happen ------------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        """All of it. Raises Violation when a rule is broken by a step."""
        yield from self._messages_move(state)
        yield from self._participants_move(state)
        for coordinator, ops in enumerate(state.coordinators):
            if ops:
                yield from self._coordinator_moves(state, coordinator)
        yield from self._crashes(state)

    def calm(self, state: State) -> bool:
        """Whether all is over: everybody is open, every operation has ended, nothing is on its way but what may be lost."""
        messages = [self.message(number) for number in state.net]
        if any(not isinstance(m, Request) or m.live for m in messages) or not any(state.coordinators):
            return False
        if not all(self.shim(state, who).up and self.shim(state, who).open for who in range(3)):
            return False
        ops = (self._ops.values[number] for each in state.coordinators for number in each)
        return all(op is None or op.core < 0 for op in ops)

    def _messages_move(self, state: State) -> Iterator[Step]:
        seen: set[int] = set()
        for place, number in enumerate(state.net):
            if number in seen:
                continue
            seen.add(number)
            message = self.message(number)
            without = with_net(state, state.net[:place] + state.net[place + 1 :])
            if isinstance(message, Request):
                # A calm world does not count on what nobody waits for: it may be lost.
                rank = 0 if message.live else LAPSE + 1
                after = self._arrives(without, message)
                once = self._tidy(after)
                if message.live or after != without or self.plain:
                    yield Step(("arrives", message), 0, rank, once)
                if message.live and state.budget.losses:
                    paid = paid_of(without)
                    stray = self._sent(paid, message._replace(live=False, number=NOBODY))
                    late = self._told(stray, message, ("no answer", message.number))
                    yield Step(("is late", message), 1, 0, self._tidy(late))
                    twice = self._arrives(self._sent(paid, message._replace(live=False, number=NOBODY)), message)
                    twice = self._tidy(twice)
                    if self.plain or twice != once._replace(budget=twice.budget):
                        yield Step(("arrives, and will again", message), 1, 0, twice)
            elif isinstance(message, Reply):
                yield Step(("is answered", message), 0, 0, self._tidy(self._answered(without, message)))
                if state.budget.losses:
                    lost = self._told(paid_of(without), message, ("no answer", message.number))
                    yield Step(("is lost", message), 1, 0, self._tidy(lost))
            else:
                yield Step(("is noticed", message), 0, 0, self._tidy(self._noticed(without, message)))

    def _participants_move(self, state: State) -> Iterator[Step]:
        for who in range(3):
            shim = self.shim(state, who)
            if not shim.up:
                back = self.shims.comes_back(shim)
                after = self._notified(self._with(state, who, back), who, back.incarnation)
                yield Step(("comes back", who), 0, 3, self._tidy(after))
                continue
            if shim.runs:
                served = self.shims.ends(shim, well=True)
                yield Step(("is done", who, shim.runs), 0, 1, self._tidy(self._served(state, who, served)))
                if state.budget.losses:
                    served = self.shims.ends(shim, well=False)
                    yield Step(("fails", who, shim.runs), 1, 1, self._tidy(self._served(paid_of(state), who, served)))
            if self._owners[state.shims[who]] >= 0:
                renewed = self._is_renewed(state, shim)
                if renewed and not state.budget.lapses:
                    continue
                paid = state._replace(budget=state.budget._replace(lapses=state.budget.lapses - renewed))
                after = self._tidy(self._served(paid, who, self.shims.lapses(shim)))
                yield Step(("lapses", who), int(renewed), LAPSE, after)

    def _is_renewed(self, state: State, shim: Shim) -> bool:
        """Whether a coordinator that the fence serves is at that operation: it renews, or tells it to open, in time."""
        operation = self.shims.owner(shim)
        return any(
            coordinator + 1 >= shim.seen and self._hears(state, coordinator, operation) for coordinator in range(2)
        )

    def _coordinator_moves(self, state: State, coordinator: int) -> Iterator[Step]:
        highest = coordinator == self.highest(state)
        for number in state.coordinators[coordinator]:
            op: Op | None = self._ops.values[number]
            if op is None or op.core < 0:
                continue
            yield from self._publishes(state, coordinator, op)
            at = self.cores.at(op)
            stage = at.transaction.stage
            if at.timer_at is not None and stage not in UNATTENDED:
                retry = at.transaction.course.calls.next_retry()
                free = (retry is not None and retry <= at.timer_at) or not self._moves(state, coordinator, op)
                free = free and stage not in OWNED
                if free or state.budget.losses:
                    paid = state if free else paid_of(state)
                    after = self._step(paid, coordinator, op, ("tick",))
                    yield Step(("time passes", coordinator, op.operation), not free, 5, self._tidy(after))
            if highest:
                yield from self._trainer_calls(state, coordinator, op, stage)
            for name in at.transaction.leases():
                who = NAMES.index(name)
                shim = self.shim(state, who)
                if not shim.up:
                    continue
                renewed = self.shims.renews(shim, op.operation, op.epoch)
                asked = self._with(state, who, renewed.shim)
                if renewed.refused:
                    lost = ("lease lost", who, renewed.refused, renewed.still_loaded)
                    after = self._step(asked, coordinator, op, lost)
                    label = "is told that it is loaded still" if renewed.still_loaded else "is told of a lapse"
                    yield Step((label, coordinator, op.operation, who), 0, 7, self._tidy(after))
                elif name in at.transaction.unheard:
                    after = self._step(asked, coordinator, op, ("lease renewed", who))
                    yield Step(("hears that it is held", coordinator, op.operation, who), 0, 7, self._tidy(after))
        if highest:
            yield from self._begins(state, coordinator)
            yield from self._settles(state, coordinator)

    def _trainer_calls(self, state: State, coordinator: int, op: Op, stage: Stage) -> Iterator[Step]:
        due = {
            Stage.PREPARED: ("commit",), Stage.COMMITTED: ("publish",), Stage.PUBLISHED: ("resume",),
            Stage.RESTORED: ("resume", "abort"), Stage.FAILED_PAUSED: ("abort",),
        }.get(stage, ())  # fmt: skip
        for what in due:
            after = self._step(state, coordinator, op, (what,))
            yield Step(("the trainer calls", coordinator, op.operation, what), 0, 6, self._tidy(after))
        if "abort" not in due and state.budget.aborts and (stage in BEFORE_PUBLISH or stage is Stage.PUBLISHING):
            paid = state._replace(budget=state.budget._replace(aborts=state.budget.aborts - 1))
            after = self._step(paid, coordinator, op, ("abort",))
            yield Step(("a person aborts", coordinator, op.operation), 1, 6, self._tidy(after))

    def _begins(self, state: State, coordinator: int) -> Iterator[Step]:
        ops = state.coordinators[coordinator]
        if NOT_BEGUN not in ops:
            return
        operation = ops.index(NOT_BEGUN)
        before: list[Op] = [self._ops.values[number] for number in ops[:operation]]
        if any(op.core >= 0 and not op.outcome for op in before):
            return
        if not all(self.shim(state, who).up for who in range(3)):
            return
        old = {(m.who, m.coordinator) for m in map(self.message, state.net) if isinstance(m, Notice)}
        # What has not been noticed yet is not known: it begins with the incarnation it has last heard of.
        known = tuple(
            self.shim(state, who).incarnation - ((who, coordinator) in old) for who in range(3)
        )  # fmt: skip
        op, out = self.cores.begin(operation, coordinator + 1, known, True)
        after = self._performed(state, coordinator, op, out)
        yield Step(("begins", coordinator, operation), 0, BEGIN, self._tidy(after))

    def _settles(self, state: State, coordinator: int) -> Iterator[Step]:
        """A shim registers again while it is paused by an operation that has ended here: it is told how."""
        for who in range(3):
            owner = self._owners[state.shims[who]]  # nobody's when it is dead
            op = self.op(state, coordinator, owner) if owner >= 0 else None
            if op is None or op.core >= 0:
                continue
            phase = Phase.RESUME if op.outcome == Outcome.SUCCEEDED.name else Phase.ABORT
            request = Request(who, coordinator, owner, NOBODY, int(phase), (), False)
            # Everybody registers when a coordinator starts; later only who had lost the line, which need not happen.
            rank = 7 if coordinator == 1 else LAPSE + 1
            yield Step(("is settled", coordinator, who), 0, rank, self._tidy(self._arrives(state, request)))

    def _crashes(self, state: State) -> Iterator[Step]:
        if not state.coordinators[0] and not state.coordinators[1]:
            yield from self._starts(state)
        if state.coordinators[0] and state.coordinators[1]:  # it looks whether it was replaced, and may be slow to
            left = state._replace(coordinators=((), state.coordinators[1]))
            yield Step(("the coordinator that was replaced leaves",), 0, LEAVES, self._tidy(left))
        if not state.budget.crashes:
            return
        paid = state._replace(budget=state.budget._replace(crashes=state.budget.crashes - 1))
        for who in range(3):
            shim = self.shim(state, who)
            if shim.up:
                after = self._with(paid, who, self.shims.dies(shim))
                for coordinator, operation, number in shim.followers:
                    after = self._sent(after, Reply(who, coordinator, operation, number, ("gone",)))
                yield Step(("dies", who), 1, 9, self._tidy(self._notified(after, who, 0)))
        if state.coordinators[0] and not state.coordinators[1]:
            yield Step(("the coordinator dies",), 1, 9, self._tidy(paid._replace(coordinators=((), ()))))
            if self.split:
                yield from self._starts(paid, cost=1)

    def _starts(self, state: State, cost: int = 0) -> Iterator[Step]:
        """The second coordinator starts, and finds what is durable: records that nobody waited for may be missing."""
        journal = state.journal
        while True:
            yield Step(("coordinator 1 starts", len(journal)), cost, 4, self._tidy(self._recovers(state, journal)))
            if not journal or self.cores.records.values[journal[-1]].required:
                return
            journal = journal[:-1]

    def _recovers(self, state: State, journal: tuple[int, ...]) -> State:
        state = state._replace(journal=journal, coordinators=(state.coordinators[0], (NOT_BEGUN,) * len(self.program)))
        for operation in range(len(self.program)):
            mine = tuple(n for n in journal if self._is_about(n, operation))
            if not mine:
                continue
            last: Any = self.cores.records.values[mine[-1]]
            if last.kind is RecordKind.ENDED:
                state = self._keep(state, 1, Op(operation, 0, (), -1, outcome=str(last.data["outcome"])))
                continue
            if state.manifests[operation] == NOTHING and not self.cores.is_restore(operation):
                state = state._replace(manifests=changed(state.manifests, operation, VOID))
            op, out = self.cores.recover(operation, 2, mine, state.manifests[operation] == THERE)
            state = self._performed(state, 1, op, out)
        for who in range(3):  # everybody registers
            shim = self.shim(state, who)
            if not shim.up or shim.incarnation > 1:
                state = self._sent(state, Notice(who, 1, shim.incarnation if shim.up else 0))
        return state

    def _is_about(self, record: int, operation: int) -> bool:
        return self._belongs_to(record) == operation

    def _belongs_to(self, record: int) -> int:
        data: Any = self.cores.records.values[record].data
        name = data["operation"]["operation_id"] if "operation" in data else data["operation_id"]
        return int(str(name).partition("-")[2])

    # ---- what then happens ----------------------------------------------------------------------------------------------

    def _arrives(self, state: State, request: Request) -> State:
        who = request.who
        number = state.shims[who]
        known = self._arrivals.get((number, request))
        if known is None:
            if not self.shim(state, who).up:
                return self._told(state, request, ("no answer", request.number)) if request.live else state
            known = self._arrivals[number, request] = self._arrival(self.shim(state, who), request)
        self._look(state, who, known.shim, known.call, known.served)
        net = tuple(sorted((*state.net, *known.sent))) if known.sent else state.net
        after = State(state[0], changed(state.shims, who, known.after), net, *state[3:])
        # A restore has no manifest that decides: how it ended is what participants were opened by.
        if (
            self.cores.is_restore(request.operation)
            and self.shims.owner(known.shim) == request.operation
            and known.served.shim.open
        ):
            after = self._decided(after, request.operation, known.call.phase)
        return after

    def _arrival(self, shim: Shim, request: Request) -> Arrival:
        call = Call(request.coordinator + 1, request.operation, Phase(request.phase), request.about)
        ref = (request.coordinator, request.operation, request.number) if request.live else None
        served = self.shims.serve(shim, call, ref)
        sent = [self._message(Reply(request.who, *its, payload)) for its, payload in served.others]
        if ref is not None and served.answer:
            sent.append(self._message(Reply(request.who, *ref, served.answer)))
        return Arrival(shim, call, served, self._part(served.shim), tuple(sent))

    def _look(self, state: State, who: int, shim: Shim, call: Call, served: Served) -> None:
        """Rules about several participants at once."""
        if self.cores.is_restore(call.operation) and shim.loaded == call.operation + 1:
            self._all_or_nobody(state, who, shim, call, served)
        if state.budget != self.first.budget:
            return  # a fault may cost the order of what happens, never the order in which it is asked for
        if call.phase in OPENING and who == AGENT and served.shim.open and not shim.open:
            shut = [NAMES[other] for other in range(3) if other != AGENT and not self.shim(state, other).open]
            if shut:
                raise Violation("I18", f"the agent is released while {', '.join(shut)} is closed")
        if call.phase in CLOSES and who == RESOURCES and shim.open and not served.shim.open:
            order = ORDER[Phase(call.phase)]
            for other in order[: order.index(who)]:
                its = self.shim(state, other)
                if its.open and not its.marks[call.operation].lapsed:
                    raise Violation("I18", f"resources close while {NAMES[other]} is open")

    def _all_or_nobody(self, state: State, who: int, shim: Shim, call: Call, served: Served) -> None:
        """I5, of one that has loaded: Resume makes it final when all have, Abort takes it back when none has made it final."""
        resumed = call.phase == Phase.RESUME and served.answer == ("opened",)
        given_up = call.phase == Phase.ABORT and served.shim.loaded != call.operation + 1
        for other in range(3):
            its = self.shim(state, other)
            if other == who or not its.up or its.incarnation != shim.incarnation:
                continue
            loaded = its.loaded == call.operation + 1
            if resumed and not loaded:
                raise Violation("I5", f"{NAMES[who]} opens with what it loaded, and {NAMES[other]} has not loaded it")
            if given_up and loaded and its.marks[call.operation].over:
                raise Violation("I5", f"{NAMES[who]} gives up what it loaded, and {NAMES[other]} has gone on with it")

    def _answered(self, state: State, reply: Reply) -> State:
        payload = reply.payload
        if payload == ("gone",):
            return self._told(state, reply, ("no answer", reply.number))
        if payload[0] == "refused":
            return self._told(state, reply, ("refused", reply.number, payload[1]))
        return self._told(state, reply, ("replied", reply.number, payload, reply.who))

    def _noticed(self, state: State, notice: Notice) -> State:
        what: What = ("restarted", notice.who, notice.incarnation) if notice.incarnation else ("lost", notice.who)
        for number in state.coordinators[notice.coordinator]:
            op: Op | None = self._ops.values[number]
            if op is not None and op.core >= 0:
                state = self._step(state, notice.coordinator, op, what)
        return state

    def _publishes(self, state: State, coordinator: int, op: Op) -> Iterator[Step]:
        label = (coordinator, op.operation)
        if op.publishing == 1:
            failed = self._step(state, coordinator, op._replace(publishing=0), ("publish failed",))
            if state.manifests[op.operation] == VOID or self._known_lapsed(state, op):
                yield Step(("the snapshot is not published", *label), 0, 2, self._tidy(failed))
                return
            self._may_be_published(state, op)
            there = state._replace(manifests=changed(state.manifests, op.operation, THERE))
            linked = self._keep(there, coordinator, op._replace(publishing=2))
            yield Step(("the snapshot is published", *label), 0, 2, self._tidy(linked))
            if state.budget.losses:
                yield Step(("the disk fails", *label), 1, 2, self._tidy(paid_of(failed)))
        elif op.publishing == 2:
            after = self._step(state, coordinator, op._replace(publishing=0), ("published",))
            yield Step(("it is known to be published", *label), 0, 2, self._tidy(after))

    def _known_lapsed(self, state: State, op: Op) -> bool:
        """Whether `publish_until` has passed: then a lease that was confirmed has lapsed, or may have."""
        for name in self.cores.at(op).transaction.evidence.lease_until:
            shim = self.shim(state, NAMES.index(name))
            if shim.marks[op.operation].lapsed:
                return True
        return False

    def _may_be_published(self, state: State, op: Op) -> None:
        """I1, I2, I3, I7 and I17 at the one moment when they decide."""
        operation = op.operation
        if state.decided[operation]:
            raise Violation("I1", f"operation {operation} is published, and somebody was told to open before")
        if state.manifests[operation] != NOTHING:
            raise Violation("I1", f"the snapshot of operation {operation} is published twice")
        for who, name in enumerate(NAMES):
            shim = self.shim(state, who)
            mark = shim.marks[operation]
            if not mark.exported:
                raise Violation(
                    "I2", f"operation {operation} is published, and {name} has exported nothing in its freeze"
                )
            if not mark.confirmed:
                raise Violation(
                    "I3", f"operation {operation} is published, and {name} has not confirmed an unbroken freeze"
                )
            if mark.confirmed != op.incarnations[who]:
                raise Violation(
                    "I17", f"operation {operation} is published with incarnation {mark.confirmed} of {name}"
                )
            if shim.up and shim.incarnation == mark.confirmed and not mark.frozen:
                raise Violation("I3", f"operation {operation} is published while {name} is open")

    def _told(self, state: State, message: Request | Reply, what: What) -> State:
        if not state.coordinators[message.coordinator]:
            return state
        op = self.op(state, message.coordinator, message.operation)
        if op is None or op.core < 0:
            return state
        return self._step(state, message.coordinator, op, what)

    def _step(self, state: State, coordinator: int, op: Op, what: What) -> State:
        after, out = self.cores.step(op, what, coordinator == self.highest(state))
        return self._performed(state, coordinator, after, out)

    def _performed(self, state: State, coordinator: int, op: Op, out: tuple[Output, ...]) -> State:
        state = self._keep(state, coordinator, op)
        for output in out:
            if output[0] == "record":
                state = state._replace(journal=(*state.journal, int(output[1])))  # type: ignore[arg-type]
            elif output[0] == "call":
                _, number, who, phase, about = output
                assert isinstance(who, int)
                assert isinstance(phase, int)
                assert isinstance(about, tuple)
                if not self.cores.is_restore(op.operation):
                    state = self._decided(state, op.operation, Phase(phase))
                state = self._sent(
                    state, Request(who, coordinator, op.operation, cast(Name, number), phase, about, True)
                )
            elif output[0] == "cancel":
                state = self._cancelled(state, (coordinator, op.operation, cast(Name, output[1])))
        return state

    def _decided(self, state: State, operation: int, phase: Phase) -> State:
        if phase not in OPENING:
            return state
        bit = ABORTED if phase == Phase.ABORT else RESUMED
        published = state.manifests[operation] == THERE
        if not self.cores.is_restore(operation) and published != (bit == RESUMED):
            raise Violation(
                "I1", f"{phase.name} of operation {operation}, which is {'' if published else 'not '}published"
            )
        decided = state.decided[operation] | bit
        if decided == ABORTED | RESUMED:
            raise Violation("I1", f"operation {operation} was resumed and aborted")
        return state._replace(decided=changed(state.decided, operation, decided))

    def _cancelled(self, state: State, ref: Ref) -> State:
        """Nobody waits any more: the request may still arrive, and only an answer that is here already is still read."""
        for number in state.net:
            message = self.message(number)
            if isinstance(message, Request) and message.live and message[1:4] == ref:
                state = self._sent(without_one(state, number), message._replace(live=False, number=NOBODY))
                return self._never_answered(state, ref)
        for who in range(3):
            shim = self.shim(state, who)
            if ref in shim.followers:
                left = shim._replace(followers=tuple(r for r in shim.followers if r != ref))
                return self._never_answered(self._with(state, who, left), ref)
        return state

    def _never_answered(self, state: State, ref: Ref) -> State:
        coordinator, operation, name = ref
        op = self.op(state, coordinator, operation)
        assert op is not None
        return state if op.core < 0 else self._keep(state, coordinator, self.cores.without(op, name))

    # ---- parts ----------------------------------------------------------------------------------------------------------

    def _served(self, state: State, who: int, served: Served) -> State:
        state = self._with(state, who, served.shim)
        for ref, payload in served.others:
            state = self._sent(state, Reply(who, *ref, payload))
        return state

    def _sent(self, state: State, message: Message) -> State:
        return with_net(state, tuple(sorted((*state.net, self._message(message)))))

    def _notified(self, state: State, who: int, incarnation: int) -> State:
        for coordinator, ops in enumerate(state.coordinators):
            if ops:
                old = self._message(Notice(who, coordinator, 0))
                if old in state.net:  # the later news says it all
                    state = without_one(state, old)
                state = self._sent(state, Notice(who, coordinator, incarnation))
        return state
