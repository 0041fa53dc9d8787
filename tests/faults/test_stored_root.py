"""Real processes whose root is in a real S3 server: killed at every step of a save, recovered, restored."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.client import AsyncClient, Budgets
from coordinator.history import History
from coordinator.snapshots import SnapshotStore
from coordinator.wire.errors import SafepointError
from tests.faults.fleet import COORDINATOR, SERVERS, Fleet
from tests.faults.rollouts import Engine, Trainer
from tests.faults.watch import Watch
from tests.object_store import S3Server, a_server, environment, prefix

pytest.importorskip("s3fs")

WITHIN_S = 60.0
# Who dies where.
DEATHS = {
    "the intent is written": (COORDINATOR, "journal.after_append"),
    "a part is written": ("counter", "shim.before_manifest"),
    "the ledger is written": (COORDINATOR, "publication.after_ledger"),
    "right before the commit point": (COORDINATOR, "snapshots.before_publish"),
    "right after the commit point": (COORDINATOR, "snapshots.after_publish"),
}


@pytest.fixture
def server() -> Iterator[S3Server]:
    with a_server() as made:
        yield made


@pytest.fixture
def url(server: S3Server) -> Iterator[str]:
    with environment(AWS_ENDPOINT_URL=server.address):
        yield f"s3://bucket/{prefix()}"


class Lane:
    """A fleet with its trainer."""

    def __init__(self, fleet: Fleet, client: AsyncClient, watch: Watch, trainer: Trainer) -> None:
        self.fleet, self.client, self.watch, self.trainer = fleet, client, watch, trainer

    async def healthy(self) -> None:
        """Start what does not run; everybody is registered and open when this returns."""
        until, seen = time.monotonic() + WITHIN_S, "nobody"
        while time.monotonic() < until:
            self.fleet.start()
            try:
                topology = await self.client.topology(timeout=3)
                known = {p.capabilities.participant_id: p.incarnation_id for p in topology.participants}
                present = {name: self.fleet.shim(name).get("incarnation_id") for name in SERVERS}
                blocking = [f.message for f in topology.findings if f.blocking]
                if known == present and not blocking and not self.watch.closed and not self.watch.unseen:
                    return
                seen = f"registered {sorted(known)}, {blocking}, closed {sorted(self.watch.closed)}"
            except SafepointError as error:
                seen = str(error)
            await asyncio.sleep(0.1)
        logs = "".join(f"\n--- {name}\n{self.fleet.log(name)}" for name in (COORDINATOR, *SERVERS))
        raise TimeoutError(f"{seen}{logs}")


@pytest.fixture
async def lane(url: str) -> AsyncIterator[Lane]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stored-"))
        engine = await stack.enter_async_context(Engine())
        fleet = Fleet(Path(folder), engine.url, store=url)
        stack.callback(fleet.close)
        client = AsyncClient(f"file:{url}/coordinator/address.json", budgets=Budgets(20.0, 20.0, 20.0))
        stack.push_async_callback(client.close)
        fleet.start()
        watch = await stack.enter_async_context(Watch({name: fleet.url(name) for name in SERVERS}))
        trainer = await stack.enter_async_context(Trainer(fleet.url("agent"), "stored"))
        made = Lane(fleet, client, watch, trainer)
        await made.healthy()
        yield made


@pytest.mark.timeout(600)
async def test_killed_anywhere_in_a_save_it_recovers_and_the_last_snapshot_restores(lane: Lane, url: str) -> None:
    fleet, client, trainer = lane.fleet, lane.client, lane.trainer
    trainer.go()
    await trainer.under_way()
    assert (await client.save("first", timeout=30)).snapshot_id == "first"
    store = SnapshotStore(url, "default")
    ended: dict[str, bool] = {}
    for number, (where, (whom, place)) in enumerate(DEATHS.items()):
        name = f"step-{number}"
        fleet.forget_hits()
        fleet.arm(whom, f"{place}=1*kill")
        saving = asyncio.create_task(client.save(name, timeout=30))
        async with asyncio.timeout(WITHIN_S):
            while not fleet.hits(whom):
                await asyncio.sleep(0.05)
        fleet.disarm()
        await lane.healthy()
        answer = (await asyncio.gather(saving, return_exceptions=True))[0]
        there = {found.snapshot_id for found in store.list().snapshots}
        published = not isinstance(answer, SafepointError)  # a save that nobody remembers is repeated by the client
        ended[where] = published
        assert (name in there) is published, f"{where}: {answer}"
        assert "first" in there
        # The same name again, which nothing of what was given up is in the way of.
        if not published:
            async with asyncio.timeout(WITHIN_S):
                while True:
                    try:
                        assert (await client.save(name, timeout=30)).snapshot_id == name
                        break
                    except SafepointError:
                        await lane.healthy()
                        await asyncio.sleep(0.2)
        assert store.verify(name).unlisted == ()
    assert ended["right after the commit point"]
    assert not ended["right before the commit point"]
    last = store.list().snapshots[0].snapshot_id
    # Whoever went on after a death has told how it ended.
    told = [(record.snapshot_id, record.outcome) for record in History(url).list()]
    assert sorted(name for name, outcome in told if outcome == "succeeded") == sorted(there | {last})
    assert all(outcome for _, outcome in told)

    left = await trainer.stop()
    fleet.kill(COORDINATOR, *SERVERS)
    await lane.healthy()
    restored = await client.restore(last, timeout=60)
    await client.resume(restored.operation_id, timeout=20)
    for each in left:
        trainer.dispatch(each)
    assert not await trainer.finish(left, WITHIN_S)
    assert not [each.wrong for each in left if each.wrong]


async def test_a_store_that_stops_during_a_save_is_what_status_names_and_an_abort_opens_everybody(
    lane: Lane, url: str, server: S3Server
) -> None:
    lane.trainer.go()
    await lane.trainer.under_way()
    assert (await lane.client.save("first", timeout=30)).snapshot_id == "first"
    server.process.send_signal(signal.SIGSTOP)
    saving = asyncio.create_task(lane.client.save("second", timeout=15))
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                status = await lane.client.status(timeout=5)
                said = [status.operation.waiting_for, *(health.status.waiting_for for health in status.participants)]
                if any("The object store has not answered for" in each and url in each for each in said):
                    break
                assert not saving.done(), (said, await asyncio.gather(saving, return_exceptions=True))
                await asyncio.sleep(0.1)
        await lane.client.abort(timeout=10)
        async with asyncio.timeout(5):
            while lane.watch.closed:  # opening needs no storage
                await asyncio.sleep(0.05)
    finally:
        server.process.send_signal(signal.SIGCONT)
    await asyncio.gather(saving, return_exceptions=True)
    await lane.healthy()
    assert (await lane.client.save("third", timeout=30)).snapshot_id == "third"
