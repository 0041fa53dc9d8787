"""One life of a server: a directory of its own, closed to others, and names for its worker processes.

The rule kept here: a restarted server never meets the files of its former life. Its main process makes the directory,
workers find it through SAFEPOINT_LIFE. A life that ended in good order takes its directory with it; one that was killed
leaves it for people to look at, until the server's next life sweeps it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.lock_file import hold
from participant_shims.gate.process import lives, started

LIFE_VARIABLE: Final = "SAFEPOINT_LIFE"
# What a second job of one user on one machine needs, where both have a server of one name.
OTHER_JOB: Final = "give that job a SAFEPOINT_RUN_DIR of its own"
SOCKET: Final = "gate.sock"
CALLS: Final = "calls.db"
_RECORD: Final = "life.json"
_ENDED: Final = "ended"
_ENDING: Final = "ending"  # the same, when the server's process waits for its shim
_MAX_SOCKET_PATH: Final = 107  # bytes; the kernel's sun_path without its terminator


def run_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where lives are: SAFEPOINT_RUN_DIR, else below XDG_RUNTIME_DIR, else /tmp/safepoint-<uid>."""
    if given := environment.get("SAFEPOINT_RUN_DIR"):
        return Path(given)
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "safepoint"
    return Path(f"/tmp/safepoint-{os.getuid()}")


def create(server_name: str, kind: str, workers: int, parent: Path) -> Path:
    """Make the directory of a new life of this process, and sweep those of the server's former lives.

    Raises PERMISSION_DENIED when `parent` belongs to somebody else or is open to others, INVALID_ARGUMENT when its
    path is too long for a Unix socket; nothing is left behind.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(parent)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise refuse(
            Reason.PERMISSION_DENIED,
            f"{parent} does not belong to this user, or others may write to it.",
            next_step="Set SAFEPOINT_RUN_DIR to a directory of your own.",
        )
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", server_name)
    sweep(safe, parent)
    life = parent / f"{safe}-{secrets.token_hex(4)}"
    if len(os.fsencode(life / SOCKET)) > _MAX_SOCKET_PATH:
        raise refuse(
            Reason.INVALID_ARGUMENT,
            f"{life / SOCKET} is too long for a Unix socket.",
            next_step="Set SAFEPOINT_RUN_DIR to a shorter path.",
        )
    life.mkdir(mode=0o700)
    record = {
        "server_name": server_name, "kind": kind, "configured_workers": workers,
        "pid": os.getpid(), "started": started(os.getpid()),
    }  # fmt: skip
    (life / _RECORD).write_text(json.dumps(record) + "\n")
    return life


def server_process(life: Path) -> tuple[int, str] | None:
    """The pid of the server's main process and when it began; None when `life` has no such note."""
    try:
        record = json.loads((life / _RECORD).read_text())
        return int(record["pid"]), str(record["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def server_of(life: Path) -> tuple[str, int]:
    """The server's name and how many workers it was started with; empty and 1 when `life` has no such note."""
    try:
        record = json.loads((life / _RECORD).read_text())
        return str(record["server_name"]), int(record["configured_workers"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", 1


def sweep(safe_name: str, parent: Path) -> int:
    """Remove the directories of this server's lives whose process is gone; how many."""
    removed = 0
    for life in parent.glob(f"{safe_name}-????????"):
        try:
            record = json.loads((life / _RECORD).read_text())
            alive = lives(int(record["pid"]), str(record["started"]))
        except FileNotFoundError:
            continue  # being made, or not ours
        except (OSError, ValueError, KeyError, TypeError):
            alive = False
        if not alive:
            shutil.rmtree(life, ignore_errors=True)
            removed += 1
    return removed


def mark_ended(life: Path) -> None:
    """Note that the server of this life is ending in good order. Only its main process is heard; a lost note is harmless."""
    try:
        if json.loads((life / _RECORD).read_text())["pid"] == os.getpid():
            (life / _ENDED).touch(mode=0o600)
    except (OSError, ValueError, KeyError, TypeError):
        pass


def is_ending(life: Path) -> bool:
    """Whether the server of this life has noted that it ends, although its process may still be there."""
    return (life / _ENDED).exists() or (life / _ENDING).exists()


def unmark_ended(life: Path) -> None:
    """Take that back: the server's process removes the directory itself, and its shim must not wait for it."""
    try:
        (life / _ENDING).touch(mode=0o600)
        (life / _ENDED).unlink(missing_ok=True)
    except OSError:
        pass


def bury(life: Path, within_s: float = 2.0) -> bool:
    """Remove the directory of a life that ended in good order; whether it did.

    For the shim, which outlives its server by a moment: a server that SIGTERM ends runs nothing of its own at the end,
    since uvicorn delivers the signal again when it is done. Waits up to `within_s` seconds for a process that has said
    that it ends, and leaves everything alone when it lives on, or never said so.
    """
    until = time.monotonic() + within_s
    try:
        record = json.loads((life / _RECORD).read_text())
        if not (life / _ENDED).exists():
            return False
        while lives(int(record["pid"]), str(record["started"])):
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    shutil.rmtree(life, ignore_errors=True)
    return True


def claim_worker(life: Path, configured: int) -> tuple[str, int]:
    """A name for this worker process, "worker-<n>", and the descriptor that keeps it until the process ends.

    A worker that replaces a dead one takes its place. Raises WORKERS_MISSING when there are more than configured,
    STORAGE_*.
    """
    for n in range(max(1, configured)):
        if (held := hold(life / f"worker-{n}.lock")) is not None:
            return f"worker-{n}", held
    raise refuse(Reason.WORKERS_MISSING, f"{life.name} has {configured} workers already.")
