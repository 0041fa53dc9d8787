"""The contenders: one real Gym server each, on a port of its own, differing in nothing but what is loaded into it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.fleets.fleets import scratch
from benchmarks.fleets.processes import REPOSITORY, Worker
from benchmarks.gate.load import Next, request
from coordinator.demo.ports import free_ports
from participant_shims.identity import CallIdentity
from tests.gym.fleet import TOOLS, Fleet, counter_config

CHEAPEST: Final = REPOSITORY / "benchmarks" / "gate" / "cheapest"
CHEAPEST_NAME: Final = "cheapest middleware"
ALL_OFF: Final = "gate, all off"
ALL_ON: Final = "gate, all on"
# Nobody to log to, to count for or to trace for; and everything that can be switched on in a gated server.
_OFF: Final = {
    "SAFEPOINT_SHIM": "manual",
    "SAFEPOINT_DEBUG": "",
    "SAFEPOINT_TRACES": "",
    "SAFEPOINT_LOG_FORMAT": "text",
}
_ON: Final = {
    "SAFEPOINT_SHIM": "spawn",
    "SAFEPOINT_DEBUG": "1",
    "SAFEPOINT_TRACES": "1",
    "SAFEPOINT_LOG_FORMAT": "json",
}
_TRACED: Final = {"traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01"}


class Server:
    """A contender: where it listens, the next request for it, and the server's process (not its shim's, nor a proxy's)."""

    def __init__(self, port: int, make: Callable[[], Next], pid: int) -> None:
        self.port, self.make = port, make
        self._process = psutil.Process(pid)

    def cpu_s(self) -> float:
        """Seconds of CPU that the server has used."""
        times = self._process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def contenders() -> Generator[tuple[dict[str, Server], dict[str, Server]]]:
    """Of two kinds, all started at once.

    `example_session_state_mgmt`, asked to add to a counter: without identity, and as a gated agent asks it.
    `simple_agent`, asked for whole rollouts of five model calls and four tool calls; model and tools are canned.
    """
    with ExitStack() as stack, scratch("gate") as root:
        counters = {
            each: _spawn(stack, root, "counter", each) for each in ("bare", CHEAPEST_NAME, ALL_OFF, "gate", ALL_ON)
        }
        agents = {each: _spawn(stack, root, "counter_agent", each) for each in ("bare", "gate and call log")}
        for fleet in (*counters.values(), *agents.values()):
            (name,) = fleet.processes
            fleet._wait(name)
        yield _counters(stack, root, counters), _agents(agents)


def _counters(stack: ExitStack, root: Path, fleets: dict[str, Fleet]) -> dict[str, Server]:
    out: dict[str, Server] = {}
    for contender, fleet in fleets.items():
        port, pid = _port(fleet, "counter"), fleet.processes["counter"].pid
        out[contender] = Server(port, _anonymous(port, _TRACED if contender == ALL_ON else None), pid)
        if contender == "gate":
            out["gate, calls remembered"] = Server(port, _identified(port), pid)
        if contender == "bare":
            through = _proxy(stack, root, port)
            out["behind the proxy"] = Server(through, _anonymous(through), pid)
    return out


def _agents(fleets: dict[str, Fleet]) -> dict[str, Server]:
    out: dict[str, Server] = {}
    for contender, fleet in fleets.items():
        port, pid = _port(fleet, "counter_agent"), fleet.processes["counter_agent"].pid
        out[contender] = Server(port, _rollouts(port), pid)
    return out


def _spawn(stack: ExitStack, root: Path, name: str, contender: str) -> Fleet:
    folder = root / f"{name}-{contender.replace(', ', '-').replace(' ', '-')}"
    folder.mkdir()
    fleet = Fleet(counter_config("http://127.0.0.1:9/v1"), folder, gated=contender.startswith("gate"), warm=False)
    fleet.environment |= (
        _ON if contender == ALL_ON else _OFF if contender == ALL_OFF else _OFF | {"SAFEPOINT_SHIM": "spawn"}
    )
    if contender == CHEAPEST_NAME:
        fleet.hooks = CHEAPEST
    stack.callback(fleet.close)
    if name == "counter_agent":
        ports = [str(_port(fleet, each)) for each in ("policy_model", "counter")]
        stack.enter_context(Worker("benchmarks.gate.neighbours", *ports, log=folder / "neighbours.log")).ready()
    fleet._spawn(name)
    return fleet


def _port(fleet: Fleet, name: str) -> int:
    return int(fleet.url(name).rpartition(":")[2])


def _proxy(stack: ExitStack, root: Path, upstream: int) -> int:
    (port,) = free_ports(1)
    arguments = ["shim", "--proxy", f"127.0.0.1:{port}=127.0.0.1:{upstream}", "--name", "counter", "--role", "resources",
                 "--checkpoint-mode", "stateless", "--life", str(root / "proxy"), "--bind", "unix"]  # fmt: skip
    stack.enter_context(Worker("participant_shims.cli", *arguments, log=root / "proxy.log")).ready()
    return port


def _anonymous(port: int, headers: dict[str, str] | None = None) -> Callable[[], Next]:
    made = request(port, "/increment_counter", b'{"count": 1}', headers)
    return lambda: (made, None)


def _identified(port: int) -> Callable[[], Next]:
    """As an agent asks with 16 rollouts: each call is new, and says that the one before it was recorded."""
    numbers = itertools.count(16)

    def make() -> Next:
        number = next(numbers)
        identity = CallIdentity(f"r-{number % 16}", 0, f"0.{number}")
        headers = identity.headers([f"0.{number - 16}"])
        return request(port, "/increment_counter", b'{"count": 1}', headers), None

    return make


def _rollouts(port: int) -> Callable[[], Next]:
    numbers = itertools.count()

    def make() -> Next:
        row: dict[str, Any] = {
            "responses_create_params": {"input": [{"role": "user", "content": "add 1"}], "tools": TOOLS},
            "initial_count": 0, "expected_count": 3, "_ng_rollout_id": f"r-{next(numbers)}",
            "agent_ref": {"type": "responses_api_agents", "name": "counter_agent"},
        }  # fmt: skip
        return request(port, "/run", json.dumps(row).encode()), None

    return make
