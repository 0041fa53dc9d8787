"""The call log and its file."""

from __future__ import annotations

import json
import os
import random
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.errors import Reason, Refused, SafepointError
from coordinator.wire.terms import RolloutState
from participant_shims.gate import calllog, calllog_files
from participant_shims.gate.calllog import Answer, CallLog, Stale, Verdict
from participant_shims.identity import MAX_ATTEMPT, CallIdentity, root

BINARY = Answer(
    200, (("Content-Type", "application/octet-stream"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")), b"\x00\xff"
)
TEXT = Answer(200, (("content-type", "application/json"),), '{"x": "\u00e9"}'.encode(), "OK", "http://h/p")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CallLog]:
    made = CallLog(tmp_path / "calls.db")
    yield made
    made.close()


def dispatched(log: CallLog, rollout_id: str = "r-1", calls: int = 2) -> CallIdentity:
    claim = log.claim(rollout_id, "sha", b'{"a": 1}', "c=1")
    here = root(rollout_id, claim.attempt, claim.base)
    for n in range(1, calls + 1):
        log.issue(here.child(n), here.call_id, n, "model", False, "POST", "/v1", f"d{n}")
        if n < calls:
            log.respond(here.child(n), BINARY if n == 1 else TEXT, False)
    return here


def written(log: CallLog, directory: Path) -> Path:
    directory.mkdir()
    calllog_files.export(log, directory)
    return directory / calllog_files.FILE


def test_a_commit_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    if (pid := os.fork()) == 0:
        dispatched(CallLog(path))
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    log = CallLog(path)
    records = log.records("r-1", "0")
    assert [(r.call_id, r.answer) for r in records] == [("0.1", BINARY), ("0.2", None)]
    # Its owner is gone: the next dispatch continues it.
    claim = log.claim("r-1", "sha", b'{"a": 1}', "")
    assert (claim.verdict, claim.attempt, claim.base, claim.cookie) == (Verdict.REPLAY, 1, 0, "c=1")
    log.close()


def test_a_process_that_has_the_pid_of_a_dead_one_is_not_taken_for_it(log: CallLog) -> None:
    log.claim("r-1", "sha", b"{}", "")
    assert log.claim("r-1", "sha", b"{}", "").verdict is Verdict.JOIN
    log.db.execute("UPDATE rollouts SET began='1'")  # whoever had this pid then
    assert not log.runs_elsewhere("r-1")
    claim = log.claim("r-1", "sha", b"{}", "")
    assert (claim.verdict, claim.attempt) == (Verdict.REPLAY, 1)


def test_what_was_exported_is_loaded_as_the_next_attempt(log: CallLog, tmp_path: Path) -> None:
    dispatched(log, calls=3)
    log.remember(CallIdentity("r-9", 0, "0.4"), "dig", BINARY, "session-1")
    new = CallLog(tmp_path / "new.db")
    loaded = calllog_files.load(new, [written(log, tmp_path / "out")])
    assert loaded.totals == {RolloutState.PENDING: 1}
    assert loaded.recorded_calls == 2
    assert [r.answer for r in new.records("r-1", "0")] == [BINARY, TEXT, None]
    assert new.recall(CallIdentity("r-9", 1, "0.4")) == ("dig", BINARY)
    assert new.sessions() == {"session-1": ("r-9", 0)}
    assert new.stale(CallIdentity("r-9", 0, "0.5")) is Stale.ATTEMPT
    assert new.stale(CallIdentity("r-9", 1, "0.5")) is None
    assert new.attempt_of("r-1") == 1
    new.close()


def test_a_full_disk_at_the_export_is_told_with_the_file_that_it_did_not_take(log: CallLog, tmp_path: Path) -> None:
    dispatched(log)
    (tmp_path / "out").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # a write fails as on a full disk: without a path
    try:
        with pytest.raises(SafepointError) as refused:
            calllog_files.export(log, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.reason is Reason.STORAGE_FAILED
    assert str(tmp_path / "out" / calllog_files.FILE) in refused.value.problem.message


def test_the_ledger_has_each_rollout_in_one_state(log: CallLog, tmp_path: Path) -> None:
    dispatched(log, "pending", calls=2)
    here = dispatched(log, "parked", calls=2)
    log.respond(here.child(2), TEXT, False)
    done = dispatched(log, "completed")
    log.finish("completed", done.attempt, TEXT)
    failed = dispatched(log, "failed")
    log.finish("failed", failed.attempt, Answer(500, (), b"no"))
    dispatched(log, "excluded")
    log.exclude("excluded", 0, "too slow")
    log.exclude("elsewhere", 2, "of another agent")
    out = tmp_path / "out"
    out.mkdir()
    ledger = calllog_files.export(log, out).ledger
    assert {line.rollout_id: (line.state.name, line.recorded_calls) for line in ledger} == {
        "pending": ("PENDING", 1), "parked": ("PARKED", 2), "completed": ("COMPLETED", 1), "failed": ("EXCLUDED", 0),
        "excluded": ("EXCLUDED", 0), "elsewhere": ("EXCLUDED", 0),
    }  # fmt: skip
    reasons = {line.rollout_id: line.reason for line in ledger if line.reason}
    assert reasons["failed"] == "its last dispatch failed with status 500"
    new = CallLog(tmp_path / "new.db")
    loaded = calllog_files.load(new, [out / calllog_files.FILE])
    assert {line.rollout_id for line in loaded.restarted} == {"failed", "excluded", "elsewhere"}
    assert new.claim("excluded", "sha", b"", "").attempt == 1
    new.close()


def test_a_rollout_that_must_restart_stays_in_the_ledger_until_it_is_dispatched(log: CallLog, tmp_path: Path) -> None:
    failed = dispatched(log, "failed")
    log.finish("failed", failed.attempt, Answer(500, (), b"no"))
    dispatched(log, "slow")
    log.exclude("slow", 0, "too slow")
    dispatched(log, "lost")  # by another server, which only the whole ledger says
    file = written(log, tmp_path / "out-0")
    elsewhere = {"lost": "its session was lost"}
    for n in (1, 2, 3):  # saved again and again before anybody has dispatched them
        new = CallLog(tmp_path / f"{n}.db")
        loaded = calllog_files.load(new, [file], elsewhere)
        assert loaded.totals == {RolloutState.EXCLUDED: 3}
        out = tmp_path / f"out-{n}"
        out.mkdir()
        ledger = calllog_files.export(new, out).ledger
        assert {line.rollout_id: (line.state, line.reason) for line in ledger} == {
            "failed": (RolloutState.EXCLUDED, "its last dispatch failed with status 500"),
            "slow": (RolloutState.EXCLUDED, "too slow"),
            "lost": (RolloutState.EXCLUDED, "its session was lost"),
        }
        file, elsewhere = out / calllog_files.FILE, {}
        new.close()
    last = CallLog(tmp_path / "last.db")
    calllog_files.load(last, [file])
    for rollout_id in ("failed", "slow", "lost"):
        claim = last.claim(rollout_id, "sha", b"{}", "")
        assert (claim.verdict, claim.attempt, claim.base) == (Verdict.RUN, 1, 1)
    assert {line.state for line in calllog_files.export(last, tmp_path).ledger} == {RolloutState.PARKED}
    last.close()


class FullDisk:
    """A connection on which `statement` fails while `full`, as it does on a disk without space."""

    def __init__(self, db: sqlite3.Connection, statement: str) -> None:
        self._db, self._statement, self.full = db, statement, True

    def execute(self, sql: str, *values: Any) -> Any:
        if self.full and sql.startswith(self._statement):
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_a_commit_that_fails_leaves_no_transaction_behind(log: CallLog) -> None:
    disk: Any = FullDisk(log.db, "COMMIT")
    log.db = disk
    for _ in range(2):  # the second is not refused for a transaction that the first has left open
        with pytest.raises(sqlite3.OperationalError, match="full"):
            log.claim("r-1", "sha", b"{}", "")
        assert not log.db.in_transaction
    disk.full = False
    assert log.claim("r-1", "sha", b"{}", "").verdict is Verdict.RUN


def test_a_result_that_the_disk_did_not_take_is_said_to_be_one_whatever_was_lost_before(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "full.db", tolerant=True)
    here = root("r-1", 0, 0)
    log.claim("r-1", "sha", b"{}", "")
    db = log.db
    for statement in ("INSERT OR REPLACE INTO calls", "UPDATE rollouts SET state=?"):
        disk: Any = FullDisk(db, statement)
        log.db = disk
        if statement.startswith("INSERT"):
            log.issue(here.child(1), "0", 1, "model", False, "POST", "/v1", "d1")
            assert "calls could not be logged" in log.damaged["r-1"]
        else:
            log.finish("r-1", 0, TEXT)
        log.db = db
    disk = FullDisk(db, "UPDATE rollouts SET delivered")
    log.db = disk
    log.delivered("r-1", 0)
    assert log.damaged["r-1"].startswith("it has finished, and its result could not be recorded")
    log.close()


def test_a_call_that_the_disk_did_not_take_costs_a_place_in_the_cut_and_no_request(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "full.db", tolerant=True)
    here = root("r-1", 0, 0)
    assert log.claim("r-1", "sha", b"{}", "").verdict is Verdict.RUN
    disk: Any = FullDisk(log.db, "INSERT OR REPLACE INTO calls")
    log.db = disk
    log.issue(here.child(1), "0", 1, "model", False, "POST", "/v1", "d1")
    disk.full = False
    assert log.respond(here.child(1), TEXT, False)  # not taken for a call of a stale attempt
    assert "could not be logged" in log.damaged["r-1"]
    # Cut short, it begins from its input: the call that is missing in the log would be made again.
    log.interrupt("r-1", 0)
    claim = log.claim("r-1", "sha", b"{}", "")
    assert (claim.verdict, claim.attempt, claim.base) == (Verdict.RUN, 1, 1)
    assert not log.damaged
    assert not log.respond(here.child(1), TEXT, False)  # and this one is stale
    log.close()


def test_a_self_call_that_waits_does_not_make_a_rollout_pending(log: CallLog, tmp_path: Path) -> None:
    here = dispatched(log, calls=0)
    log.issue(here.child(1), here.call_id, 1, "agent", True, "POST", "/v1/responses", "d")
    out = tmp_path / "out"
    out.mkdir()
    assert calllog_files.export(log, out).ledger[0].state is RolloutState.PARKED


def test_a_log_that_has_served_is_not_overwritten(log: CallLog, tmp_path: Path) -> None:
    dispatched(log)
    file = written(log, tmp_path / "out")
    other = CallLog(tmp_path / "other.db")
    dispatched(other, "mine")
    with pytest.raises(Refused) as refused:
        calllog_files.load(other, [file])
    assert refused.value.reason is Reason.NOT_FRESH
    assert other.attempt_of("mine") == 0
    assert other.attempt_of("r-1") == -1
    other.close()


def test_a_load_may_be_repeated_until_the_first_dispatch(log: CallLog, tmp_path: Path) -> None:
    dispatched(log)
    file = written(log, tmp_path / "out")
    new = CallLog(tmp_path / "new.db")
    for _ in range(3):
        assert calllog_files.load(new, [file]).totals == {RolloutState.PENDING: 1}
    assert new.attempt_of("r-1") == 1
    new.claim("r-1", "sha", b"", "")
    with pytest.raises(Refused):
        calllog_files.load(new, [file])
    new.close()


@pytest.mark.parametrize("kind", ["rollout", "call", "executed", "count", "session"])
def test_a_line_that_comes_twice_is_damage_and_no_failure_of_the_disk(log: CallLog, tmp_path: Path, kind: str) -> None:
    dispatched(log)
    log.remember(CallIdentity("r-9", 0, "0.4"), "dig", TEXT, "session-1", counted=True)
    file = written(log, tmp_path / "out")
    lines = file.read_bytes().splitlines()
    at = next(n for n, line in enumerate(lines) if json.loads(line)["t"] == kind)
    file.write_bytes(b"\n".join([*lines[: at + 1], *lines[at:], b""]))
    new = CallLog(tmp_path / "new.db")
    if kind == "session":  # says the same again
        assert calllog_files.load(new, [file]).totals == {RolloutState.PENDING: 1}
    else:
        with pytest.raises(Refused) as refused:
            calllog_files.load(new, [file])
        assert refused.value.reason is Reason.SNAPSHOT_CORRUPT
        assert new.attempt_of("r-1") == -1
    new.close()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("rollout", {"attempt": MAX_ATTEMPT + 1}),  # its calls would carry no identity that anybody reads
        ("rollout", {"base": 1}),
        ("executed", {"base": 7}),
        ("count", {"base": 7}),
        ("call", {"call_id": "0.x"}),
        ("call", {"call_id": "../1"}),
        ("executed", {"call_id": ""}),
    ],
)
def test_what_no_gate_has_written_is_refused(
    log: CallLog, tmp_path: Path, kind: str, change: dict[str, object]
) -> None:
    dispatched(log, calls=3)
    log.remember(CallIdentity("r-9", 0, "0.4"), "dig", TEXT, "session-1", counted=True)
    file = written(log, tmp_path / "out")
    records = [json.loads(line) for line in file.read_bytes().splitlines()]
    next(r for r in records if r["t"] == kind).update(change)
    file.write_bytes(b"".join(json.dumps(r).encode() + b"\n" for r in records))
    new = CallLog(tmp_path / "new.db")
    with pytest.raises(Refused) as refused:
        calllog_files.load(new, [file])
    assert refused.value.reason is Reason.SNAPSHOT_CORRUPT
    assert new.attempt_of("r-1") == -1
    new.close()


