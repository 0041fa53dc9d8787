"""Real Gym servers with real shims, each started by its own server: saved while rollouts run, killed, restored.

A coordinator in miniature calls the Participant services in the order of the waves; everything else is the real thing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from safepoint.v1 import manifest_pb2, participant_service_pb2_grpc
from safepoint.v1 import participant_service_pb2 as pb

from coordinator.wire.beneath import Directory
from coordinator.wire.errors import Reason
from coordinator.wire.manifest_file import write_snapshot_manifest
from coordinator.wire.rpc import channel
from coordinator.wire.terms import CheckpointMode, ParticipantState, Role
from tests.gym.endpoint import ScriptedEndpoint
from tests.gym.fleet import Fleet, counter_config, row
from tests.gym.test_gate import Trainer, until
from tests.shims.shim_fakes import answer, collect, refused

pytestmark = [pytest.mark.gym, pytest.mark.slow]
PREPARE = ("policy_model", "counter_agent", "counter")
COMMIT = ("counter_agent", "policy_model", "counter")
OPEN = ("counter", "policy_model", "counter_agent")


class Shims:
    """The participants of a fleet, by server."""

    def __init__(self, stubs: dict[str, Any], root: Path, fleet: Fleet) -> None:
        self.stubs, self.root, self.fleet = stubs, root, fleet
        self.prepared: dict[str, pb.Prepared] = {}
        self.committed: dict[str, pb.Committed] = {}

    @staticmethod
    def context(operation_id: str) -> pb.OperationContext:
        return pb.OperationContext(operation_id=operation_id, coordinator_epoch=1)

    async def prepare(self, operation_id: str, lease_s: int = 60) -> float:
        begun = time.monotonic()
        for name in PREPARE:
            request = pb.PrepareRequest(context=self.context(operation_id))
            request.lease_ttl.FromSeconds(lease_s)
            events = await collect(self.stubs[name].Prepare(request, timeout=30))
            self.prepared[name] = events[-1].prepared
        return time.monotonic() - begun

    async def save(self, operation_id: str, snapshot_id: str) -> float:
        """Everything but the opening. Seconds until all were prepared."""
        pause_s = await self.prepare(operation_id)
        directory = self.root / "snapshots" / snapshot_id
        directory.mkdir(parents=True, mode=0o700)
        for name in COMMIT:
            request = pb.CommitRequest(context=self.context(operation_id), snapshot_id=snapshot_id)
            self.committed[name] = (await collect(self.stubs[name].Commit(request, timeout=60)))[-1].committed
        for name in COMMIT:
            confirm = pb.ConfirmRequest(
                context=self.context(operation_id), incarnation_id=self.prepared[name].incarnation_id,
                admission_generation=self.prepared[name].admission_generation,
            )  # fmt: skip
            await answer(self.stubs[name].Confirm(confirm, timeout=10))
        ledger = (directory / "counter_agent" / "ledger.jsonl").read_bytes()
        (directory / "ledger.jsonl").write_bytes(ledger)
        manifest = manifest_pb2.SnapshotManifest(
            format_version=1, snapshot_id=snapshot_id, operation_id=operation_id, job_id="default", coordinator_epoch=1,
            ledger_sha256=hashlib.sha256(ledger).hexdigest(), ledger_size_bytes=len(ledger),
        )  # fmt: skip
        with Directory.open(directory) as opened:
            write_snapshot_manifest(opened, manifest)
        return pause_s

    async def restore(self, operation_id: str, snapshot_id: str) -> dict[str, pb.Restored]:
        out = {}
        for name in PREPARE:
            request = pb.RestoreRequest(
                context=self.context(operation_id), snapshot_id=snapshot_id,
                manifest_sha256=self.committed[name].manifest_sha256,
            )  # fmt: skip
            request.lease_ttl.FromSeconds(60)
            out[name] = (await collect(self.stubs[name].Restore(request, timeout=60)))[-1].restored
        return out

    async def resume(self, operation_id: str) -> None:
        for name in OPEN:
            await answer(self.stubs[name].Resume(pb.ResumeRequest(context=self.context(operation_id)), timeout=10))

    async def status(self, name: str) -> Any:
        return (await answer(self.stubs[name].GetStatus(pb.GetStatusRequest(max_rollouts=50), timeout=10))).status


def announced(fleet: Fleet, name: str) -> dict[str, Any]:
    """What the shim of this server's life says; None-like until it is there."""
    try:
        return json.loads((fleet.life(name) / "shim.json").read_text())
    except (OSError, ValueError, AssertionError):
        return {}


