"""`safepoint serve --name ID --listen HOST:PORT -- vllm serve ...`: a vLLM server with its shim beside it.

The rule: one command is one life of the engine. vLLM runs in a session of its own with control turned on, the shim
in another; when vLLM ends, for whatever reason, all of its session is killed (a killed API server leaves its engine behind),
the shim says goodbye, and we end with vLLM's code and its last words. Started again, it is another incarnation. A shim
that dies alone is started again: callers come through it. A vLLM whose engine has died closes its port and may then wait
for ever for a call that the engine will never answer: it is killed. When we are killed ourselves, the shim ends the engine; when
that is killed too, our next start does (`leftovers`).

When we are told to go, the shim goes first, so that nobody stays paused; then vLLM gets SIGINT, since SIGTERM hangs it
while streams run; after the grace its group is killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, cast

from participant_shims.engine.call import API_KEY
from participant_shims.engine.end_note import EndNote, engine_ended
from participant_shims.gate.life import OTHER_JOB
from participant_shims.groups import adopted_orphans, end_group, signal_group
from participant_shims.leftovers import Leftovers, Reaped, StillRuns

SHIM_GOODBYE_S: Final = 4.0
GRACE_S: Final = 10.0  # between SIGINT and SIGKILL
CLOSED_S: Final = 15.0  # an engine that has taken its port back for so long and has not ended does not end
LOOK_S: Final = 1.0  # between two looks at the port
LAST_LINES: Final = 20
LAST_LINES_S: Final = 0.1  # for the last of them to be read, before the shim says them
AGAIN_S: Final = (1.0, 2.0, 5.0, 10.0)  # pauses before a shim that died is started again
LONG_LIFE_S: Final = 60.0  # a shim that lived so long begins with the first pause again
# Exits of a shim that another start would not mend: bad use, another shim serves this life.
EXIT_ANOTHER: Final = 3
_FINAL: Final = frozenset({2, EXIT_ANOTHER})
_MODULES: Final = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"})
DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `serve` was given for a vLLM. `life`: the directory of the engine of that name, which outlives each of its
    lives. `shim`: further arguments of `safepoint shim`, as they are."""

    name: str
    listen: str
    life: Path
    shim: tuple[str, ...] = ()
    verbose: bool = False


def is_vllm(argv: Sequence[str]) -> bool:
    """Whether the command starts a vLLM server."""
    if not argv:
        return False
    words = [Path(word).name if number < 2 else word for number, word in enumerate(argv)]
    return ("vllm" in words[:2] and "serve" in words[:3]) or bool(_MODULES & set(argv))


def target_of(argv: Sequence[str]) -> str:
    """Where that server will listen, as host:port. Raises ValueError when nothing can stand before it, or nobody knows."""
    told = told_to(argv)
    host, port = told.get("host") or "127.0.0.1", told.get("port") or "8000"
    if told.get("uds"):
        raise ValueError("a vLLM on a Unix socket can't be covered: give it --port instead of --uds")
    if "ssl-keyfile" in told:
        raise ValueError("a vLLM that speaks TLS can't be covered: end TLS before the shim")
    if not port.isdigit() or port == "0":
        raise ValueError(f"--port {port}: the shim has to know vLLM's port")
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost", "") else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def told_to(argv: Sequence[str]) -> dict[str, str]:
    """What vLLM is told, by the names of its flags, of which the last counts; they beat the file that `--config` names.

    Raises ValueError when that file can't be read.
    """
    flags: dict[str, str] = {}
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            flags[_dashed(name[2:])] = value if equals else following
    return {**_written_in(flags["config"]), **flags} if flags.get("config") else flags


