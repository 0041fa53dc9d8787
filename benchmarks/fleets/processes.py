"""Worker processes that answer lines of JSON: started, asked, measured, ended."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

REPOSITORY: Final = Path(__file__).resolve().parents[2]
START_WITHIN_S: Final = 300.0
ANSWER_WITHIN_S: Final = 180.0
END_WITHIN_S: Final = 10.0


class Worker:
    """A process of ours. It prints one line of JSON when it is ready, and one for each line that it is sent."""

    def __init__(self, module: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        raise_descriptor_limit()
        path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "gen")))
        self.module = module
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        self.pid = self._process.pid
        self._seen = psutil.Process(self.pid)

    def ready(self) -> dict[str, Any]:
        """Its first line. Raises RuntimeError with the end of its log when it does not come."""
        return self._line(START_WITHIN_S)

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a line, wait for its answer. Raises RuntimeError when it does not come."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        return self._line(ANSWER_WITHIN_S)

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used, user and system."""
        times = self._seen.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _line(self, within_s: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        until = time.monotonic() + within_s
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([out], [], [], max(0.0, until - time.monotonic()))
            got = os.read(out.fileno(), 1 << 20) if readable else b""
            if not got:
                end = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.module} did not answer (exit code {self._process.poll()}).\n{end}")
            line += got
        loaded: dict[str, Any] = json.loads(line)
        return loaded


def raise_descriptor_limit() -> None:
    """Let this process and its children have as many descriptors as the machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
