"""Participants, a network and a disk that do their worst, for one core.

The participants here follow the rules of the contract in the simplest way (fence, tombstones, lease, incarnation), so
that what is found is the coordinator's fault. Everything that may happen next is an entry of `should()` or `faults()`; a test draws
which of it happens. `settle()` then lets everything that is left happen, in order and without further faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from coordinator.protocol.events import (
    AbortRequested,
    Begin,
    Call,
    Cancel,
    CommitRequested,
    ConfirmArguments,
    Effect,
    Event,
    Finish,
    IncarnationChanged,
    LeaseLost,
    LeaseRenewed,
    NoAnswer,
    ParticipantLost,
    Publish,
    Published,
    PublishFailed,
    PublishRequested,
    Record,
    RecordFailed,
    RecordKind,
    Recover,
    RefusedBy,
    Replied,
    ResumeRequested,
    SetTimer,
    Tick,
)
from coordinator.protocol.operation import Operation, Outcome, Stage
from coordinator.protocol.proofs import Committed, Confirmed, Opened, Prepared, Proof, RestoredProof
from coordinator.protocol.topology import Participant, Topology
from coordinator.protocol.transaction import Transaction
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import Phase

OPENING = (Phase.RESUME, Phase.ABORT)
STANDING = (Stage.PREPARED, Stage.COMMITTED, Stage.PUBLISHED, Stage.RESTORED)


@dataclass
class Server:
    """One participant, as the contract has it."""

    member: Participant
    incarnation: IncarnationId
    alive: bool = True
    closed: bool = False
    finished: bool = False  # it has seen the end of the operation, or its lease lapsed: never served again
    generation: int = 0
    lease_until: float = 0.0
    committed_at: int | None = None  # generation at which its state was written
    confirmed_at: int | None = None  # generation at which it confirmed
    loaded: bool = False

    def lapse(self, now: float) -> None:
        if self.closed and now >= self.lease_until:
            self._open()

    def _open(self) -> None:
        self.generation += self.closed
        self.closed, self.finished = False, True

    def restart(self) -> None:
        self.incarnation = IncarnationId(f"{self.incarnation}x")
        self.alive, self.closed, self.finished, self.generation = True, False, False, 0
        self.committed_at = self.confirmed_at = None
        self.loaded = False

    def serve(self, call: Call, operation: Operation, now: float) -> Proof | Reason:
        self.lapse(now)
        ttl = operation.options.lease_ttl_s
        if call.phase in OPENING:
            self._open()
            return Opened(closed_for_s=0.1)
        if self.finished:
            return Reason.OPERATION_FINISHED
        if call.phase in (Phase.PREPARE, Phase.RESTORE):
            self.generation += not self.closed
            self.closed, self.lease_until = True, now + ttl
            if call.phase == Phase.PREPARE:
                workers = tuple(f"w{n}" for n in range(self.member.configured_workers))
                return Prepared(self.incarnation, self.generation, workers)
            self.loaded = True
            return RestoredProof(operation.snapshot_id, self.incarnation, self.generation)
        if not self.closed:
            return Reason.WRONG_PHASE
        self.lease_until = now + ttl
        if call.phase == Phase.COMMIT:
            self.committed_at = self.generation
            name = self.member.participant_id
            return Committed(operation.operation_id, operation.snapshot_id, name, self.incarnation, "0a" * 32)
        assert isinstance(call.arguments, ConfirmArguments)
        if call.arguments.generation != self.generation or call.arguments.incarnation_id != self.incarnation:
            return Reason.INCARNATION_CHANGED
        self.confirmed_at = self.generation
        return Confirmed(self.incarnation, self.generation, ttl)


@dataclass
class World:
    """`log` is everything that the cores have asked for, in order; crashes are marked by None."""

    operation: Operation
    topology: Topology
    deadline: float
    now: float = 0.0
    core: Transaction = field(default_factory=Transaction)
    servers: dict[ParticipantId, Server] = field(default_factory=dict)
    requests: dict[int, Call] = field(default_factory=dict)  # sent, not arrived
    answers: dict[int, Event] = field(default_factory=dict)  # on their way back
    strays: list[Call] = field(default_factory=list)  # requests that the network delivers later than anybody thought
    journal: list[Record] = field(default_factory=list)
    on_disk: bool = False
    publishing: bool = False
    timer: float | None = None
    log: list[Effect | None] = field(default_factory=list)
    finish: Finish | None = None
    crashes: int = 0
    check: Callable[[World, list[Effect]], None] = lambda _world, _effects: None

    def __post_init__(self) -> None:
        self.servers = {p.participant_id: Server(p, p.incarnation_id) for p in self.topology.participants}
        self.step(Begin(self.now, self.deadline, self.operation, self.topology))

    def step(self, event: Event, *, journal_fails: bool = False) -> None:
        effects = self.core.step(event)
        done: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Record) and journal_fails:
                if effect.required:
                    self._performed(done)
                    self.step(RecordFailed(self.now, Problem(Reason.STORAGE_FULL, "The journal is full.")))
                    return
                continue
            done.append(effect)
        self._performed(done)

    def _performed(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.log.append(effect)
            match effect:
                case Record():
                    self.journal.append(effect)
                case Call():
                    self.requests[effect.call_no] = effect
                case Cancel():
                    stray = self.requests.pop(effect.call_no, None)
                    if stray is not None:
                        self.strays.append(stray)
                case Publish():
                    self.publishing = True
                case SetTimer(at=at):
                    self.timer = at
                case Finish():
                    self.finish = effect
                case _:
                    pass
        self.check(self, effects)

    # ---- what may happen ----------------------------------------------------------------------------------------------

    def happen(self, number: int) -> None:
        """One of all that may happen next: in nine of ten cases what should, else a fault."""
        should, faults = self.should(), self.faults()
        among = should if number % 10 and should else faults
        among[(number // 10) % len(among)]()

    def should(self) -> list[Callable[[], None]]:
        """What happens when nothing goes wrong."""
        out: list[Callable[[], None]] = [partial(self.arrive, no) for no in sorted(self.requests)]
        out += [partial(self.answer, no) for no in sorted(self.answers)]
        out += [partial(self.publish, ok=True)] if self.publishing else []
        if self.core.stage in STANDING:
            out.append(self.trainer)
        return out

    def faults(self) -> list[Callable[[], None]]:
        """What the world has against it, and mere time."""
        out: list[Callable[[], None]] = [partial(self.wait, 0.05), partial(self.wait, 1.0), partial(self.wait, 7.0)]
        out += [self.crash, self.renew, self.trainer, partial(self.step, AbortRequested(self.now, "a person"))]
        for no in sorted(self.requests):
            out += [
                partial(self.lose, no, arrives=False),
                partial(self.lose, no, arrives=True),
                partial(self.decline, no),
            ]
        out += [partial(self.answer, no, twice=True) for no in sorted(self.answers)]
        out += [partial(self.stray, n) for n in range(len(self.strays))]
        for name, server in self.servers.items():
            out += [partial(self.die, name), partial(self.restart, name)] if server.alive else []
        out += [partial(self.publish, ok=False)] if self.publishing else []
        return out

    def arrive(self, no: int) -> None:
        call = self.requests.pop(no)
        server = self.servers[call.participant_id]
        if not server.alive:
            self.answers[no] = NoAnswer(self.now, no, Problem(Reason.UNREACHABLE, "Connection refused."))
            return
        served = server.serve(call, self.operation, self.now)
        if isinstance(served, Reason):
            self.answers[no] = RefusedBy(self.now, no, Problem(served, "No."))
        else:
            self.answers[no] = Replied(self.now, no, served)

    def lose(self, no: int, *, arrives: bool) -> None:
        if arrives:
            self.arrive(no)
            self.answers.pop(no)
        else:
            self.strays.append(self.requests.pop(no))
        self.step(NoAnswer(self.now, no, Problem(Reason.UNREACHABLE, "No answer.")))

    def decline(self, no: int) -> None:
        call = self.requests.pop(no)
        if call.phase in OPENING:
            self.requests[no] = call  # nobody may decline to open
            return
        self.step(RefusedBy(self.now, no, Problem(Reason.DECLINED, "Not now.")))

    def answer(self, no: int, *, twice: bool = False) -> None:
        event = replace(self.answers.pop(no), now=self.now)  # type: ignore[type-var]
        self.step(event)
        if twice:
            self.step(event)

    def stray(self, index: int) -> None:
        call = self.strays.pop(index)
        server = self.servers[call.participant_id]
        if server.alive:
            served = server.serve(call, self.operation, self.now)
            if not isinstance(served, Reason):
                self.step(Replied(self.now, call.call_no, served))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for server in self.servers.values():
            server.lapse(self.now)
        for _ in range(20):
            if self.timer is None or self.timer > self.now:
                return
            self.timer = None
            self.step(Tick(self.now))
        raise AssertionError(f"the timer goes off at once, again and again: {self.core.stage} {self.timer}")

    def renew(self) -> None:
        for name in self.core.leases():
            server = self.servers[name]
            server.lapse(self.now)
            if not server.alive:
                continue
            if server.closed and not server.finished:
                server.lease_until = self.now + self.operation.options.lease_ttl_s
                self.step(LeaseRenewed(self.now, name, self.now, self.operation.options.lease_ttl_s))
            else:
                self.step(LeaseLost(self.now, name, Problem(Reason.LEASE_LAPSED, "It has opened.")))

    def die(self, name: ParticipantId) -> None:
        server = self.servers[name]
        server.alive, server.closed = False, False
        self.step(ParticipantLost(self.now, name, Problem(Reason.UNREACHABLE, "Its registration ended."), 0.5))

    def restart(self, name: ParticipantId) -> None:
        self.servers[name].restart()
        self.step(IncarnationChanged(self.now, name, self.servers[name].incarnation))

    def publish(self, *, ok: bool) -> None:
        in_time = self.now < self.core.publish_until()
        self.publishing = False
        if ok and in_time:
            self.on_disk = True
            self.step(Published(self.now))
        else:
            self.step(PublishFailed(self.now, Problem(Reason.STORAGE_FAILED, "The disk.")))

    def trainer(self) -> None:
        later = self.now + 10
        match self.core.stage:
            case Stage.PREPARED:
                self.step(CommitRequested(self.now, later))
            case Stage.COMMITTED:
                self.step(PublishRequested(self.now, later))
            case _:
                self.step(ResumeRequested(self.now))

    def crash(self, *, written: bool | None = None) -> None:
        if self.crashes >= 2 or not self.journal:
            return
        self.crashes += 1
        if self.publishing and (written if written is not None else self.crashes % 2 == 0):
            self.on_disk = True  # it died after the link, before it knew
        self.publishing = False
        self.strays += self.requests.values()
        self.requests.clear()
        self.answers.clear()
        self.timer = None
        self.log.append(None)
        self.core = Transaction.from_records(self.journal, published=self.on_disk, coordinator_epoch=2)
        # Call numbers begin again with each coordinator; answers to the old one's calls reach nobody.
        self.strays = [replace(call, call_no=10**6) for call in self.strays]
        self.step(Recover(self.now))

    def settle(self) -> None:
        """No more faults: everything arrives, everything is answered, time goes on until the core has ended."""
        for _ in range(600):
            if self.publishing:
                self.publish(ok=True)
            elif self.requests:
                self.arrive(min(self.requests))
            elif self.answers:
                self.answer(min(self.answers))
            elif self.core.stage in STANDING:
                self.trainer()
            elif self.core.stage == Stage.FAILED_PAUSED:
                return
            elif self.timer is not None:
                self.wait(max(0.01, self.timer - self.now))
            else:
                return

    @property
    def outcome(self) -> Outcome:
        return self.core.outcome

    def kinds(self) -> list[RecordKind]:
        return [record.kind for record in self.journal]
