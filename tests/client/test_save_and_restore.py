"""Saving and restoring through both clients: results, progress, and the newest snapshot that verifies."""

from __future__ import annotations

from typing import Any

import pytest
from safepoint.v1 import manifest_pb2

from coordinator.client import Reason, Refused, RolloutState, Totals, describe
from coordinator.wire.errors import Blocked, Problem
from tests.client.driver import Driver
from tests.client.fake_coordinator import FakeCoordinator, entries


async def test_a_save_says_in_one_line_what_it_cost(driver: Driver, fake: FakeCoordinator) -> None:
    result = await driver.do("save", "step-40", metadata={"step": "40"})
    assert result.line == "snapshot step-40: paused 0.31 s, 62 in flight kept, 0 to restart, 41 MB"
    assert str(result) == result.line
    assert result.totals == Totals(completed=3, parked=60, pending=2)
    assert result.snapshot.metadata == {"step": "40"}
    assert fake.done == ["save step-40"]


OUT_OF_RANGE = [-1.0, 0.0, 0.001, 1e12, float("inf"), float("nan")]
CALLS: dict[str, tuple[Any, ...]] = {
    "save": ("s",), "restore": ("s",), "restore the newest": ("latest",), "resume": (), "abort": (), "status": (),
    "topology": (), "snapshots": (), "verify": ("s",), "prune": (1,), "pin": ("s", "r"), "unpin": ("s",), "explain": (),
    "operations": (), "watch": (), "ledger": ("s",), "cut": ("s",), "commit": ("o",), "publish": ("o",), "retire": (["r-1"],),
}  # fmt: skip


@pytest.mark.parametrize("timeout", OUT_OF_RANGE)
@pytest.mark.parametrize("call", CALLS)
async def test_a_time_that_no_call_can_be_given_is_refused_before_anybody_is_called(
    driver: Driver, fake: FakeCoordinator, call: str, timeout: float
) -> None:
    """1e12 ran over and looked like a silent coordinator; -1 and 0 ended a save after policy models had closed."""

    async def made() -> None:
        method = call.partition(" ")[0]
        if method in ("watch", "ledger"):
            await driver.take(getattr(driver.client, method)(*CALLS[call], timeout=timeout))
        elif method == "cut":
            await driver.cut(snapshot_id="s", timeout=timeout)
        else:
            await driver.do(method, *CALLS[call], timeout=timeout)

    with pytest.raises(Refused, match=r"timeout must be 0\.1 to 31536000 seconds") as caught:
        await made()
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert fake.asked == []


async def test_the_options_of_a_save_travel(driver: Driver, fake: FakeCoordinator) -> None:
    await driver.do(
        "save", "s", quiesce_mode="drain", straggler_policy="fail", straggler_grace=1.5, lease=20, expected_fingerprint="f"
    )  # fmt: skip
    options = fake.requests("Save")[0].options
    assert (options.quiesce_mode, options.straggler_policy) == (2, 2)
    assert options.straggler_grace.ToMilliseconds() == 1500
    assert options.lease_ttl.ToSeconds() == 20
    assert options.expected_fingerprint == "f"


async def test_a_save_without_a_name_gets_a_new_one_each_time(driver: Driver) -> None:
    first, second = await driver.do("save"), await driver.do("save")
    assert first.snapshot_id.startswith("auto-")
    assert first.snapshot_id != second.snapshot_id


async def test_progress_is_told_once_and_in_order_and_can_be_read(driver: Driver, fake: FakeCoordinator) -> None:
    seen = []
    await driver.do("save", "s", on_progress=seen.append)
    assert [event.sequence for event in seen] == list(range(1, 10))
    text = "\n".join(describe(event) for event in seen)
    assert "prepare agent: 62 parked" in text
    assert "commit agent: 20 MB of 41 MB, 62 parked" in text
    assert "saved s" in text


async def test_a_callback_that_fails_does_not_void_the_save(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_event: object) -> None:
        raise RuntimeError("no terminal")

    result = await driver.do("save", "s", on_progress=broken)
    assert result.snapshot_id == "s"
    assert "no terminal" in caplog.text


async def test_a_refusal_carries_reason_participant_rollouts_and_the_next_step(
    driver: Driver, fake: FakeCoordinator
) -> None:
    blocked = tuple(Blocked(f"r-{n}", 0, 4, 83.0, "judge") for n in range(25))
    fake.fail("Save", Problem(Reason.DRAIN_INCOMPLETE, "still draining", participant_id="counter", rollouts=blocked))
    with pytest.raises(Refused) as caught:
        await driver.do("save", "s")
    assert caught.value.reason is Reason.DRAIN_INCOMPLETE
    assert caught.value.participant_id == "counter"
    assert caught.value.problem.rollout_count == 25
    assert "r-0 (turn 4, 83 s, waiting on judge)" in str(caught.value)
    assert "Next: " in str(caught.value)
    assert fake.names() == ["Save"], "a refusal is final: it is not repeated"


