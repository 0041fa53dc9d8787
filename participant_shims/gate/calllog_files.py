"""The call log as a file of a snapshot, as it is read: `calls.rope` or `calls.jsonl` (written by `calllog_export`).

The rule: a file is read strictly and as a whole before anything is installed. Formats: `gym-calls-v3`, the lines of one rollout
after those of another; `gym-calls-v2`, all lines of a kind after those of another, and a rollout has `explicit`, which says
nothing any more; `gym-calls-v1`, as v2 and without counts.

    exported = export(log, directory)     # files are fsynced; ledger lines are for the manifest
    loaded = load(log, [directory / "calls.jsonl"], excluded={})
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from coordinator.wire import failpoints
from coordinator.wire.errors import Reason, refuse
from coordinator.wire.ids import is_rollout_id
from coordinator.wire.rope import open_content
from coordinator.wire.terms import RolloutState
from participant_shims.adapter import LedgerLine
from participant_shims.gate.calllog import UNCOUNTED, CallLog
from participant_shims.gate.calllog_export import FILE, FORMAT, ROPE, export
from participant_shims.identity import MAX_ATTEMPT

__all__ = ["FILE", "ROPE", "LogLoad", "export", "keep", "load", "loaded_by", "read", "unload"]

_COUNTED, _OLD = "gym-calls-v2", "gym-calls-v1"
MAX_LINE_BYTES: Final = 256 * 1024 * 1024  # one response with its token ids; the largest seen is 4 MB
MAX_LINES: Final = 20_000_000
_LOADED: Final = "loaded"  # the key under which the log says which restore it holds, until that is resumed


@dataclass(frozen=True, slots=True)
class LogLoad:
    """What was installed. `totals` counts rollouts by the state in which they continue; `restarted` cannot."""

    totals: dict[RolloutState, int] = field(default_factory=dict[RolloutState, int])
    restarted: tuple[LedgerLine, ...] = ()
    recorded_calls: int = 0
    sessions: int = 0


def load(
    log: CallLog,
    files: Sequence[Path],
    excluded: Mapping[str, str] | None = None,
    operation_id: str = "",
    progress: Callable[[int], None] | None = None,
    takes: Sequence[Callable[[str], bool]] = (),
) -> LogLoad:
    """Install the rollouts of `files` as attempt N+1, in one transaction, into the log of a fresh life.

    `takes`: for each file, which rollouts of it; without, all. What two files say of one rollout is taken from the first.

    `excluded` (rollout to reason) comes from the snapshot's whole ledger: rollouts that another server could not save
    restart from their input here. `operation_id`: the restore, see `loaded_by`. `progress(bytes)` is called now and
    then. May be repeated until the first dispatch; a repeat replaces. Raises NOT_FRESH, or
    SNAPSHOT_CORRUPT naming file and line: nothing has changed then.
    """
    lost = dict(excluded or {})
    totals: dict[RolloutState, int] = {}
    restarted: list[LedgerLine] = []
    known: set[str] = set()
    counted: set[str] = set()
    recorded = sessions = 0
    failpoints.reach("calllog.before_install")
    with _nothing_twice(files), log.together():
        if not log.is_fresh():
            raise refuse(Reason.NOT_FRESH, f"{log.path.parent.name} has served rollouts since it started.")
        _clear(log)
        if operation_id:
            log.note(_LOADED, operation_id)
        log.note(UNCOUNTED, not all(_has_counts(path) for path in files))
        for r in _wanted(files, progress, takes):
            kind, rollout_id = r["t"], r["rollout_id"]
            if kind == "excluded" or (
                kind == "rollout" and rollout_id in lost and r["state"] != RolloutState.COMPLETED
            ):
                reason = lost.get(rollout_id) or r.get("reason", "")
                lost[rollout_id] = reason
                if not r.get("guest") and rollout_id not in counted:  # a guest is its own agent's to account for
                    counted.add(rollout_id)
                    totals[RolloutState.EXCLUDED] = totals.get(RolloutState.EXCLUDED, 0) + 1
                    restarted.append(LedgerLine(rollout_id, r["attempt"], RolloutState.EXCLUDED, reason))
                # Calls of the old base are told that the state is lost; the agent then restarts with a new one.
                log.mark(rollout_id, r["attempt"] + 1, r["attempt"] + 1)
                if kind == "rollout" and not r["guest"]:
                    _install_excluded(log, r, reason)
            elif kind == "rollout" and r["state"] == RolloutState.EXCLUDED:
                raise refuse(Reason.SNAPSHOT_CORRUPT, f"Rollout {rollout_id} is excluded, and no line says why.")
            elif kind == "rollout":
                _install_rollout(log, r)
                known.add(rollout_id)
                if r["guest"]:
                    continue  # it is its own agent's to account for
                state = RolloutState(r["state"])
                totals[state] = totals.get(state, 0) + 1
                recorded += r["turns"] if state is RolloutState.COMPLETED else 0
            elif kind == "mark":
                log.mark(rollout_id, r["min_attempt"], r["min_base"])
            elif rollout_id in lost:
                continue
            elif kind == "call":
                if rollout_id not in known:
                    raise refuse(Reason.SNAPSHOT_CORRUPT, f"A call of {rollout_id} has no rollout in the call log.")
                log.db.execute(
                    "INSERT INTO calls(rollout_id, scope, number, call_id, attempt, server, own, method, path, digest,"
                    " done, status, phrase, url, headers, body) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                    (
                        rollout_id, r["scope"], r["number"], r["call_id"], r["attempt"], r["server"], r["own"],
                        r["method"], r["path"], r["digest"], r["done"], r["status"], r["phrase"], r["url"],
                        json.dumps(r["headers"], separators=(",", ":")), r["body"],
                    ),
                )  # fmt: skip
                recorded += r["done"]
            elif kind == "executed":
                log.db.execute(
                    "INSERT INTO executed(rollout_id, call_id, attempt, base, digest, status, headers, body)"
                    " VALUES(?,?,?,?,?,?,?,?)",
                    (
                        rollout_id, r["call_id"], r["attempt"], r["base"], r["digest"], r["status"],
                        json.dumps(r["headers"], separators=(",", ":")), r["body"],
                    ),
                )  # fmt: skip
                log.mark(rollout_id, r["attempt"] + 1)
            elif kind == "count":
                log.db.execute(
                    "INSERT INTO counts(rollout_id, attempt, base, executed) VALUES(?,?,?,?)",
                    (rollout_id, r["attempt"], r["base"], r["executed"]),
                )
                log.mark(rollout_id, r["attempt"] + 1)
            else:
                log.bind(r["session_id"], rollout_id, r["attempt"])
                log.mark(rollout_id, r["attempt"] + 1)
                sessions += 1
    failpoints.reach("calllog.after_install")
    return LogLoad(totals, tuple(restarted), recorded, sessions)


@contextmanager
def _nothing_twice(files: Sequence[Path]) -> Generator[None]:
    try:
        yield
    except sqlite3.IntegrityError as error:  # the disk has no part in it
        names = ", ".join(sorted({path.name for path in files}))
        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{names} says something twice: {error}.") from error


def _wanted(
    files: Sequence[Path], progress: Callable[[int], None] | None, takes: Sequence[Callable[[str], bool]]
) -> Iterator[dict[str, Any]]:
    if not takes:
        yield from read(files, progress)
        return
    said_by: dict[str, Path] = {}
    for path, take in zip(files, takes, strict=True):
        for record in read([path], progress):
            rollout_id = record["rollout_id"]
            if take(rollout_id) and (record["t"] == "mark" or said_by.setdefault(rollout_id, path) == path):
                yield record


def unload(log: CallLog, served: bool = False) -> None:
    """Forget what was loaded. `served`: the server has worked since, and what it did stays.

    What was dispatched and still runs begins again from its input.
    """
    with log.together():
        if log.is_fresh() and not served:
            _clear(log)
            return
        log.db.execute(
            "DELETE FROM calls WHERE rollout_id IN (SELECT rollout_id FROM rollouts WHERE restored=1 AND claimed=0)"
        )
        log.db.execute("DELETE FROM rollouts WHERE restored=1 AND claimed=0")
        log.db.execute("DELETE FROM elsewhere")
        log.db.execute(
            "UPDATE rollouts SET state='diverged', reason='the restore it continued was given up'"
            " WHERE restored=1 AND state='running'"
        )
        log.note(_LOADED, "")


def loaded_by(log: CallLog) -> str:
    """The restore that was loaded and neither kept nor unloaded; empty when there is none."""
    return str(log.noted(_LOADED) or "")


def keep(log: CallLog) -> None:
    """What was loaded is the server's own from now on."""
    log.note(_LOADED, "")


