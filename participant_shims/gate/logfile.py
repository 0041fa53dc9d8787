"""The file below the call log: `calls.db`, SQLite in WAL mode, shared by the worker processes of a server.

The rule kept here: a commit reaches the kernel and so outlives the process (synchronous=OFF; a snapshot is what
outlives the host), and in a server a failing disk costs a rollout its place in the next cut, never a request.
"""

from __future__ import annotations

import errno
import functools
import json
import sqlite3
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from coordinator.wire.beneath import STORAGE_HELP, storage_error
from coordinator.wire.errors import Reason, SafepointError, refuse
from participant_shims.gate.tail import FULL_BYTES, Tail, records, tails_of
from participant_shims.identity import CallIdentity

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Log = TypeVar("_Log", bound="LogFile")
Header = tuple[str, str]

FORMAT: Final = "gym-calls-v1"  # the state schema of agents and models; versions of the file are calllog_files' own
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"))
_BUSY_S: Final = 5.0  # another worker's commit takes microseconds; longer means that a process was stopped inside one

# A call that its callee has counted for certain. Not one that its gate lets pass, that may have failed before there was an
# answer, or whose last chunk may be here before the callee is done: too few is safe, too many a loss that there was not.
FINISHED: Final = (
    "done=1 AND status<400 AND method NOT IN ('GET','HEAD','OPTIONS')"
    " AND instr(lower(headers),'event-stream')=0 AND instr(lower(headers),'x-ndjson')=0"
)
_SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS rollouts(
  rollout_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, base INTEGER NOT NULL,
  input_sha256 TEXT NOT NULL, input BLOB NOT NULL, cookie TEXT NOT NULL, state TEXT NOT NULL,
  restored INTEGER NOT NULL DEFAULT 0, claimed INTEGER NOT NULL DEFAULT 1, delivered INTEGER NOT NULL DEFAULT 0,
  guest INTEGER NOT NULL DEFAULT 0, reason TEXT NOT NULL DEFAULT '', turns INTEGER NOT NULL DEFAULT 0,
  pid INTEGER NOT NULL DEFAULT 0, began TEXT NOT NULL DEFAULT '',
  status INTEGER NOT NULL DEFAULT 0, headers TEXT NOT NULL DEFAULT '[]', body BLOB NOT NULL DEFAULT x'');
CREATE TABLE IF NOT EXISTS calls(
  rollout_id TEXT NOT NULL, scope TEXT NOT NULL, number INTEGER NOT NULL, call_id TEXT NOT NULL,
  attempt INTEGER NOT NULL, server TEXT NOT NULL, own INTEGER NOT NULL, method TEXT NOT NULL, path TEXT NOT NULL,
  digest TEXT NOT NULL, done INTEGER NOT NULL, status INTEGER NOT NULL DEFAULT 0, phrase TEXT NOT NULL DEFAULT '',
  url TEXT NOT NULL DEFAULT '', headers TEXT NOT NULL DEFAULT '[]', body BLOB NOT NULL DEFAULT x'');
