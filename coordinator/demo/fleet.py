"""Starts and kills the demo's servers: the engine, and NeMo Gym's own servers, unmodified.

The rule it keeps: what is started here is found again by a mark in its environment, which children inherit. So `kill`
gets every server, every shim and every grandchild with SIGKILL, whoever their parent is by now, and nothing else.

    fleet = Fleet(logs, RandomNetwork(seed=7, token_ms=20), environment={"SAFEPOINT_ROOT": ...})
    await fleet.start()
    fleet.urls["counter_agent"]
    fleet.kill()
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import aiohttp
import psutil

from coordinator.demo.engines import MODEL_NAME, VLLM_PYTHON, Engine
from coordinator.demo.ports import free_ports
from coordinator.demo.rows import COUNTER_AGENT, SYNONYMS_AGENT
from coordinator.wire.errors import Reason, refuse

MARK: Final = "SAFEPOINT_DEMO_FLEET"
MODEL: Final = "policy_model"
COUNTER: Final = "counter"
SYNONYMS: Final = "synonyms"
START_S: Final = 120.0
GYM_PYTHON: Final = "SAFEPOINT_GYM_PYTHON"
_KEPT: Final = frozenset({GYM_PYTHON, VLLM_PYTHON, "SAFEPOINT_TEST_RUN"})
_REPOSITORY: Final = Path(__file__).resolve().parents[2]
# Nothing in here talks to the outside.
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def gym_python() -> Path:
    """The interpreter of NeMo Gym's environment. Raises UNAVAILABLE when it is not there."""
    path = Path(os.environ.get(GYM_PYTHON) or _REPOSITORY / ".venv-gym" / "bin" / "python")
    if not path.exists():
        raise refuse(
            Reason.UNAVAILABLE, f"NeMo Gym's environment is not there: {path}", next_step="Run `make setup-gym`."
        )
    return path


@dataclass(frozen=True, slots=True)
class Server:
    """One NeMo Gym server: its instance name, and which upstream class it is."""

    name: str
    kind: str
    implementation: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _agent(name: str, resources: str, settings: Mapping[str, Any]) -> Server:
    return Server(
        name,
        "responses_api_agents",
        "simple_agent",
        {
            "resources_server": {"type": "resources_servers", "name": resources},
            "model_server": {"type": "responses_api_models", "name": MODEL},
            **settings,
        },
    )


def servers(policy_url: str, agent_settings: Mapping[str, Any]) -> list[Server]:
    """The demo's servers: one policy model, and two environments with an agent each, stateful and stateless."""
    model = {
        "base_url": policy_url,
        "api_key": "none",
        "model": MODEL_NAME,
        "return_token_id_information": True,
        "uses_reasoning_parser": False,
    }
    return [
        Server(MODEL, "responses_api_models", "vllm_model", model),
        Server(COUNTER, "resources_servers", "example_session_state_mgmt", {"domain": "agent"}),
        Server(SYNONYMS, "resources_servers", "example_multi_step", {"domain": "instruction_following"}),
        _agent(COUNTER_AGENT, COUNTER, agent_settings),
        _agent(SYNONYMS_AGENT, SYNONYMS, agent_settings),
    ]


def marked(mark: str, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Every living process that carries `mark` in its environment, or belongs to one of `sessions`."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark or os.getsid(process.pid) in sessions:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def kill_marked(mark: str, within_s: float = 20.0) -> int:
    """SIGKILL every process that carries `mark`, and all of their sessions, until none is left; how many there were.

    A process that gives itself a title, as vLLM's engine does, writes it over its environment and with it over the mark;
    it is still in the session of one that has it. Raises INTERNAL after `within_s` seconds.
    """
    killed: set[int] = set()
    sessions: set[int] = set()
    until = time.monotonic() + within_s
    while processes := marked(mark, sessions):
        if time.monotonic() > until:
            raise refuse(Reason.INTERNAL, f"processes outlive SIGKILL: {[p.pid for p in processes]}")
        for process in processes:
            with suppress(ProcessLookupError):
                sessions.add(os.getsid(process.pid))
        sessions.discard(os.getsid(0))
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)
                killed.add(process.pid)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=1.0)
    return len(killed)


