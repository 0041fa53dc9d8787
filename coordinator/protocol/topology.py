"""Who takes part in an operation, and whether they can be checkpointed together.

PURE. The one rule: roles are declared, never guessed, and nothing is paused before every blocking finding is mended.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from coordinator.protocol import actors, policies
from coordinator.protocol.participant import Finding, Participant, ShimProcess, finding_of, give_role
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.ids import is_wire_id
from coordinator.wire.places import in_actor
from coordinator.wire.terms import CheckpointMode, Phase, QuiesceMode, Role

__all__ = ["Finding", "Participant", "ShimProcess"]


@dataclass(frozen=True, slots=True)
class Missing:
    """A participant that took part, is gone and has not come back. `since_s`: seconds ago; `why`: a sentence."""

    participant: Participant
    since_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Topology:
    """All participants. `policy_endpoints`: where the trainer serves its policy; empty when not configured.

    `missing`: who was part of it and is gone; a save without them would lose what they hold.
    """

    participants: tuple[Participant, ...]
    policy_endpoints: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()


NEVER: Final = "not heard of since this coordinator started"  # begins the `why` of who took part before that
STARTING_S: Final = 60.0  # servers that start beside the coordinator are not alarming for so long
_NAMED: Final = 5
_IN_ONE: Final = 3  # findings in one error
_SHORT: Final = 160  # characters of a why in an error
_QUOTES: Final = " The last of its log:"  # begins what may be long

# Kinds that are not listed (the raw proxy, adapters of others) may have any role.
KIND_ROLES: Final[Mapping[str, frozenset[Role]]] = MappingProxyType(
    {
        "gym.agent": frozenset({Role.AGENT}),
        "gym.resources": frozenset({Role.RESOURCES}),
        "gym.model": frozenset({Role.POLICY_MODEL, Role.AUXILIARY_MODEL}),
        "vllm": frozenset({Role.ENGINE}),
    }
)


def validate(topology: Topology, quiesce_mode: QuiesceMode = QuiesceMode.UNSPECIFIED) -> list[Finding]:
    """Everything that is wrong or costly, blocking findings first, each group by participant.

    `quiesce_mode` is the one that a save asks for. Never raises.
    """
    found = [
        *_whole(topology),
        *_names(topology.participants),
        *actors.findings(topology.participants),
        *gone_from(topology.missing),
        *(finding for p in topology.participants for finding in _one(p, quiesce_mode)),
        *_dependencies(topology),
        *policies.findings(topology.participants, topology.policy_endpoints),
    ]
    return sorted(found, key=lambda f: (not f.blocking, f.participant_id, f.reason, f.message))


def problem_from_findings(findings: Iterable[Finding]) -> Problem | None:
    """The one Problem that refuses an operation: None without blocking findings.

    A single finding keeps its own reason and next step; several become TOPOLOGY_INVALID, whose message has the first ones: a
    message has 1,000 bytes, and the topology lists all.
    """
    blocking = [f for f in findings if f.blocking]
    if not blocking:
        return None
    if len(blocking) == 1:
        only = blocking[0]
        return Problem(only.reason, only.message, only.next_step, Phase.DISCOVER, only.participant_id)
    shown, left = blocking[:_IN_ONE], len(blocking) - _IN_ONE
    more = f" And {left} more: see `safepoint topology`." if left > 0 else ""
    text = " ".join(f"({n}) {f.message}" for n, f in enumerate(shown, 1)) + more
    steps = " ".join(f"({n}) {f.next_step}" for n, f in enumerate(shown, 1))
    reasons = {f.reason for f in blocking}
    reason = blocking[0].reason if len(reasons) == 1 else Reason.TOPOLOGY_INVALID
    return Problem(reason, text, steps, Phase.DISCOVER)


def refusal(topology: Topology, findings: Sequence[Finding], expected_fingerprint: str) -> Problem | None:
    """Why this topology takes no operation: blocking findings, else another fingerprint than the expected one, if any is."""
    gone = [each for each in topology.missing if not _starting(each)]
    if len(gone) > 1:  # the same for each of them, which would be cut in an error
        names = {each.participant.participant_id for each in gone}
        of_them = [f for f in findings if f.reason is Reason.TOPOLOGY_INVALID and f.participant_id in names]
        findings = [gone_together(gone), *(f for f in findings if f not in of_them)] if of_them else findings
    problem = problem_from_findings(findings)
    if problem is None and expected_fingerprint not in ("", found := fingerprint(topology.participants)):
        return Problem(
            Reason.FINGERPRINT_MISMATCH,
            f"The topology is not the expected one: its fingerprint is {found}.",
            "Look at `safepoint topology`, and expect what it says if that is what you want.",
        )
    return problem


def mode_for(participant: Participant, requested: QuiesceMode) -> QuiesceMode:
    """The quiesce mode this participant is asked for. Only engines abort; then the others use their default."""
    if requested == QuiesceMode.ABORT and participant.role != Role.ENGINE:
        return QuiesceMode.UNSPECIFIED
    return requested


def fingerprint(participants: Iterable[Participant]) -> str:
    """SHA-256 hex over the canonical JSON of what a snapshot depends on (rule 12).

    One array per participant, sorted by id: id, role, kind, checkpoint mode, workers, state schema, config digest, and its
    actor, for one that belongs to one.
    Addresses, incarnations and features are left out: they change without changing what can be restored.
    """
    rows = [[p.participant_id, *facts(p).values()] for p in sorted(participants, key=lambda p: p.participant_id)]
    text = json.dumps({"safepoint-fingerprint": 1, "participants": rows}, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def difference(before: Iterable[Participant], now: Iterable[Participant]) -> list[str]:
    """What two topologies differ in, as sentences for people; empty if and only if the fingerprints are equal."""
    old, new = ({str(p.participant_id): facts(p) for p in each} for each in (before, now))
    out: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            out.append(f"{name} ({old[name]['role']}) is missing now.")
        elif name not in old:
            out.append(f"{name} ({new[name]['role']}) is new.")
        else:
            out += [
                _changed(name, fact, old[name].get(fact, ""), new[name].get(fact, ""))
                for fact in old[name] | new[name]
                if new[name].get(fact) != old[name].get(fact)
            ]
    return out


def _changed(name: str, fact: str, was: str, now: str) -> str:
    if fact == "config digest":  # all that is known of it is that it differs
        text = f"{name}: the configuration of this server has changed (digest {was[:8] or 'empty'}, now {now[:8] or 'empty'})"
        return f"{text}; compare its part of the configuration that its server was started with."
    if fact == "workers":
        return f"{name}: it had {was} worker process{'es' if was != '1' else ''} and has {now} now."
    return f"{name}: {fact} was {was or 'empty'} and is {now or 'empty'}."


def facts(p: Participant) -> dict[str, str]:
    """What a snapshot depends on of a participant, besides its name."""
    return {
        "role": p.role.name.lower(),
        "kind": p.kind,
        "checkpoint mode": p.checkpoint_mode.name.lower(),
        "workers": str(p.configured_workers),
        "state schema": p.state_schema,
        "config digest": p.config_digest,
    } | ({"actor": p.actor_id} if p.actor_id else {})


def _whole(topology: Topology) -> Iterator[Finding]:
    # Who is missed is said by itself, with what helps.
    roles = {p.role for p in (*topology.participants, *(gone.participant for gone in topology.missing))}
    invalid = Reason.TOPOLOGY_INVALID
    if not topology.participants and topology.missing:
        return  # who is missed is said one by one, with what became of them
    if not topology.participants:
        yield finding_of(
            invalid, "", "Nobody is registered.",
            "Start the servers with the gate, or list their shims in the configuration. If they have been started, their log "
            "says what became of them: that of your `gym env start`, or of `safepoint serve`.",
        )  # fmt: skip
        return
    if roles == {Role.ENGINE}:
        return  # they hold what they generate, and freeze it themselves
    if Role.AGENT not in roles:
        yield finding_of(
            invalid, "", "No agent is registered, so that no rollout would be in a snapshot.",
            "Start the agent servers with the gate, or see why their shims did not register.",
        )  # fmt: skip
    if Role.POLICY_MODEL not in roles:
        yield finding_of(
            invalid, "", "No model has role policy, so that generations are not paused with their rollouts.",
            'Add "<name>=policy" to SAFEPOINT_ROLES for the model that is trained, and restart its server.', blocking=False,
        )  # fmt: skip


def _names(participants: tuple[Participant, ...]) -> Iterator[Finding]:
    by_name: dict[str, list[Participant]] = defaultdict(list)
    by_address: dict[str, set[str]] = defaultdict(set)
    for p in participants:
        by_name[p.participant_id].append(p)
        if p.address:
            by_address[p.address].add(p.participant_id)
    for name, group in sorted(by_name.items()):
        if len(group) > 1:
            where = ", ".join(sorted(p.address or "no address" for p in group))
            yield finding_of(
                Reason.DUPLICATE_PARTICIPANT, name, f"{len(group)} participants have the name `{name}`: {where}."
            )
    for address, names in sorted(by_address.items()):
        if len(names) > 1:
            yield finding_of(
                Reason.DUPLICATE_PARTICIPANT, min(names),
                f"{', '.join(f'`{n}`' for n in sorted(names))} have one address, {address}.",
                "Give each shim an address of its own (bind port 0).",
            )  # fmt: skip


def gone_from(missing: tuple[Missing, ...]) -> Iterator[Finding]:
    """What is to be said of who has taken part and is not here."""
    starting = [gone for gone in missing if _starting(gone)]
    if starting:
        names = [gone.participant.participant_id for gone in starting]
        shown = [f"`{gone.participant.participant_id}`{_last_heard(gone)}" for gone in starting[:_NAMED]]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        have = "have" if len(names) > 1 else "has"
        yield finding_of(
            Reason.TOPOLOGY_INVALID, names[0] if len(names) == 1 else "",
            f"Not back yet, {max(gone.since_s for gone in starting):.0f} s after this coordinator has started: "
            f"{', '.join(shown)}{more}, which {have} taken part before.",
            "Wait until the servers have started, which takes NeMo Gym a minute or two; the log of your `gym env start` says whether"
            " it has ended instead. If one is gone for good, save once "
            f"with `--without {names[0] if len(names) == 1 else 'NAME'}`.",
        )  # fmt: skip
    for gone in missing:
        if gone in starting:
            continue
        p = gone.participant
        yield finding_of(
            Reason.TOPOLOGY_INVALID, p.participant_id,
            f"`{p.participant_id}` ({p.role.name.lower()}, {p.address}) took part and is missed for {gone.since_s:.0f} s: "
            f"{gone.why.rstrip('.')}. What it holds would be missing in the snapshot.",
            f"Start `{p.participant_id}` again (under `gym env start` that is all of its servers, and then a restore); its "
            f"shim's log says why it ended. If it is gone for good, save once with `--without {p.participant_id}`.",
        )  # fmt: skip


def gone_together(missing: Sequence[Missing]) -> Finding:
    """The same of several, short enough for an error; what each log says is in the topology."""
    shown = "; ".join(
        f"`{gone.participant.participant_id}` for {gone.since_s:.0f} s ({_short(gone.why.partition(_QUOTES)[0])})"
        for gone in missing[:_IN_ONE]
    )
    more = f"; and {len(missing) - _IN_ONE} more" if len(missing) > _IN_ONE else ""
    return finding_of(
        Reason.TOPOLOGY_INVALID, "",
        f"{len(missing)} servers took part and are missed: {shown}{more}. What they hold would be missing in the snapshot.",
        "Start them again (under `gym env start` that is all of its servers, and then a restore); `safepoint topology` and their "
        "shims' logs say why each ended. Those that are gone for good: save once with `--without NAME` for each.",
    )  # fmt: skip


def _starting(gone: Missing) -> bool:
    return gone.why.startswith(NEVER) and gone.since_s < STARTING_S


def _short(why: str) -> str:
    why = why.rstrip(". ")
    return why if len(why) <= _SHORT else f"{why[: _SHORT - 3]}..."


def _last_heard(gone: Missing) -> str:
    detail = gone.why.removeprefix(NEVER).strip("; .")
    return f" ({detail})" if detail else ""


def _one(p: Participant, quiesce_mode: QuiesceMode) -> Iterator[Finding]:
    name = p.participant_id
    if not is_wire_id(name):
        yield finding_of(Reason.MALFORMED_ID, name, f"`{name}` cannot name a participant.")
    yield from _role(p)
    if p.configured_workers < 1:
        yield finding_of(
            Reason.TOPOLOGY_INVALID, name, f"`{name}` says it has no worker process.",
            "Report it to the maker of the adapter.",
        )  # fmt: skip
    offered = [mode for mode in p.quiesce_modes if mode != QuiesceMode.UNSPECIFIED]
    asked = mode_for(p, quiesce_mode)
    if p.role == Role.AUXILIARY_MODEL:
        return  # never paused and never saved: how it could be is nobody's concern
    if not offered:
        yield finding_of(
            Reason.TOPOLOGY_INVALID, name, f"`{name}` offers no quiesce mode.", "Report it to the maker of the adapter."
        )
    elif asked != QuiesceMode.UNSPECIFIED and asked not in offered:
        names = ", ".join(mode.name.lower() for mode in offered)
        yield finding_of(
            Reason.UNSUPPORTED, name,
            f"`{name}` does not offer quiesce mode {asked.name.lower()}; it offers {names}.",
            "Ask for a quiesce mode that everybody offers, or for none: each then uses its default.",
        )  # fmt: skip
    yield from _mode(p)


def _role(p: Participant) -> Iterator[Finding]:
    name, allowed = p.participant_id, KIND_ROLES.get(p.kind)
    choices = " or ".join(sorted(role.name.lower() for role in allowed)) if allowed else "one of the five roles"
    step = (
        give_role(p.kind, p.server_name, "policy", "auxiliary")
        if allowed and len(allowed) > 1
        else f"Declare role {choices} for `{name}`."
    )
    if p.role == Role.UNSPECIFIED:
        yield finding_of(Reason.ROLE_INVALID, name, f"`{name}` ({p.kind or 'no kind'}) declares no role.", step)
    elif allowed and p.role not in allowed:
        yield finding_of(
            Reason.ROLE_INVALID, name, f"`{name}` is a {p.kind} and cannot have role {p.role.name.lower()}.", step
        )


def _mode(p: Participant) -> Iterator[Finding]:
    name, why = p.participant_id, f": {p.checkpoint_mode_reason}" if p.checkpoint_mode_reason else "."
    if p.checkpoint_mode == CheckpointMode.UNSPECIFIED:
        yield finding_of(
            Reason.TOPOLOGY_INVALID, name, f"`{name}` does not say how its state survives.",
            "Set SAFEPOINT_STATE for it: codec, reexecute, restart_only or stateless.",
        )  # fmt: skip
    elif p.checkpoint_mode == CheckpointMode.RESTART_ONLY:
        lost = "its rollouts restart from their input" if p.role == Role.AGENT else "rollouts that used it restart"
        yield finding_of(
            Reason.STATE_UNSUPPORTED, name, f"`{name}` cannot save its state, so {lost}{why}", blocking=False
        )
    elif p.checkpoint_mode == CheckpointMode.REPLAY:
        yield finding_of(
            Reason.STATE_UNSUPPORTED, name,
            f"`{name}` does not export its state: a restore makes its logged calls again and compares the answers{why}",
            "Nothing, if the server is deterministic; else give it an export hook.", blocking=False,
        )  # fmt: skip
    elif p.role == Role.AGENT and p.checkpoint_mode == CheckpointMode.STATELESS:
        yield finding_of(
            Reason.STATE_UNSUPPORTED, name,
            f"`{name}` is an agent that keeps nothing, so that its rollouts are in no snapshot{why}", blocking=False,
        )  # fmt: skip


def _dependencies(topology: Topology) -> Iterator[Finding]:
    known: dict[str, Participant] = {str(p.participant_id): p for p in topology.participants}
    missed = {
        str(gone.participant.participant_id) for gone in topology.missing
    }  # has a finding of its own, which blocks
    callers: dict[str, list[str]] = defaultdict(list)
    for p in topology.participants:
        for name in sorted(set(p.depends_on) - missed):
            target = actors.callee(p, name, known)
            if target is None and in_actor(p.actor_id, name) in missed:
                continue
            if target is None:
                yield finding_of(
                    Reason.UNKNOWN_PARTICIPANT, p.participant_id,
                    f"`{p.participant_id}` calls `{name}`, which nobody has registered{_in_actor(p)}: it is not paused.",
                    f"Start `{name}` with the gate, unless it keeps no state.", blocking=False,
                )  # fmt: skip
            elif p.role == Role.RESOURCES and target.role == Role.POLICY_MODEL:
                callers[target.participant_id].append(p.participant_id)
    for name, who in sorted(callers.items()):
        # Closed with the policy it would never answer the verifier, whose handler could then never end.
        yield finding_of(
            Reason.POLICY_NOT_SERVED, name,
            f"Policy model `{name}` is called by a verifier ({', '.join(f'`{w}`' for w in sorted(who))}); "
            "set role auxiliary.",
            give_role(known[name].kind, known[name].server_name, "auxiliary"),
        )  # fmt: skip


def _in_actor(p: Participant) -> str:
    return f" in actor `{p.actor_id}` or for all of them" if p.actor_id else ""
