"""The call log as a snapshot holds it: the lines of each rollout, gathered while it runs, sealed by a save.

Runs in the shim, on the same `calls.db` as the workers. The rule: a save holds what the log has held since every worker had
closed admission. What was read before is used for rollouts that have not changed since, which the log itself notes (the table
`touched`), so that a save costs what has changed, however much was ever logged.

    calls.rope      format `gym-calls-v3`: a header, `excluded` lines, then the lines of one rollout after those of another
    calls.jsonl     the same as a file of its own, where there is no snapshot root

Only what a restore needs is in it: rollouts that live or must restart, completed ones that nobody retired, remembered answers
and how many calls were executed, sessions, marks. A body that is JSON or other UTF-8 text stays readable, anything else is
base64. Everything here blocks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from coordinator.wire import failpoints
from coordinator.wire.beneath import storage_error
from coordinator.wire.chunks import Chunks, ChunkWriter, Piece, Segment, wasted
from coordinator.wire.rope import SUFFIX, Rope
from coordinator.wire.terms import RolloutState
from participant_shims.adapter import LedgerLine, WrittenFile
from participant_shims.gate.calllog import UNCOUNTED, CallLog

FORMAT: Final = "gym-calls-v3"
FILE: Final = "calls.jsonl"
ROPE: Final = f"calls{SUFFIX}"
SETTLED_FOR_S: Final = 300.0  # chunks that were touched are left alone for longer than that (coordinator.sweeping)
_FAILED: Final = "its last dispatch failed with status {}"
_TABLES: Final = ("rollouts", "executed", "sessions", "marks", "counts")
_TOLD_EVERY: Final = 256  # rollouts

Told = Callable[[int, int], None]  # bytes and rollouts so far


@dataclass(frozen=True, slots=True)
class LogExport:
    """What was written. `ledger` has one line for each rollout that this server runs, or cannot save."""

    files: tuple[WrittenFile, ...]
    ledger: tuple[LedgerLine, ...]
    recorded_calls: int


@dataclass(slots=True)
class _Bundle:
    """One rollout. `lines` or `piece`: what the log holds of it. `ledger` is None for what is another server's to tell."""

    ledger: LedgerLine | None
    digest: bytes = b""
    piece: Piece | None = None


