"""An adapter's own part of a snapshot, saved and loaded as the shim does it, manifest included."""

from __future__ import annotations

from pathlib import Path

from coordinator.wire.terms import QuiesceMode, Weights
from participant_shims.adapter import Exported, Loaded, Part, WrittenFile
from participant_shims.adapters.vllm import VllmAdapter


def part_of(directory: Path, exported: Exported) -> Part:
    """What a restore gets of what was saved there."""
    return Part(directory, exported.files, weights=exported.weights)


def part_with(directory: Path, file: WrittenFile, version: str = "default") -> Part:
    """A part of this file, of weights of that version."""
    return Part(directory, (file,), weights=Weights(version))


async def export(adapter: VllmAdapter, directory: Path) -> Exported:
    """Write the cut of what is frozen into `directory`, which exists."""
    exported = [step async for step in adapter.export(directory)][-1]
    assert isinstance(exported, Exported)
    return exported


async def load(adapter: VllmAdapter, part: Part, operation: str = "op-load") -> Loaded:
    """Close it and load; it stays closed."""
    await adapter.close(operation, QuiesceMode.HOLD, 60)
    loaded = [step async for step in adapter.load_part(part)][-1]
    assert isinstance(loaded, Loaded)
    return loaded
