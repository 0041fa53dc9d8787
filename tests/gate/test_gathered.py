"""The call log as a rope: what was gathered while rollouts run is what a save at that moment would have read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.wire.chunks import Chunk, Chunks
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import RolloutState
from participant_shims.gate import calllog_export, calllog_files
from participant_shims.gate.calllog import Answer, CallLog
from participant_shims.gate.calllog_export import Gathered
from participant_shims.identity import CallIdentity, root

ANSWER = Answer(200, (("content-type", "application/json"),), b'{"x": "' + b"y" * 5000 + b'"}')
TABLES = ("rollouts", "calls", "executed", "counts", "sessions", "marks")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CallLog]:
    made = CallLog(tmp_path / "calls.db")
    yield made
    made.close()


def call(log: CallLog, rollout_id: str, number: int, *, answered: bool = True) -> None:
    here = root(rollout_id, log.attempt_of(rollout_id), 0)
    log.issue(here.child(number), here.call_id, number, "model", False, "POST", "/v1", f"d{number}")
    if answered:
        log.respond(here.child(number), ANSWER, False)


def rollout(log: CallLog, rollout_id: str, calls: int = 3) -> None:
    log.claim(rollout_id, "sha", b'{"a": 1}', "c=1")
    for number in range(1, calls + 1):
        call(log, rollout_id, number)


def part(tmp_path: Path, name: str) -> Path:
    made = tmp_path / "root" / "snapshots" / name / "agent"
    made.mkdir(parents=True)
    return made


def installed(path: Path, tmp_path: Path) -> dict[str, list[tuple[object, ...]]]:
    """What a fresh log has after a load."""
    new = CallLog(tmp_path / f"{path.parents[1].name}-{path.name}.db")
    try:
        calllog_files.load(new, [path])
        return {table: sorted(new.db.execute(f"SELECT * FROM {table}").fetchall()) for table in TABLES}
    finally:
        new.close()


def same_as_at_once(log: CallLog, gathered: Gathered, tmp_path: Path, name: str) -> calllog_export.LogExport:
    """Export what was gathered; it must load as what a log that is read now would."""
    directory = part(tmp_path, name)
    done = gathered.export(log, directory, Chunks(tmp_path / "root"))
    whole = tmp_path / f"whole-{name}" / "x"
    whole.mkdir(parents=True)
    now = calllog_files.export(log, whole)
    assert done.ledger == now.ledger
    assert done.recorded_calls == now.recorded_calls

    def without_serial(found: dict[str, list[tuple[object, ...]]]) -> dict[str, list[tuple[object, ...]]]:
        return found | {"executed": sorted(row[1:] for row in found["executed"])}

    loaded = installed(directory / "calls.rope", tmp_path)
    assert without_serial(loaded) == without_serial(installed(whole / "calls.jsonl", tmp_path))
    return done


def test_whatever_changes_after_it_was_gathered_is_read_again(log: CallLog, tmp_path: Path) -> None:
    gathered, chunks = Gathered(), Chunks(tmp_path / "root")
    (tmp_path / "root").mkdir()
    for number in range(8):
        rollout(log, f"r-{number}")
    identity = CallIdentity("r-x", 0, "0.4")
    log.remember(identity, "dig", ANSWER, "session-1", counted=True)
    gathered.ahead(log, chunks, 60)
    call(log, "r-1", 4)
    call(log, "r-2", 4, answered=False)
    log.finish("r-3", 0, ANSWER)
    log.retire([("r-4", 0)])
    log.restart("r-5", 0, "it uses chance")
    log.remember(CallIdentity("r-x", 0, "0.5"), "dig", ANSWER, "session-2", ["0.4"], counted=True)
    log.mark("r-y", 3)
    rollout(log, "r-new")
    log.exclude("r-6", 0, "its request did not end")
    done = same_as_at_once(log, gathered, tmp_path, "s-1")
    states = {line.rollout_id: line.state for line in done.ledger}
    assert states["r-1"] is RolloutState.PARKED
    assert states["r-2"] is RolloutState.PENDING
    assert states["r-3"] is RolloutState.COMPLETED
    assert "r-4" not in states
    assert states["r-6"] is RolloutState.EXCLUDED
    log.clear_excluded()
    log.done([("r-x", 0)])
    same_as_at_once(log, gathered, tmp_path, "s-2")  # nobody is excluded any more, and another has ended


def test_a_second_save_writes_the_rollouts_that_have_gone_on(log: CallLog, tmp_path: Path) -> None:
    gathered = Gathered()
    (tmp_path / "root").mkdir()
    for number in range(300):
        rollout(log, f"r-{number}", 5)
    same_as_at_once(log, gathered, tmp_path, "s-1")
    size = sum(found.size_bytes for found in Chunks(tmp_path / "root").all())
    for number in range(3):
        call(log, f"r-{number}", 6)
    same_as_at_once(log, gathered, tmp_path, "s-2")
    more = sum(found.size_bytes for found in Chunks(tmp_path / "root").all()) - size
    own = (tmp_path / "root" / "snapshots" / "s-2" / "agent" / "calls.rope").stat().st_size
    assert more + own < 0.02 * size
    same_as_at_once(log, gathered, tmp_path, "s-3")
    assert sum(found.size_bytes for found in Chunks(tmp_path / "root").all()) == size + more


def test_a_shim_that_follows_another_reads_everything(log: CallLog, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    rollout(log, "r-1")
    same_as_at_once(log, Gathered(), tmp_path, "s-1")
    rollout(log, "r-2")
    same_as_at_once(log, Gathered(), tmp_path, "s-2")


def test_what_was_not_written_is_read_again(log: CallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = Gathered()
    (tmp_path / "root").mkdir()
    rollout(log, "r-1")

    def full(self: Chunks, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Chunks, "write", full)
    with pytest.raises(OSError, match="No space"):
        gathered.export(log, part(tmp_path, "s-0"), Chunks(tmp_path / "root"))
    monkeypatch.undo()
    same_as_at_once(log, gathered, tmp_path, "s-1")


def test_what_lies_in_a_chunk_that_was_found_damaged_is_written_again(log: CallLog, tmp_path: Path) -> None:
    gathered, chunks = Gathered(), Chunks(tmp_path / "root")
    (tmp_path / "root").mkdir()
    for number in range(30):
        rollout(log, f"r-{number}")
    same_as_at_once(log, gathered, tmp_path, "s-1")
    (found,) = chunks.all()
    chunks.path(found.sha256).write_bytes(bytes(found.size_bytes))
    with pytest.raises(SafepointError):
        chunks.check(Chunk(found.sha256, found.size_bytes))
    gathered.ahead(log, chunks, 60.0)
    same_as_at_once(log, gathered, tmp_path, "s-2")
    chunks.check(Chunk(found.sha256, found.size_bytes))  # the same bytes: the first snapshot is whole again


@pytest.mark.parametrize("harm", ["split", "before its rollout"])
def test_the_lines_of_a_rollout_are_together(log: CallLog, tmp_path: Path, harm: str) -> None:
    rollout(log, "r-1")
    rollout(log, "r-2")
    out = tmp_path / "out"
    out.mkdir()
    calllog_files.export(log, out)
    head, *lines = (out / "calls.jsonl").read_bytes().splitlines(keepends=True)
    lines = [lines[0], *lines[2:], lines[1]] if harm == "split" else [lines[1], lines[0], *lines[2:]]
    (out / "calls.jsonl").write_bytes(b"".join([head, *lines]))
    new = CallLog(tmp_path / "new.db")
    with pytest.raises(SafepointError) as raised:
        calllog_files.load(new, [out / "calls.jsonl"])
    assert raised.value.reason is Reason.SNAPSHOT_CORRUPT
    new.close()
