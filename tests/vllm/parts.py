"""An adapter's own part of a snapshot, saved and loaded as the shim does it, manifest included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator.wire.terms import QuiesceMode, Weights
from participant_shims.adapter import Exported, Loaded, Part, WrittenFile
from participant_shims.adapters.vllm import VllmAdapter
from tests.vllm.forms import Form, ended
from tests.vllm.test_control import freeze


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


async def cut_of(it: Form, directory: Path, tokens: int, **more: Any) -> Part:
    """The part, in `directory`, of one request that was cut after so many tokens; its caller has left. `more`: as of `ask`."""
    directory.mkdir()  # noqa: ASYNC240
    asked = it.ask(**more)
    await it.running()
    it.engine.step(tokens)
    await it.recorded(tokens)
    await freeze(it.adapter)
    part = part_of(directory, await export(it.adapter, directory))
    await ended(asked)
    return part


async def load(adapter: VllmAdapter, part: Part, operation: str = "op-load") -> Loaded:
    """Close it and load; it stays closed."""
    await adapter.close(operation, QuiesceMode.HOLD, 60)
    loaded = [step async for step in adapter.load_part(part)][-1]
    assert isinstance(loaded, Loaded)
    return loaded
