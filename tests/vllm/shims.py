"""A shim's adapter in front of an engine, which goes with the block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from participant_shims.adapters.vllm import VllmAdapter, VllmOptions


@asynccontextmanager
async def shim_before(target: str, life: Path) -> AsyncIterator[VllmAdapter]:
    """One that knows the engine."""
    adapter = VllmAdapter(VllmOptions("engine", "127.0.0.1:0", target, life))
    await adapter.start(lambda: None)
    await adapter.describe()
    try:
        yield adapter
    finally:
        await adapter.stop()