def _clear(log: CallLog) -> None:
    for table in ("rollouts", "calls", "executed", "counts", "sessions", "marks", "excluded", "elsewhere"):
        log.db.execute(f"DELETE FROM {table}")
    log.note(_LOADED, "")
    log.note(UNCOUNTED, False)


def _install_rollout(log: CallLog, r: Mapping[str, Any]) -> None:
    done = r["state"] == RolloutState.COMPLETED
    log.db.execute(
        "INSERT INTO rollouts(rollout_id, attempt, base, input_sha256, input, cookie, state, guest,"
        " restored, claimed, turns, status, headers, body) VALUES(?,?,?,?,?,?,?,?,1,0,?,?,?,?)",
        (
            r["rollout_id"], r["attempt"] if done else r["attempt"] + 1, r["base"], r["input_sha256"],
            r["input"], r["cookie"], "completed" if done else "interrupted", r["guest"],
            r["turns"], r["status"],
            json.dumps(r["headers"], separators=(",", ":")), r["body"],
        ),
    )  # fmt: skip
    if not done:
        log.mark(r["rollout_id"], r["attempt"] + 1)


def _install_excluded(log: CallLog, r: Mapping[str, Any], reason: str) -> None:
    # Whoever dispatches it begins from the input; a snapshot that is made before that must not have forgotten it.
    log.db.execute(
        "INSERT INTO rollouts(rollout_id, attempt, base, input_sha256, input, cookie, state, restored, claimed,"
        " reason) VALUES(?,?,?,?,x'','','excluded',1,0,?)",
        (r["rollout_id"], r["attempt"], r["base"], r["input_sha256"], reason[:1000]),
    )