class Gathered:
    """What was read of one call log, and where it lies. Not for two logs; a thread at a time, which `stop` sends away."""

    def __init__(self) -> None:
        self._bundles: dict[str, _Bundle] = {}
        self._stale: set[str] = set()  # to be read again
        self._chunks: Chunks | None = None
        self._counted: bool | None = None
        self._settled_at = float("-inf")
        self._busy = threading.Lock()
        self._stopped = False

    def doubt(self) -> None:
        """A save has failed: each chunk must be found before it is used again."""
        self._settled_at = float("-inf")

    def ahead(self, log: CallLog, chunks: Chunks, within_s: float) -> None:
        """Write what has changed since the last time, while the server works. Raises sqlite3.Error, STORAGE_*.

        Ends after `within_s` seconds, and when `export` is called.
        """
        until = time.monotonic() + within_s
        with self._busy:
            self._stopped = False
            log.bring_in()
            self._begin(log, chunks, tidy=True)
            self._gather(log, ChunkWriter(chunks), lambda: self._stopped or time.monotonic() > until, None)

    def export(
        self,
        log: CallLog,
        directory: Path,
        chunks: Chunks | None = None,
        *,
        stateful: bool = True,
        lost_reason: str = "",
        progress: Told | None = None,
    ) -> LogExport:
        """Write the log below `directory`, durably; with `chunks` as a rope. `stateful`, `lost_reason`: see `export`.

        Raises sqlite3.Error, STORAGE_*, OSError (also ENOSPC) with a partial file left behind: the caller removes its
        directory.
        """
        self._stopped = True
        with self._busy:
            failpoints.reach("calllog.before_write")
            log.bring_in()
            if chunks is None:
                return _to_file(log, directory, stateful, lost_reason, progress)
            self._begin(log, chunks, tidy=False)
            log.db.execute("BEGIN")  # one view, also while a worker records an answer that arrives during the export
            try:
                self._gather(log, ChunkWriter(chunks), lambda: False, progress)
                lost = _lost(log.db, stateful, lost_reason)
                return self._seal(log, directory / ROPE, lost)
            finally:
                log.db.execute("ROLLBACK")

    # -- reading

    def _begin(self, log: CallLog, chunks: Chunks, *, tidy: bool) -> None:
        counted = not log.noted(UNCOUNTED)
        if self._chunks is None or self._chunks.root != chunks.root or counted != self._counted:
            self._chunks, self._counted, self._bundles, self._stale = chunks, counted, {}, set(_known(log.db))
        with log.together():
            self._stale |= {row[0] for row in log.db.execute("SELECT rollout_id FROM touched")}
            log.db.execute("DELETE FROM touched")
        if tidy or time.monotonic() - self._settled_at > SETTLED_FOR_S:
            live: dict[Segment, int] = {}
            for bundle in self._bundles.values():
                if bundle.piece is not None:
                    live[bundle.piece[0]] = live.get(bundle.piece[0], 0) + bundle.piece[2]
            gone = {s for s in live if s.chunk is None or not chunks.touch(s.chunk)}
            if tidy:
                gone |= wasted(live)
            for rollout_id, bundle in self._bundles.items() if gone else ():
                if bundle.piece is not None and bundle.piece[0] in gone:
                    bundle.piece = None
                    self._stale.add(rollout_id)
            self._settled_at = time.monotonic()

    def _gather(self, log: CallLog, out: ChunkWriter, over: Callable[[], bool], progress: Told | None) -> None:
        size = done = 0
        try:
            for rollout_id in sorted(self._stale):
                if over():
                    break
                lines, bundle = _read(log.db, rollout_id, bool(self._counted))
                before = self._bundles.pop(rollout_id, None)
                if bundle is not None:
                    bundle.digest = hashlib.sha256(lines).digest()
                    same = before is not None and before.piece is not None and before.digest == bundle.digest
                    bundle.piece = before.piece if same and before is not None else out.add(lines) if lines else None
                    self._bundles[rollout_id] = bundle
                self._stale.discard(rollout_id)
                size, done = size + len(lines), done + 1
                if progress is not None and done % _TOLD_EVERY == 0:
                    progress(size, done)
            out.seal()
        except BaseException:
            self._settled_at = float("-inf")  # what lies in no chunk is found before it is used
            raise

    # -- writing

    def _seal(self, log: CallLog, path: Path, lost: Mapping[str, tuple[int, str]]) -> LogExport:
        rope = Rope()
        rope.add_inline(_dump({"t": "header", "format": FORMAT, "counted": bool(self._counted)}))
        names = sorted(self._bundles)
        bundles = [self._bundles[name] for name in names]
        ledger, skip = _judged(
            [(n, b.ledger) for n, b in zip(names, bundles, strict=True) if b.ledger is not None], lost
        )
        if skip:
            rope.add_inline(b"".join(map(_dump, _of_excluded(log.db, skip))))
            bundles = [self._bundles[name] for name in names if name not in skip]
        rope.add(*(bundle.piece for bundle in bundles if bundle.piece is not None))
        data = rope.to_bytes()
        _write(path, [data])
        file = WrittenFile(path.name, len(data), hashlib.sha256(data).hexdigest())
        return LogExport((file,), tuple(ledger), sum(line.recorded_calls for line in ledger))


def export(
    log: CallLog,
    directory: Path,
    *,
    stateful: bool = True,
    lost_reason: str = "",
    progress: Told | None = None,
) -> LogExport:
    """Write `<directory>/calls.jsonl` from one consistent view of the log, durably.

    `stateful=False` with a `lost_reason` is for servers whose state cannot be saved: every rollout that has a session
    here is excluded with that reason. `progress(bytes, rollouts)` is called now and then. Raises OSError (also ENOSPC)
    with a partial file left behind: the caller removes its directory.
    """
    return Gathered().export(log, directory, stateful=stateful, lost_reason=lost_reason, progress=progress)


