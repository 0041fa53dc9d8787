"""Who takes part is known durably, in few writes, before any operation begins."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from coordinator.journal import Journal
from coordinator.journal_file import MEMBERS, Entry, line
from coordinator.membership import Membership
from coordinator.protocol.topology import Participant, ShimProcess
from coordinator.registry import Registry
from coordinator.server import serve
from coordinator.settings import Settings
from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import IncarnationId, OperationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, Role
from tests.fakes import FakeShim


def participant(name: str, role: Role = Role.AGENT) -> Participant:
    process = ShimProcess("host-a", 4711, "/logs/shim.log", watched=True)
    return Participant(
        ParticipantId(name), role, "fake", CheckpointMode.EXPORT_RESTORE, IncarnationId("i-1"), "127.0.0.1:1",
        depends_on=("a", "b"), process=process,
    )  # fmt: skip


def journal(path: Path) -> Journal:
    path.mkdir(exist_ok=True)
    return Journal(Directory.open(path))


class Bench:
    """A membership whose journal writes when it is told to."""

    def __init__(self, path: Path) -> None:
        self.journal = journal(path)
        self.registry = Registry(lambda: 100.0, 3.0)
        self.go = asyncio.Event()
        self.writes = 0
        self.membership = Membership(self.journal, self.registry, self.append, lambda: 0.0)

    async def append(self, entry: Entry) -> None:
        await self.go.wait()
        self.writes += 1
        self.journal.append(entry)

    def missing(self) -> list[Participant]:
        return [m.participant for m in self.registry.missing()]


async def test_thousands_that_come_at_once_cost_a_few_writes_and_an_operation_waits_for_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j")
    for n in range(3000):
        bench.registry.register(participant(f"agent-{n:04}"))
        if n == 10:
            await asyncio.sleep(0)  # the first write has begun
    settled = asyncio.create_task(bench.membership.settled())
    await asyncio.sleep(0)
    assert not settled.done()
    bench.go.set()
    await settled
    assert bench.writes <= 2
    bench.journal.close()
    again = Bench(tmp_path / "j")
    assert len(again.missing()) == 3000
    assert again.missing()[0] == participant("agent-0000")
    again.journal.close()


async def test_who_is_gone_for_good_is_forgotten_and_an_auxiliary_model_is_never_known(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j")
    bench.go.set()
    agent, judge = participant("agent"), participant("judge", Role.AUXILIARY_MODEL)
    for who in (agent, judge):
        bench.registry.leave(bench.registry.register(who), "it ended")
    await bench.membership.settled()
    assert list(bench.journal.contents.members) == ["agent"]
    bench.registry.dismiss(["agent", "nobody"])
    await bench.membership.settled()
    bench.journal.close()
    again = Bench(tmp_path / "j")
    assert again.missing() == []
    again.journal.close()


async def test_that_somebody_is_gone_for_good_outlives_coordinators_and_rotations(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j")
    bench.go.set()
    bench.registry.leave(bench.registry.register(participant("agent")), "it ended")
    bench.registry.dismiss(["agent"])
    await bench.membership.settled()
    bench.journal._rotate()
    bench.journal.close()
    for _ in range(2):
        bench = Bench(tmp_path / "j")
        bench.membership.assume([participant("agent")])  # it was in the newest snapshot
        assert bench.missing() == []
        bench.registry.check_known(["agent"])  # a trainer may say so at every save
        bench.journal.close()
    bench = Bench(tmp_path / "j")
    bench.go.set()
    bench.registry.register(participant("agent"))  # it is back after all
    await bench.membership.settled()
    bench.journal.close()
    again = Bench(tmp_path / "j")
    assert [who.participant_id for who in again.missing()] == ["agent"]
    again.journal.close()


async def test_last_heard_is_when_the_coordinator_before_was_last_there_and_not_the_registration(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path / "j")
    bench.go.set()
    bench.registry.register(participant("agent"))
    bench.registry.leave(bench.registry.register(participant("left")), "it ended")
    await bench.membership.settled()
    bench.journal.note_alive()
    os.utime(tmp_path / "j" / f"epoch-{bench.journal.epoch}", (3600, 3600))
    bench.journal.close()
    again = Bench(tmp_path / "j")
    why = {m.participant.participant_id: m.why for m in again.registry.missing()}
    assert "last heard 1970-01-01 01:00:00 UTC" in why["agent"]
    assert "last heard 1970-01-01 01:00" not in why["left"]
    # That one has not heard of it, however long it lives: its life says nothing.
    again.journal.note_alive()
    os.utime(tmp_path / "j" / f"epoch-{again.journal.epoch}", (7200, 7200))
    again.journal.close()
    third = Bench(tmp_path / "j")
    assert third.registry.missing()[0].why == again.registry.missing()[0].why
    third.journal.close()


async def test_who_comes_back_as_an_auxiliary_model_is_missed_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j")
    bench.go.set()
    bench.registry.leave(bench.registry.register(participant("judge", Role.POLICY_MODEL)), "it ended")
    await bench.membership.settled()
    bench.journal.close()
    bench = Bench(tmp_path / "j")  # its role has been mended
    bench.go.set()
    bench.registry.leave(bench.registry.register(participant("judge", Role.AUXILIARY_MODEL)), "it ended")
    await bench.membership.settled()
    bench.journal.close()
    again = Bench(tmp_path / "j")
    assert again.missing() == []
    again.journal.close()


async def test_members_outlive_every_rotation_of_the_journal(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j")
    bench.go.set()
    bench.registry.register(participant("agent"))
    await bench.membership.settled()
    bench.journal._rotate()
    bench.journal.close()
    for _ in range(3):
        again = journal(tmp_path / "j")
        assert list(again.contents.members) == ["agent"]
        assert not again.contents.open, "members are of no operation"
        again.close()


async def test_a_journal_that_fails_keeps_nobody_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "j")

    async def fail(entry: Entry) -> None:
        raise refuse(Reason.STORAGE_FAILED, "no disk")

    bench.membership = Membership(bench.journal, bench.registry, fail)
    bench.registry.register(participant("agent"))
    await asyncio.wait_for(bench.membership.settled(), 5)
    assert bench.registry.get("agent") is not None
    bench.journal.close()


async def test_a_member_that_cannot_be_read_prevents_no_start(tmp_path: Path) -> None:
    made = journal(tmp_path / "j")
    made.append(Entry(OperationId(""), MEMBERS, {"members": {"odd": {"participant": {"role": "NEW"}}}}))
    made.close()
    bench = Bench(tmp_path / "j")
    assert bench.missing() == []
    bench.journal.close()


@pytest.mark.parametrize("data", [{}, {"members": None}, {"members": ["agent"]}, {"members": {"agent": "here"}}])
def test_an_entry_that_names_no_members_is_damage_and_not_a_crash(tmp_path: Path, data: dict[str, object]) -> None:
    made = journal(tmp_path / "j")
    made.append(Entry(OperationId("op"), "request", {}))
    made.close()
    (path,) = (tmp_path / "j").glob("journal-*.log")
    bad = line(Entry(OperationId(""), MEMBERS, data))
    head, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(head + b"\n" + bad + rest)
    with pytest.raises(SafepointError) as caught:
        journal(tmp_path / "j")
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT


async def test_a_coordinator_that_acts_says_so_to_the_one_after_it(tmp_path: Path) -> None:
    running = await serve(Settings(root=str(tmp_path / "root")))
    try:
        mark = tmp_path / "root" / "coordinator" / f"epoch-{running.epoch}"
        os.utime(mark, (3600, 3600))
        assert await running._why_unfit() is None
        assert mark.stat().st_mtime > 3600
    finally:
        await running.kill()


async def test_a_coordinator_that_stops_notes_nobody_as_lost_and_complains_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    running = await serve(Settings(root=str(root)))
    shim = await FakeShim("agent", Role.AGENT, root).start()
    try:
        await shim.register(running.address)
        await running.operations.membership.settled()
        caplog.clear()
        await running.stop()
        await asyncio.sleep(0)
        assert [r.getMessage() for r in caplog.records if r.name.startswith("coordinator")] == []
        lines = "".join(path.read_text() for path in (root / "coordinator").glob("journal-*.log"))
        assert '"agent"' in lines
        assert '"lost"' not in lines
    finally:
        await shim.stop()


async def test_who_left_right_before_a_coordinator_stops_is_noted_before_its_journal_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    running = await serve(Settings(root=str(root)))
    shims = [await FakeShim(name, Role.AGENT, root).start() for name in ("one", "two")]
    membership, journal, slow = running.operations.membership, running.operations.journal, threading.Event()
    append = journal.append
    try:
        for shim in shims:
            await shim.register(running.address)
        await membership.settled()
        journal.append = lambda *entry: (slow.wait(10), append(*entry))[1]  # type: ignore[method-assign]
        await shims[0].leave()
        while membership._writing is None:
            await asyncio.sleep(0.01)
        await shims[1].leave()
        while not membership._changed:
            await asyncio.sleep(0.01)
        caplog.clear()
        asyncio.get_running_loop().call_later(0.5, slow.set)
        await running.kill()
        assert [r.getMessage() for r in caplog.records if r.name.startswith("coordinator")] == []
        lines = "".join(path.read_text() for path in (root / "coordinator").glob("journal-*.log"))
        assert lines.count('"lost"') == 2
    finally:
        slow.set()
        await running.kill()
        for shim in shims:
            await shim.stop()
