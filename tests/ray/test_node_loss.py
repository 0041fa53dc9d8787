"""The node under the coordinator is killed in each phase, while real shims hold (FAILURES B28 to B41).

After each: nobody was paused for longer than the lease, what the client was told is what the disk says, the snapshot of
before is intact, trainer and shims find the next coordinator by themselves, and the next save succeeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from coordinator.client import Client
from coordinator.wire.errors import Reason, SafepointError
from coordinator.wire.terms import ParticipantState
from tests.ray.conftest import Nodes
from tests.ray.fleet import Shims, Trainer, soon
from tests.ray.hosting import LEASE_S, SLACK_S, assert_found_again, coordinator_on, lose_the_node, outcome

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Case:
    """Where the operation stands when the node dies. `hold`: participant, step, and which from now on; else a failpoint."""

    hold: tuple[str, str, int] | None = None
    failpoint: str = ""
    published: bool = False


# "still" is asked once in prepare, twice in commit, once in confirm.
SAVES = {
    "prepare": Case(hold=("resources-0", "quiesce", 1)),
    "commit": Case(hold=("resources-0", "export", 1)),
    "confirm": Case(hold=("model-0", "still", 4)),
    "publish": Case(failpoint="snapshots.before_publish"),
    "published": Case(failpoint="snapshots.after_publish", published=True),
    "resume": Case(hold=("agent-0", "open", 1), published=True),
}
IN_EVERY_RUN = "commit"
PHASES = [pytest.param(n, marks=[] if n == IN_EVERY_RUN else [pytest.mark.ray_cluster]) for n in SAVES]


@pytest.mark.parametrize("phase", PHASES)
def test_a_save_survives_the_loss_of_the_coordinators_node_in(
    nodes: Nodes, shims: Shims, trainer: Trainer, phase: str
) -> None:
    case = SAVES[phase]
    with coordinator_on(nodes, shims, trainer) as name:
        trainer.client.save("before")
        epoch = shims.record()["epoch"]
        nodes.spare = nodes.add()  # takes long, and nobody is held meanwhile
        reached = stand(nodes, shims, case)
        saving = trainer.begin(lambda client: client.save("lost", operation_id="op-lost", timeout=90))
        soon(reached, 60, f"the hold in {phase}")
        killed_at = lose_the_node(nodes, name)
        nodes.fail("")
        shims.release()

        soon(shims.all_open, 60, "the opening of everybody")
        assert time.monotonic() < killed_at + LEASE_S + SLACK_S
        told = outcome(saving.result, 90)
        assert ("lost" in shims.published()) == case.published
        if case.published:
            assert told.snapshot_id == "lost"
            shims.verify("lost")
        else:
            assert isinstance(told, SafepointError)
            assert told.reason is Reason.COORDINATOR_RESTARTED
            assert told.problem.operation_id == "op-lost"
        shims.verify("before")
        assert_found_again(trainer, shims, name, epoch)


@pytest.mark.ray_cluster
@pytest.mark.parametrize("loaded", [False, True], ids=["restore", "restored"])
def test_a_restore_survives_the_loss_of_the_coordinators_node_while_it_is(
    nodes: Nodes, shims: Shims, trainer: Trainer, loaded: bool
) -> None:
    with coordinator_on(nodes, shims, trainer) as name:
        trainer.client.save("before")
        epoch = shims.record()["epoch"]
        opened = {p: len(shims.steps(p, "open")) for p in shims.processes}
        if not loaded:
            shims.hold("resources-0", "load")

        def restore(client: Client) -> Any:
            return client.restore("before", operation_id="op-restore", lease=60, timeout=120)

        restoring = trainer.begin(restore)
        if loaded:
            restoring.result(30)
        else:
            soon(lambda: shims.steps("resources-0", "load"), 60, "the load")
        lose_the_node(nodes, name)
        shims.release()
        soon(lambda: trainer.all_here(epoch + 1), 90, "the next coordinator")
        states = shims.states()
        assert ParticipantState.OPEN not in states.values(), states
        assert opened == {p: len(shims.steps(p, "open")) for p in shims.processes}  # never half open
        if loaded:
            assert trainer.begin(restore).result(60).snapshot.snapshot_id == "before"  # attaches to what was loaded
            trainer.client.resume("op-restore")
        else:
            told = outcome(restoring.result, 60)
            assert isinstance(told, SafepointError)
            trainer.client.abort()
        soon(shims.all_open, 60, "the opening of everybody")
        shims.verify("before")
        assert_found_again(trainer, shims, name, epoch)


def stand(nodes: Nodes, shims: Shims, case: Case) -> Callable[[], bool]:
    """Let the next save stop where the case says; whether it has."""
    if case.hold is not None:
        participant, step, ahead = case.hold
        count = len(shims.steps(participant, step)) + ahead
        shims.hold(participant, step, count)
        return lambda: len(shims.steps(participant, step)) >= count
    hits = nodes.hits(case.failpoint)
    nodes.fail(f"{case.failpoint}=delay(60000)")
    return lambda: nodes.hits(case.failpoint) > hits
