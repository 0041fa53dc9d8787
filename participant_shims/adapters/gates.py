"""The gates of one server: who is here, who has left, and what all of them are asked at once.

The rule: a configured worker that is not here, or does not answer, is an error with its name and, as far as it can be
seen, with what has become of its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, cast

from coordinator.wire.errors import Reason, SafepointError, refuse
from participant_shims.adapter import TaskStack
from participant_shims.adapters.gate_link import BAD_LINE, GateLink, GateStatus, Json, read_stack, read_status

ANSWER_WITHIN_S: Final = 0.7  # open, renew: what must be answered within 1 s to our own caller
STATUS_WITHIN_S: Final = 0.4  # of a coordinator's status, which asks us for 0.7 s: who is silent is then told by us
# What a phase asks: a worker whose machine is busy must not void a cut. The coordinator waits 5 s for a confirmation, of
# which 1 s is for saying no.
PHASE_ANSWER_WITHIN_S: Final = 3.0


def patience_s(lease_left_s: float | None) -> float:
    """How long a phase waits for the word of a worker: a third of the lease that is left, since everybody stands still
    meanwhile and the rest is for renewing it, or opening; within the two limits above. None: nobody is closed."""
    if lease_left_s is None:
        return PHASE_ANSWER_WITHIN_S
    return min(PHASE_ANSWER_WITHIN_S, max(ANSWER_WITHIN_S, lease_left_s / 3))


class Gates:
    """`here`: the connected ones by worker; `left`: the last one of each worker that is gone."""

    def __init__(self, participant_id: str) -> None:
        self._participant_id = participant_id
        self.here: dict[str, GateLink] = {}
        self.left: dict[str, GateLink] = {}

    def leave(self, link: GateLink) -> None:
        """Its connection has ended."""
        if self.here.get(link.worker_id) is link:
            del self.here[link.worker_id]
            self.left[link.worker_id] = link

    @property
    def kind(self) -> str:
        """agent, model or resources; empty while nobody is here."""
        return next((kind_of(link) for link in self.here.values()), "")

    def all(self, reason: Reason) -> list[GateLink]:
        """Every configured worker, by name. Raises `reason` when one is missing, with its name and what has become of it."""
        missing = self.missing()
        if missing:
            raise refuse(reason, f"{missing}.{self._last_words()}")
        return [self.here[name] for name in sorted(self.here)]

    def missing(self) -> str:
        """Which configured workers are not here, and what has become of each, as a sentence without its end; else empty."""
        links = [self.here[name] for name in sorted(self.here)]
        known = [*links, *self.left.values()]
        configured = known[0].hello.configured_workers if known else 1
        if len(links) >= configured:
            return ""
        there = ", ".join(link.worker_id for link in links) or "none"
        expected = [f"worker-{n}" for n in range(configured)]
        absent = [
            f"{n} (pid {self.left[n].hello.pid}: {self.left[n].fate})" if n in self.left else n
            for n in expected
            if n not in self.here
        ] or [f"{configured - len(links)} more"]
        return (
            f"{len(links)} of {configured} workers of {self._participant_id} are connected ({there}); "
            f"missing: {', '.join(absent)}"
        )

    def _last_words(self) -> str:
        return next((link.last_words for name, link in sorted(self.left.items()) if name not in self.here), "")

    async def statuses(self, lease_left_s: float | None) -> list[GateStatus]:
        """The status of every worker, asked now, for a phase. Raises WORKERS_MISSING."""
        links = self.all(Reason.WORKERS_MISSING)
        answers = await self.ask(links, "status", {"max_rollouts": 0}, patience_s(lease_left_s))
        for link, answer in zip(links, answers, strict=True):
            link.status = read_status(answer)
        return [link.status for link in links]

    async def refresh(self, links: Sequence[GateLink], max_rollouts: int) -> list[bool]:
        """Ask for the status of each; whether it answered. Raises nothing."""

        async def one(link: GateLink) -> bool:
            try:
                link.status = read_status(await link.request("status", {"max_rollouts": max_rollouts}, STATUS_WITHIN_S))
            except SafepointError:
                return False  # its last word stands, and it is named
            return True

        return list(await asyncio.gather(*(one(link) for link in links)))

    async def stacks(self, links: Sequence[GateLink], limit: int) -> list[TaskStack]:
        """What the tasks of each wait for; whoever does not say, or is too old to know, is left out."""

        async def one(link: GateLink) -> list[TaskStack]:
            try:
                answer = await link.request("stacks", {"max_stacks": limit}, ANSWER_WITHIN_S)
                return [read_stack(link.worker_id, raw) for raw in cast("list[Json]", answer["stacks"])]
            except (SafepointError, *BAD_LINE):
                return []

        each = await asyncio.gather(*(one(link) for link in links))
        return [stack for found in each for stack in found][:limit]

    async def ask(self, links: Sequence[GateLink], what: str, params: Json, timeout_s: float | None) -> list[Json]:
        """Ask all at once; every answer, or the first refusal after all have ended."""
        answers = await asyncio.gather(
            *(link.request(what, params, timeout_s) for link in links), return_exceptions=True
        )  # fmt: skip
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return cast("list[Json]", answers)


def kind_of(link: GateLink) -> str:
    """agent, model or resources."""
    return link.hello.kind.removeprefix("gym.") or "unknown"
