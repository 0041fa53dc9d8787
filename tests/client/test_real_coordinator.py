"""Both clients and the command against the real coordinator, with shims that keep the contract."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.client import AsyncClient, Budgets, Client, Reason, Refused, RolloutState
from coordinator.server import Coordinator, serve
from coordinator.settings import Settings
from coordinator.wire.terms import Role
from tests.cli.conftest import Safepoint
from tests.client.driver import Driver
from tests.fakes import FakeShim, Knobs
from tests.in_time import room_for_answers


class Fleet:
    """A coordinator with an agent that has five parked rollouts, a model and a resources server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = f"file:{root}/coordinator/address.json"
        self.shims: dict[str, FakeShim] = {}
        self.coordinator: Coordinator | None = None

    async def start(self) -> None:
        await self.start_coordinator()
        for name, role, knobs in (
            ("agent", Role.AGENT, Knobs(rollouts=5)),
            ("model", Role.POLICY_MODEL, Knobs()),
            ("counter", Role.RESOURCES, Knobs()),
        ):
            shim = self.shims[name] = FakeShim(name, role, self.root, knobs)
            await shim.start()
            await shim.register(self.coordinator.address)

    async def start_coordinator(self, **settings: float) -> None:
        self.coordinator = await serve(Settings(root=str(self.root), heartbeat_s=0.2, **settings))

    async def another_coordinator(self, **settings: float) -> None:
        for shim in self.shims.values():
            await shim.leave()
        await self.start_coordinator(**settings)
        for shim in self.shims.values():
            await shim.register(self.coordinator.address)

    async def stop(self) -> None:
        for shim in self.shims.values():
            await shim.stop()
        if self.coordinator is not None:
            await self.coordinator.kill()

    @property
    def everybody_is_open(self) -> bool:
        return all(shim.open for shim in self.shims.values())


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, fleet: Fleet) -> AsyncIterator[Driver]:
    sync = request.param == "sync"
    budgets = Budgets(10, 10, 10)
    made = Driver((Client if sync else AsyncClient)(fleet.target, budgets=budgets), sync)
    yield made
    await made.close()


async def test_save_restore_resume_and_the_ledger(client: Driver, fleet: Fleet) -> None:
    seen = []
    saved = await client.do("save", "step-1", metadata={"weights": "/ckpt/1"}, on_progress=seen.append)
    assert (saved.totals.kept_in_flight, saved.totals.excluded) == (5, 0)
    assert saved.line.startswith("snapshot step-1: paused ")
    assert saved.unconfirmed == ()
    assert fleet.everybody_is_open
    numbers = [event.sequence for event in seen]
    assert numbers == sorted(set(numbers))
    again = await client.do("save", "step-1", metadata={"weights": "/ckpt/1"}, operation_id=saved.operation_id)
    assert again.snapshot == saved.snapshot, "a repeat is answered from the record"

    restored = await client.do("restore")
    assert restored.snapshot_id == "step-1"
    assert restored.snapshot.metadata["weights"] == "/ckpt/1"
    assert restored.paused
    assert not fleet.everybody_is_open
    rollouts = await client.take(restored.rollouts())
    assert len(rollouts) == 5
    assert {r.state for r in rollouts} == {RolloutState.PARKED}
    assert (await client.do("resume")).pause_s > 0
    assert fleet.everybody_is_open
    assert (await client.do("resume")).pause_s is None, "nothing waits for it any more"


@pytest.mark.parametrize("asked", [1.0, None], ids=["its own lease", "the coordinator's lease"])
async def test_a_cut_outlives_its_lease_while_the_body_runs(client: Driver, fleet: Fleet, asked: float | None) -> None:
    if asked is None:
        await fleet.coordinator.kill()
        await fleet.another_coordinator(lease_ttl_s=1.0)

    async def longer_than_the_lease() -> None:
        await asyncio.sleep(1.5)

    if client.sync:
        loop = asyncio.get_running_loop()
        cut = await client.cut(
            lambda _: asyncio.run_coroutine_threadsafe(longer_than_the_lease(), loop).result(),
            snapshot_id="c",
            lease=asked,
        )
    else:
        async with client.client.cut("c", lease=asked) as cut:
            await longer_than_the_lease()
    assert cut.prepared.participant_ids
    assert cut.prepared.lease_s == 1
    assert cut.result.snapshot_id == "c"
    assert cut.result.pause_s > 1.4
    assert fleet.everybody_is_open


async def test_a_failed_body_leaves_no_snapshot_and_nobody_paused(client: Driver, fleet: Fleet) -> None:
    with pytest.raises(OSError, match="disk"):
        await client.cut(error=OSError("disk"), snapshot_id="c")
    assert fleet.everybody_is_open
    assert (await client.do("snapshots")).published == ()


