"""Real NeMo Gym servers for tests: started by hand on free ports, with the gate loaded through PYTHONPATH.

One Fleet is one set of processes; `kill_all` is SIGKILL, `close` leaves nothing behind. The servers are the unmodified
ones of the installed package.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.demo.ports import free_ports
from participant_shims.gate import bootstrap_path
from tests.conftest import gym_python
from tests.gym.warm import Server

TYPES = ("resources_servers", "responses_api_agents", "responses_api_models")
OWN = Path(__file__).resolve().parent / "servers"  # applications of ours, where the installed ones lack something
READY_S = 90.0


def counter_config(
    openai_url: str, *, model_workers: int = 1, agent_workers: int = 1, counter_workers: int = 1
) -> dict[str, Any]:
    """A stateful counter, its agent and a policy model. Ports are chosen once, as a real deployment's are."""
    head, model, resources, agent = free_ports(4)
    model_extra = {"num_workers": model_workers} if model_workers > 1 else {}
    agent_extra = {"num_workers": agent_workers} if agent_workers > 1 else {}
    counter_extra = {"num_workers": counter_workers} if counter_workers > 1 else {}
    return {
        "head_server": {"host": "127.0.0.1", "port": head},
        "default_host": "127.0.0.1",
        "policy_model": {
            "responses_api_models": {
                "vllm_model": {
                    "entrypoint": "app.py", "host": "127.0.0.1", "port": model, "base_url": openai_url,
                    "api_key": "dummy", "model": "fake", "return_token_id_information": True,
                    "uses_reasoning_parser": True, **model_extra,
                }
            }
        },
        "counter": {
            "resources_servers": {
                "session_state_workers" if counter_extra else "example_session_state_mgmt": {
                    "entrypoint": "app.py", "domain": "agent", "host": "127.0.0.1", "port": resources, **counter_extra,
                }
            }
        },
        "counter_agent": {
            "responses_api_agents": {
                "simple_agent_workers" if agent_extra else "simple_agent": {
                    "entrypoint": "app.py", "host": "127.0.0.1", "port": agent,
                    "resources_server": {"type": "resources_servers", "name": "counter"},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"}, **agent_extra,
                }
            }
        },
        "config_paths": [], "use_absolute_ip": False, "port_range_low": 10001, "port_range_high": 20000,
        "disallowed_ports": [], "head_server_deps": [], "python_version": "3.12.1", "skip_venv_if_present": False,
        "dry_run": False,
    }  # fmt: skip


def with_second_counter(config: dict[str, Any]) -> dict[str, Any]:
    """The same with another counter, `other`, and an agent of its own beside the first."""
    resources, agent = free_ports(2)
    out: dict[str, Any] = json.loads(json.dumps(config))
    for name, like, port in (("other", "counter", resources), ("other_agent", "counter_agent", agent)):
        out[name] = json.loads(json.dumps(out[like]))
        next(iter(next(iter(out[name].values())).values()))["port"] = port
    out["other_agent"]["responses_api_agents"]["simple_agent"]["resources_server"]["name"] = "other"
    return out


