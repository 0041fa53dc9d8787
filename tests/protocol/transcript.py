"""Golden transcripts of the core: commands of a scenario, and the exact effects that they have.

A scenario file is a sequence of blocks, each a few commands, a line of dashes, and what came out. `#` begins a comment.
SAFEPOINT_REWRITE=1 writes what comes out into the files instead of comparing: read the difference before committing it.

    participants policy=policy_model agent=agent box=resources judge=auxiliary_model    [:workers=2:mode=restart_only]
    begin save s1 step-1 deadline=10 [trainer] [mode=drain] [straggler=fail] [lease=30]
    begin restore r1 step-1 deadline=10 [resume]
    ok WHO [incarnation= workers= silent= generation= lease= excluded=r-1,r-2 snapshot=]     WHO: name, name.phase or *
    refuse WHO REASON text...      silent WHO      wrong WHO text...     progress WHO in_flight=3 waiting=r-17:4:83:judge
    lost NAME     restarted NAME     lapsed NAME     renewed NAME 30     record-failed REASON text...
    published     publish-failed REASON text...     tick     heard     abort [cause]    commit|publish deadline=20     resume
    crash [published]       a new coordinator reads the records; the calls of the old one are gone
    why    leases

`@2.5 command` says at which time it happens.
"""

from __future__ import annotations

from coordinator.protocol.events import (
    AbortRequested,
    Announce,
    Await,
    Begin,
    Call,
    Cancel,
    CommitRequested,
    Effect,
    Event,
    Finish,
    Ignored,
    IncarnationChanged,
    LeaseLost,
    LeaseRenewed,
    LossExplained,
    Misanswered,
    NoAnswer,
    ParticipantDone,
    ParticipantLost,
    PhaseFinished,
    PhaseStarted,
    PrepareArguments,
    ProgressReported,
    Publish,
    Published,
    PublishFailed,
    PublishRequested,
    Record,
    RecordFailed,
    RecordKind,
    Recover,
    RefusedBy,
    Reject,
    Replied,
    RestoreArguments,
    ResumeRequested,
    SetTimer,
    Tick,
    TrainerHeard,
    Warned,
)
from coordinator.protocol.operation import Operation, Options, RestorePart
from coordinator.protocol.proofs import Committed, Confirmed, Opened, Prepared, Progress, Proof, RestoredProof
from coordinator.protocol.records import problem_from_json
from coordinator.protocol.topology import Participant, Topology
from coordinator.protocol.transaction import Transaction
from coordinator.wire.errors import STILL_LOADED, Blocked, Problem, Reason
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId, SnapshotId
from coordinator.wire.terms import CheckpointMode, OperationKind, Phase, QuiesceMode, Role, StragglerPolicy

KINDS = {
    Role.POLICY_MODEL: "gym.model",
    Role.AUXILIARY_MODEL: "gym.model",
    Role.AGENT: "gym.agent",
    Role.RESOURCES: "gym.resources",
    Role.ENGINE: "vllm",
    Role.UNSPECIFIED: "gym.model",
}
Words = dict[str, str]


def participant(name: str, role: Role, **changes: object) -> Participant:
    """A participant that is in order; `changes` make it otherwise."""
    fields: dict[str, object] = {
        "participant_id": ParticipantId(name), "role": role, "kind": KINDS[role],
        "checkpoint_mode": CheckpointMode.EXPORT_RESTORE, "incarnation_id": IncarnationId(f"i-{name}"),
        "address": f"unix:/run/{name}.sock", "state_schema": "gym-session-v1",
    }  # fmt: skip
    return Participant(**(fields | changes))  # type: ignore[arg-type]


def proof_for(call: Call, member: Participant, operation: Operation, words: Words | None = None) -> Proof:
    """What an honest participant answers; `words` make it lie."""
    words = words or {}
    incarnation = IncarnationId(words.get("incarnation", member.incarnation_id))
    generation = int(words.get("generation", "7"))
    workers = tuple(f"worker-{n}" for n in range(int(words.get("workers", member.configured_workers))))
    if call.phase == Phase.PREPARE:
        excluded = tuple(Blocked(r) for r in words.get("excluded", "").split(",") if r)
        silent = tuple(w for w in words.get("silent", "").split(",") if w)
        return Prepared(incarnation, generation, workers, silent, excluded, len(excluded))
    if call.phase == Phase.COMMIT:
        snapshot = SnapshotId(words.get("snapshot", operation.snapshot_id))
        return Committed(operation.operation_id, snapshot, member.participant_id, incarnation, "0a" * 32)
    if call.phase == Phase.CONFIRM:
        return Confirmed(incarnation, generation, float(words.get("lease", "30")))
    if call.phase == Phase.RESTORE:
        return RestoredProof(SnapshotId(words.get("snapshot", operation.snapshot_id)), incarnation, generation)
    return Opened(closed_for_s=1.0)