async def test_what_cannot_be_a_name_is_refused_before_anything_leaves(driver: Driver, fake: FakeCoordinator) -> None:
    for bad in ("../x", "latest", "a" * 129, "-x", "a/b"):
        with pytest.raises(Refused) as caught:
            await driver.do("save", bad)
        assert caught.value.reason is Reason.MALFORMED_ID
    with pytest.raises(Refused, match=r"quiesce_mode 'freeze' does not exist\. Choose one of: hold, drain, abort"):
        await driver.do("save", "s", quiesce_mode="freeze")
    with pytest.raises(Refused) as caught:
        await driver.do("save", "s", metadata={"k": "v" * 1100})
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    with pytest.raises(Refused):
        await driver.do("save", "s", lease=float("nan"))
    assert fake.asked == []


async def test_restore_leaves_everybody_paused_until_resume(driver: Driver, fake: FakeCoordinator) -> None:
    fake.published = ["step-40"]
    result = await driver.do("restore", "step-40")
    assert result.paused
    assert result.line == (
        "restored step-40: 61 in flight continue, 3 answered from record, 1 restart, 64 sessions, still paused"
    )
    assert result.diverged[0].reason == "the agent uses time"
    assert fake.done == []
    resumed = await driver.do("resume")
    assert resumed.pause_s == pytest.approx(0.52)
    assert fake.done == ["resume"]


async def test_restore_with_resume_opens(driver: Driver, fake: FakeCoordinator) -> None:
    fake.published = ["step-40"]
    result = await driver.do("restore", "step-40", resume=True)
    assert not result.paused
    assert result.pause_s == pytest.approx(0.52)


async def test_a_restored_ledger_is_read_in_parts_and_over_a_lost_connection(
    driver: Driver, fake: FakeCoordinator
) -> None:
    from tests.client.fake_coordinator import Fault

    fake.published = ["step-40"]
    fake.rollouts = list(entries("r-1", "r-2", "r-3", "r-4", "r-5")) + list(entries("r-6", state=1))
    result = await driver.do("restore")
    fake.fail("ReadLedger", Fault(after=2))
    rollouts = await driver.take(result.rollouts())
    assert [r.rollout_id for r in rollouts] == ["r-1", "r-2", "r-3", "r-4", "r-5", "r-6"]
    assert fake.names().count("ReadLedger") == 2
    assert rollouts[0].state is RolloutState.PARKED
    assert rollouts[5].completed
    assert rollouts[0].recorded_calls == 3


async def test_a_restore_of_actors_says_where_each_rollout_is_now(driver: Driver, fake: FakeCoordinator) -> None:
    def placed(old: str, new: str, first: str = "", until: str = "") -> manifest_pb2.Placement:
        return manifest_pb2.Placement(from_actor_id=old, to_actor_id=new, rollouts_from=first, rollouts_until=until)

    fake.published = ["step-40"]
    fake.rollouts = list(entries("r-1", "r-2", "r-3", "r-4"))
    for number, rollout in enumerate(fake.rollouts):
        rollout.participant_id = f"a{number % 2}.agent"
    fake.placements = [placed("a0", "a0", "", "r-3"), placed("a0", "b1", "r-3"), placed("a1", "b1")]
    result = await driver.do("restore", "step-40", elastic=True)
    assert fake.asked[-1][1].elastic
    assert "spread over 2 actors" in result.line
    rollouts = await driver.take(result.rollouts())
    assert [(r.participant_id, r.actor_id) for r in rollouts] == [
        ("a0.agent", "a0"), ("a1.agent", "b1"), ("a0.agent", "b1"), ("a1.agent", "b1"),
    ]  # fmt: skip


async def test_latest_is_the_newest_that_verifies_and_it_says_what_was_passed_over(
    driver: Driver, fake: FakeCoordinator
) -> None:
    fake.published = ["step-42", "step-41", "step-40"]
    fake.damaged = {"step-42": Reason.SNAPSHOT_CORRUPT}
    result = await driver.do("restore", "latest")
    assert result.snapshot_id == "step-41"
    assert list(result.skipped) == ["step-42"]
    assert "calls.jsonl is damaged" in result.skipped["step-42"]
    assert fake.requests("Restore")[0].snapshot_id == "step-41"