def _written_in(path: str) -> dict[str, str]:
    """What a file for `--config` says, of each list the first."""
    try:
        import yaml  # not above: this entry starts also where it is not installed
    except ModuleNotFoundError as error:
        raise ValueError(f"--config {path} can't be read without PyYAML: install it for {sys.executable}") from error
    try:
        read: Any = yaml.safe_load(Path(path).read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"--config {path} can't be read, and may say where vLLM listens: {why}") from error
    if not isinstance(read, dict):
        raise ValueError(f"--config {path} has no options: vLLM reads a file of `name: value`")
    said: dict[str, str] = {}
    for name, value in cast("dict[str, Any]", read).items():
        first: Any = next(iter(cast("Sequence[Any]", value)), None) if isinstance(value, list) else value
        if first is not None and first is not False:  # vLLM leaves those out
            said[_dashed(str(name))] = str(first)
    return said


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What vLLM needs besides. Raises ValueError when control was turned off on purpose."""
    given = environ.get(DEV_MODE, "")
    if given and given != "1":
        raise ValueError(f"{DEV_MODE}={given}: without 1 vLLM can't be paused")
    return {} if given else {DEV_MODE: "1"}


def run_engine(options: EngineOptions, argv: Sequence[str]) -> int:
    """Run vLLM and its shim; vLLM's exit code (128 + N when signal N ended it).

    2: bad use; 3: this engine is served already, or its port is taken; 127: no such command.
    """
    try:
        if not (options.name and options.listen):
            raise ValueError("a vLLM needs --name, and --listen HOST:PORT where callers reach it from now on")
        target = target_of(argv)
        added = engine_environment(os.environ)
    except ValueError as error:
        print(f"safepoint serve: {error}", file=sys.stderr)
        return 2
    with adopted_orphans():
        return _run(options, argv, target, added)


def _run(options: EngineOptions, argv: Sequence[str], target: str, added: dict[str, str]) -> int:
    """What is left once the options are known to be good."""
    left = Leftovers(options.life)
    try:
        _tell(options.name, left.reap())
    except StillRuns as error:
        print(f"safepoint serve: {options.name} is served already, by pid {error.pid}. End that one first, or take another "
              f"--name. If it is of another job, {OTHER_JOB}.", file=sys.stderr)  # fmt: skip
        return EXIT_ANOTHER
    if _is_taken(target):  # else the shim would stand before that one until vLLM has found out, and pause it for us
        print(f"safepoint serve: another server listens at {target}, so vLLM could not. Give this one another --port, or end "
              "that server first.", file=sys.stderr)  # fmt: skip
        return EXIT_ANOTHER
    beside = _Shim(options, target, told_to(argv).get("api-key", ""))
    try:
        engine = subprocess.Popen(
            list(argv), env={**os.environ, **added}, start_new_session=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        print(f"safepoint serve: {argv[0]} can't be run: {error.strerror}", file=sys.stderr)
        return 127
    if options.verbose:
        print(f"safepoint serve: {options.listen} -> {target}, vLLM is pid {engine.pid}", file=sys.stderr)
    left.note(engine.pid)
    said = _LastWords(engine)
    told: list[int] = []

    def tell(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    before = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    port = _Port(target)
    ended = EndNote(options.life)
    try:
        code = _watch(engine, beside, told, left, port)
        if not told:
            said.join(LAST_LINES_S)  # who is left of its group may hold the pipes open
            ended.write(os.getpid(), engine_ended(options.name, engine.pid, code, time.time(), said.lines, port.hung))
    finally:
        beside.end()
        ended.remove()
        end_group(engine.pid)
        left.reap()  # who has left the group, as vLLM's data-parallel supervisor does
        said.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    if not told:
        print(f"safepoint serve: vLLM ({options.name}, pid {engine.pid}) ended by itself: {how}. Its last lines:",
              file=sys.stderr)  # fmt: skip
        print("".join(f"  | {line}\n" for line in said.lines), end="", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def _tell(name: str, reaped: Reaped) -> None:
    """Say what a life before this one had left."""
    if reaped.ended:
        print(f"safepoint serve: a life of {name} before this one was killed and had left {', '.join(reaped.ended)}: ended "
              "now.", file=sys.stderr, flush=True)  # fmt: skip
    if reaped.stay:
        print(f"safepoint serve: {', '.join(reaped.stay)} of a killed life of {name} do not end, and may hold its GPU.",
              file=sys.stderr, flush=True)  # fmt: skip
    if reaped.unproved:
        print(f"safepoint serve: {', '.join(reaped.unproved)} may be left of a killed life of {name}; they are left alone, "
              "since that can't be proved.", file=sys.stderr, flush=True)  # fmt: skip


def _watch(engine: subprocess.Popen[bytes], beside: _Shim, told: list[int], left: Leftovers, port: _Port) -> int:
    """Until vLLM has ended, by itself or because we are told to go."""
    kill_at = 0.0
    while True:
        if told and not kill_at:
            beside.end()
            engine.send_signal(signal.SIGINT)
            kill_at = time.monotonic() + GRACE_S
        elif kill_at and time.monotonic() >= kill_at:
            signal_group(engine.pid, signal.SIGKILL)
            kill_at = time.monotonic() + GRACE_S
        elif not kill_at:
            beside.keep()
            if port.closed_for_good():
                print(f"safepoint serve: vLLM (pid {engine.pid}) has closed its port {CLOSED_S:.0f} s ago and does not end: "
                      "it is killed", file=sys.stderr, flush=True)  # fmt: skip
                signal_group(engine.pid, signal.SIGKILL)
        left.note(engine.pid, *beside.sessions)
        try:
            return engine.wait(0.1)
        except subprocess.TimeoutExpired:
            continue


def _address(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    return host.strip("[]"), int(port)


def _is_taken(target: str) -> bool:
    try:
        socket.create_connection(_address(target), 1.0).close()
    except OSError:
        return False
    return True


class _Port:
    """Whether the engine has closed the port on which it had listened."""

    def __init__(self, target: str) -> None:
        self._address = _address(target)
        self._listened = False
        self.hung = False  # it has been closed for good, and its engine had not ended
        self._closed_at = self._look_at = 0.0

    def closed_for_good(self) -> bool:
        """Whether nobody has listened there for CLOSED_S, and somebody had before. Looks every LOOK_S."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        try:
            socket.create_connection(self._address, 0.2).close()
        except ConnectionRefusedError:
            self._closed_at = self._closed_at or now
        except OSError:  # it is slow to say so, and listens
            self._closed_at = 0.0
        else:
            self._listened, self._closed_at = True, 0.0
        self.hung = self._listened and self._closed_at > 0 and now - self._closed_at >= CLOSED_S
        return self.hung


