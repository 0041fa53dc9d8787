"""The history of a root in a store: written beside the operation, never in its pause, and read back when nobody runs any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.history import History, file_name
from coordinator.history_files import File, InStore
from coordinator.history_record import Record, parse
from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.folder import names_below, open_root, place
from coordinator.wire.stored_folder import Where
from tests.cli.conftest import Safepoint
from tests.coordinator.conftest import Bench, kinds, unary, until
from tests.fakes import Knobs
from tests.object_store import S3Server, a_server, environment, prefix
from tests.stored import Lost, MemoryRequests, MemoryStore, quiet

FULL = {"Commit": Problem(Reason.STORAGE_FULL, "The disk is full.")}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with a_server() as made:
        yield made


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        yield MemoryStore().root()
    else:
        with environment(AWS_ENDPOINT_URL=request.getfixturevalue("server").address):
            yield f"s3://bucket/{prefix()}"


@pytest.fixture
def client() -> MemoryRequests:
    return MemoryStore().client()


@pytest.fixture
async def stored(tmp_path: Path, client: MemoryRequests) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, client.store.root(client))
    yield made
    await made.stop()


async def written(url: str, operation_id: str) -> Record:
    """The operation as the history has it, once its last line is there."""
    history = History(url)
    async with asyncio.timeout(20):
        while True:
            record = await asyncio.to_thread(history.find, operation_id)
            if record is not None and record.outcome:
                return record
            await asyncio.sleep(0.02)


def objects(url: str) -> list[str]:
    found = names_below(Where(url)).all("coordinator/history!1/")
    return [one.key.rpartition("/")[2] for one in found]


async def test_what_ended_is_told_by_the_next_coordinator_and_by_commands_when_none_runs(
    url: str, tmp_path: Path
) -> None:
    bench = Bench(tmp_path, url)
    knobs = Knobs(rollouts=3)
    try:
        await bench.start(agent_0=knobs)
        await bench.save()
        knobs.fail_on.update(FULL)
        with pytest.raises(SafepointError, match="disk is full"):
            await bench.save("save-2", "step-2")
        record = await written(url, "save-1")
        assert (record.outcome, record.epoch, record.coverage, record.damaged) == ("succeeded", 1, 1.0, 0)
        assert {p["participant_id"] for p in record.participants} == {"agent-0", "model-0", "resources-0"}
        assert record.pause_s is not None
        await written(url, "save-2")
        before = await bench.explain()
        await bench.crash()
        await bench.restart()
        after = await bench.explain()
        assert after.operation.failure == before.operation.failure
        assert after.operation.begin_time == before.operation.begin_time
        assert "phase_started" in kinds(list(after.events))
        listed = await unary(bench.stub().ListOperations(pb.ListOperationsRequest(), timeout=5))
        assert [one.operation.operation_id for one in listed.operations] == ["save-2", "save-1"]
        assert listed.operations[1].snapshot.snapshot_id == "step-1"
    finally:
        await bench.stop()

    alone = Safepoint("")
    ran = await alone("why", "--root", url)
    assert ran.code == 0, ran.err
    assert "save step-2 (save-2): aborted" in ran.out
    assert "reason: STORAGE_FULL" in ran.out
    assert f"no coordinator answers; read from {url}/coordinator/history" in ran.err
    by_address = await alone("why", "step-1", "-c", f"file:{url}/coordinator/address.json", "--json")
    assert by_address.json()["operation"]["operation_id"] == "save-1"
    rows = (await alone("history", "--json", env={"SAFEPOINT_ROOT": f"{url}/"})).json()["operations"]
    assert [one["operation"]["operation_id"] for one in rows] == ["save-2", "save-1"]
    report = await alone("report", "step-1", "--root", url, "-o", "-")
    assert "participant_called" in report.out or "agent-0" in report.out
    assert not report.err


async def test_a_root_without_a_history_is_not_taken_for_one(url: str) -> None:
    ran = await Safepoint("")("why", "--root", url, "--wait", "0.1")
    assert ran.code == 5
    assert "read from" not in ran.err
    assert History(url).list() == []
    assert not History(url).later("save-1", 0)


async def test_a_save_writes_its_history_once_and_as_soon_as_everybody_is_open_again(
    stored: Bench, client: MemoryRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InStore, "gap_s", 3600.0)
    asked: list[tuple[str, bool]] = []

    def look(method: str, key: str) -> None:
        if "/history!" in key:
            asked.append((f"{method} {key.rpartition('/')[2]}", stored.all_open()))

    client.before = look
    await stored.start()
    await stored.save()
    (name,) = [file async for file in _written(stored, 1)]
    assert [what for what, _ in asked if what.startswith("PUT")] == ["PUT history!1!made", f"PUT {name}"]
    assert all(is_open for _, is_open in asked), "a pause that waits for the history"


async def _written(bench: Bench, count: int) -> AsyncIterator[str]:
    await until(lambda: len(objects(bench.where)) >= count)
    for name in objects(bench.where):
        yield name


async def test_a_store_that_refuses_the_history_costs_no_save_and_has_it_when_it_answers(
    stored: Bench, client: MemoryRequests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(InStore, "gap_s", 0.05)
    refused = 0

    def away(_method: str, key: str) -> None:
        nonlocal refused
        if "/history!" in key:
            refused += 1
            raise Lost("no route")

    client.before = away
    await stored.start()
    assert kinds(await stored.save())[-1] == "saved"
    assert kinds(await stored.save("save-2", "step-2"))[-1] == "saved"
    await until(lambda: refused > 10)
    assert (await stored.explain("save-1")).operation.outcome == pb.OPERATION_OUTCOME_SUCCEEDED, "from memory"
    client.before = quiet
    await written(stored.where, "save-2")
    assert [record.operation_id for record in History(stored.where).list()] == ["save-2", "save-1"]
    assert sum("history of operations is not written" in r.message for r in caplog.records) == 1


async def test_an_object_whose_answer_was_lost_is_there_once(
    stored: Bench, client: MemoryRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InStore, "gap_s", 0.05)
    lost = 0

    def unheard(method: str, key: str) -> None:
        nonlocal lost
        if method in ("PUT", "GET") and "/history!1/" in key and lost < 3:  # until what writes it gives up, for now
            lost += 1
            raise Lost("no answer")

    client.before, client.after = quiet, unheard
    await stored.start()
    await stored.save()
    await until(lambda: lost == 3)
    await stored.save("save-2", "step-2")
    await written(stored.where, "save-2")
    for name in ("save-1", "save-2"):
        record = await written(stored.where, name)
        numbers = [told.event.sequence for told in record.events]
        assert numbers == sorted(set(numbers)), "something is there twice"
        assert (record.takeovers, record.damaged) == (0, 0)


async def test_what_a_crash_cut_off_is_gone_on_with_in_another_object(
    stored: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long is written before its end: who was waited for is what one wants to know after a crash."""
    monkeypatch.setattr(InStore, "gap_s", 0.02)
    await stored.start(resources_0=Knobs(inflight=1, drain_after_s=60))
    saving = asyncio.create_task(stored.save(quiesce_mode=2))
    seen = History(stored.where)

    def closed() -> bool:
        record = seen.find("save-1")
        return record is not None and bool(record.last("participant_called"))

    await until(closed)
    assert seen.list()[0].outcome == ""
    await stored.crash()
    with pytest.raises(SafepointError):
        await saving
    await stored.restart()
    record = await written(stored.where, "save-1")
    assert (record.takeovers, record.outcome) == (1, "aborted")
    assert record.failed is not None
    assert record.last("participant_called"), "of the coordinator that died"
    assert len(objects(stored.where)) > 1
    assert [one.operation_id for one in seen.list()] == ["save-1"]