@pytest.mark.parametrize("seed", range(150))
def test_a_damaged_file_is_refused_and_nothing_is_installed(log: CallLog, tmp_path: Path, seed: int) -> None:
    dispatched(log, calls=3)
    log.remember(CallIdentity("r-9", 0, "0.4"), "dig", TEXT, "session-1", counted=True)
    file = written(log, tmp_path / "out")
    rng = random.Random(seed)
    lines = file.read_bytes().splitlines()
    at = rng.randrange(len(lines))
    record = json.loads(lines[at])
    harm = rng.choice(["drop", "type", "extra", "cut", "kind", "swap", "header", "deep", "id"])
    if harm == "drop":
        record.pop(rng.choice(list(record)))
    elif harm == "type":
        key = rng.choice(list(record))
        record[key] = rng.choice([None, -1, 2**70, {"x": 1}, ["a"], 1.5, True])
    elif harm == "extra":
        record["more"] = 1
    elif harm == "kind":
        record["t"] = rng.choice([t for t in ["", "call", "rollout", "header", 3] if t != record["t"]])
    elif harm == "id":
        record["rollout_id"] = rng.choice(["../x", "", "a b", "x" * 300])
    elif harm == "deep":
        lines[at] = b"[" * 100_000
    elif harm == "cut":
        lines[at] = lines[at][: len(lines[at]) // 2]
    elif harm == "swap":
        lines.append(lines[1])
    else:
        lines = lines[1:]
    if harm not in ("deep", "cut", "swap", "header"):
        lines[at] = json.dumps(record).encode()
    damaged = b"\n".join(lines) + b"\n"
    if damaged == file.read_bytes():
        return
    file.write_bytes(damaged)
    new = CallLog(tmp_path / "new.db")
    try:
        with pytest.raises(SafepointError):
            calllog_files.load(new, [file])
    finally:
        tables = ("rollouts", "calls", "executed", "sessions", "marks", "counts")
        counts = [new.db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in tables]
        new.close()
    assert counts == [0] * 6


def test_only_finished_calls_that_the_callee_must_have_counted_are_told(log: CallLog) -> None:
    here = root("r-1", 0, 0)
    log.claim("r-1", "sha", b"{}", "")
    stream = Answer(200, (("Content-Type", "text/event-stream; charset=utf-8"),), b"data: 1")
    failed = Answer(500, (), b"")  # of a handler that raised
    given = [("POST", TEXT), ("PUT", TEXT), ("GET", TEXT), ("POST", stream), ("POST", failed), ("POST", None)]
    for n, (method, answer) in enumerate(given, 1):
        log.issue(here.child(n), here.call_id, n, "box", False, method, "/step", f"d{n}")
        if answer is not None:
            log.respond(here.child(n), answer, False)
    log.issue(here.child(9), here.call_id, 9, "other", False, "POST", "/step", "d9")
    log.respond(here.child(9), TEXT, False)
    assert log.finished_at("r-1", "box") == 2
    assert log.restart("r-1", 0, "again") == 1
    assert log.finished_at("r-1", "box") == 0


def test_a_callee_that_has_executed_fewer_calls_than_its_caller_has_finished_has_lost_them(log: CallLog) -> None:
    def executed(call: CallIdentity, digest: str = "dig") -> None:
        log.remember(call, digest, TEXT, counted=True)

    here = root("r-1", 2, 1)
    assert not log.has_lost(here.child(1), 0)
    assert log.has_lost(here.child(1), 1)
    executed(here.child(1))
    executed(here.child(2))
    assert [log.has_lost(root("r-1", 3, 1).child(3), n) for n in (1, 2, 3)] == [False, False, True]
    executed(root("r-1", 3, 3).child(1))  # from its input
    assert [log.has_lost(root("r-1", 3, 3).child(2), n) for n in (1, 2)] == [False, True]
    log.done([("r-1", 2)])
    assert not log.has_lost(root("r-1", 3, 3).child(2), 1)
    log.done([("r-1", 3)])
    assert log.db.execute("SELECT count(*) FROM counts").fetchone() == (0,)


def test_the_state_of_a_rollout_is_gone_with_the_worker_process_that_held_it(log: CallLog, tmp_path: Path) -> None:
    here, elsewhere = root("r-1", 0, 0), root("r-2", 0, 0)
    if (pid := os.fork()) == 0:
        worker = CallLog(log.path)
        worker.remember(here.child(1), "dig", TEXT, counted=True)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    for n in (2, 3):  # another worker has executed as many since, in a session that began empty there
        log.remember(here.child(n), "dig", TEXT, counted=True)
    log.remember(elsewhere.child(1), "dig", TEXT, counted=True)
    assert log.has_lost(here.child(4), 2)
    assert not log.has_lost(elsewhere.child(2), 1)

    log.exclude_orphans()
    out = tmp_path / "out"
    out.mkdir()
    ledger = {line.rollout_id: line for line in calllog_files.export(log, out).ledger}
    assert list(ledger) == ["r-1"]
    assert (ledger["r-1"].state, str(pid) in ledger["r-1"].reason) == (RolloutState.EXCLUDED, True)

    log.remember(root("r-1", 1, 1).child(1), "dig", TEXT, counted=True)  # it has restarted from its input
    assert not log.has_lost(root("r-1", 1, 1).child(2), 1)


def test_what_a_restore_has_brought_back_is_gone_with_the_worker_that_loaded_it(log: CallLog, tmp_path: Path) -> None:
    for rollout_id in ("r-1", "r-2"):
        for n in (1, 2):
            log.remember(root(rollout_id, 0, 0).child(n), "dig", TEXT, f"s-{rollout_id}", counted=True)
    file = written(log, tmp_path / "out")
    new = CallLog(tmp_path / "new.db")
    calllog_files.load(new, [file])
    if (pid := os.fork()) == 0:
        CallLog(new.path).adopt(["r-1"])
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    lost = [new.has_lost(root(rollout_id, 1, 0).child(3), 2) for rollout_id in ("r-1", "r-2")]
    new.close()
    assert lost == [True, False]


def test_a_call_that_the_disk_did_not_take_is_no_lost_state(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls.db", tolerant=True)
    call = root("r-1", 0, 0).child(1)
    log.db.execute("DROP TABLE executed")
    log.remember(call, "dig", TEXT, counted=True)
    assert log.failures == 1
    assert not log.has_lost(call, 1)
    log.close()


def test_retired_attempts_are_forgotten_and_refused(log: CallLog, tmp_path: Path) -> None:
    here = dispatched(log)
    log.finish("r-1", here.attempt, TEXT)
    log.remember(CallIdentity("r-2", 1, "0.4"), "dig", TEXT, "s")
    assert log.retire([("r-1", 0), ("r-2", 1), ("unknown", 4)]) == 2
    assert log.sessions() == {}
    assert log.stale(CallIdentity("r-2", 1, "0.5")) is Stale.ATTEMPT
    assert log.stale(CallIdentity("r-2", 2, "0.5")) is None
    assert log.claim("r-1", "sha", b"", "").attempt == 1
    out = tmp_path / "out"
    out.mkdir()
    assert [line.rollout_id for line in calllog_files.export(log, out).ledger] == ["r-1"]


def test_an_answer_of_an_older_base_is_forgotten_when_the_new_one_calls(log: CallLog) -> None:
    log.remember(CallIdentity("r-1", 0, "0.1"), "d", TEXT)
    log.remember(CallIdentity("r-1", 2, "2.1"), "d", BINARY)
    assert log.recall(CallIdentity("r-1", 2, "0.1")) is None
    assert log.recall(CallIdentity("r-1", 2, "2.1")) == ("d", BINARY)


def test_an_answer_to_an_attempt_that_was_overtaken_is_dropped(log: CallLog) -> None:
    here = dispatched(log)
    log.restart("r-1", 0, "diverged")
    assert log.respond(here.child(2), TEXT, False) is False
    assert log.records("r-1", "0") == []


def test_what_has_become_of_sessions_is_read_from_where_it_was_read_last(
    log: CallLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything() -> dict[str, tuple[str, int]]:
        rows = log.db.execute("SELECT session_id, rollout_id, attempt FROM sessions").fetchall()
        return {r[0]: (r[1], r[2]) for r in rows}

    monkeypatch.setattr(calllog, "_KEPT_MOVES", 8)
    other = CallLog(log.path)  # another worker, or the shim, changes them as well
    rng = random.Random(7)
    for step in range(400):
        who, rollout_id = rng.choice((log, other)), f"r-{rng.randrange(12)}"
        match rng.randrange(4):
            case 0 | 1:
                who.bind(f"s-{rng.randrange(20)}", rollout_id, rng.randrange(3))
            case 2:
                who.done([(rollout_id, rng.randrange(3))])
            case _:
                who.retire([(rollout_id, 0)])
        if rng.random() < (
            0.5 if step % 100 < 50 else 0.02
        ):  # and seldom, so that moves are forgotten before they are read
            found = who.sessions()
            assert found == everything()
            found.clear()  # it is the caller's own
    assert log.sessions() == other.sessions() == everything()
    assert log.db.execute("SELECT count(*) FROM moved").fetchone()[0] <= 2 * 8 + 2
    other.close()
