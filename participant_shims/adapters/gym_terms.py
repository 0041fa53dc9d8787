"""What gates say, in the words of the adapter.

PURE but for `progress_until`, which waits. A name that is not known becomes UNSPECIFIED or a refusal, never a guess.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import CheckpointMode, Role
from participant_shims.adapter import Counts, Progress, WrittenFile
from participant_shims.adapters.gate_link import GateStatus, Json

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


async def progress_until(
    asking: asyncio.Future[list[Json]], progress: asyncio.Queue[Progress]
) -> AsyncIterator[Progress]:
    """Progress until `asking` is done; cancels it when the reader goes away. Raises what it raises."""
    try:
        while not asking.done():
            getting = asyncio.ensure_future(progress.get())
            both: set[asyncio.Future[Any]] = {asking, getting}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if getting.done():
                    yield getting.result()
            finally:
                getting.cancel()
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
