"""One run's whole world: a coordinator, the fleet, what Safepoint puts beside it, and the trainer's client.

The rule it keeps: two worlds share nothing but the code. Each has its own snapshot root, job, ports, run directory and
policy, so that the interrupted run can be compared with one that Safepoint never touched while it ran.

A world can be killed and started again: the snapshot root stays, all else is new.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from coordinator.client import AsyncClient
from coordinator.demo.fleet import MODEL, Fleet
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError, refuse
from participant_shims.gate import bootstrap_path

REGISTER_S: Final = 60.0
PARTICIPANTS: Final = 5


class Host(Protocol):
    """Where a coordinator runs."""

    async def start(self, settings: Settings) -> None:
        """Start it; return when its address file is written."""
        ...

    async def kill(self) -> int:
        """End it without a word; how many processes that took."""
        ...

    async def revive(self) -> str:
        """After `kill`: have it again; how that came about, as half a sentence."""
        ...

    async def stop(self) -> None:
        """End it for good."""
        ...


@dataclass
class World:
    """`folder` gets the snapshot root and the logs; it is emptied first. `token_ms`: how long a sampled token takes."""

    name: str
    folder: Path
    seed: int
    host: Host
    token_ms: float
    lives: int = field(default=0, init=False)
    fleet: Fleet = field(init=False)
    client: AsyncClient = field(init=False)
    _run_dir: Path = field(init=False)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.root.mkdir(parents=True)
        # In the temporary directory and short: Unix socket paths end at 107 characters, and a checkout may lie deep.
        self._run_dir = Path(tempfile.mkdtemp(prefix="sp-"))
        self.client = AsyncClient(f"file:{self.root}/coordinator/address.json")
        self._new_fleet()

    @property
    def root(self) -> Path:
        """The snapshot root."""
        return self.folder / "root"

    def policy_log(self, life: int) -> Path:
        """The log of the policy's `life`-th life, counted from 1."""
        return self.folder / f"policy-{life}.jsonl"

    async def start(self) -> None:
        """Start everything; return when every server answers and every shim is registered."""
        await asyncio.gather(self.host.start(Settings(root=str(self.root), job_id=self._job)), self._start_fleet())
        await self._until_registered()

    async def restart(self) -> str:
        """After `kill`: new servers, and the coordinator again; how that came back."""
        self._new_fleet()
        how, _ = await asyncio.gather(self.host.revive(), self._start_fleet())
        await self._until_registered()
        return how

    async def kill(self) -> int:
        """SIGKILL everything, the coordinator included; how many processes there were."""
        coordinator, fleet = await asyncio.gather(self.host.kill(), asyncio.to_thread(self.fleet.kill))
        return coordinator + fleet

    async def stop(self) -> None:
        """End everything for good and remove what is outside `folder`."""
        await self.client.close()
        await asyncio.to_thread(self.fleet.kill)
        await self.host.stop()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    @property
    def _job(self) -> str:
        return f"demo-{self.name}"

    def _new_fleet(self) -> None:
        self.lives += 1
        environment = {
            "SAFEPOINT_COORDINATOR": f"file:{self.root}/coordinator/address.json",
            "SAFEPOINT_ROOT": str(self.root),
            "SAFEPOINT_RUN_DIR": str(self._run_dir),
            "SAFEPOINT_JOB": self._job,
            "SAFEPOINT_ROLES": f"{MODEL}=policy",
            "SAFEPOINT_GYM_RAY": "off",
        }
        self.fleet = Fleet(
            self.folder / f"logs-{self.lives}",
            self.seed,
            environment,
            (str(bootstrap_path()),),
            self.token_ms,
            self.policy_log(self.lives),
        )

    async def _start_fleet(self) -> None:
        await self.fleet.start()

    async def _until_registered(self) -> None:
        until = time.monotonic() + REGISTER_S
        seen = "nobody"
        while time.monotonic() < until:
            try:
                topology = await self.client.topology(timeout=5)
                seen = ", ".join(each.capabilities.participant_id for each in topology.participants) or "nobody"
                if len(topology.participants) == PARTICIPANTS:
                    blocking = [finding for finding in topology.findings if finding.blocking]
                    if not blocking:
                        return
                    seen += "; " + "; ".join(f"{f.participant_id}: {f.message}" for f in blocking)
            except SafepointError as error:
                seen = str(error)
            await asyncio.sleep(0.2)
        raise refuse(
            Reason.UNAVAILABLE,
            f"after {REGISTER_S:.0f} s there are registered at the coordinator: {seen}",
            next_step=f"Read the logs in {self.fleet.logs}.",
        )
