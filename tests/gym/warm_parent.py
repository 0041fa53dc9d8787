"""Run by Gym's Python: imports what Gym servers import from others, then becomes one of them, in a fork, at each request.

The rule: nothing of nemo_gym, uvicorn or Safepoint is imported here, so what is under test begins in a server as it does when
Python starts: sitecustomize, the hooks, the application. Only what takes most of a start is there already, unchanged.

A request is one JSON message on the socket whose number is the argument: {"start": ..} comes with the file of the log and is
answered with the pid, {"poll": pid} with how it ended. A process that has ended is kept until it was asked for, as by its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
import threading
import warnings
from types import ModuleType
from typing import Any

IMPORTED = ("pandas", "ray", "wandb", "wandb.util", "openai", "fastapi", "aiohttp", "omegaconf")
STARTED_ANEW = (
    "nemo_gym",
    "uvicorn",
    "coordinator",
    "participant_shims",
    "safepoint",
    "sitecustomize",
    "usercustomize",
)


def serve(control: socket.socket) -> str:
    """Answer until the socket ends; then exit. Returns in a server alone: the path of its program."""
    path = list(sys.path)[1:]  # without this file's folder
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            control.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            return become(request["start"], files[0], path)
        os.close(files[0])
        control.send(json.dumps(pid).encode())


def become(start: dict[str, Any], log: int, path: list[str]) -> str:
    """Be what `python program` would be in that folder and environment."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(start["folder"])
    os.environ.clear()
    os.environ.update(start["environment"])
    tempfile.tempdir = None  # it was looked up in the environment of the parent
    program = os.path.join(start["folder"], start["program"])
    sys.argv[:] = [start["program"], *start["arguments"]]
    sys.path[:] = [start["folder"], *filter(None, start["environment"].get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        pass
    return program


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in STARTED_ANEW]:
        del sys.modules[name]
    assert threading.active_count() == 1, threading.enumerate()
    # What Python warns of is a thread of pyarrow's jemalloc, which looks after forks itself.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules["__main__"] = module = ModuleType("__main__")
    module.__file__ = program
    with open(program, encoding="utf-8") as file:
        code = compile(file.read(), program, "exec")
    exec(code, vars(module))


if __name__ == "__main__":
    main()
