"""What can change nothing any more is taken out of a state, so that states which differ in nothing else are one.

Why that loses nothing. The first five hold everywhere; the others are left out in a `plain` exploration, with which the
tests compare small bounds (the ways in which the world can stand at rest must be the same):
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
- A request that nobody waits for is gone as well once its participant, in its last incarnation, has done what it asks for
  (or begun to prepare, since that which fails is not begun again): it is answered from what was recorded, then refused.
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

from typing import Any, NamedTuple

from coordinator.protocol.events import RecordKind
from coordinator.wire.terms import Phase
from tests.explorer.core import Op
from tests.explorer.shim import Call, Shim
from tests.explorer.values import Table
from tests.explorer.world import (
    GIVEN_UP,
    NOBODY,
    NOTICE,
    REPLY,
    STRAY,
    UNKNOWN,
    Budget,
    Notice,
    Reply,
    State,
    World,
)


class Standing(NamedTuple):
    """What follows from the coordinators alone. `ended`: operations with an outcome that are not that outcome yet.

    `over`: which operations nobody publishes any more; `saves`: those of them that are saves.
    """

    number: int
    ended: tuple[tuple[int, int], ...]
    over: tuple[int, ...]
    saves: tuple[int, ...]
    alone: bool


class Tidy(World):
    """A world that is tidied after each step."""

    def __init__(self, program: tuple[str, ...], budget: Budget, *, plain: bool = False) -> None:
        super().__init__(program, budget, plain=plain)
        self._heard = Table()
        self._compacted: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._standings: dict[tuple[tuple[int, ...], ...], Standing] = {}
        self._remains: dict[tuple[int, int, bool], int | None] = {}
        self._left: dict[tuple[int, tuple[int, ...], bool, int], int] = {}

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
        tidied = State(coordinators, tuple(left), net, compact, manifests, decided, budget)
        # What has gone may have been all that an operation waited for.
        return self._tidy(tidied) if standing.ended and len(net) < len(state.net) else tidied

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
        call = Call(epoch, message.operation, Phase(message.phase), message.about)
        done = not self.plain and self.shims.has_done(shim, call)
        idle = epoch < shim.seen or shim.marks[message.operation].over or done
        return None if last and idle and self.shims.serve(shim, call, None).shim == shim else number
