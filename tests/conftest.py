"""What holds for every test: nothing is skipped silently, and nothing is left behind.

- A test marked `gym` fails, and is not skipped, when NeMo Gym's environment is missing.
- At the end no process that a test started may live, and no folder that a test made in the temporary directory may be
  there. Checked once, after all fixtures are gone, since a module's fixture may keep servers for several tests; the
  report names the test during which each leftover appeared.

`make test` runs two workers (pytest-xdist), a file at a time: each looks after what it started itself, and tells the
process that people read. Files that wait for real servers come first, so that both workers end together.

What processes leave that were killed, or a whole run that was, lies in one folder of that run, which is removed.

How they are found where they hide: `tests/leftovers.py`. A server of grpc.aio that a test has not stopped is stopped with
the test's loop, since it would hang the whole run at its end.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.leftovers import (
    Row,
    command_of,
    note_started,
    processes,
    started_by,
    stop_servers_with_their_loop,
    temporary_files_of_one_run,
)

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "SAFEPOINT_TEST_RUN"
# How long processes may take to end after the last fixture: Ray's need several seconds.
ENDING_S = 20.0

_run = secrets.token_hex(8)
_started: dict[int, str] = {}  # by pid, and in which test
_folders: dict[str, str] = {}
_current = "collection"
_leaks: list[str] = []


def gym_python() -> Path:
    """The interpreter of NeMo Gym's environment."""
    return Path(os.environ.get("SAFEPOINT_GYM_PYTHON") or REPOSITORY / ".venv-gym" / "bin" / "python")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = _run
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # started in the background by a script: children would be deaf
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # `timeout` and CI end a run by it: fixtures then end what they have started, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # workers inherit it
        config.add_cleanup(temporary_files_of_one_run())
    make = tempfile.mkdtemp

    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        folder = make(*args, **kwargs)
        _folders[os.fspath(folder)] = _current
        return folder

    # Every way to make a temporary folder goes through it, TemporaryDirectory included.
    tempfile.mkdtemp = mkdtemp
    config.add_cleanup(lambda: setattr(tempfile, "mkdtemp", make))
    config.add_cleanup(note_started(lambda pid: _started.setdefault(pid, _current)))
    config.add_cleanup(stop_servers_with_their_loop(lambda what: _leaks.append(f"{what}, by the end of {_current}")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        waits = {item.path for item in items if any(item.iter_markers("slow"))}
        items.sort(key=lambda item: item.path not in waits)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _leaks.extend(getattr(node, "workeroutput", {}).get("leaks", ()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gym") and not gym_python().exists():
        pytest.fail(f"{gym_python()} is not there: run `make setup-gym` first", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _current
    _current = item.nodeid
    result = yield
    for pid in _children():
        _started.setdefault(pid, item.nodeid)
    return result


def _children() -> list[int]:
    """Our direct children; cheap enough to ask for after every test."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
    return found


def _ours() -> list[Row]:
    # Python's own helper lives as long as the process that needed it: us.
    return [
        row
        for row in started_by(os.getpid(), processes(f"{MARK}={_run}"), _started)
        if "multiprocessing.resource_tracker" not in command_of(row.pid)
    ]


def _wait_until_empty(look: Callable[[], list[Any]], within_s: float) -> list[Any]:
    until = time.monotonic() + within_s
    while (left := look()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if warm := sys.modules.get("tests.gym.warm"):  # where no server was started there is nothing to end
        warm.end()
    for row in _wait_until_empty(_ours, ENDING_S):
        what = f"process {row.pid} ({command_of(row.pid)[:160]})"
        try:
            os.kill(row.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        started_in = next((_started[p] for p in (row.pid, row.parent, row.group, row.session) if p in _started), "")
        _leaks.append(f"{what}, started in {started_in or 'an unknown test'}")
    for folder, test in _folders.items():
        # pytest keeps the folders of the last three runs on purpose.
        if os.path.isdir(folder) and "pytest-of-" not in folder:
            _leaks.append(f"folder {folder}, made in {test}")
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["leaks"] = _leaks
    if _leaks and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _leaks:
        terminalreporter.section("left behind", red=True)
        for leak in _leaks:
            terminalreporter.line(leak)
