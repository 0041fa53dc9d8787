"""A shim that has something of an operation that is over hears how that one ended, before it is asked for a cut."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.wire.errors import Problem, Reason, SafepointError
from coordinator.wire.terms import Role
from tests.coordinator.conftest import Bench, until
from tests.fakes import FakeShim, Knobs


async def replaced(bench: Bench, knobs: Knobs | None = None, *, holds: str = "restore-1") -> FakeShim:
    """The shim of the agent is killed; the next one finds in the server what the restore had loaded."""
    await bench.shims["agent-0"].stop()
    return await bench.add("agent-0", Role.AGENT, knobs, in_question=holds)


@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "aborted"])
async def test_a_shim_that_holds_a_restore_that_ended_without_it_hears_how_before_the_next_save(
    bench: Bench, resumed: bool
) -> None:
    await bench.start()
    await bench.save()
    await bench.restore(resume=resumed)
    if not resumed:
        await bench.abort()
    shim = await replaced(bench)
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"
    assert shim.heard == [("Resume" if resumed else "Abort", "restore-1")]


async def test_a_shim_that_was_killed_while_its_restore_waited_hears_of_the_abort(bench: Bench) -> None:
    await bench.start()
    await bench.save()
    await bench.restore()
    await bench.shims["agent-0"].stop()
    await bench.abort()
    shim = await replaced(bench)
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"
    assert shim.heard == [("Abort", "restore-1")]


async def test_who_holds_what_nobody_here_knows_is_told_to_abort(bench: Bench) -> None:
    await bench.start()
    shim = await replaced(bench, holds="of-another-life")
    await until(lambda: shim.heard == [("Abort", "of-another-life")])


async def test_it_is_told_until_it_answers_and_nothing_is_saved_before(bench: Bench) -> None:
    await bench.start()
    stopped = Knobs(fail_on={"Abort": Problem(Reason.UNAVAILABLE, "Not yet.")})
    shim = await replaced(bench, stopped, holds="restore-1")
    with pytest.raises(SafepointError) as caught:
        await bench.save("save-1", "step-1", timeout=30)
    assert "restore-1" in caught.value.problem.message
    assert shim.in_question
    assert bench.all_open()
    stopped.fail_on.clear()
    await until(lambda: not shim.in_question)
    assert (await bench.save("save-2", "step-2"))[-1].saved.snapshot.snapshot_id == "step-2"


async def test_who_has_not_said_that_it_is_open_after_a_save_is_waited_for_by_the_next_one(bench: Bench) -> None:
    await bench.start(resources_0=Knobs(hang_on={"Resume"}))
    saved = (await bench.save(timeout=30))[-1].saved
    assert list(saved.unconfirmed) == ["resources-0"]
    saving = asyncio.create_task(bench.save("save-2", "step-2", timeout=30))
    async with asyncio.timeout(10):
        while not await waits_for(bench, "save-2", "resources-0"):
            await asyncio.sleep(0.01)
    bench.shims["resources-0"].knobs.hang_on.clear()  # it is told again
    assert (await saving)[-1].saved.snapshot.snapshot_id == "step-2"


async def waits_for(bench: Bench, operation_id: str, name: str) -> bool:
    operation = (await bench.status()).operation
    return operation.operation_id == operation_id and name in operation.waiting_for
