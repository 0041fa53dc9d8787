"""A light fleet of real processes: a coordinator, three small servers with real gates, and the shims that they start.

The rule it keeps: what it starts it ends, by pid, and everything lies in one directory, so that a leak is seen. Each
process has a file of failpoints of its own that is read again when it changes: one fleet serves many cases. A server's
gate and its shim share a file; their failpoints have different names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from coordinator.demo.ports import free_ports
from coordinator.wire import failpoints
from participant_shims.gate import bootstrap_path

REPOSITORY = Path(__file__).resolve().parents[2]
COORDINATOR = "coordinator"
SERVERS = ("policy_model", "agent", "counter")
LEASE_S = 2.0
_SECTION: dict[str, str] = {
    "policy_model": "responses_api_models",
    "agent": "responses_api_agents",
    "counter": "resources_servers",
}
_SETTINGS = {
    "LEASE_TTL_S": str(LEASE_S), "HEARTBEAT_S": "0.3", "STRAGGLER_GRACE_S": "2",
    "PREPARE_TIMEOUT_S": "10", "COMMIT_TIMEOUT_S": "10", "RESTORE_TIMEOUT_S": "20",
}  # fmt: skip


def settings_of_a_coordinator() -> dict[str, str]:
    """As its environment has them."""
    return {f"SAFEPOINT_COORDINATOR_{name}": value for name, value in _SETTINGS.items()}


@dataclass(frozen=True)
class Hit:
    """A failpoint that did something."""

    name: str
    detail: str
    action: str
    pid: int


@dataclass
class Fleet:
    """`directory`: everything; short, for Unix sockets. `engine`: where the policy generates."""

    directory: Path
    engine: str
    extra: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])  # environment of one process
    store: str = ""  # the root, when it is not the directory
    processes: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, "subprocess.Popen[bytes]"], init=False
    )

    def __post_init__(self) -> None:
        for folder in (self.root, self.run_dir, self.temporary, self.logs, self.points):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        self.ports: dict[str, int] = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))
        for name in (COORDINATOR, *SERVERS):
            self.arm(name, "")

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def place(self) -> str:
        """The root as the processes are told."""
        return self.store or str(self.root)

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def temporary(self) -> Path:
        return self.directory / "tmp"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def points(self) -> Path:
        return self.directory / "points"

    # ---- failpoints -----------------------------------------------------------------------------------------------

    def arm(self, name: str, specification: str) -> None:
        """From the next reach on, these are the failpoints of that process, and of its shim."""
        failpoints.parse(specification)
        new = self.points / f".{name}"
        new.write_text(specification)
        new.rename(self.points / name)

    def disarm(self) -> None:
        """No process has any."""
        for name in (COORDINATOR, *SERVERS):
            if (self.points / name).read_text():
                self.arm(name, "")

    def hits(self, name: str) -> list[Hit]:
        """What the failpoints of that process have done since `forget_hits`."""
        try:
            lines = (self.points / f"{name}.hits").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Hit(**json.loads(line)) for line in lines]

    def forget_hits(self) -> None:
        for path in self.points.glob("*.hits"):
            path.unlink()

    # ---- processes ------------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start those that do not run; returns at once."""
        for name in names or (COORDINATOR, *SERVERS):
            if not self.runs(name):
                self._spawn(name)

    def _spawn(self, name: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SAFEPOINT_", "NEMO_GYM", "PYTHONPATH"))}
        paths = [str(REPOSITORY), str(REPOSITORY / "gen")]
        environment = kept | {
            "TMPDIR": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1", "SAFEPOINT_ROOT": self.place,
            failpoints.VARIABLE: f"file:{self.points / name}",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.faults.server"]
        if name == COORDINATOR:
            command = [sys.executable, "-m", "coordinator.cli", "coordinator", "--root", self.place]
            environment |= settings_of_a_coordinator() | self.extra.get(name, {})
        else:
            paths = [bootstrap_path(), *paths, str(Path(__file__).with_name("stub"))]
            environment |= {
                "NEMO_GYM_CONFIG_PATH": name, "NEMO_GYM_CONFIG_DICT": json.dumps(self._deployment()),
                "SAFEPOINT_RUN_DIR": str(self.run_dir), "SAFEPOINT_ROLES": "policy_model=policy",
                "SAFEPOINT_COORDINATOR": f"file:{self.place}/coordinator/address.json", "SAFEPOINT_DEBUG": "1",
                "FAULTS_ENGINE": self.engine,
            } | self.extra.get(name, {})  # fmt: skip
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def _deployment(self) -> dict[str, Any]:
        links: dict[str, Any] = {
            "resources_server": {"type": "resources_servers", "name": "counter"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
        }
        return {
            name: {_SECTION[name]: {"small": {"port": self.ports[name], **(links if name == "agent" else {})}}}
            for name in SERVERS
        }

    def runs(self, name: str) -> bool:
        """Whether that process was started and has not ended."""
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def log(self, name: str) -> str:
        """The end of what that process has printed."""
        return (self.logs / f"{name}.log").read_text(errors="replace")[-3000:]

    def life(self, name: str) -> Path | None:
        """The directory of the server's present life; None while it has none."""
        process = self.processes.get(name)
        for life in self.run_dir.glob(f"{name}-????????"):
            with contextlib.suppress(OSError, ValueError):
                if process is not None and json.loads((life / "life.json").read_text())["pid"] == process.pid:
                    return life
        return None

    def shim(self, name: str) -> dict[str, Any]:
        """What the shim of that server's life says of itself; empty while there is none."""
        life = self.life(name)
        try:
            return dict(json.loads((life / "shim.json").read_text())) if life is not None else {}
        except (OSError, ValueError):
            return {}

    def pid(self, process: str) -> int:
        """The pid of "coordinator", a server, or "<server>/shim"; 0 when it does not run."""
        name, _, shim = process.partition("/")
        if shim:
            return int(self.shim(name).get("pid") or 0)
        return self.processes[name].pid if self.runs(name) else 0

    def signal(self, process: str, number: int) -> None:
        """Send a signal to one process; one that is gone is none."""
        pid = self.pid(process)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, *names: str) -> None:
        """SIGKILL, and wait for the end. Shims end with their servers."""
        for name in names:
            process = self.processes.get(name)
            if process is not None and process.poll() is None:
                process.kill()
            if process is not None:
                process.wait()

    def close(self) -> None:
        """End everything, shims that were stopped included."""
        shims = [self.pid(f"{name}/shim") for name in SERVERS]
        self.kill(*self.processes)
        for pid in filter(None, shims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while time.monotonic() < until and any(map(psutil.pid_exists, filter(None, shims))):
            time.sleep(0.05)
