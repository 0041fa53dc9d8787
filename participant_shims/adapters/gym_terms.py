"""What gates say, in the words of the adapter.

PURE but for `Tally`, which waits. A name that is not known becomes UNSPECIFIED or a refusal, never a guess.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import CheckpointMode, Role
from participant_shims.adapter import Counts, Progress, WrittenFile
from participant_shims.adapters.gate_link import GateStatus

_ROLES: Final = {
    "policy": Role.POLICY_MODEL, "policy_model": Role.POLICY_MODEL, "auxiliary": Role.AUXILIARY_MODEL,
    "auxiliary_model": Role.AUXILIARY_MODEL, "judge": Role.AUXILIARY_MODEL, "agent": Role.AGENT,
    "resources": Role.RESOURCES, "engine": Role.ENGINE,
}  # fmt: skip


def role_named(name: str) -> Role:
    """A role by its name; UNSPECIFIED for an empty one. Raises ROLE_INVALID."""
    if not name:
        return Role.UNSPECIFIED
    if name.lower() not in _ROLES:
        raise refuse(Reason.ROLE_INVALID, f"{name!r} is no role; these are: {', '.join(_ROLES)}.")
    return _ROLES[name.lower()]


class Tally:
    """How far several are together, each of whom says how far it is alone: from the loop, or from a thread of ours.

    `total_bytes`: what they have in all; zero when it is not known.
    """

    def __init__(self, total_bytes: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._total_bytes = total_bytes
        self._parts: dict[str, Progress] = {}
        self._news = asyncio.Event()

    def tell(self, who: str, progress: Progress) -> None:
        """`who` is so far."""
        self._parts[who] = progress
        self._news.set()

    def tell_from_thread(self, who: str, bytes_done: int) -> None:
        """The same, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody wants to know
            self._loop.call_soon_threadsafe(self.tell, who, Progress(bytes_done))

    def now(self) -> Progress:
        """All of them together."""
        parts = list(self._parts.values())
        return Progress(
            sum(p.bytes_done for p in parts), self._total_bytes,
            sum(p.items_done for p in parts), sum(p.items_total for p in parts),
        )  # fmt: skip

    async def until(self, asking: asyncio.Future[Any]) -> AsyncIterator[Progress]:
        """Progress until `asking` is done; cancels it when the reader goes away. Raises what it raises."""
        try:
            while not asking.done():
                waiting = asyncio.ensure_future(self._news.wait())
                both: set[asyncio.Future[Any]] = {asking, waiting}
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                if self._news.is_set():
                    self._news.clear()
                    yield self.now()
            asking.result()
        finally:
            asking.cancel()


def sum_counts(statuses: Sequence[GateStatus]) -> Counts:
    return Counts(
        sum(s.counts.in_flight for s in statuses),
        sum(s.counts.parked for s in statuses),
        sum(s.counts.held for s in statuses),
    )


def join_warnings(statuses: Mapping[str, GateStatus]) -> tuple[str, ...]:
    """What the gates of a server warn of, each with the name of its worker where there are several."""
    several = len(statuses) > 1
    return tuple(f"{name}: {w}" if several else w for name, status in statuses.items() for w in status.warnings)


def mode_named(name: str) -> CheckpointMode:
    upper = name.upper()
    return CheckpointMode[upper] if upper in CheckpointMode.__members__ else CheckpointMode.UNSPECIFIED


def read_progress(raw: Mapping[str, Any]) -> Progress:
    return Progress(*(int(raw.get(k) or 0) for k in ("bytes_done", "bytes_total", "items_done", "items_total")))


def read_file(raw: Mapping[str, Any]) -> WrittenFile:
    return WrittenFile(str(raw["path"]), int(raw["size_bytes"]), str(raw["sha256"]))
