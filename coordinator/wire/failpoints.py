"""Failpoints: places in the code where a test lets a process die, stop, hang or see a failing disk.

The rule: they are on only where SAFEPOINT_FAILPOINTS was set when a process called `arm` at its start; otherwise
`reach` is one look at a global. Places are named in `failpoint_names`; a name, an action or an error that does not exist
is refused at the start, with those that do, since a fault that never happens would pass for one that was survived.

    SAFEPOINT_FAILPOINTS = TERM(;TERM)*  |  file:/absolute/path
    TERM                 = name[DETAIL]=STEP(->STEP)*        [DETAIL] only where the place has one: "manifest.json"
    STEP                 = [COUNT*]ACTION                    without a count: from here on, always
    ACTION               = kill | stop | error(EIO) | error(ENOSPC) | error(EROFS) | delay(MILLISECONDS) | off

    journal.after_append=kill                  SIGKILL to this process when it is reached
    shim.before_confirmed=2*off->1*stop        SIGSTOP at the third time, once
    disk.before_link[manifest.json]=error(EIO)

`file:` names a file with TERMs that is read again whenever it has changed, so that one fleet serves many cases; each
action that is taken is first appended to `<path>.hits`, one JSON object a line: {"name", "detail", "action", "pid"}.
`delay` blocks the thread that has reached the place, and with it its event loop: that is what a hang is.

Standard library only: gates have it inside servers that are not ours.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.failpoint_names import PLACES

VARIABLE: Final = "SAFEPOINT_FAILPOINTS"
ACTIONS: Final = ("kill", "stop", "error(EIO)", "error(ENOSPC)", "error(EROFS)", "delay(MILLISECONDS)", "off")
_FILE: Final = "file:"
_TERM: Final = re.compile(r"([a-z_.]+)(?:\[([^\]=;]+)\])?=(.+)")
_STEP: Final = re.compile(r"(?:([1-9][0-9]{0,8})\*)?([a-z]+)(?:\(([A-Z0-9]+)\))?")
_ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS}


@dataclass(slots=True)
class Step:
    """One step of a term. `left`: how often it still applies, None for ever."""

    action: str
    argument: str
    left: int | None

    def __str__(self) -> str:
        return f"{self.action}({self.argument})" if self.argument else self.action


@dataclass(frozen=True, slots=True)
class Term:
    """What happens at one place. `detail` narrows it to one participant or file; empty: whichever comes."""

    name: str
    detail: str
    steps: list[Step]

    def next(self) -> Step | None:
        """The step that applies now; it is used up by this."""
        for step in self.steps:
            if step.left is None:
                return step
            if step.left > 0:
                step.left -= 1
                return step
        return None


def parse(text: str) -> list[Term]:
    """The terms of a specification. Raises INVALID_ARGUMENT naming what is wrong and what there is."""
    terms: list[Term] = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        match = _TERM.fullmatch(part)
        if match is None:
            raise _wrong(f"{part[:100]!r} is no term", "Write NAME=ACTION, or NAME[DETAIL]=COUNT*ACTION->ACTION.")
        name, detail, steps = match[1], match[2] or "", match[3].split("->")
        if name not in PLACES:
            raise _wrong(f"there is no failpoint {name!r}", f"There are: {', '.join(PLACES)}.")
        terms.append(Term(name, detail, [_step(name, step.strip()) for step in steps]))
    return terms


def _step(name: str, text: str) -> Step:
    match = _STEP.fullmatch(text)
    action, argument = (match[2], match[3] or "") if match else ("", "")
    good = {
        "kill": not argument, "stop": not argument, "off": not argument, "delay": argument.isdigit(),
        "error": argument in _ERRORS,
    }.get(action, False)  # fmt: skip
    if match is None or not good:
        raise _wrong(f"{text[:100]!r} is no action", f"There are: {', '.join(ACTIONS)}.")
    if action == "error" and not PLACES[name].disk:
        disk = ", ".join(place.name for place in PLACES.values() if place.disk)
        raise _wrong(f"no disk is used at {name}", f"Errors may be had at: {disk}.")
    return Step(action, argument, int(match[1]) if match[1] else None)


def _wrong(what: str, next_step: str) -> Exception:
    return refuse(Reason.INVALID_ARGUMENT, f"{VARIABLE}: {what}.", next_step=next_step)


class Armed:
    """The failpoints of this process. Safe for several threads."""

    def __init__(self, specification: str) -> None:
        """Raises INVALID_ARGUMENT as `parse`, and when a file cannot be read."""
        self._path = Path(specification.removeprefix(_FILE)) if specification.startswith(_FILE) else None
        self._seen: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._terms: list[Term] = [] if self._path else parse(specification)
        if self._path is not None:
            self._read_again(self._path)

    def reach(self, name: str, detail: str) -> None:
        """Take the action that is due here, if one is."""
        with self._lock:
            if self._path is not None:
                self._read_again(self._path)
            due = [term for term in self._terms if term.name == name and term.detail in ("", detail)]
            step = due[0].next() if due else None
        if step is not None and step.action != "off":
            self._note(name, detail, str(step))
            _ACT[step.action](step.argument)

    def _read_again(self, path: Path) -> None:
        try:
            found = path.stat()
            seen = (found.st_ino, found.st_mtime_ns)
            if seen != self._seen:
                self._seen, self._terms = seen, parse(path.read_text())
        except OSError as error:
            raise _wrong(
                f"{path} cannot be read: {error.strerror}", "Make the file before the process starts."
            ) from error

    def _note(self, name: str, detail: str, action: str) -> None:
        if self._path is None:
            return
        line = json.dumps({"name": name, "detail": detail, "action": action, "pid": os.getpid()}) + "\n"
        file = os.open(f"{self._path}.hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def _signal(number: int) -> None:
    # To this very thread, which then takes it before it goes on; a signal to the process may be taken by another one
    # when this has run past the place.
    signal.pthread_kill(threading.get_ident(), number)


def _kill(_: str) -> None:
    _signal(signal.SIGKILL)


def _stop(_: str) -> None:
    _signal(signal.SIGSTOP)


def _error(name: str) -> None:
    raise OSError(_ERRORS[name], os.strerror(_ERRORS[name]))


def _delay(milliseconds: str) -> None:
    time.sleep(int(milliseconds) / 1000)


_ACT: Final[Mapping[str, Callable[[str], None]]] = {"kill": _kill, "stop": _stop, "error": _error, "delay": _delay}
_armed: Armed | None = None


def arm(environment: Mapping[str, str] = os.environ) -> None:
    """Arm what SAFEPOINT_FAILPOINTS says, at the start of a process; nothing when it is not set. May be repeated.

    Raises INVALID_ARGUMENT for what does not exist; then nothing is armed.
    """
    global _armed
    specification = environment.get(VARIABLE, "")
    if specification and _armed is None:
        _armed = Armed(specification)


def disarm() -> None:
    """Forget what was armed. For tests in one process."""
    global _armed
    _armed = None


def reach(name: str, detail: str = "") -> None:
    """A place that has a name in `failpoint_names`. Does nothing unless it was armed.

    Raises OSError where an error was asked for.
    """
    if _armed is not None:
        _armed.reach(name, detail)
