"""Where the rollouts of a snapshot go when the actors are not those that were saved.

PURE. The one rule: every rollout goes to exactly one actor, with all that any server of its old one holds of it. So rollouts
are placed by ranges of their ids, in the order of bytes, and the ranges of each old actor leave nothing out: what nobody
has listed, such as a session whose rollout has ended, falls into one of them as well.

Actors that have equal servers, name by name, are replicas of each other; rollouts go from replica to replica. What can stay
where it is stays; live rollouts are spread so that no replica has two more than another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.protocol.actors import by_actor
from coordinator.protocol.participant import Participant
from coordinator.protocol.topology import difference, facts
from coordinator.wire.ids import ParticipantId
from coordinator.wire.places import Placement
from coordinator.wire.terms import FOREIGN_STATE, CheckpointMode, Role

Kind = frozenset[tuple[str, ...]]  # what all replicas have alike


Servers = Mapping[str, Mapping[str, Participant]]  # by actor and name of the server


@dataclass(frozen=True, slots=True)
class Match:
    """Which actors of a snapshot are replicas of which that are here. `unfit`: why rollouts cannot be moved, as sentences.

    The empty name is that of a fleet without actors, where the other side has some.
    """

    groups: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    before: Servers = field(default_factory=dict[str, Mapping[str, Participant]])
    now: Servers = field(default_factory=dict[str, Mapping[str, Participant]])
    unfit: tuple[str, ...] = ()


def match(before: Collection[Participant], now: Collection[Participant]) -> Match:
    """Compare the actors of a snapshot with those that are here, and the servers that belong to none."""
    old, shared_then = _split(before, now)
    new, shared_now = _split(now, before)
    wrong = difference(shared_then, shared_now)
    if not old or not new:
        wrong.append("Nobody has set SAFEPOINT_ACTOR, so that no servers are replicas of others.")
    kinds_before, kinds_now = _kinds(old), _kinds(new)
    for kind, names in kinds_before.items():
        if kind not in kinds_now:
            wrong.append(
                f"No actor here is a replica of {_called(names[0])} of the snapshot: {_nearest(old[names[0]], new)}"
            )
    for kind, names in kinds_now.items():
        if kind not in kinds_before:
            wrong.append(
                f"The snapshot has no replica of {_called(names[0])}: {_nearest(new[names[0]], old, ahead=True)}"
            )
    if wrong:
        return Match(unfit=tuple(wrong))
    groups = sorted((tuple(names), tuple(kinds_now[kind])) for kind, names in kinds_before.items())
    return Match(tuple(groups), old, new)


def place(groups: Iterable[tuple[Sequence[str], Sequence[str]]], live: Mapping[str, Sequence[str]]) -> list[Placement]:
    """The placements, sorted. `live`: by old actor, the sorted ids of rollouts that are still to be run."""
    out: list[Placement] = []
    for old, new in groups:
        out += _place_group(sorted(old), sorted(new), {name: live.get(name, ()) for name in old})
    return sorted(out, key=lambda p: (p.from_actor, p.first))


def untakeable(placements: Iterable[Placement], now: Servers) -> list[str]:
    """Which servers cannot take what is to be moved there, as sentences; none where whole actors only get another name."""
    given: dict[str, list[Placement]] = defaultdict(list)
    for placement in placements:
        given[placement.to_actor].append(placement)
    return [
        f"{p.participant_id} ({p.kind}) cannot take rollouts of other actors: it does not offer {FOREIGN_STATE}."
        for actor, parts in sorted(given.items())
        if len(parts) > 1 or not parts[0].whole
        for p in now[actor].values()
        if joins(p) and FOREIGN_STATE not in p.features
    ]


def joins(p: Participant) -> bool:
    """Whether a participant has a part in a snapshot."""
    return p.role != Role.AUXILIARY_MODEL and p.checkpoint_mode != CheckpointMode.STATELESS


def _place_group(old: Sequence[str], new: Sequence[str], live: Mapping[str, Sequence[str]]) -> list[Placement]:
    total = sum(len(ids) for ids in live.values())
    low, more = divmod(total, len(new))
    # Who has most keeps most: the ones that get one more are those whose own rollouts then stay.
    favoured = sorted(new, key=lambda name: (-len(live.get(name, ())), name))[:more]
    room = {name: low + (name in favoured) for name in new}
    runs: dict[str, list[tuple[str, int]]] = {name: [] for name in old}  # by old actor: to whom, and how many
    for name in old:
        if name in room and (kept := min(len(live[name]), room[name])):
            runs[name].append((name, kept))
            room[name] -= kept
    targets = iter(sorted(name for name in new if room[name]))
    target = next(targets, "")
    for name in old:
        left = len(live[name]) - sum(count for _, count in runs[name])
        while left:
            given = min(left, room[target])
            runs[name].append((target, given))
            left, room[target] = left - given, room[target] - given
            if not room[target]:
                target = next(targets, "")
    empty = sorted(new)
    out: list[Placement] = []
    for number, name in enumerate(old):
        ids, at, first = live[name], 0, ""
        # Without live rollouts there are finished ones perhaps, whose results somebody must have.
        shares = runs[name] or [(name if name in new else empty[number % len(empty)], 0)]
        for share, (to, count) in enumerate(shares):
            at += count
            until = ids[at] if share + 1 < len(shares) else ""
            out.append(Placement(name, to, first, until))
            first = until
    return out


def _split(
    these: Collection[Participant], others: Iterable[Participant]
) -> tuple[dict[str, dict[str, Participant]], list[Participant]]:
    """The servers of each actor by name, and those of none. `these` without actors are one, as far as it has replicas."""
    found = by_actor(these)
    shared = found.pop("", [])
    if not found:
        names = {p.server_name for p in others if p.actor_id}
        one = [p for p in shared if p.server_name in names]
        found, shared = ({"": one} if one else {}), [p for p in shared if p.server_name not in names]
    return {actor: {p.server_name: p for p in servers} for actor, servers in found.items()}, shared


def _kinds(actors: Servers) -> dict[Kind, list[str]]:
    out: dict[Kind, list[str]] = defaultdict(list)
    for actor, servers in sorted(actors.items()):
        out[frozenset((name, *facts(_plain(p)).values()) for name, p in servers.items())].append(actor)
    return dict(out)


def _nearest(servers: Mapping[str, Participant], others: Servers, *, ahead: bool = False) -> str:
    """What an actor differs in from the most similar one of the `others`."""
    mine = [_plain(p) for p in servers.values()]
    best: list[str] = ["there is none."]
    for number, (_, each) in enumerate(sorted(others.items())):
        theirs = [_plain(p) for p in each.values()]
        found = difference(theirs, mine) if ahead else difference(mine, theirs)
        best = found if number == 0 or len(found) < len(best) else best
    return " ".join(best)


def _plain(p: Participant) -> Participant:
    return replace(p, participant_id=ParticipantId(p.server_name), actor_id="")


def _called(actor: str) -> str:
    return f"actor {actor}" if actor else "the servers without an actor"
