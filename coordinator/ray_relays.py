"""Relays on Ray: one detached actor on every node of a cluster, bound to it.

The rule: as with the coordinator, the actor is a host and nothing more. Ray starts it again on its own node when it dies;
a node that is lost takes its relay with it, as it takes its shims. `start` may be called again at any time: nodes that have
a relay keep it, and those that have joined since get one.

The caller connects to Ray first (`ray_host.connect`). These functions block, as Ray's do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.ray_host import WILDCARDS, require_ray
from coordinator.relay.host import RelayOptions, RelayServer, serve
from coordinator.wire.errors import Problem, Reason, Refused, SafepointError, refuse
from coordinator.wire.usage import raise_open_files

log = logging.getLogger(__name__)

NAMESPACE: Final = "safepoint"
START_WITHIN_S: Final = 60.0
STOP_WITHIN_S: Final = 10.0
AGAIN_S: Final = 1.0
_ray: Final[Any] = ray  # much of it is typed in part only


class RelayHost:
    """What runs in an actor's process."""

    def __init__(self, options: RelayOptions) -> None:
        # Begun in the constructor, which Ray runs again after a restart.
        self._options = options
        self._problem: Problem | None = None
        self._starting: asyncio.Task[RelayServer] = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> RelayServer:
        raise_open_files()
        options = self._options
        if not options.advertise and options.bind.startswith(WILDCARDS):
            options = replace(options, advertise=_ray.util.get_node_ip_address())
        while True:
            try:
                return await serve(options)
            except SafepointError as error:
                # The one before us may hold the directory for another moment; a restart would change nothing else.
                self._problem = error.problem
                log.error("the relay does not start: %s", error)
            await asyncio.sleep(AGAIN_S)

    async def address(self, within_s: float) -> tuple[str, str]:
        """Where it listens; or an empty text, and why it does not."""
        done, _ = await asyncio.wait({self._starting}, timeout=within_s)
        if done:
            return self._starting.result().address, ""
        return "", str(self._problem or "It has not started yet.")

    async def pid(self) -> int:
        """The process it runs in now."""
        return os.getpid()

    async def stop(self) -> None:
        """Stop in good order; the actor itself is ended by its handle."""
        if self._starting.done():
            await self._starting.result().stop("It was told to end")
        else:
            self._starting.cancel()


def start(options: RelayOptions, namespace: str = NAMESPACE, resource: str = "") -> dict[str, str]:
    """A relay on every node that lives, or on those that have a custom resource: node id -> address.

    `options.relay_id` is not used: each is called after its node. Raises UNAVAILABLE when one does not start in a minute.
    """
    nodes = _nodes(resource)
    actors = {node: _actor(options, node, namespace) for node in nodes}
    until = time.monotonic() + START_WITHIN_S
    found: dict[str, str] = {}
    for node, actor in actors.items():
        left_s = max(1.0, until - time.monotonic())
        try:
            address, why = _ray.get(actor.address.remote(left_s), timeout=left_s + 5.0)
        except (GetTimeoutError, RayActorError) as error:
            address, why = "", type(error).__name__
        if not address:
            raise refuse(
                Reason.UNAVAILABLE, f"The relay of node {nodes[node]} does not start: {why}",
                next_step="Look into that actor's log in Ray, mend the cause, and start again: others are kept.",
            )  # fmt: skip
        found[node] = address
    return found


def stop(job_id: str = "default", namespace: str = NAMESPACE) -> int:
    """Stop all relays of a job: how many there were. Their shims go on to the coordinator."""
    names = [
        each["name"]
        for each in _ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == namespace and each["name"].startswith(_prefix(job_id))
    ]
    for name in names:
        actor = _ray.get_actor(name, namespace=namespace)
        try:
            _ray.get(actor.stop.remote(), timeout=STOP_WITHIN_S)
        except (GetTimeoutError, RayActorError) as error:
            log.warning("%s does not answer (%s) and is killed", name, type(error).__name__)
        _ray.kill(actor, no_restart=True)
    return len(names)


def _actor(options: RelayOptions, node: str, namespace: str) -> Any:
    actor_class = _ray.remote(RelayHost)
    named = replace(options, relay_id=f"node-{node[:12]}")
    return actor_class.options(
        name=f"{_prefix(options.job_id)}{node}", namespace=namespace, lifetime="detached", get_if_exists=True,
        max_restarts=-1, max_task_retries=0, num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(named)  # fmt: skip


def _prefix(job_id: str) -> str:
    return f"safepoint-relay-{job_id}-"


def _nodes(resource: str) -> dict[str, str]:
    """Node id -> its name for people."""
    require_ray()
    living = [node for node in _ray.nodes() if node["Alive"] and (not resource or resource in node["Resources"])]
    if not living:
        raise Refused(Problem(Reason.UNAVAILABLE, f"No node has {resource or 'joined'}.", "Start nodes first."))
    return {node["NodeID"]: node["NodeManagerHostname"] for node in living}