async def test_latest_with_nothing_that_verifies_restores_nothing(driver: Driver, fake: FakeCoordinator) -> None:
    with pytest.raises(Refused) as caught:
        await driver.do("restore")
    assert caught.value.reason is Reason.SNAPSHOT_NOT_FOUND
    fake.published, fake.damaged = ["step-42"], {"step-42": Reason.SNAPSHOT_UNSAFE}
    with pytest.raises(Refused, match="1 snapshots, and none of them verifies: step-42") as caught:
        await driver.do("restore")
    assert caught.value.reason is Reason.SNAPSHOT_CORRUPT, "a trainer must not take it for a fresh job"
    assert "Restore" not in fake.names()


async def test_latest_does_not_hide_that_the_storage_is_down(driver: Driver, fake: FakeCoordinator) -> None:
    fake.published, fake.damaged = ["step-42", "step-41"], {"step-42": Reason.STORAGE_FAILED}
    with pytest.raises(Refused) as caught:
        await driver.do("restore")
    assert caught.value.reason is Reason.STORAGE_FAILED


async def test_a_snapshot_is_fetched_from_the_store(driver: Driver, fake: FakeCoordinator) -> None:
    fake.stored = ["step-43", "step-42"]
    assert (await driver.do("fetch")).snapshot.snapshot_id == "step-43"
    assert (await driver.do("fetch", "step-43", "s3://bucket/run")).found
    with pytest.raises(Refused):
        await driver.do("fetch", "step-43", "s3://other")


async def test_lists_topology_status_prune_retire_and_explain_pass_through(
    driver: Driver, fake: FakeCoordinator
) -> None:
    fake.published = ["d", "c", "b", "a"]
    fake.invalid = {"e": "no manifest"}
    listed = await driver.do("snapshots")
    assert [s.snapshot_id for s in listed.published] == ["d", "c", "b", "a"], "over pages of two"
    assert listed.invalid == {"e": "no manifest"}
    assert (await driver.do("prune", 3, dry_run=True)).deleted == ["a"]
    assert (await driver.do("prune", 3)).deleted == ["a"]
    assert (await driver.do("prune", 1, keep_every=0, keep_interval=60)).kept == {"d": "it is the newest"}
    asked = fake.requests("PruneSnapshots")
    assert [r.HasField("keep_every") for r in asked] == [False, False, True], "silence is not zero"
    assert asked[-1].keep_interval.seconds == 60
    assert (await driver.do("pin", "d", "figure 3")).pin_reason == "figure 3"
    assert [await driver.do("unpin", "d") for _ in range(2)] == ["figure 3", ""]
    assert (await driver.do("verify", "d")).files == 4
    assert (await driver.do("topology")).participants[0].capabilities.participant_id == "agent"
    status = await driver.do("status", participants=True, max_rollouts=1)
    assert status.participants[0].status.rollouts[0].rollout_id == "r-0"
    assert (await driver.do("explain")).operation.failure.primary.participant_id == "counter"


async def test_any_number_of_rollouts_is_retired_in_calls_that_fit(driver: Driver, fake: FakeCoordinator) -> None:
    assert await driver.do("retire", [f"r-{n}" for n in range(2500)]) == 2500
    assert [len(r.rollout_ids) for r in fake.requests("RetireRollouts")] == [1024, 1024, 452]
    fake.unconfirmed = ["counter"]
    with pytest.raises(Exception, match="Could not tell counter"):
        await driver.do("retire", ["r-1"])
    fake.causes = {"counter": "Its call log is full."}
    with pytest.raises(Exception, match="counter: Its call log is full"):
        await driver.do("retire", ["r-1"])


async def test_watch_begins_with_the_status_and_ends_with_its_operation(driver: Driver) -> None:
    events = await driver.take(driver.client.watch("save-1"))
    assert [e.WhichOneof("event") for e in events] == ["status", "operation_event"]
    endless = await driver.take(driver.client.watch(), count=2)
    assert len(endless) == 2


async def test_abort_names_who_has_not_opened_yet(driver: Driver, fake: FakeCoordinator) -> None:
    fake.active, fake.unconfirmed = "save-7", ["counter"]
    result = await driver.do("abort", "the trainer stops")
    assert (result.operation_id, result.unconfirmed) == ("save-7", ("counter",))
    assert fake.requests("Abort")[0].cause == "the trainer stops"
    assert (await driver.do("abort")).operation_id == ""


async def test_every_call_carries_a_deadline(driver: Driver, fake: FakeCoordinator) -> None:
    fake.published = ["a"]
    for method, args in (("save", ("s",)), ("restore", ()), ("status", ()), ("topology", ()), ("abort", ())):
        await driver.do(method, *args)
    assert len(fake.budgets) == len(fake.asked)  # the server refuses a call without one before it is counted
    assert all(0 < budget < 4000 for budget in fake.budgets)