class Transcript:
    """Runs the commands of one scenario against one core."""

    def __init__(self) -> None:
        self.now = 0.0
        self.transaction = Transaction()
        self.members: dict[str, Participant] = {}
        self.calls: dict[int, Call] = {}  # the latest is the last
        self.running: dict[int, Call] = {}
        self.journal: list[Record] = []

    def run(self, line: str) -> list[str]:
        """The effects of one command, one line each."""
        line = line.strip()
        if line.startswith("@"):
            at, _, line = line[1:].partition(" ")
            self.now = float(at)
        verb, *rest = line.split()
        plain = [word for word in rest if "=" not in word]
        words = dict(word.split("=", 1) for word in rest if "=" in word)
        if verb == "participants":
            self.members = {name: _member(name, text) for name, text in words.items()}
            return []
        if verb == "why":
            return [f"why: {self.transaction.why_waiting(self.now)}"]
        if verb == "leases":
            return [f"leases: {', '.join(self.transaction.leases()) or 'nobody'}"]
        if verb == "crash":
            return self._crash(published="published" in plain)
        return [text for event in self._events(verb, plain, words) for text in self._step(event)]

    def _crash(self, *, published: bool) -> list[str]:
        self.transaction = Transaction.from_records(self.journal, published=published, coordinator_epoch=2)
        self.calls.clear()
        self.running.clear()
        return self._step(Recover(self.now))

    def _step(self, event: Event) -> list[str]:
        effects = self.transaction.step(event)
        for effect in effects:
            if isinstance(effect, Call):
                self.calls[effect.call_no] = self.running[effect.call_no] = effect
            elif isinstance(effect, Cancel):
                self.running.pop(effect.call_no, None)
            elif isinstance(effect, Record):
                self.journal.append(effect)
        return [show(effect) for effect in effects]

    def _find(self, who: str) -> list[Call]:
        if who == "*":
            return list(self.running.values())
        # A participant of an actor has a dot in its own name.
        name, phase = (who, "") if who in self.members else who.rpartition(".")[::2]
        found = [
            call for call in self.calls.values()
            if call.participant_id == name and phase in ("", call.phase.name.lower())
        ]  # fmt: skip
        assert found, f"no call to {who}"
        return found[-1:]

    def _events(self, verb: str, plain: list[str], words: Words) -> list[Event]:
        now = self.now
        if verb == "begin":
            return [self._begin(plain, words)]
        if verb in ("ok", "refuse", "silent", "wrong"):
            calls = self._find(plain[0])
            for call in calls:
                self.running.pop(call.call_no, None)
            return [self._ended(verb, call, plain[1:], words) for call in calls]
        if verb == "progress":
            call = self._find(plain[0])[0]
            waiting = tuple(_blocked(text) for text in words.get("waiting", "").split(",") if text)
            numbers = {key: int(value) for key, value in words.items() if key != "waiting"}
            progress = Progress(waiting_for=waiting, waiting_for_count=len(waiting), **numbers)
            return [ProgressReported(now, call.call_no, progress)]
        if verb in ("lost", "explained", "restarted", "lapsed", "renewed"):
            who = ParticipantId(plain[0])
            if verb == "lost":
                problem = Problem(Reason.UNREACHABLE, "Its registration ended.")
                return [ParticipantLost(now, who, problem, float(words.get("within", "0")))]
            if verb == "explained":
                return [LossExplained(now, who, " ".join(plain[1:]))]
            if verb == "restarted":
                return [IncarnationChanged(now, who, IncarnationId(f"i-{who}-2"))]
            if verb == "lapsed":
                kept = {STILL_LOADED: words["loaded"]} if "loaded" in words else {}
                lapsed = Problem(Reason.LEASE_LAPSED, "Its lease has lapsed and it has opened.", metadata=kept)
                return [LeaseLost(now, who, lapsed)]
            return [LeaseRenewed(now, who, now, float(plain[1]))]
        if verb in ("publish-failed", "record-failed"):
            problem = Problem(Reason[plain[0]], " ".join(plain[1:]))
            return [PublishFailed(now, problem) if verb == "publish-failed" else RecordFailed(now, problem)]
        deadline = float(words.get("deadline", "0"))
        simple: dict[str, Event] = {
            "published": Published(now), "tick": Tick(now), "heard": TrainerHeard(now), "resume": ResumeRequested(now),
            "abort": AbortRequested(now, " ".join(plain)), "commit": CommitRequested(now, deadline),
            "publish": PublishRequested(now, deadline),
        }  # fmt: skip
        return [simple[verb]]

    def _begin(self, plain: list[str], words: Words) -> Begin:
        options = Options(
            quiesce_mode=QuiesceMode[words.get("mode", "unspecified").upper()],
            straggler_policy=StragglerPolicy[words.get("straggler", "exclude").upper()],
            lease_ttl_s=float(words.get("lease", "30")),
            expected_fingerprint=words.get("expect", ""),
        )
        kind = OperationKind[plain[0].upper()]
        parts = {
            p.participant_id: RestorePart("0a" * 32)
            for p in self.members.values()
            if kind == OperationKind.RESTORE and p.checkpoint_mode != CheckpointMode.STATELESS
        }
        operation = Operation(
            kind, OperationId(plain[1]), SnapshotId(plain[2]), 1, options,
            trainer_driven="trainer" in plain, resume_when_done="resume" in plain, parts=parts,
        )  # fmt: skip
        return Begin(self.now, float(words["deadline"]), operation, Topology(tuple(self.members.values())))

    def _ended(self, verb: str, call: Call, plain: list[str], words: Words) -> Event:
        now, no = self.now, call.call_no
        if verb == "ok":
            member = self.members[call.participant_id]
            return Replied(now, no, proof_for(call, member, self.transaction.operation, words))
        if verb == "silent":
            return NoAnswer(now, no, Problem(Reason.UNREACHABLE, "No answer (UNAVAILABLE): connection refused."))
        if verb == "wrong":
            return Misanswered(now, no, Problem(Reason.PROTOCOL_VIOLATION, " ".join(plain)))
        return RefusedBy(now, no, Problem(Reason[plain[0]], " ".join(plain[1:])))


