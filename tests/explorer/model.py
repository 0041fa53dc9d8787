"""The small model: coordinators, three participants, a network, a disk, and what may happen next.

The rule: everything that may happen in a state is in `steps`, and nothing else happens. Steps that cost are faults, and
are bounded by the state's budget; the others are free, in any order. A step is one message, one write, one death.

What is free: any order in which messages arrive; participants that take as long as they like; leases that lapse at any
time; renewals that find it out, and what they are told then (that a restore is loaded still, or nothing); a trainer that
waits as long as it likes; timers once nothing that they wait for moves; a coordinator that was replaced and leaves.
What costs: a request that is late (its caller has given up), a request that comes twice, a reply that is lost, a timer
that goes off before what it waits for, a phase or a write that fails, a crash, an abort by a person.

Reductions, and why they lose nothing. The first five hold everywhere; the others are left out in a `plain` exploration, to
which the tests compare on small bounds (how the world can stand at rest must be the same, state by state):
- A lost request is a late one that has not arrived yet: whatever may follow a loss may follow a delay.
- Participants and coordinators are numbers for states that were seen (`values`), so equal ones are one.
- A message that changes nothing now and can change nothing later is taken out at once: a request that its participant
  refuses for ever (its operation is over there, or its epoch too low, and that incarnation is the last one), and a reply
  whose call does not run any more, unless it might say that somebody closed late.
- An operation that has ended, and whose coordinator has nobody left to tell, is its outcome; marks of what happened in
  it are taken off once it cannot be published any more, since only its publish would ask for them.
- Admission generations are only compared within an operation: at rest they begin again.
- A request that nobody waits for, and whose arrival would change nothing, does not arrive: what could follow without it
  can follow with it as well, since it may stay on its way for ever. So could a Confirm that nobody waits for: all that it
  changes is the lease, which is not counted here; it is gone. A repeat of a request that would be gone at once would only
  cost: it does not happen.
- A save that no coordinator can publish any more closes nobody again but by a Prepare that is on its way. A participant that
  it does not hold, and to which none is on its way, has never heard of it: its tombstone would only refuse such a Prepare,
  all that may still come is Resume or Abort, and "opened", "finished" and "fenced" are the same to a coordinator that opens
  a save. So what is on its way there that nobody waits for is gone. Restores are left as they are: who has loaded is asked.
- An operation that has an outcome, and that neither holds anybody nor can, is its outcome, though its coordinator would
  still tell some to open (as long as one coordinator lives: with two, what they tell would say which epoch is served).
- A call that was answered, or that never can be, is forgotten by the coordinator: another answer to it, which `CallBook`
  would know, does not come. Causes and times that are only told are left out of keys (`values.ONLY_TOLD`).
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final, NamedTuple, cast

from coordinator.protocol.events import RecordKind
from coordinator.protocol.legality import BEFORE_PUBLISH, OPENING_STAGES, OWNED, UNATTENDED
from coordinator.protocol.operation import Outcome, Stage
from coordinator.wire.terms import Phase
from tests.explorer.core import AGENT, NAMES, OPENING, ORDER, RESOURCES, Cores, Op, Output, What
from tests.explorer.shim import Call, Name, Payload, Ref, Served, Shim, Shims
from tests.explorer.values import Table
from tests.explorer.violation import Violation

NOTHING, THERE, VOID = 0, 1, 2  # a manifest's name on the disk
ABORTED, RESUMED = 1, 2  # bits: what participants were told
_CLOSES: Final = (Phase.PREPARE, Phase.RESTORE)


class Request(NamedTuple):
    """A call on its way. `live`: its caller waits for the answer; what nobody waits for has no name."""

    who: int
    coordinator: int
    operation: int
    number: Name
    phase: int
    about: tuple[int, ...]
    live: bool


class Reply(NamedTuple):
    """An answer on its way."""

    who: int
    coordinator: int
    operation: int
    number: Name
    payload: Payload


class Notice(NamedTuple):
    """The registration of a participant ended (`incarnation` 0), or it came back as another incarnation."""

    who: int
    coordinator: int
    incarnation: int


Message = Request | Reply | Notice


class Facts(NamedTuple):
    """What is looked at of a message again and again. `closes`: a request that may close; `tells`: of a generation."""

    kind: int
    who: int
    coordinator: int
    operation: int
    closes: bool
    tells: bool


class Standing(NamedTuple):
    """What follows from the coordinators alone. `ended`: operations with an outcome that are not that outcome yet.

    `over`: which operations nobody publishes any more; `saves`: those of them that are saves.
    """

    number: int
    ended: tuple[tuple[int, int], ...]
    over: tuple[int, ...]
    saves: tuple[int, ...]
    alone: bool


class Arrival(NamedTuple):
    """What comes of a request. `sent`: numbers of the replies."""

    shim: Shim
    call: Call
    served: Served
    after: int
    sent: tuple[int, ...]


class Budget(NamedTuple):
    """How much may still go wrong. `lapses`: of leases that somebody still renews; others lapse for nothing."""

    losses: int
    crashes: int
    aborts: int
    lapses: int


class State(NamedTuple):
    """Everything. `coordinators`: for each, its operations by number (of `Model.ops`), or () when it does not live.

    `journal`: numbers of records; `manifests`: by operation; `decided`: by operation, what anybody was told.
    """

    coordinators: tuple[tuple[int, ...], ...]
    shims: tuple[int, ...]
    net: tuple[int, ...]
    journal: tuple[int, ...]
    manifests: tuple[int, ...]
    decided: tuple[int, ...]
    budget: Budget


class Step(NamedTuple):
    """One thing that may happen: what it is, whether it costs, and what is then. `rank`: what a calm world does first."""

    label: tuple[Any, ...]
    cost: int
    rank: int
    state: State


LAPSE: Final = 9  # ranks
BEGIN: Final = 8
LEAVES: Final = 7
NOT_BEGUN: Final = 0  # as the number of an operation
GIVEN_UP: Final = OPENING_STAGES | {Stage.ENDED}  # it is not published any more, if it has not been
NOBODY: Final = (-1, 0, 0)
UNKNOWN: Final = -1
NOTICE, REPLY, CALL, STRAY = 0, 1, 2, 3  # kinds of messages: a stray is a request that nobody waits for
# A packed state: coordinators and what was (4 bytes each), participants and messages on their way (2 bytes each).
_LAYOUTS: Final = tuple(Struct(f"<2I{3 + count}H") for count in range(40))


class Model:
    """The rules of the small world. `split`: a crashed coordinator may live on beside the next one."""

    def __init__(self, program: tuple[str, ...], budget: Budget, *, split: bool = False, plain: bool = False) -> None:
        self.program = program
        self.split = split
        self.plain = plain
        self.cores = Cores(program, plain=plain)
        self.shims = Shims(len(program))
        self._ops = Table()
        self._op(None)
        self._parts = Table()
        self._owners: list[int] = []  # by number: which operation owns its pause, or -1
        self._messages = Table()
        self._heard = Table()
        self._pairs = Table()
        self._pasts = Table()
        self._compacted: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._facts: list[Facts] = []
        self._standings: dict[tuple[tuple[int, ...], ...], Standing] = {}
        self._arrivals: dict[tuple[int, Request], Arrival] = {}
        self._remains: dict[tuple[int, int, bool], int | None] = {}
        self._left: dict[tuple[int, tuple[int, ...], bool, int], int] = {}
        first = self._part(self.shims.first)
        none = (0,) * len(program)
        self.first = State(((NOT_BEGUN,) * len(program), ()), (first,) * 3, (), (), none, none, budget)

    # ---- bytes ----

    def packed(self, state: State) -> bytes:
        """The state in few bytes, exactly."""
        coordinators, shims, net, *past = state
        former = self._pasts.number(key := tuple(past), key)
        count = len(net)
        return _LAYOUTS[count].pack(self._pairs.number(coordinators, coordinators), former, *shims, *net)

    def unpacked(self, packed: bytes) -> State:
        """The state that was packed by this model."""
        pair, past, *rest = _LAYOUTS[(len(packed) - _LAYOUTS[0].size) // 2].unpack(packed)
        return State(self._pairs.values[pair], tuple(rest[:3]), tuple(rest[3:]), *self._pasts.values[past])

    # ---- numbers ------------------------------------------------------------------------------------------------------

    def _op(self, op: Op | None) -> int:
        return self._ops.number(op, op)

    def _part(self, shim: Shim) -> int:
        number = self._parts.number(shim, shim)
        if number == len(self._owners):
            self._owners.append(self.shims.owner(shim))
        return number

    def _message(self, message: Message) -> int:
        number = self._messages.number((type(message), message), message)
        if number == len(self._facts):
            self._facts.append(_facts(message))
        return number

    def op(self, state: State, coordinator: int, operation: int) -> Op | None:
        """The operation at this coordinator; None when it has not begun there."""
        found: Op | None = self._ops.values[state.coordinators[coordinator][operation]]
        return found

    def shim(self, state: State, who: int) -> Shim:
        """A participant."""
        found: Shim = self._parts.values[state.shims[who]]
        return found

    def message(self, number: int) -> Message:
        """A message."""
        found: Message = self._messages.values[number]
        return found

    @staticmethod
    def highest(state: State) -> int:
        """The coordinator that started last."""
        return 1 if state.coordinators[1] else 0

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
            without = _with_net(state, state.net[:place] + state.net[place + 1 :])
            if isinstance(message, Request):
                # A calm world does not count on what nobody waits for: it may be lost.
                rank = 0 if message.live else LAPSE + 1
                after = self._arrives(without, message)
                once = self._tidy(after)
                if message.live or after != without or self.plain:
                    yield Step(("arrives", message), 0, rank, once)
                if message.live and state.budget.losses:
                    paid = _paid(without)
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
                    lost = self._told(_paid(without), message, ("no answer", message.number))
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
                    yield Step(("fails", who, shim.runs), 1, 1, self._tidy(self._served(_paid(state), who, served)))
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
                    paid = state if free else _paid(state)
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
                state = state._replace(manifests=_changed(state.manifests, operation, VOID))
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
        after = State(state[0], _changed(state.shims, who, known.after), net, *state[3:])
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
        if call.phase in _CLOSES and who == RESOURCES and shim.open and not served.shim.open:
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
            there = state._replace(manifests=_changed(state.manifests, op.operation, THERE))
            linked = self._keep(there, coordinator, op._replace(publishing=2))
            yield Step(("the snapshot is published", *label), 0, 2, self._tidy(linked))
            if state.budget.losses:
                yield Step(("the disk fails", *label), 1, 2, self._tidy(_paid(failed)))
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
        return state._replace(decided=_changed(state.decided, operation, decided))

    def _cancelled(self, state: State, ref: Ref) -> State:
        """Nobody waits any more: the request may still arrive, and only an answer that is here already is still read."""
        for number in state.net:
            message = self.message(number)
            if isinstance(message, Request) and message.live and message[1:4] == ref:
                state = self._sent(_without(state, number), message._replace(live=False, number=NOBODY))
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

    def _with(self, state: State, who: int, shim: Shim) -> State:
        c, shims, net, journal, manifests, decided, budget = state
        return State(c, _changed(shims, who, self._part(shim)), net, journal, manifests, decided, budget)

    def _keep(self, state: State, coordinator: int, op: Op) -> State:
        ops = _changed(state.coordinators[coordinator], op.operation, self._op(op))
        c, shims, net, journal, manifests, decided, budget = state
        both = (ops, c[1]) if coordinator == 0 else (c[0], ops)
        return State(both, shims, net, journal, manifests, decided, budget)

    def _sent(self, state: State, message: Message) -> State:
        return _with_net(state, tuple(sorted((*state.net, self._message(message)))))

    def _notified(self, state: State, who: int, incarnation: int) -> State:
        for coordinator, ops in enumerate(state.coordinators):
            if ops:
                old = self._message(Notice(who, coordinator, 0))
                if old in state.net:  # the later news says it all
                    state = _without(state, old)
                state = self._sent(state, Notice(who, coordinator, incarnation))
        return state

    def _moves(self, state: State, coordinator: int, op: Op) -> bool:
        """Whether anything is on its way that this operation waits for."""
        mine = (coordinator, op.operation)
        runs = self.cores.at(op).runs
        for number in state.net:
            message = self.message(number)
            if not isinstance(message, Notice) and message[1:3] == mine and runs(message.number):
                return True
        return any(ref[:2] == mine and runs(ref[2]) for who in range(3) for ref in self.shim(state, who).followers)

    def _tidy(self, state: State) -> State:
        """Without what can change nothing any more; see above."""
        standing = self._stand(state.coordinators)
        for coordinator, operation in standing.ended:
            op = self.op(state, coordinator, operation)
            assert op is not None
            at = self.cores.at(op)
            lingers = at.timer_at is not None or self._moves(state, coordinator, op)
            if at.transaction.settled or not lingers or self._is_behind(state, standing, operation):
                state = self._keep(state, coordinator, Op(operation, 0, (), -1, outcome=op.outcome))
        standing = self._stand(state.coordinators)
        coordinators, shims, net, journal, manifests, decided, budget = state
        rests = not net and self._rests(coordinators) and any(coordinators)
        if net:
            behind = tuple(o for o in standing.saves if self._is_behind(state, standing, o))
            remain = [kept for number in net if (kept := self._still(state, number, behind)) is not None]
            net = tuple(sorted(remain))
        known = self._facts
        if not self.plain:
            rests = len(standing.over) == len(self.program) and not any(known[number].tells for number in net)
        compact = self._compacted.get(journal)
        if compact is None:
            compact = self._compacted[journal] = self._compact(journal)
        closing = [known[number][1:4:2] for number in net if known[number].closes]  # whom, and of which operation
        left: list[int] = []
        for who, number in enumerate(shims):
            out_of: tuple[int, ...] = ()
            if standing.saves:
                owner = self._owners[number]
                out_of = tuple(o for o in standing.saves if owner != o and (who, o) not in closing)
            key = standing.number, out_of, rests, number
            found = self._left.get(key)
            if found is None:
                shim = self._without_the_past(state, self._parts.values[number], standing.over, out_of, rests)
                found = self._left[key] = self._part(shim)
            left.append(found)
            if out_of and net:
                net = tuple(n for n in net if not self._is_past(state, n, who, out_of))
        return State(coordinators, tuple(left), net, compact, manifests, decided, budget)

    def _stand(self, coordinators: tuple[tuple[int, ...], ...]) -> Standing:
        known = self._standings.get(coordinators)
        if known is None:
            ended, over = list[tuple[int, int]](), set(range(len(self.program)))
            for coordinator, ops in enumerate(coordinators):
                for operation, number in enumerate(ops):
                    op: Op | None = self._ops.values[number]
                    if op is None or op.core < 0:
                        continue
                    if op.outcome and not op.publishing:
                        ended.append((coordinator, operation))
                    if op.publishing or self.cores.at(op).transaction.stage not in GIVEN_UP:
                        over.discard(operation)
            saves = () if self.plain else tuple(o for o in over if not self.cores.is_restore(o))
            alone = any(coordinators) and not all(coordinators)
            heard = tuple(over), tuple(tuple(map(self._is_heard, ops)) for ops in coordinators)
            number = self._heard.number(heard, heard)
            known = self._standings[coordinators] = Standing(number, tuple(ended), tuple(over), saves, alone)
        return known

    def _rests(self, coordinators: tuple[tuple[int, ...], ...]) -> bool:
        return not any(self._is_heard(number) for ops in coordinators for number in ops)

    def _is_past(self, state: State, number: int, who: int, operations: tuple[int, ...]) -> bool:
        """Of an operation that this participant is out of: what nobody waits for, and word that it had closed."""
        fact = self._facts[number]
        if fact.who != who or fact.operation not in operations:
            return False
        if fact.kind != REPLY or not fact.tells:
            return fact.kind == STRAY
        op = self.op(state, fact.coordinator, fact.operation)
        return op is None or op.core < 0 or not self.cores.at(op).runs(self.message(number).number)  # type: ignore[union-attr]

    def _is_heard(self, number: int) -> bool:
        op: Op | None = self._ops.values[number]
        return op is not None and op.core >= 0

    def _without_the_past(
        self, state: State, shim: Shim, over: tuple[int, ...], out_of: tuple[int, ...], rests: bool
    ) -> Shim:
        left = shim._replace(followers=tuple(ref for ref in shim.followers if self._hears(state, ref[0], ref[1])))
        for operation in over:
            left = self.shims.forgets(left, operation)
        for operation in out_of:
            left = self.shims.never_heard_of(left, operation)
        return left._replace(generation=1) if rests and left.open else left

    def _compact(self, journal: tuple[int, ...]) -> tuple[int, ...]:
        """Of an operation that has ended, and that a later record has made durable, the end is all that is read."""
        for place in range(len(journal) - 1, 0, -1):
            record: Any = self.cores.records.values[journal[place]]
            if record.kind is RecordKind.BEGUN:
                before: list[Any] = [self.cores.records.values[number] for number in journal[:place]]
                ends = [n for n, each in zip(journal, before, strict=False) if each.kind is RecordKind.ENDED]
                return (*ends, *journal[place:])
        return journal

    def _hears(self, state: State, coordinator: int, operation: int) -> bool:
        if not state.coordinators[coordinator]:
            return False
        op = self.op(state, coordinator, operation)
        return op is not None and op.core >= 0

    def _is_behind(self, state: State, standing: Standing, operation: int) -> bool:
        """Whether nobody is held by this operation, nor can be any more: then nothing that is left of it can matter."""
        if not standing.alone or operation not in standing.saves:
            return False
        op = self.op(state, self.highest(state), operation)
        if op is None or not op.outcome:
            return False
        if any(self._owners[number] == operation for number in state.shims):
            return False
        known = self._facts
        return not any(known[number].closes and known[number].operation == operation for number in state.net)

    def _still(self, state: State, number: int, behind: tuple[int, ...]) -> int | None:
        fact = self._facts[number]
        if fact.kind == NOTICE:
            return number if state.coordinators[fact.coordinator] else None
        if fact.operation in behind:
            return None
        if fact.kind == STRAY:
            key = number, state.shims[fact.who], bool(state.budget.crashes)
        else:
            ops = state.coordinators[fact.coordinator]
            key = number, ops[fact.operation] if ops else -1, False
        kept = self._remains.get(key, UNKNOWN)
        if kept == UNKNOWN:
            kept = self._remains[key] = self._remaining(state, number)
        # Nobody waits for it any more: what becomes of it then is asked for the participant.
        return kept if kept is None or kept == number else self._still(state, kept, ())

    def _remaining(self, state: State, number: int) -> int | None:
        message = self.message(number)
        assert not isinstance(message, Notice)
        op = self.op(state, message.coordinator, message.operation) if state.coordinators[message.coordinator] else None
        heard = op is not None and op.core >= 0
        if isinstance(message, Reply):
            if op is None or not heard:
                return None
            at = self.cores.at(op)
            late = message.payload[0] in ("prepare", "restore") and (self.plain or message.number in at.calls)
            return number if at.runs(message.number) or late else None
        if message.live:
            return number if heard else self._message(message._replace(live=False, number=NOBODY))
        if message.phase == Phase.CONFIRM and not self.plain:
            return None
        shim = self.shim(state, message.who)
        last = shim.up and (shim.incarnation > 1 or not state.budget.crashes)
        epoch = message.coordinator + 1
        if last and (epoch < shim.seen or shim.marks[message.operation].over):
            call = Call(epoch, message.operation, Phase(message.phase), message.about)
            if self.shims.serve(shim, call, None).shim == shim:
                return None
        return number


def _facts(message: Message) -> Facts:
    if isinstance(message, Notice):
        return Facts(NOTICE, message.who, message.coordinator, -1, False, False)
    if isinstance(message, Reply):
        tells = message.payload[0] in ("prepare", "confirmed", "restore")
        return Facts(REPLY, message.who, message.coordinator, message.operation, False, tells)
    closes, tells = message.phase in _CLOSES, message.phase == Phase.CONFIRM
    kind = CALL if message.live else STRAY
    return Facts(kind, message.who, message.coordinator, message.operation, closes, tells)


def _with_net(state: State, net: tuple[int, ...]) -> State:
    coordinators, shims, _, journal, manifests, decided, budget = state  # `_replace` takes three times as long
    return State(coordinators, shims, net, journal, manifests, decided, budget)


def _paid(state: State) -> State:
    return state._replace(budget=state.budget._replace(losses=state.budget.losses - 1))


def _without(state: State, number: int) -> State:
    place = state.net.index(number)
    return _with_net(state, state.net[:place] + state.net[place + 1 :])


def _changed(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _ref(ref: Ref | None) -> Ref:
    assert ref is not None
    return ref