# -- the strict reader: exactly these fields of exactly these types

_S, _I, _H, _B = "string", "integer", "headers", "body"
_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "excluded": {"rollout_id": _S, "attempt": _I, "reason": _S},
    "rollout": {
        "rollout_id": _S, "attempt": _I, "base": _I, "input_sha256": _S, "input": _B, "cookie": _S,
        "state": _I, "guest": _I, "turns": _I, "status": _I, "headers": _H, "body": _B,
    },
    "call": {
        "rollout_id": _S, "scope": _S, "number": _I, "call_id": _S, "attempt": _I, "server": _S, "own": _I,
        "method": _S, "path": _S, "digest": _S, "done": _I, "status": _I, "phrase": _S, "url": _S, "headers": _H,
        "body": _B,
    },
    "executed": {
        "rollout_id": _S, "call_id": _S, "attempt": _I, "base": _I, "digest": _S, "status": _I, "headers": _H,
        "body": _B,
    },
    "session": {"session_id": _S, "rollout_id": _S, "attempt": _I},
    "mark": {"rollout_id": _S, "min_attempt": _I, "min_base": _I},
    "count": {"rollout_id": _S, "attempt": _I, "base": _I, "executed": _I},
}  # fmt: skip
_ORDER: Final = ("excluded", "rollout", "call", "executed", "session", "mark", "count")
_CALL_ID: Final = re.compile(r"[0-9]{1,10}(\.[0-9]{1,10})*")
_STATES: Final = (RolloutState.COMPLETED, RolloutState.PARKED, RolloutState.PENDING, RolloutState.EXCLUDED)


def read(files: Sequence[Path], progress: Callable[[int], None] | None = None) -> Iterator[dict[str, Any]]:
    """The records of `files`, bodies decoded. `progress(bytes)` is called every 256 lines. Raises SNAPSHOT_CORRUPT or SNAPSHOT_TOO_NEW at the first bad line."""
    size = 0
    for path in files:
        order = _Order()
        with open_content(path) as lines:
            for number in range(1, MAX_LINES + 2):
                raw = lines.readline(MAX_LINE_BYTES + 1)
                if not raw:
                    if number == 1:
                        raise refuse(Reason.SNAPSHOT_CORRUPT, f"{path.name} is empty.")
                    break
                if number > MAX_LINES or len(raw) > MAX_LINE_BYTES:
                    raise refuse(Reason.LIMIT_EXCEEDED, f"{path.name}:{number} is over the limits of a call log.")
                size += len(raw)
                if progress is not None and number % 256 == 0:
                    progress(size)
                try:
                    record = json.loads(raw.decode("utf-8", "surrogatepass"))
                    if number == 1:
                        order.by_rollout = _check_header(record, path)
                        continue
                    checked = _checked(record, before_v3=not order.by_rollout)
                    order.check(checked)
                    yield checked
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise refuse(
                        Reason.SNAPSHOT_CORRUPT, f"{path.name}:{number} is not a line of a call log: {error!r}"[:300]
                    ) from error


