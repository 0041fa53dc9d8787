"""Trainer-driven saves: whatever the body does, everybody is told to open again."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.client import Reason, Refused, Unanswered
from coordinator.wire.errors import Problem
from tests.client.driver import Driver
from tests.client.fake_coordinator import LOST, FakeCoordinator, Fault


async def test_a_cut_pauses_publishes_with_the_trainers_metadata_and_resumes(
    driver: Driver, fake: FakeCoordinator
) -> None:
    def body(cut) -> None:
        assert fake.names() == ["Prepare"], "everybody is paused in the body, nothing is exported yet"
        assert cut.prepared.parked == 62
        assert cut.result is None
        cut.metadata["weights"] = "/ckpt/40"

    cut = await driver.cut(body, snapshot_id="step-40")
    assert fake.names() == ["Prepare", "Commit", "Publish", "Resume"]
    assert fake.done == ["publish step-40", "resume"]
    assert cut.result.snapshot.metadata == {"weights": "/ckpt/40"}
    assert cut.result.pause_s == pytest.approx(0.52)


async def test_an_exception_in_the_body_aborts_and_goes_on(driver: Driver, fake: FakeCoordinator) -> None:
    with pytest.raises(OSError, match="disk full") as caught:
        await driver.cut(error=OSError("disk full"), snapshot_id="step-40")
    assert fake.names() == ["Prepare", "Abort"]
    assert fake.done == ["abort"]
    assert "OSError: disk full" in fake.requests("Abort")[0].cause
    assert not getattr(caught.value, "__notes__", [])


async def test_commit_may_run_early_and_runs_once(driver: Driver, fake: FakeCoordinator) -> None:
    if driver.sync:
        await driver.cut(lambda cut: cut.commit(), snapshot_id="s")
    else:
        async with driver.client.cut("s") as cut:
            await cut.commit()
    assert fake.names() == ["Prepare", "Commit", "Publish", "Resume"]


async def test_a_refused_prepare_never_runs_the_body(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Prepare", Problem(Reason.TOPOLOGY_INVALID, "no agent"))
    with pytest.raises(Refused):
        await driver.cut(lambda cut: pytest.fail("ran"), snapshot_id="s")
    assert fake.done == []


@pytest.mark.hasty
async def test_a_prepare_whose_reply_never_came_is_aborted(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Prepare", *[Fault(after=2)] * 100)
    with pytest.raises(Unanswered):
        await driver.cut(lambda cut: pytest.fail("ran"), snapshot_id="s")
    assert fake.done == ["abort"]


async def test_a_void_cut_is_aborted(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Publish", Problem(Reason.LEASE_LAPSED, "counter opened by itself"))
    with pytest.raises(Refused) as caught:
        await driver.cut(snapshot_id="s")
    assert caught.value.reason is Reason.LEASE_LAPSED
    assert fake.done == ["abort"]
    assert fake.published == []


async def test_a_lost_publish_reply_is_repeated(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Publish", Fault(after=1), LOST)
    cut = await driver.cut(snapshot_id="s")
    assert fake.done == ["publish s", "resume"]
    assert cut.result.snapshot_id == "s"


@pytest.mark.hasty
async def test_a_publish_of_unknown_effect_is_resumed_when_it_was_done(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Publish", *[Fault(after=1)] * 100)
    with pytest.raises(Unanswered) as caught:
        await driver.cut(snapshot_id="s")
    assert fake.done == ["publish s", "resume"], "never aborted after the commit point"
    assert "told to resume" in " ".join(caught.value.__notes__)


@pytest.mark.hasty
async def test_a_publish_of_unknown_effect_is_aborted_when_it_was_not_done(
    driver: Driver, fake: FakeCoordinator
) -> None:
    fake.fail("Publish", *[LOST] * 100)
    with pytest.raises(Unanswered):
        await driver.cut(snapshot_id="s")
    assert fake.done == ["abort"]


async def test_a_failed_resume_says_that_the_snapshot_is_published(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Resume", Problem(Reason.UNREACHABLE, "counter is gone"))
    with pytest.raises(Refused) as caught:
        await driver.cut(snapshot_id="s")
    assert "Snapshot s is published and durable" in " ".join(caught.value.__notes__)


async def test_a_long_body_keeps_the_cut_alive_by_repeating_its_last_call(
    driver: Driver, fake: FakeCoordinator
) -> None:
    async def until(name: str, times: int) -> None:
        async with asyncio.timeout(10):
            while fake.names().count(name) < times:
                await asyncio.sleep(0.02)

    loop = asyncio.get_running_loop()
    if driver.sync:

        def body(cut) -> None:
            asyncio.run_coroutine_threadsafe(until("Prepare", 3), loop).result()
            cut.commit()
            asyncio.run_coroutine_threadsafe(until("Commit", 3), loop).result()

        await driver.cut(body, snapshot_id="s", lease=1)
    else:
        async with driver.client.cut("s", lease=1) as cut:
            await until("Prepare", 3)
            await cut.commit()
            await until("Commit", 3)
    assert len({r.SerializeToString(deterministic=True) for r in fake.requests("Prepare")}) == 1
    assert fake.done == ["publish s", "resume"]
    before = len(fake.asked)
    await asyncio.sleep(0.5)  # longer than the interval: nothing is renewed any more
    assert len(fake.asked) == before