def _to_file(log: CallLog, directory: Path, stateful: bool, lost_reason: str, progress: Told | None) -> LogExport:
    path, db = directory / FILE, log.db
    counted = not log.noted(UNCOUNTED)
    db.execute("BEGIN")
    try:
        lost = _lost(db, stateful, lost_reason)
        found = [(name, _ledger_line(db, name)) for name in sorted(_known(db))]
        ledger, skip = _judged([(name, line) for name, line in found if line is not None], lost)
        digest, size = hashlib.sha256(), 0

        def parts() -> Iterator[bytes]:
            nonlocal size
            yield _dump({"t": "header", "format": FORMAT, "counted": counted})
            yield from map(_dump, _of_excluded(db, skip))
            for done, (rollout_id, _) in enumerate(found, 1):
                if rollout_id not in skip:
                    yield _read(db, rollout_id, counted)[0]
                if progress is not None and done % _TOLD_EVERY == 0:
                    progress(size, done)

        def counted_parts() -> Iterator[bytes]:
            nonlocal size
            for part in parts():
                digest.update(part)
                size += len(part)
                yield part

        _write(path, counted_parts())
    finally:
        db.execute("ROLLBACK")
    recorded = sum(line.recorded_calls for line in ledger)
    return LogExport((WrittenFile(path.name, size, digest.hexdigest()),), tuple(ledger), recorded)


def _write(path: Path, parts: Sequence[bytes] | Iterator[bytes]) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            for part in parts:
                out.write(part)
            out.flush()
            failpoints.reach("calllog.before_fsync")
            os.fsync(out.fileno())
    except OSError as error:  # that of a write says no path, and the root and the run directory are two disks often
        raise storage_error(error, f"writing {path}") from error


# -- what the log says of a rollout


def _known(db: sqlite3.Connection) -> Iterator[str]:
    """Every rollout that the log knows."""
    for row in db.execute(" UNION ".join(f"SELECT rollout_id FROM {table}" for table in _TABLES)):
        yield row[0]


def _ledger_line(db: sqlite3.Connection, rollout_id: str) -> LedgerLine | None:
    """Where a rollout stands that this server runs, without what only the present cut says.

    None for a guest, and for what is another server's to tell.
    """
    row = db.execute(
        "SELECT attempt, state, input_sha256, turns, status, reason, guest FROM rollouts WHERE rollout_id=?",
        (rollout_id,),
    ).fetchone()
    if row is None or row[6]:
        return None
    attempt, state, sha256, turns, status, noted, _ = row
    if state == "completed":
        return LedgerLine(rollout_id, attempt, RolloutState.COMPLETED, "", int(turns), "", sha256)
    if state in ("failed", "excluded"):
        reason = noted if state == "excluded" else _FAILED.format(status)
        return LedgerLine(rollout_id, attempt, RolloutState.EXCLUDED, reason, 0, "", sha256)
    (calls,) = db.execute("SELECT count(*) FROM calls WHERE rollout_id=? AND done=1", (rollout_id,)).fetchone()
    (pending,) = db.execute(
        "SELECT max(server || ' ' || method || ' ' || path) FROM calls WHERE rollout_id=? AND done=0 AND own=0",
        (rollout_id,),
    ).fetchone()
    to = RolloutState.PARKED if pending is None else RolloutState.PENDING
    return LedgerLine(rollout_id, attempt, to, "", int(calls), str(pending or "")[:256], sha256)


def _lost(db: sqlite3.Connection, stateful: bool, lost_reason: str) -> dict[str, tuple[int, str]]:
    """What the present cut cannot hold: attempt and reason by rollout."""
    lost = {r[0]: (r[1], r[2]) for r in db.execute("SELECT rollout_id, attempt, reason FROM excluded")}
    if not stateful and lost_reason:
        for rollout_id, attempt in db.execute("SELECT rollout_id, max(attempt) FROM sessions GROUP BY rollout_id"):
            lost.setdefault(rollout_id, (attempt, lost_reason))
    return lost


def _judged(
    found: Sequence[tuple[str, LedgerLine]], lost: Mapping[str, tuple[int, str]]
) -> tuple[list[LedgerLine], dict[str, LedgerLine]]:
    """The ledger of the cut, sorted, and the rollouts of it that cannot be saved."""
    ledger: list[LedgerLine] = []
    mine: set[str] = set()
    for rollout_id, line in found:
        mine.add(rollout_id)
        if rollout_id in lost and line.state is not RolloutState.COMPLETED:
            reason = lost[rollout_id][1]
            line = replace(line, state=RolloutState.EXCLUDED, reason=reason, recorded_calls=0, waiting_on="")
        ledger.append(line)
    for rollout_id, (attempt, reason) in lost.items():
        if rollout_id not in mine and rollout_id != "anonymous":
            ledger.append(LedgerLine(rollout_id, attempt, RolloutState.EXCLUDED, reason))
    ledger.sort(key=lambda line: line.rollout_id)
    return ledger, {line.rollout_id: line for line in ledger if line.state is RolloutState.EXCLUDED}