CREATE UNIQUE INDEX IF NOT EXISTS calls_by_id ON calls(rollout_id, call_id);
CREATE INDEX IF NOT EXISTS calls_by_scope ON calls(rollout_id, scope, number);
CREATE INDEX IF NOT EXISTS calls_finished ON calls(rollout_id, server) WHERE {FINISHED};
CREATE TABLE IF NOT EXISTS executed(
  serial INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL, call_id TEXT NOT NULL, attempt INTEGER NOT NULL,
  base INTEGER NOT NULL, digest TEXT NOT NULL, status INTEGER NOT NULL, headers TEXT NOT NULL, body BLOB NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS executed_by_request ON executed(rollout_id, call_id, digest);
CREATE TABLE IF NOT EXISTS sessions(session_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_by_rollout ON sessions(rollout_id);
CREATE TABLE IF NOT EXISTS counts(
  rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, base INTEGER NOT NULL, executed INTEGER NOT NULL,
  pid INTEGER NOT NULL DEFAULT 0, began TEXT NOT NULL DEFAULT '', PRIMARY KEY(rollout_id, pid, began));
CREATE TABLE IF NOT EXISTS callers(
  rollout_id TEXT NOT NULL, caller TEXT NOT NULL, base INTEGER NOT NULL, log TEXT NOT NULL,
  PRIMARY KEY(rollout_id, caller)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks(rollout_id TEXT PRIMARY KEY, min_attempt INTEGER NOT NULL, min_base INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS excluded(rollout_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS elsewhere(rollout_id TEXT PRIMARY KEY, input_sha256 TEXT NOT NULL, actor TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS touched(rollout_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tails(name TEXT PRIMARY KEY, brought INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS moved(serial INTEGER PRIMARY KEY, session_id TEXT NOT NULL);
"""
# What of each table is in a snapshot: a rollout of which any of it changes is written anew by the next save.
_WATCHED: Final = {
    "rollouts": "attempt, base, input_sha256, input, cookie, state, turns, status, headers, body, guest, reason",
    "calls": "",
    "executed": "",
    "sessions": "",
    "counts": "",
    "marks": "",
}
_TRIGGERS: Final = "".join(
    f"CREATE TRIGGER IF NOT EXISTS {table}_{what} AFTER {what.upper()}{f' OF {columns}' if what == 'update' and columns else ''}"
    f" ON {table} BEGIN {''.join(f'INSERT INTO touched VALUES({row}.rollout_id) ON CONFLICT DO NOTHING;' for row in rows)} END;"
    for table, columns in _WATCHED.items()
    for what, rows in (("insert", ("NEW",)), ("update", ("OLD", "NEW")), ("delete", ("OLD",)))
)
# Which sessions have come, gone, or another owner: whoever keeps what it has read of them reads on from there.
_MOVED: Final = "".join(
    f"CREATE TRIGGER IF NOT EXISTS moved_{what} AFTER {what.upper()} ON sessions BEGIN"
    f" INSERT INTO moved(session_id) VALUES({row}.session_id); END;"
    for what, row in (("insert", "NEW"), ("update", "NEW"), ("delete", "OLD"))
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as it is kept: status, headers in order (names as they were sent), body, the URL it came from."""

    status: int
    headers: tuple[Header, ...]
    body: bytes
    phrase: str = ""
    url: str = ""


@dataclass(slots=True)
class Live:
    """A rollout that has begun here from its input, and whose calls have all been appended since."""

    attempt: int
    turns: int = 0
    scopes: set[str] = field(default_factory=set[str])  # in which calls were made
    waiting: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])  # call id -> server, method
    # Of those that go to this server itself: digest and answer, once it has executed them.
    own: dict[str, tuple[str, Answer] | None] = field(default_factory=dict[str, "tuple[str, Answer] | None"])
    finished: dict[str, int] = field(default_factory=dict[str, int])  # by server, as FINISHED says


def is_finished(method: str, answer: Answer) -> bool:
    """FINISHED, of an answer that has just come."""
    if answer.status >= 400 or method in ("GET", "HEAD", "OPTIONS"):
        return False
    text = "\n".join(part for header in answer.headers for part in header).lower()
    return "event-stream" not in text and "x-ndjson" not in text


# What a call log raises. Python has a MemoryError for most of what sqlite3 cannot do without memory.
LOG_ERRORS: Final = (sqlite3.Error, MemoryError)
# SQLITE_NOMEM, SQLITE_IOERR_NOMEM, SQLITE_IOERR_SHMMAP: the text of the last two is "disk I/O error".
_NO_MEMORY: Final = frozenset({7, 3082, 5386})


def no_memory(error: BaseException) -> bool:
    """Whether it was no disk that failed a call log."""
    return isinstance(error, MemoryError) or getattr(error, "sqlite_errorcode", 0) in _NO_MEMORY


def log_failure(path: Path, error: sqlite3.Error | MemoryError) -> SafepointError:
    """STORAGE_FULL or STORAGE_FAILED for a call log that cannot be used: its disk is not that of the snapshots."""
    if no_memory(error):
        return storage_error(MemoryError(), f"using the call log {path}")
    reason = Reason.STORAGE_FULL if "full" in str(error) else Reason.STORAGE_FAILED
    return refuse(reason, f"The call log {path} failed: {error}.", next_step=remedy(path, error))


def remedy(path: Path, error: sqlite3.Error | MemoryError) -> str:
    """What to do: sqlite3 tells damage from what the disk did by the class of the error."""
    if no_memory(error):
        return STORAGE_HELP[errno.ENOMEM]
    if isinstance(error, sqlite3.OperationalError):
        return (
            f"Free space on the disk of {path.parent}, or set SAFEPOINT_RUN_DIR to another one and restart the server."
        )
    return (
        f"It is damaged: see that the disk of {path.parent} is sound and that nothing else writes there, then restart the "
        "server, which begins a new log; the rollouts that it runs have to begin anew, or to be restored."
    )


_CALLS_LOST: Final = "its calls could not be logged"


def tolerated(
    default: _R, lost: str = ""
) -> Callable[[Callable[Concatenate[_Log, _P], _R]], Callable[Concatenate[_Log, _P], _R]]:
    """A tolerant log answers `default` when the file fails, and remembers which rollout that concerns.

    `lost`: what the rollout has lost by it, where that is more than a call: it is said instead of what was lost before.
    """

    def wrap(method: Callable[Concatenate[_Log, _P], _R]) -> Callable[Concatenate[_Log, _P], _R]:
        @functools.wraps(method)
        def method_or_default(self: _Log, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(self, *args, **kwargs)
            except LOG_ERRORS as error:
                if not self.tolerant:
                    raise
                self.failures += 1
                said = "out of memory" if no_memory(error) else str(error)
                self.last_failure, self.remedy = said[:100], remedy(self.path, error)
                first = args[0] if args else None
                rollout_id = first.rollout_id if isinstance(first, CallIdentity) else first
                if isinstance(rollout_id, str) and (lost or rollout_id not in self.damaged):
                    self.damaged[rollout_id] = f"{lost or _CALLS_LOST}: {said}"[:300]
                return default

        return method_or_default

    return wrap


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class LogFile:
    """One process's connection to `calls.db`. Raises sqlite3.Error when the file cannot be used; nothing changed then.

    Not for several threads at once. `tolerant`: see the module. `alone`: no other process changes the rollouts that this one
    runs, so that their calls may be appended beside the database (`tail`).
    """

    def __init__(self, path: Path, *, tolerant: bool = False, alone: bool = False) -> None:
        self.path = path
        self.tolerant = tolerant
        self.failures = 0
        self.last_failure = ""
        self.remedy = ""  # of the last failure
        self.damaged: dict[str, str] = {}  # rollouts whose log has a hole, with the reason
        self.db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=OFF")
        self.db.executescript("BEGIN IMMEDIATE;" + _SCHEMA + _TRIGGERS + _MOVED + "COMMIT;")
        self.live: dict[str, Live] = {}  # rollouts whose calls are appended
        self.tail: Tail | None = None
        # Those of which something was appended that may not be in the database, and where in the tail that begins.
        self.unread: dict[str, int] = {}
        self.bring_in()
        self.tail = Tail(path) if alone else None
        self._named = _file_at(path)

    def require_named(self) -> None:
        """Raise STORAGE_FAILED when the file that is written is not the one at its path any more: a save reads that one."""
        if _file_at(self.path) != self._named:
            raise refuse(
                Reason.STORAGE_FAILED,
                f"The call log {self.path} was removed or replaced while its server ran: what the server logs is in no snapshot.",
                next_step="Restart the server, and keep what clears old files away from SAFEPOINT_RUN_DIR.",
            )

    def close(self) -> None:
        """Give the file back."""
        if self.tail is not None:
            self.tail.close()
        self.db.close()

    def append(self, rollout_id: str, head: list[Any], body: bytes = b"") -> None:
        """Add a record of a live rollout to the tail. It is live no more when that fails."""
        assert self.tail is not None
        try:
            if self.tail.size > FULL_BYTES:
                self.bring_in()
                before = self.tail.path
                self.tail.begin()
                before.unlink(missing_ok=True)
            at = self.tail.size
            self.tail.append(head, body)
        except LOG_ERRORS:
            del self.live[rollout_id]
            raise
        self.unread.setdefault(rollout_id, at)

    def catch_up(self, rollout_id: str) -> None:
        """What the log has of the rollout is in the database from now on, and what comes is written there."""
        self.live.pop(rollout_id, None)
        if rollout_id in self.unread:
            self.bring_in()

    def bring_in(self) -> None:
        """Bring in what was appended by anybody and is not in the database yet."""
        if tails := tails_of(self.path):
            with self.together():
                for tail in tails:
                    self._bring_in(tail)
        self.unread.clear()

    def _bring_in(self, tail: Path) -> None:
        row = self.db.execute("SELECT brought FROM tails WHERE name=?", (tail.name,)).fetchone()
        at = known = row[0] if row else 0
        mine = self.tail if self.tail is not None and self.tail.path == tail else None
        if mine is not None:  # who writes it knows what of it still matters: most rollouts have ended by now
            at = max(known, min(self.unread.values(), default=mine.size))
        try:
            for head, body, end in records(tail, at):
                if mine is None or head[1] in self.unread:
                    self._apply(head, body)
                at = end
        except FileNotFoundError:
            return  # it was brought in, and another was begun
        except (ValueError, TypeError, IndexError) as error:
            raise sqlite3.DatabaseError(f"{tail} has a record that is none: {error}") from error
        except OSError as error:
            raise sqlite3.OperationalError(f"{tail} cannot be read: {error.strerror}") from error
        if at != known:
            self.db.execute("INSERT OR REPLACE INTO tails VALUES(?,?)", (tail.name, at))

    def _apply(self, head: list[Any], body: bytes) -> None:
        """Make the change that a record says. Raises ValueError, TypeError for one that is none."""
        raise NotImplementedError

    @contextmanager
    def together(self) -> Generator[None]:
        """Several changes as one; none of them when the block raises."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")  # what fails here may be open still, and would keep the file locked for ever
        except BaseException:
            if self.db.in_transaction:  # a full disk may have ended it already
                self.db.execute("ROLLBACK")
            raise

    def note(self, key: str, value: Any) -> None:
        """Keep a JSON value for the other workers."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES(?,?)", (key, json.dumps(value)))

    def noted(self, key: str) -> Any:
        """The JSON value kept under `key`, or None."""
        row = self.db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return json.loads(row[0]) if row else None


def dump_headers(headers: Iterable[Header]) -> str:
    return _COMPACT.encode([list(h) for h in headers])


def answer_of(status: int, headers: str, body: bytes, phrase: str = "", url: str = "") -> Answer:
    return Answer(int(status), tuple((str(k), str(v)) for k, v in json.loads(headers)), bytes(body), phrase, url)
