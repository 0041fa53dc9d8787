"""The dispatches in the call log: which rollouts this agent runs, at which attempt, and what became of them.

The rule kept here: whether a dispatch runs, continues, joins or is answered from its record is decided and recorded in
one transaction, so that two workers never run the same rollout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast

from coordinator.wire.places import is_called
from participant_shims.gate.logfile import Answer, Live, LogFile, answer_of, dump_headers, tolerated
from participant_shims.gate.process import lives, own
from participant_shims.identity import CallIdentity


class Verdict(Enum):
    """What to do with a dispatch that has arrived."""

    RUN = "run"  # from the input
    REPLAY = "replay"  # from the input, recorded calls are answered from the log
    ANSWER = "answer"  # with the recorded result
    JOIN = "join"  # it runs already, in this process or in another worker
    CONFLICT = "conflict"  # the id runs already with another input, or the log failed: run it unlogged beside


@dataclass(frozen=True, slots=True)
class Claim:
    """The decision about one dispatch. `cookie` is the Cookie header to run with, None: as it came."""

    verdict: Verdict
    attempt: int = 0
    base: int = 0
    reason: str = ""
    result: Answer | None = None
    cookie: str | None = None


_NO_ATTEMPT: Final = cast("int | None", None)
_NO_RESULT: Final = cast("Answer | None", None)


class DispatchLog(LogFile):
    """The table `rollouts`, and the calls of a rollout as far as they begin and end with it."""

    @tolerated(Claim(Verdict.CONFLICT, reason="the call log failed"))
    def claim(self, rollout_id: str, sha256: str, body: bytes, cookie: str) -> Claim:
        """Decide about a dispatch of `rollout_id` with this input, and record that it runs if it does.

        An id may come again (the next epoch), and then asks for a new result. A recorded one answers when it is not known
        that anybody has it: it was restored and not yet claimed, or its response never reached its client.
        """
        self.catch_up(rollout_id)
        with self.together():
            claim = self._decide(rollout_id, sha256, body, cookie)
        if claim.verdict is Verdict.RUN and self.tail is not None:
            self.live[rollout_id] = Live(claim.attempt)
        return claim

    def _decide(self, rollout_id: str, sha256: str, body: bytes, cookie: str) -> Claim:
        row = self.db.execute(
            "SELECT attempt, base, input_sha256, state, restored, claimed, delivered, pid, status, headers, body,"
            " guest, cookie, began FROM rollouts WHERE rollout_id=?", (rollout_id,),
        ).fetchone()  # fmt: skip
        floor = self.db.execute("SELECT min_attempt FROM marks WHERE rollout_id=?", (rollout_id,)).fetchone()
        lowest = int(floor[0]) if floor else 0
        if row is None or row[11]:
            return self._begin(rollout_id, sha256, body, cookie, lowest, "")
        attempt, base, known, state, restored, claimed, delivered, pid = row[:8]
        same = known == sha256
        waiting = bool(restored and not claimed)
        if state in ("running", "diverged") and lives(pid, row[13]):
            return Claim(Verdict.JOIN if same else Verdict.CONFLICT, attempt, base)
        if state == "completed" and same and (waiting or not delivered):
            self.db.execute("UPDATE rollouts SET claimed=1 WHERE rollout_id=?", (rollout_id,))
            return Claim(Verdict.ANSWER, attempt, base, result=answer_of(row[8], row[9], row[10]))
        if state in ("running", "interrupted"):
            # A restored one has its new attempt already (load installs N+1); one whose worker died gets it here.
            attempt = attempt if waiting else attempt + 1
            if same and rollout_id not in self.damaged:  # a call that is not in the log would be made twice
                self.db.execute(
                    "UPDATE rollouts SET attempt=?, state='running', claimed=1, pid=?, began=?, turns=0"
                    " WHERE rollout_id=?",
                    (attempt, *own(), rollout_id),
                )
                return Claim(Verdict.REPLAY, attempt, base, cookie=row[12])
            reason = self.damaged.get(rollout_id, "input changed")
            return self._begin(rollout_id, sha256, body, cookie, max(attempt, lowest), reason)
        reason = "" if same else "input changed"
        return self._begin(rollout_id, sha256, body, cookie, max(attempt + 1, lowest), reason)

    def _begin(self, rollout_id: str, sha256: str, body: bytes, cookie: str, attempt: int, reason: str) -> Claim:
        self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
        self.db.execute(
            "INSERT OR REPLACE INTO rollouts(rollout_id, attempt, base, input_sha256, input, cookie, state,"
            " reason, pid, began) VALUES(?,?,?,?,?,?,'running',?,?,?)",
            (rollout_id, attempt, attempt, sha256, body, cookie, reason, *own()),
        )
        self.damaged.pop(rollout_id, None)  # its log is whole again: empty
        return Claim(Verdict.RUN, attempt, attempt, reason)

    @tolerated(_NO_ATTEMPT)
    def restart(self, rollout_id: str, attempt: int, reason: str, above: int = -1) -> int | None:
        """Forget every call of the running `attempt`; the new attempt, which is its base as well, and higher than `above`.

        None when the log failed: its calls are still there, and no attempt of it may be answered from them.
        """
        following = max(attempt, above) + 1
        self.catch_up(rollout_id)
        with self.together():
            self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
            changed = self.db.execute(
                "UPDATE rollouts SET attempt=?, base=?, turns=0, reason=?, state='running', restored=0"
                " WHERE rollout_id=? AND attempt=?", (following, following, reason, rollout_id, attempt),
            ).rowcount  # fmt: skip
        if changed and self.tail is not None:
            self.live[rollout_id] = Live(following)
        return following

    @tolerated(None)
    def diverge(self, rollout_id: str, attempt: int, reason: str) -> None:
        """Note that `attempt` must restart. Read with `diverged`, also by another worker."""
        self.catch_up(rollout_id)
        self.db.execute(
            "UPDATE rollouts SET state='diverged', reason=? WHERE rollout_id=? AND attempt=? AND state='running'",
            (reason, rollout_id, attempt),
        )

    @tolerated(False)
    def diverged(self, rollout_id: str, attempt: int) -> bool:
        """Whether `attempt` must restart, or is not the present one any more."""
        if rollout_id in self.live:
            return self.live[rollout_id].attempt != attempt
        row = self.db.execute("SELECT state, attempt FROM rollouts WHERE rollout_id=?", (rollout_id,)).fetchone()
        return row is not None and (row[0] == "diverged" or row[1] != attempt)

    @tolerated(None, "it has finished, and its result could not be recorded, so that a restore begins it again")
    def finish(self, rollout_id: str, attempt: int, result: Answer) -> None:
        """Record the result of a dispatch. A status of 400 and above is a failure: the next dispatch begins anew."""
        state = "completed" if result.status < 400 else "failed"
        live = self.live.pop(rollout_id, None)
        if live is None:
            self.catch_up(rollout_id)
        turns = live.turns if live is not None and live.attempt == attempt else None
        with self.together():
            changed = self.db.execute(
                "UPDATE rollouts SET state=?, status=?, headers=?, body=?, delivered=0, turns=coalesce(?, turns)"
                " WHERE rollout_id=? AND attempt=?",
                (state, result.status, dump_headers(result.headers), result.body, turns, rollout_id, attempt),
            ).rowcount
            if changed:
                self.db.execute("DELETE FROM calls WHERE rollout_id=?", (rollout_id,))
        if changed:
            self.unread.pop(rollout_id, None)  # its calls matter no more, and are not brought in

    @tolerated(None)
    def interrupt(self, rollout_id: str, attempt: int) -> None:
        """The handler of a dispatch ended without a response: the next dispatch continues it."""
        self.db.execute(
            "UPDATE rollouts SET state='interrupted' WHERE rollout_id=? AND attempt=? AND state IN ('running','diverged')",
            (rollout_id, attempt),
        )

    @tolerated(None)
    def delivered(self, rollout_id: str, attempt: int) -> None:
        """The response of a dispatch has been sent to a client that was still there."""
        self.db.execute("UPDATE rollouts SET delivered=1 WHERE rollout_id=? AND attempt=?", (rollout_id, attempt))

    @tolerated(_NO_RESULT)
    def result(self, rollout_id: str, sha256: str) -> Answer | None:
        """The recorded result of a finished dispatch with this input; None while it runs or when it never ran."""
        row = self.db.execute(
            "SELECT status, headers, body FROM rollouts WHERE rollout_id=? AND input_sha256=?"
            " AND state IN ('completed','failed')", (rollout_id, sha256),
        ).fetchone()  # fmt: skip
        return answer_of(*row) if row else None

    def attempt_of(self, rollout_id: str) -> int:
        """The present attempt of a dispatch; -1 when it is not known."""
        if rollout_id in self.live:
            return self.live[rollout_id].attempt
        row = self.db.execute("SELECT attempt FROM rollouts WHERE rollout_id=?", (rollout_id,)).fetchone()
        return int(row[0]) if row else -1

    def runs_elsewhere(self, rollout_id: str) -> bool:
        """Whether another live worker runs it."""
        row = self.db.execute("SELECT state, pid, began FROM rollouts WHERE rollout_id=?", (rollout_id,)).fetchone()
        return row is not None and row[0] in ("running", "diverged") and row[1:] != own() and lives(row[1], row[2])

    def hold_elsewhere(self, held: Iterable[tuple[str, str, str]]) -> None:
        """Rollouts that another Gym actor has got in a restore, each with its input and that actor. Replaces what was noted."""
        with self.together():
            self.db.execute("DELETE FROM elsewhere")
            self.db.executemany("INSERT OR REPLACE INTO elsewhere(rollout_id, input_sha256, actor) VALUES(?,?,?)", held)

    @tolerated("")
    def held_elsewhere(self, rollout_id: str, sha256: str) -> str:
        """The actor that has the turns of a rollout with this input; empty when it may begin here."""
        row = self.db.execute(
            "SELECT actor FROM elsewhere WHERE rollout_id=? AND input_sha256=?"
            " AND NOT EXISTS(SELECT 1 FROM rollouts r WHERE r.rollout_id=elsewhere.rollout_id AND r.guest=0)",
            (rollout_id, sha256),
        ).fetchone()
        return str(row[0]) if row else ""

    @tolerated("")
    def moved_here(self, rollout_id: str, sha256: str, server: str) -> str:
        """The id of a restored rollout that this dispatch means although it is known by another one; empty for none.

        Gym's indices are counted by each actor, so that a rollout which is known by them is named after the agent that had it
        (`7-1@a0.agent`). Here the same row has another name. The same indices and input at an agent called `server`, and
        nobody has claimed it: whichever of two such rows goes on from it, what comes of them is the same.
        """
        indices, at, _ = rollout_id.partition("@")
        if not at or self.attempt_of(rollout_id) >= 0:
            return ""
        rows = self.db.execute(
            "SELECT rollout_id FROM rollouts WHERE rollout_id>=? AND rollout_id<? AND restored=1 AND claimed=0"
            " AND input_sha256=? ORDER BY rollout_id", (f"{indices}@", f"{indices}A", sha256),  # A comes after @
        )  # fmt: skip
        return next((found for (found,) in rows if is_called(found.partition("@")[2], server)), "")

    def is_fresh(self) -> bool:
        """No dispatch has been served in this life but, at most, a snapshot has been loaded."""
        return self.db.execute("SELECT 1 FROM rollouts WHERE restored=0 OR claimed=1 LIMIT 1").fetchone() is None

    @tolerated(None)
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
                "INSERT OR REPLACE INTO rollouts(rollout_id, attempt, base, input_sha256, input, cookie,"
                " state, guest, pid, began) VALUES(?,?,?,'',x'','','running',1,?,?)",
                (call.rollout_id, call.attempt, call.base, *own()),
            )