async def test_the_page_shows_after_a_restart_what_was_before(stored: Bench) -> None:
    stored.settings["page_bind"] = "127.0.0.1:0"
    await stored.start()
    await stored.save()
    await written(stored.where, "save-1")
    await stored.crash()
    await stored.restart()
    assert stored.running.page is not None
    page = stored.running.page.page
    overview = await asyncio.to_thread(page.overview)
    assert [(one["operation_id"], one["outcome"]) for one in overview["operations"]] == [("save-1", "succeeded")]
    assert (await asyncio.to_thread(page.operation, "save-1"))["lanes"]


async def test_only_the_newest_operations_stay_with_all_of_their_objects(
    stored: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InStore, "gap_s", 0.0)
    stored.settings["history_keep"] = 2
    await stored.start()
    for number in (1, 2, 3, 4):
        await stored.save(f"save-{number}", f"step-{number}")
        await written(stored.where, f"save-{number}")
    await until(lambda: {name[14:-6] for name in objects(stored.where)} == {"save-3", "save-4"})
    assert [record.operation_id for record in History(stored.where).list()] == ["save-4", "save-3"]


def told(epoch: int, *more: dict[str, Any], time: float = 1000.0) -> bytes:
    head = {
        "kind": "operation", "operation_id": "op-1", "operation": "save", "snapshot_id": "s", "epoch": epoch, "time": time,
    }  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in (head, *more))


