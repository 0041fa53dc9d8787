"""Calls that are appended beside the database are part of the log, whoever reads it, and however their writer ended."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.errors import Reason
from participant_shims.gate import logfile, tail
from participant_shims.gate.calllog import Answer, CallLog, Verdict
from participant_shims.gate.logfile import is_finished, log_failure
from participant_shims.gate.tail import records, tails_of
from participant_shims.identity import CallIdentity, root

OK = Answer(
    200, (("content-type", "application/json"), ("x-name", "caf\u00e9 \udce9")), b'{"x": 1}', "OK", "http://h/p"
)
# What two logs have in common: a serial is of one file, and what a rollout has remembered that has ended is nobody's.
TABLES = dict.fromkeys(("rollouts", "calls", "sessions", "counts", "marks"), "*") | {
    "executed JOIN rollouts USING(rollout_id) WHERE executed.base=rollouts.base AND state='running'": "rollout_id, call_id, executed.attempt, digest, executed.body"
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CallLog]:
    made = CallLog(tmp_path / "calls.db", alone=True)
    yield made
    made.close()


def dispatch(log: CallLog, rollout_id: str = "r-1", calls: int = 2, answered: int = 2) -> CallIdentity:
    claim = log.claim(rollout_id, "sha", b'{"a": 1}', "c=1")
    here = root(rollout_id, claim.attempt, claim.base)
    for n in range(1, calls + 1):
        issue(log, here, n)
        if n <= answered:
            assert log.respond(here.child(n), OK, False)
    return here


def issue(log: CallLog, here: CallIdentity, n: int) -> None:
    log.issue(here.child(n), here.call_id, n, "model", False, "POST", "/v1", f"d{n}")


def read_elsewhere(path: Path, rollout_id: str = "r-1") -> list[tuple[str, Answer | None]]:
    other = CallLog(path)
    try:
        return [(r.call_id, r.answer) for r in other.records(rollout_id, "0")]
    finally:
        other.close()


def in_database(log: CallLog) -> int:
    return int(log.db.execute("SELECT count(*) FROM calls").fetchone()[0])


def test_a_call_is_for_others_to_read_as_soon_as_it_was_made(log: CallLog) -> None:
    dispatch(log, calls=3, answered=2)
    assert in_database(log) == 0  # nothing but the tail has it
    assert read_elsewhere(log.path) == [("0.1", OK), ("0.2", OK), ("0.3", None)]
    here = root("r-1", 0, 0)
    assert log.respond(here.child(3), OK, False)
    assert read_elsewhere(log.path)[2] == ("0.3", OK)
    assert log.finished_at("r-1", "model") == 3


def test_a_call_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    if (pid := os.fork()) == 0:
        dispatch(CallLog(path, alone=True), answered=1)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert read_elsewhere(path) == [("0.1", OK), ("0.2", None)]
    log = CallLog(path)
    assert log.claim("r-1", "sha", b'{"a": 1}', "").verdict is Verdict.REPLAY
    log.close()


def test_a_record_that_was_cut_off_is_none_wherever_it_was_cut(log: CallLog, tmp_path: Path) -> None:
    dispatch(log, calls=1)
    (path,) = tails_of(log.path)
    whole = path.read_bytes()
    ends = [0, *(end for _, _, end in records(path, 0))]
    assert ends[-1] == len(whole)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert [end for _, _, end in records(path, 0)] == [end for end in ends[1:] if end <= size]
    path.write_bytes(whole)


def test_damage_is_refused_or_seen_in_what_is_missing_and_never_taken_for_another_record(log: CallLog) -> None:
    dispatch(log, calls=3)
    (path,) = tails_of(log.path)
    whole, rng = path.read_bytes(), random.Random(3)
    good = [head for head, _, _ in records(path, 0)]
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.3 else data)
        found: list[Any] = []
        with contextlib.suppress(sqlite3.DatabaseError):
            found += (head for head, _, _ in records(path, 0))
        assert found == good[: len(found)]


@pytest.mark.parametrize("head", [["no such", "r-1", 0, "0.1"], {}, ["respond", "r-1", 0, "0.1", 200], 7, ["issue"]])
def test_a_record_that_means_nothing_fails_the_save_and_not_the_process(log: CallLog, head: Any) -> None:
    dispatch(log, calls=1, answered=0)
    assert log.tail is not None
    log.tail.append(head)
    with pytest.raises(sqlite3.DatabaseError, match="none") as caught:
        read_elsewhere(log.path)
    problem = log_failure(log.path, caught.value).problem
    assert problem.reason is Reason.STORAGE_FAILED
    assert problem.next_step.startswith("It is damaged")  # free space would not help


def test_calls_of_a_rollout_that_has_ended_never_reach_the_database(log: CallLog) -> None:
    here = dispatch(log, calls=4, answered=4)
    log.finish("r-1", 0, OK)
    assert read_elsewhere(log.path) == []
    assert in_database(log) == 0
    assert log.db.execute("SELECT turns FROM rollouts").fetchone() == (4,)
    assert not log.respond(here.child(5), OK, False)  # nobody has it who would act on it


def test_its_writer_reads_only_what_of_a_tail_still_matters(log: CallLog) -> None:
    for n in range(20):
        dispatch(log, f"over-{n}")
        log.finish(f"over-{n}", 0, OK)
    (path,) = tails_of(log.path)
    before = path.stat().st_size
    dispatch(log, "goes-on", calls=2, answered=1)
    path.write_bytes(bytes(before) + path.read_bytes()[before:])  # whoever reads the rest finds damage
    log.bring_in()
    assert [r.call_id for r in log.records("goes-on", "0")] == ["0.1", "0.2"]
    log.finish("goes-on", 0, OK)
    path.write_bytes(bytes(path.stat().st_size))
    log.bring_in()


def test_a_tail_that_is_full_is_brought_in_and_begun_anew(log: CallLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "FULL_BYTES", 2000)
    made = [dispatch(log, f"r-{n}", calls=3, answered=2) for n in range(20)]
    (path,) = tails_of(log.path)
    assert path.stat().st_size < 4000
    for here in made:
        assert read_elsewhere(log.path, here.rollout_id) == [("0.1", OK), ("0.2", OK), ("0.3", None)]
        assert log.respond(here.child(3), OK, False)
        assert log.finished_at(here.rollout_id, "model") == 3


@pytest.mark.parametrize(("code", "reason"), [(errno.ENOSPC, Reason.STORAGE_FULL), (errno.EIO, Reason.STORAGE_FAILED)])
@pytest.mark.parametrize("half", [False, True])
def test_a_disk_that_fails_costs_a_rollout_its_place_in_the_cut_and_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: Reason, half: bool
) -> None:
    log = CallLog(tmp_path / "calls.db", tolerant=True, alone=True)
    here, other = dispatch(log, "r-1"), dispatch(log, "r-2")
    issue(log, here, 3)
    write = os.write

    def failing(file: int, data: bytes) -> int:
        if half:
            return write(file, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(tail.os, "write", failing)
        assert log.respond(here.child(3), OK, False)  # its agent goes on
    assert log.damaged.keys() == {"r-1"}
    assert log_failure(log.path, sqlite3.OperationalError(log.last_failure)).problem.reason is (
        Reason.STORAGE_FULL if half else reason
    )
    issue(log, other, 3)
    assert log.respond(other.child(3), OK, False)
    assert log.finished_at("r-2", "model") == 3
    assert [answer for _, answer in read_elsewhere(log.path, "r-2")] == [OK] * 3
    issue(log, here, 4)
    assert log.respond(here.child(4), OK, False)
    assert read_elsewhere(log.path, "r-1") == [("0.1", OK), ("0.2", OK), ("0.3", None), ("0.4", OK)]
    log.close()


def test_an_attempt_that_was_replaced_appends_nothing_that_counts(log: CallLog) -> None:
    here = dispatch(log, calls=2, answered=1)
    log.diverge("r-1", 0, "why")
    assert log.restart("r-1", 0, "why") == 1
    assert not log.respond(here.child(2), OK, False)
    again = root("r-1", 1, 1)
    log.issue(again.child(1), "1", 1, "model", False, "POST", "/v1", "d1")
    assert log.respond(again.child(1), OK, False)
    assert log.finished_at("r-1", "model") == 1
    other = CallLog(log.path)
    assert other.records("r-1", "0") == []
    assert [r.answer for r in other.records("r-1", "1")] == [OK]
    other.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_log_with_a_tail_says_what_one_without_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same events, in any order: the same answers, and in the end the same tables."""
    monkeypatch.setattr(logfile, "FULL_BYTES", 3000)
    rng = random.Random(seed)
    plain = CallLog(tmp_path / "plain.db")
    tailed = CallLog(tmp_path / "tailed.db", alone=True)
    rollouts = {f"r-{n}": root(f"r-{n}", 0, 0) for n in range(4)}
    waiting: dict[str, list[int]] = {name: [] for name in rollouts}
    appended = 0

    def both(what: str, *args: Any) -> Any:
        first, second = getattr(plain, what)(*args), getattr(tailed, what)(*args)
        assert first == second, what
        return first

    def disturb(rollout_id: str) -> None:
        here = rollouts[rollout_id]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                both("finish", rollout_id, here.attempt, OK)
            case 5:
                both("interrupt", rollout_id, here.attempt)
            case 6:
                both("diverge", rollout_id, here.attempt, "why")
                following = both("restart", rollout_id, here.attempt, "why")
                rollouts[rollout_id], waiting[rollout_id] = root(rollout_id, following, following), []
            case 7:
                both("retire", [(rollout_id, here.attempt)])
            case _:
                CallLog(tailed.path).close()  # the shim looks
        claim = both("claim", rollout_id, "sha", b"{}", "")
        rollouts[rollout_id] = root(rollout_id, claim.attempt, claim.base)
        if claim.verdict is Verdict.RUN:
            waiting[rollout_id] = []

    for name in rollouts:
        disturb(name)
    for step in range(1, 500):
        rollout_id = rng.choice([*rollouts])
        here, mine = rollouts[rollout_id], waiting[rollout_id]
        status, kind = rng.choice((200, 200, 500)), rng.choice(("application/json", "text/event-stream"))
        answer = Answer(status, (("content-type", kind),), b"%d" % step)
        if rng.random() < 0.04:
            disturb(rollout_id)
        elif mine and rng.random() < 0.5:
            number = mine.pop(rng.randrange(len(mine)))
            if number % 5 == 0 and rng.random() < 0.8:
                both("remember", here.child(number), "d", answer)
            both("recall", here.child(number), "d")
            if rng.random() < 0.1:
                continue  # no answer comes
            both("respond", here.child(number), answer, number % 5 == 0)
        else:
            method, own = rng.choice(("POST", "POST", "GET")), step % 5 == 0
            server = "itself" if own else rng.choice("ab")
            both("issue", here.child(step), here.call_id, step, server, own, method, "/v1", "d")
            mine.append(step)
        appended += rollout_id in tailed.live
        both("finished_at", rollout_id, rng.choice("ab"))
        both("attempt_of", rollout_id)
        both("diverged", rollout_id, here.attempt - rng.randrange(2))
        both("is_own_call", here.child(step))
        if rng.random() < 0.1:
            both("records", rollout_id, here.call_id)
    assert appended > 50
    tailed.bring_in()
    for table, columns in TABLES.items():
        rows = [log.db.execute(f"SELECT {columns} FROM {table} ORDER BY 1, 2").fetchall() for log in (plain, tailed)]
        assert rows[0] == rows[1], table
    plain.close()
    tailed.close()


