"""The driver without a network: what it makes of its timers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from coordinator.driver import Drive, Identity, Surroundings
from coordinator.protocol import events as core
from coordinator.protocol.operation import Operation
from coordinator.protocol.topology import Topology
from coordinator.protocol.transaction import Transaction
from coordinator.wire.ids import OperationId, SnapshotId
from coordinator.wire.terms import OperationKind

AT = 1.0
EARLY_S = 1e-9


class Around:
    """A clock that stands a little before the timer's time, whenever it is looked at."""

    def slept(self) -> tuple[float, str]:
        return 0.0, ""

    def clock(self) -> float:
        return AT - EARLY_S


class Core:
    """Asks for one timer, and keeps what it is told."""

    topology = Topology(())
    unheard: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.told: asyncio.Queue[core.Event] = asyncio.Queue()

    def step(self, event: core.Event) -> list[core.Effect]:
        self.told.put_nowait(event)
        return [core.SetTimer(AT)] if isinstance(event, core.Recover) else []

    def leases(self) -> tuple[str, ...]:
        return ()


async def test_a_timer_that_goes_off_early_by_the_clocks_resolution_counts_as_its_time() -> None:
    # Else the core is told a time at which nothing is due, sets no other timer, and waits for ever.
    operation = Operation(OperationKind.SAVE, OperationId("save-1"), SnapshotId("step-1"))
    transaction: Any = Core()
    drive = Drive(
        operation, cast(Transaction, transaction), Identity("", {}), cast(Surroundings, Around()), lambda event: None
    )
    drive.start(core.Recover(0.0))
    try:
        await transaction.told.get()
        told = await asyncio.wait_for(transaction.told.get(), 10.0)
        assert told == core.Tick(AT)
    finally:
        await drive.stop()