@dataclass(slots=True)
class _Order:
    """Calls come after their rollouts, or a rollout could be judged too late; and what is said of one rollout is together."""

    by_rollout: bool = False
    at: int = 0
    rollout_id: str = ""
    seen: set[str] = field(default_factory=set[str])

    def check(self, record: Mapping[str, Any]) -> None:
        """Raises ValueError for a line that is not where it should be."""
        kind, rollout_id = _ORDER.index(record["t"]), record["rollout_id"]
        if self.by_rollout and kind and rollout_id != self.rollout_id:
            if rollout_id in self.seen:
                raise ValueError("a rollout comes twice")
            self.seen.add(rollout_id)
            self.rollout_id, self.at = rollout_id, 1
        if kind < self.at:
            raise ValueError("out of order")
        self.at = kind


def _has_counts(path: Path) -> bool:
    with open_content(path) as lines:
        head = lines.readline(1024)  # the reader checks the line
        return _OLD.encode() not in head and b'"counted":false' not in head


def _check_header(record: Any, path: Path) -> bool:
    """Whether the lines of a rollout are together. Raises ValueError, SNAPSHOT_TOO_NEW."""
    record = dict(record)
    known: str = record["format"]
    if record.pop("t") != "header" or type(known) is not str:
        raise ValueError("no header")
    if known not in (FORMAT, _COUNTED, _OLD):
        raise refuse(Reason.SNAPSHOT_TOO_NEW, f"{path.name} has format {known[:64]!r}, not {FORMAT}.")
    if set(record) != ({"format", "counted"} if known == FORMAT else {"format"}):
        raise ValueError("no header")
    if known == FORMAT and type(record["counted"]) is not bool:
        raise ValueError("no header")
    return known == FORMAT


def _checked(record: Any, before_v3: bool) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    fields = dict(cast("Mapping[str, Any]", record))
    if before_v3 and fields["t"] == "rollout" and type(fields.pop("explicit")) is not int:
        raise ValueError("explicit is not of type integer")
    return _checked_fields(fields)


def _checked_fields(record: dict[str, Any]) -> dict[str, Any]:
    fields = _FIELDS[record["t"]]
    if set(record) != {"t", *fields}:
        raise ValueError("other fields than expected")
    for name, kind in fields.items():
        value = record[name]
        if kind == _S:
            good = type(value) is str
        elif kind == _I:
            good = type(value) is int and 0 <= value < 2**62
        elif kind == _H:
            good = _are_headers(value)
        else:
            record[name] = _bytes(value)
            good = True
        if not good:
            raise ValueError(f"{name} is not of type {kind}")
    if not is_rollout_id(record["rollout_id"]):
        raise ValueError("malformed rollout_id")
    attempt = record.get("attempt", 0)
    if attempt > MAX_ATTEMPT or record.get("base", 0) > attempt:
        raise ValueError("an attempt or base that no call can have")
    if _CALL_ID.fullmatch(record.get("call_id", "0")) is None:
        raise ValueError("malformed call_id")
    if record["t"] == "rollout" and record["state"] not in _STATES:
        raise ValueError("unknown state")
    return record


def _are_headers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and [type(part) for part in cast("Sequence[Any]", pair)] == [str, str]
        for pair in cast("Sequence[Any]", value)
    )


def _bytes(value: Any) -> bytes:
    if type(value) is str:
        return value.encode("utf-8", "surrogatepass")
    if type(value) is dict:
        held = cast("dict[str, Any]", value)
        if set(held) == {"b64"} and type(held["b64"]) is str:
            return base64.b64decode(held["b64"], validate=True)
    raise ValueError("body is neither text nor base64")