@dataclass
class Fleet:
    """The servers of one run. `logs`: folder for what they print; `environment`: what each of them gets besides ours.

    `policy_log`: where the engine writes down what it generates.
    """

    logs: Path
    engine: Engine
    environment: Mapping[str, str]
    python_path: tuple[str, ...] = ()
    policy_log: Path | None = None
    urls: dict[str, str] = field(default_factory=dict[str, str], init=False)
    mark: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _processes: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, "subprocess.Popen[bytes]"], init=False
    )

    async def start(self) -> None:
        """Start everything and return when every server answers. A failure kills what was started, and says whose log to read."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            policy_url = await asyncio.to_thread(
                self.engine.start, self._launch, self._died, free_ports, self.policy_log
            )
            chosen = servers(policy_url, self.engine.agent_settings)
            ports = dict(zip((server.name for server in chosen), free_ports(len(chosen)), strict=True))
            resolved = await asyncio.to_thread(self._resolve, chosen, ports)
            for server in chosen:
                self._start_server(server, resolved)
                self.urls[server.name] = f"http://127.0.0.1:{ports[server.name]}"
            await self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> int:
        """SIGKILL everything that `start` started and all its children; how many processes there were."""
        count = kill_marked(self.mark)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        self.urls.clear()
        return count

    def _environment(self, **more: str) -> dict[str, str]:
        # A Safepoint that the caller's own shell is set up for is not the demo's.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("SAFEPOINT_") or name in _KEPT
        }
        return {**inherited, **_QUIET, **self.environment, MARK: self.mark, **more}

    def _log(self, name: str) -> IO[bytes]:
        return (self.logs / f"{name}.log").open("ab")

    def _launch(
        self, name: str, command: Sequence[str], *, says: bool = False, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        environment = self._environment(**(more or {}))
        with self._log(name) as log:
            self._processes[name] = subprocess.Popen(
                list(command),
                cwd=_REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE if says else log,
                stderr=log,
                start_new_session=True,
            )
        return self._processes[name]

    def _resolve(self, chosen: list[Server], ports: Mapping[str, int]) -> dict[str, str]:
        config: dict[str, Any] = {
            "default_host": "127.0.0.1",
            "head_server": {"host": "127.0.0.1", "port": free_ports(1)[0]},
        }
        for server in chosen:
            settings = {"entrypoint": "app.py", "host": "127.0.0.1", "port": ports[server.name], **server.settings}
            config[server.name] = {server.kind: {server.implementation: settings}}
        script = str(Path(__file__).with_name("gym_config.py"))
        done = subprocess.run(
            [str(gym_python()), script],
            input=json.dumps(config).encode(),
            env=self._environment(),
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise refuse(Reason.INTERNAL, f"NeMo Gym cannot read the configuration: {done.stderr.decode()[-500:]}")
        answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def _start_server(self, server: Server, resolved: Mapping[str, str]) -> None:
        folder = Path(resolved["parent_dir"]) / server.kind / server.implementation
        # The bootstrap folder comes first: Python loads the first sitecustomize that it finds.
        paths = [*self.python_path, str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = self._environment(
            NEMO_GYM_CONFIG_DICT=resolved["config"],
            NEMO_GYM_CONFIG_PATH=server.name,
            PYTHONPATH=os.pathsep.join(path for path in paths if path),
        )
        with self._log(server.name) as log:
            self._processes[server.name] = subprocess.Popen(
                [str(gym_python()), "app.py"],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_S
        waiting = dict(self.urls)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while waiting:
                for name, url in list(waiting.items()):
                    if self._processes[name].poll() is not None:
                        raise self._died(name)
                    try:
                        async with session.get(url):
                            del waiting[name]
                    except (aiohttp.ClientError, TimeoutError):
                        continue
                if time.monotonic() > until:
                    raise refuse(
                        Reason.UNAVAILABLE,
                        f"not up after {START_S:.0f} s: {', '.join(waiting)}; logs are in {self.logs}",
                    )
                await asyncio.sleep(0.1)

    def _died(self, name: str) -> Exception:
        path = self.logs / f"{name}.log"
        return refuse(
            Reason.UNAVAILABLE,
            f"{name} ended while it was starting: {path.read_text(errors='replace')[-600:]}",
            next_step=f"Read {path}.",
        )
