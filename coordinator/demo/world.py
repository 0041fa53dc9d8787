"""Everything of one run: the fleet, what Safepoint puts beside it, the coordinator, and the trainer's client of it.

The rule it keeps: two worlds share nothing but the code. Each has its own ports, policy, run directory and snapshot root,
so that the interrupted run can be compared with one that nobody interrupted.

    World(..., host=None)        the gate is loaded and never asked for anything: no shims, no coordinator
    World(..., host=RayHost())   the whole of Safepoint; may be killed and started again, and then only the disk is left
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from coordinator.client import AsyncClient
from coordinator.demo.engines import Engine
from coordinator.demo.fleet import MODEL, Fleet
from coordinator.demo.hosts import RayHost
from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError, refuse
from participant_shims.gate import bootstrap_path

REGISTER_S: Final = 60.0
PARTICIPANTS: Final = 5  # besides the engine's own


@dataclass
class World:
    """`folder` is emptied first and gets the logs and the snapshot root."""

    folder: Path
    engine: Engine
    host: RayHost | None
    lives: int = field(default=0, init=False)
    fleet: Fleet = field(init=False)
    client: AsyncClient = field(init=False)
    _run_dir: Path = field(init=False)
    _temporary: Path = field(init=False)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.root.mkdir(parents=True)
        # In the temporary directory and short: Unix socket paths end at 107 characters, and a checkout may lie deep.
        self._run_dir = Path(tempfile.mkdtemp(prefix="sp-"))
        # What gets SIGKILL leaves its temporary files behind: they go where we can remove them.
        self._temporary = self._run_dir / "t"
        self._temporary.mkdir()
        self.client = AsyncClient(f"file:{self.root}/coordinator/address.json")
        self.fleet = self._next_fleet()

    @property
    def root(self) -> Path:
        """The snapshot root."""
        return self.folder / "root"

    def policy_log(self, life: int) -> Path:
        """The log of the policy's `life`-th life, counted from 1."""
        return self.folder / f"policy-{life}.jsonl"

    async def start(self) -> None:
        """Start everything; return when every server answers and every shim is registered. Raises SafepointError."""
        if self.host is None:
            await self.fleet.start()
            return
        settings = Settings(root=str(self.root), job_id="demo")
        await asyncio.gather(self.host.start(settings, self._temporary), self.fleet.start())
        await self._until_registered()

    def kill(self) -> int:
        """SIGKILL everything, the coordinator included; how many processes there were."""
        coordinator = self.host.kill() if self.host is not None else 0
        return coordinator + self.fleet.kill()

    async def restart(self) -> float:
        """After `kill`: new servers; seconds after which the coordinator was back by itself. Raises SafepointError."""
        assert self.host is not None
        self.fleet = self._next_fleet()
        revived_s, _ = await asyncio.gather(self.host.revived(), self.fleet.start())
        await self._until_registered()
        return revived_s

    async def stop(self) -> None:
        """End everything for good and remove what is outside `folder`."""
        await self.client.close()
        await asyncio.to_thread(self.fleet.kill)
        if self.host is not None:
            await self.host.stop()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def _next_fleet(self) -> Fleet:
        self.lives += 1
        environment = {
            "SAFEPOINT_ROOT": str(self.root),
            "SAFEPOINT_RUN_DIR": str(self._run_dir),
            "TMPDIR": str(self._temporary),
            "SAFEPOINT_JOB": "demo",
            "SAFEPOINT_ROLES": f"{MODEL}=policy",
            "SAFEPOINT_GYM_RAY": "off",
        }
        if self.host is None:
            environment["SAFEPOINT_SHIM"] = "manual"
        else:
            environment["SAFEPOINT_COORDINATOR"] = f"file:{self.root}/coordinator/address.json"
        logs = self.folder / f"logs-{self.lives}"
        return Fleet(logs, self.engine, environment, (bootstrap_path(),), self.policy_log(self.lives))

    async def _until_registered(self) -> None:
        until = time.monotonic() + REGISTER_S
        seen = "nobody"
        while time.monotonic() < until:
            try:
                topology = await self.client.topology(timeout=5)
                seen = ", ".join(each.capabilities.participant_id for each in topology.participants) or "nobody"
                blocking = [finding for finding in topology.findings if finding.blocking]
                if len(topology.participants) == PARTICIPANTS + self.engine.participants and not blocking:
                    return
                seen += "".join(f"; {finding.participant_id}: {finding.message}" for finding in blocking)
            except SafepointError as error:
                seen = str(error)
            await asyncio.sleep(0.2)
        raise refuse(
            Reason.UNAVAILABLE,
            f"after {REGISTER_S:.0f} s there are registered at the coordinator: {seen}",
            next_step=f"Read the logs in {self.fleet.logs}.",
        )
