"""An elastic restore: which participant loads what of a snapshot, when the actors here are not those that were saved.

The rule: everything that can refuse it is found here, before anybody is paused, and said as a difference: who, in what, and
what to do. Where rollouts go is decided in `protocol.placing`; what each server then has to account for is counted from the
ledgers of the parts that it loads. Blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from safepoint.v1 import manifest_pb2

from coordinator import ledger_lines
from coordinator.protocol import placing
from coordinator.protocol.operation import Operation, RestorePart, RestoreSource
from coordinator.protocol.placing import Match
from coordinator.protocol.topology import Participant
from coordinator.snapshot_reading import SnapshotReader, as_it_was
from coordinator.wire.errors import Problem, Reason, Refused
from coordinator.wire.ids import ParticipantId
from coordinator.wire.places import Locator, Placement, actor_of
from coordinator.wire.terms import Phase, RolloutState

SHOWN: Final = 5
MAX_PLACEMENTS: Final = 1000
References = Mapping[str, manifest_pb2.ParticipantRef]


def spread(
    store: SnapshotReader,
    operation: Operation,
    manifest: manifest_pb2.SnapshotManifest,
    here: Collection[Participant],
) -> Operation:
    """The operation with everybody's part. Raises FINGERPRINT_MISMATCH, UNSUPPORTED, LIMIT_EXCEEDED, and as `store.load`."""
    references = {reference.participant_id: reference for reference in manifest.participants}
    found = placing.match([as_it_was(reference) for reference in references.values()], here)
    if found.unfit:
        raise _refused(
            operation, Reason.FINGERPRINT_MISMATCH,
            f"The actors here cannot take over those of {operation.snapshot_id}: {first_few(found.unfit)}",
            "Let each actor have the servers and the configuration of those that were saved; `safepoint topology` lists them.",
        )  # fmt: skip
    owners = _owners(store, operation.snapshot_id, found.before)
    placements = placing.place(found.groups, owners.live)
    if len(placements) > MAX_PLACEMENTS:
        raise _refused(
            operation, Reason.LIMIT_EXCEEDED,
            f"{len(found.before)} actors on {len(found.now)} take {len(placements)} moves; {MAX_PLACEMENTS} are allowed.",
        )  # fmt: skip
    cannot = placing.untakeable(placements, found.now) or _unlike(store, operation, placements, found, references)
    if cannot:
        raise _refused(
            operation, Reason.UNSUPPORTED,
            f"The rollouts of {operation.snapshot_id} cannot be spread over the actors here: {first_few(cannot)}",
            "Start as many actors as the snapshot has, under the same names, and restore without --elastic.",
        )  # fmt: skip
    parts = _parts(store, operation, placements, found, references, owners)
    return replace(operation, parts=parts, placements=tuple(placements))


def first_few(sentences: Sequence[str]) -> str:
    """Sentences for a message, the first few of them."""
    return " ".join(sentences[:SHOWN]) + (f" And {len(sentences) - SHOWN} more." if len(sentences) > SHOWN else "")


class _Owners:
    """Whose the rollouts of a snapshot are. `live`: by actor, the sorted ids of those that are still to be run."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self.live: dict[str, list[str]] = defaultdict(list)


def _owners(store: SnapshotReader, snapshot_id: str, actors: Collection[str]) -> _Owners:
    out = _Owners()
    for raw in store.ledger(snapshot_id):  # which is sorted
        line = ledger_lines.decode(raw, snapshot_id)
        actor = actor_of(line.participant_id, actors)
        out.of[line.rollout_id] = actor
        if line.state != RolloutState.COMPLETED:
            out.live[actor].append(line.rollout_id)
    return out


def _parts(
    store: SnapshotReader,
    operation: Operation,
    placements: Sequence[Placement],
    found: Match,
    references: References,
    owners: _Owners,
) -> dict[ParticipantId, RestorePart]:
    parts: dict[ParticipantId, RestorePart] = {}
    moved = {p.participant_id for servers in found.before.values() for p in servers.values()}
    for name, reference in references.items():
        if name not in moved and reference.manifest_sha256:  # it belongs to no actor, and loads its own
            totals = store.part_totals(reference, operation.snapshot_id)
            parts[ParticipantId(name)] = RestorePart(reference.manifest_sha256, totals=totals)
    counted = _counted(store, operation.snapshot_id, placements, found, references, owners)
    for actor, servers in found.now.items():
        given = [placement for placement in placements if placement.to_actor == actor]
        for name, server in servers.items():
            sources = [
                RestoreSource(str(then.participant_id), sha256, placement.first, placement.until)
                for placement in given
                if (then := found.before[placement.from_actor][name])
                and (sha256 := references[then.participant_id].manifest_sha256)
            ]
            if len(given) == 1 and given[0].whole and sources:
                reference = references[sources[0].participant_id]
                parts[server.participant_id] = RestorePart(
                    reference.manifest_sha256,
                    reference.participant_id,
                    store.part_totals(reference, operation.snapshot_id),
                )
            elif placing.joins(server):  # also without sources: it must be as fresh as the others
                parts[server.participant_id] = RestorePart(totals=counted[actor, name], sources=tuple(sources))
    return parts


def _counted(
    store: SnapshotReader,
    snapshot_id: str,
    placements: Sequence[Placement],
    found: Match,
    references: References,
    owners: _Owners,
) -> dict[tuple[str, str], dict[str, int]]:
    """The rollouts that each server has to account for, by its actor and name."""
    totals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    where = Locator(placements)
    for actor, servers in found.before.items():
        for name, server in servers.items():
            reference = references[server.participant_id]
            for line in store.part_ledger(reference, snapshot_id) if reference.manifest_sha256 else ():
                if (
                    owners.of.get(line.rollout_id, actor) == actor
                ):  # else it is what is left of one that another actor has
                    totals[where.now_at(line.rollout_id, str(server.participant_id)), name][
                        line.state.name.lower()
                    ] += 1
    return defaultdict(dict, {key: dict(counts) for key, counts in totals.items()})


def _unlike(
    store: SnapshotReader, operation: Operation, placements: Sequence[Placement], found: Match, references: References
) -> list[str]:
    """Servers that would get the state of several whole servers, which is not the same."""
    out: list[str] = []
    for actor, servers in found.now.items():
        given = {placement.from_actor for placement in placements if placement.to_actor == actor}
        for name, server in servers.items():
            named = [references[found.before[source][name].participant_id] for source in sorted(given)]
            shared = {
                reference.participant_id: store.part_manifest(reference, operation.snapshot_id).shared_state_sha256
                for reference in named
                if reference.manifest_sha256
            }
            if len(set(shared.values())) > 1:
                out.append(
                    f"{server.participant_id} would get state that belongs to a server as a whole, and to no rollout, from "
                    f"{' and '.join(shared)}, where it is not the same."
                )
    return out


def _refused(operation: Operation, reason: Reason, message: str, next_step: str = "") -> Refused:
    return Refused(Problem(reason, message, next_step, Phase.DISCOVER, operation_id=operation.operation_id))
