"""Real Gym servers without the two and a half seconds of processor that each needs for importing ray, wandb and pandas.

A parent (`warm_parent`) has imported them and forks; what is Gym's and ours begins anew in every server. One parent for each
process that runs tests; it ends with it, and is ended before leftovers are looked for.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import IO, Any

from tests.conftest import gym_python


class Parent:
    """The process that forks. Raises OSError when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {
                k: v for k, v in os.environ.items() if not k.startswith(("SAFEPOINT_", "NEMO_GYM", "PYTHONPATH"))
            }
            # Threads do not survive a fork, and the pools of numpy would be made here.
            environment |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "disabled"}
            environment |= {k: v for k, v in os.environ.items() if k == "SAFEPOINT_TEST_RUN"}
            self._process = subprocess.Popen(
                [str(gym_python()), str(Path(__file__).with_name("warm_parent.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def ask(self, request: dict[str, Any], *files: int) -> Any:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], list(files))
            answer = self._control.recv(1 << 16)
        if not answer:
            raise OSError("the parent of the Gym servers has ended")
        return json.loads(answer)

    def end(self) -> None:
        self._control.close()
        self._process.wait(30)


@functools.cache
def parent() -> Parent:
    """The one of this process."""
    return Parent()


def end() -> None:
    """End it, if it was needed."""
    if parent.cache_info().currsize:
        parent().end()
        parent.cache_clear()


class Server:
    """A forked server, or another program of Gym's Python, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        program: str,
        folder: Path,
        environment: dict[str, str],
        log: IO[bytes],
        *arguments: str,
        spares: int = 0,
    ) -> None:
        """`spares`: how many workers of it are forked too; those beyond are started by multiprocessing."""
        self.returncode: int | None = None
        start = {
            "program": program, "folder": str(folder), "environment": environment, "arguments": arguments, "spares": spares,
        }  # fmt: skip
        self.pid: int = parent().ask({"start": start}, log.fileno())

    def poll(self) -> int | None:
        """As of Popen."""
        if self.returncode is None:
            self.returncode = parent().ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As of Popen. Raises TimeoutError."""
        if self.returncode is None:
            file = os.pidfd_open(self.pid)  # it stays until `poll` has seen its end
            try:
                looking = select.poll()  # a process that runs tests may have more descriptors than select() takes
                looking.register(file, select.POLLIN)
                if not looking.poll(None if timeout is None else 1000 * timeout):
                    raise TimeoutError(f"{self.pid} has not ended within {timeout} s")
            finally:
                os.close(file)
        code = self.poll()
        assert code is not None
        return code

    def terminate(self) -> None:
        """As of Popen."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """As of Popen."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
