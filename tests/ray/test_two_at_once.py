"""A coordinator is started beside another one: the one that started last acts, the other one ends (FAILURES B39, B42)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from coordinator.settings import Settings
from coordinator.wire.errors import Reason, SafepointError
from tests.ray.conftest import Nodes
from tests.ray.fleet import HOST, REPOSITORY, Shims, Trainer, soon
from tests.ray.hosting import assert_found_again, coordinator_on, outcome

pytestmark = [pytest.mark.ray, pytest.mark.ray_cluster, pytest.mark.slow, pytest.mark.timeout(180)]


@contextmanager
def plain_process(shims: Shims) -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ, PYTHONPATH=f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'gen'}")
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "coordinator", "--root", str(shims.root)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(90)


def actor_is_gone(nodes: Nodes, name: str, namespace: str) -> bool:
    try:
        nodes.ray.get_actor(name, namespace=namespace)
    except ValueError:
        return True
    return False


def newer_than(shims: Shims, epoch: int) -> bool:
    return int(shims.record()["epoch"]) >= epoch


def test_one_of_the_same_name_in_another_namespace_replaces_it_in_the_middle_of_a_save(
    nodes: Nodes, shims: Shims, trainer: Trainer
) -> None:
    from coordinator import ray_host

    with coordinator_on(nodes, shims, trainer) as name:
        trainer.client.save("before")
        shims.hold("resources-0", "export")
        saving = trainer.begin(lambda client: client.save("lost", operation_id="op-lost", timeout=90))
        soon(lambda: len(shims.steps("resources-0", "export")) == 2)
        settings = Settings(root=str(shims.root), heartbeat_s=1.5, lease_ttl_s=6)
        try:
            ray_host.start(settings, name, "another-namespace", resources={HOST: 0.01})
            shims.release()
            told = outcome(saving.result, 60)
            assert isinstance(told, SafepointError)
            soon(shims.all_open)
            assert shims.published() == {"before"}
            soon(lambda: actor_is_gone(nodes, name, ray_host.NAMESPACE), 30, "the end of the older one")
            soon(lambda: trainer.all_here(2), 60, "the registration with the newer one")
            assert shims.record()["address"] == ray_host.find(name, "another-namespace")
            trainer.client.save("after")
            shims.verify("after")
            time.sleep(3)  # longer than each looks whether it still owns the root
            assert shims.record()["epoch"] == 2
        finally:
            ray_host.stop(name, "another-namespace")


def test_a_plain_process_beside_the_actor_replaces_it_and_a_new_actor_replaces_the_process(
    nodes: Nodes, shims: Shims, trainer: Trainer
) -> None:
    from coordinator import ray_host

    with coordinator_on(nodes, shims, trainer) as name, plain_process(shims) as process:
        soon(lambda: trainer.all_here(2), 60, "the registration with the process")
        soon(lambda: actor_is_gone(nodes, name, ray_host.NAMESPACE), 30, "the end of the actor")
        with pytest.raises(SafepointError) as caught:
            ray_host.find(name)
        assert caught.value.reason is Reason.UNAVAILABLE
        trainer.client.save("by-the-process")
        ray_host.start(Settings(root=str(shims.root), heartbeat_s=1.5), name, resources={HOST: 0.01})
        assert process.wait(90) != 0  # it says why, and ends
        soon(lambda: trainer.all_here(3), 60, "the registration with the new actor")
        trainer.client.save("by-the-actor")
        assert shims.published() == {"by-the-process", "by-the-actor"}


def test_a_coordinator_that_crashes_again_and_again_raises_its_epoch_each_time_and_serves_in_the_end(
    nodes: Nodes, shims: Shims, trainer: Trainer
) -> None:
    from coordinator import ray_host

    with coordinator_on(nodes, shims, trainer) as name:
        trainer.client.save("before")
        epoch = shims.record()["epoch"]

        def pid() -> int:
            actor = nodes.ray.get_actor(name, namespace=ray_host.NAMESPACE)
            return int(nodes.ray.get(actor.pid.remote(), timeout=10))

        for crash in range(1, 4):
            os.kill(soon(pid, 60), signal.SIGKILL)
            soon(partial(newer_than, shims, epoch + crash), 60, "the next start")
        assert_found_again(trainer, shims, name, epoch)
