"""Run by Gym's Python: imports what Gym servers import from others, then becomes one of them, in a fork, at each request.

The rule: nothing of nemo_gym, uvicorn or Safepoint is imported here, so what is under test begins in a server as it does when
Python starts: sitecustomize, the hooks, the application. Only what takes most of a start is there already, unchanged.

Workers of a server that has several are forked likewise, from a server in which nothing of it has been imported yet: spares,
which take the place of the processes that multiprocessing would start (`spawnv_passfds`), children of that server as those.

A request is one JSON message on the socket whose number is the argument: {"start": ..} comes with the file of the log and is
answered with the pid, {"poll": pid} with how it ended. A process that has ended is kept until it was asked for, as by its parent.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import multiprocessing.util
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
            sys.exit()  # and not os._exit: wandb has made folders, which it removes at its end
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
    take_workers_from([spare(path) for _ in range(start["spares"])])
    program = os.path.join(start["folder"], start["program"])
    sys.argv[:] = [start["program"], *start["arguments"]]
    begin(start["folder"], start["environment"], path)
    return program


def begin(folder: str, environment: dict[str, str], path: list[str]) -> None:
    """What Python does before it runs a program of that folder."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it was looked up in the environment of the parent
    sys.path[:] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    importlib.invalidate_caches()
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        pass


def spare(path: list[str]) -> tuple[int, socket.socket]:
    """A process that waits to be a worker of this one, and ends with it; and the socket on which it is told."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    message, files, _, _ = socket.recv_fds(theirs, 1 << 20, 64)
    if not message:
        os._exit(0)
    request = json.loads(message)
    # The command line names files by their numbers. What is in the way goes first, then each takes its place.
    away = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["numbers"]) + 1) for file in files]
    theirs.close()
    for file in files:
        os.close(file)
    for number, file in zip(request["numbers"], away, strict=True):
        os.dup2(file, number)
        os.close(file)
    begin(request["folder"], request["environment"], path)
    sys.argv[:] = ["-c", *request["arguments"]]
    exec(request["code"], {"__name__": "__main__"})
    os._exit(0)  # not reached: `spawn_main` exits


def take_workers_from(spares: list[tuple[int, socket.socket]]) -> None:
    """Workers that multiprocessing starts are spares, while there are any; the rest is started as always."""
    as_always = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

    def spawn(path: bytes, arguments: list[str], files: list[int]) -> int:
        place = arguments.index("-c") if "-c" in arguments else -1
        if not spares or "spawn_main" not in arguments[place + 1]:
            started: int = as_always(path, arguments, files)
            return started
        pid, control = spares.pop()
        numbers = sorted({int(file) for file in files})
        request = {
            "code": arguments[place + 1], "arguments": arguments[place + 2 :], "numbers": numbers,
            "folder": os.getcwd(), "environment": dict(os.environ),
        }  # fmt: skip
        with control:
            socket.send_fds(control, [json.dumps(request).encode()], numbers)
        return pid

    if spares:
        multiprocessing.util.spawnv_passfds = spawn  # type: ignore[attr-defined]


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
