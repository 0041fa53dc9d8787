"""What a Restore has a participant load when the snapshot is of several Gym actors, and what others hold then.

The rule: the snapshot's ledger says whose a rollout is. What another actor's servers have left of it is not loaded, and an
agent knows which rollouts went elsewhere, so that one that comes here by mistake is told, and not begun twice. Blocks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from safepoint.v1 import participant_service_pb2 as pb

from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.ids import is_wire_id
from coordinator.wire.manifest_file import is_sha256
from coordinator.wire.places import Locator, Placement, actor_of
from coordinator.wire.terms import Role
from participant_shims import messages
from participant_shims.adapter import (
    Adapter,
    Description,
    Elsewhere,
    Loaded,
    LoadsByManifest,
    Part,
    Progress,
    TakesForeign,
)
from participant_shims.adapters.ledger_file import snapshot_ledger
from participant_shims.export import Exports, VerifiedPart
from participant_shims.stored_export import StoredExports

MAX_SOURCES: Final = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to load, and which rollouts other actors have."""

    parts: tuple[Part, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()
    sessions: int = 0  # in the files of the parts


def check(request: pb.RestoreRequest) -> None:
    """Raises INVALID_ARGUMENT, LIMIT_EXCEEDED, MALFORMED_ID for sources and placements that cannot be."""
    if len(request.sources) > MAX_SOURCES or len(request.placements) > MAX_SOURCES:
        raise refuse(Reason.LIMIT_EXCEEDED, f"A restore has at most {MAX_SOURCES} sources and placements.")
    if request.sources and (request.manifest_sha256 or request.source_participant_id):
        raise refuse(Reason.INVALID_ARGUMENT, "A restore has sources, or one part of its own, and not both.")
    for source in request.sources:
        if not is_wire_id(source.participant_id) or not is_sha256(source.manifest_sha256):
            raise refuse(
                Reason.MALFORMED_ID, f"{source.participant_id[:60]!r} with its digest is no part of a snapshot."
            )


def plan(request: pb.RestoreRequest, mine: Description, exports: Exports | StoredExports) -> Plan:
    """What `mine` loads, verified, and what went to others. Raises as `Exports.verify`."""
    own = (request.source_participant_id or mine.participant_id, request.manifest_sha256)
    named = [(source.participant_id, source.manifest_sha256) for source in request.sources] or (
        [own] if request.manifest_sha256 else []
    )
    if named:
        failpoints.reach("shim.before_verify")
    now = messages.capabilities(mine)
    read = {part: exports.verify(request.snapshot_id, *part, now) for part in dict.fromkeys(named)}
    bounds = [(source.rollouts_from, source.rollouts_until) for source in request.sources] or [("", "")] * len(named)
    parts = [_part(read[part], *bound) for part, bound in zip(named, bounds, strict=True)]
    sessions = sum(read[part].manifest.sessions for part in named)
    if not request.placements or not (request.sources or mine.role is Role.AGENT):
        return Plan(tuple(parts), (), sessions)
    strangers, elsewhere = _of_others(request, parts, mine, exports.published(request.snapshot_id))
    return Plan(tuple(replace(part, without=strangers[n]) for n, part in enumerate(parts)), elsewhere, sessions)


def load(adapter: Adapter, parts: Sequence[Part]) -> AsyncIterator[Progress | Loaded]:
    """Load the parts. Raises UNSUPPORTED where the adapter takes a part of its own only."""
    if len(parts) == 1 and parts[0].whole:
        if isinstance(adapter, LoadsByManifest):
            return adapter.load_part(parts[0])
        return adapter.load(parts[0].directory, parts[0].files)
    if isinstance(adapter, TakesForeign):
        return adapter.load_parts(parts)
    raise refuse(Reason.UNSUPPORTED, "This server loads what it has saved itself, and only as a whole.")


def _of_others(
    request: pb.RestoreRequest, parts: Sequence[Part], mine: Description, snapshot: Path
) -> tuple[list[frozenset[str]], tuple[Elsewhere, ...]]:
    """By part, the rollouts in it that another actor owns; and, for an agent, those that are in another one now."""
    where = Locator(
        Placement(p.from_actor_id, p.to_actor_id, p.rollouts_from, p.rollouts_until) for p in request.placements
    )
    from_actors = {p.from_actor_id for p in request.placements}
    actors = [actor_of(source.participant_id, from_actors) for source in request.sources]
    strangers: list[set[str]] = [set() for _ in parts]
    elsewhere: list[Elsewhere] = []
    for line in snapshot_ledger(snapshot):
        owner = actor_of(line.participant_id, from_actors)
        for number, actor in enumerate(actors):
            if actor != owner and parts[number].has(line.rollout_id):
                strangers[number].add(line.rollout_id)
        now = where.now_at(line.rollout_id, line.participant_id)
        if mine.role is Role.AGENT and now != mine.actor_id and line.input_sha256:
            elsewhere.append(Elsewhere(line.rollout_id, line.input_sha256, now))
    return [frozenset(each) for each in strangers], tuple(elsewhere)


def _part(verified: VerifiedPart, first: str, until: str) -> Part:
    manifest = verified.manifest
    return Part(
        verified.directory, messages.written_files(manifest), first, until, weights=messages.weights_of(manifest)
    )
