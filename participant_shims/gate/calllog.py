"""The call log of one life of a server: every call of a rollout and its answer, at both of its ends.

The rule kept here: a response is in the log before anybody acts on it. Callers: the gate in each worker, on its event
loop; and the shim, which exports and loads the same file (calllog_files).

Tables: `rollouts` (the dispatches of this server, agents only: dispatch_log), `calls` (what each of them called, and the
answers), `executed` (answers that this server gave and whose caller has not said yet that it has them), `counts` (how
many calls of a rollout a server with state has executed since the rollout last began from its input, by worker process:
the state they have left is in its memory), `sessions` (which rollout a session belongs to), `marks` (attempts and bases
that are over), `excluded` (rollouts that the present cut cannot hold), `meta`.

A commit costs more than all else that the gate does for a call. So where this process is the only one, what it records of a
rollout that has begun here from its input is appended to the `tail`, and most of it never gets to the tables: the rollout ends
before anybody reads them. Whoever asks for more than the next call of such a rollout brings in what was appended (`catch_up`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, cast

from participant_shims.gate.callers import CallerLog
from participant_shims.gate.dispatch_log import Claim, DispatchLog, Verdict
from participant_shims.gate.logfile import (
    FINISHED,
    FORMAT,
    Answer,
    Header,
    Live,
    answer_of,
    dump_headers,
    is_finished,
    tolerated,
)
from participant_shims.gate.process import lives, own
from participant_shims.identity import MAX_ATTEMPT, CallIdentity

__all__ = ["FORMAT", "Answer", "CallLog", "CallRecord", "Claim", "Header", "Stale", "Verdict"]

# Answers of rollouts that ended without a word (their agent was killed) are dropped from here on, oldest first.
MAX_EXECUTED: Final = 65_536
_KEPT_MOVES: Final = 65_536  # of sessions: a worker that has seen none of so many reads all of them
# Set while this life continues a snapshot that does not tell how many calls were executed.
UNCOUNTED: Final = "uncounted"


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


class Stale(Enum):
    """Why a call is refused."""

    ATTEMPT = "STALE_ATTEMPT"  # a later attempt has been installed
    LOG_LOST = "LOG_LOST"  # the caller has begun anew without its log: see `callers`
    STATE_LOST = "STATE_LOST"  # this server does not have its state of the rollout, or never had: it must restart


_ORPHANED: Final = "its state was in the memory of a worker process that is gone (pid {})"
_NOT_STALE: Final = cast("Stale | None", None)


class CallLog(DispatchLog, CallerLog):
    """See the module. Raises sqlite3.Error when the file cannot be used, unless it is tolerant; nothing changed then."""

    _sessions: tuple[dict[str, tuple[str, int]], int] = (
        {},
        0,
    )  # what was read, and up to which move; replaced, not changed

    # -- calls that leave

    @tolerated(list[CallRecord]())
    def records(self, rollout_id: str, scope: str) -> list[CallRecord]:
        """The calls that were made in a scope, in their order."""
        live = self.live.get(rollout_id)
        if live is not None and scope not in live.scopes:
            return []
        if rollout_id in self.unread:
            self.bring_in()
        rows = self.db.execute(
            "SELECT number, call_id, server, method, path, digest, done, status, headers, body, phrase, url FROM calls"
            " WHERE rollout_id=? AND scope=? ORDER BY number", (rollout_id, scope),
        ).fetchall()  # fmt: skip
        return [
            CallRecord(rollout_id, scope, r[0], r[1], r[2], r[3], r[4], r[5], answer_of(*r[7:12]) if r[6] else None)
            for r in rows
        ]

    @tolerated(None)
    def issue(
        self, call: CallIdentity, scope: str, number: int, server: str, own: bool, method: str, path: str, digest: str
    ) -> None:
        """A call leaves now. `own`: it goes to this server itself."""
        live = self._live(call)
        if live is not None:
            self.append(call.rollout_id, ["issue", *_key(call), scope, number, server, own, method, path, digest])
            live.scopes.add(scope)
            live.waiting[call.call_id] = (server, method)
            if own:
                live.own[call.call_id] = None
            return
        self._issue(call, scope, number, server, own, method, path, digest)

    def _issue(
        self, call: CallIdentity, scope: str, number: int, server: str, own: bool, method: str, path: str, digest: str
    ) -> None:
        self.db.execute(
            "INSERT OR REPLACE INTO calls(rollout_id, scope, number, call_id, attempt, server, own, method, path,"
            " digest, done) VALUES(?,?,?,?,?,?,?,?,?,?,0)",
            (call.rollout_id, scope, number, call.call_id, call.attempt, server, int(own), method, path, digest),
        )

    @tolerated(True)
    def respond(self, call: CallIdentity, answer: Answer, own: bool) -> bool:
        """Record the answer to a call that left; False when the call belongs to a stale attempt and was dropped.

        A call that could not be logged when it left is not stale for that: its rollout is damaged, and goes on.
        """
        live = self._live(call)
        if live is not None and (made := live.waiting.pop(call.call_id, None)):
            answered = [answer.status, answer.phrase, answer.url, answer.headers]
            self.append(call.rollout_id, ["respond", *_key(call), own, *answered], answer.body)
            live.own.pop(call.call_id, None)
            live.turns += 1
            live.finished[made[0]] = live.finished.get(made[0], 0) + is_finished(made[1], answer)
            return True
        self.catch_up(call.rollout_id)
        with self.together():
            changed = self._respond(call, answer, own)
            if not changed and call.rollout_id in self.damaged:
                return self.attempt_of(call.rollout_id) in (-1, call.attempt)
        return changed > 0

    def _respond(self, call: CallIdentity, answer: Answer, own: bool) -> int:
        changed = self.db.execute(
            "UPDATE calls SET done=1, status=?, phrase=?, url=?, headers=?, body=? WHERE rollout_id=? AND call_id=?"
            " AND EXISTS(SELECT 1 FROM rollouts r WHERE r.rollout_id=calls.rollout_id AND r.attempt=?)",
            (
                answer.status, answer.phrase, answer.url, dump_headers(answer.headers), answer.body,
                call.rollout_id, call.call_id, call.attempt,
            ),
        ).rowcount  # fmt: skip
        if changed:
            self.db.execute("UPDATE rollouts SET turns=turns+1 WHERE rollout_id=?", (call.rollout_id,))
        if own:  # this server is the callee too, and nobody else would tell it
            self.db.execute("DELETE FROM executed WHERE rollout_id=? AND call_id=?", (call.rollout_id, call.call_id))
        return changed

    def _live(self, call: CallIdentity) -> Live | None:
        live = self.live.get(call.rollout_id)
        return live if live is not None and live.attempt == call.attempt else None

    def _apply(self, head: list[Any], body: bytes) -> None:
        kind, rollout_id, attempt, call_id, *rest = head
        row = self.db.execute("SELECT attempt, state FROM rollouts WHERE rollout_id=?", (rollout_id,)).fetchone()
        if row is None or row[0] != attempt or row[1] in ("completed", "failed"):
            return  # it is over
        call = CallIdentity(rollout_id, attempt, call_id)
        if kind == "issue":
            scope, number, server, own, method, path, digest = rest
            self._issue(call, scope, number, server, own, method, path, digest)
        elif kind == "respond":
            own, status, phrase, url, headers = rest
            self._respond(call, Answer(status, _pairs(headers), body, phrase, url), own)
        elif kind == "remember":
            digest, status, headers = rest
            self._remember(call, digest, Answer(status, _pairs(headers), body))
        else:
            raise ValueError(f"a kind that is not known: {str(kind)[:100]}")

    @tolerated(0)
    def finished_at(self, rollout_id: str, server: str) -> int:
        """How many calls of the rollout, made here, `server` has finished for certain since it began from its input."""
        live = self.live.get(rollout_id)
        if live is not None:
            return live.finished.get(server, 0)
        self.catch_up(rollout_id)
        row = self.db.execute(
            f"SELECT count(*) FROM calls WHERE rollout_id=? AND server=? AND {FINISHED}", (rollout_id, server)
        ).fetchone()
        return int(row[0])

    @tolerated(False)
    def is_own_call(self, call: CallIdentity) -> bool:
        """Whether this server has made `call` itself and still waits for the answer: a self-call is never parked."""
        live = self._live(call)
        if live is not None:
            return call.call_id in live.own
        return self.db.execute(
            "SELECT 1 FROM calls WHERE rollout_id=? AND call_id=? AND own=1 AND done=0", (call.rollout_id, call.call_id)
        ).fetchone() is not None  # fmt: skip

    # -- calls that were executed here

    def recall(self, call: CallIdentity, digest: str = "") -> tuple[str, Answer] | None:
        """The remembered answer to `call` with the digest of its request: of the one with `digest`, else of another."""
        live = self._live(call)
        if live is not None and call.call_id in live.own:
            return live.own[call.call_id]
        row = self.db.execute(
            "SELECT digest, status, headers, body FROM executed WHERE rollout_id=? AND call_id=?"
            " ORDER BY digest=? DESC, serial DESC LIMIT 1", (call.rollout_id, call.call_id, digest),
        ).fetchone()  # fmt: skip
        return (row[0], answer_of(row[1], row[2], row[3])) if row else None

    @tolerated(None)
    def remember(
        self, call: CallIdentity, digest: str, answer: Answer, session_id: str = "", recorded: Sequence[str] = (),
        *, counted: bool = False, caller: str = "",
    ) -> None:  # fmt: skip
        """Remember what was answered, before it is released. Forgets what the caller has `recorded`, and earlier bases.

        `counted`: it may have changed the state of this server, see `has_lost`.

        In one commit, since commits are what this costs. An answer that is forgotten late does no harm.
        """
        live = self._live(call)
        if live is not None and call.call_id in live.own and not (recorded or session_id or counted):
            self.append(
                call.rollout_id, ["remember", *_key(call), digest, answer.status, answer.headers], answer.body
            )  # fmt: skip
            live.own[call.call_id] = (digest, answer)
            return
        self.catch_up(call.rollout_id)
        with self.together():
            for known in recorded:
                self.db.execute("DELETE FROM executed WHERE rollout_id=? AND call_id=?", (call.rollout_id, known))
            self._remember(call, digest, answer)
            if counted:
                self.db.execute("DELETE FROM counts WHERE rollout_id=? AND base<>?", (call.rollout_id, call.base))
                self.db.execute(
                    "INSERT INTO counts(rollout_id, attempt, base, executed, pid, began) VALUES(?,?,?,1,?,?) ON CONFLICT DO"
                    " UPDATE SET executed=executed+1, attempt=max(attempt, excluded.attempt)",
                    (call.rollout_id, call.attempt, call.base, *own()),
                )
                if caller:
                    self.note_caller(call, caller)
            if session_id:
                self.bind(session_id, call.rollout_id, call.attempt)

    def _remember(self, call: CallIdentity, digest: str, answer: Answer) -> None:
        self.db.execute("DELETE FROM executed WHERE rollout_id=? AND base<?", (call.rollout_id, call.base))
        serial = self.db.execute(
            "INSERT OR REPLACE INTO executed(rollout_id, call_id, attempt, base, digest, status, headers, body)"
            " VALUES(?,?,?,?,?,?,?,?)",
            (
                call.rollout_id, call.call_id, call.attempt, call.base, digest, answer.status,
                dump_headers(answer.headers), answer.body,
            ),
        ).lastrowid  # fmt: skip
        if serial is not None and serial % 256 == 0:
            self.db.execute("DELETE FROM executed WHERE serial<=?", (serial - MAX_EXECUTED,))

    def done(self, rollouts: Iterable[tuple[str, int]]) -> list[str]:
        """These attempts, and lower ones, have ended at their agent: their answers and sessions matter no more.

        The ids of those sessions.
        """
        gone: list[str] = []
        with self.together():
            for rollout_id, attempt in rollouts:
                self.damaged.pop(rollout_id, None)
                gone += [
                    r[0]
                    for r in self.db.execute(
                        "SELECT session_id FROM sessions WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt)
                    )
                ]
                for table in ("executed", "counts", "sessions"):
                    self.db.execute(f"DELETE FROM {table} WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt))
                self.db.execute("DELETE FROM callers WHERE rollout_id=? AND base<=?", (rollout_id, attempt))
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
        """Session id to (rollout, attempt), of the rollouts that are not over. Reads what has changed since the last time."""
        with self.together():
            first, last = self.db.execute(
                "SELECT coalesce(min(serial), 1), coalesce(max(serial), 0) FROM moved"
            ).fetchone()
            known, at = self._sessions
            if first > at + 1 or not at:
                known = {}
                rows = self.db.execute("SELECT session_id, rollout_id, attempt FROM sessions")
            else:
                rows = self.db.execute(
                    "SELECT DISTINCT m.session_id, s.rollout_id, s.attempt FROM moved m LEFT JOIN sessions s USING(session_id)"
                    " WHERE m.serial>?", (at,),
                )  # fmt: skip
            for session_id, rollout_id, attempt in rows:
                if rollout_id is None:
                    known.pop(session_id, None)
                else:
                    known[session_id] = (rollout_id, attempt)
            if last - first > 2 * _KEPT_MOVES:
                self.db.execute("DELETE FROM moved WHERE serial<=?", (last - _KEPT_MOVES,))
        self._sessions = (known, last)
        return dict(known)

    @tolerated(False)
    def has_lost(self, call: CallIdentity, finished: int) -> bool:
        """Whether this life no longer has what the `finished` calls of the rollout, that its caller has seen, have left here.

        It has executed fewer: the server was started anew without its caller, or was left out of a restore. Or a worker
        process that has executed some is gone, and its memory with it; one that lives is asked itself (`neighbours`), and
        if it was not, the state is not here either. Never when the count is not known: of a rollout that could not be
        logged, and after the restore of a snapshot without counts.
        """
        rows = self.db.execute(
            "SELECT executed, pid, began FROM counts WHERE rollout_id=? AND base=?", (call.rollout_id, call.base)
        ).fetchall()
        if any(pid and (pid, began) != own() for _, pid, began in rows):
            return True
        if finished <= sum(executed for executed, _, _ in rows):
            return False
        return call.rollout_id not in self.damaged and not self.noted(UNCOUNTED)

    def adopt(self, rollout_ids: Iterable[str]) -> None:
        """The state that a restore has brought back of these is in this process from now on."""
        with self.together():
            self.db.executemany(
                "UPDATE OR REPLACE counts SET pid=?, began=? WHERE rollout_id=? AND pid=0",
                [(*own(), rollout_id) for rollout_id in rollout_ids],
            )

    def exclude_orphans(self) -> None:
        """The present cut cannot hold rollouts whose state was in a worker process that is gone."""
        processes = self.db.execute("SELECT DISTINCT pid, began FROM counts").fetchall()
        for pid, began in processes:
            if _is_gone(pid, began):
                self.db.execute(
                    "INSERT OR IGNORE INTO excluded SELECT rollout_id, max(attempt), ? FROM counts WHERE pid=? AND began=?"
                    " GROUP BY rollout_id", (_ORPHANED.format(pid), pid, began),
                )  # fmt: skip

    # -- attempts that are over

    @tolerated(_NOT_STALE)
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

    @tolerated(0)
    def lowest(self, rollout_id: str) -> int:
        """The lowest attempt of a rollout that may run here, when it begins from its input."""
        row = self.db.execute(
            "SELECT max(min_attempt, min_base) FROM marks WHERE rollout_id=?", (rollout_id,)
        ).fetchone()
        return int(row[0]) if row else 0

    def mark(self, rollout_id: str, min_attempt: int, min_base: int = 0) -> None:
        """Attempts below `min_attempt` and bases below `min_base` are refused from now on. Marks only rise."""
        self.db.execute(
            "INSERT INTO marks(rollout_id, min_attempt, min_base) VALUES(?,?,?) ON CONFLICT(rollout_id) DO UPDATE SET"
            " min_attempt=max(min_attempt, excluded.min_attempt), min_base=max(min_base, excluded.min_base)",
            (rollout_id, min_attempt, min_base),
        )

    def retire(self, attempts: Sequence[tuple[str, int]]) -> int:
        """Forget rollouts up to the given attempts and refuse those from now on; how many were known here.

        An attempt above MAX_ATTEMPT stands for every one that was seen here: the id may come again, in the next epoch, and
        its attempts are counted on from there.
        """
        known = 0
        with self.together():
            for rollout_id, named in attempts:
                self.live.pop(rollout_id, None)
                seen = 0
                attempt = named if named <= MAX_ATTEMPT else self._highest(rollout_id)
                seen += self.db.execute(
                    "DELETE FROM rollouts WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt)
                ).rowcount
                if seen:
                    self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
                for table in ("executed", "counts", "sessions"):
                    seen += self.db.execute(
                        f"DELETE FROM {table} WHERE rollout_id=? AND attempt<=?", (rollout_id, attempt)
                    ).rowcount
                self.db.execute("DELETE FROM elsewhere WHERE rollout_id=?", (rollout_id,))
                self.db.execute("DELETE FROM callers WHERE rollout_id=? AND base<=?", (rollout_id, attempt))
                known += seen > 0
                if attempt >= 0:
                    self.mark(rollout_id, attempt + 1)
        return known

    def _highest(self, rollout_id: str) -> int:
        """The highest attempt of a rollout that is known to have been here; -1 when none is. The same when asked again."""
        row = self.db.execute(
            "SELECT max(attempt) FROM (SELECT attempt FROM rollouts WHERE rollout_id=? UNION ALL"
            " SELECT attempt FROM executed WHERE rollout_id=? UNION ALL SELECT attempt FROM sessions WHERE rollout_id=?"
            " UNION ALL SELECT min_attempt - 1 FROM marks WHERE rollout_id=?)", (rollout_id,) * 4,
        ).fetchone()  # fmt: skip
        return -1 if row[0] is None else int(row[0])

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


def _key(call: CallIdentity) -> tuple[str, int, str]:
    return call.rollout_id, call.attempt, call.call_id


def _pairs(headers: list[Any]) -> tuple[Header, ...]:
    return tuple((name, value) for name, value in headers)


def _is_gone(pid: int, began: str) -> bool:
    return bool(pid) and not lives(pid, began)  # zero: what a restore has brought back for no worker in particular
