"""What the service relies on, for every adapter."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.ids import is_wire_id
from coordinator.wire.terms import CheckpointMode, QuiesceMode, RolloutState
from participant_shims import placed
from participant_shims.adapter import Drain, Exported, Loaded, Part, Progress
from tests.in_time import Stopwatch
from tests.shims.benches import BENCHES, Bench
from tests.shims.shim_fakes import until


@pytest.fixture(params=sorted(BENCHES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def bench(kind: str, short_path: Path) -> AsyncIterator[Bench]:
    async with BENCHES[kind](short_path) as made:
        yield made


async def close(bench: Bench, operation_id: str = "op-1", mode: QuiesceMode = QuiesceMode.HOLD) -> Any:
    return await bench.adapter.close(operation_id, mode, 60)


async def quiesce(bench: Bench, mode: QuiesceMode = QuiesceMode.HOLD, after_s: float | None = 5) -> list[Drain]:
    return [drain async for drain in bench.adapter.quiesce(mode, after_s)]


async def test_it_describes_itself(bench: Bench) -> None:
    what = await bench.adapter.describe()
    assert is_wire_id(what.participant_id)
    assert what.role is bench.role
    assert what.kind
    assert what.state_schema
    assert what.checkpoint_mode is not CheckpointMode.UNSPECIFIED
    assert what.quiesce_modes
    assert what.configured_workers >= 1
    assert what == await bench.adapter.describe()


async def test_closing_is_acknowledged_by_every_worker_and_parks_what_comes(bench: Bench) -> None:
    what = await bench.adapter.describe()
    closed = await close(bench)
    assert len(closed.workers) == what.configured_workers
    assert all(worker.acknowledged for worker in closed.workers)
    await bench.work("r-1")
    drains = await quiesce(bench)
    assert drains[-1].quiesced
    assert drains[-1].counts.parked == 1
    status = await bench.adapter.status(10)
    assert status.closed
    assert status.counts.parked == 1


async def test_quiescing_names_what_runs_and_ends_when_it_ends(bench: Bench) -> None:
    await bench.work("r-1")
    closed = await close(bench)
    assert closed.counts.in_flight == 1
    drains: list[Drain] = []
    async for drain in bench.adapter.quiesce(QuiesceMode.DRAIN, None):
        drains.append(drain)
        if not drain.quiesced and len(drains) == 1:
            assert [r.rollout_id for r in drain.waiting_for] == ["r-1"]
            assert drain.waiting_for_count == 1
            asyncio.get_running_loop().call_soon(asyncio.ensure_future, bench.end("r-1"))
    assert drains[-1].quiesced
    assert drains[-1].excluded == ()
    assert (await bench.adapter.still()).activity == ""


async def test_stragglers_are_excluded_after_the_grace(bench: Bench) -> None:
    await bench.work("r-1")
    await close(bench)
    watch = Stopwatch()
    drains = await quiesce(bench, after_s=0.3)
    assert watch.seconds < 2
    if bench.freezes:
        assert drains[-1].excluded == ()  # nobody has to be given up where work stops in the middle
        assert drains[-1].counts.held == 1
    else:
        assert [r.rollout_id for r in drains[-1].excluded] == ["r-1"]
    assert (await bench.adapter.still()).activity == ""  # what was given up may move
    await bench.adapter.open()
    await bench.end("r-1")


async def test_the_generation_says_whether_the_freeze_held(bench: Bench) -> None:
    closed = await close(bench)
    await quiesce(bench)
    assert (await bench.adapter.still()).generation == closed.generation
    await bench.adapter.open()
    await close(bench, "op-2")
    still = await bench.adapter.still()
    assert still.generation != closed.generation


async def test_opening_releases_and_may_be_repeated_in_every_state(bench: Bench) -> None:
    assert (await bench.adapter.open()).closed_for_s is None
    await close(bench)
    await bench.work("r-1")
    await asyncio.sleep(0)
    opened = await bench.adapter.open()
    assert opened.released_parked == 1
    assert opened.closed_for_s is not None
    assert (await bench.adapter.open()).closed_for_s is None
    assert not (await bench.adapter.status(0)).closed


async def test_opening_overtakes_a_quiesce_that_waits(bench: Bench) -> None:
    await bench.work("r-1")
    await close(bench)
    waiting = asyncio.create_task(quiesce(bench, QuiesceMode.DRAIN, None))
    await asyncio.sleep(0.05)
    waiting.cancel()
    watch = Stopwatch()
    await bench.adapter.open()
    assert watch.seconds < 1
    await asyncio.gather(waiting, return_exceptions=True)
    await bench.end("r-1")


async def test_what_is_exported_is_there_and_can_be_loaded(kind: str, bench: Bench, short_path: Path) -> None:
    directory = short_path / "root" / "snapshots" / "snap-1" / "counter"
    directory.mkdir(parents=True)
    await bench.work("r-1")
    await bench.end("r-1")
    await close(bench)
    await quiesce(bench)
    steps = [step async for step in bench.adapter.export(directory)]
    exported = steps[-1]
    assert isinstance(exported, Exported)
    assert all(isinstance(step, Progress) for step in steps[:-1])
    for file in exported.files:
        data = (directory / file.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size_bytes, file.sha256)
    assert exported.ledger_file == "" or exported.ledger_file in {f.path for f in exported.files}
    await bench.adapter.open()
    async with BENCHES[kind](short_path) as fresh:
        await close(fresh, "op-2")
        part = Part(directory, exported.files, weights=exported.weights)
        loading = [step async for step in placed.load(fresh.adapter, [part])]
        loaded = loading[-1]
        assert isinstance(loaded, Loaded)
        # Nobody is missing and nobody is new; what has become excluded is named.
        assert sum(loaded.totals.values()) == sum(exported.totals.values())
        done, lost = RolloutState.COMPLETED, RolloutState.EXCLUDED
        assert loaded.totals.get(done, 0) == exported.totals.get(done, 0)
        assert loaded.totals.get(lost, 0) - exported.totals.get(lost, 0) <= len(loaded.diverged)
        assert (await fresh.adapter.status(0)).closed


async def test_a_gate_opens_by_its_own_lease(bench: Bench) -> None:
    if not bench.lapses:
        return
    await bench.adapter.close("op-1", QuiesceMode.HOLD, 0.2)
    await bench.work("r-1")
    before = bench.changes
    loop = asyncio.get_running_loop()
    end = loop.time() + 5
    while (await bench.adapter.status(0)).closed:
        assert loop.time() < end
        await asyncio.sleep(0.02)
    assert (await bench.adapter.still()).activity != ""
    await until(lambda: bench.changes > before)
    await bench.end("r-1")


async def test_renewing_keeps_it_closed(bench: Bench) -> None:
    await bench.adapter.close("op-1", QuiesceMode.HOLD, 1.0)
    await bench.adapter.renew(60)
    await asyncio.sleep(1.2 if bench.lapses else 0)
    assert (await bench.adapter.status(0)).closed


async def test_retiring_is_counted(bench: Bench) -> None:
    assert await bench.adapter.retire([("r-1", 0), ("r-2", 3)]) >= 0
