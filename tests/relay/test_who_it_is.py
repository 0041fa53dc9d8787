"""A relay shows who it is to both sides, and is nobody else: not the coordinator to a trainer, no relay with a shim's
certificate, and nobody without a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from safepoint.v1 import coordinator_service_pb2 as pb
from safepoint.v1 import coordinator_service_pb2_grpc

from coordinator import certs
from coordinator.relay import host
from coordinator.relay.host import RelayOptions
from coordinator.wire.access import Access
from coordinator.wire.errors import Reason, Unanswered
from coordinator.wire.links import read_security
from tests.relay.conftest import Node
from tests.shims.shim_fakes import answer, until

HEX = "0123456789abcdef"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    certs.init(tmp_path / "certs", "default")
    return tmp_path / "certs"


async def test_with_certificates_a_save_goes_through_it(node: Node, made: Path) -> None:
    node.tls = made
    await node.coordinate()
    await node.relay()
    await node.fleet()
    assert {node.via(name) for name in node.servers} == {"n1"}
    assert (await node.save())[-1].HasField("saved")
    assert node.all_open()


async def test_with_a_token_for_each_access_a_save_goes_through_it(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n".join(f"{access} {HEX[n:] + HEX * 3 + HEX[:n]}" for n, access in enumerate(Access)) + "\n")
    path.chmod(0o600)
    node.token_file = str(path)
    await node.coordinate()
    await node.relay()
    await node.fleet()
    assert {node.via(name) for name in node.servers} == {"n1"}
    assert (await node.save())[-1].HasField("saved")
    assert node.all_open()


async def test_it_cannot_pose_as_the_coordinator_to_a_trainer(node: Node, made: Path) -> None:
    node.tls = made
    await node.coordinate()
    relay = await node.relay()
    security = read_security(None, made / "trainer")
    async with security.channel(relay.address, Access.COORDINATOR) as link:
        stub = coordinator_service_pb2_grpc.CoordinatorStub(link)
        with pytest.raises(Unanswered):
            await answer(stub.GetTopology(pb.GetTopologyRequest(), timeout=3))


async def test_a_shims_certificate_makes_no_relay(node: Node, made: Path, tmp_path: Path) -> None:
    node.tls = made
    await node.coordinate()
    options = RelayOptions(node.record, tmp_path / "relay-n9", "n9", tls_dir=str(made / "shim"))
    relay = node.relays["n9"] = await host.serve(options)
    await until(lambda: relay.standing.trouble is not None)
    assert relay.standing.trouble is not None
    assert relay.standing.trouble.reason is Reason.PERMISSION_DENIED
