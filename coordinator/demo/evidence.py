"""What a published snapshot holds, read from its files: which model calls are recorded, and the environments' state.

The rule it keeps: the demo's claims rest on the snapshot's own bytes and the policy's own log, and on nothing that the
servers, the shims or the coordinator say about themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from coordinator.demo.compare import Generations, prompts_in, read_generations
from coordinator.demo.network import conversation_digest


@dataclass
class Evidence:
    """`recorded`: digests of conversations whose model answer is in the snapshot. `sessions`: state by rollout."""

    recorded: set[str] = field(default_factory=set[str])
    sessions: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.rglob("*.jsonl")):
        with path.open(encoding="utf-8", errors="surrogatepass") as lines:
            for line in lines:
                value: object = json.loads(line)
                if isinstance(value, dict):
                    yield cast(dict[str, Any], value)


def read_snapshot(root: Path, snapshot_id: str, seed: int) -> Evidence:
    """The evidence of a published snapshot. Raises OSError or ValueError when its files are not there or not JSON lines."""
    found = Evidence()
    for line in _lines(root / "snapshots" / snapshot_id):
        if "session" in line and "state" in line:
            found.sessions.setdefault(str(line.get("rollout_id")), []).append(line["state"])
        else:
            found.recorded.update(conversation_digest(seed, ids) for ids in prompts_in(line))
    return found


def conversations_of(result: object, seed: int) -> set[str]:
    """Digests of the model calls that a rollout's result was made from."""
    return {conversation_digest(seed, ids) for ids in prompts_in(result)}


def read_log(path: Path) -> Generations:
    """What one life of the policy generated; empty when it never began one."""
    if not path.exists():
        return Generations()
    return read_generations(path.read_text(errors="replace").splitlines())
