"""A restart on a node that lacks the files: it refuses to act, says so, and acts once it has them (FAILURES B40)."""

from __future__ import annotations

import shutil
import time

import pytest

from coordinator.wire.errors import Reason, SafepointError
from tests.ray.conftest import Nodes
from tests.ray.fleet import Shims, Trainer, soon
from tests.ray.hosting import LEASE_S, SLACK_S, assert_found_again, coordinator_on, lose_the_node

pytestmark = [pytest.mark.ray, pytest.mark.ray_cluster, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("files", ["none", "older"])
def test_a_coordinator_refuses_to_act_on_a_node_with(nodes: Nodes, shims: Shims, trainer: Trainer, files: str) -> None:
    from coordinator import ray_host

    with coordinator_on(nodes, shims, trainer) as name:
        trainer.client.save("before")
        epoch = shims.record()["epoch"]
        shims.hold("resources-0", "export")
        trainer.begin(lambda client: client.save("lost", timeout=20))
        soon(lambda: len(shims.steps("resources-0", "export")) == 2)
        killed_at = lose_the_node(nodes, name)
        away = shims.root.with_name("away")
        shims.root.rename(away)  # what the old node had
        if files == "older":
            (shims.root / "coordinator").mkdir(parents=True)
            (shims.root / "coordinator" / "epoch-0").touch()
        shims.release()

        soon(shims.all_open, 60, "the opening of everybody")  # by their lease: nobody tells them
        assert time.monotonic() < killed_at + LEASE_S + SLACK_S

        def refusal() -> SafepointError | None:
            try:
                ray_host.find(name)
            except SafepointError as error:
                return error if error.reason is Reason.STORAGE_FAILED else None
            raise AssertionError("it serves without its log")

        found = soon(refusal, 60, "the refusal")
        assert found is not None
        assert str(shims.root) in found.problem.message
        assert "node" in found.problem.message
        assert not (shims.root / "owner.json").exists()  # nothing was made
        if files == "older":
            shutil.rmtree(shims.root)
        away.rename(shims.root)
        assert_found_again(trainer, shims, name, epoch)
        shims.verify("before")
