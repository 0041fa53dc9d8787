"""Lost replies, restarts and budgets: the same operation_id is sent again, and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from coordinator.client import AsyncClient, Budgets, Client, Misanswered, Reason, Refused, Unanswered
from coordinator.client_patience import Patience
from coordinator.wire.errors import Problem, refuse
from coordinator.wire.terms import Phase
from tests.client.driver import QUICK, Driver
from tests.client.fake_coordinator import LOST, FakeCoordinator, Fault


@pytest.mark.parametrize("after", [0, 1, 4, 9])
async def test_a_lost_reply_is_asked_for_again_and_the_save_is_made_once(
    driver: Driver, fake: FakeCoordinator, after: int
) -> None:
    fake.fail("Save", Fault(after=after), Fault(after=after))
    seen = []
    result = await driver.do("save", "step-40", on_progress=seen.append)
    assert result.snapshot_id == "step-40"
    assert fake.done == ["save step-40"]
    asked = fake.requests("Save")
    assert len(asked) == 3
    assert len({r.SerializeToString(deterministic=True) for r in asked}) == 1, "the very same request"
    assert [e.sequence for e in seen] == sorted({e.sequence for e in seen}), "nothing is told twice"


async def test_unary_calls_are_repeated_too(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("GetStatus", LOST, LOST)
    assert (await driver.do("status")).coordinator_epoch == 3
    assert fake.names() == ["GetStatus"] * 3


async def test_a_coordinator_that_is_not_ready_is_waited_for(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Save", Problem(Reason.UNAVAILABLE, "starting"), Problem(Reason.UNAVAILABLE, "starting"))
    assert (await driver.do("save", "s")).snapshot_id == "s"


@pytest.mark.hasty
async def test_the_error_names_the_budget_that_ran_out(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Save", *[LOST] * 100)
    with pytest.raises(Unanswered, match=r"the budget for a coordinator that cannot be reached is 0\.3 s") as caught:
        await driver.do("save", "s")
    assert "may have been done" in caught.value.problem.next_step
    assert caught.value.problem.operation_id.startswith("save-")
    fake.faults["Save"].clear()
    fake.fail("Save", *[Fault(after=2)] * 100)
    with pytest.raises(Unanswered, match=r"the budget for a lost reply is 0\.3 s"):
        await driver.do("save", "t")
    fake.faults["Save"].clear()
    fake.fail("Save", *[Problem(Reason.UNAVAILABLE, "starting")] * 100)
    with pytest.raises(Refused, match=r"the budget for a coordinator that is not ready is 0\.3 s"):
        await driver.do("save", "u")


async def test_a_hanging_coordinator_costs_no_more_than_the_deadline(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Save", *[Fault(hang=True)] * 10)
    began = asyncio.get_running_loop().time()
    with pytest.raises(Unanswered, match=r"the deadline of 0\.5 s passed") as caught:
        await driver.do("save", "s", timeout=0.5)
    assert asyncio.get_running_loop().time() - began < 30, "its own deadline would be 600 s"
    assert "safepoint status" in caught.value.problem.next_step


async def test_a_call_that_runs_out_of_time_says_where_the_operation_stood(
    driver: Driver, fake: FakeCoordinator
) -> None:
    fake.fail("Prepare", *[Fault(hang=True, after=1)] * 10)
    with pytest.raises(Unanswered) as caught:
        await driver.do("prepare", "s", "save-1", timeout=2)
    assert caught.value.problem.phase is Phase.PREPARE
    assert "the deadline of 2 s passed" in str(caught.value)
    assert "in prepare, and waited for agent, counter" in str(caught.value)


async def test_a_stream_that_ends_well_without_its_result_is_no_success(driver: Driver, fake: FakeCoordinator) -> None:
    fake.fail("Save", Fault(end=True, after=3))
    with pytest.raises(Misanswered, match="without the event Saved"):
        await driver.do("save", "s")
    fake.fail("Save", Fault(end=True))
    with pytest.raises(Misanswered):
        await driver.do("save", "t")


async def test_a_repeated_operation_with_another_request_is_a_conflict(driver: Driver) -> None:
    await driver.do("save", "s", operation_id="save-x")
    assert (await driver.do("save", "s", operation_id="save-x")).snapshot_id == "s"
    with pytest.raises(Refused) as caught:
        await driver.do("save", "t", operation_id="save-x")
    assert caught.value.reason is Reason.REQUEST_CONFLICT


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_coordinator_that_came_back_elsewhere_is_found_through_its_address_file(
    kind: type, tmp_path: Path
) -> None:
    file = tmp_path / "address.json"
    client = kind(f"file:{file}", budgets=Budgets(10, 10, 10))
    driver = Driver(client, kind is Client)
    first, second = FakeCoordinator(), FakeCoordinator()
    first.fail("Save", Fault(after=3, hang=True))
    async with first.serve():
        task = asyncio.create_task(driver.do("save", "s"))  # before anybody wrote an address
        await asyncio.sleep(0)
        file.write_text(json.dumps({"address": first.address, "epoch": 1}))
        async with asyncio.timeout(10):
            while not first.asked:
                await asyncio.sleep(0.02)
    async with second.serve():
        file.write_text(json.dumps({"address": second.address, "epoch": 2}))
        assert (await task).snapshot_id == "s"
    assert second.done == ["save s"]
    await driver.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_target_where_nobody_listens_is_unanswered_within_its_budget(kind: type) -> None:
    with tempfile.TemporaryDirectory(prefix="sp-") as folder:
        for target in (f"unix:{folder}/nobody", f"file:{folder}/address.json"):
            driver = Driver(kind(target, budgets=QUICK), kind is Client)
            with pytest.raises(Unanswered, match=r"cannot be reached is 0\.3 s"):
                await driver.do("status")
            await driver.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_token_is_sent_and_a_missing_one_is_named(kind: type, tmp_path: Path) -> None:
    secret = "0123456789abcdef" * 4
    file = tmp_path / "token"
    file.write_text(secret)
    file.chmod(0o600)
    async with FakeCoordinator(token=secret).serve() as fake:
        with_token = Driver(kind(fake.address, token_file=file, budgets=QUICK), kind is Client)
        assert (await with_token.do("status")).coordinator_epoch == 3
        await with_token.close()
        without = Driver(kind(fake.address, budgets=QUICK), kind is Client)
        for method, args in (("status", ()), ("save", ("s",))):
            with pytest.raises(Refused) as caught:
                await without.do(method, *args)
            assert caught.value.reason is Reason.UNAUTHENTICATED
            assert "SAFEPOINT_TOKEN_FILE" in str(caught.value)
            assert secret not in str(caught.value)
        await without.close()
        assert fake.done == []


def test_a_client_without_any_target_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAFEPOINT_COORDINATOR", raising=False)
    monkeypatch.delenv("SAFEPOINT_ROOT", raising=False)
    with pytest.raises(Refused, match="Set SAFEPOINT_COORDINATOR to host:port"):
        Client()
    monkeypatch.setenv("SAFEPOINT_ROOT", "/somewhere")
    Client().close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def unanswered() -> Unanswered:
    return Unanswered(Problem(Reason.UNREACHABLE, "No answer (UNAVAILABLE)."))


def test_budgets_are_counted_for_each_kind_of_failure_in_a_row() -> None:
    clock = Clock()
    patience = Patience("Save", "Save s", None, Budgets(10, 20, 30), clock)
    patience.next_try_s()
    assert patience.again(unanswered())
    clock.now += 9
    assert patience.again(refuse(Reason.UNAVAILABLE, "starting")), "another kind: its own budget"
    clock.now += 29
    assert patience.again(refuse(Reason.UNAVAILABLE, "starting"))
    clock.now += 2
    assert not patience.again(refuse(Reason.UNAVAILABLE, "starting"))


def test_an_operation_that_failed_because_a_participant_was_not_ready_is_not_asked_for_again() -> None:
    """Its end is recorded under its id: each repeat would get the same answer, for as long as the budget lasts."""
    patience = Patience("Save", "Save s", None, Budgets(10, 20, 30), Clock())
    patience.next_try_s()
    assert not patience.again(refuse(Reason.UNAVAILABLE, "It did not say.", participant_id="m", phase=Phase.CONFIRM))
    assert not patience.again(refuse(Reason.UNAVAILABLE, "The disk hung.", phase=Phase.PUBLISH))
    assert patience.again(refuse(Reason.UNAVAILABLE, "starting"))


def test_a_peer_that_always_breaks_off_after_its_first_word_is_given_up() -> None:
    clock = Clock()
    patience = Patience("Save", "Save s", None, Budgets(10, 20, 30), clock)
    tries = 0
    while True:
        patience.next_try_s()
        patience.heard()
        clock.now += 1
        tries += 1
        if not patience.again(unanswered()):
            break
    assert tries == 21
    assert "the budget for a lost reply is 20 s" in str(patience.last_word(unanswered(), "save-1"))


def test_a_long_operation_may_lose_its_connection_more_than_once() -> None:
    clock = Clock()
    patience = Patience("Restore", "Restore s", None, Budgets(10, 20, 30), clock)
    for _ in range(5):
        patience.next_try_s()
        clock.now += 100
        patience.heard()
        assert patience.again(unanswered())


def test_no_failure_is_repeated_beyond_the_deadline_and_a_refusal_never() -> None:
    clock = Clock()
    patience = Patience("Save", "Save s", 5.0, Budgets(10, 20, 30), clock)
    patience.next_try_s()
    assert not patience.again(refuse(Reason.DECLINED, "no"))
    assert patience.again(unanswered())
    clock.now += 4.95
    assert not patience.again(unanswered())
    assert patience.wait_s(3.0) == 0.0
    assert "the deadline of 5 s passed" in str(patience.last_word(unanswered()))
