"""Who takes part now: shims that registered, each for as long as its stream lives, and those of the static list.

The rule: a name belongs to one living incarnation. A newcomer of that name with another incarnation is refused while
the old one lives, and replaces it once it is dead; whoever follows the registry hears of a loss or a replacement at
once, so that an operation never waits for somebody who is gone. Who is gone and has not come back is remembered: a
snapshot without it would look whole and lack what it holds. Who is behind a relay is heard with it, and gone with it.

No IO: the clock (seconds, monotonic) is given, streams call `beat` and `leave`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from coordinator.protocol.sentences import WE_SLEPT
from coordinator.protocol.topology import Missing, Participant, ShimProcess
from coordinator.wire.errors import ENDED, SLEPT, Problem, Reason, refuse
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import Role

Lost = Callable[[Participant, Problem], None]
Joined = Callable[[Participant], None]
Explained = Callable[[Participant, str], None]
GoneForGood = Callable[[tuple[ParticipantId, ...]], None]

MAX_PARTICIPANTS: Final = 10_000
_MAX_ENDS: Final = 1_000  # of shims whose end was told; the coordinator hears of most losses within seconds of it
_MAX_DISMISSED: Final = 1_000
_SHOWN: Final = 20


@dataclass(slots=True, eq=False)
class Relay:
    """A relay: how it announced itself, when it was last heard, and how long it may be silent (seconds)."""

    relay_id: str
    incarnation_id: str
    address: str
    process: ShimProcess | None
    nonce: str
    heard_at: float
    silence_s: float

    def __str__(self) -> str:
        return f"relay {self.relay_id} ({self.process or self.address})"


@dataclass(slots=True, eq=False)
class Session:
    """One registration: what a shim said in Hello, when it was last heard, how long it may be silent, when it began (seconds).

    `relay`: the one it came through, which is heard for it. `why`: of one that has ended, as a part of a sentence.
    """

    participant: Participant
    heard_at: float
    silence_s: float
    began_at: float
    relay: Relay | None = None
    alive: bool = True
    why: str = ""

    @property
    def pulse(self) -> Relay | Session:
        """Whose heartbeats say that it lives."""
        return self.relay or self


@dataclass(slots=True)
class Registry:
    """The participants of a job. `silence_s`: how long a stream may be silent before its shim counts as lost, unless more
    was granted to it."""

    clock: Callable[[], float]
    silence_s: float
    _sessions: dict[ParticipantId, Session] = field(default_factory=dict[ParticipantId, Session])
    _static: dict[ParticipantId, Participant] = field(default_factory=dict[ParticipantId, Participant])
    _gone: dict[ParticipantId, tuple[Participant, float, str]] = field(
        default_factory=dict[ParticipantId, tuple[Participant, float, str]]
    )
    _dismissed: OrderedDict[ParticipantId, None] = field(default_factory=OrderedDict[ParticipantId, None])
    _ends: OrderedDict[IncarnationId, str] = field(default_factory=OrderedDict[IncarnationId, str])
    _explained: OrderedDict[IncarnationId, None] = field(default_factory=OrderedDict[IncarnationId, None])
    _on_lost: list[Lost] = field(default_factory=list[Lost])
    _on_explained: list[Explained] = field(default_factory=list[Explained])
    _on_gone_for_good: list[GoneForGood] = field(default_factory=list[GoneForGood])
    _on_joined: list[Joined] = field(default_factory=list[Joined])

    def follow(
        self, lost: Lost, joined: Joined, explained: Explained | None = None, gone_for_good: GoneForGood | None = None
    ) -> None:
        """Call `lost` for who is gone or replaced, `joined` for who has come, `explained` when it is told how one ended,
        `gone_for_good` when it is said of some that they do not come back."""
        self._on_lost.append(lost)
        self._on_joined.append(joined)
        if explained is not None:
            self._on_explained.append(explained)
        if gone_for_good is not None:
            self._on_gone_for_good.append(gone_for_good)

    def register(self, participant: Participant, silence_s: float = 0.0, relay: Relay | None = None) -> Session:
        """A shim announces itself, or a relay does for it. Call `beat` for each heartbeat and `leave` when the stream ends.
        `silence_s`: how long it may be silent, when that is longer than for others.

        Raises DUPLICATE_PARTICIPANT when another living incarnation has the name. The same incarnation on a new stream
        (its connection broke) takes over from the old stream, and nothing is lost.
        """
        name = participant.participant_id
        static = self._static.get(name)
        if static is not None and static.address != participant.address:
            raise refuse(
                Reason.DUPLICATE_PARTICIPANT,
                f"{name} is in the static list at {static.address}; this shim is at {participant.address}.",
                participant_id=name,
            )
        old = self._sessions.get(name)
        if old is None and static is None and len(self._sessions) >= MAX_PARTICIPANTS:
            raise refuse(Reason.LIMIT_EXCEEDED, f"There are {MAX_PARTICIPANTS} participants already.")
        if old is not None and old.participant.incarnation_id != participant.incarnation_id:
            silent_s = self.clock() - old.pulse.heard_at
            if silent_s <= old.pulse.silence_s:
                raise refuse(
                    Reason.DUPLICATE_PARTICIPANT,
                    f"{name} is registered from {old.participant.address}, heard {silent_s:.1f} s ago.",
                    next_step=f"Two servers are called {name}. One may be of an earlier start that was not ended whole: end it"
                    f" (its shim listens at {old.participant.address}), and the other one is in within seconds; or give one"
                    " another name.",
                    participant_id=name,
                )
            why = "fell silent and was replaced by another process"
            self._lose(old, f"it {why}", f"{name} {why}.", Reason.INCARNATION_CHANGED)
        elif old is not None:
            old.alive = False
        now = self.clock()
        session = Session(participant, now, max(silence_s, self.silence_s), now, relay)
        self._sessions[name] = session
        self._gone.pop(name, None)
        for joined in self._on_joined:
            joined(participant)
        return session

    def beat(self, who: Session | Relay) -> None:
        """A heartbeat, or anything else, came from this shim, or from a relay for all who are behind it."""
        who.heard_at = self.clock()

    def relay_of(self, name: str, incarnation_id: str) -> Relay | None:
        """Through which relay that lifetime of that participant is registered now; None when through none, or not at all."""
        session = self._sessions.get(ParticipantId(name))
        return session.relay if session is not None and session.participant.incarnation_id == incarnation_id else None

    def leave(self, session: Session, why: str, goodbye: str = "", *, we_slept: str = "") -> None:
        """The stream has ended; `goodbye` is what the shim has said of it. Nothing happens when the registration was
        taken over before. `we_slept`: that this process had not run, so that who is well has left it too; a part of a
        sentence, empty when it had."""
        if not session.alive:
            return
        name = session.participant.participant_id
        if goodbye:
            self._end(session.participant.incarnation_id, goodbye)
        elif we_slept:
            why = f"{why} while {we_slept}"
            self._lose(session, why, f"{name} has left: {why}.", Reason.UNREACHABLE, WE_SLEPT, {SLEPT: we_slept})
            return
        through = f" behind {session.relay}" if session.relay is not None else ""
        self._lose(session, why, f"{name} is gone{through}: {why}.", Reason.UNREACHABLE)

    def explain(self, name: ParticipantId, incarnation_id: IncarnationId, how: str) -> None:
        """Somebody has seen how a shim's process ended. `how`: a sentence. Whether it is here, its stream alone decides.

        A process ends once: the first word on it stands beside what the shim itself had said, and later ones change nothing.
        """
        gone = self._gone.get(name)
        if incarnation_id in self._explained:
            return
        self._explained[incarnation_id] = None
        while len(self._explained) > _MAX_ENDS:
            self._explained.popitem(last=False)
        self._end(incarnation_id, how)
        if gone is None or gone[0].incarnation_id != incarnation_id:
            return
        who, at, why = gone
        self._gone[name] = who, at, f"{why.rstrip('.')}. {how}"
        for explained in self._on_explained:
            explained(who, how)

    def _end(self, incarnation_id: IncarnationId, how: str) -> None:
        self._ends[incarnation_id] = how
        while len(self._ends) > _MAX_ENDS:
            self._ends.popitem(last=False)

    def reap(self) -> None:
        """Lose everybody who has been silent for too long; call it once a heartbeat interval."""
        now = self.clock()
        for session in [s for s in self._sessions.values() if now - s.pulse.heard_at > s.pulse.silence_s]:
            name = session.participant.participant_id
            who = f"{name} is gone: its {session.relay}" if session.relay is not None else name
            why = f"has been silent for {now - session.pulse.heard_at:.1f} s"
            self._lose(session, f"it {why}", f"{who} {why}.", Reason.UNREACHABLE)

    def forgive(self) -> None:
        """Count everybody's silence from now: it was we who did not listen."""
        now = self.clock()
        for session in self._sessions.values():
            session.pulse.heard_at = now

    def set_static(self, participant: Participant) -> None:
        """What somebody of the static list said it is. Another incarnation than before is a replacement."""
        name = participant.participant_id
        old = self._static.get(name)
        if old is not None and old.address != participant.address:
            raise refuse(
                Reason.DUPLICATE_PARTICIPANT,
                f"Both {old.address} and {participant.address} of the static list are called {name}.",
                participant_id=name,
            )
        self._gone.pop(name, None)
        if old == participant:
            return
        self._static[name] = participant
        if old is not None and old.incarnation_id != participant.incarnation_id and name not in self._sessions:
            problem = Problem(Reason.INCARNATION_CHANGED, f"{name} was restarted.", participant_id=name)
            for lost in self._on_lost:
                lost(old, problem)
        for joined in self._on_joined:
            joined(participant)

    def forget_static(self, address: str) -> None:
        """Nobody answers at this address of the static list."""
        for name in [n for n, p in self._static.items() if p.address == address]:
            gone = self._static.pop(name)
            if name not in self._sessions:
                problem = Problem(Reason.UNREACHABLE, f"{name} does not answer at {address}.", participant_id=name)
                self._remember(gone, problem)
                for lost in self._on_lost:
                    lost(gone, problem)

    def missing(self) -> tuple[Missing, ...]:
        """Who took part, is gone and has not come back, sorted by name. Auxiliary models do not count."""
        now = self.clock()
        return tuple(Missing(who, now - at, why) for _, (who, at, why) in sorted(self._gone.items()))

    def miss(self, who: Participant, why: str) -> None:
        """It took part before this coordinator started, and is not here. `why`: a part of a sentence."""
        if self.get(who.participant_id) is None:
            self._remember(who, Problem(Reason.UNREACHABLE, why, participant_id=who.participant_id))

    def dismiss(self, names: Iterable[str]) -> None:
        """Somebody has said that it is as it should be without these. Those that are not missed change nothing."""
        dismissed = tuple(name for name in map(ParticipantId, names) if self._gone.pop(name, None) is not None)
        if dismissed:
            self._dismissed |= dict.fromkeys(dismissed)
            while len(self._dismissed) > _MAX_DISMISSED:
                self._dismissed.popitem(last=False)
            for gone_for_good in self._on_gone_for_good:
                gone_for_good(dismissed)

    def recall_dismissed(self, names: Iterable[str]) -> None:
        """It was said of these before this coordinator started, the oldest first."""
        self._dismissed |= dict.fromkeys(map(ParticipantId, names))

    def check_known(self, names: Iterable[str]) -> None:
        """Raise UNKNOWN_PARTICIPANT for those that are neither here, nor missed, nor have been dismissed."""
        known = self._sessions.keys() | self._static.keys() | self._gone.keys()
        unknown = [name for name in map(ParticipantId, names) if name not in known and name not in self._dismissed]
        if unknown:
            shown = sorted(self._gone) + sorted(known - self._gone.keys())
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            raise refuse(
                Reason.UNKNOWN_PARTICIPANT,
                f"{', '.join(unknown[:_SHOWN])} cannot be left out: nobody of that name takes part, or has. "
                f"Known are {', '.join(shown[:_SHOWN]) or 'none'}{more}.",
                next_step="Name who is missed, or leave nobody out.", participant_id=unknown[0],
            )  # fmt: skip

    def __len__(self) -> int:
        """How many are registered."""
        return len(self._sessions)

    def participants(self) -> tuple[Participant, ...]:
        """Everybody now, sorted by name."""
        everybody = {**self._static, **{name: s.participant for name, s in self._sessions.items()}}
        return tuple(everybody[name] for name in sorted(everybody))

    def addresses(self) -> set[str]:
        """Where everybody is called: at their own addresses, or at their relays'."""
        direct = {p.address for p in self._static.values()}
        return direct | {(s.relay or s.participant).address for s in self._sessions.values()}

    def get(self, name: str) -> Participant | None:
        """The participant of that name."""
        session = self._sessions.get(ParticipantId(name))
        return session.participant if session is not None else self._static.get(ParticipantId(name))

    def is_here(self, who: Participant) -> bool:
        """Whether this very incarnation of a participant is registered, or static."""
        found = self.get(who.participant_id)
        return found is not None and found.incarnation_id == who.incarnation_id

    def here_for_s(self, name: str) -> float | None:
        """For how many seconds the participant of that name has been registered; None when it is not."""
        session = self._sessions.get(ParticipantId(name))
        if session is not None:
            return self.clock() - session.began_at
        return float("inf") if ParticipantId(name) in self._static else None

    def incarnations(self, names: Iterable[ParticipantId]) -> dict[ParticipantId, IncarnationId]:
        """The incarnations of those of `names` that are here."""
        return {name: found.incarnation_id for name in names if (found := self.get(name)) is not None}

    def _lose(
        self,
        session: Session,
        why: str,
        message: str,
        reason: Reason,
        next_step: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        session.alive, session.why = False, why
        name = session.participant.participant_id
        if self._sessions.get(name) is session:
            del self._sessions[name]
        problem = Problem(reason, message, next_step, participant_id=name, metadata=metadata or {})
        problem = self._with_process(session.participant, problem)
        if name not in self._static:
            self._remember(session.participant, problem)
        for lost in self._on_lost:
            lost(session.participant, problem)

    def _with_process(self, who: Participant, problem: Problem) -> Problem:
        """The loss with where the process ran, where its log is, and how it ended as far as that is known."""
        metadata = dict(problem.metadata)
        message = problem.message.rstrip(".")
        if who.process is not None:
            metadata |= {"host": who.process.host, "pid": str(who.process.pid)}
            metadata |= {"log_path": who.process.log_path} if who.process.log_path else {}
            message = f"{message} (its shim was {who.process})"
        how = self._ends.get(who.incarnation_id, "")
        if how:
            metadata[ENDED] = how
            message = f"{message}. {how.rstrip('.')}"
        return replace(problem, message=f"{message}.", metadata=metadata)

    def _remember(self, gone: Participant, problem: Problem) -> None:
        if gone.role is not Role.AUXILIARY_MODEL:  # never paused, never saved: nothing of it can be missing
            self._gone[gone.participant_id] = (gone, self.clock(), problem.message)
