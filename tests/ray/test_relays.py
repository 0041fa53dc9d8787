"""Relays as actors: one on each node that is meant, kept when asked again, back on its node after a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from coordinator.relay.host import RelayOptions
from tests.ray.conftest import Nodes
from tests.ray.fleet import HOST, soon

pytestmark = pytest.mark.ray_cluster


def test_a_node_gets_one_relay_keeps_it_and_gets_it_back_after_a_kill(nodes: Nodes, tmp_path: Path) -> None:
    from coordinator import ray_relays

    options = RelayOptions("file:/nowhere/address.json", tmp_path / "relay", job_id="relays")
    record = tmp_path / "relay" / "address.json"
    try:
        (first,) = ray_relays.start(options, resource=HOST).items()
        assert json.loads(record.read_text())["address"] == first[1]
        assert ray_relays.start(options, resource=HOST) == dict([first])
        (name,) = [n["name"] for n in nodes.ray.util.list_named_actors(all_namespaces=True) if "relay" in n["name"]]
        actor = nodes.ray.get_actor(name, namespace=ray_relays.NAMESPACE)
        os.kill(nodes.ray.get(actor.pid.remote(), timeout=30), signal.SIGKILL)
        soon(lambda: json.loads(record.read_text())["address"] != first[1], 60, "another relay in its place")
        ((node, address),) = ray_relays.start(options, resource=HOST).items()
        assert (node, address) == (first[0], json.loads(record.read_text())["address"])
    finally:
        assert ray_relays.stop("relays") == 1
