"""What the proxy before an engine costs: CPU of the shim's own process, a request and a token.

    python -m tests.vllm.bench_proxy [--profile FILE]      prints JSON

Engine, shim and caller are three processes; the engine answers from canned bytes, so that nothing but the proxy is seen.
In turns with it, the same is asked through a pump that passes bytes on unread (`bare_pump`): what any proxy costs on
asyncio, and how much of the figures is the machine's.
CPU is what the kernel counted of the shim's threads, in nanoseconds. It is measured in short bursts, and the one of them
that cost least is told: others on the machine make each instruction slower, and on some bursts they are away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from coordinator.demo.ports import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
CALLERS = 8
ASKED = 40  # requests of each caller in a burst
TOKENS = 500  # of each stream in a burst
PACED = 50  # tokens of each stream, one second
ASKS: dict[str, dict[str, Any]] = {
    # As NeMo Gym's model server asks: whole answers.
    "whole, 1 token": {"max_tokens": 1, "logprobs": 0, "return_token_ids": True},
    "whole, 1 token, bare": {"max_tokens": 1},
    "streamed, 1 token": {"max_tokens": 1, "logprobs": 0, "return_token_ids": True, "stream": True},
}


Fronts = dict[str, tuple[int, psutil.Process]]  # port and process of what stands before the engine


@contextlib.contextmanager
def fronts(folder: Path, pace: float = 0.0, profile: str = "", steps: bool = False) -> Iterator[Fronts]:
    """The shim and a bare pump, before one engine; with `steps` also the engine itself."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}"}
    run: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "cwd": REPOSITORY,
        "env": environment,
    }
    engine = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.canned_engine", str(pace), *(["steps"] if steps else [])], **run
    )
    assert engine.stdout is not None
    upstream, port = int(engine.stdout.readline()), free_ports(1)[0]
    command = [sys.executable, *(["-m", "cProfile", "-o", profile] if profile else []), "-m", "participant_shims.cli"]
    command += ["shim", "--vllm", f"127.0.0.1:{port}=127.0.0.1:{upstream}", "--name", "engine", "--life", str(folder)]
    process = subprocess.Popen([*command, "--bind", "unix"], **run)
    pump = subprocess.Popen([sys.executable, "-m", "tests.vllm.bare_pump", f"127.0.0.1:{upstream}"], **run)
    try:
        assert process.stdout is not None
        assert pump.stdout is not None
        process.stdout.readline()
        pumps_at = int(pump.stdout.readline())
        time.sleep(1.5)  # it gets to know its engine
        found = {"": (port, psutil.Process(process.pid)), ", bare pump": (pumps_at, psutil.Process(pump.pid))}
        yield {**found, ", no proxy": (upstream, psutil.Process(engine.pid))} if steps else found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        for other in (pump, engine):
            other.kill()
            other.wait()


def message(port: int, ask: dict[str, Any]) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "Count on: 1 2 3", "temperature": 0, **ask}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer none\r\naccept: */*\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (port, len(body), body)
    )


class Caller(asyncio.Protocol):
    """Asks again and again on one connection."""

    def __init__(self, ask: bytes, count: int, done: asyncio.Future[None]) -> None:
        self.ask, self.left, self.done = ask, count, done
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.ask)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.buffer.endswith(b"0\r\n\r\n") or self._whole():
            assert b" 200 " in self.buffer[:16], self.buffer[:500]
            self.buffer = b""
            self.left -= 1
            if self.left:
                self.transport.write(self.ask)
            else:
                self.transport.close()
                self.done.set_result(None)

    def _whole(self) -> bool:
        head, _, body = self.buffer.partition(b"\r\n\r\n")
        at = head.find(b"content-length: ")
        return at >= 0 and len(body) == int(head[at + 16 :].split(b"\r\n", 1)[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionResetError("the proxy closed"))


async def ask(port: int, body: dict[str, Any], callers: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = []
    for _ in range(callers):
        done = loop.create_future()
        ends.append(done)
        await loop.create_connection(lambda done=done: Caller(message(port, body), count, done), "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*ends)


def used(process: psutil.Process) -> float:
    """CPU seconds of the process so far."""
    spent = 0
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            spent += int((thread / "schedstat").read_text().split()[0])
    return spent / 1e9


def burst(port: int, process: psutil.Process, body: dict[str, Any], callers: int, count: int) -> tuple[float, float]:
    """CPU seconds of the proxy and seconds that went by, of `count` requests of each caller."""
    before, begun = used(process), time.monotonic()
    asyncio.run(ask(port, body, callers, count))
    return used(process) - before, time.monotonic() - begun


def in_turns(
    found: Fronts, body: dict[str, Any], callers: int, count: int, times: int
) -> dict[str, tuple[float, float]]:
    """Of each front: CPU seconds and seconds of the cheapest of its bursts."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _ in range(times):
        for name, (port, process) in found.items():
            took[name].append(burst(port, process, body, callers, count))
    return {name: (min(cpu for cpu, _ in all_), min(seconds for _, seconds in all_)) for name, all_ in took.items()}


def bench(bursts: int = 50, profile: str = "") -> dict[str, float]:
    """The figures."""
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sp-") as folder,
        fronts(Path(folder) / "a", profile=profile) as before,
    ):
        for name, body in ASKS.items():
            in_turns(before, body, CALLERS, ASKED, 1)
            for front, (cpu, seconds) in in_turns(before, body, CALLERS, ASKED, bursts).items():
                found[f"ms CPU a request: {name}{front}"] = round(cpu / ASKED / CALLERS * 1e3, 4)
                if not front:
                    found[f"requests/s: {name}"] = round(ASKED * CALLERS / seconds)
        for name, more in (("as asked", {"logprobs": 0, "return_token_ids": True}), ("stripped", {})):
            body = {"max_tokens": TOKENS, "stream": True, **more}
            for front, (cpu, _) in in_turns(before, body, CALLERS, 1, bursts).items():
                found[f"us CPU a token, all at once: {name}{front}"] = round(cpu / TOKENS / CALLERS * 1e6, 2)
    if profile:
        return found
    with tempfile.TemporaryDirectory(prefix="sp-") as folder, fronts(Path(folder) / "b", 50.0) as before:
        body = {"max_tokens": PACED, "stream": True, "logprobs": 0, "return_token_ids": True}
        for front, (cpu, seconds) in in_turns(before, body, 16, 1, max(2, bursts // 5)).items():
            found[f"us CPU a token, 16 streams of 50 tokens/s{front}"] = round(cpu / PACED / 16 * 1e6, 2)
            found[f"share of a core, 16 streams of 50 tokens/s{front}"] = round(cpu / seconds, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bursts", type=int, default=50, help="of each kind, 320 requests or 4,000 tokens each")
    parser.add_argument("--profile", default="", help="write a profile of the shim's process to this file")
    arguments = parser.parse_args()
    print(json.dumps(bench(arguments.bursts, arguments.profile), indent=1))


if __name__ == "__main__":
    main()