ABORTED = {"kind": "ended", "time": 1030.0, "outcome": "aborted", "elapsed_s": 30.0}
SUCCEEDED = {"kind": "ended", "time": 1021.0, "outcome": "succeeded", "elapsed_s": 1.0}
EVENT = {"kind": "event", "event": {"elapsed": "2s", "warning": {"message": "late"}}}


def test_a_coordinator_that_slept_does_not_say_how_an_operation_ended_that_another_has_ended() -> None:
    record = parse((told(1) + told(2, SUCCEEDED, time=1020.0) + told(1, EVENT, ABORTED)).split(b"\n"))
    assert record is not None
    assert (record.outcome, record.elapsed_s, record.takeovers) == ("succeeded", 21.0, 1)
    assert not record.events


def test_each_object_says_whose_it_is_and_a_second_one_of_the_same_coordinator_goes_on() -> None:
    record = parse((told(3, EVENT) + told(3, EVENT, ABORTED)).split(b"\n"))
    assert record is not None
    assert (record.outcome, record.takeovers, len(record.events)) == ("aborted", 0, 2)


def test_what_waits_for_a_store_stays_small(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryStore()
    client = memory.client()
    url = memory.root(client)
    files = InStore(lambda: open_root(place(url)).child("coordinator"), 5)

    def away(_method: str, _key: str) -> None:
        raise Lost("no route")

    client.before = away
    caplog.set_level(logging.CRITICAL)
    head = told(1)
    for number in range(12):
        file = File(file_name(1000.0 + number, f"op-{number}"), taken_over=False, head=head)
        assert files.write([(file, head), (file, b"x" * (1 << 20))], prune=True)
    client.before = quiet
    assert not files.write([], prune=False)
    assert [name[14:-6] for name in objects(url)] == ["op-9", "op-10", "op-11"]


def test_names_ascend_also_when_the_clock_does_not() -> None:
    memory = MemoryStore()
    url = memory.root()
    files = InStore(lambda: open_root(place(url)).child("coordinator"), 5)
    for began_s, operation in ((5000.0, "op-1"), (1400.0, "op-2"), (1400.0, "op-3"), (6000.0, "op-4")):
        head = told(1).replace(b"op-1", operation.encode())
        files.write([(File(file_name(began_s, operation), taken_over=False, head=head), head)], prune=False)
    assert [record.operation_id for record in History(url).list()] == ["op-4", "op-3", "op-2", "op-1"]
    assert [record.operation_id for record in History(url).later("op-2", 0)] == ["op-4", "op-3"]


def test_a_long_list_is_read_as_far_as_it_is_asked_for() -> None:
    memory = MemoryStore()
    url = memory.root()
    files = InStore(lambda: open_root(place(url)).child("coordinator"), 1000)
    for number in range(100):
        head = told(1).replace(b"op-1", b"op-%d" % number)
        files.write(
            [(File(file_name(1000.0 + number, f"op-{number}"), taken_over=False, head=head), head)], prune=False
        )
    client = memory.client()
    memory.root(client)
    assert [record.operation_id for record in History(url).list(3)] == ["op-99", "op-98", "op-97"]
    assert client.count < 20
    assert len(History(url).list(1000)) == 100


async def test_what_the_journal_knows_to_have_succeeded_is_not_read_to_find_what_failed(
    stored: Bench, client: MemoryRequests
) -> None:
    """Of 200 operations each was a request, and together longer than whoever asked had time."""
    await stored.start()
    for number in range(12):
        await stored.save(f"save-{number}", f"step-{number}")
    await written(client.store.url, "save-11")
    await stored.crash()
    await stored.restart()
    await until(stored.all_open)
    read: list[tuple[str, str]] = []
    client.before = lambda method, key: read.append((method, key)) if "history!" in key else None
    assert not (await stored.explain()).HasField("operation")
    assert len(read) < 3, read