async def test_a_coordinator_that_dies_in_a_save_costs_the_save_and_nothing_else(client: Driver, fleet: Fleet) -> None:
    fleet.shims["counter"].knobs.hang_on = {"Commit"}
    saving = asyncio.create_task(client.do("save", "s"))
    async with asyncio.timeout(10):
        while not fleet.shims["counter"].count("Commit"):
            await asyncio.sleep(0.02)
    await fleet.coordinator.kill()
    fleet.shims["counter"].knobs.hang_on = set()
    await fleet.another_coordinator()
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(saving, 20)
    assert caught.value.problem.operation_id.startswith("save-")
    async with asyncio.timeout(10):
        while not fleet.everybody_is_open:
            await asyncio.sleep(0.02)
    assert (await client.do("save", "t")).snapshot_id == "t"


async def test_the_error_of_a_drain_names_the_rollouts(client: Driver, fleet: Fleet) -> None:
    fleet.shims["counter"].knobs.inflight = 2
    fleet.shims["counter"].knobs.drain_after_s = math.inf
    with room_for_answers(), pytest.raises(Refused) as caught:
        await client.do("save", "s", quiesce_mode="drain", straggler_policy="fail", timeout=20)
    assert caught.value.reason is Reason.DRAIN_INCOMPLETE
    assert caught.value.participant_id == "counter"
    assert caught.value.rollouts
    cause = await client.do("explain")
    assert cause.operation.failure.primary.participant_id == "counter"


async def test_the_command_works_on_a_root_with_and_without_its_coordinator(fleet: Fleet) -> None:
    safepoint = Safepoint(fleet.target)
    root = ("--root", str(fleet.root))
    assert (await safepoint("topology")).code == 0
    for name in ("step-1", "step-2", "step-3"):
        assert (await safepoint("save", name, "--json")).json()["snapshot"]["totals"]["parked"] == 5
    asked = (await safepoint("snapshots", "ls", "--json")).json()
    read = (await safepoint("snapshots", "ls", "--json", *root)).json()
    assert [s["snapshot_id"] for s in read["snapshots"]] == ["step-3", "step-2", "step-1"]
    assert read == asked, "both ways tell the same"
    assert (await safepoint("snapshots", "show", "--rollouts", "--json", *root)).out == (
        await safepoint("snapshots", "show", "--rollouts", "--json")
    ).out
    assert (await safepoint("snapshots", "prune", "--keep", "1", *root)).code == 4, "a coordinator runs on it"
    assert (await safepoint("snapshots", "pin", "step-1", "-m", "figure 3", *root)).code == 4, "likewise"
    assert (await safepoint("snapshots", "pin", "step-1", "-m", "figure 3")).out == "step-1 is pinned: figure 3\n"
    dry = await safepoint("snapshots", "prune", "--keep", "2", "--dry-run")
    assert "keeps step-1: it is pinned: figure 3" in dry.out
    assert "pinned: step-1: figure 3" in (await safepoint("snapshots", "ls", *root)).out
    assert (await safepoint("snapshots", "unpin", "step-1")).code == 0
    assert (await safepoint("snapshots", "prune", "--keep", "2", "--json")).json()["deleted"] == ["step-1"]
    await fleet.coordinator.kill()
    assert (await safepoint("snapshots", "pin", "step-2", "-m", "why", *root)).code == 0
    assert (await safepoint("snapshots", "prune", "--keep", "1", "--json", *root)).json()["deleted"] == []
    assert (await safepoint("snapshots", "unpin", "step-2", *root)).code == 0
    gone = await safepoint("snapshots", "prune", "--keep", "1", "--json", *root)
    assert gone.json()["deleted"] == ["step-2"]
    assert (await safepoint("snapshots", "verify", *root)).out.startswith("step-3 is whole: ")
    ledger = fleet.root / "snapshots" / "step-3" / "ledger.jsonl"
    ledger.chmod(0o600)
    ledger.write_bytes(ledger.read_bytes()[:-2] + b" \n")
    damaged = await safepoint("snapshots", "verify", "step-3", "--json", *root)
    assert damaged.code == 6
    assert "ledger.jsonl" in damaged.json()["error"]["message"]
    # A list reads manifests and sizes, not every byte: it sees what is cut off, and verify what is changed.
    ledger.write_bytes(ledger.read_bytes()[:-1])
    listed = (await safepoint("snapshots", "ls", "--json", *root)).json()
    assert listed["snapshots"] == []
    assert "ledger.jsonl" in listed["invalid"]["step-3"]


async def test_a_mistyped_root_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    ran = await Safepoint("")("snapshots", "ls", "--json", "--root", str(tmp_path / "nowhere"))
    assert ran.code == 3
    assert json.loads(ran.out)["error"]["reason"] == "MISSING"
    assert not (tmp_path / "nowhere").exists()
