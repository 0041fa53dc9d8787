"""The shim beside a server: started by the server's main process, restarted when it dies, ended with it.

The rule kept here: the server never waits for its shim. It is started from a thread, its output goes to `shim.log` of
the life, and as long as it is away the gate stands open, or opens by its lease. Only why it takes no part is said in the
server's own log, where whoever misses the server looks first.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from participant_shims.gate.life import unmark_ended

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.2, 5.0)
_WENT_WELL_S: Final = (
    60.0  # a shim that lived so long did not fail at its start: the next one waits no longer than the first did
)
_END_S: Final = 2.0  # Gym itself gives a server no more than a second
BEFORE_VARIABLE: Final = (
    "SAFEPOINT_SHIM_BEFORE"  # what ended the shim before; it is there, maybe empty, for one that is watched
)
SAYS_VARIABLE: Final = "SAFEPOINT_SHIM_SAYS"  # a descriptor: each line written there is said in the server's log
ANNOUNCEMENT: Final = "shim.json"  # a shim that can be called has written who it is
_GATED: Final = ("NEMO_GYM_CONFIG_PATH", "NEMO_GYM_CONFIG_DICT", "IS_NEMO_GYM_FASTAPI_WORKER")


def command(life: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The shim's command line. SAFEPOINT_SHIM_PYTHON names another interpreter when the server's lacks grpcio."""
    python = environment.get("SAFEPOINT_SHIM_PYTHON") or sys.executable
    return [python, "-m", "participant_shims.cli", "shim", "--life", str(life)]


def shim_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The server's environment without what would make the shim a Gym server, and with Safepoint importable."""
    package_root = Path(__file__).resolve().parents[2]
    bootstrap = str(Path(__file__).resolve().parent / "bootstrap")
    kept = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and os.path.abspath(p) != bootstrap]
    kept.append(str(package_root))
    if (package_root / "gen" / "safepoint").is_dir():  # a checkout; an installed package has it beside
        kept.append(str(package_root / "gen"))
    out = {k: v for k, v in environment.items() if k not in _GATED}
    out["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(kept))
    return out


def backoff_s(tries: int) -> float:
    """Seconds to wait before the next start, after so many shims in a row that did not live long."""
    low, high = _BACKOFF_S
    return float(min(low * 2 ** min(max(0, tries - 1), 16), high))


class ShimProcess:
    """Keeps one shim running. `start` returns at once; `stop` ends it and is called at exit."""

    def __init__(
        self, argv: Sequence[str], life: Path, environment: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._argv = list(argv)
        self._life = life
        self._environment = dict(environment)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._thread = threading.Thread(target=self._keep, name="safepoint-shim", daemon=True)

    def start(self) -> None:
        """Begin; from now on a dead shim is replaced."""
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the shim: SIGTERM, then SIGKILL after 2 s. May be repeated."""
        self._stopping.set()
        process = self._process
        if process is None or process.poll() is not None:
            return
        unmark_ended(self._life)  # else each would wait for the other
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _keep(self) -> None:
        # The kernel's death signal follows the thread that made the child, so this thread makes all of them and stays.
        launch = str(Path(__file__).resolve().parent / "launch.py")
        tries, before = 0, ""
        while not self._stopping.is_set():
            began = self._clock()
            try:
                says, said = os.pipe()
                # Beside, and not in place of, the wait for its end: whoever has inherited the descriptor may keep it open.
                threading.Thread(target=_say, args=(says,), name="safepoint-shim-says", daemon=True).start()
                with os.fdopen(said, "wb"), (self._life / "shim.log").open("ab") as out:
                    self._process = subprocess.Popen(
                        [sys.executable, "-S", "-E", launch, str(os.getpid()), *self._argv],
                        stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._life,
                        env=self._environment | {BEFORE_VARIABLE: before, SAYS_VARIABLE: str(said)}, pass_fds=(said,),
                        start_new_session=True,  # a terminal's Ctrl-C ends the server first, and the server ends it
                    )  # fmt: skip
                self.starts += 1
                code = self._process.wait()
                before = self._ended(self._process.pid, code) or before
                if not self._stopping.is_set():
                    log.warning("the shim ended with code %s; see %s", code, self._life / "shim.log")
            except OSError as error:
                log.warning("the shim cannot be started: %s", error)
            tries = 0 if self._clock() - began >= _WENT_WELL_S else tries + 1
            if self._stopping.wait(backoff_s(tries)):
                return

    def _ended(self, pid: int, code: int) -> str:
        """Who has ended and how, for its successor to tell; empty when it had not said who it was."""
        try:
            said = json.loads((self._life / ANNOUNCEMENT).read_text())
            if said["pid"] == pid:
                return json.dumps(
                    {"participant_id": said["participant_id"], "incarnation_id": said["incarnation_id"], "code": code}
                )
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return ""


def _say(says: int) -> None:
    with os.fdopen(says, errors="replace") as lines:
        for line in lines:
            print(f"safepoint: {line.strip()}", file=sys.stderr, flush=True)
