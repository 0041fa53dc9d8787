"""Which snapshots stay: decided here, and nowhere else.

PURE. The rule: a snapshot goes only when nothing keeps it, and whatever keeps one is said. The newest that can be restored
always stays, and so does what is pinned or in use; `keep_last` keeps the newest few, `keep_every` and `keep_interval_s` one
of each block of steps or time, for good. The oldest of a block is the one, so that a later prune keeps the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from coordinator.wire.errors import Reason, refuse

NEWEST = "it is the newest"


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep. `keep_last`: the newest so many, at least 1. `keep_every`: the oldest of each so many steps; 0: none.

    `keep_interval_s`: the oldest of each so many seconds; 0: none. Raises INVALID_ARGUMENT.
    """

    keep_last: int
    keep_every: int = 0
    keep_interval_s: float = 0.0

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise refuse(Reason.INVALID_ARGUMENT, "keep_last must be at least 1: the newest snapshot is never deleted.")
        if self.keep_every < 0 or not 0 <= self.keep_interval_s < math.inf:
            raise refuse(Reason.INVALID_ARGUMENT, "keep_every and keep_interval must not be negative.")


@dataclass(frozen=True, slots=True)
class Dated:
    """A published snapshot as far as its age is concerned. `step`: of its metadata, None when that has no integer."""

    snapshot_id: str
    create_time_s: float
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays and why, newest first, and what goes, newest first."""

    kept: Mapping[str, str]
    doomed: tuple[str, ...]


def step_of(metadata: Mapping[str, str]) -> int | None:
    """The training step that a trainer has written beside its snapshot as `step`; None for what is no integer from 0."""
    text = metadata.get("step", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def plan(
    newest_first: Sequence[Dated],
    retention: Retention,
    pins: Mapping[str, str],
    in_use: Collection[str] = (),
    spared: Collection[str] = (),
    saved_last: str = "",
    also: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """What a prune does. `pins`: names to reasons. `spared`: kept since no newer one can be restored. `also`: names to why
    else they stay, such as what is not uploaded yet.

    `saved_last` stays whatever its age seems to be: somebody may have put snapshots of another root beside it.
    """
    why: dict[str, list[str]] = {one.snapshot_id: [] for one in newest_first}
    for place, one in enumerate(newest_first[: retention.keep_last]):
        why[one.snapshot_id].append(NEWEST if place == 0 else f"it is one of the newest {retention.keep_last}")
    oldest_first = newest_first[::-1]
    for name, block in _firsts(oldest_first, retention.keep_every, lambda one: one.step):
        first = block * retention.keep_every
        why[name].append(f"it is the oldest of steps {first} to {first + retention.keep_every - 1}")
    for name, _ in _firsts(oldest_first, retention.keep_interval_s, lambda one: one.create_time_s):
        why[name].append(f"it is the oldest of its {retention.keep_interval_s:g} s")
    for one in newest_first:
        name = one.snapshot_id
        if name in pins:
            why[name].append(f"it is pinned: {pins[name]}")
        if name in in_use:
            why[name].append("an operation uses it")
        if name in also:
            why[name].append(also[name])
        if name in spared:
            why[name].append("no newer one can be restored")
        if name == saved_last and not why[name]:
            why[name].append("it was saved last")
    return Plan(
        {name: "; ".join(reasons) for name, reasons in why.items() if reasons},
        tuple(name for name, reasons in why.items() if not reasons),
    )


def _firsts(
    oldest_first: Sequence[Dated], every: float, measure: Callable[[Dated], float | None]
) -> Iterator[tuple[str, int]]:
    """The first of each block of `every`, with the number of the block."""
    seen: set[int] = set()
    for one in oldest_first:
        value = measure(one)
        if every and value is not None and (block := int(value // every)) not in seen:
            seen.add(block)
            yield one.snapshot_id, block
