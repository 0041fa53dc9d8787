"""What the demo's model server talks to: the random network of `policy`, or a real vLLM.

The rule it keeps: an engine is started by the fleet's `launch`, so that it carries the fleet's mark and is killed with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from coordinator.demo.engine_log import LOG_VARIABLE
from coordinator.wire.errors import Reason, refuse

REPOSITORY: Final = Path(__file__).resolve().parents[2]
VLLM_PYTHON: Final = "SAFEPOINT_VLLM_PYTHON"
POLICY: Final = "policy"
MODEL_NAME: Final = "demo-policy"
CONTEXT: Final = 8192
SLOTS: Final = 16
# A minute and a half on two cores that do something else as well; minutes where much else runs.
START_S: Final = 900.0


class Launch(Protocol):
    """Starts a command with the fleet's mark; its output goes to the log of `name`, standard output only when not `says`."""

    def __call__(
        self, name: str, command: Sequence[str], *, says: bool = False, more: Mapping[str, str] = ...
    ) -> subprocess.Popen[bytes]: ...


class Engine(Protocol):
    """What answers the model server. `participants`: how many shims of its own it brings."""

    @property
    def participants(self) -> int: ...

    @property
    def agent_settings(self) -> Mapping[str, Any]:
        """What the agents have to be told because of it."""
        ...

    def start(
        self, launch: Launch, died: Callable[[str], Exception], free_ports: Callable[[int], list[int]], log: Path | None
    ) -> str:
        """Start it; its base URL, ending with /v1, once it answers. Blocks. Raises UNAVAILABLE. `log`: of generations."""
        ...


@dataclass(frozen=True, slots=True)
class RandomNetwork:
    """The network of `policy`. `token_ms`: how long a sampled token takes."""

    seed: int
    token_ms: float
    participants: int = 0
    agent_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def start(
        self, launch: Launch, died: Callable[[str], Exception], free_ports: Callable[[int], list[int]], log: Path | None
    ) -> str:
        """As Engine says."""
        command = [sys.executable, "-m", "coordinator.demo.policy", "--seed", str(self.seed)]
        command += ["--token-ms", str(self.token_ms)]
        command += ["--log", str(log)] if log is not None else []
        process = launch(POLICY, command, says=True)
        assert process.stdout is not None
        # Ends when the process does: it says where it listens, or its pipe closes.
        with process.stdout as said:
            line = said.readline()
        if not line:
            raise died(POLICY)
        return str(json.loads(line)["base_url"])


def vllm_python() -> Path:
    """The interpreter of vLLM's environment. Raises UNAVAILABLE when it is not there."""
    path = Path(os.environ.get(VLLM_PYTHON) or REPOSITORY / ".venv-vllm" / "bin" / "python")
    if not path.exists():
        raise refuse(Reason.UNAVAILABLE, f"vLLM's environment is not there: {path}", next_step="Run `make setup-vllm`.")
    return path


def tiny_model(folder: Path, *, layers: int, width: int) -> Path:
    """The folder of a small model with random weights; made when it is not there, always the same."""
    if not (folder / "model.safetensors").exists():
        script = str(Path(__file__).with_name("tiny_model.py"))
        command = [str(vllm_python()), script, str(folder), "--layers", str(layers), "--width", str(width)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise refuse(Reason.INTERNAL, f"the model could not be made: {done.stderr[-500:]}")
    return folder


@dataclass(frozen=True, slots=True)
class Vllm:
    """A real vLLM on CPUs. `covered`: with its shim before it, and a log; else nothing of Safepoint is near it.

    `max_steps`: at how many model calls an agent stops; a model that has to call a tool never ends by itself.
    """

    model: Path
    covered: bool
    max_steps: int

    @property
    def participants(self) -> int:
        """Its shim."""
        return int(self.covered)

    @property
    def agent_settings(self) -> Mapping[str, Any]:
        """As Engine says."""
        return {"max_steps": self.max_steps}

    def start(
        self, launch: Launch, died: Callable[[str], Exception], free_ports: Callable[[int], list[int]], log: Path | None
    ) -> str:
        """As Engine says."""
        port, listen = free_ports(2)
        python = vllm_python()
        command = [
            str(python.parent / "vllm"), "serve", str(self.model), "--host", "127.0.0.1", "--port", str(port),
            "--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT),
            "--max-num-seqs", str(SLOTS), "--enable-scale-out", "--enable-auto-tool-choice",
            "--tool-call-parser", "hermes",
            # Random weights would fill a list of calls with blanks.
            "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
        ]  # fmt: skip
        more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "TRANSFORMERS_OFFLINE": "1"}
        # Python finds the package by its folder: a middleware is named, and imported by vLLM.
        more["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "gen")])
        if self.covered:
            command += ["--middleware", "coordinator.demo.engine_log.EngineLog"]
            more |= {LOG_VARIABLE: str(log)} if log is not None else {}
            serve = [str(python), "-m", "participant_shims.cli", "serve"]
            command = [*serve, "--name", "engine", "--listen", f"127.0.0.1:{listen}", "--", *command]
        process = launch(POLICY, command, more=more)
        url = f"http://127.0.0.1:{listen if self.covered else port}"
        until = time.monotonic() + START_S
        while not _answers(f"{url}/health"):
            if process.poll() is not None:
                raise died(POLICY)
            if time.monotonic() > until:
                raise refuse(Reason.UNAVAILABLE, f"vLLM is not up after {START_S:.0f} s")
            time.sleep(0.3)
        return f"{url}/v1"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
