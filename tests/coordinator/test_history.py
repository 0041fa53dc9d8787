"""What each operation leaves below the root: it outlives the coordinator, stays small, and no save fails by it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator import history_files
from coordinator.history import History, file_name, names
from coordinator.history_files import OnDisk, after_others
from coordinator.history_record import Record, parse
from coordinator.history_writing import HistoryWriter
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Problem, Reason
from coordinator.wire.terms import Phase, Role
from tests.coordinator.conftest import Bench, SafepointError, kinds, unary, until
from tests.fakes import Knobs

HEAD = {"kind": "operation", "operation_id": "op-1", "operation": "save", "snapshot_id": "s", "time": 1000.0}


def folder(bench: Bench) -> Path:
    return bench.root / "coordinator" / "history"


async def written(bench: Bench, operation_id: str) -> Record:
    """The operation as the history has it, once its last line is there."""
    history = History(bench.root)
    found: list[Record] = []

    def there() -> bool:
        record = history.find(operation_id)
        found[:] = [record] if record is not None and record.outcome else []
        return bool(found)

    await until(there)
    return found[0]


async def test_a_save_can_be_told_from_its_file_alone(bench: Bench) -> None:
    await bench.start(agent_0=Knobs(rollouts=3))
    await bench.save()
    record = await written(bench, "save-1")
    assert (record.operation, record.snapshot_id, record.outcome, record.epoch) == ("save", "step-1", "succeeded", 1)
    assert {p["participant_id"]: p["role"] for p in record.participants} == {
        "agent-0": "agent", "model-0": "policy_model", "resources-0": "resources",
    }  # fmt: skip
    told = [(t.event.WhichOneof("event"), t.at_s) for t in record.events]
    assert [name for name, _ in told if name == "phase_started"] == ["phase_started"] * 6  # discover to resume
    assert [at for _, at in told] == sorted(at for _, at in told)
    called = [
        t.event.participant_called.participant_id for t in record.events if t.event.HasField("participant_called")
    ]
    assert called[:3] == ["model-0", "agent-0", "resources-0"]  # as the waves of prepare go
    assert record.coverage == 1.0
    assert record.size_bytes > 0
    assert record.pause_s is not None
    assert 0 < record.pause_s < record.elapsed_s
    assert record.damaged == record.dropped == 0


async def test_a_phase_says_how_long_it_may_take(bench: Bench) -> None:
    await bench.start()
    events = await bench.save()
    started = {e.phase_started.phase: e.phase_started for e in events if e.HasField("phase_started")}
    assert 0 < started[int(Phase.PREPARE)].budget.ToMicroseconds() < 10e6  # the caller's, less what opening needs
    assert started[int(Phase.RESUME)].budget.ToMicroseconds() > 0
    assert not started[int(Phase.PUBLISH)].HasField("budget")  # the disk is not given up on


async def test_why_is_known_after_a_restart_with_the_events_around_it(bench: Bench) -> None:
    knobs = Knobs(fail_on={"Commit": Problem(Reason.STORAGE_FULL, "The disk is full.")})
    await bench.start(agent_0=knobs)
    with pytest.raises(SafepointError, match="disk is full"):
        await bench.save()
    before = await bench.explain()
    await bench.crash()
    await bench.restart()
    after = await bench.explain()
    assert after.operation.failure == before.operation.failure
    assert after.operation.begin_time == before.operation.begin_time
    assert kinds(list(after.events))[-3:] == kinds(list(before.events))[-3:]
    assert "phase_started" in kinds(list(after.events))
    knobs.fail_on.clear()
    await bench.save("save-2", "step-2")
    await written(bench, "save-2")
    assert [(one.operation_id, one.outcome) for one in (await bench.explain()).later] == [("save-2", 2)]


async def test_a_save_that_a_crash_has_ended_has_its_begin_and_what_came_after_it(bench: Bench) -> None:
    knobs = Knobs(hang_on={"Commit"})
    await bench.start(agent_0=knobs)
    saving = asyncio.create_task(bench.save(timeout=20))
    await until(lambda: bench.shims["agent-0"].count("Commit") == 1)
    await bench.crash()
    saving.cancel()
    knobs.hang_on.clear()
    await bench.restart()
    await bench.save("save-2", "step-2")
    await written(bench, "save-2")
    told = await bench.explain()
    assert told.operation.operation_id == "save-1"
    assert told.operation.HasField("begin_time"), "an earlier coordinator has written it down"
    assert [(one.operation_id, one.outcome) for one in told.later] == [("save-2", 2)]


async def test_a_save_that_was_refused_before_anybody_was_paused_is_remembered_too(bench: Bench) -> None:
    await bench.start()
    await bench.add("judge", Role.UNSPECIFIED)
    with pytest.raises(SafepointError) as caught:
        await bench.save()
    await written(bench, "save-1")
    await bench.crash()
    await bench.start_coordinator()
    answer = await bench.explain()
    assert answer.operation.failure.primary.reason == int(caught.value.reason)


async def test_the_name_of_a_snapshot_means_the_save_that_made_it_and_not_a_repeat_that_it_refused(
    bench: Bench,
) -> None:
    await bench.start()
    await bench.save("save-1", "step-1")
    with pytest.raises(SafepointError):
        await bench.save("save-2", "step-1")
    await until(lambda: len(History(str(bench.root)).list()) == 2)
    found = History(str(bench.root)).named("step-1")
    assert found is not None
    assert found.operation_id == "save-1"
    assert History(str(bench.root)).named("step-2") is None


async def test_what_a_crash_cut_off_is_gone_on_with_in_the_same_file(bench: Bench) -> None:
    await bench.start(resources_0=Knobs(inflight=1, drain_after_s=60))
    saving = asyncio.create_task(bench.save(quiesce_mode=2))
    await until(
        lambda: (
            any(f.stat().st_size for f in folder(bench).glob("*")) and bench.shims["resources-0"].closed_at is not None
        )
    )
    await bench.crash()
    with pytest.raises(SafepointError):
        await saving
    await bench.restart()
    record = await written(bench, "save-1")
    assert record.takeovers == 1
    assert record.outcome == "aborted"
    assert record.failed is not None
    assert len(list(folder(bench).glob("*"))) == 1
    assert record.elapsed_s > record.events[-1].at_s - 0.01


async def test_the_list_has_the_newest_first_and_after_a_restart(bench: Bench) -> None:
    await bench.start()
    for number in (1, 2, 3):
        await bench.save(f"save-{number}", f"step-{number}")
    await bench.crash()
    await bench.restart()
    answer = await unary(bench.stub().ListOperations(pb.ListOperationsRequest(page_size=2), timeout=5))
    assert [one.operation.operation_id for one in answer.operations] == ["save-3", "save-2"]
    assert answer.operations[0].snapshot.snapshot_id == "step-3"
    assert answer.operations[0].pause.ToMicroseconds() > 0


async def test_what_is_not_written_yet_is_told_from_memory(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    await written(bench, "save-1")
    (file,) = folder(bench).glob("*")
    file.write_bytes(file.read_bytes().split(b"\n")[0] + b"\n")
    answer = await unary(bench.stub().ListOperations(pb.ListOperationsRequest(), timeout=5))
    (one,) = answer.operations
    assert one.snapshot.snapshot_id == "step-1"
    assert one.pause.ToMicroseconds() > 0
    assert one.operation.outcome == pb.OPERATION_OUTCOME_SUCCEEDED


async def test_what_was_never_written_stands_where_its_time_is(bench: Bench) -> None:
    """A full disk kept it out, and had room again for those that came after."""
    await bench.start()
    for number in (1, 2, 3):
        await bench.save(f"save-{number}", f"step-{number}")
        await written(bench, f"save-{number}")
        await asyncio.sleep(0.002)  # times are told in milliseconds
    (unwritten,) = folder(bench).glob("*-save-2.jsonl")
    unwritten.unlink()
    answer = await unary(bench.stub().ListOperations(pb.ListOperationsRequest(), timeout=5))
    assert [one.operation.operation_id for one in answer.operations] == ["save-3", "save-2", "save-1"]


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_a_disk_that_refuses_the_history_costs_no_save(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: int, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(Directory, "append", refuse)
    await bench.start()
    events = await bench.save()
    assert kinds(events)[-1] == "saved"
    await bench.save("save-2", "step-2")
    assert sum("history of operations is not written" in r.message for r in caplog.records) == 1


async def test_a_disk_that_hangs_costs_no_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    let_go = threading.Event()
    monkeypatch.setattr(Directory, "append", lambda *_: let_go.wait(30))
    try:
        await bench.start()
        events = await bench.save()
        assert kinds(events)[-1] == "saved"
        assert (await bench.explain("save-1")).operation.outcome == pb.OPERATION_OUTCOME_SUCCEEDED
    finally:
        let_go.set()


async def test_a_listener_that_fails_is_left_out_and_the_save_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """History, metrics, traces, a page: none of them may end an operation, whatever is wrong with it."""

    class Broken:
        told = 0

        def offer(self, event: pb.OperationEvent) -> None:
            self.told += 1
            raise NameError("a bug")

    broken = Broken()
    await bench.start()
    bench.running.operations.feed.add(broken)
    assert kinds(await bench.save())[-1] == "saved"
    assert broken.told == 1
    assert "Broken has failed and is left out" in caplog.text


async def test_the_last_mebibyte_is_left_to_the_journal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_files, "LEAST_FREE_BYTES", 1 << 60)
    await bench.start()
    await bench.save()
    assert not list(folder(bench).glob("*"))


async def test_only_the_newest_files_stay(bench: Bench) -> None:
    bench.settings["history_keep"] = 2
    await bench.start()
    for number in (1, 2, 3, 4):
        await bench.save(f"save-{number}", f"step-{number}")
        await written(bench, f"save-{number}")
    await until(lambda: len(list(folder(bench).glob("*"))) == 2)
    assert [r.operation_id for r in History(bench.root).list()] == ["save-4", "save-3"]


def test_names_ascend_also_when_the_clock_does_not(tmp_path: Path) -> None:
    with Directory.open(tmp_path) as directory:
        for began_s, operation in ((5000.0, "op-1"), (1400.0, "op-2"), (1400.0, "op-3"), (6000.0, "op-4")):
            name = after_others(directory, file_name(began_s, operation))
            directory.append(name, b"{}\n")
        assert [operation for _, operation in names(directory)] == ["op-1", "op-2", "op-3", "op-4"]


async def test_after_the_clock_was_set_back_the_oldest_files_go_and_the_newest_stay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings["history_keep"] = 2
    await bench.start()
    for number, back_s in enumerate((0, 7200, 10_800), 1):
        assert bench.coordinator is not None
        monkeypatch.setattr(bench.coordinator.history, "_wall_clock", lambda back_s=back_s: time.time() - back_s)
        await bench.save(f"save-{number}", f"step-{number}")
        await written(bench, f"save-{number}")
    await until(lambda: len(list(folder(bench).glob("*"))) == 2)
    assert [r.operation_id for r in History(bench.root).list()] == ["save-3", "save-2"]
    assert [one.operation_id for one in (await bench.explain("save-2")).later] == ["save-3"]
    assert not (await bench.explain("save-3")).later


async def test_a_coordinator_whose_root_was_replaced_writes_no_history_into_the_new_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.server.FIT_EVERY_S", 60.0)
    await bench.start()
    await bench.save()
    await written(bench, "save-1")
    moved = bench.root.with_name("moved")
    bench.root.rename(moved)
    (bench.root / "coordinator").mkdir(parents=True)
    with pytest.raises(SafepointError):
        await bench.save("save-2", "step-2")
    await until(lambda: len(list((moved / "coordinator" / "history").iterdir())) == 2)
    assert not list((bench.root / "coordinator").iterdir())


async def test_without_history_nothing_is_written_and_why_still_answers(bench: Bench) -> None:
    bench.settings["history_keep"] = 0
    await bench.start(agent_0=Knobs(fail_on={"Commit": Problem(Reason.STORAGE_FULL, "The disk is full.")}))
    with pytest.raises(SafepointError):
        await bench.save()
    assert not folder(bench).exists()
    assert (await bench.explain()).operation.failure.primary.reason == int(Reason.STORAGE_FULL)


async def test_a_long_drain_of_many_stays_small_and_keeps_its_ends(tmp_path: Path) -> None:
    writer = HistoryWriter(OnDisk(lambda: Directory.open(tmp_path), 5), "job", lambda: 1000.0)
    drive: Any = _drive()
    writer.began(drive)
    for tenth in range(36_000):
        event = pb.OperationEvent(operation_id="op-1", sequence=tenth + 1)
        event.elapsed.FromMilliseconds(tenth * 100)
        event.participant_progress.participant_id = f"agent-{tenth % 4}"
        event.participant_progress.in_flight = 36_000 - tenth
        writer.offer(event)
    await writer.close()
    (file,) = (tmp_path / "history").iterdir()
    assert file.stat().st_size < 400_000
    record = parse(file.read_bytes().split(b"\n"))
    assert record is not None
    assert record.events[0].at_s < 1
    assert record.events[-1].at_s > 3500


def _drive() -> Any:
    from types import SimpleNamespace

    from coordinator.protocol.operation import Operation
    from coordinator.wire.ids import OperationId, SnapshotId
    from coordinator.wire.terms import OperationKind

    operation = Operation(OperationKind.SAVE, OperationId("op-1"), SnapshotId("s"))
    return SimpleNamespace(operation=operation, began_ms=0, transaction=None)


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"kind":"event"}', b'{"kind":"event","event":[]}', b"[" * 100_000,
        b'{"kind":"event","event":{"elapsed":"never"}}', b'{"kind":"ended","outcome":"won","elapsed_s":1}',
        b'{"kind":"event","event":{"elapsed":"0.1s","\\ud800x":{}}}', b'{"kind":"event","event":{"elapsed":"\\ud800"}}',
        b'{"kind":"ended","outcome":"aborted","elapsed_s":NaN}', b'{"kind":"participants","participants":[1]}',
        b'{"kind":"operation","operation_id":"../x","operation":"save","time":1}', b'{"kind":["event"]}',
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_passed_over_and_counted(line: bytes) -> None:
    record = parse([json.dumps(HEAD).encode(), line, b'{"kind":"later","x":1}'])
    assert record is not None
    assert record.operation_id == "op-1"
    assert record.damaged == (0 if line in (b'{"kind":["event"]}',) else 1) or line.startswith(b'{"kind":"operation"')
    assert not record.outcome


def test_a_file_that_names_no_operation_is_none(tmp_path: Path) -> None:
    assert parse([b'{"kind":"ended","outcome":"aborted","elapsed_s":1}']) is None
    there = tmp_path / "coordinator" / "history"
    there.mkdir(parents=True)
    (there / "0000000001000-op-1.jsonl").write_bytes(b"nothing\n")
    (there / "0000000002000-op-2.jsonl").symlink_to("/etc/passwd")
    (there / "0000000003000-op-3.jsonl").write_bytes(b"x" * (5 << 20))
    (there / "0000000000500-op-4.jsonl").write_bytes(json.dumps(HEAD | {"operation_id": "op-4"}).encode())
    assert [r.operation_id for r in History(tmp_path).list()] == ["op-4"]
    assert History(tmp_path).find("op-2") is None
    assert History(tmp_path / "elsewhere").list() == []