def show(effect: Effect) -> str:
    """One effect as one line that a person can read."""
    match effect:
        case Record():
            cause = effect.data.get("primary") if effect.kind != RecordKind.ENDED else None
            text = f"record {effect.kind}{'' if effect.required else ' (not required)'}"
            return f"{text} because {_problem(problem_from_json(cause))}" if cause else text  # type: ignore[arg-type]
        case Call():
            text = f"call #{effect.call_no} {effect.participant_id} {effect.phase.name.lower()}"
            match effect.arguments:
                case PrepareArguments(quiesce_mode=mode) if mode != QuiesceMode.UNSPECIFIED:
                    text += f" {mode.name.lower()}"
                case RestoreArguments(manifest_sha256=""):
                    text += " nothing"
                case _:
                    pass
            return f"{text} within {_number(effect.timeout_s)} s"
        case Cancel():
            return f"cancel #{effect.call_no} {effect.participant_id}"
        case Publish():
            return f"publish {effect.snapshot_id} of {', '.join(effect.committed)} until {_number(effect.valid_until)}"
        case SetTimer(at=at):
            return "timer off" if at is None else f"timer {_number(at)}"
        case Announce(what=PhaseStarted(phase=phase, participant_ids=who)):
            return f"started {phase.name.lower()}: {', '.join(who) or 'nobody'}"
        case Announce(what=ParticipantDone(phase=phase, participant_id=who)):
            return f"done {phase.name.lower()} {who}"
        case Announce(what=PhaseFinished(phase=phase, duration_s=duration)):
            return f"finished {phase.name.lower()} in {_number(duration)} s"
        case Announce(what=Warned(message=message, participant_id=who)):
            return f"warning {who or '-'}: {message}"
        case Ignored():
            return f"ignored #{effect.call_no} {effect.verdict}"
        case Await():
            return f"await {effect.stage}" + (f" because {_problem(effect.primary)}" if effect.primary else "")
        case Reject():
            return f"reject {_problem(effect.problem)}"
        case Finish():
            lines = [f"finish {effect.outcome.name.lower()}{' published' if effect.published else ''}"]
            lines += [f"  because {_problem(effect.primary)}"] if effect.primary else []
            lines += [f"  also {_problem(problem)}" for problem in effect.secondary]
            lines += [f"  unconfirmed {', '.join(effect.unconfirmed)}"] if effect.unconfirmed else []
            return "\n".join(lines)


def _problem(problem: Problem) -> str:
    return f"{problem.reason.name} {problem}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _member(name: str, text: str) -> Participant:
    role, *more = text.split(":")
    extra = dict(word.split("=", 1) for word in more)
    changes: dict[str, object] = {"actor_id": name.partition(".")[0]} if "." in name else {}
    if "workers" in extra:
        changes["configured_workers"] = int(extra["workers"])
    if "mode" in extra:
        changes["checkpoint_mode"] = CheckpointMode[extra["mode"].upper()]
    if "calls" in extra:
        changes["depends_on"] = tuple(extra["calls"].split("+"))
    return participant(name, Role[role.upper()], **changes)


def _blocked(text: str) -> Blocked:
    rollout, turn, age, on = (*text.split(":"), "", "", "")[:4]
    return Blocked(rollout, 0, int(turn or 0), float(age or 0), on)
