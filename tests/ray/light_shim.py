"""A real shim process in front of a server that is not there: what the tests of a whole cluster pause.

    python -m tests.ray.light_shim --life DIR --name agent-0 --role agent --root ROOT

Each step of the adapter is noted in <life>/steps.log as one JSON object a line, with the machine's monotonic time; it
waits for as long as <life>/hold.STEP or <life>/hold.STEP.N is there, N being how often the step was taken so far.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.wire.terms import CheckpointMode, Role, RolloutState
from participant_shims.adapter import Description, Exported, LedgerLine, Loaded, Progress, WrittenFile
from participant_shims.adapters.ledger_file import LEDGER, write_ledger
from participant_shims.shim import ShimOptions, serve_shim
from tests.shims.shim_fakes import FakeAdapter

ROLES = {"agent": Role.AGENT, "policy": Role.POLICY_MODEL, "resources": Role.RESOURCES}
ROLLOUTS = 2  # that the agent has parked


@dataclass
class LightAdapter(FakeAdapter):
    """`FakeAdapter` with a name, a ledger when it is an agent, and steps that wait for a file to go away."""

    name: str = ""
    life: Path = Path()
    counts: dict[str, int] = field(default_factory=dict)

    async def _step(self, name: str) -> None:
        self.counts[name] = count = self.counts.get(name, 0) + 1
        with (self.life / "steps.log").open("a") as log:
            log.write(json.dumps({"at": time.monotonic(), "step": name, "n": count}) + "\n")
        while (self.life / f"hold.{name}").exists() or (self.life / f"hold.{name}.{count}").exists():
            await asyncio.sleep(0.02)

    async def describe(self) -> Description:
        return Description(
            self.name, self.role, self.kind, CheckpointMode.EXPORT_RESTORE, self.state_schema, self.modes
        )

    def _totals(self) -> dict[RolloutState, int]:
        return {RolloutState.PARKED: ROLLOUTS} if self.role is Role.AGENT else {}

    async def export(self, directory: Path) -> AsyncIterator[Progress | Exported]:
        await self._step("export")
        data = b'{"a": 1}\n'
        (directory / "state.jsonl").write_bytes(data)
        files = [WrittenFile("state.jsonl", len(data), hashlib.sha256(data).hexdigest())]
        if self.role is Role.AGENT:
            lines = [LedgerLine(f"r-{n}", 0, RolloutState.PARKED, recorded_calls=1) for n in range(ROLLOUTS)]
            files.append(write_ledger(directory, lines, self.name))
        yield Exported(tuple(files), LEDGER if self.role is Role.AGENT else "", self._totals())

    async def load(self, directory: Path, files: Sequence[WrittenFile]) -> AsyncIterator[Progress | Loaded]:
        await self._step("load")
        self.loaded_for = self.closed_for
        yield Loaded(0, self._totals(), (), self.generation)


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    for name in ("--life", "--name", "--role", "--root"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    root, life = Path(arguments.root), Path(arguments.life)
    adapter = LightAdapter(role=ROLES[arguments.role], name=arguments.name, life=life, in_flight=[])
    options = ShimOptions(life, arguments.name, f"file:{root}/coordinator/address.json", root, bind="unix")
    asyncio.run(serve_shim(options, adapter))


if __name__ == "__main__":
    main()
