"""Gym actors: deployments of Gym that run side by side, each with servers of its own, whose names the others may have too.

PURE. The one rule: a rollout lives in one actor. Servers of an actor call each other and those that belong to none; never
those of another actor. A fleet without actors is one deployment, and nothing here concerns it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from coordinator.protocol.participant import Finding, Participant, finding_of
from coordinator.wire.errors import Reason
from coordinator.wire.places import actor_of, in_actor
from coordinator.wire.terms import Role

ACTOR_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # without a dot: it ends where the server's name begins


def by_actor(participants: Iterable[Participant]) -> dict[str, list[Participant]]:
    """The servers of each actor, sorted by their ids; those of no actor under the empty name, when there are any."""
    found: dict[str, list[Participant]] = defaultdict(list)
    for p in sorted(participants, key=lambda p: (p.actor_id, p.participant_id)):
        found[p.actor_id].append(p)
    return dict(found)


def callee(caller: Participant, name: str, known: Mapping[str, Participant]) -> Participant | None:
    """Whom a participant reaches when it calls the server `name`: one of its own actor, else one of none. `known`: by id."""
    found = known.get(in_actor(caller.actor_id, name)) or known.get(name)
    return found if found is not None and found.actor_id in ("", caller.actor_id) else None


def findings(participants: Collection[Participant]) -> Iterator[Finding]:
    """What is wrong or costly about how servers are spread over actors; nothing for a fleet without them."""
    actors = by_actor(participants)
    names = {name for name in actors if name}
    for p in participants:
        yield from _named(p, names)
    if not names:
        return
    for name in sorted(names):
        if not any(p.role == Role.AGENT for p in actors[name]):
            yield finding_of(
                Reason.TOPOLOGY_INVALID, actors[name][0].participant_id,
                f"Actor `{name}` has no agent, so that no rollout lives in it.",
                "Start its agent servers with the gate, and with the SAFEPOINT_ACTOR of the others.", blocking=False,
            )  # fmt: skip
    for p in actors.get("", ()):
        if p.role == Role.AGENT:
            yield finding_of(
                Reason.TOPOLOGY_INVALID, p.participant_id,
                f"Agent `{p.participant_id}` belongs to no actor, and others do: its rollouts go to no other actor.",
                "Set SAFEPOINT_ACTOR where its servers are started.", blocking=False,
            )  # fmt: skip


def _named(p: Participant, actor_ids: Collection[str]) -> Iterator[Finding]:
    name = p.participant_id
    if p.actor_id and ACTOR_ID.fullmatch(p.actor_id) is None:
        yield finding_of(
            Reason.MALFORMED_ID, name, f"`{p.actor_id[:70]}`, which `{name}` names as its actor, cannot name one.",
            "Set SAFEPOINT_ACTOR to 1 to 63 characters of [A-Za-z0-9_-], the first a letter or digit.",
        )  # fmt: skip
    elif p.actor_id and not name.startswith(f"{p.actor_id}."):
        yield finding_of(
            Reason.TOPOLOGY_INVALID, name, f"`{name}` belongs to actor `{p.actor_id}`, and its name does not begin with it.",
            f"Let its participant_id be `{p.actor_id}.` and the name of the server.",
        )  # fmt: skip
    elif not p.actor_id and actor_of(name, actor_ids):
        yield finding_of(
            Reason.TOPOLOGY_INVALID, name, f"`{name}` belongs to no actor, and its name says that it does.",
            "Start its shim with --actor and its plain name, or give it a name without a dot.",
        )  # fmt: skip
