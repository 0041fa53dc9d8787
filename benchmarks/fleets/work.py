"""The work of one participant at a cut, the same in every fleet: how long it drains, and the small file it leaves.

The rule: participants decide nothing here by chance. Their drains follow from the names of operation and participant, so
that every fleet waits for the same ones.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

POLICY, AGENT, RESOURCES = "policy", "agent", "resources"
PREPARE_ORDER: Final = (POLICY, AGENT, RESOURCES)
COMMIT_ORDER: Final = (AGENT, POLICY, RESOURCES)
OPEN_ORDER: Final = (RESOURCES, POLICY, AGENT)

EXPORT: Final = b'{"rollout_id":"r-1","turn":4,"state":"' + b"x" * 1000 + b'"}\n'
RECORDS: Final = "records.jsonl"


@dataclass(frozen=True, slots=True)
class Member:
    """One participant of a fleet."""

    name: str
    role: str


def members(count: int) -> list[Member]:
    """A fleet: one policy model, a tenth agents, else resources servers. One alone is an agent."""
    if count == 1:
        return [Member("agent-0", AGENT)]
    agents = max(1, count // 10)
    roles = [POLICY] + [AGENT] * agents + [RESOURCES] * (count - 1 - agents)
    return [Member(f"{role}-{n}", role) for n, role in enumerate(roles)]


def operation_name(label: str, drain_s: tuple[float, float]) -> str:
    """An operation's name, which says how long its participants drain: from, to (seconds)."""
    low, high = (round(seconds * 1000) for seconds in drain_s)
    return f"{label}.{low}-{high}"


def operation_name_at(label: str, quiet_at: tuple[float, float]) -> str:
    """The name of one that says when they are quiet: from, to, on this machine's monotonic clock (seconds)."""
    low, high = (round(seconds * 1000) for seconds in quiet_at)
    return f"{label}.at-{low}-{high}"


def drain_s(operation: str, name: str, role: str) -> float:
    """How long this participant needs to be quiet. Agents and models hold what they have, and need no time."""
    low, high = _range(operation)
    if role != RESOURCES or not high:
        return 0.0
    return low + _share(operation, name) * (high - low)


def quiet_at(operation: str, name: str, role: str, now: float) -> float:
    """When it is quiet, if it is asked at `now` (monotonic seconds)."""
    at = drain_s(operation, name, role)
    return max(now, at) if ".at-" in operation else now + at


def _range(operation: str) -> tuple[float, float]:
    numbers = [int(each) / 1000 for each in operation.rpartition(".")[2].split("-") if each.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0.0, 0.0)


def _share(operation: str, name: str) -> float:
    return int.from_bytes(hashlib.sha256(f"{operation} {name}".encode()).digest()[:4], "big") / 2**32


def last_drain_s(operation: str, fleet: list[Member]) -> float:
    """The longest of them all: nobody can be done before it."""
    return max(drain_s(operation, member.name, member.role) for member in fleet)


def write_durably(path: Path, data: bytes) -> str:
    """Write and fsync a new file; the SHA-256 of its bytes, hex."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
