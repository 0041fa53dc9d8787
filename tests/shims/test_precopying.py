"""Precopy: it is served while nothing runs, ends in time, and a save goes without it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator import precopying as coordinating
from coordinator.participants import Participants
from coordinator.protocol.topology import Participant
from coordinator.wire.errors import Reason, SafepointError, refuse
from coordinator.wire.ids import IncarnationId, ParticipantId
from coordinator.wire.terms import CheckpointMode, Role
from participant_shims.adapter import Adapter
from participant_shims.adapters import gate_link
from participant_shims.fence import Fence, Rpc
from participant_shims.precopying import export, precopy

ROOT = Path("/nowhere")


class Ahead:
    """An adapter that notes what it was asked; `hangs`: it never ends by itself."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs = hangs
        self.asked: list[Any] = []

    async def precopy(self, root: Path, within_s: float) -> None:
        self.asked.append(root)
        if self.hangs:
            await asyncio.Event().wait()

    def export(self, directory: Path, root: Path | None = None) -> Any:
        return directory, root


class Plain:
    """One that does not write ahead."""

    def export(self, directory: Path) -> Any:
        return directory


def who(name: str, role: Role = Role.RESOURCES, *features: str) -> Participant:
    mode = CheckpointMode.EXPORT_RESTORE
    return Participant(ParticipantId(name), role, "k", mode, IncarnationId("i"), "a:1", features=features)


def ahead(
    participants: Any, everybody: list[Participant], is_here: Callable[[Participant], bool] = lambda _: True
) -> coordinating.Ahead:
    return coordinating.Ahead(cast("Participants", participants), everybody, is_here)


async def refused(adapter: Any, fence: Fence, epoch: int = 3, root: Path | None = ROOT) -> Reason:
    with pytest.raises(SafepointError) as raised:
        await precopy(cast("Adapter", adapter), fence, epoch, root, 1.0)
    return raised.value.reason


async def test_it_is_refused_where_it_would_disturb_or_can_do_nothing() -> None:
    adapter, fence = Ahead(), Fence("box")
    assert await refused(adapter, fence, 0) is Reason.INVALID_ARGUMENT
    assert await refused(Plain(), fence) is Reason.UNSUPPORTED
    assert await refused(adapter, fence, root=None) is Reason.UNSUPPORTED
    fence.call(Rpc.PREPARE, "op-1", 5, "digest", 0.0, 30.0)
    assert await refused(adapter, fence, 5) is Reason.FENCED
    assert await refused(adapter, fence, 4) is Reason.STALE_EPOCH
    assert adapter.asked == []


async def test_it_takes_no_fence_and_ends_in_time() -> None:
    adapter, fence = Ahead(hangs=True), Fence("box")
    await precopy(cast("Adapter", adapter), fence, 7, ROOT, 0.01)
    assert adapter.asked == [ROOT]
    assert fence.highest_epoch == 0
    assert fence.operation_id == ""


def test_an_adapter_that_does_not_share_is_asked_as_it_always_was() -> None:
    assert export(cast("Adapter", Plain()), ROOT / "x", ROOT) == ROOT / "x"
    assert export(cast("Adapter", Ahead()), ROOT / "x", ROOT) == (ROOT / "x", ROOT)


async def test_a_save_asks_those_who_can_and_goes_without_those_who_fail() -> None:
    asked: list[str] = []

    class Fake:
        async def precopy(self, whom: Participant, within_s: float) -> None:
            asked.append(whom.participant_id)
            if whom.participant_id == "full":
                raise refuse(Reason.STORAGE_FULL, "The storage is full.")

    everybody = [
        who("box", Role.RESOURCES, "precopy"), who("full", Role.RESOURCES, "precopy"), who("old"),
        who("judge", Role.AUXILIARY_MODEL, "precopy"),
    ]  # fmt: skip
    await ahead(Fake(), everybody).ask(30)
    assert sorted(asked) == ["box", "full"]
    await ahead(Fake(), everybody).ask(0.5)  # there is no time for it
    assert len(asked) == 2


async def test_who_has_gone_silent_is_named_and_not_waited_for() -> None:
    class Hangs:
        async def precopy(self, whom: Participant, within_s: float) -> None:
            if whom.participant_id == "stopped":
                await asyncio.Event().wait()

    here = {"box", "stopped"}
    everybody = [who("box", Role.RESOURCES, "precopy"), who("stopped", Role.RESOURCES, "precopy")]
    round_ = ahead(Hangs(), everybody, lambda p: p.participant_id in here)
    asking = asyncio.create_task(round_.ask(1000))
    while round_.waiting() != ("stopped",):
        await asyncio.sleep(0.01)
    here.remove("stopped")
    async with asyncio.timeout(10):
        await asking
    assert round_.waiting() == ()


@pytest.mark.parametrize("answers", [True, False], ids=["it works", "its process is stopped"])
async def test_a_worker_is_waited_for_as_long_as_its_gate_says_how_it_is(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_link, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(gate_link, "ANSWERS_WITHIN_S", 0.2)
    sent: list[Any] = []

    class Writer:
        def write(self, line: bytes) -> None:
            message, loop = json.loads(line), asyncio.get_running_loop()
            sent.append(message["op"])
            if answers and message["op"] == "status":
                loop.call_soon(link.receive, {"id": message["id"], "ok": {}})
                if sent.count("status") == 3:
                    loop.call_soon(link.receive, {"id": 1, "ok": {"sessions": 7}})

    hello = gate_link.GateHello("w-0", os.getpid(), "counter", "gym.resources", 1, {})
    link = gate_link.GateLink(hello, cast("asyncio.StreamWriter", Writer()))
    if answers:
        assert await link.while_it_answers("precopy", {}) == {"sessions": 7}
        return
    with pytest.raises(SafepointError) as raised:
        await link.while_it_answers("precopy", {})
    assert raised.value.reason is Reason.WORKERS_MISSING
    assert "counter" in str(raised.value)
    assert sent == ["precopy", "status"]