def _of_excluded(db: sqlite3.Connection, skip: Mapping[str, LedgerLine]) -> Iterator[dict[str, Any]]:
    """The lines of rollouts that are not saved: why; and what their agent has to account for until they are dispatched again."""
    for line in skip.values():
        yield {"t": "excluded", "rollout_id": line.rollout_id, "attempt": line.attempt, "reason": line.reason}
    for rollout_id in sorted(skip):
        for fields in _rollout(db, rollout_id, RolloutState.EXCLUDED):
            if not fields["guest"]:  # also in the next snapshot
                yield fields | {"input": "", "cookie": "", "turns": 0, "headers": [], "body": ""}
        yield from _marks(db, rollout_id)


def _read(db: sqlite3.Connection, rollout_id: str, counted: bool) -> tuple[bytes, _Bundle | None]:
    """The lines of a rollout, and what is known of it; None when nothing is."""
    ledger = _ledger_line(db, rollout_id)
    state = ledger.state if ledger is not None else RolloutState.PARKED
    lines = b"".join(map(_dump, _records(db, rollout_id, state, counted)))
    return lines, _Bundle(ledger) if lines or ledger is not None else None


def _records(db: sqlite3.Connection, rollout_id: str, state: RolloutState, counted: bool) -> Iterator[dict[str, Any]]:
    yield from _rollout(db, rollout_id, state)
    for r in db.execute(
        "SELECT scope, number, call_id, attempt, server, own, method, path, digest, done, status, phrase, url, headers,"
        " body FROM calls WHERE rollout_id=? ORDER BY scope, number",
        (rollout_id,),
    ):
        yield {
            "t": "call", "rollout_id": rollout_id, "scope": r[0], "number": r[1], "call_id": r[2], "attempt": r[3],
            "server": r[4], "own": r[5], "method": r[6], "path": r[7], "digest": r[8], "done": r[9], "status": r[10],
            "phrase": r[11], "url": r[12], "headers": json.loads(r[13]), "body": _text(r[14]),
        }  # fmt: skip
    for r in db.execute(
        "SELECT call_id, attempt, base, digest, status, headers, body FROM executed WHERE rollout_id=? ORDER BY serial",
        (rollout_id,),
    ):
        yield {
            "t": "executed", "rollout_id": rollout_id, "call_id": r[0], "attempt": r[1], "base": r[2], "digest": r[3],
            "status": r[4], "headers": json.loads(r[5]), "body": _text(r[6]),
        }  # fmt: skip
    for r in db.execute(
        "SELECT session_id, attempt FROM sessions WHERE rollout_id=? ORDER BY session_id", (rollout_id,)
    ):
        yield {"t": "session", "session_id": r[0], "rollout_id": rollout_id, "attempt": r[1]}
    yield from _marks(db, rollout_id)
    counts = (
        "SELECT max(attempt), max(base), sum(executed) FROM counts WHERE rollout_id=? GROUP BY rollout_id"  # by worker
    )
    for r in db.execute(counts, (rollout_id,)) if counted else ():
        yield {"t": "count", "rollout_id": rollout_id, "attempt": r[0], "base": r[1], "executed": r[2]}


def _rollout(db: sqlite3.Connection, rollout_id: str, state: RolloutState) -> Iterator[dict[str, Any]]:
    for r in db.execute(
        "SELECT attempt, base, input_sha256, input, cookie, guest, turns, status, headers, body"
        " FROM rollouts WHERE rollout_id=?",
        (rollout_id,),
    ):
        yield {
            "t": "rollout", "rollout_id": rollout_id, "attempt": r[0], "base": r[1],
            "input_sha256": r[2], "input": _text(r[3]), "cookie": r[4], "state": int(state), "guest": r[5],
            "turns": r[6], "status": r[7], "headers": json.loads(r[8]), "body": _text(r[9]),
        }  # fmt: skip


def _marks(db: sqlite3.Connection, rollout_id: str) -> Iterator[dict[str, Any]]:
    for r in db.execute("SELECT min_attempt, min_base FROM marks WHERE rollout_id=?", (rollout_id,)):
        yield {"t": "mark", "rollout_id": rollout_id, "min_attempt": r[0], "min_base": r[1]}


def _dump(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


def _text(body: bytes) -> str | dict[str, str]:
    try:
        return bytes(body).decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(body).decode()}
