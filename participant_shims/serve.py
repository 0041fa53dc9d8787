"""`safepoint serve -- COMMAND`: run a server, or ng_run with all of its servers, with the gate loaded into it.

The rule: the command is not changed, only its environment, and nothing of it is left when we end. It runs in a process
group of its own, since Gym and engines leave orphans when only their first process is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from coordinator.wire.names import is_store
from participant_shims.groups import adopted_orphans, end_group, signal_group

GRACE_S: Final = 10.0  # between SIGTERM and SIGKILL; Gym itself gives its servers 1 s
BOOTSTRAP: Final = Path(__file__).resolve().parent / "gate" / "bootstrap"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `serve` was given. An empty value sets nothing: what the environment says stands.

    `name` and `role` are for one server: its instance name and "policy" or "auxiliary".
    """

    name: str = ""
    role: str = ""
    coordinator: str = ""
    root: str = ""
    run_dir: str = ""
    job_id: str = ""
    bind: str = ""
    token_file: str = ""
    tls_dir: str = ""
    state: str = ""
    gym_ray: str = ""
    actor: str = ""
    verbose: bool = False


def serve_environment(options: ServeOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set for the command, apart from those that are set already to the same.

    Raises ValueError for a role without the name of the server that has it, and for one that does not exist: its server would
    start, and be refused by every coordinator.
    """
    name = options.name or environ.get("NEMO_GYM_CONFIG_PATH", "")
    if options.role and not name:
        raise ValueError("--role needs --name: which server has it?")
    roles = environ.get("SAFEPOINT_ROLES", "")
    if options.role:
        others = [pair for pair in roles.split(",") if pair and pair.partition("=")[0].strip() != name]
        roles = ",".join([*others, f"{name}={options.role}"])
    _check_roles(roles)
    path = os.pathsep.join([str(BOOTSTRAP), *_import_path(), *filter(None, [environ.get("PYTHONPATH", "")])])
    wanted = {
        "PYTHONPATH": path,
        "SAFEPOINT_ROLES": roles,
        "SAFEPOINT_COORDINATOR": options.coordinator,
        # Servers and shims have working directories of their own: what is relative here, also in the environment, is ours.
        "SAFEPOINT_ROOT": _absolute(options.root or environ.get("SAFEPOINT_ROOT", "")),
        "SAFEPOINT_RUN_DIR": _absolute(options.run_dir or environ.get("SAFEPOINT_RUN_DIR", "")),
        "SAFEPOINT_JOB": options.job_id,
        "SAFEPOINT_BIND": options.bind,
        "SAFEPOINT_TOKEN_FILE": _absolute(options.token_file or environ.get("SAFEPOINT_TOKEN_FILE", "")),
        "SAFEPOINT_TLS_DIR": _absolute(options.tls_dir or environ.get("SAFEPOINT_TLS_DIR", "")),
        "SAFEPOINT_STATE": options.state,
        "SAFEPOINT_GYM_RAY": options.gym_ray,
        "SAFEPOINT_ACTOR": options.actor,
    }
    return {key: value for key, value in wanted.items() if value and environ.get(key) != value}


def _absolute(path: str) -> str:
    if is_store(path):
        return path
    return str(Path(path).expanduser().absolute()) if path else ""


def _import_path() -> list[str]:
    """Where safepoint lies when it is not installed in the command's environment: a checkout, run in place."""
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "gen" / "safepoint").is_dir():
        return [str(checkout), str(checkout / "gen")]
    return []


def _check_roles(roles: str) -> None:
    """Raise ValueError for what is no `name=role`. Which servers there will be is not known here."""
    from participant_shims.gate.describe import ROLE_WORDS

    for pair in filter(None, (pair.strip() for pair in roles.split(","))):
        name, equals, role = pair.partition("=")
        if not equals or role.strip().lower() not in ROLE_WORDS:
            what = f"{role.strip()!r} is no role" if equals else f"{name!r} has no role"
            raise ValueError(f"{what} (--role, SAFEPOINT_ROLES); choose one of: {', '.join(ROLE_WORDS)}")


def run_serve(options: ServeOptions, argv: Sequence[str]) -> int:
    """Run `argv` and pass its exit code on (128 + N when signal N ended it). 2: bad use; 127: no such command."""
    if not argv:
        print(
            "safepoint serve: no command; write it after --, e.g. `safepoint serve -- python app.py`", file=sys.stderr
        )
        return 2
    try:
        added = serve_environment(options, os.environ)
    except ValueError as error:
        print(f"safepoint serve: {error}", file=sys.stderr)
        return 2
    if options.verbose:
        for key, value in sorted(added.items()):
            print(f"safepoint serve: {key}={value}", file=sys.stderr)
    with adopted_orphans():
        try:
            process = subprocess.Popen(list(argv), env={**os.environ, **added}, start_new_session=True)
        except OSError as error:
            print(f"safepoint serve: {argv[0]} can't be run: {error.strerror}", file=sys.stderr)
            return 127
        with _forwarded(process):
            try:
                code = process.wait()
            finally:
                end_group(process.pid)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _forwarded(process: subprocess.Popen[bytes]) -> Generator[None]:
    """Pass SIGTERM and SIGINT on to the group while the command runs; after GRACE_S seconds it is killed."""
    deadline: list[float] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if not deadline:
            deadline.append(time.monotonic() + GRACE_S)
        signal_group(process.pid, signal.Signals(number))
        signal.alarm(max(1, round(deadline[0] - time.monotonic())))

    def kill(_number: int, _frame: FrameType | None) -> None:
        signal_group(process.pid, signal.SIGKILL)

    handlers = {signal.SIGTERM: forward, signal.SIGINT: forward, signal.SIGALRM: kill}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
