"""Names that scripts and dashboards read: the fields of `--json`, and the figures of the demo.

The rule: a name is added and never changed or taken away without this file, and so a person, saying so.

    python -m tests.known_bugs.golden          rewrites golden_names.json from what is printed now
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.demo.figures import Figures
from coordinator.wire.errors import Problem, Reason
from tests.cli.conftest import Safepoint
from tests.client.fake_coordinator import FakeCoordinator, Fault, entries

FILE: Final = Path(__file__).with_name("golden_names.json")
# Objects whose keys are data of the user and no names of ours.
_DATA: Final = frozenset({"metadata", "invalid", "skipped"})


def names(value: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all fields of a JSON value: `a.b`, and `a[].b` within lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path
            if key not in _DATA:
                yield from names(item, path)
    elif isinstance(value, list):
        for item in value:
            yield from names(item, f"{prefix}[]")


async def printed() -> dict[str, list[str]]:
    """What each command prints with --json, when there is something to print in every field."""
    found: dict[str, list[str]] = {}
    async with FakeCoordinator().serve() as fake:
        safepoint = Safepoint(fake.address)
        fake.published = ["step-41", "step-40"]
        fake.damaged = {"step-41": Reason.SNAPSHOT_CORRUPT}
        fake.invalid = {"step-0": "no manifest"}
        fake.rollouts = list(entries("r-1", "r-2"))
        fake.metadata = {"step": "40"}
        fake.unconfirmed = ["counter"]
        fake.findings = [
            pb.Finding(blocking=False, reason=int(Reason.STATE_UNSUPPORTED), participant_id="sandbox", message="m",
                       next_step="n")
        ]  # fmt: skip
        commands = {
            "restore": ("restore",),
            "resume": ("resume",),
            "save": ("save", "s", "--meta", "step=40"),
            "abort": ("abort",),
            "status": ("status", "--rollouts", "2"),
            "topology": ("topology",),
            "why": ("why", "--events"),
            "history": ("history",),
            "snapshots ls": ("snapshots", "ls"),
            "snapshots show": ("snapshots", "show", "step-40"),
            "snapshots show --rollouts": ("snapshots", "show", "step-40", "--rollouts"),
            "snapshots verify": ("snapshots", "verify", "step-40"),
            "snapshots prune": ("snapshots", "prune", "--keep", "1", "--dry-run"),
            "snapshots pin": ("snapshots", "pin", "step-40", "--reason", "why"),
            "snapshots unpin": ("snapshots", "unpin", "step-40"),
        }
        for name, arguments in commands.items():
            if name == "status":
                fake.active = "save-7"
            ran = await safepoint(*arguments, "--json")
            assert ran.code == 0, (name, ran.out, ran.err)
            found[name] = sorted({path for line in ran.out.splitlines() for path in names(json.loads(line))})
        fake.fail("Save", Fault(Problem(Reason.DECLINED, "no room", participant_id="agent")))
        failed = await safepoint("save", "s2", "--json")
        found["a failure"] = sorted(set(names(failed.json())))
    found["build/demo.json"] = sorted(field.name for field in dataclasses.fields(Figures))
    return found


def read() -> dict[str, list[str]]:
    """What was promised."""
    return json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


if __name__ == "__main__":
    FILE.write_text(json.dumps(asyncio.run(printed()), indent=1) + "\n", encoding="utf-8")
