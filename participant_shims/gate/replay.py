"""One scope of a rollout: numbers its calls, and answers recorded ones from the log.

The rule kept here: a record is used once, and only for a call with the same digest. When the agent makes a call that is
not among the records although some are left, the others get a moment (an agent may call in parallel); then the rollout
has diverged, and that is said, never papered over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from coordinator.wire.errors import Refused
from participant_shims.gate.calllog import CallRecord
from participant_shims.identity import CallIdentity

# How long a call that matches nothing waits for calls that run beside it to use up the records.
PATIENCE_S: Final = 2.0
# Why an agent asks something else than before, and what helps: for people, after the calls that differ.
STRAYED: Final = (
    "What it sends depends on the time, on chance or on something from outside: seed chance by the rollout, and let a server "
    "answer the rest, whose answers are recorded."
)


class DivergedError(Exception):
    """The rollout does not repeat its recorded calls; it restarts from its input. Raised inside the agent's handler."""


@dataclass(slots=True)
class Dispatch:
    """One attempt that runs at this agent. Sticky: once it is diverged, none of its calls leaves any more."""

    rollout_id: str
    attempt: int
    base: int
    diverged: str = ""
    strayed: bool = False  # it diverged by what the agent itself does
    answered: bool = False  # a call of it has had its answer, from a server or from the log
    overtaken: Refused | None = None  # a later attempt of it runs elsewhere: its client is told so
    outrun_by: int = -1  # an attempt that others know of, and this server does not: of an earlier life of it
    signal: asyncio.Event = field(default_factory=asyncio.Event)
    scopes: dict[str, Scope] = field(default_factory=lambda: dict[str, "Scope"]())

    def diverge(self, reason: str, *, strayed: bool = False) -> None:
        """The first reason stays."""
        if not self.diverged:
            self.diverged, self.strayed = reason, strayed
            self.signal.set()

    def leftover(self) -> str:
        """Why a dispatch that has ended did not repeat its recorded calls; empty when it did."""
        for scope in self.scopes.values():
            left = [r for r in scope.unused if r.answer is not None]
            if left:
                r = left[0]
                return f"it ended without {len(left)} recorded calls, the first {r.server} {r.method} {r.path} ({r.call_id})"
        return ""


class Scope:
    """The calls made in one scope, in this attempt."""

    def __init__(self, identity: CallIdentity, records: Iterable[CallRecord] = (), dispatch: Dispatch | None = None):
        self.identity = identity
        self.dispatch = dispatch
        self.unused = sorted(records, key=lambda r: r.number)
        self._next = max((r.number for r in self.unused), default=0) + 1
        self._used = asyncio.Event()
        self.home = ""  # of work that is not logged: the rollout that it is part of, where that is known

    async def match(self, digest: str, what: str, patience_s: float = PATIENCE_S) -> CallRecord | None:
        """The record of this call, which is used up by it; None when no records are left.

        Raises DivergedError when records are left, none matches, and nobody uses them up within `patience_s` seconds.
        """
        deadline = asyncio.get_running_loop().time() + patience_s
        while self.unused:
            found = next((r for r in self.unused if r.digest == digest), None)
            if found is not None:
                self.unused.remove(found)
                self._used.set()
                return found
            self._used.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._used.wait()
            except TimeoutError:
                r = self.unused[0]
                recorded = f"{r.server} {r.method} {r.path}"
                how = "was sent with another content" if what == recorded else f"was made where {recorded} is recorded"
                raise DivergedError(
                    f"call {what} {how} ({r.call_id}, digest {digest[:12]}, recorded digest {r.digest[:12]})"
                ) from None
        return None

    def number(self) -> int:
        """The number of a new call."""
        self._next += 1
        return self._next - 1
