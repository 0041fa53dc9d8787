"""Whose shim does not see the coordinator's snapshot root, from what each says of the root that it sees.

PURE. It refuses nothing: what a shim says is some seconds old, and another machine's view of a shared directory up to a minute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from safepoint.v1 import capabilities_pb2

from coordinator.wire.errors import Reason
from coordinator.wire.names import is_store

REASONS: Final = frozenset({Reason.STORAGE_FAILED, Reason.SNAPSHOT_NOT_FOUND})


@dataclass(frozen=True, slots=True)
class Unseen:
    """Who does not see it, and how: a sentence without its subject, which is the shim."""

    participant_ids: tuple[str, ...]
    text: str
    next_step: str
    reason: Reason


def unseen(mark: str, root: str, seen: Iterable[tuple[str, capabilities_pb2.SeenRoot]]) -> tuple[list[Unseen], int]:
    """Those who see it otherwise, alike ones together, and how many see it well.

    `mark`: the coordinator's; empty: it does not say. `root`: where it has it. `seen`: participants that have to write there.
    """
    if not mark:
        return [], 0
    well = 0
    found: dict[tuple[str, str, str], list[str]] = {}  # path, problem, mark -> whose
    for participant_id, it in seen:
        if it.mark == mark and not it.problem:
            well += 1
        else:
            found.setdefault((it.path, it.problem, it.mark), []).append(participant_id)
    next_step = (
        f"Set SAFEPOINT_ROOT to {root} before the server starts, and give its machine what reaches that store (AWS_ENDPOINT_URL, "
        "credentials, a region). If the coordinator began within the last minute, look again first."
        if is_store(root)
        else f"Mount {root} on the shim's machine, let the user of the server write there, and set SAFEPOINT_ROOT to it before the "
        "server starts. If the coordinator began within the last minute, look again first."
    )
    told: list[Unseen] = []
    for (path, problem, their_mark), names in sorted(found.items()):
        if not path:
            text, reason = "has no snapshot root: its part of a save cannot be written", Reason.STORAGE_FAILED
        elif their_mark and their_mark != mark:
            text = f"sees another coordinator's record in {path}: that is not the root {root}, or an old view of it"
            reason = Reason.SNAPSHOT_NOT_FOUND
        else:
            lacks = "cannot use" if their_mark else "does not see"
            text, reason = (
                f"{lacks} the coordinator's root {root} at {path}: {problem.rstrip('.')}",
                Reason.STORAGE_FAILED,
            )
        told.append(Unseen(tuple(names), text, next_step, reason))
    return told, well
