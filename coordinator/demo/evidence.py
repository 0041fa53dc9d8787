"""What a published snapshot holds, read from its files: which model calls are recorded in it.

The rule it keeps: the demo's claims rest on the snapshot's own bytes and the policy's own log, and on nothing that the
servers, the shims or the coordinator say about themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from coordinator.demo.compare import Generations, prompts_in, read_generations
from coordinator.demo.conversation import conversation_digest


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.rglob("*.jsonl")):
        with path.open(encoding="utf-8", errors="surrogatepass") as lines:
            for line in lines:
                value: object = json.loads(line)
                if isinstance(value, dict):
                    yield cast(dict[str, Any], value)


def recorded_calls(root: Path, snapshot_id: str, seed: int) -> set[str]:
    """Digests of the conversations whose model answer is in a published snapshot. Raises OSError or ValueError when its
    files are not there or not JSON lines."""
    found: set[str] = set()
    for line in _lines(root / "snapshots" / snapshot_id):
        found.update(conversations_of(line, seed))
    return found


def conversations_of(result: object, seed: int) -> set[str]:
    """Digests of the model calls whose answers are in a value: a rollout's result, or a line of a snapshot's file."""
    return {conversation_digest(seed, ids) for ids in prompts_in(result)}


def read_log(path: Path) -> Generations:
    """What one life of the policy generated; empty when it never began one."""
    if not path.exists():
        return Generations()
    return read_generations(path.read_text(errors="replace").splitlines())