def test_what_is_finished_is_the_same_in_memory_and_in_the_database(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "calls.db")
    here = root("r-1", log.claim("r-1", "sha", b"", "").attempt, 0)
    expected = n = 0
    for method in ("POST", "GET", "HEAD", "OPTIONS", "PUT"):
        for status in (200, 302, 400, 500):
            for header in (
                ("a", "b"),
                ("Content-Type", "Text/Event-Stream"),
                ("X-NDJSON", ""),
                ("c", "application/x-ndjson"),
            ):
                n += 1
                answer = Answer(status, (header,), b"")
                log.issue(here.child(n), "0", n, "s", False, method, "/", "d")
                log.respond(here.child(n), answer, False)
                expected += is_finished(method, answer)
    assert 0 < expected == log.finished_at("r-1", "s") < n
    log.close()


def test_a_process_without_memory_is_told_from_a_disk_that_fails(log: CallLog) -> None:
    """A call log maps its index into memory, and sqlite3 says `disk I/O error` when it gets none for that."""
    program = (
        "import resource, sqlite3, sys; from pathlib import Path;"
        " from participant_shims.gate.calllog import CallLog; from participant_shims.gate.logfile import log_failure;"
        " used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize();"
        " resource.setrlimit(resource.RLIMIT_AS, (used, -1));"
        "\ntry: CallLog(Path(sys.argv[1]))"
        "\nexcept (sqlite3.Error, MemoryError) as error: failed = error"
        "\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
        "\nproblem = log_failure(Path(sys.argv[1]), failed).problem; print(problem.message, problem.next_step)"
    )
    told = subprocess.run([sys.executable, "-c", program, str(log.path)], capture_output=True, text=True, check=True)
    assert "gets no more memory" in told.stdout
    assert str(log.path) in told.stdout
    assert "Free space" not in told.stdout
    assert "disk" not in told.stdout


@pytest.mark.parametrize("failure", [MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))])
def test_a_call_for_which_there_is_no_memory_costs_its_rollout_a_place_in_the_cut_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    log = CallLog(tmp_path / "calls.db", tolerant=True, alone=True)
    here = dispatch(log, "r-1")
    issue(log, here, 3)

    def failing(file: int, data: bytes) -> int:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(tail.os, "write", failing)
        assert log.respond(here.child(3), OK, False)  # its agent goes on
    assert log.damaged == {"r-1": "its calls could not be logged: out of memory"}
    assert "more memory" in log.remedy
    assert "Free space" not in log.remedy
    log.close()
