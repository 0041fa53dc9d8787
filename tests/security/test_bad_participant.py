"""A participant that was taken over can only void cuts (FAILURES D32). What its certificate opens: test_tls.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from safepoint.v1 import coordinator_service_pb2 as pb

from coordinator.wire.errors import SafepointError
from coordinator.wire.terms import Role
from tests.coordinator.conftest import Bench, unary, until
from tests.fakes import Knobs

LIES = ["operation", "digest", "missing-file", "generation", "no-proof"]
BAD = {
    **{f"lies about {lie}": Knobs(lie=lie) for lie in LIES},
    "never drains": Knobs(inflight=1, drain_after_s=math.inf),
    "hangs in Prepare": Knobs(hang_on={"Prepare"}),
    "hangs in Commit": Knobs(hang_on={"Commit"}),
    "hangs in Confirm": Knobs(hang_on={"Confirm"}),
    "breaks in Commit": Knobs(crash_on={"Commit"}),
    "dies in Confirm": Knobs(die_at="Confirm"),
}


@pytest.fixture
async def quick(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path / "root")
    bench.settings |= {"prepare_timeout_s": 1.5, "commit_timeout_s": 1.5, "lease_ttl_s": 2.0}
    return bench


@pytest.mark.parametrize("what", BAD)
async def test_what_it_does_voids_the_cut_and_frees_the_others(what: str, quick: Bench) -> None:
    try:
        await quick.start(resources=2, resources_1=BAD[what])
        options: dict[str, Any] = {"quiesce_mode": 2, "straggler_policy": 2} if what == "never drains" else {}
        with pytest.raises(SafepointError):
            await quick.save(timeout=8, **options)
        assert not (await unary(quick.stub().ListSnapshots(pb.ListSnapshotsRequest(), timeout=5))).snapshots
        honest = [shim for name, shim in quick.shims.items() if name != "resources-1"]
        await until(lambda: all(shim.open for shim in honest), 10)
    finally:
        await quick.stop()


async def test_it_does_not_reach_the_files_of_others_by_its_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "root")
    try:
        await bench.start()
        for name in ("../model-0", "..", "model-0/../agent-0", "/etc", "a\x00b", ".hidden", "x" * 200):
            with pytest.raises((aio.AioRpcError, ValueError)):  # ValueError: a text that protobuf does not take
                await bench.add(name, Role.RESOURCES)
            await bench.shims.pop(name).stop()
        assert {p.info.capabilities.participant_id for p in (await bench.status()).participants} == {
            "agent-0", "model-0", "resources-0",
        }  # fmt: skip
    finally:
        await bench.stop()