class _Shim:
    """The shim's process, started when it is wanted and started again when it dies."""

    def __init__(self, options: EngineOptions, target: str, api_key: str) -> None:
        self._environment = {**os.environ, **({API_KEY: api_key} if api_key else {})}
        python = os.environ.get("SAFEPOINT_SHIM_PYTHON") or sys.executable
        self._command = [
            python, "-m", "participant_shims.cli", "shim", "--vllm", f"{options.listen}={target}",
            "--name", options.name, "--life", str(options.life), "--parent-pid", str(os.getpid()), *options.shim,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._not_before = 0.0
        self._deaths = 0
        self._over = False

    @property
    def sessions(self) -> tuple[int, ...]:
        """That of the process, while there is one."""
        return () if self._process is None else (self._process.pid,)

    def keep(self) -> None:
        """Start it when it does not run."""
        now = time.monotonic()
        if self._over or (self._process is not None and self._process.poll() is None) or now < self._not_before:
            return
        if self._process is not None:
            code, self._process = self._process.returncode, None
            self._over = code in _FINAL
            self._deaths = 0 if now - self._started > LONG_LIFE_S else self._deaths
            self._not_before = now + AGAIN_S[min(self._deaths, len(AGAIN_S) - 1)]
            self._deaths += 1
            again = "it is not started again" if self._over else "starting it again"
            print(f"safepoint serve: the shim ended with {code}; {again}", file=sys.stderr, flush=True)
            return
        self._started = now
        # Its one line of standard output is for whoever starts a shim by hand.
        self._process = subprocess.Popen(
            self._command, env=_with_path(self._environment), start_new_session=True, stdout=subprocess.DEVNULL
        )

    def end(self) -> None:
        """Let it say goodbye; it opens its doors and resumes the engine first. May be repeated."""
        self._over = True
        if self._process is None:
            return
        try:
            self._process.terminate()
            self._process.wait(SHIM_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _with_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Safepoint has to be found where it is not installed: a checkout, run in place."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "gen" / "safepoint").is_dir():
        return dict(environ)
    path = os.pathsep.join([str(checkout), str(checkout / "gen"), *filter(None, [environ.get("PYTHONPATH", "")])])
    return {**environ, "PYTHONPATH": path}


class _LastWords:
    """Passes on what a process prints, and keeps the last of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        pairs: list[tuple[IO[bytes] | None, Any]] = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
        self._pumps = [threading.Thread(target=self._pump, args=pair, daemon=True) for pair in pairs]
        for pump in self._pumps:
            pump.start()

    @property
    def lines(self) -> list[str]:
        """The last, as they are now."""
        return list(self._lines)

    def join(self, within_s: float = 2.0) -> None:
        """Wait for the rest, so long for each pipe; they end with the last process of the group."""
        for pump in self._pumps:
            pump.join(within_s)

    def _pump(self, source: IO[bytes], to: Any) -> None:
        with source:
            for raw in source:
                text = raw.decode(errors="replace")
                self._lines.append(text.rstrip("\n")[:2000])
                try:
                    to.write(text)
                    to.flush()
                except (OSError, ValueError):
                    continue  # nobody listens to us: vLLM must not stop because of that
