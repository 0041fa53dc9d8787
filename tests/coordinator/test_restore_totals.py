"""A restore accounts for every rollout of the snapshot, or it does not count as one (rule 11)."""

from __future__ import annotations

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import manifest_pb2

from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import Role
from tests.coordinator.conftest import Bench, until
from tests.fakes import Knobs

COMPLETED, PARKED = manifest_pb2.ROLLOUT_STATE_COMPLETED, manifest_pb2.ROLLOUT_STATE_PARKED
PENDING, EXCLUDED = manifest_pb2.ROLLOUT_STATE_PENDING, manifest_pb2.ROLLOUT_STATE_EXCLUDED


def entries(**counts: int) -> list[manifest_pb2.LedgerEntry]:
    """So many rollouts in each state, named "<state>-<n>"."""
    states = {"completed": COMPLETED, "parked": PARKED, "pending": PENDING, "excluded": EXCLUDED}
    return [
        manifest_pb2.LedgerEntry(
            rollout_id=f"{name}-{n}", state=states[name], participant_id="agent-0", reason="why" * (name == "excluded")
        )
        for name, count in counts.items()
        for n in range(count)
    ]


def lost(*rollout_ids: str) -> list[manifest_pb2.LedgerEntry]:
    return [manifest_pb2.LedgerEntry(rollout_id=r, state=EXCLUDED, reason="its session is gone") for r in rollout_ids]


async def saved_and_restarted(bench: Bench, ledger: list[manifest_pb2.LedgerEntry], **knobs: Knobs) -> None:
    await bench.start(agent_0=Knobs(ledger=ledger))
    await bench.save()
    for name, shim in list(bench.shims.items()):
        await shim.stop()
        await until(lambda name=name: bench.running.operations.discovery.registry.get(name) is None)
        await bench.add(name, Role(shim.capabilities.role), knobs.get(name.replace("-", "_")))


def totals(message: manifest_pb2.LedgerTotals) -> tuple[int, int, int, int]:
    return message.completed, message.parked, message.pending, message.excluded


WRONG = {
    "one is missing": (2, 3, 3, 1),
    "one is new": (2, 4, 4, 1),
    "one that had finished runs again": (1, 3, 4, 2),
    "one that ran has finished": (3, 3, 3, 1),
    "one that was parked has a call in flight": (2, 2, 5, 1),
    "one restarts and nobody has said so": (2, 3, 3, 2),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_restore_that_does_not_account_for_every_rollout_fails_and_stays_paused(
    bench: Bench, what: str
) -> None:
    completed, parked, pending, excluded = WRONG[what]
    told = manifest_pb2.LedgerTotals(completed=completed, parked=parked, pending=pending, excluded=excluded)
    ledger = entries(completed=2, parked=3, pending=4, excluded=1)
    await saved_and_restarted(bench, ledger, agent_0=Knobs(restored_totals=told))
    with pytest.raises(SafepointError) as caught:
        await bench.restore()
    assert caught.value.reason is Reason.LEDGER_UNBALANCED
    assert caught.value.problem.participant_id == "agent-0"
    assert not bench.shims["agent-0"].open
    assert not bench.shims["model-0"].open, "the wave before it"
    assert (await bench.status()).operation.outcome == pb.OPERATION_OUTCOME_FAILED_PAUSED
    await bench.abort()
    assert bench.all_open()


async def test_an_agent_that_names_what_restarts_is_in_balance(bench: Bench) -> None:
    told = manifest_pb2.LedgerTotals(parked=1, excluded=1)
    knobs = Knobs(restored_totals=told, diverged=lost("parked-1"))
    await saved_and_restarted(bench, entries(parked=2), agent_0=knobs)
    done = (await bench.restore())[-1].restored
    assert totals(done.totals) == (0, 1, 0, 1)
    assert [e.rollout_id for e in done.diverged] == ["parked-1"]


async def test_totals_are_right_however_many_have_diverged(bench: Bench) -> None:
    ledger = entries(completed=10, parked=1500, pending=1500, excluded=30)
    gone = lost(
        *(f"parked-{n}" for n in range(1100)), *(f"pending-{n}" for n in range(1200)),
        *(f"completed-{n}" for n in range(10)),  # their sessions: the results stay what they are
        *(f"excluded-{n}" for n in range(30)),  # they restart anyway
        "unknown-1",
    )  # fmt: skip
    await saved_and_restarted(bench, ledger, resources_0=Knobs(diverged=gone))
    done = (await bench.restore())[-1].restored
    assert totals(done.totals) == (10, 400, 300, 30 + 2300)
    assert (done.diverged_count, len(done.diverged)) == (2300, 20)
    assert sum(totals(done.totals)) == sum(totals(done.snapshot.totals))
    assert {e.reason for e in done.diverged} == {"its session is gone"}


async def test_two_that_lost_the_same_rollout_lost_one(bench: Bench) -> None:
    knobs = [Knobs(diverged=lost("parked-0", f"parked-{n}")) for n in (1, 2)]
    await saved_and_restarted(bench, entries(parked=4), resources_0=knobs[0], model_0=knobs[1])
    done = (await bench.restore())[-1].restored
    assert totals(done.totals) == (0, 1, 0, 3)
    assert done.diverged_count == 3


async def test_a_count_without_names_is_no_proof(bench: Bench) -> None:
    gone = lost(*(f"parked-{n}" for n in range(25)))
    await saved_and_restarted(bench, entries(parked=30), resources_0=Knobs(diverged=gone, names_all=False))
    with pytest.raises(SafepointError) as caught:
        await bench.restore()
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert "25" in caught.value.problem.message
    assert not bench.shims["resources-0"].open
