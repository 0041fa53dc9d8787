"""The line between one worker's gate and the shim: a thread of its own, JSON lines over the life's `gate.sock`.

The rule kept here: status is answered although the server's event loop is busy; everything that changes something runs
on the loop. The shim listens, gates dial, for ever: a shim that dies and comes back finds its gates again, and a gate
without a shim still opens by its lease.

Messages (one JSON object a line; `id` is numbered by its sender):

    gate -> shim   {"hello": {"worker_id", "pid", "server_name", "kind", "configured_workers", "describe": {...}}}
                   {"event": "status", "status": {...}}          each change, at most every 50 ms while closed and
                                                                 every 250 ms while open, and each second
                   {"event": "opened", "cause": "lease"}
                   {"id": n, "ok": {...}} | {"id": n, "error": {"reason": "DECLINED", "message", "next_step"}}
                   {"id": n, "progress": {"bytes_done": n, "items_done": n, "items_total": n}}
                       while it exports or loads, at most every 100 ms; each replaces the one before
    shim -> gate   {"id": n, "op": "close", "params": {"operation_id", "mode": "hold"|"drain", "lease_s"}}
                       ok: {"counts": {"in_flight","parked","held","calling"}, "generation"}
                   {"id": n, "op": "status", "params": {"max_rollouts"}}             ok: see Gate.status
                   {"id": n, "op": "stacks", "params": {"max_stacks"}}
                       ok: {"stacks": [{"rollout_id", "task", "frames": [[file, line, function], ...]}]}
                   {"id": n, "op": "exclude"}                    ok: {"excluded": [{"rollout_id", "attempt", ...}]}
                   {"id": n, "op": "export", "params": {"directory", "prefix", "root", "doubt"}}
                       ok: {"files": [{"path","size_bytes","sha256"}], "sessions", "bytes", "excluded": [...],
                            "shared_state_sha256"}
                   {"id": n, "op": "precopy", "params": {"root", "within_s"}}         ok: {"sessions"}
                   {"id": n, "op": "load", "params": {"parts": [{"directory", "files": ["name", ...], "sha256", "some"}]}}
                       sha256: of the files, so that a load of others is told from a repeat
                       some: only sessions of rollouts that the call log, which is loaded already, has got
                       ok: {"sessions", "left", "diverged": [...], "rollouts": [the first few whose sessions these are],
                            "rollout_count"}
                   {"id": n, "op": "open", "params": {"cause"}}
                       ok: {"released_parked", "released_held", "closed_for_s", "generation"}
                   {"id": n, "op": "renew", "params": {"lease_s"}}                    ok: {"lease_remaining_s"}
                   {"id": n, "op": "retire", "params": {"attempts": [[rollout_id, attempt], ...]}}    ok: {"known"}
                   {"id": n, "op": "describe"}                                        ok: the hello's describe
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import random
import select
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire import failpoints
from coordinator.wire.beneath import storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.terms import QuiesceMode
from participant_shims.gate.core import Gate
from participant_shims.gate.logfile import log_failure
from participant_shims.gate.stacks import stacks

log = logging.getLogger(__name__)

STATUS_GAP_S: Final = 0.05  # while somebody waits for a drain
OPEN_GAP_S: Final = 0.25  # a server under load changes all the time, and pays for each
STATUS_SILENCE_S: Final = 1.0
PROGRESS_GAP_S: Final = 0.1
MAX_LINE_BYTES: Final = 64 * 1024 * 1024
_BACKOFF_S: Final = (0.05, 1.0)
_SEND_TIMEOUT_S: Final = 5.0  # a shim that does not read for so long is dead or stopped: dial again


def _readable(within_s: float, *sockets: socket.socket) -> list[socket.socket]:
    """Those that can be read or have ended, as soon as one has; none after `within_s` seconds.

    By poll: select() takes no descriptor above 1023, and a server under load has more connections than that.
    """
    looking, by_number = select.poll(), {each.fileno(): each for each in sockets}
    for number in by_number:
        looking.register(number, select.POLLIN)
    return [by_number[number] for number, _ in looking.poll(math.ceil(1000 * within_s))]


class Control:
    """The control thread of one gate. `start` once the server's loop runs; `stop` is for tests."""

    def __init__(self, gate: Gate, path: Path) -> None:
        self._gate = gate
        self._path = path
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._wake_r, self._wake_w = socket.socketpair()
        for end in (self._wake_r, self._wake_w):
            end.setblocking(False)
        self._lock = threading.Lock()
        self._out: list[bytes] = []
        self._dirty = False
        self._stopping = False
        self._tasks: set[asyncio.Future[Any]] = set()  # keeps running operations from being collected
        self.connections = 0
        self._thread = threading.Thread(target=self._run, name="safepoint-control", daemon=True)
        gate.on_change = self._on_change
        gate.on_opened = self._on_opened

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to dial. Called in the thread of the loop."""
        self._loop, self._loop_thread = loop, threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join(5)
        self._wake_r.close()
        self._wake_w.close()

    # -- called on the loop

    def _on_change(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._wake()

    def _on_opened(self, cause: str) -> None:
        self._push({"event": "opened", "cause": cause})

    def _push(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._out.append(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_w.send(b"x")
        except (BlockingIOError, OSError):
            pass  # it is awake already, or gone

    # -- the thread

    def _run(self) -> None:
        backoff = _BACKOFF_S[0]
        while not self._stopping:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.connect(str(self._path))
                    sock.settimeout(_SEND_TIMEOUT_S)
                    with self._lock:
                        self._out.clear()  # replies to a shim that is gone
                    failpoints.reach("gate.before_hello")
                    sock.sendall(json.dumps({"hello": self._gate.hello()}, separators=(",", ":")).encode() + b"\n")
                    self.connections += 1
                    backoff = _BACKOFF_S[0]
                    self._serve(sock)
            except (OSError, ValueError):
                pass
            except Exception:
                log.exception("the gate's control line failed; dialling again")
            _readable(backoff * random.uniform(0.5, 1.0), self._wake_r)
            self._drain_wake()
            backoff = min(backoff * 2, _BACKOFF_S[1])

    def _serve(self, sock: socket.socket) -> None:
        buffer = b""
        sent_at = 0.0
        self._dirty = True
        while not self._stopping:
            now = time.monotonic()
            due = sent_at + self._gap_s()
            if now >= due:
                self._dirty = False  # before reading, so that a change in between is sent again
                status = json.dumps({"event": "status", "status": self._status(20)}, separators=(",", ":"))
                sock.sendall(status.encode() + b"\n")
                sent_at = now
                continue
            ready = _readable(due - now, sock, self._wake_r)
            if self._wake_r in ready:
                self._drain_wake()
            with self._lock:
                out, self._out = self._out, []
            if out:
                sock.sendall(b"".join(out))
            if sock in ready:
                chunk = sock.recv(1 << 16)
                if not chunk:
                    return
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                if len(buffer) > MAX_LINE_BYTES:
                    raise ValueError("a line of the shim is over the limit")
                for line in lines:
                    if line.strip():
                        self._receive(line)

    def _gap_s(self) -> float:
        if not self._dirty:
            return STATUS_SILENCE_S
        return STATUS_GAP_S if self._gate.doors.closed else OPEN_GAP_S

    def _status(self, max_rollouts: int) -> dict[str, Any]:
        for _ in range(5):
            try:
                return self._gate.status(max_rollouts)
            except RuntimeError:  # a dictionary changed while it was read; the next try nearly always wins
                continue
        return {"closed": self._gate.doors.closed, "generation": self._gate.doors.generation,
                "counts": self._gate.counts(), "rollouts": [], "rollout_count": 0}  # fmt: skip

    def _drain_wake(self) -> None:
        try:
            while self._wake_r.recv(4096):
                pass
        except (BlockingIOError, OSError):
            pass

    def _receive(self, line: bytes) -> None:
        """One request of the shim. Raises ValueError for what is none: the line is dialled again then."""
        try:
            message: Any = json.loads(line, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError("a line of the shim is nested too deep") from None
        if not isinstance(message, dict):
            raise ValueError("a line of the shim is no object")
        request = cast("dict[str, Any]", message)
        params: object = request.get("params") or {}
        if not isinstance(params, dict):
            raise ValueError("the parameters of a request are no object")
        self._handle(request.get("id"), str(request.get("op")), cast("dict[str, Any]", params))

    def _handle(self, number: Any, op: str, params: dict[str, Any]) -> None:
        if op == "status":
            asked = params.get("max_rollouts", 0)
            self._push({"id": number, "ok": self._status(asked if type(asked) is int else 0)})
            return
        if op == "stacks":
            asked = params.get("max_stacks", 0)
            found = stacks(self._gate, self._loop, self._loop_thread, asked if type(asked) is int else 0)
            self._push({"id": number, "ok": {"stacks": found}})
            return
        if op == "describe":
            self._push({"id": number, "ok": self._gate.describe()})
            return
        loop = self._loop
        if loop is None or loop.is_closed():
            self._push({"id": number, "error": {"reason": "UNAVAILABLE", "message": "The server is ending."}})
            return
        loop.call_soon_threadsafe(self._on_loop, number, op, params)

    # -- on the loop again

    def _on_loop(self, number: Any, op: str, params: dict[str, Any]) -> None:
        where = params.get("directory") or params.get("root")
        doing = f"{op} in {where}" if where else op
        # A change that needs no waiting is made in this very step: closing must not be overtaken by a request.
        try:
            result = self._operation(op, number)(params)
        except Exception as error:
            self._push({"id": number, "error": _error(error, self._gate.log.path, doing)})
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(result)
            self._tasks.add(task)
            task.add_done_callback(lambda t: self._finished(number, t, doing))
        else:
            self._push({"id": number, "ok": result})

    def _finished(self, number: Any, task: asyncio.Future[Any], doing: str) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._push({"id": number, "error": {"reason": "ABORTED", "message": "The server is ending."}})
        elif (error := task.exception()) is not None:
            self._push({"id": number, "error": _error(error, self._gate.log.path, doing)})
        else:
            self._push({"id": number, "ok": task.result()})

    def _teller(self, number: Any) -> Callable[[int, int, int], None]:
        """Passes on how far request `number` is, as often as somebody can read it."""
        next_at = 0.0

        def told(bytes_done: int, items_done: int, items_total: int) -> None:
            nonlocal next_at
            now = time.monotonic()
            if now >= next_at:
                next_at = now + PROGRESS_GAP_S
                figures = {"bytes_done": bytes_done, "items_done": items_done, "items_total": items_total}
                self._push({"id": number, "progress": figures})

        return told

    def _operation(self, op: str, number: Any) -> Callable[[dict[str, Any]], Any]:
        gate = self._gate
        operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "close": lambda p: gate.close(p["operation_id"], _mode(p["mode"]), float(p["lease_s"])),
            "open": lambda p: gate.open(p.get("cause", "resume")),
            "renew": lambda p: gate.renew(float(p["lease_s"])),
            "exclude": lambda p: gate.exclude(),
            "export": lambda p: gate.export(
                p["directory"], p.get("prefix", ""), self._teller(number), p.get("root", ""), bool(p.get("doubt"))
            ),
            "precopy": lambda p: gate.precopy(p["root"], float(p["within_s"])),
            "load": lambda p: gate.load(p["parts"], self._teller(number)),
            "retire": lambda p: gate.retire(p["attempts"]),
        }
        if op not in operations:
            raise refuse(Reason.UNSUPPORTED, f"The gate does not know the operation {op[:64]!r}.")
        return operations[op]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")  # a lease of NaN seconds would never be over


def _mode(text: str) -> QuiesceMode:
    modes = {"hold": QuiesceMode.HOLD, "drain": QuiesceMode.DRAIN}
    if text not in modes:
        raise refuse(Reason.UNSUPPORTED, f"A Gym server can hold or drain, not {text[:32]!r}.")
    return modes[text]


def _error(error: BaseException, call_log: Path, doing: str) -> dict[str, str]:
    if isinstance(error, sqlite3.Error):
        error = log_failure(call_log, error)
    elif isinstance(error, OSError | MemoryError):
        error = storage_error(error, doing)
    if isinstance(error, SafepointError):
        return {"reason": error.reason.name, "message": error.problem.message, "next_step": error.problem.next_step}
    log.error("a gate operation failed", exc_info=error)
    return {"reason": "INTERNAL", "message": f"{type(error).__name__}: {error}"[:500]}
