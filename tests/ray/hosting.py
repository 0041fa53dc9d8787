"""A coordinator hosted by the test's cluster, the loss of its node, and what must hold afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from coordinator.settings import Settings
from coordinator.wire.errors import SafepointError
from tests.ray.conftest import Nodes
from tests.ray.fleet import HOST, Shims, Trainer, soon

LEASE_S = 6.0
SLACK_S = 20.0  # of a machine that does ten other things as well


@contextmanager
def coordinator_on(nodes: Nodes, shims: Shims, trainer: Trainer) -> Iterator[str]:
    """One that serves and has everybody; the actor's name, which no other test has."""
    from coordinator import ray_host

    name = shims.folder.name
    nodes.fail("")
    settings = Settings(root=str(shims.root), heartbeat_s=1.5, lease_ttl_s=LEASE_S)
    try:
        ray_host.start(settings, name, resources={HOST: 0.01})
        soon(trainer.all_here, 60, "the registration of everybody")
        yield name
    finally:
        shims.release()
        nodes.fail("")
        ray_host.stop(name)


def lose_the_node(nodes: Nodes, name: str) -> float:
    """Kill the node under the coordinator, another one is there (`nodes.spare`, else made now); the monotonic time."""
    from coordinator import ray_host

    actor = nodes.ray.get_actor(name, namespace=ray_host.NAMESPACE)
    pid = nodes.ray.get(actor.pid.remote(), timeout=30)
    fresh = nodes.spare or nodes.add()
    lost, nodes.host, nodes.spare = nodes.host, fresh, None
    at = time.monotonic()
    nodes.remove(lost)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # else it would answer for another second
    return at


def outcome(result: Callable[[float], Any], within_s: float) -> Any:
    """What a call returned, or the SafepointError that it raised."""
    try:
        return result(within_s)
    except SafepointError as error:
        return error


def assert_found_again(trainer: Trainer, shims: Shims, name: str, epoch: int) -> None:
    from coordinator import ray_host

    soon(lambda: trainer.all_here(epoch + 1), 60, "the registration with the next coordinator")
    record = shims.record()
    assert record["epoch"] > epoch
    assert soon(lambda: ray_host.find(name), 30) == record["address"]
    assert trainer.client.save("after").snapshot_id == "after"
    shims.verify("after")
