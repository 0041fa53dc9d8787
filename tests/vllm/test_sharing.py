"""Several engines behind one address: a restored request goes on wherever its caller is sent, once, and never at an engine
that has another policy. Scripted."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.wire.terms import QuiesceMode
from participant_shims.adapter import Exported, Loaded
from participant_shims.adapters.vllm import VllmAdapter
from participant_shims.engine.record import Record
from participant_shims.engine.requests_file import Origin, encode, read_requests, write_requests
from participant_shims.identity import CallIdentity
from tests.vllm.parts import part_with
from tests.vllm.real_engine import Caller, Said
from tests.vllm.scripted_engine import Scripted, scripted
from tests.vllm.test_control import ASK, covered, freeze, half_done, until

WHOLE = [103 + n for n in range(8)]


class Fleet:
    """Engines of one root, a shim before each, and parts of one snapshot that are loaded into them."""

    def __init__(self, path: Path) -> None:
        self.path, self.root = path, path / "root"
        self.root.mkdir()
        self.engines: list[Scripted] = []
        self.adapters: list[VllmAdapter] = []
        self.callers: list[Caller] = []

    async def add(self, stack: AsyncExitStack, **options: Any) -> None:
        number = len(self.engines)
        engine = await stack.enter_async_context(scripted())
        life = self.path / f"life-{number}"
        life.mkdir(exist_ok=True)
        adapter, caller = await stack.enter_async_context(
            covered(engine, life, **{"name": f"engine-{number}", "root": self.root, **options})
        )
        self.engines.append(engine)
        self.adapters.append(adapter)
        self.callers.append(caller)

    async def restore(self, *parts: list[Record], operation: str = "op-r") -> None:
        for number, records in enumerate(parts):
            directory = self.path / f"{operation}-{number}"
            directory.mkdir()
            file = write_requests(directory, Origin("tiny", "0.32.0"), [encode(r) for r in records])
            adapter = self.adapters[number]
            await adapter.close(operation, QuiesceMode.HOLD, 60)
            assert isinstance([step async for step in adapter.load_part(part_with(directory, file))][-1], Loaded)
        for adapter in self.adapters[: len(parts)]:
            await adapter.keep()
            await adapter.open()

    async def saved(self, number: int, name: str) -> list[Record]:
        """What a save has of that engine."""
        directory = self.path / name
        directory.mkdir()
        adapter = self.adapters[number]
        await freeze(adapter, f"op-{name}")
        assert isinstance([step async for step in adapter.export(directory)][-1], Exported)
        await adapter.open()
        return read_requests(directory)[1]

    async def ask(self, number: int, caller: CallIdentity | None = None, **more: Any) -> Said:
        """Ask that engine, which generates until it has answered."""
        asked = asyncio.create_task(self.callers[number].whole({**ASK, **more}, caller.headers() if caller else None))
        while not asked.done():
            self.engines[number].step()
            await asyncio.wait({asked}, timeout=0.005)
        return await asked


@asynccontextmanager
async def fleet(path: Path, *options: dict[str, Any]) -> AsyncIterator[Fleet]:
    its = Fleet(path)
    async with AsyncExitStack() as stack:
        for each in options:
            await its.add(stack, **each)
        yield its


def record(number: int, rollout: str = "", **more: Any) -> Record:
    """One of whose eight tokens three are there."""
    made = half_done(**more)
    made.request_id, made.rollout_id, made.call_id = f"sp-{number}", rollout, "0.1" if rollout else ""
    return made


def waiting(its: Fleet) -> list[int]:
    return [len(adapter.pool) for adapter in its.adapters]


@pytest.mark.parametrize("rollout", ["", "r-1"])
async def test_a_restored_request_goes_on_at_the_engine_that_its_caller_is_sent_to(
    tmp_path: Path, rollout: str
) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1, rollout)], [record(2, "r-2", min_tokens=2)])
        said = await its.ask(1, CallIdentity("r-1", 1, "0.1") if rollout else None)
        assert (said.ids, said.label) == (WHOLE, "exact; kept=3")
        assert its.adapters[1].pool.tally.kept == 3
        # It is in no later snapshot, and nobody waits for it.
        assert await its.saved(0, "one") == []
        assert waiting(its) == [0, 1]
        assert [r.request_id for r in await its.saved(1, "two")] == ["sp-2"]


async def test_each_of_several_equal_questions_is_continued_once_among_all_engines(tmp_path: Path) -> None:
    """Two samples of one prompt must not begin with the same tokens."""
    async with fleet(tmp_path, {}, {}, {}) as its:
        await its.restore([record(1), record(2)], [record(3)], [])
        answers = await asyncio.gather(*(its.ask(n % 3) for n in range(5)))
        assert sorted(said.label for said in answers) == ["", "", *["exact; kept=3"] * 3]
        assert sum(adapter.pool.tally.exact for adapter in its.adapters) == 3
        for number in range(3):
            assert await its.saved(number, f"part-{number}") == []


async def test_what_two_rollouts_asked_alike_is_not_mixed_up_between_engines(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1, "r-1")], [])
        assert (await its.ask(1, CallIdentity("r-2", 1, "0.1"))).label == ""
        assert (await its.ask(1, CallIdentity("r-1", 0, "0.1"))).label == "", "an attempt that was replaced has got it"
        assert (await its.ask(1, CallIdentity("r-1", 1, "0.1"))).label == "exact; kept=3"


@pytest.mark.parametrize("differs", [{"policy": "other"}, {"weights": "mark"}, {"root": None}])
async def test_engines_that_are_not_of_one_policy_continue_nothing_of_each_other(
    tmp_path: Path, differs: dict[str, Any]
) -> None:
    async with fleet(tmp_path, {}, differs) as its:
        await its.restore([record(1)], [])
        assert (await its.ask(1)).label == ""
        assert waiting(its) == [1, 0]
        assert (await its.ask(0)).label == "exact; kept=3"


async def test_engines_with_other_weights_continue_nothing_of_each_other(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        for adapter in its.adapters:
            object.__setattr__(adapter._options, "weights", "mark")
        await its.restore([record(1)], [])
        assert (await its.ask(1)).label == "exact; kept=3"  # both are told to mix, and say so
        for adapter in its.adapters:
            object.__setattr__(adapter._options, "weights", "refuse")
        its.engines[1].weight_version = "step-8"
        await its.adapters[1].close("op-2", QuiesceMode.HOLD, 60)
        directory = tmp_path / "eight"
        directory.mkdir()
        file = write_requests(directory, Origin("tiny", "0.32.0"), [])
        _ = [step async for step in its.adapters[1].load_part(part_with(directory, file, "step-8"))]
        await its.adapters[1].open()
        await its.restore([record(2)], operation="op-2")
        assert (await its.ask(1)).label == ""
        assert (await its.ask(0)).label == "exact; kept=3"


async def test_a_root_that_fails_costs_a_regeneration_and_never_the_engines_own(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1), record(2)], [])
        shutil.rmtree(its.root)
        its.root.write_text("no directory")
        assert (await its.ask(1)).label == ""
        assert (await its.ask(0)).label == "exact; kept=3"
        assert [r.request_id for r in await its.saved(0, "later")] == ["sp-2"]


async def test_what_another_engine_had_and_nobody_can_read_is_counted(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1)], [])
        (found,) = (its.root / "continuing").rglob("engine-0.jsonl")
        found.write_text("{")
        assert (await its.ask(1)).label == ""
        assert its.adapters[1].pool.tally.regenerated == 1


async def test_what_was_retired_or_given_up_goes_on_nowhere(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1, "r-1"), record(2, "r-2", min_tokens=2)], [])
        assert await its.adapters[0].retire([("r-1", 0)]) == 1
        await asyncio.gather(*its.adapters[0].restored.sharing._ending)
        assert (await its.ask(1, CallIdentity("r-1", 1, "0.1"))).label == ""
        for adapter in its.adapters:
            await adapter.close("op-2", QuiesceMode.HOLD, 60)
            directory = tmp_path / f"given-up-{adapter._options.participant_id}"
            directory.mkdir()
            file = write_requests(directory, Origin("tiny", "0.32.0"), [encode(record(9))])
            _ = [step async for step in adapter.load_part(part_with(directory, file))]
        for adapter in its.adapters:
            await adapter.unload()
            await adapter.open()
        assert [(await its.ask(n)).label for n in range(2)] == ["", ""]
        assert (await its.ask(1, CallIdentity("r-2", 1, "0.1"), min_tokens=2)).label == ""
        assert not [path for path in (its.root / "continuing").rglob("*") if path.suffix in (".jsonl", ".index")]


async def test_a_request_that_was_taken_is_there_for_the_next_shim_of_who_has_taken_it(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1)], [])
        asked = asyncio.create_task(its.callers[1].whole(ASK))
        await until(lambda: bool(its.engines[1].running))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        async with covered(its.engines[1], tmp_path / "life-1", name="engine-1", root=its.root) as (adapter, caller):
            its.adapters.append(adapter)
            its.callers.append(caller)
            its.engines.append(its.engines[1])
            assert (await its.ask(0)).label == ""
            assert (await its.ask(2)).label == "exact; kept=3"
            assert (await its.ask(2)).label == ""


async def test_a_caller_that_leaves_while_its_record_is_claimed_has_not_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1), record(2), record(3)], [])
        for number in range(2):
            going = asyncio.Event()
            real = asyncio.to_thread

            async def slow(work: Any, *given: Any, going: asyncio.Event = going, real: Any = real) -> Any:
                found = await real(work, *given)
                if work.__name__ in ("_claim", "_fetch"):
                    going.set()
                    await asyncio.sleep(3600)
                return found

            with monkeypatch.context() as patch:
                patch.setattr("participant_shims.engine.sharing.asyncio.to_thread", slow)
                asked = asyncio.create_task(its.callers[number].whole(ASK))
                await going.wait()
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                await until(lambda number=number: not its.adapters[number].proxy.in_flight)
            assert (await its.ask(number)).label == "exact; kept=3"


async def test_a_restore_removes_what_the_one_before_it_left(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1)], [record(2)], operation="op-1")
        await its.restore([record(3)], [], operation="op-2")
        assert [path.name for path in (its.root / "continuing").iterdir()] == ["op-2"]
        assert [(await its.ask(1)).label for _ in range(2)] == ["exact; kept=3", ""]


async def test_equal_questions_that_come_together_to_another_engine_get_a_record_each(tmp_path: Path) -> None:
    async with fleet(tmp_path, {}, {}) as its:
        await its.restore([record(1), record(2)], [])
        answers = await asyncio.gather(*(its.ask(1) for _ in range(5)))
        assert sorted(said.label for said in answers) == ["", "", "", *["exact; kept=3"] * 2]
