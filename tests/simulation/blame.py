"""Whether a failure names what went wrong (L5): runs with a single fault, placed where it hurts.

The rule: of the operations that fail in such a run at least 99 in 100 name the fault in their one primary cause: the
participant that died, hung or was cut off, the coordinator that was replaced, or the storage that failed.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from coordinator.wire.errors import Problem, Reason
from tests.simulation.faults import LEASE_S, Event, Plan, make
from tests.simulation.story import play

KINDS = (
    "crash shim", "crash server", "pause shim", "pause server", "crash coordinator", "cut off", "disk full", "fsync fails",
    "pause coordinator",
)  # fmt: skip
OF_A_PARTICIPANT = KINDS[:4]
LEAST = 0.99
STORAGE = frozenset({Reason.STORAGE_FULL, Reason.STORAGE_FAILED})


def single(seed: int) -> tuple[Plan, str, str]:
    """A run in which one save meets one fault; its kind, and whom it hits."""
    random = Random(f"blame {seed}")
    plan, kind = make(seed, ("one message",)), KINDS[seed % len(KINDS)]
    whom = random.choice(list(plan.servers))
    length = random.uniform(2 * LEASE_S, 3 * LEASE_S)
    at = 2.0
    if kind == "pause coordinator":
        length = random.uniform(2 * LEASE_S, 20.0)  # past the time of the save, too
    match kind:
        case "cut off":
            fault = Event(at + random.uniform(0.0, 0.03), "partition", whom, length, "both")
        case "disk full":
            fault = Event(at - 0.5, kind, whom, 8.0)
        case "fsync fails":
            fault = Event(
                at - random.uniform(0.0, 0.02), kind, whom, 3.0, random.choice([f"shim of {whom}", "coordinator"])
            )
        case _:
            fault = Event(at - 1.0, "when prepared", whom, length, kind)
    return replace(
        plan, events=tuple(sorted((fault, Event(at, "save", value=1)), key=lambda event: event.at)), duration_s=22.0,
        restarts=False, straggles=0.0, coordinator_leaves=False, power_loss_at_end=False, faults_in_restore=False, little_memory=False,
        ages="",
    ), kind, whom  # fmt: skip


def named(kind: str, whom: str, problem: Problem) -> bool:
    """Whether the primary cause is the fault."""
    if kind in OF_A_PARTICIPANT or kind == "cut off":
        return whom == problem.participant_id or whom in problem.message
    if kind == "pause coordinator":
        return "The coordinator (process" in problem.message and not problem.participant_id
    if kind.endswith("coordinator"):
        return "coordinator" in problem.message.lower()
    return problem.reason in STORAGE


def asked(seed: int) -> tuple[str, list[tuple[bool, str]]]:
    """Run it: the kind of its fault, and of each operation that failed before all was well again whether it was named."""
    plan, kind, whom = single(seed)
    result = play(plan)
    told = [problem for operation, problem in result.failures if operation == "save-1"]
    found = [(named(kind, whom, p), f"seed {seed}, {kind} {whom}: {p.reason.name} {p.message[:150]}") for p in told]
    return kind, [*found, *((False, f"seed {seed}: {text}") for text in result.violations)]
