"""The real `ng_run`, with the gate by environment variables alone, and as `safepoint serve -- ng_run`.

`ng_run` and its servers are NeMo Gym's own, unchanged; its first process starts a Ray of its own, in a folder of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.client import AsyncClient
from coordinator.server import serve
from coordinator.settings import Settings
from participant_shims.gate import bootstrap_path
from tests.conftest import gym_python
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import TYPES, Fleet, counter_config, row
from tests.gym.whole import REPOSITORY, Trainer, registered, until

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]
MARK = "SAFEPOINT_TEST_NG_RUN"


class NgRun:
    """One `ng_run`. `before`: what stands before it on the command line."""

    def __init__(self, config: dict[str, Any], directory: Path, ray: Path, environment: dict[str, str]) -> None:
        self.mark = secrets.token_hex(8)
        self.log = directory / "ng_run.log"
        self.directory = directory
        environments = directory / "environments"
        for entry in config.values():
            kind = next((t for t in TYPES if isinstance(entry, dict) and t in entry), None)
            if kind is not None:
                folder = environments / kind / next(iter(entry[kind]))
                folder.mkdir(parents=True)
                (folder / ".venv").symlink_to(gym_python().parent.parent)
        chosen = {k: v for k, v in config.items() if k in ("head_server", "default_host") or isinstance(v, dict)}
        (directory / "gym.yaml").write_text(json.dumps(chosen))  # JSON is YAML
        self.command = [
            str(gym_python().parent / "ng_run"), f"+config_paths=[{directory / 'gym.yaml'}]",
            "+skip_venv_if_present=true", f"+uv_venv_dir={environments}",
        ]  # fmt: skip
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SAFEPOINT_", "NEMO_GYM", "RAY_"))}
        self.environment = inherited | {
            "RAY_ADDRESS": "local", "RAY_TMPDIR": str(ray), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
            "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "DO_NOT_TRACK": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(directory), MARK: self.mark,
            "SAFEPOINT_TEST_RUN": os.environ.get("SAFEPOINT_TEST_RUN", ""),
        } | environment  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *before: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*before, *self.command], cwd=self.directory, env=self.environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def ours(self) -> list[psutil.Process]:
        """Every process that descends from it, whoever its parent is by now."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def named(self, words: str) -> list[int]:
        """Pids of ours whose command line has `words`."""
        found: list[int] = []
        for process in self.ours():
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def commands(self) -> list[str]:
        """What they are, for people."""
        found: list[str] = []
        for process in self.ours():
            try:
                found.append(" ".join(process.cmdline())[:80])
            except psutil.Error:
                continue
        return found

    async def terminate(self, within_s: float = 90) -> int:
        """SIGTERM to its pid alone, as a supervisor would; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), within_s)

    def kill(self) -> None:
        """Whatever is left, for good."""
        end = time.monotonic() + 20
        while (left := self.ours()) and time.monotonic() < end:
            for process in left:
                try:
                    process.kill()
                except psutil.Error:
                    continue
            psutil.wait_procs(left, timeout=1)
        if self.process is not None:
            self.process.wait()


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sp-ray-"))  # short: Ray's sockets lie deep below it
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def running(
    endpoint: ScriptedEndpoint, directory: Path, ray: Path, *before: str, **environment: str
) -> AsyncIterator[tuple[NgRun, Fleet, AsyncClient]]:
    """`ng_run` with a coordinator, once every shim is registered."""
    config = counter_config(endpoint.url)
    fleet = Fleet(config, directory)  # for the addresses only: it starts nothing
    (directory / "root").mkdir(exist_ok=True)
    coordinator = await serve(Settings(root=str(directory / "root")))
    job = NgRun(config, directory, ray, environment)
    client = AsyncClient(coordinator.address)
    try:
        job.start(*before)
        try:
            await registered(client, fleet.names(), 150)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{job.log.read_text(errors='replace')[-4000:]}") from None
        yield job, fleet, client
    finally:
        job.kill()
        await client.close()
        await coordinator.kill()


async def save_in_flight(endpoint: ScriptedEndpoint, fleet: Fleet, client: AsyncClient, name: str) -> None:
    """A save while eight rollouts have a generation in flight; all of them finish, and nothing is made twice."""
    endpoint.hold(after_turn=2)
    async with Trainer(fleet) as trainer:
        runs = [asyncio.create_task(trainer.run(row(i, 4))) for i in range(8)]
        await until(lambda: endpoint.begun == 24, 60)
        result = await client.save(name)
        print(result.line)
        assert (result.totals.pending, result.totals.excluded) == (8, 0)
        assert not any(run.done() for run in runs)
        endpoint.release()
        assert [r["reward"] for r in await asyncio.gather(*runs)] == [1.0] * 8
    assert (endpoint.repeated, endpoint.aborted) == (0, 0)


async def test_under_the_real_ng_run_servers_get_gate_and_shim_by_environment(
    directory: Path, ray_folder: Path
) -> None:
    root, run_dir = directory / "root", directory / "r"
    environment = {
        "SAFEPOINT_ROOT": str(root), "SAFEPOINT_COORDINATOR": f"file:{root}/coordinator/address.json",
        "SAFEPOINT_ROLES": "policy_model=policy", "SAFEPOINT_RUN_DIR": str(run_dir), "PYTHONPATH": bootstrap_path(),
    }  # fmt: skip
    with ScriptedEndpoint() as endpoint:
        async with running(endpoint, directory, ray_folder, **environment) as (job, fleet, client):
            assert len(job.named("participant_shims.cli shim")) == 3
            assert len(job.named("python app.py")) == 3
            await save_in_flight(endpoint, fleet, client, "live")
            code = await job.terminate()
            # What Gym and Ray leave behind when SIGTERM ends them is theirs, and differs from run to run. Ours is that no
            # shim outlives its server, and that there is no server without a shim as long as it runs.
            end = time.monotonic() + 10
            while job.ours() and time.monotonic() < end:
                await asyncio.sleep(0.1)
            servers = job.named("python app.py")
            print(
                f"ng_run ended with {code}; left after {10 - max(0.0, end - time.monotonic()):.1f} s: {job.commands()}"
            )
            await until(lambda: len(job.named("participant_shims.cli shim")) == len(servers), 60)
            for pid in servers:
                psutil.Process(pid).kill()
            await until(lambda: not job.named("participant_shims"), 60)


async def test_serve_runs_ng_run_and_leaves_nothing_of_it(directory: Path, ray_folder: Path) -> None:
    root, run_dir = directory / "root", directory / "r"
    before = [
        sys.executable, "-m", "participant_shims.cli", "serve", "--root", str(root), "--run-dir", str(run_dir),
        "--coordinator", f"file:{root}/coordinator/address.json", "--name", "policy_model", "--role", "policy",
        "--gym-ray", "off", "--",
    ]  # fmt: skip
    environment = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}"}
    with ScriptedEndpoint() as endpoint:
        async with running(endpoint, directory, ray_folder, *before, **environment) as (job, fleet, client):
            await save_in_flight(endpoint, fleet, client, "served")
            code = await job.terminate()
            left = job.commands()  # one that ends meanwhile has none
            print(f"serve ended with {code}; left behind: {left}")
            await until(lambda: not job.ours(), 60)
            # The lives are gone with those that ended in good order. What a busy machine made Gym or us kill has left its
            # own, which the next start of that server sweeps.
            left_lives = list(run_dir.iterdir())
            print(f"lives that are left: {[(path.name, (path / 'ended').exists()) for path in left_lives]}")
            assert not any((path / "ended").exists() or (path / "shim.json").exists() for path in left_lives)
