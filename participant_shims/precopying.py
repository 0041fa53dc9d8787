"""Precopy: what can be written before a save closes anything.

The rule: it changes nothing that anybody relies on. It needs no fence and takes none, it is served only while no operation is
active here, and a save is right without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from coordinator.wire.errors import Reason, refuse
from coordinator.wire.terms import ParticipantState
from participant_shims import messages
from participant_shims.adapter import Adapter, Exported, Precopies, Progress
from participant_shims.fence import Fence


async def precopy(adapter: Adapter, fence: Fence, epoch: int, root: Path | None, within_s: float) -> None:
    """Have the adapter write ahead, for at most `within_s` seconds.

    Raises INVALID_ARGUMENT, STALE_EPOCH, FENCED, UNSUPPORTED, and what the adapter raises.
    """
    messages.epoch_of(epoch)
    if epoch < fence.highest_epoch:
        raise refuse(
            Reason.STALE_EPOCH, f"Epoch {epoch} is older than {fence.highest_epoch}, which this participant serves."
        )
    if not isinstance(adapter, Precopies) or root is None:
        raise refuse(Reason.UNSUPPORTED, "Nothing can be written ahead of a save here.")
    if fence.state is not ParticipantState.OPEN:
        raise refuse(Reason.FENCED, f"{fence.operation_id} is active here.")
    try:
        async with asyncio.timeout(within_s):
            await adapter.precopy(root, within_s * 0.9)
    except TimeoutError:
        pass  # what was written until then is used


def export(adapter: Adapter, directory: Path, root: Path | None) -> AsyncIterator[Progress | Exported]:
    """The export of an adapter, which shares chunks below `root` with what it has written ahead when it does that."""
    if isinstance(adapter, Precopies):
        return cast("Precopies", adapter).export(directory, root)
    return adapter.export(directory)
