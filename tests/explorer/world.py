"""What a state of the small model is made of, and the numbers by which states are kept.

The rule: a state is a few small numbers, so that millions of them fit into memory and equal ones are one. Nothing here
knows what may happen.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final, NamedTuple

from coordinator.protocol.legality import OPENING_STAGES
from coordinator.protocol.operation import Stage
from coordinator.wire.terms import Phase
from tests.explorer.core import Cores, Op
from tests.explorer.shim import Name, Payload, Shim, Shims
from tests.explorer.values import Table

NOTHING, THERE, VOID = 0, 1, 2  # a manifest's name on the disk
ABORTED, RESUMED = 1, 2  # bits: what participants were told
CLOSES: Final = (Phase.PREPARE, Phase.RESTORE)


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


class World:
    """The tables of numbers, and what is asked of a state."""

    def __init__(self, program: tuple[str, ...], budget: Budget, *, plain: bool = False) -> None:
        """`plain`: without the reductions that `tidy` says are left out then."""
        self.program = program
        self.plain = plain
        self.cores = Cores(program, plain=plain)
        self.shims = Shims(len(program))
        self._ops = Table()
        self._op(None)
        self._parts = Table()
        self._owners: list[int] = []  # by number: which operation owns its pause, or -1
        self._messages = Table()
        self._pairs = Table()
        self._pasts = Table()
        self._facts: list[Facts] = []
        first = self._part(self.shims.first)
        none = (0,) * len(program)
        self.first = State(((NOT_BEGUN,) * len(program), ()), (first,) * 3, (), (), none, none, budget)

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

    def _with(self, state: State, who: int, shim: Shim) -> State:
        c, shims, net, journal, manifests, decided, budget = state
        return State(c, changed(shims, who, self._part(shim)), net, journal, manifests, decided, budget)

    def _keep(self, state: State, coordinator: int, op: Op) -> State:
        ops = changed(state.coordinators[coordinator], op.operation, self._op(op))
        c, shims, net, journal, manifests, decided, budget = state
        both = (ops, c[1]) if coordinator == 0 else (c[0], ops)
        return State(both, shims, net, journal, manifests, decided, budget)

    def _moves(self, state: State, coordinator: int, op: Op) -> bool:
        """Whether anything is on its way that this operation waits for."""
        mine = (coordinator, op.operation)
        runs = self.cores.at(op).runs
        for number in state.net:
            message = self.message(number)
            if not isinstance(message, Notice) and message[1:3] == mine and runs(message.number):
                return True
        return any(ref[:2] == mine and runs(ref[2]) for who in range(3) for ref in self.shim(state, who).followers)

    def _is_heard(self, number: int) -> bool:
        op: Op | None = self._ops.values[number]
        return op is not None and op.core >= 0

    def _hears(self, state: State, coordinator: int, operation: int) -> bool:
        if not state.coordinators[coordinator]:
            return False
        op = self.op(state, coordinator, operation)
        return op is not None and op.core >= 0


def _facts(message: Message) -> Facts:
    if isinstance(message, Notice):
        return Facts(NOTICE, message.who, message.coordinator, -1, False, False)
    if isinstance(message, Reply):
        tells = message.payload[0] in ("prepare", "confirmed", "restore")
        return Facts(REPLY, message.who, message.coordinator, message.operation, False, tells)
    closes, tells = message.phase in CLOSES, message.phase == Phase.CONFIRM
    kind = CALL if message.live else STRAY
    return Facts(kind, message.who, message.coordinator, message.operation, closes, tells)


def with_net(state: State, net: tuple[int, ...]) -> State:
    coordinators, shims, _, journal, manifests, decided, budget = state  # `_replace` takes three times as long
    return State(coordinators, shims, net, journal, manifests, decided, budget)


def paid_of(state: State) -> State:
    return state._replace(budget=state.budget._replace(losses=state.budget.losses - 1))


def without_one(state: State, number: int) -> State:
    place = state.net.index(number)
    return with_net(state, state.net[:place] + state.net[place + 1 :])


def changed(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
