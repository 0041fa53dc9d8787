"""What a life of an engine runs, noted in its directory, so that the next one can end what a kill has left of it.

vLLM's API server, killed, leaves its engine behind, and with it the memory of the GPU; `safepoint serve`, killed as well,
can't end the group any more. So it notes the sessions that it has started and who is in them, every second.

The rule: only who is provably ours is killed. A process is known by pid, time of start and session; and since the number of
a session is not given again while anybody is in it, one known process that lives makes the whole session ours. What
cannot be proved is named and left alone. Nothing of this is waited for on disk: a machine that goes down ends them all.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from participant_shims.gate.process import lives, started

log = logging.getLogger(__name__)

NAME: Final = "processes.json"
EVERY_S: Final = 1.0
GONE_WITHIN_S: Final = 10.0  # a driver takes a while to give back the memory of a GPU
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")

Sessions = dict[int, list[tuple[int, str]]]


class StillRuns(Exception):
    """Whoever wrote the note lives: nothing of it is left over."""

    def __init__(self, pid: int) -> None:
        super().__init__(f"pid {pid}")
        self.pid = pid


@dataclass(frozen=True, slots=True)
class Reaped:
    """Processes as people know them, "pid name": `ended`; `stay`: killed, and there after 10 s all the same; `unproved`:
    in a session of that number, and left alone."""

    ended: tuple[str, ...] = ()
    stay: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()


class Leftovers:
    """The note of one engine, in the directory `life`. Nothing here raises OSError: an engine runs without a note too."""

    def __init__(self, life: Path) -> None:
        self._path = life / NAME
        self._written: Sessions | None = None
        self._next_s = 0.0

    def note(self, *sessions: int) -> None:
        """These are the sessions that this process has started. Looks at them every second, and at a new one at once."""
        if time.monotonic() < self._next_s and self._written is not None and self._written.keys() == set(sessions):
            return
        self._next_s = time.monotonic() + EVERY_S
        found = _members(sessions)
        if found == self._written:
            return
        boot, me = _boot(), os.getpid()
        text = json.dumps({"boot": boot, "by": [me, started(me)], "sessions": found})
        temporary = self._path.with_name(f".{NAME}.{me}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(text + "\n")
            temporary.rename(self._path)
            self._written = found
        except OSError:
            pass

    def reap(self) -> Reaped:
        """End what the life that wrote the note has left. Raises StillRuns. Takes up to 10 s."""
        noted = self._read()
        if noted is None:
            return Reaped()
        boot, by, sessions = noted
        if boot != _boot():
            self._forget()
            return Reaped()
        if by[0] != os.getpid() and lives(*by):
            raise StillRuns(by[0])
        mine = os.getsid(0)  # of a shim that ends what was beside it
        now = _members(s for s in sessions if s != mine)
        ours = {s for s in now if any(lives(*known) and known in now[s] for known in sessions[s])}
        unproved = tuple(_name(pid) for s in now if s not in ours for pid, _ in now[s])
        names: dict[tuple[int, str], str] = {}
        until = time.monotonic() + GONE_WITHIN_S
        # Again and again: who was just being started is there a moment later. While one of them lives the number is theirs.
        while ours:
            left = [(s, *known) for s, all_of in _members(ours).items() for known in all_of]
            if not left or time.monotonic() >= until:
                break
            for session, pid, began in left:
                names.setdefault((pid, began), _name(pid))
                _kill(session, pid, began)
            time.sleep(0.02)
        stay = tuple(name for known, name in names.items() if lives(*known))
        ended = tuple(name for known, name in names.items() if not lives(*known))
        if not stay:
            self._forget()
        return Reaped(ended, stay, unproved)

    def _read(self) -> tuple[str, tuple[int, str], Sessions] | None:
        try:
            raw = json.loads(self._path.read_text())
            by, sessions = raw["by"], raw["sessions"]
            return (
                str(raw["boot"]), (int(by[0]), str(by[1])),
                {int(s): [(int(pid), str(began)) for pid, began in known] for s, known in sessions.items()},
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None

    def _forget(self) -> None:
        self._written = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            pass


def end_what_is_left(life: Path) -> None:
    """For the shim of an engine, when it ends: an engine whose `safepoint serve` was killed has nobody else to end it."""
    try:
        reaped = Leftovers(life).reap()
    except StillRuns:
        return
    if reaped.ended:
        log.warning("`safepoint serve` was killed; its engine is ended with it: %s", ", ".join(reaped.ended))


def _members(sessions: Iterable[int]) -> Sessions:
    """Who is in these sessions now."""
    found: Sessions = {session: [] for session in sessions}
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:  # no Linux: nobody can be told from another
        return found
    for pid in sorted(pids):
        try:
            mine = found.get(os.getsid(pid))
        except OSError:
            continue  # it has just ended
        if mine is not None and (began := started(pid)):
            mine.append((pid, began))
    return found


def _kill(session: int, pid: int, began: str) -> None:
    """By a descriptor, which goes on meaning the same process when its number is given to another."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if lives(pid, began) and os.getsid(pid) == session:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(fd)


def _name(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}"
    except OSError:
        return str(pid)


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