@asynccontextmanager
async def shims_of(fleet: Fleet, root: Path, committed: dict[str, Any] | None = None) -> AsyncIterator[Shims]:
    async with AsyncExitStack() as stack:
        stubs = {}
        for name in fleet.names():
            await until(lambda name=name: announced(fleet, name))
            link = await stack.enter_async_context(channel(announced(fleet, name)["address"]))
            stubs[name] = participant_service_pb2_grpc.ParticipantStub(link)
            end = time.monotonic() + 30
            while True:  # the gate dials in as soon as its server's loop runs
                try:
                    await answer(stubs[name].GetCapabilities(pb.GetCapabilitiesRequest(), timeout=5))
                    break
                except Exception:
                    assert time.monotonic() < end, (fleet.life(name) / "shim.log").read_text()[-2000:]
                    await asyncio.sleep(0.1)
        shims = Shims(stubs, root, fleet)
        shims.committed = committed or {}
        yield shims


def new_fleet(endpoint: ScriptedEndpoint, directory: Path, config: dict[str, Any] | None = None) -> Fleet:
    directory.mkdir(exist_ok=True)
    environment = {"SAFEPOINT_SHIM": "spawn", "SAFEPOINT_ROOT": str(directory.parent / "root")}
    return Fleet(config or counter_config(endpoint.url), directory, environment=environment)


async def test_live_rollouts_are_saved_killed_and_restored(short_path: Path) -> None:
    root = short_path / "root"
    root.mkdir()
    with ScriptedEndpoint() as endpoint:
        fleet = new_fleet(endpoint, short_path / "a")
        again: Fleet | None = None
        try:
            fleet.start()
            async with shims_of(fleet, root) as shims:
                what = {
                    name: (await answer(stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=5))).capabilities
                    for name, stub in shims.stubs.items()
                }
                assert {n: c.role for n, c in what.items()} == {
                    "policy_model": Role.POLICY_MODEL, "counter_agent": Role.AGENT, "counter": Role.RESOURCES,
                }  # fmt: skip
                assert what["counter"].checkpoint_mode == CheckpointMode.EXPORT_RESTORE
                # a save that is opened again disturbs nobody
                async with Trainer(fleet) as trainer:
                    runs = [asyncio.create_task(trainer.run(row(i, 3, delay_ms=50))) for i in range(6)]
                    await until(lambda: endpoint.begun >= 6)
                    await shims.save("op-1", "snap-1")
                    assert (await shims.status("counter_agent")).rollout_count > 0
                    await shims.resume("op-1")
                    assert [r["reward"] for r in await asyncio.gather(*runs)] == [1.0] * 6
                assert endpoint.repeated == 0
                # and one after which everything is killed
                begun = endpoint.begun
                endpoint.hold(after_turn=2)
                trainer = Trainer(fleet)
                runs = [asyncio.create_task(trainer.run(row(50 + i, 4))) for i in range(8)]
                await until(lambda: endpoint.begun == begun + 24)  # the third generation of each runs
                pause_s = await shims.save("op-2", "snap-2")
                assert pause_s < 5  # generations that never end don't make it longer
                committed = dict(shims.committed)
                ledger = [
                    json.loads(line) for line in (root / "snapshots/snap-2/ledger.jsonl").read_text().splitlines()
                ]
                live = {e["rollout_id"]: e["state"] for e in ledger if e["state"] != "ROLLOUT_STATE_COMPLETED"}
                assert live == {f"{50 + i}-0@counter_agent": "ROLLOUT_STATE_PENDING" for i in range(8)}
                assert committed["counter_agent"].manifest.totals.pending == 8
            fleet.kill()
            await trainer.__aexit__()
            await asyncio.gather(*runs, return_exceptions=True)
            endpoint.release()

            again = new_fleet(endpoint, short_path / "b", fleet.config)
            again.start()
            made, total = endpoint.repeated, endpoint.total
            async with shims_of(again, root, committed) as shims:
                restored = await shims.restore("op-3", "snap-2")
                assert restored["counter_agent"].totals.pending == 8
                assert restored["counter"].sessions >= 8
                assert (await shims.status("counter")).state == ParticipantState.RESTORED
                async with Trainer(again) as trainer:
                    runs = [asyncio.create_task(trainer.run(row(50 + i, 4))) for i in range(8)]
                    await asyncio.sleep(0.3)
                    assert not any(run.done() for run in runs)  # still paused
                    await shims.resume("op-3")
                    results = await asyncio.gather(*runs)
            assert [r["reward"] for r in results] == [1.0] * 8
            # Turns 1 and 2 of each were in the snapshot; the third was in flight, 4 to 6 never began.
            assert endpoint.total - total <= 8 * 4 + 8
            assert endpoint.repeated - made <= 8
        finally:
            fleet.close()
            if again is not None:
                again.close()


