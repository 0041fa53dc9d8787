"""The call log of one life of a server: `calls.db`, SQLite in WAL mode, shared by the server's worker processes.

The rule kept here: a response is in the log before anybody acts on it. A commit reaches the kernel and so outlives the
process (synchronous=OFF; a snapshot is what outlives the host: see calllog_files). Callers: the gate in each worker,
on its event loop; and the shim, which exports and loads the same file (calllog_files).

Tables: `rollouts` (the dispatches of this server, agents only), `calls` (what each of them called, and the answers),
`executed` (answers that this server gave and whose caller has not said yet that it has them), `sessions` (which
rollout a session belongs to), `marks` (attempts and bases that are over), `excluded` (rollouts that the present cut
cannot hold), `meta`.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from participant_shims.identity import CallIdentity

Header = tuple[str, str]

FORMAT: Final = "gym-calls-v1"  # of the file that calllog_files writes, and state schema of agents and models
_BUSY_S: Final = 5.0  # another worker's commit takes microseconds; longer means that a process was stopped inside one
# Answers of rollouts that ended without a word (their agent was killed) are dropped from here on, oldest first.
MAX_EXECUTED: Final = 65_536

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS rollouts(
  rollout_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, base INTEGER NOT NULL, explicit INTEGER NOT NULL,
  input_sha256 TEXT NOT NULL, input BLOB NOT NULL, cookie TEXT NOT NULL, state TEXT NOT NULL,
  restored INTEGER NOT NULL DEFAULT 0, claimed INTEGER NOT NULL DEFAULT 1, delivered INTEGER NOT NULL DEFAULT 0,
  guest INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', turns INTEGER NOT NULL DEFAULT 0, pid INTEGER NOT NULL DEFAULT 0,
  status INTEGER NOT NULL DEFAULT 0, headers TEXT NOT NULL DEFAULT '[]', body BLOB NOT NULL DEFAULT x'');
CREATE TABLE IF NOT EXISTS calls(
  rollout_id TEXT NOT NULL, scope TEXT NOT NULL, number INTEGER NOT NULL, call_id TEXT NOT NULL,
  attempt INTEGER NOT NULL, server TEXT NOT NULL, own INTEGER NOT NULL, method TEXT NOT NULL, path TEXT NOT NULL,
  digest TEXT NOT NULL, done INTEGER NOT NULL, status INTEGER NOT NULL DEFAULT 0, phrase TEXT NOT NULL DEFAULT '',
  url TEXT NOT NULL DEFAULT '', headers TEXT NOT NULL DEFAULT '[]', body BLOB NOT NULL DEFAULT x'');
CREATE UNIQUE INDEX IF NOT EXISTS calls_by_id ON calls(rollout_id, call_id);
CREATE INDEX IF NOT EXISTS calls_by_scope ON calls(rollout_id, scope, number);
CREATE TABLE IF NOT EXISTS executed(
  serial INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL, call_id TEXT NOT NULL, attempt INTEGER NOT NULL,
  base INTEGER NOT NULL, digest TEXT NOT NULL, status INTEGER NOT NULL, headers TEXT NOT NULL, body BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS executed_by_id ON executed(rollout_id, call_id);
CREATE TABLE IF NOT EXISTS sessions(session_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_by_rollout ON sessions(rollout_id);
CREATE TABLE IF NOT EXISTS marks(rollout_id TEXT PRIMARY KEY, min_attempt INTEGER NOT NULL, min_base INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS excluded(rollout_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as it is kept: status, headers in order (names as they were sent), body, the URL it came from."""

    status: int
    headers: tuple[Header, ...]
    body: bytes
    phrase: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call made in a scope. `answer` is None while it has none."""

    rollout_id: str
    scope: str
    number: int
    call_id: str
    server: str
    method: str
    path: str
    digest: str
    answer: Answer | None


class Verdict(Enum):
    """What to do with a dispatch that has arrived."""

    RUN = "run"  # from the input
    REPLAY = "replay"  # from the input, recorded calls are answered from the log
    ANSWER = "answer"  # with the recorded result
    JOIN = "join"  # it runs already, in this process or in another worker
    CONFLICT = "conflict"  # the id runs already with another input: run it unlogged beside


@dataclass(frozen=True, slots=True)
class Claim:
    """The decision about one dispatch. `cookie` is the Cookie header to run with, None: as it came."""

    verdict: Verdict
    attempt: int = 0
    base: int = 0
    reason: str = ""
    result: Answer | None = None
    cookie: str | None = None


class Stale(Enum):
    """Why a call is refused."""

    ATTEMPT = "STALE_ATTEMPT"  # a later attempt has been installed
    STATE_LOST = "STATE_LOST"  # the snapshot does not hold this server's state of the rollout: it must restart


class CallLog:
    """One process's connection to `calls.db`. Raises sqlite3.Error when the file cannot be used; nothing changed then.

    Not for several threads at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=OFF")
        self.db.executescript("BEGIN IMMEDIATE;" + _SCHEMA + "COMMIT;")

    def close(self) -> None:
        """Give the file back."""
        self.db.close()

    def seal(self) -> None:
        """Make the log durable against loss of the host: checkpoint the WAL and fsync the file."""
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def together(self) -> Generator[None]:
        """Several changes as one; none of them when the block raises."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    # -- dispatches

    def claim(self, rollout_id: str, explicit: bool, sha256: str, body: bytes, cookie: str) -> Claim:
        """Decide about a dispatch of `rollout_id` with this input, and record that it runs if it does.

        An explicit id is unique for ever: completed, it is answered from its record. An index id may come again (the
        next epoch): only a record that was restored and not yet claimed, or whose response never reached its client,
        answers it.
        """
        with self.together():
            row = self.db.execute(
                "SELECT attempt, base, input_sha256, state, restored, claimed, delivered, pid, status, headers, body,"
                " guest, cookie FROM rollouts WHERE rollout_id=?", (rollout_id,),
            ).fetchone()  # fmt: skip
            floor = self.db.execute("SELECT min_attempt FROM marks WHERE rollout_id=?", (rollout_id,)).fetchone()
            lowest = int(floor[0]) if floor else 0
            if row is None or row[11]:
                return self._begin(rollout_id, explicit, sha256, body, cookie, lowest, "")
            attempt, base, known, state, restored, claimed, delivered, pid = row[:8]
            same = known == sha256
            waiting = bool(restored and not claimed)
            if state in ("running", "diverged") and _alive(pid):
                return Claim(Verdict.JOIN if same else Verdict.CONFLICT, attempt, base)
            if state == "completed" and same and (explicit or waiting or not delivered):
                self.db.execute("UPDATE rollouts SET claimed=1 WHERE rollout_id=?", (rollout_id,))
                return Claim(Verdict.ANSWER, attempt, base, result=_answer(row[8], row[9], row[10]))
            if state in ("running", "interrupted"):
                # A restored one has its new attempt already (load installs N+1); one whose worker died gets it here.
                attempt = attempt if waiting else attempt + 1
                if same:
                    self.db.execute(
                        "UPDATE rollouts SET attempt=?, state='running', claimed=1, pid=?, turns=0 WHERE rollout_id=?",
                        (attempt, os.getpid(), rollout_id),
                    )
                    return Claim(Verdict.REPLAY, attempt, base, cookie=row[12])
                return self._begin(rollout_id, explicit, sha256, body, cookie, max(attempt, lowest), "input changed")
            reason = "" if same else "input changed"
            return self._begin(rollout_id, explicit, sha256, body, cookie, max(attempt + 1, lowest), reason)

    def _begin(
        self, rollout_id: str, explicit: bool, sha256: str, body: bytes, cookie: str, attempt: int, reason: str
    ) -> Claim:
        self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
        self.db.execute(
            "INSERT OR REPLACE INTO rollouts(rollout_id, attempt, base, explicit, input_sha256, input, cookie, state,"
            " reason, pid) VALUES(?,?,?,?,?,?,?,'running',?,?)",
            (rollout_id, attempt, attempt, int(explicit), sha256, body, cookie, reason, os.getpid()),
        )
        return Claim(Verdict.RUN, attempt, attempt, reason)

    def restart(self, rollout_id: str, attempt: int, reason: str) -> int:
        """Forget every call of the running `attempt`; the new attempt, which is its base as well."""
        with self.together():
            self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
            self.db.execute(
                "UPDATE rollouts SET attempt=?, base=?, turns=0, reason=?, state='running', restored=0"
                " WHERE rollout_id=? AND attempt=?", (attempt + 1, attempt + 1, reason, rollout_id, attempt),
            )  # fmt: skip
        return attempt + 1

    def diverge(self, rollout_id: str, attempt: int, reason: str) -> None:
        """Note that `attempt` must restart. Read with `diverged`, also by another worker."""
        self.db.execute(
            "UPDATE rollouts SET state='diverged', reason=? WHERE rollout_id=? AND attempt=? AND state='running'",
            (reason, rollout_id, attempt),
        )

    def diverged(self, rollout_id: str, attempt: int) -> bool:
        """Whether `attempt` must restart, or is not the present one any more."""
        row = self.db.execute("SELECT state, attempt FROM rollouts WHERE rollout_id=?", (rollout_id,)).fetchone()
        return row is not None and (row[0] == "diverged" or row[1] != attempt)

    def finish(self, rollout_id: str, attempt: int, result: Answer) -> None:
        """Record the result of a dispatch. A status of 400 and above is a failure: the next dispatch begins anew."""
        state = "completed" if result.status < 400 else "failed"
        with self.together():
            changed = self.db.execute(
                "UPDATE rollouts SET state=?, status=?, headers=?, body=?, delivered=0 WHERE rollout_id=? AND attempt=?",
                (state, result.status, _dump(result.headers), result.body, rollout_id, attempt),
            ).rowcount
            if changed:
                self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))

    def interrupt(self, rollout_id: str, attempt: int) -> None:
        """The handler of a dispatch ended without a response: the next dispatch continues it."""
        self.db.execute(
            "UPDATE rollouts SET state='interrupted' WHERE rollout_id=? AND attempt=? AND state IN ('running','diverged')",
            (rollout_id, attempt),
        )

    def delivered(self, rollout_id: str, attempt: int) -> None:
        """The response of a dispatch has been sent to a client that was still there."""
        self.db.execute("UPDATE rollouts SET delivered=1 WHERE rollout_id=? AND attempt=?", (rollout_id, attempt))

    def result(self, rollout_id: str, sha256: str) -> Answer | None:
        """The recorded result of a finished dispatch with this input; None while it runs or when it never ran."""
        row = self.db.execute(
            "SELECT status, headers, body FROM rollouts WHERE rollout_id=? AND input_sha256=?"
            " AND state IN ('completed','failed')", (rollout_id, sha256),
        ).fetchone()  # fmt: skip
        return _answer(*row) if row else None

    def attempt_of(self, rollout_id: str) -> int:
        """The present attempt of a dispatch; -1 when it is not known."""
        row = self.db.execute("SELECT attempt FROM rollouts WHERE rollout_id=?", (rollout_id,)).fetchone()
        return int(row[0]) if row else -1

    def runs_elsewhere(self, rollout_id: str) -> bool:
        """Whether another live worker runs it."""
        row = self.db.execute("SELECT state, pid FROM rollouts WHERE rollout_id=?", (rollout_id,)).fetchone()
        return row is not None and row[0] in ("running", "diverged") and row[1] != os.getpid() and _alive(row[1])

    def is_fresh(self) -> bool:
        """No dispatch has been served in this life but, at most, a snapshot has been loaded."""
        return self.db.execute("SELECT 1 FROM rollouts WHERE restored=0 OR claimed=1 LIMIT 1").fetchone() is None

    def host(self, call: CallIdentity) -> None:
        """A rollout that another agent dispatched calls this agent: its calls from here are logged as well."""
        with self.together():
            row = self.db.execute(
                "SELECT attempt, base, guest FROM rollouts WHERE rollout_id=?", (call.rollout_id,)
            ).fetchone()
            if row is not None and (not row[2] or (row[0] >= call.attempt and row[1] >= call.base)):
                return
            if row is not None and row[1] < call.base:
                self.db.execute("DELETE FROM calls WHERE rollout_id=?", (call.rollout_id,))
            self.db.execute(
                "INSERT OR REPLACE INTO rollouts(rollout_id, attempt, base, explicit, input_sha256, input, cookie,"
                " state, guest, pid) VALUES(?,?,?,0,'',x'','','running',1,?)",
                (call.rollout_id, call.attempt, call.base, os.getpid()),
            )

    # -- calls that leave

    def records(self, rollout_id: str, scope: str) -> list[CallRecord]:
        """The calls that were made in a scope, in their order."""
        rows = self.db.execute(
            "SELECT number, call_id, server, method, path, digest, done, status, headers, body, phrase, url FROM calls"
            " WHERE rollout_id=? AND scope=? ORDER BY number", (rollout_id, scope),
        ).fetchall()  # fmt: skip
        return [
            CallRecord(rollout_id, scope, r[0], r[1], r[2], r[3], r[4], r[5], _answer(*r[7:12]) if r[6] else None)
            for r in rows
        ]

    def issue(
        self, call: CallIdentity, scope: str, number: int, server: str, own: bool, method: str, path: str, digest: str
    ) -> None:
        """A call leaves now. `own`: it goes to this server itself."""
        self.db.execute(
            "INSERT OR REPLACE INTO calls(rollout_id, scope, number, call_id, attempt, server, own, method, path,"
            " digest, done) VALUES(?,?,?,?,?,?,?,?,?,?,0)",
            (call.rollout_id, scope, number, call.call_id, call.attempt, server, int(own), method, path, digest),
        )

    def respond(self, call: CallIdentity, answer: Answer, own: bool) -> bool:
        """Record the answer to a call that left; False when the call belongs to a stale attempt and was dropped."""
        with self.together():
            changed = self.db.execute(
                "UPDATE calls SET done=1, status=?, phrase=?, url=?, headers=?, body=? WHERE rollout_id=? AND call_id=?"
                " AND EXISTS(SELECT 1 FROM rollouts r WHERE r.rollout_id=calls.rollout_id AND r.attempt=?)",
                (
                    answer.status, answer.phrase, answer.url, _dump(answer.headers), answer.body,
                    call.rollout_id, call.call_id, call.attempt,
                ),
            ).rowcount  # fmt: skip
            if changed:
                self.db.execute("UPDATE rollouts SET turns=turns+1 WHERE rollout_id=?", (call.rollout_id,))
            if own:  # this server is the callee too, and nobody else would tell it
                self.db.execute(
                    "DELETE FROM executed WHERE rollout_id=? AND call_id=?", (call.rollout_id, call.call_id)
                )
        return changed > 0

    def is_own_call(self, call: CallIdentity) -> bool:
        """Whether this server has made `call` itself and still waits for the answer: a self-call is never parked."""
        return self.db.execute(
            "SELECT 1 FROM calls WHERE rollout_id=? AND call_id=? AND own=1 AND done=0", (call.rollout_id, call.call_id)
        ).fetchone() is not None  # fmt: skip

    # -- calls that were executed here

    def recall(self, call: CallIdentity) -> tuple[str, Answer] | None:
        """The remembered answer to `call` with the digest of its request."""
        row = self.db.execute(
            "SELECT digest, status, headers, body FROM executed WHERE rollout_id=? AND call_id=?",
            (call.rollout_id, call.call_id),
        ).fetchone()
        return (row[0], _answer(row[1], row[2], row[3])) if row else None

    def remember(self, call: CallIdentity, digest: str, answer: Answer, session_id: str = "") -> None:
        """Remember what was answered, before it is released. Answers of the rollout's earlier bases are forgotten."""
        with self.together():
            self.db.execute("DELETE FROM executed WHERE rollout_id=? AND base<?", (call.rollout_id, call.base))
            serial = self.db.execute(
                "INSERT OR REPLACE INTO executed(rollout_id, call_id, attempt, base, digest, status, headers, body)"
                " VALUES(?,?,?,?,?,?,?,?)",
                (
                    call.rollout_id, call.call_id, call.attempt, call.base, digest, answer.status,
                    _dump(answer.headers), answer.body,
                ),
            ).lastrowid  # fmt: skip
            if session_id:
                self.bind(session_id, call.rollout_id, call.attempt)
            if serial is not None and serial % 256 == 0:
                self.db.execute("DELETE FROM executed WHERE serial<=?", (serial - MAX_EXECUTED,))

    def forget(self, rollout_id: str, call_ids: Sequence[str]) -> None:
        """The caller has recorded these answers."""
        marks = ",".join("?" * len(call_ids))
        self.db.execute(f"DELETE FROM executed WHERE rollout_id=? AND call_id IN ({marks})", (rollout_id, *call_ids))

    def done(self, rollouts: Iterable[tuple[str, int]]) -> list[str]:
        """These attempts, and lower ones, have ended at their agent: their answers and sessions matter no more.

        The ids of those sessions.
        """
        gone: list[str] = []
        with self.together():
            for rollout_id, attempt in rollouts:
                gone += [
                    r[0]
                    for r in self.db.execute(
                        "SELECT session_id FROM sessions WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt)
                    )
                ]
                self.db.execute("DELETE FROM executed WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt))
                self.db.execute("DELETE FROM sessions WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt))
                if self.db.execute(
                    "DELETE FROM rollouts WHERE rollout_id=? AND attempt<=? AND guest=1", (rollout_id, attempt)
                ).rowcount:
                    self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
        return gone

    def bind(self, session_id: str, rollout_id: str, attempt: int) -> None:
        """The session belongs to the rollout."""
        self.db.execute(
            "INSERT INTO sessions(session_id, rollout_id, attempt) VALUES(?,?,?) ON CONFLICT(session_id) DO UPDATE"
            " SET rollout_id=excluded.rollout_id, attempt=excluded.attempt"
            " WHERE attempt<>excluded.attempt OR rollout_id<>excluded.rollout_id", (session_id, rollout_id, attempt),
        )  # fmt: skip

    def sessions(self) -> dict[str, tuple[str, int]]:
        """Session id to (rollout, attempt), of the rollouts that are not over."""
        rows = self.db.execute("SELECT session_id, rollout_id, attempt FROM sessions").fetchall()
        return {r[0]: (r[1], r[2]) for r in rows}

    # -- attempts that are over

    def stale(self, call: CallIdentity) -> Stale | None:
        """Why `call` must be refused; None when it may run, and then lower attempts are stale from now on."""
        row = self.db.execute(
            "SELECT min_attempt, min_base FROM marks WHERE rollout_id=?", (call.rollout_id,)
        ).fetchone()
        low, base = (row[0], row[1]) if row else (0, 0)
        if call.attempt < low:
            return Stale.ATTEMPT
        if call.base < base:
            return Stale.STATE_LOST
        if call.attempt > low:
            self.mark(call.rollout_id, call.attempt)
        return None

    def mark(self, rollout_id: str, min_attempt: int, min_base: int = 0) -> None:
        """Attempts below `min_attempt` and bases below `min_base` are refused from now on. Marks only rise."""
        self.db.execute(
            "INSERT INTO marks(rollout_id, min_attempt, min_base) VALUES(?,?,?) ON CONFLICT(rollout_id) DO UPDATE SET"
            " min_attempt=max(min_attempt, excluded.min_attempt), min_base=max(min_base, excluded.min_base)",
            (rollout_id, min_attempt, min_base),
        )

    def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        """Forget rollouts up to the given attempts and refuse those from now on; how many were known here."""
        known = 0
        with self.together():
            for rollout_id, attempt in attempts:
                seen = 0
                seen += self.db.execute(
                    "DELETE FROM rollouts WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt)
                ).rowcount
                if seen:
                    self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
                for table in ("executed", "sessions"):
                    seen += self.db.execute(
                        f"DELETE FROM {table} WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt)
                    ).rowcount
                known += seen > 0
                self.mark(rollout_id, attempt + 1)
        return known

    # -- rollouts that the present cut cannot hold; and notes

    def exclude(self, rollout_id: str, attempt: int, reason: str) -> None:
        """The present cut cannot hold this rollout. The first reason stays."""
        self.db.execute("INSERT OR IGNORE INTO excluded VALUES(?,?,?)", (rollout_id, attempt, reason[:1000]))

    def excluded(self) -> list[tuple[str, int, str]]:
        """What the present cut cannot hold: rollout, attempt, reason."""
        return [(r[0], r[1], r[2]) for r in self.db.execute("SELECT rollout_id, attempt, reason FROM excluded")]

    def clear_excluded(self) -> None:
        """A new cut begins."""
        self.db.execute("DELETE FROM excluded")

    def note(self, key: str, value: Any) -> None:
        """Keep a JSON value for the other workers."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, json.dumps(value)))

    def noted(self, key: str) -> Any:
        """The JSON value kept under `key`, or None."""
        row = self.db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return json.loads(row[0]) if row else None


def _dump(headers: Iterable[Header]) -> str:
    return json.dumps([list(h) for h in headers], separators=(",", ":"))


def _answer(status: int, headers: str, body: bytes, phrase: str = "", url: str = "") -> Answer:
    return Answer(int(status), tuple((str(k), str(v)) for k, v in json.loads(headers)), bytes(body), phrase, url)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
