from __future__ import annotations

import asyncio

import pytest

from coordinator.wire.errors import Reason, Refused
from coordinator.wire.terms import Activity, QuiesceMode
from participant_shims.admission import Doors, Entry
from tests.gate.clock import Clock

HOLD, DRAIN = QuiesceMode.HOLD, QuiesceMode.DRAIN


def make() -> tuple[Doors, Clock]:
    clock = Clock()
    return Doors(clock=clock, call_later=clock.later), clock


async def spin(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_parked_work_is_released_in_the_order_of_arrival() -> None:
    doors, _ = make()
    doors.close("op", HOLD, 30)
    order: list[str] = []

    async def work(name: str) -> None:
        entry = doors.enter(name)
        if await doors.admitted(entry):
            order.append(name)
        doors.leave(entry)

    tasks = [asyncio.create_task(work(f"r-{i}")) for i in range(20)]
    await spin()
    assert doors.counts().parked == 20
    assert order == []
    released = doors.open()
    await asyncio.gather(*tasks)
    assert order == [f"r-{i}" for i in range(20)]
    assert (released.parked, released.held) == (20, 0)
    assert doors.counts().parked == 0
    assert not doors.is_inside("r-3")


async def test_parked_work_whose_client_left_is_never_run() -> None:
    doors, _ = make()
    doors.close("op", HOLD, 30)
    entry = doors.enter("r-1")
    admitted = asyncio.create_task(doors.admitted(entry))
    await spin()
    doors.abandon(entry)
    assert await admitted is False
    assert not doors.is_inside("r-1")
    doors.open()
    assert doors.counts().in_flight == 0


async def test_a_client_that_left_in_the_step_of_the_opening_is_not_run() -> None:
    doors, _ = make()
    doors.close("op", HOLD, 30)
    entry = doors.enter("r-1")
    admitted = asyncio.create_task(doors.admitted(entry))
    await spin()
    doors.open()
    doors.abandon(entry)
    assert await admitted is False


async def test_a_second_close_before_parked_work_woke_keeps_it_parked() -> None:
    doors, _ = make()
    doors.close("first", HOLD, 30)
    entry = doors.enter("r-1")
    admitted = asyncio.create_task(doors.admitted(entry))
    await spin()
    doors.open()
    doors.close("second", HOLD, 30)
    await spin()
    assert not admitted.done()
    assert doors.counts().parked == 1
    assert doors.counts().in_flight == 0
    doors.open()
    assert await admitted


async def test_work_is_counted_in_the_step_in_which_it_is_admitted() -> None:
    doors, _ = make()
    entry = doors.enter("r-1")
    assert doors.counts().in_flight == 1  # before anything awaited
    doors.close("op", HOLD, 30)
    assert await doors.admitted(entry)  # admitted before the close: it goes on
    assert doors.enter("r-2").activity is Activity.PARKED


async def test_exempt_work_passes_closed_doors() -> None:
    doors, _ = make()
    doors.close("op", HOLD, 30)
    entry = doors.enter("r-1", exempt=True)
    assert await doors.admitted(entry)
    assert entry.activity is Activity.RUNNING


async def test_a_finished_response_is_held_until_open_and_passes_under_drain() -> None:
    doors, _ = make()
    entry, other = doors.enter("r-1"), doors.enter("r-2")
    doors.close("op", HOLD, 30)
    held = asyncio.create_task(doors.hold(entry))
    await spin()
    assert (doors.counts().held, doors.counts().in_flight) == (1, 1)
    assert doors.open().held == 1
    assert await held
    doors.close("drain", DRAIN, 30)
    assert await doors.hold(other)
    assert doors.counts().held == 0


async def test_the_lease_opens_by_itself_and_is_remembered_as_the_cause() -> None:
    clock = Clock()
    lapsed: list[str] = []
    doors = Doors(clock=clock, call_later=clock.later, on_lapse=lapsed.append)
    doors.close("op", HOLD, 10)
    entry = doors.enter("r-1")
    admitted = asyncio.create_task(doors.admitted(entry))
    clock.move(9)
    await spin()
    assert doors.closed
    clock.move(1)
    assert await admitted
    assert (doors.closed, doors.opened_by, lapsed) == (False, "lease", ["op"])
    with pytest.raises(Refused) as refused:
        doors.close("op", HOLD, 10)
    assert refused.value.reason is Reason.LEASE_LAPSED
    assert not doors.closed
    doors.close("next", HOLD, 10)
    assert doors.closed


async def test_a_process_that_was_stopped_past_its_lease_opens_before_it_decides() -> None:
    doors, clock = make()
    doors.close("op", HOLD, 10)
    clock.move(60, fire=False)
    assert doors.enter("r-1").activity is Activity.RUNNING
    assert doors.opened_by == "lease"


async def test_renewing_moves_the_lease_and_is_refused_when_open() -> None:
    doors, clock = make()
    doors.close("op", HOLD, 10)
    clock.move(8)
    doors.renew(10)
    clock.move(8)
    assert doors.closed
    assert doors.lease_remaining_s == pytest.approx(2)
    clock.move(2)
    assert not doors.closed
    with pytest.raises(Refused):
        doors.renew(10)


async def test_each_opening_and_closing_counts_and_repeats_do_not() -> None:
    doors, _ = make()
    assert doors.close("a", HOLD, 10) == 1
    assert doors.close("a", HOLD, 10) == 1
    assert doors.close("b", HOLD, 10) == 2  # taken over without opening
    doors.open()
    assert doors.generation == 3
    assert doors.open().closed_for_s is None
    assert doors.generation == 3


async def test_a_timer_of_an_earlier_closing_does_not_open_a_later_one() -> None:
    doors, clock = make()
    doors.close("a", HOLD, 10)
    doors.open()
    clock.move(5)
    doors.close("b", HOLD, 10)
    clock.move(6)
    assert doors.closed


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    doors, _ = make()
    doors.close("op", HOLD, 30)
    entry = doors.enter("r-1")
    task = asyncio.create_task(doors.admitted(entry))
    await spin()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not doors.is_inside("r-1")
    assert doors.counts().parked == 0


async def test_a_rollout_stands_where_its_deepest_call_is() -> None:
    doors, clock = make()
    doors.enter("r-1", waiting_on="POST /run")
    clock.move(3)
    call = doors.enter("r-1", inbound=False, waiting_on="policy_model POST /v1/responses")
    clock.move(4)
    standing, count = doors.rollouts(10)
    assert count == 1
    assert standing[0].activity is Activity.CALLING
    assert standing[0].waiting_on == "policy_model POST /v1/responses"
    assert standing[0].age_s == pytest.approx(4)
    assert doors.counts().in_flight == 1  # the call is part of the request that makes it
    doors.leave(call)
    assert doors.rollouts(10)[0][0].waiting_on == "POST /run"
    assert doors.running() == {"r-1": 0}


async def test_an_outbound_call_parks_and_is_calling_once_admitted() -> None:
    doors, _ = make()
    doors.close("op", HOLD, 30)
    entry: Entry = doors.enter("r-1", inbound=False)
    waiting = asyncio.create_task(doors.admitted(entry))
    await spin()
    assert doors.counts().parked == 1
    doors.open()
    await waiting
    assert entry.activity is Activity.CALLING