async def test_a_killed_shim_comes_back_and_what_it_owned_is_void(short_path: Path) -> None:
    with ScriptedEndpoint() as endpoint:
        fleet = new_fleet(endpoint, short_path / "a")
        (short_path / "root").mkdir()
        try:
            fleet.start()
            async with shims_of(fleet, short_path / "root") as shims:
                await shims.prepare("op-1", lease_s=3)
                old = announced(fleet, "counter")
                psutil.Process(old["pid"]).kill()
                await until(lambda: announced(fleet, "counter").get("pid") not in (None, old["pid"]))
            async with shims_of(fleet, short_path / "root") as shims:
                confirm = pb.ConfirmRequest(
                    context=shims.context("op-1"), incarnation_id=old["incarnation_id"], admission_generation=1
                )
                error = await refused(answer(shims.stubs["counter"].Confirm(confirm, timeout=5)))
                assert error.reason is Reason.INCARNATION_CHANGED
                for name in OPEN:  # an abort of what this shim has never seen opens the server all the same
                    await answer(shims.stubs[name].Abort(pb.AbortRequest(context=shims.context("op-1")), timeout=5))
                assert (await shims.status("counter")).state == ParticipantState.OPEN
                await shims.prepare("op-2", lease_s=2)  # the coordinator dies here: the lease opens everything
                async with Trainer(fleet) as trainer:
                    assert (await asyncio.wait_for(trainer.run(row(1, 1)), 20))["reward"] == 1.0
                assert "lease" in (await shims.status("counter_agent")).last_failure
        finally:
            fleet.close()


async def test_an_abort_after_the_shim_that_restored_was_killed_leaves_nothing_to_go_on_from(short_path: Path) -> None:
    root = short_path / "root"
    root.mkdir()
    with ScriptedEndpoint() as endpoint:
        fleet = new_fleet(endpoint, short_path / "a")
        again: Fleet | None = None
        try:
            fleet.start()
            async with shims_of(fleet, root) as shims, Trainer(fleet) as trainer:
                await asyncio.gather(*(trainer.run(row(i, 1)) for i in range(2)))
                await shims.save("op-1", "snap-1")
                committed = dict(shims.committed)
            fleet.kill()

            again = new_fleet(endpoint, short_path / "b", fleet.config)
            again.start()
            async with shims_of(again, root, committed) as shims:
                await shims.restore("op-2", "snap-1")
                old = announced(again, "counter_agent")
                assert loaded_rollouts(again) == 2
                psutil.Process(old["pid"]).kill()
                await until(lambda: announced(again, "counter_agent").get("pid") not in (None, old["pid"]))
            async with shims_of(again, root, committed) as shims:
                for name in OPEN:
                    await answer(shims.stubs[name].Abort(pb.AbortRequest(context=shims.context("op-2")), timeout=5))
                assert loaded_rollouts(again) == 0
        finally:
            fleet.close()
            if again is not None:
                again.close()


def loaded_rollouts(fleet: Fleet) -> int:
    with closing(sqlite3.connect(fleet.life("counter_agent") / "calls.db")) as log:
        return int(log.execute("SELECT count(*) FROM rollouts").fetchone()[0])
