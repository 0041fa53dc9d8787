"""Names of servers that belong to a Gym actor, and where a restore has brought the rollouts of actors.

PURE. The one rule: a rollout is in one actor. Its old actor and its id say in which, by ranges of ids in the order of bytes
(ids are ASCII, so that the order of texts is the same); the ranges of an actor leave nothing out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass


def in_actor(actor_id: str, server_name: str) -> str:
    """The participant_id of a server: its own name, below that of its Gym actor when it has one."""
    return f"{actor_id}.{server_name}" if actor_id else server_name


def actor_of(participant_id: str, actor_ids: Collection[str]) -> str:
    """The actor that a participant of that id belongs to, empty for none. `actor_ids`: all that there are."""
    head, dot, _ = participant_id.partition(".")
    return head if dot and head in actor_ids else ""


def is_called(participant_id: str, server_name: str) -> bool:
    """Whether a participant of that id is a server of that name, in whatever actor, or in none."""
    return server_name in (participant_id, participant_id.partition(".")[2])  # an actor's name has no dot


@dataclass(frozen=True, slots=True)
class Placement:
    """Rollouts of one actor of a snapshot, from `first` to before `until` (empty: no bound), and the actor they go to."""

    from_actor: str
    to_actor: str
    first: str = ""
    until: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is everything that the old actor had."""
        return not self.first and not self.until


def within(rollout_id: str, first: str, until: str) -> bool:
    """Whether a rollout is in a range of ids, from `first` to before `until`; empty: no bound."""
    return first <= rollout_id and (not until or rollout_id < until)


class Locator:
    """Who holds a rollout now, asked often."""

    def __init__(self, placements: Iterable[Placement]) -> None:
        self._given: dict[str, list[Placement]] = defaultdict(list)
        for placement in sorted(placements, key=lambda p: p.first):
            self._given[placement.from_actor].append(placement)
        self._firsts = {name: [p.first for p in given] for name, given in self._given.items()}

    def now_at(self, rollout_id: str, agent_id: str) -> str:
        """The actor that holds a rollout which the agent of that participant_id had; empty when it is in none."""
        actor = actor_of(agent_id, self._given)
        given = self._given.get(actor)
        return given[bisect_right(self._firsts[actor], rollout_id) - 1].to_actor if given else ""