@dataclass
class Fleet:
    """Servers of one configuration. `directory` gets logs and lives."""

    config: dict[str, Any]
    directory: Path
    gated: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes] | Server] = field(default_factory=dict)
    # Servers behind a proxy: the port that they bind instead of the one of the configuration. They have no gate.
    proxied: dict[str, int] = field(default_factory=dict)
    hooks: Path | None = None  # a folder with a sitecustomize, loaded instead of the gate
    warm: bool = True  # forked from a process that has imported what is neither Gym's nor ours

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def names(self) -> list[str]:
        return [k for k, v in self.config.items() if isinstance(v, dict) and any(t in v for t in TYPES)]

    def _section(self, name: str) -> tuple[str, str, dict[str, Any]]:
        kind = next(t for t in TYPES if t in self.config[name])
        implementation, values = next(iter(self.config[name][kind].items()))
        return kind, implementation, values

    def url(self, name: str) -> str:
        values = self._section(name)[2]
        return f"http://{values['host']}:{values['port']}"

    def start(self, *names: str) -> None:
        """Start those that do not run and wait until they answer."""
        chosen = names or tuple(n for n in self.names() if n not in self.processes)
        for name in chosen:
            self._spawn(name)
        for name in chosen:
            self._wait(name)

    def _spawn(self, name: str) -> None:
        kind, implementation, values = self._section(name)
        site = next((gym_python().parent.parent / "lib").glob("python3*")) / "site-packages"
        source = OWN if (OWN / kind / implementation).is_dir() else site
        folder = source / kind / implementation
        path = [str(folder), str(source), str(site)]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SAFEPOINT_", "NEMO_GYM"))}
        env |= {
            "NEMO_GYM_CONFIG_DICT": json.dumps(self.config), "NEMO_GYM_CONFIG_PATH": name,
            "SAFEPOINT_RUN_DIR": str(self.run_dir), "SAFEPOINT_ROLES": "policy_model=policy",
            "SAFEPOINT_SHIM": "manual", "SAFEPOINT_GYM_RAY": "off", "SAFEPOINT_DEBUG": "1",
            "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "DO_NOT_TRACK": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.directory),  # a killed server does not tidy up
        } | self.environment  # fmt: skip
        # Without the gate the hook that keeps Ray away is still needed: the same bootstrap, shut off by a kind it
        # does not find would be another program. So ungated fleets get a folder of their own.
        gated = self.gated and name not in self.proxied
        path.insert(0, bootstrap_path() if gated else str(self.hooks or Path(__file__).parent / "no_ray"))
        if name in self.proxied:
            own = json.loads(env["NEMO_GYM_CONFIG_DICT"])
            own[name][kind][implementation]["port"] = self.proxied[name]
            env["NEMO_GYM_CONFIG_DICT"] = json.dumps(own)
        tree = Path(__file__).resolve().parents[2]  # this one, whichever is installed there
        env["PYTHONPATH"] = os.pathsep.join([*path, str(tree), str(tree / "gen")])
        log = (self.directory / f"{name}.log").open("ab")
        with log:
            if self.warm:
                workers = values.get("num_workers", 0)
                self.processes[name] = Server(values["entrypoint"], folder, env, log, spares=workers and workers + 1)
                return
            self.processes[name] = subprocess.Popen(
                [str(gym_python()), values["entrypoint"]], cwd=folder, env=env, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _wait(self, name: str) -> None:
        url = f"http://127.0.0.1:{self.proxied[name]}" if name in self.proxied else self.url(name)
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.processes[name].poll() is not None:
                raise AssertionError(f"{name} ended with {self.processes[name].returncode}:\n{self.log(name)}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"{name} does not answer:\n{self.log(name)}")

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")[-4000:]

    def life(self, name: str) -> Path:
        """The directory of the server's present life."""
        pid = self.processes[name].pid
        for life in self.run_dir.glob(f"*{name}-????????"):
            if json.loads((life / "life.json").read_text())["pid"] == pid:
                return life
        raise AssertionError(f"{name} has no life:\n{self.log(name)}")

    def kill(self, *names: str) -> None:
        """SIGKILL to the whole group of each."""
        for name in names or tuple(self.processes):
            process = self.processes.pop(name)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def terminate(self, *names: str) -> None:
        """SIGTERM to the first process of each, and wait until it has ended."""
        for name in names:
            process = self.processes.pop(name)
            process.terminate()
            process.wait(20)

    def close(self) -> None:
        self.kill()


def row(i: int, turns: int = 3, *, delay_ms: int = 0, start: int = 3, **extra: Any) -> dict[str, Any]:
    """One row for the counter agent: add numbers, then read the counter."""
    adds = [i + j + 1 for j in range(turns)]
    text = " then ".join(f"add {a}" for a in adds) + " then get the count" + (f" delay={delay_ms}" if delay_ms else "")
    return {
        "responses_create_params": {"input": [{"role": "user", "content": text}], "tools": TOOLS},
        "initial_count": start, "expected_count": start + sum(adds), "_ng_task_index": i, "_ng_rollout_index": 0,
        "agent_ref": {"type": "responses_api_agents", "name": "counter_agent"}, **extra,
    }  # fmt: skip


TOOLS: list[dict[str, Any]] = [
    {
        "name": "increment_counter", "type": "function", "description": "", "strict": True,
        "parameters": {
            "type": "object", "properties": {"count": {"type": "integer", "description": ""}},
            "required": ["count"], "additionalProperties": False,
        },
    },
    {
        "name": "get_counter_value", "type": "function", "description": "", "strict": True,
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    },
]  # fmt: skip
